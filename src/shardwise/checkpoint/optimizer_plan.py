"""How the optimizer state of a checkpoint fits the optimizers at hand: what can be known before reading.

Nothing here changes an optimizer, and nothing communicates.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardwise.checkpoint.manifest import Manifest, by_first, counted, nested
from shardwise.layout.fqns import listed
from shardwise.state.named_state import (
    Names,
    Optimizers,
    StatePath,
    are_equal,
    blank,
    check_parameters,
    has_whole_state,
    is_elsewhere,
    kind_of,
    parameters_of,
    scalar_keys,
)

# What schedulers of the learning rate add to param groups.
SCHEDULERS = {"initial_lr", "max_lr", "min_lr", "base_lr", "swa_lr", "max_momentum", "base_momentum"}


@dataclass
class OptimizerPlan:
    """What is read for one optimizer, and into what."""

    groups: list[dict[str, Any]]
    # number of a parameter -> name of a state -> its place below that -> key in the checkpoint
    state: dict[int, dict[str, dict[StatePath, str]]]
    kept: dict[int, dict[str, Any]]  # of parameters the checkpoint knows nothing of
    blanks: dict[str, Any]  # by key: where it is read


def saved_groups(manifest: Manifest, values: dict[str, Any]) -> list[dict[str, Any]]:
    """The param groups of the checkpoint; `values` by key, read before."""
    indexed = by_first(manifest.under("optimizer", "param_groups"))
    found = []
    for index in sorted(indexed, key=int):
        entries = by_first(indexed[index])
        found.append(
            {name: nested({place: values[k] for place, k in each.items()}) for name, each in entries.items()}
        )
    return found


def check_optimizers(
    manifest: Manifest,
    optimizers: Optimizers,
    names: Names,
    groups: list[dict[str, Any]],
    kinds: list[str] | None,
    strict: bool,
) -> list[OptimizerPlan]:
    """How the checkpoint's state fits `optimizers`.

    Raises:
        ValueError: it does not.
    """
    if not groups:
        raise ValueError(
            f"{manifest.path} holds no optimizer. To start with a fresh one, call load_checkpoint(path, "
            "model)."
        )
    for optimizer in optimizers:
        check_parameters(optimizer, names)
    own_kinds = list(map(kind_of, optimizers))
    if kinds is not None and not set(own_kinds) <= set(kinds):
        raise ValueError(
            f"{manifest.path} holds the state of {listed(kinds)}, and is to be loaded into "
            f"{listed(own_kinds)}. The state of one kind of optimizer means nothing to another: build the "
            "same, or load the model alone."
        )
    owner = {name: index for index, group in enumerate(groups) for name in group.get("params", [])}
    _check_membership(manifest, optimizers, names, owner, strict)
    saved = by_first(manifest.under("optimizer", "state"))
    scalars = scalar_keys(
        {str(place[0]): md.size for place, key in entries.items() if (md := manifest.tensor(key))}
        for entries in saved.values()
    )
    taken: dict[int, str] = {}
    empty = iter([group for group in groups if not group["params"]])
    plans = []
    for optimizer in optimizers:
        plan = OptimizerPlan(_groups_for(manifest, optimizer, names, groups, owner, taken, empty), {}, {}, {})
        for number, param in enumerate(parameters_of(optimizer)):
            name = _saved_name(names[param], owner)
            existing = optimizer.state.get(param, {})
            if name is None:
                plan.kept[number] = dict(existing)
            elif name in saved and not is_elsewhere(optimizer, param):
                plan.state[number] = by_first(saved[name])
                is_whole = has_whole_state(optimizer)
                _fill_blanks(manifest, plan, name, number, param, existing, scalars, is_whole)
        plans.append(plan)
    return plans


def _fill_blanks(
    manifest: Manifest,
    plan: OptimizerPlan,
    name: str,
    number: int,
    param: Tensor,
    existing: dict[str, Any],
    scalars: set[str],
    is_whole: bool,
) -> None:
    for state, entries in plan.state[number].items():
        for place, key in entries.items():
            md = manifest.tensor(key)
            if md is None:
                plan.blanks[key] = None
                continue
            there = existing.get(state) if not place else None
            plan.blanks[key] = blank(param, there, md.size, md.properties.dtype, state in scalars, is_whole)
            if plan.blanks[key] is None:
                raise ValueError(
                    f"{manifest.path}: '{state}' of {name} has shape {tuple(md.size)}, and the parameter "
                    f"{tuple(param.shape)}; nothing says how that is laid out over ranks. Take a step with "
                    "the optimizer before loading, so that its state shows it."
                )


def _saved_name(aliases: list[str], owner: dict[str, int]) -> str | None:
    """The one of its names that a parameter has in the checkpoint."""
    return next((name for name in aliases if name in owner), None)


def _check_membership(
    manifest: Manifest, optimizers: Optimizers, names: Names, owner: dict[str, int], strict: bool
) -> None:
    """Check that the optimizers and the checkpoint's param groups have the same parameters."""
    own = [param for each in optimizers for param in parameters_of(each)]
    missing = [names[param][0] for param in own if _saved_name(names[param], owner) is None]
    ours = set(own)
    unexpected = [
        aliases[0] for param, aliases in names.items() if param not in ours and _saved_name(aliases, owner)
    ]
    lines = [f"missing in the checkpoint's: {counted(missing)}"] if missing else []
    lines += [f"in the checkpoint's only: {counted(unexpected)}"] if unexpected else []
    if lines and strict:
        raise ValueError(
            f"{manifest.path}: the optimizer has other parameters; {'; '.join(lines)}. Nothing was loaded. "
            "strict=False leaves those as they are that are missing."
        )


def _groups_for(
    manifest: Manifest,
    optimizer: torch.optim.Optimizer,
    names: Names,
    groups: list[dict[str, Any]],
    owner: dict[str, int],
    taken: dict[int, str],
    empty: Iterator[dict[str, Any]],
) -> list[dict[str, Any]]:
    """The optimizer's param groups with the hyperparameters of the checkpoint.

    `taken` notes which of the checkpoint's groups were used, by a parameter in the one that used it. Groups
    without parameters, to be filled later, take those of `empty` in order.
    """
    found, number = [], 0
    for index, own in enumerate(optimizer.param_groups):
        hyper = {key: value for key, value in own.items() if key != "params"}
        known = [name for param in own["params"] if (name := _saved_name(names[param], owner)) is not None]
        sources = sorted({owner[name] for name in known})
        for source in sources:
            if source in taken:
                raise ValueError(
                    f"{manifest.path}: {taken[source]} and {known[0]} share a param group there, and are in "
                    "two groups here. Build the optimizer with the same groups as the one that was saved."
                )
            taken[source] = known[0]
        candidates = [groups[source] for source in sources]
        if not own["params"] and (other := next(empty, None)) is not None:
            candidates = [other]
        if candidates:
            _check_alike(manifest, type(optimizer).__name__, index, hyper, candidates)
            hyper |= {k: v for k, v in candidates[0].items() if k not in ("params", "param_names")}
        numbers = list(range(number, number + len(own["params"])))
        number += len(numbers)
        found.append(hyper | {"params": numbers})
    return found


def _check_alike(
    manifest: Manifest, kind: str, index: int, own: dict[str, Any], candidates: list[dict[str, Any]]
) -> None:
    first = candidates[0]
    lacks = set(own) - set(first) - SCHEDULERS - {"param_names"}
    beyond = set(first) - set(own) - SCHEDULERS - {"params", "param_names"}
    if lacks and beyond:  # one of the two alone is what another version of torch has added
        raise ValueError(
            f"{manifest.path}: group {index} of {kind} has {listed(sorted(lacks))}, and the checkpoint's has "
            f"{listed(sorted(beyond))}: the state of another kind of optimizer. Build the same, or load the "
            "model alone."
        )
    for key in first:
        if key not in ("params", "param_names") and not are_equal([each.get(key) for each in candidates]):
            raise ValueError(
                f"{manifest.path}: group {index} of {kind} joins parameters of several groups there, which "
                f"differ in '{key}': {listed(str(each.get(key)) for each in candidates)}. Build the "
                "optimizer with the same groups as the one that was saved."
            )
