"""What a trace of a real step records, on any number of ranks."""

import threading
from typing import Any

import pytest
import torch
from dynamo import forget_graphs
from harness import World
from models import SquareBlock, built, random_batch, shard_tower
from on_ranks import on_ranks
from reference import mean_of_squares
from simulated_device import streams_on_the_host
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim.optimizer import _global_optimizer_pre_hooks
from torch.utils.checkpoint import checkpoint

import shardwise
from shardwise import CommPolicy
from shardwise.engine.module_state import sharded_module_states
from shardwise.observe import memory_snapshot
from shardwise.tracing import timeline
from shardwise.tracing.recorder import TracedRoot
from shardwise.tracing.records import Recording, Span, lanes
from shardwise.tracing.streams import TracedStreams

WIDTH, DEPTH = 64, 3
BLOCK_BYTES = 2 * WIDTH * WIDTH * 8  # two square matrices of float64
ROOT_BYTES = WIDTH * WIDTH * 8
BLOCKS = [f"blocks.{index}" for index in range(DEPTH)]


class Model(nn.Module):
    """Square matrices alone: every number of bytes is plain arithmetic, without padding."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(SquareBlock(WIDTH) for _ in range(DEPTH))
        self.outlet = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.outlet(x)


def build(mesh: Any = None, **options: Any) -> Any:
    model = built(Model, seed=0)
    return shard_tower(model, mesh=mesh, **options)


def backward(model: nn.Module, index: int = 0) -> None:
    mean_of_squares(model, random_batch(index, 4, WIDTH)).backward()


def training(model: nn.Module) -> Any:
    optimizer = torch.optim.AdamW(model.parameters())

    def step(index: int = 0) -> None:
        backward(model, index)
        optimizer.step()
        optimizer.zero_grad()

    return step


def recorded(**options: Any) -> Recording:
    """A step like all later ones: the order of groups is known."""
    model = build(**options)
    step = training(model)
    step()
    with shardwise.trace(model) as trace:
        step()
    return trace.recording


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
        sent["Model"] = ROOT_BYTES * (world - 1) // world
        gathers, reductions = recording.of_row("all-gather"), recording.of_row("reduce-scatter")
        assert {s.num_bytes == sent[s.name] for s in gathers} == {True}
        # The last block stays unsharded for backward, as the root does.
        order = ["Model", *BLOCKS, *BLOCKS[-2::-1]]
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


@on_ranks(4)
def test_shards_with_replicas_are_reduced_twice() -> None:
    recording = recorded(mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard")))
    assert_is_a_step(recording)
    assert_waits_lie_in_transfers(recording)
    sums = recording.of_row("all-reduce")
    # Each rank has half a block, and of that it sends and receives half, twice: to sum, and the sums.
    assert {s.name: s.num_bytes for s in sums} == dict.fromkeys(BLOCKS, BLOCK_BYTES // 2) | {
        "Model": ROOT_BYTES // 2
    }
    assert {s.num_bytes for s in recording.of_row("reduce-scatter") if s.name in BLOCKS} == {BLOCK_BYTES // 2}


@on_ranks(2)
def test_replicas_alone_only_all_reduce() -> None:
    recording = recorded(mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp_replicate", "dp_shard")))
    assert_is_a_step(recording)
    assert {s.name: s.num_bytes for s in recording.of_row("all-reduce")} == dict.fromkeys(
        BLOCKS, BLOCK_BYTES
    ) | {"Model": ROOT_BYTES}
    assert not recording.of_row("all-gather")
    assert not recording.of_row("reduce-scatter")


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


@on_ranks(2)
def test_a_microbatch_without_synchronisation_reduces_nothing() -> None:
    model = build()
    backward(model)
    found = []
    for is_last in (False, True):
        with shardwise.trace(model) as trace:
            model.set_requires_gradient_sync(is_last)
            backward(model)
        found.append(trace.recording)
    first, last = found
    assert {group.reductions for group in first.groups} == {0}
    assert not first.of_row("reduce-scatter")
    assert {group.reductions for group in last.groups} == {1}


class Checkpointed(Model):
    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.outlet(x)


@on_ranks(2)
def test_a_recomputation_is_told_from_the_backward_around_it() -> None:
    model = built(Checkpointed, seed=0)
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


def compiled() -> tuple[Recording, Recording]:
    forget_graphs()
    model = build()
    for block in model.blocks:
        block.compile(backend="aot_eager")
    step = training(model)
    step()
    with shardwise.trace(model) as trace:
        step()
    plain = recorded()
    return trace.recording, plain


@pytest.mark.slow
def test_compiled_blocks_are_seen_as_others(world2: World) -> None:
    for graphs, plain in world2.run(compiled):
        assert_is_a_step(graphs)
        assert [(s.name, s.num_bytes) for s in graphs.of_row("all-gather")] == [
            (s.name, s.num_bytes) for s in plain.of_row("all-gather")
        ]


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
        ["Model", "1", "1", f"{2 * root:.4f}"],
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
    roots = [span.name for span in trace.recording.of_row("all-gather") if span.name.startswith("Model")]
    names = ["Model", *BLOCKS]
    assert [name for name, _ in works] == [*names, *(f"{name}'" for name in names)]
    assert [count for _, count in works[:4]] == [count for _, count in works[4:]] == [1, 2, 2, 1]
    assert roots == ["Model", "Model'"]


@on_ranks(2)
def test_on_a_device_times_are_those_of_events_on_its_streams() -> None:
    mesh = init_device_mesh("cpu", (2,))  # by default that of the accelerator, which there seems to be
    with streams_on_the_host(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(timeline, "has_streams", lambda _: True)
        recording = recorded(mesh=mesh)
    assert_is_a_step(recording)
    assert [s.name for s in recording.of_row("all-gather")] == ["Model", *BLOCKS, *BLOCKS[-2::-1]]
    assert {s.num_bytes for s in recording.of_row("reduce-scatter") if s.name in BLOCKS} == {BLOCK_BYTES // 2}
    lags = [span.lag_ns for span in recording.of_row("computation")]
    assert sum(lag is not None and lag < 100_000 for lag in lags) > len(lags) / 2, lags


def test_what_is_not_sharded_is_refused() -> None:
    with pytest.raises(ValueError, match="trace: there is no sharded module in this Linear"):
        shardwise.trace(nn.Linear(2, 2)).__enter__()
    with pytest.raises(TypeError, match="trace: model is 3, an int"):
        shardwise.trace(3).__enter__()  # type: ignore[arg-type]
