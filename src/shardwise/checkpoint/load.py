"""``load_checkpoint`` and ``resume``."""

import logging
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from socket import gethostname
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.arguments import check_flags, check_module, check_type
from shardwise.checkpoint import folders
from shardwise.checkpoint.hosts import Hosts
from shardwise.checkpoint.manifest import (
    INFO,
    Manifest,
    by_first,
    check_records,
    files_for,
    is_extra_state,
    read,
    read_objects,
)
from shardwise.checkpoint.pending import begin
from shardwise.checkpoint.stateful import (
    STATES,
    StatefulPlan,
    check_objects,
    plan_states,
    rebuilt,
    tensor_places,
)
from shardwise.init.initialise import (
    give_memory,
    is_on_meta,
    mark_partly_loaded,
    note_complete_load,
    refuse_lost,
)
from shardwise.layout.fqns import listed
from shardwise.ranks.agreement import RankGroup
from shardwise.ranks.failures import monitored
from shardwise.state.loading import LoadTargets, ShapeAndDtype
from shardwise.state.named_state import (
    OptimizerOrMany,
    Optimizers,
    StatePath,
    as_optimizers,
    entries_of,
    kind_of,
    parameter_names,
)
from shardwise.state.optimizer_state import OptimizerPlan, SavedState, load_into, plan_optimizers, with_memory
from shardwise.torch_compat import dtensor

_log = logging.getLogger(__name__)

_TRIALS = 10  # where another job may save to the same path


@dataclass(frozen=True)
class Loaded:
    """What a checkpoint contained besides the model and the optimizer.

    Attributes:
        path: the folder that was read; None if :func:`resume` has found no checkpoint.
        shared: the values that were the same on all ranks; empty for a checkpoint that another program wrote.
        per_rank: the values that this rank saved; None if it saved none, or if another number of ranks wrote
            the checkpoint.
        world_size: how many ranks wrote it; None if it does not contain that.
        missing: names in the model that are not in the checkpoint, and `states.NAME` for an object; only with
            `strict=False`.
        unexpected: names in the checkpoint that are not in the model; only with `strict=False`.
    """

    path: Path | None
    shared: dict[str, Any]
    per_rank: dict[str, Any] | None
    world_size: int | None
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()

    @property
    def step(self) -> int:
        """The step in `shared`; 0 if nothing was loaded.

        Raises:
            ValueError: the checkpoint was saved without it.
        """
        if self.path is None:
            return 0
        if "step" not in self.shared:
            raise ValueError(
                f"{self.path} does not record the step at which it was saved: `shared` "
                f"{f'has only {listed(sorted(self.shared))}' if self.shared else 'is empty'}. Save it with "
                "save_checkpoint(..., shared={'step': step})."
            )
        return self.shared["step"]  # type: ignore[no-any-return]


@monitored
@torch.inference_mode(False)
@torch.no_grad()
def load_checkpoint(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: OptimizerOrMany | None = None,
    *,
    states: dict[str, Any] | None = None,
    strict: bool = True,
    convert_dtype: bool = False,
    verify: bool = True,
    trust: bool = False,
    local: bool = False,
) -> Loaded:
    """Load a checkpoint into a model. The number of ranks and the sharding may differ from those of the save.

    Collective over all ranks of the default process group. Before anything changes, it checks names, shapes
    and dtypes, that each tensor is complete, that all ranks see the same save, and that this rank reads what
    was written.

    A checkpoint may come from anywhere: loading it runs none of its code, and opens no file outside of its
    folder. Values that are neither tensors nor plain (numbers, texts, lists, dicts) need `trust=True`.

    Args:
        path: a folder that :func:`save_checkpoint` or torch's recipe wrote,
            `dcp.save({"model": ..., "optimizer": ...})`.
        model: parameters on the meta device get memory first.
        optimizer: one optimizer, or several, of the same kind as those that were saved. None does not load
            their state. Hyperparameters come from the checkpoint, as with `optimizer.load_state_dict`.
        states: objects whose states are loaded, by the names under which they were saved. Values are read
            into the tensors that `state_dict()` returns; then `load_state_dict` is called.
        strict: False allows names to be missing on either side, and reports them. Objects in `states` that
            the checkpoint does not have stay as they are.
        convert_dtype: convert floating-point tensors that have another dtype in the checkpoint.
        verify: compare the data with the digests that were saved with it (if torch wrote the checkpoint,
            which has no digests, with the checksums in torch's records). Each rank reads its part twice, the
            second time mostly from the cache of the operating system. False skips this.
        trust: create objects of any class. That can run any code that the author of the checkpoint has put
            in.
        local: `path` is a folder of each host's own, see :func:`save_checkpoint`. Files that a host's ranks
            read, and that only other hosts have, are copied to its folder.

    Returns:
        A :class:`shardwise.checkpoint.Loaded`.

    Raises:
        FileNotFoundError: there is no checkpoint at `path`, or another job has replaced it meanwhile.
        PermissionError: this process may not read it.
        ValueError: the checkpoint is damaged, differs between hosts, does not belong to this model, optimizer
            or states, or contains objects that need `trust=True`. Nothing has changed.
        RuntimeError: reading failed half-way. The model refuses to run until a load has succeeded.

    Every rank reads its own part into its shards. In addition, at most one saved piece of a parameter is in
    memory; pieces are as large as the shards of the ranks that saved.

    Example::

        loaded = load_checkpoint("run/step-100", model, optimizer)
        first_step = loaded.shared["step"] + 1
    """
    rank_group, saves = begin()
    flags = {"strict": strict, "convert_dtype": convert_dtype, "verify": verify, "trust": trust}

    def check() -> tuple[Path, Optimizers, dict[str, Any]]:
        place = folders.given("load_checkpoint", path)
        check_flags("load_checkpoint", local=local)
        return place, *_checked("load_checkpoint", model, optimizer, states, flags)

    place, optimizers, stateful = rank_group.run_on_all_ranks(check)
    told = {
        "path": place.name if local else str(place),
        "optimizer": bool(optimizers),
        "states": list(stateful),
    }
    rank_group.agree("load_checkpoint", told | flags | {"local": local})
    with ExitStack() as files:
        if local:
            hosts = Hosts(saves.rank_group_in_background(rank_group), place.parent)
            folder = hosts.open(files, place)
            manifest = rank_group.run_on_all_ranks(lambda: Manifest.read(folder, verify, trust))
        else:
            manifest = rank_group.run_on_all_ranks(lambda: opened(files, place, verify, trust))
        return _load(rank_group, manifest, model, optimizers, stateful, **flags)


@monitored
def resume(
    directory: str | os.PathLike[str],
    model: nn.Module,
    optimizer: OptimizerOrMany | None = None,
    *,
    states: dict[str, Any] | None = None,
    strict: bool = True,
    convert_dtype: bool = False,
    verify: bool = True,
    trust: bool = False,
    local: str | os.PathLike[str] | None = None,
) -> Loaded:
    """Load the newest complete checkpoint in `directory`, if there is one.

    Collective over all ranks of the default process group. The first rank looks for the checkpoint, as
    :func:`latest_checkpoint` does, logs what it found, and all ranks load that one. If there is none, or no
    `directory`, nothing is loaded: the result has no `path`, its `step` is 0, and its `shared` is empty.

    Args:
        directory: where the folders `step-10`, `step-20` and so on are; the same on all ranks.
        model: see :func:`load_checkpoint`, also for the following arguments.
        optimizer: one, or several.
        states: objects whose states are loaded, by name.
        strict: False allows names to be missing on either side.
        convert_dtype: convert floating-point tensors of another dtype.
        verify: compare the data with its digests.
        trust: create objects of any class, which can run any code.
        local: a folder of each host's own with checkpoints of `save_checkpoint(..., local=True)`. The newest
            one of which all files are left on some host is loaded, unless `directory` has a newer one.

    Returns:
        What was loaded besides the model and the optimizer. Its `step` is the one that was saved.

    Raises:
        ValueError: `directory` is itself a checkpoint, or not the same on all ranks; or as
            :func:`load_checkpoint` raises.
        FileNotFoundError: a rank's host does not see the checkpoint that the first rank has found.
        PermissionError: this process may not read it.

    Example::

        step = resume("run", model, optimizer).step
        while step < 1000:
            train_step(model, optimizer)
            step += 1
            if step % 100 == 0:
                save_checkpoint(f"run/step-{step}", model, optimizer, shared={"step": step})
    """
    rank_group, saves = begin()
    flags = {"strict": strict, "convert_dtype": convert_dtype, "verify": verify, "trust": trust}

    def check() -> Path:
        """Also of what is used only if there is a checkpoint: a mistake shows in the first run."""
        wanted = "a folder of checkpoints, as a str or a Path"
        check_type("resume", "directory", directory, wanted, str, os.PathLike)
        check_type("resume", "local", local, wanted, str, os.PathLike, type(None))
        _checked("resume", model, optimizer, states, flags)
        return folders.absolute(directory)

    place = rank_group.run_on_all_ranks(check)
    rank_group.agree("resume", {"directory": str(place), "local": local is not None})
    found = rank_group.run_on_all_ranks(
        lambda: folders.newest("resume", place) if rank_group.is_first else None, says_rank=False
    )
    latest: Path | None = rank_group.broadcast_object(found, 0)
    newer = None
    if local is not None:
        hosts = Hosts(saves.rank_group_in_background(rank_group), folders.absolute(local))
        newer = hosts.newest(latest)
    if rank_group.is_first:
        _log.info("resume: %s", newer or latest or f"no checkpoint in {place}")
    if newer is not None:
        return load_checkpoint(newer, model, optimizer, states=states, local=True, **flags)
    if latest is None:
        return Loaded(None, {}, None, None)
    return load_checkpoint(latest, model, optimizer, states=states, **flags)


def _checked(
    caller: str,
    model: nn.Module,
    optimizer: OptimizerOrMany | None,
    states: dict[str, Any] | None,
    flags: dict[str, bool],
) -> tuple[Optimizers, dict[str, Any]]:
    """The optimizers and objects to load into; refuses what no checkpoint could be loaded with."""
    check_module(caller, model)
    check_flags(caller, **flags)
    return as_optimizers(optimizer), check_objects(states)


def _load(
    rank_group: RankGroup,
    manifest: Manifest,
    model: nn.Module,
    optimizers: Optimizers,
    stateful: dict[str, Any],
    strict: bool,
    convert_dtype: bool,
    verify: bool,
    trust: bool,
) -> Loaded:
    _refuse_other_saves(rank_group, manifest)
    rank_group.on_first(manifest.check)
    entries = rank_group.run_on_all_ranks(lambda: entries_of(model))
    all_names = {name for each in rank_group.distinct(list(entries), list(entries)) for name in each}
    small = _small_keys(manifest, rank_group.rank, stateful)
    manifest.folder.fetch(manifest.files_of(small))
    values = rank_group.run_on_all_ranks(lambda: read_objects(manifest, small, verify, trust))
    info = _dict_at(manifest, values, INFO)
    is_same_size = info.get("world_size") == rank_group.size
    per_rank = _dict_at(manifest, values, "per_rank", str(rank_group.rank)) if is_same_size else {}
    was_given = per_rank.pop("", None) is not None
    shared = _dict_at(manifest, values, "shared")
    loaded = Loaded(manifest.path, shared, per_rank if was_given else None, info.get("world_size"))

    def plan() -> list[OptimizerPlan]:
        if not optimizers:
            return []
        saved, own = _saved_state(manifest, values), list(map(kind_of, optimizers))
        kinds = info.get("optimizers")
        if kinds is not None and not set(own) <= set(kinds):
            raise ValueError(
                f"{manifest.path} holds the state of {listed(kinds)}, but is loaded into {listed(own)}. One "
                "kind of optimizer cannot use the state of another: build the same kind, or load only the "
                "model."
            )
        return plan_optimizers(saved, optimizers, parameter_names(model), strict)

    targets = LoadTargets(str(manifest.path), entries, strict, convert_dtype, ValueError)

    def check() -> tuple[list[OptimizerPlan], dict[str, Any]]:
        _expect(manifest, targets, all_names)
        return plan(), {name: thing.state_dict() for name, thing in stateful.items()}

    plans, own = rank_group.run_on_all_ranks(check)
    places = tensor_places(own)
    everywhere = {place for each in rank_group.distinct(places, places) for place in each}
    state_plans, left = rank_group.run_on_all_ranks(
        lambda: plan_states(manifest, stateful, own, everywhere, strict, convert_dtype)
    )
    reading = Reading(manifest, model, targets, optimizers, plan, plans, state_plans, values)
    manifest.folder.fetch(rank_group.run_on_all_ranks(reading.files))
    rank_group.run_on_all_ranks(lambda: reading.prepare(verify, trust))
    try:
        rank_group.run_on_all_ranks(reading.run, lambda error: f"{manifest.path}: {error}")
    except Exception as error:
        why = f"{error}. The weights are a mix of those of the checkpoint and others. Load another one."
        mark_partly_loaded(model, why)
        raise RuntimeError(why) from error
    if not targets.missing():  # else what a load before this one has left may still be there
        note_complete_load(model)
    missing = (*targets.missing(), *(f"{STATES}.{name}" for name in left))
    return replace(loaded, missing=missing, unexpected=tuple(targets.unexpected))


def _expect(manifest: Manifest, targets: LoadTargets, all_names: set[str]) -> None:
    """Check that what the checkpoint has fits the model; `all_names` are those of all ranks' models."""
    saved = by_first(manifest.under("model"))
    if not saved:
        tops = {str(place[0]) for place in manifest.places}
        raise ValueError(
            f"{manifest.path} holds no model: its keys are {listed(sorted(tops))}, and not 'model'. Another "
            "program saved it in a different layout; read it with torch.distributed.checkpoint, and load the "
            "values into the model yourself."
        )
    # An empty dict, which a module may save beside tensors, has no key in a checkpoint of torch's.
    facts = {
        name: ShapeAndDtype(None)
        for name, entry in targets.entries.items()
        if isinstance(entry.value, dict) and not entry.value
    }
    for name, places in saved.items():
        entry = targets.entries.get(name)
        if entry is None and name not in all_names:
            facts[name] = ShapeAndDtype(None)
        elif entry is not None:  # only the module itself knows what its extra state may be
            is_known = entry.is_tensor and not is_extra_state(name)
            facts[name] = manifest.facts(places.get(())) if is_known else ShapeAndDtype.of(entry.value)
    targets.expect(facts, is_all=True)


def opened(files: ExitStack, path: Path, verify: bool, trust: bool) -> Manifest:
    """The checkpoint at `path`; `files` closes it."""
    for trials_left in reversed(range(_TRIALS)):
        folders.refuse_forbidden(path / folders.METADATA)
        place = folders.found(path)
        try:
            if place is None:
                raise FileNotFoundError(f"{path} is not a checkpoint: {folders.why_not_a_checkpoint(path)}.")
            return Manifest.read(files.enter_context(folders.OpenFolder(place)), verify, trust)
        except FileNotFoundError:
            if not trials_left or not folders.is_complete(path):
                raise  # else another job has saved between two of these lines
    raise AssertionError


def _refuse_other_saves(rank_group: RankGroup, manifest: Manifest) -> None:
    """Refuse different saves at the same path: ranks would load parts of different models."""
    seen = rank_group.all_gather_objects((manifest.identity, str(manifest.path), gethostname()))
    if len({identity for identity, _, _ in seen}) == 1:
        return
    lines = [f"rank {rank} on {host} has {path}, save {save}" for rank, (save, path, host) in enumerate(seen)]
    firsts = [line for rank, line in enumerate(lines) if seen[rank][0] not in [s for s, _, _ in seen[:rank]]]
    raise ValueError(
        f"ranks see different checkpoints: {listed(firsts)}. Each rank would load its part of a different "
        "model. Each host may have this path on its own disk, or see an old state of a shared one, or "
        "another job may be saving there. Put checkpoints on a file system that all hosts share, or copy one "
        "of these to all hosts. If another job was saving, load again. Nothing was loaded."
    )


def _small_keys(manifest: Manifest, rank: int, states: Iterable[str]) -> list[str]:
    """All but tensors of the model, the optimizer and `states`."""
    keys = [
        *manifest.under("shared").values(),
        *manifest.under("per_rank", str(rank)).values(),
        *manifest.under(INFO).values(),
        *manifest.under("optimizer", "param_groups").values(),
    ]
    for name in states:
        keys += [key for key in manifest.under(STATES, name).values() if manifest.tensor(key) is None]
    return keys


def _dict_at(manifest: Manifest, values: dict[str, Any], *start: str) -> dict[str, Any]:
    """What a caller gave as a dict, from the values that were read."""
    found = by_first(manifest.under(*start))
    return {name: rebuilt({place: values[k] for place, k in each.items()}) for name, each in found.items()}


def _saved_state(manifest: Manifest, values: dict[str, Any]) -> SavedState:
    """The state of the optimizers; `values` by key, read before."""
    groups = by_first(manifest.under("optimizer", "param_groups"))
    if not groups:
        raise ValueError(
            f"{manifest.path} holds no optimizer. To start with a fresh one, call load_checkpoint(path, "
            "model)."
        )

    return SavedState(
        str(manifest.path),
        [rebuilt({place: values[key] for place, key in groups[i].items()}) for i in sorted(groups, key=int)],
        {
            name: {place: (key, manifest.facts(key)) for place, key in each.items() if place}
            for name, each in by_first(manifest.under("optimizer", "state")).items()
        },
        is_checkpoint=True,
    )


@dataclass
class Reading:
    """Everything known once only reading is left: what goes where."""

    manifest: Manifest
    model: nn.Module
    targets: LoadTargets
    optimizers: Optimizers
    plan: Callable[[], list[OptimizerPlan]]
    plans: list[OptimizerPlan]
    state_plans: list[StatefulPlan]
    values: dict[str, Any]  # read before

    def files(self) -> list[str]:
        """The files that `prepare` and `run` read."""
        return files_for(self.manifest, self._targets())

    def prepare(self, verify: bool, trust: bool) -> None:
        """Read values, and verify tensors: the last step that may fail before anything changes."""
        coming = [entry.value for entry in self.targets.entries.values()]
        refuse_lost(self.model, "load_checkpoint", coming)
        targets = self._targets()
        objects = [key for key, target in targets.items() if target is None]
        self.values = self.values | read_objects(self.manifest, objects, verify, trust)
        check_records(self.manifest, {k: t for k, t in targets.items() if t is not None}, verify)
        self.targets.refuse_broken_ties(self._read_apart)

    def run(self) -> None:
        """Read, and give everything to its owner."""
        if is_on_meta(self.model):
            with _trying("allocating memory for the model failed"):
                give_memory(self.model)
                self.plans = self.plan()  # anew: planned tensors are like the parameters
                self.targets.entries = entries_of(self.model)
        targets = self._targets()
        tensors = {key: target for key, target in targets.items() if target is not None}
        with _trying("reading its tensors failed", ". Files may have been damaged since they were written"):
            read(self.manifest, tensors, trust=False)
        values: dict[Any, Any] = {key: self.values[key] for key in targets.keys() - tensors} | tensors
        with _trying("loading what was read into the model failed"):
            # Tensors have been read into the model's own; this is for states of other kinds, and for hooks.
            state = {
                entry.key: rebuilt({place: values[key] for place, key in self._saved[name].items()})
                for name, entry in self.targets.entries.items()
                if name in self._saved
            }
            self.model.load_state_dict(state, strict=False)
        for optimizer, plan in zip(self.optimizers, self.plans, strict=True):
            with _trying(f"loading what was read into {type(optimizer).__name__} failed"):
                loaded = {
                    number: rebuilt({place: values[key] for place, key in places.items()})
                    for number, places in plan.state.items()
                }
                load_into(optimizer, plan.kept | loaded, plan.groups, self.targets.converts)
        for state_plan in self.state_plans:
            with _trying(f"states[{state_plan.name!r}].load_state_dict failed"):
                state_plan.give(self.values | values)

    def _targets(self) -> dict[str, Tensor | None]:
        """By key: what is read into; None for what is no tensor."""
        targets = {
            key: self._target(name, key)
            for name in self.targets.entries
            for key in self._saved.get(name, {}).values()
        }
        for plan in self.plans:
            targets |= plan.blanks
        for state_plan in self.state_plans:
            targets |= state_plan.targets
        return targets

    def _read_apart(self, name: str) -> Tensor:
        """This rank's part of a tensor of the model, in memory of its own."""
        if not self.targets.goes_by_rows(name):
            return torch.empty(0)  # of a class of its own: not compared
        target = self.targets.entries[name].value
        local = dtensor.plain(target)
        apart = with_memory(target, torch.device("cpu") if local.is_meta else local.device)
        read(self.manifest, {self._saved[name][()]: apart}, trust=False)
        return dtensor.plain(apart)

    @cached_property
    def _saved(self) -> dict[str, dict[StatePath, str]]:
        return by_first(self.manifest.under("model"))

    def _target(self, name: str, key: str) -> Tensor | None:
        """The model's own tensor; memory for what has any length; None for a value."""
        md = self.manifest.tensor(key)
        if is_extra_state(name) and md is not None:
            return torch.empty(md.size, dtype=md.properties.dtype)
        value = self.targets.entries[name].value
        return value.detach() if isinstance(value, Tensor) and md is not None else None


@contextmanager
def _trying(what: str, hint: str = "") -> Iterator[None]:
    """An error inside names what failed.

    ``hint`` is its usual cause, which a warning that the caller's filters turn into an error does not have.
    """
    try:
        yield
    except Exception as error:
        what += "" if isinstance(error, Warning) else hint
        raise RuntimeError(f"{what}: {type(error).__name__}: {error}") from error
