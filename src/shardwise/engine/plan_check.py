"""Checks that all ranks have the same plan, before the first forward with gradients and after changes.

The plan of a module tree is facts, as text, that must be equal on all ranks that communicate:

    ("blocks.0.up.weight", "shape")          "(16, 8)"
    ("blocks.0.up.weight", "requires_grad")  "True"
    ("blocks.0", "reshard_after_forward")    "None"
    ("blocks.0", "a backward without gradients of blocks.0.scale (...)")   "seen"

Facts belong to the ranks of one mesh. So experts, whose names may differ between ranks, are compared only
among the ranks that share them, and pipeline stages not at all. Settings that may change from one microbatch
to the next (gradient synchronisation, resharding after backward) count in the first comparison only. A steady
step only tests a flag. If a setter was called with the current value, the next forward computes the plan's
digest, and communicates nothing.

Collectives cannot compare plans: ranks may disagree about their process groups, and mismatched collectives
end the process. So facts are compared through the store of the job. Each rank sends the first of them a
digest of its facts and waits for its answer; ranks send the facts themselves, in a second exchange, only if
digests differ.

    rank 1    digests/1 = nonce, what it tells                                  waits for answer/<nonce>
    rank 0    takes digests/1 ... digests/n away, compares, sets answer/<nonce> for each

So every rank needs a few operations, and the first rank a few for each of the others. All ranks get the same
answer. A nonce stands for one exchange of one rank, so records left by a failed comparison are never mistaken
for an answer.
"""

import os
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from hashlib import blake2b
from typing import Any, NamedTuple
from zlib import crc32

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardwise.buckets.bucket import Bucket
from shardwise.groups.group import ParameterGroup
from shardwise.groups.states import shared_settings
from shardwise.layout.fqns import listed, listed_ranks, ranks_by_value
from shardwise.layout.mesh import Axis, axes_of, mesh_text
from shardwise.params.initial_values import refuse_unequal_initial_values
from shardwise.params.parameter import Param
from shardwise.ranks.activity import Wait
from shardwise.ranks.board import Board
from shardwise.ranks.failures import monitor_of_job
from shardwise.ranks.replicas import are_fake
from shardwise.torch_compat import autograd, c10d

Facts = Mapping[tuple[str, str], str]
"""Values by (where, what); equal facts are in the same order on all ranks."""

_MOST_SHOWN = 8
"""The largest number of different sets of facts to compare, and of parameters of one reduction."""


# --- the comparison -------------------------------------------------------------------------------


class Unequal(Exception):
    """Ranks have different facts, or some did not join the comparison."""


class OwnDevice(NamedTuple):
    """The device of one rank; all empty if it does not matter.

    ``identity``: unique over all machines. ``bound``: the device of the process group.
    """

    name: str = ""
    bound: str = ""
    identity: str = ""


def digest_of(facts: Facts) -> str:
    """A digest that is equal for equal facts in the same order."""
    return blake2b(repr(list(facts.items())).encode(), digest_size=16).hexdigest()


def compare(
    facts: Facts,
    ranks: Sequence[int],
    device: OwnDevice,
    number: int,
    timeout: timedelta,
    while_waiting: Callable[[], None],
) -> int:
    """Compare ``facts`` among ``ranks``, each of which calls this, with its ``device``; return the ``number``
    that the first of them has given.

    ``while_waiting`` is called now and then, and may raise.

    Raises:
        RuntimeError: on all ranks, if one uses a device that differs from its process group's, or that
            another rank uses.
        Unequal: on all ranks, unless all have the same facts.
    """
    named = blake2b(repr(list(ranks)).encode(), digest_size=8).hexdigest()
    board = Board(c10d.job_store(), f"shardwise/plan/{named}")
    deadline = time.monotonic() + timeout.total_seconds()

    def check() -> None:
        if time.monotonic() > deadline:
            raise Unequal(
                f"Not all of {listed_ranks(ranks)} came to compare their plans within the timeout of the "
                "process group"
            )
        while_waiting()

    exchange = partial(_exchange, board, ranks, check)
    told = [digest_of(facts), device, number]
    problem, unlike, agreed = exchange("digests", told, partial(_compare_digests, ranks[0]))
    if problem:
        raise RuntimeError(problem)
    if unlike:
        is_asked = dist.get_rank() in [each[0] for each in unlike]
        rows = [(*key, value) for key, value in facts.items()] if is_asked else None
        raise Unequal(exchange("facts", rows, partial(_compare_facts, unlike)))
    return agreed  # type: ignore[no-any-return]


def _exchange(
    board: Board,
    ranks: Sequence[int],
    check: Callable[[], None],
    topic: str,
    own: Any,
    answer: Callable[[dict[int, Any]], Any],
) -> Any:
    """What the first of ``ranks`` answers to what all of them tell, by rank; the same on all of them."""
    rank, (first, *others) = dist.get_rank(), ranks
    if rank == first:
        told = {other: board.take(f"{topic}/{other}", check) for other in others}
        result = answer({first: own} | {other: each for other, (_, each) in told.items()})
        for nonce, _ in told.values():
            board.post(f"answer/{nonce}", result)
        return result
    nonce = uuid.uuid4().hex
    board.post(f"{topic}/{rank}", [nonce, own])
    try:
        return board.take(f"answer/{nonce}", check)
    except BaseException:
        board.remove(f"{topic}/{rank}")
        raise


def _compare_digests(first: int, told: Mapping[int, Any]) -> tuple[str, list[list[int]], int]:
    """What is wrong with the devices; the ranks of the first few digests, if there are several; the number of
    the ``first`` rank."""
    by_digest = ranks_by_value((rank, digest) for rank, (digest, *_) in told.items())
    unlike = list(by_digest.values())[:_MOST_SHOWN] if len(by_digest) > 1 else []
    devices = {rank: OwnDevice(*device) for rank, (_, device, _) in told.items()}
    return wrong_device(devices), unlike, told[first][2]


def _compare_facts(unlike: Sequence[Sequence[int]], told: Mapping[int, Any]) -> str:
    facts = [{(where, what): value for where, what, value in told[ranks[0]]} for ranks in unlike]
    return first_difference(list(zip(unlike, facts, strict=True)))


def wrong_device(devices: Mapping[int, OwnDevice]) -> str:
    """The first rank on a device that NCCL cannot use, and what to do; empty if none."""
    found = [
        f"rank {rank} uses {device.name}, but its process group is bound to {device.bound}"
        for rank, device in devices.items()
        if device.bound not in ("", device.name)
    ]
    users = ranks_by_value((rank, each.identity) for rank, each in devices.items() if each.identity)
    for ranks in users.values():
        if len(ranks) > 1:
            found.append(f"{listed_ranks(ranks)} use the same device, {devices[ranks[0]].name}")
    advice = (
        "With NCCL each rank has a device of its own. Choose it in each process before anything is put on a "
        'device and before init_process_group: torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))'
    )
    return f"{found[0]}. {advice}" if found else ""


def first_difference(told: Sequence[tuple[Sequence[int], Facts]]) -> str:
    """The first fact that differs, with the values of all ranks."""
    keys = list(dict.fromkeys(key for _, facts in told for key in facts))
    differing = [key for key in keys if len({facts.get(key) for _, facts in told}) > 1]
    if not differing:
        return "the plans list the same facts in different orders"
    where, what = differing[0]
    values = ranks_by_value((rank, facts.get(differing[0])) for ranks, facts in told for rank in ranks)
    sides = ", ".join(
        f"{value if value is not None else 'missing'} on {listed_ranks(ranks)}"
        for value, ranks in values.items()
    )
    more = f" ({len(differing) - 1} more differences follow)" if len(differing) > 1 else ""
    return f"{where}: {what} is {sides}{more}"


FULL_LOAD = "the checksum of the full value that load_state_dict was given"

_REMEDY = "set_reduce_scatter_unused_params(True) lets ranks differ"

Plan = dict[tuple[int, ...], dict[tuple[str, str], str]]
"""Facts by (where, what) for each set of ranks; the largest sets first, in the same order on all ranks."""


# --- the plan -------------------------------------------------------------------------------------


def ranks_on(mesh: DeviceMesh) -> tuple[int, ...]:
    """All ranks of a mesh, in ascending order."""
    return tuple(sorted(mesh.mesh.flatten().tolist()))


def plan_of(groups: Sequence[ParameterGroup], trained: Mapping[Param, bool], *, is_first: bool) -> Plan:
    """The plan of ``groups``.

    Args:
        groups: all groups of a module tree.
        trained: whether each parameter is trained; for a missing one, ``requires_grad`` decides.
        is_first: include settings that may change from one microbatch to the next.
    """
    plan: Plan = {}
    ranks_of: dict[int, tuple[int, ...]] = {}

    def facts_on(mesh: DeviceMesh) -> dict[tuple[str, str], str]:
        ranks = ranks_of.get(id(mesh))
        if ranks is None:
            ranks = ranks_of[id(mesh)] = ranks_on(mesh)
        return plan.setdefault(ranks, {})

    for group in groups:
        facts_on(group.mesh.mesh)
        for bucket in group.buckets:
            for param in bucket.params:
                facts = facts_on(param.joint_mesh)
                for what, value in _facts_of(param, bucket, group).items():
                    facts[param.fqn, what] = value
                facts[param.fqn, "requires_grad"] = str(trained.get(param, param.sharded.requires_grad))
    for group in groups:
        facts = facts_on(group.mesh.mesh)
        for what, value in _settings_of(group, is_first).items():
            facts[group.name, what] = value
        for bucket in [] if group.settings.ranks_may_differ else group.buckets:
            own, facts = {param.fqn for param in bucket.params}, facts_on(bucket.mesh.mesh)
            for left_out in sorted(group.gradients.left_out):
                if left_out[0] in own:
                    facts[group.name, _left_out_text(left_out)] = "seen"
    for ranks, facts in plan.items():
        names = [group.name for group in groups if ranks_of[id(group.mesh.mesh)] == ranks]
        facts["the model", "the order of its groups"] = ", ".join(names)
    return {
        ranks: plan[ranks] for ranks in sorted(plan, key=lambda ranks: (-len(ranks), ranks)) if len(ranks) > 1
    }


def full_loads_of(groups: Sequence[ParameterGroup]) -> Plan:
    """The full values that ``load_state_dict`` has sharded since the last comparison, as facts."""
    loads: Plan = {}
    for param in [param for group in groups for param in group.shards.params]:
        if param.full_load is not None:
            ranks = tuple(sorted(param.joint_mesh.mesh.flatten().tolist()))
            loads.setdefault(ranks, {})[param.fqn, FULL_LOAD] = param.full_load
    return loads


def _facts_of(param: Param, bucket: Bucket, group: ParameterGroup) -> dict[str, str]:
    precision = param.precision
    return {
        "its group": f"'{group.name}'",
        "shape": str(tuple(param.sharded.shape)),
        "dtype": _short(precision.stored),
        "mesh": mesh_text(param.joint_mesh),
        "placement": ", ".join(map(str, param.placements)),
        "dtype of computation": _short(precision.computed),
        "dtype of reduction": f"{_short(precision.reduced)}, accumulated in {_short(precision.accumulated)}",
        "dtype of .grad": _short(precision.kept),
        "class": type(bucket).__name__,
        "check_equal_weights": str(param.compares),
    }


def _settings_of(group: ParameterGroup, is_first: bool) -> dict[str, str]:
    settings = group.settings
    return {
        "mesh": f"{mesh_text(group.mesh.mesh)} ({', '.join(group.mesh.roles)})",
        **shared_settings(settings, with_those_of_microbatch=is_first),
        "number of modules": str(len(group.modules)),
        "comm_policy": str(group.policy),
        "where shards are kept": ", ".join(sorted({b.storage.device.type for b in group.buckets})),
        "set_all_reduce_hook": str(settings.all_reduce_hook is not None),
        "communication chosen by": ", ".join(sorted(group.choices)),
        "set_modules_to_forward_prefetch": _names(settings.forward_prefetch),
        "set_modules_to_backward_prefetch": _names(settings.backward_prefetch),
        "ignored parameters": str(
            [tuple(p.shape) for p in group.ignored] if settings.averages_ignored else []
        ),
    }


def _left_out_text(names: Sequence[str]) -> str:
    shown = listed(names, _MOST_SHOWN)
    if len(names) > _MOST_SHOWN:
        shown += f" [{crc32(repr(names).encode()):08x}]"  # as many others may begin alike
    return f"a backward without gradients of {shown} ({_REMEDY})"


def _names(groups: Sequence[ParameterGroup] | None) -> str:
    return "None" if groups is None else str([group.name for group in groups])


def _short(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")


# --- when it is compared --------------------------------------------------------------------------


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
        self.numbers: dict[tuple[int, ...], int] = {}
        """A number that tells this model from others of the same ranks, once these have agreed."""
        self._agreed: dict[tuple[int, ...], tuple[str, Facts]] = {}  # the last plan agreed on, by ranks
        self._trained: dict[Param, bool] = {}  # when all ranks last read it
        self._axes: list[Axis] = []
        self._wait = Wait("comparison of plans", "", lambda: self._axes)
        self._wait_for_values: Wait | None = None

    def plan_changed(self) -> None:
        """A group's parameters were replaced, frozen or unfrozen, or a setting has changed: the next forward
        with gradients compares the plan again, if it differs."""
        self.is_agreed = False

    def trained_changed(self) -> None:
        """A forward has frozen or unfrozen parameters: the next one reads anew which are trained."""
        self._trained = {}
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
                self.numbers[ranks] = self._compare(ranks, {**at_first[ranks], **loaded}, timeout)
            elif loaded or self._agreed[ranks][0] != digest:
                self._compare(ranks, {**facts, **loaded}, timeout)
            self._agreed[ranks] = digest, facts
        for param in [param for group in groups for param in group.shards.params]:
            param.full_load = None

    def _compare(self, ranks: tuple[int, ...], facts: Facts, timeout: timedelta) -> int:
        self._wait.reason = self._change(ranks, facts)
        monitor, wait = monitor_of_job(), self._wait

        def refuse_failed() -> None:
            if monitor.failure is not None:
                raise monitor.explained(RuntimeError(), wait)

        try:
            with monitor.collective(wait):
                number = self.numbers.get(ranks) or monitor.next_number()
                return compare(facts, ranks, self._own_device(), number, timeout, refuse_failed)
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
