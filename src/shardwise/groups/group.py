"""The parameters of one ``fully_shard`` call: their identity, settings, and the owners of their two states.

    ParameterGroup
      settings      the caller's choices
      shards        the registered parameters, and the caller's changes to them
      unsharded     the full parameters: SHARDED -> UNSHARDING -> UNSHARDED -> SHARDED
      gradients     EMPTY -> PENDING -> REDUCING -> EMPTY, and their reductions

``unsharded`` knows ``shards``, and ``gradients`` knows both; operations on all three are here. The root
decides *when* something happens to a group. The group knows *whether* that is allowed, and how.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise.buckets.bucket import Bucket
from shardwise.buckets.extension import check_before_training, is_extension, split_off
from shardwise.comm.streams import CommStreams, nothing
from shardwise.groups.gradients import Gradients
from shardwise.groups.managed_modules import AddedParameters, SideTensors
from shardwise.groups.shards import Shards
from shardwise.groups.states import EMPTY, PENDING, SHARDED, SUMMONED, Settings
from shardwise.groups.unsharded import Observer, Unsharded, refuse_summoned
from shardwise.layout.fqns import listed
from shardwise.layout.mesh import Axis, ShardMesh
from shardwise.layout.precision import Casts
from shardwise.params.parameter import Param, Site, name_of_replaced
from shardwise.policies import CommPolicy
from shardwise.ranks.activity import Wait
from shardwise.ranks.failures import monitor_of_job
from shardwise.torch_compat import c10d, dtensor


@dataclass(frozen=True, eq=False)
class Tie:
    """A place that registers a parameter that another group has taken: the two groups are tied."""

    site: Site
    original: nn.Parameter


class ParameterGroup:
    """The parameters of one ``fully_shard`` call, in buckets by mesh.

    ``modules`` are those of the call. ``managed_modules`` are these and all inside, except those that other
    calls have sharded: every module that registers a parameter of the group. ``plan_changed`` is called when
    parameters were replaced, frozen or unfrozen; ``changes_adopted`` when the group has adopted the caller's
    changes in a pass, and has not communicated yet.
    """

    streams: CommStreams

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
        self.modules = tuple(modules)
        self.managed_modules = tuple(managed_modules)
        self.mesh = mesh  # of the fully_shard call; shard_placement_fn may give a parameter another
        self.device = mesh.device
        self.policy = policy
        self.casts = casts
        self.ties: list[Tie] = []
        self.ignored: list[nn.Parameter] = []
        self.choices: set[str] = set()  # setters and hooks that have chosen how to communicate
        self.partly_loaded: str | None = None  # why a load failed halfway
        self.added = AddedParameters(managed_modules)
        self.side_tensors = SideTensors(managed_modules)
        self.observer: Observer | None = None
        self.traced: Any = None  # facts of the last trace
        self.plan_changed: Callable[[], None] = nothing
        self.changes_adopted: Callable[[], None] = nothing
        self.trained_changed: Callable[[], None] = nothing
        self.shards = Shards(name, buckets, mesh.device)
        self.unsharded = Unsharded(self.shards, self._prepare_unshard, self._adopt_freezing)
        self.gradients = Gradients(
            self.shards, self.unsharded, tells_each=policy.backward_prefetch == "after"
        )
        self._ignored_awaited = Wait("average of ignored_params' gradients", name, list)
        self.configure()

    @property
    def name(self) -> str:
        """The name of its modules, as seen from the outermost sharded module."""
        return self.shards.name

    @property
    def buckets(self) -> list[Bucket]:
        """Its parameters by mesh."""
        return self.shards.buckets

    # --- configuration ----------------------------------------------------------------------------

    settings = Settings()

    def configure(self, **changes: Any) -> None:
        """Change settings."""
        self.settings = self.gradients.settings = replace(self.settings, **changes)

    def take_settings(self, other: "ParameterGroup") -> None:
        """Take over the settings of ``other``, except the modules to prefetch."""
        self.settings = other.settings
        self.configure(forward_prefetch=None, backward_prefetch=None)
        self.unsharded.keeps_storage = other.unsharded.keeps_storage
        self.choices = set(other.choices)
        self.partly_loaded = other.partly_loaded

    def observe(self, observer: Observer | None) -> None:
        """Report every event to ``observer`` from now on."""
        self.observer = self.unsharded.observer = self.gradients.observer = observer

    def attach(self, streams: CommStreams) -> None:
        """Give the group its streams, and register its waits, so that other ranks learn of its failures."""
        self.use_streams(streams)
        monitor = monitor_of_job()
        for awaited, stream in (
            (self.unsharded.awaited, streams.all_gather),
            (self.gradients.awaited, streams.reduce_scatter),
        ):
            awaited.name, awaited.axes, awaited.monitor = self.name, self.all_axes, monitor
            awaited.stream = stream if streams.are_device_streams else None
            monitor.note_wait(awaited)
        self._ignored_awaited.name, self._ignored_awaited.axes = self.name, self.all_axes

    def use_streams(self, streams: CommStreams) -> None:
        """Communicate on ``streams`` from now on."""
        self.streams = self.unsharded.streams = self.gradients.streams = streams

    def rename(self, names: Mapping[nn.Module, str]) -> None:
        """Adopt the names that an outer module has for our modules, where ``names`` has them."""
        self.shards.rename(names, self.modules)

    # --- its parameters ---------------------------------------------------------------------------

    @torch.no_grad()
    def make_shards(self) -> list[nn.Parameter]:
        """Lay out the buckets, and make their shards from the full parameters. Touches no module."""
        with torch.inference_mode(False):
            return [shard for bucket in self.buckets for shard in bucket.make_shards()]

    def install(self, shards: Sequence[nn.Parameter]) -> None:
        """Register the shards in the modules, in place of the full parameters."""
        for param, sharded in zip(self.shards.params, shards, strict=True):
            param.install_shard(sharded)

    def take_stock(self) -> None:
        """Start over with the current parameters of the buckets, while none is unsharded."""
        self.shards.take_stock()
        self.unsharded.drop()
        self.gradients.start_over()
        self.plan_changed()

    def replan(self, change: Callable[[Bucket], None], only: Bucket | None = None) -> None:
        """Let ``change`` lay out the buckets again, while nothing is unsharded or unreduced."""
        self._refuse_replan()
        for bucket in self.buckets if only is None else [only]:
            change(bucket)
        self.take_stock()

    def _refuse_replan(self) -> None:
        if self.unsharded.state is not SHARDED or self.gradients.state is not EMPTY:
            raise RuntimeError(
                f"{self.name}: its communication cannot be changed while its parameters are "
                f"{self.unsharded.state.value} and its gradients {self.gradients.state.value}. Change it "
                "between steps, after a backward with gradient synchronisation."
            )

    def adopt_protocols(self) -> None:
        """Give a separate bucket to each shard that has gained a protocol to all-gather itself."""
        for bucket in self.buckets:
            check_before_training(bucket)
        if not any(is_extension(p.local) for b in self.buckets if b.takes_more for p in b.params):
            return
        self._refuse_replan()
        with torch.inference_mode(False), torch.no_grad():
            split = [split_off(bucket, self.casts.policy) for bucket in self.buckets]
        self.shards.buckets = [bucket for buckets in split for bucket in buckets]
        self.take_stock()

    def give_up(self, param: Param) -> None:
        """Give up a parameter that another group is about to take."""
        owner = next(bucket for bucket in self.buckets if param in bucket.params)
        owner.params.remove(param)
        if owner.params:
            owner.rebuild_flat_shard()
        else:
            self.buckets.remove(owner)
        self.take_stock()

    def take_in(self, param: Param, bucket_for: Callable[[Param], Bucket]) -> None:
        """Take a parameter that another group has given up, into the bucket of its mesh."""
        for bucket in self.buckets:
            if bucket.mesh is param.mesh and bucket.takes_more:
                bucket.params.append(param)
                break
        else:
            bucket = bucket_for(param)
            self.buckets.append(bucket)
        bucket.rebuild_flat_shard()
        self.take_stock()

    # --- adopting the caller's changes ------------------------------------------------------------

    def adopt_replaced(self) -> None:
        """Adopt parameters that the caller has registered in place of ours, while nothing is unsharded."""
        if self.unsharded.state is SHARDED:
            self.shards.adopt_replaced()

    def adopt_changes(self) -> bool:
        """Adopt parameters that were assigned, moved, cast, frozen or unfrozen since the last call.

        True if there were any, or if this is the first call.
        """
        if self.shards.are_untouched(self.unsharded.full_params):
            return False
        self.shards.refuse_assigned_data()
        self.adopt_replaced()
        if self.shards.are_elsewhere():
            self._move_in()
        self._sync_requires_grad()
        return True

    def adopt_when_moved(self) -> None:
        """Adopt shards that were just moved, cast or assigned, once all are on the group's devices."""
        if not self.shards.are_all_here():
            return
        if self.unsharded.state is SHARDED:
            self.adopt_changes()
        for param in self.shards.params:
            param.restore_metadata()

    def _prepare_unshard(self) -> None:
        """Adopt changes; at the first call, make the full parameters and hook them."""
        if self.adopt_changes():
            self.changes_adopted()
            self.streams.all_gather.wait_for_compute()  # the compute stream may have moved the shards
        if not self.unsharded.is_made:
            self.unsharded.make()
            self.gradients.attach_hooks()

    def _adopt_freezing(self) -> None:
        if self.gradients.state is not PENDING:
            self._sync_requires_grad()
            self.changes_adopted()

    def adopt_freezing(self) -> None:
        """Adopt parameters that a forward has frozen or unfrozen, perhaps only for now: ranks compare them
        before the next forward."""
        if self.shards.are_as_trainable():
            return
        if self.gradients.state is PENDING:
            raise RuntimeError(
                f"{self.name}: parameters were frozen or unfrozen in a forward that activation checkpointing "
                "runs again, while gradients of their group arrive. Call fully_shard on the module that is "
                "frozen, before the module around it; or freeze it outside of what is checkpointed."
            )
        self._sync_requires_grad()
        self.trained_changed()

    def _sync_requires_grad(self) -> None:
        """Copy ``requires_grad`` of the shards to the unsharded parameters, and hook these."""
        for param in self.shards.params:
            if param.unsharded is not None and param.unsharded.requires_grad != param.sharded.requires_grad:
                param.unsharded.requires_grad_(param.sharded.requires_grad)
                self.plan_changed()
        # Before the first unshard there are no unsharded parameters to hook.
        self.gradients.attach_hooks()
        self.shards.look()

    def _move_in(self) -> None:
        """Copy shards that are stored elsewhere into new flat shards."""
        self.shards.refuse_meta()
        unsharded = self.unsharded
        carried = [full.grad for full in unsharded.full_params]
        is_planned_anew = [bucket.sync_flat_shard() for bucket in self.buckets]
        if not any(is_planned_anew):
            return
        self.take_stock()
        if any(gradient is not None for gradient in carried):
            unsharded.make()
            self.gradients.attach_hooks()
            for bucket in unsharded.buckets:
                bucket.buffer.free()
            for full, gradient, param in zip(unsharded.full_params, carried, self.shards.params, strict=True):
                full.grad = None if gradient is None else gradient.to(param.precision.accumulated)

    # --- checks -----------------------------------------------------------------------------------

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

    def refuse_if_summoned(self, what: str) -> None:
        """Refuse ``what`` inside ``unsharded()``, which lends the parameters to the caller."""
        if self.unsharded.state is SUMMONED:
            refuse_summoned(self.name, what)

    def refuse_added(self, names: Mapping[nn.Module, str]) -> None:
        """Refuse parameters that were added after sharding: no group would reduce their gradients.

        ``names``: the name of every module of the tree.
        """
        added = self.added.find_added(names, self.unsharded.full_params)
        if not added:
            return
        for where, tensor in added:
            if ours := [param.fqn for param in self.shards.params if param.unsharded is tensor]:
                raise RuntimeError(
                    f"{where}: forward assigned the unsharded parameter {ours[0]} to this attribute. Its "
                    "memory is freed after forward. Keep a copy (.clone())."
                )
        shown = listed((where for where, _ in added), 4)
        were = "these parameters were" if len(added) > 1 else "this parameter was"
        raise RuntimeError(
            f"{shown}: {were} added after fully_shard (group '{self.name}'). No group reduces the "
            "gradients, so they would stay this rank's own and the ranks would drift apart. Add parameters "
            "before fully_shard, call fully_shard on the new module, or freeze what is not to be trained."
        )

    # --- ignored parameters -----------------------------------------------------------------------

    @torch.no_grad()
    def average_ignored(self) -> None:
        """Average the gradients of ignored parameters over all ranks, if gradients are synchronised now.

        Every trainable one takes part on every rank, with zeros if it has no gradient, so all ranks send the
        same number of bytes.
        """
        if not self.settings.requires_gradient_sync:
            return
        trainable = [param for param in self.ignored if param.requires_grad]
        for param in trainable:
            if param.grad is None:
                param.grad = torch.zeros_like(param)
        gradients = [dtensor.plain(param.grad) for param in trainable if param.grad is not None]
        if gradients:
            with monitor_of_job().collective(self._ignored_awaited):
                for axis in self.mesh.axes():
                    _average(gradients, axis)

    # --- questions --------------------------------------------------------------------------------

    @property
    def max_in_flight(self) -> int:
        """The number of reductions that may be in flight: more give more overlap, and take more memory."""
        return self.settings.max_reductions + self.shards.are_replicated

    def all_axes(self) -> list[Axis]:
        """The axes along which it communicates, the longest first."""
        axes = {id(axis.pg): axis for bucket in self.buckets for axis in bucket.communication.axes()}
        return sorted(axes.values(), key=lambda axis: -axis.world)

    def __del__(self) -> None:
        """Keep communication in flight alive: the back end still writes into its memory."""
        own = vars(self)  # incomplete in a copy that failed
        if "gradients" in own:
            under_way = [self.unsharded.work, *self.gradients.in_flight()]
            if any(each is not None for each in under_way):
                c10d.keep_until_exit(under_way)


def _average(gradients: list[Tensor], axis: Axis) -> None:
    """Average tensors over the ranks of ``axis``, in place, with one all-reduce for each dtype."""
    for dtype in dict.fromkeys(g.dtype for g in gradients):
        same = [g for g in gradients if g.dtype == dtype]
        flat = torch.cat([g.reshape(-1) for g in same]).div_(axis.world)
        dist.all_reduce(flat, group=axis.pg)
        for gradient, part in zip(same, flat.split([g.numel() for g in same]), strict=True):
            gradient.copy_(part.view_as(gradient))


def open_tie_message(fqn: str, other: str) -> str:
    """The error text for parameter ``fqn``, tied to the parameter that ``other`` describes."""
    return (
        f"{fqn} is tied to {other} was sharded in another fully_shard call, and no sharded module contains "
        "both, to own the parameter. Call fully_shard on the module around both, after these two, or shard "
        "both in one call, as a list."
    )


def shard_axes_of(groups: Sequence[ParameterGroup]) -> list[Axis]:
    """The axes over which the parameters of ``groups`` are sharded, the longest first."""
    every = [bucket.mesh.shard_axis for group in groups for bucket in group.buckets]
    axes = {id(axis.pg): axis for axis in every if not axis.is_alone}
    return sorted(axes.values(), key=lambda axis: -axis.world)
