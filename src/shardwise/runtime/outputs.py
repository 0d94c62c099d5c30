"""Tensors inside what a forward returns.

Tuples, lists, dicts and their subclasses, dataclasses, whatever is registered with torch's pytree,
and plain objects, through their attributes. Knows nothing of sharding.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree  # registered containers; torch has no public list of them

_LEAVES = (str, bytes, int, float, complex, bool, type(None), type, nn.Module)
_MAX_DEPTH = 8


class NotAContainer(TypeError):
    """Raised with the name of a class whose contents can be seen but not replaced."""


def find_tensors(output: Any) -> list[Tensor]:
    """All tensors in ``output``, each once, in order."""
    found: dict[int, Tensor] = {}
    seen: set[int] = set()

    def visit(value: Any, depth: int) -> None:
        if isinstance(value, Tensor):
            found.setdefault(id(value), value)
        elif depth < _MAX_DEPTH and not isinstance(value, _LEAVES) and id(value) not in seen:
            seen.add(id(value))
            for child in _children(value):
                visit(child, depth + 1)

    visit(output, 0)
    return list(found.values())


def _children(value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, (list, tuple, set, frozenset)):
        return value
    if type(value) in pytree.SUPPORTED_NODES:
        return pytree.SUPPORTED_NODES[type(value)].flatten_fn(value)[0]
    return list(_attributes(value))


def _attributes(value: Any) -> Iterator[Any]:
    yield from getattr(value, "__dict__", {}).values()
    for cls in type(value).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                yield getattr(value, name)


def replace_tensors(output: Any, new: dict[int, Tensor]) -> Any:
    """``output`` with tensors replaced, ``new`` going by the id of the old.

    Raises:
        NotAContainer: a tensor to be replaced is in an object that cannot be rebuilt.
    """
    if isinstance(output, Tensor):
        return new.get(id(output), output)
    if isinstance(output, _LEAVES) or not any(id(t) in new for t in find_tensors(output)):
        return output
    if isinstance(output, tuple) and hasattr(output, "_fields"):
        return type(output)(*(replace_tensors(value, new) for value in output))
    if type(output) in (tuple, list):
        return type(output)(replace_tensors(value, new) for value in output)
    if type(output) is dict:
        return {key: replace_tensors(value, new) for key, value in output.items()}
    if dataclasses.is_dataclass(output) and not isinstance(output, (type, Mapping)):
        changes = {
            field.name: replace_tensors(getattr(output, field.name), new)
            for field in dataclasses.fields(output)
            if field.init
        }
        return dataclasses.replace(output, **changes)
    raise NotAContainer(type(output).__name__)
