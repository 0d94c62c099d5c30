"""What goes into a block and comes out of it, in the forms that have gone wrong elsewhere (docs/explain/failures.md)."""

import gc
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from events import counts, events_of
from expecttest import assert_expected_inline
from failure_models import Chain, Recurrent, block
from meshed import refusal
from models import WIDTH, Block, built, even_tower
from on_ranks import on_ranks
from reference import adamw, mean_of_squares
from refusals import assert_says
from scenario import Side, same_as_plain
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from shardwise import fully_shard


def train(side: Side, model: nn.Module, reshard: bool | None = None, loss: Any = mean_of_squares) -> None:
    side.shard_tower(model, reshard_after_forward=reshard)
    side.steps(model, adamw(model), range(2), loss)


# --- outputs changed in place ---------------------------------------------------------------------


class ReturnsView(Block):
    """Its output is a view of what it computed, and the last operation saves a weight."""

    def __init__(self, kind: str) -> None:
        super().__init__(8, 13)
        self.gain = nn.Parameter(torch.full((8,), 1.1))
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x) * self.gain
        if self.kind == "reshape":
            return x.view(-1, 2, 4)
        if self.kind == "slice":
            return torch.cat([x, x], dim=1)[:, 3:11]
        if self.kind == "transposed":
            return x.t()
        if self.kind == "view_of_view":
            return x.view(-1, 2, 4).transpose(0, 1)[:, :, 1:]
        return x


class InPlace(Chain):
    def __init__(self, kind: str, operation: str) -> None:
        super().__init__(*[lambda: ReturnsView(kind)] * 3)
        self.kind, self.operation = kind, operation

    def between(self, block: nn.Module, x: Tensor) -> Tensor:
        y = block(x)
        if self.operation == "mul":
            y.mul_(0.9)
        elif self.operation == "add_weight":
            y.add_(self.inlet.weight.sum(), alpha=0.1)
        elif self.operation == "part":
            y[..., 0].mul_(0.5)
        elif self.operation == "tanh":
            y.tanh_()
        elif self.operation == "view_then_mul":
            y.flatten()[::2].mul_(0.9)
        if self.kind == "transposed":
            return y.t()
        if self.kind == "view_of_view":
            return torch.cat([y, y.sum(2, keepdim=True)], dim=2).transpose(0, 1).flatten(1)
        return y.reshape(-1, 8)


@same_as_plain(2)
@pytest.mark.parametrize(
    ("kind", "operation"),
    [
        ("itself", "mul"),
        ("reshape", "add_weight"),
        ("slice", "part"),
        ("transposed", "tanh"),
        ("view_of_view", "view_then_mul"),
    ],
)
def test_outputs_and_views_may_be_changed_in_place(side: Side, kind: str, operation: str) -> None:
    train(side, built(InPlace, kind, operation), True)


# --- tensors in containers and on attributes ------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FrozenData:
    hidden: Tensor
    extra: Any = None


class Named(NamedTuple):
    hidden: Tensor
    extra: Any = None


class Plain:
    def __init__(self, hidden: Tensor, extra: Any = None) -> None:
        self.hidden, self.extra = hidden, extra
        self.me = self  # objects may point in circles


class ModelOutput(OrderedDict):
    """As Transformers has them: a dict whose items are attributes as well."""

    def __init__(self, hidden: Tensor, extra: Any = None) -> None:
        super().__init__(hidden=hidden, extra=extra)

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class Hidden:
    def __init__(self, hidden: Tensor, extra: Any = None) -> None:
        self.read = lambda: hidden

    @property
    def hidden(self) -> Tensor:
        return self.read()


def in_lists(hidden: Tensor, extra: Any = None) -> Any:
    return [None, [("text", [[hidden]]), {"extra": extra}]]


def in_generator(hidden: Tensor, extra: Any = None) -> Any:
    return (tensor for tensor in (hidden, extra))


def taken_out(output: Any) -> Tensor:
    if isinstance(output, list):
        return output[1][0][1][0][0]
    return next(output) if hasattr(output, "__next__") else output.hidden


class Contains(Block):
    def __init__(self, container: Any) -> None:
        super().__init__(8, 13)
        self.gain = nn.Parameter(torch.full((8,), 1.1))
        self.container = container

    def forward(self, x: Any) -> Any:
        x = super().forward(x if isinstance(x, Tensor) else taken_out(x)) * self.gain
        return self.container(x, extra=x.detach().sum())


class Container(Chain):
    def __init__(self, container: Any) -> None:
        super().__init__(*[lambda: Contains(container)] * 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inlet(x)
        for each in self.blocks:
            x = each(x)
        return self.outlet(taken_out(x))


@same_as_plain(2)
@pytest.mark.parametrize(
    "container",
    [FrozenData, Named, Plain, ModelOutput, in_lists, Hidden, in_generator],
    ids=lambda c: c.__name__,
)
def test_tensors_are_found_in_containers(side: Side, container: Any) -> None:
    """In the last two they are not; there parameters stay for the backward."""
    train(side, built(Container, container), True)


@on_ranks(2)
def test_a_step_leaves_no_tensors_to_the_garbage_collector() -> None:
    model = Side(is_sharded=True).shard_tower(built(Container, in_lists))
    optimizer = adamw(model)
    for step in range(4):
        if step == 2:
            gc.collect()
            gc.disable()
            gc.set_debug(gc.DEBUG_SAVEALL)
        mean_of_squares(model, torch.randn(4, 8, dtype=torch.float64)).backward()
        optimizer.step()
        optimizer.zero_grad()
    try:
        gc.collect()
        left = [str(each.shape) for each in gc.garbage if isinstance(each, Tensor)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    assert left == []


# --- parameters as outputs ------------------------------------------------------------------------


RETURNED: dict[str, Callable[[Tensor, nn.Linear], Any]] = {
    "itself": lambda x, linear: (x, linear.weight),
    "view": lambda x, linear: (x, linear.weight.t()[1:, 2:]),
    "row": lambda x, linear: [x, {"weight": linear.weight[3]}],
    "expanded": lambda x, linear: (x, linear.bias.expand(3, 8)),
    "dataclass": lambda x, linear: FrozenData(x, linear.weight),
    "twice": lambda x, linear: (x, (linear.weight, linear.weight)),
    "hidden": lambda x, linear: Plain(x, linear.weight),
}


class ReturnsWeight(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.how = how

    def forward(self, x: Tensor) -> Any:
        return RETURNED[self.how](torch.tanh(self.linear(x)), self.linear)


class UsesReturned(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(ReturnsWeight(how) for _ in range(3))
        self.outlet = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        weights: list[Tensor] = []
        for each in self.blocks:
            output = each(x)
            x, weight = (output.hidden, output.extra) if hasattr(output, "hidden") else output
            if isinstance(weight, dict):
                weight = weight["weight"]
            if isinstance(weight, tuple):
                assert weight[0] is weight[1]
                weight = weight[0]
            weights.append(weight)
        # after all blocks have been freed
        return self.outlet(x) + 0.1 * sum(weight.pow(2).sum() for weight in weights)


@same_as_plain(2)
@pytest.mark.parametrize("how", [how for how in RETURNED if how != "hidden"])
def test_a_block_may_return_its_own_parameter(side: Side, how: str) -> None:
    train(side, built(UsesReturned, how), how != "itself")


class ReturnsInnerWeight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.block(x), self.block.weight


@on_ranks(2)
def test_a_root_may_return_the_parameter_of_a_block_that_stays_unsharded() -> None:
    """A copy, as the block is freed in backward."""
    model = ReturnsInnerWeight()
    fully_shard(model.block, reshard_after_forward=False)
    fully_shard(model)
    _, weight = model(torch.ones(2, 4))
    assert not isinstance(weight, nn.Parameter)


class ReturnsOnlyWeight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8))

    def forward(self) -> Tensor:
        return self.weight


class PromptTuning(nn.Module):
    """A block that is nothing but a parameter, without inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([ReturnsOnlyWeight(), Block(8, 13)])
        self.outlet = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.outlet(self.blocks[1](x + self.blocks[0]()))


@same_as_plain(1, 3)
def test_a_block_may_return_nothing_but_its_parameter(side: Side) -> None:
    model = built(PromptTuning)
    train(side, model)
    with torch.no_grad():
        side.note("returned without gradients", model.blocks[0]().clone())
    side.assert_settled(model)


@on_ranks(2)
def test_a_parameter_in_an_unknown_container_is_refused() -> None:
    torch.manual_seed(0)
    side = Side(is_sharded=True)
    model = nn.Sequential(ReturnsWeight("hidden"))
    side.shard(model[0], model)
    with pytest.raises(TypeError) as caught:
        model(torch.ones(2, 8))
    side.assert_settled(model)
    first = str(caught.value)
    assert "0: forward returned one of its own parameters somewhere inside a Plain" in first
    assert "parameter.clone()" in first


# --- side outputs ---------------------------------------------------------------------------------


class SideOutput(nn.Module):
    def __init__(self, when: str) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.router = nn.Linear(8, 4)
        self.when = when
        self.aux_loss: Tensor | None = None

    def forward(self, x: Tensor) -> Any:
        h = torch.tanh(self.first(x))
        if self.when == "before":
            self.aux_loss = self.router(torch.tanh(self.second(h))).pow(2).mean()
        y = x + torch.tanh(self.second(h))
        if self.when != "before":
            # made after the output: its backward comes first
            self.aux_loss = self.router(torch.tanh(self.second(h * 0.5))).pow(2).mean()
        if self.when == "detached":
            return y.detach()
        if self.when == "codes":
            return (y > 0).long()
        if self.when == "none":
            self.stored = y
            return None
        return y


class Collecting(Chain):
    def __init__(self, when: str, only_aux: bool = False) -> None:
        super().__init__(*[lambda: SideOutput(when)] * 3)
        self.when, self.only_aux = when, only_aux

    def between(self, block: nn.Module, x: Tensor) -> Tensor:
        y = block(x)
        if self.when == "none":
            return block.stored
        return x * 0.9 + y.to(x.dtype)

    def loss(self, inputs: Tensor) -> Tensor:
        loss = mean_of_squares(self, inputs)
        aux = torch.stack([each.aux_loss for each in self.blocks]).sum()
        return aux if self.only_aux else loss + aux


def collected_loss(model: Any, inputs: Tensor) -> Tensor:
    return model.loss(inputs)


@same_as_plain(2)
@pytest.mark.parametrize(
    ("when", "only_aux", "reshard"),
    [
        ("before", True, False),
        ("after", False, False),
        ("none", True, None),
        ("detached", False, True),
        ("codes", False, True),
    ],
)
def test_a_loss_left_on_an_attribute_trains_beside_any_output_or_none(
    side: Side, when: str, only_aux: bool, reshard: bool | None
) -> None:
    """Also where the loss is made only of attributes, and where the output has no gradient."""
    train(side, built(Collecting, when, only_aux), reshard, collected_loss)


class LateOnTorchs(nn.Module):
    """Leaves a loss on a module of torch's own, where ``first`` has stood in the forwards before, or nothing."""

    def __init__(self, first: Any) -> None:
        super().__init__()
        self.body, self.router = nn.Linear(8, 8), nn.Linear(8, 4)
        if first != "nothing":
            self.body.aux_loss = first

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.body.aux_loss = self.router(torch.tanh(self.body(x * 0.5))).pow(2).mean()
        return x + torch.tanh(self.body(x))


def loss_on_torchs(model: Any, inputs: Tensor) -> Tensor:
    """The last backward is of what stands on the attributes alone."""
    model.train(mode=False)
    mean_of_squares(model, inputs).backward()
    model.train()
    mean_of_squares(model, inputs)
    return torch.stack([block.body.aux_loss for block in model.blocks]).sum()


@same_as_plain(2)
@pytest.mark.parametrize(
    ("first", "reshard"), [(None, True), (0.0, False), (torch.zeros(()), True), ("nothing", True)]
)
def test_a_loss_that_replaces_something_on_a_module_of_torchs_trains(
    side: Side, first: Any, reshard: bool
) -> None:
    train(side, built(Chain, *[lambda: LateOnTorchs(first)] * 3), reshard, loss_on_torchs)


class KeepsWeight(torch.autograd.Function):
    """Keeps its weight by itself instead of save_for_backward, as some kernels do: torch checks nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.weight = weight
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0] @ ctx.weight, None


class SideKernel(SideOutput):
    def __init__(self) -> None:
        super().__init__("kernel")

    def forward(self, x: Tensor) -> Tensor:
        y = x + torch.tanh(self.second(torch.tanh(self.first(x))))
        self.aux_loss = KeepsWeight.apply(y * 0.5, self.router.weight).pow(2).mean()  # type: ignore
        return y


class CollectingKernels(Collecting):
    def __init__(self) -> None:
        super().__init__("kernel")
        self.blocks = nn.ModuleList(SideKernel() for _ in range(3))


@same_as_plain(2)
@pytest.mark.parametrize("reshard", [True, False])
def test_freed_weights_are_never_read_by_a_side_output(side: Side, reshard: bool) -> None:
    train(side, built(CollectingKernels), reshard, collected_loss)


class StoresWeight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.kept: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.kept = self.linear.weight
        return torch.tanh(self.linear(x))


@on_ranks(2)
def test_a_parameter_left_on_an_attribute_is_refused() -> None:
    side = Side(is_sharded=True)
    model = side.shard_tower(built(Chain, StoresWeight, block))
    told = refusal(model, side.inputs(0))
    assert_says(
        told, "blocks.0.kept: forward assigned the unsharded parameter blocks.0.linear.weight", ".clone()"
    )


# --- several outputs ------------------------------------------------------------------------------


class Several(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        a = torch.tanh(self.first(x))
        b = torch.tanh(self.second(a))
        return a, b, self.first(b)


class UsesOne(Chain):
    def __init__(self, used: tuple[int, ...]) -> None:
        super().__init__(*[Several] * 3)
        self.outputs = used

    def between(self, block: nn.Module, x: Tensor) -> Tensor:
        outputs = block(x)
        return sum((outputs[i] for i in self.outputs), x * 0.5)


@same_as_plain(2)
@pytest.mark.parametrize(("used", "reshard"), [((1,), False), ((0, 2), False), ((0, 1, 2), None)])
def test_any_of_several_outputs_may_be_used(side: Side, used: tuple[int, ...], reshard: bool | None) -> None:
    train(side, built(UsesOne, used), reshard)


class PassesThrough(nn.Module):
    """Hands on all it was given, and adds its own: residual streams, lists of hidden states."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, states: list[Tensor]) -> list[Tensor]:
        return [*states, torch.tanh(self.linear(states[-1]))]


class Dense(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inlet = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(PassesThrough() for _ in range(4))
        self.outlet = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        states = [self.inlet(x)]
        for each in self.blocks:
            states = each(states)
        return self.outlet(torch.stack(states).sum(0))


@same_as_plain(2)
def test_inputs_may_be_handed_on_and_cause_no_further_unshards(side: Side) -> None:
    model = side.shard_tower(built(Dense), reshard_after_forward=True)
    optimizer = adamw(model)
    side.step(model, optimizer, 0)
    events = events_of(model) if side.is_sharded else []
    side.steps(model, optimizer, [1])
    if side.is_sharded:  # in forward and backward
        assert counts(events, "unshard") == {"Dense": 2, **{f"blocks.{index}": 2 for index in range(4)}}


# --- recurrent blocks, odd inputs -----------------------------------------------------------------


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.LSTM(8, 6, batch_first=True), nn.LSTM(6, 5, batch_first=True)])
        self.outlet = nn.Linear(5, 1)

    def forward(self, x: Tensor) -> Tensor:
        sequence = torch.stack([x, x * 0.5, x.flip(1)], dim=1)
        lengths = torch.tensor([1 + i % 3 for i in range(len(x))])
        packed: PackedSequence = pack_padded_sequence(sequence, lengths, True, enforce_sorted=False)
        for each in self.blocks:
            packed, _ = each(packed)
        return self.outlet(pad_packed_sequence(packed, batch_first=True)[0].sum(1))


@same_as_plain(2)
def test_recurrent_modules_themselves_may_be_sharded_and_fed_packed_sequences(side: Side) -> None:
    train(side, built(Packed))


# --- inference mode -------------------------------------------------------------------------------


@same_as_plain(2)
@pytest.mark.parametrize(
    ("mode", "reshard"),
    [(torch.inference_mode, None), (torch.inference_mode, False), (torch.no_grad, True)],
)
def test_training_follows_a_first_forward_without_gradients(
    side: Side, mode: Any, reshard: bool | None
) -> None:
    model = side.shard_tower(built(Chain, block, lambda: Recurrent(nn.LSTM)), reshard_after_forward=reshard)
    for step in range(2):
        with mode():
            output = model(side.inputs(9))
        side.note_rows("inference", output.clone())
        side.assert_settled(model)
        side.steps(model, adamw(model), [step])
    model.requires_grad_(False)
    model.inlet.requires_grad_(True)
    side.steps(model, adamw(model), [3])


@same_as_plain(2)
def test_a_model_sharded_under_inference_mode_trains(side: Side) -> None:
    model = built(even_tower)
    with torch.inference_mode():
        side.shard_tower(model)
        side.note_rows("inference", model(side.inputs(9)).clone())
    side.steps(model, adamw(model), range(2))


# --- inputs that a block changes: they are outputs of that call -----------------------------------


@dataclass
class Cache:
    """As Hugging Face's key-value caches: every block adds to the same one."""

    keys: list[Tensor] = field(default_factory=list)
    total: Tensor | None = None

    def update(self, key: Tensor) -> Tensor:
        self.keys.append(key)
        self.total = key if self.total is None else torch.cat([self.total, key])
        return self.total


class Changes(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.block = Block(WIDTH, 13)
        self.side = nn.Linear(WIDTH, WIDTH)
        self.how = how

    def forward(self, x: Tensor, given: Any) -> Any:
        y = self.block(x)
        if self.how == "dict":
            given["h"] = y
            return given
        if self.how == "list":
            given.append(y)
            return y
        if self.how == "list_alone":
            given.append(y)
            return None
        if self.how == "list_of_others":
            given.append(torch.tanh(self.side(x)))
            return y
        if self.how == "cache":
            return y + given.update(self.side(x)).view(-1, *x.shape).mean(0)
        if self.how == "cache_returned":
            return y + given.update(self.side(x)).view(-1, *x.shape).mean(0), given
        gain = self.side.weight.sum() * 0.01 + 1
        if self.how == "in_place":
            return x.mul_(gain).add_(self.side.bias)
        if self.how == "in_place_alone":
            x.mul_(gain).add_(self.side.bias)
        else:
            x[:, 1:].mul_(gain)
        return None


class Changing(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.inlet = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Changes(how) for _ in range(3))
        self.outlet = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inlet(x) * 0.5
        given: Any = {} if self.how == "dict" else Cache() if "cache" in self.how else []
        for each in self.blocks:
            returned = each(x, given)
            if self.how == "dict":
                x = returned["h"]
            elif self.how == "cache_returned":
                x, given = returned
            elif returned is not None:
                x = returned
        if self.how == "in_place":
            x = x.clone()
        kept = given.keys if isinstance(given, Cache) else given if isinstance(given, list) else []
        return self.outlet(sum(kept, x))


HOWS = (
    *("dict", "list", "list_alone", "list_of_others", "cache", "cache_returned"),
    *("in_place", "in_place_alone", "part_in_place"),
)


@same_as_plain()
@pytest.mark.parametrize(("world", "reshard"), [(1, None), (2, True)], indirect=["world"])
def test_what_a_block_adds_to_its_input_has_a_gradient(side: Side, reshard: bool | None) -> None:
    for how in HOWS:
        model = side.shard_tower(built(Changing, how), reshard_after_forward=reshard)
        side.steps(model, adamw(model), range(2))


@same_as_plain(2)
def test_a_loss_may_use_nothing_but_what_the_list_has(side: Side) -> None:
    model = side.shard_tower(built(Changing, "list_of_others"), reshard_after_forward=True)
    for step in range(2):
        kept: list[Tensor] = []
        model.blocks[1](side.inputs(step), kept)
        kept[0].pow(2).mean().backward()
        side.note("gradient", model.blocks[1].side.weight.grad)
        side.assert_settled(model)


class AppendsWeight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, given: list[Tensor]) -> Tensor:
        given.append(self.linear.weight.t())
        return self.linear(x)


@on_ranks(2)
def test_a_parameter_put_into_the_callers_list_is_refused() -> None:
    model = fully_shard(built(AppendsWeight), reshard_after_forward=True)
    x = torch.ones(2, WIDTH, dtype=torch.float64)
    for has_graph in (True, False):
        with torch.set_grad_enabled(has_graph), pytest.raises(TypeError) as refused:
            model(x, [x])
        assert_expected_inline(
            str(refused.value),
            """AppendsWeight: forward has put one of its own parameters, of shape (8, 8), into a container that it was given. The parameter's memory is freed after forward. Put parameter.clone() there.""",
        )
