"""The parameters of one ``fully_shard`` call: their identity, settings, and the owners of their two states.

    ParameterGroup
      settings      what the caller has chosen
      shards        the registered parameters, and what the caller does to them
      unsharded     the full parameters: SHARDED -> UNSHARDING -> UNSHARDED -> SHARDED
      gradients     EMPTY -> PENDING -> REDUCING -> EMPTY
      reductions    those of its gradients that are in flight

The root decides *when* something happens to a group. The group knows *whether* that is allowed, and how.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import torch
from torch import nn

from shardwise.buckets.bucket import Bucket
from shardwise.comm.streams import CommStreams
from shardwise.groups.added_parameters import ModuleWatch
from shardwise.groups.casts import Casts
from shardwise.groups.gradients import Gradients
from shardwise.groups.reductions import Reductions
from shardwise.groups.settings import Settings
from shardwise.groups.shards import Shards
from shardwise.groups.side_tensors import SideTensors
from shardwise.groups.states import SUMMONED
from shardwise.groups.unsharded import Unsharded
from shardwise.groups.waits import Waits
from shardwise.layout.fqns import clean, listed
from shardwise.layout.mesh import Axis, ShardMesh
from shardwise.params.parameter import Site
from shardwise.params.replaced_parameter import name_of_replaced
from shardwise.policies import CommPolicy
from shardwise.torch_compat import c10d

_T = TypeVar("_T")


class Observer(Protocol):
    """Called with every event and the name of its group."""

    def __call__(self, event: str, name: str, /) -> None:
        """``event`` has happened to the group of this name."""


class Listener:
    """Called with what happens to one group, to decide what to do when. This one does nothing."""

    def gradient_arrived(self) -> None:
        """An unsharded gradient has arrived: the first of a backward, or any where each is asked for."""

    def part_complete(self) -> None:
        """Some gradients may be reduced before the others."""

    def gradients_complete(self) -> None:
        """The gradients of all trainable parameters have arrived."""

    def plan_changed(self) -> None:
        """Parameters were replaced, frozen or unfrozen."""

    def changes_followed(self) -> None:
        """In a pass, the group has adopted changes of the caller, and has not communicated yet."""


@dataclass(frozen=True, eq=False)
class Tie:
    """A place that registers a parameter which another group has taken: the two groups are tied."""

    site: Site
    original: nn.Parameter


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


class ParameterGroup:
    """The parameters of one ``fully_shard`` call, in buckets by mesh.

    ``modules`` are those of the call. ``managed_modules`` are these and all inside, but for those that other
    calls have sharded: every module that registers a parameter of the group.
    """

    def __init__(
        self,
        name: str,
        modules: Sequence[nn.Module],
        managed_modules: Sequence[nn.Module],
        buckets: list[Bucket],
        mesh: ShardMesh,
        policy: CommPolicy,
        casts: Casts,
    ) -> None:
        self.name = name
        self.modules = tuple(modules)
        self.managed_modules = tuple(managed_modules)
        self.buckets = buckets
        self.mesh = mesh  # of the fully_shard call; shard_placement_fn may give a parameter another
        self.device = mesh.device
        self.policy = policy
        self.casts = casts
        self.settings = Settings()
        self.ties: list[Tie] = []
        self.ignored: list[nn.Parameter] = []
        self.choices: set[str] = set()  # which setters have chosen how to communicate
        self.partly_loaded: str | None = None  # why a load failed half-way
        self.added = ModuleWatch(managed_modules)
        self.side_tensors = SideTensors(managed_modules)
        self.observer: Observer | None = None
        self.traced: TracedWork | None = None  # what the last trace saw
        self.listener = Listener()
        self.streams: CommStreams
        self.waits = Waits(name)
        self.shards = Shards(self)
        self.unsharded = Unsharded(self)
        self.gradients = Gradients(self)
        self.reductions = Reductions(self)
        self.shards.take_stock()

    def configure(self, **changes: Any) -> None:
        """Change settings."""
        self.settings = replace(self.settings, **changes)

    def take_settings(self, other: "ParameterGroup") -> None:
        """Take over the settings of ``other``, except the modules to prefetch."""
        self.settings = replace(other.settings, forward_prefetch=None, backward_prefetch=None)
        self.choices = set(other.choices)
        self.partly_loaded = other.partly_loaded

    @torch.no_grad()
    def make_shards(self) -> list[nn.Parameter]:
        """Lay out the buckets, and make their shards from the full parameters. Touches no module."""
        with torch.inference_mode(False):
            return [shard for bucket in self.buckets for shard in bucket.make_shards()]

    def install(self, shards: Sequence[nn.Parameter]) -> None:
        """Register the shards in the modules, in place of the full parameters."""
        for param, sharded in zip(self.shards.params, shards, strict=True):
            param.install_shard(sharded)

    def attach(self, streams: CommStreams) -> None:
        """Give the group the streams on which it communicates."""
        self.streams = streams
        self.waits.attach(self.name, self.all_axes, streams)

    def rename(self, names: Mapping[nn.Module, str]) -> None:
        """Take over the names that an outer module has for our modules, as far as ``names`` has them."""
        found = [clean(names[module]) for module in self.modules if module in names]
        if len(found) == len(self.modules):
            self.name = ", ".join(found)
        self.shards.rename(names)

    # --- what is refused --------------------------------------------------------------------------

    def refuse_open_ties(self) -> None:
        """Refuse a parameter tied to one of another group if no sharded module contains both."""
        if self.ties:
            tie = self.ties[0]
            raise RuntimeError(open_tie_message(tie.site.fqn, f"{name_of_replaced(tie.original)}, which"))

    def refuse_partly_loaded(self) -> None:
        """Refuse to run after a load that failed halfway."""
        if self.partly_loaded is not None:
            raise RuntimeError(
                f"{self.name}: the model is only partly loaded, because an earlier load failed "
                f"({self.partly_loaded}). Load a complete checkpoint before the next forward."
            )

    def refuse_if_summoned(self, what: str, instead: str = "Leave the context first.") -> None:
        """Refuse ``what`` inside ``unsharded()``, where the caller has the parameters."""
        if self.unsharded.state is SUMMONED:
            raise RuntimeError(
                f"{self.name}: {what} is not possible inside unsharded(), which has put full parameters in "
                f"place of the shards that its group works with. {instead}"
            )

    def refuse_added(self, names: Mapping[nn.Module, str]) -> None:
        """Refuse parameters that were added after sharding: no group would reduce their gradients.

        ``names``: the name of every module of the tree.
        """
        added = self.added.find_added(names, self.unsharded.params)
        if not added:
            return
        for where, tensor in added:
            ours = [param.fqn for param in self.shards.params if param.unsharded is tensor]
            if ours:
                raise RuntimeError(
                    f"{where}: forward assigned the unsharded parameter {ours[0]} to this attribute, which "
                    "makes it a second parameter, and its memory is freed after forward. Keep a copy "
                    "(.clone())."
                )
        shown = listed((where for where, _ in added), 4)
        were = "these parameters were" if len(added) > 1 else "this parameter was"
        raise RuntimeError(
            f"{shown}: {were} added after fully_shard (group '{self.name}'). No group reduces the "
            "gradients, so they would stay this rank's own and the ranks would drift apart. Add parameters "
            "before fully_shard, call fully_shard on the new module, or freeze what is not to be trained."
        )

    # --- questions --------------------------------------------------------------------------------

    @property
    def replicates(self) -> bool:
        """True if some of its shards are replicated."""
        return self.shards.are_replicated

    @property
    def max_in_flight(self) -> int:
        """How many reductions may be in flight at once: more overlap, for more memory."""
        return self.settings.max_reductions + (1 if self.replicates else 0)

    def axes(self) -> list[Axis]:
        """The axes over which its parameters are sharded, the longest first."""
        axes = {
            id(axis.pg): axis for b in self.buckets for axis in b.mesh.axes() if axis is b.mesh.shard_axis
        }
        return sorted(axes.values(), key=lambda axis: -axis.world)

    def all_axes(self) -> list[Axis]:
        """The axes along which it communicates, the longest first."""
        axes = {id(axis.pg): axis for bucket in self.buckets for axis in bucket.communication.axes()}
        return sorted(axes.values(), key=lambda axis: -axis.world)

    # --- reporting --------------------------------------------------------------------------------

    def labelled(self, what: str, work: Callable[[], _T]) -> Callable[[], _T]:
        """``work`` in a profiler range for ``what``, a row of a trace. Asked for while a profiler records."""

        def run() -> _T:
            with torch.autograd.profiler.record_function(f"shardwise.{what} {self.name}"):
                return work()

        return run

    def __del__(self) -> None:
        """Keep communication in flight alive: the back end still writes into its memory."""
        own = vars(self)  # incomplete in a copy that failed
        if "reductions" in own:
            under_way = [self.unsharded.in_flight, *self.reductions.in_flight()]
            if any(each is not None for each in under_way):
                c10d.keep_until_exit(under_way)


def open_tie_message(fqn: str, other: str) -> str:
    """The error text for parameter ``fqn``, tied to the parameter that the words ``other`` stand for."""
    return (
        f"{fqn} is tied to {other} was sharded in another fully_shard call, and no sharded module contains "
        "both, to own the parameter. Call fully_shard on the module around both, after these two, or shard "
        "both in one call, as a list."
    )


def axes_of(groups: Sequence[ParameterGroup]) -> list[Axis]:
    """The axes over which the parameters of ``groups`` are sharded, the longest first."""
    axes = {id(axis.pg): axis for group in groups for axis in group.axes() if not axis.is_alone}
    return sorted(axes.values(), key=lambda axis: -axis.world)
