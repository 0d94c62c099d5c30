"""Marks on models whose load failed half-way, so that nobody trains with half of the weights."""

from typing import Any

from torch import nn

from shardwise.engine.module_state import sharded_module_states
from shardwise.layout.fqns import uncompiled
from shardwise.setup.validation import groups_in

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
