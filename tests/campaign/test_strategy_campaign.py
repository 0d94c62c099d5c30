"""Random use of what `shard_model` offers: any strategy, mixture or context trains as plain PyTorch does.

A draw is a dict of plain values: the ranks, the model, how it is sharded, and a script of steps with what
happens between them. It is run on a world first, which answers with what it noted and with what only a sharded
model knows (which parameters a context showed), then in this process with those answers; the notes must agree.

    STRATEGY_DRAW="{...}" pytest -m slow -s tests/campaign/test_strategy_campaign.py
    STRATEGY_SEED=5000 STRATEGY_DRAWS=400 pytest -m slow -s tests/campaign/test_strategy_campaign.py
"""

import copy
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from meshed import device_mesh
from models import Block, built, random_batch
from reference import full
from scenario import one_thread
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from campaign.blocks import (
    EXACT,
    HAVE_LIN,
    KINDS,
    NEAR,
    PRECISIONS,
    SIZES,
    Failure,
    Net,
    chosen_placement,
    names,
)
from campaign.campaign import Campaign, Worlds
from campaign.draws import Draw, choice, completed, many, one_of, rarely, record, with_one_again
from campaign.notes import Mismatch, Notes, difference
from campaign.training import Run, emptying_buffers
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
    shard_model,
    statistics,
    unsharded,
)
from shardwise.engine.module_state import sharded_module_states
from shardwise.observe import memory_snapshot
from shardwise.strategies import WrapBySize, register_comm_hook
from shardwise.strategies.wrap_policies import as_policy, chosen

# --- models ---------------------------------------------------------------------------------------


class Stage(nn.Module):
    """Blocks in a block, and a parameter beside them."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(width, hidden) for _ in range(2))
        self.gain = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x) * self.gain
        return x


class Detached(nn.Module):
    """Reads its weight once without a gradient for it: of that use no gradient tells when it is over."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width) / width)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(x @ self.weight.detach()) @ self.weight


class Adapted(nn.Module):
    """A frozen weight in bfloat16 and one in float32, beside what is trained."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.base = nn.Parameter(torch.randn(width, width).bfloat16(), requires_grad=False)
        self.table = nn.Parameter(torch.randn(3, width, dtype=torch.float32), requires_grad=False)
        self.down, self.up = nn.Linear(width, 2, bias=False), nn.Linear(2, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.base.to(x.dtype) / 3 + self.up(self.down(x)) + self.table[1].to(x.dtype))

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Any:
        """Keeps its dtypes under `double()`."""
        dtypes = {name: param.dtype for name, param in self._parameters.items() if param is not None}
        super()._apply(fn, recurse)
        for name, dtype in dtypes.items():
            param = self._parameters[name]
            assert param is not None
            if type(param) is nn.Parameter and not param.is_meta:
                param.data = param.data.to(dtype)
        return self


class Single(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.inner(x.float())).to(x.dtype)


class Sparse(nn.Module):
    """Leaves out one of its layers, another one in every other forward, on all ranks alike."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.choices = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.turn = 0

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.choices[self.turn % 2](x))


ALL_KINDS: dict[str, Callable[[int, int], nn.Module]] = {
    **KINDS,
    **{"stage": Stage, "detached": Detached, "adapted": Adapted, "single": Single, "sparse": Sparse},
}
EXACT_KINDS = [kind for kind in ALL_KINDS if kind != "single"]


# --- sharding -------------------------------------------------------------------------------------

FLAT, HYBRID = ("zero3", "ddp", "zero1", "zero2"), ("hybrid", "hybrid_zero2")
WITHIN_HOSTS = "zero3_hpz"  # on the mesh of the hybrid ones, but ties are over one mesh
LEAVES = (nn.Linear, nn.LayerNorm, nn.GroupNorm, nn.Conv2d, nn.Embedding, nn.GRU)


def mesh_for(draw: Draw, strategy: str) -> DeviceMesh:
    world = draw["world"]
    if strategy in FLAT:
        return device_mesh((world,), ("data",))
    hosts = draw["hosts"] if world % draw["hosts"] == 0 else 1
    return device_mesh((hosts, world // hosts), ("replicate", "shard"))


def is_even_block(name: str, module: nn.Module) -> bool:
    stem, _, index = name.rpartition(".")
    return stem == "blocks" and int(index) % 2 == 0


def is_layer(module: nn.Module) -> bool:
    return isinstance(module, (*LEAVES, Stage))


def above(module: nn.Module, recurse: bool, nonwrapped_numel: int, limit: int) -> bool:
    return recurse or nonwrapped_numel >= limit


class EveryBlock:
    def choose(self, model: nn.Module, ignored: set[int]) -> list[nn.Module]:
        return [block for block in model.blocks if any(id(p) not in ignored for p in block.parameters())]


def wrap_of(draw: Draw) -> Any:
    return {
        "repeated": None,
        "blocks": EveryBlock(),
        "linears": nn.Linear,
        "leaves": set(LEAVES),
        "classes": [Block, Stage, nn.Linear],
        "size": WrapBySize(25),
        "large": WrapBySize(200),
        "even": is_even_block,
        "layers": is_layer,
        "recursive": partial(above, limit=40),
    }[draw["wrap"]]


def precision_of(name: str | None) -> MixedPrecisionPolicy:
    return MixedPrecisionPolicy(**PRECISIONS[name][0])


def comm_policy_of(draw: Draw) -> CommPolicy:
    return CommPolicy(
        packing_limit_bytes=draw["packing"],
        prefetch=draw["prefetch"],
        backward_prefetch=draw["backward_prefetch"],
        max_prefetched=draw["max_prefetched"],
        part_bytes=draw["parts"],
    )


def shard(model: Net, draw: Draw) -> None:
    options: dict[str, Any] = {
        "mp_policy": precision_of(draw["precision"]),
        "offload_policy": CPUOffloadPolicy() if draw["offload"] else None,
        "comm_policy": comm_policy_of(draw),
    }
    if draw["placement"]:
        options["shard_placement_fn"] = partial(chosen_placement, draw["salt"], None)
    if draw["inner"] is not None:
        block = model.blocks[0]
        layers = [module for module in block.modules() if isinstance(module, LEAVES)]
        inner = block if draw["inner"] == "block" or not layers else layers[0]
        mesh = mesh_for(draw, "zero3")
        fully_shard(inner, mesh=mesh, mp_policy=options["mp_policy"], comm_policy=options["comm_policy"])
    ignored = ignored_of(model, draw)
    params = {param for module in ignored for param in module.parameters()}
    by_module = draw["ignored"] != "params"
    wrap = wrap_of(draw)
    try:
        overrides = overrides_of(model, draw, wrap, {id(param) for param in params})
    except ValueError as error:
        if "chose no module" not in str(error):
            raise
        wrap, overrides = None, {}
    if draw["mesh"]:
        options["mesh"] = mesh_for(draw, draw["strategy"])
    hosts = draw["hosts"] if draw["world"] % draw["hosts"] == 0 else 1
    with mock.patch.dict(os.environ, LOCAL_WORLD_SIZE=str(draw["world"] // hosts)), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*ignored_params")
        warnings.filterwarnings("ignore", message=".*own group keeps")
        shard_model(
            model,
            strategy=draw["strategy"],
            wrap=wrap,
            overrides=overrides,
            bucket_cap_mb=draw["bucket"],
            ignored_modules=ignored if by_module else None,
            ignored_params=None if by_module else params,
            **options,
        )
    if draw["ignored"]:
        model.set_reduce_ignored_params(True)
    assert explain(model).count("\n") >= len(memory_snapshot(model).groups)


def ignored_of(model: Net, draw: Draw) -> list[nn.Module]:
    if draw["ignored"] is None:
        return []
    return [model.blocks[-1] if draw["ignored"] == "block" else model.outlet]


def overrides_of(model: Net, draw: Draw, wrap: Any, ignored: set[int]) -> dict[Any, Any]:
    """Each for one of the modules that become groups, or all of a class; the root is among them."""
    ids = ignored | {id(p) for m in model.modules() if isinstance(m, FSDPModule) for p in m.parameters()}
    blocks = [m for m in chosen(as_policy(wrap), model, ids) if not isinstance(m, FSDPModule)]
    left_alone = {inner for module in ignored_of(model, draw) for inner in module.modules()}
    modules: list[nn.Module] = [m for m in blocks if m not in left_alone]
    known = {module: name for name, module in model.named_modules()}
    found: dict[Any, Any] = {}
    for each in draw["overrides"]:
        module = [model, *modules][each["target"] % (len(modules) + 1)]
        change: dict[str, Any] = {}
        if each["strategy"] is not None:
            change |= {"strategy": each["strategy"], "mesh": mesh_for(draw, each["strategy"])}
        if each["reshard"] is not None:
            change["reshard_after_forward"] = each["reshard"]
        if each["precision"] is not None:
            change["mp_policy"] = precision_of(each["precision"])
        if each["comm"]:
            change["comm_policy"] = CommPolicy(packing_limit_bytes=0, prefetch=2, backward_prefetch="after")
        key: Any = known[module]
        if each["by"] == "class":
            key = type(module)
        elif each["by"] == "pattern":
            key = known[module].rpartition(".")[0] + "*"
        found[key] = change
    return found


def mean_of_ranks(pgs: dict[int, Any], grad: Tensor, output: Tensor | None = None) -> None:
    """A hook for FSDP1 that averages exactly; `pgs`: the process group of so many shards."""
    if output is None:
        dist.all_reduce(grad)
        grad.div_(dist.get_world_size())
        return
    if output.numel() == 0:
        return
    world = grad.numel() // output.numel()
    if world == 1:
        output.copy_(grad)
        return
    total = grad.clone()
    dist.all_reduce(total, group=pgs[world])
    rank = dist.get_rank(pgs[world])
    output.copy_(total.chunk(world)[rank] / world)


# --- draws ----------------------------------------------------------------------------------------

OVERRIDE = record(
    {
        "target": choice(*range(6)),
        "by": choice("name", "name", "class", "pattern"),
        "strategy": choice(None, *FLAT, *HYBRID, WITHIN_HOSTS),
        "reshard": choice(None, None, None, True, False),
        "precision": choice(None, None, None, None, "same"),
        "comm": choice(False, False, True),
    }
)
EDITS = names("scale data assign replace freeze load grads")
ACTION = one_of(
    {
        "unsharded": record(
            {
                "where": choice("root", "block", "blocks"),
                "target": choice(0, 1, 2),
                "recurse": choice(True, True, False),
                "writeback": choice(True, True, False),
                "rank0": choice(False, False, True),
                "host": choice(False, False, True),
                "grads": choice(False, True),
                "edit": choice(None, *EDITS),
                "fails": rarely(4),
            }
        ),
        "inference": record(
            {
                "budget": choice(None, 0, 300, 1000, 4000),
                "counts": choice((1, 1, 1, 1), (2, 0, 1, 3), (0, 2, 0, 0), (3, 2, 2, 1), (0, 0, 0, 1)),
                "fails": choice(None, None, "body", "forward"),
                "who": choice(0, 1, 2, 3, "all"),
                "place": choice(0, 1, 2),
                "warm": choice(False, True),
            }
        ),
        "no_sync_fails": record({}),
        "eval": record({"where": choice("root", "block"), "target": choice(0, 1, 2)}),
        "state": record({"form": choice("full", "sharded", "dcp_full", "dcp_sharded")}),
        "deepcopy": record({}),
        "fail": record({"where": choice("forward", "backward"), "place": choice(0, 1, 2)}),
        "unshard": record(
            {"waits": choice(False, True), "edits": choice(False, True), "target": choice(0, 1, 2)}
        ),
        "edit": record({"how": choice("scale", "data")}),
        "optimizer_state": record({}),
        "unfreeze": record({}),
    },
    weights={"unsharded": 5, "inference": 4, "eval": 2, "state": 2},
)
MICRO = record(
    {
        "before": many(ACTION, least=0, most=1),
        "kind": choice(*names("plain plain plain both crossed eval_between fails_first retain")),
        "sync": choice("yes", "no_sync", "no_sync", "part", "nested"),
        "raises": rarely(4),
    }
)
STEP = record(
    {
        "micro": many(MICRO, least=1, most=3),
        "before": many(ACTION, least=0, most=2),
        "after": many(ACTION, least=0, most=1),
        "zero": choice("none", "zeros", "model", "keep"),
        "clip": choice(None, None, 2.0, 1.0, float("inf"), 3.0, 0.5, 7.5),
        "limit": choice(0.05, 5.0),
        "foreach": choice(None, True, False),
        "norms": rarely(3),
    }
)
DRAWS = record(
    {
        "steps": many(STEP, least=1, most=4),
        "overrides": many(OVERRIDE, least=0, most=3),
        "blocks": with_one_again(many(choice(*EXACT_KINDS * 10, "single"), least=1, most=4)),
        "world": choice(2, 2, 1, 3, 4, 4),
        "strategy": choice(*FLAT, *HYBRID, WITHIN_HOSTS),
        "hosts": choice(1, 2, 4, 3),
        "mesh": choice(*(True,) * 12, False),
        "sizes": choice(*SIZES),
        "order": choice("once", "once", "again", "twice", "doubled", "reversed"),
        "checkpoint": choice(None, None, "reentrant", "non_reentrant"),
        "tie": choice(None, None, None, "ends", "root_block", "blocks"),
        "wrap": choice(
            *("repeated", "blocks"), *names("blocks linears leaves classes size large even layers recursive")
        ),
        "bucket": choice(None, None, None, 0.0005, 0.002, 1.0),
        "precision": choice(None, None, None, None, None, "same", "kept", "norms_alone", "float32"),
        "placement": rarely(4),
        "offload": rarely(4),
        "packing": choice(None, 0, 100, 1 << 30),
        "parts": choice(None, 0, 100),
        "prefetch": choice(1, 0, 2, 3),
        "backward_prefetch": choice("before", "after", "after", None),
        "max_prefetched": choice(None, None, 1, 2),
        "unused": choice(None, None, None, 0, 1, 2),
        "ignored": choice(*(None,) * 8, "params", "module", "block"),
        "inner": choice(*(None,) * 8, "block", "child"),
        "hook": choice(None, None, None, 0, 1),
        "empties_buffers": choice(True, False),
        "optimizer": choice("sgd", "momentum", "adamw"),
        "salt": choice(*range(8)),
    }
)


def exactness_of(draw: Draw) -> Mismatch:
    used = {draw["precision"], *(each["precision"] for each in draw["overrides"])}
    is_exact = all(PRECISIONS[name][1] == EXACT for name in used) and "single" not in draw["blocks"]
    return EXACT if is_exact else NEAR


def settled(draw: Draw) -> Draw:
    """The nearest draw that plain PyTorch can run and that the documentation allows."""
    draw = copy.deepcopy(draw)
    if "single" in draw["blocks"]:  # which computes in float32 whatever the policy says
        draw["precision"] = None
        draw["overrides"] = [{**each, "precision": None} for each in draw["overrides"]]
    if draw["ignored"] is not None:
        draw["precision"] = None if draw["precision"] == "float32" else draw["precision"]
    if draw["precision"] == "float32":
        swap = ("lookup", "gru", "adapted", "detached")
        draw["blocks"] = ["plain" if kind in swap else kind for kind in draw["blocks"]]
        draw["overrides"] = [{**each, "precision": None} for each in draw["overrides"]]
    if exactness_of(draw) != EXACT:
        draw["optimizer"] = "sgd"
        draw["blocks"] = ["plain" if kind == "lookup" else kind for kind in draw["blocks"]]
    with_lin = [kind for kind in draw["blocks"] if kind in HAVE_LIN]
    if len(with_lin) < {"root_block": 1, "blocks": 2}.get(draw["tie"], 0):
        draw["tie"] = None
    if draw["ignored"] in ("params", "module", "block") and draw["tie"] is not None:
        draw["tie"] = None
    if draw["ignored"] == "block" and draw["inner"] is not None:
        draw["inner"] = None
    if draw["blocks"][0] == "bare":
        draw["inner"] = None
    if draw["inner"] is not None:
        draw["tie"] = None
        if "twice" in draw["blocks"] or draw["blocks"][0] in ("attention", "stage"):
            draw["inner"] = None
    has_params = [kind != "bare" for kind in draw["blocks"]]
    if draw["ignored"] == "block":
        has_params[-1] = False
    if draw["inner"] is not None:
        has_params[0] = False
    if (draw["wrap"] == "blocks" and not any(has_params)) or (
        draw["wrap"] == "even" and not any(has_params[::2])
    ):
        draw["wrap"] = "repeated"
    if draw["unused"] is not None and (draw["unused"] >= len(draw["blocks"]) or len(draw["blocks"]) < 2):
        draw["unused"] = None
    if is_tied(draw):  # ties stay on one mesh
        family = next((f for f in (FLAT, HYBRID) if draw["strategy"] in f), (WITHIN_HOSTS,))
        for each in draw["overrides"]:
            if not (draw["mesh"] and each["strategy"] in family):
                each["strategy"] = None
    for step in draw["steps"]:
        if step["clip"] == float("inf") and "knobs" in draw["blocks"]:
            step["clip"] = 2.0  # torch has no largest value of an empty gradient
        step["micro"][-1]["sync"] = "yes"
        deferred = False  # gradients wait: with_grads and hooks are refused
        for micro in step["micro"]:
            if deferred and keeps_groups(draw):  # between microbatches an edit of what is kept is refused
                micro["before"] = [each for each in micro["before"] if each["kind"] != "edit"]
            for each in micro["before"]:
                _settle_action(each, deferred)
            if micro["kind"] == "retain" and draw["checkpoint"] is not None:
                micro["kind"] = "plain"
            deferred = deferred or micro["sync"] != "yes"
        for each in [*step["before"], *step["after"]]:
            _settle_action(each, False)
    return draw if os.environ.get("STRATEGY_EVERYTHING") else _without_what_is_known(draw)


def _without_what_is_known(draw: Draw) -> Draw:
    """Leaves out what is known to fail; STRATEGY_EVERYTHING=1 draws it as well."""
    if is_tied(draw) and draw["strategy"] in FLAT:
        # A tie between a replicated and a sharded group of one mesh fails while the model is half sharded.
        for each in draw["overrides"]:
            if "ddp" in (each["strategy"], draw["strategy"]):
                each["strategy"] = None
        if "ddp" in {each["strategy"] for each in draw["overrides"]}:
            draw["overrides"] = []
    if draw["backward_prefetch"] == "after" or any(each["comm"] for each in draw["overrides"]):
        # It frees a group with its last gradient: a detached use may be left, or a call to be recomputed.
        draw["blocks"] = ["plain" if kind == "detached" else kind for kind in draw["blocks"]]
        if draw["checkpoint"] == "reentrant":
            draw["checkpoint"] = "non_reentrant"
    for action in actions_of(draw):
        if action["kind"] == "inference":
            # A first forward that fails on some ranks is played in the order of calls, not of unshards; and
            # ranks that run different numbers keep different orders, by which they prefetch afterwards.
            action["warm"] = True
        if action["kind"] == "unshard":
            # An all-gather on its way reads shards that are changed and changed back, and nothing tells.
            action["waits"] = True
    return draw


def keeps_groups(draw: Draw) -> bool:
    strategies = [draw["strategy"], *(each["strategy"] for each in draw["overrides"])]
    is_kept = any(name is not None and name.endswith(("zero1", "zero2", "hpz")) for name in strategies)
    return is_kept or any(each["reshard"] is False for each in draw["overrides"])


def is_tied(draw: Draw) -> bool:
    return draw["tie"] is not None or "twice" in draw["blocks"]


def actions_of(draw: Draw) -> Iterator[Draw]:
    for step in draw["steps"]:
        for actions in (step["before"], *(micro["before"] for micro in step["micro"]), step["after"]):
            yield from actions


def _settle_action(action: Draw, deferred: bool) -> None:
    if action["kind"] != "unsharded":
        return
    if action["rank0"]:
        action["writeback"] = False
    if deferred:
        action["grads"] = False
    if action["edit"] == "grads" and not action["grads"]:
        action["edit"] = "scale"
    if action["edit"] == "replace" and action["grads"]:
        action["edit"] = "assign"  # a new parameter has no gradient
    if action["rank0"] and action["edit"] is not None:
        action["edit"] = "scale"


# --- running --------------------------------------------------------------------------------------


class StrategyRun(Run):
    """Sharded, which finds answers, or plainly with the answers of the ranks."""

    def __init__(self, draw: Draw, answers: list[Any] | None) -> None:
        is_sharded = answers is None
        super().__init__(draw, is_sharded, *((dist.get_rank(), draw["world"]) if is_sharded else (0, 1)))
        self.answers: list[Any] = list(answers or [])
        model = built(Net, draw, ALL_KINDS)
        for module in model.modules():
            if isinstance(module, Single):
                module.inner.float()
        self.model = model
        self.ignored = {id(p) for m in ignored_of(model, draw) for p in m.parameters()}
        if self.is_sharded:
            shard(self.model, draw)
        else:
            self.model.checkpoint = None  # recomputing changes no number
        self.optimizer = self.make_optimizer()

    def answer(self, find: Callable[[], Any]) -> Any:
        """What the sharded run finds; the plain run is told."""
        if not self.is_sharded:
            return self.answers.pop(0)
        self.answers.append(find())
        return self.answers[-1]

    # --- the script ---

    def run(self) -> tuple[Notes, list[Any]]:
        self.run_steps()
        return self.notes, self.answers

    def act_before(self, number: int, step: Draw) -> None:
        if self.draw["hook"] == number:
            self.register_hook()
        self.act(step["before"], f"step {number}, before")

    def register_hook(self) -> None:
        if not self.is_sharded:
            return
        pgs = {self.draw["world"]: dist.group.WORLD}
        hybrid = mesh_for(self.draw, "hybrid")
        if hybrid.size(1) > 1:
            pgs[hybrid.size(1)] = hybrid.get_group("shard")
        register_comm_hook(self.model, pgs, mean_of_ranks)

    def train(self, number: int, step: Draw) -> None:
        self.zero_gradients(step["zero"])
        for index, micro in enumerate(step["micro"]):
            self.act(micro["before"], f"step {number}, before microbatch {index}")
            self.place = f"step {number}, microbatch {index}"
            for module in self.model.modules():
                if isinstance(module, Sparse):
                    module.turn += 1
            with suppress(Failure), self.syncing(micro["sync"]):
                getattr(self, f"micro_{micro['kind']}")()
                if micro["raises"]:
                    raise Failure
        self.fill_zeros()
        self.place = f"step {number}"
        self.note_gradients()
        self.act(step["after"], f"step {number}, after backward")
        self.place = f"step {number}"
        if step["norms"]:
            self.note_statistics()
        if step["clip"] is not None:
            self.clip(step)
        self.note_gradients()
        self.optimizer.step()
        self.note_parameters(self.model)
        self.assert_settled()

    @contextmanager
    def syncing(self, how: str) -> Iterator[None]:
        with ExitStack() as stack:
            if self.is_sharded and how != "yes":
                part = (
                    self.model.blocks
                    if how == "part" and sharded_module_states(self.model.blocks)
                    else self.model
                )
                stack.enter_context(no_sync(part))
                if how == "nested":
                    with no_sync(self.model):
                        pass
            yield

    def fill_zeros(self) -> None:
        """What averaging the gradients of ignored parameters gives those that have none."""
        for param in self.model.parameters():
            if id(param) in self.ignored and param.requires_grad and param.grad is None:
                param.grad = torch.zeros_like(param)

    def clip(self, step: Draw) -> None:
        if self.is_sharded:
            what = self.model if step["foreach"] is None else list(self.model.parameters())
            norm = clip_grad_norm_(what, step["limit"], step["clip"], foreach=step["foreach"])
        else:
            norm = nn.utils.clip_grad_norm_(
                self.model.parameters(), step["limit"], step["clip"], foreach=False
            )
        self.note("logarithm of the norm", norm.double().log1p())  # of any size

    def note_statistics(self) -> None:
        if self.is_sharded:
            modules = statistics(self.model, of="gradients", by="module")
            found = {name: each.norm for name, each in modules.items()}
        else:
            found = {}
            for name, module in self.model.named_modules():
                if any(p.requires_grad or p.grad is not None for p in module.parameters()):
                    gradients = [p.grad.double().flatten() for p in module.parameters() if p.grad is not None]
                    flat = torch.cat(gradients) if gradients else torch.zeros(0)
                    found[name] = torch.linalg.vector_norm(flat).item() if flat.numel() else 0.0
        self.note("modules with norms", list(found))
        self.note("their logarithms", torch.tensor(list(found.values()), dtype=torch.float64).log1p())

    # --- microbatches ---

    def loss(self) -> Tensor:
        x = self.batch()
        loss = (self.model(x) - x).pow(2).mean()
        self.note("loss", loss.double(), "mean")
        return loss

    def micro_fails_first(self) -> None:
        self.do_fail({"where": "forward", "place": 1})
        self.loss().backward()

    # --- between ---

    def act(self, actions: list[Draw], where: str) -> None:
        for action in actions:
            self.place = f"{where}: {action['kind']}"
            is_whole = action["kind"] not in ("deepcopy", "fail", "optimizer_state") or where.endswith(
                "before"
            )
            if is_whole:  # the others lose gradients
                getattr(self, f"do_{action['kind']}")(action)

    def module_for(self, action: Draw) -> nn.Module:
        if action["where"] == "root":
            return self.model
        if action["where"] == "blocks":
            return self.model.blocks
        return self.model.blocks[action["target"] % len(self.model.blocks)]

    def do_unsharded(self, action: Draw) -> None:
        module = self.module_for(action)
        options = {
            "recurse": action["recurse"],
            "writeback": action["writeback"],
            "rank0_only": action["rank0"],
            "offload_to_cpu": action["host"],
            "with_grads": action["grads"],
        }
        is_possible = self.answer(
            lambda: (
                bool(sharded_module_states(module)) and (action["recurse"] or isinstance(module, FSDPModule))
            )
        )
        if not is_possible:
            return
        before = dict(self.model.named_parameters(remove_duplicate=False))
        is_shown = not action["rank0"] or self.index == 0
        gradients = {name: full(param.grad) for name, param in before.items()} if action["grads"] else {}
        with suppress(Failure), unsharded(module, **options) if self.is_sharded else nullcontext():
            inside = dict(self.model.named_parameters(remove_duplicate=False))
            lent = [
                name for name, param in inside.items() if not self.is_sharded or param is not before[name]
            ]
            if action["rank0"]:  # others see nothing: rank 0 tells
                lent = self.answer(lambda: told_by_first(lent))
            else:
                lent = self.answer(lambda: lent)
            kind = "first" if action["rank0"] else "same"
            for name in lent:
                self.note(f"inside, {name}", inside[name] if is_shown else None, kind)
                self.note(f"inside, {name} trains", inside[name].requires_grad)
                if action["grads"]:
                    gradient = inside[name].grad if self.is_sharded else gradients[name]
                    self.note(f"inside, gradient of {name}", gradient if is_shown else None, kind)
            self.note("inside, state", sorted(self.model.state_dict()))
            if is_shown and action["edit"] is not None and (self.is_sharded or action["writeback"]):
                self.edit(lent, action)
            if action["fails"]:
                raise Failure
        self.assert_lent_back(before)

    def assert_lent_back(self, before: dict[str, nn.Parameter]) -> None:
        if self.is_sharded:
            after = dict(self.model.named_parameters(remove_duplicate=False))
            assert all(after[name] is param for name, param in before.items()), "other parameters than before"

    def edit(self, lent: list[str], action: Draw) -> None:
        how = action["edit"]
        inside = dict(self.model.named_parameters(remove_duplicate=False))
        params = list(dict.fromkeys(inside[name] for name in lent))
        if how == "load":
            state = {name: inside[name].detach().clone() for name in lent}
            with torch.no_grad():
                for value in state.values():
                    if value.is_floating_point():
                        value.mul_(0.75)
            self.model.load_state_dict(state, strict=False)
            return
        for param in params:
            if how == "freeze" and param.is_floating_point():
                if any(inside[name] is param and name.startswith("blocks.") for name in lent):
                    param.requires_grad_(False)
            elif how == "grads":
                if param.grad is not None:
                    param.grad = None if param.numel() % 3 == 0 else param.grad * 0.5
            elif how == "replace":
                self.replace(param, inside, lent)
            elif not param.is_floating_point():
                continue
            elif how == "scale":
                with torch.no_grad():
                    param.mul_(0.9)
            elif how == "data":
                param.data.mul_(0.9)
            elif how == "assign":
                param.data = param.data * 0.9

    def replace(self, param: nn.Parameter, inside: dict[str, nn.Parameter], lent: list[str]) -> None:
        if not param.is_floating_point():
            return
        new = nn.Parameter(param.detach() * 0.9, requires_grad=param.requires_grad)
        if not self.is_sharded:  # where objects stay the same
            param.data = new.data
            param.grad = param.grad
            return
        for name in lent:
            if inside[name] is param:
                stem, _, own = name.rpartition(".")
                setattr(self.model.get_submodule(stem), own, new)

    def do_inference(self, action: Draw) -> None:
        """Ranks run different numbers of forwards, on the same input."""
        who = range(self.draw["world"]) if action["who"] == "all" else [action["who"]]
        counts = action["counts"][: self.draw["world"]]
        width = SIZES[self.draw["sizes"]][0]
        mine = self.index in who or not self.is_sharded
        outputs: list[Tensor | None] = []
        count = counts[self.index] if self.is_sharded else max(counts)
        context = inference(self.model, budget_bytes=action["budget"]) if self.is_sharded else torch.no_grad()
        was_training = self.model.training
        with suppress(Failure), context:
            if action["warm"]:
                self.note("output on all ranks", self.model(random_batch(999, 3, width)).double())
            for index in range(count):
                x = random_batch(1000 + index, 3, width)
                if self.is_sharded and action["fails"] == "forward" and mine and index == count - 1:
                    self.model.fails_at = action["place"] % (len(self.model.order) + 1)
                    with pytest.raises(Failure):
                        self.model(x)
                    self.model.fails_at = None
                    if action["place"] % 2:
                        raise Failure
                outputs.append(self.model(x))
            if self.is_sharded and action["fails"] == "body" and mine:
                raise Failure
        assert self.model.training == was_training
        for index in range(max(counts)):
            value = outputs[index].double() if index < len(outputs) else None
            self.note(f"output {index}", value, "some")
        for found in memory_snapshot(self.model).groups if self.is_sharded else ():
            assert found.state == "sharded", f"{found.name} is {found.state}"

    def do_no_sync_fails(self, action: Draw) -> None:
        with suppress(Failure), no_sync(self.model) if self.is_sharded else nullcontext():
            self.model.fails_at = 0
            self.model(self.batch())
        self.model.fails_at = None
        if self.is_sharded:
            assert all(
                module_state.group.settings.requires_gradient_sync
                for module_state in sharded_module_states(self.model)
            )

    def do_eval(self, action: Draw) -> None:
        module = self.module_for(action)
        if action["where"] == "block" and not self.answer(lambda: self.may_run_alone(module)):
            return
        self.evaluate(module)

    def may_run_alone(self, block: nn.Module) -> bool:
        return isinstance(block, FSDPModule) and self.draw["tie"] not in ("root_block", "blocks")

    def do_state(self, action: Draw) -> None:
        form = action["form"]
        if form.startswith("dcp") and not self.draw["ignored"]:
            options = StateDictOptions(full_state_dict=form == "dcp_full")
            self.through_dcp(options)
        else:
            self.through_state(full_values=form == "full")

    def do_deepcopy(self, action: Draw) -> None:
        ignored = [p for p in self.model.parameters() if id(p) in self.ignored]
        memo: dict[int, Any] = {}
        self.model = copy.deepcopy(self.model, memo)
        self.ignored = {id(memo[id(p)]) for p in ignored}
        self.optimizer = self.make_optimizer()

    def do_fail(self, action: Draw) -> None:
        """A forward fails, or a backward, after which all gradients are thrown away."""
        if action["where"] == "forward":
            self.fail_forward(action["place"] % (len(self.model.order) + 1))
            return
        block = self.model.blocks[action["place"] % len(self.model.blocks)]
        self.fail_in_backward(block)

    def do_unshard(self, action: Draw) -> None:
        block = self.model.blocks[action["target"] % len(self.model.blocks)]
        for module in (self.model, block) if self.is_sharded else ():
            if isinstance(module, FSDPModule):
                module.unshard(async_op=not action["waits"])
        if action["edits"]:
            self.scale(0.9)

    def do_edit(self, action: Draw) -> None:
        self.scale(0.9, through_data=action["how"] == "data")

    def do_optimizer_state(self, action: Draw) -> None:
        self.reload_optimizer()

    def do_unfreeze(self, action: Draw) -> None:
        for name, param in self.model.named_parameters():
            # Ignored parameters are averaged if they were trainable when the model was sharded.
            if param.dtype == torch.float64 and name.startswith("blocks.") and id(param) not in self.ignored:
                param.requires_grad_(True)

    # --- checking ---

    def assert_settled(self) -> None:
        """Nothing is left unreduced or shadowed, nor unsharded but where that was asked for."""
        if not self.is_sharded:
            return
        for module_state, found in zip(
            sharded_module_states(self.model), memory_snapshot(self.model).groups, strict=True
        ):
            group = module_state.group
            if found.reason == "the caller has called unshard()":
                continue
            for param in group.shards.params:
                assert not any(s.name in s.module.__dict__ for s in param.sites), f"{param.fqn} is shadowed"
            assert found.gradient_state == "empty", f"{found.name} is {found.gradient_state}"
            is_kept = found.state != "sharded"
            assert not (is_kept and group.settings.reshard_after_backward), f"{found.name} is {found.state}"
        for param in self.model.parameters():
            assert isinstance(param, DTensor) != (id(param) in self.ignored)


def told_by_first(mine: list[str]) -> list[str]:
    found: list[Any] = [mine]
    dist.broadcast_object_list(found, src=0)
    return found[0]


def run_sharded(draw: Draw) -> Any:
    with emptying_buffers(draw):
        return StrategyRun(draw, None).run()


def run_draw(worlds: Worlds, draw: Draw, folder: Path) -> str | None:
    ranks = worlds[draw["world"]].run(run_sharded, draw, timeout=CAMPAIGN.timeout_s())
    answers = [rank[1] for rank in ranks]
    if any(each != answers[0] for each in answers):
        return f"the ranks disagree: {answers}"
    with one_thread():
        plain, _ = StrategyRun(draw, answers[0]).run()
    return difference(plain, [rank[0] for rank in ranks], exactness_of(draw))


# --- tests ----------------------------------------------------------------------------------------

CAMPAIGN = Campaign("STRATEGY", DRAWS, settled, run_draw)


def test_draws_of_strategies_train_as_plainly(worlds: Worlds, tmp_path: Path) -> None:
    CAMPAIGN.check_many(worlds, tmp_path, num_draws=3)


def test_a_group_may_get_more_gradients_while_it_reduces(worlds: Worlds, tmp_path: Path) -> None:
    """In a nested backward, in parts, as another group begins to reduce."""
    micro = [completed(MICRO, sync="no_sync"), completed(MICRO, kind="both")]
    draw = completed(
        DRAWS,
        strategy="ddp",
        checkpoint="reentrant",
        wrap="large",
        bucket=1.0,
        parts=100,
        prefetch=2,
        ignored="module",
        blocks=["knobs", "twice", "knobs"],
        steps=[completed(STEP, micro=micro)],
    )
    CAMPAIGN.check_draw(worlds, tmp_path, draw)


@pytest.mark.slow
def test_many_draws_of_strategies_train_as_plainly(worlds: Worlds, tmp_path: Path) -> None:
    CAMPAIGN.check_many(worlds, tmp_path, num_draws=300)
