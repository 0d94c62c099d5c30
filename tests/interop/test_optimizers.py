"""Which optimizers work on our shards, by themselves and as FlatOptimizer: each against itself in one process.

The tables are those of docs/interop/optimizers.md.
"""

import inspect
import warnings
from importlib import import_module
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from harness import World
from reference import full
from torch import nn

from shardwise import fully_shard
from shardwise.layout.text_tables import aligned
from shardwise.optim import FlatOptimizer

STEPS = 3
WIDTHS = {"even": 4, "uneven": 5}  # of rows on two ranks
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


def weights_of(module: str, kind: str, how: str, width: int) -> Weights:
    """The weights after some steps of a model that is ``plain``, ``sharded``, or sharded and stepped ``flat``."""
    torch.manual_seed(0)
    has_bias = kind != "Muon"  # of torch's, which takes matrices only
    model = nn.Sequential(
        nn.Linear(width, width, bias=has_bias), nn.Tanh(), nn.Linear(width, width, bias=has_bias)
    ).double()
    if how != "plain":
        fully_shard(model[0])
        fully_shard(model)
    optimizer: Any = kinds_of(module)[kind](model.parameters(), **OPTIONS.get(kind, {}))
    if how == "flat":
        optimizer = FlatOptimizer(optimizer, elementwise=module != "torch.optim")
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(6, width, dtype=torch.float64, generator=generator)

        def closure(x: torch.Tensor = x) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(x).square().sum()
            loss.backward()
            return loss

        if kind == "LBFGS":
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()
    return {name: full(param) for name, param in model.named_parameters()}


def outcome(module: str, kind: str, how: str, width: int) -> str:
    """Whether a sharded model comes to the weights of one process."""
    tolerance = 2e-2 if kind == "Muon" else 1e-9  # it iterates in bfloat16
    try:
        expected = weights_of(module, kind, "plain", width)
    except Exception:
        return "-"
    try:
        found = weights_of(module, kind, how, width)
    except Exception as error:
        return "refused" if "FlatOptimizer: " in str(error) else "error"
    same = all(torch.allclose(found[name], expected[name], rtol=tolerance, atol=1e-12) for name in expected)
    return "yes" if same else "OTHER WEIGHTS"


def outcomes(module: str, kinds: list[str]) -> list[list[str]]:
    warnings.simplefilter("ignore")
    return [
        [
            kind,
            *(outcome(module, kind, how, width) for how in ("sharded", "flat") for width in WIDTHS.values()),
        ]
        for kind in kinds
    ]


def shown(world: World, module: str, kinds: list[str]) -> str:
    first, *others = world.run(outcomes, module, kinds)
    assert all(other == first for other in others)
    return "\n".join(aligned([["", *WIDTHS, *(f"flat, {rows}" for rows in WIDTHS)], *first], right=()))


@pytest.mark.slow
def test_optimizers_of_torch(world2: World) -> None:
    """Elementwise ones work, on uneven rows too; Rprop as FlatOptimizer. SparseAdam takes no dense gradients."""
    assert_expected_inline(
        shown(world2, "torch.optim", sorted(kinds_of("torch.optim"))),
        """\
            even   uneven  flat, even  flat, uneven
ASGD        yes    yes     yes         yes
Adadelta    yes    yes     yes         yes
Adafactor   error  error   refused     refused
Adagrad     yes    yes     yes         yes
Adam        yes    yes     yes         yes
AdamW       yes    yes     yes         yes
Adamax      yes    yes     yes         yes
LBFGS       yes    error   refused     refused
Muon        yes    yes     refused     refused
NAdam       yes    yes     yes         yes
RAdam       yes    yes     yes         yes
RMSprop     yes    yes     yes         yes
Rprop       error  error   yes         yes
SGD         yes    yes     yes         yes
SparseAdam  -      -       -           -""",
    )


THIRD_PARTY = [
    "AdaBelief",
    "AdamP",
    "Adan",
    "ADOPT",
    "CAME",
    "Lamb",
    "LARS",
    "Lion",
    "MARS",
    "NovoGrad",
    "Prodigy",
    "QHAdam",
    "RAdam",
    "Ranger21",
    "ScheduleFreeAdamW",
    "Shampoo",
    "SOAP",
    "SophiaH",
    "StableAdamW",
    "Tiger",
    "Yogi",
    "AdaFactor",
    "GaLore",
    "Kate",
    "DAdaptAdam",
    "AdEMAMix",
    "Grams",
    "Muon",
    "APOLLO",
    "SM3",
]


@pytest.mark.slow
def test_optimizers_of_others(world2: World) -> None:
    pytest.importorskip("pytorch_optimizer")
    there = [kind for kind in sorted(THIRD_PARTY) if kind in kinds_of("pytorch_optimizer")]
    assert_expected_inline(
        shown(world2, "pytorch_optimizer", there),
        """\
                   even   uneven  flat, even  flat, uneven
ADOPT              error  error   refused     refused
APOLLO             yes    yes     refused     refused
AdEMAMix           yes    yes     refused     refused
AdaBelief          yes    yes     refused     refused
AdaFactor          error  error   refused     refused
AdamP              error  error   refused     refused
Adan               error  error   refused     refused
CAME               error  error   refused     refused
DAdaptAdam         error  error   refused     refused
GaLore             yes    yes     refused     refused
Grams              yes    yes     refused     refused
Kate               yes    yes     refused     refused
LARS               error  error   refused     refused
Lamb               error  error   refused     refused
Lion               yes    yes     refused     refused
MARS               error  error   refused     refused
Muon               -      -       -           -
NovoGrad           error  error   refused     refused
Prodigy            error  error   refused     refused
QHAdam             yes    yes     refused     refused
RAdam              yes    yes     refused     refused
Ranger21           -      -       -           -
SM3                error  error   refused     refused
SOAP               error  error   refused     refused
ScheduleFreeAdamW  yes    yes     refused     refused
Shampoo            error  error   refused     refused
SophiaH            -      -       -           -
StableAdamW        error  yes     refused     refused
Tiger              yes    yes     refused     refused
Yogi               yes    yes     refused     refused""",
    )
