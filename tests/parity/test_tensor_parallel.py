"""Data parallel over tensor parallel: parameters that are DTensors before they are sharded.

Training on a mesh of both equals plain training on the global batch in float64 to 1e-10; ranks of one
tensor-parallel row see the same data. World 4, so two dimensions of size 2, or three of which one is
trivial, which is where a mesh dimension that is forgotten would show.
"""

from functools import partial
from typing import Any

import pytest
import torch
from comparing import assert_all_same, assert_as_plain
from harness import World
from meshed import Layout, gradients_of, layout_inputs, parameters_of, part, seat, tensors_of, whole
from models import built, random_batch, shard_tower
from reference import LocalAdamW, full
from tensor_parallel import PLANS, SIZES, Mlp, Run, Stack, loss_of, made, split_everything
from thinning import named, pairs
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    parallelize_module,
)

import shardwise
from shardwise import fully_shard, load_full_state_dict

# --- where --------------------------------------------------------------------------------------

USUAL = Layout((2, 2), ("dp", "tp"), ("dp",))
LAYOUTS = [
    USUAL,
    Layout((2, 2), ("tp", "dp"), ("dp",)),
    Layout((4, 1), ("dp", "tp"), ("dp",)),
    Layout((1, 4), ("dp", "tp"), ("dp",)),
    Layout((1, 2, 2), ("replicate", "shard", "tp"), ("replicate", "shard")),
    Layout((2, 1, 2), ("replicate", "shard", "tp"), ("replicate", "shard")),
    Layout((2, 2, 1), ("replicate", "shard", "tp"), ("replicate", "shard")),
]


OPTIMIZERS = {
    "adamw": partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1),
    "adamw_foreach": partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1, foreach=True),
    "adamw_loop": partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1, foreach=False),
    "sgd_momentum": partial(torch.optim.SGD, lr=0.05, momentum=0.9),
}


def trained(layout: Layout | None, run: Run) -> dict[str, Any]:
    model = made(layout, run)
    optimizer = OPTIMIZERS[run.optimizer](model.parameters())
    notes: dict[str, Any] = {}
    for step in range(run.steps):
        optimizer.zero_grad()
        for microbatch in range(run.microbatches):
            if layout is not None:
                model.set_requires_gradient_sync(microbatch == run.microbatches - 1)
            inputs = layout_inputs(layout, 10 * step + microbatch, run.sizes[0])
            loss_of(model, inputs).backward()
        if run.clip is not None:
            notes[f"norm {step}"] = whole(nn.utils.clip_grad_norm_(model.parameters(), run.clip))
        notes |= {f"step {step}: {name}": value for name, value in gradients_of(model).items()}
        optimizer.step()
    return {**notes, **parameters_of(model)}


def assert_trains_as_plainly(world: World, layout: Layout, run: Run) -> None:
    assert_as_plain(world, trained, layout, run)


# --- training -------------------------------------------------------------------------------------


@pairs(("sizes", "layout"), SIZES, named(LAYOUTS), every=5)
def test_training_on_both_dimensions_equals_plain_training(
    world4: World, sizes: tuple[int, int, int], layout: Layout
) -> None:
    assert_trains_as_plainly(world4, layout, Run(sizes=sizes))


PAIR_OF_TWO = [Layout((1, 2), ("dp", "tp"), ("dp",)), Layout((2, 1), ("dp", "tp"), ("dp",))]


@pytest.mark.thin(45)
@pytest.mark.parametrize("layout", PAIR_OF_TWO, ids=str)
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_one_of_the_dimensions_may_be_trivial(
    world2: World, sizes: tuple[int, int, int], layout: Layout
) -> None:
    assert_trains_as_plainly(world2, layout, Run(sizes=sizes))


VARIANTS = {
    "everything": Run(plan="everything"),
    "everything_uneven": Run(plan="everything", sizes=SIZES["uneven"]),
    "sequences": Run(plan="sequences"),
    "sequences_uneven": Run(plan="sequences", sizes=SIZES["uneven"]),
    "foreach": Run(optimizer="adamw_foreach"),
    "loop": Run(optimizer="adamw_loop", sizes=SIZES["uneven"]),
    "everything_foreach": Run(plan="everything", optimizer="adamw_foreach", sizes=SIZES["uneven"]),
    "momentum": Run(optimizer="sgd_momentum"),
    "resharded": Run(options={"reshard_after_forward": True}, sizes=SIZES["uneven"]),
    "kept": Run(options={"reshard_after_forward": False}),
    "microbatches": Run(microbatches=3, sizes=SIZES["uneven"]),
    "clipped": Run(plan="everything", clip=0.1),
    "clipped_uneven": Run(plan="everything", clip=0.1, sizes=SIZES["uneven"]),
    "clipped_sequences": Run(plan="sequences", clip=0.1),
    "clipped_microbatches": Run(plan="everything", clip=0.1, microbatches=2, sizes=SIZES["uneven"]),
    "columns": Run(dim=1),
    "columns_uneven": Run(dim=1, sizes=SIZES["uneven"]),
    "last_dimension": Run(dim=-1, plan="everything"),
    "columns_clipped": Run(dim=1, plan="everything", clip=0.1, microbatches=2),
    "columns_kept": Run(dim=1, options={"reshard_after_forward": False}, sizes=SIZES["uneven"]),
}


@pytest.mark.sample(10)
@pytest.mark.parametrize("run", VARIANTS.values(), ids=VARIANTS)
def test_every_way_of_training_equals_plain_training(world4: World, run: Run) -> None:
    assert_trains_as_plainly(world4, USUAL, run)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [LAYOUTS[1], LAYOUTS[5]], ids=str)
@pytest.mark.parametrize("name", ["clipped_microbatches", "sequences_uneven", "columns_uneven"])
def test_other_meshes_do_the_same(world4: World, layout: Layout, name: str) -> None:
    assert_trains_as_plainly(world4, layout, VARIANTS[name])


FOUR = Layout((4, 1), ("dp", "tp"), ("dp",))


@pytest.mark.slow
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("plan", ["mlps", "everything"])
def test_resharding_to_a_smaller_world_leaves_tensor_parallel_parameters_right(
    world4: World, plan: str, sizes: tuple[int, int, int]
) -> None:
    run = Run(plan=plan, sizes=sizes, options={"reshard_after_forward": 2}, microbatches=2)
    assert_trains_as_plainly(world4, FOUR, run)


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


@pytest.mark.thin(9)
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("plan", PLANS)
def test_parameters_lie_on_the_joint_mesh(world4: World, plan: str, sizes: tuple[int, int, int]) -> None:
    run = Run(plan=plan, sizes=sizes)
    plain = dict(made(None, run).named_parameters())
    ranks = world4.run(shown, USUAL, run)
    for name, expected in PLACED[plan].items():
        for found in ranks:
            assert (found[name][0], found[name][1]) == expected
            assert found[name][2] == plain[name].shape
    for name, value in plain.items():
        mesh_names, dims, _, _ = ranks[0][name]
        numel = sum(found[name][3].numel() for found in ranks)
        copies = 1 if mesh_names == BOTH and None not in dims else 2
        assert numel == copies * value.numel(), f"{name}: the ranks hold {numel} numbers"


def columns_shown(dim: int) -> dict[str, Any]:
    return shown(USUAL, Run(dim=dim))


@pytest.mark.parametrize("dim", [1, -1])
def test_another_dimension_than_tensor_parallel_may_be_sharded(world4: World, dim: int) -> None:
    for found in world4.run(columns_shown, dim):
        assert found["blocks.0.mlp.up.weight"][1] == (1, 0)
        assert found["blocks.0.mlp.down.weight"][1] == (1, 1)
        assert found["blocks.0.mlp.up.bias"][1] == (0, 0)
        assert found["inlet.weight"][1] == (1,)


def states(layout: Layout | None, run: Run) -> dict[str, Any]:
    """Full values before anything ran, and after a step; also of the optimizer."""
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


@pytest.mark.thin(54)
@pytest.mark.parametrize("layout", [USUAL, LAYOUTS[1], LAYOUTS[5]], ids=str)
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_states_hold_the_full_values(world4: World, layout: Layout, sizes: tuple[int, int, int]) -> None:
    run = Run(plan="everything", sizes=sizes)
    assert_as_plain(world4, states, layout, run)


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


def full_parameters_in_forward() -> dict[str, Any]:
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
    return {**seen, "between": shards}


def test_modules_see_the_parameters_that_tensor_parallelism_made(world4: World) -> None:
    for seen in world4.run(full_parameters_in_forward):
        assert seen == {
            "inlet": ("Tensor", torch.Size([8, 8])),
            "blocks.0.norm": ("Tensor", torch.Size([8])),
            "blocks.0.mlp.up": (("tp",), (Shard(0),), torch.Size([16, 8])),
            "blocks.0.mlp.down": (("tp",), (Shard(1),), torch.Size([8, 16])),
            "between": [("dp",), ("dp",), BOTH, BOTH],
        }


def loaded(layout: Layout, run: Run) -> dict[str, Any]:
    """State dicts go from one sharded model into another."""
    source, target = made(layout, run), made(layout, run)
    with torch.no_grad():
        for param in source.parameters():
            param.mul_(2)
    target.load_state_dict(source.state_dict())
    loss_of(target, layout_inputs(layout, 0, run.sizes[0])).backward()
    return tensors_of(target)


def doubled(run: Run) -> dict[str, Any]:
    model = made(None, run)
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(2)
    loss_of(model, layout_inputs(None, 0, run.sizes[0])).backward()
    return tensors_of(model)


def test_a_state_dict_is_loaded_into_another_model(world4: World) -> None:
    run = Run(sizes=SIZES["uneven"])
    assert_all_same(world4.run(loaded, USUAL, run), doubled(run))


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
@pytest.mark.parametrize("layout", [USUAL, LAYOUTS[4], LAYOUTS[5]], ids=str)
@pytest.mark.parametrize("sizes", [SIZES["even"], SIZES["uneven"]], ids=["even", "uneven"])
def test_parameters_on_the_whole_mesh_train_as_plainly(
    world4: World, layout: Layout, sizes: tuple[int, int, int]
) -> None:
    assert_as_plain(world4, on_whole_mesh, layout, sizes)


# --- with low precision ---------------------------------------------------------------------------


def in_bfloat16(layout: Layout | None, microbatches: int, clip: float) -> dict[str, Any]:
    """bfloat16 computation, float32 reduction, accumulation and clipping at once."""
    torch.manual_seed(1234)
    model = Stack()
    if layout is not None:
        split_everything(model, layout.mesh()["tp"])
        policy = shardwise.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        shard_tower(model, mesh=layout.data_mesh(), mp_policy=policy)
        assert all(param.dtype == torch.float32 for param in model.parameters())
    for microbatch in range(microbatches):
        if layout is not None:
            model.set_requires_gradient_sync(microbatch == microbatches - 1)
        inputs = part(random_batch(microbatch, 12).float(), *seat(layout))
        (model(inputs).float() - inputs.sum(-1, keepdim=True)).pow(2).mean().backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), clip)
    return {"norm": whole(norm), **gradients_of(model)}


@pytest.mark.parametrize("layout", [USUAL, LAYOUTS[5]], ids=str)
def test_bfloat16_accumulation_and_clipping_work_together(world4: World, layout: Layout) -> None:
    """To 3% of the largest number of each gradient: some ten roundings of bfloat16, of 0.4% each."""
    expected = in_bfloat16(None, 2, 0.5)
    for found in world4.run(in_bfloat16, layout, 2, 0.5):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert found[name].dtype == torch.float32
            atol = 0.03 * value.abs().max().item()
            torch.testing.assert_close(found[name], value, rtol=0.0, atol=atol)
