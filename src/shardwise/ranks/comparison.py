"""Facts that several ranks must have in common, compared through the store of the job.

Collectives cannot compare them: ranks may disagree about their process groups, and mismatched collectives
end the process. Each rank sends the first of them a digest of its facts and waits for a verdict; ranks
exchange the facts themselves only if digests differ.

    rank 1    post/1 = nonce, digest, device                                waits for verdict/<nonce>
    rank 0    takes post/1 ... post/n away, compares, sets verdict/<nonce> for each

So every rank needs a few operations, and the first rank a few for each of the others. All ranks get the same
verdict. A nonce stands for one comparison of one rank, so records left by a failed comparison are never
mistaken for an answer.
"""

import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from hashlib import blake2b
from typing import NamedTuple

import torch.distributed as dist

from shardwise.layout.fqns import listed_ranks, ranks_by_value
from shardwise.ranks.board import Board
from shardwise.torch_compat import c10d

Facts = Mapping[tuple[str, str], str]
"""Values by (where, what); equal facts are in the same order on all ranks."""

_MOST_SHOWN = 8
"""The largest number of different sets of facts to compare."""

_TELL = "tell"
"""In place of a verdict: post the facts."""


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

    own = dist.get_rank()
    if own == ranks[0]:
        is_about_device, text = _lead(board, check, facts, ranks, device)
    else:
        is_about_device, text = _follow(board, check, facts, own, device)
    if text:
        raise RuntimeError(text) if is_about_device else Unequal(text)


def _lead(
    board: Board, check: Callable[[], None], facts: Facts, ranks: Sequence[int], device: OwnDevice
) -> tuple[bool, str]:
    """On the first rank: take the posts of all others, and give each the verdict."""
    own, *others = ranks
    nonces: dict[int, str] = {}
    by_digest = {digest_of(facts): [own]}
    devices = {own: device}
    for rank in others:
        nonces[rank], digest, other_device = board.take(f"post/{rank}", check)
        by_digest.setdefault(digest, []).append(rank)
        devices[rank] = OwnDevice(*other_device)
    text = wrong_device(devices)
    is_about_device = bool(text)
    if not text and len(by_digest) > 1:
        alike, *unlike = list(by_digest.values())[:_MOST_SHOWN]
        for group in unlike:
            board.post(f"verdict/{nonces[group[0]]}", _TELL)
        told: list[tuple[list[int], Facts]] = [(alike, facts)]
        for group in unlike:
            rows = board.take(f"facts/{nonces[group[0]]}", check)
            told.append((group, {(where, what): value for where, what, value in rows}))
        text = first_difference(told)
    for nonce in nonces.values():
        board.post(f"verdict/{nonce}", [is_about_device, text])
    return is_about_device, text


def _follow(
    board: Board, check: Callable[[], None], facts: Facts, own: int, device: OwnDevice
) -> tuple[bool, str]:
    """On each other rank: post a digest, and the facts on request; return the verdict."""
    nonce = uuid.uuid4().hex
    board.post(f"post/{own}", [nonce, digest_of(facts), device])
    try:
        while (verdict := board.take(f"verdict/{nonce}", check)) == _TELL:
            board.post(f"facts/{nonce}", [(*key, value) for key, value in facts.items()])
    except BaseException:
        board.remove(f"post/{own}")
        raise
    is_about_device, text = verdict
    return is_about_device, text


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
