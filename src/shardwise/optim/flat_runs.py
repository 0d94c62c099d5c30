"""Flat runs: which sharded parameters an optimizer may step as one tensor, and their state.

A run is a range of a bucket's flat shard: neighbours of one param group whose gradients are neighbours as
well, and whose states have the same numbers of steps. Padding in between takes part; its gradient is zero, so
it stays zero::

    shard buffer   | w1 . . . . | b1 pad | w2 . . | b2 pad | w3 . . . . |
    runs           [----- one tensor ----)  idle  [---- another one ----)     w2 has no gradient

The state of a run is flat as well. Runs are split and joined through `StateSlice`, a parameter's part of a
state. State that is already in place is not copied.
"""

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from operator import attrgetter, is_, is_not
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardwise.buckets.bucket import bucket_and_index
from shardwise.buckets.optimizer_steps import SteppedParameters
from shardwise.buckets.sharded_gradients import GradientRange, ShardedGradients
from shardwise.comm.buffers import FlatShard, typed_range
from shardwise.layout.slots import ALIGNMENT
from shardwise.torch_compat import dtensor, tensor_impl

MAX_GAP = ALIGNMENT - 1
"""Elements of padding that a run may span; a larger gap (a last rank's missing rows) cuts it."""


class StateSlice(NamedTuple):
    """A parameter's part of a state: elements of ``flat`` from ``start`` on.

    ``is_ours``: only this optimizer uses the memory around it.
    """

    flat: Tensor
    start: int
    is_ours: bool

    def values(self, numel: int) -> Tensor:
        """Its elements."""
        return self.flat if self.flat.numel() == numel else self.flat.narrow(0, self.start, numel)

    @property
    def offset(self) -> int:
        """Its offset in its storage."""
        return int(self.flat.storage_offset()) + self.start


ParamState = dict[str, Any]
"""The state of one parameter by name: a `StateSlice` for tensors of its shape, other values unchanged."""


class Location(NamedTuple):
    """The elements [start, end) of a bucket's flat shard, padding included, that belong to a parameter.

    ``position``: its index in the bucket. ``gradient_start``: where its gradient starts in a buffer of
    gradients. ``buffer``: the address of that buffer; None if the gradient is elsewhere.
    """

    shard: FlatShard
    gradients: ShardedGradients
    position: int
    start: int
    end: int
    gradient_start: int
    buffer: int | None


def locate(param: Tensor, local: Tensor, gradient: Tensor) -> Location | None:
    """Where ``param`` is, given its local tensor and local gradient; None if in no flat shard."""
    found = bucket_and_index(param)
    if found is None or not local.numel() or type(local) is not Tensor:
        return None
    bucket, index = found
    slot, view = bucket.stored.slots[index], bucket.flat_shard.views[index]
    is_over_it = (view.dtype, view.shape, view.stride()) == (local.dtype, local.shape, local.stride())
    if view.is_meta or local.is_meta or not is_over_it or view.data_ptr() != local.data_ptr():
        return None  # moved or assigned, and the bucket has not followed yet
    start, gradients = slot.shard_offset // local.itemsize, bucket.sharded_gradients
    end, gradient_start = start + slot.padded_numel, gradients.gradient_offset(index)
    buffer = gradients.buffer_of(index, gradient)
    return Location(bucket.flat_shard, gradients, index, start, end, gradient_start, buffer)


@dataclass(eq=False)
class RunMember:
    """A candidate for a run.

    ``gradient`` is local. ``is_usual``: the gradient is an ordinary DTensor, placed as the parameter is.
    """

    param: Tensor
    local: Tensor
    gradient: Tensor
    is_usual: bool
    location: Location | None
    state: ParamState | None
    signature: Any = None

    @property
    def at(self) -> Location:
        """Its location, where it has one."""
        assert self.location is not None
        return self.location

    @property
    def is_plain(self) -> bool:
        """Whether neither tensor is of a subclass."""
        return type(self.local) is Tensor and type(self.gradient) is Tensor

    @property
    def is_flat(self) -> bool:
        """Whether it is stepped as a 1D tensor."""
        return self.is_plain and self.local.is_contiguous()


class FlatRun:
    """Parameters that are stepped as one tensor, ``flat``, which shares their memory."""

    def __init__(self, members: Sequence[RunMember], starts: Sequence[int]) -> None:
        first, last = members[0], members[-1]
        self.params = [member.param for member in members]
        self.starts = list(starts)
        self.numels = [member.local.numel() for member in members]
        self.is_merged = len(members) > 1 and starts[-1] > 0
        self.is_flat = first.is_flat
        if self.is_merged:
            dtype, begin = first.local.dtype, first.at.start
            end = begin + starts[-1] + last.local.numel()
            size = dtype.itemsize
            self.flat = typed_range(first.at.shard.bytes, begin * size, end * size, dtype)
        else:
            self.flat = first.local.detach()
            self.flat = self.flat.view(-1) if self.is_flat else self.flat
        if first.gradient.dtype != self.flat.dtype:
            tensor_impl.set_grad_dtype(self.flat, first.gradient.dtype)

    def gradient(self, first: Tensor) -> Tensor:
        """The gradient of ``flat``, from the local gradient of the first parameter."""
        if self.is_merged:
            return first.as_strided(self.flat.shape, (1,))
        return first.reshape(-1) if self.is_flat else first

    def take_apart(self, state: dict[str, Any]) -> list[ParamState]:
        """The state of ``flat``, by parameter."""
        return [
            {
                key: StateSlice(value, start, is_ours=True)
                if isinstance(value, Tensor) and value.shape == self.flat.shape
                else value
                for key, value in state.items()
            }
            for start in self.starts
        ]

    def join(self, states: Sequence[ParamState]) -> dict[str, Any]:
        """The state of ``flat``, from that of each parameter. Numbers are copied."""
        joined: dict[str, Any] = {}
        for key, value in states[0].items():
            if isinstance(value, StateSlice):
                joined[key] = self._joined([state[key] for state in states])
            else:
                joined[key] = own_copy(value)
        return joined

    def _joined(self, parts: Sequence[StateSlice]) -> Tensor:
        first = parts[0]
        if self._are_in_place(parts):
            is_all = first.start == 0 and first.flat.shape == self.flat.shape
            return first.flat if is_all else first.flat.as_strided(self.flat.shape, (1,), first.offset)
        if not self.is_flat:
            values = first.values(self.numels[0]).reshape(self.flat.shape)
            return values if first.is_ours else values.to(self.flat.device, copy=True)
        whole = torch.zeros(self.flat.shape, dtype=first.flat.dtype, device=self.flat.device)
        for part, start, numel in zip(parts, self.starts, self.numels, strict=True):
            whole.narrow(0, start, numel).copy_(part.values(numel).reshape(-1))
        return whole

    def _are_in_place(self, parts: Sequence[StateSlice]) -> bool:
        """Whether they lie in one storage of ours, spaced as their parameters are."""
        if not (self.is_flat and all(part.is_ours and part.flat.dim() == 1 for part in parts)):
            return False
        storages = {part.flat.untyped_storage().data_ptr() for part in parts}
        begin = parts[0].offset
        is_placed = [part.offset - begin for part in parts] == self.starts
        return len(storages) == 1 and is_placed and parts[0].flat.device == self.flat.device


def own_copy(value: Any) -> Any:
    """A copy that no other parameter shares."""
    return value.detach().clone() if isinstance(value, Tensor) else copy.deepcopy(value)


def make_runs(members: Sequence[RunMember], max_gap: int) -> list[tuple[FlatRun, list[RunMember]]]:
    """The runs of one param group."""
    _sign(members)
    empty = [member for member in members if not member.local.numel()]
    alone: list[RunMember] = []
    placed: list[RunMember] = []
    for member in members:
        if member.local.numel():
            is_placed = member.location is not None and member.is_usual and member.is_plain
            (placed if is_placed else alone).append(member)
    runs = [(FlatRun([member], [0]), [member]) for member in alone]
    for some in _alike(empty):
        runs.append((FlatRun(some, [0] * len(some)), some))
    for some in _neighbours(placed, max_gap):
        begin = some[0].at.start
        runs.append((FlatRun(some, [member.at.start - begin for member in some]), some))
    return runs


def _alike(members: Iterable[RunMember]) -> list[list[RunMember]]:
    """Empty shards, by signature: only their step counters advance."""
    found: dict[Any, list[RunMember]] = {}
    for member in members:
        local, gradient = member.local, member.gradient
        alone = None if member.is_flat and member.is_usual else id(member)
        key = (local.dtype, local.device, gradient.dtype, repr(member.signature), alone)
        found.setdefault(key, []).append(member)
    return list(found.values())


def _neighbours(members: Sequence[RunMember], max_gap: int) -> list[list[RunMember]]:
    found: list[list[RunMember]] = []
    number_of: dict[int, int] = {}
    for member in members:
        number_of.setdefault(id(member.at.shard), len(number_of))
    for member in sorted(members, key=lambda each: (number_of[id(each.at.shard)], each.at.start)):
        if found and _continues(found[-1], member, max_gap):
            found[-1].append(member)
        else:
            found.append([member])
    return found


def _continues(run: Sequence[RunMember], member: RunMember, max_gap: int) -> bool:
    """Whether ``member`` starts where ``run`` ends, and its gradient where the gradients of ``run`` end."""
    first, last, here = run[0], run[-1], member.at
    # A parameter without a gradient may lie in between.
    if here.shard is not last.at.shard or member.local.dtype != last.local.dtype:
        return False
    gap = last.at.end - last.at.start - last.local.numel()
    if here.start != last.at.end or gap > max_gap:
        return False
    if here.buffer is None or here.buffer != first.at.buffer:
        return False
    is_beside = here.gradient_start - first.at.gradient_start == here.start - first.at.start
    return is_beside and member.gradient.dtype == first.gradient.dtype and member.signature == first.signature


# --- signatures -----------------------------------------------------------------------------------


def _sign(members: Sequence[RunMember]) -> None:
    """Set signatures: names, dtypes and numbers of the state. Members with equal ones may share a state."""
    numbers = _read([v for m in members for v in (m.state or {}).values() if _is_number(v)])
    for member in members:
        member.signature = tuple(
            (key, *_signature(value, numbers))
            for key, value in sorted((member.state or {}).items(), key=lambda item: str(item[0]))
        )


def _is_number(value: Any) -> bool:
    """Whether ``value`` is a tensor of one element, such as a step count, for the whole parameter."""
    return isinstance(value, Tensor) and not isinstance(value, DTensor) and value.numel() == 1


def _signature(value: Any, numbers: dict[int, Any]) -> tuple[Any, ...]:
    if isinstance(value, StateSlice):
        return "part", value.flat.dtype, type(value.flat)
    if _is_number(value):
        return value.dtype, value.device, value.shape, numbers[id(value)]
    return type(value), value


def _read(tensors: Sequence[Tensor]) -> dict[int, Any]:
    """Read the numbers in tensors, with one synchronisation per device."""
    distinct = {id(tensor): tensor for tensor in tensors}
    by_kind: dict[Any, list[int]] = {}
    for key, tensor in distinct.items():
        by_kind.setdefault((tensor.device, tensor.dtype), []).append(key)
    found: dict[int, Any] = {}
    for keys in by_kind.values():
        values = torch.stack([distinct[key].detach().reshape(()) for key in keys]).tolist()
        found.update(zip(keys, values, strict=True))
    return found


# --- from step to step ----------------------------------------------------------------------------

Groups = list[dict[str, Any]]


class StepPlan:
    """The runs of all param groups, and their premises, in lists that C loops compare.

    ``flats``: what each group steps. ``found``: the runs, with their members.
    """

    def __init__(
        self, groups: Groups, flats: list[list[Tensor]], found: Sequence[tuple[FlatRun, list[RunMember]]]
    ) -> None:
        self.flats = flats
        self.runs = [run for run, _ in found]
        self._groups = [list(group["params"]) for group in groups]
        self._have_eps = list(map(has_eps, groups))
        sharded = [p for params in self._groups for p in params if isinstance(p, DTensor)]
        self._resting = [param for param in sharded if param.grad is None]
        members = [member for _, some in found for member in some]
        self._is_lasting = all(member.is_usual for member in members)
        self._params = [member.param for member in members]
        self._locals = [member.local for member in members]
        places = map(bucket_and_index, chain.from_iterable(self._groups))
        buckets = [place[0] for place in places if place is not None]
        self.stepped = SteppedParameters([*self._params, *self._locals], buckets)
        self._specs = [
            dtensor.spec_of(member.param.grad) if isinstance(member.param.grad, DTensor) else None
            for member in members
        ]
        self._firsts: list[int] = []
        self._ranges: list[tuple[GradientRange, int, int]] = []  # of merged runs, among all gradients
        count = 0
        for run, some in found:
            self._firsts.append(count)
            if run.is_merged:
                gradients = GradientRange(some[0].at.gradients, [member.at.position for member in some])
                self._ranges.append((gradients, count, count + len(some)))
            count += len(some)

    def gradients(self, groups: Groups) -> list[Tensor] | None:
        """The gradients of the runs, if nothing has changed since they were made."""
        if not (self._is_lasting and self._has_same(groups)):
            return None
        if not all(map(is_, map(_LOCAL, self._params), self._locals)):
            return None
        with tensor_impl.plain_access():
            gradients = list(map(_GRAD, self._params))
        if not _ONLY_DTENSORS.issuperset(map(type, gradients)):
            return None
        if not all(map(is_, map(_SPEC, gradients), self._specs)):
            return None
        locals_ = list(map(_LOCAL, gradients))
        if not all(of.is_in_place(locals_[begin:end]) for of, begin, end in self._ranges):
            return None
        return [run.gradient(locals_[first]) for run, first in zip(self.runs, self._firsts, strict=True)]

    def _has_same(self, groups: Groups) -> bool:
        """Whether param groups have the same parameters, and none outside the runs has a gradient."""
        if len(groups) != len(self._groups) or list(map(has_eps, groups)) != self._have_eps:
            return False
        for group, known in zip(groups, self._groups, strict=True):
            params = group["params"]
            if len(params) != len(known) or not all(map(is_, params, known)):
                return False
        with tensor_impl.plain_access():
            return not any(map(is_not, map(_GRAD, self._resting), repeat(None)))


_LOCAL, _GRAD, _SPEC = dtensor.local_tensor, attrgetter("grad"), dtensor.spec_of
_ONLY_DTENSORS = {DTensor}


def has_eps(group: dict[str, Any]) -> bool:
    """False if the optimizer may divide zero by zero."""
    return bool(group.get("eps") != 0)
