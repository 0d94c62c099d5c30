"""Every operation of torch: which memory it reads and writes, on which lane, and whether the host waits for it.

An operation on tensors of the device is launched on the current stream; one on plain tensors is done by the host.
What is in an operator's schema decides what is written: arguments that it changes, and new outputs. Views touch
nothing. Copies between host and device:

    from pinned memory, non_blocking   on the stream, beside the host
    from pageable memory, non_blocking the host has read it when the call returns
    anything else                      the host waits
"""

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from races.clocks import Lane
from races.device import DEVICE, DeviceTensor, OrderedDevice, is_of_type, on_device, on_host, unseen
from races.memory import UNWRITTEN, Memory

aten = torch.ops.aten

EMPTY = {"empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided", "empty_permuted"}
COPIES = {"copy_", "_to_copy"}
READ_BY_HOST = {
    *("_local_scalar_dense", "equal", "nonzero", "is_nonzero", "masked_select"),
    *("_unique2", "unique_dim", "unique_consecutive", "allclose"),
}
INDEXING = {"index", "index_put_", "_index_put_impl_", "index_put"}
"""Take indices in host memory, which they copy."""


@cache
def _is_view(operation: Any) -> bool:
    returns = operation._schema.returns
    return any(each.alias_info is not None and not each.alias_info.is_write for each in returns)


@cache
def _written(operation: Any) -> frozenset[str]:
    arguments = operation._schema.arguments
    return frozenset(
        each.name for each in arguments if each.alias_info is not None and each.alias_info.is_write
    )


def _name(operation: Any) -> str:
    return operation._schema.name.rpartition("::")[2]


def tensors_in(values: Any) -> Iterator[Tensor]:
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, (list, tuple)):
        for each in values:
            yield from tensors_in(each)
    elif isinstance(values, dict):
        yield from tensors_in(tuple(values.values()))


def mapped(function: Callable[[Any], Any], values: Any) -> Any:
    """`values`, an operation's arguments or results, with `function` of each tensor."""
    if isinstance(values, Tensor):
        return function(values)
    if isinstance(values, (list, tuple)):
        return type(values)([mapped(function, each) for each in values])
    if isinstance(values, dict):
        return {name: mapped(function, each) for name, each in values.items()}
    return values


class Operations(TorchDispatchMode):
    """Runs operations on the memory of the host, and tells `memory` about them."""

    def __init__(
        self, device: OrderedDevice, memory: Memory, functional_collective: Callable[[Any, Any, Any], Any]
    ) -> None:
        super().__init__()
        self._device = device
        self._memory = memory
        self._functional_collective = functional_collective
        self._pinned: dict[int, torch.UntypedStorage] = {}

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = {} if kwargs is None else dict(kwargs)
        if operation is torch.ops.prim.device.default:
            return DEVICE
        if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None:
            return operation(*args, **kwargs)  # DTensor asks for the shape of a result
        if operation is aten._has_compatible_shallow_copy_type.default:
            return True
        if not all(issubclass(DeviceTensor, kind) or kind is torch.nn.Parameter for kind in types):
            return NotImplemented  # a DTensor, say, which comes again with what is inside
        self._memory.drop_dead()
        if operation.namespace == "_c10d_functional":
            return self._functional_collective(operation, args, kwargs)
        name = _name(operation)
        if name == "is_pinned":
            return self.is_pinned(args[0])
        if name in COPIES and self._crosses(name, args, kwargs):
            return self._copy(operation, name, args, kwargs)
        return self._run(operation, name, args, kwargs)

    def _run(self, operation: Any, name: str, args: Any, kwargs: Any) -> Any:
        """An operation that is all on the device, or all on the host."""
        is_on_device = any(isinstance(t, DeviceTensor) for t in tensors_in((args, kwargs)))
        if (device := kwargs.get("device")) is not None:
            is_on_device = is_of_type(device)
            if is_on_device:
                kwargs["device"] = torch.device("cpu")
        lane = self._device.lane if is_on_device else self._device.host
        if name == "set_":
            return _with_storage_of(args[0], operation(on_host(args[0]), *args[1:], **kwargs))
        is_pinned = bool(kwargs.pop("pin_memory", False)) or name == "_pin_memory"
        if not _is_view(operation) and name not in EMPTY:
            self._use_arguments(operation, name, args, kwargs, lane)
        result = (
            _as_plain(operation, args, kwargs, is_on_device) if name != "_pin_memory" else args[0].clone()
        )
        if not _is_view(operation):
            self._use_results(name, args, kwargs, result, lane)
        if is_pinned:
            self._pinned[result.untyped_storage()._cdata] = result.untyped_storage()
        if is_on_device and (name in READ_BY_HOST or _has_mask(name, args)):
            self._device.block_host(name, self._device.clocks.snapshot(lane))
        return result

    def _use_arguments(self, operation: Any, name: str, args: Any, kwargs: Any, lane: Lane) -> None:
        written = _written(operation)
        given = {each.name: value for each, value in zip(operation._schema.arguments, args, strict=False)}
        for argument, value in {**given, **kwargs}.items():
            for tensor in tensors_in(value):
                user = lane
                if (
                    lane is not self._device.host
                    and not isinstance(tensor, DeviceTensor)
                    and not tensor.is_meta
                ):
                    _refuse_host_memory(operation, name, tensor)
                    user = self._device.host  # reads the number when it launches
                self._use(tensor, user, is_write=argument in written, operation=name)

    def _use_results(self, name: str, args: Any, kwargs: Any, result: Any, lane: Lane) -> None:
        """New memory, which is the lane's own: as NaN where nothing is written."""
        before = {t.untyped_storage()._cdata for t in tensors_in((args, kwargs)) if not t.is_meta}
        for tensor in tensors_in(result):
            if tensor.is_meta or tensor.layout is not torch.strided:
                continue
            if tensor.untyped_storage()._cdata in before:
                continue
            if name in EMPTY:
                fill_unwritten(tensor.untyped_storage())
                self._memory.allocate(tensor.untyped_storage(), lane)
            else:
                self._use(tensor, lane, is_write=True, operation=name)

    def _use(self, tensor: Tensor, lane: Lane, *, is_write: bool, operation: str) -> None:
        if not tensor.is_meta and tensor.layout is torch.strided:
            owner = lane if isinstance(tensor, DeviceTensor) else self._device.host
            self._memory.access(tensor, owner, lane, is_write=is_write, operation=operation)

    # --- between host and device -------------------------------------------------------------------

    def _crosses(self, name: str, args: Any, kwargs: Any) -> bool:
        if name == "copy_":
            return isinstance(args[0], DeviceTensor) != isinstance(args[1], DeviceTensor)
        device = kwargs.get("device")
        return device is not None and is_of_type(device) != isinstance(args[0], DeviceTensor)

    def _copy(self, operation: Any, name: str, args: Any, kwargs: Any) -> Tensor:
        source: Tensor = args[0] if name == "_to_copy" else args[1]
        lane = self._device.lane
        if name == "copy_":
            result: Tensor = args[0]
            non_blocking = bool(kwargs.get("non_blocking", args[2] if len(args) > 2 else False))
            on_host(result).copy_(on_host(source))
        else:
            non_blocking = bool(kwargs.pop("non_blocking", False))
            made = operation(on_host(source), **{**kwargs, "device": torch.device("cpu")})
            result = made if isinstance(source, DeviceTensor) else on_device(made)
        host_side = result if isinstance(source, DeviceTensor) else source
        runs_beside = non_blocking and self.is_pinned(host_side)
        is_staged = non_blocking and host_side is source
        self._use(
            source,
            self._device.host if is_staged and not runs_beside else lane,
            is_write=False,
            operation=name,
        )
        self._use(result, lane, is_write=True, operation=name)
        if not runs_beside and not is_staged:
            to = "the host" if host_side is result else "the device"
            self._device.block_host(f"copy to {to}", self._device.clocks.snapshot(lane))
        return result

    def is_pinned(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._pinned

    def pin_alias(self, alias: Tensor, tensor: Tensor) -> None:
        if self.is_pinned(tensor):
            self._pinned[alias.untyped_storage()._cdata] = alias.untyped_storage()


def fill_unwritten(storage: torch.UntypedStorage) -> None:
    """Each byte 0xFF: NaN in all dtypes of floating point."""
    if storage.nbytes():
        with unseen():
            torch.empty(0, dtype=torch.uint8).set_(storage).fill_(UNWRITTEN)


def _as_plain(operation: Any, args: Any, kwargs: Any, is_on_device: bool) -> Any:
    """The result of `operation`, run on plain tensors; what was given comes back as the objects that were given."""
    given: dict[int, tuple[Tensor, Tensor]] = {}

    def plain(value: Any) -> Any:
        if not isinstance(value, DeviceTensor):
            return value
        made = on_host(value)
        given[id(made)] = (made, value)
        return made

    def back(value: Any) -> Any:
        if value.is_meta:
            return value
        if id(value) in given:
            return given[id(value)][1]
        return on_device(value) if is_on_device else value

    result = mapped(back, operation(*mapped(plain, args), **mapped(plain, kwargs)))
    for made, original in given.values():
        if (
            made.shape != original.shape or made.stride() != original.stride()
        ):  # resized, or transposed in place
            original.data = on_device(made)
    return result


def _with_storage_of(tensor: Tensor, made: Tensor) -> Tensor:
    if isinstance(tensor, DeviceTensor):
        tensor.data = on_device(made)
    return tensor


def _has_mask(name: str, args: Any) -> bool:
    return name in INDEXING and any(t.dtype in (torch.bool, torch.uint8) for t in tensors_in(args[1]))


def _refuse_host_memory(operation: Any, name: str, tensor: Tensor) -> None:
    if tensor.dim() and name not in INDEXING:
        raise RuntimeError(
            f"{operation} got tensors of the device and one of the host, of shape {tuple(tensor.shape)}"
        )
