"""Facts that several ranks must have in common, compared through the store of the job.

Collectives cannot compare them: ranks may disagree about their process groups, and mismatched collectives
end the process. Each rank sends the first of them a digest of its facts and waits for its answer; ranks send
the facts themselves, in a second exchange, only if digests differ.

    rank 1    digests/1 = nonce, what it tells                                  waits for answer/<nonce>
    rank 0    takes digests/1 ... digests/n away, compares, sets answer/<nonce> for each

So every rank needs a few operations, and the first rank a few for each of the others. All ranks get the same
answer. A nonce stands for one exchange of one rank, so records left by a failed comparison are never mistaken
for an answer.
"""

import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from hashlib import blake2b
from typing import Any, NamedTuple

import torch.distributed as dist

from shardwise.layout.fqns import listed_ranks, ranks_by_value
from shardwise.ranks.board import Board
from shardwise.torch_compat import c10d

Facts = Mapping[tuple[str, str], str]
"""Values by (where, what); equal facts are in the same order on all ranks."""

_MOST_SHOWN = 8
"""The largest number of different sets of facts to compare."""


class Unequal(Exception):
    """Ranks have different facts, or some did not join the comparison."""


class OwnDevice(NamedTuple):
    """The device of one rank; all empty if it does not matter.

    ``identity``: unique over all machines. ``bound``: the device of the process group.
    """

    name: str = ""
    bound: str = ""
    identity: str = ""


def digest_of(facts: Facts) -> str:
    """A digest that is equal for equal facts in the same order."""
    return blake2b(repr(list(facts.items())).encode(), digest_size=16).hexdigest()


def compare(
    facts: Facts,
    ranks: Sequence[int],
    device: OwnDevice,
    timeout: timedelta,
    while_waiting: Callable[[], None],
) -> None:
    """Compare ``facts`` among ``ranks``, each of which calls this, with its ``device``.

    ``while_waiting`` is called now and then, and may raise.

    Raises:
        RuntimeError: on all ranks, if one uses a device that differs from its process group's, or that
            another rank uses.
        Unequal: on all ranks, unless all have the same facts.
    """
    named = blake2b(repr(list(ranks)).encode(), digest_size=8).hexdigest()
    board = Board(c10d.job_store(), f"shardwise/plan/{named}")
    deadline = time.monotonic() + timeout.total_seconds()

    def check() -> None:
        if time.monotonic() > deadline:
            raise Unequal(
                f"Not all of {listed_ranks(ranks)} came to compare their plans within the timeout of the "
                "process group"
            )
        while_waiting()

    exchange = partial(_exchange, board, ranks, check)
    problem, unlike = exchange("digests", [digest_of(facts), device], _compare_digests)
    if problem:
        raise RuntimeError(problem)
    if unlike:
        is_asked = dist.get_rank() in [each[0] for each in unlike]
        rows = [(*key, value) for key, value in facts.items()] if is_asked else None
        raise Unequal(exchange("facts", rows, partial(_compare_facts, unlike)))


def _exchange(
    board: Board,
    ranks: Sequence[int],
    check: Callable[[], None],
    topic: str,
    own: Any,
    answer: Callable[[dict[int, Any]], Any],
) -> Any:
    """What the first of ``ranks`` answers to what all of them tell, by rank; the same on all of them."""
    rank, (first, *others) = dist.get_rank(), ranks
    if rank == first:
        told = {other: board.take(f"{topic}/{other}", check) for other in others}
        result = answer({first: own} | {other: each for other, (_, each) in told.items()})
        for nonce, _ in told.values():
            board.post(f"answer/{nonce}", result)
        return result
    nonce = uuid.uuid4().hex
    board.post(f"{topic}/{rank}", [nonce, own])
    try:
        return board.take(f"answer/{nonce}", check)
    except BaseException:
        board.remove(f"{topic}/{rank}")
        raise


def _compare_digests(told: Mapping[int, Any]) -> tuple[str, list[list[int]]]:
    """What is wrong with the devices; and the ranks of the first few digests, if there are several."""
    by_digest = ranks_by_value((rank, digest) for rank, (digest, _) in told.items())
    unlike = list(by_digest.values())[:_MOST_SHOWN] if len(by_digest) > 1 else []
    return wrong_device({rank: OwnDevice(*device) for rank, (_, device) in told.items()}), unlike


def _compare_facts(unlike: Sequence[Sequence[int]], told: Mapping[int, Any]) -> str:
    facts = [{(where, what): value for where, what, value in told[ranks[0]]} for ranks in unlike]
    return first_difference(list(zip(unlike, facts, strict=True)))


def wrong_device(devices: Mapping[int, OwnDevice]) -> str:
    """The first rank on a device that NCCL cannot use, and what to do; empty if none."""
    found = ""
    for rank, device in devices.items():
        if device.bound not in ("", device.name) and not found:
            found = f"rank {rank} uses {device.name}, but its process group is bound to {device.bound}"
    users = ranks_by_value((rank, each.identity) for rank, each in devices.items() if each.identity)
    for ranks in users.values():
        if len(ranks) > 1 and not found:
            found = f"{listed_ranks(ranks)} use the same device, {devices[ranks[0]].name}"
    if not found:
        return ""
    return (
        f"{found}. With NCCL each rank has a device of its own. Choose it in each process before anything is "
        'put on a device and before init_process_group: torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))'
    )


def first_difference(told: Sequence[tuple[Sequence[int], Facts]]) -> str:
    """The first fact that differs, with the values of all ranks."""
    keys = list(dict.fromkeys(key for _, facts in told for key in facts))
    differing = [key for key in keys if len({facts.get(key) for _, facts in told}) > 1]
    if not differing:
        return "the plans list the same facts in different orders"
    where, what = differing[0]
    values = ranks_by_value((rank, facts.get(differing[0])) for ranks, facts in told for rank in ranks)
    sides = ", ".join(
        f"{value if value is not None else 'missing'} on {listed_ranks(ranks)}"
        for value, ranks in values.items()
    )
    more = f" ({len(differing) - 1} more differences follow)" if len(differing) > 1 else ""
    return f"{where}: {what} is {sides}{more}"
