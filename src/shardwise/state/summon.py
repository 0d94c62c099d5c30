"""Summon: full parameters in place of the sharded ones, for the caller, with changes written back.

These are not the unsharded parameters of forward, which shadow the sharded ones. Summoned parameters have the
stored dtype and memory of their own, and are registered in the modules, so that ``parameters()`` and
``state_dict()`` show them. The sharded parameters stay the same objects, and are registered again afterwards.

    module._parameters["weight"]    shard  ->  full parameter  ->  the same shard, with the edits
    group                           SHARDED    SUMMONED           SHARDED
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardwise.buckets.bucket import Bucket
from shardwise.buckets.extension import ExtensionBucket
from shardwise.comm.buffers import AllGather, LocalViews, UnshardedBuffer, bytes_of
from shardwise.comm.communicators import make_communicator
from shardwise.comm.streams import HostStream
from shardwise.groups.group import ParameterGroup
from shardwise.groups.states import EMPTY
from shardwise.layout.chunks import shard_of
from shardwise.layout.slots import Layout, Slot
from shardwise.params.parameter import Param, mark_replaced
from shardwise.ranks.model_ranks import Broadcast
from shardwise.ranks.replicas import Checksums, Claim, broadcast_tensors
from shardwise.torch_compat import dtensor, nn_modules, tensor_impl


def check_can_summon(group: ParameterGroup, with_gradients: bool) -> None:
    """Refuse before anything has been unsharded."""
    group.refuse_if_summoned("another unsharded()")
    for bucket in group.buckets:
        if isinstance(bucket, ExtensionBucket):
            raise NotImplementedError(
                f"unsharded: {bucket.params[0].fqn} is a {type(bucket.params[0].local).__name__}, which "
                "defines its own all-gather, of the values used in computation; its stored values cannot be "
                "all-gathered. Shard it in a module of its own, and leave that module out with recurse=False."
            )
    if with_gradients and group.gradients.state is not EMPTY:
        waiting = [p.fqn for p in group.shards.params if p.is_deferred]
        raise RuntimeError(
            f"unsharded(with_grads=True): gradients of {', '.join(waiting[:4]) or group.name} wait to be "
            "reduced, so that .grad does not show them yet. Run a backward with synchronisation first, or "
            "zero_grad()."
        )


@dataclass(eq=False)
class _SummonedParam:
    """One summoned parameter, and what it and its shard were before the caller got it."""

    param: Param
    bucket: Bucket
    slot: Slot
    full: nn.Parameter
    version: int
    gradient: Tensor | None
    gradient_version: int
    shard_before: Tensor | None  # None: changes are dropped
    shard_gradient_before: Tensor | None
    checksum: Tensor | None  # of ``full``, as it was; None: it cannot have one, or changes are dropped
    new: Tensor | str | None = None  # what stands in its place at the end, or why that cannot be used
    takes_over: bool = True  # the changes

    def part(self, whole: Tensor) -> Tensor:
        """This rank's shard of a full tensor."""
        content = self.param.content_in(whole.detach())
        return shard_of(content, self.slot, self.bucket.mesh.shard_axis.rank)

    def problem(self) -> str | None:
        """Why what stands in its place cannot be taken over, if so."""
        if isinstance(self.new, Tensor):
            return None
        return (
            self.new
            or f"{self.param.fqn}: it was removed. Put it back, or change modules before fully_shard."
        )

    def change(self, checksums: Checksums) -> Tensor:
        """A number for what the caller has made of its value; 0 if it is as it was."""
        now = checksums.of(dtensor.plain(self.new)) if isinstance(self.new, Tensor) else None
        if now is None or self.checksum is None:
            return torch.zeros((), dtype=torch.int64)
        return torch.where(now.to(self.checksum.device) == self.checksum, 0, now.to(self.checksum.device))

    def change_of_gradient(self, checksums: Checksums) -> Tensor:
        """The same for its gradient."""
        new = self.new.grad if isinstance(self.new, Tensor) else self.gradient
        number = None if new is None or self._has_same(new) else checksums.of(dtensor.plain(new))
        return torch.tensor(int(not self._has_same(new))) if number is None else number

    def write_back(self, with_gradients: bool) -> list[str]:
        """Write changes back into the shard; returns problems as texts."""
        if self.shard_before is None or not self.takes_over:
            return []
        new = self.new
        if not isinstance(new, Tensor):
            return [str(self.problem())]
        problems = self._write_back_value(new)
        if new.requires_grad != self.param.sharded.requires_grad:
            self.param.sharded.requires_grad_(new.requires_grad)
        if with_gradients:
            problems += self._write_back_gradient(new.grad)
        elif new.grad is not None:
            problems.append(
                f"{self.param.fqn}: .grad of its full parameter was set, and is lost. Pass with_grads=True "
                "to keep it."
            )
        return problems

    def _write_back_value(self, new: Tensor) -> list[str]:
        assert self.shard_before is not None
        local = self.param.local
        part = self.part(new).to(local.device)
        # Versions count the changes of all ranks, whoever keeps the rows: then all shards count them, and a
        # backward that needs the old values fails on all ranks. Changes through .data are found by content.
        is_changed = (
            new is not self.full
            or tensor_impl.version(new) != self.version
            or not _same(part, self.shard_before)
        )
        if not is_changed:
            return []
        if not _same(local, self.shard_before):
            return [
                f"{self.param.fqn}: both its shard (perhaps by an optimizer) and its full parameter were "
                "changed inside. The shard keeps its own change. Change only one of them."
            ]
        local.copy_(part)
        return []

    def _write_back_gradient(self, new: Tensor | None) -> list[str]:
        if self._has_same(new):
            return []
        if self.param.sharded.grad is not self.shard_gradient_before:
            return [
                f"{self.param.fqn}: .grad of its shard was replaced inside (perhaps by an optimizer's "
                "zero_grad()), and .grad of its full parameter was changed. The shard keeps its own .grad."
            ]
        self.param.set_gradient(None if new is None else self.part(new))
        return []

    def _has_same(self, gradient: Tensor | None) -> bool:
        return gradient is self.gradient and (
            gradient is None or tensor_impl.version(gradient) == self.gradient_version
        )


class SummonedGroup:
    """The summoned parameters of one group: until ``end``; then ``write_back`` and ``release``."""

    def __init__(
        self, group: ParameterGroup, writeback: bool, rank0_only: bool, to_host: bool, with_gradients: bool
    ) -> None:
        self._group = group
        self._writes_back, self._to_host, self._with_gradients = writeback, to_host, with_gradients
        # Ranks that do not get full parameters only take part in the all-gathers.
        self._is_shown = not rank0_only or dist.get_rank() == int(group.mesh.mesh.mesh.min())
        self.summoned: list[_SummonedParam] = []
        group.adopt_changes()
        group.unsharded.step("summon")
        try:
            with torch.inference_mode(False), torch.no_grad():
                for bucket in group.buckets:
                    self.summoned += self._summon(bucket)
        except BaseException:
            group.unsharded.step("end_summon")
            raise
        # A parameter that is deleted and registered again would come last in parameters().
        self._orders = {
            s.module: list(nn_modules.parameters(s.module)) for p in group.shards.params for s in p.sites
        }
        for summoned in self.summoned:
            _register(summoned.param, summoned.full)
        nn_modules.refresh_flat_weights(group.shards.rnns)

    def _summon(self, bucket: Bucket) -> Iterator[_SummonedParam]:
        values = all_gather_tensors(bucket, bucket.flat_shard.bytes, bucket.stored)
        checksums = Checksums()
        gradients: list[Tensor | None] = [None] * len(values)
        if self._with_gradients:
            gradients = _full_gradients(bucket)
        if not self._is_shown:
            return
        rows = zip(bucket.params, bucket.stored.slots, values, gradients, strict=True)
        for param, slot, value, gradient in rows:
            wants_grad = param.sharded.requires_grad
            full = param.like_original(self._on_device(value), wants_grad)
            vars(full).update(param.attributes)
            if gradient is not None:
                tensor_impl.set_grad_dtype(full, gradient.dtype)
                full.grad = param.like_original(self._on_device(gradient), wants_grad).detach()
            own = full.grad
            yield _SummonedParam(
                param,
                bucket,
                slot,
                full,
                tensor_impl.version(full),
                own,
                0 if own is None else tensor_impl.version(own),
                param.local.detach().clone() if self._writes_back else None,
                param.sharded.grad,
                checksums.of(dtensor.plain(full)) if self._writes_back and param.mesh.axes() else None,
            )

    def _on_device(self, tensor: Tensor) -> Tensor:
        return tensor.cpu() if self._to_host else tensor

    def end(self) -> None:
        """Note what the caller leaves, and register the sharded parameters again. Never raises."""
        for summoned in self.summoned:
            summoned.new = _found_instead_of(summoned.full, summoned.param)
        for summoned in self.summoned:
            _register(summoned.param, summoned.param.sharded)
        for module, names in self._orders.items():
            nn_modules.reorder(nn_modules.parameters(module), names)
        nn_modules.refresh_flat_weights(self._group.shards.rnns)
        self._group.unsharded.step("end_summon")

    def claims(self, checksums: Checksums) -> list[Claim]:
        """What has to be equal on all ranks so that the shards make up one parameter."""
        claims = []
        for each in self.summoned:
            param, axes = each.param, each.param.mesh.axes()
            if param.compares and axes:
                ranks = tuple(param.mesh.mesh.mesh.flatten().tolist())
                claims.append(Claim(param.fqn, axes, ranks, each.change(checksums)))
                if self._with_gradients:
                    number = each.change_of_gradient(checksums)
                    claims.append(Claim(f"{param.fqn}.grad", axes, ranks, number))
        return claims

    def write_back(self) -> list[str]:
        """Write changes back; returns problems as texts. Never raises: other groups write theirs as well."""
        problems: list[str] = []
        with torch.inference_mode(False), torch.no_grad():
            for summoned in self.summoned:
                try:
                    problems += summoned.write_back(self._with_gradients)
                except Exception as error:
                    problems.append(f"{summoned.param.fqn}: {error}")
        return problems

    def release(self) -> None:
        """Have the full parameters refuse to be trained, or differentiated by a backward that is to come."""
        for summoned in self.summoned:
            if summoned.full.requires_grad:
                late = partial(_refuse_late_gradient, summoned.param.fqn)
                summoned.full.register_post_accumulate_grad_hook(late)
            mark_replaced(summoned.full, summoned.param.fqn)


def _refuse_late_gradient(fqn: str, full: Tensor) -> NoReturn:
    raise RuntimeError(
        f"{fqn}: a gradient of its full parameter arrived after the end of unsharded(), and would be lost. "
        "Run this backward inside, with unsharded(model, with_grads=True)."
    )


@torch.no_grad()
def broadcast_changes(groups: Sequence[SummonedGroup], src_rank: int) -> None:
    """Replace what each rank has made of the full parameters by what ``src_rank`` has. Collective."""
    by_mesh: dict[DeviceMesh, list[_SummonedParam]] = {}
    for group in groups:
        for each in group.summoned:
            if each.param.mesh.axes():
                by_mesh.setdefault(each.param.mesh.mesh, []).append(each)
    checksums = Checksums()
    for summoned in by_mesh.values():
        mesh = summoned[0].param.mesh
        broadcast = Broadcast(mesh.axes(), src_rank, mesh.device)
        problems = [each.problem() for each in summoned]
        changed = [each.checksum is None or bool(each.change(checksums)) for each in summoned]
        problems, changed = broadcast.object((problems, changed))
        if found := [problem for problem in problems if problem]:
            raise RuntimeError(f"unsharded: rank {src_rank}: {' '.join(found)}")
        tensors = []
        for each, is_changed in zip(summoned, changed, strict=True):
            each.takes_over = is_changed
            if not broadcast.is_source:
                each.new = each.full
            if is_changed:
                assert isinstance(each.new, Tensor)
                tensors.append(dtensor.plain(each.new))
        broadcast_tensors(tensors, broadcast, mesh.device)


def all_gather_tensors(bucket: Bucket, flat: Tensor, layout: Layout) -> list[Tensor]:
    """The full tensors, one for each parameter, whose shards are in ``flat``, laid out as ``layout``.

    On the device of the mesh, with memory of their own. Collective over the ranks that share the bucket.
    """
    mesh = bucket.mesh
    buffer = UnshardedBuffer(layout, mesh.device)
    flat = flat.to(mesh.device)
    if mesh.shard_axis.is_alone:
        buffer.bytes.copy_(flat)
    else:
        comm = make_communicator(mesh.shard_axis.pg, mesh.device)
        comm.channel = bucket.communication.channel
        all_gather = AllGather(comm, layout, buffer)
        all_gather.start(HostStream(), all_gather.cut(flat))()
    return [buffer.unsharded_tensor(slot) for slot in layout.slots]


def _full_gradients(bucket: Bucket) -> list[Tensor | None]:
    """The full gradients; None for parameters that have none on any rank."""
    rank, axis = bucket.mesh.shard_axis.rank, bucket.mesh.shard_axis
    flat = torch.zeros(bucket.kept.shard_bytes, dtype=torch.uint8, device=bucket.storage.device)
    is_there = torch.zeros(len(bucket.params), dtype=torch.int32, device=bucket.mesh.device)
    views = LocalViews(bucket.kept, rank).of(flat)
    for index, (param, view) in enumerate(zip(bucket.params, views, strict=True)):
        gradient = param.sharded.grad
        if gradient is not None:
            assert isinstance(gradient, DTensor)
            wanted = param.sharded.placements  # type: ignore[attr-defined]
            if gradient.placements != wanted:
                gradient = gradient.redistribute(placements=wanted)
            view.copy_(dtensor.local_tensor(gradient))
            is_there[index] = 1
    if not axis.is_alone:
        dist.all_reduce(is_there, op=dist.ReduceOp.MAX, group=axis.pg)
    fulls = all_gather_tensors(bucket, flat, bucket.kept)
    return [full if there else None for full, there in zip(fulls, is_there.tolist(), strict=True)]


def _register(param: Param, tensor: nn.Parameter) -> None:
    for site in param.sites:
        nn_modules.parameters(site.module)[site.name] = tensor


def _found_instead_of(full: nn.Parameter, param: Param) -> Tensor | str | None:
    """What is registered instead of ``full`` now: itself, another tensor, or why that cannot be used."""
    found: Sequence[Tensor | None] = [site.registered() for site in param.sites]
    others = [tensor for tensor in found if tensor is not full]
    if not others:
        return _fitting(full, param)
    if any(tensor is not others[0] for tensor in found):
        names = " and ".join(site.fqn for site in param.sites)
        return f"{names} are tied, but only one was replaced. Replace all of them with the same parameter."
    return None if others[0] is None else _fitting(others[0], param)


def _fitting(tensor: Tensor, param: Param) -> Tensor | str:
    wanted = tuple(param.sharded.shape)
    if tensor.dtype != param.sharded.dtype or tensor.is_meta:
        return (
            f"{param.fqn}: it was replaced by a tensor of {tensor.dtype} on {tensor.device}, where "
            f"{param.sharded.dtype} with values is expected. Convert the model outside, with .to()."
        )
    is_alike = isinstance(tensor, DTensor) == param.is_tensor_parallel
    if tuple(tensor.shape) == wanted and is_alike:
        return tensor
    return (
        f"{param.fqn}: it was replaced by a {type(tensor).__name__} of shape {tuple(tensor.shape)}, where "
        f"{wanted} is expected. Its shard keeps its old values."
    )


def _same(left: Tensor, right: Tensor) -> bool:
    """Bit for bit."""
    return left.dtype == right.dtype and torch.equal(bytes_of(left), bytes_of(right))
