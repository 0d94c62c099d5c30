"""Every argument, method, class and warning of FSDP1, FairScale, Lightning and DDP has a row in the documentation.

The tables of its pages about migration say where each is found here, or why it is not needed. Each row names what it is about;
`SHOWN_BY` names a test for each of these names, here or in another file, and what torch really has is asked
of the installed torch. Training is compared with plain PyTorch in float64 to 1e-10, as everywhere.
"""

import importlib
import inspect
import re
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as fsdp
from events import events_of
from failure_models import Branching, PartlyUsed, Tied
from harness import World
from models import Block, Tower, built, even_tower, random_batch, uneven_tower
from reference import adamw, full, mean_of_squares
from refusals import assert_says
from scenario import Side, assert_same, same_as_plain
from strategies import shard_as
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import wrap as peers_wrap
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.parallel import DistributedDataParallel

import shardwise
from shardwise import (
    CommPolicy,
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    clip_grad_norm_,
    explain,
    fully_shard,
    inference,
    no_sync,
    register_fsdp_forward_method,
    shard_model,
    unsharded,
)
from shardwise.observe import memory_snapshot
from shardwise.strategies import WrapBySize

TESTS = Path(__file__).parents[1]
PAGES = [TESTS.parent / "docs" / "migrate" / f"{name}.md" for name in ("fsdp1", "fairscale", "ddp")]
HEADING = "## Every name"


def shard_here(side: Side, model: nn.Module, **options: Any) -> nn.Module:
    """Shard, on the side that is sharded, without a word about what is ignored."""
    if side.is_sharded:
        with warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", message=".*ignored_params contains trainable", category=UserWarning
            )
            shard_model(model, **options)
    return model


def groups_of(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, FSDPModule)]


# --- the arguments of FSDP1 -----------------------------------------------------------------------


def what_becomes_of_the_model() -> tuple[bool, list[str], list[str], bool, bool]:
    model, plain = built(even_tower), built(even_tower)
    returned = shard_model(model)
    return (
        returned is model,
        list(model.state_dict()),
        list(plain.state_dict()),
        isinstance(model, Tower),
        hasattr(model, "module"),
    )


def test_the_model_is_sharded_in_place_and_not_wrapped(world2: World) -> None:
    for is_itself, names, plain, is_tower, has_module in world2.run(what_becomes_of_the_model):
        assert is_itself
        assert names == plain
        assert is_tower
        assert not has_module


def mesh_of_a_process_group() -> DeviceMesh:
    return DeviceMesh.from_group(dist.new_group([0, 1]), "cpu")


def mesh_of_two_process_groups() -> DeviceMesh:
    shard, _ = dist.new_subgroups_by_enumeration([[0, 1], [2, 3]])
    replicate, _ = dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])
    ranks = torch.arange(4).view(2, 2)
    return DeviceMesh.from_group([replicate, shard], "cpu", mesh=ranks, mesh_dim_names=("replicate", "shard"))


def mesh_of_all_ranks() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def train_on_a_mesh(side: Side, make_mesh: Callable[[], DeviceMesh], strategy: str, numel: int) -> None:
    model = built(even_tower)
    if side.is_sharded:
        shard_model(model, mesh=make_mesh(), strategy=strategy)
        assert model.blocks[0].up.weight.to_local().numel() == numel
    side.steps(model, adamw(model), range(3))


def test_a_process_group_makes_a_mesh(world2: World) -> None:
    assert_same(world2, train_on_a_mesh, mesh_of_a_process_group, "zero3", 64)


def test_two_process_groups_make_a_hybrid_mesh(world4: World) -> None:
    assert_same(world4, train_on_a_mesh, mesh_of_two_process_groups, "hybrid", 64)


def test_a_device_mesh_is_passed_on(world2: World) -> None:
    assert_same(world2, train_on_a_mesh, mesh_of_all_ranks, "zero3", 64)


def train_by_strategy(side: Side, strategy: str) -> None:
    model = built(even_tower)
    if side.is_sharded:
        shard_as(model, strategy)
    step_by_step(side, model)


def step_by_step(side: Side, model: nn.Module) -> None:
    """Ordinary steps, without a look at what they leave behind: some strategies keep full parameters."""
    optimizer = adamw(model)
    for step in range(3):
        optimizer.zero_grad()
        mean_of_squares(model, side.inputs(step)).backward()
        side.note_gradients(model)
        optimizer.step()
    side.note_parameters(model)


def kept(strategy: str) -> tuple[list[Any], list[bool]]:
    """Placements of a weight; whether a block is unsharded after forward, after backward, after no_sync."""
    model = built(even_tower)
    shard_as(model, strategy)
    found = []
    for context in (None, no_sync(model)):
        loss = model(random_batch(0, 4)).sum()
        found.append(memory_snapshot(model.blocks[0]).groups[0].state == "unsharded")
        if context is None:
            loss.backward()
        else:
            with context:
                loss.backward()
        found.append(memory_snapshot(model.blocks[0]).groups[0].state == "unsharded")
    return list(model.blocks[0].up.weight.placements), found


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("strategy", "placements", "is_kept"),
    [
        ("zero3", [Shard(0)], [False, False, False, False]),
        ("zero2", [Shard(0)], [True, False, True, True]),
        ("zero1", [Shard(0)], [True, True, True, True]),
        ("ddp", [Replicate()], None),
        ("hybrid", [Replicate(), Shard(0)], [False, False, False, False]),
        ("hybrid_zero2", [Replicate(), Shard(0)], [True, False, True, True]),
    ],
)
def test_a_strategy_keeps_what_the_peers_keeps(
    world4: World, strategy: str, placements: Any, is_kept: Any
) -> None:
    assert_same(world4, train_by_strategy, strategy)
    for placed, found in world4.run(kept, strategy):
        assert placed == placements
        assert is_kept is None or found == is_kept


@same_as_plain(2)
def test_single_modules_may_have_another_strategy(side: Side) -> None:
    model = built(even_tower)
    shard_here(side, model, strategy="zero3", overrides={"blocks.0": "zero2", "blocks.2": "ddp"})
    if side.is_sharded:
        assert model.blocks[0].up.weight.placements == (Shard(0),)
        assert model.blocks[2].up.weight.placements == (Replicate(),)
    side.steps(model, adamw(model), range(3))


@same_as_plain(2)
def test_offloaded_gradients_add_up_without_no_sync(side: Side) -> None:
    """Microbatches outside no_sync, of which FSDP1 would keep the last."""
    model = built(uneven_tower)
    shard_here(side, model, offload_policy=CPUOffloadPolicy())
    optimizer = adamw(model)
    for step in range(2):
        optimizer.zero_grad()
        for microbatch in range(3):
            mean_of_squares(model, side.inputs(3 * step + microbatch, 7)).backward()
        side.note_gradients(model)
        if side.is_sharded:
            for param in model.parameters():
                assert {param.to_local().device.type, param.grad.to_local().device.type} == {"cpu"}
        optimizer.step()
    side.note_parameters(model)


def of_the_documents(
    module: nn.Module, recurse: bool, unwrapped_params: int, min_num_params: int = 200
) -> bool:
    """As the documents of 1.11 have it."""
    return unwrapped_params >= min_num_params


def of_later_documents(
    module: nn.Module, recurse: bool, nonwrapped_numel: int, min_num_params: int = 200
) -> bool:
    """As those of 2.1 have it."""
    return nonwrapped_numel >= min_num_params


def always(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
    """As `always_wrap_policy`, with names for what it is asked."""
    return True


def is_a_block(module: nn.Module) -> bool:
    return isinstance(module, Block)


BLOCKS = ["", "blocks.0", "blocks.1", "blocks.2"]
UPS_AND_DOWNS = [f"blocks.{i}.{name}" for i in range(3) for name in ("up", "down")]
LEAVES = ["inlet", "outlet", *UPS_AND_DOWNS, *[f"blocks.{i}.norm" for i in range(3)]]
WRAPS: list[tuple[Any, list[str]]] = [
    (None, BLOCKS),
    ({Block}, BLOCKS),
    (peers_wrap.ModuleWrapPolicy({Block}), BLOCKS),
    (partial(peers_wrap.transformer_auto_wrap_policy, transformer_layer_cls={Block}), BLOCKS),
    (partial(peers_wrap.lambda_auto_wrap_policy, lambda_fn=is_a_block), BLOCKS),
    (is_a_block, BLOCKS),
    (partial(peers_wrap.size_based_auto_wrap_policy, min_num_params=200), BLOCKS),
    (WrapBySize(200), BLOCKS),
    (of_the_documents, BLOCKS),
    (of_later_documents, BLOCKS),
    (partial(of_later_documents, min_num_params=100), ["", *UPS_AND_DOWNS]),
    (always, ["", *BLOCKS[1:], *LEAVES]),
    (peers_wrap.always_wrap_policy, ["", *BLOCKS[1:], *LEAVES]),
]


def groups_chosen(wrap: Any) -> list[str]:
    return groups_of(shard_model(built(even_tower), wrap=wrap))


@pytest.mark.parametrize(
    ("wrap", "expected"), WRAPS, ids=lambda value: re.sub(" at 0x.*", "", str(value))[:40]
)
def test_policies_of_fsdp1_choose_what_they_chose_there(world1: World, wrap: Any, expected: Any) -> None:
    """Beside a running FSDP1: test_wrap.py."""
    assert [sorted(found) for found in world1.run(groups_chosen, wrap)] == [sorted(expected)]


def refusal_of_a_custom_policy() -> str:
    with pytest.raises((TypeError, ValueError)) as caught:
        shard_model(built(even_tower), wrap=peers_wrap.CustomPolicy(is_a_block))
    return str(caught.value)


def groups_with_settings() -> list[bool]:
    """What a CustomPolicy returns as a dict for some modules. (The last is kept for backward.)"""
    model = shard_model(
        built(even_tower), wrap=is_a_block, overrides={"blocks.0": {"reshard_after_forward": False}}
    )
    model(random_batch(0, 4)).sum()
    return [group.state == "unsharded" for group in memory_snapshot(model.blocks).groups]


def test_settings_of_single_modules_are_overrides(world1: World) -> None:
    (text,) = world1.run(refusal_of_a_custom_policy)
    assert_says(text, "CustomPolicy", "overrides")
    assert world1.run(groups_with_settings) == [[True, False, True]]


class Manual(nn.Module):
    """The announcement's model; `wrap` is what stood in place of FSDP1's."""

    def __init__(self, wrap: Callable[[nn.Module], nn.Module]) -> None:
        super().__init__()
        self.layer1 = wrap(nn.Linear(8, 4))
        self.layer2 = nn.Linear(4, 16)
        self.layer3 = wrap(nn.Linear(16, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer3(torch.tanh(self.layer2(self.layer1(x))))


@same_as_plain(2)
def test_layers_wrapped_by_hand_stay_as_they_are(side: Side) -> None:
    model = built(Manual, fully_shard if side.is_sharded else lambda module: module, seed=3)
    shard_here(side, model, strategy="zero2")
    if side.is_sharded:
        assert groups_of(model) == ["", "layer1", "layer3"]
    side.steps(model, adamw(model), range(3))


# --- mixed precision ------------------------------------------------------------------------------


class Normalised(nn.Module):
    def __init__(self, norm: type[nn.Module]) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.norm = norm(8)
        self.register_buffer("scale", torch.ones(8))
        self.seen: dict[str, torch.dtype] = {}

    def forward(self, x: Tensor) -> Tensor:
        self.seen = {"input": x.dtype, "linear": self.linear.weight.dtype, "norm": self.norm.weight.dtype}
        return x + self.norm(self.linear(x)) * self.scale.to(x.dtype)


class NormalisedModel(nn.Module):
    """Has no parameters of its own, so that its input may be of any dtype."""

    def __init__(self, norm: type[nn.Module] = nn.LayerNorm) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Normalised(norm), Normalised(norm)])
        self.seen: dict[str, torch.dtype] = {}

    def forward(self, x: Tensor) -> Tensor:
        self.seen = {"input": x.dtype}
        for block in self.blocks:
            x = block(x)
        return x


LOW = torch.bfloat16


def dtypes_under(
    policy: MixedPrecisionPolicy, overrides: Any = None, norm: type[nn.Module] = nn.LayerNorm
) -> dict[str, Any]:
    torch.manual_seed(0)
    model = NormalisedModel(norm)
    shard_model(model, mp_policy=policy, overrides=overrides)
    model(torch.randn(4, 8)).float().sum().backward()
    block = model.blocks[1]
    return {
        "root": model.seen["input"],
        **block.seen,
        "buffer": block.scale.dtype,
        "gradient": block.linear.weight.grad.dtype,
        "shard": block.linear.weight.dtype,
        "groups": len(groups_of(model)),
    }


def test_fields_of_mixed_precision_keep_their_names(world2: World) -> None:
    low = {"root": LOW, "input": LOW, "linear": LOW, "norm": LOW, "groups": 3}
    high = {"buffer": torch.float32, "gradient": torch.float32, "shard": torch.float32}
    for found in world2.run(dtypes_under, MixedPrecisionPolicy(param_dtype=LOW)):
        assert found == low | high
    policy = MixedPrecisionPolicy(
        param_dtype=LOW, reduce_dtype=LOW, buffer_dtype=LOW, keep_low_precision_grads=True
    )
    for found in world2.run(dtypes_under, policy):
        assert found == low | {"buffer": LOW, "gradient": LOW, "shard": torch.float32}


def test_the_roots_inputs_are_cast_by_the_roots_own_policy(world2: World) -> None:
    policy = MixedPrecisionPolicy(param_dtype=LOW)
    of_the_root = MixedPrecisionPolicy(param_dtype=LOW, cast_forward_inputs=False)
    for found in world2.run(dtypes_under, policy, {"": {"mp_policy": of_the_root}}):
        assert (found["root"], found["input"]) == (torch.float32, LOW)


def test_classes_in_full_precision_share_their_modules_group(world2: World) -> None:
    policy = MixedPrecisionPolicy(param_dtype=LOW, full_precision=nn.BatchNorm1d)
    for found in world2.run(dtypes_under, policy, norm=nn.BatchNorm1d):
        assert (found["linear"], found["norm"], found["groups"]) == (LOW, torch.float32, 3)


# --- what is ignored, and where values come from --------------------------------------------------


def ignored_by(how: str) -> list[str]:
    """Names of what is left plain."""
    model = built(even_tower)
    model.outlet.requires_grad_(False)
    options = {
        "modules": {"ignored_modules": [model.outlet]},
        "params": {"ignored_params": set(model.outlet.parameters())},
    }
    shard_model(model, **options[how])
    model(random_batch(0, 4)).sum().backward()
    return [name for name, param in model.named_parameters() if not isinstance(param, DTensor)]


@pytest.mark.parametrize("how", ["modules", "params"])
def test_ignored_modules_and_parameters_are_left_as_they_are(world2: World, how: str) -> None:
    assert world2.run(ignored_by, how) == [["outlet.weight", "outlet.bias"]] * 2


@same_as_plain(3)
def test_parameters_keep_names_shapes_and_options_of_their_own(side: Side) -> None:
    model = shard_here(side, built(even_tower))
    decayed = [param for param in model.parameters() if param.dim() > 1]
    others = [param for param in model.parameters() if param.dim() < 2]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.5}, {"params": others, "weight_decay": 0.0, "lr": 1e-1}]
    )
    side.note("shapes", {name: list(param.shape) for name, param in model.named_parameters()})
    side.steps(model, optimizer, range(3))


# --- the methods of FSDP1 -------------------------------------------------------------------------


def halve_and_seed(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=0.3)
        module.bias.data.fill_(0.25)


@same_as_plain(2)
def test_apply_sees_full_parameters(side: Side) -> None:
    model = shard_here(side, built(even_tower))
    optimizer = adamw(model)  # before: the parameters stay the same objects
    torch.manual_seed(5)
    if side.is_sharded:
        with unsharded(model):
            model.apply(halve_and_seed)
    else:
        model.apply(halve_and_seed)
    side.note_parameters(model)
    side.steps(model, optimizer, range(2))


@same_as_plain(4)
@pytest.mark.sample(3)
@pytest.mark.parametrize(("strategy", "norm_type"), [("zero3", 2.0), ("ddp", 2.0), ("hybrid", float("inf"))])
def test_gradients_are_clipped_under_any_strategy(side: Side, strategy: str, norm_type: float) -> None:
    model = built(uneven_tower)
    if side.is_sharded:
        shard_as(model, strategy)
    optimizer = adamw(model)
    for step in range(2):
        optimizer.zero_grad()
        mean_of_squares(model, side.inputs(step, 7)).backward()
        clip: Any = clip_grad_norm_ if side.is_sharded else nn.utils.clip_grad_norm_
        norm = clip(model if side.is_sharded else model.parameters(), 0.1, norm_type)
        side.note("norm", norm)
        side.note_gradients(model)
        optimizer.step()
    side.note_parameters(model)


def modules_and_tree() -> tuple[list[str], str]:
    model = shard_model(built(even_tower))
    return groups_of(model), explain(model)


def test_sharded_modules_are_found_by_their_class(world2: World) -> None:
    for names, text in world2.run(modules_and_tree):
        assert names == BLOCKS
        assert all(name in text for name in names)


def names_seen() -> list[list[str]]:
    model = built(even_tower)
    model.register_buffer("scale", torch.ones(1))
    plain = [name for name, _ in (*model.named_parameters(), *model.named_buffers())]
    shard_model(model)
    seen = [plain]

    def look(*_: Any) -> None:
        seen.append([name for name, _ in (*model.named_parameters(), *model.named_buffers())])

    look()
    model.blocks[1].register_forward_hook(look)
    model(random_batch(0, 4)).sum().backward()
    with unsharded(model):
        look()
    return seen


def test_names_have_no_prefixes(world2: World) -> None:
    for seen in world2.run(names_seen):
        assert len(seen) == 4
        assert all(names == seen[0] for names in seen)


@same_as_plain(2)
def test_no_sync_leaves_gradients_unreduced(side: Side) -> None:
    model = shard_here(side, built(even_tower))
    optimizer = adamw(model)
    for step in range(2):
        optimizer.zero_grad()
        if side.is_sharded:
            events = events_of(model)
            with no_sync(model):
                mean_of_squares(model, side.inputs(2 * step)).backward()
            assert not [event for event in events if event.startswith("reduce")]
        else:
            mean_of_squares(model, side.inputs(2 * step)).backward()
        mean_of_squares(model, side.inputs(2 * step + 1)).backward()
        side.note_gradients(model)
        optimizer.step()
    side.note_parameters(model)


def summoned(**options: Any) -> dict[str, Any]:
    """What `unsharded` shows inside, and what is left after an edit."""
    model = built(even_tower)
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    shard_model(model)
    mean_of_squares(model, random_batch(0, 4)).backward()
    plain = built(even_tower)
    mean_of_squares(plain, random_batch(0, 4)).backward()
    is_first = dist.get_rank() == 0
    with unsharded(model, **options):
        inside = dict(model.named_parameters())
        block = model.blocks[0].up.weight
        found = {
            "root": not isinstance(model.inlet.weight, DTensor),
            "block": not isinstance(block, DTensor),
            "exact": all(torch.equal(full(p), before[n]) for n, p in inside.items())
            if not options.get("rank0_only")
            else all(torch.equal(p, before[n]) for n, p in inside.items() if is_first),
            "device": model.inlet.weight.device.type,
            "gradient": None
            if isinstance(block, DTensor) or block.grad is None
            else torch.allclose(block.grad, plain.blocks[0].up.weight.grad, rtol=0, atol=1e-12),
        }
        if not isinstance(model.inlet.weight, DTensor):
            model.inlet.weight.data.add_(1)
    found["written"] = torch.equal(full(model.inlet.weight), before["inlet.weight"] + 1)
    found["kept"] = torch.equal(full(model.inlet.weight), before["inlet.weight"])
    return found


FOUND = {"root": True, "block": True, "exact": True, "device": "cpu", "gradient": None}
WRITTEN, DROPPED = {"written": True, "kept": False}, {"written": False, "kept": True}


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, FOUND | WRITTEN),
        ({"recurse": False}, FOUND | {"block": False} | WRITTEN),
        ({"writeback": False}, FOUND | DROPPED),
        ({"offload_to_cpu": True}, FOUND | WRITTEN),
        ({"with_grads": True}, FOUND | {"gradient": True} | WRITTEN),
        (
            {"with_grads": True, "offload_to_cpu": True, "writeback": False},
            FOUND | {"gradient": True} | DROPPED,
        ),
    ],
    ids=str,
)
def test_unsharded_takes_the_arguments_of_summon_full_params(
    world2: World, options: Any, expected: Any
) -> None:
    assert world2.run(summoned, **options) == [expected] * 2


def test_full_parameters_may_be_on_one_rank_only(world2: World) -> None:
    options = {"rank0_only": True, "writeback": False, "offload_to_cpu": True, "with_grads": True}
    first, second = world2.run(summoned, **options)
    assert first == FOUND | {"gradient": True} | DROPPED
    assert second == FOUND | {"root": False, "block": False} | DROPPED


def refusal_of_writeback_on_one_rank() -> str:
    model = shard_model(built(even_tower))
    with pytest.raises(ValueError, match="rank0_only") as caught, unsharded(model, rank0_only=True):
        pass
    return str(caught.value)


def test_writing_back_from_one_rank_is_refused(world2: World) -> None:
    for text in world2.run(refusal_of_writeback_on_one_rank):
        assert_says(text, "rank0_only", "writeback")


# --- state dicts ----------------------------------------------------------------------------------


def state_of_the_model(options: dict[str, Any] | None) -> tuple[str, bool]:
    """The kind of values, and whether they are those of the model."""
    model = built(uneven_tower)
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    shard_model(model)
    if options is None:
        state = model.state_dict()
    else:
        state = get_model_state_dict(model, options=StateDictOptions(**options))
    kinds = {type(value).__name__ for value in state.values()} or {"nothing"}
    assert all(value.device.type == "cpu" for value in state.values())
    is_right = all(torch.equal(full(value), expected[name]) for name, value in state.items())
    return "".join(kinds), is_right and (not state or state.keys() == expected.keys())


def test_a_state_dict_is_sharded_and_dcp_makes_the_other_forms(world2: World) -> None:
    sharded, whole, nothing = ("DTensor", True), ("Tensor", True), ("nothing", True)
    assert world2.run(state_of_the_model, None) == [sharded, sharded]
    assert world2.run(state_of_the_model, {"cpu_offload": True}) == [sharded, sharded]
    assert world2.run(state_of_the_model, {"full_state_dict": True}) == [whole, whole]
    assert world2.run(state_of_the_model, {"full_state_dict": True, "cpu_offload": True}) == [whole, nothing]


@same_as_plain(3)
@pytest.mark.parametrize("how", ["everywhere", "from rank 0"])
def test_a_full_state_dict_loads(side: Side, how: str) -> None:
    """Rank 0 has a full checkpoint; `how` it gets into the others."""
    torch.manual_seed(50)
    state = uneven_tower().double().state_dict()
    model = shard_here(side, built(uneven_tower))
    if not side.is_sharded or how == "everywhere":
        model.load_state_dict(state)
    else:
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(model, state if side.rank == 0 else {}, options=options)
    side.note_parameters(model)
    side.steps(model, adamw(model), range(2), width=7)


def local_state_is_the_ranks_own() -> bool:
    model = shard_model(built(uneven_tower))
    state = {name: value.to_local() for name, value in model.state_dict().items()}
    return all(
        torch.equal(value, dict(model.named_parameters())[name].to_local()) for name, value in state.items()
    )


def test_a_local_state_dict_is_a_line(world3: World) -> None:
    assert world3.run(local_state_is_the_ranks_own) == [True] * 3


FULL = {"full_state_dict": True, "cpu_offload": True}


def states_of_an_optimizer(options: dict[str, Any]) -> tuple[list[str], set[str]]:
    """Keys, and the kinds of the tensors that have a shape."""
    model = shard_model(built(uneven_tower))
    optimizer = adamw(model)
    mean_of_squares(model, random_batch(0, 4, 7)).backward()
    optimizer.step()
    found = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(**options))
    values = [value for state in found.get("state", {}).values() for value in state.values()]
    return list(found.get("state", {})), {type(value).__name__ for value in values if value.dim()}


def test_the_state_of_an_optimizer_is_keyed_by_name(world2: World) -> None:
    names = [name for name, _ in uneven_tower().named_parameters()]
    for keys, kinds in world2.run(states_of_an_optimizer, {}):
        assert sorted(keys) == sorted(names)
        assert kinds == {"DTensor"}
    (keys, kinds), (other_keys, _) = world2.run(states_of_an_optimizer, FULL)
    assert sorted(keys) == sorted(names)
    assert kinds == {"Tensor"}
    assert other_keys == []


@same_as_plain(2, 3)
@pytest.mark.thin(27)
@pytest.mark.parametrize("how", ["sharded", "full", "scattered"])
def test_a_run_goes_on_from_its_states(side: Side, how: str) -> None:
    """Train two steps, carry model and optimizer over to new ones, train on."""
    model = shard_here(side, built(uneven_tower))
    optimizer = adamw(model)
    side.steps(model, optimizer, range(2), width=7)
    if not side.is_sharded:
        side.steps(model, optimizer, [2, 3], width=7)
        return
    read: dict[str, Any] = {} if how == "sharded" else {"full_state_dict": True}
    if how == "scattered":
        read["cpu_offload"] = True  # on rank 0 alone
    saved = get_model_state_dict(model, options=StateDictOptions(**read))
    saved_optimizer = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(**read))
    torch.manual_seed(77)
    fresh = shard_model(uneven_tower().double())
    fresh_optimizer = adamw(fresh)
    write = {"sharded": {}, "full": {"full_state_dict": True}}.get(
        how, {"full_state_dict": True, "broadcast_from_rank0": True}
    )
    set_model_state_dict(fresh, saved, options=StateDictOptions(**write))
    set_optimizer_state_dict(fresh, fresh_optimizer, saved_optimizer, options=StateDictOptions(**write))
    side.steps(fresh, fresh_optimizer, [2, 3], width=7)


@same_as_plain(2)
@pytest.mark.parametrize("direction", ["plain to sharded", "sharded to plain"])
def test_states_need_no_new_keys_to_change_sides(side: Side, direction: str) -> None:
    """The state of an optimizer goes from a plain model to a sharded one, or back, by its names."""
    is_first_plain = direction == "plain to sharded"
    first = built(uneven_tower)
    if side.is_sharded and not is_first_plain:
        shard_model(first)
    optimizer = adamw(first)
    for step in range(2):
        # The same on every rank: the plain model is one that every rank has by itself.
        optimizer.zero_grad()
        mean_of_squares(first, random_batch(step, 4, 7)).backward()
        optimizer.step()
    options = StateDictOptions(full_state_dict=True)
    state = get_model_state_dict(first, options=options)
    of_optimizer = get_optimizer_state_dict(first, optimizer, options=options)
    second = built(uneven_tower, seed=77)
    if side.is_sharded and is_first_plain:
        shard_model(second)
    optimizer = adamw(second)
    set_model_state_dict(second, state, options=options)
    set_optimizer_state_dict(second, optimizer, of_optimizer, options=options)
    for step in range(2, 4):
        optimizer.zero_grad()
        mean_of_squares(second, random_batch(step, 4, 7)).backward()
        optimizer.step()
    side.note_parameters(second)


# --- the warnings of FSDP1 ------------------------------------------------------------------------


class SavedReference(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.saved = [self.linear.weight]

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.saved[0].t()


def optimizer_before() -> None:
    model = built(even_tower)
    optimizer = adamw(model)
    shard_model(model)
    mean_of_squares(model, random_batch(0, 4)).backward()
    optimizer.step()


def submodule_alone() -> None:
    model = shard_model(built(even_tower))
    model.blocks[1].up(random_batch(0, 4))


def change_between() -> None:
    model = shard_model(built(even_tower))
    loss = mean_of_squares(model, random_batch(0, 4))
    with torch.no_grad():
        model.blocks[1].up.weight.mul_(2)
    loss.backward()


def saved_reference() -> None:
    model = SavedReference().double()
    fully_shard(model)
    model(random_batch(0, 4)).sum().backward()


def renamed() -> None:
    model = shard_model(built(even_tower))
    weight = model.outlet.weight
    del model.outlet.weight
    model.outlet.kernel = weight
    model(random_batch(0, 4))


def text_of(act: Callable[[], None]) -> str:
    try:
        act()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


@pytest.mark.parametrize(
    ("act", "words"),
    [
        (optimizer_before, ("inlet.weight", "optimizer built before")),
        (submodule_alone, ("blocks.1.up.weight", "'blocks.1'", "register_fsdp_forward_method")),
        (change_between, ("modified by an inplace operation",)),
        (saved_reference, ("linear.weight", "keep weights in a plain list")),
        (renamed, ("outlet.weight", "removed after fully_shard")),
    ],
)
def test_what_was_undefined_or_stale_is_an_error(
    world2: World, act: Callable[[], None], words: tuple[str, ...]
) -> None:
    for text in world2.run(text_of, act):
        assert_says(text, "RuntimeError", *words)


class WithEncoder(Tower):
    def encode(self, x: Tensor) -> Tensor:
        return self.blocks[0](self.inlet(x))


def encoded() -> bool:
    torch.manual_seed(0)
    model, plain = WithEncoder(), WithEncoder()
    plain.load_state_dict(model.state_dict())
    shard_model(model)
    register_fsdp_forward_method(model, "encode")
    x = torch.ones(2, 8)
    return torch.equal(model.encode(x), plain.encode(x)) and torch.equal(
        model.blocks[1](x), plain.blocks[1](x)
    )


def test_other_methods_are_registered_and_blocks_may_be_called_alone(world2: World) -> None:
    assert world2.run(encoded) == [True, True]


@same_as_plain(2)
def test_changes_between_passes_stay(side: Side) -> None:
    model = shard_here(side, built(even_tower))
    optimizer = adamw(model)
    side.step(model, optimizer, 0)
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(0.9)
    side.steps(model, optimizer, [1, 2])


@same_as_plain(2, 3)
def test_parameters_may_be_shared_across_groups(side: Side) -> None:
    model = shard_here(side, built(Tied), wrap={Block, nn.Linear}, mesh=None)
    side.steps(model, adamw(model), range(3))


@same_as_plain(2)
def test_frozen_parameters_share_groups_with_trainable_ones(side: Side) -> None:
    model = built(even_tower)
    for block in model.blocks:
        block.up.requires_grad_(False)
    shard_here(side, model)
    side.steps(model, adamw(model), range(3))
    assert all(param.grad is None for block in model.blocks for param in block.up.parameters())


def shown_between_passes(strategy: str) -> bool:
    model = shard_model(built(even_tower), strategy=strategy)
    loss = model(random_batch(0, 4)).sum()
    first = all(isinstance(param, DTensor) for param in (*model.parameters(), model.blocks[0].up.weight))
    loss.backward()
    return first and isinstance(model.blocks[0].up.weight, DTensor)


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3", "ddp"])
def test_modules_show_their_shards_between_passes(world2: World, strategy: str) -> None:
    assert world2.run(shown_between_passes, strategy) == [True, True]


# --- FairScale and Lightning ----------------------------------------------------------------------


def storages() -> tuple[bool, int, bool]:
    """Whether the shards of a block lie in one buffer, how many hold its gradients, and whether shapes stay."""
    model = built(even_tower)
    shapes = [param.shape for param in model.parameters()]
    shard_model(model)
    mean_of_squares(model, random_batch(0, 4)).backward()
    params = list(model.blocks[0].parameters())
    buffer = model.blocks[0]._shardwise_state.group.buckets[0].flat_shard.bytes
    inside = range(buffer.data_ptr(), buffer.data_ptr() + buffer.numel())
    return (
        all(param.to_local().data_ptr() in inside for param in params),
        len({param.grad.to_local().untyped_storage().data_ptr() for param in params}),
        shapes == [param.shape for param in model.parameters()],
    )


def test_a_groups_shards_and_gradients_are_views_of_one_buffer_each(world2: World) -> None:
    assert world2.run(storages) == [(True, 1, True)] * 2


def forwards_inside_inference() -> tuple[bool, list[str]]:
    model, plain = built(even_tower), built(even_tower)
    shard_model(model)
    with inference(model):
        events = events_of(model)
        outputs = [model(random_batch(index, 4)) for index in range(3)]
    with torch.no_grad():
        same = [torch.equal(out, plain(random_batch(index, 4))) for index, out in enumerate(outputs)]
    return all(same), [event for event in events if event.startswith("unshard")]


def test_for_prediction_weights_are_kept_unsharded(world2: World) -> None:
    for is_same, gathers in world2.run(forwards_inside_inference):
        assert is_same
        assert gathers == []


def different_numbers_of_forwards() -> bool:
    model, plain = built(even_tower), built(even_tower)
    shard_model(model)
    with inference(model, budget_bytes=0), torch.no_grad():
        same = [
            torch.equal(model(random_batch(index, 4)), plain(random_batch(index, 4)))
            for index in range(1 + 2 * dist.get_rank())
        ]
    return all(same)


@pytest.mark.parametrize("world", [2, 3], indirect=True)
def test_for_prediction_ranks_may_run_different_numbers_of_forwards(world: World) -> None:
    assert world.run(different_numbers_of_forwards) == [True] * world.size


# --- DDP ------------------------------------------------------------------------------------------


@same_as_plain(2)
@pytest.mark.parametrize(("megabytes", "count"), [(25, 2), (0.005, 3), (0.001, 4)])
def test_neighbours_share_a_bucket(side: Side, megabytes: float, count: int) -> None:
    """A block has 296 numbers of 8 bytes."""
    model = shard_here(side, built(even_tower), bucket_cap_mb=megabytes)
    if side.is_sharded:
        assert len(memory_snapshot(model).groups) == count
    side.steps(model, adamw(model), range(3))


@same_as_plain(2)
def test_chosen_modules_share_a_bucket(side: Side) -> None:
    model = built(even_tower)
    if side.is_sharded:
        first, second, third = model.blocks
        fully_shard([first, third])
        fully_shard([second, model.outlet])
        fully_shard(model)
    side.steps(model, adamw(model), range(3))


@same_as_plain(2)
def test_what_no_rank_uses_needs_no_word_and_is_not_reduced(side: Side) -> None:
    """One block and one parameter of the root are used by no rank."""
    model: Any = built(Branching)
    model.used = (0, 2)
    shard_here(side, model)
    optimizer = adamw(model)
    for step in range(3):
        if side.is_sharded:
            events = events_of(model)
        side.step(model, optimizer, step)
        if side.is_sharded:
            assert "reduce blocks.2" in events
            assert "reduce blocks.1" not in events
    side.note_parameters(model)
    assert model.blocks[1].up.weight.grad is None


class SometimesUsed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([PartlyUsed(), PartlyUsed()])
        self.optional = nn.Linear(8, 8)
        self.uses_optional = True

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.optional(x) if self.uses_optional else x


def gradients_where_ranks_differ(rank: int, world: int) -> dict[str, Tensor]:
    """Of a rank that uses the optional parts if its number is odd; plain if `world` is 1."""
    model: Any = built(SometimesUsed)
    model.uses_optional = model.blocks[0].uses_extra = rank % 2 == 1
    if world > 1:
        shard_model(model, wrap={PartlyUsed, nn.Linear}, mesh=None)
        model.set_reduce_scatter_unused_params(True)
        model.optional.set_may_be_unused()
    mean_of_squares(model, random_batch(rank, 4)).backward()
    return {
        name: torch.zeros(param.shape, dtype=param.dtype) if param.grad is None else full(param.grad)
        for name, param in model.named_parameters()
    }


def gradients_of_this_rank() -> dict[str, Tensor]:
    return gradients_where_ranks_differ(dist.get_rank(), dist.get_world_size())


def test_ranks_may_use_different_parameters_and_modules(world2: World) -> None:
    plain = [gradients_where_ranks_differ(rank, 1) for rank in range(2)]
    expected = {name: (plain[0][name] + plain[1][name]) / 2 for name in plain[0]}
    for got in world2.run(gradients_of_this_rank):
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-10)


@same_as_plain(2)
def test_ignored_gradients_may_be_averaged_at_the_end(side: Side) -> None:
    model = built(even_tower)
    shard_here(side, model, ignored_params=set(model.outlet.parameters()))
    if side.is_sharded:
        model.set_reduce_ignored_params(True)
        assert not isinstance(model.outlet.weight, DTensor)
    step_by_step(side, model)


# --- the table ------------------------------------------------------------------------------------

THIS = "test_coming_from"
# The name in the table -> where it is shown.
SHOWN_BY: dict[str, str] = {
    name: test
    for names, test in {
        "FullyShardedDataParallel DistributedDataParallel module forward": (
            "test_the_model_is_sharded_in_place_and_not_wrapped"
        ),
        "process_group": "test_two_process_groups_make_a_hybrid_mesh",
        "device_mesh": "test_a_device_mesh_is_passed_on",
        "sharding_strategy ShardingStrategy FULL_SHARD SHARD_GRAD_OP NO_SHARD HYBRID_SHARD "
        "_HYBRID_SHARD_ZERO2": "test_a_strategy_keeps_what_the_peers_keeps",
        "cpu_offload CPUOffload offload_params move_grads_to_cpu": (
            "test_offloaded_gradients_add_up_without_no_sync"
        ),
        "auto_wrap_policy fsdp_auto_wrap_policy ModuleWrapPolicy transformer_auto_wrap_policy "
        "size_based_auto_wrap_policy default_auto_wrap_policy lambda_auto_wrap_policy always_wrap_policy "
        "min_num_params": "test_policies_of_fsdp1_choose_what_they_chose_there",
        "CustomPolicy": "test_settings_of_single_modules_are_overrides",
        "enable_wrap wrap": "test_layers_wrapped_by_hand_stay_as_they_are",
        "backward_prefetch BackwardPrefetch BACKWARD_PRE": (
            "test_prefetch.test_before_the_next_group_is_unsharded_while_a_group_computes"
        ),
        "BACKWARD_POST": (
            "test_prefetch.test_after_the_next_group_is_unsharded_once_a_group_is_done_and_freed"
        ),
        "forward_prefetch": "test_prefetch.test_forward_prefetches_whatever_backward_does",
        "limit_all_gathers": "test_prefetch.test_a_list_is_unsharded_as_far_as_the_limit_goes",
        "mixed_precision MixedPrecision param_dtype reduce_dtype buffer_dtype keep_low_precision_grads "
        "cast_forward_inputs compute_dtype fp32_reduce_scatter": (
            "test_fields_of_mixed_precision_keep_their_names"
        ),
        "cast_root_forward_inputs": "test_the_roots_inputs_are_cast_by_the_roots_own_policy",
        "_module_classes_to_ignore": "test_classes_in_full_precision_share_their_modules_group",
        "ignored_modules ignored_states": "test_ignored_modules_and_parameters_are_left_as_they_are",
        "param_init_fn model_sharded_context": "test_materialize.test_values_are_those_of_one_process",
        "sync_module_states init_sync": (
            "test_sync_module_states.test_a_model_that_one_rank_has_loaded_is_sharded_everywhere"
        ),
        "broadcast_buffers forward_sync_buffers": (
            "test_sync_module_states.test_buffers_that_drifted_apart_are_made_equal"
        ),
        "use_orig_params": "test_parameters_keep_names_shapes_and_options_of_their_own",
        "apply": "test_apply_sees_full_parameters",
        "clip_grad_norm_": "test_gradients_are_clipped_under_any_strategy",
        "fsdp_modules check_is_root": "test_sharded_modules_are_found_by_their_class",
        "named_parameters named_buffers": "test_names_have_no_prefixes",
        "no_sync": "test_no_sync_leaves_gradients_unreduced",
        "register_comm_hook": "test_comm_hooks.test_a_hook_written_for_fsdp1_trains_as_the_plain_model",
        "summon_full_params recurse writeback offload_to_cpu with_grads": (
            "test_unsharded_takes_the_arguments_of_summon_full_params"
        ),
        "rank0_only": "test_full_parameters_may_be_on_one_rank_only",
        "state_dict_type set_state_dict_type get_state_dict_type StateDictType StateDictSettings "
        "StateDictConfig SHARDED_STATE_DICT ShardedStateDictConfig use_dtensor state_dict_to_cpu": (
            "test_a_state_dict_is_sharded_and_dcp_makes_the_other_forms"
        ),
        "FULL_STATE_DICT FullStateDictConfig": (
            "test_full_state.test_the_full_state_is_that_of_the_plain_model"
        ),
        "LOCAL_STATE_DICT LocalStateDictConfig": "test_a_local_state_dict_is_a_line",
        "optim_state_dict sharded_optim_state_dict OptimStateDictConfig ShardedOptimStateDictConfig "
        "LocalOptimStateDictConfig": "test_the_state_of_an_optimizer_is_keyed_by_name",
        "full_optim_state_dict FullOptimStateDictConfig rekey_optim_state_dict OptimStateKeyType": (
            "test_full_optimizer_state.test_the_state_by_id_is_that_of_the_plain_optimizer"
        ),
        "optim_state_dict_to_load shard_full_optim_state_dict scatter_full_optim_state_dict "
        "flatten_sharded_optim_state_dict": "test_full_optimizer_state.test_a_plain_run_goes_on_sharded",
        "lazy_bucket_allocation": (
            "test_memory.test_two_groups_of_parameters_are_the_most_and_as_many_of_gradients_or_one"
        ),
        "flatten_parameters gradient_as_bucket_view": (
            "test_a_groups_shards_and_gradients_are_views_of_one_buffer_each"
        ),
        "reshard_after_forward": "test_settings_of_single_modules_are_overrides",
        "training_step validation_step test_step predict_step setup": (
            "test_for_prediction_weights_are_kept_unsharded"
        ),
        "join join_hook join_device join_process_group": (
            "test_for_prediction_ranks_may_run_different_numbers_of_forwards"
        ),
        "bucket_cap_mb": "test_neighbours_share_a_bucket",
        "bucket_cap_mb_list": "test_chosen_modules_share_a_bucket",
        "find_unused_parameters": "test_ranks_may_use_different_parameters_and_modules",
        "skip_all_reduce_unused_params": "test_what_no_rank_uses_needs_no_word_and_is_not_reduced",
        "static_graph": ("test_events.test_a_new_order_stops_prefetch_and_is_what_the_next_forward_follows"),
        "delay_all_reduce_named_params param_to_hook_all_reduce": (
            "test_ignored_gradients_may_be_averaged_at_the_end"
        ),
    }.items()
    for name in names.split()
}
SHOWN_BY |= {
    "an optimizer built before wrapping": "test_what_was_undefined_or_stale_is_an_error",
    "parameters shared between units": "test_parameters_may_be_shared_across_groups",
    "frozen and trainable parameters in one unit": (
        "test_frozen_parameters_share_groups_with_trainable_ones"
    ),
    "forward of a submodule of a unit": ("test_other_methods_are_registered_and_blocks_may_be_called_alone"),
    "accumulation outside no_sync with CPU offload": "test_offloaded_gradients_add_up_without_no_sync",
    "parameters changed between forward and backward": "test_changes_between_passes_stay",
    "SHARD_GRAD_OP shows full parameters after forward": "test_modules_show_their_shards_between_passes",
    "references to parameters saved before": "test_what_was_undefined_or_stale_is_an_error",
    "parameters renamed after wrapping": "test_what_was_undefined_or_stale_is_an_error",
    "rank0_only with writeback": "test_writing_back_from_one_rank_is_refused",
    "sync_module_states needs a GPU": (
        "test_sync_module_states.test_a_model_that_one_rank_has_loaded_is_sharded_everywhere"
    ),
}


def table() -> dict[str, str]:
    """Every name of the tables, and what its row says."""
    texts = [page.read_text() for page in PAGES]
    assert all(text.count(HEADING) == 1 for text in texts), "a page has no such section"
    section = "\n".join(text[text.index(HEADING) + len(HEADING) :].split("\n## ")[0] for text in texts)
    rows = re.findall(r"^\| (.*?) \| (.*) \|$", section, flags=re.MULTILINE)
    named = [(name, here) for there, here in rows for name in re.findall(r"`([^`]+)`", there)]
    names = [name for name, _ in named]
    assert len(set(names)) == len(names), f"twice: {sorted({n for n in names if names.count(n) > 1})}"
    return dict(named)


def arguments_of(function: Any) -> set[str]:
    return set(inspect.signature(function).parameters) - {"self"}


def public_methods(cls: type) -> set[str]:
    return {name for name in vars(cls) if not name.startswith("_")}


def members_of(*enums: Any) -> set[str]:
    return {module_state.name for enum in enums for module_state in enum}


# Of documents whose code is not installed.
OF_1_11 = {"module", "process_group", "cpu_offload", "fsdp_auto_wrap_policy", "backward_prefetch"}
LIGHTNING = (
    "accelerator cpu_offload flatten_parameters reshard_after_forward move_grads_to_cpu fp32_reduce_scatter "
    "compute_dtype bucket_cap_mb min_num_params state_dict_to_cpu parallel_devices cluster_environment "
    "checkpoint_io precision_plugin process_group_backend model_sharded_context training_step "
    "validation_step test_step predict_step setup"
)
PEERS_OWN = (  # the names that torch's fully_shard shares with shardwise
    "CPUOffloadPolicy DataParallelMeshDims FSDPModule fully_shard GradientReductionHandle MixedPrecisionPolicy "
    "OffloadPolicy register_fsdp_forward_method UnshardHandle share_comm_ctx"
)


@pytest.mark.parametrize(
    "names",
    [
        arguments_of(fsdp.FullyShardedDataParallel),
        arguments_of(fsdp.MixedPrecision),
        arguments_of(fsdp.CPUOffload),
        arguments_of(fsdp.FullyShardedDataParallel.summon_full_params),
        arguments_of(fsdp.FullStateDictConfig),
        public_methods(fsdp.FullyShardedDataParallel),
        set(fsdp.__all__) - set(PEERS_OWN.split()),
        members_of(fsdp.ShardingStrategy, fsdp.BackwardPrefetch, fsdp.StateDictType),
        {name for name in vars(peers_wrap) if name.endswith(("wrap_policy", "Policy", "wrap"))}
        - {name for name in vars(peers_wrap) if name.startswith("_")},
        arguments_of(DistributedDataParallel),
        {"no_sync", "join", "register_comm_hook", "join_hook", "join_device", "join_process_group"},
        OF_1_11,
        set(LIGHTNING.split()),
    ],
    ids=lambda names: f"{len(names)} such as {min(names)}",
)
def test_every_name_has_a_row(names: set[str]) -> None:
    assert sorted(names - set(table())) == []


def test_every_row_that_claims_something_names_a_test_that_exists() -> None:
    for name, here in table().items():
        if name not in SHOWN_BY:
            assert here.startswith(("none: ", "not yet")), f"{name}: what is said is not shown"
            continue
        file, _, test = SHOWN_BY[name].rpartition(".")
        text = next(TESTS.rglob(f"{file or THIS}.py")).read_text()
        assert f"\ndef {test}(" in text, f"{name}: {SHOWN_BY[name]} does not exist"


def test_what_is_shown_is_in_the_table() -> None:
    assert sorted(set(SHOWN_BY) - set(table())) == []


HOMES: list[Any] = [
    shardwise,
    FSDPModule,
    nn,
    nn.Module,
    torch,
    dist,
    DeviceMesh,
    torch.distributed.checkpoint.state_dict,
    DTensor,
    Tensor,
    {}.__class__,
    __builtins__ if inspect.ismodule(__builtins__) else type("B", (), dict(__builtins__)),
]
OF_THE_READER = {"init_fn", "wrap", "isinstance"}
OF_POLICIES = {"LowPrecisionReduction", "QuantizedReduction"}  # as the row says


def has(home: Any, name: str) -> bool:
    """Whether ``name`` stands in ``home``; or, if it begins with its package, in that."""
    package, _, last = name.rpartition(".")
    return last in importlib.import_module(package).__all__ if package else hasattr(home, name)


def test_every_function_that_the_table_calls_exists() -> None:
    called = {
        name
        for here in table().values()
        for code in re.findall(r"`([^`]+)`", here)
        for name in re.findall(r"(shardwise\.\w+\.\w+|\w+)\(", code)
    }
    assert {"shard_model", "shardwise.strategies.register_comm_hook"} <= called
    missing = {name for name in called if not any(has(home, name) for home in HOMES)}
    assert sorted(missing - OF_THE_READER - OF_POLICIES - {"model", "buffer", "bucket"}) == []


def test_every_argument_that_the_table_names_exists() -> None:
    accepted = set().union(
        *(
            arguments_of(function)
            for function in (
                *(shard_model, MixedPrecisionPolicy, CommPolicy, StateDictOptions, unsharded),
                *(shardwise.init.sync_module_states, shardwise.full_state_dict),
                shardwise.state.load_full_optimizer_state_dict,
            )
        ),
        arguments_of(DeviceMesh.from_group),
        {"options", "device"},
    )
    named = {
        name
        for here in table().values()
        for code in re.findall(r"`([^`]+)`", here)
        for name in re.findall(r"(\w+)=", code)
    }
    assert sorted(named - accepted) == []
