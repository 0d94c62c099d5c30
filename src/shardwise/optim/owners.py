"""Which rank owns which block of sharded tensors, and what ranks send so that owners have whole blocks.

Arithmetic on shapes only: no tensors, no process groups. A rank is a member of the set of ranks that share
the tensors, and is counted in that set.

A block is the unit that one member processes: a tensor, or one of the matrices in it. Four members, two
blocks A and B of 8 rows, sharded by rows:

    member        0      1      2      3
    has           A01    A23    A45    A67     and the same of B
    owns          A      B      -      -

    there         1, 2, 3 send rows of A to 0;   0, 2, 3 send rows of B to 1
    back          0 sends each its rows of A;    1 sends each its rows of B

Owners are chosen for all blocks at once, the costliest first, each for the member with the least work so
far (longest processing time first: Graham, "Bounds on multiprocessing timing anomalies", 1969). A block that
some members have whole is owned by one of them, so that it need not be sent: experts that are sharded by
expert, replicated tensors. Where members hold copies of each other's parts (replicas), all may be owners;
an owner receives the parts from its own copy, and sends the results to all.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import NamedTuple

from shardwise.layout.chunks import stretches
from shardwise.layout.regions import Region, Split

MIN_ROUNDS = 4
"""The smallest number of rounds, so that computation hides most of the communication."""

BlockCost = Callable[["Block"], float]
"""What a block costs its owner, in any unit."""


class BlockKey(NamedTuple):
    """Which block: the index of its tensor, and its index among the blocks of that tensor."""

    tensor: int
    block: int


@dataclass(frozen=True)
class Block:
    """A block, and where it lies in its full tensor."""

    key: BlockKey
    region: Region

    @property
    def shape(self) -> tuple[int, ...]:
        """With as many dims as the tensor."""
        return self.region.sizes

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.region.numel


@dataclass(frozen=True)
class Placed:
    """How a full tensor lies on the members, and the regions of its blocks.

    ``coordinates[member]`` is where a member is in the mesh.
    """

    split: Split
    coordinates: tuple[tuple[int, ...], ...]
    regions: tuple[Region, ...]


class BlockPiece(NamedTuple):
    """A member's part of a block: where it lies in the block, and in the member's shard."""

    block: Block
    in_block: tuple[slice, ...]
    in_local: tuple[slice, ...]
    shape: tuple[int, ...]


Pieces = list[list[BlockPiece]]
"""Pieces by the other member."""


@dataclass(frozen=True)
class Round:
    """What one member does in one round. ``there`` and ``back`` are the pieces that it sends to each member
    and receives from each, itself included; both ends have them in the same order."""

    owned: tuple[Block, ...]
    sent_there: Pieces
    received_there: Pieces
    sent_back: Pieces
    received_back: Pieces
    travels_there: bool
    travels_back: bool


class OwnerPlan:
    """Owners and rounds for ``tensors``, by index, that ``world`` members share; the same on all of them.

    ``cost``: of a block. ``fixed``: owners that are already known.
    """

    def __init__(
        self, tensors: dict[int, Placed], world: int, cost: BlockCost, fixed: Mapping[BlockKey, int]
    ) -> None:
        self._tensors = tensors
        self.world = world
        self._regions: dict[tuple[Split, tuple[int, ...]], Region] = {}
        self._holders: dict[tuple[Split, int, Region], list[int]] = {}
        self.blocks = {
            index: [Block(BlockKey(index, i), region) for i, region in enumerate(placed.regions)]
            for index, placed in tensors.items()
        }
        self.owners = self._choose_owners(cost, fixed)

    def _choose_owners(self, cost: BlockCost, fixed: Mapping[BlockKey, int]) -> dict[BlockKey, int]:
        everything = [block for blocks in self.blocks.values() for block in blocks]
        costs = {block.key: cost(block) for block in everything}
        owners = {key: owner for key, owner in fixed.items() if key in costs}
        loads = [0.0] * self.world
        for key, owner in owners.items():
            loads[owner] += costs[key]
        # Among equals, blocks with few possible owners first; then in the order of the tensors.
        order = sorted(everything, key=lambda b: (-costs[b.key], len(self.holders(b)) or self.world, b.key))
        for block in order:
            if block.key in owners:
                continue
            candidates = self.holders(block) or range(self.world)
            owner = min(candidates, key=lambda member: (loads[member], member))
            owners[block.key] = owner
            loads[owner] += costs[block.key]
        return owners

    def region(self, tensor: int, member: int) -> Region:
        """The region of a tensor that ``member`` has."""
        placed = self._tensors[tensor]
        key = (placed.split, placed.coordinates[member])
        if key not in self._regions:
            self._regions[key] = placed.split.region(placed.coordinates[member])
        return self._regions[key]

    def holders(self, block: Block) -> list[int]:
        """The members that have the whole block."""
        tensor = block.key.tensor
        placed = self._tensors[tensor]
        key = (placed.split, id(placed.coordinates), block.region)
        if key not in self._holders:
            self._holders[key] = [
                member
                for member in range(self.world)
                if self.region(tensor, member).intersection(block.region) == block.region
            ]
        return self._holders[key]

    def owned_in_rounds(self, size: Callable[[Block], int], limit: int | None) -> list[list[Sequence[Block]]]:
        """The blocks that each member owns in each round, whichever tensors are active.

        ``limit`` bounds the total ``size`` of an owner's blocks in one round, unless one block is larger.
        None: one round.
        """
        owned: list[list[Block]] = [[] for _ in range(self.world)]
        for blocks in self.blocks.values():
            for block in blocks:
                owned[self.owners[block.key]].append(block)
        for each in owned:  # large ones first, and alike ones together
            each.sort(key=lambda b: (-b.numel, b.shape, b.key))
        if limit is None:
            return [list(owned)]
        largest = max((sum(map(size, each)) for each in owned), default=0)
        limit = max(1, min(limit, -(-largest // MIN_ROUNDS)))
        parts = [[each[r.start : r.stop] for r in stretches([*map(size, each)], limit)] for each in owned]
        return [list(blocks) for blocks in zip_longest(*parts, fillvalue=())]

    def round(self, owned: Sequence[Sequence[Block]], active: Collection[int], own: int) -> Round:
        """What member ``own`` does in a round for the tensors ``active``."""
        owned = [[block for block in each if block.key.tensor in active] for each in owned]
        members = range(self.world)
        return Round(
            owned=tuple(owned[own]),
            sent_there=[self._pieces(owned[owner], owner, own) for owner in members],
            received_there=[self._pieces(owned[own], own, member) for member in members],
            sent_back=[self._pieces(owned[own], None, member) for member in members],
            received_back=[self._pieces(owned[owner], None, own) for owner in members],
            travels_there=any(b.numel and not self.holders(b) for blocks in owned for b in blocks),
            travels_back=any(
                b.numel and self.holders(b) != [self.owners[b.key]] for blocks in owned for b in blocks
            ),
        )

    def _pieces(self, blocks: Sequence[Block], owner: int | None, member: int) -> list[BlockPiece]:
        """The pieces of ``blocks`` that ``member`` has; with ``owner``, those that it sends there."""
        found = []
        for block in blocks:
            if owner is not None and not self._is_source(block.key.tensor, owner, member):
                continue
            local = self.region(block.key.tensor, member)
            both = local.intersection(block.region)
            if both.numel:
                index = both.within(local).slices
                found.append(BlockPiece(block, both.within(block.region).slices, index, both.sizes))
        return found

    def _is_source(self, tensor: int, owner: int, member: int) -> bool:
        """Whether ``member`` belongs to the copy of ``owner``: each copy serves its own owners."""
        placed = self._tensors[tensor]
        theirs, mine = placed.coordinates[owner], placed.coordinates[member]
        cut = placed.split.mesh_dims
        return all(dim in cut or a == b for dim, (a, b) in enumerate(zip(theirs, mine, strict=True)))
