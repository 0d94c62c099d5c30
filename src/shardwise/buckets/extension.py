"""Extensions: tensor subclasses that define their own all-gather.

A weight in a compressed form (scaled integers, float8) is all-gathered in that form: one method turns the
shard into plain tensors, the other makes the unsharded weight from those of all ranks. The two methods are
those of torch's fully_shard, so classes written for it work here:

    fsdp_pre_all_gather(self, mesh) -> (inputs, metadata)
    fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy) -> (inputs, metadata)
    fsdp_post_all_gather(self, outputs, metadata, param_dtype, *, out=None) -> (tensor, inner) or None

``mesh`` is the mesh of the ranks that share the weight. ``outputs`` keep their storage from one unshard to
the next: freed in between, and refilled in place. The first unshard makes the full tensor; later ones pass
it as ``out``, the object that the module computes with, so that attributes besides its data, such as a
scale, can be refreshed.

The methods may be on a class or on a single tensor: the original, or the local tensor of a sharded
parameter. Either may get them until the first forward.
"""

import inspect
from collections.abc import Sequence
from functools import partial
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise.buckets.bucket import Bucket, UnshardedBucket
from shardwise.comm.buffers import ShardStorage, bytes_of
from shardwise.comm.streams import CommStream, Finish, nothing
from shardwise.layout.chunks import round_up
from shardwise.layout.mesh import ShardMesh
from shardwise.layout.slots import ALIGNMENT
from shardwise.params.parameter import Param
from shardwise.policies import CommPolicy
from shardwise.torch_compat import dtensor, tensor_impl

PRE, POST = "fsdp_pre_all_gather", "fsdp_post_all_gather"


def is_extension(tensor: Tensor) -> bool:
    """True if ``tensor`` has both methods of the protocol."""
    return all(callable(getattr(tensor, name, None)) for name in (PRE, POST))


def needs_own_bucket(tensor: Tensor) -> bool:
    """True if ``tensor`` has the protocol, or is of a subclass that may get it before the first forward."""
    return type(tensor) is not Tensor or is_extension(tensor)


def check_protocol(tensor: Tensor, where: str) -> None:
    """Refuse a tensor with only one of the two methods."""
    has = [name for name in (PRE, POST) if callable(getattr(tensor, name, None))]
    if len(has) == 1:
        missing = POST if has == [PRE] else PRE
        raise TypeError(
            f"{where} holds a {type(tensor).__name__}, which has {has[0]} but no {missing}; an all-gather "
            "needs both. Add it to the class, or to the tensor that has the other."
        )


def _carry_methods(source: Tensor, target: Tensor) -> None:
    """Copy methods set on ``source`` itself to ``target``, which has those of its class."""
    for name in (PRE, POST):
        own = vars(source).get(name)
        if own is not None:
            is_bound = isinstance(own, MethodType) and own.__self__ is source
            setattr(target, name, MethodType(own.__func__, target) if is_bound else own)


def _copied(tensor: Tensor) -> Tensor:
    """A copy of ``tensor`` in separate memory, made from copies of its inner tensors if it lists them.

    ``clone`` of a quantised class may quantise again, with other blocks (torchao's NF4Tensor). It is only the
    fallback for a ``__tensor_unflatten__`` that does not accept torch's arguments.
    """
    if not hasattr(tensor, "__tensor_flatten__"):
        return tensor.clone()
    names, context = tensor.__tensor_flatten__()
    kind: Any = type(tensor)
    try:
        inspect.signature(kind.__tensor_unflatten__).bind({}, context, (), ())
    except TypeError:
        return tensor.clone()
    inner = {name: _copied(getattr(tensor, name)) for name in names}
    strides = torch.empty_strided(tensor.size(), tensor.stride(), device="meta").clone().stride()  # dense
    copied: Tensor = kind.__tensor_unflatten__(inner, context, tensor.size(), strides)
    return copied.detach()


class _ExtensionBuffer:
    """An UnshardedBuffer of the storages of tensors that a protocol made."""

    is_alias = False

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        """Manage the memory of ``tensors``, which are in use."""
        self._storages: dict[int, tuple[torch.UntypedStorage, int]] = {}
        self.keeps_memory = False
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self._storages.setdefault(tensor_impl.storage_key(storage), (storage, storage.nbytes()))

    def allocate(self) -> None:
        """Allocate memory for all of them, with undefined contents."""
        for storage, num_bytes in self._storages.values():
            if storage.nbytes() == 0:
                storage.resize_(num_bytes)

    def keep_memory(self, keep: bool) -> None:
        """Choose whether ``free`` keeps the memory."""
        self.keeps_memory = keep

    def free(self) -> None:
        """Free the memory."""
        for storage, _ in () if self.keeps_memory else self._storages.values():
            storage.resize_(0)

    @property
    def allocated_bytes(self) -> int:
        """The memory that it takes now."""
        return sum(storage.nbytes() for storage, _ in self._storages.values())

    def holds(self, address: int) -> bool:
        """True if ``address`` lies in the memory that ``free`` frees."""
        return any(0 <= address - s.data_ptr() < num_bytes for s, num_bytes in self._storages.values())


class ExtensionBucket(Bucket):
    """A bucket of one parameter with its own all-gather. Its gradient is reduced like any other."""

    def __init__(
        self, param: Param, mesh: ShardMesh, policy: CommPolicy, storage: ShardStorage, mp_policy: Any
    ) -> None:
        super().__init__([param], mesh, policy, storage)
        self.mp_policy = mp_policy
        self._param = param

    takes_more = False

    # --- the shard --------------------------------------------------------------------------------

    def make_shards(self) -> list[nn.Parameter]:
        """Make the sharded parameter; the local tensor has the class of the original."""
        rank, world = self.mesh.shard_axis.rank, self.mesh.shard_axis.world
        whole = self._param.content()
        device = torch.device("meta") if whole.is_meta else self.storage.device
        self.lay_out(device)
        part = self._parts(whole, world)[rank]
        # Not all classes can be cloned on the meta device.
        local = torch.empty_like(part) if whole.is_meta else _copied(part).to(device)
        _carry_methods(whole, local)
        return [self._param.make_shard(local)]

    def _parts(self, whole: Tensor, world: int) -> Sequence[Tensor]:
        """The parts of all ranks, so that all fail alike if the class cannot be cut this way."""
        dim = self._param.dim
        expected = [part.shape for part in torch.empty(whole.shape, device="meta").chunk(world, dim)]
        try:
            parts = torch.chunk(whole, world, dim) if whole.numel() else (whole,)
            found = [part.shape for part in parts]
            if whole.numel() and found != expected:
                raise ValueError(f"it gave the shapes {[tuple(shape) for shape in found]}")
            return [*parts, *(parts[0].narrow(dim, 0, 0) for _ in range(world - len(parts)))]
        except Exception as error:
            raise ValueError(
                f"{self._param.fqn}: {type(whole).__name__} cannot be cut into {world} chunks along dim "
                f"{dim} of shape {tuple(whole.shape)}: {error}. Choose a shape that divides by the ranks, "
                "another dim (shard_placement_fn), or keep the parameter whole (ignored_params)."
            ) from error

    def lay_out(self, device: torch.device) -> None:
        """Plan the reduction; there is no flat shard."""
        super().lay_out(torch.device("meta"))
        self.flat_shard.bytes = torch.empty(0, dtype=torch.uint8, device=device)

    def sync_flat_shard(self) -> bool:
        """Adopt a local tensor that was moved, cast or assigned; True if the bucket was laid out again."""
        param = self._param
        if param.sharded.dtype != param.precision.stored or self.flat_shard.bytes.is_meta:
            self.rebuild_flat_shard()
            return True
        self._take_local()
        return False

    def rebuild_flat_shard(self) -> None:
        """Lay out the bucket again."""
        self._param.adopt_dtype()
        self.lay_out(torch.device("meta") if self._param.sharded.is_meta else self.storage.device)
        self._take_local()

    def _take_local(self) -> None:
        """Move the local tensor to the device that stores shards."""
        local = dtensor.local_tensor(self._param.sharded)
        if local is self._param.local:
            return
        if not local.is_meta and local.device != self.storage.device:
            moved = local.to(self.storage.device)
            _carry_methods(local, moved)
            local = moved
        self._param.rebase(local)

    def make_unsharded(self) -> UnshardedBucket:
        """Run the first all-gather, which makes the unsharded parameter."""
        return _UnshardedExtension(self)


class _UnshardedExtension(UnshardedBucket):
    """The unsharded parameter of an ``ExtensionBucket``, made and filled by its protocol."""

    _bucket: ExtensionBucket

    def _make_params(self) -> Any:
        """Run the first all-gather, which makes the parameter: only then are the outputs known."""
        (self._param,) = self._bucket.params
        self._outputs, metadata = self._first_all_gather()
        self._is_fresh = True  # already filled: no all-gather before the first use
        local = self._param.local
        full, inner = local.fsdp_post_all_gather(self._outputs, metadata, self._param_dtype)  # type: ignore[attr-defined]
        self._param.make_unsharded(self._without_padding(full).detach(), keeps_class=True)
        return _ExtensionBuffer([*self._outputs, *inner])

    def _without_padding(self, full: Tensor) -> Tensor:
        """``full`` without the padding rows at its end."""
        shape, found = self._param.shape, tuple(full.shape)
        if found == shape:
            return full
        if self._param.dim != 0 or len(found) != len(shape) or found[1:] != shape[1:] or found < shape:
            raise RuntimeError(
                f"{self._param.fqn}: {type(self._param.local).__name__}.{POST} returned shape {found}, where "
                f"a tensor of shape {shape} is expected; or one with more rows, which are cut off, if it is "
                "sharded on dim 0. Return a tensor of the shape of the whole parameter."
            )
        # Classes written for torch's fully_shard have this operation, which it always calls.
        return full.as_strided(shape, full.stride())

    @property
    def _param_dtype(self) -> torch.dtype:
        if self._param.local.dtype.is_floating_point:
            return self._param.precision.computed
        return getattr(self._bucket.mp_policy, "param_dtype", None) or self._param.local.dtype

    def _inputs(self, stream: CommStream | None = None) -> tuple[list[Tensor], Any]:
        """The tensors to send, and the metadata; a shard on the host is copied for ``stream``, or at once."""
        local: Any = self._param.local
        if not is_extension(local):
            raise RuntimeError(
                f"{self._param.fqn}: its shard was replaced by a {type(local).__name__} without {PRE} and "
                f"{POST}. Methods that were put on a tensor stay with that tensor: put them on the new local "
                "tensor as well, or on its class."
            )
        if local.device != self._bucket.mesh.device:
            to_device = partial(local.to, self._bucket.mesh.device)
            moved = to_device() if stream is None else stream.copy_in(partial(to_device, non_blocking=True))
            _carry_methods(local, moved)
            local = moved
        mesh = self._bucket.mesh.shard_dim_mesh
        if len(inspect.signature(local.fsdp_pre_all_gather).parameters) == 1:
            inputs, metadata = local.fsdp_pre_all_gather(mesh)
        else:
            sharded = self._param.sharded
            inputs, metadata = local.fsdp_pre_all_gather(
                mesh, sharded.size(), sharded.stride(), self._param.sites[0].module, self._bucket.mp_policy
            )
        if not isinstance(inputs, (tuple, list)) or not all(type(t) is Tensor for t in inputs) or not inputs:
            raise TypeError(
                f"{self._param.fqn}: {type(local).__name__}.{PRE} returned inputs {inputs!r}; expected is a "
                "tuple of plain tensors, which are what travels."
            )
        # Tags depend on the offset in the storage, which must be equal on all ranks (see ``GlooExchange``).
        return [t.clone() if t.storage_offset() else t.contiguous() for t in inputs], metadata

    def start_all_gather(self, stream: CommStream) -> Finish:
        """All-gather into the same storages again."""
        is_fresh, self._is_fresh = self._is_fresh, False
        if is_fresh and self.buffer.allocated_bytes:  # otherwise freed since: gradients were carried over
            return nothing
        self.buffer.allocate()
        with torch.inference_mode(False), torch.no_grad():
            inputs, metadata = self._inputs(stream)
            wait = self._start(inputs, self._outputs)

        def finish() -> None:
            with torch.inference_mode(False), torch.no_grad():
                wait()
                self._param.local.fsdp_post_all_gather(  # type: ignore[attr-defined]
                    self._outputs, metadata, self._param_dtype, out=self._param.unsharded_data()
                )

        return finish

    def _first_all_gather(self) -> tuple[list[Tensor], Any]:
        inputs, metadata = self._inputs()
        axis = self._bucket.mesh.shard_axis
        own = [tuple(tensor.shape) for tensor in inputs]
        self._shapes = [own] * axis.world  # of the inputs of all ranks
        if not axis.is_alone and not self._bucket.stored.slots[0].is_even:
            dist.all_gather_object(self._shapes, own, group=axis.pg)
        outputs = []
        for index, tensor in enumerate(inputs):
            rows = sum(shapes[index][0] for shapes in self._shapes) if tensor.dim() else axis.world
            outputs.append(tensor.new_empty((rows, *tensor.shape[1:])))
        self._start(inputs, outputs)()
        return outputs, metadata

    def _start(self, inputs: list[Tensor], outputs: list[Tensor]) -> Finish:
        """All-gather each input into its output, padded in transit if sizes differ between ranks."""
        if self._bucket.mesh.shard_axis.is_alone:
            for output, source in zip(outputs, inputs, strict=True):
                output.view(source.shape).copy_(source)
            return nothing
        comm = self._bucket.communication.all_gather
        waits, padded = [], []
        for index, (source, output) in enumerate(zip(inputs, outputs, strict=True)):
            sizes = [torch.Size(shapes[index]).numel() * source.itemsize for shapes in self._shapes]
            send, receive = bytes_of(source), bytes_of(output)
            if min(sizes) != max(sizes) or sizes[0] % ALIGNMENT:
                room, target = round_up(max(sizes), ALIGNMENT), receive
                receive = send.new_empty(room * len(sizes))
                send = torch.nn.functional.pad(send, (0, room - send.numel()))
                padded.append((receive.view(len(sizes), room), sizes, target))
            if send.numel():
                # One after another: messages are distinguished by their place in a shard buffer (see
                # ``GlooExchange``), which these do not have.
                waits.append(comm.all_gather([receive], [send]))

        def finish() -> None:
            for wait in waits:
                wait()
            for rows, sizes, target in padded:
                torch.cat([row[:size] for row, size in zip(rows, sizes, strict=True)], out=target)

        return finish

    def relocated_params(self) -> list[str]:
        """Always empty: the protocol owns the memory."""
        return []

    @property
    def can_be_compared(self) -> bool:
        """False: the unsharded parameter differs from the shard in form, so it is all-gathered again."""
        return False


def check_before_training(bucket: Bucket) -> None:
    """Refuse parameters of a subclass without the protocol, or with half of it."""
    for param in bucket.params:
        check_protocol(param.local, param.fqn)
        if isinstance(bucket, ExtensionBucket) and not is_extension(param.local):
            raise NotImplementedError(
                f"{param.fqn} holds a {type(param.local).__name__}, a tensor subclass that does not define "
                f"how it is all-gathered. Give the class {PRE} and {POST} before the first forward; or, "
                "before fully_shard, convert the parameter to a plain tensor, or pass it in ignored_params."
            )


def split_off(bucket: Bucket, mp_policy: Any) -> list[Bucket]:
    """``bucket``, and a bucket for each of its parameters whose local tensor has the methods.

    Call it while everything is sharded. The first bucket is left out if it has no parameters left.
    """
    leaving = [param for param in bucket.params if bucket.takes_more and is_extension(param.local)]
    if not leaving:
        return [bucket]
    made: list[Bucket] = []
    for param in leaving:
        if not param.local.is_meta:
            param.local.data = param.local.clone()  # the same tensor, in separate memory
        own = ExtensionBucket(param, bucket.mesh, bucket.policy, bucket.storage, mp_policy)
        own.communication.use(bucket.communication.options)
        own.rebuild_flat_shard()
        made.append(own)
    bucket.params = [param for param in bucket.params if param not in leaving]
    if bucket.params:
        bucket.rebuild_flat_shard()
        made.insert(0, bucket)
    return made
