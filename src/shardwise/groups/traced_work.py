"""What a group did while a trace recorded: plain numbers, which the group keeps for ``explain``."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Traffic:
    """Transfers of one group.

    Attributes:
        num_bytes: what they sent.
        ns: how long they took, together.
        waited_ns: how long the computation waited for them.
    """

    num_bytes: int
    ns: int
    waited_ns: int

    @property
    def uncovered(self) -> float:
        """The share of them that no computation covers; 0 where nothing was sent."""
        return min(1.0, self.waited_ns / self.ns) if self.ns else 0.0


@dataclass(frozen=True)
class TracedWork:
    """What one group did while a trace recorded.

    Attributes:
        name: of the group.
        unshards: how often it was all-gathered.
        reductions: how often its gradients were reduced.
        all_gather: its all-gathers.
        reduction: its reduce-scatters and all-reduces.
        computed_ns: how long its modules computed, forward and backward.
    """

    name: str
    unshards: int
    reductions: int
    all_gather: Traffic
    reduction: Traffic
    computed_ns: int

    @property
    def both(self) -> Traffic:
        """All its transfers."""
        one, two = self.all_gather, self.reduction
        return Traffic(one.num_bytes + two.num_bytes, one.ns + two.ns, one.waited_ns + two.waited_ns)
