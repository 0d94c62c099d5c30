"""Whether two results are the same, through dicts, lists and tuples: the one comparison of the tests."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from harness import World
from torch import Tensor
from torch.distributed.tensor import DTensor


def assert_equal(got: Any, want: Any, what: str = "", atol: float = 0.0, rtol: float = 0.0) -> None:
    """Tensors to the tolerance, without one bit for bit; everything else exactly."""
    if isinstance(want, dict) and isinstance(got, dict):
        assert got.keys() == want.keys(), f"{what}: {list(got)} for {list(want)}"
        for key, value in want.items():
            assert_equal(got[key], value, f"{what}: {key}", atol, rtol)
    elif isinstance(want, (list, tuple)):
        assert type(got) is type(want), f"{what}: {got} where {want} is expected"
        assert len(got) == len(want), f"{what}: {len(got)} of {len(want)}: {got} for {want}"
        for index, (one, other) in enumerate(zip(got, want, strict=True)):
            assert_equal(one, other, f"{what}: {index}", atol, rtol)
    elif not isinstance(want, Tensor):
        assert not isinstance(got, Tensor), f"{what}: a tensor where {want} is expected"
        assert got == want, f"{what}: {got} where {want} is expected"
    else:
        assert isinstance(got, Tensor), f"{what}: {got} where {want} is expected"
        assert not isinstance(got, DTensor), f"{what}: a DTensor"
        if atol or rtol:
            torch.testing.assert_close(got, want, rtol=rtol, atol=atol, msg=lambda text: f"{what}: {text}")
        else:
            assert got.dtype == want.dtype, f"{what}: {got.dtype} where {want.dtype} is expected"
            assert torch.equal(got, want), f"{what}: {got} where {want} is expected"


def assert_as_plain(
    world: World, program: Callable[..., Any], where: Any, *args: Any, atol: float = 1e-10, **how: Any
) -> None:
    """`program` finds the same on the ranks, which are told where they are, as in this process, without that."""
    ranks = world.run(program, where, *args, **how)
    assert_all_same(ranks, program(None, *args, **how), atol=atol)


def same(left: Any, right: Any) -> bool:
    """Bit for bit."""
    try:
        assert_equal(left, right)
    except AssertionError:
        return False
    return True


def assert_all_same(
    ranks: Sequence[dict[str, Any]], want: dict[str, Any], atol: float = 1e-10, rtol: float = 0.0
) -> None:
    """What every rank found agrees with the plain run."""
    assert want, "the program has noted nothing"
    for rank, got in enumerate(ranks):
        assert_equal(got, want, f"rank {rank}", atol, rtol)


def alike(ranks: Sequence[Any]) -> Any:
    """What every rank found: the same."""
    first, *others = ranks
    assert all(other == first for other in others), f"the ranks disagree: {ranks}"
    return first
