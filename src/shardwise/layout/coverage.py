"""Coverage: do the chunks of a saved tensor make up all of it, without gaps and overlaps? Regions only.

size (7, 4)     chunks at rows 0, 3 and 5     of 3, 2 and 2 rows     covered
                               0, 3 and 4        3, 2 and 2          rows 4 twice, row 6 never
"""

from collections.abc import Sequence
from itertools import combinations
from math import prod

from shardwise.layout.regions import Region


def why_not_covered(size: Sequence[int], chunks: Sequence[Region]) -> str | None:
    """What is wrong with `chunks` as the parts of a tensor of `size`; None: they are all of it."""
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
    """Two chunks that have elements in common. For grids in about n log n steps."""
    if len(chunks) < 2:
        return None
    for dim in range(len(chunks[0].sizes)):
        slabs = _slabs(chunks, dim)
        if len(slabs) > 1:
            return next((found for slab in slabs if (found := _overlap(slab)) is not None), None)
    return next((pair for pair in combinations(chunks, 2) if _meet(*pair)), None)


def _slabs(chunks: Sequence[Region], dim: int) -> list[list[Region]]:
    """`chunks` in groups whose extents along `dim` do not meet."""
    slabs: list[list[Region]] = []
    end = -1
    for chunk in sorted(chunks, key=lambda each: each.offsets[dim]):
        if chunk.offsets[dim] >= end:
            slabs.append([])
        slabs[-1].append(chunk)
        end = max(end, chunk.offsets[dim] + chunk.sizes[dim])
    return slabs


def _meet(one: Region, other: Region) -> bool:
    return all(
        a < b + m and b < a + n
        for a, n, b, m in zip(one.offsets, one.sizes, other.offsets, other.sizes, strict=True)
    )
