"""Who owns which matrix, and what ranks send each other so that owners have them whole.

Arithmetic on shapes only: no tensors, no process groups. Ranks are counted as members of those that share
the tensors.

A matrix is a tensor of two dims, one of the matrices stacked in a tensor of three, or some rows of either,
where several matrices are fused into one. Four members, two matrices A and B of 8 rows, sharded by rows:

    member        0      1      2      3
    has           A01    A23    A45    A67     and the same of B
    owns          A      B      -      -

    there         1, 2, 3 send rows of A to 0;   0, 2, 3 send rows of B to 1
    back          0 sends each its rows of A;    1 sends each its rows of B

Owners are chosen for all matrices at once, the costliest first, each for the member with the least to do so
far (longest processing time first: Graham, "Bounds on multiprocessing timing anomalies", 1969). A matrix that
some members have whole is owned by one of them, so that it need not travel there: experts that are sharded by
the expert, replicated tensors. Where members hold copies of each other's parts (replicas), all may be owners;
an owner is sent the parts by its own copy, and sends the results to all.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import NamedTuple

from shardwise.layout.regions import Region, Split

MIN_ROUNDS = 4
"""In how many rounds matrices travel at least, so that most do beside computation."""

Cost = Callable[[int, int], float]
"""What a matrix of so many rows and columns costs its owner, in any unit."""


class MatrixKey(NamedTuple):
    """Which matrix: the index of its tensor, and its index among the matrices of that tensor."""

    tensor: int
    matrix: int


@dataclass(frozen=True)
class Placed:
    """How a full tensor lies on the members: ``coordinates[member]`` is where it is in the mesh."""

    split: Split
    coordinates: tuple[tuple[int, ...], ...]
    row_blocks: tuple[int, ...] | None = None
    """Rows of each of the matrices that are fused into one, along the last dim but one."""

    def matrices(self, tensor: int) -> "list[Matrix]":
        """The matrices in it, those of the first expert first."""
        *stacked, rows, columns = self.split.shape
        found: list[Matrix] = []
        for expert in range(prod(stacked)):
            before = (expert,) if stacked else ()
            start = 0
            for size in self.row_blocks or (rows,):
                region = Region((*before, start, 0), (*(1 for _ in before), size, columns))
                found.append(Matrix(MatrixKey(tensor, len(found)), region))
                start += size
        return found


@dataclass(frozen=True)
class Matrix:
    """A matrix, and where it lies in its full tensor."""

    key: MatrixKey
    region: Region

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        rows, columns = self.region.sizes[-2:]
        return rows, columns


class MatrixPiece(NamedTuple):
    """The part of a matrix that one member has: where it lies in the matrix, and in the member's shard."""

    matrix: Matrix
    in_matrix: tuple[slice, ...]
    in_local: tuple[int | slice, ...]
    shape: tuple[int, int]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.shape[0] * self.shape[1]


Pieces = list[list[MatrixPiece]]
"""Pieces by the other member."""


@dataclass(frozen=True)
class Round:
    """What one member does in one round. ``there`` and ``back`` are what it sends to each member and what it
    receives from each, itself included; both ends have the pieces in the same order."""

    owned: tuple[Matrix, ...]
    sent_there: Pieces
    received_there: Pieces
    sent_back: Pieces
    received_back: Pieces
    travels_there: bool
    travels_back: bool


class MatrixPlan:
    """Owners and rounds for tensors that the same members share.

    Args:
        tensors: by index. The same on all members.
        world: the number of members.
        cost: of a matrix of so many rows and columns.
    """

    def __init__(self, tensors: dict[int, Placed], world: int, cost: Cost) -> None:
        self._tensors = tensors
        self.world = world
        self._regions: dict[tuple[Split, tuple[int, ...]], Region] = {}
        self._holders: dict[tuple[Split, int, Region], list[int]] = {}
        self.matrices = {index: placed.matrices(index) for index, placed in tensors.items()}
        self.owners = self._choose_owners(cost)

    @cached_property
    def loads(self) -> dict[int, list[MatrixKey]]:
        """What each member owns."""
        owned: dict[int, list[MatrixKey]] = {member: [] for member in range(self.world)}
        for key, owner in self.owners.items():
            owned[owner].append(key)
        return owned

    def _choose_owners(self, cost: Cost) -> dict[MatrixKey, int]:
        everything = [matrix for matrices in self.matrices.values() for matrix in matrices]
        costs = {matrix.key: cost(*matrix.shape) for matrix in everything}
        loads = [0.0] * self.world
        owners: dict[MatrixKey, int] = {}
        # Matrices that may have few owners first among equals; then in the order of the tensors.
        order = sorted(everything, key=lambda m: (-costs[m.key], len(self.holders(m)) or self.world, m.key))
        for matrix in order:
            candidates = self.holders(matrix) or range(self.world)
            owner = min(candidates, key=lambda member: (loads[member], member))
            owners[matrix.key] = owner
            loads[owner] += costs[matrix.key]
        return owners

    def region(self, tensor: int, member: int) -> Region:
        """What ``member`` has of a tensor."""
        placed = self._tensors[tensor]
        key = (placed.split, placed.coordinates[member])
        found = self._regions.get(key)
        if found is None:
            found = self._regions[key] = placed.split.region(placed.coordinates[member])
        return found

    def holders(self, matrix: Matrix) -> list[int]:
        """The members that have all of it."""
        tensor = matrix.key.tensor
        placed = self._tensors[tensor]
        key = (placed.split, id(placed.coordinates), matrix.region)
        if key not in self._holders:
            self._holders[key] = [
                member
                for member in range(self.world)
                if self.region(tensor, member).intersection(matrix.region) == matrix.region
            ]
        return self._holders[key]

    # --- rounds -----------------------------------------------------------------------------------

    def rounds(self, active: Collection[int], own: int, limit: int) -> list[Round]:
        """What member ``own`` does for the tensors ``active``, in order.

        ``limit``: elements of matrices that an owner may have in one round, unless one matrix has more.
        """
        owned = self._owned(set(active))
        numels = [sum(prod(matrix.shape) for matrix in each) for each in owned]
        limit = max(1, min(limit, -(-max(numels, default=0) // MIN_ROUNDS)))
        parts = [_cut(each, limit) for each in owned]
        count = max(map(len, parts), default=0)
        return [self._round([p[i] if i < len(p) else () for p in parts], own) for i in range(count)]

    def _owned(self, active: set[int]) -> list[list[Matrix]]:
        """By owner. Large ones first, and alike ones together."""
        owned: list[list[Matrix]] = [[] for _ in range(self.world)]
        for tensor in sorted(active):
            for matrix in self.matrices[tensor]:
                owned[self.owners[matrix.key]].append(matrix)
        for each in owned:
            each.sort(key=lambda m: (-prod(m.shape), m.shape, m.key))
        return owned

    def _round(self, owned: Sequence[Sequence[Matrix]], own: int) -> Round:
        members = range(self.world)
        travels_there = any(
            len(self.holders(matrix)) == 0 for matrices in owned for matrix in matrices if prod(matrix.shape)
        )
        return Round(
            owned=tuple(owned[own]),
            sent_there=[self._pieces(owned[owner], owner, own) for owner in members],
            received_there=[self._pieces(owned[own], own, member) for member in members],
            sent_back=[self._pieces(owned[own], None, member) for member in members],
            received_back=[self._pieces(owned[owner], None, own) for owner in members],
            travels_there=travels_there,
            travels_back=any(self._is_shared(matrix) for matrices in owned for matrix in matrices),
        )

    def _is_shared(self, matrix: Matrix) -> bool:
        """Whether any other member than the owner has some of it."""
        return self.holders(matrix) != [self.owners[matrix.key]] and bool(prod(matrix.shape))

    def _pieces(self, matrices: Sequence[Matrix], owner: int | None, member: int) -> list[MatrixPiece]:
        """What ``member`` has of ``matrices``; with ``owner``, what it sends there."""
        found = []
        for matrix in matrices:
            if owner is not None and not self._is_source(matrix.key.tensor, owner, member):
                continue
            local = self.region(matrix.key.tensor, member)
            both = local.intersection(matrix.region)
            if both.numel:
                found.append(_piece(matrix, both, local))
        return found

    def _is_source(self, tensor: int, owner: int, member: int) -> bool:
        """Whether ``member`` is of the same copy as ``owner``: each copy serves its own owners."""
        placed = self._tensors[tensor]
        theirs, mine = placed.coordinates[owner], placed.coordinates[member]
        cut = placed.split.mesh_dims
        return all(dim in cut or a == b for dim, (a, b) in enumerate(zip(theirs, mine, strict=True)))


def _piece(matrix: Matrix, both: Region, local: Region) -> MatrixPiece:
    of_local = both.within(local)
    index: tuple[int | slice, ...] = of_local.slices
    if len(index) == 3:  # the matrices of a stack one by one
        index = (of_local.offsets[0], *of_local.slices[1:])
    rows, columns = both.sizes[-2:]
    return MatrixPiece(matrix, both.within(matrix.region).slices[-2:], index, (rows, columns))


def _cut(matrices: Sequence[Matrix], limit: int) -> list[Sequence[Matrix]]:
    """Stretches of at most ``limit`` elements, or of one matrix."""
    parts: list[Sequence[Matrix]] = []
    start = numel = 0
    for index, matrix in enumerate(matrices):
        size = prod(matrix.shape)
        if index > start and numel + size > limit:
            parts.append(matrices[start:index])
            start, numel = index, 0
        numel += size
    if start < len(matrices):
        parts.append(matrices[start:])
    return parts
