"""Regions: which part of a full tensor each rank of a mesh holds.

Arithmetic on shapes only: no tensors, no process groups. A tensor is cut along one of its dims for one mesh
dimension after another, each time like ``torch.chunk``, so a part is always a region:

    shape (7, 4), mesh (2, 2), dim 0 cut for mesh dim 1, then for mesh dim 0

                        mesh dim 1 = 0      1
    mesh dim 0 = 0      rows 0-1            rows 4-5
                 1      rows 2-3            row  6
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, product
from math import prod

from shardwise.layout.chunks import chunk_range


@dataclass(frozen=True, slots=True)
class Region:
    """The elements [offset, offset + size) along each dim."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def all_of(cls, shape: Sequence[int] | None) -> "Region":
        """The whole of a tensor; None: of a scalar."""
        return cls((0,) * len(shape or ()), tuple(shape or ()))

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.sizes)

    @property
    def slices(self) -> tuple[slice, ...]:
        """The index of the region in the full tensor."""
        return tuple(slice(o, o + n) for o, n in zip(self.offsets, self.sizes, strict=True))

    def intersection(self, other: "Region") -> "Region":
        """The elements in both, at offsets in the full tensor; with numel 0 if there are none."""
        starts = tuple(map(max, self.offsets, other.offsets))
        mine, theirs = self._ends, other._ends
        sizes = tuple(max(0, min(a, b) - start) for a, b, start in zip(mine, theirs, starts, strict=True))
        return Region(starts, sizes)

    def within(self, outer: "Region") -> "Region":
        """The same elements, at offsets in ``outer``, which contains them."""
        return Region(
            tuple(o - start for o, start in zip(self.offsets, outer.offsets, strict=True)), self.sizes
        )

    @property
    def _ends(self) -> tuple[int, ...]:
        return tuple(o + n for o, n in zip(self.offsets, self.sizes, strict=True))

    def rows(self, start: int, end: int) -> "Region":
        """Its own rows [start, end), along dim 0."""
        start, end = min(start, self.sizes[0]), min(end, self.sizes[0])
        return Region((self.offsets[0] + start, *self.offsets[1:]), (end - start, *self.sizes[1:]))

    def overlap(self, start: int, end: int) -> tuple[slice, slice]:
        """The overlap of rows [start, end) of the full tensor with the region: in those rows, and in it."""
        own = self.offsets[0]
        first = max(start, own)
        last = max(first, min(end, own + self.sizes[0]))
        return slice(first - start, last - start), slice(first - own, last - own)


@dataclass(frozen=True, slots=True)
class Cut:
    """One cut: dim ``dim`` of the tensor among the ranks along ``mesh_dim``."""

    mesh_dim: int
    dim: int


@dataclass(frozen=True)
class Split:
    """A full tensor of ``shape`` over a mesh of ``sizes``; ``cuts`` in the order in which they were made."""

    shape: tuple[int, ...]
    sizes: tuple[int, ...]
    cuts: tuple[Cut, ...]

    @cached_property
    def mesh_dims(self) -> tuple[int, ...]:
        """The mesh dims along which ranks hold different parts."""
        return tuple(sorted(cut.mesh_dim for cut in self.cuts))

    def region(self, coordinate: Sequence[int]) -> Region:
        """The region of the rank at ``coordinate``; may be empty if there are more ranks than rows."""
        offsets, sizes = [0] * len(self.shape), list(self.shape)
        for cut in self.cuts:
            start, end = chunk_range(sizes[cut.dim], self.sizes[cut.mesh_dim], coordinate[cut.mesh_dim])
            offsets[cut.dim] += start
            sizes[cut.dim] = end - start
        return Region(tuple(offsets), tuple(sizes))

    @cached_property
    def largest(self) -> tuple[int, ...]:
        """The sizes of the largest part, which is that of the first rank."""
        return self.region([0] * len(self.sizes)).sizes

    @cached_property
    def numel(self) -> int:
        """Elements of the full tensor."""
        return prod(self.shape)

    @cached_property
    def num_parts(self) -> int:
        """The number of different parts."""
        return prod(self.sizes[dim] for dim in self.mesh_dims)

    @cached_property
    def is_even(self) -> bool:
        """True if all parts have the same size."""
        return prod(self.largest) * self.num_parts == self.numel

    @cached_property
    def is_concatenation(self) -> bool:
        """True if the full tensor is the concatenation of its parts, with those of the last cut adjacent."""
        return self.is_even and all(prod(self.shape[: cut.dim]) == 1 for cut in self.cuts)

    def coordinates(self) -> list[tuple[int, ...]]:
        """A rank for each part, in order: the first along mesh dims that hold copies."""
        along = [range(n) if dim in self.mesh_dims else range(1) for dim, n in enumerate(self.sizes)]
        return list(product(*along))


def cuts_in_order(shards: Sequence[tuple[int, int, int]], sizes: Sequence[int]) -> tuple[Cut, ...]:
    """The cuts of placements, in the order in which they were made.

    ``shards``: (mesh dim, tensor dim, split factor) of each sharding placement, by mesh dim. Cuts were made
    from the first mesh dim to the last. But a cut with a split factor above 1 came after those cuts of later
    mesh dims, on the same tensor dim, that make this number of parts.
    """
    made: list[Cut] = []
    for mesh_dim, dim, factor in reversed(shards):
        position, parts = 0, 1
        while parts < factor and position < len(made):
            if made[position].dim == dim:
                parts *= sizes[made[position].mesh_dim]
            position += 1
        made.insert(position, Cut(mesh_dim, dim))
    return tuple(made)


# --- coverage -------------------------------------------------------------------------------------


def why_not_covered(size: Sequence[int], chunks: Sequence[Region]) -> str | None:
    """Why `chunks` do not make up a tensor of `size`; None if they do.

    size (7, 4)     chunks at rows 0, 3 and 5     of 3, 2 and 2 rows     covered
                                   0, 3 and 4        3, 2 and 2          rows 4 twice, row 6 never
    """
    for chunk in chunks:
        if not len(chunk.offsets) == len(chunk.sizes) == len(size) or any(
            o < 0 or n < 0 or o + n > whole
            for o, n, whole in zip(chunk.offsets, chunk.sizes, size, strict=True)
        ):
            return f"a chunk of {chunk.sizes} at {chunk.offsets} is not inside of {tuple(size)}"
    chunks = [chunk for chunk in chunks if chunk.numel]
    if (pair := _overlap(chunks)) is not None:
        one, other = pair
        return f"chunks of {one.sizes} at {one.offsets} and of {other.sizes} at {other.offsets} overlap"
    there, all_of_it = sum(chunk.numel for chunk in chunks), prod(size)
    if there != all_of_it:
        return f"its chunks have {there} of {all_of_it} elements"
    return None


def _overlap(chunks: Sequence[Region]) -> tuple[Region, Region] | None:
    """Two chunks with common elements. Takes about n log n steps for grids."""
    if len(chunks) < 2:
        return None
    for dim in range(len(chunks[0].sizes)):
        slabs = _slabs(chunks, dim)
        if len(slabs) > 1:
            return next((found for slab in slabs if (found := _overlap(slab)) is not None), None)
    return next(
        ((one, other) for one, other in combinations(chunks, 2) if one.intersection(other).numel), None
    )


def _slabs(chunks: Sequence[Region], dim: int) -> list[list[Region]]:
    """`chunks` in groups whose extents along `dim` do not overlap."""
    slabs: list[list[Region]] = []
    end = -1
    for chunk in sorted(chunks, key=lambda each: each.offsets[dim]):
        if chunk.offsets[dim] >= end:
            slabs.append([])
        slabs[-1].append(chunk)
        end = max(end, chunk.offsets[dim] + chunk.sizes[dim])
    return slabs
