"""``resume``."""

import logging
import os
from pathlib import Path
from typing import Any

from torch import nn

from shardwise.arguments import check_type
from shardwise.checkpoint.folders import absolute, newest, newness, numbered
from shardwise.checkpoint.hosts import Hosts, complete_save
from shardwise.checkpoint.load import Loaded, checked, load_checkpoint
from shardwise.checkpoint.pending import all_ranks, saves_of
from shardwise.ranks.failures import monitored
from shardwise.ranks.rank_group import RankGroup
from shardwise.state.named_state import OptimizerOrMany

_log = logging.getLogger(__name__)


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
    :func:`latest_checkpoint` does, and all ranks load that one. If there is none, or no `directory`, nothing
    is loaded: the result has no `path`, its `step` is 0, and its `shared` is empty. The first rank logs which
    checkpoint it found, or that it found none.

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
    rank_group = all_ranks()
    if (last := saves_of(rank_group).last) is not None:
        last.end_before_next()
    flags = {"strict": strict, "convert_dtype": convert_dtype, "verify": verify, "trust": trust}

    def check() -> Path:
        """Also of what is used only if there is a checkpoint: a mistake shows in the first run."""
        wanted = "a folder of checkpoints, as a str or a Path"
        check_type("resume", "directory", directory, wanted, str, os.PathLike)
        check_type("resume", "local", local, wanted, str, os.PathLike, type(None))
        checked("resume", model, optimizer, states, flags)
        return absolute(directory)

    place = rank_group.run_on_all_ranks(check)
    rank_group.agree("resume", {"directory": str(place), "local": local is not None})
    found = rank_group.run_on_all_ranks(
        lambda: newest("resume", place) if rank_group.is_first else None, says_rank=False
    )
    latest: Path | None = rank_group.broadcast_object(found, 0)
    newer = None if local is None else _newest_on_hosts(rank_group, absolute(local), latest)
    if rank_group.is_first:
        _log.info("resume: %s", newer or latest or f"no checkpoint in {place}")
    if newer is not None:
        return load_checkpoint(newer, model, optimizer, states=states, local=True, **flags)
    if latest is None:
        return Loaded(None, {}, None, None)
    return load_checkpoint(latest, model, optimizer, states=states, **flags)


def _newest_on_hosts(rank_group: RankGroup, directory: Path, other: Path | None) -> Path | None:
    """The newest checkpoint in the hosts' own folders; None if there is none that is as new as `other`."""
    hosts = Hosts(saves_of(rank_group).rank_group_in_background(rank_group), directory)
    complete = [name for name, held in hosts.held(directory).items() if complete_save(held) is not None]
    newest = max(filter(numbered, complete), key=newness, default=None)
    if newest is None or (other is not None and newness(newest) < newness(other.name)):
        return None
    return directory / newest
