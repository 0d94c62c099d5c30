"""Which groups are unsharded or being unsharded, each with its reason; which are unsharded ahead of use."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from typing import Any

import torch
from torch import nn

from shardwise.buckets.bucket import Bucket
from shardwise.buckets.optimizer_steps import add_step_listener
from shardwise.comm.streams import CommStreams, is_captured
from shardwise.engine.calls import Call
from shardwise.groups.group import ParameterGroup, shard_axes_of
from shardwise.groups.states import PARTLY, SHARDED, UNSHARDED, UNSHARDING
from shardwise.layout.fqns import listed
from shardwise.layout.mesh import Axis, all_reduce_max
from shardwise.ranks.activity import Wait
from shardwise.ranks.failures import monitor_of_job
from shardwise.torch_compat.tensor_impl import assert_later


class Reason(Enum):
    """Why a group is in memory."""

    IN_USE = "a forward or a backward uses it, or the caller has chosen to keep it"
    AHEAD = "it was prefetched"
    CALLER = "the caller has called unshard()"
    FOR_BACKWARD = "the next backward probably begins with it"
    FOR_EARLIER_BACKWARD = "the same, and another forward has begun since"
    INFERENCE = "inference() keeps it"

    __hash__ = object.__hash__  # see groups/states.py


IN_USE, AHEAD, CALLER, FOR_BACKWARD, FOR_EARLIER_BACKWARD, INFERENCE = Reason


class UnshardedGroups:
    """The groups of one root that are unsharded, being unsharded, or partly kept."""

    def __init__(self) -> None:
        self.reasons: dict[ParameterGroup, Reason] = {}
        """Why each group is in memory; contains every group that is not sharded."""
        # Groups that are unsharded and freed with another, outside any order: set_may_be_unused().
        self.unsharded_with: Mapping[ParameterGroup, Sequence[ParameterGroup]] = {}
        self.accompanying: frozenset[ParameterGroup] = frozenset()
        self.announce: Callable[[ParameterGroup], None] | None = None
        """Called with each group that is about to be unsharded, unless it already is: see inference.py."""
        self.is_mid_accumulation = False
        """Whether nothing has run since a backward without synchronisation."""
        self.awaits_backward = False
        """Whether no backward has begun since the last forward."""
        self._stepped: set[ParameterGroup] = set()  # since they were unsharded
        self.is_captured = False
        axes: list[Axis] = []
        self._compared_along = axes
        self._comparison = Wait("comparison of parameters that stayed unsharded", "", lambda: axes)
        add_step_listener(self)

    def arrange(self, groups: Sequence[ParameterGroup], root: ParameterGroup) -> None:
        """Recompute which of ``groups`` are unsharded together; ``root``: the outermost."""
        self.accompanying = frozenset(group for group in groups if group.settings.may_be_unused)
        self.unsharded_with = _unsharded_together(groups, root) if self.accompanying else {}

    def refuse_alone(self, groups: Sequence[ParameterGroup]) -> None:
        """Refuse a group that may be unused if no enclosing group is run by all ranks."""
        accompanied = {group for inside in self.unsharded_with.values() for group in inside}
        for group in groups:
            if group in self.accompanying and group not in accompanied:
                raise RuntimeError(
                    f"{group.name}: set_may_be_unused() was called on it, but no sharded module around it is "
                    "run by all ranks, with which it could be unsharded. Call fully_shard on the module "
                    "around it."
                )

    # --- unshard ----------------------------------------------------------------------------------

    def claim(self, group: ParameterGroup, reason: Reason) -> None:
        """``group`` is about to be unsharded for ``reason``; ``inference()`` stays the reason."""
        before = self.reasons.get(group)
        if before is FOR_EARLIER_BACKWARD:
            self.reshard(group)  # only now, when all ranks unshard it
        if self.announce is not None:
            self.announce(group)
        if before is not INFERENCE:
            self.reasons[group] = reason

    def unshard(self, group: ParameterGroup, reason: Reason) -> None:
        """Claim ``group`` and begin to unshard it."""
        self.claim(group, reason)
        group.unsharded.unshard()

    def unshard_again(self, group: ParameterGroup) -> None:
        """Begin to unshard ``group`` for backward, after a forward has used it."""
        self.reasons.setdefault(group, IN_USE)
        group.unsharded.unshard_again()

    def change_sides(self, captured: bool, streams: CommStreams) -> None:
        """A pass begins, whose work is captured into a CUDA graph, or is not, contrary to the one before.

        Neither kind may wait for streams and events of the other. All work must be over before a capture.
        """
        self.is_captured = captured
        streams.reduce_scatter.drop_readers()
        for group in self.reasons:
            group.unsharded.drop_streams()

    # --- reshard ----------------------------------------------------------------------------------

    def reshard(self, group: ParameterGroup) -> None:
        """Reshard ``group``, after waiting for an all-gather in flight, unless ``inference()`` keeps it."""
        if self.reasons.pop(group, None) is INFERENCE:
            self.reasons[group] = INFERENCE
            return
        if self._stepped:
            self._stepped.discard(group)
        unsharded = group.unsharded
        if unsharded.state is UNSHARDING:
            unsharded.wait()
        if unsharded.state is UNSHARDED or unsharded.state is PARTLY:
            unsharded.reshard()

    def keep_for_next(self, group: ParameterGroup) -> None:
        """Have a few ranks keep ``group``, if it is in memory, for the forward of the next microbatch."""
        unsharded = group.unsharded
        if unsharded.state is UNSHARDED and self.reasons.get(group) is not INFERENCE and not self.is_captured:
            unsharded.keep_part(until_changed=True)
        elif unsharded.state is not PARTLY:
            self.reshard(group)

    def reshard_stale(self, groups: Sequence[ParameterGroup], optimizer: Any) -> None:
        """Reshard those of ``groups`` that were kept, whole or in parts, while shards changed on any rank.

        All ranks or none reshard a group, since they unshard it together. Two cases need no communication and
        no answer from the device: the step of an optimizer, which changes all shards on all ranks, and the
        next microbatch of an accumulation without synchronisation, before which nothing may change them. In
        another forward before a backward, on a device, groups that the caller has not asked to keep are
        always resharded: to gather one again takes less time than to wait for all work queued on the device.

        ``optimizer``: the event after which it has written the shards, if the caller has set one.
        """
        accumulates = self.is_mid_accumulation and torch.is_grad_enabled()
        self.is_mid_accumulation = False
        kept = [g for g in groups if g.unsharded.state is UNSHARDED or g.unsharded.keeps_until_changed]
        if not kept:
            return
        unasked = self.awaits_backward and not accumulates and kept[0].streams.are_device_streams
        for group in list(kept):
            if group in self._stepped or (unasked and group.settings.reshard_after_forward is None):
                self.reshard(group)
                kept.remove(group)
        if kept and optimizer is not None:
            kept[0].streams.make_compute_wait_for(optimizer)  # it is about to read the shards
        if kept and accumulates and not any(group.shards.are_offloaded for group in kept):
            self._refuse_changes(kept)
        elif kept:
            self._reshard_changed(kept)

    def optimizer_stepped(self, buckets: Iterable[Bucket]) -> None:
        """An optimizer has stepped: if any of its parameters is in memory, all trainable groups are stale.

        All of them, because ranks must agree, and an optimizer may leave out shards that are empty on its
        rank.
        """
        if not self.reasons:
            return
        # Copy it: if ranks are threads, any of them may call this.
        trainable = [group for group in list(self.reasons) if group.gradients.are_wanted]
        own = {id(bucket) for group in trainable for bucket in group.buckets}
        if any(id(bucket) in own for bucket in buckets):
            self._stepped.update(trainable)

    def _reshard_changed(self, kept: Sequence[ParameterGroup]) -> None:
        """Compare on the device, on all ranks. The host waits once for the answer."""
        if is_captured(kept[0].device):
            raise RuntimeError(
                f"{listed([group.name for group in kept], 4)}: kept unsharded since a backward, and perhaps "
                "changed since. The host would have to ask the device, which a CUDA graph cannot capture. "
                "Capture forward, backward and the optimizer's step together, or have groups resharded after "
                "backward: set_reshard_after_backward(True)."
            )
        flags = torch.stack([group.unsharded.differ() for group in kept]).to(torch.int32)
        self._compared_along[:] = shard_axes_of(kept)
        with monitor_of_job().collective(self._comparison):
            all_reduce_max(flags, self._compared_along)
            are_stale = flags.tolist()
        for group, is_stale in zip(kept, are_stale, strict=True):
            if is_stale:
                self.reshard(group)
            else:
                group.unsharded.sync_versions()

    def _refuse_changes(self, kept: Sequence[ParameterGroup]) -> None:
        """Refuse changes on this rank. The host sees changes that torch counts; the device finds others."""
        for group in kept:
            if not group.unsharded.can_be_compared:  # quantized, or frozen or unfrozen, alike on all ranks
                self.reshard(group)
                continue
            differ = group.unsharded.differ()
            if not (changed := group.unsharded.shards_changed()):
                assert_later(~differ, _changed_later_message(group))
            elif differ.item():
                raise RuntimeError(_changed_message(f"{', '.join(changed)} has", group))
            else:
                group.unsharded.sync_versions()  # written with equal contents, as by a load

    def reshard_after_failure(self) -> None:
        """Reshard all groups from any state, except those in the caller's ``unsharded()``."""
        self.awaits_backward = False
        for group in self.reasons:
            group.unsharded.reshard_after_failure()
        self.reasons.clear()
        self._stepped.clear()

    def end_pass(self, *unneeded: Reason) -> None:
        """A pass is over: reshard groups in memory for ``unneeded`` reasons.

        Between passes modules show their shards, even of groups in memory, except in ``inference()``.
        """
        for group, reason in list(self.reasons.items()):
            if reason in unneeded:
                self.reshard(group)
            elif group.unsharded.is_shown and reason is not CALLER and reason is not INFERENCE:
                group.unsharded.hide()

    def freed_by_exit(self, call: Call) -> Sequence[ParameterGroup]:
        """The groups whose unsharded parameters may be freed when ``call`` ends, or before the next one."""
        if call.parent is None:
            return tuple(self.reasons)
        return (call.group, *self.unsharded_with.get(call.group, ()))


def _unsharded_together(
    groups: Sequence[ParameterGroup], root: ParameterGroup
) -> dict[ParameterGroup, list[ParameterGroup]]:
    """For each group that all ranks run, the inner groups that some ranks may skip.

    All ranks unshard these with the enclosing group, at the same point. Their gradients are reduced at the
    end of backward, with zeros from ranks that have none.
    """
    group_of = {module: group for group in groups for module in group.modules}
    around: dict[ParameterGroup, ParameterGroup | None] = {}
    seen: set[nn.Module] = set()

    def visit(module: nn.Module, nearest: ParameterGroup | None) -> None:
        if module in seen:
            return
        seen.add(module)
        own = group_of.get(module)
        if own is not None and own.settings.may_be_unused:
            around.setdefault(own, nearest)
        elif own is not None:
            nearest = own
        for child in module.children():
            visit(child, nearest)

    for module in root.modules:
        visit(module, None)
    together: dict[ParameterGroup, list[ParameterGroup]] = {}
    for group in groups:
        if (nearest := around.get(group)) is not None:
            together.setdefault(nearest, []).append(group)
    return together


_CHANGED_HOW = "between microbatches, after a backward without gradient synchronisation."


def _changed_later_message(group: ParameterGroup) -> str:
    """Shorter: CUDA takes few characters."""
    return (
        f"{group.name}: its parameters have changed {_CHANGED_HOW} Change them after a backward with "
        "synchronisation, or call set_reshard_after_backward(True)."
    )


def _changed_message(what: str, group: ParameterGroup) -> str:
    return (
        f"{group.name}: {what} changed {_CHANGED_HOW} The group was kept unsharded for the next microbatch, "
        "whose forward would compute with the old values, and it does not ask the other ranks whether theirs "
        "have changed as well. Change parameters after a backward with synchronisation, or have the group "
        "resharded after each backward: set_reshard_after_backward(True)."
    )


# --- ahead of use ---------------------------------------------------------------------------------


class Order:
    """A planned sequence of groups, and how far it has been followed."""

    def __init__(self) -> None:
        self.planned: list[ParameterGroup] = []
        """Set at the end of each pass, empty before the first; the next pass begins with ``rewind``."""
        self.cursor = 0
        self.is_followed = False
        """Whether groups have followed the plan so far."""

    def rewind(self) -> None:
        """Expect the planned sequence again, from its beginning."""
        self.cursor = 0
        self.is_followed = True

    def enter(self, group: ParameterGroup) -> Sequence[ParameterGroup]:
        """``group`` is used now: advance to it. Returns the groups that were planned before it.

        If it does not come later in the plan, the plan is no longer followed.
        """
        if not self.is_followed:
            return ()
        start = self.cursor
        if start < len(self.planned) and self.planned[start] is group:
            self.cursor += 1
        elif start == 0 or self.planned[start - 1] is not group:
            if group in self.planned[start:]:
                self.cursor = self.planned.index(group, start) + 1
                return self.planned[start : self.cursor - 1]
            self.is_followed = False
        return ()

    def resume_at(self, group: ParameterGroup) -> None:
        """If the plan is not being followed, follow it again from the next occurrence of ``group``."""
        if not self.is_followed:
            places = [i for i, g in enumerate(self.planned) if g is group]
            if places:
                later = [i for i in places if i >= self.cursor]
                self.cursor = (later or places)[0] + 1
                self.is_followed = True

    def upcoming(self, count: int) -> list[ParameterGroup]:
        """The next ``count`` groups of the plan; none if it is not being followed."""
        return self.planned[self.cursor : self.cursor + count] if self.is_followed else []


class Prefetch:
    """Chooses the groups to unshard ahead: the caller's choice, or the next in order."""

    def __init__(self, held: UnshardedGroups) -> None:
        self._held = held
        self.forward_order = Order()
        self.backward_order = Order()

    def reshard_skipped(self, skipped: Sequence[ParameterGroup], group: ParameterGroup) -> None:
        """Reshard prefetched groups that ``group`` has ``skipped``, if others are to be prefetched."""
        if self.forward_order.upcoming(group.policy.prefetch):
            for each in skipped:
                if each is not group and self._held.reasons.get(each) is AHEAD:
                    self._held.reshard(each)

    def coming(
        self, group: ParameterGroup, chosen: Sequence[ParameterGroup] | None, order: Order
    ) -> list[ParameterGroup]:
        """The groups to unshard ahead after ``group``, within the limit on groups in memory.

        ``chosen``: the caller's choice; None: the next in ``order``.
        """
        policy, found = group.policy, list[ParameterGroup]()
        if chosen is None:  # order.upcoming, inlined to save a call
            at = order.cursor
            chosen = order.planned[at : at + policy.prefetch] if order.is_followed else ()
        for each in chosen:
            if each.unsharded.state is SHARDED or each.unsharded.state is PARTLY:
                found.append(each)
        if found and policy.max_prefetched is not None:
            num_ahead = list(self._held.reasons.values()).count(AHEAD)
            del found[max(0, policy.max_prefetched - num_ahead) :]
        return found
