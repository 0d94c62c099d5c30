"""Loss scaling for gradients with different placements.

``torch.amp.GradScaler`` reduces its flag for infinities by the placement of the first gradient in its list.
If that is replicated (a scalar, a block under ``ddp``, a parameter that is not sharded) and others are not,
only one rank sees an infinity in its shard, and the ranks continue with different weights.
"""

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardwise.layout.mesh import all_reduce_max, axes_of
from shardwise.params.parameter import refuse_deferred
from shardwise.ranks.failures import monitor_of_job
from shardwise.torch_compat import dtensor, optimizers, tensor_impl


class GradScaler(optimizers.GradScalerBase):
    """A ``torch.amp.GradScaler`` in which all ranks see every infinity, for gradients of any placement.

    It has torch's arguments, and is used like torch's. Costs 2 d - 1 all-reduces of one number for d mesh
    dimensions; all ranks must call ``step`` (or ``unscale_``) together.

    Raises:
        RuntimeError: from ``step`` or ``unscale_``: gradients of backwards without synchronisation
            (``no_sync``) wait to be reduced.
        ValueError: gradients are in float16, as in torch.

    Example::

        scaler = GradScaler("cuda")
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    """

    def unscale_gradients(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        """Unscale the local tensors of all gradients, and report infinities to all ranks."""
        params = [param for group in optimizer.param_groups for param in group["params"]]
        found: dict[torch.device, Tensor] = {}
        by_kind: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        with monitor_of_job().call("GradScaler", lambda: axes_of(params)), torch.no_grad():
            for param in params:
                if param.grad is not None:
                    local = _values(param.grad, allow_fp16)
                    by_kind.setdefault((local.device, local.dtype), []).append(local)
            for (device, _), gradients in by_kind.items():
                flag = found.setdefault(device, found_inf.to(device, copy=True))
                optimizers.check_and_unscale_(gradients, flag, inv_scale.to(device))
            _agree(found, found_inf, params)
        return found or {found_inf.device: found_inf}


def _values(gradient: Tensor, allow_fp16: bool) -> Tensor:
    """This rank's numbers of a gradient."""
    refuse_deferred(gradient)
    if not allow_fp16 and gradient.dtype is torch.float16:
        raise ValueError("Attempting to unscale FP16 gradients.")  # torch's words
    local = dtensor.plain(gradient)
    return tensor_impl.sparse_values(local) if local.is_sparse else local


def _agree(found: dict[torch.device, Tensor], like: Tensor, params: list[Tensor]) -> None:
    """Report infinities on any rank to every device, including ranks without gradients."""
    axes = axes_of(params)
    if not axes:
        return
    devices = {torch.device(param.device_mesh.device_type) for param in params if isinstance(param, DTensor)}
    highest = like.to(devices.pop() if len(devices) == 1 else like.device, copy=True)
    for flag in found.values():
        torch.maximum(highest, flag.to(highest.device), out=highest)
    all_reduce_max(highest, axes)
    for flag in found.values():
        flag.copy_(highest)
    found.setdefault(highest.device, highest)
