"""shard_model: a strategy by name. All of them train alike; they differ in what travels and what is held.

Bytes on the wire and in memory are weighed by means that ask nothing of the library (strategies.py) and compared with
the formulas of the ZeRO paper (Rajbhandari et al. 2020, sections 5 and 7): for psi parameters on N ranks

strategy   parameters   gradients   Adam   travels a step and rank
    ddp            4            4         8    2 psi (N - 1) / N
    zero1          4            4        8/N   2
    zero2          4           4/N       8/N   2
    zero3         4/N          4/N       8/N   3

Here the shard lies beside the full parameters that zero1 and zero2 keep: 4/N more.
"""

import os
import warnings
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from comparing import assert_all_same
from harness import World
from meshed import device_mesh, gradients_of, refusal
from models import Block, SquareTower, built, even_tower, uneven_batch, uneven_tower
from on_ranks import on_ranks
from reference import adamw, mean_of_squares
from refusals import assert_says, differences, portrait
from strategies import BY_HOSTS, FLAT, HYBRID, STRATEGIES, Plan, Wire, groups_of, live_bytes, rows
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.tensor import DTensor, Replicate, Shard

import shardwise
from shardwise import (
    CommPolicy,
    CPUOffloadPolicy,
    DataParallelMeshDims,
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    shard_model,
)


def on(*plans: Plan, slowly: tuple[Plan, ...] = ()) -> pytest.MarkDecorator:
    cases = [pytest.param(plan, plan.ranks) for plan in plans]
    cases += [pytest.param(plan, plan.ranks, marks=pytest.mark.slow) for plan in slowly]
    return pytest.mark.parametrize(("plan", "world"), cases, indirect=["world"], ids=str)


# Every strategy, on as few ranks as tell it from others.
EACH = [Plan("ddp", 2), Plan("zero1", 2), Plan("zero2", 2), Plan("zero3", 2), Plan("hybrid", 4, 2)]
MORE = (Plan("hybrid_zero2", 4, 2), Plan("zero3", 4))
WITHIN_TWO = Plan("zero3_hpz", 4, 2)
TWO_RANKS = Plan("zero3", 2)


# --- the same training ----------------------------------------------------------------------------


def gradients(plan: Plan | None, model: nn.Module, microbatches: int = 1) -> dict[str, Any]:
    """Of the uneven tower's first batches, added up."""
    for microbatch in range(microbatches):
        mean_of_squares(model, rows(plan, uneven_batch(microbatch, 12))).backward()
    return gradients_of(model)


# --- what travels ---------------------------------------------------------------------------------

WIDTH = 64


IN_BLOCK, IN_ROOT = 2 * WIDTH * WIDTH * 4, WIDTH * WIDTH * 4  # bytes


def sent_in_a_step(plan: Plan, microbatches: int, is_quiet: bool) -> tuple[float, float]:
    """After a step to warm up: bytes that travel point to point, and in sums."""
    torch.manual_seed(0)
    model = plan.shard(SquareTower(WIDTH, 3))
    optimizer = adamw(model)
    for _ in range(2):
        with Wire() as wire:
            for microbatch in range(microbatches):
                waits = is_quiet and microbatch < microbatches - 1
                with shardwise.no_sync(model) if waits else nullcontext():
                    model(torch.ones(2, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return wire.messages, wire.sums


# By strategy and (microbatches, quiet): how many times blocks' bytes travel over the shards, and those of the
# root and the last block, which are kept after forward; and how many sums over replicas there are.
ONE, FOUR_TIMES, QUIETLY = (1, False), (4, False), (4, True)
TRAVELS: dict[str, dict[tuple[int, bool], tuple[int, int, int]]] = {
    "ddp": {ONE: (0, 0, 1), FOUR_TIMES: (0, 0, 4), QUIETLY: (0, 0, 1)},
    "zero1": {ONE: (2, 2, 0), FOUR_TIMES: (1 + 4, 1 + 4, 0), QUIETLY: (2, 2, 0)},
    "zero2": {ONE: (2, 2, 0), FOUR_TIMES: (8, 8, 0), QUIETLY: (2, 2, 0)},
    "zero3": {ONE: (3, 2, 0), FOUR_TIMES: (12, 8, 0), QUIETLY: (8 + 1, 4 + 1, 0)},
    "hybrid": {ONE: (3, 2, 1), FOUR_TIMES: (12, 8, 4), QUIETLY: (8 + 1, 4 + 1, 1)},
    "hybrid_zero2": {ONE: (2, 2, 1), FOUR_TIMES: (8, 8, 4), QUIETLY: (2, 2, 1)},
}


@on(*EACH, slowly=MORE)
def test_as_many_bytes_travel_as_the_formulas_say(world: World, plan: Plan) -> None:
    """Exactly. zero3's root counts twice where its blocks count three times: it is kept after forward, since
    backward begins with it, and so is the last block."""
    shards, replicas = plan.shards, plan.ranks // plan.shards
    for (microbatches, is_quiet), (freed, kept, sums) in TRAVELS[plan.strategy].items():
        messages = (freed * 2 * IN_BLOCK + kept * (IN_ROOT + IN_BLOCK)) * (shards - 1) / shards
        # Each replica of a shard of 1 / shards of the gradients.
        in_sums = sums * 2 * (replicas - 1) / replicas * (3 * IN_BLOCK + IN_ROOT) / shards
        for sent in world.run(sent_in_a_step, plan, microbatches, is_quiet):
            assert sent == (messages, in_sums), (microbatches, is_quiet)


# By (microbatches, quiet): how many times the model's bytes travel over all ranks, and within hosts. All groups
# are freed, the root's as well. Quiet microbatches share what their first forward has gathered.
WITHIN_HOSTS = {ONE: (2, 1), FOUR_TIMES: (8, 4), QUIETLY: (1 + 1, 4 + 3)}


@on_ranks(4)
def test_zero3_hpz_gathers_over_all_ranks_once_and_within_hosts_afterwards() -> None:
    whole = 3 * IN_BLOCK + IN_ROOT
    for (microbatches, is_quiet), (over_all, within) in WITHIN_HOSTS.items():
        sent = sent_in_a_step(WITHIN_TWO, microbatches, is_quiet)
        assert sent == (whole * (over_all * 3 / 4 + within / 2), 0), (microbatches, is_quiet)


# --- what is held ---------------------------------------------------------------------------------


class Wide(nn.Module):
    """2 MiB, above the 1 MiB up to which unsharded buffers in host memory are not given back."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(1024, 512) / 32)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.weight.t()) @ self.weight


def held(plan: Plan) -> dict[str, float]:
    """Bytes a parameter at the end of forward, after microbatches, and after a step with Adam."""
    before = live_bytes()
    torch.manual_seed(0)
    model = nn.Sequential(*(Wide() for _ in range(4)))
    count = sum(param.numel() for param in model.parameters())
    plan.shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    inputs = torch.ones(1, 512)
    found: dict[str, float] = {}

    def weigh(when: str) -> None:
        most = limits(plan)[when][1]
        for _ in range(500):  # a thread of gloo's may hold on to what it has summed until it runs again
            found[when] = (live_bytes() - before) / count
            if found[when] <= most:
                break
            os.sched_yield()

    with shardwise.no_sync(model):
        loss = model(inputs).sum()
        weigh("forward")
        loss.backward()
        del loss
        weigh("quiet microbatch")
        model(inputs).sum().backward()
        weigh("two quiet microbatches")
    model(inputs).sum().backward()
    weigh("backward")
    optimizer.step()
    weigh("step")
    optimizer.zero_grad()
    weigh("zero_grad")
    return found


def limits(plan: Plan) -> dict[str, tuple[float, float]]:
    """Bytes a parameter, at least and at most: to 0.05, for inputs, outputs and Adam's counters of steps.

    While gradients wait, whole, the shards have a `.grad` of zeros that notices when it is cleared: at most
    another 4 / N.
    """
    placeholder = {when: 4 / plan.shards if "quiet" in when else 0 for when in formulas(plan)}
    return {w: (want - 0.05, want + placeholder[w] + 0.05) for w, want in formulas(plan).items()}


def formulas(plan: Plan) -> dict[str, float]:
    """Bytes a parameter in float32 with Adam. `keeps`: full parameters beside the shard.

    From forward to backward that is the last of the four blocks where the others are freed.
    """
    n = plan.shards
    shard, gradient, state = 4 / n, 4 / n, 8 / n
    of_host = 4 / (plan.ranks // plan.hosts)
    keeps = {"zero1": 4, "zero2": 4, "hybrid_zero2": 4, "zero3_hpz": of_host}.get(plan.strategy, 0)
    # A full copy beside a shard that is everything is none.
    kept_between = 4 if plan.strategy == "zero1" else 0
    kept_between, keeps = (0, 0) if n == 1 else (kept_between, keeps)
    frees = plan.strategy in ("zero3", "hybrid")
    return {
        "forward": shard + (4 / 4 if frees else keeps),
        "quiet microbatch": shard + keeps + 4,
        "two quiet microbatches": shard + keeps + 4,
        "backward": shard + kept_between + gradient,
        "step": shard + kept_between + gradient + state,
        "zero_grad": shard + kept_between + state,
    }


@on(*EACH, WITHIN_TWO, slowly=MORE)
def test_as_much_is_held_as_the_formulas_say(world: World, plan: Plan) -> None:
    for found in world.run(held, plan):
        for when, (least, most) in limits(plan).items():
            assert least <= found[when] <= most, (when, least, most, found)


# --- meshes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("local", [None, "2", "4", pytest.param("1", marks=pytest.mark.slow)])
@on_ranks(4)
def test_each_strategy_has_its_own_placements_and_hybrids_shard_over_the_ranks_of_a_host(
    local: str | None,
) -> None:
    hosts = {"1": [[0], [1], [2], [3]], "2": [[0, 1], [2, 3]], "4": [[0, 1, 2, 3]]}
    found: dict[str, Any] = {}
    with mock.patch.dict(os.environ):
        os.environ.pop("LOCAL_WORLD_SIZE", None)
        if local is not None:
            os.environ["LOCAL_WORLD_SIZE"] = local
        for strategy in FLAT if local is None else BY_HOSTS:
            model = shard_model(built(even_tower), strategy=strategy)
            weight = model.blocks[0].up.weight
            where = (weight.device_mesh.mesh.tolist(), len(weight.to_local()))
            found[strategy] = (weight.placements, *where)
            if strategy == "zero3_hpz":
                kept = model._shardwise_state.group.settings.reshard_after_forward
    if local is None:
        assert found["ddp"] == ((Replicate(),), [0, 1, 2, 3], 16)
        assert all(found[strategy] == ((Shard(0),), [0, 1, 2, 3], 4) for strategy in FLAT[1:])
    else:
        want = ((Replicate(), Shard(0)), hosts[local], 16 // int(local))
        assert all(found[strategy] == want for strategy in HYBRID)
        assert found["zero3_hpz"] == ((Shard(0),), [0, 1, 2, 3], 4)
        assert kept == {"1": False, "2": 2, "4": True}[local]


@on_ranks(2)
def test_policies_by_name() -> None:
    bf16, fp16 = (
        MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        for dtype in (torch.bfloat16, torch.float16)
    )
    offloaded = CPUOffloadPolicy()
    with mock.patch("shardwise.strategies.shard_model.fully_shard", wraps=fully_shard) as call:
        shard_model(
            built(even_tower),
            mp_policy="bf16",
            offload_policy="cpu",
            overrides={
                "blocks.0": {"mp_policy": "fp16", "offload_policy": None},
                "blocks.1": {"mp_policy": "fp32"},
            },
        )
    found = [(each.kwargs["mp_policy"], each.kwargs["offload_policy"]) for each in call.call_args_list]
    assert found == [(fp16, None), (None, offloaded), (bf16, offloaded), (bf16, offloaded)]


ROLES: list[tuple[str, dict[str, Any], tuple[str, ...] | None, int]] = [
    ("ddp", {}, None, 7),
    ("zero3", {}, None, 2),
    ("hybrid", {}, None, 4),
    ("ddp", {"replicate": ("a", "b")}, ("a", "b"), 7),
    ("zero2", {"shard": ("a", "b")}, ("a", "b"), 2),
    ("hybrid", {"replicate": "a", "shard": "b"}, ("a", "b"), 4),
    ("hybrid_zero2", {"replicate": "b", "shard": "a"}, ("a", "b"), 4),
    ("zero3_hpz", {}, None, 2),
    ("zero3_hpz", {}, ("a", "b"), 2),
    ("zero3_hpz", {"replicate": "a", "shard": "b"}, ("a", "b"), 2),
]


@pytest.mark.sample(3)
@pytest.mark.parametrize(("strategy", "dims", "names", "rows"), ROLES, ids=str)
@on_ranks(4)
def test_meshes_may_have_no_names_or_roles_by_name(
    strategy: str, dims: dict[str, Any], names: tuple[str, ...] | None, rows: int
) -> None:
    want = gradients(None, built(uneven_tower))
    shape = (2, 2) if dims or strategy in BY_HOSTS else (4,)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    options = {"dp_mesh_dims": DataParallelMeshDims(**dims)} if dims else {}
    model = shard_model(built(uneven_tower), strategy=strategy, mesh=mesh, **options)
    assert len(model.inlet.weight.to_local()) in (rows, 7 % rows or rows)  # the last ranks have what is left
    assert_all_same([gradients(Plan("zero3", 4), model)], want)


# --- overrides ------------------------------------------------------------------------------------


def described(model: nn.Module) -> dict[str, str]:
    """Of each group: placements, what is kept after forward and after backward, dtype of computation."""
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            group = module._shardwise_state.group
            param = group.shards.params[0]
            frees = group.settings.reshard_after_forward
            after = ("freed" if name else "as root") if frees is None else ("freed" if frees else "kept")
            between = "" if group.settings.reshard_after_backward else ", kept on"
            dtype = str(param.precision.computed).removeprefix("torch.")
            found[name] = f"{param.sharded.placements}: {after}{between}, {dtype}"
    return found


BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
FREED, AS_ROOT = "(Shard(dim=0),): freed, float64", "(Shard(dim=0),): as root, float64"
KEPT, KEPT_ON = "(Shard(dim=0),): kept, float64", "(Shard(dim=0),): kept, kept on, float64"
ZERO3 = {"": AS_ROOT, "blocks.0": FREED, "blocks.1": FREED, "blocks.2": FREED}


def half(dtype: str) -> str:
    return dtype.replace("float64", "bfloat16")


OVERRIDES: dict[str, tuple[dict[Any, Any], dict[str, str]]] = {
    "a name": ({"blocks.1": "zero2"}, ZERO3 | {"blocks.1": KEPT}),
    "the root": ({"": "zero1"}, ZERO3 | {"": KEPT_ON}),
    "a pattern": ({"blocks.[01]": "zero1"}, ZERO3 | {"blocks.0": KEPT_ON, "blocks.1": KEPT_ON}),
    "everything": ({"*": "zero2"}, dict.fromkeys(ZERO3, KEPT)),
    "a class": ({Block: "zero2"}, {**dict.fromkeys(ZERO3, KEPT), "": AS_ROOT}),
    "a dictionary": ({"blocks.2": {"mp_policy": BF16}}, ZERO3 | {"blocks.2": half(FREED)}),
    "freed or not": (
        {"": {"reshard_after_forward": True}, "blocks.0": {"reshard_after_forward": False}},
        ZERO3 | {"": FREED, "blocks.0": KEPT},
    ),
    "later wins": (
        {"blocks.*": "zero2", "blocks.1": "zero1"},
        ZERO3 | {"blocks.0": KEPT, "blocks.1": KEPT_ON, "blocks.2": KEPT},
    ),
    "later wins key by key": (
        {
            Block: {"strategy": "zero2", "mp_policy": BF16},
            "blocks.1": {"mp_policy": MixedPrecisionPolicy()},
            "blocks.2": "zero1",
        },
        {"": AS_ROOT, "blocks.0": half(KEPT), "blocks.1": KEPT, "blocks.2": half(KEPT_ON)},
    ),
    "another dim": (
        {"blocks.1": {"shard_placement_fn": lambda param: Shard(param.dim() - 1)}},
        ZERO3,  # its first parameter has one dim: see below
    ),
    "replicated": ({"blocks.1": "ddp"}, ZERO3 | {"blocks.1": "(Replicate(),): freed, float64"}),
}


@on_ranks(2)
def test_overrides_apply_to_what_they_name() -> None:
    """That they train as plainly is shown by tests/campaign."""
    for name, (overrides, want) in OVERRIDES.items():
        model = shard_model(built(uneven_tower), overrides=overrides)
        assert described(model) == want, name
        if name == "another dim":
            assert model.blocks[1].up.weight.placements == (Shard(1),)
            assert model.blocks[0].up.weight.placements == (Shard(0),)


@on_ranks(4)
def test_overrides_may_change_mesh_policies_and_storage() -> None:
    mesh = device_mesh((2, 2), ("replicate", "shard"))
    policy = CommPolicy(packing_limit_bytes=7)
    overrides = {
        "blocks.0": {"comm_policy": policy},
        "blocks.1": {"strategy": "hybrid", "mesh": mesh},
        "blocks.2": {"offload_policy": CPUOffloadPolicy()},
    }
    model = shard_model(built(uneven_tower), overrides=overrides)
    groups = [block._shardwise_state.group for block in model.blocks]
    assert [group.policy is policy for group in groups] == [True, False, False]
    assert [block.up.weight.device_mesh.ndim for block in model.blocks] == [1, 2, 1]
    assert_all_same([gradients(Plan("zero3", 4), model)], gradients(None, built(uneven_tower)))


# --- which modules --------------------------------------------------------------------------------


BLOCK_MB = 8e-6 * (7 + 7 + 7 * 13 + 13 + 13 * 7 + 7)  # of a block of the uneven tower, in float64
EACH_ALONE = [[""], ["blocks.0"], ["blocks.1"], ["blocks.2"]]


@pytest.mark.parametrize(
    ("cap", "overrides", "want"),
    [
        (None, None, EACH_ALONE),
        (2 * BLOCK_MB, None, [[""], ["blocks.0", "blocks.1"], ["blocks.2"]]),
        (2 * BLOCK_MB - 1e-6, None, EACH_ALONE),
        (25, {"blocks.[12]": "zero2"}, [[""], ["blocks.0"], ["blocks.1", "blocks.2"]]),
    ],
    ids=["no cap", "room for two", "a byte less", "two are different"],
)
@on_ranks(2)
def test_neighbours_share_a_group_up_to_the_cap(cap: Any, overrides: Any, want: Any) -> None:
    """Which ones is tested in test_wrap.py."""
    plain = gradients(None, built(uneven_tower))
    model = shard_model(built(uneven_tower), bucket_cap_mb=cap, overrides=overrides)
    assert groups_of(model) == want
    assert_all_same([gradients(TWO_RANKS, model)], plain)


@pytest.mark.parametrize("trains", [True, False])
@on_ranks(2)
def test_ignored_modules_are_left_alone(trains: bool) -> None:
    """The second block is left alone: plain parameters, this rank's own gradients."""
    plain_model = built(uneven_tower)
    plain_model.blocks[1].requires_grad_(trains)
    want = gradients(None, plain_model, microbatches=2)
    model = built(uneven_tower)
    model.blocks[1].requires_grad_(trains)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        shard_model(model, ignored_modules=[model.blocks[1]])
    plain = [name for name, param in model.named_parameters() if not isinstance(param, DTensor)]
    assert all(name.startswith("blocks.1.") for name in plain)
    assert len(plain) == 6
    gradients(TWO_RANKS, model, microbatches=2)
    for param in model.blocks[1].parameters():
        if param.grad is not None:
            dist.all_reduce(param.grad)
            param.grad /= 2
    assert groups_of(model) == [[""], ["blocks.0"], ["blocks.2"]]
    assert bool(caught) is trains
    for each in caught:
        assert_says(str(each.message), "blocks.1.norm.weight", "ignored")
    assert_all_same([gradients_of(model)], want)


@on_ranks(2)
def test_a_part_of_a_block_may_be_ignored() -> None:
    model = built(uneven_tower)
    for block in model.blocks:
        block.up.requires_grad_(False)
    shard_model(model, ignored_modules=(block.up for block in model.blocks))
    assert not any(isinstance(block.up.weight, DTensor) for block in model.blocks)
    assert all(isinstance(block.down.weight, DTensor) for block in model.blocks)
    assert groups_of(model) == [[""], ["blocks.0"], ["blocks.1"], ["blocks.2"]]


@pytest.mark.parametrize(("strategy", "cap"), [("zero3", None), ("zero1", 25), ("ddp", 25)])
@on_ranks(2)
def test_a_module_sharded_before_stays_as_it_is(strategy: str, cap: float | None) -> None:
    model = built(uneven_tower)
    fully_shard(model.blocks[1], reshard_after_forward=False)
    module_state = model.blocks[1]._shardwise_state
    kept = list(model.blocks[1].parameters())
    shard_model(model, strategy=strategy, bucket_cap_mb=cap)
    assert model.blocks[1]._shardwise_state is module_state
    assert module_state.group.settings.reshard_after_forward is False
    assert all(now is then for now, then in zip(model.blocks[1].parameters(), kept, strict=True))
    assert_all_same([gradients(TWO_RANKS, model)], gradients(None, built(uneven_tower)))


# --- the root -------------------------------------------------------------------------------------


class TopHeavy(nn.Module):
    """Most of it is an embedding, which no block contains."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(1000, 8)
        self.blocks = nn.ModuleList(Block(8, 16) for _ in range(2))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return x


@on_ranks(2)
def test_a_root_that_keeps_most_parameters_is_told_of() -> None:
    ignoring = TopHeavy()
    ignoring.embed.requires_grad_(False)
    cases: list[tuple[nn.Module, dict[str, Any], list[str]]] = [
        (TopHeavy(), {}, ["embed.weight"]),
        (TopHeavy(), {"wrap": (nn.Embedding, Block)}, []),
        (ignoring, {"ignored_modules": [ignoring.embed]}, []),
        (nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Conv1d(8, 8, 1)), {}, ["0.weight"]),
        (even_tower(), {}, []),
    ]
    for model, options, named in cases:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            shard_model(model, **options)
        assert all(each.category is UserWarning for each in caught)
        for each, name in zip(caught, named, strict=True):
            assert_says(str(each.message), "shard_model", name, "wrap=")


# --- refusals -------------------------------------------------------------------------------------


class TiedEnds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.middle = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.middle(self.embed(tokens)))


def sharded_before() -> Any:
    return shard_model(built(uneven_tower))


def line() -> Any:
    return device_mesh((4,), ("data",))


def square() -> Any:
    return device_mesh((2, 2), ("replicate", "shard"))


def case(*words: str, **options: Any) -> tuple[dict[str, Any], tuple[str, ...]]:
    return options, words


SHARDS = {"mesh": square, "dp_mesh_dims": DataParallelMeshDims(shard="shard")}
BOTH = {"mesh": square, "dp_mesh_dims": DataParallelMeshDims(shard="shard", replicate="replicate")}
SWAPPED = {"mesh": square, "dp_mesh_dims": DataParallelMeshDims(shard="replicate", replicate="shard")}
FSDP1S = {
    "FULL_SHARD": "zero3", "SHARD_GRAD_OP": "zero2", "HYBRID_SHARD": "hybrid", "NO_SHARD": "ddp",
}  # fmt: skip
HOW = "init_device_mesh"
REFUSALS = {
    "unknown": case("ValueError", "'zero4'", *STRATEGIES, strategy="zero4"),
    "no string": case("TypeError", "strategy", "3", "int", strategy=3),
    **{
        f"FSDP1's {theirs}": case(
            "ValueError", f"'{theirs}'. FSDP1's {theirs} is called '{ours}'", strategy=theirs
        )
        for theirs, ours in FSDP1S.items()
    },
    "FSDP1's enum": case(
        "ValueError", "called 'hybrid_zero2'", strategy=ShardingStrategy._HYBRID_SHARD_ZERO2
    ),
    "an override by FSDP1's": case(
        "ValueError", "in the override for 'blocks.1'", "called 'ddp'", overrides={"blocks.1": "NO_SHARD"}
    ),
    "hosts behind their ranks": case(
        "ValueError: shard_model: strategy 'zero3_hpz' needs the dimension of hosts, shard, before that",
        "(replicate=2, shard=2)",
        strategy="zero3_hpz",
        **SWAPPED,
    ),
    "zero3 on two dimensions": case("ValueError", "zero3", "hybrid", "2", mesh=square),
    "hybrid on one dimension": case(
        "ValueError", "hybrid", "replicate", "shard", mesh=line, strategy="hybrid"
    ),
    "hosts unknown": case("LOCAL_WORLD_SIZE", HOW, "replicate", strategy="hybrid", local=None),
    "hosts uneven": case("LOCAL_WORLD_SIZE", "3", "4", HOW, strategy="hybrid", local="3"),
    "hosts zero": case("LOCAL_WORLD_SIZE", "0", HOW, strategy="hybrid", local="0"),
    "hosts unlike": case("LOCAL_WORLD_SIZE", HOW, strategy="hybrid", local=["2", "2", "2", "4"]),
    "ddp cannot shard": case(
        "'ddp' needs dp_mesh_dims to name dimensions to replicate over", strategy="ddp", **SHARDS
    ),
    "zero2 cannot do both": case(
        "'zero2' needs dp_mesh_dims to name dimensions to shard over", strategy="zero2", **BOTH
    ),
    "hybrid needs both": case(
        "'hybrid' needs dp_mesh_dims to name dimensions to replicate and to shard over",
        strategy="hybrid",
        **SHARDS,
    ),
    "override of nothing": case(
        "ValueError", "override", "layers.*", "blocks.0", overrides={"layers.*": "zero2"}
    ),
    "override of what is not chosen": case("ValueError", "inlet", "wrap", overrides={"inlet": "zero2"}),
    "override of an absent class": case("ValueError", "LSTM", "blocks.0", overrides={nn.LSTM: "zero2"}),
    "override by an unknown strategy": case(
        "ValueError", "zero5", "blocks.1", *STRATEGIES, overrides={"blocks.1": "zero5"}
    ),
    "override with an unknown key": case(
        "ValueError", "precision", "blocks.1", "mp_policy", overrides={"blocks.1": {"precision": "bf16"}}
    ),
    "override by a number": case("TypeError", "blocks.1", "int", overrides={"blocks.1": 2}),
    "override of a number": case("TypeError", "overrides", "int", overrides={1: "zero2"}),
    "overrides no mapping": case("TypeError", "overrides", "list", overrides=["blocks.1"]),
    "override that does not fit its mesh": case(
        "ValueError", "zero3", overrides=lambda: {"blocks.1": {"mesh": square()}}
    ),
    "cap of nothing": case("ValueError", "bucket_cap_mb", "0", bucket_cap_mb=0),
    "cap of text": case("TypeError", "bucket_cap_mb", "str", bucket_cap_mb="25"),
    "ignored no modules": case("TypeError", "ignored_modules", "str", ignored_modules=["blocks.1"]),
    "ignored no list": case("TypeError", "ignored_modules", "int", ignored_modules=3),
    "unknown precision": case(
        "ValueError: shard_model: there is no mp_policy 'bf61'",
        "'bf16'",
        "'fp16'",
        "MixedPrecisionPolicy",
        mp_policy="bf61",
    ),
    "unknown storage": case(
        "ValueError: shard_model: there is no offload_policy 'disk'",
        "'cpu'",
        "CPUOffloadPolicy",
        offload_policy="disk",
    ),
}


LATE = {  # some groups could be sharded before
    "placement in the last block": case(
        "ValueError", "blocks.2", "5", overrides={"blocks.2": {"shard_placement_fn": lambda param: Shard(5)}}
    ),
    "precision of the root": case("TypeError", "mp_policy", overrides={"": {"mp_policy": 16}}),
    "storage of the last block": case(
        "ValueError",
        "the override for 'blocks.2': there is no offload_policy 'host'",
        overrides={"blocks.2": {"offload_policy": "host"}},
    ),
    "part of the last block": case(
        "ValueError", "reshard_after_forward", "3", overrides={"blocks.2": {"reshard_after_forward": 3}}
    ),
}


TIED = "ValueError: shard_model: embed.weight and head.weight are tied"
OTHER_MODELS = {
    "sharded before": case("ValueError: ", "Tower", "already", model=sharded_before),
    "sharded by hand": case(
        "ValueError: ", "Tower", "already", model=lambda: fully_shard(built(uneven_tower))
    ),
    "a block of what is sharded": case("ValueError: ", model=lambda: sharded_before().blocks[1]),
    "a list": case("TypeError: ", "list", model=lambda: [even_tower()]),
    "a container": case("ValueError: ", "ModuleList", "forward", model=lambda: nn.ModuleList([even_tower()])),
    "what is warned of, where that is an error": case("UserWarning: ", model=TopHeavy),
    "tied to another strategy": case(
        TIED, model=TiedEnds, wrap={nn.Linear, nn.Embedding}, overrides={"embed": "ddp"}
    ),
    "tied in a block and the root": case(
        TIED,
        model=TiedEnds,
        wrap={nn.Linear, nn.Embedding},
        overrides=dict.fromkeys(("embed", "head"), "ddp"),
    ),
}
CASES = REFUSALS | LATE | OTHER_MODELS


@on_ranks(4)
def test_what_does_not_fit_is_refused_and_nothing_changes() -> None:
    messages = {}
    for name, (options, _) in CASES.items():
        made = {key: value() if callable(value) else value for key, value in options.items()}
        model = made.pop("model", None) or built(uneven_tower)
        watched = nn.ModuleList(model) if isinstance(model, list) else model
        local = made.pop("local", "2")
        before = portrait(watched)
        with mock.patch.dict(os.environ):
            os.environ.pop("LOCAL_WORLD_SIZE", None)
            if local is not None:
                os.environ["LOCAL_WORLD_SIZE"] = local[dist.get_rank()] if isinstance(local, list) else local
            messages[name] = refusal(shard_model, model, **made)
        assert not differences(before, portrait(watched)), name
        if name in LATE:
            mean_of_squares(shard_model(model), uneven_batch(0, 3)).backward()
    for name, (_, words) in CASES.items():
        assert_says(messages[name], *words)


def test_without_a_process_group_it_is_refused() -> None:
    assert not dist.is_initialized()
    model = even_tower()
    with pytest.raises(RuntimeError, match="init_process_group"):
        shard_model(model)
    assert all(type(param) is nn.Parameter for param in model.parameters())
    assert not isinstance(model, FSDPModule)
