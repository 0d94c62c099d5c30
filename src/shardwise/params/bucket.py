"""The bucket: parameters of a group that share a mesh, their memory and their communication.

In most models a group has one bucket; it has several where its parameters are sharded over different meshes,
as experts are. A bucket knows *how* to all-gather and to reduce-scatter; its group knows whether and when.

Where sharded parameters are stored in another dtype than they are computed in, or in host memory, the flat
shard is first copied into a buffer to send from: one cast, one copy, for all parameters together.
"""

from dataclasses import dataclass, replace
from functools import partial
from operator import or_
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise.comm.all_gather import AllGather
from shardwise.comm.buffers import FlatShard, UnshardedBuffer, buffer_for, cast_buffer
from shardwise.comm.communicators import BackendCollectives, all_reduce, make_communicator
from shardwise.comm.quantized import Int8AllGather, QuantizedExchange, QuantizedSum
from shardwise.comm.reduce_scatter import GradientPart, ReduceScatter
from shardwise.comm.reducers import AllReduce
from shardwise.comm.reduction import NO_REPLICAS, Destination, Hook, Reduction, ReplicaReduction
from shardwise.comm.streams import CommStream, CommStreams, Finish, nothing
from shardwise.layout.chunks import shard_of
from shardwise.layout.mesh import ShardMesh
from shardwise.layout.packing import choose_direct
from shardwise.layout.slots import ALIGNMENT, Layout, SlotSpec, plan_layout
from shardwise.params.changes import all_start_at
from shardwise.params.comm_options import CommOptions
from shardwise.params.flat_slot import FlatSlot
from shardwise.params.parameter import Param
from shardwise.params.post_forward import PostForwardShard
from shardwise.params.sharded_gradients import ShardedGradients
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
        self.unsharded_params: list[nn.Parameter] = []
        self.policy = policy
        self._comms = CommOptions()
        self._make_communicators()
        self._post_forward: PostForwardShard | None = None
        self._earlier: Tensor | None = None  # sums that have yet to be summed over replicas
        # Set by close_reduction for accumulate: which parameters have a gradient in the reduction or in the
        # earlier sums, and whether the reduction goes on to the replicas.
        self._has_sum: list[bool] = [False] * len(params)
        self._covers_replicas = True

    # --- how it communicates ----------------------------------------------------------------------

    def communicate_as(self, other: "Bucket") -> None:
        """Communicate as ``other`` does."""
        self._comms = other._comms
        self._make_communicators()

    def _make_communicators(self) -> None:
        """Make the communicators from all options at once, so that none undoes another."""
        chosen, pg, device = self._comms, self.mesh.shard_axis.pg, self.mesh.device
        self._all_gather_comm = (chosen.make_all_gather or make_communicator)(pg, device)
        make_reduce_scatter = (
            chosen.reducer.reduce_scatter_communicator
            if chosen.reducer
            else chosen.make_reduce_scatter or make_communicator
        )
        self._reduce_scatter_comm = make_reduce_scatter(chosen.reduce_pg or pg, device)
        replicas = self.mesh.replicate_axis.pg
        self._sum_over_replicas: AllReduce | None = None
        if chosen.reducer is not None:
            self._sum_over_replicas = chosen.reducer.all_reduce_function(replicas, device)
        elif replicas is not None and not self.mesh.replicate_axis.is_alone:
            self._sum_over_replicas = partial(all_reduce, replicas)
        for comm in (self._all_gather_comm, self._reduce_scatter_comm):
            comm.channel = chosen.channel
            if isinstance(comm, BackendCollectives):
                comm.force_sum = chosen.force_sum

    def force_sums(self, enable: bool) -> None:
        """Have the back end only sum, and divide afterwards. May be called at any time."""
        self._comms = replace(self._comms, force_sum=enable)
        for comm in (self._all_gather_comm, self._reduce_scatter_comm):
            if isinstance(comm, BackendCollectives):
                comm.force_sum = enable

    def use_channel(self, channel: int) -> None:
        """Keep this bucket's messages apart from those of other buckets. May be called at any time."""
        self._comms = replace(self._comms, channel=channel)
        for comm in (self._all_gather_comm, self._reduce_scatter_comm):
            comm.channel = channel
        if self._post_forward is not None:
            self._post_forward.use_channel(channel)

    @property
    def comms(self) -> CommOptions:
        """How it communicates."""
        return self._comms

    @property
    def channel(self) -> int:
        """The number that keeps its messages apart."""
        return self._comms.channel

    @property
    def averages_itself(self) -> bool:
        """True if the caller's reducer divides as well."""
        return self._comms.reducer is not None and self._comms.reducer.divides

    def would_change(self, choices: dict[str, Any]) -> bool:
        """Whether ``communicate`` would change anything."""
        return replace(self._comms, **choices) != self._comms

    def communicate(self, **choices: Any) -> None:
        """Change some of ``CommOptions``, while everything is sharded."""
        if self.would_change(choices):
            self._comms = replace(self._comms, **choices)
            self._make_communicators()
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
        self._reduce_scatter = ReduceScatter(
            self._reduce_scatter_comm, self.reduced, self.mesh.device, self.policy.part_bytes
        )
        for each in (self._reduce_scatter_comm, self._sum_over_replicas):
            if isinstance(each, (QuantizedExchange, QuantizedSum)):
                each.plan_for(self.reduced)
        self.sharded_gradients = ShardedGradients(self.params, self.kept, self.mesh.shard_axis.rank)
        self._destination = Destination(self.kept, self.storage.device, self.storage.is_pinned)
        self._has_scalars = any(slot.is_replicated for slot in self.reduced.slots)
        self._all_gather: AllGather | None = None
        self._pieces: list[Tensor] | None = None
        self._post_forward = None
        self._earlier = None
        self._has_sum = [False] * len(self.params)
        self.unsharded_params = []
        for index, param in enumerate(self.params):
            param.unsharded = None
            param.stand_at(FlatSlot(self, index))

    def _layout(self, form: str, world: int | None = None, slots_serve: int | None = None) -> Layout:
        """The layout of the parameters in one of the dtypes of their Precision; equal layouts are shared."""
        dtypes = [getattr(param.precision, form) for param in self.params]
        if world is None and form != "stored":
            for other in ("stored", "computed", "reduced"):
                if other == form:
                    break
                if dtypes == [getattr(param.precision, other) for param in self.params]:
                    return getattr(self, other)
        entries = [
            SlotSpec(
                param.shape,
                dtype,
                dtype.itemsize,
                param.precision,
                max(1, ALIGNMENT // param.precision.smallest_itemsize),
                param.dim,
            )
            for param, dtype in zip(self.params, dtypes, strict=True)
        ]
        own = self.mesh.shard_axis.world
        is_direct = self._are_direct(
            [
                e.chunk_numel(own) * p.precision.computed.itemsize
                for e, p in zip(entries, self.params, strict=True)
            ]
        )
        return plan_layout(
            entries, own if world is None else world, is_direct, slots_serve or self._post_forward_world()
        )

    def _are_direct(self, chunk_bytes: list[int]) -> list[bool]:
        """Whether parameters with shards of these sizes have collectives of their own, without copies."""
        comm, limit = self._all_gather_comm, self.policy.packing_limit_bytes
        if comm.packs_everything or self._reduce_scatter_comm.packs_everything or self._is_quantized:
            return [False] * len(chunk_bytes)
        if limit is not None:
            return [size >= limit for size in chunk_bytes]
        world = self.mesh.shard_axis.world
        return choose_direct(chunk_bytes, world, comm.packing_limit_bytes, comm.most_direct)

    def _post_forward_world(self) -> int | None:
        return None if self._comms.post_forward_axis is None else self._comms.post_forward_axis.world

    # --- unsharded parameters ---------------------------------------------------------------------

    def make_unsharded_params(self) -> None:
        """Make the unsharded parameters. They stay the same objects from now on."""
        device = self.mesh.device
        is_alias = self.mesh.shard_axis.is_alone and self._sends_flat_shard
        self.unsharded_buffer = UnshardedBuffer(
            self.computed, device, self.flat_shard.bytes if is_alias else None
        )
        for param, slot in zip(self.params, self.computed.slots, strict=True):
            param.make_unsharded(self.unsharded_buffer.unsharded_tensor(slot))
        if not self.mesh.shard_axis.is_alone:
            self._all_gather = self._make_all_gather()
            if self._sends_flat_shard:
                self._pieces = self._all_gather.cut(self.flat_shard.bytes)
        if (axis := self._comms.post_forward_axis) is not None:
            part = self._layout("computed", axis.world, self.mesh.shard_axis.world)
            comm = make_communicator(axis.pg, device)
            comm.channel = self._comms.channel
            self._post_forward = PostForwardShard(comm, axis.rank, part, self.unsharded_buffer, device)
        self.unsharded_params = [param.unsharded for param in self.params if param.unsharded is not None]
        slots = self.computed.slots
        self._placed = [index for index, slot in enumerate(slots) if slot.slot_bytes]
        self._contents = [self.params[index].unsharded_data() for index in self._placed]
        self._offsets = [slots[index].slot_offset for index in self._placed]

    def _make_all_gather(self) -> AllGather:
        if self.policy.quantized_gather is None:
            return AllGather(self._all_gather_comm, self.computed, self.unsharded_buffer)
        block_size = self.policy.quantized_gather.block_size
        return Int8AllGather(self._all_gather_comm, self.computed, self.unsharded_buffer, block_size)

    @property
    def _is_quantized(self) -> bool:
        """True if unsharded parameters are only close to the sharded ones."""
        return self.policy.quantized_gather is not None and not self.mesh.shard_axis.is_alone

    @property
    def is_offloaded(self) -> bool:
        """True if sharded parameters are in host memory, and computation is on a device."""
        return self.storage.device != self.mesh.device

    @property
    def _sends_flat_shard(self) -> bool:
        """True if the flat shard itself is the input of the all-gather."""
        return self.computed is self.stored and self.storage.device == self.mesh.device

    def start_all_gather(self, stream: CommStream) -> Finish:
        """Allocate the unsharded buffer and start to fill it; returns the function that waits."""
        self.unsharded_buffer.allocate()
        if self._post_forward is not None and self._post_forward.has_contents:
            return self._post_forward.start_all_gather(stream)
        if self._all_gather is None:  # a single rank
            if not self._sends_flat_shard:
                self._copy_flat_shard(self.unsharded_buffer.bytes, stream)
            return nothing
        if self._pieces is not None:
            return self._all_gather.start(stream, self._pieces)
        scratch = stream.acquire(self.computed.shard_bytes, self.mesh.device)
        send = scratch.bytes[: self.computed.shard_bytes]
        self._copy_flat_shard(send, stream)
        wait = self._all_gather.start(stream, self._all_gather.cut(send))

        def finish() -> None:
            wait()
            stream.release(scratch)

        return finish

    def _copy_flat_shard(self, target: Tensor, stream: CommStream) -> None:
        """Copy the flat shard to ``target``, on the computing device and in the computing dtypes."""
        source = self.flat_shard.bytes
        if source.device != target.device and self.computed is not self.stored:
            scratch = stream.acquire(source.numel(), target.device)
            staged = scratch.bytes[: source.numel()]
            staged.copy_(source, non_blocking=True)
            cast_buffer(staged, self.stored, target, self.computed)
            stream.release(scratch)
        else:
            cast_buffer(source, self.stored, target, self.computed)

    def keep_post_forward_shard(self) -> None:
        """Keep this rank's post-forward shard, if there is a post-forward axis."""
        if self._post_forward is not None:
            self._post_forward.keep()

    def drop_post_forward_shard(self) -> None:
        """Free the post-forward shard."""
        if self._post_forward is not None:
            self._post_forward.drop()

    def is_stale(self) -> bool:
        """True if this rank's sharded parameters have changed since the all-gather.

        Compares them with its own part of the unsharded buffer: versions do not tell, since foreach and fused
        optimizers, and changes through ``.data``, do not count on a DTensor.
        """
        rank = self.mesh.shard_axis.rank
        if self._is_quantized or not all(param.is_untouched() for param in self.params):
            return True
        if self.mesh.shard_axis.is_alone and self._sends_flat_shard:
            return False
        for param, slot in zip(self.params, self.computed.slots, strict=True):
            part = shard_of(param.unsharded_data().detach(), slot, rank)
            now = param.local.detach().to(part.device, part.dtype)
            if now.numel() and not torch.equal(bytes_of(now), bytes_of(part)):
                return True
        return False

    def allocated_bytes(self) -> tuple[int, int]:
        """The memory that the unsharded buffer takes now, and the post-forward shard."""
        buffer = getattr(self, "unsharded_buffer", None)  # made at the first unshard
        return (
            0 if buffer is None else buffer.allocated_bytes,
            0 if self._post_forward is None else self._post_forward.allocated_bytes,
        )

    def relocated_params(self) -> list[str]:
        """Names of unsharded parameters that were given other memory (``param.data = ...``)."""
        start = self.unsharded_buffer.bytes.data_ptr()
        if all_start_at(self._contents, self._offsets, start):
            return []
        rows = zip(self._placed, self._contents, self._offsets, strict=True)
        return [self.params[i].fqn for i, content, offset in rows if content.data_ptr() != start + offset]

    def drop_unsharded_params(self) -> None:
        """Forget them; the next unshard makes new ones."""
        self.unsharded_params = []
        for param in self.params:
            param.unsharded = None

    @torch.no_grad()
    def sync_flat_shard(self) -> bool:
        """Copy moved, converted or assigned shards into the flat shard; True if that was rebuilt."""
        for param in self.params:
            local = dtensor.local_tensor(param.sharded)
            if local.device not in (self.storage.device, self.mesh.device):
                raise RuntimeError(
                    f"{param.fqn}: its shard is on {local.device}, but its mesh is of {self.mesh.device}, "
                    f"where it has to be gathered. Move the model back with .to('{self.mesh.device}'), or "
                    "shard it over a mesh of the other device."
                )
        has_new_dtype = any(param.sharded.dtype != param.precision.stored for param in self.params)
        if has_new_dtype or self.flat_shard.bytes.device != self.storage.device:
            for param in self.params:
                param.follow_dtype()
            self.rebuild_flat_shard()
            return True
        locals_ = [dtensor.local_tensor(param.sharded) for param in self.params]
        with torch.inference_mode(False):
            self.flat_shard.fill(locals_)
        for param, view, local in zip(self.params, self.flat_shard.views, locals_, strict=True):
            if local is not view:
                param.rebase(view)
        return False

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

    # --- gradients --------------------------------------------------------------------------------

    @property
    def parts(self) -> list[GradientPart]:
        """Which gradients are reduced together; indices are those of ``params``."""
        return self._reduce_scatter.parts

    def open_reduction(self, streams: CommStreams, divisor: float, *, is_filled: bool) -> Reduction:
        """A reduction with nothing sent yet. ``is_filled``: every parameter will have a gradient."""
        allocate = partial(buffer_for, self.reduced, self.mesh.device, is_filled=is_filled)
        divisor = 1.0 if self.averages_itself else divisor
        return Reduction(self._reduce_scatter, self.reduced, divisor, streams, allocate, is_filled=is_filled)

    def close_reduction(self, reduction: Reduction, all_reduces: bool, hook: Hook | None) -> None:
        """All gradients are sent: continue with the replicas, if ``all_reduces``."""
        self._covers_replicas = all_reduces or self.mesh.replicate_axis.is_alone
        self._has_sum = list(map(or_, self._has_sum, reduction.present))
        earlier, self._earlier = self._earlier, None
        replica_sum = self._sum_over_replicas if self._covers_replicas else None
        destination = (
            self._destination if self._covers_replicas else Destination(self.reduced, self.mesh.device)
        )
        agree = self._broadcast_copies if self._has_unequal_copies else None
        replicas = NO_REPLICAS
        if replica_sum is not None or earlier is not None or hook is not None or agree is not None:
            summed = [
                index
                for index, (param, has_sum) in enumerate(zip(self.params, self._has_sum, strict=True))
                if has_sum or param.sharded.requires_grad
            ]
            own_hook = hook if self._covers_replicas else None
            replicas = ReplicaReduction(frozenset(summed), replica_sum, earlier, own_hook, agree)
        reduction.close(replicas, destination)

    @property
    def _has_unequal_copies(self) -> bool:
        """True if ranks keep the same scalar, but may get different bits for its gradient."""
        if not self._has_scalars or self.mesh.shard_axis.is_alone:
            return False
        return not self._reduce_scatter_comm.sums_are_bitwise_equal or self._comms.reducer is not None

    def _broadcast_copies(self, output: Tensor) -> None:
        """Broadcast the first rank's gradients of what all ranks keep."""
        copies = [
            output[slot.shard_offset : slot.shard_offset + slot.spec.itemsize]
            for slot in self.reduced.slots
            if slot.is_replicated
        ]
        flat = torch.cat(copies)
        dist.broadcast(flat, group=self._comms.reduce_pg or self.mesh.shard_axis.pg, group_src=0)
        for copy, agreed in zip(copies, flat.split([len(copy) for copy in copies]), strict=True):
            copy.copy_(agreed)

    def accumulate(self, reduction: Reduction, *, without_hooks: bool) -> bool:
        """Add reduced gradients to ``.grad`` of the sharded parameters; True: they wait for the replicas.

        ``without_hooks``: no sharded parameter has gradient hooks or a deferred gradient.
        """
        if not self._covers_replicas:
            self._earlier = reduction.output
            return True
        has_sum, self._has_sum = self._has_sum, [False] * len(self.params)
        if not (without_hooks and all(has_sum) and self.sharded_gradients.accumulate_all(reduction.output)):
            self.sharded_gradients.accumulate(reduction.output, has_sum)
        return False

    @property
    def earlier(self) -> Tensor | None:
        """Sums that wait to be summed over replicas."""
        return self._earlier

    def has_earlier_for(self, index: int) -> bool:
        """True while the sum of this parameter waits to be summed over replicas."""
        return self._earlier is not None and self._has_sum[index]

    def drop_earlier(self, index: int) -> None:
        """Drop the waiting sums of one parameter."""
        assert self._earlier is not None
        self._has_sum[index] = False
        slot = self.reduced.slots[index]
        self._earlier[slot.shard_offset : slot.shard_offset + slot.padded_bytes].zero_()
        if not any(self._has_sum):
            self._earlier = None

    def drop_all_earlier(self) -> None:
        """Drop all waiting sums, and what was in flight."""
        self._earlier = None
        self._has_sum = [False] * len(self.params)


def bytes_of(tensor: Tensor) -> Tensor:
    """The bytes of a tensor, for comparisons bit by bit."""
    return tensor.contiguous().view(-1).view(torch.uint8)
