"""Full optimizer state: out of shards, into shards, and by parameter name or by id.

    by name     state["head.weight"] = {"step": ..., "exp_avg": ...}      group["params"] = ["head.weight"]
    by id       state[0] = {"step": ..., "exp_avg": ...}                  group["params"] = [0]

By id is what the ``state_dict()`` of an optimizer over a model that is not sharded looks like: parameters
are counted in the order of its groups, and whoever loads it pairs them by place alone. So a state by name is
first brought into the order of the optimizer at hand. By name is what ``torch.distributed.checkpoint`` writes
and reads.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwise.arguments import check_module, check_type
from shardwise.comm.full_tensors import BUCKET_BYTES, full_values
from shardwise.layout.fqns import clean, listed
from shardwise.layout.mesh import Axis
from shardwise.ranks.agreement import run_on_all_ranks
from shardwise.ranks.failures import monitored
from shardwise.ranks.model_ranks import Broadcast, axes_of_model, device_of_model, gather_from_all, own_rank
from shardwise.state.loading import LoadTargets, ShapeAndDtype, load_from_one
from shardwise.state.named_state import (
    StatePath,
    blank,
    check_parameters,
    has_whole_state,
    is_elsewhere,
    leaves,
    load_into,
    mapped,
    parameter_names,
    parameters_of,
    scalar_keys,
    state_of,
)
from shardwise.state.names import StateEntry, check_at_rest, check_rank

State = dict[str, Any]
LOAD = "load_full_optimizer_state_dict"
REKEY = "rekey_optimizer_state_dict"


def full_optimizer_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, owner: int | None, cpu: bool
) -> State:
    """The full state by name, on global rank ``owner`` or everywhere; {} on other ranks.

    Raises:
        TypeError: it is no optimizer.
        ValueError: it has parameters that are not the model's, or a state that cannot be put together from
            what ranks have. All ranks raise.
    """

    def own() -> State:
        _names_by_group(model, optimizer, "full_state_dict")
        return state_of([optimizer], parameter_names(model))

    axes, device = axes_of_model(model), device_of_model(model)
    sharded = run_on_all_ranks(axes, device, own)
    if has_whole_state(optimizer):
        sharded["state"] = _from_owners(sharded["state"], axes, device)
    full = full_values(dict(leaves(sharded)), owner, cpu)
    if owner not in (None, own_rank()):
        return {}
    return mapped(sharded, lambda place, _: full[place])


def _from_owners(owned: State, axes: Sequence[Axis], device: torch.device) -> State:
    """The state of all parameters, of which each rank has some. Collective."""
    outlines = gather_from_all(axes, _outline_of(owned))
    own = dict(leaves(owned))
    joint: State = {}
    for rank, outline in outlines.items():
        # A look at the state makes an empty one, which is the owner's as well if the class keeps none.
        missing = {name: values for name, values in outline.items() if not joint.get(name)}
        broadcast = Broadcast(axes, rank, device)

        def sent(place: StatePath, leaf: Any, broadcast: Broadcast = broadcast) -> Any:
            if not isinstance(leaf, _TensorOutline):
                return leaf
            assert leaf.facts.shape is not None
            if broadcast.is_source:
                whole = own[place].detach().to(device).contiguous()
            else:
                whole = torch.empty(leaf.facts.shape, dtype=leaf.facts.dtype, device=device)
            broadcast.tensor(whole)
            return whole

        joint |= mapped(missing, sent)
    return joint


@monitored
@torch.inference_mode(False)
@torch.no_grad()
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
        RuntimeError: parameters, groups or shapes do not fit, by name.
        TypeError: ``model`` or ``optimizer`` is something else.
        ValueError: the optimizer updates parameters that ``model`` does not have; ``src_rank`` is not among
            the ranks of the model; the optimizer keeps state that does not say which part of the whole it is.

    After an error, which all ranks raise, the optimizer is unchanged. Parameters are paired by name, or with
    a state by id by place; those in one group must have been in one group. The name may be any that a tied
    parameter has. A parameter of which ``state`` has nothing keeps the state it has.

    Collective. Beside ``state`` needs 64 MiB on each rank, and this rank's part of the new state beside that
    of the old one.

    Example::

        model_state, optimizer_state = torch.load("last.pt") if dist.get_rank() == 0 else (None, None)
        load_full_state_dict(model, model_state)
        load_full_optimizer_state_dict(model, optimizer, optimizer_state)
    """
    check_module(LOAD, model)
    axes, device = axes_of_model(model), device_of_model(model)

    def check() -> None:
        _check_call(model, optimizer)
        check_rank(LOAD, "src_rank", src_rank)

    run_on_all_ranks(axes, device, check, caller=LOAD, same={"src_rank": src_rank})
    broadcast = Broadcast([], None, device) if src_rank is None else Broadcast(axes, src_rank, device)
    named = run_on_all_ranks(
        axes, device, lambda: _full_by_name(state, model, optimizer) if broadcast.is_source else None
    )
    outline = broadcast.object(None if named is None else _outline(named))
    loading = run_on_all_ranks(axes, device, lambda: _OptimizerLoad(outline, model, optimizer))
    tensors = None if named is None else _tensors_of(named)
    load_from_one(loading.targets, tensors, broadcast, device, BUCKET_BYTES)
    run_on_all_ranks(axes, device, lambda: loading.finish(optimizer))


def rekey_optimizer_state_dict(
    state: Mapping[str, Any],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    to: Literal["name", "id"],
) -> State:
    """The same state with parameters by name, or by id, in the order of an optimizer.

    Args:
        state: full or sharded, by name or by id.
        model: with the names.
        optimizer: over the parameters of ``model``. Its groups, and parameters in them, say how parameters
            are counted: what is to load a state by id must have them in the same order.
        to: "name" or "id".

    Returns:
        A new dict with the same tensors in it. Groups, and the parameters in each, are in the order of
        ``optimizer``, so that ids ascend.

    Raises:
        RuntimeError: ``state`` is of other parameters, or has others together in a group.
        TypeError: ``optimizer`` is something else.
        ValueError: ``to`` is something else, or the optimizer updates parameters that ``model`` does not
            have.

    Local.

    Example::

        _, state = full_state_dict(sharded_model, optimizer)
        plain_optimizer.load_state_dict(rekey_optimizer_state_dict(state, sharded_model, optimizer, "id"))
    """
    if to not in ("name", "id"):
        raise ValueError(f"{REKEY}: to is {to!r}; pass 'name' or 'id'.")
    named = by_name(state, model, optimizer, REKEY)
    return named if to == "name" else _by_id(named)


# --- names and ids --------------------------------------------------------------------------------


def by_name(
    state: Mapping[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer, caller: str
) -> State:
    """``state`` with parameters by canonical name, however it has them, in the order of ``optimizer``.

    Raises:
        RuntimeError: it is no state of an optimizer over these parameters in these groups.
    """
    own = _names_by_group(model, optimizer, caller)
    _check_form(state, caller)
    keys = [key for group in state["param_groups"] for key in group["params"]]
    if keys and all(isinstance(key, int) for key in keys):
        new = _names_by_id(keys, own, caller)
    else:
        first = {alias: each[0] for each in parameter_names(model).values() for alias in each}
        new = {key: first.get(clean(key), clean(key)) for key in {*keys, *state["state"]}}
    if lost := [key for key in state["state"] if key not in new]:
        raise RuntimeError(f"{caller}: state of {listed(map(str, lost))}, which none of its groups has.")
    named = {new[key]: dict(values) for key, values in state["state"].items()}
    groups = [_with_params(group, new) for group in state["param_groups"]]
    _check_membership(named, groups, own, caller)
    return {"state": named, "param_groups": _in_order_of(own, groups)}


def _names_by_group(model: nn.Module, optimizer: torch.optim.Optimizer, caller: str) -> list[list[str]]:
    """Canonical names of the optimizer's parameters."""
    check_type(caller, "optimizer", optimizer, "a torch.optim.Optimizer", torch.optim.Optimizer)
    names = parameter_names(model)
    check_parameters(optimizer, names)
    return [[names[param][0] for param in group["params"]] for group in optimizer.param_groups]


def _names_by_id(ids: list[int], own: list[list[str]], caller: str) -> dict[int, str]:
    """Names by id; parameters are paired by position, as optimizers do."""
    names = [name for group in own for name in group]
    if sorted(ids) != list(range(len(names))):
        raise RuntimeError(
            f"{caller}: the state is of an optimizer with {len(ids)} parameters, and this one has "
            f"{len(names)}. Build it over the same parameters."
        )
    return dict(zip(ids, names, strict=True))


def _by_id(named: State) -> State:
    """By id, from a state in the order of the optimizer: ids ascend, as in a ``state_dict()``."""
    names = [name for group in named["param_groups"] for name in group["params"]]
    ids = {name: index for index, name in enumerate(names)}
    return {
        "state": {ids[name]: dict(values) for name, values in named["state"].items()},
        "param_groups": [_with_params(group, ids) for group in named["param_groups"]],
    }


def _with_params(group: Mapping[str, Any], new: Mapping[Any, Any]) -> dict[str, Any]:
    # Names of one tied parameter are one key.
    return {**group, "params": list(dict.fromkeys(new[key] for key in group["params"]))}


def _in_order_of(own: list[list[str]], groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """``groups``, and the parameters in each, as ``own`` has them."""
    found: dict[frozenset[str], list[dict[str, Any]]] = {}
    for group in groups:
        found.setdefault(frozenset(group["params"]), []).append(group)
    ordered = []
    for names in own:
        group = found[frozenset(names)].pop(0)
        ordered.append({**group, "params": names})
        if (given := group.get("param_names")) and len(given) == len(names):
            renamed = dict(zip(group["params"], given, strict=True))
            ordered[-1]["param_names"] = [renamed[name] for name in names]
    return ordered


def _check_form(state: Any, caller: str) -> None:
    if not isinstance(state, Mapping) or not {"state", "param_groups"} <= set(state):
        raise RuntimeError(
            f"{caller}: state is {_kind_of(state)}, where the state of an optimizer has 'state' and "
            "'param_groups'."
        )
    values, groups = state["state"], state["param_groups"]
    if not isinstance(values, Mapping):
        raise RuntimeError(f"{caller}: 'state' is {_kind_of(values)}, where a dict by parameter is expected.")
    if odd := [key for key, each in values.items() if not isinstance(each, Mapping)]:
        raise RuntimeError(
            f"{caller}: 'state' of {listed(map(str, odd))} is {_kind_of(values[odd[0]])}, where a dict is "
            "expected."
        )
    if not isinstance(groups, (list, tuple)) or not all(map(_is_group, groups)):
        raise RuntimeError(f"{caller}: 'param_groups' is to be a list of dicts with 'params' in each.")
    keys = [*values, *(key for group in groups for key in group["params"])]
    if not any(all(isinstance(key, kind) for key in keys) for kind in (int, str)):
        raise RuntimeError(f"{caller}: parameters go by names or by ids, but not by both in one state.")


def _is_group(group: Any) -> bool:
    return isinstance(group, Mapping) and isinstance(group.get("params"), (list, tuple))


def _kind_of(state: Any) -> str:
    if isinstance(state, Mapping):
        return f"a dict with {listed(map(repr, state), 4) or 'nothing in it'}"
    return f"a {type(state).__name__}"


def _check_membership(named: State, groups: list[dict[str, Any]], own: list[list[str]], caller: str) -> None:
    """The same parameters, together in the same groups."""
    theirs = [group["params"] for group in groups]
    ours = {name for names in own for name in names}
    those = {name for names in theirs for name in names}
    if unknown := [name for name in dict.fromkeys([*named, *sorted(those)]) if name not in ours]:
        problem = f"state of {listed(unknown)}, which this optimizer does not update"
    elif missing := [name for names in own for name in names if name not in those]:
        problem = f"none of its groups has {listed(missing)}, which this optimizer updates"
    elif sorted(map(sorted, theirs)) != sorted(map(sorted, own)):
        index = next((i for i, names in enumerate(own) if set(names) not in map(set, theirs)), 0)
        problem = (
            f"group {index} of this optimizer ({listed(own[index], 4)}) is none of the groups there, which "
            f"are of {[len(names) for names in theirs]} parameters"
        )
    else:
        return
    raise RuntimeError(
        f"{caller}: {problem}. Build the optimizer with the same groups as the one that was saved."
    )


# --- loading --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _TensorOutline:
    """A tensor in the outline of a state, which all ranks get before the tensors."""

    name: str
    facts: ShapeAndDtype


def _check_call(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    check_at_rest(model, LOAD)
    _names_by_group(model, optimizer, LOAD)


def _full_by_name(state: Any, model: nn.Module, optimizer: torch.optim.Optimizer) -> State:
    named = by_name(state, model, optimizer, LOAD)
    sharded = dict.fromkeys(p[0] for p, value in leaves(named["state"]) if isinstance(value, DTensor))
    if sharded:
        raise RuntimeError(
            f"{LOAD}: the state of {listed(sharded)} is sharded, where a full one is expected. Load it with "
            "torch.distributed.checkpoint's set_optimizer_state_dict."
        )
    return named


def _outline_of(state: State) -> State:
    """State by parameter without its tensors."""

    def slot(place: StatePath, value: Any) -> Any:
        return _TensorOutline(_label(place), ShapeAndDtype.of(value)) if isinstance(value, Tensor) else value

    return mapped(state, slot)  # type: ignore[no-any-return]


def _outline(named: State) -> State:
    """The state without its tensors; tensors among hyperparameters stay."""

    def on_host(_: StatePath, value: Any) -> Any:
        return value.detach().cpu() if isinstance(value, Tensor) else value

    return {"state": _outline_of(named["state"]), "param_groups": mapped(named["param_groups"], on_host)}


def _tensors_of(named: State) -> Iterator[tuple[str, Tensor]]:
    return ((_label(place), value) for place, value in leaves(named["state"]) if isinstance(value, Tensor))


def _label(place: StatePath) -> str:
    return f"{place[0]} ({_key(place)})"


def _key(place: StatePath) -> str:
    """The path below the parameter."""
    return ".".join(map(str, place[1:]))


class _OptimizerLoad:
    """New state in shards: allocated first, then filled, and given to the optimizer when complete."""

    def __init__(self, outline: State, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        names = parameter_names(model)
        self._params = params = {names[param][0]: param for param in parameters_of(optimizer)}
        self._outline = outline
        self._own = state_of([optimizer], names)
        problems = _other_kind(outline["state"], self._own["state"])
        self._tensors = _blanks(outline["state"], self._own["state"], params, optimizer, problems)
        if problems:
            raise RuntimeError(f"{LOAD}: {'; '.join(problems)}.")
        entries = {name: StateEntry(name, name, tensor, True) for name, tensor in self._tensors.items()}
        self.targets = LoadTargets(LOAD, entries, is_strict=True, converts=False)

    def finish(self, optimizer: torch.optim.Optimizer) -> None:
        """Have the optimizer go on with it.

        By its own method: ``set_optimizer_state_dict`` of torch.distributed.checkpoint makes a step of an
        optimizer that has made none, which counts as one where a parameter has no state to be loaded.
        """

        def filled(_: StatePath, leaf: Any) -> Any:
            return self._tensors[leaf.name] if isinstance(leaf, _TensorOutline) else leaf

        groups = [
            _on_devices_of(own, saved)
            for own, saved in zip(optimizer.param_groups, self._outline["param_groups"], strict=True)
        ]
        state = self._own["state"] | mapped(self._outline["state"], filled)
        state = {
            name: each for name, each in state.items() if not is_elsewhere(optimizer, self._params[name])
        }
        by_id = _by_id({"state": state, "param_groups": groups})
        load_into(optimizer, by_id["state"], by_id["param_groups"], convert_dtype=False)


def _blanks(
    outline: State,
    own: State,
    params: Mapping[str, Tensor],
    optimizer: torch.optim.Optimizer,
    problems: list[str],
) -> dict[str, Tensor]:
    """Memory for this rank's part of each tensor, laid out as the existing state or the parameter.

    On the meta device for what another rank has whole: all ranks take part in sending it.
    """
    existing = {place: value for place, value in leaves(own) if isinstance(value, Tensor)}
    slots = {place: leaf for place, leaf in leaves(outline) if isinstance(leaf, _TensorOutline)}
    shapes: dict[str, dict[str, Any]] = {}
    for place, slot in slots.items():
        shapes.setdefault(place[0], {})[_key(place)] = slot.facts.shape
    scalars = scalar_keys(shapes.values())
    made: dict[str, Tensor] = {}
    is_whole = has_whole_state(optimizer)
    unlike, unplaced = [], []
    for place, slot in slots.items():
        shape, there = slot.facts.shape, existing.get(place)
        found = None
        if there is not None and tuple(there.shape) != shape:
            unlike.append(
                f"{slot.name} has shape {shape} there, where this optimizer has {tuple(there.shape)}"
            )
        elif is_elsewhere(optimizer, params[place[0]]):
            made[slot.name] = torch.empty(shape or (), dtype=slot.facts.dtype, device="meta")
        elif (found := _blank(params[place[0]], there, slot.facts, _key(place) in scalars, is_whole)) is None:
            unplaced.append(f"{slot.name} of shape {shape}")
        else:
            made[slot.name] = found
    problems += [listed(unlike)] if unlike else []
    problems += [_unplaced(unplaced)] if unplaced else []
    return made


def _blank(
    param: Tensor, there: Tensor | None, facts: ShapeAndDtype, is_scalar: bool, is_whole: bool
) -> Tensor | None:
    assert facts.shape is not None
    assert facts.dtype is not None
    # The state that there is stays as it is, should the load fail.
    like = None if there is None else torch.zeros_like(there, dtype=facts.dtype)
    return blank(param, like, torch.Size(facts.shape), facts.dtype, is_scalar, is_whole)


def _unplaced(names: list[str]) -> str:
    return (
        f"nothing says how state that is not of the shape of its parameter is laid out over ranks: "
        f"{listed(names)}. Take a step with the optimizer before loading, so that its state shows it"
    )


def _other_kind(saved: State, own: State) -> list[str]:
    """Signs that a state is of another kind of optimizer."""
    kinds = {key for values in own.values() for key in values}
    others = {key for values in saved.values() for key in values} - kinds
    if not kinds or not others:
        return []
    return [
        f"it holds {listed(sorted(map(str, others)))}, and this optimizer keeps "
        f"{listed(sorted(map(str, kinds)))}, so that it is of another kind"
    ]


def _on_devices_of(own: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
    """Move tensors among hyperparameters (of a capturable optimizer) to the devices of the current ones."""

    at_hand = {place: value for place, value in leaves(dict(own)) if isinstance(value, Tensor)}

    def placed(place: StatePath, value: Any) -> Any:
        is_wanted = isinstance(value, Tensor) and place in at_hand
        return value.to(at_hand[place].device) if is_wanted else value

    return mapped(dict(saved), placed)
