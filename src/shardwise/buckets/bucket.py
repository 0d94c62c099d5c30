"""The bucket: parameters of a group that share a mesh, and so their memory and their communication.

    Bucket
      communication      the collectives of its ranks
      stored, ...        where each parameter lies in its buffers, by dtype
      flat_shard         the shards of this rank
      make_unsharded()   UnshardedBucket: the full parameters, their memory, and the all-gather that fills it
      reduction          how to reduce their gradients
      sharded_gradients  ``.grad`` of the shards

In most models a group has one bucket; it has several if its parameters are sharded over different meshes, as
experts are. A bucket knows *how*; its group knows whether and when.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.buckets.sharded_gradients import BucketReduction, ShardedGradients, all_start_at
from shardwise.comm.buffers import (
    AllGather,
    FlatShard,
    InPlaceAllGather,
    LocalViews,
    ShardStorage,
    UnshardedBuffer,
    bytes_of,
    cast_buffer,
    cast_segments,
    typed_segments,
)
from shardwise.comm.communicators import Communication
from shardwise.comm.custom import PooledCollectives
from shardwise.comm.quantized import Int8AllGather
from shardwise.comm.streams import CommStream, Finish, nothing, wait_and_release
from shardwise.layout.chunks import shard_of
from shardwise.layout.mesh import Axis, ShardMesh
from shardwise.layout.slots import ALIGNMENT, Layout, Slot, choose_direct, plan_layout
from shardwise.params.parameter import PLACE, Param
from shardwise.policies import CommPolicy
from shardwise.torch_compat import dtensor, tensor_impl


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
                # This one has separate memory until the bucket's other parameters have values.
                view = torch.empty(part.shape, dtype=part.dtype, device=self.storage.device)
            shards.append(param.make_shard(view.copy_(part)))
        return shards

    def lay_out(self, device: torch.device) -> None:
        """Plan for the current parameters, and make a flat shard, which is not filled yet."""
        self._plan()
        self._make_flat_shard(device)

    def _make_flat_shard(self, device: torch.device) -> None:
        is_pinned = self.storage.is_pinned and device.type == "cpu"
        self.flat_shard = FlatShard(self.stored, self.mesh.shard_axis.rank, device, is_pinned=is_pinned)

    def _plan(self) -> None:
        """Plan buffers and collectives for the current parameters."""
        axis = self.communication.options.post_forward_axis
        forms = [self._dtypes(form) for form in ("stored", "computed", "reduced", "kept")]
        own, few = self.mesh.shard_axis.world, None if axis is None else axis.world
        layouts = {each: self._layout(each, own, few) for each in dict.fromkeys(forms)}  # equal ones once
        self.stored, self.computed, self.reduced, self.kept = map(layouts.__getitem__, forms)
        self.sharded_gradients = ShardedGradients(self.params, self.kept, self.mesh.shard_axis.rank)
        before: BucketReduction | None = getattr(self, "reduction", None)
        self.reduction = BucketReduction(
            self.communication, self.reduced, self.policy.part_bytes, self.sharded_gradients, self.storage
        )
        if before is not None:
            self.reduction.carry_earlier(before)
        ref = tensor_impl.AttributeRef(self)
        for index, param in enumerate(self.params):
            param.mark((ref, index))

    def _dtypes(self, form: str) -> tuple[torch.dtype, ...]:
        return tuple(getattr(param.precision, form) for param in self.params)

    def _layout(self, dtypes: Sequence[torch.dtype], world: int, slots_serve: int | None) -> Layout:
        """The layout of the parameters in these dtypes; the slots also fit ``slots_serve`` ranks."""
        own, slots, chunk_bytes = self.mesh.shard_axis.world, [], []
        for param, dtype in zip(self.params, dtypes, strict=True):
            kind = param.precision
            granule = max(1, ALIGNMENT // kind.smallest_itemsize)
            slots.append(Slot(param.shape, dtype, dtype.itemsize, kind, granule, param.dim, own))
            chunk_bytes.append(slots[-1].chunk_numel * kind.computed.itemsize)
        return plan_layout(slots, world, self._are_direct(chunk_bytes), slots_serve)

    def post_forward_layout(self, axis: Axis) -> Layout:
        """The layout of the computed parameters, over the few ranks that keep them after forward."""
        return self._layout(self._dtypes("computed"), axis.world, self.mesh.shard_axis.world)

    def _are_direct(self, chunk_bytes: list[int]) -> list[bool]:
        """Whether parameters with shards of these sizes have their own collectives, without copies."""
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
        """True if unsharded parameters only approximate the sharded ones."""
        return self.policy.quantized_all_gather is not None and not self.mesh.shard_axis.is_alone

    @property
    def is_offloaded(self) -> bool:
        """True if sharded parameters are in host memory, and computation runs on a device."""
        return self.storage.device != self.mesh.device

    def make_unsharded(self) -> "UnshardedBucket":
        """Make the unsharded parameters."""
        return UnshardedBucket(self)

    @torch.no_grad()
    def sync_flat_shard(self) -> bool:
        """Copy moved, converted or assigned shards into a new flat shard; True if there were any.

        Not into the existing one: assigned tensors may be shards of ours, for example after two parameters
        were swapped, and would be overwritten before this or another bucket has read them.
        """
        locals_ = [dtensor.local_tensor(param.sharded) for param in self.params]
        for param, local in zip(self.params, locals_, strict=True):
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
        elif self.flat_shard.holds(locals_):
            return False
        self.rebuild_flat_shard()
        return True

    @torch.no_grad()
    def rebuild_flat_shard(self) -> None:
        """Lay out the bucket again; copy all shards into a new flat shard, if they do not lie as planned."""
        if any(param.sharded.is_meta for param in self.params):
            self.lay_out(torch.device("meta"))
            return
        locals_ = [dtensor.local_tensor(param.sharded) for param in self.params]
        before: FlatShard | None = getattr(self, "flat_shard", None)
        with torch.inference_mode(False):
            self._plan()
            if before is not None and before.layout == self.stored and before.holds(locals_):
                return
            self._make_flat_shard(self.storage.device)
            self.flat_shard.fill(locals_)
        for param, view in zip(self.params, self.flat_shard.views, strict=True):
            param.rebase(view)


class UnshardedBucket:
    """The unsharded parameters of ``bucket``, the same objects until it is laid out again.

    If sharded parameters are in host memory, or in a dtype other than that of the computation, the flat shard
    is first copied into a buffer to send from: one cast, one copy, for all parameters together.

    If a few ranks keep the parameters together between forward and backward, each has a post-forward shard:
    its part of all of them, in their compute dtypes.
    """

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self._device = bucket.mesh.device
        self._among_few: AllGather | None = None
        self._post_forward_shard: Tensor | None = None
        self._own_parts: list[Tensor] | None = None
        self.buffer = self._make_params()
        self.full_params = [param.unsharded for param in bucket.params if param.unsharded is not None]

    def _make_params(self) -> UnshardedBuffer:
        """Make the parameters, and everything needed to fill and check them; return their memory."""
        bucket, slots = self._bucket, self._bucket.computed.slots
        self._is_alone = bucket.mesh.shard_axis.is_alone
        # Whether the flat shard is the input of the all-gather.
        self._sends_flat_shard = bucket.computed is bucket.stored and not bucket.is_offloaded
        flat = bucket.flat_shard.bytes if self._sends_flat_shard else None
        buffer = UnshardedBuffer(bucket.computed, self._device, flat if self._is_alone else None)
        for param, slot in zip(bucket.params, slots, strict=True):
            param.make_unsharded(buffer.unsharded_tensor(slot))
        self._all_gather = None if self._is_alone else self._make_all_gather(buffer)
        self._pieces: list[Tensor] | None = None
        if bucket.computed is not bucket.stored:
            self._stored = typed_segments(bucket.flat_shard.bytes, bucket.stored)
            # Everything that `_to_send` depends on: buckets of other layouts use the same buffers.
            direct = [(slots[i].shard_offset, slots[i].chunk_bytes) for i in bucket.computed.direct]
            self._send_key = repr((direct, bucket.computed.packed_start, bucket.computed.segments))
        in_place = isinstance(self._all_gather, InPlaceAllGather)
        if self._all_gather is not None and flat is not None and not in_place:
            self._pieces = self._all_gather.cut(flat)
        comm, axis = bucket.communication.post_forward, bucket.communication.options.post_forward_axis
        if comm is not None and axis is not None:
            self._post_forward_rank, self._post_forward_layout = axis.rank, bucket.post_forward_layout(axis)
            self._among_few = AllGather(comm, self._post_forward_layout, buffer)
        self._placed = [param for param, slot in zip(bucket.params, slots, strict=True) if slot.slot_bytes]
        self._contents = [param.unsharded_data() for param in self._placed]
        self._offsets = [slot.slot_offset for slot in slots if slot.slot_bytes]
        self._start_from_flat_shard()
        return buffer

    def _make_all_gather(self, buffer: UnshardedBuffer) -> AllGather:
        comm, layout = self._bucket.communication.all_gather, self._bucket.computed
        if (quantized := self._bucket.policy.quantized_all_gather) is None:
            if isinstance(comm, PooledCollectives):
                return InPlaceAllGather(comm, layout, buffer, self._bucket.mesh.shard_axis.rank)
            return AllGather(comm, layout, buffer)
        return Int8AllGather(comm, layout, buffer, quantized.block_size)

    def start_all_gather(self, stream: CommStream) -> Finish:
        """Allocate the buffer and start to fill it; return the function that waits.

        Replaced on the instance if a buffer, usually the flat shard, can be sent directly.
        """
        self.buffer.allocate()
        flat = self._on_device(stream)
        if self._all_gather is None:  # a single rank
            if not self._sends_flat_shard:
                self._cast(flat, self.buffer.bytes)
            return nothing
        if isinstance(self._all_gather, InPlaceAllGather):
            return self._all_gather.start_from(partial(self._cast, flat))
        if self._bucket.computed is self._bucket.stored:
            return self._all_gather.start(stream, self._all_gather.cut(flat))
        scratch = stream.acquire(self._bucket.computed.shard_bytes, self._device)
        key = self._send_key
        targets, pieces = scratch.views.get(key) or scratch.make_view(key, self._to_send)
        is_copy = flat is not self._bucket.flat_shard.bytes
        cast_segments(typed_segments(flat, self._bucket.stored) if is_copy else self._stored, targets)
        return partial(wait_and_release, self._all_gather.start(stream, pieces), stream, (scratch,))

    def _to_send(self, buffer: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Of a buffer to send from: the segments that are cast into it, and the inputs of the all-gather."""
        assert self._all_gather is not None
        send = buffer[: self._bucket.computed.shard_bytes]
        return typed_segments(send, self._bucket.computed), self._all_gather.cut(send)

    def _start_from_flat_shard(self) -> None:
        vars(self).pop("start_all_gather", None)
        if self._all_gather is not None and self._pieces is not None:
            self.start_all_gather = partial(self._all_gather.start, inputs=self._pieces)  # type: ignore[method-assign]

    def _on_device(self, stream: CommStream) -> Tensor:
        """The flat shard on the computing device, in the stored dtypes."""
        flat = self._bucket.flat_shard.bytes
        if not self._bucket.is_offloaded:
            return flat
        return stream.copy_in(
            lambda: torch.empty_like(flat, device=self._device).copy_(flat, non_blocking=True)
        )

    def _cast(self, flat: Tensor, target: Tensor) -> None:
        """Copy the flat shard to ``target``, in the compute dtypes."""
        cast_buffer(flat, self._bucket.stored, target, self._bucket.computed)

    def note_own_parts(self) -> None:
        """Have ``differs`` compare with copies of what it compares with now, until the parts are dropped."""
        self._own_parts = [part.clone() for part in self._own()]

    def _own(self) -> list[Tensor]:
        """This rank's part of each full parameter."""
        if self._own_parts is not None:
            return self._own_parts
        rank, slots = self._bucket.mesh.shard_axis.rank, self._bucket.computed.slots
        rows = zip(self._bucket.params, slots, strict=True)
        return [shard_of(param.unsharded_data().detach(), slot, rank) for param, slot in rows]

    def keep_post_forward_shard(self) -> None:
        """Keep this rank's post-forward shard, to gather from next; only if a few ranks keep parameters."""
        if self._among_few is None:
            return
        rank, layout = self._post_forward_rank, self._post_forward_layout
        kept = torch.zeros(layout.shard_bytes, dtype=torch.uint8, device=self._device)
        for view, slot in zip(LocalViews(layout, rank).of(kept), layout.slots, strict=True):
            view.copy_(shard_of(self.buffer.unsharded_tensor(slot), slot, rank))
        self._post_forward_shard = kept
        self.start_all_gather = partial(self._among_few.start, inputs=self._among_few.cut(kept))  # type: ignore[method-assign]

    def drop_post_forward_shard(self) -> None:
        """Free the post-forward shard."""
        self._own_parts = None
        if self._post_forward_shard is not None:
            self._post_forward_shard = None
            self._start_from_flat_shard()

    # --- questions --------------------------------------------------------------------------------

    @property
    def can_be_compared(self) -> bool:
        """False if they only approximate the shards."""
        return not self._bucket.is_quantized

    def differs(self) -> Tensor:
        """Whether this rank's sharded parameters have changed since the all-gather: a bool on the device.

        Compares them with its own part of the buffer: versions do not show it, since foreach and fused
        optimizers, and changes through ``.data``, do not count on a DTensor. Does not wait.
        """
        bucket = self._bucket
        answer = torch.zeros((), dtype=torch.bool, device=self._device)
        if self._is_alone and self._sends_flat_shard:
            return answer
        for param, part in zip(bucket.params, self._own(), strict=True):
            now = param.local.detach().to(part.device, part.dtype)
            if now.numel():
                answer |= torch.ne(bytes_of(now), bytes_of(part)).any()
        return answer

    def relocated_params(self) -> list[str]:
        """Names of unsharded parameters that were given other memory (``param.data = ...``)."""
        start = self.buffer.bytes.data_ptr()
        if all_start_at(self._contents, self._offsets, start):
            return []
        rows = zip(self._placed, self._contents, self._offsets, strict=True)
        return [param.fqn for param, content, offset in rows if content.data_ptr() != start + offset]

    def allocated_bytes(self) -> tuple[int, int]:
        """The memory that the buffer takes now, and the post-forward shard."""
        part = self._post_forward_shard
        return self.buffer.allocated_bytes, 0 if part is None else part.numel()


# --- from a parameter to its bucket ----------------------------------------------------------------


def bucket_and_index(param: Tensor) -> tuple[Bucket, int] | None:
    """The bucket of ``param`` and its index in it; None if it is not a sharded parameter, or no longer its
    bucket's."""
    ref, index = param.__dict__.get(PLACE, (None, 0))
    if not ref or (bucket := ref()) is None or bucket.params[index].sharded is not param:
        return None
    return bucket, index
