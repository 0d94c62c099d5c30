"""Whether all ranks that share a model have the same plan for it: asked before the first forward with
gradients, and again when the plan has changed.

What a steady step costs is a flag. A plan that has changed and is the same as before (a setter was called
with the value that was set) costs its digest, and no communication.
"""

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from shardwise.runtime import compat
from shardwise.runtime.comparison import Comparison, Facts, Unequal, digest_of
from shardwise.runtime.fingerprint import plan_of
from shardwise.runtime.group import Group
from shardwise.runtime.param import Param
from shardwise.runtime.replicas import are_silent


class PlanCheck:
    """The plan of one module tree, as its ranks have agreed on it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._trained: dict[Param, bool] = {}
        self._agreed: dict[tuple[int, ...], tuple[str, Facts]] = {}  # by ranks

    def look(self, groups: Sequence[Group]) -> None:
        """Look at which parameters are trained now.

        Otherwise what was seen the last time counts: all ranks have to look at the same moment, and most
        notice a change only where they gather.
        """
        self._trained = {param: param.sharded.requires_grad for group in groups for param in group.params}

    def run(self, groups: Sequence[Group]) -> None:
        """Raise on all ranks alike if their plans differ. Collective where the plan has changed.

        Raises:
            RuntimeError: with the first difference and the ranks on either side.
        """
        axes = [axis for group in groups for bucket in group.buckets for axis in bucket.mesh.axes()]
        if not axes or are_silent(axes, self._device):
            return
        if not self._trained:
            self.look(groups)
        timeout = compat.timeout_of(axes[0].pg, self._device)
        at_first = plan_of(groups, self._trained, is_first=True)
        for ranks, facts in plan_of(groups, self._trained, is_first=False).items():
            digest = digest_of(facts)
            if ranks not in self._agreed:
                self._compare(ranks, at_first[ranks], timeout)
            elif self._agreed[ranks][0] != digest:
                self._compare(ranks, facts, timeout)
            self._agreed[ranks] = digest, facts

    def _compare(self, ranks: tuple[int, ...], facts: Facts, timeout: timedelta) -> None:
        comparison = Comparison(compat.job_store(), ranks, dist.get_rank(), timeout, _nothing)
        try:
            comparison.run(facts)
        except Unequal as error:
            self._trained = {}  # what is mended is looked at anew
            raise RuntimeError(
                f"The ranks have different plans for the model, so that they would communicate what does not "
                f"fit together. {error}. {self._changes(ranks, facts)}Build, shard, freeze and configure the "
                "model alike on all ranks."
            ) from None

    def _changes(self, ranks: tuple[int, ...], facts: Facts) -> str:
        """What has changed here since the ranks agreed."""
        if ranks not in self._agreed:
            return ""
        before = self._agreed[ranks][1]
        changed = [key for key in dict.fromkeys([*facts, *before]) if facts.get(key) != before.get(key)]
        if not changed:
            return ""
        where, what = changed[0]
        more = f" and {len(changed) - 1} more changes" if len(changed) > 1 else ""
        return (
            f"On rank {dist.get_rank()} the plan has changed since they last agreed: {where}: {what} was "
            f"{before.get(changed[0], 'missing')} and is {facts.get(changed[0], 'missing')}{more}. "
        )


def _nothing() -> None:
    """Nobody asks this rank for anything while it waits."""
