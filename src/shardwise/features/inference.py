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

from collections.abc import Sequence
from contextlib import ExitStack

import torch

from shardwise.engine.calls import FAILED, Outcome
from shardwise.engine.feature import Feature
from shardwise.engine.memory import IN_USE, INFERENCE
from shardwise.engine.prefetch_order import Order
from shardwise.engine.root import Root
from shardwise.groups.group import ParameterGroup, axes_of
from shardwise.groups.states import SHARDED
from shardwise.layout.mesh import highest_over


class Inference(Feature):
    """One ``inference()`` of ``entered``, some groups of a root. Those that are ``kept`` stay."""

    ranks_run_alike = False

    def __init__(self, root: Root, entered: Sequence[ParameterGroup], kept: set[ParameterGroup]) -> None:
        super().__init__(root)
        self.kept = kept
        self._axes = axes_of(entered)
        self._communicates = any(group not in kept for group in entered)
        self._plan: list[ParameterGroup] | None = None  # as the last forward went
        self._issued: list[ParameterGroup] | None = None  # by the forward that runs, or failed
        self._announces = False
        self._refusal: str | None = None  # the unsharded parameters are no longer to be used
        # Ranks may run different numbers of forwards: what they learn from them is forgotten afterwards.
        self._order_outside, root.forward_order = root.forward_order, Order()

    def backward_begins(self) -> None:
        """Refused."""
        raise RuntimeError(
            f"{self.root.name}: a backward inside inference(), "
            "which keeps full parameters whose gradients nobody reduces. Train outside of it."
        )

    def forward_begins(self) -> None:
        """Make good what a failed one owes, and tell the other ranks that this one runs another."""
        self._make_good()
        self._check_weights()
        self._issued = []
        if self._communicates:
            _, self._announces = self._tell(runs=True)

    def unsharding(self, group: ParameterGroup) -> None:
        """Announce it where others may not run the forward."""
        if group.unsharded.state is SHARDED and self._issued is not None and group not in self.kept:
            self._issued.append(group)
            if self._announces:
                self._announce(self.root.groups.index(group) + 1)

    def forward_ended(self, outcome: Outcome) -> None:
        """It tells how the next will go, unless it has failed."""
        if self._issued is not None and outcome is not FAILED:
            self._plan, self._issued = self._issued, None
            if self._announces:
                self._announce(0)

    def end(self) -> None:
        """Take part in what other ranks still run, then free everything."""
        root = self.root
        with ExitStack() as stack:
            for group in self.kept:
                stack.callback(self._release, group)
            stack.callback(root.remove_feature, self)
            stack.callback(setattr, root, "forward_order", self._order_outside)
            self._make_good()
            self._serve()

    def _release(self, group: ParameterGroup) -> None:
        self.root.memory.hold(group, IN_USE)
        self.root.memory.release(group)

    def _check_weights(self) -> None:
        """Refuse to go on with full parameters that are not those of their shards, by their versions."""
        for group in self.kept if self._refusal is None else ():
            if changed := group.unsharded.shards_changed_since() or group.unsharded.changed_in_place():
                group.unsharded.follow_versions()  # told here, and not once more when the group is freed
                self._refusal = (
                    f"{changed[0]}: changed inside inference(), where the full parameters that were gathered "
                    "before are used. Leave the context, change weights, and enter it again."
                )
        if self._refusal is not None:
            raise RuntimeError(self._refusal)

    def _make_good(self) -> None:
        """Unshard what a forward that failed had yet to unshard, and the other ranks wait for."""
        issued, self._issued = self._issued, None
        if issued is None or not self._communicates:
            return
        if self._announces:
            self._follow()
        elif self._plan is not None:
            _play(self._plan[len(issued) :])

    def _serve(self) -> None:
        """Take part in the all-gathers of other ranks until all have left."""
        while self._communicates and self._tell(runs=False)[0]:
            self._follow()

    def _follow(self) -> None:
        while (place := self._announce(0)) > 0:
            _play([self.root.groups[place - 1]])

    def _tell(self, runs: bool) -> tuple[bool, bool]:
        """Whether any rank is about to run a forward, and whether gathers have to be announced in it."""
        asks = not runs or self._plan is None
        flags = torch.tensor([runs, asks], dtype=torch.int32, device=self.root.device)
        highest_over(flags, self._axes)
        somebody_runs, somebody_asks = flags.tolist()
        return bool(somebody_runs), bool(somebody_asks)

    def _announce(self, place: int) -> int:
        """What those that run a forward gather next, by its place, or 0 when they have ended."""
        places = torch.tensor([place], dtype=torch.int32, device=self.root.device)
        highest_over(places, self._axes)
        return int(places.item())


def begin_inference(root: Root, groups: Sequence[ParameterGroup], budget: float) -> int:
    """Keep the groups unsharded that ``budget`` bytes have room for; returns the bytes taken."""
    if root.feature(Inference) is not None:
        raise RuntimeError(
            f"inference: {groups[0].name} is in another inference() already, which would end with this "
            "one. Leave it first."
        )
    root.prepare()
    kept: list[ParameterGroup] = []
    taken = 0
    for group in groups:
        if taken + group.unsharded.num_bytes <= budget:
            kept.append(group)
            taken += group.unsharded.num_bytes
    root.streams.wait_for_optimizer(root.post_optim_event)
    for group in root.groups:
        root.memory.release(group)  # what was kept from before may be stale
    for group in kept:
        root.unshard(group)
    for group in kept:
        group.unsharded.wait()
    for group in kept:
        root.memory.hold(group, INFERENCE)
    root.add_feature(Inference(root, groups, set(kept)))
    return taken


def end_inference(root: Root) -> None:
    """Leave it."""
    inference = root.feature(Inference)
    assert inference is not None
    inference.end()


def _play(groups: Sequence[ParameterGroup]) -> None:
    """Unshard for the sake of other ranks; all at once, since they may go in another order."""
    pending: list[ParameterGroup] = []
    for group in [*groups, None]:
        if group is None or group in pending:  # it is unsharded once more
            for each in pending:
                each.unsharded.wait()
                each.unsharded.reshard()
            pending.clear()
        if group is not None:
            group.unsharded.unshard()
            pending.append(group)
