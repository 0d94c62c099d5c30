"""Which groups stay gathered between the forwards of ``inference()``, and what ranks owe each other then.

Groups that are kept need no communication. The others are gathered in each forward, by all ranks together; a
rank that runs fewer forwards has to gather along. So before each forward the ranks agree whether anybody is
still at it, and who has left plays the gathers of a forward, as the last one went, for the others:

    rank 0    forward    forward    leaves    plays    agrees that all have left
    rank 1    forward    forward    forward   leaves   agrees that all have left
"""

from collections.abc import Sequence

import torch

from shardwise.runtime.group import Group
from shardwise.runtime.mesh import Axis, highest_over


class Inference:
    """State of one ``inference()``: ``kept`` groups, and the gathers of the others."""

    def __init__(self, groups: Sequence[Group], kept: set[Group], device: torch.device) -> None:
        self.kept = kept
        self._device = device
        self._streamed = [group for group in groups if group not in kept]
        self._axes = axes_of(groups)
        self._plan = self._streamed  # the order in which the groups stand in the model, until a forward tells
        self._issued: list[Group] | None = None  # by the forward that runs, or failed

    @property
    def communicates(self) -> bool:
        """True if forwards gather anything."""
        return bool(self._streamed)

    def check_weights(self) -> None:
        """Refuse to go on with full parameters whose shards have changed, as far as versions tell."""
        for group in self.kept:
            if changed := group.changed_since_gather():
                raise RuntimeError(
                    f"{changed[0]}: changed inside inference(), where the full parameters that were gathered "
                    "before are used. Leave the context, change weights, and enter it again."
                )

    def begin_forward(self) -> None:
        """This rank is about to run one."""
        self._issued = []
        if self.communicates:
            self.somebody_runs(True)

    def note(self, group: Group) -> None:
        """A group is being gathered."""
        if self._issued is not None and group not in self.kept:
            self._issued.append(group)

    def end_forward(self) -> None:
        """The running forward has ended, and tells how the next will go."""
        if self._issued is not None:
            self._plan, self._issued = self._issued, None

    def owed(self) -> list[Group]:
        """What a forward that failed had yet to gather, and the other ranks wait for."""
        issued, self._issued = self._issued, None
        return [] if issued is None else self._plan[len(issued) :]

    def gathers_of_others(self) -> list[Group] | None:
        """What another rank's forward gathers now; None if all have left."""
        return self._plan if self.communicates and self.somebody_runs(False) else None

    def somebody_runs(self, is_running: bool) -> bool:
        """Whether any rank is about to run a forward. Collective: each rank asks once a forward."""
        flag = torch.tensor([is_running], dtype=torch.int32, device=self._device)
        highest_over(flag, self._axes)
        return bool(flag.item())


def axes_of(groups: Sequence[Group]) -> list[Axis]:
    """The axes along which the shards of ``groups`` are spread, the longest first."""
    axes = {id(axis.pg): axis for group in groups for axis in group.axes() if not axis.is_alone}
    return sorted(axes.values(), key=lambda axis: -axis.world)
