"""Which groups stay unsharded between the forwards of ``inference()``, and how ranks keep in step.

Kept groups need no communication. All ranks together unshard the others in each forward, so a rank that runs
fewer forwards must take part in the remaining all-gathers. Before each forward, ranks exchange whether they
run it or have left. Once a rank has left, the others announce each all-gather before they begin it, as they
also do in their first two forwards:

    rank 0    runs    runs, announces a, b       has left    all have left
    rank 1    runs    has left, joins in a, b    has left    all have left

If a forward fails on one rank before any has left, the other ranks still issue all-gathers that they do not
announce. The failed rank takes part by replaying those of its last forward. That forward must have
prefetched. Without prefetch, as in the first one, groups that are used twice are unsharded in a different
order.
"""

from collections.abc import Sequence
from contextlib import ExitStack

import torch

from shardwise.engine.calls import FAILED, Outcome
from shardwise.engine.root import Feature, Root
from shardwise.engine.unsharded_groups import IN_USE, INFERENCE, Order
from shardwise.groups.group import ParameterGroup, shard_axes_of
from shardwise.groups.states import SHARDED
from shardwise.layout.mesh import all_reduce_max
from shardwise.ranks.activity import Wait
from shardwise.ranks.failures import monitor_of_job


class Inference(Feature):
    """One ``inference()`` of some groups of a root (``entered``), of which ``kept`` stay unsharded."""

    def __init__(self, root: Root, entered: Sequence[ParameterGroup], kept: set[ParameterGroup]) -> None:
        super().__init__(root)
        self.kept = kept
        self._axes = axes = shard_axes_of(entered)
        self._wait = Wait("next forward inside inference()", root.name, lambda: axes)
        self._communicates = any(group not in kept for group in entered)
        self._plan: list[ParameterGroup] | None = None  # what the last forward unsharded, in order
        self._prefetches = False  # in this forward: an earlier one has recorded the order
        self._issued: list[ParameterGroup] | None = None  # the same for a running or failed one
        self._announces = False
        self._refusal: str | None = None  # why the unsharded parameters can no longer be used
        # Ranks may run different numbers of forwards, so the order recorded in them is dropped afterwards.
        self._order_outside, root.prefetch.forward_order = root.prefetch.forward_order, Order()
        root.ranks_run_alike = False
        root.unsharded_groups.announce = self._unsharding

    def backward_begins(self) -> None:
        """Refuse a backward."""
        raise RuntimeError(
            f"{self.root.name}: a backward inside inference(), "
            "which keeps full parameters whose gradients are not reduced. Train outside of it."
        )

    def forward_begins(self) -> None:
        """Catch up on a failed forward, and inform the other ranks that this one runs another."""
        self._make_good()
        self._check_weights()
        self._issued = []
        self._prefetches = bool(self.root.prefetch.forward_order.planned)
        if self._communicates:
            _, self._announces = self._tell(runs=True)

    def _unsharding(self, group: ParameterGroup) -> None:
        """Announce the all-gather, if other ranks may not run this forward."""
        if group.unsharded.state is SHARDED and self._issued is not None and group not in self.kept:
            self._issued.append(group)
            if self._announces:
                self._announce(self.root.groups.index(group) + 1)

    def forward_ended(self, outcome: Outcome) -> None:
        """Expect the next forward to unshard the same groups, unless this one failed."""
        if self._issued is not None and outcome is not FAILED:
            self._plan, self._issued = self._issued if self._prefetches else None, None
            if self._announces:
                self._announce(0)

    def end(self) -> None:
        """Take part in the forwards that other ranks still run, then reshard everything."""
        root = self.root
        with ExitStack() as stack:
            for group in self.kept:
                stack.callback(self._release, group)
            stack.callback(self._leave)
            stack.callback(setattr, root.prefetch, "forward_order", self._order_outside)
            self._make_good()
            self._serve()

    def _release(self, group: ParameterGroup) -> None:
        self.root.unsharded_groups.reasons[group] = IN_USE
        self.root.unsharded_groups.reshard(group)

    def _leave(self) -> None:
        self.root.remove(self)
        self.root.ranks_run_alike = True
        self.root.unsharded_groups.announce = None

    def _check_weights(self) -> None:
        """Refuse to continue if versions show that shards or full parameters were changed."""
        for group in self.kept if self._refusal is None else ():
            if changed := group.unsharded.shards_changed() or group.unsharded.changed_in_place():
                group.unsharded.sync_versions()  # raise here, and not again when the group is resharded
                self._refusal = (
                    f"{changed[0]}: changed inside inference(), where the parameters that were unsharded "
                    "before are used. Leave the context, change weights, and enter it again."
                )
        if self._refusal is not None:
            raise RuntimeError(self._refusal)

    def _make_good(self) -> None:
        """After a failed forward, unshard its remaining groups: the other ranks wait for that."""
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
        """Whether any rank is about to run a forward, and whether its all-gathers must be announced."""
        asks = not runs or self._plan is None
        somebody_runs, somebody_asks = self._highest([runs, asks])
        return bool(somebody_runs), bool(somebody_asks)

    def _announce(self, place: int) -> int:
        """The group that ranks in a forward unshard next: 1 + its index in the root, or 0 at the end."""
        return self._highest([place])[0]

    def _highest(self, own: Sequence[int]) -> list[int]:
        """The maximum of each over the ranks."""
        highest = torch.tensor(own, dtype=torch.int32, device=self.root.device)
        with monitor_of_job().collective(self._wait):
            all_reduce_max(highest, self._axes)
            return highest.tolist()  # type: ignore[no-any-return]


def begin_inference(root: Root, groups: Sequence[ParameterGroup], budget: float) -> int:
    """Keep as many groups unsharded as fit into ``budget`` bytes; return the bytes they take."""
    if root.find(Inference) is not None:
        raise RuntimeError(
            f"inference: {groups[0].name} is in another inference() already, which would end with this "
            "one. Leave it first."
        )
    root.ensure_ready()
    kept: list[ParameterGroup] = []
    taken = 0
    for group in groups:
        if taken + group.unsharded.num_bytes <= budget:
            kept.append(group)
            taken += group.unsharded.num_bytes
    root.wait_for_optimizer()
    for group in root.groups:
        root.unsharded_groups.reshard(group)  # a group kept from before may be stale
    for group in kept:
        root.unsharded_groups.unshard(group, IN_USE)
    for group in kept:
        group.unsharded.wait()
    for group in kept:
        root.unsharded_groups.reasons[group] = INFERENCE
    root.add(Inference(root, groups, set(kept)))
    return taken


def end_inference(root: Root) -> None:
    """Leave the ``inference()`` of ``root``."""
    inference = root.find(Inference)
    assert inference is not None
    inference.end()


def _play(groups: Sequence[ParameterGroup]) -> None:
    """Take part in all-gathers of other ranks, all at once, since those may wait in a different order."""
    pending: list[ParameterGroup] = []
    for group in [*groups, None]:
        if group is None or group in pending:  # unsharded a second time
            for each in pending:
                each.unsharded.wait()
                each.unsharded.reshard()
            pending.clear()
        if group is not None:
            group.unsharded.unshard()
            pending.append(group)
