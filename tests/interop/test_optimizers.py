"""Which optimizers work on our shards, and in which way: each class against itself in one process.

The tables of docs/interop/optimizers.md are what these tests find. EXPECTTEST_ACCEPT=1 writes them anew:

    pytest -m slow tests/interop/test_optimizers.py

A package that is not installed is skipped. Beside the extra `interop`: `pip install --no-deps timm`, since the torchvision
that it asks for takes one build of torch only.
"""

import inspect
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, patch

import pytest
import torch
import torch.distributed as dist
from harness import World
from harness.report import WorkerError
from reference import full
from scenario import one_thread
from torch import Tensor, nn

from shardwise import fully_shard
from shardwise.optim import FlatOptimizer, WholeParameters

PAGE = Path(__file__).parents[2] / "docs/interop/optimizers.md"
STEPS = 7
EVEN, UNEVEN = 12, 13  # rows on two and three ranks
WAYS = ("as it is", "FlatOptimizer", "WholeParameters", "single_owner")
TABLES = {  # the name in the documentation, and the module
    "torch.optim": "torch.optim",
    "pytorch_optimizer": "pytorch_optimizer",
    "torch_optimizer": "torch_optimizer",
    "timm.optim": "timm.optim",
    "transformers": "transformers.optimization",
    "torchao.optim": "torchao.optim",
}
Weights = dict[str, Tensor]

# --- what classes need beside parameters ----------------------------------------------------------

SGD = partial(torch.optim.SGD, lr=0.01, momentum=0.9)
OPTIONS: dict[str, dict[str, Any]] = {  # the class's own, but where they do nothing in a few steps
    "torch.optim.SGD": {"momentum": 0.9, "nesterov": True},
    "torch.optim.LBFGS": {"max_iter": 3},
    "torch_optimizer.LARS": {"weight_decay": 0.1},
    "pytorch_optimizer.AdaShift": {"keep_num": 3},
    "pytorch_optimizer.BSAM": {"num_data": 6},
    **{
        f"{table}.{name}": {"delta": 10.0}
        for table in ("pytorch_optimizer", "torch_optimizer", "timm.optim")
        for name in ("AdamP", "SGDP")
    },
    "pytorch_optimizer.FAdam": {"momentum_dtype": torch.float64, "fim_dtype": torch.float64},
    "pytorch_optimizer.Ranger21": {"num_iterations": STEPS},
    "pytorch_optimizer.ScalableShampoo": {
        "start_preconditioning_step": 2,
        "preconditioning_compute_steps": 1,
    },
    "pytorch_optimizer.ScheduleFreeSGD": {"lr": 0.01},
    **{
        f"pytorch_optimizer.{name}": {"base_optimizer": torch.optim.SGD, "lr": 0.01, "momentum": 0.9}
        for name in ("FriendlySAM", "LookSAM", "SAM")
    },
}
MUONS = {"AdaGO", "AdaMuon", "DistributedMuon", "Muon", "MuonClip", "NorMuon"}
BFLOAT16 = MUONS  # iterate in it, so that the order of sums shows
MATRICES_ONLY = {"torch.optim.Muon", "pytorch_optimizer.SpectralSphere"}
AROUND_ANOTHER = {"Lookahead", "OrthoGrad", "PCGrad", "ScheduleFreeWrapper", "TRAC"}
WITH_CLOSURE = {"AliG", "BSAM", "FriendlySAM", "LBFGS", "LookSAM", "SAM"}
UNTRIED = {
    "AdaLOMO": "no step: it changes parameters in backward",
    "Adahessian": "differentiates gradients (`create_graph`), which shardwise reduces",
    "CPUOffloadOptimizer": "needs a GPU",
    "DeMo": "communicates by itself",
    "DistributedMuon": "communicates by itself; Muon does not",
    "GSAM": "communicates by itself",
    "LOMO": "no step: it changes parameters in backward",
    "LayerWiseDummyOptimizer": "does nothing",
    "SafeFP16Optimizer": "scales the loss and keeps masters by itself: `MixedPrecisionPolicy`, `GradScaler`",
    "WSAM": "communicates by itself",
    "SparseAdam": "accepts only sparse gradients",
}


def with_params_alone(spec: str, kind: Any) -> Any:
    """A class like ``kind`` that is made of parameters."""
    name = spec.rpartition(".")[2]

    def around_another(self: Any, params: Any, **options: Any) -> None:
        kind.__init__(self, SGD(params), **options)
        if hasattr(self, "train"):  # of schedule-free ones
            self.train()

    def with_names(self: Any, groups: Any, **options: Any) -> None:
        named = [(group["name"], group["params"][0]) for group in groups]
        kind.__init__(self, SimpleNamespace(named_parameters=lambda: named), **options)

    def with_hessian(self: Any, closure: Any = None) -> Any:
        params = [param for group in self.param_groups for param in group["params"]]
        return kind.step(self, hessian=[param.grad.square() for param in params])

    changes: dict[str, Any] = {
        **{each: {"__init__": around_another} for each in AROUND_ANOTHER},
        "AdamMini": {"__init__": with_names},
        "AdaHessian": {"step": with_hessian},
        "SophiaH": {"step": with_hessian},
    }
    return type(name, (kind,), changes[name]) if name in changes else kind


def groups_of(name: str, model: Any) -> Any:
    if name == "AdamMini":
        return [{"params": [param], "name": key} for key, param in model.named_parameters()]
    if name in MUONS and model[0].bias is not None:
        return [
            {
                "params": [param for param in model.parameters() if (param.dim() == 2) == is_matrix],
                "use_muon": is_matrix,
            }
            for is_matrix in (True, False)
        ]
    return model.parameters()


@cache
def module_of(table: str) -> Any:
    stubs = {}
    if (
        table == "timm.optim"
    ):  # torchvision, which timm imports and its optimizers do not need, has to fit torch
        parts = ("", ".models", ".models.feature_extraction", ".ops", ".ops.misc", ".datasets")
        parts += (".transforms", ".transforms.functional")
        stubs = {f"torchvision{part}": MagicMock() for part in parts}
        stubs = {name: stub for name, stub in stubs.items() if name not in sys.modules}
    sys.modules.update(stubs)
    try:
        return import_module(TABLES[table])
    finally:
        for name in stubs:
            del sys.modules[name]


def kinds_of(table: str) -> dict[str, Any]:
    return {
        name: kind
        for name, kind in vars(module_of(table)).items()
        if inspect.isclass(kind)
        and issubclass(kind, torch.optim.Optimizer)
        and kind is not torch.optim.Optimizer
        and not name.startswith("_")
    }


# --- training -------------------------------------------------------------------------------------


@contextmanager
def quietly() -> Iterator[None]:
    """Without warnings of others, and without the compiler, which torchao's optimizers use."""
    with warnings.catch_warnings(), patch("torch.compile", lambda function, **_: function):
        warnings.simplefilter("ignore")
        yield


def model_of(spec: str, rows: int) -> nn.Sequential:
    torch.manual_seed(0)
    has_low_bits = spec.startswith("torchao.")
    width, rows = (768, 4 * rows) if has_low_bits else (rows, rows)
    bias = spec not in MATRICES_ONLY
    model = nn.Sequential(nn.Linear(width, rows, bias=bias), nn.Tanh(), nn.Linear(rows, width, bias=bias))
    return model if has_low_bits else model.double()


def optimizer_of(table: str, name: str, model: nn.Module, way: str) -> Any:
    spec = f"{table}.{name}"
    kind = with_params_alone(spec, kinds_of(table)[name])
    options = OPTIONS.get(spec, {})
    if table == "timm.optim" and name not in AROUND_ANOTHER:
        options = {"lr": 0.01, **options}
    params = groups_of(name, model)
    if way in ("WholeParameters", "single_owner"):
        return WholeParameters(kind, params, single_owner=way == "single_owner", **options)
    optimizer = kind(params, **options)
    return (
        FlatOptimizer(optimizer, elementwise=table != "torch.optim") if way == "FlatOptimizer" else optimizer
    )


def trained(table: str, name: str, way: str, rows: int) -> tuple[Weights, Weights, bool]:
    """Weights before and after some steps, and whether the optimizer draws random numbers.

    ``way`` is "plain" in one process. Of a sharded model the first rank has all of the gradients, so that
    their sum is exact.
    """
    model = model_of(f"{table}.{name}", rows)
    share = 1
    if way != "plain":
        fully_shard(model[0])
        fully_shard(model)
        model.set_gradient_divide_factor(1.0)
        share = int(dist.get_rank() == 0)
    before = {key: full(param.detach()).clone() for key, param in model.named_parameters()}
    with quietly():
        optimizer = optimizer_of(table, name, model, way)
        dtype, width = model[0].weight.dtype, model[0].in_features
        draws = torch.get_rng_state()
        for step in range(STEPS):
            x = torch.randn(6, width, dtype=dtype, generator=torch.Generator().manual_seed(step))

            def closure(x: Tensor = x) -> Any:
                optimizer.zero_grad()
                with torch.enable_grad():  # which AliG's step turns off
                    loss = model(x).square().sum()
                    (loss * share).backward()
                return loss

            if name == "LBFGS":
                optimizer.step(closure)
            else:
                closure()
                optimizer.step(closure) if name in WITH_CLOSURE else optimizer.step()
    is_random = not torch.equal(torch.get_rng_state(), draws)
    return before, {key: full(param.detach()) for key, param in model.named_parameters()}, is_random


def distance(found: Weights, expected: Weights, before: Weights) -> float:
    """The largest difference, as a part of how far the parameter has come."""
    return max(
        float((found[key] - value).abs().max() / (value - before[key]).abs().max().clamp(min=1e-300))
        for key, value in expected.items()
    )


def outcomes(
    table: str, name: str, ways: tuple[str, ...], plain: dict[int, Any]
) -> dict[tuple[str, int], Any]:
    """By way and rows: how far a sharded model is from the weights of one process, or the error of all ranks."""
    found: dict[tuple[str, int], Any] = {}
    for way in ways:
        for rows, (before, expected, _) in plain.items():
            try:
                found[way, rows] = distance(trained(table, name, way, rows)[1], expected, before)
            except Exception as error:
                dist.monitored_barrier(timeout=timedelta(seconds=5))  # else some rank waits for this one
                found[way, rows] = f"{type(error).__name__}: {error}"
                break
    return found


# --- tables ---------------------------------------------------------------------------------------


def verdict(found: Any, name: str, is_random: bool) -> str:
    if isinstance(found, str):
        ours = ("FlatOptimizer: ", "WholeParameters: ", "WholeParameters.step: ")
        return "refused" if any(where in found for where in ours) else "raises"
    if found < 1e-9:
        return "yes"
    if is_random:
        return "other random numbers"
    return "yes, in bfloat16" if name in BFLOAT16 and found < 0.1 else "OTHER WEIGHTS"


def cell(verdicts: dict[int, set[str]]) -> str:
    """Of what was found on all worlds, by rows: even ones, then uneven ones."""
    for rows, found in verdicts.items():
        bad = sorted(found - {"yes"})
        if bad:
            on_uneven = rows != EVEN and bad[0] in ("raises", "OTHER WEIGHTS")
            return f"{bad[0]} on uneven rows" if on_uneven else bad[0]
    return "yes"


def cells(worlds: tuple[World, ...], table: str, name: str, plain: dict[int, Any]) -> tuple[str, ...]:
    verdicts: dict[str, dict[int, set[str]]] = {way: {rows: set() for rows in plain} for way in WAYS}
    for world in worlds:
        found = {}
        for ways in (WAYS, *((way,) for way in WAYS)):  # all at once, unless some ranks raise and others wait
            try:
                first, *_ = world.run(outcomes, table, name, ways, plain)
            except WorkerError as error:
                if len(ways) == 1:
                    found[ways[0], EVEN] = str(error)
                continue
            found |= first
            if ways == WAYS:
                break
        for (way, rows), each in found.items():
            verdicts[way][rows].add(verdict(each, name, plain[rows][2]))
    return tuple(cell(verdicts[way]) for way in WAYS)


def rows_of_table(worlds: tuple[World, ...], table: str) -> list[str]:
    rows: dict[tuple[str, ...], list[str]] = {}
    for name in sorted(kinds_of(table)):
        if name in UNTRIED:
            rows.setdefault((f"not tried: {UNTRIED[name]}", "", "", ""), []).append(name)
            continue
        with one_thread():
            plain = {rows: trained(table, name, "plain", rows) for rows in (EVEN, UNEVEN)}
        found = cells(worlds, table, name, plain)
        assert any(each.startswith("yes") for each in found), f"{name} has no way: {found}"
        rows.setdefault(found, []).append(name)
    order = sorted(
        rows, key=lambda found: (found[0].startswith("not"), sum(each != "yes" for each in found), found)
    )
    return [f"| {', '.join(rows[found])} | {' | '.join(found)} |" for found in order]


def assert_on_page(lines: list[str], table: str) -> None:
    """Between the head of the table and the next empty line."""
    text, page = "\n".join(lines), PAGE.read_text()
    head = f"| of `{table}` | as it is | `FlatOptimizer` | `WholeParameters` | `single_owner=True` |\n|---|---|---|---|---|\n"
    before, rest = page.split(head)
    there, after = rest.split("\n\n", 1)
    if os.environ.get("EXPECTTEST_ACCEPT"):
        PAGE.write_text(f"{before}{head}{text}\n\n{after}")
    else:
        assert there == text


@pytest.mark.slow
@pytest.mark.parametrize("table", TABLES)
def test_every_class_has_a_way(world2: World, world3: World, table: str) -> None:
    package = table.partition(".")[0]
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    assert_on_page(rows_of_table((world2, world3), table), table)
