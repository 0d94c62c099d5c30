"""Whoever brings communication of their own: it is used, it sees what it may rely on, it changes no number.

Custom collectives, a hook on the reduced gradients, and the switches that say how to communicate. Results are
compared with plain training in float64.
"""

import weakref
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from custom_comms import AllGather, Comm, Comms, ReduceScatter
from failure_models import Failure, fragile_tower
from harness import World
from meshed import outcome
from models import (
    built,
    even_tower,
    language_model,
    next_token_loss,
    random_batch,
    shard_tower,
    token_batch,
    uneven_tower,
)
from on_ranks import on_ranks
from reference import adamw, mean_of_squares
from refusals import SHARDED, Calling, assert_says, refusal, seeded, sharded_tower, tower
from scenario import Side, same_as_plain
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import shardwise
from shardwise import FSDPModule
from shardwise.engine.module_state import sharded_module_states
from shardwise.torch_compat import c10d

# --- custom collectives ---------------------------------------------------------------------------


@same_as_plain()
@pytest.mark.parametrize(
    ("world", "make", "returns_work", "names"),
    [
        (1, even_tower, True, None),
        (2, uneven_tower, False, None),
        (3, uneven_tower, True, None),
        (2, uneven_tower, True, ["blocks.1"]),
    ],
    indirect=["world"],
)
def test_custom_collectives_carry_the_groups_they_were_set_on(
    side: Side, make: Any, returns_work: bool, names: list[str] | None
) -> None:
    model = side.shard_tower(built(make), reshard_after_forward=True)
    comms = None
    width = 7 if make is uneven_tower else 8
    optimizer = adamw(model)
    for step in range(3):
        if side.is_sharded and step == (0 if names is None else 1):  # or between steps
            comms = Comms(model, names, returns_work)
        side.step(model, optimizer, step, width=width)
        if comms is not None and side.world > 1:  # a rank alone need not communicate
            chosen = 4 if names is None else len(names)
            assert len(comms.reduce.calls) == chosen, "each group is reduced by one call"
            assert len(comms.gather.calls) >= 2 * chosen - 1, "forward and backward all-gather by a call each"
            assert sum(call["sent"] for call in comms.reduce.calls) >= numel(model, names)
            comms.check(side.world)
            comms.clear()
    side.note_parameters(model)


def numel(model: nn.Module, names: list[str] | None) -> int:
    modules = [model] if names is None else [model.get_submodule(name) for name in names]
    return sum(param.numel() for module in modules for param in module.parameters())


class Doubling(ReduceScatter):
    """Changes what it reduces, so that its result is seen to be the one that counts."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        super().__call__(output_tensor, input_tensor, group, op)
        output_tensor.mul_(2)


class GathersOnes(AllGather):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False
    ) -> None:
        super().__call__(output_tensor, input_tensor, group)
        output_tensor.fill_(1)


@same_as_plain(2)
def test_what_a_custom_collective_returns_is_what_is_used(side: Side) -> None:
    model = built(even_tower)
    if not side.is_sharded:
        with torch.no_grad():
            for param in model.blocks[0].parameters():
                param.fill_(1)
    side.shard_tower(model)
    if side.is_sharded:
        model.blocks[0].set_custom_all_gather(GathersOnes(returns_work=False))
        model.blocks[1].set_custom_reduce_scatter(Doubling(returns_work=False))
    mean_of_squares(model, side.inputs(0)).backward()
    for name, param in model.named_parameters():
        factor = 2 if name.startswith("blocks.1.") and not side.is_sharded else 1
        side.note(f"gradient of {name}", param.grad * factor)


# --- the hook on reduced gradients ----------------------------------------------------------------


@same_as_plain()
@pytest.mark.parametrize(
    ("world", "on", "mesh_shape"),
    [
        (1, "blocks.1", (1,)),
        (2, "", (2,)),
        (3, "blocks.1", (3,)),
        (2, "blocks.1", (2, 1)),
        (2, "", (1, 2)),
        (4, "blocks.1", (2, 2)),
    ],
    indirect=["world"],
    ids=str,
)
def test_a_hook_sees_and_may_change_what_was_reduced_over_all_ranks(
    side: Side, on: str, mesh_shape: tuple[int, ...]
) -> None:
    model = built(uneven_tower)
    options: dict[str, Any] = {}
    if side.is_sharded and len(mesh_shape) == 2:
        options["mesh"] = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("replicate", "shard"))
    side.shard_tower(model, **options)
    seen: list[int] = []

    def scale(reduced: Tensor) -> None:
        seen.append(reduced.numel())
        reduced.mul_(0.5)

    chosen = {n for n, _ in model.named_parameters() if n.startswith(on) and ("blocks" in n) == bool(on)}
    if side.is_sharded:
        model.get_submodule(on).set_all_reduce_hook(scale)
    for step in range(2):
        model.zero_grad()
        mean_of_squares(model, side.inputs(step, 7)).backward()
        for name, param in model.named_parameters():
            factor = 0.5 if name in chosen and not side.is_sharded else 1.0
            side.note(f"gradient of {name}", param.grad * factor)
    if side.is_sharded:
        local = sum(p.to_local().numel() for n, p in model.named_parameters() if n in chosen)
        assert sum(seen) >= 2 * local, "the hook has not seen every gradient"


@same_as_plain(4)
def test_a_hook_may_reduce_over_ranks_outside_of_the_mesh(side: Side) -> None:
    """What the hook is for: an all-reduce over ranks that the mesh does not know of."""
    model = built(even_tower)
    if not side.is_sharded:
        side.shard_tower(model)
    else:
        plane = init_device_mesh("cpu", (2, 2), mesh_dim_names=("other", "shard"))
        side.shard_tower(model, mesh=plane["shard"])
        other = plane.get_group("other")

        def average(reduced: Tensor) -> None:
            dist.all_reduce(reduced, group=other)
            reduced.div_(2)

        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_all_reduce_hook(average)
    mean_of_squares(model, side.inputs(0)).backward()
    for name, param in model.named_parameters():
        side.note(name, param.grad if not side.is_sharded else param.grad.full_tensor())


@same_as_plain(2)
def test_a_hook_gets_what_microbatches_add_up_to_and_not_each_part(side: Side) -> None:
    model, seen = built(even_tower), []

    def halve(reduced: Tensor) -> None:
        seen.append(reduced.mul_(0.5))

    if side.is_sharded:
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
        side.shard_tower(model, mesh=mesh)
        model.set_all_reduce_hook(halve)
    for microbatch in range(3):
        if side.is_sharded:
            model.set_requires_all_reduce(microbatch == 2)
        mean_of_squares(model, side.inputs(microbatch)).backward()
    for name, param in model.named_parameters():
        side.note(name, param.grad * (0.5 if not side.is_sharded and "blocks" not in name else 1))
    assert len(seen) == side.is_sharded


# --- switches that change no number ---------------------------------------------------------------

SUMS = "set_force_sum_reduction_for_comms"
MEMORY = "set_allocate_memory_from_process_group_for_comm"
GROUP = "set_separate_reduce_scatter_group"
BUFFERS = "set_reduce_scatter_max_input_buffers"
SWITCHES = {
    "on": [
        *(Calling(SUMS, (True,)), Calling(MEMORY, (True,)), Calling(GROUP), Calling(BUFFERS, (1,))),
        Calling("set_post_optim_event", (torch.Event("cpu"),)),
    ],
    "on and back": [Calling(name, (enable,)) for name in (SUMS, MEMORY, GROUP) for enable in (True, False)],
    "on for one block": [
        Calling(BUFFERS, (8,)),
        Calling(BUFFERS, (2,), {"recurse": False}, on="blocks.1"),
        Calling(GROUP, (True,), {"recurse": False}, on="blocks.1"),
    ],
}


@same_as_plain()
@pytest.mark.parametrize(
    ("world", "switches"),
    [(1, "on"), (3, "on"), (2, "on and back"), (2, "on for one block")],
    indirect=["world"],
)
def test_how_to_communicate_changes_no_number(side: Side, switches: str) -> None:
    model = side.shard_tower(built(uneven_tower))
    optimizer = adamw(model)
    for step in range(3):
        if side.is_sharded and step < 2:
            for switch in SWITCHES[switches]:
                switch(model)
        optimizer.zero_grad()
        for microbatch in range(2):
            side.sync(model, microbatch == 1)
            mean_of_squares(model, side.inputs(2 * step + microbatch, 7)).backward()
        side.note_gradients(model)
        optimizer.step()
        side.assert_settled(model)
    side.note_parameters(model)


@pytest.mark.parametrize(("world", "factor"), [(2, None), (3, 8.0)], indirect=["world"])
@on_ranks()
def test_only_sums_are_asked_for_where_sums_are_forced(factor: float | None) -> None:
    model, plain = seeded(sharded_tower), seeded(tower)
    comms = Comms(model)
    model.set_force_sum_reduction_for_comms(True)
    if factor is not None:
        model.set_gradient_divide_factor(factor)
    for each in (model, plain):
        each(random_batch(0, 4)).pow(2).mean().backward()
    assert {call["op"] for call in comms.reduce.calls} == {"SUM"}
    ratio = model.outlet.bias.grad.full_tensor() / plain.outlet.bias.grad
    assert ratio.item() == pytest.approx(dist.get_world_size() / factor if factor else 1.0, abs=1e-10)


@on_ranks(2)
def test_reductions_get_a_group_of_their_own_and_give_it_back() -> None:
    for enable in (True, False):
        model = sharded_tower()
        comms = Comms(model)
        model.set_separate_reduce_scatter_group(True)
        model.set_separate_reduce_scatter_group(enable)
        model(random_batch(0, 4)).pow(2).mean().backward()
        gathers, reductions = (
            {call["group"] for call in comm.calls} for comm in (comms.gather, comms.reduce)
        )
        assert len(gathers) == len(reductions) == 1
        assert (gathers != reductions) == enable


@on_ranks(2)
def test_forced_sums_reach_the_communicators_in_use_and_those_made_later() -> None:
    model = sharded_tower()
    (bucket,) = model._shardwise_state.group.buckets
    for enable in (True, False, True):
        model.set_force_sum_reduction_for_comms(enable)
        assert bucket.communication.reduce_scatter.force_sum == enable
    before = bucket.communication.reduce_scatter
    model.set_separate_reduce_scatter_group(True)
    model(random_batch(0, 4)).sum().backward()
    assert bucket.communication.reduce_scatter is not before
    assert bucket.communication.reduce_scatter.force_sum


@on_ranks(1)
def test_an_event_is_kept_until_the_next_forward_and_no_longer() -> None:
    """The root waits for an event once, at its next forward."""
    model = sharded_tower()
    model(random_batch(0, 4)).sum().backward()
    event = torch.Event("cpu")
    alive = weakref.ref(event)
    model.set_post_optim_event(event)
    del event
    before = alive() is not None
    model(random_batch(0, 4)).sum().backward()
    assert [before, alive() is not None] == [True, False]


# --- weights that backward does not need ----------------------------------------------------------


@same_as_plain(2)
def test_an_embedding_need_not_be_unsharded_for_backward(side: Side) -> None:
    model = built(language_model)
    side.shard(model.embed, *model.blocks, model, reshard_after_forward=True)
    gathers = AllGather(returns_work=True)
    if side.is_sharded:
        model.embed.set_custom_all_gather(gathers)
        model.embed.set_unshard_in_backward(False)
    optimizer = adamw(model)
    for step in range(2):
        optimizer.zero_grad()
        next_token_loss(model, side.part(token_batch(step, 12))).backward()
        side.note_gradients(model)
        optimizer.step()
        side.assert_settled(model)
        assert len(gathers.calls) == side.is_sharded * (step + 1), "all-gathered once a step"


@same_as_plain(2)
def test_a_root_need_not_be_unsharded_for_a_loss_inside(side: Side) -> None:
    """The loss comes from what a block has put out, not from the root's output, inside whose call it ran."""
    model = built(even_tower)
    side.shard_tower(model, reshard_after_forward=True)
    gathers = AllGather(returns_work=True)
    if side.is_sharded:
        model.set_custom_all_gather(gathers)
        model.set_unshard_in_backward(False)
    seen: list[Tensor] = []
    model.blocks[1].register_forward_hook(lambda module, args, output: seen.append(output))
    for step in range(2):
        model.zero_grad()
        model(side.inputs(step))
        seen.pop().pow(2).mean().backward()
        side.note_gradients(model)
        side.assert_settled(model)
        assert len(gathers.calls) == side.is_sharded * (step + 1), "all-gathered once a step"


@on_ranks(2)
def test_weights_that_backward_needs_after_all_are_an_error() -> None:
    model = shard_tower(built(even_tower), reshard_after_forward=True)
    model.blocks[1].set_unshard_in_backward(False)
    text = outcome(lambda: model(random_batch(0, 4)).sum().backward())
    assert_says(text, "RuntimeError", "modified by an inplace operation")


# --- several roots, and starting over -------------------------------------------------------------


@same_as_plain(2)
def test_roots_that_share_their_lanes_train(side: Side) -> None:
    first, second = built(even_tower), built(language_model)
    side.shard_tower(first)
    side.shard_tower(second)
    if side.is_sharded:
        shardwise.share_comm_ctx([first, second])
    optimizer = torch.optim.AdamW([*first.parameters(), *second.parameters()], lr=1e-2)
    for step in range(2):
        optimizer.zero_grad()
        loss = mean_of_squares(first, side.inputs(step))
        loss = loss + next_token_loss(second, side.part(token_batch(step, 12)))
        loss.backward()
        side.note_mean("loss", loss)
        for model in (first, second):
            side.note_gradients(model)
            side.assert_settled(model)
        optimizer.step()
    if side.is_sharded:
        roots = {each.root for model in (first, second) for each in sharded_module_states(model)}
        assert len(roots) == 2
        assert len({id(root.lazy_init.streams) for root in roots}) == 1


@same_as_plain(2)
@pytest.mark.parametrize("after", [None, "early", "late", "backward", "unsynchronised", "not all-reduced"])
def test_iteration_state_may_be_reset_at_any_time(side: Side, after: str | None) -> None:
    """Before there is any, and where others need it to recover.

    It loses nothing but the failed iteration, or gradients that are not synchronised, as the peer documents.
    """
    replicas = after == "not all-reduced" and side.is_sharded
    mesh = {"mesh": init_device_mesh("cpu", (2, 1))} if replicas else {}
    model = side.shard_tower(built(fragile_tower), **mesh)
    optimizer = adamw(model)
    if side.is_sharded:
        model.reset_iter_state()
    side.step(model, optimizer, 0)
    if after == "unsynchronised":
        side.sync(model, False)
        mean_of_squares(model, side.inputs(9)).backward()
        side.sync(model, True)
    elif after == "not all-reduced":
        if side.is_sharded:
            model.set_requires_all_reduce(False)
            mean_of_squares(model, side.inputs(9)).backward()
            model.set_requires_all_reduce(True)
    elif after is not None:
        optimizer.zero_grad()
        model.blocks[1].fails = after
        with pytest.raises(Failure):
            mean_of_squares(model, side.inputs(5)).backward()
        model.blocks[1].fails = None
        optimizer.zero_grad()
    if side.is_sharded:
        model.reset_iter_state()
        side.assert_settled(model)
    side.steps(model, optimizer, [1, 2])


# --- refused --------------------------------------------------------------------------------------


class OnlyCalls:
    def __call__(self, *args: Any) -> None: ...


class OnlyAllocates:
    def allocate(self, *args: Any) -> None: ...


WRONG: list[tuple[str, tuple[Any, ...], dict[str, Any], str]] = [
    ("set_custom_all_gather", (None,), {}, "comm"),
    ("set_custom_all_gather", (OnlyCalls(),), {}, "allocate"),
    ("set_custom_all_gather", (OnlyAllocates(),), {}, "comm"),
    ("set_custom_all_gather", (AllGather,), {}, "comm"),
    ("set_custom_reduce_scatter", (OnlyCalls(),), {}, "allocate"),
    ("set_custom_reduce_scatter", (ReduceScatter,), {}, "comm"),
    ("set_all_reduce_hook", (3,), {}, "hook"),
    ("set_force_sum_reduction_for_comms", (1,), {}, "enable"),
    ("set_allocate_memory_from_process_group_for_comm", (1,), {}, "enable"),
    ("set_separate_reduce_scatter_group", ("yes",), {}, "enable"),
    ("set_separate_reduce_scatter_group", (True,), {"recurse": "no"}, "recurse"),
    ("set_reduce_scatter_max_input_buffers", (0,), {}, "max_input_buffers"),
    ("set_reduce_scatter_max_input_buffers", ("2",), {}, "max_input_buffers"),
    ("set_reduce_scatter_max_input_buffers", (True,), {}, "max_input_buffers"),
    ("set_reduce_scatter_max_input_buffers", (1,), {"recurse": 0}, "recurse"),
    ("set_unshard_in_backward", ("no",), {}, "unshard_in_backward"),
    ("set_requires_all_reduce", (1,), {}, "requires_all_reduce"),
    ("set_reduce_scatter_unused_params", (1,), {}, "reduce_scatter_unused_params"),
    ("set_reduce_ignored_params", ("yes",), {}, "set_reduce_ignored_params"),
    ("set_may_be_unused", ("yes",), {}, "set_may_be_unused"),
    ("set_post_optim_event", (3,), {}, "event"),
    ("set_symm_mem_for_comm", (3,), {}, "backend"),
    ("set_symm_mem_for_comm", ("GLOO",), {}, "backend"),
]


@pytest.mark.parametrize(("method", "args", "kwargs", "word"), WRONG, ids=lambda value: str(value)[:40])
def test_what_a_setter_cannot_use_is_refused_by_name(
    world1: World, method: str, args: Any, kwargs: Any, word: str
) -> None:
    call = Calling(method, args, kwargs)
    text = refusal(world1, call, build=sharded_tower, **SHARDED)
    assert text.startswith(("TypeError: ", "ValueError: ")), text
    assert_says(text, method, word)


def test_symmetric_memory_is_refused_where_there_is_none(world2: World) -> None:
    text = refusal(world2, Calling("set_symm_mem_for_comm"), build=sharded_tower, **SHARDED)
    assert_says(text, "set_symm_mem_for_comm", "cpu")
    assert text.startswith(("NotImplementedError: ", "RuntimeError: ", "ValueError: ")), text


def memory_after_custom(model: Any, setter: str, comm: Any) -> None:
    getattr(model, setter)(comm(returns_work=True))
    model.set_allocate_memory_from_process_group_for_comm(True)


@pytest.mark.parametrize(
    ("setter", "comm"), [("set_custom_all_gather", AllGather), ("set_custom_reduce_scatter", ReduceScatter)]
)
def test_a_custom_collective_stays_where_memory_of_the_group_is_asked_for(
    world1: World, setter: str, comm: Any
) -> None:
    act = partial(memory_after_custom, setter=setter, comm=comm)
    text = refusal(world1, act, build=sharded_tower, **SHARDED)
    assert_says(text, "set_allocate_memory_from_process_group_for_comm", setter)


def memory_of_any_group(pg: Any, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(numel, dtype=dtype, device=device)


@same_as_plain(2)
@pytest.mark.parametrize(
    ("setter", "comm", "ends"),
    [("set_custom_all_gather", AllGather, True), ("set_custom_reduce_scatter", ReduceScatter, False)],
)
def test_a_custom_collective_takes_the_place_of_memory_of_the_group(
    side: Side, setter: str, comm: type[Comm], ends: bool
) -> None:
    """Of a back end that has an allocator; ``ends``: its memory is let go of afterwards."""
    model: Any = side.shard_tower(built(even_tower))
    custom = comm(returns_work=True)
    with pytest.MonkeyPatch.context() as patch:
        if side.is_sharded:
            patch.setattr(c10d, "can_allocate", lambda pg, device: True)
            patch.setattr(c10d, "allocate_from_group", memory_of_any_group)
            model.set_allocate_memory_from_process_group_for_comm(True)
            getattr(model, setter)(custom)
            if ends:
                model.set_allocate_memory_from_process_group_for_comm(False)
        side.steps(model, adamw(model), [0])
    assert bool(custom.calls) == side.is_sharded


@pytest.mark.parametrize(
    ("modules", "word"),
    [([nn.Linear(2, 2)], "Linear"), (even_tower(), "modules"), ("model", "modules"), (None, "modules")],
)
def test_only_sharded_modules_share_their_lanes(modules: Any, word: str) -> None:
    with pytest.raises((TypeError, ValueError)) as caught:
        shardwise.share_comm_ctx(modules)
    assert_says(str(caught.value), "share_comm_ctx", word)


def tower_after_a_step() -> nn.Module:
    model = sharded_tower()
    model(random_batch(0, 4)).sum().backward()
    model.zero_grad()
    return model


def test_iteration_state_is_reset_on_the_root(world1: World) -> None:
    text = refusal(world1, Calling("reset_iter_state", on="blocks.0"), build=tower_after_a_step, **SHARDED)
    assert_says(text, "RuntimeError", "reset_iter_state", "root")
