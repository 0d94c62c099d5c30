"""What a tensor or parameter is made of: its class, attributes, storage."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.torch_compat.autograd import gradient_hooks, post_accumulate_hooks


def storage_users(storage: torch.UntypedStorage) -> int:
    """How many tensors and handles there are over one memory; no public function counts them."""
    return torch._C._storage_Use_Count(storage._cdata)


plain_access: Callable[[], AbstractContextManager[None]] = torch._C.DisableTorchFunctionSubclass
"""Inside, attributes of DTensors are read and set without asking whether the class wants to take part, which
DTensor does not: that takes half of the time. Described in torch's notes on extending PyTorch."""


def chunk_cat(tensors: list[Tensor], num_chunks: int, out: Tensor) -> None:
    """Chunk each tensor along dim 0, pad the last chunks with zeros, and put all first chunks side by side in
    the first row of ``out``, and so on. Not documented; views and a ``torch.cat`` take twice the time."""
    torch._chunk_cat(tensors, 0, num_chunks, out=out)


def own_attributes(tensor: Tensor) -> dict[str, Any]:
    """What was set on ``tensor``, but for what is in the memory of a tensor subclass."""
    inside = vars(tensor.detach())
    return {name: value for name, value in vars(tensor).items() if name not in inside}


def become(tensor: nn.Parameter, new: Tensor) -> None:
    """Give ``tensor`` the contents of ``new``, also on another device; it stays the same object.

    ``torch.utils.swap_tensors`` is public, but leaves hooks and attributes with what is swapped away, and the
    places of hooks are private.
    """
    hooks, post_hooks = gradient_hooks(tensor), post_accumulate_hooks(tensor)
    for name, value in own_attributes(tensor).items():
        vars(new).setdefault(name, value)
    torch.utils.swap_tensors(tensor, new)
    if hooks:
        tensor._backward_hooks = hooks
    if post_hooks:
        tensor._post_accumulate_grad_hooks = post_hooks  # type: ignore[attr-defined]


def as_subclass_of_parameter(cls: type, data: Tensor, requires_grad: bool) -> nn.Parameter:
    """A parameter of the class ``cls`` over ``data``, without calling its constructor.

    ``nn.Parameter`` itself is made by the same function.
    """
    return torch.Tensor._make_subclass(cls, data, requires_grad)  # type: ignore[return-value]


def set_grad_dtype(tensor: Tensor, dtype: torch.dtype) -> None:
    """Have gradients of ``tensor``, a leaf, be cast to ``dtype`` and added up in it.

    Public since 2.10, but not yet in torch's annotations.
    """
    tensor.grad_dtype = dtype  # type: ignore[attr-defined]
