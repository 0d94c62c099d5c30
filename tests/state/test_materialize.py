"""materialize: values for models on the meta device, a group at a time.

The reference is plain PyTorch in one process: `to_empty`, then the same inits in the order of
`nn.Module.apply`. Values must be equal to the last bit, whatever the world, strategy, mesh and grouping.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from comparing import alike, assert_all_same, assert_equal
from expecttest import assert_expected_inline
from harness import World
from meshed import device_mesh, refusal
from models import CausalBlock, LanguageModel, random_batch, shard_tower
from on_ranks import on_ranks
from reference import full
from refusals import wrapped
from strategies import Plan, live_bytes
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from shardwise import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard, materialize
from shardwise.init import check_replicas

by_world = pytest.mark.parametrize("world", [1, 2, 3, 4], indirect=True)

# --- models ---------------------------------------------------------------------------------------


class Model(nn.Module):
    """Only modules with a forward can be sharded."""

    def forward(self, x: Tensor) -> Tensor:
        return x


class Rotary(nn.Module):
    """A buffer that no checkpoint has."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("angles", torch.zeros(5), persistent=False)

    def reset_parameters(self) -> None:
        self.angles = 1.0 / 10 ** torch.arange(5)


class Mixed(Model):
    """Modules of torch that initialise themselves in their own ways; no dim divides by 2, 3 or 4."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(7, 1)
        self.recurrent = nn.LSTM(7, 5)
        self.norm = nn.BatchNorm1d(7)
        self.rotary = Rotary()


class MixedTower(Model):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 7, padding_idx=2)
        self.blocks = nn.ModuleList(Mixed() for _ in range(2))
        self.head = nn.Conv1d(7, 3, 2)


class SharedAngles(MixedTower):
    """Both blocks share a buffer, and each computes it anew."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].rotary.angles = self.blocks[0].rotary.angles


class OddBlock(Model):
    """Parameters and buffers of many shapes and dtypes, and an init that reads what its children have."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 3)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.zeros(0, 4))
        self.frozen = nn.Parameter(torch.zeros(7), requires_grad=False)
        self.counts = nn.Parameter(torch.zeros(5, dtype=torch.int64), requires_grad=False)
        self.short = nn.Parameter(torch.zeros(5, 3, dtype=torch.bfloat16))
        self.spectrum = nn.Parameter(torch.zeros(6, dtype=torch.complex64))
        self.register_buffer("mask", torch.zeros(4, dtype=torch.bool))
        self.register_buffer("bytes", torch.zeros(4, dtype=torch.uint8))

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.inner.weight.mul_(2)
            self.scale.copy_(self.inner.bias.sum())
            nn.init.normal_(self.frozen)
            self.counts.data = torch.randperm(5)
            self.short.uniform_()
            self.spectrum = nn.Parameter(torch.randn(6, dtype=torch.complex64))
            self.mask.fill_(False)
            self.bytes.random_(0, 9)


class OddTower(Model):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(OddBlock() for _ in range(2))


class Tied(LanguageModel):
    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embed.weight


def orthogonal(module: nn.Module) -> None:
    for param in module.parameters(recurse=False):
        if param.dim() == 2:
            nn.init.orthogonal_(param)
        else:
            nn.init.normal_(param, std=0.1)
    for buffer in module.buffers(recurse=False):
        buffer.zero_()


def kaiming(module: nn.Module) -> None:
    """In the manner of Transformers: `module.weight.data.normal_()`."""
    if isinstance(module, nn.Linear):
        nn.init.kaiming_normal_(module.weight)
        if module.bias is not None:
            module.bias.data.zero_()
    elif isinstance(module, nn.Embedding):
        module.weight.data.normal_(mean=0.0, std=0.02)
    elif isinstance(module, nn.LayerNorm):
        module.bias.data.zero_()
        module.weight.data.fill_(1.0)


@dataclass(frozen=True)
class Case:
    """Travels by pickle."""

    make: Callable[[], nn.Module]
    init: Callable[[nn.Module], None] | None = None

    def __str__(self) -> str:
        return f"{self.make.__name__}_{self.init.__name__ if self.init else 'own'}"


TEXT = Case(LanguageModel)
MIXED = Case(MixedTower)
CASES = [TEXT, MIXED, Case(OddTower), Case(Tied), Case(Tied, kaiming), Case(MixedTower, orthogonal)]


def on_meta(make: Callable[[], nn.Module]) -> Any:
    with torch.device("meta"):
        return make()


def own_tensors(module: nn.Module) -> list[Tensor]:
    return [t for t in [*module._parameters.values(), *module._buffers.values()] if t is not None]


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
    return {name: (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone() for name, t in named}


def plain(case: Case, seed: int = 7) -> dict[str, Tensor]:
    model = on_meta(case.make)
    todo = {module for module in model.modules() if own_tensors(module)}
    torch.manual_seed(seed)
    model.to_empty(device="cpu")
    if isinstance(model, Tied):
        model.head.weight = model.embed.weight  # to_empty takes them apart

    def init(module: nn.Module) -> None:
        if module in todo:
            todo.remove(module)
            own = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
            with torch.no_grad():
                case.init(module) if case.init is not None else own()

    model.apply(init)
    return {**tensors_of(model), "next": torch.rand(3)}


def drawn(model: nn.Module, case: Case) -> dict[str, Tensor]:
    torch.manual_seed(7)
    assert materialize(model, case.init) is model
    return {**tensors_of(model), "next": torch.rand(3)}


def materialized(case: Case) -> dict[str, Tensor]:
    return drawn(shard_tower(on_meta(case.make)), case)


def assert_bits(ranks: list[dict[str, Tensor]], want: dict[str, Tensor]) -> None:
    assert_all_same(ranks, want, atol=0.0)


# --- values ---------------------------------------------------------------------------------------


@pytest.mark.thin(15)
@by_world
@pytest.mark.parametrize("case", CASES, ids=str)
def test_values_are_those_of_one_process(world: World, case: Case) -> None:
    assert_bits(world.run(materialized, case), plain(case))


@on_ranks(2)
def test_each_module_may_compute_a_shared_buffer_anew() -> None:
    case = Case(SharedAngles)
    assert_bits([materialized(case)], plain(case))


SPREAD: dict[str, Callable[[nn.Module], Any]] = {
    "hybrid": Plan("hybrid", 4, 2).shard,
    "ddp": Plan("ddp", 4).shard,
    "columns on the host": partial(
        shard_tower,
        offload_policy=CPUOffloadPolicy(pin_memory=False),
        shard_placement_fn=lambda p: Shard(p.dim() - 1) if p.dim() else None,
    ),
    "mixed precision": partial(shard_tower, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)),
}


@pytest.mark.parametrize("name", SPREAD)
@on_ranks(4)
def test_how_the_model_is_spread_does_not_matter(name: str) -> None:
    assert_bits([drawn(SPREAD[name](on_meta(MIXED.make)), MIXED)], plain(MIXED))


class Pair(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, hidden), nn.Linear(hidden, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


class PairTower(Model):
    def __init__(self, hidden: int = 7) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Pair(hidden) for _ in range(2))
        self.outlet = nn.Linear(6, 3)


@pytest.mark.parametrize(
    ("shape", "is_sharded"), [((1, 2, 2), True), ((1, 1, 4), False), ((2, 1, 2), True)], ids=str
)
@on_ranks(4)
def test_neither_does_tensor_parallelism(shape: tuple[int, int, int], is_sharded: bool) -> None:
    case = Case(PairTower)
    model = on_meta(PairTower)
    mesh = device_mesh(shape, ("replicate", "shard", "tp"))
    for block in model.blocks:
        plan = {"up": ColwiseParallel(use_local_output=False), "down": RowwiseParallel()}
        parallelize_module(block, mesh["tp"], plan)
    if is_sharded:
        shard_tower(model, mesh=mesh["replicate", "shard"])
    assert_bits([drawn(model, case)], plain(case))


def Wide() -> nn.Module:
    return nn.Linear(8, 4)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.GRU(3, 4), nn.GRU(4, 4)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)[0]
        return x


@on_ranks(2)
def test_recurrent_modules_run_once_they_have_values() -> None:
    def made(device: str) -> nn.Module:
        torch.manual_seed(0)
        with torch.device(device):
            return Recurrent()

    plain, model = made("cpu"), made("meta")
    for layer in (*model.layers, model):
        fully_shard(layer)
    torch.manual_seed(0)
    materialize(model)
    torch.testing.assert_close(model(torch.ones(5, 2, 3)), plain(torch.ones(5, 2, 3)), rtol=0, atol=0)


def test_a_model_that_is_not_sharded_is_initialised_in_one_process() -> None:
    for case in CASES:
        assert_bits([drawn(on_meta(case.make), case)], plain(case))


@on_ranks(2)
def test_what_is_not_sharded_is_initialised_along() -> None:
    """One block sharded, with an ignored parameter; the rest plain."""
    model = on_meta(LanguageModel)
    ignored = {model.blocks[1].norm_1.bias.requires_grad_(False)}
    fully_shard(model.blocks[1], ignored_params=ignored)
    assert_bits([drawn(model, TEXT)], plain(TEXT))
    assert {id(p) for p in ignored} < {id(p) for p in model.parameters()}


@on_ranks(2)
def test_values_that_are_there_already_are_left_alone() -> None:
    model = on_meta(LanguageModel)
    model.head = nn.Linear(12, 29, bias=False)
    nn.init.constant_(model.head.weight, 3.0)
    model.blocks[0].up.bias = nn.Parameter(torch.full((48,), 5.0))
    shard_tower(model)
    materialize(model)
    assert not any(p.is_meta for p in model.parameters())
    found = tensors_of(model)
    assert found["head.weight"].eq(3).all()
    assert found["blocks.0.up.bias"].eq(5).all()


@on_ranks(2)
def test_a_part_of_a_model_can_be_initialised_alone() -> None:
    want = plain(Case(OneBlock))
    del want["next"]
    model = shard_tower(on_meta(LanguageModel))
    torch.manual_seed(7)
    materialize(model.blocks[1])
    materialize(model.norm)
    names = [name for name, param in model.named_parameters() if not param.is_meta]
    assert {name.rsplit(".", 2)[0] for name in names} == {"blocks.1", "norm"}
    assert_bits([tensors_of(model.blocks[1])], want)


def OneBlock() -> nn.Module:
    return CausalBlock(12, 2)


# --- what stays as it is --------------------------------------------------------------------------


@on_ranks(2)
def test_parameters_stay_the_same_objects_with_what_hangs_on_them() -> None:
    """An optimizer that was built before trains the model."""
    model = shard_tower(on_meta(LanguageModel))
    before = list(model.parameters())
    for param in before:
        param.is_marked = True
    seen: list[Tensor] = []
    model.head.weight.register_post_accumulate_grad_hook(seen.append)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    materialize(model)
    assert all(a is b for a, b in zip(before, model.parameters(), strict=True))
    assert all(param.is_marked for param in model.parameters())
    values = tensors_of(model)
    model(torch.arange(6).view(1, 6)).square().mean().backward()
    optimizer.step()
    assert len(seen) == 1
    for name, param in model.named_parameters():
        assert_equal(full(param), values[name] - 0.5 * full(param.grad), atol=1e-6)


@on_ranks(4)
def test_all_ranks_draw_as_the_first_and_then_as_they_would_have() -> None:
    want, rank = plain(TEXT), dist.get_rank()
    model = shard_tower(on_meta(LanguageModel))
    seed = 7 if rank < 2 else 100 + rank
    torch.manual_seed(seed)
    materialize(model)
    after = torch.rand(3)
    if rank >= 2:
        torch.manual_seed(seed)
        want["next"] = torch.rand(3)
    assert_bits([{**tensors_of(model), "next": after}], want)


@on_ranks(2)
def test_init_is_called_once_for_each_module_with_tensors_children_first() -> None:
    model = shard_tower(on_meta(MIXED.make))
    names = {module: name for name, module in model.named_modules()}
    calls: list[str] = []

    def init(module: nn.Module) -> None:
        calls.append(names[module])
        for tensor in own_tensors(module):
            tensor.data.zero_()

    materialize(model, init)
    materialize(model, init)  # nothing is left to do
    assert_expected_inline(
        "\n".join(calls),
        """\
embed
blocks.0.attention.out_proj
blocks.0.attention
blocks.0.recurrent
blocks.0.norm
blocks.0.rotary
blocks.1.attention.out_proj
blocks.1.attention
blocks.1.recurrent
blocks.1.norm
blocks.1.rotary
head""",
    )


# --- memory ---------------------------------------------------------------------------------------


class Square(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(256, 256, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


class Squares(Model):
    def __init__(self) -> None:
        super().__init__()
        self.inlet, self.outlet = nn.Linear(256, 256, bias=False), nn.Linear(256, 256, bias=False)
        self.blocks = nn.ModuleList(Square() for _ in range(6))


UNIT = 256 * 256 * 4


@on_ranks(4)
def test_beside_the_shards_one_group_is_in_memory() -> None:
    """In layers."""
    before = live_bytes()
    model = shard_tower(on_meta(Squares))
    most: list[int] = []

    def init(module: nn.Module) -> None:
        nn.init.normal_(module.weight)
        most.append(live_bytes() - before)

    materialize(model, init)
    after = (live_bytes() - before) / UNIT
    assert after < 8 / 4 + 0.5
    assert max(most) / UNIT < after + 2 + 0.05  # the root has two layers


# --- refusals -------------------------------------------------------------------------------------


class Bare(nn.Module):
    """Nobody says how to initialise it."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.zeros(3))
        self.register_buffer("steps", torch.zeros(2, dtype=torch.int64))


class WithBare(Model):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(3, 3), Bare())])
        self.head = nn.Linear(3, 3)


def refused(make: Callable[[], nn.Module], init: Callable[[nn.Module], None] | None = None) -> Any:
    """How it is refused, what is on the meta device afterwards, and how many shards are not in place."""
    model = shard_tower(on_meta(make))
    params = list(model.parameters())
    torch.manual_seed(7)
    try:
        materialize(model, init)
        text = "not refused"
    except Exception as error:
        text = "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])])
    displaced = sum(a is not b for a, b in zip(params, model.parameters(), strict=True))
    left = [name for name, t in [*model.named_parameters(), *model.named_buffers()] if t.is_meta]
    return text, left, displaced


def half(module: nn.Module) -> None:
    for tensor in own_tensors(module):
        tensor.data[:1].fill_(1)


def test_what_got_no_values_or_only_in_part_is_named(world2: World) -> None:
    text, left, displaced = alike(world2.run(refused, WithBare))
    assert (left, displaced) == (["blocks.0.1.gain", "blocks.0.1.steps"], 0)
    assert_expected_inline(
        wrapped(text),
        """\
RuntimeError: materialize: 2 tensors got no values, or not everywhere:
blocks.0.1.gain (parameter of Bare), blocks.0.1.steps (buffer of
Bare). Nothing initialises them: the class has no reset_parameters(),
or that, or init_fn, leaves them out. Give the class a
reset_parameters() that writes to all of its tensors, or pass an
init_fn that does. They are still on the meta device; the others have
values.""",
    )
    text, left, _ = alike(world2.run(refused, WithBare, half))
    assert "blocks.0.0.weight" in text
    assert left == [
        *("blocks.0.0.weight", "blocks.0.0.bias", "blocks.0.1.gain", "head.weight", "head.bias"),
        "blocks.0.1.steps",
    ]


WRITES: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    "a function of torch.nn.init": lambda model, other: nn.init.trunc_normal_(other),
    "data": lambda model, other: other.data.normal_(),
    "an index": lambda model, other: other.__setitem__(0, 1.0),
    "an operator": lambda model, other: other.__iadd__(1),
    "an output": lambda model, other: torch.add(other, 1, out=other),
    "several": lambda model, other: torch._foreach_zero_([other]),
    "assignment": lambda model, other: setattr(model.outlet, "weight", nn.Parameter(torch.zeros(3, 6))),
}


@pytest.mark.parametrize("how", WRITES)
@on_ranks(2)
def test_an_init_of_everything_at_once_is_refused_by_name_however_it_writes(how: str) -> None:
    model = shard_tower(on_meta(PairTower))

    def init(module: nn.Module) -> None:
        with torch.no_grad():
            WRITES[how](model, model.outlet.weight)
            module.reset_parameters()

    before = model.outlet.weight
    text = refusal(materialize, model, init)
    assert model.outlet.weight is before
    assert text.startswith("RuntimeError: materialize: ")
    assert "outlet.weight" in text
    if how == "a function of torch.nn.init":
        assert_expected_inline(
            wrapped(text),
            """\
RuntimeError: materialize: the init of blocks.0.up (Linear) writes to
outlet.weight, which belongs to another group, or to no module inside
this one, and is not full now: only one group at a time has full
parameters, and only those inside the module. Initialise each
parameter in the module that owns it: give its class
reset_parameters(), or pass an init_fn that changes only the module it
is called with. A function that initialises the whole model from its
root does not work.""",
        )


class WithGain(PairTower):
    """The root has a parameter of its own, beside blocks that are sharded."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.zeros(3))


def everything_inside(module: nn.Module) -> None:
    for param in module.parameters():
        nn.init.ones_(param)


def own_group(module: nn.Module) -> None:
    for name, param in module.named_parameters():
        if not name.startswith("blocks"):
            nn.init.ones_(param)


def test_the_root_may_write_to_its_own_group_and_not_to_its_blocks(world2: World) -> None:
    assert alike(world2.run(refused, WithGain, own_group)) == ("not refused", [], 0)
    text, left, displaced = alike(world2.run(refused, WithGain, everything_inside))
    assert (left, displaced) == (["gain"], 0)
    assert "the init of the model (WithGain) writes to blocks.0.up.weight" in text


def wrong_shape(module: nn.Module) -> None:
    module.weight = nn.Parameter(torch.zeros(2, 2))
    nn.init.zeros_(module.bias)


def wrong_dtype(module: nn.Module) -> None:
    module.reset_parameters()
    module.bias.data = torch.zeros(module.bias.shape, dtype=torch.float64)


def removed(module: nn.Module) -> None:
    module.reset_parameters()
    module.bias = None


def left_on_meta(module: nn.Module) -> None:
    module.reset_parameters()
    module.weight = nn.Parameter(torch.zeros(module.weight.shape, device="meta"))


@pytest.mark.parametrize("init", [wrong_shape, wrong_dtype, removed, left_on_meta])
def test_tensors_that_do_not_fit_are_refused_by_name_and_with_both_shapes(
    world2: World, init: Callable[[nn.Module], None]
) -> None:
    text, left, displaced = alike(world2.run(refused, PairTower, init))
    assert displaced == 0
    assert "blocks.0.up.bias" not in left or "blocks.0.up.weight" not in left
    assert f"blocks.0.up.{'weight' if init in (wrong_shape, left_on_meta) else 'bias'}: it was re" in text
    if init is wrong_shape:
        assert_expected_inline(
            wrapped(text),
            """\
RuntimeError: materialize: blocks.0.up.weight: it was replaced by a
Parameter of torch.float32 and shape (2, 2), where a plain tensor of
torch.float32 and shape (7, 6) with values is expected. Copy values
into the tensor that is there, or assign one like it.
blocks.0.down.weight: it was replaced by a Parameter of torch.float32
and shape (2, 2), where a plain tensor of torch.float32 and shape (6,
7) with values is expected. Copy values into the tensor that is there,
or assign one like it.""",
        )


class Breaks(nn.Linear):
    def reset_parameters(self) -> None:
        super().reset_parameters()
        if not self.weight.is_meta and torch.rand(()) >= 0:
            raise ValueError("no more random numbers")


class BreaksLate(Model):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Pair(7), nn.Sequential(nn.Linear(6, 6), Breaks(6, 6))])


def test_an_error_in_an_init_names_the_module_and_leaves_shards_in_place(world2: World) -> None:
    text, left, displaced = alike(world2.run(refused, BreaksLate))
    assert (left, displaced) == (["blocks.1.1.weight", "blocks.1.1.bias"], 0)
    assert_expected_inline(
        wrapped(text),
        """\
ValueError: no more random numbers materialize: raised while
initialising blocks.1.1 (Breaks).""",
    )


@on_ranks(2)
def test_it_can_be_called_again_after_an_error() -> None:
    model = shard_tower(on_meta(BreaksLate))
    with suppress(ValueError):
        materialize(model)
    materialize(model, lambda module: [nn.init.ones_(p) for p in module.parameters()])
    check_replicas(model)
    model.blocks[1](random_batch(0, 2, 6, torch.float32)).sum().backward()
    assert tensors_of(model)["blocks.1.1.weight"].eq(1).all()


@on_ranks(2)
def test_ranks_that_disagree_about_what_has_values_are_told() -> None:
    text = refusal(materialize, fully_shard(Wide() if dist.get_rank() == 1 else on_meta(Wide)))
    assert "ranks disagree" in text
    if dist.get_rank() == 1:
        assert_expected_inline(
            wrapped(text),
            """\
RuntimeError: materialize: ranks disagree about which tensors have no
values: here none, on the first rank weight, bias. Build the model on
the meta device on all ranks. If one rank has loaded values, send them
to the others with load_full_state_dict.""",
        )


@on_ranks(1)
def test_wrong_arguments_and_moments_are_refused() -> None:
    model = fully_shard(nn.Sequential(on_meta(Wide)))
    found = [
        refusal(materialize, model, 3),
        refusal(materialize, [model]),
        refusal(materialize, model, device="meta"),
        refusal(model, torch.zeros(1, 8)),
    ]
    materialize(model)

    def inside(*_: Any) -> None:
        found.append(refusal(materialize, model))

    model[0].register_forward_hook(inside)
    model(torch.zeros(1, 8))
    assert_expected_inline(
        "\n".join(map(wrapped, found)),
        """\
TypeError: materialize: init_fn is 3, an int; pass a function of a
module.
TypeError: materialize: model is a list; pass an nn.Module.
ValueError: materialize: device is 'meta', where nothing has values.
Pass 'cpu', or None.
RuntimeError: Cannot run forward: 2 parameters are still on the meta
device: 0.weight, 0.bias. Nothing has given them values. Call
shardwise.materialize(model), or load a checkpoint, first.
RuntimeError: materialize: Sequential is part of a model whose forward
is running, and that needs its parameters and gradients as they are.
Call it before.""",
    )


# --- under which modes an init runs ---------------------------------------------------------------


@on_ranks(2)
def test_an_init_may_write_in_place_without_a_word_about_gradients() -> None:
    model = fully_shard(on_meta(Wide))
    seen: list[bool] = []

    def fill(module: nn.Module) -> None:
        seen.append(torch.is_grad_enabled())
        module.weight.fill_(1)
        module.bias.fill_(2)

    with torch.inference_mode():
        materialize(model, fill)
    assert seen == [False]
    assert model.weight.full_tensor().eq(1).all()
    assert not model.weight.is_inference()
