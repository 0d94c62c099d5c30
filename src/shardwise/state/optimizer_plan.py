"""How a saved state fits the optimizers that are to go on with it, before any tensor is read; and into them.

Parameters go by names. The saved state is a checkpoint's, or a full state's.
"""

from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardwise.layout.fqns import listed
from shardwise.optim.offload import _StateMover
from shardwise.optim.whole_parameters import are_equal
from shardwise.state.loading import ShapeAndDtype
from shardwise.state.named_state import (
    Names,
    Optimizers,
    StatePath,
    check_parameters,
    has_whole_state,
    is_elsewhere,
    leaves,
    mapped,
    parameters_of,
)
from shardwise.torch_compat import dtensor, optimizers

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
