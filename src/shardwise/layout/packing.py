"""Which parameters of a bucket have a collective of their own ("direct"), and which share one ("packed").

Arithmetic on sizes only. A direct parameter is spared the copies through a packed buffer, and the memory of
that buffer. It costs one more collective, whose latency grows with the number of ranks, while what each rank
sends of a parameter shrinks. So what counts is the chunk, the part of one rank. By the limit of a back end of
256 KiB:

    unsharded        chunk at 8 ranks    at 64       at 512
    2 MiB            256 KiB  direct     packed      packed
    24 MiB           direct              direct      48 KiB   packed: below a quarter of the limit
    64 MiB           direct              direct      128 KiB  direct, for it is large: see below
"""

from collections.abc import Sequence

LARGEST_PACKED_BYTES = 16 << 20
"""An unsharded parameter above this size would cost much memory if it were packed."""

_SMALLEST_OF_LIMIT = 4
"""Chunks of such parameters may be smaller than the limit by up to this factor."""


def choose_direct(
    chunk_bytes: Sequence[int], world: int, limit_bytes: float, max_direct: float
) -> list[bool]:
    """For each parameter, whether it is direct, by the bytes of its chunk.

    ``limit_bytes``: chunks from this size on are worth a collective of their own. ``max_direct``: at most
    so many are direct, the largest first; a bucket of many experts would issue hundreds of collectives at
    once.
    """
    smallest = limit_bytes / _SMALLEST_OF_LIMIT
    direct = [
        index
        for index, size in enumerate(chunk_bytes)
        if size >= limit_bytes or (size >= smallest and size * world > LARGEST_PACKED_BYTES)
    ]
    if len(direct) > max_direct:
        direct = sorted(direct, key=lambda index: -chunk_bytes[index])[: int(max_direct)]
    chosen = set(direct)
    return [index in chosen for index in range(len(chunk_bytes))]
