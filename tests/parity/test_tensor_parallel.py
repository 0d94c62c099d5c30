"""Data parallel over tensor parallel: parameters that are DTensors before they are sharded.

Training on a mesh of both equals plain training on the global batch in float64 to 1e-10; ranks of one
tensor-parallel row see the same data. World 4, so two dimensions of size 2, or three of which one is
trivial, which is where a mesh dimension that is forgotten would show.
"""

from functools import partial
from typing import Any

import pytest
import torch
from comparing import assert_as_plain
from harness import World
from meshed import Layout, gradients_of, layout_inputs, parameters_of
from models import built
from on_ranks import on_ranks
from reference import LocalAdamW, full
from tensor_parallel import SIZES, Mlp, Run, in_bfloat16, loss_of, made, trained
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import shardwise
from shardwise import fully_shard, load_full_state_dict

# --- where --------------------------------------------------------------------------------------

USUAL = Layout((2, 2), ("dp", "tp"), ("dp",))
OTHER_ORDER = Layout((2, 2), ("tp", "dp"), ("dp",))
REPLICAS = Layout((2, 1, 2), ("replicate", "shard", "tp"), ("replicate", "shard"))
SHARDS_OF_ONE_REPLICA = Layout((1, 2, 2), ("replicate", "shard", "tp"), ("replicate", "shard"))


# --- training -------------------------------------------------------------------------------------


EVEN, UNEVEN, FEW_ROWS = SIZES["even"], SIZES["uneven"], SIZES["few_rows"]
ALL = {"plan": "everything"}
RUNS: dict[str, tuple[Layout, Run]] = {
    "even, last dimension, other order": (OTHER_ORDER, Run(**ALL, dim=-1, sizes=EVEN)),
    "data alone, a loop": (
        Layout((2, 1), ("dp", "tp"), ("dp",)),
        Run(optimizer="adamw_loop", sizes=UNEVEN, options={"reshard_after_forward": 2}),
    ),
    "tensors alone, momentum": (
        Layout((1, 2), ("dp", "tp"), ("dp",)),
        Run(optimizer="sgd_momentum", sizes=FEW_ROWS),
    ),
    "shards of one replica": (SHARDS_OF_ONE_REPLICA, Run(**ALL, optimizer="adamw_foreach", sizes=UNEVEN)),
    "replicas, sequences": (REPLICAS, Run(plan="sequences", sizes=UNEVEN)),
    "replicas of shards": (
        Layout((2, 2, 1), ("replicate", "shard", "tp"), ("replicate", "shard")),
        Run(sizes=FEW_ROWS, options={"reshard_after_forward": False}),
    ),
    "few rows, clipped microbatches": (USUAL, Run(**ALL, clip=0.1, microbatches=2, sizes=FEW_ROWS)),
    "columns, clipped microbatches": (USUAL, Run(**ALL, dim=1, clip=0.1, microbatches=2)),
}


@pytest.mark.parametrize(
    ("world", "layout", "run"),
    [pytest.param(case[0].size, *case, id=name) for name, case in RUNS.items()],
    indirect=["world"],
)
def test_training_on_both_dimensions_equals_plain_training(world: World, layout: Layout, run: Run) -> None:
    assert_as_plain(world, trained, layout, run)


# --- what is where --------------------------------------------------------------------------------


def shown(layout: Layout, run: Run) -> dict[str, Any]:
    model = made(layout, run)
    loss_of(model, layout_inputs(layout, 0, run.sizes[0])).backward()
    found: dict[str, Any] = {}
    for name, param in model.named_parameters():
        assert isinstance(param, DTensor)
        assert isinstance(param.grad, DTensor)
        assert param.grad.placements == param.placements
        assert param.grad.device_mesh == param.device_mesh
        assert param.grad.to_local().shape == param.to_local().shape
        dims = tuple(getattr(each, "dim", None) for each in param.placements)  # of strided shards too
        found[name] = param.device_mesh.mesh_dim_names, dims, param.shape, param.to_local().detach()
    return found


BOTH = ("dp", "tp")
# On which dimension each mesh dimension shards; None: replicated.
PLACED = {
    "mlps": {
        "inlet.weight": (("dp",), (0,)),
        "blocks.0.norm.weight": (("dp",), (0,)),
        "blocks.0.mlp.up.weight": (BOTH, (0, 0)),
        "blocks.0.mlp.up.bias": (BOTH, (0, 0)),
        "blocks.0.mlp.down.weight": (BOTH, (0, 1)),
        "blocks.0.mlp.down.bias": (BOTH, (0, None)),
        "head.down.weight": (BOTH, (0, 1)),
    },
    "everything": {"inlet.weight": (BOTH, (0, None)), "blocks.1.norm.bias": (BOTH, (0, None))},
    "sequences": {"inlet.weight": (BOTH, (0, None)), "blocks.1.norm.bias": (BOTH, (0, None))},
}
PLACED_ON_COLUMNS = {
    "inlet.weight": (("dp",), (1,)),
    "blocks.0.mlp.up.weight": (BOTH, (1, 0)),
    "blocks.0.mlp.up.bias": (BOTH, (0, 0)),
    "blocks.0.mlp.down.weight": (BOTH, (1, 1)),
}


@pytest.mark.parametrize(
    ("run", "placed"),
    [
        *(
            (Run(plan=plan, sizes=sizes), PLACED[plan])
            for plan, sizes in zip(PLACED, SIZES.values(), strict=True)
        ),
        *((Run(dim=dim), PLACED_ON_COLUMNS) for dim in (1, -1)),
    ],
)
def test_parameters_lie_on_the_joint_mesh(world4: World, run: Run, placed: dict[str, Any]) -> None:
    plain = dict(made(None, run).named_parameters())
    ranks = world4.run(shown, USUAL, run)
    for name, expected in placed.items():
        for found in ranks:
            assert (found[name][0], found[name][1]) == expected
            assert found[name][2] == plain[name].shape
    for name, value in plain.items():
        mesh_names, dims, _, _ = ranks[0][name]
        numel = sum(found[name][3].numel() for found in ranks)
        copies = 1 if mesh_names == BOTH and None not in dims else 2
        assert numel == copies * value.numel(), f"{name}: the ranks hold {numel} numbers"


def states(layout: Layout | None, run: Run) -> dict[str, Any]:
    model = made(layout, run)
    before = {name: full(value) for name, value in model.state_dict().items()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    loss_of(model, layout_inputs(layout, 0, run.sizes[0])).backward()
    optimizer.step()
    names = {param: name for name, param in model.named_parameters()}
    after = {f"after: {name}": full(value) for name, value in model.state_dict().items()}
    for param, state in optimizer.state.items():
        after |= {f"{key} of {names[param]}": full(state[key]) for key in ("exp_avg", "exp_avg_sq")}
    return {**before, **after}


def test_states_hold_the_full_values(world4: World) -> None:
    assert_as_plain(world4, states, OTHER_ORDER, Run(plan="everything", sizes=UNEVEN))


class Uneven(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 7, bias=False))


def loaded_into_uneven_rows(way: str) -> str:
    """What becomes of a full state where ranks of a tensor parallel weight have different numbers of rows."""
    mesh = USUAL.mesh()
    model = parallelize_module(Uneven(), mesh["tp"], {"0": ColwiseParallel()})
    shard = torch_fully_shard if way.startswith("the peer") else fully_shard
    shard(model, mesh=mesh["dp"])
    want = torch.arange(28.0).view(7, 4)
    state = {"0.weight": want.clone()}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0="broadcast" in way)
    try:
        if way == "load_full_state_dict":
            load_full_state_dict(model, state, src_rank=None)
        elif way == "load_state_dict":
            model.load_state_dict(state)
        else:
            set_model_state_dict(model, state, options=options)
    except AssertionError as error:
        return type(error).__name__
    return "right" if torch.equal(full(model[0].weight), want) else "wrong"


def test_full_values_are_loaded_into_uneven_rows(world4: World) -> None:
    """torch's `set_model_state_dict` cannot, whoever has sharded; with `broadcast_from_rank0` it can."""
    ways = ("load_full_state_dict", "load_state_dict", "torch, broadcast", "torch", "the peer, torch")
    found = {way: set(world4.run(loaded_into_uneven_rows, way)) for way in ways}
    assert [found[way] for way in ways[:3]] == [{"right"}] * 3
    assert found["torch"] == found["the peer, torch"]


@on_ranks(4)
def test_modules_see_the_parameters_that_tensor_parallelism_made() -> None:
    """What the modules see while they run, and what they show between the passes."""
    model = made(USUAL, Run())
    seen: dict[str, Any] = {}

    def look(module: nn.Module, args: Any, name: str) -> None:
        weight = module.weight
        if isinstance(weight, DTensor):
            seen[name] = weight.device_mesh.mesh_dim_names, weight.placements, weight.shape
        else:
            seen[name] = type(weight.data).__name__, weight.shape

    names = ["inlet", "blocks.0.norm", "blocks.0.mlp.up", "blocks.0.mlp.down"]
    for name in names:
        model.get_submodule(name).register_forward_pre_hook(partial(look, name=name))
    model(layout_inputs(USUAL, 0))
    shards = [model.get_submodule(name).weight.device_mesh.mesh_dim_names for name in names]
    found = {**seen, "between": shards}
    assert found == {
        "inlet": ("Tensor", torch.Size([8, 8])),
        "blocks.0.norm": ("Tensor", torch.Size([8])),
        "blocks.0.mlp.up": (("tp",), (Shard(0),), torch.Size([16, 8])),
        "blocks.0.mlp.down": (("tp",), (Shard(1),), torch.Size([8, 16])),
        "between": [("dp",), ("dp",), BOTH, BOTH],
    }


# --- a mesh that holds everything -----------------------------------------------------------------


def on_whole_mesh(layout: Layout | None, sizes: tuple[int, int, int]) -> dict[str, Any]:
    """Parameters are DTensors on the mesh of all dimensions; the data-parallel ones are named."""
    model = built(Mlp, *sizes)
    if layout is not None:
        mesh = layout.mesh()
        split = {
            "up.weight": Shard(0),
            "up.bias": Shard(0),
            "down.weight": Shard(1),
            "down.bias": Replicate(),
        }
        for name, param in list(model.named_parameters()):
            owner, attribute = name.split(".")
            placements = [Replicate()] * (mesh.ndim - 1) + [split[name]]
            placed = nn.Parameter(distribute_tensor(param.detach(), mesh, placements))
            setattr(model.get_submodule(owner), attribute, placed)
        shard, *replicate = reversed(layout.data)
        dims = shardwise.DataParallelMeshDims(shard=shard, replicate=replicate[0] if replicate else None)
        fully_shard(model, mesh=mesh, dp_mesh_dims=dims)
    optimizer = LocalAdamW(model.parameters(), lr=1e-2, foreach=True)
    notes: dict[str, Any] = {}
    for step in range(2):
        optimizer.zero_grad()
        inputs = layout_inputs(layout, step, sizes[0])
        target = inputs.sum(-1, keepdim=True)
        if layout is not None:
            spread = [Shard(0) if name in layout.data else Replicate() for name in layout.names]
            inputs = DTensor.from_local(inputs, layout.mesh(), spread, run_check=False)
        outputs = model(inputs)
        if isinstance(outputs, DTensor):
            outputs = outputs.redistribute(placements=inputs.placements).to_local()
        (outputs - target).pow(2).mean().backward()
        notes |= {f"step {step}: {name}": value for name, value in gradients_of(model).items()}
        optimizer.step()
    return {**notes, **parameters_of(model)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "sizes"), [(USUAL, EVEN), (SHARDS_OF_ONE_REPLICA, UNEVEN), (REPLICAS, UNEVEN)], ids=str
)
def test_parameters_on_the_whole_mesh_train_as_plainly(
    world4: World, layout: Layout, sizes: tuple[int, int, int]
) -> None:
    assert_as_plain(world4, on_whole_mesh, layout, sizes)


# --- with low precision ---------------------------------------------------------------------------


def test_bfloat16_accumulation_and_clipping_work_together(world4: World) -> None:
    """To 3% of the largest number of each gradient: some ten roundings of bfloat16, of 0.4% each."""
    expected = in_bfloat16(None, 2, 0.5)
    for found in world4.run(in_bfloat16, USUAL, 2, 0.5):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert found[name].dtype == torch.float32
            atol = 0.03 * value.abs().max().item()
            torch.testing.assert_close(found[name], value, rtol=0.0, atol=atol)
