"""Compiled models are known by the names they were written with: nothing here sees that they are compiled.

`FORMS` are the ways in which a model is compiled. Whatever takes a model or gives names is asked of each of
them, and gives what it gives of the model that is not compiled.
"""

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
from comparing import assert_equal
from dynamo import forget_graphs
from events import events_of
from harness import World
from models import Tower, random_batch
from on_ranks import on_ranks
from reference import full, mean_of_squares
from test_compile_model import num_graphs, part, wrong_gradients
from torch import Tensor, nn
from torch._dynamo.utils import counters

import shardwise
from shardwise import fully_shard, shard_model
from shardwise.comm.full_tensors import full_values
from shardwise.engine.module_state import sharded_module_states
from shardwise.optim import FlatOptimizer

FORMS = [
    "plain",
    "model.compile()",
    "torch.compile(model)",
    "block.compile()",
    "block.compile() before",
    "block = torch.compile(block)",
    "fully_shard(torch.compile(block))",
    "fully_shard(torch.compile(model))",
    "compiled twice",
]
COMPILED = FORMS[1:]
forms = pytest.mark.parametrize("form", COMPILED)


class NamedTower(Tower):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("offset", torch.randn(8))

    def forward(self, x: Tensor) -> Tensor:
        x = self.inlet(x) + self.offset
        for block in self.blocks:
            x = block(x)
        return self.outlet(x)


def compiled(module: nn.Module) -> Any:
    return torch.compile(module, backend="eager")


def sharded(form: str, model: nn.Module) -> Any:
    forget_graphs()
    for index, block in enumerate(model.blocks):
        if form == "fully_shard(torch.compile(block))":
            model.blocks[index] = block = compiled(block)
        if form == "block.compile() before":
            block.compile(backend="eager")
        fully_shard(block)
        if form in ("block = torch.compile(block)", "compiled twice"):
            model.blocks[index] = compiled(block)
        if form == "block.compile()":
            block.compile(backend="eager")
    if form == "fully_shard(torch.compile(model))":
        return fully_shard(compiled(model))
    fully_shard(model)
    if form == "model.compile()":
        model.compile(backend="eager")
    return compiled(model) if form in ("torch.compile(model)", "compiled twice") else model


def built(form: str, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return sharded(form, NamedTower().double())


def batch(step: int = 0) -> Tensor:
    return part(random_batch(step, 8))


def train(model: nn.Module, optimizer: Any = None, steps: int = 1) -> None:
    for step in range(steps):
        model.zero_grad()
        mean_of_squares(model, batch(step)).backward()
        if optimizer is not None:
            optimizer.step()


def adamw(model: nn.Module, is_flat: bool = False) -> Any:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    return FlatOptimizer(optimizer) if is_flat else optimizer


def everything(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    state, optimizer_state = shardwise.full_state_dict(model, optimizer, rank0_only=False)
    return {"model": state, **optimizer_state}


def assert_as_uncompiled(world: World, of: Callable[[str], Any], form: str) -> None:
    """`of` a compiled form finds the same as of the model that is not compiled."""
    for got, want in zip(world.run(of, form), world.run(of, "plain"), strict=True):
        assert_equal(got, want)


# --- the numbers ----------------------------------------------------------------------------------


def steps_of(form: str) -> dict[str, Any]:
    model = built(form)
    optimizer = adamw(model)
    train(model, optimizer, 3)
    return everything(model, optimizer)


@pytest.mark.sample(4)
@forms
def test_a_compiled_model_trains_as_the_same_model_uncompiled(world2: World, form: str) -> None:
    assert_as_uncompiled(world2, steps_of, form)


# --- checkpoints ----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("is_flat", [False, True], ids=["AdamW", "FlatOptimizer"])
@forms
@on_ranks(2)
def test_a_checkpoint_of_a_compiled_model_is_one_of_the_model(
    tmp_path: Path, form: str, is_flat: bool
) -> None:
    """From a compiled model into a plain one and back; each goes on as the one before."""
    path = Path(str(tmp_path))
    kept: dict[str, Any] = {}
    for index, (saving, loading) in enumerate([(form, "plain"), ("plain", form)]):
        one, other = built(saving, 1), built(loading, 2)
        own = [(model, adamw(model, is_flat), shardwise.state.EMA(model, 0.5)) for model in (one, other)]
        for model, optimizer, ema in own:
            train(model, optimizer, 2)
            ema.update()
        (one, optimizer, ema), (other, other_optimizer, other_ema) = own
        shardwise.save_checkpoint(path / str(index), one, optimizer, states={"ema": ema})
        loaded = shardwise.load_checkpoint(
            path / str(index), other, other_optimizer, states={"ema": other_ema}
        )
        assert (loaded.missing, loaded.unexpected) == ((), ())
        train(one, optimizer)
        train(other, other_optimizer)
        assert_equal(everything(other, other_optimizer), everything(one, optimizer))
        averages = [full_values(each.state_dict()["averages"], None, True) for each in (ema, other_ema)]
        assert_equal(averages[1], averages[0])
        kept.setdefault("names", list(averages[0]))
        assert kept["names"] == list(averages[0])
    assert not [name for name in kept["names"] if "_orig_mod" in name]


@pytest.mark.sample(3)
@forms
@on_ranks(2)
def test_full_states_have_the_names_of_the_model(tmp_path: Path, form: str) -> None:
    folder = str(tmp_path / "out")
    plain, model = built("plain", 1), built(form, 2)
    optimizers = adamw(plain), torch.optim.AdamW(list(model.named_parameters()), lr=0.05)
    train(plain, optimizers[0])
    train(model, optimizers[1])
    own, want = everything(model, optimizers[1]), everything(plain, optimizers[0])
    assert own.keys() == want.keys()
    assert list(own["model"]) == list(want["model"]) == list(NamedTower().state_dict())
    assert list(own["state"]) == list(want["state"])
    names = own["param_groups"][0].pop("param_names")
    assert names == own["param_groups"][0]["params"] == want["param_groups"][0]["params"]
    parameters = dict(shardwise.state.iter_full_parameters(model, names=["blocks.1.up.weight"]))
    assert_equal(parameters, {"blocks.1.up.weight": own["model"]["blocks.1.up.weight"]})

    rekeyed = shardwise.state.rekey_optimizer_state_dict(want, model, optimizers[1], "id")
    assert_equal(rekeyed["state"], dict(enumerate(want["state"].values())))
    shardwise.load_full_state_dict(model, want["model"], src_rank=None)
    shardwise.state.load_full_optimizer_state_dict(model, optimizers[1], want, src_rank=None)
    got = everything(model, optimizers[1])
    got["param_groups"][0].pop("param_names", None)
    assert_equal(got, want)

    # From a dict that torch has made of a compiled model, as from any other.
    torchs = {
        f"_orig_mod.{name}".replace("blocks.0", "blocks.0._orig_mod"): v for name, v in own["model"].items()
    }
    shardwise.load_full_state_dict(model, torchs, src_rank=None)
    assert_equal(shardwise.full_state_dict(model, rank0_only=False), own["model"])

    pytest.importorskip("safetensors")
    shardwise.state.save_safetensors(model, folder)
    shardwise.load_full_state_dict(plain, folder)
    assert_equal(shardwise.full_state_dict(plain, rank0_only=False), own["model"])


# --- what is told ---------------------------------------------------------------------------------


def told(act: Callable[[], Any]) -> str:
    try:
        return f"returned {act()!r}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def meta_messages(form: str) -> dict[str, str]:
    def fail(module: nn.Module) -> None:
        raise ValueError("no")

    def notes() -> str:
        try:
            shardwise.materialize(model, fail)
        except ValueError as error:
            return " ".join(error.__notes__)
        return "accepted"

    with torch.device("meta"):
        model = sharded(form, NamedTower().double())
    empty = Path("/nowhere")
    return {
        "forward on meta": told(lambda: model(batch())),
        "saved on meta": told(lambda: shardwise.full_state_dict(model)),
        "loaded in part": told(
            lambda: shardwise.load_full_state_dict(model, {}, src_rank=None, strict=False)
        ),
        "init fails": notes(),
        "init does nothing": told(lambda: shardwise.materialize(model, lambda module: None)),
        "no checkpoint": told(lambda: shardwise.load_checkpoint(empty, model)),
    }


def messages(form: str) -> dict[str, str]:
    model = built(form)
    inner = model._orig_mod if isinstance(model, torch._dynamo.OptimizedModule) else model
    block = inner.blocks[1]
    foreign = torch.optim.AdamW([nn.Parameter(torch.ones(3))])
    said = {
        "explain": shardwise.explain(model),
        "sharded twice": told(lambda: fully_shard(block)),
        "sharded inside": told(lambda: fully_shard(block.up)),
        "called outside": told(lambda: block.up(batch())),
        "a wrong shape": told(
            lambda: shardwise.load_full_state_dict(
                model, {"blocks.1.up.weight": torch.ones(2)}, src_rank=None, strict=False
            )
        ),
        "a name too many": told(lambda: shardwise.load_full_state_dict(model, {"x": batch()}, src_rank=None)),
        "foreign parameters": told(lambda: shardwise.full_state_dict(model, foreign)),
        "prefetch": told(lambda: model.set_modules_to_forward_prefetch([block.up])),
    }
    train(model)
    said["norms"] = str(list(shardwise.statistics(model, by="module")))
    next(block.up.parameters()).grad.fill_(float("nan"))
    said["not finite"] = told(lambda: shardwise.clip_grad_norm_(model, 1.0, error_if_nonfinite=True))
    events = events_of(model)
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        model(batch())
    said["events"] = ", ".join(sorted(set(events)))  # nothing is unsharded ahead the first time
    with shardwise.unsharded(model), torch.no_grad():
        said["forward in unsharded"] = told(lambda: model(batch()))
    block.up.extra = nn.Parameter(torch.ones(2))
    said["added"] = told(lambda: model(batch()))
    del block.up.extra
    block.up.bias = nn.Parameter(torch.ones(16))
    said["replaced"] = told(lambda: model(batch()))
    return said


CASES = [(of, form) for form in COMPILED for of in (messages, meta_messages)]


@pytest.mark.sample(8)
@pytest.mark.parametrize(("of", "form"), CASES)
def test_messages_and_tables_have_the_names_of_the_model(world2: World, of: Any, form: str) -> None:
    assert_as_uncompiled(world2, of, form)


# --- what may be done with a sharded module -------------------------------------------------------


class Encoding(Tower):
    def encode(self, x: Tensor) -> Tensor:
        return self.inlet(x)

    def forward(self, x: Tensor) -> Tensor:
        x = self.encode(x)
        for block in self.blocks:
            x = block(x)
        return self.outlet(x)


def use(form: str) -> dict[str, Any]:
    with torch.device("meta"):
        model = sharded(form, Encoding().double())
    torch.manual_seed(0)
    assert shardwise.materialize(model) is model
    blocks = list(model.blocks)
    groups = [module_state.group for module_state in sharded_module_states(model)]
    found: dict[str, Any] = {}

    model.set_requires_gradient_sync(False)
    found["setter"] = [group.settings.requires_gradient_sync for group in groups]
    model.set_requires_gradient_sync(True)
    blocks[1].set_reshard_after_backward(False)
    found["setter of a block"] = [group.settings.reshard_after_backward for group in groups]
    blocks[1].set_reshard_after_backward(True)
    model.set_modules_to_forward_prefetch(blocks[:2])
    blocks[0].set_modules_to_backward_prefetch([blocks[2]])
    found["prefetch"] = [
        [g.name for g in each]
        for each in (groups[0].settings.forward_prefetch, groups[1].settings.backward_prefetch)
    ]
    shardwise.share_comm_ctx([model])

    blocks[0].unshard().wait()
    found["unshard"] = tuple(blocks[0].up.weight.shape)
    blocks[0].reshard()
    for recurse in (True, False):
        with shardwise.unsharded(model, recurse=recurse):
            shown = dict(model.named_parameters())
            found[f"unsharded {recurse}"] = [type(param).__name__ for param in shown.values()]
    with shardwise.no_sync(model):
        train(model)
    mean_of_squares(model, batch(1)).backward()
    found["norm"] = shardwise.clip_grad_norm_(model, 0.1)
    found["gradients"] = [full(param.grad) for param in model.parameters()]
    with shardwise.inference(model):
        found["output"] = model(batch())
    shardwise.init.check_replicas(model)
    shardwise.init.sync_module_states(model)

    before, twin = model(batch()).detach().clone(), copy.deepcopy(model)
    with torch.no_grad():
        for param in twin.parameters():
            param.zero_()
    assert not twin(batch()).any()
    train(twin, adamw(twin))
    assert twin(batch()).any()
    assert torch.equal(model(batch()), before)

    shardwise.register_fsdp_forward_method(model, "encode")
    found["encoded"] = model.encode(batch())
    train(model)  # with a break in the graph
    found["by method"] = [full(param.grad) for param in model.parameters()]
    shardwise.strategies.register_comm_hook(
        model, None, shardwise.policies.LowPrecisionReduction(torch.bfloat16)
    )
    train(model)
    found["by hook"] = [full(param.grad) for param in model.parameters()]
    return found


@pytest.mark.slow
@forms
def test_what_may_be_done_with_a_model_may_be_done_with_a_compiled_one(world2: World, form: str) -> None:
    assert_as_uncompiled(world2, use, form)


# --- shard_model ----------------------------------------------------------------------------------

WRAPS: dict[str, Any] = {
    "repeated": None,
    "by class": {"wrap": {type(Tower().blocks[0])}},
    "by name": {"wrap": lambda name, module: name.startswith("blocks.") and name.count(".") == 1},
    "by size": {"wrap": shardwise.strategies.WrapBySize(200)},
    "recursively": {"wrap": lambda module, recurse, nonwrapped_numel: recurse or nonwrapped_numel > 200},
    "merged": {"bucket_cap_mb": 0.005},
    "overridden": {"overrides": {"blocks.1": "zero2", "": {"reshard_after_forward": True}}},
    "overridden by class": {"overrides": {type(Tower().blocks[0]): "zero2", Tower: "zero1"}},
    "ignored": {"ignored_modules": "blocks.1"},
}


def strategies(form: str) -> dict[str, str]:
    found = {}
    for name, options in WRAPS.items():
        forget_graphs()
        torch.manual_seed(0)
        model: Any = Tower().double()
        for index, block in enumerate(model.blocks):
            if "block" in form:
                model.blocks[index] = compiled(block)
        model = compiled(model) if "model" in form else model
        options = dict(options or {})
        if "ignored_modules" in options:
            options["ignored_modules"] = [model.blocks[1]]
        with warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", message="(?s)shard_model: the root's own group|.*ignored_params"
            )
            assert shard_model(model, **options) is model
        found[name] = shardwise.explain(model)
        # Graphs take seconds, and dynamo refuses to meet a module both without and with what torch.compile has
        # put around it, as it would in a group of several modules.
        has_graphs = name == "repeated" or (name == "merged" and form == "block")
        with torch.compiler.set_stance("default" if has_graphs else "force_eager"):
            train(model)
        found[f"{name}: gradients"] = [full(param.grad) for param in model.parameters()]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("form", ["block and model", "block", "model"])
def test_shard_model_chooses_by_names_and_classes_of_the_model(world2: World, form: str) -> None:
    assert_as_uncompiled(world2, strategies, form)


# --- graphs ---------------------------------------------------------------------------------------

NEEDS_LEN = pytest.mark.skipif(
    torch.__version__ < "2.13",
    reason="dynamo asks OptimizedModules of derived classes for a length; the peer's too",
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "breaks"),
    [("a sharded wrapper", 0), pytest.param("sharded wrappers in a function", 1, marks=NEEDS_LEN)],
)
@on_ranks(2, timeout=120)
def test_what_torch_compile_returned_may_be_sharded_itself(form: str, breaks: int) -> None:
    """As torch's `fully_shard` allows. Hooks are around the graph, which no other graph goes into.

    Wrappers of blocks by themselves: test_compile_blocks.py.
    """
    torch.manual_seed(0)
    plain = NamedTower().double()
    model: Any = copy.deepcopy(plain)
    forget_graphs()
    options = {"backend": "aot_eager", "fullgraph": True}
    for index, block in enumerate(model.blocks):
        if form != "a sharded wrapper":
            model.blocks[index] = block = torch.compile(block, **options)
        fully_shard(block)
    if form == "a sharded wrapper":
        model = torch.compile(model, **options)
    fully_shard(model)
    run: Any = model
    if form != "a sharded wrapper":
        run = torch.compile(lambda x: model(x), backend="aot_eager")
    for _ in range(2):
        plain.zero_grad()
        model.zero_grad()
        mean_of_squares(plain, random_batch(0, 8)).backward()
        mean_of_squares(run, batch()).backward()
    assert wrong_gradients(model, plain, 1e-10) == []
    assert (num_graphs(), len(counters["graph_break"])) == (1, breaks)
