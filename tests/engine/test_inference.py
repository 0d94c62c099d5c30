"""inference: full parameters stay unsharded while a model only runs forward, as many as fit in a budget.

Outputs are those of plain PyTorch in float64 to 1e-10; what travels and what is held is weighed
(strategies.py). Ranks may run different numbers of forwards: whoever is done serves the others.
"""

from collections.abc import Callable
from contextlib import nullcontext, suppress
from copy import deepcopy
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from comparing import assert_all_same, assert_as_plain, assert_equal
from failure_models import Failure
from harness import World
from meshed import assert_refused_in_a_pass, device_mesh, refusal, tensors_of
from models import Block, built, even_tower, odd_model, random_batch, uneven_tower
from on_ranks import on_ranks
from reference import adamw, mean_of_squares
from refusals import assert_says
from scenario import Side, one_thread, same_as_plain
from strategies import Plan, Wire, live_bytes, part, step
from test_memory import WIDTH, Pair
from test_memory import B as BLOCK
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import shardwise
from shardwise import CommPolicy, CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

ZERO3 = Plan("zero3", 2)
BUDGETS = (None, 0, 4000)  # a block of the uneven tower has 1728 bytes, all of it 5696


def trained(
    plan: Plan | None, steps: int = 1, make: Callable[[], nn.Module] = uneven_tower, **options: Any
) -> Any:
    model = built(make)
    if plan is not None:
        plan.shard(model, **options)
    optimizer = adamw(model)
    for index in range(steps):
        step(model, optimizer, plan, index, width_of(make))
    return model, optimizer


def width_of(make: Callable[[], nn.Module]) -> int:
    return 8 if make is odd_model else 7


# --- outputs --------------------------------------------------------------------------------------


def evaluated(
    plan: Plan | None,
    counts: list[int],
    budget: int | None,
    make: Callable[[], nn.Module] = uneven_tower,
    **options: Any,
) -> dict[str, Any]:
    """Train, run as many forwards as `counts` says of this rank, train on; twice.

    Inputs are the same on all ranks, so that the plain run finds the outputs of the busiest one.
    """
    model, optimizer = trained(plan, make=make, **options)
    count = max(counts) if plan is None else counts[dist.get_rank()]
    inputs = [random_batch(10 + i, 3, width_of(make)) for i in range(count)]
    notes: dict[str, Any] = {}
    for index in range(2):
        if plan is None:
            with torch.no_grad():
                outputs = [model(each) for each in inputs]
        else:
            with shardwise.inference(model, budget_bytes=budget):
                assert not torch.is_grad_enabled()
                outputs = [model(each) for each in inputs]
                assert not any(output.requires_grad for output in outputs)
            assert torch.is_grad_enabled()
            assert all(isinstance(param, DTensor) for param in model.parameters())
        notes |= {f"round {index}, output {i}": output for i, output in enumerate(outputs)}
        step(model, optimizer, plan, 20 + index, width_of(make))
    return notes | tensors_of(model)


def assert_evaluated(ranks: list[dict[str, Any]], counts: list[int], want: dict[str, Any]) -> None:
    for found, count in zip(ranks, counts, strict=True):
        mine = {n: v for n, v in want.items() if "output" not in n or int(n.split()[-1]) < count}
        assert_all_same([found], mine)


@cache
def plainly_evaluated(most: int) -> dict[str, Any]:
    with one_thread():
        return evaluated(None, [most], None)


@pytest.mark.parametrize(
    ("world", "plan", "counts", "budget"),
    [
        (1, Plan("zero3", 1), [2], 4000),
        (4, Plan("zero1", 4), [2, 2, 2, 2], None),
        (4, Plan("hybrid_zero2", 4, 2), [2, 2, 2, 2], 4000),
        (4, Plan("zero3", 4), [3, 0, 1, 2], None),
        (4, Plan("hybrid", 4, 2), [3, 0, 1, 2], 0),
        (2, Plan("zero2", 2), [3, 1], 4000),
        (2, ZERO3, [0, 2], None),
        (2, ZERO3, [3, 0], 0),
        (2, ZERO3, [0, 0], None),
        (3, Plan("zero3", 3), [1, 0, 2], 4000),
    ],
    indirect=["world"],
    ids=str,
)
def test_ranks_may_run_different_numbers_of_forwards(
    world: World, plan: Plan, counts: list[int], budget: int | None
) -> None:
    assert_evaluated(world.run(evaluated, plan, counts, budget), counts, plainly_evaluated(max(counts)))


@pytest.mark.parametrize("options", [{}, {"offload_policy": CPUOffloadPolicy()}], ids=str)
def test_parameters_may_be_odd_and_lie_elsewhere(world2: World, options: dict[str, Any]) -> None:
    want = evaluated(None, [2, 0], None, odd_model)
    for budget in (None, 500):
        ranks = world2.run(evaluated, ZERO3, [2, 0], budget, odd_model, **options)
        assert_evaluated(ranks, [2, 0], want)


@on_ranks(2)
def test_parameters_are_kept_in_the_dtype_of_the_computation() -> None:
    torch.manual_seed(1234)
    model = ZERO3.shard(uneven_tower(), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    seen: list[torch.dtype] = []
    model.blocks[1].up.register_forward_hook(lambda module, args, output: seen.append(module.weight.dtype))
    inputs = random_batch(0, 3, 7, torch.float32)
    with torch.no_grad():
        want = model(inputs)
    for budget in BUDGETS:
        with shardwise.inference(model, budget_bytes=budget):
            assert torch.equal(model(inputs), want)
    assert seen == [torch.bfloat16] * 4


class Ordered(nn.Module):
    """Runs its blocks in another order than they are registered in, or some of them more than once."""

    def __init__(self, order: list[int]) -> None:
        super().__init__()
        self.outlet = nn.Linear(7, 1)
        self.blocks = nn.ModuleList(Block(7, 13) for _ in range(3))
        self.order = order

    def forward(self, x: Tensor) -> Tensor:
        for index in self.order:
            x = self.blocks[index](x)
        return self.outlet(x)


def ordered(plan: Plan | None, order: list[int], counts: list[int], budget: int | None, steps: int) -> Any:
    """A rank that runs nothing inside must know what the others unshard, also if none ever ran."""
    model, optimizer = trained(plan, steps, partial(Ordered, order))
    if plan is None:
        with torch.no_grad():
            return [model(random_batch(10 + i, 3, 7)) for i in range(max(counts))]
    with shardwise.inference(model, budget_bytes=budget):
        outputs = [model(random_batch(10 + i, 3, 7)) for i in range(counts[dist.get_rank()])]
    step(model, optimizer, plan, 20)
    return outputs


@pytest.mark.parametrize(("order", "steps"), [([2, 1, 0], 1), ([0, 1, 2, 0, 1, 2], 0), ([1], 1)])
def test_blocks_may_run_in_any_order(world2: World, order: list[int], steps: int) -> None:
    for counts in ([0, 1], [2, 1]):
        want = ordered(None, order, counts, None, steps)
        for budget in (0, 2000):
            ranks = world2.run(ordered, ZERO3, order, counts, budget, steps)
            for outputs, count in zip(ranks, counts, strict=True):
                assert_equal(outputs, want[:count], atol=1e-10)


# --- what travels, what is held -------------------------------------------------------------------


def stack() -> Any:
    """Blocks of more than 1 MiB, which are hence freed on the host."""
    torch.manual_seed(0)
    return nn.Sequential(*(Pair() for _ in range(4)))


def weighed(plan: Plan, budget: int | None, counts: list[int]) -> dict[str, Any]:
    """Bytes in blocks: sent when entering, in each forward, when leaving; held inside and after."""
    model = plan.shard(stack())
    inputs = torch.ones(1, WIDTH)
    before = live_bytes()
    entering, leaving, forwards = Wire(), Wire(), []
    context = shardwise.inference(model, budget_bytes=budget)
    with entering:
        context.__enter__()
    for _ in range(counts[dist.get_rank()]):
        with Wire() as wire:
            model(inputs)
        forwards.append(wire.bytes / BLOCK)
    inside = (live_bytes() - before) / BLOCK
    with leaving:
        context.__exit__(None, None, None)
    return {
        "entering": entering.bytes / BLOCK,
        "forwards": forwards,
        "inside": inside,
        "leaving": leaving.bytes / BLOCK,
        "after": (live_bytes() - before) / BLOCK,
    }


@pytest.mark.parametrize(
    ("budget", "kept"), [(None, 4), (0, 0), (BLOCK - 1, 0), (BLOCK, 1), (3 * BLOCK - 1, 2), (3 * BLOCK, 3)]
)
def test_what_there_is_room_for_travels_once_and_the_others_in_every_forward(
    world2: World, budget: int | None, kept: int
) -> None:
    """The budget is full parameters in bytes. Each of two ranks sends its half of four blocks."""
    for found in world2.run(weighed, ZERO3, budget, [3, 3]):
        first, *others = found["forwards"]
        assert found["entering"] + first == 2
        assert found["entering"] == 0 or kept
        assert others == [(4 - kept) / 2] * 2
        assert found["leaving"] == 0
        assert found["inside"] == pytest.approx(kept, abs=0.01)  # outputs, and flags
        assert found["after"] == pytest.approx(0, abs=0.01)


@pytest.mark.parametrize(("budget", "sent"), [(0, 6), (None, 2)], ids=["no room", "room for all"])
def test_a_rank_that_is_done_sends_what_the_others_need(world2: World, budget: int | None, sent: int) -> None:
    busy, idle = world2.run(weighed, ZERO3, budget, [3, 0])
    assert busy["entering"] + sum(busy["forwards"]) == sent
    assert idle["entering"] + idle["leaving"] == sent
    assert busy["after"] == pytest.approx(0, abs=0.01)
    assert idle["after"] == pytest.approx(0, abs=0.01)


def test_replicas_keep_what_they_have(world2: World) -> None:
    for found in world2.run(weighed, Plan("ddp", 2), None, [2, 0]):
        assert found["entering"] + sum(found["forwards"]) + found["leaving"] == 0
        assert found["inside"] == pytest.approx(0, abs=0.01)


@on_ranks(2)
def test_a_rank_that_fails_serves_the_others_and_everything_is_freed() -> None:
    """Rank 1 fails after its first forward; rank 0 goes on. Bytes after it, and of ordinary forwards."""
    model = ZERO3.shard(stack())
    before = live_bytes()
    expected = pytest.raises(Failure, match="after the first") if dist.get_rank() else nullcontext()
    with expected, shardwise.inference(model, budget_bytes=BLOCK):
        for _ in range(1 if dist.get_rank() else 3):
            model(torch.ones(1, WIDTH))
        if dist.get_rank():
            raise Failure("after the first")
    after = (live_bytes() - before) / BLOCK
    sent = []
    for _ in range(2):
        with Wire() as wire, torch.no_grad():
            model(torch.ones(1, WIDTH))
        sent.append(wire.bytes / BLOCK)
    assert after == pytest.approx(0, abs=0.01)
    assert sent == [2, 2]


def failed_midway(
    plan: Plan | None, where: str, failing: tuple[int, ...], budget: int | None
) -> dict[str, Any]:
    """Some fail inside their second forward; the others run four, and need the rest of it from these."""
    model, optimizer = trained(plan)
    outputs: list[Tensor] = []
    if plan is None:
        with torch.no_grad():
            outputs += [model(random_batch(10 + i, 3, 7)) for i in range(4)]
    else:

        def fail(*_: Any) -> None:
            if dist.get_rank() in failing and len(outputs) == 1:
                raise Failure("midway")

        handle = model.get_submodule(where).register_forward_hook(fail)
        with suppress(Failure), shardwise.inference(model, budget_bytes=budget):
            for i in range(4):
                outputs.append(model(random_batch(10 + i, 3, 7)))
        handle.remove()
    step(model, optimizer, plan, 20)
    return {**{f"output {i}": output for i, output in enumerate(outputs)}, **tensors_of(model)}


@pytest.mark.parametrize(
    ("where", "failing"), [("blocks.1", (1,)), ("", (1,)), ("blocks.1.up", (0, 1, 2))], ids=str
)
def test_a_rank_that_fails_midway_still_unshards_what_the_others_wait_for(
    world3: World, where: str, failing: tuple[int, ...]
) -> None:
    """And all train on as if nothing had been."""
    with one_thread():
        want = failed_midway(None, where, (), None)
    for budget in BUDGETS:
        ranks = world3.run(failed_midway, Plan("zero3", 3), where, failing, budget)
        assert_evaluated(ranks, [1 if rank in failing else 4 for rank in range(3)], want)


def failed_early(plan: Plan | None, steps: int, order: list[int], done: int) -> dict[str, Any]:
    """Rank 1 fails after the first block of a forward, when it has `done` others; rank 0 runs one more."""
    options: dict[str, Any] = {} if plan is None else {"comm_policy": CommPolicy(prefetch=2)}
    model, optimizer = trained(plan, steps, partial(Ordered, order), **options)
    outputs: list[Tensor] = []

    def fail(*_: Any) -> None:
        if dist.get_rank() == 1 and len(outputs) == done:
            raise Failure("early")

    if plan is None:
        with torch.no_grad():
            outputs += [model(random_batch(10 + i, 3, 7)) for i in range(done + 2)]
    else:
        handle = model.blocks[0].register_forward_hook(fail)
        with suppress(Failure), shardwise.inference(model, budget_bytes=0):
            for i in range(done + 2):
                outputs.append(model(random_batch(10 + i, 3, 7)))
        handle.remove()
    step(model, optimizer, plan, 20)
    return {**{f"output {i}": output for i, output in enumerate(outputs)}, **tensors_of(model)}


@pytest.mark.parametrize(
    ("order", "done"), [([0, 1, 2, 0, 1, 2], 0), ([0, 0, 1], 1), ([0, 0, 1], 2)], ids=str
)
def test_a_rank_that_fails_early_unshards_in_the_order_of_the_others(
    world2: World, order: list[int], done: int
) -> None:
    """No rank has run a forward to its end, or only one without prefetch, which unshards in another order."""
    for steps in (1, 0):
        with one_thread():
            want = failed_early(None, steps, order, done)
        ranks = world2.run(failed_early, ZERO3, steps, order, done)
        assert_evaluated(ranks, [done + 2, done], want)


# --- what it leaves behind ------------------------------------------------------------------------


def between_microbatches(plan: Plan | None, budget: int | None) -> dict[str, Any]:
    """An evaluation while unsynchronised gradients wait, and between forward and backward."""
    model, optimizer = trained(plan, steps=0)
    for index in range(2):
        optimizer.zero_grad()
        if plan is None:
            for microbatch in range(3):
                mean_of_squares(model, part(plan, 3 * index + microbatch)).backward()
        else:
            with shardwise.no_sync(model):
                mean_of_squares(model, part(plan, 3 * index)).backward()
            with shardwise.inference(model, budget_bytes=budget):
                model(part(plan, 9))
            loss = mean_of_squares(model, part(plan, 3 * index + 1))
            with shardwise.inference(model, budget_bytes=budget):
                model(part(plan, 9))
            loss.backward()
            mean_of_squares(model, part(plan, 3 * index + 2)).backward()
        optimizer.step()
    return tensors_of(model)


def test_it_may_be_entered_anywhere_between_passes(world2: World) -> None:
    for budget in (None, 0):
        assert_as_plain(world2, between_microbatches, ZERO3, budget)


@pytest.mark.parametrize("how", ["one of them", "optimizer", "loaded"])
@on_ranks(2)
def test_weights_that_change_inside_are_noticed(how: str) -> None:
    model, optimizer = trained(ZERO3)
    mean_of_squares(model, part(ZERO3, 1)).backward()

    def load() -> None:
        model.load_state_dict({name: value * 0.9 for name, value in model.state_dict().items()})

    changes: dict[str, Callable[[], Any]] = {
        "one of them": torch.no_grad()(lambda: model.blocks[2].down.weight.add_(0.1)),
        "optimizer": optimizer.step,
        "loaded": load,
    }

    def act() -> None:
        with shardwise.inference(model, budget_bytes=None):
            model(random_batch(0, 2, 7))
            changes[how]()
            model(random_batch(0, 2, 7))

    message = refusal(act)
    with shardwise.inference(model, budget_bytes=None):
        inside = model(random_batch(0, 2, 7))
    with torch.no_grad():
        after = model(random_batch(0, 2, 7))
    assert_says(message, "RuntimeError: ", "inference")
    assert "weight" in message or "blocks.2" in message
    assert torch.equal(inside, after), "the old weights were used"


# --- refusals -------------------------------------------------------------------------------------


@same_as_plain(2)
@pytest.mark.parametrize("forward_is_inside", [True, False])
@pytest.mark.parametrize("budget", [None, 0])
def test_backward_inside_is_refused(side: Side, budget: int | None, forward_is_inside: bool) -> None:
    model = side.shard_tower(built(even_tower))
    if side.is_sharded:
        loss = None if forward_is_inside else mean_of_squares(model, side.inputs(0))
        with shardwise.inference(model, budget_bytes=budget), torch.enable_grad():
            message = refusal((mean_of_squares(model, side.inputs(0)) if loss is None else loss).backward)
        assert_says(message, "RuntimeError: ", "inference", "backward")
        model.zero_grad()
    mean_of_squares(model, side.inputs(1)).backward()
    side.note_gradients(model)


@on_ranks(2)
def test_contexts_that_exclude_each_other_are_refused() -> None:
    model, _ = trained(ZERO3, steps=0)
    with torch.no_grad():
        want = model(random_batch(0, 2, 7))
    block, inference, unsharded = model.blocks[1], shardwise.inference, shardwise.unsharded
    for outer, outside, inner, inside in [
        (inference, model, inference, model),
        (inference, model, inference, block),
        (unsharded, model, inference, model),
        (unsharded, block, inference, model),
        (inference, model, unsharded, model),
    ]:
        with outer(outside):
            message = refusal(inner(inside).__enter__)
        assert_says(message, "RuntimeError: ", outer.__name__, inner.__name__)
        with inference(model):
            assert torch.equal(model(random_batch(0, 2, 7)), want)


@on_ranks(2)
def test_what_it_keeps_unsharded_is_not_resharded_inside() -> None:
    model, _ = trained(ZERO3, steps=0)
    with shardwise.inference(model, budget_bytes=None):
        want = model(random_batch(0, 2, 7))
        message = refusal(model.blocks[1].reshard)
        found = model(random_batch(0, 2, 7))
    assert message.startswith("RuntimeError: reshard: blocks.1 is kept unsharded by inference()")
    assert torch.equal(found, want)


@pytest.mark.parametrize("budget", [None, 0])
@on_ranks(2)
def test_no_module_is_sharded_around_it(budget: int | None) -> None:
    """The new root would not know what is kept."""
    inner, _ = trained(ZERO3, steps=0)
    model = nn.Sequential(inner, nn.Linear(1, 2).double())
    with shardwise.inference(inner, budget_bytes=budget):
        assert_says(refusal(partial(fully_shard, model)), "RuntimeError: fully_shard: ", "in inference()")
    fully_shard(model)(random_batch(0, 2, 7)).sum().backward()


@pytest.mark.parametrize("when", ["forward", "backward"])
@on_ranks(2)
def test_it_is_refused_inside_a_running_pass(when: str) -> None:
    assert_refused_in_a_pass(shardwise.inference, when, "inference", of_root=True)


REFUSED: list[tuple[Callable[[Any], Any], list[str]]] = [
    (lambda model: shardwise.inference(uneven_tower()), ["ValueError", "Tower"]),
    (lambda model: shardwise.inference([model]), ["TypeError", "list"]),  # type: ignore[arg-type]
    (lambda model: shardwise.inference(model, budget_bytes=-1), ["ValueError", "budget_bytes", "-1"]),
    (lambda model: shardwise.inference(model, budget_bytes="all"), ["TypeError", "budget_bytes", "'all'"]),  # type: ignore[arg-type]
    (lambda model: shardwise.inference(model, budget_bytes=True), ["TypeError", "budget_bytes", "True"]),
]


@on_ranks(2)
def test_arguments_that_do_not_fit_are_refused() -> None:
    model, _ = trained(ZERO3, steps=0)
    for call, words in REFUSED:
        assert_says(refusal(lambda call=call: call(model).__enter__()), "inference", *words)


def on_replicas(counts: list[int]) -> tuple[int, float]:
    """Each replica serves its own: the other one does not take part."""
    model = built(even_tower)
    shardwise.shard_model(model, strategy="hybrid", mesh=device_mesh((2, 2), ("replicate", "shard")))
    with Wire() as wire, shardwise.inference(model, budget_bytes=0):
        outputs = [model(random_batch(10 + i, 3)) for i in range(counts[dist.get_rank()])]
    return len(outputs), wire.messages


def test_replicas_serve_only_their_own(world4: World) -> None:
    found = world4.run(on_replicas, [3, 0, 0, 0])
    assert [count for count, _ in found] == [3, 0, 0, 0]
    assert found[0][1] == found[1][1] > 0
    assert found[2][1] == found[3][1] == 0


@on_ranks(2)
def test_a_copy_made_after_it_runs_on_its_own() -> None:
    model, _ = trained(ZERO3)
    with shardwise.inference(model):
        want = model(random_batch(0, 2, 7))
    twin = deepcopy(model)
    with shardwise.inference(twin):
        assert torch.equal(want, twin(random_batch(0, 2, 7)))


# --- what training finds afterwards ---------------------------------------------------------------


def trained_around_another_path(plan: Plan | None) -> dict[str, Any]:
    """Only rank 0 runs forwards inside, and those take another way through the blocks than training does."""
    model, optimizer = trained(plan, 2, partial(Ordered, [0, 1]))
    if plan is not None:
        model.order = [0, 2]
        with shardwise.inference(model, budget_bytes=0):
            if dist.get_rank() == 0:
                model(random_batch(9, 3, 7))
        model.order = [0, 1]
    for index in range(2, 4):
        step(model, optimizer, plan, index)
    return tensors_of(model)


def test_forwards_that_some_ranks_have_run_inside_do_not_change_what_training_prefetches(
    world2: World,
) -> None:
    """A group that is prefetched on some ranks alone, and not run, would hang them."""
    assert_as_plain(world2, trained_around_another_path, ZERO3)
