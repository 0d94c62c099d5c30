"""A checkpoint written by all ranks of a group: whole or not at all, and all of them raise alike."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

from shardwise.checkpoint import folders
from shardwise.checkpoint.digests import SummingFileSystem, write_digests
from shardwise.checkpoint.folders import METADATA, OpenFolder, Save
from shardwise.checkpoint.hosts import Hosts, LocalFolder
from shardwise.checkpoint.manifest import Manifest
from shardwise.ranks.agreement import RankGroup
from shardwise.state.model_files import sync


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
    made = rank_group.run_on_all_ranks(lambda: [each for each in path.parents if not each.exists()])
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
            folders.discard(save, made)
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
