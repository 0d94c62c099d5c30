"""What a graph of a whole model would not do right is refused where it is compiled, and done without a graph.

`DONE_WITHOUT_A_GRAPH` can be done by eager runs: `torch.compile` without `fullgraph` does it as well, by a break in
the graph, with the same gradients. `NEVER_DONE` cannot.

Where contexts and setters decide, the test is in test_compile_model.py.
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from comparing import alike
from custom_comms import AllGather, ReduceScatter
from dynamo import forget_graphs
from expecttest import assert_expected_inline
from harness import World
from models import Tower, built, random_batch, shard_tower
from on_ranks import on_ranks
from tensor_subclasses import Stack as StackOfSubclasses
from tensor_subclasses import TravelsLow
from test_compile_model import backward, compiled, num_graphs, part, told, wrong_gradients
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

import shardwise
from shardwise import CommPolicy, DataParallelMeshDims, MixedPrecisionPolicy, fully_shard
from shardwise.init.initialise import mark_partly_loaded
from shardwise.policies import LowPrecisionReduction, QuantizedAllGather
from shardwise.strategies import register_comm_hook

# --- models that a graph cannot have ----------------------------------------------------------------


def tower() -> Any:
    torch.manual_seed(0)
    return Tower()


def up(model: Any) -> nn.Linear:
    return model.blocks[0].up


class Own(nn.Parameter):
    """A class of the caller's."""


class OnMesh(nn.Module):
    def __init__(self, mesh: Any) -> None:
        super().__init__()
        self.mesh = mesh
        weight = torch.linspace(-1, 1, 64).view(8, 8)
        self.weight = nn.Parameter(distribute_tensor(weight, mesh, [Replicate(), Replicate()]))

    def forward(self, x: Tensor) -> Tensor:
        inputs = DTensor.from_local(x, self.mesh, [Replicate(), Replicate()], run_check=False)
        return (inputs @ self.weight).to_local()


def on_the_whole_mesh() -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("dp", "tp"))
    return fully_shard(OnMesh(mesh), mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="dp"))


def openly_tied() -> nn.Module:
    model = tower()
    model.blocks[1].up.weight = model.blocks[0].up.weight
    for block in model.blocks:
        fully_shard(block)
    return model


def on_meta() -> nn.Module:
    with torch.device("meta"):
        model = Tower()
    return shard_tower(model)


LOW = {"param_dtype": torch.bfloat16}
OPTIONS: dict[str, dict[str, Any]] = {
    "quantized all-gather": {"comm_policy": CommPolicy(quantized_all_gather=QuantizedAllGather())},
    "gradients in low precision": {"mp_policy": MixedPrecisionPolicy(**LOW, keep_low_precision_grads=True)},
    "sums in a dtype of their own": {
        "mp_policy": MixedPrecisionPolicy(**LOW, reduce_dtype=torch.bfloat16, accumulate_dtype=torch.float32)
    },
    "kept by pairs": {"reshard_after_forward": 2},
}
BEFORE: dict[str, Callable[[Any], Any]] = {
    "hook on the original": lambda model: up(model).weight.register_hook(lambda gradient: gradient * 2),
    "post hook on the original": lambda model: up(model).weight.register_post_accumulate_grad_hook(
        lambda param: None
    ),
    "class of its own": lambda model: setattr(up(model), "weight", Own(up(model).weight.detach())),
}
AFTER: dict[str, Callable[[Any], Any]] = {
    "custom all-gather": lambda model: model.blocks[1].set_custom_all_gather(AllGather(returns_work=True)),
    "custom reduction": lambda model: model.blocks[1].set_custom_reduce_scatter(
        ReduceScatter(returns_work=True)
    ),
    "comm hook": lambda model: register_comm_hook(model, None, LowPrecisionReduction()),
    "all-reduce hook": lambda model: model.blocks[1].set_all_reduce_hook(lambda gradient: None),
    "event of the optimizer": lambda model: model.set_post_optim_event(torch.Event("cpu")),
    "partly loaded": lambda model: mark_partly_loaded(model, "the disk was full."),
    "added parameter": lambda model: setattr(model.blocks[1], "scale", nn.Parameter(torch.ones(2))),
}
OTHERS: dict[str, Callable[[], nn.Module]] = {
    "extension": lambda: shard_tower(StackOfSubclasses(TravelsLow, 8, True)),
    "on the whole mesh": on_the_whole_mesh,
    "openly tied": openly_tied,
    "on meta": on_meta,
}


def model_with(what: str) -> Any:
    """A tower with something in its options, or done to it before or after it is sharded; or another model."""
    torch.manual_seed(0)
    if what in OTHERS:
        return OTHERS[what]()
    model = tower()
    BEFORE.get(what, lambda model: None)(model)
    shard_tower(model, **OPTIONS.get(what, {}))
    AFTER.get(what, lambda model: None)(model)
    return model


NEVER_DONE = ["partly loaded", "openly tied", "added parameter", "on meta"]
BY_PAIRS = "kept by pairs"
DONE_WITHOUT_A_GRAPH = [
    what for what in (*AFTER, *OPTIONS, *BEFORE, *OTHERS) if what not in (*NEVER_DONE, BY_PAIRS)
]

# --- what is said ---------------------------------------------------------------------------------


def batch_for(model: nn.Module) -> Tensor:
    dtype = torch.float64 if isinstance(model, StackOfSubclasses) else torch.float32
    return part(random_batch(0, 8, dtype=dtype))


def refusal(what: str) -> str:
    """What is said under `fullgraph=True`."""
    model = model_with(what)
    with pytest.raises(torch._dynamo.exc.Unsupported) as caught:
        backward(compiled(model, "function"), batch_for(model))
    return f"{what}: {told(caught.value)}"


def refusals(whats: list[str]) -> list[str]:
    return [refusal(what) for what in whats]


def told_alike(world: World, whats: list[str]) -> str:
    first = alike(world.run(refusals, whats, timeout=120))
    return "\n".join(each.removesuffix(" [...]") for each in first)


@pytest.mark.slow
def test_what_only_eager_runs_do_is_refused_in_graphs(world2: World, world4: World) -> None:
    by_pairs = "Tower: reshard_after_forward=2 keeps parameters among a few ranks."
    assert told_alike(world4, [BY_PAIRS]) == f"{BY_PAIRS}: {by_pairs}"
    assert_expected_inline(
        told_alike(world2, DONE_WITHOUT_A_GRAPH),
        """\
custom all-gather: blocks.1: it was given collectives or memory of its own (set_custom_all_gather, set_custom_reduce_scatter, register_comm_hook, quantized_all_gather, or an allocator).
custom reduction: blocks.1: it was given collectives or memory of its own (set_custom_all_gather, set_custom_reduce_scatter, register_comm_hook, quantized_all_gather, or an allocator).
comm hook: Tower: it was given collectives or memory of its own (set_custom_all_gather, set_custom_reduce_scatter, register_comm_hook, quantized_all_gather, or an allocator).
all-reduce hook: blocks.1: set_all_reduce_hook() or set_reduce_ignored_params() was called.
event of the optimizer: Tower: all-gathers wait for the event of set_post_optim_event().
quantized all-gather: Tower: it was given collectives or memory of its own (set_custom_all_gather, set_custom_reduce_scatter, register_comm_hook, quantized_all_gather, or an allocator).
gradients in low precision: Tower: gradients of inlet.weight are kept in torch.bfloat16 (keep_low_precision_grads).
sums in a dtype of their own: Tower: gradients of inlet.weight are to add up in torch.float32 (accumulate_dtype).
hook on the original: blocks.0: blocks.0.up.weight had hooks for its full gradient before fully_shard.
post hook on the original: blocks.0: blocks.0.up.weight had hooks for its full gradient before fully_shard.
class of its own: blocks.0: blocks.0.up.weight is of a class of its own, not nn.Parameter.
extension: blocks.0: its parameters are tensor subclasses that define their own all-gather.
on the whole mesh: OnMesh: weight is a DTensor on the whole mesh, so that its gradient would be summed twice.""",
    )


@pytest.mark.slow
def test_what_no_run_does_is_refused_in_graphs_with_the_words_of_eager_runs(world2: World) -> None:
    assert_expected_inline(
        told_alike(world2, NEVER_DONE),
        """\
partly loaded: Tower: the model is only partly loaded, because an earlier load failed (the disk was full). Load a complete checkpoint before the next forward.
openly tied: up.weight is tied to a parameter that was sharded in another fully_shard call, and no sharded module contains both, to own the parameter. Call fully_shard on the module around both, after these two, or shard both in one call, as a list.
added parameter: blocks.1.scale: this parameter was added after fully_shard (group 'blocks.1'). No group reduces the gradients, so they would stay this rank's own and the ranks would drift apart. Add parameters before fully_shard, call fully_shard on the new module, or freeze what is not to be trained.
on meta: Cannot run forward: 4 parameters are still on the meta device: inlet.weight, inlet.bias, outlet.weight, outlet.bias. Nothing has given them values. Call shardwise.materialize(model), or load a checkpoint, first.""",
    )


# --- what is done instead -------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("what", DONE_WITHOUT_A_GRAPH)
@on_ranks(2, timeout=120)
def test_what_a_graph_cannot_have_is_done_between_graphs(what: str) -> None:
    gradients: list[dict[str, Tensor]] = []
    left: list[str] = []
    for is_compiled in (False, True):
        model = model_with(what)
        run = compiled(model, "function", fullgraph=False) if is_compiled else model
        for _ in range(2):
            backward(run, batch_for(model))
        gradients.append({name: param.grad.full_tensor() for name, param in model.named_parameters()})
        left += [name for name, module in model.named_modules() if set(module.__dict__) & {"weight", "bias"}]
    want, got = gradients
    assert ([name for name in want if not torch.equal(want[name], got[name])], left) == ([], [])


@pytest.mark.slow
@on_ranks(2, timeout=120)
def test_after_a_refusal_the_model_runs_and_its_blocks_can_be_compiled() -> None:
    model, expected = model_with("custom all-gather"), model_with("custom all-gather")
    inputs = batch_for(model)
    with pytest.raises(torch._dynamo.exc.Unsupported):
        compiled(model, "function")(inputs)
    for blocks in ([], model.blocks):
        forget_graphs()
        for block in blocks:
            block.compile(backend="aot_eager", fullgraph=True)
        for each in (model, expected):
            each.zero_grad()
            backward(each, inputs)
        assert wrong_gradients(model, expected) == []
    assert num_graphs() == 1


# --- what takes part in both ----------------------------------------------------------------------


def replaced() -> tuple[str, bool, list[bool]]:
    """What is said where a parameter was replaced under a graph; whether it stays; and, with breaks, whether
    outputs are those of an eager run."""
    model = shard_tower(tower())
    inputs = batch_for(model)
    found = []
    said = "accepted"
    for fullgraph in (True, False):
        run = compiled(model, "function", fullgraph=fullgraph)
        run(inputs)
        new = nn.Parameter(model.blocks[0].up.weight.detach() * 2)
        model.blocks[0].up.weight = new
        try:
            output = run(inputs)
        except torch._dynamo.exc.Unsupported as error:
            said = told(error)
        else:
            stays = model.blocks[0].up.weight is new
            found += [stays, torch.equal(output, model(inputs)), torch.equal(output, run(inputs))]
        model(inputs)
    return said, model.blocks[0].up.weight is new, found


@pytest.mark.slow
def test_a_parameter_that_was_replaced_is_used_or_refused_and_never_put_back(world2: World) -> None:
    for said, stays, found in world2.run(replaced, timeout=120):
        assert stays
        assert all(found)
        if torch.__version__ >= "2.13":
            assert (said, len(found)) == ("accepted", 6)
        else:
            assert "blocks.0.up.weight: another parameter was put in its place" in said
            assert "uncompiled" in said


@pytest.mark.slow
@pytest.mark.parametrize("turns", ["ge", "eg", "gege", "egg"])
@on_ranks(2, timeout=120)
def test_gradients_of_graphs_and_of_eager_runs_add_up(turns: str) -> None:
    plain = built(Tower, seed=0)
    model = shard_tower(copy.deepcopy(plain))
    run = compiled(model, "function")
    for _ in range(2):
        plain.zero_grad()
        model.zero_grad()
        for seed, turn in enumerate(turns):
            inputs = random_batch(seed, 8)
            backward(plain, inputs)
            backward(run if turn == "g" else model, part(inputs))
    assert wrong_gradients(model, plain, 1e-10) == []
    ours = shardwise.clip_grad_norm_(model, 0.1)
    assert abs(float(ours - nn.utils.clip_grad_norm_(plain.parameters(), 0.1))) < 1e-10
