"""The casts of forward's inputs and outputs under mixed precision."""

from typing import Any

import torch
from torch import Tensor, nn

from shardwise.layout.nested import find_tensors, find_tensors_in_trace, map_tensors


class Casts:
    """The casts of one module's forward: of its inputs, and of its outputs."""

    def __init__(self, policy: Any) -> None:
        self.policy = policy
        casts_inputs = getattr(policy, "cast_forward_inputs", True)
        self._input = policy.param_dtype if policy is not None and casts_inputs else None
        self._output = getattr(policy, "output_dtype", None)
        self.casts_inputs = self._input is not None
        self.casts_output = self._output is not None

    def inputs(self, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """The inputs, cast for forward; None if they stay as they are."""
        if self._input is None:
            return None
        return map_tensors(args, self._cast_input), map_tensors(kwargs, self._cast_input)

    def output(self, output: Any) -> Any:
        """The output, cast for the caller."""
        dtype = self._output
        return output if dtype is None else map_tensors(output, lambda t: _cast(t, dtype))

    def _cast_input(self, tensor: Tensor) -> Tensor:
        assert self._input is not None
        return _cast(tensor, self._input)


def cast_around(module: nn.Module) -> None:
    """Hook ``module``, kept in full precision: its inputs are cast to its own dtype, its outputs back."""
    own = next((p.dtype for p in module.parameters() if p.is_floating_point()), None)
    if own is None:
        return
    given: list[torch.dtype] = []  # input dtypes of the running calls; a module may call itself

    def before(_: nn.Module, args: Any, kwargs: Any) -> Any:
        find = find_tensors_in_trace if torch.compiler.is_dynamo_compiling() else find_tensors
        tensors = find((args, kwargs))
        given.append(next((t.dtype for t in tensors if t.is_floating_point()), own))
        return map_tensors((args, kwargs), lambda t: _cast(t, own))

    def after(_: nn.Module, __: Any, output: Any) -> Any:
        dtype = given.pop() if given else own
        return map_tensors(output, lambda t: _cast(t, dtype))

    module.register_forward_pre_hook(before, with_kwargs=True)
    module.register_forward_hook(after, always_call=True)


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() and tensor.dtype != dtype else tensor
