"""The bucket: parameters of a group that share a mesh, and so their memory and their communication.

    Bucket
      communication      the collectives of its ranks
      stored, ...        where each parameter lies in its buffers, by dtype
      flat_shard         the shards of this rank
      make_unsharded()   UnshardedBucket: the unsharded parameters, and how to all-gather them
      reduction          how to reduce their gradients
      sharded_gradients  ``.grad`` of the shards

In most models a group has one bucket; it has several where its parameters are sharded over different meshes,
as experts are. A bucket knows *how*; its group knows whether and when.
"""

import weakref
from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.buckets.bucket_reduction import BucketReduction
from shardwise.buckets.communication import Communication
from shardwise.buckets.sharded_gradients import ShardedGradients
from shardwise.buckets.unsharded_bucket import UnshardedBucket
from shardwise.comm.buffers import FlatShard
from shardwise.layout.chunks import shard_of
from shardwise.layout.mesh import Axis, ShardMesh
from shardwise.layout.slots import ALIGNMENT, Layout, Slot, choose_direct, plan_layout
from shardwise.params.parameter import PLACE, Param
from shardwise.policies import CommPolicy
from shardwise.torch_compat import dtensor


@dataclass(frozen=True)
class ShardStorage:
    """Where sharded parameters are stored."""

    device: torch.device
    is_pinned: bool = False


class Bucket:
    """Parameters that share all-gathers and reduce-scatters."""

    def __init__(
        self, params: list[Param], mesh: ShardMesh, policy: CommPolicy, storage: ShardStorage
    ) -> None:
        self.params = params
        self.mesh = mesh
        self.storage = storage
        self.policy = policy
        self.communication = Communication(mesh)

    def communicate(self, **choices: Any) -> None:
        """Change some of ``CommOptions``, while everything is sharded."""
        if self.communication.would_change(choices):
            self.communication.use(replace(self.communication.options, **choices))
            self.rebuild_flat_shard()

    takes_more = True
    """Whether more parameters of the same mesh may join."""

    # --- planning ---------------------------------------------------------------------------------

    def make_shards(self) -> list[nn.Parameter]:
        """Lay out the bucket and make its sharded parameters from the originals; touches no module."""
        on_meta = any(param.sharded.is_meta for param in self.params)
        self.lay_out(torch.device("meta") if on_meta else self.storage.device)
        rank = self.mesh.shard_axis.rank
        shards = []
        for param, slot, view in zip(self.params, self.stored.slots, self.flat_shard.views, strict=True):
            part = shard_of(param.content(), slot, rank)
            if view.is_meta and not part.is_meta:
                # Other parameters of the bucket have no values yet: until then this one has its own memory.
                view = torch.empty(part.shape, dtype=part.dtype, device=self.storage.device)
            shards.append(param.make_shard(view.copy_(part)))
        return shards

    def lay_out(self, device: torch.device) -> None:
        """Plan buffers and collectives for the parameters of now; the flat shard is not filled yet."""
        self.stored = self._layout("stored")
        self.computed = self._layout("computed")
        self.reduced = self._layout("reduced")
        self.kept = self._layout("kept")
        is_pinned = self.storage.is_pinned and device.type == "cpu"
        self.flat_shard = FlatShard(self.stored, self.mesh.shard_axis.rank, device, is_pinned=is_pinned)
        self.sharded_gradients = ShardedGradients(self.params, self.kept, self.mesh.shard_axis.rank)
        before: BucketReduction | None = getattr(self, "reduction", None)
        self.reduction = BucketReduction(
            self.communication,
            self.reduced,
            self.policy.part_bytes,
            self.sharded_gradients,
            self.storage.device,
            self.storage.is_pinned,
        )
        if before is not None:
            self.reduction.carry_earlier(before)
        own = BucketRef(self)
        for index, param in enumerate(self.params):
            param.mark((own, index))

    def _layout(self, form: str, world: int | None = None, slots_serve: int | None = None) -> Layout:
        """The layout of the parameters in one of the dtypes of their Precision; equal layouts are shared."""
        dtypes = [getattr(param.precision, form) for param in self.params]
        if world is None and form != "stored":
            for other in ("stored", "computed", "reduced"):
                if other == form:
                    break
                if dtypes == [getattr(param.precision, other) for param in self.params]:
                    return getattr(self, other)
        own = self.mesh.shard_axis.world
        slots = [
            Slot(
                param.shape,
                dtype,
                dtype.itemsize,
                param.precision,
                max(1, ALIGNMENT // param.precision.smallest_itemsize),
                param.dim,
                own,
            )
            for param, dtype in zip(self.params, dtypes, strict=True)
        ]
        computed = [param.precision.computed.itemsize for param in self.params]
        is_direct = self._are_direct(
            [slot.chunk_numel * itemsize for slot, itemsize in zip(slots, computed, strict=True)]
        )
        if slots_serve is None and (axis := self.communication.options.post_forward_axis) is not None:
            slots_serve = axis.world
        return plan_layout(slots, own if world is None else world, is_direct, slots_serve)

    def post_forward_layout(self, axis: Axis) -> Layout:
        """The layout of the parameters as computed with, over the few ranks that keep them after forward."""
        return self._layout("computed", axis.world, self.mesh.shard_axis.world)

    def _are_direct(self, chunk_bytes: list[int]) -> list[bool]:
        """Whether parameters with shards of these sizes have collectives of their own, without copies."""
        comm, limit = self.communication.all_gather, self.policy.packing_limit_bytes
        packs_everything = comm.packs_everything or self.communication.reduce_scatter.packs_everything
        if packs_everything or self.is_quantized:
            return [False] * len(chunk_bytes)
        if limit is not None:
            return [size >= limit for size in chunk_bytes]
        world = self.mesh.shard_axis.world
        return choose_direct(chunk_bytes, world, comm.packing_limit_bytes, comm.most_direct)

    @property
    def is_quantized(self) -> bool:
        """True if unsharded parameters are only close to the sharded ones."""
        return self.policy.quantized_all_gather is not None and not self.mesh.shard_axis.is_alone

    @property
    def is_offloaded(self) -> bool:
        """True if sharded parameters are in host memory, and computation is on a device."""
        return self.storage.device != self.mesh.device

    def make_unsharded(self) -> UnshardedBucket:
        """Make the unsharded parameters."""
        return UnshardedBucket(self)

    @torch.no_grad()
    def sync_flat_shard(self) -> bool:
        """Copy moved, converted or assigned shards into a new flat shard; True if there were any.

        Not into the one that is there: what was assigned may be shards of ours, as where two parameters were
        swapped, and is overwritten then before it is read, here or by another bucket.
        """
        for param in self.params:
            local = dtensor.local_tensor(param.sharded)
            if local.device not in (self.storage.device, self.mesh.device):
                raise RuntimeError(
                    f"{param.fqn}: its shard is on {local.device}, but its mesh is of {self.mesh.device}, "
                    f"where it has to be unsharded. Move the model back with .to('{self.mesh.device}'), or "
                    "shard it over a mesh of the other device."
                )
        has_new_dtype = any(param.sharded.dtype != param.precision.stored for param in self.params)
        if has_new_dtype or self.flat_shard.bytes.device != self.storage.device:
            for param in self.params:
                param.adopt_dtype()
        elif all(
            dtensor.local_tensor(p.sharded) is v
            for p, v in zip(self.params, self.flat_shard.views, strict=True)
        ):
            return False
        self.rebuild_flat_shard()
        return True

    @torch.no_grad()
    def rebuild_flat_shard(self) -> None:
        """Lay out a new flat shard, and copy all shards into it."""
        if any(param.sharded.is_meta for param in self.params):
            self.lay_out(torch.device("meta"))
            return
        locals_ = [dtensor.local_tensor(param.sharded) for param in self.params]
        with torch.inference_mode(False):
            self.lay_out(self.storage.device)
            self.flat_shard.fill(locals_)
        for param, view in zip(self.params, self.flat_shard.views, strict=True):
            param.rebase(view)


class BucketRef(weakref.ref[Bucket]):
    """By which a sharded parameter knows its bucket. It does not travel: pickled or copied, it becomes an
    empty dict, which ``torch.load`` reads with ``weights_only`` as well."""

    __slots__ = ()

    def __reduce__(self) -> Any:
        """An empty dict."""
        return OrderedDict, ()


def bucket_and_index(param: Tensor) -> tuple[Bucket, int] | None:
    """The bucket of ``param`` and its index in it; None if it is no sharded parameter, or not that of its
    bucket any more."""
    ref, index = param.__dict__.get(PLACE, (None, 0))
    if not ref or (bucket := ref()) is None or bucket.params[index].sharded is not param:
        return None
    return bucket, index
