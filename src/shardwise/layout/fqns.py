"""Names of modules and parameters, as the model was written, and lists of names and ranks for messages.

``torch.compile(module)`` and ``checkpoint_wrapper(module)`` return a wrapper around the module, which adds a
part to all names inside. Here these parts are left out: a module and the wrappers around it have one name.

    blocks.0                    OptimizedModule             blocks.0
    blocks.0._orig_mod          Block                       blocks.0
    blocks.0._orig_mod.up       Linear                      blocks.0.up
"""

from collections.abc import Iterable
from itertools import groupby
from typing import TypeVar

from torch import nn

from shardwise.torch_compat import nn_modules

T = TypeVar("T")


def clean(name: str) -> str:
    """``name`` without the parts that wrappers add."""
    if not any(part in name for part in nn_modules.WRAPPER_NAMES):
        return name
    return ".".join(part for part in name.split(".") if part not in nn_modules.WRAPPER_NAMES)


def names_in(model: nn.Module) -> dict[nn.Module, str]:
    """The modules in ``model``, itself included, and their names; the first of several."""
    return {module: clean(name) for name, module in model.named_modules()}


def joined(*parts: str) -> str:
    """A dotted name of the nonempty parts."""
    return ".".join(part for part in parts if part)


def uncompiled(module: nn.Module) -> nn.Module:
    """The module inside ``module`` if that is a wrapper of ``torch.compile``; otherwise ``module``."""
    inner = nn_modules.children(module).get(nn_modules.WRAPPED)
    return module if inner is None else uncompiled(inner)


def listed(names: Iterable[str], limit: int = 8, separator: str = ", ") -> str:
    """``names`` for a message: the first few, and the number of the others."""
    every = list(names)
    more = f" and {len(every) - limit} more" if len(every) > limit else ""
    return separator.join(every[:limit]) + more


def listed_ranks(ranks: Iterable[int], limit: int = 8) -> str:
    """``ranks`` for a message, neighbours as a range: ``rank 3``, ``ranks 0-2, 5``."""
    every = sorted(ranks)
    neighbours = groupby(enumerate(every), lambda each: each[1] - each[0])
    runs = [[rank for _, rank in run] for _, run in neighbours]
    shown = [f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs[:limit]]
    num_left = sum(map(len, runs[limit:]))
    more = f" and {num_left} more" if num_left else ""
    return f"{'rank' if len(every) == 1 else 'ranks'} {', '.join(shown)}{more}"


def ranks_by_value(values: Iterable[tuple[int, T]]) -> dict[T, list[int]]:
    """The ranks of each value, from values by rank."""
    ranks: dict[T, list[int]] = {}
    for rank, value in values:
        ranks.setdefault(value, []).append(rank)
    return ranks
