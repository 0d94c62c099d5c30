"""State of optimizers: full state out of shards and into them, by parameter name or by id; and how a saved
state, a checkpoint's or a full one, fits the optimizers that are to go on with it.

    by name     state["head.weight"] = {"step": ..., "exp_avg": ...}      group["params"] = ["head.weight"]
    by id       state[0] = {"step": ..., "exp_avg": ...}                  group["params"] = [0]

By id is what the ``state_dict()`` of an optimizer over a model that is not sharded looks like: parameters
are counted in the order of its groups, and whoever loads it pairs them by place alone. So a state by name is
first brought into the order of the optimizer at hand. By name is what ``torch.distributed.checkpoint`` writes
and reads.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwise.arguments import check_module, check_rank, check_type
from shardwise.comm.full_tensors import BUCKET_BYTES, full_values
from shardwise.layout.fqns import clean, listed
from shardwise.layout.mesh import Axis
from shardwise.optim.offload import _StateMover
from shardwise.optim.whole_parameters import are_equal
from shardwise.ranks.agreement import run_on_all_ranks
from shardwise.ranks.failures import monitored
from shardwise.ranks.model_ranks import Broadcast, axes_of_model, device_of_model, gather_from_all, own_rank
from shardwise.ranks.replicas import broadcast_tensors
from shardwise.state.loading import LoadTargets, ShapeAndDtype, load_from_one
from shardwise.state.named_state import (
    Names,
    Optimizers,
    StateEntry,
    StatePath,
    check_at_rest,
    check_parameters,
    has_whole_state,
    is_elsewhere,
    leaves,
    mapped,
    parameter_names,
    parameters_of,
    state_of,
)
from shardwise.torch_compat import dtensor, optimizers

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
    targets, finish = run_on_all_ranks(axes, device, lambda: _planned(outline, model, optimizer))
    tensors = None
    if named is not None:
        tensors = ((_label(p), leaf) for p, leaf in leaves(named["state"]) if isinstance(leaf, Tensor))
    load_from_one(targets, tensors, broadcast, device, BUCKET_BYTES)
    run_on_all_ranks(axes, device, finish)


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
    try:
        keys = [*state["state"], *(key for group in state["param_groups"] for key in group["params"])]
        is_state = all(isinstance(each, Mapping) for each in state["state"].values())
    except (AttributeError, LookupError, TypeError):
        is_state = False
    if not is_state:
        is_dict = isinstance(state, Mapping)
        inside = listed(map(repr, state), 4) or "nothing in it" if is_dict else ""
        found = f"a dict with {inside}" if is_dict else f"a {type(state).__name__}"
        raise RuntimeError(
            f"{caller}: state is {found}, where the state of an optimizer has 'state', a dict for each "
            "parameter, and 'param_groups', a list of dicts with 'params' in each."
        )
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
    groups = mapped(named["param_groups"], lambda _, v: v.detach().cpu() if isinstance(v, Tensor) else v)
    return {"state": _outline_of(named["state"]), "param_groups": groups}


def _label(place: StatePath) -> str:
    return f"{place[0]} ({'.'.join(map(str, place[1:]))})"


def _planned(
    outline: State, model: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[LoadTargets, Callable[[], None]]:
    """New state in shards, to be filled; and what then has the optimizer go on with it."""
    names, outlines = parameter_names(model), outline["state"]
    own = {key for values in state_of([optimizer], names)["state"].values() for key in values}
    others = {key for values in outlines.values() for key in values} - own
    if own and others:  # else it has not stepped
        raise ValueError(
            f"{LOAD}: the state holds {listed(sorted(map(str, others)))}, but this optimizer keeps "
            f"{listed(sorted(map(str, own)))}: it is the state of another kind of optimizer."
        )
    there: dict[str, dict[StatePath, tuple[StatePath, ShapeAndDtype]]] = {}
    for place, leaf in leaves(outlines):
        facts = leaf if isinstance(leaf, ShapeAndDtype) else ShapeAndDtype(None)
        there.setdefault(place[0], {})[place[1:]] = place, facts
    saved = SavedState(LOAD, outline["param_groups"], there, is_checkpoint=False)
    (plan,) = plan_optimizers(saved, [optimizer], names)
    entries = {}
    for place, facts in leaves(outlines):
        if isinstance(facts, ShapeAndDtype):
            target = plan.blanks.get(place)
            if target is None:  # another rank has it whole; all take part in sending it
                target = torch.empty(facts.shape or (), dtype=facts.dtype, device="meta")
            entries[_label(place)] = StateEntry("", target, True)

    def filled(place: StatePath, leaf: Any) -> Any:
        return plan.blanks[place] if isinstance(leaf, ShapeAndDtype) else leaf

    def finish() -> None:
        own_names = [saved.name_of(names[param]) for param in parameters_of(optimizer)]
        loaded = {n: mapped(outlines[own_names[n]], filled, (own_names[n],)) for n in plan.state}
        load_into(optimizer, plan.kept | loaded, plan.groups, convert_dtype=False)

    return LoadTargets(LOAD, entries, is_strict=None, converts=False), finish


# --- how a saved state fits -----------------------------------------------------------------------

# What schedulers of the learning rate add to param groups.
SCHEDULERS = {"initial_lr", "max_lr", "min_lr", "base_lr", "swa_lr", "max_momentum", "base_momentum"}


@dataclass(frozen=True)
class SavedState:
    """The state of optimizers, as it was saved.

    ``groups`` have names as ``params``; ``state`` has, by name and by the path below it, a key and what is
    known of the value. Of a checkpoint, parts may belong to other ranks' models, as in a pipeline, and values
    are read into the state that an optimizer has; else its state stays as it is until all has come.
    """

    where: str  # begins messages
    groups: list[dict[str, Any]]
    state: Mapping[str, Mapping[StatePath, tuple[Hashable, ShapeAndDtype]]]
    is_checkpoint: bool

    @cached_property
    def group_of(self) -> dict[str, int]:
        """The groups, by index, of the parameters."""
        return {name: index for index, group in enumerate(self.groups) for name in group["params"]}

    @cached_property
    def scalars(self) -> set[StatePath]:
        """Paths of states that are one number for a parameter of any shape, such as a step count."""
        found: set[StatePath] = {("step",), ("eta",), ("mu",), ("mu_product",)}
        for values in self.state.values():
            if any(facts.shape for _, facts in values.values()):
                found |= {place for place, (_, facts) in values.items() if facts.shape == ()}
        return found

    def name_of(self, aliases: Iterable[str]) -> str | None:
        """The one of its names that a parameter has here."""
        return next((name for name in aliases if name in self.group_of), None)


@dataclass
class OptimizerPlan:
    """What is loaded into one optimizer: its groups, and by the numbers of parameters what was saved of each.

    ``kept``: the state that parameters keep. ``blanks``: by key, where a tensor is read; None for what is no
    tensor.
    """

    groups: list[dict[str, Any]]
    state: dict[int, Mapping[StatePath, Hashable]] = field(default_factory=dict)
    kept: dict[int, dict[str, Any]] = field(default_factory=dict)
    blanks: dict[Any, Tensor | None] = field(default_factory=dict)


def plan_groups(
    saved: SavedState, optimizers: Optimizers, names: Names, strict: bool = True
) -> list[list[dict[str, Any]]]:
    """The param groups of each optimizer, with the saved hyperparameters, and numbers as ``params``.

    Refuses other parameters (if ``strict``), other groups, and groups of another kind of optimizer.
    """
    for optimizer in optimizers:
        check_parameters(optimizer, names)
    if strict:
        _refuse_other_parameters(saved, optimizers, names)
    taken: dict[int, str] = {}
    empty = iter([group for group in saved.groups if not group["params"]])
    return [_groups_for(saved, optimizer, names, taken, empty) for optimizer in optimizers]


def plan_optimizers(
    saved: SavedState, optimizers: Optimizers, names: Names, strict: bool = True
) -> list[OptimizerPlan]:
    """How ``saved`` fits the optimizers."""
    plans = [OptimizerPlan(groups) for groups in plan_groups(saved, optimizers, names, strict)]
    for optimizer, plan in zip(optimizers, plans, strict=True):
        for number, param in enumerate(parameters_of(optimizer)):
            name = saved.name_of(names[param])
            existing = optimizer.state.get(param, {})
            if name is None or not (saved.state.get(name) or saved.is_checkpoint):
                if existing:
                    plan.kept[number] = dict(existing)
            elif saved.state.get(name) and not is_elsewhere(optimizer, param):
                plan.state[number] = {place: key for place, (key, _) in saved.state[name].items()}
                plan.blanks |= _blanks(saved, name, param, existing, has_whole_state(optimizer))
    return plans


def _refuse_other_parameters(saved: SavedState, optimizers: Optimizers, names: Names) -> None:
    own = [param for each in optimizers for param in parameters_of(each)]
    missing = [names[param][0] for param in own if saved.name_of(names[param]) is None]
    ours = {alias for param in own for alias in names[param]}
    of_model = {alias for aliases in names.values() for alias in aliases}
    unexpected = [
        name
        for name in dict.fromkeys([*saved.group_of, *saved.state])
        if name not in ours and (name in of_model or not saved.is_checkpoint)
    ]
    lines = [f"not saved: {listed(missing)}"] if missing else []
    lines += [f"saved only: {listed(unexpected)}"] if unexpected else []
    if lines:
        advice = " strict=False keeps the state of those not saved." if saved.is_checkpoint else ""
        raise ValueError(
            f"{saved.where}: the optimizer has other parameters; {'; '.join(lines)}. Nothing was loaded."
            f"{advice}"
        )


def _groups_for(
    saved: SavedState,
    optimizer: torch.optim.Optimizer,
    names: Names,
    taken: dict[int, str],
    empty: Iterator[dict[str, Any]],
) -> list[dict[str, Any]]:
    """``taken`` notes which of the saved groups were used, by a parameter in the one that used it.

    Groups without parameters, to be filled later, take those of ``empty`` in order.
    """
    found, number = [], 0
    for index, own in enumerate(optimizer.param_groups):
        hyper = {key: value for key, value in own.items() if key != "params"}
        known = [name for param in own["params"] if (name := saved.name_of(names[param])) is not None]
        sources = sorted({saved.group_of[name] for name in known})
        for source in sources:
            if source in taken:
                raise ValueError(
                    f"{saved.where}: {taken[source]} and {known[0]} share a param group in the saved state, "
                    "and are in two groups of the optimizer. Build the optimizer with the same groups as the "
                    "one that was saved."
                )
            taken[source] = known[0]
        candidates = [saved.groups[source] for source in sources]
        if not own["params"] and (other := next(empty, None)) is not None:
            candidates = [other]
        if candidates:
            _check_alike(saved.where, type(optimizer).__name__, index, hyper, candidates)
            hyper |= {k: v for k, v in candidates[0].items() if k not in ("params", "param_names")}
        numbers = list(range(number, number + len(own["params"])))
        number += len(numbers)
        found.append(hyper | {"params": numbers})
    return found


def _check_alike(
    where: str, kind: str, index: int, own: dict[str, Any], candidates: list[dict[str, Any]]
) -> None:
    first = candidates[0]
    lacks = set(own) - set(first) - SCHEDULERS - {"param_names"}
    beyond = set(first) - set(own) - SCHEDULERS - {"params", "param_names"}
    if lacks and beyond:  # one of the two alone is what another version of torch has added
        raise ValueError(
            f"{where}: group {index} of {kind} has {listed(sorted(lacks))}, but the saved group has "
            f"{listed(sorted(beyond))}: this is the state of another kind of optimizer. Build the same kind, "
            "or load only the model."
        )
    for key in first:
        if key not in ("params", "param_names") and not all(
            are_equal(first[key], each.get(key)) for each in candidates
        ):
            raise ValueError(
                f"{where}: group {index} of {kind} joins parameters of several saved groups, which differ in "
                f"'{key}': {listed(str(each.get(key)) for each in candidates)}. Build the optimizer with the "
                "same groups as the one that was saved."
            )


# --- tensors --------------------------------------------------------------------------------------


def _blanks(
    saved: SavedState, name: str, param: Tensor, existing: Any, is_whole: bool
) -> dict[Hashable, Tensor | None]:
    own = dict(leaves(existing))
    made: dict[Hashable, Tensor | None] = {}
    for place, (key, facts) in saved.state[name].items():
        made[key] = None
        if facts.shape is None:
            continue
        there, is_scalar = own.get(place), place in saved.scalars
        made[key] = _blank(param, there, facts, is_scalar, is_whole, saved.is_checkpoint)
        if made[key] is None:
            has = f", but {tuple(there.shape)} here" if isinstance(there, Tensor) else ""
            raise ValueError(
                f"{saved.where}: '{'.'.join(map(str, place))}' of {name} has shape {facts.shape}{has}; the "
                f"shape of the parameter is {tuple(param.shape)}. So it is unknown how the ranks share this "
                "state. Take a step with the optimizer before loading, so that its state shows how."
            )
    return made


def _blank(
    param: Tensor, there: Any, facts: ShapeAndDtype, is_scalar: bool, is_whole: bool, reuse: bool
) -> Tensor | None:
    """Where to read a tensor of a parameter's state: what is ``there``, or memory of the same form.

    None: the layout of a tensor of this size is unknown. ``is_whole``: it is not.
    """
    size, dtype, device = torch.Size(facts.shape or ()), facts.dtype, dtensor.plain(param).device
    if isinstance(there, Tensor) and there.shape == size:
        # Adagrad and others make state on the meta device if the model is there when they are built. It
        # stays there when the model gets memory.
        is_lost = dtensor.plain(there).is_meta and device.type != "meta"
        if reuse and there.dtype == dtype and not is_lost:
            return there
        if not (is_lost and is_scalar):
            return with_memory(there, device if is_lost else dtensor.plain(there).device, dtype)
    elif isinstance(there, Tensor) and not reuse:
        return None
    if isinstance(param, DTensor) and size == param.shape and not is_scalar and not is_whole:
        return with_memory(param, device, dtype)
    if is_whole or not size or not isinstance(param, DTensor):
        return torch.empty(size, dtype=dtype, device=torch.device("cpu") if is_scalar else device)
    return None


def with_memory(like: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """New memory on ``device``, of the form of ``like``."""
    return dtensor.placed_as(like, torch.empty_like(dtensor.plain(like), device=device, dtype=dtype))


def load_into(
    optimizer: torch.optim.Optimizer,
    state: dict[int, dict[str, Any]],
    groups: list[dict[str, Any]],
    convert_dtype: bool,
) -> None:
    """Give `optimizer` a state by the numbers of parameters, and the hyperparameters of `groups`.

    By its own method: ``set_optimizer_state_dict`` of torch.distributed.checkpoint makes a step of an
    optimizer that has made none, which counts as one where a parameter has no state to be loaded.
    `convert_dtype`: states of the form of their parameter take its dtype.
    """
    params = parameters_of(optimizer)
    groups = [_on_devices_of(own, each) for own, each in zip(optimizer.param_groups, groups, strict=True)]
    optimizer.load_state_dict({"state": state, "param_groups": groups})
    for number, values in state.items():
        mine = optimizer.state[params[number]]
        mine.update(_with_dtypes_of(values, mine, params[number] if convert_dtype else None))
    for hook in optimizers.step_post_hooks(optimizer):
        if isinstance(mover := getattr(hook, "__self__", None), _StateMover):
            mover.to_host(optimizer, (), {})  # it came to the device, as load_state_dict does


def _on_devices_of(own: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
    """Move tensors among hyperparameters (of a capturable optimizer) to the devices of the current ones."""
    at_hand = {key: value for key, value in leaves(dict(own)) if isinstance(value, Tensor)}

    def placed(place: StatePath, value: Any) -> Any:
        is_wanted = isinstance(value, Tensor) and place in at_hand
        return value.to(at_hand[place].device) if is_wanted else value

    return mapped(dict(saved), placed)  # type: ignore[no-any-return]


def _with_dtypes_of(saved: dict[str, Any], cast: dict[str, Any], converted: Tensor | None) -> Any:
    """State as it was saved: torch has cast all but 'step' to the dtype of the parameter, ASGD's eta too.

    What has the form of ``converted`` stays as it was cast.
    """
    before = dict(leaves(saved))

    def uncast(place: StatePath, leaf: Any) -> Any:
        old = before.get(place)
        if not isinstance(leaf, Tensor) or not isinstance(old, Tensor) or place[0] == "step":
            return leaf
        is_converted = converted is not None and old.shape == converted.shape
        return leaf if is_converted or leaf.dtype == old.dtype else old.to(leaf.device)

    return mapped(cast, uncast)
