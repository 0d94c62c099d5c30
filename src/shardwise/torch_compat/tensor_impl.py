"""Internals of tensors and parameters: class, attributes, version, storage. Seen on 2.11 to 2.13."""

import logging
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils.flop_counter import flop_registry

from shardwise.torch_compat.autograd import gradient_hooks, post_accumulate_hooks

version: Callable[[Tensor], int] = attrgetter("_version")
"""The version counter: how often a tensor was changed in place. Public functions
increase it, but none reads it (2.11 to 2.13)."""

is_view: Callable[[Tensor], bool] = Tensor._is_view
base_of: Callable[[Tensor], Tensor | None] = attrgetter("_base")
"""Whether autograd knows a tensor as a view, and of which; torch documents both, with their underscores."""

storage_key: Callable[[torch.UntypedStorage], int] = attrgetter("_cdata")
"""Tells storages apart. ``data_ptr()`` does not: an emptied one has none."""


storage_address: Callable[[Tensor], int] = torch._C._storage_address  # type: ignore[attr-defined]
"""``storage_key`` of the storage, in a fifth of the time. That of a DTensor itself holds nothing, and
changes when its ``.data`` is assigned (2.11 to 2.15)."""


def num_references(storage: torch.UntypedStorage) -> int:
    """How many tensors share the memory of ``storage``, views included, and one for ``storage`` itself.

    No public function counts them; torch asks this one before it reuses memory of CUDA graphs (2.11 to 2.15).
    """
    return torch._C._storage_Use_Count(storage._cdata)


def is_plain(tensor: Tensor) -> bool:
    """True for a tensor of torch's own two classes, which is its memory."""
    return type(tensor) in (Tensor, nn.Parameter)


def plain_parts(tensor: Tensor) -> list[Tensor]:
    """The tensors that hold the memory of ``tensor``: those that a subclass names, else itself."""
    if is_plain(tensor) or not hasattr(tensor, "__tensor_flatten__"):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    inner = [getattr(tensor, name) for name in names]
    return [part for each in inner if each is not None for part in plain_parts(each)]


def sparse_values(tensor: Tensor) -> Tensor:
    """The values of a sparse tensor, to be changed in place; ``values()`` only takes a coalesced one."""
    return tensor._values()


plain_access: Callable[[], AbstractContextManager[None]] = torch._C.DisableTorchFunctionSubclass
"""Inside, attributes of DTensors are read and set without ``__torch_function__``, which DTensor does not
implement: asking for it takes half of the time. Described in torch's notes on extending PyTorch."""


def flops_of(operation: Any, args: Any, kwargs: Any, result: Any) -> int:
    """The floating-point operations of matrix products, convolutions and attention; 0 for others.

    By the table of formulas of ``torch.utils.flop_counter``, which it does not name as public (2.11 to 2.15).
    Before 2.14 that lacks attention on the CPU, whose arguments begin like those on CUDA.
    """
    formula = _FORMULAS.get(operation.overloadpacket)
    try:
        return 0 if formula is None else int(formula(*args, **kwargs, out_val=result))
    except AssertionError:  # 2.11 counts no attention with fewer heads of keys than of queries
        return 0


_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention
_ATTENTION_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_backward
_FORMULAS: dict[Any, Callable[..., Any]] = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: flop_registry[_ATTENTION],
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: flop_registry[_ATTENTION_BACKWARD],
    **flop_registry,
}


chunk_cat: Callable[..., Tensor] = torch._chunk_cat
"""``chunk_cat(tensors, 0, num_chunks, out=out)`` chunks each tensor along dim 0, pads the last chunks with
zeros, and puts all first chunks side by side in the first row of ``out``, and so on. Not documented; views
and a ``torch.cat`` take twice the time."""


def own_attributes(tensor: Tensor) -> dict[str, Any]:
    """Attributes that were set on ``tensor``, without those in which a tensor subclass keeps its contents."""
    inside = vars(tensor.detach())
    return {name: value for name, value in vars(tensor).items() if name not in inside}


class AttributeRef(weakref.ref[Any]):
    """A weak reference in an attribute of a tensor. Saved or copied with the tensor, it becomes an empty
    dict, which ``torch.load`` also reads with ``weights_only``."""

    __slots__ = ()

    def __reduce__(self) -> Any:
        """Become an empty dict."""
        return OrderedDict, ()


def become(tensor: nn.Parameter, new: Tensor) -> None:
    """Give ``tensor`` the contents of ``new``, on any device; it stays the same object.

    The public ``torch.utils.swap_tensors`` swaps hooks and attributes too, and the attributes of hooks are
    private.
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


def without_values(cls: type[Tensor], shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Any:
    """A tensor of ``cls``, which answers for all operations; torch documents it, with its underscore."""
    return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)  # type: ignore[attr-defined]


_LONGEST_OF_CUDA = 254


def assert_later(is_right: Tensor, message: str) -> None:
    """Raise a RuntimeError if ``is_right`` is False: at once on the host; a device stops when it comes to it.

    The host does not wait for the device. There is no public function (2.11 to 2.15). CUDA refuses a longer
    message than `_LONGEST_OF_CUDA` bytes; the beginning, where names stand, is cut off.
    """
    torch._assert_async(is_right, message.encode()[-_LONGEST_OF_CUDA:].decode(errors="ignore"))


def set_grad_dtype(tensor: Tensor, dtype: torch.dtype) -> None:
    """Have gradients of ``tensor``, a leaf, be cast to ``dtype`` and added up in it.

    Public since 2.10, but not yet in torch's annotations.
    """
    tensor.grad_dtype = dtype  # type: ignore[attr-defined]


def has_memory(tensor: Tensor) -> bool:
    """False for a tensor without contents: on the meta device, or a fake one, which only says where it is.

    ``FakeTensor`` is what torch's own tools compute shapes with; its module is private (2.11 to 2.15).
    """
    return not (tensor.is_meta or isinstance(tensor, FakeTensor))


fake_device: Callable[[Tensor], torch.device] = attrgetter("fake_device")
"""The device that a fake tensor claims. ``tensor.device`` asks all modes, which takes 0.3 ms."""


@contextmanager
def fake_tensors() -> Iterator[None]:
    """Inside, operations make fake tensors: shapes, dtypes and devices, but no contents and no memory.

    Torch logs a traceback of its own of each operation that cannot be run; inside, its error alone tells.
    """
    log = logging.getLogger(FakeTensorMode.__module__)
    was_disabled, log.disabled = log.disabled, True
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            yield
    finally:
        log.disabled = was_disabled
