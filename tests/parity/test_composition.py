"""What people combine: optimizers, ties, clipping, several meshes, other calls (docs/explain/failures.md).

Every test runs one script plainly and sharded (scenario.py) in float64, or asks for the words of a refusal.
"""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from comparing import assert_all_same
from failure_models import Branching, Chain, PartlyUsed, block
from harness import World
from meshed import gradients_of, parameters_of, refusal, whole
from models import (
    WIDTH,
    LanguageModel,
    built,
    even_tower,
    next_token_loss,
    odd_model,
    random_batch,
    shard_tower,
    token_batch,
    uneven_tower,
)
from on_ranks import on_ranks
from reference import adamw, full, mean_of_squares
from refusals import assert_says
from scenario import BATCH_SIZE, Side, same_as_plain
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint
from towers import attribute

from shardwise import FSDPModule, MixedPrecisionPolicy, fully_shard

# --- optimizers made before sharding --------------------------------------------------------------

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1),
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-2),
    "foreach": lambda params: torch.optim.AdamW(params, lr=1e-2, foreach=True),
    "groups": lambda params: torch.optim.SGD([{"params": [p], "lr": 0.1} for p in params]),
}


@on_ranks(2)
def test_an_optimizer_made_before_sharding_says_why_not() -> None:
    """Of every kind of optimizer, whether step or zero_grad comes first."""
    texts = []
    for make in OPTIMIZERS.values():
        for first in ("step", "zero_grad"):
            model = built(even_tower)
            optimizer = make(model.parameters())
            shard_tower(model)
            mean_of_squares(model, random_batch(0, 4)).backward()
            texts.append(refusal(getattr(optimizer, first)))
    assert len(texts) == 2 * len(OPTIMIZERS)
    for text in texts:
        assert_says(text, "RuntimeError", "inlet.weight", "optimizer built before fully_shard")


class KeepsWeights(nn.Module):
    """Its forward finds weights in a list, a dict or an attribute that nobody has registered."""

    def __init__(self, place: str) -> None:
        super().__init__()
        tower = even_tower()
        self.inlet, self.blocks, self.outlet = tower.inlet, tower.blocks, tower.outlet
        weight: Any = self.blocks[1].down.weight
        self.place = place
        self.listed, self.named = [weight], {"weight": weight}
        self.__dict__["alone"] = weight

    def forward(self, x: Tensor) -> Tensor:
        for each in self.blocks:
            x = each(self.inlet(x))
        weights = {"list": self.listed[0], "dict": self.named["weight"], "attribute": self.alone}
        if self.place == "stack":
            return self.outlet(x) + torch.stack([self.listed[0], torch.zeros(8, 16).double()]).sum()
        if self.place == "method":
            return self.outlet(x) + self.listed[0].unbind()[0].sum()
        return self.outlet(torch.tanh(F.linear(x, weights[self.place].t())) @ weights[self.place].t())


@on_ranks(2)
def test_weights_that_are_kept_in_a_list_are_not_computed_with_untrained() -> None:
    for place in ("list", "dict", "attribute", "stack", "method"):
        model = built(KeepsWeights, place)
        plain = [param.detach().clone() for param in model.parameters()]
        kept = model.listed[0]
        shard_tower(model)
        text = refusal(model, random_batch(0, 4))
        assert_says(text, "blocks.1.down.weight", "plain list, dict or attribute", "detach()")
        with torch.no_grad():
            model(random_batch(0, 4))
            assert torch.equal(kept + 0, next(p for p in plain if torch.equal(p, kept)))
        model.zero_grad()
        assert (kept.detach() * 2).isfinite().all()


# --- sums over replicas ----------------------------------------------------------------------------


@on_ranks(4)
def test_sums_that_wait_for_replicas_survive_a_change_of_dtype() -> None:
    plain = built(uneven_tower)
    for step in (0, 1):
        mean_of_squares(plain, random_batch(step, 4, 7)).backward()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = shard_tower(built(uneven_tower), mesh=mesh)
    model.set_requires_all_reduce(False)
    mean_of_squares(model, random_batch(0, 4, 7)).backward()
    model.float()
    model.set_requires_all_reduce(True)
    mean_of_squares(model, random_batch(1, 4, 7).float()).backward()
    want = {name: whole(gradient).float() for name, gradient in gradients_of(plain).items()}
    assert_all_same([gradients_of(model)], want, rtol=1e-5, atol=1e-6)


# --- what parameters carry ------------------------------------------------------------------------


class Tagged(nn.Parameter):
    """A subclass with a method, as quantisation and parallelism libraries have them."""

    def doubled(self) -> Tensor:
        return self * 2


class UsesTagged(nn.Module):
    def __init__(self, rows: int) -> None:
        super().__init__()
        self.weight = Tagged(torch.randn(rows, WIDTH))
        self.weight.tag = {"axis": 1}  # type: ignore[attr-defined]
        self.back = nn.Linear(rows, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        assert type(self.weight) is Tagged, type(self.weight)
        assert self.weight.tag == {"axis": 1}  # type: ignore[attr-defined]
        return self.back(torch.tanh(x @ self.weight.doubled().t()))


class Packed(nn.Parameter):
    """Bytes of which a forward makes weights, as 4-bit quantisation for adapters stores them."""

    quant_state: Any

    def __new__(cls, data: Tensor, requires_grad: bool = False, quant_state: Any = None) -> "Packed":
        self = torch.Tensor._make_subclass(cls, data, requires_grad)
        self.quant_state = quant_state
        return self


class PackedLinear(nn.Module):
    def __init__(self, rows: int) -> None:
        super().__init__()
        packed = torch.randint(0, 256, (rows, WIDTH), dtype=torch.uint8)
        self.weight = Packed(packed, quant_state={"scale": 1 / 256, "zero": 128, "sum": int(packed.sum())})
        self.down = nn.Linear(WIDTH, 3, bias=False)
        self.up = nn.Linear(3, rows, bias=False)
        self.back = nn.Linear(rows, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        assert type(self.weight) is Packed, type(self.weight)
        assert self.weight.dtype is torch.uint8
        state = self.weight.quant_state
        assert int(self.weight.sum(dtype=torch.int64)) == state["sum"], "bytes have changed"
        dense = (self.weight.to(x.dtype) - state["zero"]) * state["scale"]
        return self.back(torch.tanh(x @ dense.t() + self.up(self.down(x))))


@same_as_plain()
@pytest.mark.parametrize(
    ("world", "make", "rows", "reshard"),
    [(1, UsesTagged, 8, True), (2, UsesTagged, 5, True), (2, PackedLinear, 5, False)],
    indirect=["world"],
)
def test_forward_sees_the_subclass_and_what_it_carries(
    side: Side, make: Any, rows: int, reshard: bool
) -> None:
    model = built(Chain, partial(make, rows), block, partial(make, rows))
    side.shard_tower(model, reshard_after_forward=reshard)
    weight = model.blocks[0].weight
    side.note("attributes", sorted(vars(weight).keys() & {"tag", "quant_state"}))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    side.steps(model, optimizer, range(2))
    side.note("bytes", model.blocks[0].weight)


@on_ranks(2)
def test_packed_bytes_are_not_cast_under_mixed_precision() -> None:
    model = built(Chain, partial(PackedLinear, 5)).float()
    before = model.blocks[0].weight.detach().clone()
    shard_tower(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    seen: list[str] = []
    model.blocks[0].register_forward_pre_hook(
        lambda module, args: seen.append(f"{module.weight.dtype} {module.down.weight.dtype} {args[0].dtype}")
    )
    mean_of_squares(model, random_batch(0, 4, dtype=torch.float32)).backward()
    assert torch.equal(full(model.blocks[0].weight), before)
    assert seen == ["torch.uint8 torch.bfloat16 torch.bfloat16"]


# --- ignored parameters ---------------------------------------------------------------------------


@same_as_plain()
@pytest.mark.parametrize(
    ("world", "synced"),
    [(1, [True]), (2, [False, True]), (3, [True, True])],
    ids=["one", "accumulated", "both synchronised"],
    indirect=["world"],
)
def test_gradients_of_ignored_parameters_are_averaged_on_request(side: Side, synced: list[bool]) -> None:
    """One trainable parameter of the root and one of a block are left out."""
    model = built(uneven_tower)
    left_out = [model.inlet.weight, model.blocks[1].up.bias]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        side.shard_tower(model, ignored_params=set(left_out))
    if side.is_sharded:
        assert [type(param) for param in left_out] == [nn.Parameter] * 2
        assert model.inlet.weight is left_out[0]
        model.set_reduce_ignored_params(True)
    for microbatch, is_synced in enumerate(synced):
        side.sync(model, is_synced)
        mean_of_squares(model, side.inputs(microbatch, 7)).backward()
    side.note_gradients(model)


def ignored(trains: bool) -> tuple[bool, list[str]]:
    """Whether a gradient of two backwards is this rank's own, and the warnings."""
    model, plain = built(even_tower), built(even_tower)
    left_out = {model.inlet.weight, model.blocks[1].up.bias}
    for param in left_out:
        param.requires_grad_(trains)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        shard_tower(model, ignored_params=left_out)
        for step in range(2):
            batch = random_batch(2 * step + dist.get_rank(), 4)
            for each in (model, plain):
                mean_of_squares(each, batch).backward()
    grad, want = model.inlet.weight.grad, plain.inlet.weight.grad
    is_own = torch.allclose(grad, want, rtol=0, atol=1e-12) if trains else grad is None
    return is_own, [str(w.message) for w in caught if issubclass(w.category, UserWarning)]


def test_without_the_request_an_ignored_gradient_is_the_ranks_own_which_is_warned_of_once(
    world2: World,
) -> None:
    """Frozen ones are ignored without a word."""
    for is_own, texts in world2.run(ignored, True):
        assert is_own
        text = "\n".join(texts)
        for name in ("inlet.weight", "up.bias"):
            assert text.count(name) == 1, text
        assert_says(text, "ignored_params", "set_reduce_ignored_params")
    assert world2.run(ignored, False) == [(True, [])] * 2


# --- unused parameters and blocks -----------------------------------------------------------------
# Ranks do different things here, so the plain side plays them one after the other.

Configure = Callable[[nn.Module, int, int], None]  # (model, rank, step)


def played(
    model: nn.Module, configure: Configure, steps: int, is_sharded: bool, world: int, **how: Any
) -> Any:
    """SGD steps; every rank on its own batch, in its own way. Missing gradients count as zero."""
    ranks = [dist.get_rank()] if is_sharded else list(range(world))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen: dict[str, Any] = {}
    for step in range(steps):
        optimizer.zero_grad()
        for microbatch in range(how.get("microbatches", 1)):
            if is_sharded:
                model.set_requires_gradient_sync(microbatch == how.get("microbatches", 1) - 1)
            for rank in ranks:
                configure(model, rank, step + microbatch)
                inputs = random_batch(100 * step + 10 * microbatch + rank, 4)
                if how.get("evaluates") and is_sharded:
                    with torch.no_grad():
                        model(inputs)
                (mean_of_squares(model, inputs) / len(ranks)).backward()
        for name, param in model.named_parameters():
            grad = torch.zeros_like(param) if param.grad is None else param.grad
            seen[f"gradient of {name} at step {step}"] = full(grad)
        optimizer.step()
    return seen | parameters_of(model)


def assert_played_alike(world: World, run: Callable[..., Any], *args: Any) -> None:
    expected = run(*args, is_sharded=False, world=world.size)
    assert_all_same(world.run(run, *args, is_sharded=True, world=world.size, timeout=20), expected)


def uses_extra_on_some(model: nn.Module, rank: int, step: int) -> None:
    for index, each in enumerate(model.blocks):
        each.uses_extra = (rank + step + index) % 2 == 0


def uses_extra_on_none(model: nn.Module, rank: int, step: int) -> None:
    for each in model.blocks:
        each.uses_extra = False


def parameter_unused_on_some(configure: Configure, is_sharded: bool, world: int) -> Any:
    model = built(Chain, PartlyUsed, PartlyUsed)
    if is_sharded:
        shard_tower(model)
        model.set_reduce_scatter_unused_params(True)
    return played(model, configure, 2, is_sharded, world, microbatches=2)


@pytest.mark.parametrize(
    ("world", "configure"), [(2, uses_extra_on_some), (3, uses_extra_on_none)], indirect=["world"]
)
def test_a_parameter_may_be_unused_on_some_ranks(world: World, configure: Configure) -> None:
    assert_played_alike(world, parameter_unused_on_some, configure)


@on_ranks(2)
def test_what_no_rank_uses_gets_zeros_only_on_request() -> None:
    model = shard_tower(built(Chain, PartlyUsed))
    seen = []
    for enabled in (True, False):
        model.zero_grad()
        model.set_reduce_scatter_unused_params(enabled)
        mean_of_squares(model, random_batch(0, 4)).backward()
        grad = model.blocks[0].extra.grad
        seen.append(None if grad is None else full(grad).abs().max().item())  # type: ignore[union-attr]
    assert seen == [0.0, None]


def one_block_for_each(model: nn.Module, rank: int, step: int) -> None:
    model.used = (0, 1 + (rank + step) % 2)


def one_block_for_the_first_rank(model: nn.Module, rank: int, step: int) -> None:
    model.used = (0, 1, 2) if rank == 0 else (0,)


def no_block_at_first(model: nn.Module, rank: int, step: int) -> None:
    model.used = (0,) if step == 0 else (0, 2, 1) if rank == 0 else (0, 1, 2)


class CheckpointedBranching(Branching):
    def forward(self, x: Tensor) -> Tensor:
        x = self.inlet(x)
        for index in self.used:
            x = checkpoint(self.blocks[index], x, use_reentrant=False)  # type: ignore[assignment]
        return self.outlet(x)


def block_used_on_some(
    make: Any, configure: Configure, reshard: bool | None, how: Any, is_sharded: bool, world: int
) -> Any:
    model = built(make)
    if is_sharded:
        shard_tower(model, reshard_after_forward=reshard)
        model.set_reduce_scatter_unused_params(True)  # `spare` of the root is used by nobody
        for each in list(model.blocks)[1:]:
            each.set_may_be_unused(True)
    return played(model, configure, 3, is_sharded, world, **how)


@pytest.mark.parametrize(
    ("world", "make", "configure", "reshard", "how"),
    [
        pytest.param(3, Branching, one_block_for_the_first_rank, True, {}, id="first rank"),
        pytest.param(3, Branching, no_block_at_first, None, {}, id="none at first"),
        pytest.param(2, CheckpointedBranching, one_block_for_each, None, {}, id="checkpointed"),
        pytest.param(2, Branching, one_block_for_each, False, {"microbatches": 2}, id="accumulated"),
        pytest.param(2, Branching, one_block_for_each, None, {"evaluates": True}, id="evaluated"),
    ],
    indirect=["world"],
)
def test_a_block_may_be_used_on_some_ranks_only(
    world: World, make: Any, configure: Configure, reshard: bool | None, how: Any
) -> None:
    assert_played_alike(world, block_used_on_some, make, configure, reshard, how)


class WithTower(nn.Module):
    """A language side and a tower of sharded layers, which sees only some batches."""

    def __init__(self) -> None:
        super().__init__()
        self.inlet, self.outlet = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.blocks = nn.ModuleList([block(), block()])
        self.vision = nn.Sequential(block(), block(), nn.Linear(WIDTH, WIDTH))
        self.sees = True

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](self.inlet(x))
        if self.sees:
            x = x + self.vision(x)
        return self.outlet(self.blocks[1](x))


def sees_on_some(model: nn.Module, rank: int, step: int) -> None:
    model.sees = rank == step % 2


def tower_used_on_some(says_no_zeros: bool, is_sharded: bool, world: int) -> Any:
    model = built(WithTower)
    if is_sharded:
        for each in (*model.blocks, model.vision[0], model.vision[1], model.vision, model):
            fully_shard(each)
        for each in model.vision.modules():
            if isinstance(each, FSDPModule):
                each.set_may_be_unused(True)
        if says_no_zeros:  # of parameters without a gradient; that may_be_unused needs some is another matter
            model.set_reduce_scatter_unused_params(False)
    return played(model, sees_on_some, 3, is_sharded, world)


@pytest.mark.parametrize(("world", "says_no_zeros"), [(2, True), (3, False)], indirect=["world"])
def test_a_tower_of_sharded_layers_may_be_used_on_some_ranks_only(world: World, says_no_zeros: bool) -> None:
    assert_played_alike(world, tower_used_on_some, says_no_zeros)


# --- tied parameters ------------------------------------------------------------------------------


class TiedLanguageModel(LanguageModel):
    """Embedding and head are one parameter; on request a third place uses it too."""

    def __init__(self, ties_three: bool = False) -> None:
        super().__init__()
        self.head.weight = self.embed.weight
        self.reader = nn.Linear(12, 29, bias=False)
        if ties_three:
            self.reader.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) + 0.1 * self.reader(self.embed(tokens))


# Which modules get a group of their own, bottom-up; the root follows.
GROUPS: dict[str, list[str]] = {
    "all in the root": [],
    "embedding apart": ["embed"],
    "head first": ["head", "embed"],
    "all apart": ["embed", "norm", "reader", "head"],
}


@same_as_plain()
@pytest.mark.parametrize(
    ("world", "groups", "ties_three", "reshard"),
    [
        (2, "all in the root", True, None),
        (2, "embedding apart", False, True),
        (2, "head first", True, False),
        (3, "all apart", True, True),
    ],
    indirect=["world"],
)
def test_weights_tied_across_groups_are_one_parameter_with_one_gradient(
    side: Side, groups: str, ties_three: bool, reshard: bool | None
) -> None:
    model = built(TiedLanguageModel, ties_three)
    own = [getattr(model, name) for name in GROUPS[groups]]
    side.shard(*model.blocks, *own, model, reshard_after_forward=reshard)
    assert model.embed.weight is model.head.weight
    assert (model.embed.weight is model.reader.weight) == ties_three
    side.note("names", [name for name, _ in model.named_parameters()])
    side.note("keys", list(model.state_dict()))
    optimizer = adamw(model)
    for step in range(2):
        optimizer.zero_grad()
        for microbatch in range(2):
            side.sync(model, microbatch == 1)
            loss = next_token_loss(model, side.part(token_batch(2 * step + microbatch, BATCH_SIZE)))
            loss.backward()
            side.note_mean("loss", loss)
        side.note_gradients(model)
        optimizer.step()
        side.assert_settled(model)
        assert model.embed.weight is model.head.weight
    side.note_parameters(model)
    for name, value in model.state_dict().items():
        side.note(f"state of {name}", value)


class TiedBlocks(Chain):
    def __init__(self) -> None:
        super().__init__(block, block, block)
        first, second, third = self.blocks
        second.up.weight = first.up.weight
        third.down.weight, third.norm.bias = first.down.weight, second.norm.bias


class TiedStages(Chain):
    """The lowest common group of the tie is a stage, not the root."""

    def __init__(self) -> None:
        super().__init__(*[lambda: nn.Sequential(block(), block())] * 2)
        for stage in self.blocks:
            stage[1].up.weight = stage[0].up.weight

    def between(self, stage: nn.Module, x: Tensor) -> Tensor:
        return checkpoint(stage, x, use_reentrant=False)  # type: ignore[return-value]


@same_as_plain()
@pytest.mark.parametrize(
    ("world", "make"), [(1, TiedStages), (2, TiedStages), (3, TiedBlocks)], indirect=["world"]
)
def test_blocks_may_share_weights(side: Side, make: Any) -> None:
    model = built(make)
    if make is TiedStages:
        side.shard(*(inner for stage in model.blocks for inner in stage))
    side.shard_tower(model)
    for name, param in model.named_parameters(remove_duplicate=False):
        side.note(f"first name of {name}", next(n for n, p in model.named_parameters() if p is param))
    side.steps(model, adamw(model), range(2))
    with torch.no_grad():
        side.note_rows("evaluation", model(side.inputs(9)))
    side.assert_settled(model)


@same_as_plain(2)
def test_tied_weights_may_be_frozen_and_thawed(side: Side) -> None:
    model = built(TiedLanguageModel, True)
    model.embed.weight.requires_grad_(False)
    side.shard(*model.blocks, model.embed, model.head, model)
    side.note("trainable", [name for name, param in model.named_parameters() if param.requires_grad])
    optimizer = adamw(model)
    for step in range(2):
        optimizer.zero_grad()
        if step == 1:
            model.head.weight.requires_grad_(True)
        next_token_loss(model, side.part(token_batch(step, BATCH_SIZE))).backward()
        side.note_gradients(model)
        optimizer.step()
        side.assert_settled(model)


# --- calls in any order, and several roots --------------------------------------------------------


@same_as_plain(2)
def test_roots_may_be_trained_apart_and_together(side: Side) -> None:
    """Three roots that share what they see, a frozen one among them, trained apart and together."""
    actor, critic, judge = built(even_tower), built(Chain, block), built(even_tower)
    judge.requires_grad_(False)
    side.shard_tower(actor, reshard_after_forward=True)
    side.shard_tower(critic, reshard_after_forward=False)
    side.shard_tower(judge)
    optimizers = [adamw(actor), adamw(critic)]
    for step in range(2):
        for optimizer in optimizers:
            optimizer.zero_grad()
        inputs = side.inputs(step)
        with torch.no_grad():
            target = judge(inputs)
        value = critic(inputs)
        (value - target).pow(2).mean().backward()
        gain = (actor(inputs) * (target - critic(inputs))).mean() + actor(inputs * 0.5).pow(2).mean()
        gain.backward()
        side.note_mean("gain", gain)
        for model in (actor, critic):
            side.note_gradients(model)
        for optimizer in optimizers:
            optimizer.step()
        for model in (actor, critic, judge):
            side.assert_settled(model)
    side.note_parameters(actor)
    side.note_parameters(critic)


# --- memory format --------------------------------------------------------------


def on_the_last_dimension(param: nn.Parameter) -> Shard | None:
    return Shard(param.ndim - 1) if param.ndim else None


@pytest.mark.parametrize("place", [None, on_the_last_dimension])
@on_ranks(2)
def test_forward_sees_the_memory_format_it_was_given_or_a_contiguous_one(place: Any) -> None:
    model, plain = built(odd_model), built(odd_model)
    shard_tower(model, shard_placement_fn=place)
    seen: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    model.blocks[0].register_forward_pre_hook(
        lambda module, args: seen.extend(
            (attribute(module, name).stride(), param.stride())
            for name, param in plain.blocks[0].named_parameters()
        )
    )
    with torch.no_grad():
        torch.testing.assert_close(model(random_batch(0, 4)), plain(random_batch(0, 4)), rtol=0, atol=1e-12)
    assert seen
    for mine, theirs in seen:
        dense = sorted(mine, reverse=True) == list(mine)
        assert mine == theirs or dense, f"strides {mine} where {theirs} were given"


# --- functional_call ------------------------------------------------------------------------------


@pytest.mark.parametrize("on", ["", "blocks.1"])
@pytest.mark.parametrize("kind", ["plain", "sharded"])
@on_ranks(2)
def test_functional_call_uses_what_it_is_given_or_refuses(kind: str, on: str) -> None:
    """With twice the weights; an ordinary step afterwards is as if nothing had been."""
    plain, model = built(even_tower), shard_tower(built(even_tower))
    found: list[dict[str, Any]] = []
    for each in (plain, model):
        target = each.get_submodule(on)
        given = {name: 2 * whole(param) for name, param in target.named_parameters()}
        if kind == "sharded" and each is model:
            for name, param in target.named_parameters():
                given[name] = distribute_tensor(given[name], param.device_mesh, param.placements)
        for value in given.values():
            value.requires_grad_()
        try:
            output = functional_call(target, given, (random_batch(0, 4),))
            output.pow(2).mean().backward()
            found.append({"output": full(output)} | {name: full(v.grad) for name, v in given.items()})
        except Exception as error:
            assert each is model
            assert_says(str(error), "functional_call")
        each.zero_grad()
        mean_of_squares(each, random_batch(1, 4)).backward()
    assert_all_same(found[1:], found[0])
    assert_all_same([gradients_of(model)], gradients_of(plain))


# --- calls past forward ---------------------------------------------------------------------------


class Generating(Chain):
    def __init__(self) -> None:
        super().__init__(block, Holds)

    def generate(self, x: Tensor) -> Tensor:
        return self.outlet(torch.tanh(self.inlet(x)))


class Holds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.weight)


WAYS: dict[str, tuple[Callable[[Any, Tensor], Tensor], list[str]]] = {
    "a layer of a block": (lambda model, x: model.blocks[0].up(x), ["up.weight", "blocks.0"]),
    "a norm of a block": (lambda model, x: model.blocks[0].norm(x), ["norm.weight", "blocks.0"]),
    "a layer of the root": (lambda model, x: model.outlet(x), ["outlet.weight", "Generating"]),
    "forward of a block": (lambda model, x: model.blocks[0].forward(x), ["norm.weight", "blocks.0"]),
    "forward of the root": (lambda model, x: model.forward(x), ["inlet.weight", "Generating"]),
    "generate": (lambda model, x: model.generate(x), ["inlet.weight", "Generating"]),
}


@pytest.mark.parametrize("used_before", [False, True])
@on_ranks(2)
def test_a_call_past_forward_says_which_parameter_and_what_to_call(used_before: bool) -> None:
    """What each of the ways is told, and the gradients of a step after all of them."""
    plain, model = built(Generating), shard_tower(built(Generating))
    if used_before:
        mean_of_squares(model, random_batch(5, 4)).backward()
        model.zero_grad()
    for way, (call, words) in WAYS.items():
        text = refusal(call, model, random_batch(0, 4))
        assert_says(text, *words)
        assert "unshard()" in text or "register_fsdp_forward_method" in text, way
        assert "aten." not in text, way
    for each in (plain, model):
        mean_of_squares(each, random_batch(1, 4)).backward()
    assert_all_same([gradients_of(model)], gradients_of(plain))
