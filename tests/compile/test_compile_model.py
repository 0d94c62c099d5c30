"""torch.compile of a model around sharded modules: one graph, with the numbers of eager runs.

A model is compiled as a *module* (its own hooks run outside of the graph, those of its blocks are in it) or
by a *function* that calls it (all hooks are in the graph).
"""

import copy
import textwrap
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from comparing import alike
from dynamo import forget_graphs
from events import observe
from expecttest import assert_expected_inline
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from harness import World
from models import (
    LanguageModel,
    OddModel,
    Tower,
    built,
    next_token_loss,
    random_batch,
    shard_tower,
    token_batch,
    uneven_tower,
)
from on_ranks import on_ranks
from reference import adamw, full, mean_of_squares
from scenario import Side, assert_same
from tensor_parallel import PLANS, Stack
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard
from torch.utils.checkpoint import checkpoint

import shardwise
from shardwise import MixedPrecisionPolicy, fully_shard

HOWS = ["module", "function"]
by_how = pytest.mark.parametrize("how", ["module", pytest.param("function", marks=pytest.mark.slow)])


def compiled(model: nn.Module, how: str, backend: Any = "aot_eager", **options: Any) -> Callable[..., Any]:
    forget_graphs()
    run = model if how == "module" else lambda x: model(x)
    return torch.compile(run, **({"fullgraph": True, "backend": backend} | options))


def num_graphs() -> int:
    return counters["stats"]["unique_graphs"]


def wrong_gradients(model: nn.Module, expected: nn.Module, atol: float = 0.0) -> list[str]:
    """Names of those that differ by more than `atol`; none where none is expected."""
    pairs = zip(expected.named_parameters(), model.parameters(), strict=True)
    gradients = [(name, full(got.grad), full(want.grad)) for (name, want), got in pairs]
    return [
        name
        for name, got, want in gradients
        if (got is None) != (want is None)
        or (want is not None and not torch.allclose(got, want, rtol=0, atol=atol))
    ]


def part(batch: Tensor) -> Tensor:
    return batch.chunk(dist.get_world_size())[dist.get_rank()]


def backward(run: Callable[..., Any], inputs: Tensor, loss_of: Any = mean_of_squares) -> None:
    loss_of(run, inputs).backward()


# --- the numbers ----------------------------------------------------------------------------------


def train(
    side: Side, build: Callable[[], nn.Module], how: str, backend: str, settings: dict[str, Any] | None = None
) -> None:
    torch.manual_seed(0)
    model = side.shard_tower(build().double())
    run = compiled(model, how, backend, **(settings or {})) if side.is_sharded else model
    side.steps(model, adamw(model), range(3), lambda _, inputs: mean_of_squares(run, inputs))
    if side.is_sharded:
        assert (num_graphs(), counters["graph_break"], counters["recompiles"]) == (1, {}, {})


@pytest.mark.parametrize(
    ("how", "backend"),
    [
        pytest.param("function", "eager", marks=pytest.mark.slow),
        ("module", "aot_eager"),
        pytest.param("function", "inductor", marks=pytest.mark.slow),
        pytest.param("module", "inductor", marks=pytest.mark.slow),
    ],
)
def test_a_compiled_model_is_one_graph_and_trains_as_a_plain_one(
    world2: World, how: str, backend: str
) -> None:
    assert_same(world2, train, Tower, how, backend, timeout=300)  # a first use of Inductor builds C++


@pytest.mark.parametrize(
    ("world", "how"), [(2, "module"), pytest.param(3, "function", marks=pytest.mark.slow)], indirect=["world"]
)
def test_parameters_that_are_easy_to_get_wrong_train_right_in_a_graph(world: World, how: str) -> None:
    assert_same(world, train, OddModel, how, "aot_eager")


class CheckpointedTower(Tower):
    def forward(self, x: Tensor) -> Tensor:
        x = self.inlet(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.outlet(x)


class TiedModel(LanguageModel):
    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embed.weight


def partly_frozen_tower() -> nn.Module:
    model = Tower()
    model.blocks[1].requires_grad_(False)
    model.blocks[0].up.weight.requires_grad_(False)
    return model


def partly_unused_tower() -> nn.Module:
    model = Tower()
    for block in model.blocks:
        block.spare = nn.Linear(8, 8)
    return model


def halves(tensor: nn.Parameter) -> Shard | None:
    return Shard(1) if tensor.dim() > 1 else None


LOW = {"param_dtype": torch.bfloat16}
CASES: dict[str, dict[str, Any]] = {
    "checkpointed": {"build": CheckpointedTower},
    "tied": {"build": TiedModel, "batch": partial(token_batch, 0, 8), "loss_of": next_token_loss},
    "partly frozen": {"build": partly_frozen_tower},
    "partly unused": {"build": partly_unused_tower},
    "uneven": {"build": uneven_tower, "batch": partial(random_batch, 0, 8, 7)},
    "kept after forward": {"options": {"reshard_after_forward": False}},
    "root freed after forward": {"options": {"reshard_after_forward": True}},
    "on dim 1": {"options": {"shard_placement_fn": halves}},
    "bfloat16": {"precision": LOW},
    "bfloat16, summed in float32": {"precision": {**LOW, "reduce_dtype": torch.float32}},
    "float16": {"precision": {"param_dtype": torch.float16}},
    "norms in float32": {"precision": {**LOW, "full_precision": nn.LayerNorm}},
    "replicas, module": {"is_hybrid": True},
    "replicas, function": {"is_hybrid": True},
}


@cache  # a mesh opens process groups, which no test can close
def hybrid_mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))


eight_rows = partial(random_batch, 0, 8)


def compare_with_eager(
    how: str,
    build: Callable[[], nn.Module] = Tower,
    batch: Callable[[], Tensor] = eight_rows,
    loss_of: Any = mean_of_squares,
    options: dict[str, Any] | None = None,
    precision: dict[str, Any] | None = None,
    is_hybrid: bool = False,
) -> tuple[int, list[str], list[str]]:
    """Graphs; gradients of two accumulated steps that are not bit for bit those of an eager run; wrong ones."""
    torch.manual_seed(0)
    dtype = torch.float64 if precision is None else torch.float32
    plain = build().to(dtype)
    inputs = batch()
    inputs = inputs.to(dtype) if inputs.is_floating_point() else inputs
    options = {**(options or {}), **({"mesh": hybrid_mesh()} if is_hybrid else {})}
    models = [copy.deepcopy(plain), copy.deepcopy(plain)]
    for model in models:
        for block in model.blocks:
            fully_shard(block, mp_policy=MixedPrecisionPolicy(**(precision or {})), **options)
        own = {**precision, "output_dtype": dtype} if precision else {}
        fully_shard(model, mp_policy=MixedPrecisionPolicy(**own), **options)
    run = compiled(models[0], how)
    for _ in range(2):
        backward(plain, inputs, loss_of)
        backward(run, part(inputs), loss_of)
        backward(models[1], part(inputs), loss_of)
    atol = 1e-10 if precision is None else 0.05
    return num_graphs(), wrong_gradients(*models), wrong_gradients(models[0], plain, atol)


SPARE = {f"blocks.{i}.spare.{name}" for i in range(3) for name in ("weight", "bias")}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "how", "case"),
    [(4 if "replicas" in case else 2, HOWS[i % 2], case) for i, case in enumerate(CASES)],
    indirect=["world"],
)
def test_gradients_of_a_graph_are_bit_for_bit_those_of_eager_runs(world: World, how: str, case: str) -> None:
    for graphs, unlike, wrong in world.run(compare_with_eager, how, **CASES[case], timeout=120):
        if case == "partly unused" and torch.__version__ < "2.13":
            # Before, DTensor.to_local() makes zeros of the gradient of what was not used.
            assert (set(unlike), set(wrong)) == (SPARE, SPARE)
            unlike, wrong = [], []
        assert (graphs, unlike, wrong) == (1, [], [])


@on_ranks(2)
def test_a_graph_divides_gradients_by_the_factor_that_was_set() -> None:
    plain = nn.Linear(8, 3).double()
    model = fully_shard(copy.deepcopy(plain))
    model.set_gradient_divide_factor(0.5)
    inputs = random_batch(0, 4)
    plain(inputs).sum().backward()
    compiled(model, "function", "eager")(part(inputs)).sum().backward()
    for shard, param in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(full(shard.grad), 2 * param.grad)


@cache
def two_dim_mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def tensor_parallel(how: str, plan: str, width: int, hidden: int) -> tuple[int, list[str], list[str]]:
    mesh = two_dim_mesh()
    plain = built(Stack, width, hidden, seed=0)
    models = [copy.deepcopy(plain), copy.deepcopy(plain)]
    for model in models:
        PLANS[plan](model, mesh["tp"])
        shard_tower(model, mesh=mesh["dp"])
    inputs = random_batch(0, 8, width)
    own = inputs.chunk(2)[mesh.get_local_rank("dp")]
    run = compiled(models[0], how)
    for call, batch in ((plain, inputs), (run, own), (models[1], own)):
        call(batch).pow(2).mean().backward()
    return num_graphs(), wrong_gradients(*models), wrong_gradients(models[0], plain, 1e-10)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "plan", "sizes"),
    [("module", "everything", (6, 10)), ("function", "mlps", (8, 16)), ("function", "sequences", (8, 16))],
)
def test_parameters_of_tensor_parallel_modules_are_unsharded_in_a_graph(
    world4: World, how: str, plan: str, sizes: tuple[int, int]
) -> None:
    assert world4.run(tensor_parallel, how, plan, *sizes, timeout=120) == [(1, [], [])] * 4


# --- the graphs -----------------------------------------------------------------------------------


class Graphs:
    """A back end that writes down what a graph does: one line each for its forward and its backward."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    @property
    def backend(self) -> Any:
        return aot_autograd(
            fw_compiler=partial(self._note, "forward"),
            bw_compiler=partial(self._note, "backward"),
            partition_fn=min_cut_rematerialization_partition,
        )

    def _note(self, name: str, graph: torch.fx.GraphModule, inputs: Any) -> Any:
        events = [event for node in graph.graph.nodes if (event := self._event(node))]
        lines = textwrap.wrap(f"{name}: {' '.join(events)}", 90, subsequent_indent=" " * 4)
        self.lines.append("\n".join(lines))
        return make_boxed_func(graph.forward)

    def _event(self, node: torch.fx.Node) -> str | None:
        name = str(node.target)
        if name.startswith("_c10d_functional.") and "wait" not in name:
            word = {"all_gather_into_tensor": "gather", "reduce_scatter_tensor": "reduce"}
            return f"{word[name.split('.')[1]]}({node.args[0].meta['val'].numel()})"  # type: ignore[union-attr]
        return "mm" if name.startswith(("aten.mm", "aten.addmm")) else None


def graphs_of(how: str, build: Callable[[], nn.Module] = Tower) -> str:
    graphs = Graphs()
    run = compiled(shard_tower(build()), how, graphs.backend)
    backward(run, random_batch(0, 2, dtype=torch.float32))
    return "\n".join(graphs.lines)


def test_a_graph_has_one_all_gather_and_one_reduction_a_group_and_unshards_again_in_backward(
    world2: World,
) -> None:
    graph, other = world2.run(graphs_of, "function", timeout=120)
    assert other == graph
    assert_expected_inline(
        graph,
        """\
forward: gather(45) mm gather(148) mm mm gather(148) mm mm gather(148) mm mm mm
backward: mm mm gather(148) mm mm mm mm reduce(296) gather(148) mm mm mm mm reduce(296)
    gather(148) mm mm mm mm reduce(296) mm reduce(90)""",
    )


@pytest.mark.slow
def test_a_compiled_module_unshards_outside_and_checkpointed_blocks_once_for_all_of_backward(
    world2: World,
) -> None:
    module, checkpointed = (
        world2.run(graphs_of, how, build, timeout=120)[0]
        for how, build in (("module", Tower), ("function", CheckpointedTower))
    )
    assert_expected_inline(
        module,
        """\
forward: mm gather(148) mm mm gather(148) mm mm gather(148) mm mm mm
backward: mm mm gather(148) mm mm mm mm reduce(296) gather(148) mm mm mm mm reduce(296)
    gather(148) mm mm mm mm reduce(296) mm""",
    )
    assert_expected_inline(
        checkpointed,
        """\
forward: gather(45) mm gather(148) mm mm gather(148) mm mm gather(148) mm mm mm
backward: mm gather(148) mm mm mm mm mm mm mm reduce(296) gather(148) mm mm mm mm mm
    reduce(296) gather(148) mm mm mm mm mm reduce(296) mm reduce(90)""",
    )


# --- over a training run --------------------------------------------------------------------------


def graphs_by_event(how: str) -> list[tuple[str, int, list[str]]]:
    """How many graphs there are after each of the events in a model's life, and which gradients are wrong."""
    plain = built(Tower, seed=0)
    model = shard_tower(copy.deepcopy(plain))
    run = compiled(model, how)
    inputs = random_batch(0, 8)
    found: list[tuple[str, int, list[str]]] = []

    def step(event: str, eager: bool = False) -> None:
        plain.zero_grad()
        model.zero_grad()
        backward(plain, inputs)
        backward(model if eager else run, part(inputs))
        found.append((event, num_graphs(), wrong_gradients(model, plain, 1e-10)))

    def on_both(change: Callable[[nn.Module], Any]) -> None:
        change(plain)
        change(model)

    step("first")
    step("second")
    step("eager", eager=True)
    step("compiled again")
    on_both(nn.Module.eval)
    step("eval")
    on_both(nn.Module.train)
    step("train")
    with torch.no_grad():
        torch.testing.assert_close(run(part(inputs)), part(plain(inputs)))
    step("after no_grad")
    on_both(lambda m: m.blocks[1].up.weight.requires_grad_(False))
    step("frozen")
    on_both(lambda m: m.blocks[1].up.weight.requires_grad_(True))
    step("thawed")
    on_both(lambda m: m.blocks[0].up.weight.data.mul_(2))
    step("edited")
    on_both(lambda m: m.load_state_dict({k: v * 1.5 for k, v in m.state_dict().items()}, assign=True))
    step("assigned")
    return found


@pytest.mark.slow
@by_how
def test_a_graph_is_compiled_again_only_where_gradients_are_switched(world2: World, how: str) -> None:
    found, other = world2.run(graphs_by_event, how, timeout=180)
    assert found == other
    assert not [event for event, _, wrong in found if wrong]
    assert [f"{event}: {count}" for event, count, _ in found] == [
        *("first: 1", "second: 1", "eager: 1", "compiled again: 1", "eval: 1", "train: 1"),
        *("after no_grad: 2", "frozen: 3", "thawed: 3", "edited: 3", "assigned: 3"),
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("dynamic", "graphs"), [(True, 1), (None, 2)])
@on_ranks(2, timeout=120)
def test_batches_may_differ_in_size(dynamic: bool | None, graphs: int) -> None:
    plain = built(Tower, seed=0)
    model = shard_tower(copy.deepcopy(plain))
    run = compiled(model, "function", dynamic=dynamic)
    for size in (8, 6, 4, 12):
        backward(plain, random_batch(0, size))
        backward(run, part(random_batch(0, size)))
    assert (num_graphs(), wrong_gradients(model, plain, 1e-10)) == (graphs, [])


# --- what a graph cannot do -----------------------------------------------------------------------


def quiet_then_loud(model: nn.Module, run: Callable[..., Any], inputs: Tensor) -> None:
    with shardwise.no_sync(model):
        backward(run, inputs)
    backward(run, inputs)


def after_quiet_eager(model: nn.Module, run: Callable[..., Any], inputs: Tensor) -> None:
    with shardwise.no_sync(model):
        backward(model, inputs)
    backward(run, inputs)


def in_inference(model: nn.Module, run: Callable[..., Any], inputs: Tensor) -> None:
    with shardwise.inference(model), torch.no_grad():
        run(inputs)


def while_unsharded(model: nn.Module, run: Callable[..., Any], inputs: Tensor) -> None:
    model.blocks[0].unshard()
    run(inputs)


def with_differing_ranks(model: nn.Module, run: Callable[..., Any], inputs: Tensor) -> None:
    model.set_reduce_scatter_unused_params(True)
    backward(run, inputs)


REMEDY = (
    " The graph of a whole model does not do that. Leave it out, or compile the sharded modules one by one "
    "(module.compile()), not the one around them: their hooks are then outside of their graphs, and do all that "
    "they do in eager runs."
)


def told(error: torch._dynamo.exc.Unsupported) -> str:
    """Without its last sentences, if those are the common ones."""
    said = next(line for line in str(error).split("\n") if "Message: " in line).partition("Message: ")[2]
    return said.replace(REMEDY, " [...]")


def refusal(act: Callable[..., None], compiled_before: bool) -> str:
    model = shard_tower(Tower().double())
    run = compiled(model, "function")
    inputs = part(random_batch(0, 4))
    if compiled_before:
        backward(run, inputs)
        model.zero_grad()
    try:
        act(model, run, inputs)
    except torch._dynamo.exc.Unsupported as error:
        return told(error)
    return "accepted"


WHILE_UNSHARDED = (
    "blocks.0.norm.weight: a graph is being compiled that unshards this parameter, but a full one stands where its "
    "shard should: inside unsharded(), after unshard(), or where a module calls itself. Leave the context, or call "
    "reshard(), before the first compiled forward."
)


@pytest.mark.parametrize("compiled_before", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_what_a_graph_cannot_do_is_refused(world2: World, compiled_before: bool) -> None:
    acts = [quiet_then_loud, after_quiet_eager, in_inference, with_differing_ranks]
    acts += [] if compiled_before else [while_unsharded]  # a graph that is there runs
    found = [alike(world2.run(refusal, act, compiled_before, timeout=120)) for act in acts]
    assert found[:4] == [
        "Tower: gradients are to stay unreduced (no_sync). [...]",
        "Tower: gradients of earlier backwards wait to be reduced together with these. [...]",
        "Tower: parameters stay unsharded inside inference(). [...]",
        "Tower: ranks were said to differ in what they use. [...]",
    ]
    assert found[4:] == ([] if compiled_before else [WHILE_UNSHARDED])


@by_how
@on_ranks(2, timeout=120)
def test_without_fullgraph_what_a_graph_cannot_do_is_done_by_the_hooks(how: str) -> None:
    plain = built(Tower, seed=0)
    model = shard_tower(copy.deepcopy(plain))
    run = compiled(model, how, fullgraph=False)
    for quiet, seed in ((True, 0), (True, 1), (False, 2), (False, 3)):
        inputs = random_batch(seed, 8)
        backward(plain, inputs)
        with shardwise.no_sync(model) if quiet else nullcontext():
            backward(run, part(inputs))
    assert wrong_gradients(model, plain, 1e-10) == []


def with_compiled_autograd(how: str) -> str | list[str]:
    plain = built(Tower, seed=0)
    model = shard_tower(copy.deepcopy(plain))
    run = compiled(model, how)
    inputs = random_batch(0, 8)
    backward(plain, inputs)
    loss = mean_of_squares(run, part(inputs))
    try:
        with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager")):
            loss.backward()
    except RuntimeError as error:
        return str(error)
    return wrong_gradients(model, plain, 1e-10)


@pytest.mark.slow
def test_compiled_autograd_takes_graphs_and_is_refused_where_hooks_have_work(world2: World) -> None:
    assert world2.run(with_compiled_autograd, "function", timeout=120) == [[], []]
    told, _ = world2.run(with_compiled_autograd, "module", timeout=120)
    assert_expected_inline(
        textwrap.fill(told, 100),
        """\
Tower: compiled autograd is on. It does not report the end of backward, so gradients would be lost.
Leave it off, or compile a function that calls the model (torch.compile(lambda x: model(x))), not
the model: its hooks are then in the graph, and none are left for autograd to run.""",
    )


# --- blocks that are compiled on their own --------------------------------------------------------


@on_ranks(2, timeout=120)
def test_blocks_that_are_compiled_gather_ahead_and_reduce_as_in_eager_runs() -> None:
    plain = built(Tower, seed=0)
    model = shard_tower(copy.deepcopy(plain))
    forget_graphs()
    inputs = random_batch(0, 8)
    events: list[list[str]] = []
    for compiles in (False, True):
        for block in model.blocks if compiles else ():
            block.compile(backend="aot_eager", fullgraph=True)
        for _ in range(3):
            events.append([])
            observe(model, lambda event, name: events[-1].append(f"{event} {name}"))
            plain.zero_grad()
            model.zero_grad()
            backward(plain, inputs)
            backward(model, part(inputs))
    eager = events[2]
    graphs = num_graphs()
    wrong = wrong_gradients(model, plain, 1e-10)
    assert events[-1] == eager
    assert "unshard blocks.1" in eager[: eager.index("forward blocks.0")]
    assert (graphs, wrong) == (1, [])  # the blocks share their code


# --- what forwards do with their arguments --------------------------------------------------------


class Collecting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor, losses: list[Tensor], seen: dict[str, Tensor]) -> Tensor:
        hidden = self.up(x)
        losses.append(hidden.pow(2).mean(dim=-1, keepdim=True))  # a row each: ranks have others
        seen[f"size {len(losses)}"] = hidden.abs().mean(dim=-1, keepdim=True)
        return x + self.down(torch.tanh(hidden))


class WithLosses(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Collecting() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        losses: list[Tensor] = []
        seen: dict[str, Tensor] = {}
        for block in self.blocks:
            x = block(x, losses, seen)
        return x + sum(losses) + sum(seen.values())


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@on_ranks(2, timeout=120)
def test_what_a_forward_adds_to_containers_that_it_was_given_is_there_afterwards(dtype: torch.dtype) -> None:
    precision = {"param_dtype": dtype, "cast_forward_inputs": True}
    graphs, unlike, wrong = compare_with_eager("function", WithLosses, precision=precision)
    assert (graphs, unlike, wrong) == (1, [], [])


# --- between whom ---------------------------------------------------------------------------------


@pytest.mark.slow
@by_how
@on_ranks(2)
def test_graphs_reduce_over_a_process_group_of_their_own_from_the_first_on(how: str) -> None:
    found: dict[str, set[str]] = {"all_gather_into_tensor": set(), "reduce_scatter_tensor": set()}

    def look(graph: Any, _inputs: Any) -> Any:
        for node in graph.graph.nodes:
            name = str(node.target).split(".")[-2:][0]
            if name in found:
                found[name].add(str(node.args[-1]))
        return make_boxed_func(graph.forward)

    model: Any = shard_tower(Tower())
    model.set_separate_reduce_scatter_group(True)
    run = compiled(model, how, aot_autograd(fw_compiler=look, bw_compiler=look))
    for each in (run, model, run):
        each(random_batch(0, 4).float()).sum().backward()
    gathers, reductions = map(sorted, found.values())
    assert (len(gathers), num_graphs()) == (1, 1)
    assert [name.startswith("shardwise_reduce") for name in reductions] == [True]
