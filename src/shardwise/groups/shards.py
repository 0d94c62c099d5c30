"""The sharded parameters of a group, as it last saw them, and what the caller may have done to them since.

Between passes the shards belong to the caller, who may replace, move, cast, freeze, unfreeze, rename and hook
them. ``are_untouched`` looks for changes before the group communicates, in loops that run in C; only if it
finds one does the group look closely (``ParameterGroup.adopt_changes``).
"""

from collections.abc import Mapping, Sequence
from operator import attrgetter, is_not

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise.buckets.bucket import Bucket
from shardwise.layout.fqns import clean, listed
from shardwise.params.changes import ShardSnapshot
from shardwise.params.parameter import Param
from shardwise.params.replaced_parameter import find_replacement
from shardwise.torch_compat import dtensor

_is_on_meta = attrgetter("flat_shard.bytes.is_meta")
_local = attrgetter("local")

_NOTHING_SEEN = ShardSnapshot(())


class Shards:
    """The sharded parameters of the group ``name``, in ``buckets`` by mesh, for computation on ``device``."""

    def __init__(self, name: str, buckets: list[Bucket], device: torch.device) -> None:
        self.name = name
        self.buckets = buckets
        self.device = device
        self.take_stock()

    def take_stock(self) -> None:
        """Start over with the parameters that the buckets have now."""
        self.params: list[Param] = [param for bucket in self.buckets for param in bucket.params]
        self.are_replicated = any(not bucket.mesh.replicate_axis.is_alone for bucket in self.buckets)
        self.is_tensor_parallel = any(param.is_tensor_parallel for param in self.params)
        self.are_offloaded = any(bucket.is_offloaded for bucket in self.buckets)
        modules = dict.fromkeys(site.module for param in self.params for site in param.sites)
        self.rnns = [module for module in modules if isinstance(module, nn.RNNBase)]
        """Modules that keep a list of their own of the parameters that are shown."""
        self.snapshot = _NOTHING_SEEN
        """All of them as they were looked at last: empty before their first unshard."""

    # --- changes ----------------------------------------------------------------------------------

    def look(self) -> None:
        """Take a new snapshot: what they are now is known."""
        self.snapshot = ShardSnapshot(self.params)

    def are_untouched(self, unsharded: Sequence[nn.Parameter]) -> bool:
        """True if they are as they were looked at last, and ``requires_grad`` agrees with ``unsharded``."""
        is_known = self.snapshot is not _NOTHING_SEEN
        return is_known and self.snapshot.is_untouched(unsharded) and not any(map(_is_on_meta, self.buckets))

    def are_elsewhere(self) -> bool:
        """True if some have no values yet, or lie somewhere else than in the flat shards."""
        standing = map(dtensor.local_tensor, [param.sharded for param in self.params])
        return any(map(_is_on_meta, self.buckets)) or any(map(is_not, standing, map(_local, self.params)))

    def adopt_replaced(self) -> None:
        """Adopt parameters that the caller has registered in place of ours."""
        replacements = [(param, find_replacement(param)) for param in self.params]
        _refuse_new_ties(replacements)
        for param, new in replacements:
            if new is not None:
                param.adopt(new)

    def are_all_here(self) -> bool:
        """True if what stands in the modules are shards on the group's devices, and tied ones are equal."""
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
        """Take over the names that an outer module has, as far as ``names`` has them; ``modules`` name the
        group."""
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
    """Refuse one sharded parameter in the places of two: a gradient would be lost."""
    owners: dict[int, Param] = {}
    for param, new in replacements:
        first = owners.setdefault(id(param.sharded if new is None else new), param)
        if first is not param:
            raise RuntimeError(
                f"{first.fqn} and {param.fqn} were tied after fully_shard: one parameter stands in both "
                "places now. Tie them before fully_shard, or keep two parameters."
            )


def meta_message(names: Sequence[str]) -> str:
    """The error text for parameters on the meta device that are about to be used."""
    are = "parameters are" if len(names) > 1 else "parameter is"
    return (
        f"{len(names)} {are} still on the meta device: {listed(names)}. Nothing has given them values. Call "
        "shardwise.materialize(model), or load a checkpoint, first."
    )
