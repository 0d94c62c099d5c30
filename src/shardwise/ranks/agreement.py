"""Every call that communicates starts with an agreement: it continues on all ranks, or all raise alike.

If one rank raised alone, the others would wait for it in their next collective until the timeout of the
process group. So everything that may fail, above all the checks of arguments, runs first, without
communication. Then every rank reports its outcome to the others:

    rank 0    check passes    all-reduce: rank 1 has failed    all-gather of errors    raise rank 1's error
    rank 1    check raises    all-reduce: rank 1 has failed    all-gather of errors    raise its own error

If no rank has failed, this costs one all-reduce of three numbers along each mesh dimension.
"""

import pickle
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from shardwise.layout.fqns import listed_ranks
from shardwise.layout.mesh import Axis, all_reduce_max, device_of_group
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


# --- objects between the ranks of a process group -------------------------------------------------


class RankGroup:
    """The ranks of `pg`; None stands for this process alone. Every method is collective.

    After each step that may fail on one rank alone, ranks report their outcomes by ``run_on_all_ranks``.
    """

    def __init__(self, pg: dist.ProcessGroup | None) -> None:
        self.pg = pg
        self.size = 1 if pg is None else dist.get_world_size(pg)
        self.rank = 0 if pg is None else dist.get_rank(pg)
        self.is_first = self.rank == 0
        self._axes = [] if pg is None else [Axis(pg, self.size, self.rank)]
        self._device = torch.device("cpu") if pg is None else device_of_group(pg)

    def all_gather_objects(self, value: Any) -> list[Any]:
        """Every rank's value, on every rank."""
        return list(gather_from_all(self._axes, value).values())

    def gather_objects(self, value: Any) -> list[Any] | None:
        """Every rank's value, on the first rank only."""
        if self.pg is None:
            return [value]
        values: list[Any] | None = [None] * self.size if self.is_first else None
        dist.gather_object(value, values, group=self.pg, group_dst=0)
        return values

    def scatter_objects(self, values: list[Any] | None) -> Any:
        """Each rank's item of the first rank's `values`."""
        if self.pg is None:
            assert values is not None
            return values[0]
        received: list[Any] = [None]
        dist.scatter_object_list(received, values, group=self.pg, group_src=0)
        return received[0]

    def broadcast_object(self, value: Any, source: int) -> Any:
        """The value of rank `source` of this group."""
        if self.pg is None:
            return value
        values = [value]
        dist.broadcast_object_list(values, group=self.pg, group_src=source)
        return values[0]

    def distinct(self, value: Any, key: Any) -> list[Any]:
        """The different values of the ranks, in the order of ranks; equal keys mean equal values.

        In most jobs all values are equal, and ranks exchange only digests.
        """
        digests = self.all_gather_objects(sha256(repr(key).encode()).digest())
        if len(set(digests)) == 1:
            return [value]
        firsts = [rank for rank, each in enumerate(digests) if digests.index(each) == rank]
        # A failure to pickle is raised on all ranks.
        pickled = self.run_on_all_ranks(lambda: pickle.dumps(value))
        return [pickle.loads(self.broadcast_object(pickled, rank)) for rank in firsts]

    def agree(self, caller: str, arguments: dict[str, Any]) -> None:
        """Refuse `arguments` of the public function `caller` that differ between ranks."""
        run_on_all_ranks(self._axes, self._device, lambda: None, caller=caller, same=arguments)

    def run_on_all_ranks(
        self, act: Callable[[], T], explain: Callable[[Exception], str] = str, says_rank: bool = True
    ) -> T:
        """As the function of this name; ``explain`` makes the text of this rank's error."""

        def explained() -> T:
            try:
                return act()
            except Exception as error:
                raise kind_of(error)(explain(error)) from error

        told = act if explain is str else explained
        return run_on_all_ranks(self._axes, self._device, told, says_rank=says_rank)

    def on_first(self, act: Callable[[], Any], explain: Callable[[Exception], str] = str) -> None:
        """Run `act` on the first rank; its exception is raised on all."""
        self.run_on_all_ranks(lambda: act() if self.is_first else None, explain, says_rank=False)
