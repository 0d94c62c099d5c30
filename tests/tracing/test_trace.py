"""What a trace of a real step records, on any number of ranks."""

import threading
from itertools import groupby
from typing import Any

import pytest
import torch
from harness import World
from meshed import device_mesh
from models import SquareTower, built, random_batch, shard_tower
from on_ranks import on_ranks
from reference import mean_of_squares
from simulated_device import streams_on_the_host
from strategies import shard_as
from tensor_subclasses import TravelsLow
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.optim.optimizer import _global_optimizer_pre_hooks
from torch.utils.checkpoint import checkpoint

import shardwise
from shardwise import CommPolicy, fully_shard, no_sync
from shardwise.engine.module_state import sharded_module_states
from shardwise.observe import memory_snapshot
from shardwise.tracing import timeline
from shardwise.tracing.recorder import TracedRoot, TracedStreams
from shardwise.tracing.records import Recording, Span, lanes

WIDTH, DEPTH = 64, 3
BLOCK_BYTES = 2 * WIDTH * WIDTH * 8  # two square matrices of float64
ROOT_BYTES = WIDTH * WIDTH * 8
BLOCKS = [f"blocks.{index}" for index in range(DEPTH)]


def made() -> Any:
    return built(SquareTower, WIDTH, DEPTH, seed=0)


def build(**options: Any) -> Any:
    return shard_tower(made(), **options)


def backward(model: nn.Module, index: int = 0) -> None:
    mean_of_squares(model, random_batch(index, 4, WIDTH)).backward()


def training(model: nn.Module, microbatches: int = 1) -> Any:
    """Runs a step of so many backwards, of which the last one reduces."""
    optimizer = torch.optim.AdamW(model.parameters())

    def step(index: int = 0) -> None:
        for _ in range(microbatches - 1):
            with no_sync(model):
                backward(model, index)
        backward(model, index)
        optimizer.step()
        optimizer.zero_grad()

    return step


def traced(model: nn.Module, microbatches: int = 1) -> Recording:
    """A step like all later ones: the order of groups is known."""
    step = training(model, microbatches)
    step()
    with shardwise.trace(model) as trace:
        step()
    return trace.recording


def recorded(**options: Any) -> Recording:
    return traced(build(**options))


def assert_disjoint(spans: list[Span]) -> None:
    assert len(lanes(spans)) <= 1


def assert_is_a_step(recording: Recording) -> None:
    """What holds for every step, however long anything takes."""
    assert all(0 <= span.start_ns <= span.end_ns <= recording.end_ns for span in recording.spans)
    computed = recording.of_row("computation")
    assert_disjoint([span for span in recording.spans if span.row in ("computation", "optimizer")])
    assert (
        list(dict.fromkeys(s.name for s in computed if s.phase == "forward" and s.name in BLOCKS)) == BLOCKS
    )
    assert (
        list(dict.fromkeys(s.name for s in computed if s.phase == "backward" and s.name in BLOCKS))
        == BLOCKS[::-1]
    )
    (optimizer,) = recording.of_row("optimizer")
    assert optimizer.name == "AdamW"
    assert max(span.end_ns for span in computed) <= optimizer.start_ns < optimizer.end_ns < recording.end_ns


def assert_waits_lie_in_transfers(recording: Recording) -> None:
    """On the host a wait is over when its transfer is; what comes after it in the same call is a copy."""
    for wait in recording.waits():
        sent = [s for s in recording.of_row(wait.awaits or "") if s.name == wait.name]
        assert any(s.start_ns <= wait.start_ns and wait.end_ns <= s.end_ns for s in sent), wait


@pytest.mark.parametrize("world", [2, 4])
def test_bytes_counts_and_order_are_those_of_the_step(world: int, world2: World, world4: World) -> None:
    for rank, recording in enumerate((world2 if world == 2 else world4).run(recorded)):
        assert recording.rank == rank
        assert_is_a_step(recording)
        assert_waits_lie_in_transfers(recording)
        sent = dict.fromkeys(BLOCKS, BLOCK_BYTES * (world - 1) // world)
        sent["SquareTower"] = ROOT_BYTES * (world - 1) // world
        gathers, reductions = recording.of_row("all-gather"), recording.of_row("reduce-scatter")
        assert {s.num_bytes == sent[s.name] for s in gathers} == {True}
        # The last block stays unsharded for backward, as the root does.
        order = ["SquareTower", *BLOCKS, *BLOCKS[-2::-1]]
        assert [s.name for s in gathers] == order
        assert [s.phase for s in gathers] == ["forward"] * 4 + ["backward"] * 2
        assert {name: sum(s.num_bytes for s in reductions if s.name == name) for name in sent} == sent
        assert {group.name: group.unshards for group in recording.groups} == {
            name: order.count(name) for name in sent
        }
        assert {group.name: group.reductions for group in recording.groups} == dict.fromkeys(sent, 1)
        assert not recording.of_row("all-reduce")


def test_a_rank_that_is_alone_sends_nothing(world1: World) -> None:
    (recording,) = world1.run(recorded)
    assert_is_a_step(recording)
    assert {span.row for span in recording.spans} <= {"computation", "copies", "optimizer"}
    assert {(group.unshards, group.reductions) for group in recording.groups} == {(0, 0)}


def held() -> tuple[Recording, int, int]:
    model = build()
    step = training(model)
    step()
    before = memory_snapshot(model).total_bytes
    with shardwise.trace(model) as trace:
        step()
    return trace.recording, before, memory_snapshot(model).total_bytes


def test_memory_is_that_of_the_snapshots(world2: World) -> None:
    for recording, before, after in world2.run(held):
        samples = recording.memory
        assert samples[0].total == before
        assert samples[-1].total == after
        assert {sample.shards for sample in samples} == {(DEPTH * BLOCK_BYTES + ROOT_BYTES) // 2}
        # The root, the block that computes and the one that is unsharded ahead.
        assert max(sample.unsharded for sample in samples) == ROOT_BYTES + 2 * BLOCK_BYTES
        assert max(sample.reduced_gradients for sample in samples) == (DEPTH * BLOCK_BYTES + ROOT_BYTES) // 2
        assert BLOCK_BYTES <= max(sample.full_gradients for sample in samples) <= ROOT_BYTES + 2 * BLOCK_BYTES
        assert [sample.at_ns for sample in samples] == sorted(sample.at_ns for sample in samples)


class Checkpointed(SquareTower):
    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.outlet(x)


@on_ranks(2)
def test_a_recomputation_is_told_from_the_backward_around_it() -> None:
    model = built(Checkpointed, WIDTH, DEPTH, seed=0)
    shard_tower(model)
    backward(model)
    with shardwise.trace(model) as trace:
        backward(model)
    computed = trace.recording.of_row("computation")
    again = [s.name for s in computed if s.phase == "recomputation"]
    assert list(dict.fromkeys(again)) == BLOCKS[::-1]
    assert_disjoint(computed)
    for name in BLOCKS:
        (*_, last) = [s for s in computed if s.name == name]
        assert last.phase == "backward"


@on_ranks(2)
def test_a_trace_changes_no_value_and_leaves_no_thread() -> None:
    found = []
    for traces in (True, False):
        model = build(comm_policy=CommPolicy(prefetch=2))
        step = training(model)
        for index in range(3):
            if traces:
                with shardwise.trace(model):
                    step(index)
            else:
                step(index)
        found.append([param.full_tensor().detach() for param in model.parameters()])
    threads = [thread.name for thread in threading.enumerate()]
    assert all(map(torch.equal, found[0], found[1]))
    assert not [name for name in threads if "trace" in name]


def state_of(model: nn.Module) -> list[object]:
    module_states = sharded_module_states(model)
    root = module_states[0].root
    return [
        root.observer,
        root.find(TracedRoot),
        len(_global_optimizer_pre_hooks),
        *(
            isinstance(getattr(module_state.group, "streams", None), TracedStreams)
            for module_state in module_states
        ),
    ]


@on_ranks(2)
def test_an_exception_ends_the_trace_and_leaves_the_model_as_it_was() -> None:
    model = build()
    step = training(model)
    step()
    block = model.blocks[1]
    handle = block.register_forward_pre_hook(lambda *_: 1 // 0)
    with pytest.raises(ZeroDivisionError), shardwise.trace(model) as trace:
        step()
    handle.remove()
    left = state_of(model)
    with pytest.raises(RuntimeError) as caught:
        trace.save("never.html")
    step()
    with shardwise.trace(model) as trace:
        step()
    assert_is_a_step(trace.recording)
    message = str(caught.value)
    assert left == [None, None, 1, False, False, False, False], "one hook is the library's own"
    assert "has recorded nothing yet: its block still runs, or has raised" in message
    assert state_of(model) == left


@on_ranks(2)
def test_a_second_trace_of_the_same_model_is_refused() -> None:
    model = build()
    with shardwise.trace(model), pytest.raises(RuntimeError) as caught, shardwise.trace(model.blocks[0]):
        pass
    backward(model)
    assert str(caught.value).startswith("trace: a trace of this model is running")


@on_ranks(2)
def test_explain_shows_what_the_last_trace_saw() -> None:
    model = build()
    before = shardwise.explain(model)
    step = training(model)
    step()
    with shardwise.trace(model):
        step()
    after = shardwise.explain(model)
    assert after.startswith(before)
    title, head, _, *lines = after.removeprefix(before).strip().splitlines()
    assert title == "the last trace, on this rank"
    assert head.split()[:5] == ["group", "unsharded", "reduced", "MB", "sent"]
    assert head.split()[5:] == ["ms", "transfers", "ms", "waited", "uncovered", "ms", "computed"]
    cells = [line.split()[:4] for line in lines]
    # Half of a block travels for each all-gather and for the reduction; the last is all-gathered once.
    block, root = BLOCK_BYTES / 2e6, ROOT_BYTES / 2e6
    assert cells == [
        ["SquareTower", "1", "1", f"{2 * root:.4f}"],
        ["blocks.0", "2", "1", f"{3 * block:.4f}"],
        ["blocks.1", "2", "1", f"{3 * block:.4f}"],
        ["blocks.2", "1", "1", f"{2 * block:.4f}"],
    ]


def of_one_rank() -> int:
    model = build()
    backward(model)
    if torch.distributed.get_rank() == 0:
        with shardwise.trace(model.blocks[0], on_all_ranks=False) as trace:
            backward(model)
        assert {span.name for span in trace.recording.spans} == {"blocks.0"}
        assert not trace.recording.is_aligned
        return len(trace.recording.spans)
    backward(model)
    return 0


def test_one_rank_may_trace_one_block_alone(world2: World) -> None:
    first, second = world2.run(of_one_rank)
    assert first > 3
    assert second == 0


@on_ranks(2)
def test_models_beside_each_other_are_told_apart() -> None:
    """Two models of one class, each with a root of its own, in a module that is not sharded."""
    both = nn.ModuleList([build(), build()])
    with shardwise.trace(both) as trace:
        for model in both:
            backward(model)
    works = [(work.name, work.unshards) for work in trace.groups]
    roots = [
        span.name for span in trace.recording.of_row("all-gather") if span.name.startswith("SquareTower")
    ]
    names = ["SquareTower", *BLOCKS]
    assert [name for name, _ in works] == [*names, *(f"{name}'" for name in names)]
    assert [count for _, count in works[:4]] == [count for _, count in works[4:]] == [1, 2, 2, 1]
    assert roots == ["SquareTower", "SquareTower'"]


@on_ranks(2)
def test_on_a_device_times_are_those_of_events_on_its_streams() -> None:
    mesh = init_device_mesh("cpu", (2,))  # by default that of the accelerator, which there seems to be
    with streams_on_the_host(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(timeline, "has_streams", lambda _: True)
        recording = recorded(mesh=mesh)
    assert_is_a_step(recording)
    assert [s.name for s in recording.of_row("all-gather")] == ["SquareTower", *BLOCKS, *BLOCKS[-2::-1]]
    assert {s.num_bytes for s in recording.of_row("reduce-scatter") if s.name in BLOCKS} == {BLOCK_BYTES // 2}
    lags = [span.lag_ns for span in recording.of_row("computation")]
    assert sum(lag is not None and lag < 100_000 for lag in lags) > len(lags) / 2, lags


# --- what travels under each strategy ------------------------------------------------------------


def sent(recording: Recording) -> dict[str, list[tuple[str, str, int]]]:
    """For each row that has any: phase, name and bytes of what travelled; parts of a group are summed up."""
    found: dict[str, dict[tuple[str, str], int]] = {}
    for span in (span for span in recording.spans if span.num_bytes):
        of_row = found.setdefault(span.row, {})
        key = span.phase, span.name
        of_row[key] = of_row.get(key, 0) + span.num_bytes
    return {row: [(*key, num_bytes) for key, num_bytes in sums.items()] for row, sums in found.items()}


def in_forward(block: int, root: int) -> list[tuple[str, str, int]]:
    return [("forward", "SquareTower", root), *(("forward", name, block) for name in BLOCKS)]


def in_backward(block: int, root: int) -> list[tuple[str, str, int]]:
    return [("backward", "SquareTower", root), *(("backward", name, block) for name in reversed(BLOCKS))]


def in_both(block: int, root: int) -> list[tuple[str, str, int]]:
    """The last block and the root stay unsharded for backward."""
    return [*in_forward(block, root), *(("backward", name, block) for name in BLOCKS[-2::-1])]


def of_strategy(strategy: str, microbatches: int = 1) -> Recording:
    model = made()
    shard_as(model, strategy)
    return traced(model, microbatches)


# On two ranks half of everything travels; a sum over two costs each rank as many bytes as it has.
HALF = BLOCK_BYTES // 2, ROOT_BYTES // 2
ON_TWO = {
    "ddp": {"all-reduce": in_backward(BLOCK_BYTES, ROOT_BYTES)},
    "zero1": {"all-gather": in_forward(*HALF), "reduce-scatter": in_backward(*HALF)},
    "zero2": {"all-gather": in_forward(*HALF), "reduce-scatter": in_backward(*HALF)},
    "zero3": {"all-gather": in_both(*HALF), "reduce-scatter": in_backward(*HALF)},
}


@pytest.mark.parametrize("strategy", ON_TWO)
def test_a_strategy_sends_what_it_promises(world2: World, strategy: str) -> None:
    for recording in world2.run(of_strategy, strategy):
        assert sent(recording) == ON_TWO[strategy]


@pytest.mark.parametrize(("strategy", "gathers"), [("hybrid", in_both), ("hybrid_zero2", in_forward)])
def test_a_hybrid_strategy_sums_its_shards_over_replicas(world4: World, strategy: str, gathers: Any) -> None:
    for recording in world4.run(of_strategy, strategy):
        assert sent(recording) == {
            "all-gather": gathers(*HALF),
            "reduce-scatter": in_backward(*HALF),
            "all-reduce": in_backward(*HALF),
        }


@pytest.mark.parametrize(("strategy", "gathers"), [("zero1", 1), ("zero3", 3)])
def test_microbatches_without_synchronisation_reduce_once(world2: World, strategy: str, gathers: int) -> None:
    """And under zero1 they share an all-gather."""
    once = ON_TWO[strategy]
    for recording in world2.run(of_strategy, strategy, 3):
        assert sent(recording) == {
            "all-gather": [(*key, gathers * num_bytes) for *key, num_bytes in once["all-gather"]],
            "reduce-scatter": once["reduce-scatter"],
        }
        computed = (span.name for span in recording.of_row("computation") if span.phase == "forward")
        assert [name for name, _ in groupby(name for name in computed if name in BLOCKS)] == 3 * BLOCKS


# --- tensor parallelism ---------------------------------------------------------------------------


@on_ranks(4)
def test_of_a_block_that_tensor_parallelism_has_split_its_part_travels() -> None:
    half_of_part = BLOCK_BYTES // 4, ROOT_BYTES // 2
    mesh = device_mesh((2, 2), ("dp", "tp"))
    model = made()
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(block, mesh=mesh["dp"])
    recording = traced(fully_shard(model, mesh=mesh["dp"]))
    assert sent(recording) == {
        "all-gather": in_both(*half_of_part),
        "reduce-scatter": in_backward(*half_of_part),
    }
    assert {group.name: group.unsharded_bytes for group in recording.groups} == {
        "SquareTower": ROOT_BYTES,
        **dict.fromkeys(BLOCKS, BLOCK_BYTES // 2),
    }


# --- weights that say themselves what travels -----------------------------------------------------


@on_ranks(2)
def test_a_weight_that_travels_in_bfloat16_sends_a_quarter_of_its_bytes() -> None:
    part = (
        BLOCK_BYTES // 2 + BLOCK_BYTES // 2 // 4
    ) // 2  # one of its two matrices; its gradient travels as it is
    model = made()
    for block in model.blocks:
        block.up.weight = nn.Parameter(TravelsLow(block.up.weight.detach()))
        fully_shard(block)
    assert sent(traced(fully_shard(model))) == {
        "all-gather": in_both(part, ROOT_BYTES // 2),
        "reduce-scatter": in_backward(*HALF),
    }
