"""Names in saved states: those of the model as it was written.

Wrappers (``torch.compile``, checkpointed blocks) add parts to names. Saved states leave them out, so that a
model loads what was saved with other wrappers or without.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from shardwise.engine.module_state import module_states_at_rest
from shardwise.groups.shards import meta_message
from shardwise.init.partial_loads import why_partly_loaded
from shardwise.layout.fqns import clean

_TensorT = TypeVar("_TensorT", bound=Tensor)


def canonical(name: str, model: nn.Module) -> str:
    """``name``, of something in ``model``, without the parts that wrappers put into it, DDP included."""
    kept: list[str] = []
    module: Any = model
    for part in name.split("."):
        is_of_ddp = isinstance(module, DistributedDataParallel) and part == "module"
        if not is_of_ddp:
            kept.append(part)
        module = getattr(module, part, None)
    return clean(".".join(kept))


@dataclass(frozen=True)
class StateEntry:
    """One entry of a state dict. ``key`` is its name there, ``value`` the parameter or buffer itself.

    ``is_own``: it is one, and not something that a module or its hooks made for the state dict.
    """

    key: str
    value: Any
    is_own: bool

    @property
    def is_tensor(self) -> bool:
        """False for what modules save beside tensors (``get_extra_state``)."""
        return isinstance(self.value, Tensor)


def entries_of(model: nn.Module) -> dict[str, StateEntry]:
    """The entries of ``model.state_dict()``, as modules and their hooks make it, by name."""
    own = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    state = model.state_dict(keep_vars=True)
    return {canonical(key, model): StateEntry(key, value, id(value) in own) for key, value in state.items()}


def parameters_of(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Canonical names and parameters; a tied one under each of its names."""
    for name, param in model.named_parameters(remove_duplicate=False):
        yield canonical(name, model), param


def each_once(named: Iterable[tuple[str, _TensorT]]) -> dict[str, _TensorT]:
    """Tensors by the first of their names."""
    first: dict[int, tuple[str, _TensorT]] = {}
    for name, tensor in named:
        first.setdefault(id(tensor), (name, tensor))
    return dict(first.values())


def check_at_rest(model: nn.Module, caller: str) -> None:
    """Refuse a model in a forward or backward, or without values."""
    module_states_at_rest(caller, model)
    on_meta = [name for name, param in parameters_of(model) if param.is_meta]
    if on_meta:
        raise RuntimeError(f"{caller}: {meta_message(on_meta)}")
    if (why := why_partly_loaded(model)) is not None:
        raise RuntimeError(
            f"{caller}: the model is only partly loaded, because an earlier load failed ({why}): its values "
            "are a mix of old and new ones. Load a complete checkpoint first."
        )
