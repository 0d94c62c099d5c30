"""Initial values: ranks that shard one model must start from equal values, which are compared or made equal.

Each rank shards its own full parameters. If these differ between ranks (different seeds, or loaded on only
one rank), the sharded parameter silently becomes a mix of different models. So each rank records checksums of
the whole and of its shard when it shards a parameter. Ranks compare them before training starts, together
with copies of the same shard. If shards have received new values meanwhile, the earlier ones do not matter.

The same applies to full values given to ``load_state_dict`` later: their checksums are compared with the
plan, at the next forward with gradients.
"""

from collections.abc import Callable, Sequence
from functools import partial
from operator import setitem
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise.layout.mesh import Axis, ShardMesh, axes_of
from shardwise.params.parameter import Param
from shardwise.ranks.agreement import run_on_all_ranks
from shardwise.ranks.failures import monitor_of_job
from shardwise.ranks.model_ranks import Broadcast
from shardwise.ranks.replicas import (
    Checksums,
    Claim,
    are_fake,
    broadcast_tensors,
    differing,
    message_on_initial_values,
    refuse_unequal,
)
from shardwise.torch_compat import dtensor, nn_modules

# --- comparison -----------------------------------------------------------------------------------


@torch.no_grad()
def record_initial_values(params: Sequence[Param], shards: Sequence[nn.Parameter]) -> None:
    """Record checksums of ``params``, which are about to be sharded into ``shards``.

    Reads each full parameter once, on its device.
    """
    checksums = Checksums()
    for param, shard in zip(params, shards, strict=True):
        if _has_parts_to_compare(param):
            whole, part = checksums.of(param.content()), checksums.of(dtensor.local_tensor(shard))
            if whole is not None and part is not None:
                param.initial_checksums = (whole, part)


@torch.no_grad()
def record_full_load(param: Param, value: Tensor | None) -> None:
    """Record a checksum of the full ``value`` of which this rank loads its part, until ranks compare it.

    None: it is not loaded from a full value.
    """
    param.full_load = None
    if value is not None and _has_parts_to_compare(param) and (number := Checksums().of(value)) is not None:
        param.full_load = f"{int(number) % 2**64:016x}"


def _has_parts_to_compare(param: Param) -> bool:
    mesh = param.mesh
    return param.compares and _is_sharded(param) and not are_fake(mesh.axes(), mesh.device)


def _is_sharded(param: Param) -> bool:
    """True if ranks keep different parts; otherwise they keep copies, which are compared as such."""
    return not param.mesh.shard_axis.is_alone and bool(param.shape)


@torch.no_grad()
def refuse_unequal_initial_values(params: Sequence[Param], device: torch.device) -> None:
    """Raise on all ranks of ``params`` if they were sharded from different values, or if copies differ.

    Collective. All ranks need the same parameters in the same order.
    """
    params = [param for param in params if param.compares]
    registered = [(param, tensor) for param in params if (tensor := param.sites[0].registered()) is not None]
    axes = axes_of(tensor for _, tensor in registered)
    checksums = Checksums()
    starts = [_start_of(p, tensor, checksums, device) for p, tensor in registered if _is_sharded(p)]
    if findings := differing(starts, axes, device):
        raise RuntimeError(message_on_initial_values(findings))
    refuse_unequal([(param.fqn, tensor) for param, tensor in registered], device)
    for param in params:
        param.initial_checksums = None


def _start_of(param: Param, tensor: Tensor, checksums: Checksums, device: torch.device) -> Claim:
    ranks = tuple(param.mesh.mesh.mesh.flatten().tolist())
    if param.initial_checksums is None:
        nothing = torch.zeros((), dtype=torch.int64, device=device)
        return Claim(param.fqn, param.mesh.axes(), ranks, nothing, is_unchanged=False)
    whole, part = param.initial_checksums
    local = dtensor.plain(tensor)
    now = checksums.of(local)
    is_unchanged = False if now is None else now.to(part.device) == part
    return Claim(
        param.fqn,
        param.mesh.axes(),
        ranks,
        whole,
        is_unchanged,
        _is_telling(local),
        takes_part=local.numel() > 0,  # for a rank with an empty shard, the values do not matter
    )


def _is_telling(local: Tensor) -> Tensor | bool:
    """False for a shard of one repeated value, since a new value may well be the same."""
    if local.numel() < 2 or type(local) is not Tensor:
        return False
    return (local != local.view(-1)[0] if local.is_contiguous() else local != local.flatten()[0]).any()


# --- broadcast ------------------------------------------------------------------------------------


@torch.no_grad()
def broadcast_initial_values(
    params: Sequence[Param], buffers: Sequence[tuple[str, nn.Module, str]], mesh: ShardMesh
) -> None:
    """Give all ranks the parameters and buffers of the first rank of the mesh, before they are sharded.

    ``buffers``: their full name, module and name in it. Tensors on the meta device that have values on the
    first rank get memory. Collective, over the mesh of each parameter, and that of the call for buffers.

    Raises:
        RuntimeError: on all ranks, if shapes or dtypes of their tensors differ.
    """
    for each in dict.fromkeys([mesh, *(param.mesh for param in params)]):
        axes = each.axes()
        if not axes or are_fake(axes, each.device):
            continue
        sent = [_ToSend(p.fqn, p.content(), partial(_replace_original, p)) for p in params if p.mesh is each]
        for fqn, module, name in buffers if each is mesh else ():
            known = nn_modules.buffers(module)
            sent.append(_ToSend(fqn, dtensor.plain(known[name]), partial(setitem, known, name)))
        with monitor_of_job().call("fully_shard", partial(list, axes)):
            _broadcast(sent, axes, each.device)


class _ToSend(NamedTuple):
    """A tensor of a module, and the function that replaces it there."""

    fqn: str
    tensor: Tensor
    replace: Callable[[Tensor], None]


def _replace_original(param: Param, new: Tensor) -> None:
    original = param.sharded
    # The module keeps its own until the sharded parameter replaces it.
    param.sharded = nn.Parameter(dtensor.placed_as(original, new), original.requires_grad)


def _broadcast(places: Sequence[_ToSend], axes: Sequence[Axis], device: torch.device) -> None:
    broadcast = Broadcast(axes, None, device)
    own = [(fqn, tuple(tensor.shape), tensor.dtype) for fqn, tensor, _ in places]
    forms, on_meta = broadcast.object((own, [place.tensor.is_meta for place in places]))
    run_on_all_ranks(axes, device, partial(_check, own, forms, places, on_meta))
    tensors = []
    for (_, tensor, replace), is_meta in zip(places, on_meta, strict=True):
        if is_meta:
            continue
        if tensor.is_meta:
            tensor = torch.empty_like(tensor, device=device)
            replace(tensor)
        tensors.append(tensor)
    broadcast_tensors(tensors, broadcast, device)


def _check(own: Any, forms: Any, places: Sequence[_ToSend], on_meta: Sequence[bool]) -> None:
    unlike = [f"{a} here and {b} there" for a, b in zip(own, forms, strict=False) if a != b]
    if unlike or len(own) != len(forms):
        raise RuntimeError(
            f"sync_module_states=True: rank {dist.get_rank()} has {len(own)} tensors to shard and the first "
            f"rank {len(forms)}; they differ at {unlike[0] if unlike else 'their end'}. Build the same model "
            "on all ranks."
        )
    for place, is_meta in zip(places, on_meta, strict=True):
        if is_meta and not place.tensor.is_meta:
            raise RuntimeError(
                f"sync_module_states=True: {place.fqn} is on the meta device on the first rank of the mesh, "
                f"which is to send it, and has values on rank {dist.get_rank()}. Load the weights on the "
                "first rank."
            )
