"""The sharded parameters of a group. The next unshard adopts what the caller has done to them.

Between passes the shards belong to the caller, who may replace, move, cast, freeze, unfreeze, rename and hook
them. The group checks for changes before it communicates, and looks closely only if it finds one.
"""

from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwise.buckets.bucket import Bucket
from shardwise.buckets.extension import check_before_training, is_extension, split_off
from shardwise.groups.states import EMPTY, SHARDED
from shardwise.layout.fqns import listed
from shardwise.params.changes import ShardSnapshot
from shardwise.params.parameter import Param
from shardwise.params.replaced_parameter import find_replacement
from shardwise.torch_compat import dtensor

if TYPE_CHECKING:
    from shardwise.groups.group import ParameterGroup

_is_on_meta = attrgetter("flat_shard.bytes.is_meta")


class Shards:
    """The sharded parameters of ``group``, as it last saw them."""

    def __init__(self, group: "ParameterGroup") -> None:
        self._group = group
        self._snapshot: ShardSnapshot | None = None
        self.params: list[Param] = []
        self.rnns: list[nn.RNNBase] = []
        """Modules that keep a list of their own of the parameters that are shown."""
        self.is_tensor_parallel = False
        self.are_replicated = False

    def take_stock(self) -> None:
        """Start over with the parameters that the buckets have now, while none is unsharded."""
        group = self._group
        self.params = [param for bucket in group.buckets for param in bucket.params]
        self.are_replicated = any(not bucket.mesh.replicate_axis.is_alone for bucket in group.buckets)
        self.is_tensor_parallel = any(param.original.is_tensor_parallel for param in self.params)
        self._snapshot = None  # made when the shards are first checked for changes
        modules = dict.fromkeys(site.module for param in self.params for site in param.sites)
        self.rnns = [module for module in modules if isinstance(module, nn.RNNBase)]
        group.unsharded.forget()
        group.gradients.forget()
        group.reductions.forget()
        group.listener.plan_changed()

    # --- change of buckets, change of groups ------------------------------------------------------

    def replan(self, change: Callable[[Bucket], None], only: Bucket | None = None) -> None:
        """Let ``change`` lay out the buckets again, while nothing is unsharded or unreduced."""
        self._refuse_change()
        for bucket in self._group.buckets if only is None else [only]:
            change(bucket)
        self.take_stock()

    def _refuse_change(self) -> None:
        group = self._group
        if group.unsharded.state is not SHARDED or group.gradients.state is not EMPTY:
            raise RuntimeError(
                f"{group.name}: its communication cannot be changed while its parameters are "
                f"{group.unsharded.state.value} and its gradients {group.gradients.state.value}. Change it "
                "between steps, after a backward with gradient synchronisation."
            )

    def follow_protocols(self) -> None:
        """Give a bucket of its own to each shard that has gained a protocol to all-gather itself."""
        group = self._group
        for bucket in group.buckets:
            check_before_training(bucket)
        if not any(is_extension(p.local) for b in group.buckets if b.takes_more for p in b.params):
            return
        self._refuse_change()
        with torch.inference_mode(False), torch.no_grad():
            split = [split_off(bucket, group.casts.policy) for bucket in group.buckets]
        group.buckets = [bucket for buckets in split for bucket in buckets]
        self.take_stock()

    def give_up(self, param: Param) -> None:
        """Give up a parameter, which another group is about to take."""
        owner = next(bucket for bucket in self._group.buckets if param in bucket.params)
        owner.params.remove(param)
        if owner.params:
            owner.rebuild_flat_shard()
        else:
            self._group.buckets.remove(owner)
        self.take_stock()

    def take_in(self, param: Param, bucket_for: Callable[[Param], Bucket]) -> None:
        """Take a parameter that another group has given up, into the bucket of its mesh."""
        for bucket in self._group.buckets:
            if bucket.mesh is param.mesh and bucket.takes_more:
                bucket.params.append(param)
                break
        else:
            bucket = bucket_for(param)
            self._group.buckets.append(bucket)
        bucket.rebuild_flat_shard()
        self.take_stock()

    def rename(self, names: Mapping[nn.Module, str]) -> None:
        """Take over the names that an outer module has for our modules, as far as ``names`` has them."""
        for param in self.params:
            param.rename(names)

    # --- adopting the caller's changes ------------------------------------------------------------

    def adopt_replaced(self) -> None:
        """Adopt parameters that the caller has registered in place of ours, while nothing is unsharded."""
        if self._group.unsharded.state is not SHARDED:
            return
        replacements = [(param, find_replacement(param)) for param in self.params]
        _refuse_new_ties(replacements)
        for param, new in replacements:
            if new is not None:
                param.adopt(new)

    def on_meta(self) -> list[str]:
        """Names of parameters on the meta device, which have no values yet."""
        return [param.fqn for param in self.params if param.sharded.is_meta]

    def follow_as_soon_as_here(self) -> None:
        """Adopt shards that were just moved, cast or assigned, once all are on the group's devices."""
        for bucket in self._group.buckets:
            here = (bucket.storage.device, self._group.device)
            for param in bucket.params:
                found = [site.registered() for site in param.sites]
                if any(t is param.sharded for t in found) and any(t is not param.sharded for t in found):
                    return  # tied, and the load has not reached its other module yet
                for tensor in found:
                    if not (isinstance(tensor, DTensor) and dtensor.local_tensor(tensor).device in here):
                        return
        if self._group.unsharded.state is SHARDED:
            self.follow()
        for param in self.params:
            param.describe_itself()

    def follow(self) -> bool:
        """Adopt what was assigned, moved, cast, frozen or unfrozen since the last call; True if any was."""
        fulls = self._group.unsharded.params
        if self._snapshot is not None and self._snapshot.is_untouched(fulls) and not self._are_on_meta():
            return False
        self.adopt_replaced()
        if self._are_on_meta() or any(dtensor.local_tensor(p.sharded) is not p.local for p in self.params):
            self._move_in()
        self.follow_freezing()
        return True

    def follow_freezing(self) -> None:
        """Copy ``requires_grad`` of the shards to the unsharded parameters, and hook these."""
        for param in self.params:
            if param.unsharded is not None and param.unsharded.requires_grad != param.sharded.requires_grad:
                param.unsharded.requires_grad_(param.sharded.requires_grad)
                self._group.listener.plan_changed()
        # Before the first unshard there are no unsharded parameters: Unsharded.make calls this again.
        self._group.gradients.attach_hooks()
        self._snapshot = ShardSnapshot(self.params)

    def _are_on_meta(self) -> bool:
        return any(map(_is_on_meta, self._group.buckets))

    def _move_in(self) -> None:
        """Copy shards that are stored elsewhere into new flat shards."""
        self.refuse_meta()
        unsharded = self._group.unsharded
        carried = [full.grad for full in unsharded.params]
        is_planned_anew = [bucket.sync_flat_shard() for bucket in self._group.buckets]
        if not any(is_planned_anew):
            return
        self.take_stock()
        if any(gradient is not None for gradient in carried):
            unsharded.make()
            for bucket in unsharded.buckets:
                bucket.buffer.free()
            for full, gradient, param in zip(unsharded.params, carried, self.params, strict=True):
                full.grad = None if gradient is None else gradient.to(param.precision.accumulated)

    def refuse_meta(self) -> None:
        """Refuse to run while parameters are on the meta device."""
        if names := self.on_meta():
            raise RuntimeError(f"Cannot run forward: {meta_message(names)}")

    # --- questions --------------------------------------------------------------------------------

    @property
    def were_looked_at(self) -> bool:
        """True once they have been unsharded, and compared with a snapshot since."""
        return self._snapshot is not None

    def snapshot(self) -> ShardSnapshot:
        """A snapshot of all of them, which answers questions in loops that run in C."""
        if self._snapshot is None:
            self._snapshot = ShardSnapshot(self.params)
        return self._snapshot

    @property
    def are_offloaded(self) -> bool:
        """True if some are in host memory, and computation is on a device."""
        return any(bucket.is_offloaded for bucket in self._group.buckets)

    @property
    def can_be_compared(self) -> bool:
        """False if unsharded parameters have to be unsharded again, whether or not their contents changed."""
        return all(bucket.can_be_compared for bucket in self._group.unsharded.buckets)

    def differ(self) -> Tensor:
        """Whether this rank's shards changed since the all-gather, as a bool on the device."""
        if not self.can_be_compared:
            return torch.ones((), dtype=torch.bool, device=self._group.device)
        found = [bucket.differs() for bucket in self._group.unsharded.buckets]
        if not found:  # a group without parameters
            return torch.zeros((), dtype=torch.bool, device=self._group.device)
        return torch.stack(found).any()


def _refuse_new_ties(replacements: Sequence[tuple[Param, nn.Parameter | None]]) -> None:
    """Refuse one sharded parameter in the places of two: a gradient would be lost."""
    owners: dict[int, Param] = {}
    for param, new in replacements:
        first = owners.setdefault(id(param.sharded if new is None else new), param)
        if first is not param:
            raise RuntimeError(
                f"{first.fqn} and {param.fqn} were tied after fully_shard: one parameter stands in both "
                "places now. Tie them before fully_shard, or keep two parameters."
            )


def meta_message(names: Sequence[str]) -> str:
    """The error text for parameters on the meta device that are about to be used."""
    are = "parameters are" if len(names) > 1 else "parameter is"
    return (
        f"{len(names)} {are} still on the meta device: {listed(names)}. Nothing has given them values. Call "
        "shardwise.materialize(model), or load a checkpoint, first."
    )
