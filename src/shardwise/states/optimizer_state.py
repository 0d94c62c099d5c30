"""Full optimizer state: out of shards, into shards, and by parameter name or by id.

    by name     state["head.weight"] = {"step": ..., "exp_avg": ...}      group["params"] = ["head.weight"]
    by id       state[0] = {"step": ..., "exp_avg": ...}                  group["params"] = [0]

By id is what the ``state_dict()`` of an optimizer over a model that is not sharded looks like: parameters
are counted in the order of its groups. By name is what ``torch.distributed.checkpoint`` writes and reads.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwise.runtime.spread import Spread, axes_of_model, device_of_model
from shardwise.runtime.transfer import BUCKET_BYTES, full_values
from shardwise.states.loading import Facts, StateMismatch, Targets, load_from_one
from shardwise.states.named_state import check_parameters, load_into, parameter_names, parameters_of
from shardwise.states.names import Entry, canonical, check_at_rest, listed

State = dict[str, Any]


def full_optimizer_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, owner: int | None, cpu: bool
) -> State:
    """The full state by name, on global rank ``owner`` or everywhere; {} on other ranks."""
    names_of(model, optimizer, "full_state_dict")
    sharded = by_name(optimizer.state_dict(), model, optimizer)
    flat = {(name, key): v for name, own in sharded["state"].items() for key, v in own.items()}
    full = full_values(flat, owner, cpu)
    if owner is not None and owner != dist.get_rank():
        return {}
    state: State = {}
    for (name, key), value in full.items():
        state.setdefault(name, {})[key] = value
    return {"state": state, "param_groups": sharded["param_groups"]}


def load_full_optimizer_state_dict(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    state: Mapping[str, Any] | None,
    *,
    src_rank: int | None = 0,
) -> None:
    """Load the full state of an optimizer, by name or by id, into the optimizer of a sharded model.

    Args:
        model: whose parameters ``optimizer`` updates.
        optimizer: of the same kind and with the same groups as the one that was saved; it may never have
            made a step.
        state: on the rank ``src_rank``: what :func:`full_state_dict` gave, the ``state_dict()`` of an
            optimizer over the model before it was sharded, or an FSDP1 ``full_optim_state_dict``. Others pass
            None.
        src_rank: the global rank whose ``state`` counts. None: each rank passes it.

    Raises:
        RuntimeError: parameters, groups or shapes do not fit, by name; the optimizer is unchanged. All ranks
            raise alike.
        ValueError: the optimizer updates parameters that ``model`` does not have.

    Collective. Beside ``state`` needs 64 MiB on each rank. A parameter of which ``state`` has nothing keeps
    the state it has.

    Example::

        model_state, optimizer_state = torch.load("last.pt") if dist.get_rank() == 0 else (None, None)
        load_full_state_dict(model, model_state)
        load_full_optimizer_state_dict(model, optimizer, optimizer_state)
    """
    check_at_rest(model, "load_full_optimizer_state_dict")
    names = names_of(model, optimizer, "load_full_optimizer_state_dict")
    axes, device = axes_of_model(model), device_of_model(model)
    spread = Spread([] if src_rank is None else axes, None if src_rank is None else src_rank, device)
    spread.holds = spread.holds or src_rank is None
    header = spread.object(_header(state, model, optimizer) if spread.holds else None)
    if isinstance(header, str):
        raise RuntimeError(header)
    own = by_name(optimizer.state_dict(), model, optimizer)
    loaded = _Loaded(header, dict(zip(names, parameters_of(optimizer), strict=True)), own)
    pairs = _tensors_of(by_name(state, model, optimizer)) if spread.holds and state is not None else None
    load_from_one(loaded.targets, pairs, spread, device, BUCKET_BYTES)
    loaded.apply(optimizer, {name: index for index, name in enumerate(names)})


def rekey_optimizer_state_dict(
    state: Mapping[str, Any],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    to: Literal["name", "id"],
) -> State:
    """The same state with parameters by name, or by id.

    Args:
        state: full or sharded, by name or by id.
        model: with the names.
        optimizer: over the parameters of ``model``; its groups say how parameters are counted.
        to: "name" or "id".

    Returns:
        A new dict with the same tensors in it.

    Raises:
        RuntimeError: ``state`` is of other parameters.
        ValueError: ``to`` is something else, or the optimizer updates parameters that ``model`` does not
            have.

    Example::

        _, state = full_state_dict(sharded_model, optimizer)
        plain_optimizer.load_state_dict(rekey_optimizer_state_dict(state, sharded_model, optimizer, "id"))
    """
    if to not in ("name", "id"):
        raise ValueError(f"rekey_optimizer_state_dict: to is {to!r}; pass 'name' or 'id'.")
    named = by_name(state, model, optimizer)
    if to == "name":
        return named
    ids = {name: i for i, name in enumerate(names_of(model, optimizer, "rekey_optimizer_state_dict"))}
    return _rekeyed(named, ids)


def names_of(model: nn.Module, optimizer: torch.optim.Optimizer, caller: str) -> list[str]:
    """Canonical names of the optimizer's parameters, in the order in which it counts them.

    Raises:
        TypeError: it is no optimizer.
        ValueError: ``model`` does not have one of them.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"{caller}: optimizer is a {type(optimizer).__name__}, not a torch.optim.Optimizer.")
    names = parameter_names(model)
    check_parameters(optimizer, names)
    return [names[param][0] for param in parameters_of(optimizer)]


def by_name(state: Mapping[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer) -> State:
    """``state`` with parameters by canonical name, however it has them.

    Raises:
        RuntimeError: it is no state of an optimizer over these parameters.
    """
    caller = "load_full_optimizer_state_dict"
    names = names_of(model, optimizer, caller)
    if not isinstance(state, Mapping) or not {"state", "param_groups"} <= set(state):
        raise StateMismatch(
            f"{caller}: state is {_kind_of(state)}, where the state of an optimizer has 'state' and "
            "'param_groups'."
        )
    keys = [key for group in state["param_groups"] for key in group["params"]]
    if keys and all(isinstance(key, int) for key in keys):
        if sorted(keys) != list(range(len(names))):
            raise StateMismatch(
                f"{caller}: the state is of an optimizer with {len(keys)} parameters, and this one has "
                f"{len(names)}."
            )
        return _rekeyed(state, dict(zip(keys, names, strict=True)))
    return _rekeyed(state, {key: canonical(key) for key in {*keys, *state["state"]}})


def _rekeyed(state: Mapping[str, Any], new: Mapping[Any, Any]) -> State:
    if lost := [key for key in state["state"] if key not in new]:
        raise StateMismatch(
            f"the state of an optimizer speaks of {listed(map(str, lost))}, which no group has."
        )
    groups = [{**group, "params": [new[key] for key in group["params"]]} for group in state["param_groups"]]
    return {
        "state": {new[key]: dict(own) for key, own in state["state"].items()},
        "param_groups": groups,
    }


def _kind_of(state: Any) -> str:
    if isinstance(state, Mapping):
        return f"a dict with {listed(map(repr, state), 4) or 'nothing in it'}"
    return f"a {type(state).__name__}"


# --- loading --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Header:
    """What all ranks are told of a state: of each parameter what kinds there are, and values but tensors."""

    facts: dict[tuple[str, str], Facts]
    others: dict[tuple[str, str], Any]
    groups: list[dict[str, Any]]


def _header(state: Any, model: nn.Module, optimizer: torch.optim.Optimizer) -> _Header | str:
    """A text: what is wrong with it."""
    try:
        named = by_name(state, model, optimizer)
    except RuntimeError as error:
        return str(error)
    flat = {(name, key): v for name, own in named["state"].items() for key, v in own.items()}
    sharded = [name for (name, _), value in flat.items() if isinstance(value, DTensor)]
    if sharded:
        return (
            f"load_full_optimizer_state_dict: the state of {listed(dict.fromkeys(sharded))} is sharded, "
            "where a full one is expected. Load it with torch.distributed.checkpoint's "
            "set_optimizer_state_dict."
        )
    return _Header(
        {place: Facts.of(value) for place, value in flat.items() if isinstance(value, Tensor)},
        {place: value for place, value in flat.items() if not isinstance(value, Tensor)},
        named["param_groups"],
    )


def _tensors_of(named: State) -> Any:
    for name, own in named["state"].items():
        for key, value in own.items():
            if isinstance(value, Tensor):
                yield _joined(name, key), value


def _joined(name: str, key: str) -> str:
    return f"{name} ({key})"


class _Loaded:
    """New state, as shards: made first, filled, and handed to the optimizer when all of it is there."""

    def __init__(self, header: _Header, params: dict[str, Tensor], own: State) -> None:
        self._header = header
        self._own = own
        self._check(params)
        self._tensors = {
            (name, key): _like(params[name], own["state"].get(name, {}).get(key), facts)
            for (name, key), facts in header.facts.items()
        }
        entries = {
            _joined(*place): Entry(_joined(*place), _joined(*place), tensor, True)
            for place, tensor in self._tensors.items()
        }
        self.targets = Targets("load_full_optimizer_state_dict", entries, is_strict=True, converts=False)

    def _check(self, params: dict[str, Tensor]) -> None:
        problems: list[str] = []
        if unknown := dict.fromkeys(n for n, _ in self._header.facts if n not in params):
            problems.append(f"state of {listed(unknown)}, which this optimizer does not update")
        theirs = sorted(sorted(group["params"]) for group in self._header.groups)
        ours = sorted(sorted(group["params"]) for group in self._own["param_groups"])
        if theirs != ours and not unknown:
            problems.append(
                f"its groups are of {[len(g) for g in theirs]} parameters, and those of this optimizer of "
                f"{[len(g) for g in ours]}, or of others"
            )
        for (name, key), facts in self._header.facts.items():
            wanted = self._own["state"].get(name, {}).get(key)
            if isinstance(wanted, Tensor) and tuple(wanted.shape) != facts.shape:
                problems.append(
                    f"{_joined(name, key)} has shape {facts.shape} there, where this optimizer has "
                    f"{tuple(wanted.shape)}"
                )
        kinds = {key for own in self._own["state"].values() for key in own}
        others = {key for _, key in (*self._header.facts, *self._header.others)}
        if kinds and not others <= kinds:
            problems.append(
                f"it holds {listed(sorted(others - kinds))}, and this optimizer keeps "
                f"{listed(sorted(kinds))}, so that it is of another kind"
            )
        if problems:
            raise StateMismatch(f"load_full_optimizer_state_dict: {'; '.join(problems)}.")

    def apply(self, optimizer: torch.optim.Optimizer, ids: Mapping[str, int]) -> None:
        """Have the optimizer go on with it.

        By its own method: ``set_optimizer_state_dict`` of torch.distributed.checkpoint makes a step of an
        optimizer that has made none, which counts as one where a parameter has no state to be loaded.
        """
        state = {name: dict(own) for name, own in self._own["state"].items()}
        for (name, key), value in (*self._tensors.items(), *self._header.others.items()):
            state.setdefault(name, {})[key] = value
        groups = sorted(
            self._header.groups, key=lambda group: min((ids[n] for n in group["params"]), default=0)
        )
        by_id = _rekeyed({"state": state, "param_groups": groups}, ids)
        load_into(optimizer, by_id["state"], by_id["param_groups"], convert_dtype=False)


def _like(param: Tensor, own: Any, facts: Facts) -> Tensor:
    """Memory for this rank's part of a state tensor: sharded as the one there is, or as its parameter."""
    assert facts.shape is not None
    if isinstance(own, Tensor):
        return torch.zeros_like(own, dtype=facts.dtype)
    if facts.shape == tuple(param.shape) and param.dim():
        return torch.zeros_like(param.detach(), dtype=facts.dtype)
    return torch.zeros(facts.shape, dtype=facts.dtype, device=None if not facts.shape else param.device)
