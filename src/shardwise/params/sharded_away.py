"""What a full parameter becomes once its shard has taken its place."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.layout.nested import find_tensors

NAME = "_shardwise_name"


def give_up_full(full: nn.Parameter, fqn: str) -> None:
    """``full`` stands in no module any more: have it say so to whoever still holds it."""
    if type(full) is nn.Parameter:
        full.grad = None
        setattr(full, NAME, fqn)
        full.__class__ = ShardedAway


class ShardedAway(nn.Parameter):
    """What a parameter becomes whose shard has taken its place, for whoever still holds it.

    Nothing that is computed with it trains the shard. Its values may be read: an optimizer that was built
    before ``fully_shard`` and code that keeps weights outside of their modules are told.
    """

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """As for any parameter, but no graph may lead to it."""
        result = super().__torch_function__(func, types, args, kwargs or {})
        if torch.is_grad_enabled() and any(tensor.grad_fn is not None for tensor in find_tensors(result)):
            _refuse_sharded_away((args, kwargs))
        return result

    @property
    def grad(self) -> Tensor | None:  # type: ignore[override]
        """Refused: no gradient will ever come here."""
        raise RuntimeError(
            f"{getattr(self, NAME, 'a parameter')}: this is the full parameter, as it was before "
            "fully_shard or inside unsharded(); its shard, another parameter, stands in the module now, and "
            "no gradient comes here any more. Was the optimizer built before fully_shard? Build it after, "
            "from model.parameters()."
        )

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        if value is not None:
            raise RuntimeError(f"{getattr(self, NAME, 'a parameter')} was sharded: set .grad of its shard.")


def _refuse_sharded_away(arguments: Any) -> None:
    for value in find_tensors(arguments):
        if isinstance(value, ShardedAway) and value.requires_grad:
            raise RuntimeError(
                f"{getattr(value, NAME, 'a parameter')}: this is the full parameter, as it was before "
                "fully_shard or inside unsharded(). Its shard stands in the module now, and what is computed "
                "with this tensor would not train it. Does the module keep weights in a plain list, dict or "
                "attribute? Read them from the modules that own them in each forward (self.layer.weight), or "
                "keep the modules in an nn.ModuleList. To compute with the old values, detach() them."
            )


def sharded_before(param: nn.Parameter) -> str | None:
    """The name under which an earlier ``fully_shard`` took ``param``, or made it; None if none did.

    Whoever still holds an original shares nothing with its shard any more.
    """
    return getattr(param, NAME, None)
