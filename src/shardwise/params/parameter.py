"""One parameter: sharded, unsharded, how the unsharded one shadows the sharded one, and ``.grad``.

``module._parameters[name]`` is the sharded parameter, always the same object: optimizers, ``state_dict`` and
everything else that walks ``parameters()`` see it. While its group is unsharded, the unsharded parameter is
in the module's instance dictionary, where Python looks first, so the module's code computes with it.

Version counters tie the two together, so that autograd's check works through the sharding:

- an unsharded parameter has the version of its sharded parameter. If the weights were changed between forward
  and backward, backward raises, as in plain PyTorch;
- a freed unsharded parameter has the version ``FREED``, so that a backward that reaches it without an unshard
  raises instead of reading freed memory.
"""

import copy
import warnings
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwise.layout.chunks import chunk_of, local_chunk
from shardwise.layout.fqns import clean, joined
from shardwise.layout.mesh import ShardMesh
from shardwise.layout.nested import find_tensors
from shardwise.layout.precision import Precision
from shardwise.torch_compat import autograd, dtensor, nn_modules, pytree, tensor_impl

NAME = "_shardwise_name"


def mark_replaced(full: nn.Parameter, fqn: str) -> None:
    """``full`` is no longer registered: make it refuse training."""
    if type(full) is nn.Parameter:
        full.grad = None
        setattr(full, NAME, fqn)
        full.__class__ = ReplacedParameter


# --- full parameters that a shard has replaced ----------------------------------------------------


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


PLACE = "_shardwise_place"
"""The attribute of a sharded parameter that leads to its bucket, and its index there."""

FREED = 2**31 - 1
"""The version of an unsharded parameter without contents; no tensor is changed that often."""

DEFERRED: "weakref.WeakSet[Param]" = weakref.WeakSet()
"""Parameters with a deferred ``.grad``: while there are none, no step needs to check each ``.grad``."""

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Site:
    """A place where a parameter is registered; a tied parameter has several."""

    module: nn.Module
    name: str
    fqn: str

    def registered(self) -> Tensor | None:
        """The tensor that is registered there now."""
        return nn_modules.registered(self.module, self.name)


class Param:
    """A parameter of a group: the sharded one, ``sharded``, and the unsharded one, ``unsharded``.

    ``local`` is this rank's shard, the local tensor of ``sharded`` and a view into its bucket's flat shard.
    Until ``install_shard``, ``sharded`` is the original parameter, and ``local`` its whole content.

    The tensor to shard is the parameter's, or this rank's part of it if it is a DTensor of tensor or expert
    parallelism; ``shape`` is its shape.

    Unsharded parameters are made like the original: of its class, with its attributes and hooks, and, for a
    DTensor, its placements. The original is not kept alive.
    """

    def __init__(
        self,
        original: nn.Parameter,
        sites: list[Site],
        mesh: ShardMesh,
        dim: int,
        precision_for: Callable[[torch.dtype], Precision],
        where: str,
    ) -> None:
        self.sites = sites
        self.mesh = mesh
        self.dim = dim
        self.original = weakref.ref(original)
        self.attributes = tensor_impl.own_attributes(original)
        self._class = type(original)
        self._original_spec = dtensor.spec_of(original) if isinstance(original, DTensor) else None
        # The caller's hooks stay in these dicts, so that a handle can remove them.
        self._original_hooks = autograd.gradient_hooks(original)
        self.original_post_hooks = autograd.post_accumulate_hooks(original)
        self.sharded = original  # until install_shard() replaces it
        self.unsharded: nn.Parameter | None = None
        self.shape = tuple(self.content().shape)
        self.local: Tensor = self.content()
        self.storage: int | None = None  # of the sharded parameter, which an assignment to .data replaces
        self._precision_for = precision_for
        self.precision = precision_for(original.dtype)
        if original.is_complex():
            dtensor.keep_views_of_complex_sharded()
        # Of the sharded parameter: data parallel mesh dims, and those of an original DTensor.
        self.joint_mesh, self.placements = mesh.placements_of(original, dim, where)
        self._spec = dtensor.sharded_spec(self.joint_mesh, self.placements, original.shape, original.dtype)
        self.gradient_spec = self._spec
        self._deferred: Tensor | None = None  # .grad that stands for unreduced gradients
        self._reduced: Tensor | None = None  # .grad without them
        self._place: Any = (None, 0)  # in a bucket: a weak reference, and an index
        self.version_base = 0
        self.compares = True  # whether to compare it with other ranks before training
        # Of the whole and of this rank's shard, from when it was sharded; None without values to compare.
        self.initial_checksums: tuple[Tensor, Tensor] | None = None
        self.full_load: str | None = None  # a checksum of the full value that load_state_dict gave this rank

    def content(self) -> Tensor:
        """The tensor to shard, before it is sharded."""
        return self.content_in(self.sharded.detach())

    def content_in(self, whole: Tensor) -> Tensor:
        """The tensor to shard of a tensor like the original: this rank's part if that is a DTensor."""
        return whole if self._original_spec is None else dtensor.local_tensor(whole)

    @property
    def fqn(self) -> str:
        """The name under which users know it."""
        return self.sites[0].fqn

    def rename(self, names: Mapping[nn.Module, str]) -> None:
        """Rename the sites, as seen from an outer module."""
        self.sites = [
            Site(s.module, s.name, joined(clean(names[s.module]), s.name)) if s.module in names else s
            for s in self.sites
        ]
        self._mark()

    def was_made_from(self, param: Tensor) -> bool:
        """True if ``param`` is our sharded parameter or the original it was made from."""
        return param is self.sharded or param is self.original()

    def mark(self, place: Any) -> None:
        """Put ``place``, a weak reference and an index, on the sharded parameter and its replacements."""
        self._place = place
        if self.sharded is not self.original():
            self._mark()

    def _mark(self) -> None:
        """Put the FQN on the sharded parameter and on the original, for messages; the place on the former."""
        original = self.original()
        for tensor in (self.sharded, *([] if original is None else [original])):
            setattr(tensor, NAME, self.fqn)
        if self.sharded is not original:
            setattr(self.sharded, PLACE, self._place)

    # --- the sharded parameter --------------------------------------------------------------------

    def take_over(
        self, sites: list[Site], mesh: ShardMesh, precision_for: Callable[[torch.dtype], Precision]
    ) -> None:
        """Move to another group over the same ranks, with additional ``sites``."""
        self.sites = [*self.sites, *sites]
        for site in sites:
            nn_modules.parameters(site.module)[site.name] = self.sharded  # type: ignore[assignment]
        self.mesh = mesh
        self._precision_for = precision_for
        self.precision = precision_for(self.sharded.dtype)
        self.unsharded = None
        self._set_gradient_dtype(self.sharded)

    def copied(self, sites: list[Site], sharded: nn.Parameter) -> "Param":
        """The same parameter in a copy of the model, with the sharded parameter ``sharded``.

        The original's hooks are not copied.
        """
        twin = copy.copy(self)
        twin.sites, twin.sharded, twin.local = sites, sharded, dtensor.local_tensor(sharded)
        twin.unsharded = twin.storage = None
        twin._original_hooks = twin.original_post_hooks = None
        twin._deferred = twin._reduced = None
        twin._set_gradient_dtype(sharded)
        return twin

    def make_shard(self, local: Tensor) -> nn.Parameter:
        """The sharded parameter over ``local``; nothing is registered yet."""
        original = self.sharded
        sharded = dtensor.make_parameter(local, self._spec, original.requires_grad)
        dtensor.set_local_tensor(sharded, local)  # itself: nn.Parameter has detached it
        vars(sharded).update(self.attributes)
        self._set_gradient_dtype(sharded)
        return sharded

    def install_shard(self, sharded: nn.Parameter) -> None:
        """Register the sharded parameter at all sites. Cannot fail halfway."""
        for site in self.sites:
            nn_modules.parameters(site.module)[site.name] = sharded
        self.sharded, self.local = sharded, dtensor.local_tensor(sharded)
        self.storage = tensor_impl.storage_address(sharded)
        self._mark()
        if (original := self.original()) is not None and type(original) is nn.Parameter:
            original.__class__ = ReplacedParameter

    def rebase(self, local: Tensor) -> None:
        """Give the sharded parameter the local tensor ``local``, which already has the contents.

        They count as newer than any earlier all-gather.
        """
        self.version_base = self.version() + 1
        dtensor.set_local_tensor(self.sharded, local)
        self.local = local
        self.restore_metadata()

    def adopt_dtype(self) -> None:
        """Adopt a conversion of the sharded parameter to another dtype."""
        dtype = self.sharded.dtype
        if dtype != self.precision.stored:
            self.precision = self._precision_for(dtype)
            self._spec = self._make_spec(dtype)
            self._set_gradient_dtype(self.sharded)

    def _set_gradient_dtype(self, sharded: nn.Parameter) -> None:
        kept = self.precision.kept
        self.gradient_spec = self._spec
        if kept != self.precision.stored:
            self.gradient_spec = self._make_spec(kept)
            tensor_impl.set_grad_dtype(sharded, kept)

    def version(self) -> int:
        """A number that grows with every in-place change of the sharded parameter that torch counts."""
        return self.version_base + tensor_impl.version(self.sharded) + tensor_impl.version(self.local)

    def find_replacement(self) -> nn.Parameter | None:
        """The sharded parameter that is registered at the sites instead of ours, or None.

        Raises:
            RuntimeError: something else is registered there, or tied sites have different tensors.
        """
        found = [site.registered() for site in self.sites]
        if all(tensor is self.sharded for tensor in found):
            return None
        site, new = next((s, t) for s, t in zip(self.sites, found, strict=True) if t is not self.sharded)
        if new is None:
            raise RuntimeError(
                f"{site.fqn}: the parameter was removed after fully_shard, but its group still unshards it. "
                "Put it back, or change the module (parametrize it, say) before fully_shard."
            )
        if not _can_replace(new, self.sharded):
            raise RuntimeError(
                f"{site.fqn}: the parameter was replaced after fully_shard by {describe(new)}, where a "
                f"parameter sharded like the old one is expected: {describe(self.sharded)}. Copy values into "
                "the sharded parameter instead (under torch.no_grad(), param.copy_(distribute_tensor(value, "
                "param.device_mesh, param.placements))), or replace parameters before fully_shard. "
                "torch.func.functional_call replaces them as well: it does not work on a sharded module."
            )
        for other_site, other in zip(self.sites, found, strict=True):
            if other is not new and not _have_equal_shards(other, new):
                raise RuntimeError(
                    f"{site.fqn} and {other_site.fqn} are tied, but {site.fqn} alone was replaced. Replace "
                    "both with the same parameter, or untie them before fully_shard."
                )
        kept = [each.fqn for each, tensor in zip(self.sites, found, strict=True) if tensor is self.sharded]
        if kept:
            warnings.warn(
                f"{site.fqn} and {kept[0]} are tied, but {site.fqn} alone was replaced, by a parameter with "
                "the same values. They stay tied: the new one stands under both names from now on. Untie "
                "them before fully_shard.",
                stacklevel=2,
            )
        assert isinstance(new, nn.Parameter)
        return new

    def adopt(self, new: nn.Parameter) -> None:
        """Adopt ``new`` as the sharded parameter, at all sites: tied stays tied.

        Its contents count as newer than any earlier all-gather.
        """
        self.version_base = self.version() + 1
        for site in self.sites:
            nn_modules.parameters(site.module)[site.name] = new
        self.sharded, self.storage = new, tensor_impl.storage_address(new)
        self.restore_metadata()

    def is_full_value(self, value: Any) -> bool:
        """True for a plain tensor of the full shape, as from a full state dict."""
        return (
            isinstance(value, Tensor) and not isinstance(value, DTensor) and value.shape == self.sharded.shape
        )

    def as_shard(self, value: Tensor) -> Tensor:
        """This rank's shard of a full value, as a DTensor like the sharded parameter. No communication."""
        if self._original_spec is not None:
            value = local_chunk(value, self._original_spec)
        if value.dim():
            value = chunk_of(value, self.dim, self.mesh.shard_axis.world, self.mesh.shard_axis.rank)
        return dtensor.make_dtensor(value, self._make_spec(value.dtype))

    def restore_metadata(self) -> None:
        """Restore metadata that the sharded parameter lost in a conversion or assignment."""
        dtensor.restore_mesh(self.sharded, self.joint_mesh)
        self._set_gradient_dtype(self.sharded)
        for key, value in self.attributes.items():
            vars(self.sharded).setdefault(key, value)
        self._mark()

    def _make_spec(self, dtype: torch.dtype) -> Any:
        return dtensor.sharded_spec(self.joint_mesh, self.placements, self._spec.shape, dtype)

    # --- the unsharded parameter ------------------------------------------------------------------

    @property
    def is_tensor_parallel(self) -> bool:
        """True if modules see a DTensor."""
        return self._original_spec is not None

    @property
    def has_own_class(self) -> bool:
        """True if the original was of a subclass of ``nn.Parameter``."""
        return not self.is_tensor_parallel and self._class not in (nn.Parameter, ReplacedParameter)

    @property
    def has_original_hooks(self) -> bool:
        """True if the caller has put hooks on the original."""
        return bool(self._original_hooks) or bool(self.original_post_hooks)

    def make_unsharded(self, data: Tensor, *, keeps_class: bool = False) -> None:
        """Make the unsharded parameter over ``data``, a tensor in the unsharded buffer.

        ``keeps_class``: it is of another class, made by its own protocol.
        """
        make = self._over if keeps_class else self.like_original
        self.unsharded = full = make(data, self.sharded.requires_grad)
        for name, value in self.attributes.items():
            vars(full).setdefault(name, value)
        if self.precision.accumulated != full.dtype and full.dtype.is_floating_point:
            tensor_impl.set_grad_dtype(full, self.precision.accumulated)

    def like_original(self, data: Tensor, requires_grad: bool) -> nn.Parameter:
        """A parameter over ``data`` with the class of the original, or its placements if it is a DTensor."""
        if self.has_own_class:
            return tensor_impl.as_subclass_of_parameter(self._class, data, requires_grad)
        return self._over(data, requires_grad)

    def _over(self, data: Tensor, requires_grad: bool) -> nn.Parameter:
        if (own := self._original_spec) is None:
            return nn.Parameter(data, requires_grad)
        spec = dtensor.sharded_spec(own.mesh, own.placements, self._spec.shape, data.dtype)
        return dtensor.make_parameter(data, spec, requires_grad)

    def as_seen_in_graphs(self, full: Tensor) -> Tensor:
        """``full`` as modules see it: a DTensor if the original is one."""
        if (own := self._original_spec) is None:
            return full
        shape, stride = self._spec.shape, self._spec.stride
        return DTensor.from_local(full, own.mesh, own.placements, shape=shape, stride=stride)

    def unsharded_data(self) -> Tensor:
        """The local tensor of the unsharded parameter."""
        assert self.unsharded is not None
        return self.content_in(self.unsharded)

    def attach_original_hooks(self, unsharded: nn.Parameter) -> None:
        """Run the caller's gradient hooks on this rank's unsharded gradient, before it is reduced."""
        if self._original_hooks is not None:
            unsharded.register_hook(partial(autograd.run_gradient_hooks, self._original_hooks))

    def gradient_to_reduce(self, gradient: Tensor) -> Tensor:
        """This rank's part of an unsharded gradient, to be reduced, placed as the original is."""
        if self._original_spec is None or not isinstance(gradient, DTensor):
            return gradient
        wanted, full_mesh = list(self._original_spec.placements), self.mesh.full_mesh
        if full_mesh is not None and gradient.device_mesh == full_mesh.mesh:
            # The reduction sums over data-parallel ranks.
            for index in full_mesh.data_parallel_dims:
                wanted[index] = gradient.placements[index]
        if tuple(wanted) != gradient.placements:
            gradient = gradient.redistribute(placements=wanted)
        return dtensor.local_tensor(gradient)

    # --- .grad of the sharded parameter -----------------------------------------------------------
    #
    # Reduced gradients are added to it. While unsharded ones wait to be reduced, it stands for them, so
    # that the caller can clear them.

    def add_gradient(self, local: Tensor) -> None:
        """Add a reduced gradient to ``.grad``, and run the hooks of the sharded parameter."""
        sharded = self.sharded
        gradient: Tensor = dtensor.make_dtensor(local, self.gradient_spec)
        if hooks := autograd.gradient_hooks(sharded):
            gradient = autograd.run_gradient_hooks(hooks, gradient)
        self.show_reduced_gradient()
        if sharded.grad is None:
            sharded.grad = gradient
        else:
            self._accumulate_gradient(dtensor.local_tensor(gradient))
        for hooks in (self.original_post_hooks, autograd.post_accumulate_hooks(sharded)):
            for post in list(hooks.values()) if hooks else ():
                post(sharded)

    def _accumulate_gradient(self, local: Tensor) -> None:
        sharded, spec = self.sharded, self.gradient_spec
        existing = sharded.grad
        if not isinstance(existing, DTensor):
            raise RuntimeError(
                f"{self.fqn}: .grad is {describe(existing)}, where a DTensor is expected; a reduced "
                "gradient cannot be added to it. Assign only DTensors sharded as the parameter to "
                ".grad, or None."
            )
        if existing.placements != spec.placements:
            # From autograd, if the loss used the sharded parameter.
            existing = sharded.grad = existing.redistribute(placements=spec.placements)
        dtensor.local_tensor(existing).add_(local)

    def set_gradient(self, local: Tensor | None) -> None:
        """Set ``.grad`` to ``local`` without running hooks."""
        if local is None:
            self.sharded.grad = None
            return
        own = torch.empty(self.local.shape, dtype=self.precision.kept, device=self.local.device)
        self.sharded.grad = dtensor.make_dtensor(own.copy_(local), self.gradient_spec)

    def defer_gradient(self) -> None:
        """Make ``.grad`` stand for an unreduced gradient."""
        if self._deferred is None or self.sharded.grad is not self._deferred:
            self._reduced = self.sharded.grad
            local = DeferredGradient.make(
                weakref.ref(self), self.fqn, self.local.shape, self.precision.kept, self.local.device
            )
            self.sharded.grad = self._deferred = dtensor.make_dtensor(local, self.gradient_spec)
            DEFERRED.add(self)

    @property
    def is_deferred(self) -> bool:
        """True while ``.grad`` stands for an unreduced gradient."""
        return self._deferred is not None

    @property
    def reduced_gradient(self) -> Tensor | None:
        """``.grad`` without unreduced gradients."""
        return self.sharded.grad if self._deferred is None else self._reduced

    def show_reduced_gradient(self) -> None:
        """Show the reduced gradient again, after the unreduced one was reduced or dropped."""
        if self._deferred is not None and self.sharded.grad is self._deferred:
            self.sharded.grad = self._converted(self._deferred)
        self._forget_deferred()

    def zero_gradient(self) -> None:
        """The caller has zeroed ``.grad`` in place; record it for ``gradient_was_cleared``."""
        if self._deferred is not None and self.sharded.grad is self._deferred:
            self.reduced_local(self._deferred).zero_()
            self.sharded.grad = self._reduced

    def reduced_local(self, like: Tensor) -> Tensor:
        """The local tensor of the reduced gradient, to add to; with the dtype and device of ``like``."""
        self._reduced = self._converted(like)
        if self._reduced is None:
            zeros = torch.zeros(self.local.shape, dtype=like.dtype, device=like.device)
            self._reduced = dtensor.make_dtensor(zeros, self.gradient_spec)
        return dtensor.local_tensor(self._reduced)

    def _converted(self, like: Tensor) -> Tensor | None:
        """The reduced gradient, converted as ``module.to()`` has converted ``like``."""
        return None if self._reduced is None else self._reduced.to(like.device, like.dtype)

    def gradient_was_cleared(self) -> bool:
        """Whether the caller cleared ``.grad`` since the gradient was deferred."""
        gradient = self.sharded.grad
        if self._deferred is None or gradient is self._deferred:
            return False
        if gradient is not None and gradient is not self._reduced:
            warnings.warn(
                f"{self.fqn}: .grad was replaced while gradients of backward passes without "
                "synchronisation (set_requires_gradient_sync(False)) wait to be reduced. They are "
                "dropped, as if it had been set to None. Synchronise in the last backward before "
                "replacing .grad.",
                stacklevel=2,
            )
        self._forget_deferred()
        return True

    def _forget_deferred(self) -> None:
        self._deferred = self._reduced = None
        DEFERRED.discard(self)


def _can_replace(new: Any, sharded: Any) -> bool:
    return (
        isinstance(new, nn.Parameter)
        and isinstance(new, DTensor)
        and new.shape == sharded.shape
        and new.placements == sharded.placements
        and new.device_mesh == sharded.device_mesh
    )


def _have_equal_shards(left: Any, right: Any) -> bool:
    """True for two sharded parameters with equal contents, such as ``load_state_dict(assign=True)`` makes
    from one tied parameter."""
    if not (isinstance(left, DTensor) and isinstance(right, DTensor)):
        return False
    a, b = dtensor.local_tensor(left), dtensor.local_tensor(right)
    return a.shape == b.shape and a.dtype == b.dtype and a.device == b.device and torch.equal(a, b)


# --- a .grad that stands for unreduced gradients ---------------------------------------------------


class DeferredGradient(Tensor):
    """The local tensor of a ``.grad`` that stands for unsharded gradients waiting to be reduced.

    The caller cannot see those, but ``zero_grad()`` must clear them as well. A ``.grad`` set to None is easy
    to detect; one zeroed in place is not: torch counts no versions for foreach operations on DTensors, nor
    through ``.data``. So this tensor has no values, and intercepts operations on it: it can be zeroed, added
    to, as by autograd, and moved to another dtype or device. All others raise an error, instead of reading
    zeros or a part of the sum.
    """

    _owner: "weakref.ref[Param]"  # weak: Python's collector cannot see references from .grad
    _fqn: str

    @classmethod
    def make(
        cls,
        owner: "weakref.ref[Param]",
        fqn: str,
        shape: torch.Size,
        dtype: torch.dtype,
        device: torch.device,
    ) -> "DeferredGradient":
        """One that forwards operations on it to ``owner``, a Param."""
        made = tensor_impl.without_values(cls, shape, dtype, device)
        made._owner, made._fqn = owner, fqn
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        """Name the parameter."""
        return f"<unreduced gradient of {self._fqn}>"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Forward to the owner what it can follow, or make another like this."""
        kwargs = kwargs or {}
        if func is aten._foreach_zero_.default:
            for each in args[0]:
                each.zero_()
            return None
        found = next(
            each for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, DeferredGradient)
        )
        owner = found._owner()
        if func is aten.zero_.default:
            if owner is not None:
                owner.zero_gradient()
            return found
        if func is aten.add_.Tensor and found is args[0] and owner is not None and owner.is_deferred:
            owner.reduced_local(found).add_(*args[1:], **kwargs)
            return found
        if func is aten.detach.default or func is aten._to_copy.default:
            dtype, device = kwargs.get("dtype") or found.dtype, kwargs.get("device") or found.device
            return cls.make(found._owner, found._fqn, found.shape, dtype, device)
        raise RuntimeError(found._refusal())

    def _refusal(self) -> str:
        return (
            f"{self._fqn}: gradients of backward passes without synchronisation (no_sync, "
            "set_requires_gradient_sync(False), set_requires_all_reduce(False)) wait to be reduced; .grad "
            "does not contain them yet. Run the last backward with synchronisation before .grad is read or "
            "changed, gradients are clipped or an optimizer steps; or call zero_grad()."
        )


def refuse_deferred(gradient: Tensor) -> None:
    """Raise the error of a ``.grad`` that stands for an unreduced gradient, before anything changes."""
    if isinstance(local := dtensor.plain(gradient), DeferredGradient):
        raise RuntimeError(local._refusal())
