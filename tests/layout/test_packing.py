"""packing.py: which parameters have a collective of their own, at any world size."""

import pytest
from expecttest import assert_expected_inline

from shardwise.layout.slots import choose_direct

LIMIT, KIB, MIB = 256 << 10, 1 << 10, 1 << 20
# A block of a model of 7 billion parameters, in bfloat16: attention, feed-forward, norm.
BLOCK = {"attention": 4096 * 4096 * 2, "feed-forward": 4096 * 11008 * 2, "norm": 4096 * 2}


def choice_at(world: int) -> str:
    chunks = [size // world for size in BLOCK.values()]
    direct = choose_direct(chunks, world, LIMIT, 64)
    rows = zip(BLOCK, direct, chunks, strict=True)
    words = [f"{name} {'direct' if own else 'packed'} ({chunk / KIB:g} KiB)" for name, own, chunk in rows]
    return f"{world} ranks: {', '.join(words)}"


def test_what_one_rank_sends_of_a_parameter_decides() -> None:
    assert_expected_inline(
        "\n".join(map(choice_at, (8, 64, 512, 1024))),
        """\
8 ranks: attention direct (4096 KiB), feed-forward direct (11008 KiB), norm packed (1 KiB)
64 ranks: attention direct (512 KiB), feed-forward direct (1376 KiB), norm packed (0.125 KiB)
512 ranks: attention direct (64 KiB), feed-forward direct (172 KiB), norm packed (0.015625 KiB)
1024 ranks: attention packed (32 KiB), feed-forward direct (86 KiB), norm packed (0.0078125 KiB)""",
    )


@pytest.mark.parametrize("world", [1, 8, 64, 512, 4096])
def test_no_rank_sends_less_than_a_quarter_of_the_limit_in_a_collective_of_its_own(world: int) -> None:
    sizes = [size for power in range(30) for size in (1 << power, 3 << power)]
    chunks = [-(-size // world) for size in sizes]
    direct = choose_direct(chunks, world, LIMIT, 1000)
    assert min(chunk for chunk, own in zip(chunks, direct, strict=True) if own) >= LIMIT // 4


def test_of_too_many_the_largest_are_direct() -> None:
    experts = [2 * MIB] * 6 + [4 * MIB] * 3
    assert choose_direct(experts, 8, LIMIT, 5) == [True] * 2 + [False] * 4 + [True] * 3
    assert choose_direct(experts, 8, LIMIT, 8) == [True] * 5 + [False] + [True] * 3
    assert choose_direct(experts, 8, LIMIT, 9) == [True] * 9


def test_a_chunk_of_the_limit_is_direct() -> None:
    assert choose_direct([LIMIT, LIMIT - 1], 8, LIMIT, 64) == [True, False]
