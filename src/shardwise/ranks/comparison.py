"""Facts that several ranks must have in common, compared through the store of the job.

Not by collectives: ranks that disagree may do so about their process groups, and collectives that do not fit
each other end the process. Each rank tells the first of them a digest of its facts and waits for a verdict;
only where digests differ are the facts themselves exchanged.

    rank 1    post/1 = nonce, digest, device                                   waits for final/<nonce>
    rank 0    takes post/1 ... post/n away, compares, sets final/<nonce> for each

So every rank has a few operations, and the first a few for each of the others. All ranks come to the same
verdict. A nonce stands for one comparison of one rank: what a comparison that failed has left behind is
never taken for an answer.
"""

import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from hashlib import blake2b
from typing import NamedTuple

import torch.distributed as dist

from shardwise.ranks.board import Board

Facts = Mapping[tuple[str, str], str]
"""Values by where and what; equal facts are in the same order on all ranks."""

_MOST_SHOWN = 8
"""The largest number of different sets of facts to look at."""


class Unequal(RuntimeError):
    """Ranks have different facts, or some did not come to compare theirs."""


class WrongDevice(RuntimeError):
    """A rank uses another device than its process group, or that of another rank."""


class OwnDevice(NamedTuple):
    """The device of one rank; all empty where it does not matter.

    ``identity``: no other device has it, on any machine. ``bound``: that of the process group.
    """

    name: str = ""
    bound: str = ""
    identity: str = ""


def digest_of(facts: Facts) -> str:
    """A digest that is equal for equal facts in the same order."""
    return blake2b(repr(list(facts.items())).encode(), digest_size=16).hexdigest()


class Comparison:
    """One comparison among ``ranks``, which all of them enter; ``own`` is this one, with its ``device``.

    ``while_waiting`` is called now and then, and may raise.
    """

    def __init__(
        self,
        store: dist.Store,
        ranks: Sequence[int],
        own: int,
        timeout: timedelta,
        while_waiting: Callable[[], None],
        device: OwnDevice,
    ) -> None:
        named = blake2b(repr(list(ranks)).encode(), digest_size=8).hexdigest()
        self._board = Board(store, f"shardwise/plan/{named}")
        self._ranks = list(ranks)
        self._own = own
        self._deadline = time.monotonic() + timeout.total_seconds()
        self._while_waiting = while_waiting
        self._device = device

    def run(self, facts: Facts) -> None:
        """Raise on all ranks alike: WrongDevice, or Unequal unless all have the same ``facts``."""
        if self._own == self._ranks[0]:
            self._lead(facts)
        else:
            self._follow(facts)

    # --- the first rank ---------------------------------------------------------------------------

    def _lead(self, facts: Facts) -> None:
        nonces: dict[int, str] = {}
        by_digest = {digest_of(facts): [self._own]}
        devices = {self._own: self._device}
        error: Exception | None = None
        try:
            for rank in self._ranks[1:]:
                nonces[rank], digest, device = self._board.take(f"post/{rank}", self._check)
                by_digest.setdefault(digest, []).append(rank)
                devices[rank] = OwnDevice(*device)
            if text := wrong_device(devices):
                error = WrongDevice(text)
            elif len(by_digest) > 1:
                error = Unequal(self._explain(facts, list(by_digest.values()), nonces))
        except BaseException as failed:
            missing = [rank for rank in self._ranks[1:] if rank not in nonces]
            text = f"rank {self._own} could not compare ({failed}); {_listed(missing)} had not come"
            self._judge(nonces, Unequal(text))
            raise
        self._judge(nonces, error)
        if error is not None:
            raise error

    def _explain(self, facts: Facts, groups: list[list[int]], nonces: Mapping[int, str]) -> str:
        told = {self._own: dict(facts)}
        shown = groups[:_MOST_SHOWN]
        for ranks in shown:
            if ranks[0] != self._own:
                self._board.post(f"verdict/{nonces[ranks[0]]}", "tell")
        for ranks in shown:
            if ranks[0] != self._own:
                rows = self._board.take(f"text/{nonces[ranks[0]]}", self._check)
                told[ranks[0]] = {(where, what): value for where, what, value in rows}
        return first_difference([(ranks, told[ranks[0]]) for ranks in shown])

    def _judge(self, nonces: Mapping[int, str], error: Exception | None) -> None:
        verdict = ["", ""] if error is None else [type(error).__name__, str(error)]
        for nonce in nonces.values():
            self._board.post(f"final/{nonce}", verdict)

    # --- the others -------------------------------------------------------------------------------

    def _follow(self, facts: Facts) -> None:
        nonce = uuid.uuid4().hex
        self._board.post(f"post/{self._own}", [nonce, digest_of(facts), self._device])
        ask, final = f"verdict/{nonce}", f"final/{nonce}"
        try:
            if self._board.wait(ask, final, check=self._check) == ask:
                self._board.remove(ask)
                rows = [(where, what, value) for (where, what), value in facts.items()]
                self._board.post(f"text/{nonce}", rows)
            kind, text = self._board.take(final, self._check)
        except BaseException:
            self._board.remove(f"post/{self._own}")
            raise
        if kind:
            raise (WrongDevice if kind == WrongDevice.__name__ else Unequal)(text)

    def _check(self) -> None:
        """While this rank waits for others."""
        if time.monotonic() > self._deadline:
            raise Unequal(
                f"Not all of {_listed(self._ranks)} came to compare their plans within the timeout of "
                "the process group"
            )
        self._while_waiting()


def wrong_device(devices: Mapping[int, OwnDevice]) -> str:
    """The first rank on a device that NCCL cannot use, and what to do; empty if there is none."""
    users: dict[str, list[int]] = {}
    found = ""
    for rank, device in devices.items():
        if device.identity:
            users.setdefault(device.identity, []).append(rank)
        if device.bound not in ("", device.name) and not found:
            found = f"rank {rank} uses {device.name}, but its process group is bound to {device.bound}"
    for ranks in users.values():
        if len(ranks) > 1 and not found:
            found = f"{_listed(ranks)} use the same device, {devices[ranks[0]].name}"
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
    by_value: dict[str | None, list[int]] = {}
    for ranks, facts in told:
        by_value.setdefault(facts.get(differing[0]), []).extend(ranks)
    sides = ", ".join(
        f"{value if value is not None else 'missing'} on {_listed(sorted(ranks))}"
        for value, ranks in by_value.items()
    )
    more = f" ({len(differing) - 1} more differences follow)" if len(differing) > 1 else ""
    return f"{where}: {what} is {sides}{more}"


def _listed(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > _MOST_SHOWN:
        return f"ranks {ranks[0]}, {ranks[1]}, ... {ranks[-1]} ({len(ranks)} ranks)"
    return "ranks " + ", ".join(map(str, ranks[:-1])) + f" and {ranks[-1]}"
