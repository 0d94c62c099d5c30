"""What users import: a few names at the top, the rest from its package."""

import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
from expecttest import assert_expected_inline

import shardwise

REFERENCE = Path(__file__).parents[1] / "docs" / "reference"
HOMES = (
    "policies",
    "planning",
    "strategies",
    "init",
    "optim",
    "state",
    "checkpoint",
    "ranks",
    "interop",
    "observe",
)


def names_of(home: str) -> dict[str, Any]:
    module = importlib.import_module(f"shardwise.{home}")
    return {name: getattr(module, name) for name in module.__all__}


def public_names() -> dict[str, Any]:
    top = {name: getattr(shardwise, name) for name in shardwise.__all__}
    return top | {f"{home}.{name}": thing for home in HOMES for name, thing in names_of(home).items()}


def test_the_top_has_the_names_of_an_ordinary_training_script() -> None:
    assert_expected_inline(
        "\n".join(sorted(shardwise.__all__)),
        """\
CPUOffloadPolicy
CommPolicy
DataParallelMeshDims
FSDPModule
GradScaler
GradientReductionHandle
MixedPrecisionPolicy
OffloadPolicy
UnshardHandle
clip_grad_norm_
compile_options
estimate
explain
full_state_dict
fully_shard
global_norm
inference
latest_checkpoint
load_checkpoint
load_full_state_dict
materialize
merge_traces
no_sync
register_fsdp_forward_method
resume
save_checkpoint
shard_model
share_comm_ctx
statistics
trace
unsharded""",
    )


def test_only_the_homes_of_public_names_list_names() -> None:
    folder = Path(shardwise.__file__).parent
    files = [*folder.glob("*.py"), *folder.glob("*/__init__.py")]
    listing = {file.relative_to(folder) for file in files if "\n__all__ = " in file.read_text()}
    assert {file.with_suffix("").parts[0] for file in listing} == {"__init__", *HOMES}


@pytest.mark.parametrize("name", public_names())
def test_a_public_name_says_what_it_is(name: str) -> None:
    text = public_names()[name].__doc__
    assert text
    assert not text.startswith(f"{name.rpartition('.')[2]}(")  # what dataclasses write where nothing is said


def test_a_name_of_the_top_is_the_same_thing_in_its_package() -> None:
    for name, thing in public_names().items():
        assert thing is getattr(shardwise, name.rpartition(".")[2], thing)


@pytest.mark.parametrize("home", HOMES)
def test_the_reference_lists_what_a_package_has_beyond_the_top(home: str) -> None:
    index = (REFERENCE / "index.md").read_text()
    (row,) = re.findall(rf"^\| `shardwise\.{home}` \| (.*) \|$", index, flags=re.MULTILINE)
    assert f"\n::: shardwise.{home}\n" in (REFERENCE / f"{home}.md").read_text()
    told, there = {*re.findall(r"`(\w+)`", row)}, {*names_of(home)}
    assert there - {*shardwise.__all__} <= told
    assert told <= there | {*shardwise.__all__, "register_comm_hook", "shard_placement_fn"}


def test_a_function_named_like_its_file_has_an_entry_of_its_own_in_the_reference() -> None:
    """The entry of its package leaves it out: there, the name is that of the file."""
    folder = Path(shardwise.__file__).parent
    hidden = {
        f"{thing.__module__}.{thing.__name__}"
        for name, thing in public_names().items()
        if folder.joinpath(*name.split(".")).with_suffix(".py").exists()
    }
    pages = "".join(page.read_text() for page in REFERENCE.glob("*.md"))
    assert hidden
    assert hidden - {*re.findall(r"^::: (.*)$", pages, flags=re.MULTILINE)} == set()


def test_options_are_passed_by_name() -> None:
    """A call takes one optional operand by position at most; what torch's own signatures allow stays."""
    torchs = {
        "MixedPrecisionPolicy",
        "DataParallelMeshDims",
        "ShardPlacementResult",
        "clip_grad_norm_",
        "GradScaler",
        "Muon",
        "PipelineStage",
    }
    results = {"LoadReport", "Loaded", "CollectiveCounts", "Estimate", "Statistics"}
    public = {
        name: thing
        for name, thing in public_names().items()
        if name.rpartition(".")[2] not in torchs | results
    }
    public |= {
        f"{name}.{method}": function
        for name, cls in public.items()
        if inspect.isclass(cls)
        for method, function in vars(cls).items()
        if not method.startswith("_") and inspect.isfunction(function)
    }
    positional = {
        name: [
            each.name
            for each in inspect.signature(function).parameters.values()
            if each.kind is each.POSITIONAL_OR_KEYWORD and each.default is not each.empty
        ]
        for name, function in public.items()
    }
    assert {name: options for name, options in positional.items() if len(options) > 1} == {}
    assert all("CommPolicy" not in name for name, options in positional.items() if options)
