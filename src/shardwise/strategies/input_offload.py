"""Inputs of checkpointed modules, kept in host memory between forward and backward.

Torch's ``save_on_cpu`` copies on the computing stream, which waits for each copy. Here copies run on a stream
of their own, and those for backward run one call ahead:

    compute  [call 0   ][call 1   ][call 2   ] ... [2 again, backward 2][1 again, backward 1][0 again, ...
    copies   [0 out ]   [1 out ]   [2 out ]        [1 in ]              [0 in ]

All memory on the device belongs to the computing stream. It waits for the end of a copy before it uses or
frees that memory, which is at the next call. So the inputs of two calls are on the device at a time, and the
last call of forward still finds its own there.
"""

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from shardwise.comm.streams import CommStream, DeviceStream, Finish, HostStream, has_streams, nothing
from shardwise.torch_compat import dynamo, pytree, tensor_impl

_COPY = "_shardwise_copy"  # an attribute of an input: its version, and a weak reference to its copy


class _Place:
    """Stands in arguments for an input that is moved."""

    def __init__(self, index: int) -> None:
        self.index = index


class _Inputs:
    """The inputs of one call. ``previous`` returns those of the call before, if its graph is alive."""

    def __init__(self, tensors: Sequence[Tensor], previous: Callable[[], "_Inputs | None"]) -> None:
        self.previous = previous
        # Without the graph, which would otherwise live as long as what is on the device.
        self.on_device = {index: tensor.detach() for index, tensor in enumerate(tensors)}
        self.versions = [tensor_impl.version(tensor) for tensor in tensors]
        self.device = tensors[0].device
        self.on_host: list[Tensor] = []

    def check_versions(self) -> None:
        """Raise if an input was changed while it was copied."""
        for index, tensor in self.on_device.items():
            if tensor_impl.version(tensor) != self.versions[index]:
                raise RuntimeError(
                    f"An input of a checkpointed module, of shape {tuple(tensor.shape)}, was changed in "
                    "place by the module or while it ran. In backward, activation checkpointing runs the "
                    "module again from the input as it was. Let the module compute a new tensor."
                )


class InputOffload:
    """Moves the inputs of the checkpointed modules of a model. A copy of the model has another one."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, CommStream] = {}
        self._copying: list[tuple[_Inputs, Finish]] = []
        """Copies that the computation has not waited for."""
        self._last: Callable[[], _Inputs | None] = nothing

    def __reduce__(self) -> Any:
        return InputOffload, ()

    def checkpoint(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The result of ``forward``, which runs again in backward, from inputs that wait in host memory."""
        tensors: list[Tensor] = []

        def take(leaf: Any) -> Any:
            if not _can_move(leaf):
                return leaf
            tensors.append(leaf)
            return _Place(len(tensors) - 1)

        rest = pytree.tree_map(take, (args, kwargs)) if torch.is_grad_enabled() else (args, kwargs)
        # As positional arguments: torch looks there, also in containers, for devices whose random states to
        # keep.
        if not tensors:
            return checkpoint(_call, forward, rest, use_reentrant=False)
        inputs = self._save(tensors)
        # Checkpointing saves its own arguments, in this order. What forward saves goes to hooks of its own.
        indices = iter(range(len(tensors)))
        with saved_tensors_hooks(lambda _: next(indices), partial(self._load, inputs)):
            return checkpoint(_call, forward, rest, *tensors, use_reentrant=False)

    @torch.no_grad()
    def _save(self, tensors: list[Tensor]) -> _Inputs:
        """Begin to copy ``tensors`` to host memory."""
        self._end_copies()
        inputs = _Inputs(tensors, self._last)
        self._last = weakref.ref(inputs)
        pairs = []
        for tensor, version in zip(tensors, inputs.versions, strict=True):
            known, copy = vars(tensor).get(_COPY, (None, nothing))
            on_host = copy() if known == version else None  # as of what an encoder gives to each block
            if on_host is None:
                on_host = _host_memory_for(tensor)
                pairs.append((on_host, tensor.detach()))
                vars(tensor)[_COPY] = version, weakref.ref(on_host)
            inputs.on_host.append(on_host)
        self._copy(inputs, pairs)
        return inputs

    @torch.no_grad()
    def _load(self, inputs: _Inputs, index: int) -> Tensor:
        """An input on its device; with the first one of a call, begin to copy those of the call before."""
        if index == 0:
            self._bring(inputs)
            self._end_copies(but=inputs)
            if (previous := inputs.previous()) is not None:
                self._bring(previous)
        return inputs.on_device.pop(index)

    def _bring(self, inputs: _Inputs) -> None:
        if not inputs.on_device:
            empty = [torch.empty_like(each, device=inputs.device) for each in inputs.on_host]
            inputs.on_device = dict(enumerate(empty))
            self._copy(inputs, list(zip(empty, inputs.on_host, strict=True)))
            inputs.versions = [tensor_impl.version(each) for each in empty]

    def _copy(self, inputs: _Inputs, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        stream = self._streams.get(inputs.device)
        if stream is None:
            make = partial(DeviceStream, inputs.device) if has_streams(inputs.device) else HostStream
            stream = self._streams[inputs.device] = make()

        def start() -> Finish:
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
            return nothing

        stream.wait_for_compute()
        self._copying.append((inputs, stream.submit(start).wait))

    def _end_copies(self, but: _Inputs | None = None) -> None:
        """Have the computation wait for all copies; then leave on the device only what ``but`` has there."""
        copying, self._copying = self._copying, []
        for _, wait in copying:
            wait()
        for inputs, _ in copying:
            inputs.check_versions()
            if inputs is not but:
                inputs.on_device.clear()


def _call(forward: Callable[..., Any], rest: Any, *tensors: Tensor) -> Any:
    args, kwargs = pytree.tree_map(lambda leaf: tensors[leaf.index] if type(leaf) is _Place else leaf, rest)
    return forward(*args, **kwargs)


def _can_move(leaf: Any) -> bool:
    """Whether ``leaf`` is an activation on a device. Parameters are in memory anyhow, as are views of them;
    tensors without gradients, such as masks, are mostly shared by all calls."""
    if not isinstance(leaf, Tensor) or not leaf.requires_grad or leaf.is_leaf:
        return False
    base = tensor_impl.base_of(leaf)
    if base is not None and base.is_leaf:
        return False
    return not tensor_impl.has_memory(leaf) or (type(leaf) is Tensor and has_streams(leaf.device))


def _host_memory_for(tensor: Tensor) -> Tensor:
    if tensor_impl.has_memory(tensor):
        return torch.empty_like(tensor, device="cpu", pin_memory=True)
    return torch.empty_like(tensor, device="meta")  # in dry runs, whose fake tensors count as the device's


# Torch would trace the copies into a graph.
dynamo.break_graphs(InputOffload.checkpoint)
