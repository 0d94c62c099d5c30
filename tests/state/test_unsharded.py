"""unsharded: inside, modules have their full parameters; after it, their shards again, edits included.

An edit inside is the same edit as in plain PyTorch: what is trained after it equals plain training on the
global batch in float64 to 1e-10, whatever the strategy, the number of ranks and the way of editing.
"""

import re
from collections.abc import Callable
from contextlib import nullcontext, suppress
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from comparing import alike, assert_all_same, assert_equal
from expecttest import assert_expected_inline
from failure_models import Failure
from harness import World
from meshed import Layout, assert_refused_in_a_pass, gradients_of, parameters_of, refusal, tensors_of, whole
from models import Tower, built, even_tower, language_model, odd_model, random_batch, uneven_tower
from on_ranks import on_ranks
from reference import adamw, mean_of_squares
from refusals import wrapped
from scenario import Side, same_as_plain
from strategies import Plan, live_bytes, part, plainly, step
from tensor_subclasses import TravelsLow
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import shardwise
from shardwise import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

by_strategy = pytest.mark.parametrize("strategy", ["zero3", "zero1", "ddp"])

ZERO3 = Plan("zero3", 2)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tower = Tower(width=7, hidden=13, depth=2)
        self.tower.blocks[1].up.weight = self.tower.blocks[0].up.weight
        self.twice = nn.Linear(7, 7)
        self.twice.weight = self.tower.inlet.weight
        self.gain = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.tower(self.twice(x) * self.gain)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.LSTM(8, 8, batch_first=True) for _ in range(2))
        self.outlet = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = x.view(-1, 1, 8)
        for block in self.blocks:
            x = block(x)[0]
        return self.outlet(x[:, -1])


MODELS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "odd": (odd_model, 8),
    "tied": (Tied, 7),
    "recurrent": (Recurrent, 8),
}


def opened(model: nn.Module, plan: Plan | None, **options: Any) -> Any:
    return nullcontext() if plan is None else shardwise.unsharded(model, **options)


# --- what is seen inside --------------------------------------------------------------------------


def seen_inside(plan: Plan | None, name: str) -> dict[str, Any]:
    make, width = MODELS[name]
    model = built(make)
    next(model.parameters()).is_special = True
    if plan is not None:
        plan.shard(model)
    step(model, torch.optim.SGD(model.parameters(), lr=0.1), plan, 0, width)
    notes: dict[str, Any] = {}
    with opened(model, plan):
        for fqn, param in model.named_parameters(remove_duplicate=False):
            module_name, _, own = fqn.rpartition(".")
            module = model.get_submodule(module_name)
            assert getattr(module, own) is param
            assert type(param) is nn.Parameter
            notes |= {fqn: param.detach().clone(), f"{fqn} trains": param.requires_grad}
            notes[f"{fqn} is a leaf"] = param.is_leaf
            if type(module) is nn.Linear:  # as an analysis does, without a forward of a sharded module
                notes[f"{module_name} computes"] = module(random_batch(0, 2, module.in_features)).detach()
        for fqn, value in model.state_dict().items():
            assert not isinstance(value, DTensor)
            notes[f"state of {fqn}"] = value.clone()
        notes["order"] = [fqn for fqn, _ in model.named_parameters()]
        notes["attribute"] = next(model.parameters()).is_special
    assert next(model.parameters()).is_special
    if plan is not None:
        assert all(isinstance(param, DTensor) for param in model.parameters())
    return notes


def all_seen(plan: Plan | None) -> dict[str, Any]:
    return {f"{n}: {what}": value for n in MODELS for what, value in seen_inside(plan, n).items()}


@pytest.mark.parametrize(
    ("plan", "world"), [(Plan("zero1", 3), 3), (Plan("hybrid_zero2", 4, 2), 4)], indirect=["world"], ids=str
)
def test_modules_have_their_full_parameters_and_their_attributes_inside_and_compute_with_them(
    world: World, plan: Plan
) -> None:
    assert_all_same(world.run(all_seen, plan), plainly(all_seen))


@on_ranks(2)
def test_under_mixed_precision_they_have_full_precision_and_edits_keep_all_their_digits() -> None:
    """What is shown is in the dtype in which it is stored, and so is an edit too fine for that of computation."""
    torch.manual_seed(1234)
    plain = uneven_tower()
    model = deepcopy(plain)
    ZERO3.shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
    model(random_batch(0, 2, 7, torch.float32))
    with shardwise.unsharded(model), torch.no_grad():
        assert_equal(model.state_dict(), plain.state_dict())
        for param in model.parameters():
            param.fill_(1 + 2.0**-20)
    assert all((whole(param) == 1 + 2.0**-20).all() for param in model.parameters())


PARTS: dict[str, tuple[str, dict[str, Any], Callable[[str], bool]]] = {
    "root alone": ("", {"recurse": False}, lambda name: not name.startswith("blocks.")),
    "a block": ("blocks.1", {}, lambda name: name.startswith("blocks.1.")),
    "a block alone": ("blocks.1", {"recurse": False}, lambda name: name.startswith("blocks.1.")),
    "a list of blocks": ("blocks", {}, lambda name: name.startswith("blocks.")),
    "all": ("", {"recurse": True}, lambda name: True),
}


@on_ranks(2)
def test_recurse_says_which_groups() -> None:
    model = ZERO3.shard(built(uneven_tower))
    for how, (module_name, options, is_inside) in PARTS.items():
        with shardwise.unsharded(model.get_submodule(module_name), **options):
            for name, param in model.named_parameters():
                assert isinstance(param, DTensor) is not is_inside(name), f"{how}: {name}"


def on_one_rank(plan: Plan, offload_to_cpu: bool) -> tuple[bool, dict[str, Any]]:
    model = plan.shard(built(uneven_tower))
    mean_of_squares(model, part(plan, 0, 7)).backward()
    options = {"rank0_only": True, "with_grads": True, "offload_to_cpu": offload_to_cpu}
    with shardwise.unsharded(model, writeback=False, **options):
        shards = [isinstance(each, DTensor) for param in model.parameters() for each in (param, param.grad)]
        values = {} if all(shards) else tensors_of(model)
    assert all(isinstance(param, DTensor) for param in model.parameters())
    step(model, adamw(model), plan, 0, 7)
    return any(shards), values


@pytest.mark.parametrize(
    ("plan", "world", "offload_to_cpu"),
    [(ZERO3, 2, True), (Plan("ddp", 2), 2, False), (Plan("hybrid", 4, 2), 4, False)],
    indirect=["world"],
    ids=str,
)
def test_rank0_only_fills_the_first_rank_alone_gradients_too(
    world: World, plan: Plan, offload_to_cpu: bool
) -> None:
    model = built(uneven_tower)
    mean_of_squares(model, part(None, 0, 7)).backward()
    (is_any_a_shard, values), *others = world.run(on_one_rank, plan, offload_to_cpu)
    assert not is_any_a_shard
    assert_all_same([values], tensors_of(model))
    assert all(other == (True, {}) for other in others)


@pytest.mark.parametrize("writes", [True, False])
@on_ranks(4)
def test_tensor_parallel_parameters_are_dtensors_on_their_own_mesh(writes: bool) -> None:
    """A mesh of data and tensor parallel: what was a DTensor before fully_shard is the same again."""
    layout = Layout((2, 2), ("dp", "tp"), ("dp",))
    model = built(even_tower)
    for block in model.blocks:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(block, layout.mesh()["tp"], plan)
    placed = {n: p.placements for n, p in model.named_parameters() if isinstance(p, DTensor)}
    shardwise.shard_model(model, strategy="zero3", mesh=layout.mesh()["dp"])
    kept, before = list(model.parameters()), parameters_of(model)
    with shardwise.unsharded(model, writeback=writes), torch.no_grad():
        for name, param in model.named_parameters():
            assert isinstance(param, DTensor) is (name in placed), name
            if isinstance(param, DTensor):
                assert param.placements == placed[name], name
                assert param.device_mesh == layout.mesh()["tp"], name
            param.mul_(0.9)
    assert all(now is then for now, then in zip(model.parameters(), kept, strict=True))
    want = {name: value * (0.9 if writes else 1.0) for name, value in before.items()}
    assert_equal(parameters_of(model), want)


# --- edits ----------------------------------------------------------------------------------------

Edit = Callable[[nn.Module], None]


@torch.no_grad()
def in_place(model: nn.Module) -> None:
    for index, param in enumerate(model.parameters()):
        if param.is_floating_point():
            param.mul_(0.9).add_(0.01 * index)


def through_data(model: nn.Module) -> None:
    for param in model.parameters():
        if param.is_floating_point():
            param.data.mul_(0.9).add_(0.02)


def by_new_data(model: nn.Module) -> None:
    for param in model.parameters():
        if param.is_floating_point():
            param.data = param.data * 0.9 + 0.03


def by_new_data_laid_out_otherwise(model: nn.Module) -> None:
    for param in model.parameters():
        if param.is_floating_point() and param.dim() == 2:
            param.data = (param.data.t() * 0.9).contiguous().t()


def by_new_parameters(model: nn.Module) -> None:
    seen: dict[int, int] = {}
    for module in model.modules():
        for param in module._parameters.values():
            seen[id(param)] = seen.get(id(param), 0) + 1
    for module in model.modules():
        for name, param in list(module._parameters.items()):
            if param is not None and param.is_floating_point() and seen[id(param)] == 1:
                value = param.detach().clone() * 0.9 + 0.04
                setattr(module, name, nn.Parameter(value, requires_grad=param.requires_grad))


def by_a_single_element(model: nn.Module) -> None:
    with torch.no_grad():
        next(param for param in model.parameters() if param.dim() == 2)[1, 0] = 0.7


def parameters_scaled(model: nn.Module, factor: float) -> dict[str, Tensor]:
    """A state dict without buffers, which are nobody's to write back."""
    return {
        name: value * factor if value.is_floating_point() else value.clone()
        for name, value in model.state_dict().items()
        if "offset" not in name
    }


def by_loading(model: nn.Module) -> None:
    model.load_state_dict(parameters_scaled(model, 0.9), strict=False)


def by_assigning(model: nn.Module) -> None:
    model.load_state_dict(parameters_scaled(model, 0.95), strict=False, assign=True)


def freezing(model: nn.Module) -> None:
    frozen = [param for param in model.parameters() if param.is_floating_point()][::2]
    for param in frozen:
        param.requires_grad_(not param.requires_grad)


EDITS: dict[str, Edit] = {
    edit.__name__: edit
    for edit in (
        *(in_place, through_data, by_new_data, by_new_data_laid_out_otherwise, by_new_parameters),
        *(by_a_single_element, by_loading, by_assigning, freezing),
    )
}
EXCEPT = {("by_assigning", "tied")}  # in plain PyTorch, ties come apart where a state dict is assigned


def edited(
    plan: Plan | None, name: str, edit: str, writeback: bool, offload_to_cpu: bool = False
) -> dict[str, Any]:
    """Train, edit, train: with parameters that are the same objects all along."""
    make, width = MODELS[name]
    model = built(make)
    if plan is not None:
        plan.shard(model)
    optimizer = adamw(model)
    before = [(n, p) for n, p in model.named_parameters(remove_duplicate=False)]
    step(model, optimizer, plan, 0, width)
    if plan is not None:
        with shardwise.unsharded(model, writeback=writeback, offload_to_cpu=offload_to_cpu):
            EDITS[edit](model)
    elif writeback:
        edit_in_place(model, EDITS[edit])
    step(model, optimizer, plan, 1, width)
    after = list(model.named_parameters(remove_duplicate=False))
    assert [n for n, _ in after] == [n for n, _ in before]
    assert all(now is then for (_, now), (_, then) in zip(after, before, strict=True))
    in_optimizer = optimizer.param_groups[0]["params"]
    assert [id(param) for param in in_optimizer] == [id(param) for param in model.parameters()]
    return tensors_of(model) | {f"{n} trains": p.requires_grad for n, p in model.named_parameters()}


def edit_in_place(model: nn.Module, edit: Edit) -> None:
    """Some edits replace parameters, which the optimizer of a plain run would not notice."""
    twin = deepcopy(model)
    edit(twin)
    with torch.no_grad():
        for param, new in zip(model.parameters(), twin.parameters(), strict=True):
            param.copy_(new)
            param.requires_grad_(new.requires_grad)


def for_all(
    plan: Plan | None,
    program: Callable[..., Any],
    edits: tuple[str, ...],
    names: tuple[str, ...],
    *args: bool,
) -> dict[str, Any]:
    return {
        f"{name}, {edit}: {what}": value
        for name in names
        for edit in edits
        if (edit, name) not in EXCEPT
        for what, value in program(plan, name, edit, *args).items()
    }


@pytest.mark.sample(4)
@pytest.mark.parametrize("edit", EDITS)
def test_training_after_an_edit_is_as_after_the_same_edit_in_plain_pytorch(world3: World, edit: str) -> None:
    names = tuple(MODELS) if edit in ("in_place", "by_new_parameters") else ("odd", "tied")
    want = plainly(for_all, edited, (edit,), names, True)
    assert_all_same(world3.run(for_all, Plan("zero3", 3), edited, (edit,), names, True), want)


@pytest.mark.parametrize(
    ("plan", "world", "writeback", "offload_to_cpu"),
    [
        (Plan("ddp", 2), 2, False, False),
        (ZERO3, 2, True, True),
        (Plan("zero1", 3), 3, False, False),
        (Plan("hybrid_zero2", 4, 2), 4, True, False),
    ],
    indirect=["world"],
    ids=str,
)
def test_edits_persist_under_every_strategy_and_none_does_without_writeback(
    world: World, plan: Plan, writeback: bool, offload_to_cpu: bool
) -> None:
    """Also where nothing is sharded and the full parameters could have been the shards themselves."""
    edits = ("in_place", "by_new_parameters", *(() if writeback else ("by_new_data", "freezing")))
    want = plainly(for_all, edited, edits, ("tied",), writeback)
    assert_all_same(world.run(for_all, plan, edited, edits, ("tied",), writeback, offload_to_cpu), want)


OTHERWISE: dict[str, dict[str, Any]] = {
    "dim 1, host": {
        "shard_placement_fn": lambda param: Shard(1) if param.dim() == 2 else None,
        "offload_policy": CPUOffloadPolicy(),
    },
    "float64": {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.float64, reduce_dtype=torch.float64)},
}


@pytest.mark.parametrize("how", OTHERWISE)
@same_as_plain(3)
def test_edits_reach_shards_that_lie_otherwise(side: Side, how: str) -> dict[str, Any]:
    """What is edited lies elsewhere or otherwise: on another dim, in host memory, in low precision."""
    model, plan = built(language_model), Plan("zero3", 3) if side.is_sharded else None
    if plan is not None:
        plan.shard(model, **OTHERWISE[how])
    optimizer = adamw(model)
    for index in range(2):
        optimizer.zero_grad()
        tokens = side.part(torch.arange(12 * 4).view(12, 4) * (index + 3) % 29)
        model(tokens).square().mean().backward()
        with opened(model, plan, with_grads=True):
            with torch.no_grad():
                for param in model.parameters():
                    assert param.grad is not None
                    assert param.grad.shape == param.shape
                    param.mul_(0.9)
                    param.grad.mul_(0.5)
            assert model.head.weight.shape == (29, 12)
        optimizer.step()
    return tensors_of(model)


@by_strategy
@same_as_plain(2)
def test_edits_between_microbatches_count_from_the_next_one_on(side: Side, strategy: str) -> dict[str, Any]:
    """What a strategy keeps unsharded must not outlive an edit; what waits unreduced must."""
    model, plan = built(uneven_tower), Plan(strategy, 2) if side.is_sharded else None
    if plan is not None:
        plan.shard(model)
    for microbatch in range(3):
        side.sync(model, microbatch == 2)
        mean_of_squares(model, side.inputs(microbatch, 7)).backward()
        if microbatch < 2:
            with opened(model, plan):
                in_place(model)
    return tensors_of(model)


@by_strategy
@same_as_plain(2)
def test_an_exception_inside_loses_no_edit(side: Side, strategy: str) -> dict[str, Any]:
    model, plan = built(uneven_tower), Plan(strategy, 2) if side.is_sharded else None
    if plan is not None:
        plan.shard(model)
    optimizer = adamw(model)
    for index in range(2):
        with suppress(Failure), opened(model, plan):
            in_place(model)
            raise Failure("inside")
        step(model, optimizer, plan, index, 7)
    return tensors_of(model)


@pytest.mark.parametrize("how", ["shape", "new data", "deleted"])
@same_as_plain(2)
def test_a_replacement_that_does_not_fit_is_refused_by_name(side: Side, how: str) -> None:
    model = side.shard_tower(built(uneven_tower))
    kept = list(model.parameters())

    def act() -> None:
        with shardwise.unsharded(model):
            layer = model.blocks[1].up
            if how == "shape":
                layer.weight = nn.Parameter(torch.ones(3, 3).double())
            elif how == "new data":
                layer.weight.data = torch.ones(3, 3).double()
            else:
                del layer.weight

    if side.is_sharded:
        told = refusal(act)
        assert "blocks.1.up.weight" in told
        assert told.startswith(("ValueError", "RuntimeError"))
        assert all(now is before for now, before in zip(model.parameters(), kept, strict=True))
    side.steps(model, adamw(model), [0], width=7)


# --- gradients ------------------------------------------------------------------------------------


@torch.no_grad()
def scale(model: nn.Module) -> None:
    for param in model.parameters():
        if param.grad is not None:
            param.grad.mul_(0.5)


def clear_some(model: nn.Module) -> None:
    for param in list(model.parameters())[::2]:
        param.grad = None


def give_to_some(model: nn.Module) -> None:
    for param in model.parameters():
        if param.grad is None and param.requires_grad and param.is_floating_point():
            param.grad = torch.full_like(param, 0.1)


GRADIENT_EDITS: dict[str, Edit] = {edit.__name__: edit for edit in (scale, clear_some, give_to_some)}


def with_gradients(plan: Plan | None, name: str, edit: str, writeback: bool) -> dict[str, Any]:
    make, width = MODELS[name]
    model = built(make)
    if plan is not None:
        plan.shard(model)
    optimizer = adamw(model)
    notes: dict[str, Any] = {}
    for index in range(2):
        optimizer.zero_grad()
        mean_of_squares(model, part(plan, index, width)).backward()
        with opened(model, plan, with_grads=True, writeback=writeback):
            for fqn, param in model.named_parameters():
                assert not isinstance(param.grad, DTensor)
                notes[f"gradient of {fqn} at step {index}"] = (
                    None if param.grad is None else param.grad.clone()
                )
            if plan is not None or writeback:
                GRADIENT_EDITS[edit](model)
        mean_of_squares(model, part(plan, 5, width)).backward()  # adds to what was left
        optimizer.step()
    return notes | tensors_of(model)


@pytest.mark.parametrize(
    ("plan", "world", "writeback"),
    [
        (ZERO3, 2, True),
        (Plan("ddp", 2), 2, True),
        (Plan("zero1", 3), 3, False),
        (Plan("hybrid_zero2", 4, 2), 4, True),
    ],
    indirect=["world"],
    ids=str,
)
def test_gradients_are_seen_whole_and_edited_unless_writeback_is_off(
    world: World, plan: Plan, writeback: bool
) -> None:
    edits, names = ("clear_some",) if not writeback else ("scale", "clear_some"), ("tied",)
    if plan == ZERO3:
        edits, names = tuple(GRADIENT_EDITS), ("odd", "tied")
    want = plainly(for_all, with_gradients, edits, names, writeback)
    assert_all_same(world.run(for_all, plan, with_gradients, edits, names, writeback), want)


@on_ranks(2)
def test_without_with_grads_gradients_are_left_alone() -> None:
    """Full parameters have none, and those of the shards stay."""
    model = ZERO3.shard(built(uneven_tower))
    mean_of_squares(model, part(ZERO3, 0, 7)).backward()
    before = [param.grad for param in model.parameters()]
    with shardwise.unsharded(model):
        assert all(param.grad is None for param in model.parameters())
    assert all(p.grad is g for p, g in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("with_grads", [False, True])
@on_ranks(2)
def test_a_backward_through_full_parameters_after_the_end_is_refused(with_grads: bool) -> None:
    model = ZERO3.shard(built(even_tower))
    with shardwise.unsharded(model, with_grads=with_grads):
        penalty = model.inlet.bias.pow(2).sum()
    assert_expected_inline(
        refusal(penalty.backward),
        """RuntimeError: inlet.bias: a gradient of its full parameter arrived after the end of unsharded(), and would be lost. Run this backward inside, with unsharded(model, with_grads=True).""",
    )
    assert all(param.grad is None for param in model.parameters())


@same_as_plain(2)
def test_gradients_that_wait_unsynchronised_are_refused_by_name(side: Side) -> dict[str, Any]:
    model = side.shard_tower(built(uneven_tower))
    side.sync(model, False)
    mean_of_squares(model, side.inputs(0, 7)).backward()
    if side.is_sharded:
        told = refusal(shardwise.unsharded(model, with_grads=True).__enter__)
        assert re.match("RuntimeError: unsharded.with_grads=True.*(inlet|blocks.0|Tower)", told), told
    side.sync(model, True)
    mean_of_squares(model, side.inputs(1, 7)).backward()
    return tensors_of(model)


# --- in time --------------------------------------------------------------------------------------


def between_forward_and_backward(plan: Plan | None, edits: bool) -> Any:
    """Looked at, it disturbs no backward. Edited, backward must not use other weights than forward."""
    model = built(uneven_tower)
    if plan is not None:
        plan.shard(model)
    loss = mean_of_squares(model, part(plan, 0, 7))
    with opened(model, plan), torch.no_grad():
        total = sum(param.sum() for param in model.parameters())
        if edits:
            for param in model.parameters():
                param.mul_(0.9)
    if edits:
        message = refusal(loss.backward)
        model.zero_grad()
    else:
        loss.backward()
        message = ""
    notes = gradients_of(model)
    mean_of_squares(model, part(plan, 1, 7)).backward()
    return message, {"total": total, **notes, **{f"{n} then": v for n, v in tensors_of(model).items()}}


@pytest.mark.parametrize("edits", [False, True])
@by_strategy
def test_it_may_be_entered_between_forward_and_backward_and_an_edit_there_is_noticed(
    world2: World, strategy: str, edits: bool
) -> None:
    told, want = plainly(between_forward_and_backward, edits)
    said = "RuntimeError: ", "modified by an inplace operation"
    assert not edits or said[1] in told
    for message, found in world2.run(between_forward_and_backward, Plan(strategy, 2), edits, timeout=20):
        assert message.startswith(said[0]) and said[1] in message if edits else not message
        assert_all_same([found], want)


def memory_around(plan: Plan, options: dict[str, Any]) -> tuple[float, float]:
    """Bytes that the context holds inside and leaves behind, in units of the full parameters.

    Parameters above 1 MiB: smaller buffers keep their memory on the host.
    """
    model = nn.Sequential(*(nn.Linear(512, 1024, bias=False) for _ in range(2)), nn.Linear(1024, 512))
    size = sum(param.numel() * 4 for param in model.parameters())
    plan.shard(model, wrap=nn.Linear)
    before = live_bytes()
    with shardwise.unsharded(model, **options):
        inside = live_bytes()
    return (inside - before) / size, (live_bytes() - before) / size


def test_each_rank_that_sees_full_parameters_holds_them_once(world2: World) -> None:
    """To a hundredth, which leaves room for the bias. To write back, shards are remembered: a half of it.

    Afterwards there may be a scalar that something else keeps.
    """
    for options, size in (({}, 1.5), ({"writeback": False}, 1), ({"offload_to_cpu": True}, 1.5)):
        for inside, after in world2.run(memory_around, ZERO3, options):
            assert inside == pytest.approx(size, abs=0.01), options
            assert after == pytest.approx(0, abs=0.001)
    only = {"writeback": False, "rank0_only": True}
    (inside, after), (others_inside, others_after) = world2.run(memory_around, ZERO3, only)
    assert inside == pytest.approx(1, abs=0.01)
    assert others_inside == pytest.approx(0, abs=0.01)
    assert [after, others_after] == pytest.approx([0, 0], abs=0.001)


# --- refusals -------------------------------------------------------------------------------------


@on_ranks(2)
def test_what_cannot_be_done_inside_is_refused_and_leaves_no_trace() -> None:
    """Training after it has nothing amiss."""
    plain, model = built(uneven_tower), ZERO3.shard(built(uneven_tower))
    plain_optimizer, optimizer = adamw(plain), adamw(model)
    step(model, optimizer, ZERO3, 0, 7)
    loss = mean_of_squares(model, part(ZERO3, 1, 7))
    with shardwise.unsharded(model):
        messages = [
            refusal(loss.backward),  # first: the next forward cleans up after it
            refusal(model, part(ZERO3, 1, 7)),
            refusal(model.blocks[1], part(ZERO3, 1, 7)),
            refusal(model.blocks[1].unshard),
            refusal(deepcopy, model),
            refusal(deepcopy, model.blocks[1]),
            refusal(shardwise.unsharded(model).__enter__),
            refusal(shardwise.unsharded(model.blocks[1]).__enter__),
        ]
    model.zero_grad()
    step(model, optimizer, ZERO3, 2, 7)
    for seed in (0, 2):
        step(plain, plain_optimizer, None, seed, 7)
    assert_equal(tensors_of(model), tensors_of(plain), atol=1e-10)
    assert_expected_inline(
        "\n".join(messages),
        """\
RuntimeError: Tower: unsharding for a forward, a backward or unshard() is not possible inside unsharded(), which has put full parameters in place of the shards that its group works with. Leave the context first. To run forwards with parameters that stay unsharded, as generation does, use inference().
RuntimeError: Tower: unsharding for a forward, a backward or unshard() is not possible inside unsharded(), which has put full parameters in place of the shards that its group works with. Leave the context first. To run forwards with parameters that stay unsharded, as generation does, use inference().
RuntimeError: blocks.1: unsharding for a forward, a backward or unshard() is not possible inside unsharded(), which has put full parameters in place of the shards that its group works with. Leave the context first. To run forwards with parameters that stay unsharded, as generation does, use inference().
RuntimeError: blocks.1: unsharding for a forward, a backward or unshard() is not possible inside unsharded(), which has put full parameters in place of the shards that its group works with. Leave the context first. To run forwards with parameters that stay unsharded, as generation does, use inference().
RuntimeError: Tower: copy.deepcopy is not possible inside unsharded(), which has put full parameters in place of the shards that its group works with. Leave the context first.
RuntimeError: blocks.1: copy.deepcopy is not possible inside unsharded(), which has put full parameters in place of the shards that its group works with. Leave the context first.
RuntimeError: Tower: another unsharded() is not possible inside unsharded(), which has put full parameters in place of the shards that its group works with. Leave the context first.
RuntimeError: blocks.1: another unsharded() is not possible inside unsharded(), which has put full parameters in place of the shards that its group works with. Leave the context first.""",
    )


@same_as_plain(2)
def test_contexts_of_disjoint_groups_may_be_nested(side: Side) -> None:
    model = side.shard_tower(built(uneven_tower))
    plan = ZERO3 if side.is_sharded else None
    with opened(model.blocks[0], plan), opened(model, plan, recurse=False):
        with opened(model.blocks[2], plan), torch.no_grad():
            model.blocks[2].up.weight.mul_(0.9)
        if side.is_sharded:
            for name, param in model.named_parameters():
                assert isinstance(param, DTensor) is name.startswith(("blocks.1", "blocks.2"))
        with torch.no_grad():
            model.blocks[0].up.weight.mul_(0.9)
            model.inlet.weight.mul_(0.9)
    side.steps(model, adamw(model), [0], width=7)


@same_as_plain(2)
def test_another_model_may_train_meanwhile(side: Side) -> None:
    first, second = (side.shard_tower(built(uneven_tower)) for _ in range(2))
    with opened(first, ZERO3 if side.is_sharded else None):
        side.steps(second, adamw(second), [0], width=7)


@pytest.mark.parametrize("when", ["forward", "backward"])
@on_ranks(2)
def test_it_is_refused_inside_a_running_pass(when: str) -> None:
    assert_refused_in_a_pass(shardwise.unsharded, when, "unsharded", "0", of_root=False)


@on_ranks(2)
def test_arguments_that_do_not_fit_are_refused() -> None:
    plain, sharded = built(uneven_tower), ZERO3.shard(built(uneven_tower))
    with torch.device("meta"):
        on_meta = ZERO3.shard(uneven_tower())
    calls: list[tuple[Any, dict[str, Any]]] = [
        (plain, {}),
        ([plain], {}),
        (sharded.inlet, {}),  # inside of a group
        (sharded.blocks, {"recurse": False}),
        (sharded, {"rank0_only": True}),
        (on_meta, {}),
        *(
            (sharded, {n: "yes"})
            for n in ("recurse", "writeback", "rank0_only", "offload_to_cpu", "with_grads")
        ),
    ]
    assert_expected_inline(
        "\n".join([refusal(shardwise.unsharded(each, **options).__enter__) for each, options in calls]),
        """\
ValueError: unsharded: there is no sharded module in this Tower. Call fully_shard or shard_model first.
TypeError: unsharded: model is a list; pass an nn.Module.
ValueError: unsharded: there is no sharded module in this Linear. Call fully_shard or shard_model first.
ValueError: unsharded: ModuleList is not sharded itself, so recurse=False leaves nothing to unshard. Pass a sharded module, or recurse=True.
ValueError: unsharded: rank0_only=True with writeback=True: the other ranks would have nothing to write back, and their shards would not follow what rank 0 changes. Pass writeback=False.
RuntimeError: Cannot run forward: 22 parameters are still on the meta device: inlet.weight, inlet.bias, outlet.weight, outlet.bias, blocks.0.norm.weight, blocks.0.norm.bias, blocks.0.up.weight, blocks.0.up.bias and 14 more. Nothing has given them values. Call shardwise.materialize(model), or load a checkpoint, first.
TypeError: unsharded: recurse is 'yes', a str; pass True or False.
TypeError: unsharded: writeback is 'yes', a str; pass True or False.
TypeError: unsharded: rank0_only is 'yes', a str; pass True or False.
TypeError: unsharded: offload_to_cpu is 'yes', a str; pass True or False.
TypeError: unsharded: with_grads is 'yes', a str; pass True or False.""",
    )


@on_ranks(2)
def test_a_tensor_subclass_that_all_gathers_itself_is_refused_by_name() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = nn.Parameter(TravelsLow(torch.ones(4, 4)))
    for each in (*model, model):
        fully_shard(each)
    told = refusal(shardwise.unsharded(model).__enter__)
    assert told.startswith("NotImplementedError: ")
    assert "1.weight" in told
    assert all(isinstance(param, DTensor) for param in model.parameters()), "groups before it were left open"


# --- changes of one rank --------------------------------------------------------------------------


EDITS_OF_ONE: dict[str, Callable[[nn.Module], None]] = {
    "in place": lambda model: [param.mul_(2) for param in model.parameters()] and None,
    "a row by .data": lambda model: model.blocks[1].up.weight.data[-1:].fill_(7),
    "replaced": lambda model: setattr(model.inlet, "weight", nn.Parameter(model.inlet.weight + 1)),
}


def edited_on(rank: int, edit: str, plan: Plan, **options: Any) -> tuple[str | None, dict[str, Any]]:
    """One rank alone edits; what is told, and the weights afterwards."""
    model = plan.shard(built(uneven_tower))

    def act() -> None:
        with shardwise.unsharded(model, **options), torch.no_grad():
            if dist.get_rank() == rank:
                EDITS_OF_ONE[edit](model)

    told = refusal(act) if "src_rank" not in options else act()
    return told, parameters_of(model)


def plainly_edited(edit: str | None) -> dict[str, Tensor]:
    model = built(uneven_tower)
    with torch.no_grad():
        if edit is not None:
            EDITS_OF_ONE[edit](model)
    return {name: param.detach() for name, param in model.named_parameters()}


by_edit = pytest.mark.parametrize(
    ("plan", "world", "edit"),
    [
        *((ZERO3, 2, edit) for edit in EDITS_OF_ONE),
        *((Plan("ddp", 2), 2, "in place"), (Plan("hybrid", 4, 2), 4, "a row by .data")),
    ],
    indirect=["world"],
    ids=str,
)


@by_edit
def test_what_one_rank_alone_has_changed_is_refused_on_all_and_not_written(
    world: World, plan: Plan, edit: str
) -> None:
    ranks = world.run(edited_on, 0, edit, plan)
    told = alike([text for text, _ in ranks])
    name = "blocks.1.up.weight" if edit == "a row by .data" else "inlet.weight"
    assert told.startswith(f"RuntimeError: unsharded: {name}")
    if (plan, edit) == (ZERO3, "a row by .data"):
        assert_expected_inline(
            wrapped(told),
            """\
RuntimeError: unsharded: blocks.1.up.weight: what was made of it
inside unsharded() on rank 1 differs from what was made on rank 0.
Nothing was written. Make the same change on all ranks, or pass
src_rank= to take over that of one rank.""",
        )
    assert_all_same([found for _, found in ranks], plainly_edited(None), atol=0.0)


@by_edit
def test_src_rank_gives_its_changes_to_all_ranks(world: World, plan: Plan, edit: str) -> None:
    ranks = world.run(edited_on, 1, edit, plan, src_rank=1)
    assert_all_same([found for _, found in ranks], plainly_edited(edit), atol=0.0)
    other = world.run(
        edited_on, 0, edit, plan, src_rank=1, offload_to_cpu=True
    )  # what rank 0 does is dropped
    assert_all_same([found for _, found in other], plainly_edited(None), atol=0.0)


@on_ranks(2)
def test_what_src_rank_cannot_do_is_refused_on_all_ranks() -> None:
    model = ZERO3.shard(built(uneven_tower))

    def summon(**options: Any) -> Callable[[], None]:
        def act() -> None:
            with shardwise.unsharded(model, **options):
                raise AssertionError("entered")

        return act

    def remove() -> None:
        with shardwise.unsharded(model, src_rank=0):
            if dist.get_rank() == 0:
                del model.inlet.weight

    acts = [
        summon(src_rank=True),
        summon(src_rank=0, writeback=False),
        summon(src_rank=2),
        summon(src_rank=dist.get_rank()),
        remove,
    ]
    assert_expected_inline(
        "\n".join([refusal(act) for act in acts]),
        """\
TypeError: unsharded: src_rank is True, a bool; pass a global rank, or None.
ValueError: unsharded: src_rank sends values that are written back. Pass writeback=True with it, and leave out with_grads.
ValueError: unsharded: rank 2 was named as src_rank, but does not hold inlet.weight, which is on ranks [0, 1]. Summon modules that it holds whole, or make the same change on all ranks.
ValueError: unsharded: ranks disagree on src_rank: rank 0 has 0, rank 1 has 1. Pass the same on all ranks.
RuntimeError: unsharded: rank 0: inlet.weight: it was removed. Put it back, or change modules before fully_shard.""",
    )


@on_ranks(2)
def test_after_an_exception_inside_src_rank_changes_nothing() -> None:
    model = ZERO3.shard(built(uneven_tower))
    with suppress(Failure), shardwise.unsharded(model, src_rank=0), torch.no_grad():
        EDITS_OF_ONE["in place"](model)
        raise Failure("inside")
    assert_equal(parameters_of(model), plainly_edited(None))


@on_ranks(2)
def test_leaving_without_writing_back_communicates_nothing() -> None:
    model = ZERO3.shard(built(uneven_tower))
    for writeback, expected in ((False, 0), (True, 1)):  # a checksum of all changes
        context = shardwise.unsharded(model, writeback=writeback)
        context.__enter__()
        with CommDebugMode() as mode:
            context.__exit__(None, None, None)
        assert mode.get_total_counts() == expected
