"""Which groups stay gathered between the forwards of ``inference()``, and what ranks owe each other then.

Groups that are kept need no communication. The others are gathered in each forward, by all ranks together; a
rank that runs fewer forwards has to gather along. So before each forward the ranks tell each other whether
they run one or have left; while somebody has left, those that run announce each gather before they begin it,
as they do in their first forward:

    rank 0    runs    runs, announces a, b    has left           all have left
    rank 1    runs    has left, plays a, b    has left           all have left

A forward that fails on one rank, while nobody has left yet, has gathers to come that the others do not
announce: that rank plays them as the last forward went.
"""

from collections.abc import Callable, Sequence

import torch

from shardwise.engine.group import Group, axes_of
from shardwise.layout.mesh import highest_over


class Inference:
    """State of one ``inference()`` of ``entered``, some of all ``groups``. Those that are ``kept`` stay."""

    def __init__(self, groups: Sequence[Group], entered: Sequence[Group], kept: set[Group]) -> None:
        self.kept = kept
        self._all = list(groups)
        self._axes = axes_of(entered)
        self._device = groups[0].device
        self._communicates = any(group not in kept for group in entered)
        self._plan: list[Group] | None = None  # as the last forward went
        self._issued: list[Group] | None = None  # by the forward that runs, or failed
        self._announces = False
        self._refusal: str | None = None  # the full parameters are no longer to be used

    def check_weights(self) -> None:
        """Refuse to go on with full parameters that are not those of their shards, by their versions."""
        for group in self.kept if self._refusal is None else ():
            if changed := group.changed_since_gather() or group.changed_in_place():
                group.follow_versions()  # it is told here, and not once more when the group is freed
                self._refusal = (
                    f"{changed[0]}: changed inside inference(), where the full parameters that were gathered "
                    "before are used. Leave the context, change weights, and enter it again."
                )
        if self._refusal is not None:
            raise RuntimeError(self._refusal)

    def begin_forward(self) -> None:
        """This rank is about to run one."""
        self._issued = []
        if self._communicates:
            _, self._announces = self._tell(runs=True)

    def note(self, group: Group) -> None:
        """A group is about to be gathered."""
        if self._issued is not None and group not in self.kept:
            self._issued.append(group)
            if self._announces:
                self._announce(self._all.index(group) + 1)

    def end_forward(self) -> None:
        """The running forward has ended, and tells how the next will go."""
        if self._issued is not None:
            self._plan, self._issued = self._issued, None
            if self._announces:
                self._announce(0)

    def make_good(self, gather: Callable[[Sequence[Group]], None]) -> None:
        """Gather what a forward that failed had yet to gather, and the other ranks wait for."""
        issued, self._issued = self._issued, None
        if issued is None or not self._communicates:
            return
        if self._announces:
            self._follow(gather)
        elif self._plan is not None:
            gather(self._plan[len(issued) :])

    def serve(self, gather: Callable[[Sequence[Group]], None]) -> None:
        """Take part in the gathers of other ranks until all have left."""
        while self._communicates and self._tell(runs=False)[0]:
            self._follow(gather)

    def _follow(self, gather: Callable[[Sequence[Group]], None]) -> None:
        while (place := self._announce(0)) > 0:
            gather([self._all[place - 1]])

    def _tell(self, runs: bool) -> tuple[bool, bool]:
        """Whether any rank is about to run a forward, and whether gathers have to be announced in it."""
        asks = not runs or self._plan is None
        flags = torch.tensor([runs, asks], dtype=torch.int32, device=self._device)
        highest_over(flags, self._axes)
        somebody_runs, somebody_asks = flags.tolist()
        return bool(somebody_runs), bool(somebody_asks)

    def _announce(self, place: int) -> int:
        """What those that run a forward gather next, by its place, or 0 when they have ended."""
        places = torch.tensor([place], dtype=torch.int32, device=self._device)
        highest_over(places, self._axes)
        return int(places.item())
