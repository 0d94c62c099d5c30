"""What other code hands in: its classes, wrappers and policies, and what it does with a model.

Numbers in low precision come from the same casts written by
hand; there every rank works on the whole batch, so that the mean over ranks is exact.
"""

import copy
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as peer
from dynamo import quiet_dynamo
from failure_models import Chain, Tied, block
from models import WIDTH, Block, built, even_tower, odd_model, random_batch, shard_tower, uneven_tower
from on_ranks import on_ranks
from reference import adamw, full, mean_of_squares
from scenario import BATCH_SIZE, Side, same_as_plain
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.tensor import distribute_tensor

import shardwise
from shardwise import FSDPModule

# --- classes and wrappers -------------------------------------------------------------------------


class Layer(ABC):
    """What some framework asks of every layer."""

    @property
    @abstractmethod
    def width(self) -> int: ...


class AbstractFirst(Layer, Block):
    @property
    def width(self) -> int:
        return WIDTH


class ForbidsAttributes(Block):
    """Lets only known attributes be set from outside, as configuration classes do."""

    def __setattr__(self, name: str, value: Any) -> None:
        if vars(self).get("is_done") and name not in self._parameters and not name.startswith("_"):
            raise AttributeError(f"{type(self).__name__} has no {name}")
        super().__setattr__(name, value)
        if name == "down":
            vars(self)["is_done"] = True


def abstract_first() -> nn.Module:
    return AbstractFirst(WIDTH, 13)


def forbids_attributes() -> nn.Module:
    return ForbidsAttributes(WIDTH, 13)


def wrapped_for_checkpointing() -> nn.Module:
    return checkpoint_wrapper(block())


def compiled_inside_a_checkpoint() -> nn.Module:
    return checkpoint_wrapper(torch.compile(block(), backend="eager"))


def scripted_names() -> nn.Module:
    """Parameter names that look like ours, and a child with a dotted class name."""
    made = block()
    made.register_parameter("_shard", nn.Parameter(torch.zeros(3)))
    return made


def innermost(module: nn.Module) -> nn.Module:
    for name in ("_orig_mod", "_checkpoint_wrapped_module"):
        if name in module._modules:
            return innermost(module._modules[name])  # type: ignore[arg-type]
    return module


@same_as_plain(2)
@pytest.mark.parametrize(
    ("make", "order"),
    [
        (abstract_first, "outside"),
        (forbids_attributes, "outside"),
        (wrapped_for_checkpointing, "inside"),
        (compiled_inside_a_checkpoint, "outside"),
        (scripted_names, "as a list"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_blocks_of_any_make_are_sharded_and_trained(
    side: Side, make: Callable[[], nn.Module], order: str
) -> None:
    """order: what is given to fully_shard, and when the block is made what it is."""
    with warnings.catch_warnings():
        quiet_dynamo()
        model = built(Chain, make, make)
        if order == "inside":  # the module inside the wrapper
            inner = [innermost(each) for each in model.blocks]
            side.shard(*inner, model)
        elif order == "as a list":
            side.shard(list(model.blocks), model)
        else:
            side.shard_tower(model)
            for each in model.blocks:
                assert isinstance(each, FSDPModule) is side.is_sharded
                assert innermost(each) is each or not isinstance(innermost(each), FSDPModule)
        side.note("names", [name for name, _ in model.named_parameters()])
        side.note("state", list(model.state_dict()))
        optimizer = adamw(model)
        for step in range(2):
            side.step(model, optimizer, step)
            model.load_state_dict(model.state_dict())
        side.note_parameters(model)


# --- policies -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LikeAPolicy:
    """Some other library's policy: the fields are what counts."""

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True


LOW = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}

POLICIES: dict[str, Callable[[], Any]] = {
    "ours": lambda: shardwise.MixedPrecisionPolicy(**LOW),
    "torch's": lambda: peer.MixedPrecisionPolicy(**LOW),
    "like one": lambda: LikeAPolicy(**LOW),
}


def low_precision_by_hand(model: nn.Module, inputs: Tensor) -> Tensor:
    """Forward with copies of the weights in bfloat16, so that gradients arrive in float32."""
    low = {name: param.to(torch.bfloat16) for name, param in model.named_parameters()}
    return torch.func.functional_call(model, low, (inputs.to(torch.bfloat16),))


@same_as_plain(2, atol=0.0)
@pytest.mark.parametrize("policy", POLICIES)
def test_policies_are_read_by_their_fields(side: Side, policy: str) -> None:
    model = built(uneven_tower).float()
    side.shard_tower(model, mp_policy=POLICIES[policy]())
    optimizer = adamw(model)
    for step in range(2):
        optimizer.zero_grad()
        inputs = random_batch(step, BATCH_SIZE, 7, torch.float32)  # the whole batch, on every rank
        output = model(inputs) if side.is_sharded else low_precision_by_hand(model, inputs)
        side.note("dtype", output.dtype)
        loss = output.float().pow(2).mean()
        loss.backward()
        side.note("loss", loss.detach())
        side.note_gradients(model)
        optimizer.step()
    side.note_parameters(model)


# --- values that come later -----------------------------------------------------------------------


class Filled(nn.Linear):
    """Initialises itself the same wherever its rows lie."""

    def reset_parameters(self) -> None:
        nn.init.constant_(self.weight, 0.125)
        nn.init.zeros_(self.bias)


def filled_block() -> nn.Module:
    return nn.Sequential(Filled(WIDTH, 13), nn.Tanh(), Filled(13, WIDTH))


class LateModel(Chain):
    def __init__(self) -> None:
        super().__init__(filled_block, filled_block)
        self.inlet, self.outlet = Filled(WIDTH, WIDTH), Filled(WIDTH, 1)
        self.tied = Filled(WIDTH, WIDTH)
        self.tied.weight = self.inlet.weight

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.tied(x))


def late_model(side: Side) -> nn.Module:
    if not side.is_sharded:
        return LateModel().double()
    with torch.device("meta"):
        model = LateModel().double()
    for param in model.parameters():
        assert param.is_meta
    return side.shard_tower(model)


def varied_state() -> dict[str, Tensor]:
    torch.manual_seed(5)
    state = LateModel().double().state_dict()
    for name, value in state.items():
        if name != "tied.weight":
            value.copy_(torch.randn(value.shape, dtype=torch.float64) / 3)
    return state


def give_values(model: Any, how: str, is_sharded: bool) -> None:
    if how == "reset_parameters":
        model.to_empty(device="cpu")
        for module in model.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
        return
    state = varied_state()
    if is_sharded:
        if how != "assign":
            model.to_empty(device="cpu")
        params = dict(model.named_parameters(remove_duplicate=False))
        for name, param in params.items():
            state[name] = distribute_tensor(state[name], param.device_mesh, param.placements)
    model.load_state_dict(state, assign=is_sharded and how == "assign")


@same_as_plain()
@pytest.mark.parametrize(
    ("world", "how"), [(1, "load"), (2, "reset_parameters"), (3, "assign")], indirect=["world"]
)
def test_a_model_of_the_meta_device_gets_its_values_after_sharding(side: Side, how: str) -> None:
    model = late_model(side)
    give_values(model, how, side.is_sharded)
    assert model.tied.weight is model.inlet.weight
    side.steps(model, adamw(model), range(2))
    give_values(model, "load" if how == "assign" else how, side.is_sharded)  # and once more, when in use
    side.note_rows("output", model(side.inputs(5)).detach())


# --- moving about ---------------------------------------------------------------------------------

MOVES: dict[str, Callable[[nn.Module], Any]] = {
    "cpu": lambda model: model.cpu(),
    "to cpu": lambda model: model.to("cpu"),
    "to dtype and device": lambda model: model.to(torch.device("cpu"), torch.float64),
    "double": lambda model: model.double(),
    "there and back": lambda model: model.float().double(),
    "type": lambda model: model.type(torch.float64),
    "requires_grad_": lambda model: model.requires_grad_(False).requires_grad_(True),
    "apply": lambda model: model.apply(lambda module: None),
}


@same_as_plain(2, atol=1e-6)  # a last bit may round to another float32
def test_moving_a_model_keeps_its_parameters_in_the_optimizer(side: Side) -> None:
    """Whatever moves the model, the optimizer that was made before goes on training it."""
    model = built(uneven_tower)
    side.shard_tower(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    before = list(model.parameters())
    for step, (how, move) in enumerate(MOVES.items()):
        optimizer.zero_grad()
        for microbatch in range(2):
            side.sync(model, microbatch == 1)
            mean_of_squares(model, side.inputs(2 * step + microbatch, 7)).backward()
            if how != "there and back":  # would round the gradients
                move(model)
        optimizer.step()
        assert move(model) is model
        assert all(now is then for now, then in zip(model.parameters(), before, strict=True))
        side.note_rows(f"output after {how}", model(side.inputs(9, 7)).detach())
    side.note_parameters(model)


# --- copies ---------------------------------------------------------------------------------------

MODELS: dict[str, Callable[[], nn.Module]] = {
    "even": even_tower,
    "uneven": uneven_tower,
    "odd": odd_model,
    "tied": Tied,
}


@same_as_plain()
@pytest.mark.parametrize(
    ("world", "make", "when", "reshard"),
    [
        (1, "odd", "before use", None),
        (2, "even", "after a step", False),
        (2, "tied", "with gradients", None),
        (3, "uneven", "after an evaluation", True),
    ],
    indirect=["world"],
)
def test_a_copy_trains_as_the_original_is_sharded_alike_and_shares_nothing(
    side: Side, make: str, when: str, reshard: bool | None
) -> None:
    """Neither feels the other."""
    model = side.shard_tower(built(MODELS[make]), reshard_after_forward=reshard)
    optimizer = adamw(model)
    width = 7 if make == "uneven" else 8

    def train(each: nn.Module, its: torch.optim.Optimizer, steps: Any) -> None:
        for step in steps:
            its.zero_grad()
            loss = mean_of_squares(each, side.inputs(step, width))
            loss.backward()
            side.note_mean("loss", loss)
            side.note_gradients(each)
            its.step()
            side.assert_settled(each)

    if when != "before use":
        train(model, optimizer, [0])
    if when == "after an evaluation":
        with torch.no_grad():
            model(side.inputs(8, width))
    if when == "with gradients":
        mean_of_squares(model, side.inputs(7, width)).backward()
    other = copy.deepcopy(model)
    side.note("copied gradients", [p.grad is not None for p in other.parameters()])
    if when == "with gradients":
        side.note_gradients(other)
    assert_apart(model, other)
    assert type(other) is type(model)
    train(other, adamw(other), [1, 2])
    side.note_parameters(model)  # as it was
    train(model, adamw(model), [1, 2])
    for (name, mine), theirs in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(full(mine), full(theirs)), name  # type: ignore[arg-type]
    side.note_parameters(other)


def assert_apart(model: nn.Module, other: nn.Module) -> None:
    """No parameter, gradient, buffer or module belongs to both; the mesh does."""
    assert not set(model.modules()) & set(other.modules())
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        if hasattr(mine, "device_mesh"):
            assert mine.device_mesh == theirs.device_mesh
            assert mine.placements == theirs.placements
            assert mine.device_mesh.get_group() is theirs.device_mesh.get_group()
    shared = storages(model) & storages(other)
    assert not shared, f"{len(shared)} storages are shared"


def storages(model: nn.Module) -> set[int]:
    tensors = [
        *model.parameters(),
        *model.buffers(),
        *(p.grad for p in model.parameters() if p.grad is not None),
    ]
    locals_ = [t.to_local() if hasattr(t, "to_local") else t for t in tensors]
    return {t.untyped_storage().data_ptr() for t in locals_ if t.untyped_storage().nbytes()}


def side_step(side: Side, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    optimizer.zero_grad()
    mean_of_squares(model, side.inputs(step, 7)).backward()
    side.note_gradients(model)
    optimizer.step()


@same_as_plain(2)
def test_torchs_own_average_of_the_weights_works(side: Side) -> None:
    model = side.shard_tower(built(uneven_tower))
    average = torch.optim.swa_utils.AveragedModel(model)
    optimizer = adamw(model)
    for step in range(2):
        side_step(side, model, optimizer, step)
        average.update_parameters(model)
    with torch.no_grad():
        side.note_rows("evaluation", average(side.inputs(9, 7)))
    side.note_parameters(average.module)


@same_as_plain(2)
def test_a_model_may_be_copied_together_with_its_optimizer(side: Side) -> None:
    model = side.shard_tower(built(uneven_tower))
    optimizer = adamw(model)
    side_step(side, model, optimizer, 0)
    other, its = copy.deepcopy([model, optimizer])
    for step in (1, 2):
        side_step(side, other, its, step)
    side.note_parameters(other)
    side.note_parameters(model)


@same_as_plain(2)
@pytest.mark.parametrize("on", ["blocks.1", "blocks"])
def test_a_part_may_be_copied_alone(side: Side, on: str) -> None:
    """A block, or the list of all blocks, becomes part of a model that is sharded in turn."""
    model = side.shard_tower(built(even_tower))
    side_loss = mean_of_squares(model, side.inputs(0))
    side_loss.backward()
    part = copy.deepcopy(model.get_submodule(on))
    assert not storages(model) & storages(part)
    blocks = list(part) if isinstance(part, nn.ModuleList) else [part]
    other = nn.Sequential(*blocks, nn.Linear(8, 1).double())
    with torch.no_grad():
        other[-1].weight.fill_(0.5)
        other[-1].bias.fill_(0.5)
    side.shard(other)
    other.zero_grad()
    side.steps(other, adamw(other), [1, 2])
    side.note_gradients(model)


@on_ranks(2)
def test_settings_are_copied_and_then_independent() -> None:
    model = built(even_tower)
    shard_tower(model)
    model.set_gradient_divide_factor(1.0)
    model.set_requires_gradient_sync(False)
    other = copy.deepcopy(model)
    other.set_requires_gradient_sync(True)
    plain = built(even_tower)
    for each in (model, other, plain):
        mean_of_squares(each, random_batch(0, 4)).backward()
    ratio = full(other.outlet.bias.grad) / plain.outlet.bias.grad
    with pytest.raises(RuntimeError, match="wait to be reduced"):
        full(model.outlet.bias.grad)
    assert round(ratio.item(), 9) == 2.0


# --- containers -----------------------------------------------------------------------------------


class Routed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleDict({"b": block(), "a": block()})
        self.layers = nn.ModuleList([nn.ModuleList([block(), block()]), nn.ModuleList([block()])])
        self.scales = nn.ParameterList([torch.ones(8), torch.full((8,), 0.5)])
        self.outlet = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stages["a"](self.stages["b"](x)) * self.scales[1]
        for layer in reversed(self.layers):
            for each in layer:
                x = each(x) * self.scales[0]
        return self.outlet(x)


@same_as_plain(2)
def test_blocks_in_lists_and_dicts_are_sharded_one_by_one_or_as_lists(side: Side) -> None:
    model = built(Routed)
    side.shard(list(model.stages.values()), *model.layers[0], model.layers[1][0], model)
    side.steps(model, adamw(model), range(2))
