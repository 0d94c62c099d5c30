"""Checks that all ranks have the same plan, before the first forward with gradients and after changes.

A steady step only tests a flag. If a setter was called with the current value, the next forward computes the
plan's digest, and communicates nothing.
"""

import os
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from shardwise.engine.plan import FULL_LOAD, full_loads_of, plan_of
from shardwise.groups.group import ParameterGroup
from shardwise.layout.mesh import Axis, axes_of
from shardwise.params.initial_values import refuse_unequal_initial_values
from shardwise.params.parameter import Param
from shardwise.ranks.activity import Wait
from shardwise.ranks.comparison import Facts, OwnDevice, Unequal, compare, digest_of
from shardwise.ranks.failures import monitor_of_job
from shardwise.ranks.replicas import are_fake
from shardwise.torch_compat import autograd, c10d


class PlanCheck:
    """Compares the plan before the first forward with gradients, and after each change.

    ``groups``: the root's own list, which changes when the tree does; the outermost is the first.
    """

    def __init__(self, device: torch.device, groups: Sequence[ParameterGroup]) -> None:
        self._device = device
        self._groups = groups
        self.is_agreed = False
        """Whether ranks have agreed on the current plan, as far as this rank knows it."""
        self.has_compared = False
        """Whether the initial values of the parameters were compared."""
        self._agreed: dict[tuple[int, ...], tuple[str, Facts]] = {}  # the last plan agreed on, by ranks
        self._trained: dict[Param, bool] = {}  # when all ranks last read it
        self._axes: list[Axis] = []
        self._wait = Wait("comparison of plans", "", lambda: self._axes)
        self._wait_for_values: Wait | None = None

    def plan_changed(self) -> None:
        """A group's parameters were replaced, frozen or unfrozen, or a setting has changed: the next forward
        with gradients compares the plan again, if it differs."""
        self.is_agreed = False

    def changes_adopted(self) -> None:
        """Compare the plan in a pass: a group has adopted the caller's changes, and not communicated yet.

        Collective: all ranks get here at the same group, and read here which parameters are trained. Most
        notice a change only when they unshard the group.
        """
        if self.is_agreed or not self.has_compared:
            return
        self._look()
        if torch.is_grad_enabled() or autograd.is_in_backward():
            self.agree()

    def _look(self) -> None:
        params = [param for group in self._groups for param in group.shards.params]
        self._trained = {param: param.sharded.requires_grad for param in params}

    def compare_initial_values(self) -> None:
        """Check once, before training, that ranks start from equal weights, replicas included. Collective."""
        params = [param for group in self._groups for param in group.shards.params]
        axes = axes_of(param.sharded for param in params)
        self._wait_for_values = Wait("comparison of initial values", self._groups[0].name, lambda: axes)
        with monitor_of_job().collective(self._wait_for_values):
            refuse_unequal_initial_values(params, self._device)
        self.has_compared = True

    def agree(self) -> None:
        """Before a forward with gradients: check that all ranks have the same plan.

        Collective, if the plan has changed since the ranks agreed on it. Without gradients nothing is
        compared: replicas may then run forwards that others do not, such as a dry run on one rank.

        Raises:
            RuntimeError: plans differ; on all ranks, with the first difference and the ranks on either side.
        """
        groups = self._groups
        axes = [axis for group in groups for bucket in group.buckets for axis in bucket.mesh.axes()]
        if axes and not are_fake(axes, self._device):
            self._wait.name, self._axes = groups[0].name, list({id(axis.pg): axis for axis in axes}.values())
            self._agree(c10d.timeout_of(axes[0].pg, self._device))
        self.is_agreed = True

    def _agree(self, timeout: timedelta) -> None:
        groups = self._groups
        if not self._trained:
            self._look()
        at_first = plan_of(groups, self._trained, is_first=True)
        loads = full_loads_of(groups)
        for ranks, facts in plan_of(groups, self._trained, is_first=False).items():
            digest, loaded = digest_of(facts), loads.get(ranks, {})
            if ranks not in self._agreed:
                self._compare(ranks, {**at_first[ranks], **loaded}, timeout)
            elif loaded or self._agreed[ranks][0] != digest:
                self._compare(ranks, {**facts, **loaded}, timeout)
            self._agreed[ranks] = digest, facts
        for param in [param for group in groups for param in group.shards.params]:
            param.full_load = None

    def _compare(self, ranks: tuple[int, ...], facts: Facts, timeout: timedelta) -> None:
        self._wait.reason = self._change(ranks, facts)
        monitor, wait = monitor_of_job(), self._wait

        def refuse_failed() -> None:
            if monitor.failure is not None:
                raise monitor.explained(RuntimeError(), wait)

        try:
            with monitor.collective(wait):
                compare(facts, ranks, self._own_device(), timeout, refuse_failed)
        except Unequal as error:
            self._trained = {}  # read again once the caller has fixed it
            if f": {FULL_LOAD} is " in str(error):
                raise RuntimeError(
                    f"The ranks have loaded different values. {error}. Each rank keeps its own rows of what "
                    "it is given, so the parameter would be put together from different models. Give "
                    "load_state_dict the same full values on all ranks, or call load_full_state_dict, which "
                    "sends those of one rank."
                ) from None
            change = f"On rank {dist.get_rank()} {wait.reason}. " if wait.reason else ""
            raise RuntimeError(
                f"The ranks have different plans for the model, so that they would communicate what does not "
                f"fit together. {error}. {change}Build, shard, freeze and configure the model alike on all "
                "ranks."
            ) from None

    def _own_device(self) -> OwnDevice:
        """This rank's device, to compare with others; only for NCCL, which needs one device per rank."""
        pg = self._axes[0].pg
        if pg is None or not c10d.is_nccl(pg, self._device):
            return OwnDevice()
        bound = c10d.bound_device(pg)
        shares = os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"
        identity = "" if shares else c10d.identity_of(self._device)
        return OwnDevice(str(self._device), str(bound or ""), identity)

    def _change(self, ranks: tuple[int, ...], facts: Facts) -> str:
        """A clause about the changes on this rank since the ranks agreed; empty if they never did."""
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
