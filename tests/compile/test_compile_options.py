"""Options of Inductor: the order of collectives in what it generates, and that numbers stay what they are."""

import re
import textwrap
from typing import Any

import pytest
import torch
from comparing import alike
from expecttest import assert_expected_inline
from harness import World
from models import Tower, random_batch, shard_tower
from scenario import assert_same
from test_compile_model import backward, compiled, hybrid_mesh, part, train
from torch._inductor.utils import run_and_get_code

import shardwise

BUCKET_MB = 0.003  # two blocks of Tower in float32, 296 numbers each, but not three


def words(code: str) -> str:
    """What generated code does, in order: products, and where collectives begin and are waited for."""
    found: list[str] = []
    for line in code[code.index("def call(") :].split("\n"):
        called = re.search(r"_c10d_functional\.(\w+?)(_out|_)?\.default\(", line)
        if called and not line.strip().startswith("#"):
            short = {
                "all_gather_into_tensor": "gather",
                "reduce_scatter_tensor": "reduce",
                "wait_tensor": "wait",
                "all_reduce": "sum",
            }
            found.append(short[called[1]])
        elif re.search(r"extern_kernels\.\w*mm\(", line) and found[-1:] != ["mm"]:
            found.append("mm")
    return " ".join(found)


IS_2_15 = torch.__version__.startswith("2.15.")
"""Its passes let some collectives begin, and be waited for, at other steps."""


def generated(options: dict[str, Any], is_hybrid: bool = False) -> list[str]:
    model = shard_tower(Tower(), mesh=hybrid_mesh() if is_hybrid else None)
    run = compiled(model, "function", "inductor", options=options)
    _, codes = run_and_get_code(backward, run, part(random_batch(0, 8, dtype=torch.float32)))
    return [words(code) for code in codes]


def shown(world: World, options: dict[str, Any]) -> str:
    first, other = world.run(generated, options, timeout=400)
    assert first == other
    return "\n".join(first)


@pytest.mark.slow
def test_collectives_run_beside_computation(world2: World) -> None:
    found = shown(world2, shardwise.compile_options())
    if IS_2_15:
        assert_expected_inline(
            found,
            """\
gather gather wait mm gather wait mm gather wait mm wait mm
mm gather gather wait mm reduce gather wait mm reduce wait wait mm reduce wait mm wait reduce wait""",
        )
        return
    assert_expected_inline(
        found,
        """\
gather gather wait mm gather wait mm gather wait mm wait mm
mm gather gather wait mm reduce gather wait mm wait reduce wait mm wait reduce mm wait reduce wait""",
    )


@pytest.mark.slow
def test_without_options_each_is_waited_for_where_it_begins(world2: World) -> None:
    assert_expected_inline(
        shown(world2, {}),
        """\
gather wait mm gather wait mm gather wait mm gather wait mm
mm gather wait mm reduce wait gather wait mm reduce wait gather wait mm reduce wait mm reduce wait""",
    )


@pytest.mark.slow
def test_neighbouring_collectives_are_merged(world2: World) -> None:
    found = shown(world2, shardwise.compile_options(bucket_cap_mb=BUCKET_MB))
    if IS_2_15:
        assert_expected_inline(
            found,
            """\
gather gather wait mm wait mm
gather gather wait mm reduce wait mm reduce wait wait""",
        )
        return
    assert_expected_inline(
        found,
        """\
gather gather wait mm wait mm
gather gather wait mm reduce wait mm wait reduce wait""",
    )


@pytest.mark.slow
def test_merged_collectives_may_be_waited_for_at_once(world2: World) -> None:
    options = shardwise.compile_options(overlap=False, bucket_cap_mb=BUCKET_MB)
    found = shown(world2, options)
    if IS_2_15:
        assert_expected_inline(
            found,
            """\
gather wait mm gather mm wait mm
gather wait mm reduce wait gather wait mm reduce wait""",
        )
        return
    assert_expected_inline(
        found,
        """\
gather wait mm gather wait mm
gather wait mm reduce wait gather wait mm reduce wait""",
    )


@pytest.mark.slow
@pytest.mark.parametrize("bucket_cap_mb", [None, BUCKET_MB])
def test_numbers_stay_what_they_are(world2: World, bucket_cap_mb: float | None) -> None:
    settings = {"options": shardwise.compile_options(bucket_cap_mb=bucket_cap_mb)}
    assert_same(world2, train, Tower, "module", "inductor", settings, timeout=400)


def test_other_options_may_be_added() -> None:
    shardwise.compile_options()["max_autotune"] = True
    assert "max_autotune" not in shardwise.compile_options()


def test_bad_arguments_are_refused() -> None:
    told = []
    for arguments in ({"overlap": 1}, {"bucket_cap_mb": "25"}, {"bucket_cap_mb": True}, {"bucket_cap_mb": 0}):
        with pytest.raises((TypeError, ValueError)) as error:
            shardwise.compile_options(**arguments)  # type: ignore[arg-type]
        told.append(f"{error.type.__name__}: {error.value}")
    assert_expected_inline(
        "\n".join(told),
        """\
TypeError: compile_options: overlap is 1, an int; pass True or False.
TypeError: compile_options: bucket_cap_mb is '25', a str; pass a number of megabytes above 0, or None to merge no collectives.
TypeError: compile_options: bucket_cap_mb is True, a bool; pass a number of megabytes above 0, or None to merge no collectives.
ValueError: compile_options: bucket_cap_mb is 0; pass a number of megabytes above 0, or None to merge no collectives.""",
    )


@pytest.mark.slow
def test_cuda_graphs_may_be_asked_for(world2: World) -> None:
    """On the host there are none, and nothing changes."""
    assert_same(world2, train, Tower, "function", "inductor", {"mode": "reduce-overhead"}, timeout=400)


@pytest.mark.slow
def test_sums_over_replicas_run_beside_computation(world4: World) -> None:
    first = alike(world4.run(generated, shardwise.compile_options(), is_hybrid=True, timeout=600))
    found = "\n".join(textwrap.fill(each, 100) for each in first)
    if IS_2_15:
        assert_expected_inline(
            found,
            """\
gather gather wait mm gather wait mm gather wait mm wait mm
mm gather gather wait mm reduce wait mm wait sum gather wait reduce wait mm wait sum reduce wait mm
wait sum wait reduce wait sum wait""",
        )
        return
    assert_expected_inline(
        found,
        """\
gather gather wait mm gather wait mm gather wait mm wait mm
mm gather gather wait mm reduce wait mm wait sum gather wait reduce wait mm wait sum wait reduce mm
wait sum wait reduce wait sum wait""",
    )


def test_megabytes_are_those_of_shard_model() -> None:
    options = shardwise.compile_options(bucket_cap_mb=25)
    size = options["bucket_all_gathers_fx_bucket_size_determinator"](0)
    assert size * 2**20 == 25e6  # torch's passes count in 2^20 bytes
