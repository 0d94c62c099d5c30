"""Stateful objects in a checkpoint, such as averages of the weights and learning rate schedulers.

Their tensors are written and read as those of the model: each rank its part, resharded where other ranks
load. Everything else is a value, which comes back as it was.

    {"averages": {"up.weight": DTensor}, "num_updates": 7}    states.ema.averages.up.weight    a tensor
                                                              states.ema.num_updates           a value
    {"steps": {0: tensor(7)}}                                 states.x.steps.0                 a tensor
                                                              states.x.steps.shardwise.keys    {"0": 0}

Nothing here communicates.
"""

import io
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwise.checkpoint.manifest import Manifest, unsafe_names
from shardwise.layout.fqns import listed
from shardwise.state.loading import LoadTargets, ShapeAndDtype
from shardwise.state.named_state import StateEntry, StatePath
from shardwise.torch_compat import dtensor

STATES = "states"  # their key in a checkpoint
WHOLE = "shardwise.whole"  # marks a value that is one pickle, which torch would take apart
KEYS = "shardwise.keys"  # in a dict, which keys its names stand for that are no texts; torch has texts only

Located = tuple[str, StatePath]  # the name of an object, and a place in its state


def as_whole(value: Any) -> Any:
    """Wrap a value so that it comes back as it was."""
    return (WHOLE, value) if isinstance(value, (Mapping, list)) else value


def original(value: Any) -> Any:
    """The value that was given to :func:`as_whole`."""
    is_whole = isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], str)
    return value[1] if is_whole and value[0] == WHOLE else value


def tensors_in(value: Any, place: StatePath = ()) -> Iterator[tuple[StatePath, Tensor]]:
    """The tensors in nested dicts, lists and tuples, by the places that torch gives them."""
    if isinstance(value, Tensor):
        yield place, value
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from tensors_in(each, (*place, str(key)))
    elif isinstance(value, (list, tuple)):
        for index, each in enumerate(value):
            yield from tensors_in(each, (*place, index))


# --- what can be written --------------------------------------------------------------------------


def refuse_shards(what: str, value: Any) -> None:
    """Refuse parts of tensors where one rank's would be taken for all."""
    for place, tensor in tensors_in(value):
        if isinstance(tensor, DTensor):
            where = what + "".join(f"[{key!r}]" for key in place)
            raise ValueError(
                f"{where} is a DTensor of shape {tuple(tensor.shape)} with placements {tensor.placements}, "
                "of which each rank has a part. Only the part of one rank would be saved, and all ranks "
                "would load that part. Pass the object whose state it is in `states`, as states={'ema': "
                "ema}, or the full tensor."
            )


def refuse_unreadable(what: str, value: Any) -> None:
    """Refuse tensors of classes that torch would write, and then refuse to read."""
    trusted = [
        each[0] if isinstance(each, tuple) else each for each in torch.serialization.get_safe_globals()
    ]
    for place, tensor in tensors_in(value):
        kind = type(dtensor.plain(tensor))
        if kind not in (Tensor, nn.Parameter) and kind not in trusted:
            raise ValueError(
                f"{'.'.join(map(str, place))} of the {what} is a {kind.__module__}.{kind.__qualname__}. "
                "torch loads tensors only of classes that it trusts, so this one could be saved, but not "
                "loaded. Call torch.serialization.add_safe_globals with the class and with what its pickles "
                "need, before saving and before loading; or convert the model back before saving."
            )


def warn_of_objects(state: Mapping[str, Any]) -> None:
    """Warn of what `load_checkpoint` will read with `trust=True` only."""
    found = [f"{'.'.join(place)} ({listed(sorted(classes))})" for place, classes in _objects_in(state, ())]
    if found:
        warnings.warn(
            f"save_checkpoint: {listed(found)} can only be loaded with trust=True, since making such objects "
            "can run any code. Save tensors and plain values: of a numpy array, torch.from_numpy(array) or "
            "array.tolist().",
            stacklevel=10,  # to the caller's line, over an agreement of ranks and three decorators
        )


def _objects_in(value: Any, place: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], list[str]]]:
    """The places of pickles that name classes, and these."""
    if isinstance(value, Mapping):
        for key, each in value.items():
            yield from _objects_in(each, (*place, str(key)))
    elif not _is_plain(value):
        pickled = io.BytesIO()
        with suppress(Exception):  # what cannot be pickled fails where it is written
            torch.save(value, pickled)
            if classes := unsafe_names(pickled):
                yield place, classes


def _is_plain(value: Any) -> bool:
    """Whether it is sure without a pickle that torch reads it."""
    if type(value) in (list, tuple, dict):
        return all(map(_is_plain, (*value, *value.values()) if isinstance(value, dict) else value))
    return isinstance(value, Tensor) or type(value) in (bool, int, float, complex, str, bytes, type(None))


def refuse_shards_in_tuples(optimizer_state: dict[str, Any]) -> None:
    """Refuse state that is a tuple of shards: torch stores a tuple whole, as one rank has it."""
    for name, values in optimizer_state["state"].items():
        for key, value in values.items():
            if _has_shard_in_tuple(value):
                raise ValueError(
                    f"save_checkpoint: the optimizer keeps '{key}' of {name} as a tuple of shards. A "
                    "checkpoint stores a tuple as one rank has it, so the other ranks would load the shards "
                    "of that rank. Keep the shards in a list or a dict."
                )


def _has_shard_in_tuple(value: Any) -> bool:
    if isinstance(value, tuple):
        return any(isinstance(tensor, DTensor) for _, tensor in tensors_in(value))
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return any(map(_has_shard_in_tuple, inside))


def check_objects(states: Any) -> dict[str, Any]:
    """The objects by name."""
    states = {} if states is None else states
    if not isinstance(states, dict) or not all(isinstance(name, str) and name for name in states):
        raise TypeError(f"states must be a dict with names as keys, not {states!r:.80}")
    for name, thing in states.items():
        if not all(callable(getattr(thing, method, None)) for method in ("state_dict", "load_state_dict")):
            raise TypeError(
                f"states[{name!r}] is a {type(thing).__name__}, which has no state_dict() and "
                "load_state_dict(). Pass the object itself, not its state; what has no such methods goes "
                "into `shared` or `per_rank`."
            )
    return states


def states_of(states: dict[str, Any]) -> dict[str, Any]:
    """The states of the objects, for a checkpoint. Tensors are not copied."""
    found: dict[str, Any] = {}
    for name, thing in states.items():
        state = thing.state_dict()
        if isinstance(state, Mapping) and state:
            found[name] = _by_name(state, _written, (STATES, name))
        else:
            found[name] = _written(state, (STATES, name))
    return found


def _written(value: Any, place: StatePath) -> Any:
    """Take values with tensors apart, as torch does, and nothing else."""
    if isinstance(value, Tensor):
        return value.detach()
    if _has_no_tensors(value):
        return as_whole(value)
    if isinstance(value, Mapping):
        return _by_name(value, _written, place)
    # Of a tuple torch would make one pickle.
    return [_written(each, (*place, index)) for index, each in enumerate(value)]


def extra_written(value: Any, place: StatePath) -> Any:
    """The extra state of a module, as torch writes it where that loses nothing."""
    if not _loses(value):
        return value
    if isinstance(value, Mapping) and value:
        return _by_name(value, extra_written, place)
    if _has_no_tensors(value):
        return as_whole(value)
    return [extra_written(each, (*place, index)) for index, each in enumerate(value)]


def _loses(value: Any) -> bool:
    """Whether torch, which takes dicts and lists apart, would lose empty dicts or make texts of keys."""
    if isinstance(value, Mapping):
        return not value or any(type(key) is not str or _loses(each) for key, each in value.items())
    return isinstance(value, list) and any(map(_loses, value))


def _by_name(state: Mapping[Any, Any], write: Callable[[Any, StatePath], Any], place: StatePath) -> Any:
    """A dict by names, as torch has it, with what they stand for where that is not the same."""
    names = {key: str(key) for key in state}
    if len(set(names.values())) < len(names):
        if _has_no_tensors(state):
            return as_whole(state)
        clash = [key for key in names if list(names.values()).count(names[key]) > 1]
        raise ValueError(
            f"save_checkpoint: {'.'.join(map(str, place))} has the keys {clash[0]!r} and {clash[1]!r}, which "
            "have the same name in a checkpoint, so tensors under them would be confused. Rename one."
        )
    written = {names[key]: write(each, (*place, names[key])) for key, each in state.items()}
    others = {name: key for key, name in names.items() if type(key) is not str}
    return written | {KEYS: as_whole(others)} if others else written


def _has_no_tensors(value: Any) -> bool:
    return next(tensors_in(value), None) is None


# --- what is read ---------------------------------------------------------------------------------


@dataclass
class StatefulPlan:
    """What is read for one object, and into what."""

    name: str
    load: Callable[[Any], Any]
    own: Any  # its current state
    saved: dict[StatePath, str]  # -> key in the checkpoint
    targets: dict[str, Tensor]  # by key

    def give(self, values: Mapping[str, Any]) -> None:
        """Give the object its state; `values` by key."""
        self.load(rebuilt({place: values[key] for place, key in self.saved.items()}, self.own))


def tensor_places(own: Mapping[str, Any]) -> list[Located]:
    """The paths of tensors in the states of the objects."""
    return [(name, place) for name, state in own.items() for place, _ in tensors_in(state)]


def plan_states(
    manifest: Manifest,
    states: Mapping[str, Any],
    own: Mapping[str, Any],
    of_any_rank: Iterable[Located],
    strict: bool,
    convert_dtype: bool,
) -> tuple[list[StatefulPlan], list[str]]:
    """How the checkpoint's states fit `own`, those of the objects; and the names that it does not have.

    `of_any_rank`: where ranks have tensors; those of a pipeline have different ones.
    """
    missing = [name for name in states if not manifest.under(STATES, name)]
    if missing and strict:
        there = {str(place[0]) for place in manifest.under(STATES)}
        raise ValueError(
            f"{manifest.path} holds no state of {listed(missing)}; it has "
            f"{listed(sorted(there)) if there else 'none of any object'}. Nothing was loaded. strict=False "
            "leaves the object as it is."
        )
    plans: list[StatefulPlan] = []
    entries: dict[str, StateEntry] = {}
    facts: dict[str, ShapeAndDtype] = {}
    elsewhere = set(of_any_rank)
    for name in (name for name in states if name not in missing):
        tensors = dict(tensors_in(own[name]))
        saved = {
            place: key
            for place, key in manifest.under(STATES, name).items()
            if place in tensors or manifest.tensor(key) is None or (name, place) not in elsewhere
        }
        plan = StatefulPlan(name, states[name].load_state_dict, own[name], saved, {})
        plans.append(plan)
        for place, tensor in tensors.items():
            label = ".".join(map(str, (name, *place)))
            entries[label] = StateEntry(label, tensor, True)
        for place, key in saved.items():
            label, found = ".".join(map(str, (name, *place))), manifest.facts(key)
            entry = entries.get(label)
            if entry is not None:
                # A value there is what has not been counted yet: the object sees it.
                facts[label] = ShapeAndDtype.of(entry.value) if found.shape is None else found
                if found.shape is not None:
                    plan.targets[key] = entry.value.detach()
            elif found.shape:
                facts[label] = found  # its layout over ranks is unknown
            elif found.shape is not None:
                plan.targets[key] = torch.empty((), dtype=found.dtype)
    where = f"{manifest.path}: states do not fit"
    LoadTargets(where, entries, None, convert_dtype, ValueError).expect(facts, is_all=True)
    return plans, missing


def rebuilt(values: dict[StatePath, Any], like: Any = None) -> Any:
    """Values by path, nested again, in containers like those of `like`."""
    if () in values:
        return original(values[()])
    keys: dict[Any, Any] = {}
    if isinstance(like, Mapping):
        keys = {str(key): key for key in like}
    elif isinstance(like, (list, tuple)):
        keys = {index: index for index in range(len(like))}
    below: dict[Any, dict[StatePath, Any]] = {}
    for (first, *rest), value in values.items():
        below.setdefault(first, {})[tuple(rest)] = value
    inside = {key: like[own] for key, own in keys.items()}
    keys |= rebuilt(below.pop(KEYS)) if KEYS in below else {}
    built = {keys.get(key, key): rebuilt(each, inside.get(key)) for key, each in below.items()}
    if isinstance(like, Mapping) or not all(isinstance(key, int) for key in below):
        return built
    items = [built[index] for index in sorted(built)]
    return tuple(items) if isinstance(like, tuple) else items
