"""Memory for models on the meta device that are about to be loaded."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.init.placeholders import TensorSite, become_parameter, refresh_lists, sites_in
from shardwise.layout.fqns import clean, listed
from shardwise.ranks.model_ranks import device_of_model
from shardwise.setup.validation import groups_in
from shardwise.torch_compat import dtensor, nn_modules


def named_tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Parameters and buffers, persistent or not, each once."""
    return [(clean(name), t) for name, t in [*model.named_parameters(), *model.named_buffers()]]


def is_on_meta(model: nn.Module) -> bool:
    """Whether any tensor of ``model`` has no values yet."""
    return any(tensor.is_meta for _, tensor in named_tensors(model))


def refuse_lost(model: nn.Module, caller: str, coming: Iterable[Any]) -> None:
    """Refuse tensors without values that are not among those ``coming``."""
    known = {id(tensor) for tensor in coming}
    lost = [name for name, tensor in named_tensors(model) if tensor.is_meta and id(tensor) not in known]
    if lost:
        are = "is" if len(lost) == 1 else "are"
        raise RuntimeError(
            f"{caller}: {listed(lost)} {are} on the meta device, without values, and will not be loaded "
            "(buffers with persistent=False are in no state). Call shardwise.materialize(model) first."
        )


def give_memory(model: nn.Module) -> None:
    """Give tensors on the meta device memory with undefined contents, on the device of the model.

    Parameters stay the same objects, for the sake of ties and of an optimizer that has them already; a shared
    buffer stays shared.
    """
    device = device_of_model(model)
    with torch.inference_mode(False), torch.no_grad():
        _give_plain_memory(model, device)
        # Only sharded parameters are left: their groups notice, and move them into flat shards.
        nn_modules.map_tensors(
            model, lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor
        )
        for group in groups_in(model):
            for param in group.shards.params:
                param.restore_metadata()


def _give_plain_memory(model: nn.Module, device: torch.device) -> None:
    """Give memory to parameters without a group (ignored, or outside sharded modules), and to buffers."""
    sharded = {id(param.sharded) for group in groups_in(model) for param in group.shards.params}
    sites: dict[int, tuple[Tensor, list[TensorSite]]] = {}
    for site, tensor in sites_in(model.modules()):
        if tensor.is_meta and id(tensor) not in sharded:
            sites.setdefault(id(tensor), (tensor, []))[1].append(site)
    for tensor, places in sites.values():
        memory = dtensor.placed_as(tensor, torch.empty_like(dtensor.plain(tensor).detach(), device=device))
        if isinstance(tensor, nn.Parameter):
            become_parameter(tensor, memory, (site.module for site in places))
        else:
            for site in places:
                site.entries[site.name] = memory
    refresh_lists(site.module for _, places in sites.values() for site in places)
