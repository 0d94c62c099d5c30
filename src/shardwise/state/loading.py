"""Full values into a sharded model, bucket by bucket.

If one rank has them, it sends each bucket to all ranks, and each rank keeps its rows. If every rank has them,
each takes its rows directly. Misfits are found before anything is written, as far as names and shapes are
known by then.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import accumulate
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardwise.comm.full_tensors import RowScatter, own_region, write_rows
from shardwise.layout.chunks import round_up
from shardwise.layout.fqns import clean, listed
from shardwise.layout.regions import Region
from shardwise.layout.slots import ALIGNMENT
from shardwise.ranks.model_ranks import Broadcast
from shardwise.state.named_state import memory_of
from shardwise.state.names import StateEntry
from shardwise.torch_compat import dtensor, tensor_impl

Pairs = Iterator[tuple[str, Any]]


@dataclass(frozen=True)
class LoadReport:
    """What a load found. Names are those of the model; a tied parameter counts once it has any of its names.

    Attributes:
        missing: in the model, but not in the source; they keep their values.
        unexpected: in the source, but not in the model; they were passed over.
        converted: loaded from another dtype than that of the model.
    """

    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    converted: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ShapeAndDtype:
    """What is known of a full value before it is read. ``shape`` is None if it is no tensor."""

    shape: tuple[int, ...] | None
    dtype: torch.dtype | None = None

    @classmethod
    def of(cls, value: Any) -> "ShapeAndDtype":
        """The shape and dtype of ``value``."""
        return cls(tuple(value.shape), value.dtype) if isinstance(value, Tensor) else cls(None)


@dataclass
class LoadTargets:
    """The targets of a load: the entries of a state dict by name, and what was loaded so far."""

    where: str  # the caller, for messages
    entries: Mapping[str, StateEntry]
    is_strict: bool
    converts: bool
    came: dict[str, None] = field(default_factory=dict)  # dicts, for the order
    unexpected: dict[str, None] = field(default_factory=dict)
    converted: dict[str, None] = field(default_factory=dict)
    whole: dict[str, Any] = field(default_factory=dict)  # key -> what only load_state_dict can put in place

    def expect(self, facts: Mapping[str, ShapeAndDtype]) -> None:
        """Record what will be loaded; refuse what does not fit.

        Raises:
            RuntimeError: naming all that is wrong.
        """
        problems: list[str] = []
        for name, found in facts.items():
            entry = self.entries.get(name)
            if entry is None:
                self.unexpected[name] = None
            elif problem := self._unfit(name, found, entry):
                problems.append(problem)
            else:
                self.came[name] = None
        if self.is_strict and self.unexpected:
            problems.append(
                f"unexpected in the source: {listed(self.unexpected)}, which this model does not have (pass "
                "strict=False to pass over them)"
            )
        self.refuse(problems)

    def refuse(self, problems: list[str]) -> None:
        """Raise if there are any."""
        if problems:
            raise RuntimeError(f"{self.where}: {listed(problems, separator='; ')}.")

    def _unfit(self, name: str, found: ShapeAndDtype, entry: StateEntry) -> str | None:
        if entry.is_tensor != (found.shape is not None):
            return f"{name} is a tensor on one side only"
        if not entry.is_tensor:
            return None
        shape, dtype = tuple(entry.value.shape), entry.value.dtype
        is_of_module = not entry.is_own and name.endswith("_extra_state")  # may grow
        if found.shape != shape and not is_of_module:
            return f"{name} has shape {found.shape} in the source, where the model has {shape}"
        if found.dtype == dtype:
            return None
        are_numbers = found.dtype is not None and found.dtype.is_floating_point and dtype.is_floating_point
        if not (self.converts and are_numbers):
            return (
                f"{name} is of {found.dtype} in the source, where the model has {dtype} (pass "
                "convert_dtype=True to convert floating-point values)"
            )
        self.converted[name] = None
        return None

    def missing(self) -> list[str]:
        """Names that did not come; a tied tensor is there if it came under another name."""
        there = {id(self.entries[name].value) for name in self.came if self.entries[name].is_tensor}
        return [
            name
            for name, entry in self.entries.items()
            if name not in self.came and not (entry.is_tensor and id(entry.value) in there)
        ]

    def check_complete(self) -> None:
        """Refuse, if strict, that names are missing; without values of their own they always are.

        Raises:
            RuntimeError: naming them.
        """
        missing = self.missing()
        empty = [
            name for name in missing if self.entries[name].is_tensor and self.entries[name].value.is_meta
        ]
        problems = []
        if self.is_strict and missing:
            problems.append(
                f"missing in the source: {listed(missing)} (pass strict=False to keep what the model has)"
            )
        elif empty:
            problems.append(
                f"missing in the source, and without values in the model: {listed(empty)} (call "
                "shardwise.materialize(model) first, for initial values)"
            )
        self.refuse(problems)

    def refuse_broken_ties(self, read: Callable[[str], Any]) -> None:
        """Refuse different values for names that are tied in the model.

        Raises:
            RuntimeError: naming both.
        """
        first: dict[int, str] = {}
        for name in self.came:
            entry = self.entries[name]
            other = first.setdefault(id(entry.value), name)
            if entry.is_tensor and other != name and not _is_same(read(name), read(other)):
                self.refuse([_broken_tie(other, name)])

    def without_repeats(self, pairs: Pairs) -> Pairs:
        """Each tensor of the model once, under the first of its names that comes.

        Raises:
            RuntimeError: another one comes with other values. Told apart by a digest, lest the first has to
                be kept.
        """
        counts = Counter(id(entry.value) for entry in self.entries.values() if entry.is_tensor)
        first: dict[int, tuple[str, bytes]] = {}
        for name, value in pairs:
            entry = self.entries.get(clean(name))
            if entry is None or counts[id(entry.value)] < 2 or not isinstance(value, Tensor):
                yield name, value
                continue
            other, digest = first.setdefault(id(entry.value), (clean(name), _digest(value)))
            if other == clean(name):
                yield name, value
            elif digest != _digest(value):
                self.refuse([_broken_tie(other, clean(name))])

    def report(self) -> LoadReport:
        """The report of the load."""
        return LoadReport(tuple(self.missing()), tuple(self.unexpected), tuple(self.converted))

    # --- writing ----------------------------------------------------------------------------------

    def goes_by_rows(self, name: str) -> bool:
        """False for what is not plain memory of the model's own, to be written to."""
        entry = self.entries[name]
        return entry.is_own and tensor_impl.is_plain(dtensor.plain(entry.value))

    def write(self, name: str, start: int, rows: Tensor, shape: tuple[int, ...]) -> None:
        """Write rows [start, ...) of the full value of ``name``."""
        entry = self.entries[name]
        if self.goes_by_rows(name):
            write_rows(entry.value, start, rows)
            return
        whole = self.whole.get(entry.key)
        if whole is None:
            whole = self.whole[entry.key] = rows.new_empty(shape)
        (whole.view(1) if not shape else whole)[start : start + len(rows)].copy_(rows)


def _broken_tie(one: str, other: str) -> str:
    return f"{one} and {other} are tied in the model, but differ in the source"


def _digest(value: Tensor) -> bytes:
    """Of the bits."""
    contents = value.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return sha256(repr((value.shape, value.dtype)).encode() + contents.numpy().tobytes()).digest()


def _is_same(left: Tensor, right: Tensor) -> bool:
    return memory_of(left) == memory_of(right) or torch.equal(left, right)


@dataclass(frozen=True)
class FullSource:
    """Full values that this rank can read by itself: names, shapes and dtypes, and how to read a region."""

    facts: Mapping[str, ShapeAndDtype]
    read: Callable[[str, Region], Any]


def of_mapping(source: Mapping[str, Any]) -> FullSource:
    """A dict of full tensors."""

    def read(name: str, region: Region) -> Any:
        value = values[name]
        return value[region.slices] if isinstance(value, Tensor) and value.dim() else value

    values: dict[str, Any] = {}
    for name, value in source.items():
        refuse_no_value(name, value)
        values[clean(name)] = value
    return FullSource({name: ShapeAndDtype.of(value) for name, value in values.items()}, read)


def refuse_no_value(name: Any, value: Any) -> None:
    """A full source has full tensors, with values."""
    if not isinstance(name, str):
        raise ValueError(f"load_full_state_dict: the source has {name!r} where names are expected.")
    if isinstance(value, DTensor):
        raise ValueError(
            f"load_full_state_dict: {name} is a DTensor, where a full tensor is expected. Load a sharded "
            "state with model.load_state_dict, or a sharded checkpoint with shardwise.load_checkpoint."
        )
    if isinstance(value, Tensor) and value.is_meta:
        raise ValueError(f"load_full_state_dict: {name} is on the meta device in the source, without values.")


@torch.no_grad()
def load_everywhere(targets: LoadTargets, source: FullSource) -> None:
    """Each rank reads its rows. No communication; ``targets`` have been checked."""
    for name in source.facts:
        entry = targets.entries.get(name)
        if entry is None:
            continue
        if not entry.is_tensor:
            targets.whole[entry.key] = source.read(name, Region((), ()))
        elif not targets.goes_by_rows(name):
            shape = source.facts[name].shape or ()
            targets.whole[entry.key] = source.read(name, Region((0,) * len(shape), shape))
        else:
            region = own_region(entry.value)
            if region.numel:
                dtensor.plain(entry.value).copy_(source.read(name, region))


@torch.no_grad()
def load_from_one(
    targets: LoadTargets, pairs: Pairs | None, broadcast: Broadcast, device: torch.device, limit: int
) -> None:
    """The rank that has ``pairs`` sends them to all, ``limit`` bytes at a time. Others pass None.

    Raises:
        RuntimeError: something that has come does not fit; what came before it is written.
        SourceError: reading failed on that rank.
    """
    sending = None if pairs is None else _Sending(targets.without_repeats(pairs), limit)
    transfer = _RowTransfer(targets, broadcast, device)
    while True:
        message = broadcast.object(None if sending is None else sending.next_message())
        if message is None:
            return
        if isinstance(message, str):
            raise SourceError(message) from (None if sending is None else sending.error)
        targets.expect(message.begun)
        for name, value in message.others.items():
            if name in targets.entries:
                targets.whole[targets.entries[name].key] = value
        transfer.send(message.blocks, None if sending is None else sending.rows)


class _RowTransfer:
    """Transfers rows from the rank that has them to the others: directly, or packed and broadcast."""

    def __init__(self, targets: LoadTargets, broadcast: Broadcast, device: torch.device) -> None:
        self._targets = targets
        self._broadcast = broadcast
        self._scatter = None if broadcast.single_axis is None else RowScatter(*broadcast.single_axis, device)
        self._memory = torch.empty(0, dtype=torch.uint8, device=device)

    def send(self, blocks: "list[_RowBlock]", rows: list[Tensor] | None) -> None:
        """One bucket; ``rows`` on the rank that has them."""
        there = rows if rows is not None else [None] * len(blocks)
        every = [(b, r) for b, r in zip(blocks, there, strict=True) if b.name in self._targets.entries]
        works = self._send_directly([each for each in every if self._goes_directly(each[0])])
        self._send_packed([each for each in every if not self._goes_directly(each[0])])
        for work in works:
            work.wait()

    def _goes_directly(self, block: "_RowBlock") -> bool:
        if self._scatter is None or not self._targets.goes_by_rows(block.name):
            return False
        return self._scatter.takes(self._targets.entries[block.name].value, block.start, block.end)

    def _send_directly(self, some: "list[tuple[_RowBlock, Tensor | None]]") -> list[Any]:
        operations: list[Any] = []
        for block, rows in some:
            assert self._scatter is not None
            target = self._targets.entries[block.name].value
            if rows is None:
                operations += self._scatter.receive(target, block.start, block.end)
            else:
                operations += self._scatter.send(target, block.start, rows)
        return dist.batch_isend_irecv(operations) if operations else []

    def _send_packed(self, some: "list[tuple[_RowBlock, Tensor | None]]") -> None:
        ends = list(accumulate(round_up(b.num_bytes, ALIGNMENT) for b, _ in some))
        if not ends:
            return
        if ends[-1] > self._memory.numel():
            device = self._memory.device
            del self._memory  # never hold two of them
            self._memory = torch.empty(ends[-1], dtype=torch.uint8, device=device)
        buffer = self._memory[: ends[-1]]
        places = [block.rows_in(buffer[start:]) for (block, _), start in zip(some, [0, *ends], strict=False)]
        for place, (_, rows) in zip(places, some, strict=True):
            if rows is not None:
                place.copy_(rows)
        if ends[-1]:
            self._broadcast.tensor(buffer)
        for place, (block, _) in zip(places, some, strict=True):
            self._targets.write(block.name, block.start, place, block.shape)


class SourceError(RuntimeError):
    """A source could not be read to its end."""


@dataclass(frozen=True, slots=True)
class _RowBlock:
    """Rows of one tensor in a bucket that travels."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int
    num_rows: int

    @property
    def end(self) -> int:
        """One past its last row."""
        return self.start + self.num_rows

    @property
    def num_bytes(self) -> int:
        """Without padding."""
        return self.num_rows * prod(self.shape[1:]) * self.dtype.itemsize

    def rows_in(self, buffer: Tensor) -> Tensor:
        """These rows, at the start of a buffer of bytes."""
        return buffer[: self.num_bytes].view(self.dtype).view(self.num_rows, *self.shape[1:])


@dataclass
class _Message:
    """The header of a bucket, which all ranks get first. ``begun``: tensors that begin in this bucket."""

    begun: dict[str, ShapeAndDtype] = field(default_factory=dict)
    others: dict[str, Any] = field(default_factory=dict)  # no tensors
    blocks: list[_RowBlock] = field(default_factory=list)


class _Sending:
    """On the sending rank: the buckets, one after the other."""

    def __init__(self, pairs: Pairs, limit: int) -> None:
        self._messages = _messages(pairs, limit)
        self.rows: list[Tensor] = []
        self.error: Exception | None = None

    def next_message(self) -> _Message | str | None:
        """The next header; ``rows`` are its rows. None: no more buckets. A text: reading failed."""
        try:
            message, self.rows = next(self._messages, (None, []))
        except Exception as error:
            self.error = error
            return f"{type(error).__name__}: {error}"
        return message


def _messages(pairs: Pairs, limit: int) -> Iterator[tuple[_Message, list[Tensor]]]:
    """Buckets of up to ``limit`` bytes, or one row, and the rows that fill them."""
    message = _Message()
    rows_to_send: list[Tensor] = []
    size = 0
    for name, value in pairs:
        refuse_no_value(name, value)
        message.begun[clean(name)] = ShapeAndDtype.of(value)
        if not isinstance(value, Tensor):
            message.others[clean(name)] = value
            continue
        shape = tuple(value.shape)
        rows = value.detach() if shape else value.detach().reshape(1)
        row_bytes, start = prod(shape[1:]) * value.itemsize, 0
        while start < len(rows) and row_bytes:
            fitting = (limit - size) // row_bytes
            if fitting < 1 and message.blocks:
                yield message, rows_to_send
                message, rows_to_send, size = _Message(), [], 0
                continue
            count = min(len(rows) - start, max(1, fitting))
            message.blocks.append(_RowBlock(clean(name), shape, value.dtype, start, count))
            rows_to_send.append(rows[start : start + count])
            size += round_up(count * row_bytes, ALIGNMENT)
            start += count
    if message.begun or message.blocks:
        yield message, rows_to_send
