"""A model's and its optimizers' state under the names that saved states use: those of the model as written.

Wrappers (``torch.compile``, checkpointed blocks) add parts to names. Saved states leave them out, so that a
model loads what was saved with other wrappers or without. An optimizer's state has
the same names and nesting as torch's `get_state_dict(model, optimizer)`, so that either reads the other's:

    {"state": {"layer.weight": {"step": ..., "exp_avg": ...}}, "param_groups": [{"lr": ..., "params": [...]}]}

torch's own function takes a step of zeros with an optimizer that has never stepped, to give it a state to
save; after it Adam counts one step too many, and Rprop has forgotten its step sizes. Here an optimizer
without state has none in the checkpoint.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from shardwise.engine.module_state import (
    compute_after_optimizer,
    module_states_at_rest,
    sharded_module_states,
)
from shardwise.init.initialise import refuse_meta, why_partly_loaded
from shardwise.layout.fqns import clean, listed
from shardwise.optim.whole_parameters import WholeParameters
from shardwise.torch_compat import dtensor, tensor_impl

TensorT = TypeVar("TensorT", bound=Tensor)
Optimizers = Sequence[torch.optim.Optimizer]
OptimizerOrMany = torch.optim.Optimizer | Iterable[torch.optim.Optimizer]
Names = dict[Tensor, list[str]]
StatePath = tuple[Any, ...]
"""Where a value stands in nested dicts and lists: keys and indices, the outermost first."""


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
    compute_after_optimizer(sharded_module_states(model))
    own = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    state = model.state_dict(keep_vars=True)
    return {canonical(key, model): StateEntry(key, value, id(value) in own) for key, value in state.items()}


def named_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Canonical names and parameters; a tied one under each of its names."""
    for name, param in model.named_parameters(remove_duplicate=False):
        yield canonical(name, model), param


def each_once(named: Iterable[tuple[str, TensorT]]) -> dict[str, TensorT]:
    """Tensors by the first of their names."""
    first: dict[int, tuple[str, TensorT]] = {}
    for name, tensor in named:
        first.setdefault(id(tensor), (name, tensor))
    return dict(first.values())


def check_at_rest(model: nn.Module, caller: str) -> None:
    """Refuse a model in a forward or backward, or without values."""
    module_states_at_rest(caller, model)
    refuse_meta(named_parameters(model), caller)
    if (why := why_partly_loaded(model)) is not None:
        raise RuntimeError(
            f"{caller}: the model is only partly loaded, because an earlier load failed ({why}): its values "
            "are a mix of old and new ones. Load a complete checkpoint first."
        )


def parameter_names(model: nn.Module) -> Names:
    """All names of each parameter, tied ones have several, without those of wrappers."""
    names: Names = {}
    for name, param in named_parameters(model):
        names.setdefault(param, []).append(name)
    return names


def as_optimizers(optimizer: Any) -> Optimizers:
    """One optimizer, several, or none, as a list."""
    if optimizer is None:
        return []
    is_many = isinstance(optimizer, Iterable) and not isinstance(optimizer, (str, nn.Module))
    optimizers = list(optimizer) if is_many else [optimizer]
    for each in optimizers:
        if not isinstance(each, torch.optim.Optimizer):
            raise TypeError(
                f"optimizer is a {type(each).__name__}; pass a torch.optim.Optimizer, or a list of them"
            )
    return optimizers


def parameters_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The parameters in the order in which `optimizer.state_dict()` numbers them."""
    return list(chain.from_iterable(group["params"] for group in optimizer.param_groups))


def kind_of(optimizer: torch.optim.Optimizer) -> str:
    """The class whose state it is, by name."""
    kind = optimizer.optimizer_class if isinstance(optimizer, WholeParameters) else type(optimizer)
    return kind.__name__


def has_whole_state(optimizer: torch.optim.Optimizer) -> bool:
    """Whether each state is on one rank, the owner of its parameter, rather than sharded."""
    return isinstance(optimizer, WholeParameters)


def is_elsewhere(optimizer: torch.optim.Optimizer, param: Tensor) -> bool:
    """Whether another rank has the state of ``param``."""
    return isinstance(optimizer, WholeParameters) and not optimizer.owns(param)


def state_of(optimizers: Optimizers, names: Names) -> dict[str, Any]:
    """The state of `optimizers` by the names of parameters; nothing is copied."""
    state: dict[str, Any] = {}
    groups: list[dict[str, Any]] = []
    owned: set[Tensor] = set()
    for optimizer in optimizers:
        check_parameters(optimizer, names)
        params = parameters_of(optimizer)
        if shared := [names[param][0] for param in params if param in owned]:
            raise ValueError(
                f"{type(optimizer).__name__}: another optimizer has {listed(shared)} as well, and a "
                "checkpoint holds one state and one set of hyperparameters for each. Give each parameter to "
                "one optimizer."
            )
        owned.update(params)
        saved = optimizer.state_dict()
        for number, values in saved["state"].items():
            if not isinstance(number, int):
                raise ValueError(
                    f"{type(optimizer).__name__}: it keeps state under the key {number!r:.80}, which is not "
                    "a parameter, so the state has no name in a checkpoint. Keep it elsewhere, and save it "
                    "beside the optimizer."
                )
            name = names[params[number]][0]
            for key, value in values.items():
                _check_whole(optimizer, name, key, value, params[number])
            state[name] = values
        for group in saved["param_groups"]:
            if (given := group.get("param_names")) is not None:
                group = group | {"param_names": [*map(clean, given)]}
            groups.append(group | {"params": [names[params[n]][0] for n in group["params"]]})
    return {"state": state, "param_groups": groups}


def check_parameters(optimizer: torch.optim.Optimizer, names: Names) -> None:
    """Refuse parameters that are not the model's: they have no name."""
    for index, group in enumerate(optimizer.param_groups):
        for place, param in enumerate(group["params"]):
            if param not in names:
                raise ValueError(
                    f"{type(optimizer).__name__}: parameter {place} of group {index}, of shape "
                    f"{tuple(param.shape)}, does not belong to the model, so its state has no name in a "
                    "checkpoint. Build the optimizer from model.parameters(), after the model was sharded."
                )


def _check_whole(optimizer: Any, name: str, key: Any, value: Any, param: Tensor) -> None:
    """Refuse state that is this rank's part of something without saying which part."""
    if not isinstance(param, DTensor) or has_whole_state(optimizer):
        return
    for _, part in leaves(value):
        if isinstance(part, Tensor) and part.dim() and not isinstance(part, DTensor):
            raise ValueError(
                f"{name}: {type(optimizer).__name__} keeps '{key}' of it as a plain tensor of shape "
                f"{tuple(part.shape)}, but the parameter is sharded: this rank cannot tell which part of the "
                "whole it holds. shardwise.optim.WholeParameters keeps such state whole, so that it can be "
                "saved."
            )
        if isinstance(part, DTensor) and any(each.is_partial() for each in part.placements):
            raise ValueError(
                f"{name}: {type(optimizer).__name__} keeps '{key}' of it as sums that are yet to be added up "
                f"({part.placements}), which a checkpoint cannot hold."
            )


def leaves(value: Any, place: StatePath = ()) -> Iterator[tuple[StatePath, Any]]:
    """The leaves of nested dicts, lists and tuples, with their paths."""
    if not (isinstance(value, dict) or type(value) in (list, tuple)):
        yield place, value
        return
    for key, each in value.items() if isinstance(value, dict) else enumerate(value):
        yield from leaves(each, (*place, key))


def mapped(value: Any, act: Callable[[StatePath, Any], Any], place: StatePath = ()) -> Any:
    """The same nest of dicts, lists and tuples, with ``act`` applied to each leaf."""
    if isinstance(value, dict):
        return {key: mapped(each, act, (*place, key)) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(mapped(each, act, (*place, index)) for index, each in enumerate(value))
    return act(place, value)


def staged(value: Any, copies: dict[Hashable, Tensor] | None = None) -> Any:
    """A copy of nested dicts and lists, with tensors in host memory.

    ``copies``: those made so far. Tied parameters have several names and one memory: copied once."""
    copies = {} if copies is None else copies
    if isinstance(value, dict):
        return {key: staged(each, copies) for key, each in value.items()}
    if type(value) in (list, tuple) and any(isinstance(leaf, Tensor) for _, leaf in leaves(value)):
        return type(value)(staged(each, copies) for each in value)
    if not isinstance(value, Tensor):
        return deepcopy(value)
    local = dtensor.plain(value)
    memory = memory_of(local)
    if memory not in copies:
        copies[memory] = local.detach().to("cpu", copy=True)
    return dtensor.placed_as(value, copies[memory])


def memory_of(tensor: Tensor) -> Hashable:
    """Equal for views of the same elements, as long as these tensors live."""
    parts = tensor_impl.plain_parts(tensor)
    if not all(tensor_impl.is_plain(part) and part.numel() for part in parts):
        return id(tensor)
    kind = None if tensor_impl.is_plain(tensor) else type(tensor)
    # On the meta device memory has no address.
    places: list[Hashable] = [
        (tensor_impl.storage_key(p.untyped_storage()), p.storage_offset()) if p.is_meta else p.data_ptr()
        for p in parts
    ]
    return kind, *places, *((p.shape, p.stride(), p.dtype, p.device) for p in parts)
