"""Memory of the device and of the host: who uses which bytes, and when freed memory may be given out again.

The caching allocator of torch, as far as it matters here: a block belongs to the stream that was current when it was
allocated. Freed, it goes back to that stream's pool at once, whatever other streams still do with it, and that stream
may get it again with its next allocation. So all other lanes must be over with it by then, as far as that stream knows.

Memory begins as NaN (each byte 0xFF), and is NaN again once it is freed: what is read before it is written, or when it
is gone, shows in the results.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from races.clocks import Clocks, Lane
from races.reports import EarlyReuse, Finding, Line, Race, Use, calling_lines

UNWRITTEN = 0xFF


class UsedAfterFree(Exception):
    """A storage was used that had been emptied. There is nothing to go on with."""


@dataclass(frozen=True, slots=True)
class Access:
    """A lane's use of the bytes [start, end) of a block."""

    lane: Lane
    time: int
    is_write: bool
    start: int
    end: int
    operation: str
    lines: tuple[Line, ...]

    def covers(self, other: "Access") -> bool:
        return self.start <= other.start and other.end <= self.end

    def use(self) -> Use:
        return Use(str(self.lane), "writes" if self.is_write else "reads", self.operation, self.lines)


@dataclass(eq=False, slots=True)
class Block:
    """Memory of one allocation, and the accesses that later ones have to wait for."""

    owner: Lane
    num_bytes: int = 0
    accesses: list[Access] = field(default_factory=list)
    is_freed: bool = False

    def last_of_others(self) -> list[Access]:
        """The last access of each lane but the owner."""
        last: dict[Lane, Access] = {}
        for access in self.accesses:
            if access.lane is not self.owner and (
                access.lane not in last or last[access.lane].time < access.time
            ):
                last[access.lane] = access
        return list(last.values())


@dataclass(frozen=True, slots=True)
class _Known:
    """A storage that lives: the block that it lies in, from which byte on. `is_alias`: it does not own the block."""

    storage: StorageWeakRef
    block: Block
    offset: int
    is_alias: bool


class Memory:
    """All blocks of one simulation. `host`: the lane whose memory has no pool."""

    def __init__(self, clocks: Clocks, host: Lane, report: Callable[[Finding], None]) -> None:
        self._clocks = clocks
        self._host = host
        self._report = report
        self._known: dict[int, _Known] = {}
        self._freed: dict[Lane, list[tuple[Block, tuple[Line, ...]]]] = {}
        self.num_checks = 0
        """Pairs of accesses by different lanes of which one writes."""

    def allocate(self, storage: torch.UntypedStorage, owner: Lane) -> Block:
        """`storage` has memory from the pool of `owner`, with undefined contents."""
        block = Block(owner)
        self._known[storage._cdata] = _Known(StorageWeakRef(storage), block, 0, is_alias=False)
        block.num_bytes = storage.nbytes()
        if owner is not self._host:
            self._check_reuse(owner)
        return block

    def alias(self, storage: torch.UntypedStorage, tensor: Tensor) -> None:
        """`storage` begins where `tensor` does, and lies in the same memory."""
        known = self._known[tensor.untyped_storage()._cdata]
        offset = known.offset + tensor.storage_offset() * tensor.itemsize
        self._known[storage._cdata] = _Known(StorageWeakRef(storage), known.block, offset, is_alias=True)

    def free(self, storage: torch.UntypedStorage) -> None:
        """`storage` is emptied, and lives on."""
        known = self._known.get(storage._cdata)
        if known is not None and not known.block.is_freed:
            self._release(known.block)

    def is_emptied(self, storage: torch.UntypedStorage) -> bool:
        known = self._known.get(storage._cdata)
        return known is not None and known.block.is_freed

    def drop_dead(self) -> None:
        """Free the memory of storages that nobody holds any more."""
        is_dead = torch.UntypedStorage._expired
        for key, known in list(self._known.items()):
            if is_dead(known.storage.cdata):
                del self._known[key]
                if not known.is_alias and not known.block.is_freed:
                    self._release(known.block)

    def access(self, tensor: Tensor, owner: Lane, lane: Lane, *, is_write: bool, operation: str) -> None:
        """`lane` uses the memory of `tensor`, plain and strided. `owner`: who has it, if it was not seen before."""
        if tensor.numel() == 0:
            return
        storage = tensor.untyped_storage()
        known = self._known.get(storage._cdata)
        if known is None:
            self.allocate(storage, owner)
            known = self._known[storage._cdata]
        start = known.offset + tensor.storage_offset() * tensor.itemsize
        span = 1 + sum(
            (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
        )
        time = self._clocks.advance(lane)
        access = Access(
            lane, time, is_write, start, start + span * tensor.itemsize, operation, calling_lines()
        )
        if known.block.is_freed:
            raise UsedAfterFree(f"{known.block.owner} had freed the memory.\n{access.use()}")
        known.block.accesses = self._checked(known.block, access)

    def _checked(self, block: Block, access: Access) -> list[Access]:
        """The accesses that later ones have to wait for: those that `access` stands for are left out."""
        kept: list[Access] = []
        for earlier in block.accesses:
            if earlier.start < access.end and access.start < earlier.end:
                if access.is_write or earlier.is_write:
                    self._check(block, earlier, access)
                    if access.is_write and access.covers(earlier):
                        continue
                elif earlier.lane is access.lane and access.covers(earlier):
                    continue
            kept.append(earlier)
        kept.append(access)
        return kept

    def _check(self, block: Block, earlier: Access, access: Access) -> None:
        if earlier.lane is access.lane:
            return
        self.num_checks += 1
        if not self._clocks.is_over(earlier.lane, earlier.time, access.lane):
            shared = min(earlier.end, access.end) - max(earlier.start, access.start)
            self._report(Race(shared, str(block.owner), earlier.use(), access.use()))

    def _release(self, block: Block) -> None:
        block.is_freed = True
        if block.owner is not self._host and block.last_of_others():
            self._freed.setdefault(block.owner, []).append((block, calling_lines()))

    def _check_reuse(self, owner: Lane) -> None:
        """The next allocation of `owner` may get any block that was freed; later ones come after it."""
        for block, freed in self._freed.pop(owner, ()):
            for last in block.last_of_others():
                self.num_checks += 1
                if not self._clocks.is_over(last.lane, last.time, owner):
                    self._report(EarlyReuse(block.num_bytes, str(owner), last.use(), freed, calling_lines()))
