"""What parameters carry, what replaces them and what they turn into (docs/explain/failures.md).

Where computing in low precision, every rank works on the whole batch: the mean of equal numbers is exact, so that
even bfloat16 agrees to the bit.
"""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from failure_models import Chain, Constrained, LoraLinear, MixedBlock, Recurrent, Tied, block
from harness import World
from meshed import refusal
from models import built, even_tower, random_batch, uneven_tower
from on_ranks import on_ranks
from reference import adamw, full, mean_of_squares
from scenario import BATCH_SIZE, Side, assert_same, same_as_plain
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from shardwise import CommPolicy, fully_shard


def like(param: Tensor, value: Tensor) -> Tensor:
    if isinstance(param, DTensor):
        return distribute_tensor(value.to(param.dtype), param.device_mesh, param.placements)
    return value.to(param.dtype)


def values_for(param: Tensor, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(param.shape, generator=generator, dtype=torch.float64) / 3


# --- what parameters carry ------------------------------------------------------------------------


class SeesAttributes(nn.Module):
    """Its forward acts on what the parameter carries, as sequence parallelism does."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))
        self.weight.factor = 3.0  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.weight) * self.weight.factor  # type: ignore[attr-defined]


@same_as_plain(2)
def test_attributes_stay_on_shards_and_full_parameters(side: Side) -> None:
    """Through changes of dtype, too."""
    model = built(Chain, SeesAttributes, block)
    marked = {"inlet.bias", "blocks.1.norm.weight", "outlet.bias"}
    for name, param in model.named_parameters():
        param.no_weight_decay = name in marked  # type: ignore[attr-defined]
    side.shard_tower(model)
    side.note("marked", sorted(n for n, p in model.named_parameters() if p.no_weight_decay))
    model(side.inputs(0))
    model.to(torch.float32)
    side.note("converted", model(side.inputs(0).float()).dtype)
    model.to(torch.float64)
    side.note("marked", sorted(n for n, p in model.named_parameters() if p.no_weight_decay))
    decay = [p for p in model.parameters() if not p.no_weight_decay]
    rest = [p for p in model.parameters() if p.no_weight_decay]
    groups = [{"params": decay, "weight_decay": 0.5}, {"params": rest, "weight_decay": 0.0}]
    side.steps(model, torch.optim.AdamW(groups, lr=1e-2), range(3))
    side.note("marked", sorted(n for n, p in model.named_parameters() if p.no_weight_decay))


@same_as_plain(2, 3)
@pytest.mark.thin(2)
@pytest.mark.parametrize("late", [False, True], ids=["before_sharding", "after_sharding"])
def test_gradient_hooks_run_once_a_backward(side: Side, late: bool) -> None:
    """Also once the dtype has changed, before any step: values that are equal are rounded alike."""
    model = built(uneven_tower)
    seen: list[str] = []

    def hook_all() -> None:
        model.inlet.weight.register_hook(lambda g: g * 2)
        model.blocks[0].up.bias.register_hook(lambda g: seen.append("hook"))
        model.blocks[1].down.weight.register_post_accumulate_grad_hook(halve)
        model.blocks[2].norm.weight.requires_grad_(False)

    def halve(param: Tensor) -> None:
        seen.append("post")
        assert param.grad is not None
        param.grad.mul_(0.5)

    if not late:
        hook_all()
    side.shard_tower(model)
    if late:
        hook_all()
    for step in range(4):
        if step == 2:
            model.to(torch.float32)
            model(side.inputs(0, 7).float())
            model.to(torch.float64)
        model.zero_grad()
        seen.clear()
        mean_of_squares(model, side.inputs(step, 7)).backward()
        side.note_gradients(model)
        side.note("calls", sorted(seen))


@same_as_plain(2)
def test_hooks_wait_while_the_parameter_is_frozen_and_end_when_they_are_removed(side: Side) -> None:
    model = built(even_tower)
    frozen, inlet = model.blocks[0].up.weight, model.inlet.weight
    frozen.register_hook(lambda g: g * 2)
    frozen.requires_grad_(False)
    handles = [inlet.register_hook(lambda g: g * 2)]
    side.shard_tower(model)
    handles.append(model.blocks[1].up.weight.register_hook(lambda g: g * 2))
    mean_of_squares(model, side.inputs(0)).backward()
    side.note_gradients(model)
    model.blocks[0].up.weight.requires_grad_(True)
    for handle in handles:
        handle.remove()
    for step in range(2):
        mean_of_squares(model, side.inputs(step)).backward()
    side.note_gradients(model)


@same_as_plain(1, 2)
def test_an_optimizer_may_step_inside_backward(side: Side) -> None:
    """Each parameter is stepped as soon as its gradient is there, and the gradient dropped."""
    model = side.shard_tower(built(even_tower))
    optimizers = {p: torch.optim.AdamW([p], lr=1e-2) for p in model.parameters()}

    def step(param: Tensor) -> None:
        optimizers[param].step()  # type: ignore[index]
        optimizers[param].zero_grad()  # type: ignore[index]

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(step)
    for index in range(3):
        loss = mean_of_squares(model, side.inputs(index))
        loss.backward()
        side.note_mean("loss", loss)
        side.note("gradients left", sum(p.grad is not None for p in model.parameters()))
        side.assert_settled(model)
    side.note_parameters(model)


# --- what replaces parameters ---------------------------------------------------------------------


@same_as_plain(2)
@pytest.mark.parametrize(("early", "reshard"), [(True, None), (True, False), (False, True)])
def test_a_parameter_put_in_place_of_another_is_used(side: Side, early: bool, reshard: bool | None) -> None:
    """module.weight = new, with a parameter sharded alike."""
    model = side.shard_tower(built(uneven_tower), reshard_after_forward=reshard)
    if not early:
        side.note_rows("first", model(side.inputs(0, 7)))
        mean_of_squares(model, side.inputs(0, 7)).backward()
    for index, module in enumerate([model.inlet, model.blocks[0].up, model.blocks[1].norm]):
        old = dict(module.named_parameters())["weight"]
        module.weight = nn.Parameter(like(old, values_for(old, index)))
    side.note_rows("replaced", model(side.inputs(1, 7)))
    model.zero_grad()
    side.steps(model, adamw(model), range(2), width=7)


@same_as_plain(2, 3)
@pytest.mark.thin(2)
@pytest.mark.parametrize(
    ("whole", "again", "frozen"), [(False, False, False), (True, True, True)], ids=["sharded", "whole"]
)
def test_loading_by_assignment_is_used(side: Side, whole: bool, frozen: bool, again: bool) -> None:
    """A state dict like the model's own, or the full one of an unsharded model."""
    model = side.shard_tower(built(uneven_tower))
    if frozen:
        model.inlet.weight.requires_grad_(False)
    if again:
        mean_of_squares(model, side.inputs(5, 7)).backward()
        model.zero_grad()
    values = {n: values_for(value, index) for index, (n, value) in enumerate(model.state_dict().items())}
    sharded = {name: like(value, values[name]) for name, value in model.state_dict().items()}
    model.load_state_dict(values if whole else sharded, assign=True)
    side.steps(model, adamw(model), range(2), width=7)


@same_as_plain(2, 3)
@pytest.mark.thin(2)
@pytest.mark.parametrize("whole", [False, True], ids=["sharded", "whole"])
def test_tied_weights_stay_tied_through_assignment(side: Side, whole: bool) -> None:
    """Plainly values are copied: torch itself unties on assignment."""
    model = side.shard_tower(built(Tied))
    state = {name: values_for(value, 3).to(value.dtype) for name, value in model.state_dict().items()}
    if not whole:
        state = {name: like(value, state[name]) for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=side.is_sharded)
    mean_of_squares(model, side.inputs(0)).backward()
    assert model.embed.weight is model.head.weight
    adamw(model).step()
    side.note_rows("output", model(side.inputs(1)))


@same_as_plain(2)
def test_data_changed_in_place_is_used(side: Side) -> None:
    model = side.shard_tower(built(even_tower))
    side.step(model, torch.optim.SGD(model.parameters(), lr=0.1), 0)
    for index, param in enumerate(model.parameters()):
        param.data.copy_(like(param, values_for(param, index)))
    side.note_rows("output", model(side.inputs(1)))
    side.note_parameters(model)
    model.zero_grad()
    side.steps(model, adamw(model), range(2))


def replace_weight(module: Any, value: Tensor, *, is_sharded: bool = True) -> None:
    weight = module.weight
    new = distribute_tensor(value, weight.device_mesh, weight.placements) if is_sharded else value
    module.weight = nn.Parameter(new)


def replicate_weight(module: Any) -> None:
    module.weight = nn.Parameter(module.weight.detach().redistribute(placements=[Replicate()]))


def rename(module: Any) -> None:
    module.kernel = module.weight
    del module.weight


CHANGES: dict[str, Callable[[Any], Any]] = {
    "under another name": lambda model: rename(model.blocks[0].up),
    "a plain one": lambda model: replace_weight(model.blocks[0].up, torch.ones(13, 7), is_sharded=False),
    "another shape": lambda model: replace_weight(model.blocks[0].up, torch.ones(13, 9)),
    "placed otherwise": lambda model: replicate_weight(model.blocks[0].up),
    "none": lambda model: setattr(model.blocks[0].up, "bias", None),
    "deleted": lambda model: delattr(model.blocks[0].up, "bias"),
    "one of two that are tied": lambda model: replace_weight(model.embed, torch.ones(7, 8).double()),
    "tied afterwards": lambda model: setattr(model.blocks[0].down, "bias", model.blocks[0].norm.weight),
}


@on_ranks(2)
@pytest.mark.parametrize("reshards", [True, False])
@pytest.mark.parametrize("steps_before", [0, 2])
def test_data_assigned_to_a_shard_is_refused_once(steps_before: int, reshards: bool) -> None:
    """A DTensor keeps its old values, and torch says nothing."""
    model = fully_shard(built(nn.Linear, 4, 3))
    model.set_reshard_after_backward(reshards)
    x = random_batch(0, 2, 4)
    for _ in range(steps_before):
        model(x).sum().backward()
    before = full(model.weight).clone()
    model.bias.data = model.bias.data
    model(x)
    model.weight.data = model.weight.data * 2
    assert_expected_inline(
        refusal(model, x),
        """RuntimeError: weight: .data was assigned, which has no effect on a DTensor: torch keeps its old values. Change them in place, under torch.no_grad(): param.copy_(values), say; or assign a new parameter.""",
    )
    assert torch.equal(model(x), nn.functional.linear(x, before, full(model.bias)))


@on_ranks(2)
def test_what_cannot_be_used_in_place_of_a_parameter_is_refused_with_names() -> None:
    told = []
    for change in CHANGES.values():
        model = built(Tied, seed=1)
        fully_shard(model.blocks[0])
        fully_shard(model)
        model(random_batch(0, 4)).sum().backward()
        change(model)
        told.append(refusal(model, random_batch(0, 4)))
    assert_expected_inline(
        "\n".join(f"{change}: {text}" for change, text in zip(CHANGES, told, strict=True)),
        """\
under another name: RuntimeError: blocks.0.up.weight: the parameter was removed after fully_shard, but its group still unshards it. Put it back, or change the module (parametrize it, say) before fully_shard.
a plain one: RuntimeError: blocks.0.up.weight: the parameter was replaced after fully_shard by a plain Parameter of shape (13, 7), where a parameter sharded like the old one is expected: a DTensor of shape (13, 7) with placements (Shard(dim=0),) on a mesh of shape (2,). Copy values into the sharded parameter instead (under torch.no_grad(), param.copy_(distribute_tensor(value, param.device_mesh, param.placements))), or replace parameters before fully_shard. torch.func.functional_call replaces them as well: it does not work on a sharded module.
another shape: RuntimeError: blocks.0.up.weight: the parameter was replaced after fully_shard by a DTensor of shape (13, 9) with placements (Shard(dim=0),) on a mesh of shape (2,), where a parameter sharded like the old one is expected: a DTensor of shape (13, 7) with placements (Shard(dim=0),) on a mesh of shape (2,). Copy values into the sharded parameter instead (under torch.no_grad(), param.copy_(distribute_tensor(value, param.device_mesh, param.placements))), or replace parameters before fully_shard. torch.func.functional_call replaces them as well: it does not work on a sharded module.
placed otherwise: RuntimeError: blocks.0.up.weight: the parameter was replaced after fully_shard by a DTensor of shape (13, 7) with placements (Replicate(),) on a mesh of shape (2,), where a parameter sharded like the old one is expected: a DTensor of shape (13, 7) with placements (Shard(dim=0),) on a mesh of shape (2,). Copy values into the sharded parameter instead (under torch.no_grad(), param.copy_(distribute_tensor(value, param.device_mesh, param.placements))), or replace parameters before fully_shard. torch.func.functional_call replaces them as well: it does not work on a sharded module.
none: RuntimeError: blocks.0.up.bias: the parameter was removed after fully_shard, but its group still unshards it. Put it back, or change the module (parametrize it, say) before fully_shard.
deleted: RuntimeError: blocks.0.up.bias: the parameter was removed after fully_shard, but its group still unshards it. Put it back, or change the module (parametrize it, say) before fully_shard.
one of two that are tied: RuntimeError: embed.weight and head.weight are tied, but embed.weight alone was replaced. Replace both with the same parameter, or untie them before fully_shard.
tied afterwards: RuntimeError: blocks.0.norm.weight and blocks.0.down.bias were tied after fully_shard: one parameter is in both places now. Tie them before fully_shard, or keep two parameters.""",
    )


def add_parameter(side: Side) -> None:
    model = side.shard_tower(built(even_tower))
    model.blocks[1].bonus = nn.Parameter(torch.full((8,), 0.5, dtype=torch.float64))
    model.blocks[1].register_forward_hook(lambda module, args, output: output * module.bonus)
    mean_of_squares(model, side.inputs(0)).backward()
    side.note("gradient", model.blocks[1].bonus.grad)


def test_a_parameter_added_after_sharding_is_reduced_or_refused(world2: World) -> None:
    try:
        assert_same(world2, add_parameter)
    except AssertionError as error:
        if "blocks.1.bonus" not in str(error):
            raise


class KeepsItsWeight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        self.kept = self.linear.weight
        return self.linear(x)


@pytest.mark.parametrize("trained", [True, False])
@on_ranks(2)
def test_an_unsharded_parameter_that_forward_registers_elsewhere_is_refused(trained: bool) -> None:
    model = fully_shard(built(KeepsItsWeight).requires_grad_(trained))
    told = refusal(model, random_batch(0, 4))
    assert told.startswith(
        "RuntimeError: kept: forward assigned the unsharded parameter linear.weight to this"
    )


# --- state dicts taken early ----------------------------------------------------------------------


def early_state_dict(side: Side, make: Any, before: str) -> None:
    model = side.shard_tower(built(make))
    if before == "assign":
        state = {n: like(v, values_for(v, i)) for i, (n, v) in enumerate(model.state_dict().items())}
        model.load_state_dict(state, assign=True)
    if before == "to_float32":
        model.to(torch.float32)
    state = model.state_dict()
    optimizer = adamw(model)
    for step in range(2):
        optimizer.zero_grad()
        inputs = side.inputs(step, 8 if make is Tied else 7)
        mean_of_squares(model, inputs.to(next(model.parameters()).dtype)).backward()
        optimizer.step()
    for name, value in state.items():
        side.note(name, value)
    side.note_parameters(model)


@pytest.mark.parametrize(
    ("world", "make", "before"),
    [
        (3, Tied, "nothing"),
        (2, uneven_tower, "nothing"),
        (2, uneven_tower, "assign"),
        (2, uneven_tower, "to_float32"),
    ],
    indirect=["world"],
)
def test_a_state_dict_taken_before_the_first_forward_stays_live(world: World, make: Any, before: str) -> None:
    atol = 1e-4 if before == "to_float32" else 1e-10
    assert_same(world, early_state_dict, make, before, atol=atol)


@same_as_plain(2, 3)
def test_tied_weights_are_trained_on_the_last_rank_too(side: Side) -> None:
    model = side.shard_tower(built(Tied))
    side.steps(model, adamw(model), range(3))


# --- several dtypes -------------------------------------------------------------------------------


def whole(step: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return random_batch(step, 6).to(dtype)


def steps_with_the_whole_batch(side: Side, model: nn.Module, dtype: torch.dtype, **options: Any) -> None:
    """With powers of two, the mean of what the ranks compute is exact."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125, **options)
    for step in range(3):
        optimizer.zero_grad()
        mean_of_squares(model, random_batch(step, 6).to(dtype)).backward()
        side.note_gradients(model)
        optimizer.step()
        side.assert_settled(model)
    side.note_parameters(model)


@same_as_plain(2, atol=0.0)
@pytest.mark.parametrize(("packing_limit_bytes", "reshard"), [(None, None), (0, True), (None, False)])
def test_float32_adapters_on_a_frozen_bfloat16_base_train_exactly(
    side: Side, packing_limit_bytes: int | None, reshard: bool | None
) -> None:
    torch.manual_seed(1234)
    model = Chain(LoraLinear, LoraLinear, LoraLinear)
    policy = CommPolicy(packing_limit_bytes=packing_limit_bytes)
    side.shard_tower(model, comm_policy=policy, reshard_after_forward=reshard)
    steps_with_the_whole_batch(side, model, torch.float32)


@same_as_plain(2, 4, atol=0.0)
@pytest.mark.thin(2)
@pytest.mark.parametrize("packing_limit_bytes", [0, 40])
def test_parameters_of_three_dtypes_train_exactly(side: Side, packing_limit_bytes: int | None) -> None:
    torch.manual_seed(1234)
    model = Chain(MixedBlock, MixedBlock)
    model.inlet.double()
    model.outlet.double()
    side.shard_tower(model, comm_policy=CommPolicy(packing_limit_bytes=packing_limit_bytes))
    steps_with_the_whole_batch(side, model, torch.float64, momentum=0.5)


class Filters(nn.Module):
    """Complex weights whose rows do not come out even, are fewer than the ranks, or are none; and a real one."""

    def __init__(self) -> None:
        super().__init__()
        shapes = [(5,), (1,), (1, 5), (3, 5), ()]
        self.gain = nn.Parameter(torch.randn(5, dtype=torch.float64))
        self.blocks = nn.ModuleList()
        self.weights = nn.ParameterList(torch.randn(shape, dtype=torch.complex128) for shape in shapes)

    def forward(self, x: Tensor) -> Tensor:
        x = (x[:, :5] * self.gain).to(torch.complex128)
        for weight in self.weights:
            x = x * (weight.sum(0) if weight.dim() > 1 else weight)
        return torch.view_as_real(x).flatten(1).sum(1, keepdim=True)


COMPLEX_OPTIMIZERS: list[Callable[[Any], torch.optim.Optimizer]] = [
    lambda params: torch.optim.Adam(params, lr=1e-2, weight_decay=0.1, foreach=True),
    lambda params: torch.optim.AdamW(params, lr=1e-2, amsgrad=True, foreach=False),
    lambda params: torch.optim.Adagrad(params, lr=1e-2),
    lambda params: torch.optim.RMSprop(params, lr=1e-2, momentum=0.5),
    lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.5),
]


@same_as_plain(2, 3)
def test_optimizers_update_complex_parameters_with_uneven_rows(side: Side) -> None:
    for optimizer in COMPLEX_OPTIMIZERS:
        torch.manual_seed(0)
        model = side.shard_tower(Filters())
        side.steps(model, optimizer(model.parameters()), range(3))


# --- conversions ----------------------------------------------------------------------------------


@same_as_plain(2, atol=0.0)
@pytest.mark.parametrize(
    ("dtype", "how", "reshard"),
    [
        (torch.float64, "before_forward", None),
        (torch.float64, "after_step", False),
        (torch.bfloat16, "after_forward", False),
        (torch.bfloat16, "with_gradients", None),
    ],
)
def test_training_goes_on_in_another_dtype(
    side: Side, dtype: torch.dtype, how: str, reshard: bool | None
) -> None:
    """Forward in float32, convert, go on training in `dtype`; every rank works on the whole batch."""
    torch.manual_seed(1234)
    model = side.shard_tower(uneven_tower(), reshard_after_forward=reshard)
    inputs = random_batch(0, 6, 7)
    if how == "after_forward":
        model(inputs.float())
    if how in ("after_step", "with_gradients"):
        mean_of_squares(model, inputs.float()).backward()
    if how == "after_step":
        torch.optim.SGD(model.parameters(), lr=0.125).step()
        model.zero_grad()
    model.to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
    for step in range(2):
        mean_of_squares(model, random_batch(step, 6, 7).to(dtype)).backward()
        side.note_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
        side.assert_settled(model)
    side.note_parameters(model)


@same_as_plain(2)
def test_moving_between_steps_changes_no_number(side: Side) -> None:
    model = side.shard_tower(built(uneven_tower))
    optimizer = adamw(model)
    actions = [
        lambda: model.to("cpu"),
        lambda: model.double(),
        lambda: model.float().double(),
        lambda: model.blocks[1].float().double(),
        lambda: model.requires_grad_(True),
    ]
    for step, act in enumerate(actions):
        side.step(model, optimizer, step, width=7)
        act()
    side.steps(model, optimizer, [len(actions)], width=7)


@same_as_plain(2)
@pytest.mark.parametrize("how", ["weights", "shifted", "models"])
def test_shards_may_be_assigned_to_each_others_places(side: Side, how: str) -> None:
    """What is assigned are shards of ours, in other places."""
    model, other = side.shard_tower(built(even_tower)), side.shard_tower(built(even_tower))
    with torch.no_grad():
        for number, param in enumerate([*model.parameters(), *other.parameters()], 1):
            param.mul_(1 + number / 50)
    side.step(model, adamw(model), 0)
    first, second, third = model.blocks
    if how == "weights":
        first.up.weight, second.up.weight = second.up.weight, first.up.weight
    elif how == "shifted":
        states = [block.state_dict() for block in (second, third, first)]
        for block, state in zip(model.blocks, states, strict=True):
            block.load_state_dict(state, assign=True)
    else:
        states = model.state_dict(), other.state_dict()
        other.load_state_dict(states[0], assign=True)
        model.load_state_dict(states[1], assign=True)
    for each in (model, other):
        side.steps(each, adamw(each), [1, 2])


@on_ranks(2)
@pytest.mark.parametrize(("replaced", "kept"), [("embed", "head"), ("head", "embed")])
def test_a_tie_that_is_restored_is_told_once(replaced: str, kept: str) -> None:
    """Once an equal parameter was put in one place of two; the first of two forwards warns of it."""
    model: Any = built(Tied)
    fully_shard(model)
    module = getattr(model, replaced)
    module.weight = nn.Parameter(module.weight.detach().clone())
    new = module.weight
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(2):
            model(random_batch(0, 4)).sum().backward()
    assert model.embed.weight is model.head.weight is new
    assert [str(each.message) for each in found] == [
        f"{replaced}.weight and {kept}.weight are tied, but {replaced}.weight alone was replaced, by a "
        "parameter with the same values. They stay tied: the new one stands under both names from now on. "
        "Untie them before fully_shard."
    ]


@on_ranks(2)
def test_a_state_dict_is_assigned_to_tied_modules_of_one_call() -> None:
    model: Any = built(Tied)
    fully_shard([model.embed, model.head])
    state = {name: torch.ones_like(value) for name, value in built(Tied).state_dict().items()}
    model.load_state_dict(state, assign=True)
    assert full(model.head.weight).mean() == 1.0


@same_as_plain(2)
def test_tied_and_recurrent_weights_follow_a_change_of_dtype(side: Side) -> None:
    torch.manual_seed(1234)
    for model in (Tied(), Chain(lambda: Recurrent(nn.LSTM), lambda: Recurrent(nn.GRU))):
        side.shard_tower(model)
        model(random_batch(0, BATCH_SIZE).float())
        model.double()
        side.steps(model, adamw(model), range(2))


# Not "data_in_place": what .data does to an unsharded copy is counted nowhere.
@pytest.mark.parametrize(("world", "how"), [(1, "data"), (2, "no_grad")], indirect=["world"])
def test_a_weight_changed_in_forward_is_kept_or_refused(world: World, how: str) -> None:
    try:
        assert_same(world, constrained, how)
    except AssertionError as error:
        if "blocks.0.linear.weight: " not in str(error) or "hanged in" not in str(error):
            raise


def constrained(side: Side, how: str) -> None:
    model = side.shard_tower(built(Chain, lambda: Constrained(how), block))
    side.steps(model, adamw(model), range(3))
    with torch.no_grad():
        side.note_rows("evaluation", model(side.inputs(9)))


def shrink(module: nn.Module, args: Any) -> None:
    with torch.no_grad():
        module.weight.mul_(0.9)  # type: ignore[operator]


@on_ranks(2)
def test_a_frozen_weight_that_forward_changes_is_refused() -> None:
    model = nn.Sequential(nn.Linear(8, 8).requires_grad_(False), nn.Linear(8, 8)).double()
    fully_shard(model[0])
    fully_shard(model)
    model[0].register_forward_pre_hook(shrink)
    assert refusal(model, random_batch(0, 4)).startswith(
        "RuntimeError: 0.weight: changed in place while unsharded"
    )


def converted_while_gradients_wait(side: Side, *dtypes: torch.dtype) -> None:
    model = side.shard_tower(built(even_tower))
    side.sync(model, False)
    mean_of_squares(model, side.inputs(0)).backward()
    for dtype in dtypes:
        model.to(dtype)
    side.sync(model, True)
    mean_of_squares(model, side.inputs(1).to(dtypes[-1])).backward()
    side.note_gradients(model)


def test_unsynchronised_gradients_are_converted_and_none_is_lost(world2: World) -> None:
    assert_same(world2, converted_while_gradients_wait, torch.float32, atol=1e-5)
    assert_same(world2, converted_while_gradients_wait, torch.float32, torch.float64, atol=1e-6)


class Either(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, uses_second: bool) -> Tensor:
        return self.second(self.first(x)) if uses_second else self.first(x)


@same_as_plain(2, atol=1e-5)
def test_sums_that_wait_for_replicas_are_converted_and_none_is_lost(side: Side) -> None:
    """Those of the second layer come from the first microbatch alone."""
    model = built(Either)
    if side.is_sharded:
        fully_shard(model, mesh=init_device_mesh("cpu", (2, 1)))
        model.set_requires_all_reduce(False)
    mean_of_squares(partial(model, uses_second=True), side.inputs(0)).backward()
    model.to(torch.float32)
    if side.is_sharded:
        model.set_requires_all_reduce(True)
    mean_of_squares(partial(model, uses_second=False), side.inputs(1).float()).backward()
    side.note_gradients(model)


@same_as_plain(1, 2)
def test_blocks_without_trainable_parameters_are_sharded_too(side: Side) -> None:
    """Blocks without any parameter, or with frozen ones only."""
    model = built(Chain, nn.Tanh, block, nn.Identity)
    model.blocks[1].requires_grad_(False)
    side.shard_tower(model)
    side.steps(model, adamw(model), range(2))
