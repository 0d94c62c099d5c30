"""Options of Inductor: the order of collectives in what it generates, and that numbers stay what they are."""

import re
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


SHORT = {"all_gather_into_tensor": "gather", "reduce_scatter_tensor": "reduce", "all_reduce": "sum"}
CALL = re.compile(
    r"(?:(\w+) = )?torch\.ops\._c10d_functional\.(\w+?)(?:_|_out)?\.default\((\w+).*?(?:out=(\w+))?\)$"
)


def covered(code: str) -> str:
    """Of each kind of collective in generated code: how many run while products are computed, and how many there are.

    Where exactly each begins and is waited for differs from torch to torch.
    """
    running: dict[str, tuple[str, int]] = {}  # by the buffer that is waited for
    kinds: dict[str, list[bool]] = {}
    products = 0
    for line in code[code.index("def call(") :].split("\n"):
        if re.match(r"\s*extern_kernels\.\w*mm\(", line):
            products += 1
        elif (called := CALL.match(line.strip())) is None:
            continue
        elif called[2] == "wait_tensor":
            kind, before = running.pop(called[3])
            kinds.setdefault(kind, []).append(products > before)
        else:
            result = called[1] or called[4] or called[3]  # new, given as out=, or in place
            running[result] = SHORT[called[2]], products
    assert not running
    return ", ".join(f"{kind} {sum(each)}/{len(each)}" for kind, each in sorted(kinds.items()))


def generated(options: dict[str, Any], is_hybrid: bool = False) -> str:
    model = shard_tower(Tower(), mesh=hybrid_mesh() if is_hybrid else None)
    run = compiled(model, "function", "inductor", options=options)
    _, codes = run_and_get_code(backward, run, part(random_batch(0, 8, dtype=torch.float32)))
    return "; ".join(map(covered, codes))


OPTIONS = shardwise.compile_options()
MERGED = shardwise.compile_options(bucket_cap_mb=BUCKET_MB)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "options", "expected"),
    [
        (2, {}, "gather 0/4; gather 0/3, reduce 0/4"),
        # Except for the first all-gather and the last reduction, ...
        (2, OPTIONS, "gather 3/4; gather 2/3, reduce 3/4"),
        (2, MERGED, "gather 1/2; gather 1/2, reduce 1/2"),
        # ... and the sums over replicas that begin once no products are left.
        (4, OPTIONS, "gather 3/4; gather 2/3, reduce 3/4, sum 2/4"),
    ],
    indirect=["world"],
    ids=["without options", "options", "merged", "replicas"],
)
def test_collectives_run_beside_computation(world: World, options: dict[str, Any], expected: str) -> None:
    """In forward; in backward."""
    assert alike(world.run(generated, options, world.size == 4, timeout=600)) == expected


@pytest.mark.slow
def test_merged_collectives_may_be_waited_for_at_once(world2: World) -> None:
    options = shardwise.compile_options(overlap=False, bucket_cap_mb=BUCKET_MB)
    found = alike(world2.run(generated, options, timeout=600))
    # Without how many are covered: torch 2.14 overlaps one of its own accord.
    assert re.sub(r"\d/", "", found) == "gather 2; gather 2, reduce 2"


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


def test_megabytes_are_those_of_shard_model() -> None:
    options = shardwise.compile_options(bucket_cap_mb=25)
    size = options["bucket_all_gathers_fx_bucket_size_determinator"](0)
    assert size * 2**20 == 25e6  # torch's passes count in 2^20 bytes
