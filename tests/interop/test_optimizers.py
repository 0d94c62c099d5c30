"""Which optimizers work on our shards, by themselves and as FlatOptimizer: each against itself in one process.

The tables of docs/interop/optimizers.md are what these tests find. EXPECTTEST_ACCEPT=1 writes them anew:

    pytest -m slow tests/interop/test_optimizers.py
"""

import inspect
import os
import warnings
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import World
from reference import full
from torch import nn

from shardwise import fully_shard
from shardwise.optim import FlatOptimizer

PAGE = Path(__file__).parents[2] / "docs/interop/optimizers.md"
STEPS = 7
WIDTHS = (64, 67)  # of rows on two ranks: some divide, others do not
OPTIONS: dict[str, dict[str, Any]] = {
    "SGD": {"momentum": 0.9, "nesterov": True},
    "LBFGS": {"max_iter": 3},
}
Weights = dict[str, torch.Tensor]


def kinds_of(module: str) -> dict[str, type[torch.optim.Optimizer]]:
    found = vars(import_module(module))
    return {
        name: kind
        for name, kind in found.items()
        if inspect.isclass(kind)
        and issubclass(kind, torch.optim.Optimizer)
        and kind is not torch.optim.Optimizer
    }


def optimizer_of(module: str, name: str, params: Iterable[nn.Parameter], how: str) -> Any:
    kind: Any = kinds_of(module)[name]
    if how == "unchecked":  # shardwise knows optimizers by name, not their subclasses
        kind = type(f"My{name}", (kind,), {})
    optimizer = kind(params, **OPTIONS.get(name, {}))
    if how == "flat":
        return FlatOptimizer(optimizer, elementwise=module != "torch.optim")
    return optimizer


def trained(module: str, name: str, how: str, width: int) -> tuple[Weights, Any]:
    """The weights after some steps of a model that is ``plain`` or sharded, and the optimizer."""
    torch.manual_seed(0)
    has_bias = (module, name) != ("torch.optim", "Muon")  # takes matrices only
    model = nn.Sequential(
        nn.Linear(width, width, bias=has_bias), nn.Tanh(), nn.Linear(width, width, bias=has_bias)
    ).double()
    if how != "plain":
        fully_shard(model[0])
        fully_shard(model)
    optimizer = optimizer_of(module, name, model.parameters(), how)
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(6, width, dtype=torch.float64, generator=generator)

        def closure(x: torch.Tensor = x) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(x).square().sum()
            loss.backward()
            return loss

        if name == "LBFGS":
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()
    return {key: full(param) for key, param in model.named_parameters()}, optimizer


def is_close(found: torch.Tensor, expected: torch.Tensor, tolerance: float) -> bool:
    return bool((found - expected).abs().max() <= tolerance * expected.abs().max())


def outcome(module: str, name: str, how: str, width: int, expected: Weights) -> str:
    """Whether a sharded model comes to the weights of one process."""
    try:
        found, optimizer = trained(module, name, how, width)
    except Exception as error:
        return (
            "refused" if "FlatOptimizer: " in str(error) or "Nothing was changed" in str(error) else "error"
        )
    # Muon iterates in bfloat16; others compute norms, whose rounding depends on the ranks.
    tolerance = 2e-2 if name == "Muon" else 1e-6
    if not all(is_close(found[key], expected[key], tolerance) for key in expected):
        return "OTHER WEIGHTS"
    return "by default" if how == "sharded" and isinstance(optimizer, FlatOptimizer) else "yes"


def outcomes(module: str, name: str) -> tuple[str, ...]:
    """Of the optimizer as it is, as FlatOptimizer, and if nobody had known its name; with each width."""
    warnings.simplefilter("ignore")
    try:
        expected = {width: trained(module, name, "plain", width)[0] for width in WIDTHS}
    except Exception:
        return ("not tried",)
    return tuple(
        outcome(module, name, how, width, expected[width])
        for how in ("sharded", "flat", "unchecked")
        for width in WIDTHS
    )


OK = ("yes", "yes")
MEANINGS = {
    (*OK, *OK): "as it is; as `FlatOptimizer` too",
    (*OK, "refused", "refused"): "as it is; not elementwise",
    ("by default", "by default", *OK): "as `FlatOptimizer`, which it becomes by itself at its first step",
    (
        "yes",
        "refused",
        "refused",
        "refused",
    ): "where rows divide by the ranks; else refused at its first step",
    ("refused",) * 4: "no: refused at its first step, before anything changes",
    (
        "not tried",
    ): "not tried: fails on this model in one process as well, or cannot be made of parameters alone",
}


DRAWS = {"Gravity": "trains, not to the weights of one process: it draws random numbers"}


def table(found: dict[str, tuple[str, ...]]) -> str:
    rows: dict[str, list[str]] = {meaning: [] for meaning in MEANINGS.values()}
    for name, results in found.items():
        meaning = DRAWS.get(name) or MEANINGS.get(results[:4], ", ".join(results))
        rows.setdefault(meaning, []).append(name)
    return "\n".join(f"| {', '.join(names)} | {meaning} |" for meaning, names in rows.items() if names)


def assert_on_page(text: str, module: str) -> None:
    """Between the head of the table for ``module`` and the next empty line."""
    page = PAGE.read_text()
    head = f"| of `{module}` | works |\n|---|---|\n"
    before, rest = page.split(head)
    there, after = rest.split("\n\n", 1)
    if os.environ.get("EXPECTTEST_ACCEPT"):
        PAGE.write_text(f"{before}{head}{text}\n\n{after}")
    else:
        assert there == text


def check(world: World, module: str) -> None:
    found = {}
    for name in sorted(kinds_of(module)):
        first, *others = world.run(outcomes, module, name)
        assert all(other == first for other in others)
        found[name] = first
        if "error" in first:
            world.close()  # a rank may wait for another
    assert_on_page(table(found), module)
    for name, results in found.items():  # what is refused, or stepped flat by default, would fail
        assert not {"refused", "by default"} & {*results[:2]} or "error" in results[4:], (name, results)


@pytest.mark.slow
def test_optimizers_of_torch(world2: World) -> None:
    """Elementwise ones work, on uneven rows too."""
    check(world2, "torch.optim")


@pytest.mark.slow
def test_optimizers_of_others(world2: World) -> None:
    pytest.importorskip("pytorch_optimizer")
    check(world2, "pytorch_optimizer")
