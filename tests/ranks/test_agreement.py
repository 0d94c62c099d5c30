"""All ranks go on, or all raise alike: the rule of every call that communicates."""

import pytest
import torch
import torch.distributed as dist
from expecttest import assert_expected_inline
from on_ranks import on_ranks
from torch.distributed.device_mesh import init_device_mesh

from shardwise.layout.mesh import Axis
from shardwise.ranks.agreement import run_on_all_ranks

CPU = torch.device("cpu")


class Odd(KeyError):
    """An exception of the caller's own."""


ERRORS = {"value": ValueError("v"), "odd": Odd("k"), "missing": FileNotFoundError("gone")}


def axes_of_square() -> list[Axis]:
    mesh = init_device_mesh("cpu", (2, 2))
    return [Axis(mesh.get_group(dim), 2, mesh.get_local_rank(dim)) for dim in range(2)]


@on_ranks(4)
def test_all_ranks_raise_what_the_first_has_met_and_go_on_afterwards() -> None:
    everywhere = dict.fromkeys(range(4), "odd")
    plans: list[dict[int, str]] = [{3: "value"}, {}, {1: "missing", 2: "value"}, {2: "odd"}, everywhere]
    axes, rank = axes_of_square(), dist.get_rank()
    found = []
    for plan in plans:

        def act(plan: dict[int, str] = plan) -> int:
            if rank in plan:
                raise ERRORS[plan[rank]]
            return rank

        try:
            found.append(f"returned {run_on_all_ranks(axes, CPU, act) - rank}")
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
    assert_expected_inline(
        "\n".join(found),
        """\
ValueError: rank 3: v
returned 0
FileNotFoundError: rank 1: gone (ranks 1, 2 failed)
RuntimeError: rank 2: Odd: 'k'
Odd: 'k'""",
    )


@on_ranks(4)
def test_arguments_that_differ_are_named() -> None:
    usual = {"src": 0, "strict": True}
    named = [usual, usual, usual, usual | {"strict": None}]
    own = named[dist.get_rank()]
    with pytest.raises(ValueError, match="disagree") as caught:
        run_on_all_ranks(axes_of_square(), CPU, lambda: None, caller="call", same=own)
    assert_expected_inline(
        str(caught.value),
        """call: ranks disagree on strict: rank 0 has True, rank 3 has None. Pass the same on all ranks.""",
    )
