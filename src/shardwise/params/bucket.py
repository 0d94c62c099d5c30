"""Parameters of a group that share a mesh: their memory, and their communication.

A group has one bucket in most models, and several where its parameters are sharded over different
meshes, as experts are. A bucket knows *how* to gather and to reduce; its group knows whether and when.

Where what is stored is not what is computed with (another dtype, or shards in host memory), the flat
shard is first brought into a buffer to send from: one cast, one copy, for all parameters together.
"""

import weakref
from collections.abc import Callable
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
from shardwise.comm.reducers import AllReduce, Reducer
from shardwise.comm.reduction import NO_REPLICAS, Destination, Hook, Reduction, ReplicaReduction
from shardwise.comm.streams import CommStream, CommStreams, Finish, nothing
from shardwise.layout.mesh import Axis, ShardMesh
from shardwise.layout.slots import ALIGNMENT, Layout, SlotSpec, plan_layout
from shardwise.params.changes import all_start_at
from shardwise.params.parameter import Param
from shardwise.params.partly_gathered import PartlyGathered, part_of
from shardwise.params.sharded_gradients import Landing
from shardwise.policies import CommPolicy
from shardwise.torch_compat import dtensor


@dataclass(frozen=True)
class Storage:
    """Where shards are kept between uses."""

    device: torch.device
    is_pinned: bool = False


_LARGEST_PACKED_BYTES = 16 << 20
"""A full parameter above this is not copied, however many ranks share it, unless the caller says so."""

Make = Callable[[dist.ProcessGroup | None, torch.device], Any]


@dataclass(frozen=True)
class Comms:
    """What was chosen about a bucket's communication.

    ``channel`` keeps its messages apart from those of other buckets. ``reduce_pg`` is a process group for
    reductions alone. ``part_axis``: the ranks that keep the full parameters together after forward.
    ``make_gather`` and ``make_reduce`` make the caller's own collectives; ``reducer`` is a whole way to sum
    gradients, over shards and replicas.
    """

    channel: int = 0
    reduce_pg: dist.ProcessGroup | None = None
    part_axis: Axis | None = None
    make_gather: Make | None = None
    make_reduce: Make | None = None
    reducer: Reducer | None = None
    force_sum: bool = False


class Bucket:
    """Parameters that are gathered and reduced by the same collectives."""

    def __init__(self, params: list[Param], mesh: ShardMesh, policy: CommPolicy, storage: Storage) -> None:
        self.params = params
        self.mesh = mesh
        self.storage = storage
        self.fulls: list[nn.Parameter] = []
        self.policy = policy
        self._comms = Comms()
        self._make_communicators()
        self._part: PartlyGathered | None = None
        self._earlier: Tensor | None = None  # sums that wait for that over replicas
        self._is_earlier: list[bool] = [False] * len(params)

    # --- by what it communicates ------------------------------------------------------------------

    def communicate_as(self, other: "Bucket") -> None:
        """Take over by which collectives ``other`` communicates."""
        self._comms = other._comms
        self._make_communicators()

    def _make_communicators(self) -> None:
        """From what was chosen, all at once: no choice undoes another."""
        chosen, pg, device = self._comms, self.mesh.shard.pg, self.mesh.device
        self._gather_comm = (chosen.make_gather or make_communicator)(pg, device)
        make_reduce = (
            chosen.reducer.make_reduce_scatter if chosen.reducer else chosen.make_reduce or make_communicator
        )
        self._reduce_comm = make_reduce(chosen.reduce_pg or pg, device)
        replicas = self.mesh.replicate.pg
        self._sum_over_replicas: AllReduce | None = None
        if chosen.reducer is not None:
            self._sum_over_replicas = chosen.reducer.make_all_reduce(replicas, device)
        elif replicas is not None and not self.mesh.replicate.is_alone:
            self._sum_over_replicas = partial(all_reduce, replicas)
        for comm in (self._gather_comm, self._reduce_comm):
            comm.channel = chosen.channel
            if isinstance(comm, BackendCollectives):
                comm.force_sum = chosen.force_sum

    def force_sums(self, enable: bool) -> None:
        """Have the back end sum only, and divide here. At any time."""
        self._comms = replace(self._comms, force_sum=enable)
        for comm in (self._gather_comm, self._reduce_comm):
            if isinstance(comm, BackendCollectives):
                comm.force_sum = enable

    def use_channel(self, channel: int) -> None:
        """Keep this bucket's messages apart from those of others. At any time."""
        self._comms = replace(self._comms, channel=channel)
        for comm in (self._gather_comm, self._reduce_comm):
            comm.channel = channel
        if self._part is not None:
            self._part.use_channel(channel)

    @property
    def comms(self) -> Comms:
        """What was chosen about its communication."""
        return self._comms

    @property
    def channel(self) -> int:
        """What sets its messages apart."""
        return self._comms.channel

    @property
    def averages_itself(self) -> bool:
        """True if the caller's way to sum gradients divides them too."""
        return self._comms.reducer is not None and self._comms.reducer.divides

    def would_change(self, choices: dict[str, Any]) -> bool:
        """Whether ``communicate`` would come to something."""
        return replace(self._comms, **choices) != self._comms

    def communicate(self, **choices: Any) -> None:
        """Communicate otherwise from now on; see ``Comms``. While nothing is gathered."""
        if self.would_change(choices):
            self._comms = replace(self._comms, **choices)
            self._make_communicators()
            self.move_in()

    takes_more = True
    """Whether further parameters of the same mesh may join."""

    # --- planning ---------------------------------------------------------------------------------

    def make_shards(self) -> list[nn.Parameter]:
        """Lay out the bucket and make its shards from the full parameters; touches no module."""
        on_meta = any(param.sharded.is_meta for param in self.params)
        self.lay_out(torch.device("meta") if on_meta else self.storage.device)
        rank = self.mesh.shard.rank
        shards = []
        for param, slot, view in zip(self.params, self.stored.slots, self.shard.views, strict=True):
            part = part_of(param.content(), slot, rank)
            if view.is_meta and not part.is_meta:
                # Others of the bucket have no values yet: this one waits for them beside the buffer.
                view = torch.empty(part.shape, dtype=part.dtype, device=self.storage.device)
            shards.append(param.make_shard(view.copy_(part)))
        return shards

    def lay_out(self, device: torch.device) -> None:
        """Plan buffers and collectives for the parameters as they are now; shards are yet to be filled."""
        self.stored = self._layout("stored")
        self.computed = self._layout("computed")
        self.reduced = self._layout("reduced")
        self.kept = self._layout("kept")
        is_pinned = self.storage.is_pinned and device.type == "cpu"
        self.shard = FlatShard(self.stored, self.mesh.shard.rank, device, is_pinned=is_pinned)
        self._reduce = ReduceScatter(
            self._reduce_comm, self.reduced, self.mesh.device, self.policy.part_bytes
        )
        for each in (self._reduce_comm, self._sum_over_replicas):
            if isinstance(each, (QuantizedExchange, QuantizedSum)):
                each.plan_for(self.reduced)
        self.landing = Landing(self.params, self.kept, self.mesh.shard.rank, self.storage.device)
        self.shard.landing = weakref.ref(self.landing)
        lend = None if self.is_offloaded else partial(self.landing.lend, is_filled=True)
        self._home = Destination(self.kept, self.storage.device, self.storage.is_pinned, lend)
        self._has_scalars = any(slot.is_replicated for slot in self.reduced.slots)
        self._gather: AllGather | None = None
        self._pieces: list[Tensor] | None = None
        self._part = None
        self._earlier = None
        self._is_earlier = [False] * len(self.params)
        self.fulls = []
        for param in self.params:
            param.full = None

    def _layout(self, form: str, world: int | None = None, slots_serve: int | None = None) -> Layout:
        """The layout of the parameters in one of the dtypes of their Precision; equal ones are shared."""
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
        own = self.mesh.shard.world
        is_direct = [
            self._travels_alone(e.chunk_numel(own) * p.precision.computed.itemsize)
            for e, p in zip(entries, self.params, strict=True)
        ]
        return plan_layout(
            entries, own if world is None else world, is_direct, slots_serve or self._part_world()
        )

    def _travels_alone(self, chunk_bytes: int) -> bool:
        """True if a parameter of which a rank keeps so much has collectives of its own, and no copies."""
        if self._gather_comm.packs_everything or self._reduce_comm.packs_everything or self._is_quantized:
            return False
        if self.policy.packing_limit_bytes is not None:
            return chunk_bytes >= self.policy.packing_limit_bytes
        is_large = chunk_bytes * self.mesh.shard.world > _LARGEST_PACKED_BYTES
        return is_large or chunk_bytes >= self._gather_comm.packing_limit_bytes

    def _part_world(self) -> int | None:
        return None if self._comms.part_axis is None else self._comms.part_axis.world

    # --- full parameters --------------------------------------------------------------------------

    def make_full_parameters(self) -> None:
        """Full parameters over a gathered buffer. They stay the same objects from now on."""
        device = self.mesh.device
        is_alias = self.mesh.shard.is_alone and self._is_sent_as_stored
        self.gathered = UnshardedBuffer(self.computed, device, self.shard.bytes if is_alias else None)
        for param, slot in zip(self.params, self.computed.slots, strict=True):
            param.make_full(self.gathered.unsharded_tensor(slot))
        if not self.mesh.shard.is_alone:
            self._gather = self._make_gather()
            if self._is_sent_as_stored:
                self._pieces = self._gather.cut(self.shard.bytes)
        if (axis := self._comms.part_axis) is not None:
            part = self._layout("computed", axis.world, self.mesh.shard.world)
            comm = make_communicator(axis.pg, device)
            comm.channel = self._comms.channel
            self._part = PartlyGathered(comm, axis.rank, part, self.gathered, device)
        self.fulls = [param.full for param in self.params if param.full is not None]
        slots = self.computed.slots
        self._placed = [index for index, slot in enumerate(slots) if slot.slot_bytes]
        self._contents = [self.params[index].full_data() for index in self._placed]
        self._offsets = [slots[index].slot_offset for index in self._placed]

    def _make_gather(self) -> AllGather:
        if self.policy.quantized_gather is None:
            return AllGather(self._gather_comm, self.computed, self.gathered)
        block_size = self.policy.quantized_gather.block_size
        return Int8AllGather(self._gather_comm, self.computed, self.gathered, block_size)

    @property
    def _is_quantized(self) -> bool:
        """True if full parameters are not quite what the shards are."""
        return self.policy.quantized_gather is not None and not self.mesh.shard.is_alone

    @property
    def is_offloaded(self) -> bool:
        """True if shards are in host memory and computed with on a device."""
        return self.storage.device != self.mesh.device

    @property
    def _is_sent_as_stored(self) -> bool:
        """True if shards are gathered from where they lie."""
        return self.computed is self.stored and self.storage.device == self.mesh.device

    def start_gather(self, stream: CommStream) -> Finish:
        """Allocate the gathered buffer and begin to fill it; returns the function that waits."""
        self.gathered.allocate()
        if self._part is not None and self._part.has_contents:
            return self._part.start_gather(stream)
        if self._gather is None:  # a rank alone
            if not self._is_sent_as_stored:
                self._bring(self.gathered.bytes, stream)
            return nothing
        if self._pieces is not None:
            return self._gather.start(stream, self._pieces)
        scratch = stream.acquire(self.computed.shard_bytes, self.mesh.device)
        send = scratch.bytes[: self.computed.shard_bytes]
        self._bring(send, stream)
        wait = self._gather.start(stream, self._gather.cut(send))

        def finish() -> None:
            wait()
            stream.release(scratch)

        return finish

    def _bring(self, target: Tensor, stream: CommStream) -> None:
        """Copy the flat shard to ``target``, on the computing device and in the dtypes of computation."""
        source = self.shard.bytes
        if source.device != target.device and self.computed is not self.stored:
            scratch = stream.acquire(source.numel(), target.device)
            landing = scratch.bytes[: source.numel()]
            landing.copy_(source, non_blocking=True)
            cast_buffer(landing, self.stored, target, self.computed)
            stream.release(scratch)
        else:
            cast_buffer(source, self.stored, target, self.computed)

    def keep_part(self) -> None:
        """Keep this rank's part of the full parameters, if that was asked for; the rest may be freed."""
        if self._part is not None:
            self._part.keep()

    def drop_part(self) -> None:
        """Free it."""
        if self._part is not None:
            self._part.drop()

    def is_stale(self) -> bool:
        """True if this rank's shards are not what the full parameters were gathered from.

        Compares contents with its own part of the gathered buffer: versions do not tell, since foreach
        and fused optimizers, and changes through ``.data``, count none on a DTensor.
        """
        rank = self.mesh.shard.rank
        if self._is_quantized or not all(param.is_untouched() for param in self.params):
            return True
        if self.mesh.shard.is_alone and self._is_sent_as_stored:
            return False
        for param, slot in zip(self.params, self.computed.slots, strict=True):
            part = part_of(param.full_data().detach(), slot, rank)
            now = param.local.detach().to(part.device, part.dtype)
            if now.numel() and not torch.equal(bytes_of(now), bytes_of(part)):
                return True
        return False

    def moved_params(self) -> list[str]:
        """Names of full parameters that were given other memory (``param.data = ...``)."""
        start = self.gathered.bytes.data_ptr()
        if all_start_at(self._contents, self._offsets, start):
            return []
        rows = zip(self._placed, self._contents, self._offsets, strict=True)
        return [self.params[i].fqn for i, content, offset in rows if content.data_ptr() != start + offset]

    def drop_full_parameters(self) -> None:
        """Forget them; the next gather makes new ones."""
        self.fulls = []
        for param in self.params:
            param.full = None

    @torch.no_grad()
    def follow_shards(self) -> bool:
        """Bring shards that were moved, cast or assigned into the flat shard; True if it was planned anew."""
        for param in self.params:
            local = dtensor.local_tensor(param.sharded)
            if local.device not in (self.storage.device, self.mesh.device):
                raise RuntimeError(
                    f"{param.fqn}: its shard is on {local.device}, but its mesh is of {self.mesh.device}, "
                    f"where it has to be gathered. Move the model back with .to('{self.mesh.device}'), or "
                    "shard it over a mesh of the other device."
                )
        has_new_dtype = any(param.sharded.dtype != param.precision.stored for param in self.params)
        if has_new_dtype or self.shard.bytes.device != self.storage.device:
            for param in self.params:
                param.follow_dtype()
            self.move_in()
            return True
        locals_ = [dtensor.local_tensor(param.sharded) for param in self.params]
        with torch.inference_mode(False):
            self.shard.fill(locals_)
        for param, view, local in zip(self.params, self.shard.views, locals_, strict=True):
            if local is not view:
                param.rebase(view)
        return False

    @torch.no_grad()
    def move_in(self) -> None:
        """Bring shards that lie elsewhere into the flat shard, planned anew."""
        if any(param.sharded.is_meta for param in self.params):
            self.lay_out(torch.device("meta"))
            return
        locals_ = [dtensor.local_tensor(param.sharded) for param in self.params]
        with torch.inference_mode(False):
            self.lay_out(self.storage.device)
            self.shard.fill(locals_)
        for param, view in zip(self.params, self.shard.views, strict=True):
            param.rebase(view)

    # --- gradients --------------------------------------------------------------------------------

    @property
    def parts(self) -> list[GradientPart]:
        """Whose gradients are sent together; indices are those of ``params``."""
        return self._reduce.parts

    def open_reduction(self, streams: CommStreams, divisor: float, *, is_filled: bool) -> Reduction:
        """A reduction of which nothing has been sent yet. ``is_filled``: all gradients will come."""
        if self.kept is self.reduced and not self.is_offloaded:
            allocate = partial(self.landing.lend, is_filled=is_filled)
        else:
            allocate = partial(buffer_for, self.reduced, self.mesh.device, is_filled=is_filled)
        divisor = 1.0 if self.averages_itself else divisor
        return Reduction(self._reduce, self.reduced, divisor, streams, allocate, is_filled=is_filled)

    def close_reduction(self, reduction: Reduction, all_reduces: bool, hook: Hook | None) -> None:
        """All gradients that there are have been sent: go on to the replicas, if that is wanted now."""
        self._all_reduces = all_reduces or self.mesh.replicate.is_alone
        self._is_earlier = list(map(or_, self._is_earlier, reduction.present))
        earlier, self._earlier = self._earlier, None
        replica_sum = self._sum_over_replicas if self._all_reduces else None
        home = self._home if self._all_reduces else Destination(self.reduced, self.mesh.device)
        agree = self._agree_on_copies if self._has_loose_copies else None
        replicas = NO_REPLICAS
        if replica_sum is not None or earlier is not None or hook is not None or agree is not None:
            summed = [
                index
                for index, (param, was_there) in enumerate(zip(self.params, self._is_earlier, strict=True))
                if was_there or param.sharded.requires_grad
            ]
            own_hook = hook if self._all_reduces else None
            replicas = ReplicaReduction(frozenset(summed), replica_sum, earlier, own_hook, agree)
        reduction.close(replicas, home)

    @property
    def _has_loose_copies(self) -> bool:
        """True if ranks keep the same scalar, and may not get the same bits for its gradient."""
        if not self._has_scalars or self.mesh.shard.is_alone:
            return False
        return not self._reduce_comm.sums_are_bitwise_equal or self._comms.reducer is not None

    def _agree_on_copies(self, output: Tensor) -> None:
        """Let all ranks keep what the first of them has come to, where they keep the same."""
        copies = [
            output[slot.shard_offset : slot.shard_offset + slot.spec.itemsize]
            for slot in self.reduced.slots
            if slot.is_replicated
        ]
        flat = torch.cat(copies)
        dist.broadcast(flat, group=self._comms.reduce_pg or self.mesh.shard.pg, group_src=0)
        for copy, agreed in zip(copies, flat.split([len(copy) for copy in copies]), strict=True):
            copy.copy_(agreed)

    def land(self, reduction: Reduction, *, plainly: bool) -> bool:
        """Add what has been reduced to ``.grad`` of the shards; True: it waits for the sum over replicas.

        ``plainly``: no shard has hooks that want to see it, nor stands its ``.grad`` for what waits.
        """
        if not self._all_reduces:
            self._earlier = reduction.output
            return True
        present, self._is_earlier = self._is_earlier, [False] * len(self.params)
        if not (plainly and all(present) and self.landing.land_plainly(reduction.output)):
            self.landing.land(reduction.output, present)
        return False

    @property
    def has_earlier(self) -> bool:
        """True while sums wait for that over replicas."""
        return self._earlier is not None

    def waits(self, index: int) -> bool:
        """True if those of this parameter do."""
        return self._earlier is not None and self._is_earlier[index]

    def drop_earlier(self, index: int) -> None:
        """Forget the sums of one parameter that wait."""
        assert self._earlier is not None
        self._is_earlier[index] = False
        slot = self.reduced.slots[index]
        self._earlier[slot.shard_offset : slot.shard_offset + slot.padded_bytes].zero_()
        if not any(self._is_earlier):
            self._earlier = None

    def drop_all_earlier(self) -> None:
        """Forget all of them, and what was in flight."""
        self._earlier = None
        self._is_earlier = [False] * len(self.params)


def bytes_of(tensor: Tensor) -> Tensor:
    """Its contents, to be compared bit for bit."""
    return tensor.contiguous().view(-1).view(torch.uint8)
