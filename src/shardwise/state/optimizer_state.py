"""Full optimizer state: out of shards, into shards, and by parameter name or by id.

    by name     state["head.weight"] = {"step": ..., "exp_avg": ...}      group["params"] = ["head.weight"]
    by id       state[0] = {"step": ..., "exp_avg": ...}                  group["params"] = [0]

By id is what the ``state_dict()`` of an optimizer over a model that is not sharded looks like: parameters
are counted in the order of its groups, and whoever loads it pairs them by place alone. So a state by name is
first brought into the order of the optimizer at hand. By name is what ``torch.distributed.checkpoint`` writes
and reads.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwise.arguments import check_module, check_rank, check_type
from shardwise.comm.full_tensors import BUCKET_BYTES, full_values
from shardwise.layout.fqns import clean, listed
from shardwise.layout.mesh import Axis
from shardwise.ranks.agreement import run_on_all_ranks
from shardwise.ranks.failures import monitored
from shardwise.ranks.model_ranks import Broadcast, axes_of_model, device_of_model, gather_from_all, own_rank
from shardwise.ranks.replicas import broadcast_tensors
from shardwise.state.loading import LoadTargets, ShapeAndDtype, load_from_one
from shardwise.state.named_state import (
    StateEntry,
    StatePath,
    check_at_rest,
    check_parameters,
    has_whole_state,
    leaves,
    mapped,
    parameter_names,
    parameters_of,
    state_of,
)
from shardwise.state.optimizer_plan import SavedState, load_into, plan_groups, plan_optimizers

State = dict[str, Any]
LOAD = "load_full_optimizer_state_dict"
REKEY = "rekey_optimizer_state_dict"


def full_optimizer_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, owner: int | None, cpu: bool
) -> State:
    """The full state by name, on global rank ``owner`` or everywhere; {} on other ranks."""

    def own() -> State:
        _own_names(model, optimizer, "full_state_dict")
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

        def whole(place: StatePath, leaf: Any, is_source: bool = broadcast.is_source) -> Any:
            if not isinstance(leaf, ShapeAndDtype):
                return leaf
            if is_source:
                return own[place].detach().to(device)
            return torch.empty(leaf.shape or (), dtype=leaf.dtype, device=device)

        found = mapped(missing, whole)
        tensors = [tensor for _, tensor in leaves(found) if isinstance(tensor, Tensor)]
        broadcast_tensors(tensors, broadcast, device)
        joint |= found
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
        optimizer: of the same kind and with the same groups as the one that was saved. It need not have made
            a step.
        state: on the rank ``src_rank``: the result of :func:`full_state_dict`, the ``state_dict()`` of an
            optimizer over the model before it was sharded, or an FSDP1 ``full_optim_state_dict``. Other ranks
            pass None.
        src_rank: the global rank whose ``state`` counts. None: each rank passes it.

    Raises:
        RuntimeError: ``state`` is not the full state of an optimizer.
        TypeError: ``model`` or ``optimizer`` is something else.
        ValueError: parameters, groups or shapes do not fit, by name; the optimizer updates parameters that
            ``model`` does not have; ``src_rank`` is not among the ranks of the model; or the optimizer has
            state of which it is unknown which part of the whole it is.

    After an error, which all ranks raise, the optimizer is unchanged. Parameters are matched by name (a tied
    one by any of its names), or by position if the state is by id. Those that were in one group must be in
    one group, which gets its hyperparameters. A parameter that ``state`` does not contain keeps its own
    state.

    Collective. In addition to ``state``, it needs 64 MiB on each rank, and memory for this rank's part of the
    new state while the old one still exists.

    Example::

        model_state, optimizer_state = torch.load("last.pt") if dist.get_rank() == 0 else (None, None)
        load_full_state_dict(model, model_state)
        load_full_optimizer_state_dict(model, optimizer, optimizer_state)
    """
    check_module(LOAD, model)
    axes, device = axes_of_model(model), device_of_model(model)

    def check() -> None:
        check_at_rest(model, LOAD)
        _own_names(model, optimizer, LOAD)
        check_rank(LOAD, "src_rank", src_rank)

    run_on_all_ranks(axes, device, check, caller=LOAD, same={"src_rank": src_rank})
    broadcast = Broadcast([], None, device) if src_rank is None else Broadcast(axes, src_rank, device)

    def read() -> State | None:
        if not broadcast.is_source:
            return None
        named = _by_name(state, model, optimizer, LOAD)  # type: ignore[arg-type]
        sharded = dict.fromkeys(p[0] for p, value in leaves(named["state"]) if isinstance(value, DTensor))
        if sharded:
            raise RuntimeError(
                f"{LOAD}: the state of {listed(sharded)} is sharded, where a full one is expected. Load it "
                "with torch.distributed.checkpoint's set_optimizer_state_dict."
            )
        return named

    named = run_on_all_ranks(axes, device, read)
    outline = broadcast.object(None if named is None else _outline(named))
    loading = run_on_all_ranks(axes, device, lambda: _OptimizerLoad(outline, model, optimizer))
    tensors = None
    if named is not None:
        tensors = ((_label(p), leaf) for p, leaf in leaves(named["state"]) if isinstance(leaf, Tensor))
    load_from_one(loading.targets, tensors, broadcast, device, BUCKET_BYTES)
    run_on_all_ranks(axes, device, loading.finish)


def rekey_optimizer_state_dict(
    state: Mapping[str, Any],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    to: Literal["name", "id"],
) -> State:
    """Return the same state with parameters by name, or by id, in the order of an optimizer. Local.

    Args:
        state: full or sharded, by name or by id.
        model: with the names.
        optimizer: over the parameters of ``model``. Its groups, and the parameters in them, determine the
            ids: an optimizer that loads a state by id must have them in the same order.
        to: "name" or "id".

    Returns:
        A new dict with the same tensors. Groups, and the parameters in them, are in the order of
        ``optimizer``.

    Raises:
        RuntimeError: ``state`` is not the state of an optimizer.
        TypeError: ``optimizer`` is something else.
        ValueError: ``to`` is something else, ``state`` is of other parameters or groups them differently, or
            the optimizer updates parameters that ``model`` does not have.

    Example::

        _, state = full_state_dict(sharded_model, optimizer)
        plain_optimizer.load_state_dict(rekey_optimizer_state_dict(state, sharded_model, optimizer, "id"))
    """
    if to not in ("name", "id"):
        raise ValueError(f"{REKEY}: to is {to!r}; pass 'name' or 'id'.")
    names = parameter_names(model)
    named = _by_name(state, model, optimizer, REKEY)
    saved = SavedState(REKEY, named["param_groups"], named["state"], is_checkpoint=False)
    (groups,) = plan_groups(saved, [optimizer], names)
    own = [names[param] for param in parameters_of(optimizer)]
    keys: list[Any] = [aliases[0] for aliases in own] if to == "name" else list(range(len(own)))
    new = {alias: key for aliases, key in zip(own, keys, strict=True) for alias in aliases}
    return {
        "state": {new[name]: dict(values) for name, values in named["state"].items()},
        "param_groups": [{**group, "params": [keys[n] for n in group["params"]]} for group in groups],
    }


# --- names and ids --------------------------------------------------------------------------------


def _by_name(
    state: Mapping[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer, caller: str
) -> State:
    """``state`` with parameters by names without wrappers, however it has them."""
    own = _own_names(model, optimizer, caller)
    _check_form(state, caller)
    keys = [key for group in state["param_groups"] for key in group["params"]]
    new: dict[Any, str]
    if keys and all(isinstance(key, int) for key in keys):  # parameters are paired by position
        if sorted(keys) != list(range(len(own))):
            raise RuntimeError(
                f"{caller}: the state is of an optimizer with {len(keys)} parameters, and this one has "
                f"{len(own)}. Build it over the same parameters."
            )
        new = dict(zip(keys, own, strict=True))
    else:
        new = {key: clean(key) for key in (*keys, *state["state"])}
    if lost := [key for key in state["state"] if key not in new]:
        raise RuntimeError(
            f"{caller}: there is state of {listed(map(str, lost))}, but no param group contains it."
        )
    return {
        "state": {new[key]: dict(values) for key, values in state["state"].items()},
        "param_groups": [
            {**group, "params": [new[key] for key in group["params"]]} for group in state["param_groups"]
        ],
    }


def _own_names(model: nn.Module, optimizer: torch.optim.Optimizer, caller: str) -> list[str]:
    """Names of the optimizer's parameters, in its order."""
    check_type(caller, "optimizer", optimizer, "a torch.optim.Optimizer", torch.optim.Optimizer)
    names = parameter_names(model)
    check_parameters(optimizer, names)
    return [names[param][0] for param in parameters_of(optimizer)]


def _check_form(state: Any, caller: str) -> None:
    def are_groups(groups: Any) -> bool:
        return isinstance(groups, (list, tuple)) and all(
            isinstance(group, Mapping) and isinstance(group.get("params"), (list, tuple)) for group in groups
        )

    def are_states(states: Any) -> bool:
        return isinstance(states, Mapping) and all(isinstance(each, Mapping) for each in states.values())

    is_dict = isinstance(state, Mapping)
    if not (is_dict and are_states(state.get("state")) and are_groups(state.get("param_groups"))):
        inside = listed(map(repr, state), 4) or "nothing in it" if is_dict else ""
        found = f"a dict with {inside}" if is_dict else f"a {type(state).__name__}"
        raise RuntimeError(
            f"{caller}: state is {found}, where the state of an optimizer has 'state', a dict for each "
            "parameter, and 'param_groups', a list of dicts with 'params' in each."
        )
    keys = [*state["state"], *(key for group in state["param_groups"] for key in group["params"])]
    if not any(all(isinstance(key, kind) for key in keys) for kind in (int, str)):
        raise RuntimeError(
            f"{caller}: a state identifies its parameters by names or by ids, but not by both."
        )


# --- loading --------------------------------------------------------------------------------------


def _outline_of(state: State) -> State:
    """State by parameter, with what all ranks must know of each tensor in its place."""
    return mapped(state, lambda _, leaf: ShapeAndDtype.of(leaf) if isinstance(leaf, Tensor) else leaf)  # type: ignore[no-any-return]


def _outline(named: State) -> State:
    """The state without its tensors; tensors among hyperparameters stay."""

    def on_host(_: StatePath, value: Any) -> Any:
        return value.detach().cpu() if isinstance(value, Tensor) else value

    return {"state": _outline_of(named["state"]), "param_groups": mapped(named["param_groups"], on_host)}


def _label(place: StatePath) -> str:
    return f"{place[0]} ({'.'.join(map(str, place[1:]))})"


class _OptimizerLoad:
    """New state in shards: allocated first, then filled, and given to the optimizer when complete."""

    def __init__(self, outline: State, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        names = parameter_names(model)
        self._optimizer, self._outline = optimizer, outline["state"]
        own = {key for values in state_of([optimizer], names)["state"].values() for key in values}
        others = {key for values in self._outline.values() for key in values} - own
        if own and others:  # else it has not stepped
            raise ValueError(
                f"{LOAD}: the state holds {listed(sorted(map(str, others)))}, but this optimizer keeps "
                f"{listed(sorted(map(str, own)))}: it is the state of another kind of optimizer."
            )
        there: dict[str, dict[StatePath, tuple[StatePath, ShapeAndDtype]]] = {}
        for place, leaf in leaves(self._outline):
            facts = leaf if isinstance(leaf, ShapeAndDtype) else ShapeAndDtype(None)
            there.setdefault(place[0], {})[place[1:]] = place, facts
        saved = SavedState(LOAD, outline["param_groups"], there, is_checkpoint=False)
        self._names = [saved.name_of(names[param]) for param in parameters_of(optimizer)]
        (self._plan,) = plan_optimizers(saved, [optimizer], names)
        entries = {}
        for place, facts in leaves(self._outline):
            if isinstance(facts, ShapeAndDtype):
                target = self._plan.blanks.get(place)
                if target is None:  # another rank has it whole; all take part in sending it
                    target = torch.empty(facts.shape or (), dtype=facts.dtype, device="meta")
                entries[_label(place)] = StateEntry("", target, True)
        self.targets = LoadTargets(LOAD, entries, is_strict=None, converts=False)

    def finish(self) -> None:
        """Have the optimizer go on with it."""

        def filled(place: StatePath, leaf: Any) -> Any:
            return self._plan.blanks[place] if isinstance(leaf, ShapeAndDtype) else leaf

        loaded = {}
        for number in self._plan.state:
            name = self._names[number]
            loaded[number] = mapped(self._outline[name], filled, (name,))
        load_into(self._optimizer, self._plan.kept | loaded, self._plan.groups, convert_dtype=False)
