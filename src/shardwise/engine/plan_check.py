"""Whether all ranks that share a model have the same plan for it: asked before the first forward with
gradients, and again when the plan has changed.

What a steady step costs is a flag. A plan that has changed and is the same as before (a setter was called
with the value that was set) costs its digest, and no communication.
"""

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from shardwise.engine.group import Group
from shardwise.engine.plan import plan_of
from shardwise.layout.mesh import Axis
from shardwise.params.parameter import Param
from shardwise.ranks.comparison import Comparison, Facts, Unequal, digest_of
from shardwise.ranks.failures import Wait, relay_of_job
from shardwise.ranks.replicas import are_fake
from shardwise.torch_compat import c10d


class PlanCheck:
    """The plan of one module tree, as its ranks have agreed on it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._trained: dict[Param, bool] = {}
        self._agreed: dict[tuple[int, ...], tuple[str, Facts]] = {}  # by ranks
        self._axes: list[Axis] = []
        self._wait = Wait("comparison of plans", "", lambda: self._axes)

    def look(self, groups: Sequence[Group]) -> None:
        """Look at which parameters are trained now.

        Otherwise what was seen the last time counts: all ranks have to look at the same moment, and most
        notice a change only where they gather.
        """
        self._trained = {param: param.sharded.requires_grad for group in groups for param in group.params}

    def run(self, name: str, groups: Sequence[Group]) -> None:
        """Raise on all ranks alike if their plans for the model ``name`` differ.

        Collective where the plan has changed since it was agreed on.

        Raises:
            RuntimeError: with the first difference and the ranks on either side.
        """
        axes = [axis for group in groups for bucket in group.buckets for axis in bucket.mesh.axes()]
        if not axes or are_fake(axes, self._device):
            return
        self._wait.name, self._axes = name, list({id(axis.pg): axis for axis in axes}.values())
        if not self._trained:
            self.look(groups)
        timeout = c10d.timeout_of(axes[0].pg, self._device)
        at_first = plan_of(groups, self._trained, is_first=True)
        for ranks, facts in plan_of(groups, self._trained, is_first=False).items():
            digest = digest_of(facts)
            if ranks not in self._agreed:
                self._compare(ranks, at_first[ranks], timeout)
            elif self._agreed[ranks][0] != digest:
                self._compare(ranks, facts, timeout)
            self._agreed[ranks] = digest, facts

    def _compare(self, ranks: tuple[int, ...], facts: Facts, timeout: timedelta) -> None:
        self._wait.reason = self._change(ranks, facts)
        relay, wait = relay_of_job(), self._wait

        def refuse_failed() -> None:
            if relay.failure is not None:
                raise relay.explained(RuntimeError(), wait.event, wait.name, self._axes)

        comparison = Comparison(c10d.job_store(), ranks, dist.get_rank(), timeout, refuse_failed)
        try:
            with relay.exchange(wait):
                comparison.run(facts)
        except Unequal as error:
            self._trained = {}  # what is mended is looked at anew
            change = f"On rank {dist.get_rank()} {wait.reason}. " if wait.reason else ""
            raise RuntimeError(
                f"The ranks have different plans for the model, so that they would communicate what does not "
                f"fit together. {error}. {change}Build, shard, freeze and configure the model alike on all "
                "ranks."
            ) from None

    def _change(self, ranks: tuple[int, ...], facts: Facts) -> str:
        """What has changed here since the ranks agreed, as a clause; empty where they have not yet."""
        if ranks not in self._agreed:
            return ""
        before = self._agreed[ranks][1]
        changed = [key for key in dict.fromkeys([*facts, *before]) if facts.get(key) != before.get(key)]
        if not changed:
            return ""
        where, what = changed[0]
        more = f", and {len(changed) - 1} more changes" if len(changed) > 1 else ""
        return (
            f"the plan has changed since the ranks last agreed on it ({where}: {what} was "
            f"{before.get(changed[0], 'missing')} and is {facts.get(changed[0], 'missing')}{more})"
        )
