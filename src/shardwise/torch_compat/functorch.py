"""The transforms of ``torch.func``. Seen on 2.11 to 2.13."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._C import _functorch
from torch._functorch import pyfunctorch
from torch.autograd import forward_ad

_Function = TypeVar("_Function", bound=Callable[..., Any])


def outside_transforms(function: _Function) -> _Function:
    """Have ``function`` run outside of all transforms that it is called in."""

    @wraps(function)
    def outside(*args: Any, **kwargs: Any) -> Any:
        if not is_in_transform():
            return function(*args, **kwargs)
        with without_transforms():
            return function(*args, **kwargs)

    return outside  # type: ignore[return-value]


def with_layers(tensors: Iterable[Tensor]) -> list[Tensor]:
    """``tensors``, their tangents, and all that these wrap."""
    return [layer for tensor in tensors for layer in _layers(tensor)]


def _layers(tensor: Tensor) -> Iterator[Tensor]:
    yield tensor
    with in_transform_of(tensor):
        its_tangent = tangent(tensor)
    if its_tangent is not None:
        yield from _layers(its_tangent)
    if is_wrapped(tensor):
        yield from _layers(unwrapped(tensor))


def innermost(tensor: Tensor) -> Tensor:
    """The tensor that has memory."""
    while is_wrapped(tensor):
        tensor = unwrapped(tensor)
    return tensor


# torch.func has no public way to tell whether a transform runs, to step out of it, or to look into what it
# wraps. It keeps transforms on a stack, the innermost last.

is_in_transform: Callable[[], bool] = torch._C._are_functorch_transforms_active
"""True inside a transform of ``torch.func``."""

is_wrapped: Callable[[Tensor], bool] = _functorch.is_functorch_wrapped_tensor
"""True for a tensor that a transform has wrapped. It has no memory of its own."""

unwrapped: Callable[[Tensor], Tensor] = _functorch.get_unwrapped
"""What such a tensor wraps; perhaps a tensor wrapped by an outer transform."""


def is_in_forward_mode() -> bool:
    """True where tensors may have tangents."""
    return forward_ad._current_level >= 0


def is_in_transform_or_forward_mode() -> bool:
    """True where a tensor may be wrapped by a transform or have a tangent."""
    return is_in_transform() or is_in_forward_mode()


without_transforms: Callable[[], AbstractContextManager[Any]] = (
    pyfunctorch.temporarily_clear_interpreter_stack
)
"""Inside, no transform is active."""


@contextmanager
def in_transform_of(tensor: Tensor) -> Iterator[None]:
    """Inside, the transform that has wrapped ``tensor`` is the innermost; none is active if none has."""
    level, inner = _functorch.maybe_get_level(tensor), []
    try:
        while is_in_transform() and _functorch.current_level() > level:
            inner.append(pyfunctorch.pop_dynamic_layer_stack())
        yield
    finally:
        while inner:
            pyfunctorch.push_dynamic_layer_stack(inner.pop())


def tangent(tensor: Tensor) -> Tensor | None:
    """The tangent that forward-mode differentiation has given to ``tensor``, for the innermost transform.

    Transforms other than ``jvp`` cannot be asked.
    """
    if not is_in_forward_mode():
        return None
    transform = _functorch.peek_interpreter_stack()
    if transform is not None and transform.key() != _functorch.TransformType.Jvp:
        return None
    return forward_ad.unpack_dual(tensor).tangent


def is_recorded() -> bool:
    """True while ``make_fx`` (or ``torch.func.linearize``) records what is computed."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None
