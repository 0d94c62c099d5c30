"""Parameters that were replaced: full ones by their shards, and shards by the caller."""

import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwise.layout.nested import find_tensors
from shardwise.torch_compat import dtensor

if TYPE_CHECKING:
    from shardwise.params.parameter import Param

NAME = "_shardwise_name"


def mark_replaced(full: nn.Parameter, fqn: str) -> None:
    """``full`` is registered nowhere any more: have it refuse to be trained."""
    if type(full) is nn.Parameter:
        full.grad = None
        setattr(full, NAME, fqn)
        full.__class__ = ReplacedParameter


class ReplacedParameter(nn.Parameter):
    """The class of a parameter that a sharded one has replaced, for whoever still holds it.

    Computing with it would not train the sharded parameter, so that raises. Its values may be read. This
    catches optimizers built before ``fully_shard``, and code that keeps weights outside of modules.
    """

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """As for any parameter, but it may not enter a graph."""
        result = super().__torch_function__(func, types, args, kwargs or {})
        if torch.is_grad_enabled() and any(tensor.grad_fn is not None for tensor in find_tensors(result)):
            _refuse_replaced((args, kwargs))
        return result

    @property
    def grad(self) -> Tensor | None:  # type: ignore[override]
        """Refused: it never gets a gradient."""
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


def _refuse_replaced(arguments: Any) -> None:
    for value in find_tensors(arguments):
        if isinstance(value, ReplacedParameter) and value.requires_grad:
            raise RuntimeError(
                f"{getattr(value, NAME, 'a parameter')}: this is the full parameter, as it was before "
                "fully_shard or inside unsharded(). Its shard stands in the module now, and what is computed "
                "with this tensor would not train it. Does the module keep weights in a plain list, dict or "
                "attribute? Read them from the modules that own them in each forward (self.layer.weight), or "
                "keep the modules in an nn.ModuleList. To compute with the old values, detach() them."
            )


def name_of_replaced(param: nn.Parameter) -> str | None:
    """The name of ``param`` if an earlier ``fully_shard`` replaced or made it; else None."""
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


def find_replacement(param: "Param") -> nn.Parameter | None:
    """The sharded parameter that is registered at the sites of ``param`` instead of ours, or None.

    Raises:
        RuntimeError: something else is registered there, or different tensors at tied sites.
    """
    found = [site.registered() for site in param.sites]
    if all(tensor is param.sharded for tensor in found):
        return None
    site, new = next((s, t) for s, t in zip(param.sites, found, strict=True) if t is not param.sharded)
    if new is None:
        raise RuntimeError(
            f"{site.fqn}: the parameter was removed after fully_shard (deleted, set to None, or replaced "
            "by a parametrization), but its group still unshards it. Put it back, or change the module "
            "before fully_shard."
        )
    if not _can_replace(new, param.sharded):
        raise RuntimeError(
            f"{site.fqn}: the parameter was replaced after fully_shard by {describe(new)}, where a "
            f"parameter sharded like the old one is expected: {describe(param.sharded)}. The group "
            "all-gathers shards and cannot use it. Copy values into the sharded parameter instead (under "
            "torch.no_grad(), param.copy_(torch.distributed.tensor.distribute_tensor(value, "
            "param.device_mesh, param.placements))), or replace parameters before fully_shard. "
            "torch.func.functional_call replaces them as well: it does not work on a sharded module."
        )
    for other_site, other in zip(param.sites, found, strict=True):
        if other is not new and not _have_equal_shards(other, new):
            raise RuntimeError(
                f"{site.fqn} and {other_site.fqn} are tied (one parameter under two names), but "
                f"{site.fqn} alone was replaced. Replace both with the same parameter, or untie "
                "them before fully_shard."
            )
    kept = [each.fqn for each, tensor in zip(param.sites, found, strict=True) if tensor is param.sharded]
    if kept:
        warnings.warn(
            f"{site.fqn} and {kept[0]} are tied (one parameter under two names), but {site.fqn} alone was "
            "replaced, by a parameter with the same values. They stay tied: the new one stands under both "
            "names from now on. Untie them before fully_shard.",
            stacklevel=2,
        )
    assert isinstance(new, nn.Parameter)
    return new


def _can_replace(new: Any, sharded: Any) -> bool:
    return (
        isinstance(new, nn.Parameter)
        and isinstance(new, DTensor)
        and new.shape == sharded.shape
        and new.placements == sharded.placements
        and new.device_mesh == sharded.device_mesh
    )


def _have_equal_shards(left: Any, right: Any) -> bool:
    """True for two sharded parameters with equal contents, as ``load_state_dict(assign=True)`` makes
    of one tied parameter."""
    if not (isinstance(left, DTensor) and isinstance(right, DTensor)):
        return False
    a, b = dtensor.local_tensor(left), dtensor.local_tensor(right)
    return a.shape == b.shape and a.dtype == b.dtype and a.device == b.device and torch.equal(a, b)
