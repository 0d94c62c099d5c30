"""Groups that stay unsharded from one forward to the next: when they are unsharded again, and what that costs.

Each comparison whose answer the host reads makes it wait for all that the device has been given.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from events import counts, events_of
from models import built, even_tower, random_batch, uneven_tower
from on_ranks import on_ranks
from reference import full, mean_of_squares
from scenario import Side, same_as_plain
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import shardwise
from shardwise import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from shardwise.comm.buffers import AllGather
from shardwise.engine.module_state import sharded_module_states
from shardwise.groups.states import SHARDED
from shardwise.optim import FlatOptimizer
from shardwise.policies import ShardPlacementResult

READS = ("item", "tolist", "__bool__", "__int__", "__float__", "nonzero")


@contextmanager
def counted(model: Any) -> Iterator[dict[str, int]]:
    """Inside, what a forward costs: all-gathers, all-reduces, and answers of the device that the host reads."""
    cost = {"all-gathers": 0, "all-reduces": 0, "reads": 0}

    def counting(what: str, call: Any) -> Any:
        def count(*args: Any, **kwargs: Any) -> Any:
            cost[what] += 1
            return call(*args, **kwargs)

        return count

    events = events_of(model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_reduce", counting("all-reduces", dist.all_reduce))
        patch.setattr(torch, "equal", counting("reads", torch.equal))
        for name in READS:
            patch.setattr(Tensor, name, counting("reads", getattr(Tensor, name)))
        yield cost
    cost["all-gathers"] = sum(event.startswith("unshard") for event in events)


def kept_tower(reshard: Any = False) -> Any:
    torch.manual_seed(0)
    return keep(Side(is_sharded=True), even_tower(), reshard)


def keep(side: Side, model: Any, reshard: Any = False, **options: Any) -> Any:
    """``reshard``: over so many ranks, where not all of it is kept."""
    side.shard_tower(model, reshard_after_forward=reshard, **options)
    if side.is_sharded and reshard is False:
        model.set_reshard_after_backward(False)
    return model


def halve(model: nn.Module) -> None:
    model.load_state_dict({name: value.clone() * 0.5 for name, value in model.state_dict().items()})


def sgd(model: nn.Module) -> Any:
    return torch.optim.SGD(model.parameters(), lr=0.01, foreach=True)


def flat_adamw(model: nn.Module) -> Any:
    return FlatOptimizer(torch.optim.AdamW(model.parameters(), lr=0.01))


def fused_adamw(model: nn.Module) -> Any:
    return torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)


class ByHand:
    def __init__(self, model: nn.Module) -> None:
        self.params = list(model.parameters())

    def step(self) -> None:
        for param in self.params:
            param.data.add_(param.grad, alpha=-0.01)

    def zero_grad(self) -> None:
        for param in self.params:
            param.grad = None


NEW_WEIGHTS, NOTHING = (f"{number} all-gathers, 0 all-reduces, 0 reads" for number in (4, 0))


@pytest.mark.parametrize(
    ("make_optimizer", "syncs", "expected"),
    [
        (sgd, [False, False, True], [NEW_WEIGHTS, NOTHING, NOTHING]),
        (flat_adamw, [False, False, True], [NEW_WEIGHTS, NOTHING, NOTHING]),
        # The caller has gradients then, and may have changed shards in any way, on any rank.
        (sgd, [True, True], [NEW_WEIGHTS, "0 all-gathers, 1 all-reduces, 1 reads"]),
        (ByHand, [False, True], ["4 all-gathers, 1 all-reduces, 1 reads", NOTHING]),
    ],
    ids=["accumulation", "accumulation, flat", "synchronised microbatches", "a step that nobody told of"],
)
@on_ranks(2)
def test_what_the_forwards_of_a_step_cost(
    make_optimizer: Any, syncs: list[bool], expected: list[str]
) -> None:
    """With a microbatch for each item of ``syncs``, in the third step."""
    model = kept_tower()
    optimizer = make_optimizer(model)
    costs = []
    for step in range(3):
        for microbatch, sync in enumerate(syncs):
            model.set_requires_gradient_sync(sync)
            inputs = random_batch(4 * step + microbatch, 4, dtype=torch.float32)
            with counted(model) as cost:
                loss = mean_of_squares(model, inputs)
            costs.append(", ".join(f"{number} {what}" for what, number in cost.items()))
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert costs[-len(syncs) :] == expected


@on_ranks(2)
def test_what_no_optimizer_steps_is_not_unsharded_again() -> None:
    model = kept_tower()
    model.blocks.requires_grad_(False)
    other = nn.Linear(2, 2)
    trained = [param for param in model.parameters() if param.requires_grad]
    optimizers = [torch.optim.SGD(params, lr=0.1) for params in (trained, other.parameters())]
    events = events_of(model)
    unshards = []
    for step in range(4):
        events.clear()
        mean_of_squares(model, random_batch(step, 4, dtype=torch.float32)).backward()
        other(torch.ones(2)).sum().backward()
        optimizers[1 if step == 1 else 0].step()
        unshards.append([event for event in events if event.startswith("unshard")])
    assert len(unshards[0]) == 4
    assert unshards[1:] == [["unshard Tower"], [], ["unshard Tower"]]


# --- the numbers ----------------------------------------------------------------------------------------


@same_as_plain()
@pytest.mark.parametrize(
    ("world", "reshard", "make_optimizer", "options"),
    [
        (2, False, ByHand, {}),
        (2, False, fused_adamw, {}),
        (4, 2, sgd, {}),
        (4, 2, flat_adamw, {"offload_policy": CPUOffloadPolicy()}),
        (4, 2, fused_adamw, {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.float64)}),
    ],
    indirect=["world"],
    ids=["changed unseen", "fused", "parts", "parts offloaded", "parts cast"],
)
def test_accumulation_trains_as_without_sharding(
    side: Side, reshard: Any, make_optimizer: Any, options: dict[str, Any]
) -> None:
    """With evaluation between microbatches, weights loaded between steps, and uneven shards."""
    model = keep(side, built(uneven_tower), reshard, **options)
    optimizer = make_optimizer(model)
    for step in range(4):
        optimizer.zero_grad()
        for microbatch in range(3):
            side.sync(model, microbatch == 2)
            mean_of_squares(model, side.inputs(4 * step + microbatch, 7)).backward()
            if step == 1 and microbatch != 1:  # within a step, and before the next
                with torch.no_grad():
                    side.note_mean("evaluation", mean_of_squares(model, side.inputs(40, 7)))
        side.note_gradients(model)
        optimizer.step()
        if step == 2:  # the unsharded groups are there, and an optimizer has stepped
            halve(model)
    side.note_parameters(model)


@same_as_plain()
@pytest.mark.parametrize(("world", "reshard"), [(2, False), (4, 2)], indirect=["world"])
def test_weights_may_be_loaded_between_microbatches(side: Side, reshard: Any) -> None:
    """All ranks load: what they have kept unsharded, or parts of it, is stale on all of them."""
    model = keep(side, built(even_tower), reshard)
    halves = {name: value.detach() * 0.5 for name, value in built(even_tower).named_parameters()}
    side.sync(model, False)
    mean_of_squares(model, side.inputs(0)).backward()
    if side.is_sharded:
        shardwise.load_full_state_dict(model, halves, src_rank=None)
    else:
        model.load_state_dict(halves)
    side.sync(model, True)
    mean_of_squares(model, side.inputs(1)).backward()
    side.note_gradients(model)


@torch.no_grad()
def double_data(model: nn.Module) -> None:
    for param in model.parameters():
        param.data.mul_(2)


@same_as_plain(2)
@pytest.mark.parametrize("change", [halve, double_data])
def test_all_ranks_may_change_weights_between_two_forwards(
    side: Side, change: Callable[[nn.Module], None]
) -> None:
    """The loss of the first forward has no backward."""
    model = built(even_tower)
    side.shard_tower(model, reshard_after_forward=False)
    side.note_mean("before", mean_of_squares(model, side.inputs(0)))
    change(model)
    mean_of_squares(model, side.inputs(1)).backward()
    side.note_gradients(model)


@on_ranks(2)
def test_a_change_on_one_of_the_meshes_of_a_group_counts() -> None:
    torch.manual_seed(0)
    mesh, other = (init_device_mesh("cpu", (2,)) for _ in range(2))

    def place(param: Tensor) -> Any:
        return ShardPlacementResult(Shard(0), other) if param.dim() == 1 else None

    model: Any = fully_shard(
        nn.Linear(4, 4), mesh=mesh, reshard_after_forward=False, shard_placement_fn=place
    )
    inputs = torch.ones(1, 4)
    model(inputs)
    model.bias.data.add_(1)
    assert len(sharded_module_states(model)[0].group.buckets) == 2
    expected = nn.functional.linear(inputs, full(model.weight), full(model.bias))
    torch.testing.assert_close(model(inputs).detach(), expected)


# --- what is refused ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("world", "reshard"), [(2, False), (4, 2)], indirect=["world"])
@pytest.mark.parametrize(
    ("is_counted", "says"), [(True, "blocks.1.up.weight has changed"), (False, "its parameters have changed")]
)
@on_ranks()
def test_a_change_between_unsynchronised_microbatches_is_refused(
    reshard: Any, is_counted: bool, says: str
) -> None:
    """And not used in part: the forward after that unshards what was changed."""
    model = kept_tower(reshard)
    model.set_requires_gradient_sync(False)
    inputs = random_batch(0, 4, dtype=torch.float32)
    model(inputs).sum().backward()
    weight = model.blocks[1].up.weight.detach() if is_counted else model.blocks[1].up.weight.data
    weight.mul_(2)
    with pytest.raises(RuntimeError) as caught:
        model(inputs)
    events = events_of(model)
    model(inputs)
    assert f"blocks.1: {says} between microbatches" in str(caught.value)
    assert reshard or counts(events, "unshard") == {"blocks.1": 1}


@on_ranks(2)
def test_weights_that_are_written_with_equal_contents_are_kept() -> None:
    model = kept_tower()
    model.set_requires_gradient_sync(False)
    inputs = random_batch(0, 4, dtype=torch.float32)
    model(inputs).sum().backward()
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()})
    events = events_of(model)
    model(inputs).sum().backward()
    assert not counts(events, "unshard")


# --- parts that a few ranks keep between microbatches ---------------------------------------------


GROUPS = 4


def tower(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Counter[int]]:
    """Of which pairs of ranks keep parts; and a counter of all-gathers by the number of ranks."""
    gathers: Counter[int] = Counter()
    start = AllGather.start

    def counting(self: Any, *args: Any, **kwargs: Any) -> Any:
        gathers[self._world] += 1
        return start(self, *args, **kwargs)

    monkeypatch.setattr(AllGather, "start", counting)
    return Side(is_sharded=True).shard_tower(built(even_tower), reshard_after_forward=2), gathers


def microbatch(model: Any, number: int, is_last: bool) -> None:
    model.set_requires_gradient_sync(is_last)
    mean_of_squares(model, random_batch(number, 4)).backward()


@on_ranks(4)
def test_a_step_gathers_over_all_ranks_once() -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        model, gathers = tower(monkeypatch)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=True)
        for step in range(3):
            gathers.clear()
            for number in range(3):
                microbatch(model, 3 * step + number, is_last=number == 2)
            # In each forward and backward, but for the first forward over all.
            assert gathers == {4: GROUPS, 2: 5 * GROUPS}
            groups = [module_state.group for module_state in sharded_module_states(model)]
            assert {group.unsharded.state for group in groups} == {SHARDED}
            optimizer.step()
            optimizer.zero_grad()


@on_ranks(4)
def test_evaluation_ends_it_and_reading_weights_does_not() -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        model, gathers = tower(monkeypatch)
        again, kept = {4: GROUPS, 2: GROUPS}, {2: 2 * GROUPS}
        acts: list[tuple[Callable[[], Any], dict[int, int]]] = [
            (lambda: torch.no_grad()(model)(random_batch(0, 4)), again),
            (lambda: shardwise.full_state_dict(model), kept),
        ]
        for act, expected in acts:
            microbatch(model, 0, is_last=False)
            act()
            gathers.clear()
            microbatch(model, 1, is_last=False)
            assert gathers == expected
            model.zero_grad()
            microbatch(model, 2, is_last=True)


@pytest.mark.parametrize("is_counted", [True, False])
@on_ranks(4)
def test_a_change_between_a_forward_and_its_backward_is_refused_in_the_next_forward(is_counted: bool) -> None:
    model = Side(is_sharded=True).shard_tower(built(even_tower), reshard_after_forward=2)
    model.set_requires_gradient_sync(False)
    loss = mean_of_squares(model, random_batch(0, 4))
    weight = model.blocks[1].up.weight.detach() if is_counted else model.blocks[1].up.weight.data
    weight.mul_(2)
    loss.backward()
    with pytest.raises(RuntimeError, match=r"blocks.1: .* between microbatches"):
        model(random_batch(0, 4))
