"""Every call that communicates starts with an agreement: it continues on all ranks, or all raise alike.

If one rank raised alone, the others would wait for it in their next collective until the timeout of the
process group. So everything that may fail, above all the checks of arguments, runs first, without
communication. Then every rank reports its outcome to the others:

    rank 0    check passes    all-reduce: rank 1 has failed    all-gather of errors    raise rank 1's error
    rank 1    check raises    all-reduce: rank 1 has failed    all-gather of errors    raise its own error

If no rank has failed, this costs one all-reduce of three numbers along each mesh dimension.
"""

from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from typing import Any, TypeVar

import torch

from shardwise.layout.fqns import listed_ranks
from shardwise.layout.mesh import Axis, all_reduce_max
from shardwise.ranks.model_ranks import gather_from_all
from shardwise.ranks.replicas import are_fake

T = TypeVar("T")

Failure = tuple[type[Exception], str]
"""An exception class that every rank can raise, and a text."""

# Classes that other ranks raise unchanged. Any other class, such as KeyError, which shows its text in quotes,
# becomes the nearest of these, with its name in the text.
_KINDS = (
    *(TypeError, ValueError, ImportError, NotImplementedError),
    *(FileNotFoundError, FileExistsError, NotADirectoryError, PermissionError, OSError),
)


def run_on_all_ranks(
    axes: Sequence[Axis],
    device: torch.device,
    act: Callable[[], T],
    *,
    says_rank: bool = True,
    caller: str = "",
    same: Mapping[str, Any] | None = None,
) -> T:
    """Run ``act`` on all ranks; return this rank's result if it succeeded on all; otherwise all raise.

    If all ranks fail alike, each raises its own exception. Otherwise all raise the error of the first rank
    that failed, as the nearest built-in class.

    Args:
        axes: connect the ranks, in the same order on all of them; if none, or fake, this rank is alone.
        device: a device on which ``axes`` can reduce a tensor.
        act: does not communicate.
        says_rank: if only some ranks failed, begin the error with the first of them.
        caller: the public function that was called, for messages about ``same``.
        same: arguments, by name, that must be equal on all ranks; compared by their ``repr``.

    Raises:
        ValueError: ranks have different values in ``same``; besides what ``act`` raises on any rank.

    Collective.
    """
    if not axes or are_fake(axes, device):
        return act()
    failure: Failure | None = None
    error: Exception | None = None
    try:
        result = act()
    except Exception as caught:
        failure, error = (kind_of(caught), _text_of(caught)), caught
    told = {name: repr(value) for name, value in (same or {}).items()}
    digest = int.from_bytes(sha256(repr(told).encode()).digest()[:7], "big")
    extremes = torch.tensor([int(failure is not None), digest, -digest], device=device)
    all_reduce_max(extremes, axes)
    somebody_failed, highest, lowest = extremes.tolist()
    if somebody_failed:
        failures = gather_from_all(axes, failure)
        if error is not None and len(set(failures.values())) == 1:
            raise error
        raise _joint(failures, says_rank) from error
    if highest != -lowest:
        raise ValueError(_difference(caller, gather_from_all(axes, told)))
    return result


def kind_of(error: Exception) -> type[Exception]:
    """The nearest class to that of ``error`` that every rank can raise."""
    return next((cls for cls in type(error).__mro__ if cls in _KINDS), RuntimeError)


def _text_of(error: Exception) -> str:
    return str(error) if type(error) is kind_of(error) else f"{type(error).__name__}: {error}"


def _joint(failures: Mapping[int, Failure | None], says_rank: bool) -> Exception:
    """One error for several ranks: that of the first, with the other ranks that failed."""
    failed = {rank: failure for rank, failure in failures.items() if failure is not None}
    first = min(failed)
    kind, text = failed[first]
    text = f"rank {first}: {text}" if says_rank else text
    if len(failed) > 1:
        text += f" ({listed_ranks(failed)} failed)"
    return kind(text)


def _difference(caller: str, told: Mapping[int, Mapping[str, str]]) -> str:
    """The first argument that ranks disagree on, and their values."""
    ranks = list(told)
    name = next(name for name in told[ranks[0]] if len({each.get(name) for each in told.values()}) > 1)
    first = told[ranks[0]][name]
    other = next(rank for rank in ranks if told[rank].get(name) != first)
    return (
        f"{caller}: ranks disagree on {name}: rank {ranks[0]} has {first}, rank {other} has "
        f"{told[other].get(name)}. Pass the same on all ranks."
    )
