"""``save_checkpoint``: all ranks of a group write, whole or not at all, and raise alike."""

import os
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwise.arguments import check_flags, check_module, check_type
from shardwise.checkpoint import folders
from shardwise.checkpoint.digests import SummingFileSystem, write_digests
from shardwise.checkpoint.folders import METADATA, OpenFolder, Save
from shardwise.checkpoint.hosts import Hosts, LocalFolder
from shardwise.checkpoint.manifest import HAS_DIGESTS, INFO, Manifest, is_extra_state
from shardwise.checkpoint.pending import PendingSave, begin
from shardwise.checkpoint.stateful import (
    STATES,
    as_whole,
    check_objects,
    extra_written,
    refuse_shards,
    refuse_shards_in_tuples,
    refuse_unreadable,
    states_of,
    tensors_in,
    warn_of_objects,
)
from shardwise.init.initialise import why_partly_loaded
from shardwise.layout.fqns import listed
from shardwise.ranks.agreement import RankGroup
from shardwise.ranks.failures import monitored
from shardwise.ranks.replicas import Checksums
from shardwise.state.model_files import sync
from shardwise.state.named_state import (
    OptimizerOrMany,
    as_optimizers,
    entries_of,
    kind_of,
    named_parameters,
    parameter_names,
    staged,
    state_of,
)


@monitored
@torch.inference_mode(False)
@torch.no_grad()
def save_checkpoint(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: OptimizerOrMany | None = None,
    *,
    states: dict[str, Any] | None = None,
    shared: dict[str, Any] | None = None,
    per_rank: dict[str, Any] | None = None,
    asynchronous: bool = False,
    keep: int | None = None,
    local: bool = False,
) -> PendingSave:
    """Write a checkpoint to `path`, completely or not at all.

    Collective over all ranks of the default process group, including those that have no part of the model.
    The checkpoint is written beside `path`, synced to disk, and moved to `path` when all ranks have written;
    until then, `load_checkpoint(path)` reads the earlier one. The folder is one of
    `torch.distributed.checkpoint`, with the keys of torch's recipe, `{"model": ..., "optimizer": ...}`.

    Args:
        path: a folder on a file system that all ranks see, the same path on all of them.
        model: sharded or not.
        optimizer: one optimizer, or several, whose state is saved by parameter name.
        states: objects with `state_dict()` and `load_state_dict()`, by names: a :class:`shardwise.state.EMA`,
            a scheduler of the learning rate, a gradient scaler. Their DTensors are written like the model's,
            and any number of ranks can load them; everything else in their states must be the same on all
            ranks.
        shared: values that are the same on all ranks, such as a step or a position in the data; those of rank
            0 are written. They may be tensors, or anything that can be pickled, but not DTensors. Values that
            are neither tensors nor plain (numbers, texts, lists, dicts) can be loaded only with `trust=True`;
            a warning tells you, for `states` and `per_rank` as well.
        per_rank: values that differ between ranks, such as states of random generators (for numpy,
            `bit_generator.state`, since `numpy.random.get_state()` has an array), or parameters that each
            rank trains by itself. They are loaded only by the same number of ranks.
        asynchronous: copy everything to host memory and return; write in the background, while training
            continues. Costs host memory for this rank's shards.
        keep: keep this many checkpoints. Afterwards, older ones beside `path` are removed, in the order of
            :func:`latest_checkpoint`, if their names differ only in the number at the end. Only complete
            checkpoints are removed.
        local: `path` is not on a shared file system, but a folder of each host's own: in its memory
            (`/dev/shm/run/step-10`), which outlives the processes of a job, or on its disk. Each host also
            keeps a copy of the files of another host, so that a job can resume after any one host is lost:
            see :func:`resume`. Needs `keep`. A host needs twice the space of its ranks' shards for each
            checkpoint, and for one more while it is written. The hosts' paths may differ in all but the
            last name. Containers with folders of their own count as hosts, also on one machine.

    Returns:
        A :class:`shardwise.checkpoint.PendingSave`, which without `asynchronous` has ended. Wait for the last
        one before `destroy_process_group`.

    Raises:
        ValueError: ranks disagree on the arguments, or on the values of a trainable parameter that is neither
            sharded nor in `per_rank`; the optimizer's state cannot be saved; `shared` or `per_rank` has
            DTensors; or a value is of a tensor subclass that torch could not read again.
        FileExistsError: `path` is not a checkpoint, or another job has saved to it meanwhile.
        OSError: a rank could not write. All ranks raise the same error, the earlier checkpoint is untouched,
            and the new files are removed as far as possible.

    Costs the memory of one parameter's shard at a time (see `asynchronous`), and a few collectives of small
    objects. A save waits for the previous one.

    Example::

        beside = {"ema": ema, "scheduler": scheduler}
        save_checkpoint(f"run/step-{step}", model, optimizer, states=beside, shared={"step": step}, keep=3)
        ...
        step = resume("run", model, optimizer, states=beside).step
    """
    rank_group, saves = begin()

    def check() -> Path:
        check_module("save_checkpoint", model)
        check_flags("save_checkpoint", asynchronous=asynchronous, local=local)
        if local and keep is None:
            raise ValueError(
                "save_checkpoint: local=True needs keep, such as keep=2: memory and disks of hosts are small."
            )
        return folders.given("save_checkpoint", path)

    place = rank_group.run_on_all_ranks(check)
    state, wholes = rank_group.run_on_all_ranks(
        lambda: (
            _state(rank_group, place, model, optimizer, states, shared, per_rank, keep),
            _whole_parameters(model, per_rank) if rank_group.size > 1 else {},
        )
    )
    told = {
        "path": place.name if local else str(place),
        "keep": keep,
        "asynchronous": asynchronous,
        "local": local,
        "optimizer": "optimizer" in state,
        "states": list(state[STATES]),
    }
    rank_group.agree("save_checkpoint", told)
    _compare_and_join(rank_group, state, wholes)
    if not rank_group.is_first:  # rank 0's are written
        del state["shared"], state[INFO]
    pending = PendingSave(place)
    writers = saves.rank_group_in_background(rank_group) if asynchronous or local else rank_group
    if asynchronous:
        in_host_memory = rank_group.run_on_all_ranks(
            lambda: {
                k: deepcopy(part) if k in ("shared", "per_rank") else staged(part)
                for k, part in state.items()
            }
        )
        saves.last = pending  # not before: if copying fails, nothing ends it
        pending.run_in_thread(
            partial(write, writers, place, in_host_memory, keep, is_staged=True, local=local)
        )
    else:
        saves.last = pending
        pending.run(partial(write, writers, place, state, keep, is_staged=False, local=local))
        pending.wait()
    return pending


def _state(
    rank_group: RankGroup,
    path: Path,
    model: nn.Module,
    optimizer: Any,
    states: dict[str, Any] | None,
    shared: dict[str, Any] | None,
    per_rank: dict[str, Any] | None,
    keep: int | None,
) -> dict[str, Any]:
    """This rank's state for the checkpoint. Tensors are not copied."""
    folders.check_name("save_checkpoint", path)
    check_type("save_checkpoint", "keep", keep, "how many checkpoints to keep, or None", int, type(None))
    if keep is not None and (keep < 1 or folders.numbered(path.name) is None):
        raise ValueError(
            f"save_checkpoint: keep={keep} for {path.name}: keep must be at least 1, and needs names that "
            "end in a number, such as step-100."
        )
    if why := why_partly_loaded(model):
        raise ValueError(
            f"save_checkpoint: the model is only partly loaded, because an earlier load failed ({why}). Load "
            "a complete checkpoint before saving."
        )
    optimizers = as_optimizers(optimizer)
    entries = entries_of(model).items()
    own = {name: each.value.detach() if each.is_tensor else each.value for name, each in entries}
    state: dict[str, Any] = {"model": own}
    for name in filter(is_extra_state, own):
        own[name] = extra_written(own[name], ("model", name))
    if optimizers:
        state["optimizer"] = state_of(optimizers, parameter_names(model))
        refuse_shards_in_tuples(state["optimizer"])
    state[STATES] = states_of(check_objects(states))
    for what in state:
        refuse_unreadable(what, state[what])
    state["shared"] = _extras("shared", shared)
    kinds = list(map(kind_of, optimizers))
    state[INFO] = {"world_size": rank_group.size, "optimizers": kinds, HAS_DIGESTS: True}
    if per_rank is not None:
        state["per_rank"] = {str(rank_group.rank): {"": rank_group.rank} | _extras("per_rank", per_rank)}
    warn_of_objects(state)
    return state


def _extras(name: str, extras: dict[str, Any] | None) -> dict[str, Any]:
    """A caller's dict, wrapped so that its values come back as they were."""
    extras = {} if extras is None else extras
    if not isinstance(extras, dict) or not all(isinstance(key, str) and key for key in extras):
        raise TypeError(f"{name} must be a dict with names as keys, not {extras!r:.80}")
    refuse_shards(name, extras)
    return {key: as_whole(value) for key, value in extras.items()}


Whole = tuple[int, bool]
"""Of a parameter that a rank has whole: its checksum, and whether it is in `per_rank` as well."""


def _whole_parameters(model: nn.Module, per_rank: dict[str, Any] | None) -> dict[str, Whole]:
    """What is trainable and not sharded, by name."""
    checksums = Checksums()

    def number_of(tensor: Tensor) -> int | None:
        number = checksums.of(tensor)
        return None if number is None else int(number.item())

    own = {
        name: number
        for name, param in named_parameters(model)
        if param.requires_grad and not isinstance(param, DTensor) and (number := number_of(param)) is not None
    }
    kept = {number_of(tensor) for _, tensor in tensors_in(per_rank)} if own else set()
    return {name: (number, number in kept) for name, number in own.items()}


def _compare_and_join(rank_group: RankGroup, state: dict[str, Any], wholes: dict[str, Whole]) -> None:
    """Refuse whole parameters that differ, and join the kinds and param groups of all ranks, each once: ranks
    of a pipeline have different ones."""
    kinds: list[str] = []
    groups: list[dict[str, Any]] = []
    has_optimizer = "optimizer" in state
    own_kinds, own = state[INFO]["optimizers"], state["optimizer"]["param_groups"] if has_optimizer else []
    key = own_kinds, [group["params"] for group in own], wholes
    every = rank_group.distinct((rank_group.rank, own_kinds, own, wholes), key)
    _refuse_different({rank: some_wholes for rank, _, _, some_wholes in every})
    for _, some_kinds, some_groups, _ in every:
        known = [group["params"] for group in groups]
        groups += [group for group in some_groups if group["params"] not in known]
        kinds += [kind for kind in some_kinds if kind not in kinds]
    if has_optimizer:
        state[INFO]["optimizers"], state["optimizer"]["param_groups"] = kinds, groups


def _refuse_different(wholes: dict[int, dict[str, Whole]]) -> None:
    """Refuse parameters of which a checkpoint would keep one rank's values; `wholes` by ranks."""
    first: dict[str, int] = {}
    differing: dict[str, tuple[int, int]] = {}
    for rank, own in wholes.items():
        for name, (number, is_kept) in own.items():
            other, other_is_kept = wholes[first.setdefault(name, rank)][name]
            if number != other and not (is_kept and other_is_kept):
                differing.setdefault(name, (first[name], rank))
    if differing:
        here, there = next(iter(differing.values()))
        raise ValueError(
            f"save_checkpoint: {listed(list(differing))}: not sharded, trainable, and different on ranks "
            f"{here} and {there}. A checkpoint holds such parameters once, and would lose what rank {there} "
            "has. If each rank trains its own, as with experts in ignored_params, pass the values in "
            "per_rank as well, per_rank={'experts': model.experts.state_dict()}, and restore them after a "
            "load. Do the same with the state of their optimizer. If they should be equal, call "
            "sync_module_states(model), and model.set_reduce_ignored_params(True)."
        )


# --- writing --------------------------------------------------------------------------------------


def write(
    rank_group: RankGroup,
    path: Path,
    state: dict[str, Any],
    keep: int | None,
    is_staged: bool,
    local: bool = False,
) -> None:
    """Write beside `path`, move to it, tidy up. All ranks raise alike.

    `is_staged`: all of `state` is in host memory already. `local`: each host has a folder `path` of its own.
    """
    hosts = Hosts(rank_group, path.parent) if local else None
    if hosts is None:
        token = rank_group.broadcast_object(folders.new_token() if rank_group.is_first else None, 0)
        once = rank_group.on_first
    else:
        token, once = hosts.new_token(), hosts.once
        hosts.once(lambda: folders.sweep(path.parent))  # memory is small
    save = Save(path, token)
    explain = partial(_why_not_written, save, rank_group.rank)
    with folders.running(save.token):
        try:
            once(lambda: folders.prepare(save), explain)
            _write_files(rank_group, save.partial, state, is_staged, explain)
            if hosts is None:
                once(lambda: _check(OpenFolder(save.partial)), explain)
            else:
                of_hosts = hosts.replicate(save.partial, explain)
                once(lambda: _check(LocalFolder(save.partial, hosts, of_hosts)), explain)
            once(lambda: folders.publish(save), explain)
        except Exception:
            # On each rank: where hosts have disks of their own, each has written to its own.
            folders.discard(save)
            raise

        def tidy() -> None:
            folders.forget_previous(save)
            folders.sweep(path.parent)
            if keep is not None:
                folders.remove_older(save, keep)

        saved = f"{path} is saved, but what it replaces could not be removed"
        once(tidy, lambda error: f"{saved}: {type(error).__name__}: {error}")


def _check(folder: OpenFolder) -> None:
    with folder as written:
        Manifest.read(written).check()


def _make_planner() -> Any:
    """A planner that takes what each rank has a copy of, and is no DTensor, from the lowest rank.

    torch's own gives every copy to the rank that has least to write. Copies that differ, as buffers do, which
    are each rank's own, would come from one rank and from another. DTensors are equal, and still spread.
    """
    from torch.distributed.checkpoint import DefaultSavePlanner, Metadata, SavePlan
    from torch.distributed.checkpoint.planner import WriteItemType

    class Planner(DefaultSavePlanner):
        def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
            seen: set[Any] = set()
            plans = []
            for plan in all_plans:
                shards = [item for item in plan.items if item.type is WriteItemType.SHARD]
                copies = [i for i in plan.items if i.type is not WriteItemType.SHARD and i.index not in seen]
                seen.update(item.index for item in copies)
                plans.append(replace(plan, items=[*shards, *copies]))
            return super().create_global_plan(plans)

    return Planner()


def _write_files(
    rank_group: RankGroup,
    folder: Path,
    state: dict[str, Any],
    is_staged: bool,
    explain: Callable[[Exception], str],
) -> None:
    """The steps of `torch.distributed.checkpoint.save`, over a group of ranks.

    `save` itself warns where there is no process group, sends errors as pickles, which some cannot be, and
    does not say which rank could not write what.
    """
    from torch.distributed.checkpoint import FileSystemWriter

    planner = _make_planner()
    writer = FileSystemWriter(folder, per_thread_copy_ahead=0 if is_staged else 10_000_000)
    files = SummingFileSystem(writer.fs)
    writer.fs = cast(Any, files)

    def plan_locally() -> Any:
        planner.set_up_planner(state, writer.storage_meta(), rank_group.is_first)
        writer.set_up_storage_writer(rank_group.is_first)
        return writer.prepare_local_plan(planner.create_local_plan())

    def plan_globally() -> Any:
        if plans is None:
            return None, None
        joint, metadata = planner.create_global_plan(plans)
        return writer.prepare_global_plan(joint), metadata

    def write_own() -> Any:
        return writer.write_data(planner.finish_plan(plan), planner).wait(), files.sums

    def finish() -> None:
        writer.finish(metadata, [written for written, _ in results])
        sync(folder / METADATA)  # torch syncs the data files, and this one before Python has flushed it
        sums = {name: each for _, of_rank in results for name, each in of_rank.items()}
        write_digests(folder, writer.save_id, (folder / METADATA).read_bytes(), sums)

    plans = rank_group.gather_objects(rank_group.run_on_all_ranks(plan_locally))
    all_plans, metadata = rank_group.run_on_all_ranks(plan_globally)
    plan = rank_group.scatter_objects(all_plans)
    results: Any = rank_group.gather_objects(rank_group.run_on_all_ranks(write_own, explain, says_rank=False))
    rank_group.on_first(finish, explain)


def _why_not_written(save: Save, rank: int, error: Exception) -> str:
    if isinstance(error, FileExistsError) and error.errno is None:
        return str(error)
    free = folders.free_bytes(save.partial)
    return (
        f"rank {rank} could not write the checkpoint {save.path} (into {save.partial}): "
        f"{type(error).__name__}: {error}. The file system has {free} bytes free. A checkpoint that was "
        "there before is still there."
    )
