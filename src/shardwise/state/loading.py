"""Full values into a sharded model, bucket by bucket.

If one rank has them, it sends each bucket to all ranks, and each rank keeps its rows. If every rank has them,
each takes its rows directly. Misfits are found before anything is written, as far as names and shapes are
known by then.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardwise.comm.buffers import bytes_of
from shardwise.comm.full_tensors import RowScatter, own_region, write_rows
from shardwise.layout.fqns import clean, listed
from shardwise.layout.regions import Region
from shardwise.ranks.model_ranks import Broadcast
from shardwise.ranks.packing import Form, in_messages, num_packed_bytes, views_in
from shardwise.state.named_state import StateEntry, memory_of
from shardwise.torch_compat import dtensor, tensor_impl

Pairs = Iterator[tuple[str, Any]]


@dataclass(frozen=True)
class LoadReport:
    """What a load found. Names are those of the model; a tied parameter is found under any of its names.

    Attributes:
        missing: in the model, but not in the source; they keep their values.
        unexpected: in the source, but not in the model; they were ignored.
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
    is_strict: bool | None  # None: always, the caller has no choice
    converts: bool
    error: type[Exception] = RuntimeError
    came: dict[str, None] = field(default_factory=dict)  # dicts, for the order
    unexpected: dict[str, None] = field(default_factory=dict)
    converted: dict[str, None] = field(default_factory=dict)
    whole: dict[str, Any] = field(default_factory=dict)  # key -> what only load_state_dict can put in place

    def expect(self, facts: Mapping[str, ShapeAndDtype], is_all: bool = False) -> None:
        """Record what will be loaded; refuse what does not fit, and if ``is_all``, what is missing."""
        problems: list[str] = []
        dtypes: list[str] = []
        for name, found in facts.items():
            entry = self.entries.get(name)
            if entry is None:
                self.unexpected[name] = None
                continue
            self.came[name] = None
            if problem := _misfit(name, found, entry):
                problems.append(problem)
            elif entry.is_tensor and found.dtype != (own := entry.value.dtype):
                self.converted[name] = None
                are_floating = all(d is not None and d.is_floating_point for d in (found.dtype, own))
                if not (self.converts and are_floating):
                    dtypes.append(f"{name} is {found.dtype} in the source and {own} in the model")
        if dtypes:
            hint = "pass convert_dtype=True to convert floating-point values"
            hint = "only floating-point values are converted" if self.converts else hint
            problems.append(f"dtypes differ: {listed(dtypes)} ({hint})")
        if self.is_strict is not False and self.unexpected:
            hint = " (pass strict=False to pass over them)" if self.is_strict else ""
            problems.append(f"unexpected in the source: {listed(self.unexpected)}{hint}")
        self.refuse([*problems, *(self.missing_problems() if is_all else ())])

    def refuse(self, problems: list[str]) -> None:
        """Raise if there are any."""
        if problems:
            raise self.error(f"{self.where}: {listed(problems, separator='; ')}.")

    def missing(self) -> list[str]:
        """Names that did not come; a tied tensor is there if it came under another name."""
        there = {id(self.entries[name].value) for name in self.came if self.entries[name].is_tensor}
        return [
            name
            for name, entry in self.entries.items()
            if name not in self.came and not (entry.is_tensor and id(entry.value) in there)
        ]

    def missing_problems(self) -> list[str]:
        """What is wrong with missing names: if strict, all, and else those without values of their own."""
        missing = self.missing()
        empty = [
            name for name in missing if self.entries[name].is_tensor and self.entries[name].value.is_meta
        ]
        if self.is_strict is not False and missing:
            hint = " (pass strict=False to keep what the model has)" if self.is_strict else ""
            return [f"missing in the source: {listed(missing)}{hint}"]
        if empty:
            return [
                f"missing in the source, and without values in the model: {listed(empty)} (call "
                "shardwise.materialize(model) first, for initial values)"
            ]
        return []

    def refuse_broken_ties(self, read: Callable[[str], Any]) -> None:
        """Refuse different values for names that are tied in the model."""
        first: dict[Hashable, str] = {}
        for name in self.came:
            entry = self.entries[name]
            if not entry.is_tensor:
                continue
            other = first.setdefault(memory_of(dtensor.plain(entry.value)), name)
            if other != name and not _is_same(read(name), read(other)):
                self.refuse([_broken_tie(other, name)])

    def without_repeats(self, pairs: Pairs) -> Pairs:
        """Each tensor of the model once, under the first of its names that comes; others must have its
        values.

        Digests are compared, so that the first value need not be kept.
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


def _misfit(name: str, found: ShapeAndDtype, entry: StateEntry) -> str | None:
    if entry.is_tensor != (found.shape is not None):
        return f"{name} is a tensor on one side only"
    is_of_module = not entry.is_own and name.endswith("_extra_state")  # may grow
    if not entry.is_tensor or is_of_module or found.shape == tuple(entry.value.shape):
        return None
    return f"{name} has shape {found.shape} in the source and {tuple(entry.value.shape)} in the model"


def _broken_tie(one: str, other: str) -> str:
    return (
        f"{one} and {other} are tied in the model, but differ in the source (untie them, or load into a "
        "model without the tie and copy the one that you want)"
    )


def _digest(value: Tensor) -> bytes:
    contents = bytes_of(value.detach().cpu())
    return sha256(repr((value.shape, value.dtype)).encode() + contents.numpy().tobytes()).digest()


def _is_same(left: Tensor, right: Tensor) -> bool:
    if memory_of(left) == memory_of(right):
        return True
    return torch.equal(bytes_of(left.detach()), bytes_of(right.detach()))


class FullSource:
    """Full values that this rank can read by itself, by names, and what is known of them."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values
        self.facts = {name: ShapeAndDtype.of(value) for name, value in values.items()}

    def read(self, name: str, region: Region) -> Any:
        """A part of a value."""
        value = self._values[name]
        return value[region.slices] if isinstance(value, Tensor) and value.dim() else value


def by_name(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Full values by names as models have them."""
    values: dict[str, Any] = {}
    keys: dict[str, str] = {}
    for name, value in pairs:
        refuse_no_value(name, value)
        values[own_name(name, keys, "load_full_state_dict: the source")] = value
    return values


def own_name(key: str, keys: dict[str, str], where: str) -> str:
    """The name in the model of what ``where`` has under ``key``; ``keys``: by name, those before, to add to.

    Raises:
        ValueError: the name is taken.
    """
    name = clean(key)
    if (other := keys.setdefault(name, key)) != key:
        raise ValueError(
            f"{where} has '{other}' and '{key}', which are both {name} without the prefixes of wrappers. "
            "Remove one."
        )
    return name


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
            targets.whole[entry.key] = source.read(name, Region.all_of(source.facts[name].shape))
        else:
            region = own_region(entry.value)
            if region.numel:
                dtensor.plain(entry.value).copy_(source.read(name, region))


@torch.no_grad()
def load_from_one(
    targets: LoadTargets, pairs: Pairs | None, broadcast: Broadcast, device: torch.device, limit: int
) -> None:
    """The rank that has ``pairs`` sends them to all, ``limit`` bytes at a time. Others pass None."""
    messages = None if pairs is None else _messages(targets.without_repeats(pairs), limit)
    transfer = _RowTransfer(targets, broadcast, device)
    while True:
        header: Any = None
        rows, cause = None, None
        if messages is not None:
            try:
                header, rows = next(messages, (None, None))
            except Exception as error:  # the others wait for the next header
                header, cause = f"{type(error).__name__}: {error}", error
        header = broadcast.object(header)
        if header is None:
            return
        if isinstance(header, str):
            raise RuntimeError(header) from cause
        targets.expect({block.name: block.facts for block in header if not block.start})
        transfer.send(header, rows)


class _RowTransfer:
    """Transfers rows from the rank that has them to the others: directly, or packed and broadcast."""

    def __init__(self, targets: LoadTargets, broadcast: Broadcast, device: torch.device) -> None:
        self._targets = targets
        self._broadcast = broadcast
        self._scatter = None if broadcast.single_axis is None else RowScatter(*broadcast.single_axis, device)
        self._memory = torch.empty(0, dtype=torch.uint8, device=device)

    def send(self, blocks: "list[_RowBlock]", rows: list[Tensor | None] | None) -> None:
        """One message; ``rows`` on the rank that has them."""
        directly: list[Any] = []  # operations
        packed: list[tuple[_RowBlock, Tensor | None]] = []
        for block, some in zip(blocks, rows or [None] * len(blocks), strict=True):
            entry = self._targets.entries.get(block.name)
            if entry is None:
                continue
            scatter, target = self._scatter, entry.value
            if block.facts.shape is None:
                self._targets.whole[entry.key] = block.value
            elif (
                scatter is None
                or not self._targets.goes_by_rows(block.name)
                or not scatter.takes(target, block.start, block.end)
            ):
                packed.append((block, some))
            elif some is None:
                directly += scatter.receive(target, block.start, block.end)
            else:
                directly += scatter.send(target, block.start, some)
        works = dist.batch_isend_irecv(directly) if directly else []
        self._send_packed(packed)
        for work in works:
            work.wait()

    def _send_packed(self, some: "list[tuple[_RowBlock, Tensor | None]]") -> None:
        forms = [block.form for block, _ in some]
        num_bytes = num_packed_bytes(forms)
        if num_bytes > self._memory.numel():
            device = self._memory.device
            del self._memory  # never hold two of them
            self._memory = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        message = self._memory[:num_bytes]
        views = views_in(message, forms)
        for view, (_, rows) in zip(views, some, strict=True):
            if rows is not None:
                view.copy_(rows)
        if num_bytes:
            self._broadcast.tensor(message)
        for view, (block, _) in zip(views, some, strict=True):
            self._targets.write(block.name, block.start, view, block.facts.shape or ())


@dataclass(frozen=True, slots=True)
class _RowBlock:
    """Rows [start, end) of one tensor in a message; or a ``value`` that is no tensor."""

    name: str
    facts: ShapeAndDtype
    start: int
    end: int
    value: Any = None

    @property
    def form(self) -> Form:
        """Of the rows."""
        assert self.facts.shape is not None
        assert self.facts.dtype is not None
        return (self.end - self.start, *self.facts.shape[1:]), self.facts.dtype


def _messages(pairs: Pairs, limit: int) -> Iterator[tuple[list[_RowBlock], list[Tensor | None]]]:
    """On the sending rank: what all ranks get first of each message, and the rows that fill it."""

    keys: dict[str, str] = {}

    def items() -> Iterator[tuple[tuple[str, ShapeAndDtype, Any], int, int]]:
        for key, value in pairs:
            refuse_no_value(key, value)
            facts = ShapeAndDtype.of(value)
            name = own_name(key, keys, "load_full_state_dict: the source")
            if facts.shape is None:
                yield (name, facts, value), 0, 0
            else:
                rows = value.detach() if facts.shape else value.detach().view(1)
                yield (name, facts, rows), len(rows), prod(rows.shape[1:]) * value.itemsize

    for message in in_messages(items(), limit):
        blocks: list[_RowBlock] = []
        rows: list[Tensor | None] = []
        for (name, facts, contents), start, end in message:
            is_tensor = facts.shape is not None
            blocks.append(_RowBlock(name, facts, start, end, None if is_tensor else contents))
            rows.append(contents[start:end] if is_tensor else None)
        yield blocks, rows
