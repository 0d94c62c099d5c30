"""What advice says of recordings that are written by hand, and of a rank that really computes for longer."""

import re
from contextlib import closing
from dataclasses import replace

import pytest
import torch
from expecttest import assert_expected_inline
from harness import World
from models import SquareBlock, built, random_batch, shard_tower
from recordings import compared, recording, span, wait
from reference import mean_of_squares
from torch import Tensor, nn

import shardwise
from shardwise.tracing.analysis import advice
from shardwise.tracing.records import Recording


def steps(**ms_of_b: float) -> list[Recording]:
    """Ranks that compute a and then b in forward; b for as long as is said, for rank r0, r1, ..."""
    latest = max(ms_of_b.values())
    found = []
    for rank, own in enumerate(ms_of_b.values()):
        spans = [
            span("computation", "a", 0, 10),
            span("computation", "b", 10, 10 + own),
            span("all-gather", "c", 10 + own, 12 + latest, num_bytes=1_500_000),
            wait("all-gather", "c", 10 + own, 12 + latest),
            span("computation", "c", 12 + latest, 100),
        ]
        found.append(recording(spans, rank=rank))
    return found


def all_advice(recordings: list[Recording]) -> str:
    return "\n".join(sentence for each in compared(recordings) for sentence in advice(each))


# --- the slowest rank -----------------------------------------------------------------------------


def test_the_slowest_rank_is_named_on_all_ranks_with_the_module() -> None:
    assert_expected_inline(
        all_advice(steps(r0=20, r1=60)),
        """\
Rank 1 is the slowest: rank 0 waits 40.0 of 100.0 ms for it. It takes 60.0 ms for b in forward, where others take 20.0 ms: look for larger samples there, or work that other ranks do not have.
Rank 1 is the slowest: rank 0 waits 40.0 of 100.0 ms for it. It takes 60.0 ms for b in forward, where others take 20.0 ms: look for larger samples there, or work that other ranks do not have.""",
    )


def test_what_was_waited_for_the_late_rank_is_told_from_the_transfer() -> None:
    first, second, third = compared(steps(r0=20, r1=60, r2=50))
    assert [(w.late_rank, w.late_ns, w.uncovered_ns) for w in first.waits()] == [(1, 40_000_000, 2_000_000)]
    assert [(w.late_rank, w.late_ns) for w in second.waits()] == [(None, 0)]
    assert [(w.late_rank, w.late_ns) for w in third.waits()] == [(1, 10_000_000)]


def test_a_transfer_that_is_queued_behind_another_is_late_from_its_own_turn_on() -> None:
    first, second = (
        [span("all-gather", "a", at, 50, num_bytes=1), wait("all-gather", "a", 0, 50)] for at in (30, 40)
    )
    found, _ = compared([recording(first), recording(second, rank=1)])
    assert [(w.late_rank, w.late_ns) for w in found.waits()] == [(1, 10_000_000)]


def test_only_ranks_that_share_a_transfer_are_waited_for() -> None:
    recordings = steps(r0=20, r1=21, r2=60, r3=60)
    first, *_ = compared(recordings, lambda rank, _: (0, 1) if rank < 2 else (2, 3))
    assert [(w.late_rank, w.late_ns) for w in first.waits()] == [(1, 1_000_000)]


def test_nobody_is_named_where_ranks_take_turns_or_the_wait_is_short() -> None:
    assert "slowest" not in all_advice(steps(r0=20, r1=24)), "4 of 100 ms"
    again: list[Recording] = []
    for rank, (first, second) in enumerate([(20, 50), (50, 20)]):
        spans = [
            span("computation", "a", 0, first),
            span("all-gather", "b", first, 52, num_bytes=1),
            wait("all-gather", "b", first, 52),
            span("computation", "b", 52, 52 + second),
            span("all-gather", "c", 52 + second, 104, num_bytes=1),
            wait("all-gather", "c", 52 + second, 104),
        ]
        again.append(recording(spans, rank=rank))
    one, two = compared(again)
    assert [w.late_rank for w in one.waits()] == [1, None]
    assert [w.late_rank for w in two.waits()] == [None, 0]
    assert one.straggler is two.straggler is None


def test_a_rank_that_is_late_outside_of_the_modules_is_told_so() -> None:
    late = [
        replace(each, spans=tuple(s for s in each.spans if s.name != "b")) for each in steps(r0=20, r1=60)
    ]
    spans = [*late[0].spans, span("computation", "b", 10, 30)]
    assert_expected_inline(
        all_advice([recording(spans), late[1]]),
        """\
Rank 1 is the slowest: rank 0 waits 40.0 of 100.0 ms for it. It takes 60.0 ms outside of the sharded modules, where others take 0.0 ms: look at what it loads, logs or saves there.
Rank 1 is the slowest: rank 0 waits 40.0 of 100.0 ms for it. It takes 60.0 ms outside of the sharded modules, where others take 0.0 ms: look at what it loads, logs or saves there.""",
    )


def test_a_rank_that_is_slower_everywhere_is_told_so() -> None:
    found = []
    for rank, own in enumerate([4, 8]):
        spans = [span("computation", name, own * i, own * (i + 1)) for i, name in enumerate("abcdefgh")]
        spans += [span("all-gather", "i", 8 * own, 65, num_bytes=1), wait("all-gather", "i", 8 * own, 65)]
        found.append(recording(spans, rank=rank))
    assert_expected_inline(
        "\n".join(advice(compared(found)[0])),
        """Rank 1 is the slowest: rank 0 waits 32.0 of 65.0 ms for it. It is slower in many places. It takes 8.0 ms for a in forward, where others take 4.0 ms: compare its device, and what else runs on its host.""",
    )


def test_the_rank_that_others_wait_for_is_not_one_that_waits_itself() -> None:
    """0 and 1 share transfers of b, 1 and 2 of c: 1 is late for 0, since it waits for 2."""
    spans = [
        [span("all-gather", "b", 0, 52, num_bytes=1), wait("all-gather", "b", 0, 52)],
        [
            *(span("all-gather", "c", 0, 50, num_bytes=1), wait("all-gather", "c", 0, 50)),
            *(span("all-gather", "b", 50, 52, num_bytes=1), wait("all-gather", "b", 50, 52)),
        ],
        [span("computation", "a", 0, 49), span("all-gather", "c", 49, 50, num_bytes=1)],
    ]
    recordings = [recording(own, rank=rank) for rank, own in enumerate(spans)]
    straggler = compared(recordings, lambda _, name: {"b": (0, 1), "c": (1, 2)}.get(name, ()))[0].straggler
    assert straggler is not None
    assert (straggler.rank, straggler.waiter, straggler.waited_ns) == (2, 1, 49_000_000)


# --- the host, communication ----------------------------------------------------------------------


def on_device(*lags: float) -> Recording:
    computed = [
        replace(span("computation", name, 10 * i, 10 * (i + 1)), lag_ns=round(lag * 1e6))
        for i, (name, lag) in enumerate(zip("abc", lags, strict=True))
    ]
    return replace(recording(computed), device="cuda")


def test_a_device_that_has_caught_up_with_the_host_is_limited_by_it() -> None:
    assert_expected_inline(
        "\n".join(advice(on_device(0.01, 0.02, 5.0))),
        """The host is the limit: for 20.0 of 30.0 ms of computation, longest in a (10.0 ms), the device had nothing queued. Compile the blocks, or give each rank more samples; the trace itself takes time of the host.""",
    )
    assert advice(on_device(0.01, 4.0, 5.0)) == [], "10 of 30 ms"
    assert advice(recording([span("computation", "a", 0, 30)])) == [], "there is no device"


def test_communication_that_nothing_covers_is_named_with_its_group() -> None:
    spans = [
        span("computation", "a", 0, 40),
        span("computation", "c", 40, 60, "backward"),
        span("reduce-scatter", "c", 60, 75, "backward", num_bytes=1),
        wait("reduce-scatter", "c", 60, 75, "backward"),
        span("reduce-scatter", "a", 75, 80, "backward", num_bytes=1),
        wait("reduce-scatter", "a", 75, 80, "backward"),
    ]
    assert_expected_inline(
        "\n".join(advice(recording(spans))),
        """No computation covers 20.0 ms of communication, 25% of the time; most is the reduce-scatter of c in backward, 15.0 ms. Give each rank more samples, send fewer bytes (an mp_policy in bfloat16), or shard smaller modules, so that one computes while another travels.""",
    )
    assert advice(recording(spans, is_aligned=False)) == [], "a rank may have been late"
    assert advice(recording([*spans, span("optimizer", "AdamW", 80, 500, "")])) == [], "20 of 500 ms"


# --- ranks that really differ ---------------------------------------------------------------------

WIDTH = 64


class Uneven(nn.Module):
    def __init__(self, more: int) -> None:
        super().__init__()
        self.more = more
        self.inner = SquareBlock(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        other = torch.eye(256)
        for _ in range(self.more):
            other = other @ other
        return self.inner(x)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        slow = 300 if torch.distributed.get_rank() == 1 else 0
        self.blocks = nn.ModuleList(Uneven(slow if index == 1 else 0) for index in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def of_an_uneven_model() -> tuple[list[str], Recording]:
    model = built(Model, seed=0)
    shard_tower(model)
    for _ in range(2):
        mean_of_squares(model, random_batch(0, 4, WIDTH)).backward()
    with shardwise.trace(model) as trace:
        mean_of_squares(model, random_batch(0, 4, WIDTH)).backward()
    return trace.advice, trace.recording


def test_a_rank_that_computes_more_is_named_with_its_module(world2: World) -> None:
    told = world2.run(of_an_uneven_model)
    for said, found in told:
        assert found.straggler is not None
        assert (found.straggler.rank, found.straggler.waiter) == (1, 0)
        assert found.straggler.place == "blocks.1 in forward"
        assert found.straggler.ns > 2 * found.straggler.usual_ns
        assert re.match(
            r"Rank 1 is the slowest: rank 0 waits .* It takes .* for blocks.1 in forward", said[0]
        )
    (_, fast), (_, slow) = told
    late = [sum(wait.late_ns for wait in found.waits()) for found in (fast, slow)]
    assert late[0] > fast.end_ns / 2
    assert late[1] < slow.end_ns / 4


def fail_on_rank_1() -> None:
    if torch.distributed.get_rank() == 1:
        raise ValueError("no data")


def fails_in_the_block() -> str:
    model = built(Model, seed=0)
    shard_tower(model)
    with pytest.raises((ValueError, RuntimeError)) as caught, shardwise.trace(model):
        fail_on_rank_1()
    return str(caught.value)


def test_a_block_that_raises_on_one_rank_is_told_to_the_others() -> None:
    with closing(World(2)) as world:  # whose process group is of no use afterwards
        first, second = world.run(fails_in_the_block)
    assert second == "no data"
    assert "trace failed, because rank 1 has failed in the block of trace: ValueError: no data" in first
