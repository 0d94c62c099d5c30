"""Questions about all parameters of a group at every unshard, in loops that run in C.

Twelve calls of a Python function cost as much as a collective of a small group. So each question is one
``map`` over the group, and costs nothing more while everything is unchanged. A snapshot may be out of date:
then the answer is "something has changed", the group looks closely, and takes a new snapshot.
"""

from collections.abc import Sequence
from functools import partial
from operator import add, attrgetter, is_, is_not, sub

import torch
from torch import Tensor, nn

from shardwise.params.parameter import Param
from shardwise.torch_compat import autograd, dtensor, nn_modules, tensor_impl

_wants_gradient = attrgetter("requires_grad")
_gradient = attrgetter("grad")
_layout = attrgetter("layout")
is_not_none = partial(is_not, None)
"""True for anything but None; a map over tensors with it runs in C."""
_DENSE = {torch.strided}


class ShardSnapshot:
    """The sharded parameters as the group last saw them."""

    def __init__(self, params: Sequence[Param]) -> None:
        places = [(site, param) for param in params for site in param.sites]
        self._modules = [site.module for site, _ in places]
        self._names = [site.name for site, _ in places]
        self._standing = [param.sharded for _, param in places]
        self._shards = [param.sharded for param in params]
        self._locals = [param.local for param in params]
        self._original_post_hooks = [param.original_post_hooks for param in params]
        self._trained = [param.sharded.requires_grad for param in params]
        self._bases = [param.version_base for param in params]
        self._has_bases = any(self._bases)

    def is_untouched(self, unsharded: Sequence[Tensor]) -> bool:
        """True if each sharded parameter is registered where it was, over the same memory, and requires_grad
        agrees with that of the unsharded one, if there are any."""
        standing = map(dict.get, map(nn_modules.parameters, self._modules), self._names)
        with tensor_impl.plain_access():
            return (
                all(map(is_, standing, self._standing))
                and all(map(is_, map(dtensor.local_tensor, self._shards), self._locals))
                and list(map(_wants_gradient, self._shards)) == self._trained
                and (not unsharded or list(map(_wants_gradient, unsharded)) == self._trained)
            )

    def is_as_trainable(self) -> bool:
        """True if no parameter was frozen or unfrozen."""
        with tensor_impl.plain_access():
            return list(map(_wants_gradient, self._shards)) == self._trained

    def versions(self) -> list[int]:
        """For each sharded parameter a number that grows with every in-place change that torch counts."""
        with tensor_impl.plain_access():
            counted = list(
                map(add, map(tensor_impl.version, self._shards), map(tensor_impl.version, self._locals))
            )
        return list(map(add, counted, self._bases)) if self._has_bases else counted

    def has_no_gradient_hooks(self) -> bool:
        """True if no sharded parameter has gradient hooks."""
        with tensor_impl.plain_access():
            return not (
                any(self._original_post_hooks)
                or any(map(autograd.gradient_hooks, self._shards))
                or any(map(autograd.post_accumulate_hooks, self._shards))
            )


def are_all_there(gradients: Sequence[Tensor | None]) -> bool:
    """True if none is None; ``in`` would ask tensors whether they equal it."""
    return all(map(is_not_none, gradients))


def take_gradients(unsharded: Sequence[nn.Parameter]) -> list[Tensor | None] | None:
    """Take ``.grad`` of ``unsharded`` away; None, and nothing taken, if one is sparse."""
    with tensor_impl.plain_access():
        gradients = list(map(_gradient, unsharded))
        layouts = set(map(_layout, filter(is_not_none, gradients)))
        if not layouts <= _DENSE:
            return None
        for full in unsharded:
            full.grad = None
    return gradients


def all_start_at(tensors: Sequence[Tensor], offsets: Sequence[int], start: int) -> bool:
    """True if tensor i lies ``offsets[i]`` bytes behind the address ``start``."""
    return set(map(sub, map(Tensor.data_ptr, tensors), offsets)) <= {start}
