"""The sharded parameters of a group. What the caller does to them is followed at the next unshard.

Between passes the shards are the caller's: they may be replaced, moved, cast, frozen or unfrozen, under other
hooks and names. The group looks before it communicates, and only closely where something has changed.
"""

from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise.groups.states import EMPTY, SHARDED
from shardwise.params.bucket import Bucket
from shardwise.params.changes import ShardSnapshot
from shardwise.params.extension import check_protocol, has_methods, split_off
from shardwise.params.parameter import Param
from shardwise.torch_compat import dtensor
from shardwise.torch_compat.nn_modules import refresh_flat_weights

if TYPE_CHECKING:
    from shardwise.groups.group import ParameterGroup

_is_on_meta = attrgetter("shard.bytes.is_meta")


class Shards:
    """The parameters of ``group``, as it believes them to be."""

    def __init__(self, group: "ParameterGroup") -> None:
        self._group = group
        self._watch: ShardSnapshot | None = None
        self.params: list[Param] = []
        self._rnns: list[nn.RNNBase] = []
        self.is_tensor_parallel = False
        self.are_replicated = False

    def take_stock(self) -> None:
        """Begin anew with the parameters that the buckets have now, none of them unsharded."""
        group = self._group
        self.params = [param for bucket in group.buckets for param in bucket.params]
        self.are_replicated = any(not bucket.mesh.replicate.is_alone for bucket in group.buckets)
        self.is_tensor_parallel = any(param.is_tensor_parallel for param in self.params)
        self._watch = None  # made when the shards are first looked at
        modules = dict.fromkeys(site.module for param in self.params for site in param.sites)
        self._rnns = [module for module in modules if isinstance(module, nn.RNNBase)]
        group.unsharded.forget()
        group.gradients.forget()
        group.listener.plan_changed()

    # --- other buckets, other owners --------------------------------------------------------------

    def replan(self, change: Callable[[Bucket], None], only: Bucket | None = None) -> None:
        """Let ``change`` plan buckets anew, while nothing is unsharded."""
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
        """Give shards a bucket each whose local tensors were told since ``fully_shard`` how they gather."""
        group = self._group
        if not any(map(has_methods, group.buckets)):
            return
        self._refuse_change()
        for param in self.params:
            check_protocol(param.local, param.fqn)
        with torch.inference_mode(False), torch.no_grad():
            split = [split_off(bucket, group.casts.policy) for bucket in group.buckets]
        group.buckets = [bucket for buckets in split for bucket in buckets]
        self.take_stock()

    def give_up(self, param: Param) -> None:
        """Leave a parameter to another group, which is about to take it."""
        owner = next(bucket for bucket in self._group.buckets if param in bucket.params)
        owner.params.remove(param)
        if owner.params:
            owner.rebuild_flat_shard()
        else:
            self._group.buckets.remove(owner)
        self.take_stock()

    def take_in(self, param: Param, bucket_for: Callable[[Param], Bucket]) -> None:
        """Own a parameter that another group has given up, in the bucket of its mesh."""
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
        """Take names from the view of a module further out, where ``names`` knows our modules."""
        for param in self.params:
            param.rename(names)

    # --- what the caller has done -----------------------------------------------------------------

    def adopt_replaced(self) -> None:
        """Take over parameters that the caller has put in place of ours, while nothing is unsharded."""
        if self._group.unsharded.state is not SHARDED:
            return
        for param in self.params:
            new = param.replaced_by()
            if new is not None:
                param.adopt(new)

    def on_meta(self) -> list[str]:
        """Names of parameters that have no values yet."""
        return [param.fqn for param in self.params if param.sharded.is_meta]

    def follow_as_soon_as_here(self) -> None:
        """Take over shards that were just moved, cast or assigned, as soon as all have values here."""
        for bucket in self._group.buckets:
            here = (bucket.storage.device, self._group.device)
            for param in bucket.params:
                for tensor in [site.registered() for site in param.sites]:
                    if not (isinstance(tensor, DTensor) and dtensor.local_tensor(tensor).device in here):
                        return
        if self._group.unsharded.state is SHARDED:
            self.follow()
        for param in self.params:
            param.describe_itself()

    def follow(self) -> bool:
        """See what was assigned, moved, cast, frozen or unfrozen since the last look; True if any was."""
        fulls = self._group.unsharded.params
        if self._watch is not None and self._watch.is_untouched(fulls) and not self._are_on_meta():
            return False
        self.adopt_replaced()
        if self._are_on_meta() or any(dtensor.local_tensor(p.sharded) is not p.local for p in self.params):
            self._move_in()
        self.follow_freezing()
        return True

    def follow_freezing(self) -> None:
        """Train what is trained now."""
        for param in self.params:
            if param.unsharded is not None and param.unsharded.requires_grad != param.sharded.requires_grad:
                param.unsharded.requires_grad_(param.sharded.requires_grad)
                self._group.listener.plan_changed()
        self._group.gradients.watch()
        self._watch = ShardSnapshot(self.params)

    def _are_on_meta(self) -> bool:
        return any(map(_is_on_meta, self._group.buckets))

    def _move_in(self) -> None:
        """Bring shards that live elsewhere into the flat shards, planned anew if dtypes changed."""
        self.refuse_meta()
        unsharded = self._group.unsharded
        carried = [full.grad for full in unsharded.params]
        is_planned_anew = [bucket.sync_flat_shard() for bucket in self._group.buckets]
        if not any(is_planned_anew):
            return
        self.take_stock()
        if any(gradient is not None for gradient in carried):
            unsharded.make()
            for bucket in self._group.buckets:
                bucket.unsharded_buffer.free()
            for full, gradient, param in zip(unsharded.params, carried, self.params, strict=True):
                full.grad = None if gradient is None else gradient.to(param.precision.accumulated)
        else:
            for bucket in self._group.buckets:
                bucket.drop_unsharded_params()

    def refuse_meta(self) -> None:
        """Parameters without values cannot be used."""
        if names := self.on_meta():
            raise RuntimeError(f"Cannot run forward: {meta_message(names)}")

    # --- questions --------------------------------------------------------------------------------

    @property
    def were_looked_at(self) -> bool:
        """True once they have been unsharded, and are watched for changes."""
        return self._watch is not None

    def watch(self) -> ShardSnapshot:
        """What answers questions about all of them in passes that run in C."""
        if self._watch is None:
            self._watch = ShardSnapshot(self.params)
        return self._watch

    def is_stale(self) -> bool:
        """True if this rank's shards changed since the unsharded parameters were gathered from them."""
        return any(bucket.is_stale() for bucket in self._group.buckets)

    def refresh_flat_weights(self) -> None:
        """Let RNN modules see what stands in their places now."""
        if self._rnns:
            refresh_flat_weights(self._rnns)


def meta_message(names: Sequence[str]) -> str:
    """What to say when parameters without values are about to be used."""
    shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
    are = "parameters are" if len(names) > 1 else "parameter is"
    return (
        f"{len(names)} {are} still on the meta device: {shown}. Nothing has given them values. Call "
        "shardwise.materialize(model), or load a checkpoint, first."
    )
