"""The optimizer's state in host memory, while parameters and gradients stay on the device."""

from typing import Any

import torch
from torch import Tensor

from shardwise.arguments import check_type
from shardwise.torch_compat import dtensor


def offload_optimizer_state(optimizer: torch.optim.Optimizer, *, pin_memory: bool = True) -> None:
    """Keep the state of ``optimizer`` in host memory between its steps.

    Use it if parameters and gradients fit on the device, but not together with the optimizer's state and the
    activations. The state is copied to the device for a step, when there are no activations, and back after
    it. :class:`CPUOffloadPolicy` keeps everything on the host, and steps there.

    Args:
        optimizer: any ``torch.optim.Optimizer`` over sharded or plain parameters.
        pin_memory: pin the host memory, so that copies run at full speed.

    Raises:
        TypeError: ``optimizer`` is not a ``torch.optim.Optimizer``.

    Costs two copies of the state over the bus per step, and its memory on the device during the step.
    ``optimizer.state_dict()`` works at any time. Does nothing for parameters in host memory, since their
    state is in host memory as well. State under keys that are not parameters stays where it is.

    Example::

        optimizer = torch.optim.AdamW(model.parameters())
        offload_optimizer_state(optimizer)
    """
    wanted = "a torch.optim.Optimizer"
    check_type("offload_optimizer_state", "optimizer", optimizer, wanted, torch.optim.Optimizer)
    mover = _StateMover(pin_memory)
    optimizer.register_step_pre_hook(mover.to_device)
    optimizer.register_step_post_hook(mover.to_host)


class _StateMover:
    def __init__(self, is_pinned: bool) -> None:
        self._is_pinned = is_pinned

    def to_device(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._move(optimizer, to_host=False)

    def to_host(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for device in self._move(optimizer, to_host=True):  # the caller may read the copies from now on
            torch.accelerator.synchronize(device)

    def _move(self, optimizer: torch.optim.Optimizer, to_host: bool) -> set[torch.device]:
        """Move the state of parameters on devices; return the devices."""
        devices = set()
        for param, state in optimizer.state.items():
            # Some optimizers keep state under other keys.
            if not isinstance(param, Tensor) or dtensor.plain(param).device.type == "cpu":
                continue
            device = dtensor.plain(param).device
            devices.add(device)
            for name, value in state.items():
                # Scalars, such as a step count, stay where the optimizer has put them.
                if isinstance(value, Tensor) and value.dim():
                    state[name] = _moved(value, torch.device("cpu") if to_host else device, self._is_pinned)
        return devices


def _moved(tensor: Tensor, device: torch.device, is_pinned: bool) -> Tensor:
    local = dtensor.plain(tensor)
    if local.device == device:
        return tensor
    target = torch.empty_like(local, device=device, pin_memory=is_pinned and device.type == "cpu")
    target.copy_(local, non_blocking=True)
    return dtensor.placed_as(tensor, target)
