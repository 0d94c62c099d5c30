"""Full parameters lent to the caller, in place of the shards, with what is done to them written back.

Forward has its own full parameters, which shadow the shards and are none of the caller's business. These
here are others: in the dtype that is stored, registered in the modules, so that whoever walks
``parameters()`` or ``state_dict()`` sees them, and with memory of their own. The shards wait meanwhile, the
same objects as ever.

    module._parameters["weight"]    shard  ->  full parameter  ->  the same shard, with the edits
    group                           SHARDED    LENT               SHARDED
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwise.runtime import compat
from shardwise.runtime.bucket import Bucket, part_of
from shardwise.runtime.buffers import GatheredBuffer, local_views
from shardwise.runtime.collectives import Gather, make_communicator
from shardwise.runtime.deferred import DeferredGradient
from shardwise.runtime.extension import ExtensionBucket
from shardwise.runtime.group import GradientState, Group
from shardwise.runtime.layout import Layout, Slot
from shardwise.runtime.param import Param, give_up_full
from shardwise.runtime.streams import HostLane


@dataclass(frozen=True)
class Terms:
    """``is_shown``: this rank gets full parameters, not only takes part in gathering them."""

    writes_back: bool
    is_shown: bool
    to_host: bool
    with_gradients: bool


def check_can_lend(group: Group, terms: Terms) -> None:
    """Refuse before anything has been gathered.

    Raises:
        RuntimeError: the group is lent already, or gradients wait that ``.grad`` does not show.
        NotImplementedError: it has tensor subclasses that only gather themselves.
    """
    group.refuse_if_lent("another unsharded()")
    for bucket in group.buckets:
        if isinstance(bucket, ExtensionBucket):
            raise NotImplementedError(
                f"unsharded: {bucket.params[0].fqn} is a {type(bucket.params[0].local).__name__}, which "
                "gathers itself in the form in which it is computed with; what is stored of it cannot be put "
                "together. Shard it in a module of its own and leave that out with recurse=False."
            )
    if terms.with_gradients and group.gradient_state is not GradientState.NONE:
        waiting = [p.fqn for p in group.params if isinstance(p.sharded.grad, DeferredGradient)]
        raise RuntimeError(
            f"unsharded(with_grads=True): gradients of {', '.join(waiting[:4]) or group.name} wait to be "
            "reduced, so that .grad does not show them yet. Run a backward with synchronisation first, or "
            "zero_grad()."
        )


class Lent:
    """The parameters of one group, from ``__init__`` to ``take_back``."""

    def __init__(self, group: Group, terms: Terms) -> None:
        self._group = group
        self._terms = terms
        self._fulls: list[nn.Parameter | None] = []
        group.lend()
        try:
            with torch.no_grad(), torch.inference_mode(False):
                for bucket in group.buckets:
                    self._fulls += self._make_fulls(bucket)
        except BaseException:
            group.take_back()
            raise
        # An entry that is deleted and comes back would come last in parameters().
        self._orders = {s.module: list(s.module._parameters) for p in group.params for s in p.sites}
        self._versions = [None if full is None else full._version for full in self._fulls]
        for param, full in zip(group.params, self._fulls, strict=True):
            if full is not None:
                _register(param, full)
        group.refresh_flat_weights()

    def _make_fulls(self, bucket: Bucket) -> Iterator[nn.Parameter | None]:
        values = gather_whole(bucket, bucket.shard.bytes, bucket.stored)
        gradients: list[Tensor | None] = [None] * len(values)
        if self._terms.with_gradients:
            gradients = _whole_gradients(bucket)
        for param, value, gradient in zip(bucket.params, values, gradients, strict=True):
            if not self._terms.is_shown:
                yield None
                continue
            full = param.as_original(self._landed(value))
            vars(full).update(param.attributes)
            if gradient is not None:
                compat.set_grad_dtype(full, gradient.dtype)
                full.grad = param.as_original(self._landed(gradient)).detach()
            yield full

    def _landed(self, tensor: Tensor) -> Tensor:
        return tensor.cpu() if self._terms.to_host else tensor

    def take_back(self) -> list[str]:
        """Put the shards back, and into them what was changed; what could not be is returned, in words."""
        found = [
            None if full is None else _found_instead_of(full, param)
            for param, full in zip(self._group.params, self._fulls, strict=True)
        ]
        for param in self._group.params:
            _register(param, param.sharded)
        for module, names in self._orders.items():
            _reorder(module._parameters, names)
        self._group.refresh_flat_weights()
        self._group.take_back()
        problems: list[str] = []
        with torch.no_grad(), torch.inference_mode(False):
            for param, full, version, new, (bucket, slot) in zip(
                self._group.params, self._fulls, self._versions, found, _places(self._group), strict=True
            ):
                if full is not None:
                    is_changed = new is not full or full._version != version
                    problems += self._settle(param, new, is_changed, bucket, slot)
                    give_up_full(full, param.fqn)
        return problems

    def _settle(
        self, param: Param, new: Tensor | str | None, is_changed: bool, bucket: Bucket, slot: Slot
    ) -> list[str]:
        if not self._terms.with_gradients and isinstance(new, Tensor) and new.grad is not None:
            return [
                f"{param.fqn}: .grad of its full parameter was set, and is lost. Pass with_grads=True and "
                "writeback=True to keep it, or run backward outside."
            ]
        if not self._terms.writes_back:
            return []
        if not isinstance(new, Tensor):
            return [new or f"{param.fqn}: it was removed. Put it back, or change modules before fully_shard."]
        _write(part_of(param.content_in(new.detach()), slot, bucket.mesh.shard.rank), param.local, is_changed)
        if new.requires_grad != param.sharded.requires_grad:
            param.sharded.requires_grad_(new.requires_grad)
        if self._terms.with_gradients:
            self._write_gradient(param, new.grad, bucket, slot)
        return []

    def _write_gradient(self, param: Param, gradient: Tensor | None, bucket: Bucket, slot: Slot) -> None:
        sharded = param.sharded
        if gradient is None:
            sharded.grad = None
            return
        part = part_of(param.content_in(gradient), slot, bucket.mesh.shard.rank)
        if sharded.grad is None:
            local = torch.empty(part.shape, dtype=param.precision.kept, device=param.local.device)
            param.add_gradient(local.copy_(part))
        else:
            _write(part, compat.local_tensor(sharded.grad), True)


def gather_whole(bucket: Bucket, flat: Tensor, layout: Layout) -> list[Tensor]:
    """The full tensors, one a parameter, of which ``flat`` holds this rank's parts, laid out as ``layout``.

    On the device of the mesh, in memory that they alone hold. Collective over the ranks that share the
    bucket.
    """
    mesh = bucket.mesh
    gathered = GatheredBuffer(layout, mesh.device)
    flat = flat.to(mesh.device)
    if mesh.shard.is_alone:
        gathered.bytes.copy_(flat)
    else:
        comm = make_communicator(mesh.shard.pg, mesh.device)
        comm.channel = bucket.channel
        gather = Gather(comm, layout, gathered)
        gather.start(HostLane(), gather.cut(flat))()
    return [gathered.full_tensor(slot) for slot in layout.slots]


def _whole_gradients(bucket: Bucket) -> list[Tensor | None]:
    """The full gradients; None for parameters that have none on any rank."""
    rank, axis = bucket.mesh.shard.rank, bucket.mesh.shard
    flat = torch.zeros(bucket.kept.shard_bytes, dtype=torch.uint8, device=bucket.storage.device)
    is_there = torch.zeros(len(bucket.params), dtype=torch.int32, device=bucket.mesh.device)
    views = local_views(flat, bucket.kept, rank)
    for index, (param, view) in enumerate(zip(bucket.params, views, strict=True)):
        gradient = param.sharded.grad
        if gradient is not None:
            assert isinstance(gradient, DTensor)
            wanted = param.sharded.placements  # type: ignore[attr-defined]
            if gradient.placements != wanted:
                gradient = gradient.redistribute(placements=wanted)
            view.copy_(compat.local_tensor(gradient))
            is_there[index] = 1
    if not axis.is_alone:
        dist.all_reduce(is_there, op=dist.ReduceOp.MAX, group=axis.pg)
    fulls = gather_whole(bucket, flat, bucket.kept)
    return [full if there else None for full, there in zip(fulls, is_there.tolist(), strict=True)]


def _places(group: Group) -> Iterator[tuple[Bucket, Slot]]:
    for bucket in group.buckets:
        for slot in bucket.stored.slots:
            yield bucket, slot


def _register(param: Param, tensor: nn.Parameter) -> None:
    for site in param.sites:
        site.module._parameters[site.name] = tensor


def _reorder(entries: dict[str, nn.Parameter | None], names: list[str]) -> None:
    """Have ``names`` come first in ``entries``, in this order."""
    if list(entries)[: len(names)] != names:
        in_order = {name: entries[name] for name in [*names, *entries] if name in entries}
        entries.clear()
        entries.update(in_order)


def _found_instead_of(full: nn.Parameter, param: Param) -> Tensor | str | None:
    """What stands in the place of ``full`` now: itself, another tensor, or in words why it cannot be used."""
    found: Sequence[Tensor | None] = [site.registered() for site in param.sites]
    others = [tensor for tensor in found if tensor is not full]
    if not others:
        return _fitting(full, param)
    if any(tensor is not others[0] for tensor in found):
        names = " and ".join(site.fqn for site in param.sites)
        return f"{names} are tied, but one alone was replaced. Replace all of them with the same parameter."
    return None if others[0] is None else _fitting(others[0], param)


def _fitting(tensor: Tensor, param: Param) -> Tensor | str:
    wanted = tuple(param.sharded.shape)
    is_alike = isinstance(tensor, DTensor) == param.is_tensor_parallel
    if tuple(tensor.shape) == wanted and is_alike:
        return tensor
    return (
        f"{param.fqn}: what stands in its place is a {type(tensor).__name__} of shape {tuple(tensor.shape)}, "
        f"where {wanted} is expected. Its shard keeps its old values."
    )


def _write(source: Tensor, target: Tensor, is_changed: bool) -> None:
    """Copy where something has changed: a change in place between forward and backward is an error there.

    ``is_changed``: the full tensor was, perhaps in parts of other ranks, which will all fail in backward
    then. Changes through ``.data`` are not counted, and found by content.
    """
    source = source.to(target.device, target.dtype)
    if is_changed or not torch.equal(_bits(source), _bits(target)):
        target.copy_(source)


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)
