"""What `explain` says of a model, the same on every rank, and that its numbers are those of the memory."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from expecttest import assert_expected_inline
from meshed import Layout
from models import LanguageModel, Tower, shard_tower, uneven_tower
from on_ranks import on_ranks
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from shardwise import DataParallelMeshDims, MixedPrecisionPolicy, explain, fully_shard
from shardwise.comm.buffers import ShardStorage
from shardwise.observe import memory_snapshot
from shardwise.policies import ShardPlacementResult

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)


def rows_of(model: nn.Module) -> str:
    """Without the header and the rules."""
    _, *found = explain(model).splitlines()
    return "\n".join(line for line in found if not line.startswith("---"))


def strategies(model: nn.Module) -> list[str]:
    """The column, without its header and the total."""
    lines = explain(model).splitlines()
    start, end = lines[0].index("strategy"), lines[0].index("mesh")
    rules = [index for index, line in enumerate(lines) if line.startswith("---")]
    return [line[start:end].strip() for line in lines[rules[0] + 1 : rules[1]]]


# --- the table ------------------------------------------------------------------------------------


def tower_of_everything() -> nn.Module:
    """Groups inside groups, lists, mixed precision, ignored and tied parameters, uneven shards."""
    model = uneven_tower()
    model.extra = nn.Linear(7, 7)
    model.outlet.weight.requires_grad_(False)
    model.extra.weight = model.inlet.weight
    fully_shard(model.blocks[0].up)
    fully_shard(model.blocks[1].up)
    fully_shard([model.blocks[0], model.blocks[1]], mp_policy=BF16)
    policy = MixedPrecisionPolicy(torch.bfloat16, full_precision=nn.LayerNorm)
    fully_shard([model.blocks[2].norm, model.blocks[2].up, model.blocks[2].down], mp_policy=policy)
    ignored = {model.outlet.weight, model.extra.bias.requires_grad_(False)}
    return fully_shard(model, ignored_params=ignored)


@on_ranks(3)
def test_nesting_lists_dtypes_and_what_is_not_managed() -> None:
    assert_expected_inline(
        explain(tower_of_everything()),
        """\
group                              class                  strategy  mesh     parameters  MB unsharded  MB per rank  dtype
------------------------------------------------------------------------------------------------------------------------------------------------
Tower                              Tower                  zero3     shard 3          57        0.0003       0.0001  float32
  blocks.0, blocks.1               Block x 2              zero3     shard 3         224        0.0007       0.0005  float32 -> bfloat16
    blocks.0.up                    Linear                 zero3     shard 3         104        0.0005       0.0002  float32
    blocks.1.up                    Linear                 zero3     shard 3         104        0.0005       0.0002  float32
  blocks.2.norm ... blocks.2.down  LayerNorm, Linear x 2  zero3     shard 3         216        0.0006       0.0004  float32; float32 -> bfloat16
------------------------------------------------------------------------------------------------------------------------------------------------
total                              5 groups                                         705        0.0026       0.0014
not managed: 14 parameters, 0.0001 MB (outlet.weight, extra.bias)""",
    )


@on_ranks(2)
def test_large_numbers_are_readable() -> None:
    with torch.device("meta"):
        model = LanguageModel(vocabulary=50_257, width=1024, heads=16)
    assert_expected_inline(
        rows_of(shard_tower(model, mp_policy=BF16)),
        """\
LanguageModel  LanguageModel  zero3     shard 2  102,928,384         205.9        205.9  float32 -> bfloat16
  blocks.0     CausalBlock    zero3     shard 2   12,596,224          25.2         25.2  float32 -> bfloat16
  blocks.1     CausalBlock    zero3     shard 2   12,596,224          25.2         25.2  float32 -> bfloat16
total          3 groups                          128,120,832         256.2        256.2""",
    )


@on_ranks(2)
def test_a_line_for_each_group_and_the_totals_also_around_sharded_modules() -> None:
    towers = {"left": shard_tower(Tower()), "right": fully_shard(Tower())}
    assert_expected_inline(
        explain(nn.ModuleDict({**towers, "rest": nn.Linear(3, 3)})),
        """\
group            class     strategy  mesh     parameters  MB unsharded  MB per rank  dtype
--------------------------------------------------------------------------------------------
left             Tower     zero3     shard 2          81        0.0004       0.0002  float32
  left.blocks.0  Block     zero3     shard 2         296        0.0012       0.0006  float32
  left.blocks.1  Block     zero3     shard 2         296        0.0012       0.0006  float32
  left.blocks.2  Block     zero3     shard 2         296        0.0012       0.0006  float32
right            Tower     zero3     shard 2         969        0.0039       0.0020  float32
--------------------------------------------------------------------------------------------
total            5 groups                          1,938        0.0078       0.0039
not managed: 12 parameters, 0.0000 MB (rest.weight, rest.bias)""",
    )


@on_ranks(2)
def test_a_part_of_a_model_keeps_the_names_that_messages_use() -> None:
    model = Tower()
    fully_shard(model.blocks[1].up)
    shard_tower(model)
    assert_expected_inline(
        rows_of(model.blocks[1]),
        """\
blocks.1       Block     zero3     shard 2         152        0.0006       0.0003  float32
  blocks.1.up  Linear    zero3     shard 2         144        0.0006       0.0003  float32
total          2 groups                            296        0.0012       0.0006""",
    )


# --- meshes ---------------------------------------------------------------------------------------

SQUARE = Layout((2, 2))


def on_mesh(roles: dict[str, str] | None) -> nn.Module:
    dims = None if roles is None else DataParallelMeshDims(**roles)
    mesh = SQUARE.mesh() if roles is None or len(roles) == 2 else SQUARE.mesh()[next(iter(roles.values()))]
    return fully_shard(Tower(), mesh=mesh, dp_mesh_dims=dims)


@on_ranks(4)
def test_meshes_are_shown_by_their_roles() -> None:
    hybrid = rows_of(on_mesh(None))
    assert rows_of(on_mesh({"shard": "shard", "replicate": "replicate"})) == hybrid
    assert_expected_inline(
        hybrid,
        """\
Tower  Tower    hybrid    replicate 2 x shard 2         969        0.0039       0.0020  float32
total  1 group                                          969        0.0039       0.0020""",
    )
    assert_expected_inline(
        rows_of(on_mesh({"replicate": "replicate"})),
        """\
Tower  Tower    ddp       replicate 2         969        0.0039       0.0039  float32
total  1 group                                969        0.0039       0.0039""",
    )


@on_ranks(4)
def test_tensor_parallelism_is_named_and_counted_on_all_ranks_once() -> None:
    mesh = Layout((2, 2), ("dp", "tp")).mesh()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8), nn.LayerNorm(8))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(model[0], mesh=mesh["dp"])
    fully_shard(model[2], mesh=mesh["dp"])
    assert_expected_inline(
        rows_of(fully_shard(model, mesh=mesh["dp"])),
        """\
Sequential  Sequential  zero3     shard 2 x tensor parallel         136        0.0003       0.0001  float32
  0         Linear      zero3     shard 2 x tensor parallel         144        0.0003       0.0001  float32
  2         LayerNorm   zero3     shard 2                            16        0.0001       0.0000  float32
total       3 groups                                                296        0.0006       0.0003""",
    )


@on_ranks(4)
def test_a_group_on_several_meshes_shows_them_all() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    expert = set(model[1].parameters())
    inner = SQUARE.mesh()["shard"]

    def place(param: nn.Parameter) -> Any:
        return ShardPlacementResult(Shard(0), inner) if param in expert else None

    assert "shard 4, shard 2 " in explain(fully_shard(model, shard_placement_fn=place))


# --- strategies -----------------------------------------------------------------------------------


def with_settings(after_forward: Any, after_backward: bool, is_hybrid: bool, changed: bool) -> nn.Module:
    mesh = Layout((2, dist.get_world_size() // 2)).mesh() if is_hybrid else None
    model = shard_tower(Tower(depth=1), reshard_after_forward=None if changed else after_forward, mesh=mesh)
    if changed:
        model.set_reshard_after_forward(after_forward)
    model.set_reshard_after_backward(after_backward)
    return model


@pytest.mark.parametrize(
    ("settings", "flat", "hybrid"),
    [
        ((True, True), "zero3", "hybrid"),
        ((None, True), "zero3", "hybrid"),
        ((False, True), "zero2", "hybrid_zero2"),
        ((False, False), "zero1", "hybrid_zero1"),
        ((True, False), "zero3 (kept after backward)", "hybrid (kept after backward)"),
    ],
)
@on_ranks(2)
def test_strategies_are_read_off_the_settings(settings: tuple[Any, bool], flat: str, hybrid: str) -> None:
    for changed in {False, settings[0] is not None}:  # None is a choice of fully_shard only
        assert strategies(with_settings(*settings, False, changed)) == [flat] * 2
        assert strategies(with_settings(*settings, True, changed)) == [hybrid] * 2


@on_ranks(4)
def test_parameters_kept_within_a_few_ranks() -> None:
    assert strategies(with_settings(2, True, False, False)) == ["zero3_hpz (within 2)"] * 2


# --- memory ---------------------------------------------------------------------------------------


def wide_tower() -> nn.Module:
    return shard_tower(Tower(width=701, hidden=1500), mp_policy=BF16)


@pytest.mark.parametrize(("world", "build"), [(2, wide_tower), (3, tower_of_everything)], indirect=["world"])
@on_ranks()
def test_the_totals_are_what_is_allocated(build: Callable[[], nn.Module]) -> None:
    model = build()
    stored = memory_snapshot(model).shard_bytes
    numel = sum(p.numel() for p in model.parameters() if isinstance(p, DTensor))
    total = next(line for line in explain(model).splitlines() if line.startswith("total"))
    for module in [m for m in model.modules() if hasattr(m, "unshard")]:
        module.unshard()
    unsharded = memory_snapshot(model).unsharded_bytes
    decimals = 1 if unsharded >= 10e6 else 4
    numbers = [f"{numel:,}", f"{unsharded / 1e6:,.{decimals}f}", f"{stored / 1e6:,.{decimals}f}"]
    assert total.split()[-3:] == numbers


@on_ranks(1)
def test_shards_on_another_device_are_said_to_be() -> None:
    model = fully_shard(Tower(), mp_policy=BF16)
    other = torch.device("meta")  # than that of the mesh
    model._shardwise_state.group.buckets[0].storage = ShardStorage(other)
    assert "  float32 on meta -> bfloat16" in explain(model)
