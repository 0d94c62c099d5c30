"""Ranks that shard one model must begin with one model: what they cut is compared, or made equal before.

Each rank cuts its own full parameters and keeps a part. Where these were different (drawn from other seeds,
or loaded on one rank only), the parameter is put together from different models, and nothing shows it. So
each rank notes a checksum of the whole when it cuts, and one of its part. They are compared before training
begins, together with copies that ranks keep of one part. If parts were given other values meanwhile, what
they were cut from does not matter any more.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwise.layout.mesh import Axis, ShardMesh, axes_of
from shardwise.params.parameter import InitialChecksums, Param
from shardwise.ranks.agreement import run_on_all_ranks
from shardwise.ranks.model_ranks import Broadcast
from shardwise.ranks.replicas import (
    Checksums,
    Claim,
    are_fake,
    broadcast_tensors,
    copies_of,
    differing,
    message_on_copies,
    message_on_initial_values,
)
from shardwise.torch_compat import dtensor, nn_modules

# --- compare --------------------------------------------------------------------------------------


@torch.no_grad()
def record_initial_values(params: Sequence[Param], shards: Sequence[nn.Parameter]) -> None:
    """Note on ``params``, which are about to be cut into ``shards``, what they are cut from.

    Reads each full parameter once, where it lies.
    """
    checksums = Checksums()
    for param, shard in zip(params, shards, strict=True):
        if param.compares and _is_sharded(param) and not are_fake(param.mesh.axes(), param.mesh.device):
            whole, part = checksums.of(param.content()), checksums.of(dtensor.local_tensor(shard))
            if whole is not None and part is not None:
                param.initial_checksums = InitialChecksums(whole, part)


def _is_sharded(param: Param) -> bool:
    """True if ranks keep different parts of what is cut; else they keep copies, compared as such."""
    return not param.mesh.shard.is_alone and bool(param.shape)


@torch.no_grad()
def refuse_unequal_initial_values(params: Sequence[Param], device: torch.device) -> None:
    """Raise on all ranks that share ``params`` if they were cut from different values, or if copies differ.

    Collective. The ranks have to have the same parameters, in one order.
    """
    params = [param for param in params if param.compares]
    registered = [(param, tensor) for param in params if (tensor := param.sites[0].registered()) is not None]
    axes = axes_of(tensor for _, tensor in registered)
    checksums = Checksums()
    starts = [_start_of(p, tensor, checksums, device) for p, tensor in registered if _is_sharded(p)]
    if findings := differing(starts, axes, device):
        raise RuntimeError(message_on_initial_values(findings))
    copies = copies_of([(param.fqn, tensor) for param, tensor in registered], checksums)
    if findings := differing(copies, axes, device):
        raise RuntimeError(message_on_copies(findings))
    for param in params:
        param.initial_checksums = None


def _start_of(param: Param, tensor: Tensor, checksums: Checksums, device: torch.device) -> Claim:
    ranks = tuple(param.mesh.mesh.mesh.flatten().tolist())
    if param.initial_checksums is None:
        nothing = torch.zeros((), dtype=torch.int64, device=device)
        return Claim(param.fqn, param.mesh.axes(), ranks, nothing, is_unchanged=False)
    local = dtensor.plain(tensor)
    now = checksums.of(local)
    is_unchanged: Tensor | bool = False
    if now is not None:
        is_unchanged = now.to(param.initial_checksums.part.device) == param.initial_checksums.part
    return Claim(
        param.fqn,
        param.mesh.axes(),
        ranks,
        param.initial_checksums.whole,
        is_unchanged,
        _is_telling(local),
        takes_part=local.numel() > 0,  # a rank that keeps nothing of it may have cut what it likes
    )


def _is_telling(local: Tensor) -> Tensor | bool:
    """False for a part that may well be given the values that it had: one again and again."""
    if local.numel() < 2 or type(local) is not Tensor:
        return False
    return (local != local.view(-1)[0] if local.is_contiguous() else local != local.flatten()[0]).any()


# --- make equal -----------------------------------------------------------------------------------


@torch.no_grad()
def broadcast_initial_values(
    params: Sequence[Param], buffers: Sequence[tuple[str, nn.Module, str]], mesh: ShardMesh
) -> None:
    """Have all ranks cut what the first rank of the mesh has, and have its buffers.

    ``buffers``: their full name, module and name in it. What a rank has on the meta device, and the first
    not, gets memory. Collective, over the mesh of each parameter, and that of the call for buffers.

    Raises:
        RuntimeError: on all ranks, if their tensors are not of the same shapes and dtypes.
    """
    meshes = list(dict.fromkeys([mesh, *(param.mesh for param in params)]))
    for each in meshes:
        axes = each.axes()
        if not axes or are_fake(axes, each.device):
            continue
        places = [_ParamToSend(param) for param in params if param.mesh is each]
        own = [_BufferToSend(*buffer) for buffer in buffers] if each is mesh else []
        _broadcast([*places, *own], axes, each.device)


class _ParamToSend:
    def __init__(self, param: Param) -> None:
        self._param = param
        self.fqn = param.fqn

    def tensor(self) -> Tensor:
        return self._param.content()

    def give_memory(self, device: torch.device) -> None:
        original = self._param.sharded
        new: Tensor = torch.empty_like(self._param.content(), device=device)
        if isinstance(original, DTensor):
            new = dtensor.make_dtensor(new, dtensor.spec_of(original))
        # The module keeps its own until the shard takes its place.
        self._param.sharded = nn.Parameter(new, original.requires_grad)


class _BufferToSend:
    def __init__(self, fqn: str, module: nn.Module, name: str) -> None:
        self.fqn, self._module, self._name = fqn, module, name

    def tensor(self) -> Tensor:
        buffer = nn_modules.buffers(self._module)[self._name]
        assert buffer is not None
        return dtensor.plain(buffer)

    def give_memory(self, device: torch.device) -> None:
        nn_modules.buffers(self._module)[self._name] = torch.empty_like(self.tensor(), device=device)


def _broadcast(places: Sequence[Any], axes: Sequence[Axis], device: torch.device) -> None:
    broadcast = Broadcast(axes, None, device)
    own = [(place.fqn, tuple(place.tensor().shape), place.tensor().dtype) for place in places]
    forms, on_meta = broadcast.object((own, [place.tensor().is_meta for place in places]))
    run_on_all_ranks(axes, device, _check(own, forms, places, on_meta))
    sent = [place for place, is_meta in zip(places, on_meta, strict=True) if not is_meta]
    for place in sent:
        if place.tensor().is_meta:
            place.give_memory(device)
    broadcast_tensors([place.tensor() for place in sent], broadcast, device)


def _check(own: Any, forms: Any, places: Sequence[Any], on_meta: Sequence[bool]) -> Callable[[], None]:
    def check() -> None:
        unlike = [f"{a} here and {b} there" for a, b in zip(own, forms, strict=False) if a != b]
        if unlike or len(own) != len(forms):
            raise RuntimeError(
                f"sync_module_states=True: rank {dist.get_rank()} has {len(own)} tensors to shard and the "
                f"first rank {len(forms)}; they differ at {unlike[0] if unlike else 'their end'}. Build the "
                "same model on all ranks."
            )
        for place, is_meta in zip(places, on_meta, strict=True):
            if is_meta and not place.tensor().is_meta:
                raise RuntimeError(
                    f"sync_module_states=True: {place.fqn} is on the meta device on the first rank of the "
                    f"mesh, which is to send it, and has values on rank {dist.get_rank()}. Load the weights "
                    "on the first rank."
                )

    return check
