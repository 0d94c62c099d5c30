"""Initial values: ranks that shard one model must start from equal values, which are compared, or made equal.

Each rank shards its own full parameters. If these differ between ranks (other seeds, or loaded on one rank
only), the sharded parameter is a mix of different models, and nothing shows it. So each rank records
checksums of the whole and of its shard when it shards a parameter. Ranks compare them before training starts,
together with copies of the same shard. If shards were given other values meanwhile, the values before do not
matter.

The same goes for full values that ``load_state_dict`` is given later: their checksums are compared with the
plan, at the next forward with gradients.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

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
    copies_of,
    differing,
    message_on_copies,
    message_on_initial_values,
)
from shardwise.torch_compat import dtensor, nn_modules

# --- compare --------------------------------------------------------------------------------------


@torch.no_grad()
def record_initial_values(params: Sequence[Param], shards: Sequence[nn.Parameter]) -> None:
    """Record checksums of ``params``, which are about to be sharded into ``shards``.

    Reads each full parameter once, where it lies.
    """
    checksums = Checksums()
    for param, shard in zip(params, shards, strict=True):
        if param.compares and _is_sharded(param) and not are_fake(param.mesh.axes(), param.mesh.device):
            whole, part = checksums.of(param.content()), checksums.of(dtensor.local_tensor(shard))
            if whole is not None and part is not None:
                param.initial_checksums = (whole, part)


@torch.no_grad()
def record_full_load(param: Param, value: Tensor | None) -> None:
    """Until ranks compare it: a checksum of the full ``value`` of which this rank is to load its part.

    None: it is loaded from something else.
    """
    param.full_load = None
    if value is not None and param.compares and _is_sharded(param):
        number = Checksums().of(value)
        if number is not None and not are_fake(param.mesh.axes(), param.mesh.device):
            param.full_load = f"{int(number) % 2**64:016x}"


def _is_sharded(param: Param) -> bool:
    """True if ranks keep different parts; else they keep copies, which are compared as such."""
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
    """False for a shard of one repeated value, which it may well be given again."""
    if local.numel() < 2 or type(local) is not Tensor:
        return False
    return (local != local.view(-1)[0] if local.is_contiguous() else local != local.flatten()[0]).any()


# --- make equal -----------------------------------------------------------------------------------


@torch.no_grad()
def broadcast_initial_values(
    params: Sequence[Param], buffers: Sequence[tuple[str, nn.Module, str]], mesh: ShardMesh
) -> None:
    """Give all ranks the parameters and buffers of the first rank of the mesh, before they are sharded.

    ``buffers``: their full name, module and name in it. Tensors on the meta device that have values on the
    first rank get memory. Collective, over the mesh of each parameter, and that of the call for buffers.

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
        # The module keeps its own until the sharded parameter replaces it.
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
    with monitor_of_job().call("fully_shard", lambda: axes):
        _broadcast_along(places, axes, device)


def _broadcast_along(places: Sequence[Any], axes: Sequence[Axis], device: torch.device) -> None:
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
