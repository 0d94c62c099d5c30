"""Full parameters that a shard has replaced, for code that still holds them."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwise.layout.nested import find_tensors

NAME = "_shardwise_name"


def mark_replaced(full: nn.Parameter, fqn: str) -> None:
    """``full`` is no longer registered: make it refuse training."""
    if type(full) is nn.Parameter:
        full.grad = None
        setattr(full, NAME, fqn)
        full.__class__ = ReplacedParameter


class ReplacedParameter(nn.Parameter):
    """The class of a parameter that a sharded one has replaced, for code that still holds it.

    Computing with it would not train the sharded parameter, so it raises. Its values may be read. This
    catches optimizers built before ``fully_shard``, and code that keeps weights outside modules.
    """

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Like any parameter, but refuse to enter a graph."""
        result = super().__torch_function__(func, types, args, kwargs or {})
        if torch.is_grad_enabled() and any(tensor.grad_fn is not None for tensor in find_tensors(result)):
            _refuse_replaced((args, kwargs))
        return result

    @property
    def grad(self) -> Tensor | None:  # type: ignore[override]
        """Refused: it never gets a gradient."""
        raise RuntimeError(
            f"{_what_it_is(self)}, and no gradient comes here any more. Was the optimizer built before "
            "fully_shard? Build it after, from model.parameters()."
        )

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        if value is not None:
            raise RuntimeError(f"{getattr(self, NAME, 'a parameter')} was sharded: set .grad of its shard.")


def _refuse_replaced(arguments: Any) -> None:
    for value in find_tensors(arguments):
        if isinstance(value, ReplacedParameter) and value.requires_grad:
            raise RuntimeError(
                f"{_what_it_is(value)}, and what is computed with this tensor would not train it. Does the "
                "module keep weights in a plain list, dict or attribute? Read them from the modules that own "
                "them in each forward (self.layer.weight). To compute with the old values, detach() them."
            )


def _what_it_is(tensor: Tensor) -> str:
    name = getattr(tensor, NAME, "a parameter")
    return (
        f"{name}: this is the full parameter, as it was before fully_shard or inside unsharded(). Its shard "
        "stands in the module now"
    )


def name_of_replaced(param: nn.Parameter) -> str | None:
    """The name of ``param`` if an earlier ``fully_shard`` replaced or made it; otherwise None."""
    return getattr(param, NAME, None)


def describe(tensor: Any) -> str:
    """The kind, shape and placements of a tensor, for messages."""
    if isinstance(tensor, DTensor):
        return (
            f"a DTensor of shape {tuple(tensor.shape)} with placements {tensor.placements} on a mesh "
            f"of shape {tuple(tensor.device_mesh.shape)}"
        )
    if isinstance(tensor, Tensor):
        return f"a plain {type(tensor).__name__} of shape {tuple(tensor.shape)}"
    return f"{type(tensor).__name__}"
