"""The docstrings of what shards a model: complete, and the examples of FSDPModule's methods run."""

import inspect
import re
import textwrap
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import World
from models import LanguageModel, token_batch
from on_ranks import on_ranks
from torch import nn

import shardwise
from shardwise import FSDPModule, GradientReductionHandle, UnshardHandle, fully_shard, policies

METHODS: dict[str, Callable[..., Any]] = {
    name: getattr(FSDPModule, name) for name in dir(FSDPModule) if not name.startswith("_")
}
HANDLES = {
    "UnshardHandle.wait": UnshardHandle.wait,
    "GradientReductionHandle.wait": GradientReductionHandle.wait,
}
FUNCTIONS: dict[str, Callable[..., Any]] = {
    name: getattr(shardwise, name)
    for name in (
        *("fully_shard", "register_fsdp_forward_method", "share_comm_ctx"),
        *("inference", "no_sync", "unsharded"),
        *("CPUOffloadPolicy", "CommPolicy", "DataParallelMeshDims", "MixedPrecisionPolicy"),
    )
} | {
    name: getattr(policies, name)
    for name in ("LowPrecisionReduction", "QuantizedAllGather", "QuantizedReduction", "ShardPlacementResult")
}
DOCUMENTED = METHODS | HANDLES | FUNCTIONS
SETTERS = {name for name in METHODS if name.startswith("set_")}
"""FSDPModule says once what they have in common: `recurse`, TypeErrors of flags, and how they are called."""
CANNOT_FAIL = {"ShardPlacementResult"}
NEED_CUDA = {"set_post_optim_event"}

everything = pytest.mark.parametrize("name", DOCUMENTED)


def section(name: str, heading: str) -> str:
    """The indented lines under `heading` in a docstring, dedented; empty without the heading."""
    doc = inspect.getdoc(FSDPModule if name == "FSDPModule" else DOCUMENTED[name]) or ""
    found = re.search(rf"^{heading}\n((?:    .*\n|\n)+)", doc + "\n", flags=re.MULTILINE)
    return textwrap.dedent(found[1]).strip("\n") + "\n" if found else ""


# --- complete -------------------------------------------------------------------------------------


@everything
def test_a_docstring_begins_with_a_summary_of_one_line(name: str) -> None:
    doc = inspect.getdoc(DOCUMENTED[name]) or ""
    assert re.match(r"[A-Z].*\.\n\n", doc), doc


@everything
def test_args_names_each_argument_and_no_other(name: str) -> None:
    described = re.findall(r"^(\w+): ", section(name, "Args:"), flags=re.MULTILINE)
    said_once = {"self", "recurse"} if name in SETTERS else {"self"}
    assert described == [e for e in inspect.signature(DOCUMENTED[name]).parameters if e not in said_once]


@everything
def test_a_docstring_says_what_is_raised_and_shows_an_example(name: str) -> None:
    assert section(name, "Raises:") or name in CANNOT_FAIL | SETTERS
    assert section(name, "Example::") or name in SETTERS


def test_what_all_setters_have_in_common_stands_in_the_class() -> None:
    doc = inspect.getdoc(FSDPModule) or ""
    assert "``recurse``: " in doc
    assert "raises ``TypeError``" in doc


VALID = {"factor": 1.0, "max_input_buffers": 1}


@pytest.mark.slow
@on_ranks(1)
def test_every_flag_refuses_what_is_not_a_bool_as_documented() -> None:
    model, wrong = sharded_model(), []
    for name, method in METHODS.items():
        parameters = list(inspect.signature(method).parameters.values())[1:]
        for flag in [each for each in parameters if each.annotation is bool]:
            values = {each.name: VALID.get(each.name, True) for each in parameters}
            try:
                getattr(model, name)(**values | {flag.name: "no"})
                wrong.append(f"{name}({flag.name}='no') is accepted")
            except TypeError as error:
                if f"{name}: {flag.name} is 'no', a str; pass True or False." not in str(error):
                    wrong.append(str(error))
    assert wrong == []


# --- the examples ---------------------------------------------------------------------------------


def sharded_model() -> nn.Module:
    model = LanguageModel(depth=3)
    for module in (model.embed, *model.blocks):
        fully_shard(module)
    return fully_shard(model)


def run_example(name: str) -> list[str]:
    """Run it, then train one more step: the names of parameters without a gradient from that."""
    model = sharded_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    microbatches = [token_batch(step, 4) for step in range(3)]
    given = {
        "dist": dist,
        "torch": torch,
        "model": model,
        "optimizer": optimizer,
        "batch": microbatches[0],
        "tokens": microbatches[0],
        "num_tokens": microbatches[0].numel(),
        "microbatches": microbatches,
        "batches": iter(microbatches),
        "schedule": lambda step: 0.1 / (step + 1),
        "step": 0,
    }
    exec(compile(section(name, "Example::"), f"<the example of {name}>", "exec"), given)
    optimizer.zero_grad()
    model(microbatches[0]).sum().backward()
    optimizer.step()
    return [name for name, param in model.named_parameters() if param.grad is None]


WITH_EXAMPLES = ["FSDPModule", *(name for name in METHODS | HANDLES if section(name, "Example::"))]


@pytest.mark.parametrize("name", [name for name in WITH_EXAMPLES if name not in NEED_CUDA])
def test_the_example_of_a_method_runs(world2: World, name: str) -> None:
    assert world2.run(run_example, name) == [[], []]


@pytest.mark.parametrize("name", sorted(NEED_CUDA))
def test_an_example_that_needs_cuda_uses_its_method(name: str) -> None:
    code = compile(section(name, "Example::"), name, "exec")
    assert name in code.co_names
