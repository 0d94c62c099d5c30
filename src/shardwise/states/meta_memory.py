"""Memory for models on the meta device that are about to be loaded, so that nothing has to be initialised."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.runtime.spread import device_of_model
from shardwise.states.names import listed


def is_on_meta(model: nn.Module) -> bool:
    """Whether anything of it has no values yet."""
    return any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


def refuse_lost(model: nn.Module, caller: str, coming: Iterable[Any]) -> None:
    """Refuse tensors without values that are not among those ``coming``.

    Raises:
        RuntimeError: naming them.
    """
    known = {id(tensor) for tensor in coming}
    lost = [name for name, tensor in _named(model) if tensor.is_meta and id(tensor) not in known]
    if lost:
        are = "is" if len(lost) == 1 else "are"
        raise RuntimeError(
            f"{caller}: {listed(lost)} {are} on the meta device, without values, and will not be loaded "
            "(buffers with persistent=False are in no state). Call shardwise.materialize(model) first."
        )


@torch.no_grad()
def give_memory(model: nn.Module) -> None:
    """Let what is on the meta device have memory on the device of the model, its contents undefined.

    Sharded parameters stay the same objects.
    """
    device = device_of_model(model)
    model._apply(lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor)


def _named(model: nn.Module) -> Iterable[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()
