"""The sharded parameters of a group, as it last saw them, and the caller's changes since.

Between passes the shards belong to the caller, who may replace, move, cast, freeze, unfreeze, rename and hook
them. ``are_untouched`` looks for changes before the group communicates; only if it finds one does the group
look closely (``ParameterGroup.adopt_changes``).

Twelve calls of a Python function cost as much as a collective of a small group. So each check at every
unshard is one ``map`` over the group, which runs in C.
"""

from collections.abc import Mapping, Sequence
from operator import add, attrgetter, is_, is_not

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise.buckets.bucket import Bucket
from shardwise.layout.fqns import clean, listed
from shardwise.params.parameter import Param
from shardwise.torch_compat import autograd, dtensor, nn_modules, tensor_impl

_is_on_meta = attrgetter("flat_shard.bytes.is_meta")
_local = attrgetter("local")
_wants_gradient = attrgetter("requires_grad")


class Shards:
    """The sharded parameters of the group ``name``, in ``buckets`` by mesh, for computation on ``device``."""

    def __init__(self, name: str, buckets: list[Bucket], device: torch.device) -> None:
        self.name = name
        self.buckets = buckets
        self.device = device
        self.take_stock()

    def take_stock(self) -> None:
        """Start over with the current parameters of the buckets."""
        self.params: list[Param] = [param for bucket in self.buckets for param in bucket.params]
        self.are_replicated = any(not bucket.mesh.replicate_axis.is_alone for bucket in self.buckets)
        self.is_tensor_parallel = any(param.is_tensor_parallel for param in self.params)
        self.are_offloaded = any(bucket.is_offloaded for bucket in self.buckets)
        modules = dict.fromkeys(site.module for param in self.params for site in param.sites)
        self.rnns = [module for module in modules if isinstance(module, nn.RNNBase)]
        """Modules that keep their own list of the shown parameters."""
        self._is_known = False  # before their first unshard
        self._look_at(())

    # --- changes ----------------------------------------------------------------------------------

    def look(self) -> None:
        """Record the current parameters, until the next look."""
        self._is_known = True
        self._look_at(self.params)

    def _look_at(self, params: Sequence[Param]) -> None:
        places = [(site, param) for param in params for site in param.sites]
        self._registered = [nn_modules.parameters(site.module) for site, _ in places]
        self._names = [site.name for site, _ in places]
        self._standing = [param.sharded for _, param in places]
        self._sharded = [param.sharded for param in params]
        self._locals = [param.local for param in params]
        for param in params:
            param.storage = tensor_impl.storage_address(param.sharded)
        self._storages = [param.storage for param in params]
        self._original_post_hooks = [param.original_post_hooks for param in params]
        self._trained = [param.sharded.requires_grad for param in params]
        self._version_bases = [param.version_base for param in params]
        self._has_version_bases = any(self._version_bases)
        self.are_frozen = not any(self._trained)

    def are_untouched(self, unsharded: Sequence[nn.Parameter]) -> bool:
        """True if each is registered where it was, over the same memory, with the same ``requires_grad``,
        which the ``unsharded`` parameters, if any, share."""
        if not self._is_known:
            return False
        standing = map(dict.get, self._registered, self._names)
        with tensor_impl.plain_access():
            return (
                all(map(is_, standing, self._standing))
                and all(map(is_, map(dtensor.local_tensor, self._sharded), self._locals))
                and list(map(tensor_impl.storage_address, self._sharded)) == self._storages
                and list(map(_wants_gradient, self._sharded)) == self._trained
                and (not unsharded or list(map(_wants_gradient, unsharded)) == self._trained)
            )

    def refuse_assigned_data(self) -> None:
        """Refuse ``param.data = values``, once: it has no effect, since a DTensor takes nothing of it."""
        names = []
        for param in self.params:
            before, param.storage = param.storage, tensor_impl.storage_address(param.sharded)
            if before not in (None, param.storage) and dtensor.local_tensor(param.sharded) is param.local:
                names.append(param.fqn)
        if names:
            raise RuntimeError(
                f"{listed(names)}: .data was assigned, which has no effect on a DTensor: torch keeps its old "
                "values. Change them in place, under torch.no_grad(): param.copy_(values), say; or assign a "
                "new parameter."
            )

    def are_as_trainable(self) -> bool:
        """True if none was frozen or unfrozen."""
        with tensor_impl.plain_access():
            return list(map(_wants_gradient, self._sharded)) == self._trained

    def are_as(self, versions: list[int]) -> bool:
        """True if their ``versions`` are these, and none was replaced, frozen or unfrozen."""
        found = map(dict.get, self._registered, self._names)
        version = tensor_impl.version
        with tensor_impl.plain_access():
            if not all(map(is_, found, self._standing)):
                return False
            if list(map(_wants_gradient, self._sharded)) != self._trained:
                return False
            counted = map(add, map(version, self._sharded), map(version, self._locals))
            return list(map(add, counted, self._version_bases)) == versions

    def versions(self) -> list[int]:
        """A number for each, which grows with every in-place change that torch counts."""
        with tensor_impl.plain_access():
            counted = list(
                map(add, map(tensor_impl.version, self._sharded), map(tensor_impl.version, self._locals))
            )
        return list(map(add, counted, self._version_bases)) if self._has_version_bases else counted

    def have_no_gradient_hooks(self) -> bool:
        """True if none has gradient hooks."""
        with tensor_impl.plain_access():
            return not (
                any(self._original_post_hooks)
                or any(map(autograd.gradient_hooks, self._sharded))
                or any(map(autograd.post_accumulate_hooks, self._sharded))
            )

    def are_elsewhere(self) -> bool:
        """True if some have no values yet, or lie outside the flat shards."""
        standing = map(dtensor.local_tensor, [param.sharded for param in self.params])
        return any(map(_is_on_meta, self.buckets)) or any(map(is_not, standing, map(_local, self.params)))

    def adopt_replaced(self) -> None:
        """Adopt parameters that the caller has registered in place of ours."""
        replacements = [(param, param.find_replacement()) for param in self.params]
        _refuse_new_ties(replacements)
        for param, new in replacements:
            if new is not None:
                param.adopt(new)

    def replaced(self) -> list[str]:
        """Names of parameters that the caller has replaced by ones sharded alike; refuses others."""
        return [param.fqn for param in self.params if param.find_replacement() is not None]

    def are_all_here(self) -> bool:
        """True if the modules hold shards on the group's devices, and tied ones are the same object."""
        for bucket in self.buckets:
            here = (bucket.storage.device, self.device)
            for param in bucket.params:
                found = [site.registered() for site in param.sites]
                if any(t is param.sharded for t in found) and any(t is not param.sharded for t in found):
                    return False  # a load has not reached its other module yet
                for tensor in found:
                    if not (isinstance(tensor, DTensor) and dtensor.local_tensor(tensor).device in here):
                        return False
        return True

    def rename(self, names: Mapping[nn.Module, str], modules: Sequence[nn.Module]) -> None:
        """Adopt the names that an outer module has, where ``names`` has them; ``modules`` name the group."""
        found = [clean(names[module]) for module in modules if module in names]
        if len(found) == len(modules):
            self.name = ", ".join(found)
        for param in self.params:
            param.rename(names)

    # --- the meta device --------------------------------------------------------------------------

    def on_meta(self) -> list[str]:
        """Names of parameters on the meta device, which have no values yet."""
        return [param.fqn for param in self.params if param.sharded.is_meta]

    def refuse_meta(self) -> None:
        """Refuse to run while parameters are on the meta device."""
        if names := self.on_meta():
            raise RuntimeError(f"Cannot run forward: {meta_message(names)}")


def _refuse_new_ties(replacements: Sequence[tuple[Param, nn.Parameter | None]]) -> None:
    """Refuse one sharded parameter in place of two: a gradient would be lost."""
    owners: dict[int, Param] = {}
    for param, new in replacements:
        first = owners.setdefault(id(param.sharded if new is None else new), param)
        if first is not param:
            raise RuntimeError(
                f"{first.fqn} and {param.fqn} were tied after fully_shard: one parameter is in both "
                "places now. Tie them before fully_shard, or keep two parameters."
            )


def meta_message(names: Sequence[str]) -> str:
    """The error text for parameters on the meta device that are about to be used."""
    are = "parameters are" if len(names) > 1 else "parameter is"
    return (
        f"{len(names)} {are} still on the meta device: {listed(names)}. Nothing has given them values. Call "
        "shardwise.materialize(model), or load a checkpoint, first."
    )
