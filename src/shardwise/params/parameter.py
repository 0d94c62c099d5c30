"""One parameter: sharded, unsharded, and how the unsharded one shadows the sharded one.

``module._parameters[name]`` is the sharded parameter, always the same object: optimizers, ``state_dict`` and
everything else that walks ``parameters()`` see it. While its group is unsharded, the unsharded parameter
stands in the module's instance dictionary, which Python looks up first, so that the module's own code
computes with it.

Version counters tie the two together, so that autograd's own check works through the sharding:

- an unsharded parameter has the version of its sharded parameter. If the weights were changed between forward
  and backward, backward raises, as it does in plain PyTorch;
- a freed unsharded parameter has the version ``FREED``, so that a backward that reaches it without an unshard
  raises instead of reading freed memory.
"""

import copy
import warnings
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from shardwise.layout.chunks import chunk_of, local_chunk
from shardwise.layout.fqns import clean
from shardwise.layout.mesh import ShardMesh
from shardwise.layout.precision import Precision
from shardwise.params.deferred import DeferredGradient, deferred_gradient
from shardwise.params.flat_slot import FLAT_SLOT, FlatSlot
from shardwise.params.replaced_parameter import NAME, ReplacedParameter, describe, have_equal_shards
from shardwise.torch_compat import autograd, dtensor, nn_modules, tensor_impl

if TYPE_CHECKING:
    from shardwise.params.initial_values import InitialChecksums

FREED = 2**31 - 1
"""The version of an unsharded parameter without contents; no tensor is changed that often."""


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

    What is sharded is the parameter's own tensor, or this rank's part of it where it is a DTensor of
    tensor or expert parallelism; ``shape`` is that of the tensor to be sharded.
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
        # Attributes that the caller has set; a tensor subclass keeps its contents in there as well.
        own = vars(original.detach())
        self.attributes = {name: value for name, value in vars(original).items() if name not in own}
        self.sharded = original  # until install_shard() replaces it
        self.unsharded: nn.Parameter | None = None
        self._full_class = type(original)
        self._inner = dtensor.spec_of(original) if isinstance(original, DTensor) else None
        self.shape = tuple(self.content().shape)
        self.local: Tensor = self.content()
        self._precision_for = precision_for
        self.precision = precision_for(original.dtype)
        if original.is_complex():
            dtensor.keep_views_of_complex_sharded()
        self._place = mesh.placements_of(original, dim, where)
        self._spec = self._make_spec(original.shape, original.dtype)
        self.gradient_spec = self._spec
        self._original = weakref.ref(original)
        self._flat_slot = FlatSlot()
        self.version_base = 0
        # The caller's hooks on the original. They stay in these dicts, so that a handle can remove them.
        self._original_hooks = autograd.gradient_hooks(original)
        self.original_post_hooks = autograd.post_accumulate_hooks(original)
        self._deferred: DeferredGradient | None = None
        self._shows_deferred = False  # whether .grad is the unreduced gradient itself
        self.compares = True  # whether to compare it with other ranks before training
        self.initial_checksums: InitialChecksums | None = None

    def content(self) -> Tensor:
        """The tensor to shard, before it is sharded."""
        return self.content_in(self.sharded.detach())

    def content_in(self, whole: Tensor) -> Tensor:
        """The tensor to shard of a tensor like the original: this rank's part, if that is a DTensor."""
        return dtensor.local_tensor(whole) if self._inner is not None else whole

    @property
    def fqn(self) -> str:
        """The name under which users know it."""
        return self.sites[0].fqn

    def rename(self, names: Mapping[nn.Module, str]) -> None:
        """Rename the sites, as seen from an outer module."""
        self.sites = [
            Site(s.module, s.name, ".".join(p for p in (clean(names[s.module]), s.name) if p))
            if s.module in names
            else s
            for s in self.sites
        ]
        self._mark()

    @property
    def joint_mesh(self) -> DeviceMesh:
        """The mesh of the sharded parameter: data parallel dims, and those of the original DTensor."""
        return self._place[0]

    @property
    def placements(self) -> tuple[Placement, ...]:
        """The placements of the sharded parameter on it."""
        return self._place[1]

    @property
    def is_tensor_parallel(self) -> bool:
        """True if modules see it as a DTensor."""
        return self._inner is not None

    def was_made_from(self, param: Tensor) -> bool:
        """True if ``param`` is our sharded parameter or the original it was made from."""
        return param is self.sharded or param is self._original()

    def stand_at(self, slot: FlatSlot) -> None:
        """The sharded parameter has ``slot`` in its bucket."""
        self._flat_slot = slot
        if self.sharded is not self._original():
            self._mark()

    def _mark(self) -> None:
        """Put the FQN on the sharded parameter and on the original, for messages; the slot on the former."""
        original = self._original()
        for tensor in (self.sharded, *([] if original is None else [original])):
            setattr(tensor, NAME, self.fqn)
        if self.sharded is not original:
            setattr(self.sharded, FLAT_SLOT, self._flat_slot)

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
        self._allow_gradients(self.sharded)

    def copied(self, sites: list[Site], sharded: nn.Parameter) -> "Param":
        """The same parameter in a copy of the model, with the sharded parameter ``sharded``."""
        twin = copy.copy(self)
        twin.sites, twin.sharded, twin.local = sites, sharded, dtensor.local_tensor(sharded)
        twin.unsharded = twin._deferred = None
        twin._shows_deferred = False
        twin._original_hooks = twin.original_post_hooks = None
        twin._allow_gradients(sharded)
        return twin

    def make_shard(self, local: Tensor) -> nn.Parameter:
        """The sharded parameter over ``local``; nothing is registered yet."""
        original = self.sharded
        sharded = dtensor.make_parameter(local, self._spec, original.requires_grad)
        vars(sharded).update(self.attributes)
        self._allow_gradients(sharded)
        return sharded

    def install_shard(self, sharded: nn.Parameter) -> None:
        """Register the sharded parameter at all sites. Cannot fail half-way."""
        for site in self.sites:
            nn_modules.parameters(site.module)[site.name] = sharded
        self.sharded, self.local = sharded, dtensor.local_tensor(sharded)
        self._mark()
        if (original := self._original()) is not None and type(original) is nn.Parameter:
            original.__class__ = ReplacedParameter

    def rebase(self, local: Tensor) -> None:
        """Give the sharded parameter the local tensor ``local``, which has the contents already.

        They count as newer than everything that was all-gathered before.
        """
        self.version_base = self.version() + 1
        dtensor.set_local_tensor(self.sharded, local)
        self.local = local
        self.describe_itself()

    def follow_dtype(self) -> None:
        """Follow a conversion of the sharded parameter to another dtype."""
        dtype = self.sharded.dtype
        if dtype != self.precision.stored:
            self.precision = self._precision_for(dtype)
            self._spec = self._make_spec(self.sharded.shape, dtype)
            self._allow_gradients(self.sharded)

    def _allow_gradients(self, sharded: nn.Parameter) -> None:
        kept = self.precision.kept
        self.gradient_spec = self._spec
        if kept != self.precision.stored:
            self.gradient_spec = self._make_spec(sharded.shape, kept)
            tensor_impl.set_grad_dtype(sharded, kept)

    def version(self) -> int:
        """A number that grows with every in-place change of the sharded parameter that torch counts."""
        return self.version_base + tensor_impl.version(self.sharded) + tensor_impl.version(self.local)

    def is_untouched(self) -> bool:
        """True if the sharded parameter is the same object over the same memory, and equally trainable."""
        sharded = self.sharded
        for site in self.sites:
            if nn_modules.parameters(site.module).get(site.name) is not sharded:
                return False
        if dtensor.local_tensor(sharded) is not self.local:
            return False
        return self.unsharded is None or self.unsharded.requires_grad == sharded.requires_grad

    def replaced_by(self) -> nn.Parameter | None:
        """The sharded parameter that is registered at the sites instead of ours, or None.

        Raises:
            RuntimeError: something else is registered there, or different tensors at tied sites.
        """
        found = [site.registered() for site in self.sites]
        if all(tensor is self.sharded for tensor in found):
            return None
        site, new = next((s, t) for s, t in zip(self.sites, found, strict=True) if t is not self.sharded)
        if new is None:
            raise RuntimeError(
                f"{site.fqn}: the parameter was removed after fully_shard (deleted, set to None, or replaced "
                "by a parametrization), but its group still gathers it. Put it back, or change the module "
                "before fully_shard."
            )
        if not self._can_adopt(new):
            raise RuntimeError(
                f"{site.fqn}: the parameter was replaced after fully_shard by {describe(new)}, where a "
                f"parameter sharded like the old one is expected: {describe(self.sharded)}. The group "
                "gathers shards and cannot use it. Copy values into the sharded parameter instead (under "
                "torch.no_grad(), param.copy_(torch.distributed.tensor.distribute_tensor(value, "
                "param.device_mesh, param.placements))), or replace parameters before fully_shard. "
                "torch.func.functional_call replaces them as well: it does not work on a sharded module."
            )
        for other_site, other in zip(self.sites, found, strict=True):
            if other is not new and not have_equal_shards(other, new):
                raise RuntimeError(
                    f"{site.fqn} and {other_site.fqn} are tied (one parameter under two names), but "
                    f"{site.fqn} alone was replaced. Replace both with the same parameter, or untie "
                    "them before fully_shard."
                )
        assert isinstance(new, nn.Parameter)
        return new

    def adopt(self, new: nn.Parameter) -> None:
        """Adopt ``new`` as the sharded parameter, at all sites: tied stays tied.

        Its contents count as newer than everything that was all-gathered before.
        """
        self.version_base = self.version() + 1
        for site in self.sites:
            nn_modules.parameters(site.module)[site.name] = new
        self.sharded = new
        self.describe_itself()

    def is_full_value(self, value: Any) -> bool:
        """True for a plain tensor of the full shape, as from a full state dict."""
        return (
            isinstance(value, Tensor) and not isinstance(value, DTensor) and value.shape == self.sharded.shape
        )

    def as_shard(self, value: Tensor) -> Tensor:
        """This rank's shard of a full value, as a DTensor like the sharded parameter. No communication."""
        if self._inner is not None:
            value = local_chunk(value, self._inner)
        if value.dim():
            value = chunk_of(value, self.dim, self.mesh.shard_axis.world, self.mesh.shard_axis.rank)
        return dtensor.make_dtensor(value, self._make_spec(self.sharded.shape, value.dtype))

    def describe_itself(self) -> None:
        """Restore what a conversion or an assignment has lost on the sharded parameter."""
        self._allow_gradients(self.sharded)
        for key, value in self.attributes.items():
            vars(self.sharded).setdefault(key, value)
        self._mark()

    def _can_adopt(self, new: Any) -> bool:
        assert isinstance(self.sharded, DTensor)
        return (
            isinstance(new, nn.Parameter)
            and isinstance(new, DTensor)
            and new.shape == self.sharded.shape
            and new.placements == self.sharded.placements
            and new.device_mesh == self.sharded.device_mesh
        )

    def _make_spec(self, shape: torch.Size, dtype: torch.dtype) -> Any:
        return dtensor.sharded_spec(*self._place, shape, dtype)

    # --- the unsharded parameter ------------------------------------------------------------------

    def make_unsharded(self, data: Tensor) -> None:
        """Make the unsharded parameter over ``data``, a tensor in the unsharded buffer."""
        self.unsharded = self.as_original(data)
        vars(self.unsharded).update(self.attributes)
        if self.precision.accumulated != self.precision.computed:
            tensor_impl.set_grad_dtype(self.unsharded, self.precision.accumulated)

    def make_unsharded_over(self, full: Tensor) -> None:
        """Make the unsharded parameter over a tensor of another class, made by its own protocol."""
        wants_grad = self.sharded.requires_grad
        if self._inner is not None:
            self.unsharded = dtensor.make_parameter(full.detach(), self._inner_spec(full.dtype), wants_grad)
        else:
            self.unsharded = nn.Parameter(full.detach(), wants_grad)
        for name, value in self.attributes.items():
            vars(self.unsharded).setdefault(name, value)
        if self.precision.accumulated != self.unsharded.dtype and self.unsharded.dtype.is_floating_point:
            tensor_impl.set_grad_dtype(self.unsharded, self.precision.accumulated)

    def as_original(self, data: Tensor) -> nn.Parameter:
        """A parameter over ``data`` with the class of the original, or its placements if it is a DTensor."""
        wants_grad = self.sharded.requires_grad
        if self._inner is not None:
            return dtensor.make_parameter(data, self._inner_spec(data.dtype), wants_grad)
        if self._full_class in (nn.Parameter, ReplacedParameter):
            return nn.Parameter(data, wants_grad)
        return tensor_impl.as_subclass_of_parameter(self._full_class, data, wants_grad)

    def _inner_spec(self, dtype: torch.dtype) -> Any:
        """The spec of the unsharded parameter on the tensor parallel mesh."""
        assert self._inner is not None
        shape = torch.Size(self.sharded.shape)
        return dtensor.sharded_spec(self._inner.mesh, self._inner.placements, shape, dtype)

    def as_seen_in_graphs(self, full: Tensor) -> Tensor:
        """``full`` as modules see it: a DTensor where the original is one."""
        if self._inner is None:
            return full
        whole = self._spec.tensor_meta
        return DTensor.from_local(
            full, self._inner.mesh, self._inner.placements, shape=whole.shape, stride=whole.stride
        )

    def unsharded_data(self) -> Tensor:
        """The local tensor of the unsharded parameter."""
        assert self.unsharded is not None
        return dtensor.local_tensor(self.unsharded) if self._inner is not None else self.unsharded

    def content_of(self, gradient: Tensor) -> Tensor:
        """The tensor to reduce of an unsharded gradient: this rank's part, placed as the parameter."""
        if self._inner is None or not isinstance(gradient, DTensor):
            return gradient
        wanted = list(self._inner.placements)
        if self.mesh.full_mesh is not None and gradient.device_mesh == self.mesh.full_mesh.mesh:
            # The reduction makes the sums over data parallel ranks.
            for index in self.mesh.full_mesh.data_parallel_dims:
                wanted[index] = gradient.placements[index]
        if tuple(wanted) != gradient.placements:
            gradient = gradient.redistribute(placements=wanted)
        return dtensor.local_tensor(gradient)

    @property
    def has_own_class(self) -> bool:
        """True if the original was of a subclass of ``nn.Parameter``."""
        return self._inner is None and self._full_class not in (nn.Parameter, ReplacedParameter)

    @property
    def has_hooks_of_original(self) -> bool:
        """True if the caller had put hooks on the original."""
        return bool(self._original_hooks) or bool(self.original_post_hooks)

    def attach_hooks_to_unsharded(self) -> None:
        """Run gradient hooks of the original on this rank's unsharded gradient, before it is reduced."""
        assert self.unsharded is not None
        if self._original_hooks is not None:
            self.unsharded.register_hook(partial(autograd.run_gradient_hooks, self._original_hooks))

    # --- the gradient -----------------------------------------------------------------------------

    def add_gradient(self, local: Tensor) -> None:
        """Accumulate a sharded gradient into ``.grad``, and run the hooks of the sharded parameter."""
        sharded = self.sharded
        gradient: Tensor = dtensor.make_dtensor(local, self.gradient_spec)
        if hooks := autograd.gradient_hooks(sharded):
            gradient = autograd.run_gradient_hooks(hooks, gradient)
        shows_deferred, self._shows_deferred = self._shows_deferred, False
        self._deferred = None  # it holds memory
        if sharded.grad is None or shows_deferred:
            sharded.grad = gradient
        else:
            self._accumulate(dtensor.local_tensor(gradient))
        for hooks in (self.original_post_hooks, autograd.post_accumulate_hooks(sharded)):
            for post in list(hooks.values()) if hooks else ():
                post(sharded)

    def set_gradient(self, local: Tensor | None) -> None:
        """Set ``.grad`` to ``local`` without running hooks."""
        if local is None:
            self.sharded.grad = None
            return
        own = torch.empty(self.local.shape, dtype=self.precision.kept, device=self.local.device)
        self.sharded.grad = dtensor.make_dtensor(own.copy_(local), self.gradient_spec)

    def defer_gradient(self, full: Tensor | None) -> None:
        """Leave the unsharded gradient ``full`` unreduced, and notice if the caller clears ``.grad``.

        If all of it belongs to this rank, ``.grad`` shows it; else zeros, unless there is a sharded gradient.
        """
        sharded = self.sharded
        if sharded.grad is None:
            own = None if full is None else self.content_of(full)
            self._shows_deferred = own is not None and self._may_show(own)
            if own is None or not self._shows_deferred:
                own = torch.zeros_like(self.local, dtype=self.precision.kept)
            sharded.grad = dtensor.make_dtensor(own.detach(), self.gradient_spec)
        sharded.grad = self._deferred = deferred_gradient(sharded.grad)

    @property
    def remembers_deferred(self) -> bool:
        """True while ``.grad`` represents an unreduced gradient."""
        return self._deferred is not None or self._shows_deferred

    def _may_show(self, own: Tensor) -> bool:
        return (
            type(own) is Tensor
            and self.mesh.shard_axis.is_alone
            and own.is_contiguous()
            and (own.shape, own.dtype) == (self.local.shape, self.precision.kept)
            and own.device == self.local.device
        )

    def hide_deferred(self) -> None:
        """Stop showing the unreduced gradient in ``.grad``: it is dropped."""
        if self._shows_deferred:
            self._shows_deferred = False
            self.sharded.grad = self._deferred = None

    def was_cleared(self) -> bool:
        """Whether the caller cleared ``.grad`` since the gradient was deferred."""
        deferred, self._deferred = self._deferred, None
        if deferred is None:
            return False
        if self.sharded.grad is not deferred:
            self._shows_deferred = False
            return True
        if not isinstance(deferred, DeferredGradient):
            return False  # converted by .to(), which swaps what a tensor is
        if deferred.changes.is_changed and not deferred.changes.is_zeroed and not self._shows_deferred:
            warnings.warn(
                f"{self.fqn}: .grad was changed in place while gradients of backward passes without "
                "synchronisation (set_requires_gradient_sync(False)) wait to be reduced. The change does "
                "not apply to them; they will be added to it. Synchronise in the last backward before "
                "changing .grad.",
                stacklevel=2,
            )
        if deferred.changes.is_zeroed:
            self._shows_deferred = False
        return deferred.changes.is_zeroed

    def _accumulate(self, local: Tensor) -> None:
        existing = self.sharded.grad
        if not isinstance(existing, DTensor):
            raise RuntimeError(
                f"{self.fqn}: .grad is {describe(existing)}, where a DTensor is expected; a reduced "
                "gradient cannot be added to it. Assign only DTensors sharded as the parameter to "
                ".grad, or None."
            )
        if existing.placements != self._spec.placements:
            # Left by autograd, where the loss used the sharded parameter itself.
            existing = self.sharded.grad = existing.redistribute(placements=self._spec.placements)
        elif isinstance(existing, DeferredGradient):
            existing = dtensor.make_dtensor(dtensor.local_tensor(existing), self.gradient_spec)
            self.sharded.grad = existing
        dtensor.local_tensor(existing).add_(local)
