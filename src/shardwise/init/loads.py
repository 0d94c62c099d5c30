"""Models that are about to be loaded: memory for what is on the meta device, and marks on those whose load
failed half-way, so that no one trains with half of the weights.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.engine.module_state import sharded_module_states
from shardwise.groups.shards import meta_message
from shardwise.init.placeholders import TensorSite, become_parameter, refresh_lists, sites_in
from shardwise.layout.fqns import clean, listed, uncompiled
from shardwise.ranks.model_ranks import device_of_model
from shardwise.setup.validation import groups_in
from shardwise.torch_compat import dtensor, nn_modules


def named_tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Parameters and buffers, persistent or not, each once."""
    return [(clean(name), t) for name, t in [*model.named_parameters(), *model.named_buffers()]]


def is_on_meta(model: nn.Module) -> bool:
    """Whether any tensor of ``model`` has no values yet."""
    return any(tensor.is_meta for _, tensor in named_tensors(model))


def refuse_meta(named: Iterable[tuple[str, Tensor]], caller: str) -> None:
    """Refuse tensors without values."""
    if names := [name for name, tensor in named if tensor.is_meta]:
        raise RuntimeError(f"{caller}: {meta_message(names)}")


def refuse_lost(model: nn.Module, caller: str, coming: Iterable[Any]) -> None:
    """Refuse tensors without values that are not among those ``coming``."""
    known = {id(tensor) for tensor in coming}
    lost = [name for name, tensor in named_tensors(model) if tensor.is_meta and id(tensor) not in known]
    if lost:
        are = "is" if len(lost) == 1 else "are"
        raise RuntimeError(
            f"{caller}: {listed(lost)} {are} on the meta device, without values, and will not be loaded (no "
            "state dict contains buffers with persistent=False). Call shardwise.materialize(model) first."
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


_MARK = "_shardwise_partly_loaded"


def mark_partly_loaded(model: nn.Module, why: str) -> None:
    """Make forwards raise a RuntimeError with ``why``, until a load has given all values.

    Forwards of all groups with parameters in ``model``; if nothing in it is sharded, that of ``model``.
    """
    why, model = why.rstrip("."), uncompiled(model)
    groups = groups_in(model)
    for group in groups:
        group.partly_loaded = why
        sharded_module_states(group.modules[0])[0].root.start_over()
    if not groups and _MARK not in model.__dict__:
        model.__dict__[_MARK] = _PartialLoadHooks(model, why)


def note_complete_load(model: nn.Module) -> None:
    """All of ``model`` has values again, on all ranks, which compare what they kept unsharded with them."""
    model = uncompiled(model)
    for group in groups_in(model):
        group.partly_loaded = None
        for param in group.shards.params:
            param.full_load = None
    for module_state in sharded_module_states(model):
        module_state.root.unsharded_groups.is_mid_accumulation = False
    if _MARK in model.__dict__:
        model.__dict__.pop(_MARK).remove()


def why_partly_loaded(model: nn.Module) -> str | None:
    """The failure, if ``model`` is marked; else None."""
    model = uncompiled(model)
    mark: _PartialLoadHooks | None = model.__dict__.get(_MARK)
    reasons = [group.partly_loaded for group in groups_in(model)] + [None if mark is None else mark.why]
    return next((why for why in reasons if why is not None), None)


class _PartialLoadHooks:
    """The mark of a model in which nothing is sharded."""

    def __init__(self, model: nn.Module, why: str) -> None:
        self.why = why
        self._handles = [
            model.register_forward_pre_hook(self._refuse),
            model.register_load_state_dict_post_hook(self._loaded),
        ]

    def remove(self) -> None:
        """Remove the mark."""
        for handle in self._handles:
            handle.remove()

    def _refuse(self, model: nn.Module, _: Any) -> None:
        raise RuntimeError(
            f"{type(model).__name__}: the model is only partly loaded, because an earlier load failed "
            f"({self.why}). Load a complete checkpoint before the next forward."
        )

    def _loaded(self, model: nn.Module, incompatible_keys: Any) -> None:
        if not incompatible_keys.missing_keys:
            note_complete_load(model)
