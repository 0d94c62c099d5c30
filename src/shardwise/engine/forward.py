"""One forward of the outermost module: which groups are unsharded and resharded as modules run.

The order is recorded, then replayed: a forward records the groups that it enters. In the next forward, each
group that is entered first prefetches the one that came after it, whose all-gather overlaps with the
computation. Every step checks the record. Where a forward skips some groups, prefetch resumes behind them; if
the order differs otherwise, prefetch stops until the next forward, which follows the new order.
"""

from typing import TYPE_CHECKING

import torch
from torch import nn

from shardwise.comm.streams import is_captured
from shardwise.engine.calls import ANNOUNCED, FAILED, NO_BACKWARD, UNANNOUNCED, Call, Outcome
from shardwise.engine.memory import AHEAD, CALLER, FOR_EARLIER_BACKWARD, IN_USE, INFERENCE
from shardwise.groups.group import ParameterGroup
from shardwise.groups.states import UNSHARDING
from shardwise.ranks.failures import relay_of_job
from shardwise.torch_compat import functorch

if TYPE_CHECKING:
    from shardwise.engine.root import Root


class ForwardPass:
    """A forward of ``root``; lives as long as the outermost module runs."""

    def __init__(self, root: "Root") -> None:
        self._root = root
        self._entered: list[ParameterGroup] = []
        self._exited: list[ParameterGroup] = []
        self._has_run: dict[ParameterGroup, set[nn.Module]] = {}

    def begin(self) -> None:
        """Check and prepare everything before the first group is unsharded. Collective."""
        root = self._root
        relay = relay_of_job()
        relay.begin()
        relay.enter_forward()
        if functorch.is_recorded():
            raise RuntimeError(
                f"{root.name}: make_fx, which torch.func.linearize uses, records what forward computes, "
                "with the full parameters as constants. They are freed after forward, so that the program "
                "would read memory that is gone. Use torch.func.jvp or vjp, which compute anew."
            )
        root.preparation.refuse_unfit()
        for agree in root.features.agree:
            agree()
        for begins in root.features.pass_begins:
            begins("a forward")
        root.preparation.complete()
        if captured := is_captured(root.device):
            root.preparation.refuse_capture()
        root.memory.begin_captured(captured)
        if torch.is_grad_enabled():
            root.preparation.process_groups.connect()
        for connected in root.features.connected:
            connected()
        if root.backward is not None:  # no backward is running now, even if one was never ended
            root.abandon()
        for group in root.groups:
            group.gradients.drop_cleared()
        root.refuse_incomplete()
        for group in root.groups:
            if group.unsharded.state is UNSHARDING:  # unsharded and not used, perhaps on some ranks only
                group.unsharded.wait()
        for forward_begins in root.features.forward_begins:
            forward_begins()
        if root.features.ranks_run_alike:
            kept = [g for g in root.groups if root.memory.reason(g) is not FOR_EARLIER_BACKWARD]
            root.memory.release_stale(kept, root.requests.post_optim_event)
        root.memory.awaits_backward = True
        root.preparation.streams.wait_for_optimizer(root.requests.take_post_optim_event())
        root.prefetch.forward_order.rewind()

    def enter(self, call: Call) -> None:
        """The module of ``call`` is about to run: have the parameters of its group unsharded."""
        root, group, memory = self._root, call.group, self._root.memory
        if group not in memory.led:
            root.prefetch.enter_in_forward(group)
            self._entered.append(group)
        memory.unshard(group)
        if memory.reason(group) is not INFERENCE:
            memory.hold(group, IN_USE)
        memory.unshard_led(group)
        root.prefetch.in_forward(group)
        group.unsharded.wait()
        root.tell("forward", group)

    def exit(self, call: Call, outcome: Outcome) -> None:
        """The module of ``call`` has run: reshard its group, unless it is kept."""
        root, group, memory = self._root, call.group, self._root.memory
        is_led = group in memory.led
        # Without grad mode this may be the first forward of a reentrant checkpoint, whose backward will come.
        if not is_led and (outcome is not NO_BACKWARD or not torch.is_grad_enabled()):
            self._exited.append(group)
        if outcome is ANNOUNCED:
            root.calls.first_entries.setdefault(group, call.enter)
        if not is_led and self._is_over(call, outcome):
            if outcome is FAILED or not any(
                keeps(group, outcome) for keeps in root.features.instead_of_reshard
            ):
                memory.release(group)
            for led in memory.leads.get(group, ()):
                memory.release(led)

    def _is_over(self, call: Call, outcome: Outcome) -> bool:
        """Whether the group is to be resharded now that ``call`` is over."""
        group = call.group
        if outcome is FAILED:  # the module around may catch the error, and go on
            return group not in self._root.calls.groups()
        has_run = self._has_run.setdefault(group, set())
        has_run.add(call.module)
        if len(has_run) < len(group.modules) or outcome is UNANNOUNCED:
            return False
        if group in self._root.calls.groups():
            return False
        return self._root.reshards_after_forward(group)

    def end(self, outcome: Outcome) -> None:
        """The outermost module has run: record the order, and reshard what no backward will use."""
        root = self._root
        relay_of_job().leave()
        if outcome is not FAILED:
            root.prefetch.forward_order.plan(self._entered)
        for ended in root.features.forward_ended:
            ended(outcome)
        if torch.is_grad_enabled():
            root.prefetch.backward_order.plan(self._exited[::-1])
        if outcome in (ANNOUNCED, UNANNOUNCED) and torch.is_grad_enabled():
            unneeded = [*root.memory.held_for(AHEAD), *self._partly_run()]
        else:
            # No backward will come, so no group need be kept for it.
            unneeded = [g for g in root.memory if root.memory.reason(g) not in (CALLER, FOR_EARLIER_BACKWARD)]
        for group in unneeded:
            root.memory.release(group)
        root.memory.hide_kept()
        if outcome is FAILED:
            root.memory.awaits_backward = False
        root.requests.let_host_write()

    def _partly_run(self) -> list[ParameterGroup]:
        """Groups of several modules, of which only some have run, that are to be resharded after forward."""
        return [
            group
            for group, modules in self._has_run.items()
            if len(modules) < len(group.modules) and group.settings.reshard_after_forward
        ]
