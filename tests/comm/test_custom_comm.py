"""Whoever brings communication of their own: it is used, it sees what it may rely on, it changes no number.

Custom collectives, a hook on the reduced gradients, and the switches that say how to communicate. Results are
compared with plain training in float64.
"""

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from custom_comms import AllGather, Comm, Comms, ReduceScatter
from failure_models import Failure, fragile_tower
from harness import World
from models import built, even_tower, language_model, next_token_loss, random_batch, token_batch, uneven_tower
from reference import adamw, mean_of_squares
from refusals import SHARDED, Calling, assert_says, refusal, sharded_tower, tower
from scenario import Side, assert_same, same_as_plain
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import shardwise
from shardwise import FSDPModule
from shardwise.torch_compat import c10d

# --- custom collectives ---------------------------------------------------------------------------


def train_with_custom_comms(side: Side, make: Any, returns_work: bool, names: list[str] | None) -> None:
    model = side.shard_tower(built(make), reshard_after_forward=True)
    comms = Comms(model, names, returns_work) if side.is_sharded else None
    width = 7 if make is uneven_tower else 8
    optimizer = adamw(model)
    for step in range(3):
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
    """Of all parameters in the groups of these names, which are blocks."""
    modules = [model] if names is None else [model.get_submodule(name) for name in names]
    return sum(param.numel() for module in modules for param in module.parameters())


@pytest.mark.thin(36)
@pytest.mark.parametrize("returns_work", [True, False], ids=["work", "none"])
@pytest.mark.parametrize("make", [even_tower, uneven_tower])
@pytest.mark.parametrize("world", [1, 2, 3, 4], indirect=True)
def test_custom_collectives_carry_every_group(world: World, make: Any, returns_work: bool) -> None:
    assert_same(world, train_with_custom_comms, make, returns_work, None)


def test_custom_collectives_concern_the_group_they_were_set_on(world2: World) -> None:
    assert_same(world2, train_with_custom_comms, uneven_tower, True, ["blocks.1"])


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


@same_as_plain(2, 3)
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


@same_as_plain(2)
def test_custom_collectives_may_be_set_between_steps(side: Side) -> None:
    model = side.shard_tower(built(even_tower))
    optimizer = adamw(model)
    side.step(model, optimizer, 0)
    if side.is_sharded:
        Comms(model)
    optimizer.zero_grad()
    for microbatch in range(3):
        side.sync(model, microbatch == 2)
        mean_of_squares(model, side.inputs(microbatch)).backward()
    side.note_gradients(model)
    optimizer.step()
    side.steps(model, optimizer, [3])


# --- the hook on reduced gradients ----------------------------------------------------------------


def hook_that_scales(side: Side, on: str, mesh_shape: tuple[int, ...]) -> None:
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


@pytest.mark.thin(2)
@pytest.mark.parametrize("on", ["", "blocks.1"])
@pytest.mark.parametrize("world", [1, 2, 3], indirect=True)
def test_a_hook_sees_and_may_change_the_reduced_gradients(world: World, on: str) -> None:
    assert_same(world, hook_that_scales, on, (world.size,))


@pytest.mark.sample(3)
@pytest.mark.parametrize("shape", [(2, 2), (4, 1), (1, 4)], ids=str)
def test_with_replicas_the_hook_gets_what_was_reduced_over_all_ranks(world4: World, shape: Any) -> None:
    assert_same(world4, hook_that_scales, "blocks.1", shape)


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


# --- switches that change no number ---------------------------------------------------------------

Switch = Callable[[Any], None]


def sums_only(model: Any) -> None:
    model.set_force_sum_reduction_for_comms(True)


def sums_only_and_back(model: Any) -> None:
    model.set_force_sum_reduction_for_comms(True)
    model.set_force_sum_reduction_for_comms(False)


def memory_of_the_group(model: Any) -> None:
    model.set_allocate_memory_from_process_group_for_comm(True)


def memory_of_the_group_and_back(model: Any) -> None:
    model.set_allocate_memory_from_process_group_for_comm(True)
    model.set_allocate_memory_from_process_group_for_comm(False)


def a_group_for_reductions(model: Any) -> None:
    model.set_separate_reduce_scatter_group()


def a_group_for_one_block(model: Any) -> None:
    model.blocks[1].set_separate_reduce_scatter_group(True, recurse=False)


def a_group_and_back(model: Any) -> None:
    model.set_separate_reduce_scatter_group(True)
    model.set_separate_reduce_scatter_group(False)


def one_buffer(model: Any) -> None:
    model.set_reduce_scatter_max_input_buffers(1)


def many_buffers(model: Any) -> None:
    model.set_reduce_scatter_max_input_buffers(8)


def two_buffers_for_a_block(model: Any) -> None:
    model.blocks[1].set_reduce_scatter_max_input_buffers(2, recurse=False)


def an_event(model: Any) -> None:
    model.set_post_optim_event(torch.Event("cpu"))


SWITCHES = [
    sums_only,
    sums_only_and_back,
    memory_of_the_group,
    memory_of_the_group_and_back,
    a_group_for_reductions,
    a_group_for_one_block,
    a_group_and_back,
    one_buffer,
    many_buffers,
    two_buffers_for_a_block,
    an_event,
]


@same_as_plain(1, 2, 3)
@pytest.mark.thin(13)
@pytest.mark.parametrize("switch", SWITCHES)
def test_how_to_communicate_changes_no_number(side: Side, switch: Switch) -> None:
    model = side.shard_tower(built(uneven_tower))
    optimizer = adamw(model)
    for step in range(3):
        if side.is_sharded and step < 2:
            switch(model)
        optimizer.zero_grad()
        for microbatch in range(2):
            side.sync(model, microbatch == 1)
            mean_of_squares(model, side.inputs(2 * step + microbatch, 7)).backward()
        side.note_gradients(model)
        optimizer.step()
        side.assert_settled(model)
    side.note_parameters(model)


def ops_of_reductions(factor: float | None) -> tuple[list[str], float]:
    model = sharded_tower()
    comms = Comms(model)
    model.set_force_sum_reduction_for_comms(True)
    if factor is not None:
        model.set_gradient_divide_factor(factor)
    plain = built_like(model)
    for each in (model, plain):
        each(random_batch(0, 4)).pow(2).mean().backward()
    ratio = model.outlet.bias.grad.full_tensor() / plain.outlet.bias.grad
    return [call["op"] for call in comms.reduce.calls], ratio.item()


def built_like(model: nn.Module) -> Any:
    plain = tower()
    with torch.no_grad():
        for mine, theirs in zip(plain.parameters(), model.parameters(), strict=True):
            mine.copy_(theirs.full_tensor())
    return plain


@pytest.mark.thin(3)
@pytest.mark.parametrize("factor", [None, 0.5, 8.0])
@pytest.mark.parametrize("world", [2, 3], indirect=True)
def test_only_sums_are_asked_for_where_sums_are_forced(world: World, factor: float | None) -> None:
    for ops, ratio in world.run(ops_of_reductions, factor):
        assert ops == ["SUM"] * len(ops)
        assert ops
        assert ratio == pytest.approx(1.0 if factor is None else world.size / factor, abs=1e-10)


def groups_used(enable: bool) -> tuple[set[str], set[str]]:
    model = sharded_tower()
    comms = Comms(model)
    model.set_separate_reduce_scatter_group(True)
    model.set_separate_reduce_scatter_group(enable)
    model(random_batch(0, 4)).pow(2).mean().backward()
    return tuple({call["group"] for call in comm.calls} for comm in (comms.gather, comms.reduce))  # type: ignore


def test_reductions_get_a_group_of_their_own(world2: World) -> None:
    for gathers, reductions in world2.run(groups_used, enable=True):
        assert len(gathers) == len(reductions) == 1
        assert gathers != reductions


def test_reductions_give_their_group_back(world2: World) -> None:
    for gathers, reductions in world2.run(groups_used, enable=False):
        assert gathers == reductions


def event_is_let_go() -> list[bool]:
    """The root waits for an event once, at its next forward."""
    model = sharded_tower()
    model(random_batch(0, 4)).sum().backward()
    event = torch.Event("cpu")
    alive = weakref.ref(event)
    model.set_post_optim_event(event)
    del event
    before = alive() is not None
    model(random_batch(0, 4)).sum().backward()
    return [before, alive() is not None]


def test_an_event_is_kept_until_the_next_forward_and_no_longer(world1: World) -> None:
    assert world1.run(event_is_let_go) == [[True, False]]


# --- weights that backward does not need ----------------------------------------------------------


@same_as_plain(2, 3)
def test_an_embedding_need_not_be_unsharded_for_backward(side: Side) -> None:
    model = built(language_model)
    side.shard(model.embed, *model.blocks, model, reshard_after_forward=True)
    gathers = AllGather(returns_work=True)
    if side.is_sharded:
        model.embed.set_custom_all_gather(gathers)
        model.embed.set_unshard_in_backward(False)
    optimizer = adamw(model)
    for step in range(3):
        optimizer.zero_grad()
        loss = next_token_loss(model, side.part(token_batch(step, 12)))
        loss.backward()
        side.note_mean("loss", loss)
        side.note_gradients(model)
        optimizer.step()
        side.assert_settled(model)
        if side.is_sharded:
            assert len(gathers.calls) == 1, f"all-gathered {len(gathers.calls)} times in a step"
            gathers.calls.clear()
    side.note_parameters(model)


@same_as_plain(2)
def test_a_root_need_not_be_unsharded_for_a_loss_inside(side: Side) -> None:
    """The loss comes from what a block has put out, not from the root's output, inside whose call it ran."""
    model = built(even_tower)
    side.shard(*model.blocks, reshard_after_forward=True)
    side.shard(model, reshard_after_forward=True)
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
        if side.is_sharded:
            assert len(gathers.calls) == 1, f"all-gathered {len(gathers.calls)} times in a step"
            gathers.calls.clear()


def backward_without_its_weights() -> str:
    model = built(even_tower)
    for block in model.blocks:
        shardwise.fully_shard(block, reshard_after_forward=True)
    shardwise.fully_shard(model)
    model.blocks[1].set_unshard_in_backward(False)
    try:
        model(random_batch(0, 4)).sum().backward()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


def test_weights_that_backward_needs_after_all_are_an_error(world2: World) -> None:
    for text in world2.run(backward_without_its_weights):
        assert_says(text, "RuntimeError", "modified by an inplace operation")


# --- several roots, and starting over -------------------------------------------------------------


@same_as_plain(1, 2)
def test_roots_that_share_their_lanes_train(side: Side) -> None:
    first, second = built(even_tower), built(language_model)
    side.shard_tower(first)
    side.shard_tower(second)
    if side.is_sharded:
        shardwise.share_comm_ctx([first, second])
    optimizer = torch.optim.AdamW([*first.parameters(), *second.parameters()], lr=1e-2)
    for step in range(3):
        optimizer.zero_grad()
        loss = mean_of_squares(first, side.inputs(step))
        loss = loss + next_token_loss(second, side.part(token_batch(step, 12)))
        loss.backward()
        side.note_mean("loss", loss)
        for model in (first, second):
            side.note_gradients(model)
            side.assert_settled(model)
        optimizer.step()


@same_as_plain(2)
@pytest.mark.sample(2)
@pytest.mark.parametrize("fails", [None, "early", "late", "backward"])
def test_iteration_state_may_be_reset_at_any_time(side: Side, fails: str | None) -> None:
    """Where others need it to recover, it may be called; it loses nothing but the failed iteration."""
    model = side.shard_tower(built(fragile_tower))
    optimizer = adamw(model)
    side.step(model, optimizer, 0)
    if fails is not None:
        optimizer.zero_grad()
        model.blocks[1].fails = fails
        with pytest.raises(Failure):
            mean_of_squares(model, side.inputs(5)).backward()
        model.blocks[1].fails = None
    optimizer.zero_grad()
    if side.is_sharded:
        model.reset_iter_state()
        side.assert_settled(model)
    side.steps(model, optimizer, [1, 2])


@same_as_plain(2)
def test_iteration_state_may_be_reset_before_there_is_any(side: Side) -> None:
    model = side.shard_tower(built(even_tower))
    if side.is_sharded:
        model.reset_iter_state()
    side.steps(model, adamw(model), range(2))


@same_as_plain(2)
def test_a_reset_drops_unsynchronised_gradients(side: Side) -> None:
    """As the peer documents: unsynchronised gradients of the iteration are discarded."""
    model = side.shard_tower(built(even_tower))
    optimizer = adamw(model)
    if side.is_sharded:
        model.set_requires_gradient_sync(False)
        mean_of_squares(model, side.inputs(9)).backward()
        model.set_requires_gradient_sync(True)
        model.reset_iter_state()
    side.steps(model, optimizer, range(2))


# --- refused --------------------------------------------------------------------------------------


class OnlyCalls:
    """Has no allocate."""

    def __call__(self, *args: Any) -> None: ...


class OnlyAllocates:
    def allocate(self, *args: Any) -> None: ...


WRONG: list[tuple[str, tuple[Any, ...], dict[str, Any], str]] = [
    ("set_custom_all_gather", (None,), {}, "comm"),
    ("set_custom_all_gather", (3,), {}, "comm"),
    ("set_custom_all_gather", (OnlyCalls(),), {}, "allocate"),
    ("set_custom_all_gather", (OnlyAllocates(),), {}, "comm"),
    ("set_custom_all_gather", (AllGather,), {}, "comm"),
    ("set_custom_reduce_scatter", (None,), {}, "comm"),
    ("set_custom_reduce_scatter", (OnlyCalls(),), {}, "allocate"),
    ("set_custom_reduce_scatter", (OnlyAllocates(),), {}, "comm"),
    ("set_custom_reduce_scatter", (ReduceScatter,), {}, "comm"),
    ("set_all_reduce_hook", (3,), {}, "hook"),
    ("set_all_reduce_hook", ("mean",), {}, "hook"),
    ("set_force_sum_reduction_for_comms", (1,), {}, "enable"),
    ("set_force_sum_reduction_for_comms", ("yes",), {}, "enable"),
    ("set_allocate_memory_from_process_group_for_comm", (1,), {}, "enable"),
    ("set_allocate_memory_from_process_group_for_comm", (None,), {}, "enable"),
    ("set_separate_reduce_scatter_group", ("yes",), {}, "enable"),
    ("set_separate_reduce_scatter_group", (1,), {}, "enable"),
    ("set_separate_reduce_scatter_group", (True,), {"recurse": "no"}, "recurse"),
    ("set_reduce_scatter_max_input_buffers", (0,), {}, "max_input_buffers"),
    ("set_reduce_scatter_max_input_buffers", (-1,), {}, "max_input_buffers"),
    ("set_reduce_scatter_max_input_buffers", ("2",), {}, "max_input_buffers"),
    ("set_reduce_scatter_max_input_buffers", (1.5,), {}, "max_input_buffers"),
    ("set_reduce_scatter_max_input_buffers", (True,), {}, "max_input_buffers"),
    ("set_reduce_scatter_max_input_buffers", (None,), {}, "max_input_buffers"),
    ("set_reduce_scatter_max_input_buffers", (1,), {"recurse": 0}, "recurse"),
    ("set_unshard_in_backward", ("no",), {}, "unshard_in_backward"),
    ("set_unshard_in_backward", (0,), {}, "unshard_in_backward"),
    ("set_requires_all_reduce", (1,), {}, "requires_all_reduce"),
    ("set_reduce_scatter_unused_params", (1,), {}, "reduce_scatter_unused_params"),
    ("set_reduce_ignored_params", ("yes",), {}, "set_reduce_ignored_params"),
    ("set_may_be_unused", ("yes",), {}, "set_may_be_unused"),
    ("set_post_optim_event", (3,), {}, "event"),
    ("set_post_optim_event", ("now",), {}, "event"),
    ("set_symm_mem_for_comm", (3,), {}, "backend"),
    ("set_symm_mem_for_comm", ("GLOO",), {}, "backend"),
]


@pytest.mark.sample(2)
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
    ("setter", "comm"),
    [("set_custom_all_gather", AllGather), ("set_custom_reduce_scatter", ReduceScatter)],
)
def test_a_custom_collective_stays_where_memory_of_the_group_is_asked_for(
    world1: World, setter: str, comm: Any
) -> None:
    (text,) = world1.run(error_of, partial(memory_after_custom, setter=setter, comm=comm))
    assert_says(text, "set_allocate_memory_from_process_group_for_comm", setter)


def memory_of_any_group(pg: Any, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(numel, dtype=dtype, device=device)


@same_as_plain(2)
@pytest.mark.parametrize("ends", [False, True])
@pytest.mark.parametrize(
    ("setter", "comm"),
    [("set_custom_all_gather", AllGather), ("set_custom_reduce_scatter", ReduceScatter)],
)
def test_a_custom_collective_takes_the_place_of_memory_of_the_group(
    side: Side, setter: str, comm: type[Comm], ends: bool
) -> None:
    """Of a back end that has an allocator; ``ends``: its memory is let go of afterwards."""
    model: Any = side.shard_tower(built(even_tower))
    custom = comm(returns_work=True)
    if side.is_sharded:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(c10d, "can_allocate", lambda pg, device: True)
            patch.setattr(c10d, "allocate_from_group", memory_of_any_group)
            model.set_allocate_memory_from_process_group_for_comm(True)
            getattr(model, setter)(custom)
            if ends:
                model.set_allocate_memory_from_process_group_for_comm(False)
            optimizer = adamw(model)
            side.step(model, optimizer, 0)
            assert custom.calls
    else:
        side.step(model, adamw(model), 0)
    side.note_parameters(model)


def error_of(act: Callable[[nn.Module], None]) -> str:
    model = sharded_tower()
    try:
        act(model)
    except (RuntimeError, ValueError) as error:
        model(random_batch(0, 4)).sum().backward()  # it still trains
        return f"{type(error).__name__}: {error}"
    return "accepted"


def not_sharded() -> Any:
    return [nn.Linear(2, 2)]


def a_single_module() -> Any:
    return sharded_tower()


def a_string() -> Any:
    return "model"


def nothing_at_all() -> Any:
    return None


def error_of_sharing(make: Callable[[], Any]) -> str:
    try:
        shardwise.share_comm_ctx(make())
    except (TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


@pytest.mark.parametrize("make", [not_sharded, a_single_module, a_string, nothing_at_all])
def test_only_sharded_modules_share_their_lanes(world1: World, make: Any) -> None:
    (text,) = world1.run(error_of_sharing, make)
    assert_says(text, "share_comm_ctx", "modules" if make is not not_sharded else "Linear")


def error_of_resetting_a_block() -> str:
    model = sharded_tower()
    model(random_batch(0, 4)).sum().backward()
    with pytest.raises(RuntimeError) as caught:
        model.blocks[0].reset_iter_state()
    return str(caught.value)


def test_iteration_state_is_reset_on_the_root(world1: World) -> None:
    (text,) = world1.run(error_of_resetting_a_block)
    assert_says(text, "reset_iter_state", "root")
