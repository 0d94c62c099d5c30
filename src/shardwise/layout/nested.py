"""Tensors in nested containers, such as the output of a forward.

Tuples, lists, dicts and their subclasses, dataclasses, classes registered with torch's pytree, and plain
objects, through their attributes. Knows nothing about sharding.
"""

import copy
import dataclasses
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from operator import is_, is_not
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.torch_compat import pytree

# Not searched: values, and objects from which a whole program is reachable.
_LEAVES = (
    *(str, bytes, int, float, complex, bool, type(None), type, nn.Module),
    *(types.ModuleType, types.FunctionType, types.MethodType),
)
_MAX_DEPTH = 8

is_not_none = partial(is_not, None)
"""True for anything except None; a map over tensors with it runs in C, where ``in`` would compare them."""


class NotAContainer(TypeError):
    """Raised with the name of a class whose contents can be seen but not replaced."""


def find_tensors(output: Any) -> list[Tensor]:
    """All tensors in ``output``, each once, in order."""
    found: dict[int, Tensor] = {}
    _visit(output, 0, found, {})
    return list(found.values())


# Not a function inside of find_tensors: one that calls itself is part of a cycle, with all that it sees, and
# only the garbage collector would free the tensors.
def _visit(value: Any, depth: int, found: dict[int, Tensor], seen: dict[int, tuple[int, Any]]) -> None:
    """``seen``: by id the depth, and the object, so that its id is not reused."""
    if isinstance(value, Tensor):
        found.setdefault(id(value), value)
    elif depth < _MAX_DEPTH and not isinstance(value, _LEAVES):
        if id(value) in seen and seen[id(value)][0] <= depth:
            return
        seen[id(value)] = (depth, value)
        for child in _children(value):
            _visit(child, depth + 1, found, seen)


def find_tensors_in_trace(value: Any) -> list[Tensor]:
    """Like ``find_tensors`` while dynamo traces: objects have no identity there, nor attributes to walk."""
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def _children(value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, (list, tuple, set, frozenset)):
        return value
    if type(value) in pytree.registered:
        return pytree.children(value)
    return [getattr(value, name) for name in _attributes(value)]


def _attributes(value: Any) -> Iterator[str]:
    """Names of the attributes in the dictionary and slots of ``value``."""
    yield from getattr(value, "__dict__", ())
    for cls in type(value).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        for slot in (slots,) if isinstance(slots, str) else slots:
            is_private = slot.startswith("__") and not slot.endswith("__")
            name = f"_{cls.__name__.lstrip('_')}{slot}" if is_private else slot
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                yield name


def replace_tensors(output: Any, new: Mapping[int, Tensor]) -> Any:
    """``output`` with tensors replaced by ``new``, which has ids of the old ones as keys.

    Raises NotAContainer for a tensor in an object that ``map_tensors`` leaves alone.
    """
    replaced = map_tensors(output, lambda tensor: new.get(id(tensor), tensor))
    if any(id(tensor) in new for tensor in find_tensors(replaced)):
        raise NotAContainer(type(output).__name__)
    return replaced


def map_tensors(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """``value`` with ``function`` applied to its tensors; the same object if nothing has changed.

    Searches tuples, lists, dicts, their common subclasses and dataclasses; leaves everything else alone.
    """
    if isinstance(value, Tensor):
        return function(value)
    if torch.compiler.is_dynamo_compiling() and not _has_other(value, function):
        return value
    if isinstance(value, dict):
        changed = {key: map_tensors(child, function) for key, child in value.items()}
        if _are_same(changed.values(), value.values()):
            return value
        if type(value) is dict:
            return changed
        mapped = copy.copy(value)
        for key, child in changed.items():
            mapped[key] = child
        return mapped
    if isinstance(value, (tuple, list)):
        children = [map_tensors(child, function) for child in value]
        if _are_same(children, value):
            return value
        return type(value)(*children) if hasattr(value, "_fields") else type(value)(children)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [f.name for f in dataclasses.fields(value) if hasattr(value, f.name)]
        fields = {name: map_tensors(getattr(value, name), function) for name in names}
        if _are_same(fields.values(), [getattr(value, name) for name in names]):
            return value
        changed_value = copy.copy(value)
        for name, child in fields.items():
            object.__setattr__(changed_value, name, child)
        return changed_value
    return value


def _are_same(new: Iterable[Any], old: Iterable[Any]) -> bool:
    return not torch.compiler.is_dynamo_compiling() and all(map(is_, new, old))


def _has_other(value: Any, function: Callable[[Tensor], Tensor]) -> bool:
    """Whether ``function``, a cast or a move, would change a tensor in ``value``, which dynamo traces.

    Tensors have no identity there. A rebuilt container would lose later additions to the original.
    """
    pairs = [(tensor, function(tensor)) for tensor in find_tensors_in_trace(value)]
    return any(new.dtype != old.dtype or new.device != old.device for old, new in pairs)
