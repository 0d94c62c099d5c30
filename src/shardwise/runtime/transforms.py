"""Sharded modules inside the transforms of ``torch.func`` and inside forward-mode differentiation.

``grad``, ``vjp``, ``jvp`` and ``vmap`` wrap tensors, one layer for each transform, and interpret every
operation. Gathering, freeing and reducing are none of a transform's business: they run outside of all. And
each layer of an output has a graph of its own, as has its tangent; a backward may come through any of them:

    vmap(grad(f))    output = grad's layer over vmap's layer over a plain tensor
                              a node           no graph         a node: the weights are trained through it
"""

from collections.abc import Callable, Iterable, Iterator
from functools import wraps
from typing import Any, TypeVar

from torch import Tensor

from shardwise.runtime import compat

_Function = TypeVar("_Function", bound=Callable[..., Any])


def outside_transforms(function: _Function) -> _Function:
    """Have ``function`` run outside of all transforms that it is called in."""

    @wraps(function)
    def outside(*args: Any, **kwargs: Any) -> Any:
        if not compat.is_in_transform():
            return function(*args, **kwargs)
        with compat.without_transforms():
            return function(*args, **kwargs)

    return outside  # type: ignore[return-value]


def with_layers(tensors: Iterable[Tensor]) -> list[Tensor]:
    """``tensors``, their tangents, and all that these wrap."""
    return [layer for tensor in tensors for layer in _layers(tensor)]


def _layers(tensor: Tensor) -> Iterator[Tensor]:
    yield tensor
    with compat.in_transform_of(tensor):
        tangent = compat.tangent(tensor)
    if tangent is not None:
        yield from _layers(tangent)
    if compat.is_wrapped(tensor):
        yield from _layers(compat.unwrapped(tensor))


def innermost(tensor: Tensor) -> Tensor:
    """The tensor that has memory."""
    while compat.is_wrapped(tensor):
        tensor = compat.unwrapped(tensor)
    return tensor
