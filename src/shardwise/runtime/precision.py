"""Which dtype a parameter and its gradient have where, and the casts at the edges of forward."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.runtime.outputs import find_tensors, find_tensors_in_trace, map_tensors


@dataclass(frozen=True, slots=True)
class Precision:
    """Dtypes of one parameter's life.

    ``stored``: the shard. ``computed``: the full parameter, as gathered. ``accumulated``: its full
    gradient. ``reduced``: the sum over ranks. ``kept``: ``.grad`` of the shard.
    """

    stored: torch.dtype
    computed: torch.dtype
    accumulated: torch.dtype
    reduced: torch.dtype
    kept: torch.dtype

    @property
    def smallest_itemsize(self) -> int:
        """Bytes of the smallest element among them."""
        return min(d.itemsize for d in (self.stored, self.computed, self.reduced, self.kept))


def precision_of(dtype: torch.dtype, policy: Any, is_full: bool) -> Precision:
    """What ``policy`` makes of a parameter of ``dtype``; ``is_full`` keeps it in its own."""
    if not dtype.is_floating_point or is_full or policy is None:
        return Precision(dtype, dtype, dtype, dtype, dtype)
    computed = policy.param_dtype or dtype
    accumulated = getattr(policy, "accumulate_dtype", None) or policy.reduce_dtype or computed
    reduced = policy.reduce_dtype or computed
    kept = reduced if getattr(policy, "keep_low_precision_grads", False) else dtype
    return Precision(dtype, computed, accumulated, reduced, kept)


class FullPrecisionRule:
    """Which parameters the policy's ``full_precision`` keeps in their own dtype.

    ``managed``: all modules of the call, those around others first.
    """

    def __init__(self, rule: Any, managed: list[nn.Module]) -> None:
        self._predicate: Callable[..., bool] | None = None
        self.outermost: list[nn.Module] = []
        """The modules of the classes given, whose inputs have to fit their parameters."""
        self._inside: set[nn.Module] = set()
        if rule is not None and not isinstance(rule, (type, tuple, list)):
            self._predicate = rule
            return
        classes = () if rule is None else (rule,) if isinstance(rule, type) else tuple(rule)
        for module in managed:
            if isinstance(module, classes) and module not in self._inside:
                self.outermost.append(module)
                self._inside.update(module.modules())

    def keeps(self, name: str, module: nn.Module, param: nn.Parameter) -> bool:
        """True for a parameter that is not cast."""
        if self._predicate is not None:
            return bool(self._predicate(name, module, param))
        return module in self._inside


class Casts:
    """The casts of one module's forward: of its inputs, and of its outputs."""

    def __init__(self, policy: Any) -> None:
        self.policy = policy
        casts_inputs = getattr(policy, "cast_forward_inputs", True)
        self._input = policy.param_dtype if policy is not None and casts_inputs else None
        self._output = getattr(policy, "output_dtype", None)

    def inputs(self, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """The inputs as forward shall see them; None: as they are."""
        if self._input is None:
            return None
        return map_tensors(args, self._cast_input), map_tensors(kwargs, self._cast_input)

    def output(self, output: Any) -> Any:
        """What the caller shall get."""
        dtype = self._output
        return output if dtype is None else map_tensors(output, lambda t: _cast(t, dtype))

    def _cast_input(self, tensor: Tensor) -> Tensor:
        assert self._input is not None
        return _cast(tensor, self._input)


def cast_around(module: nn.Module) -> None:
    """Have ``module``, kept in full precision, compute in its parameters' dtype and answer in that of its
    inputs."""
    own = next((p.dtype for p in module.parameters() if p.is_floating_point()), None)
    if own is None:
        return
    given: list[torch.dtype] = []  # of the running calls: a module may be called inside itself

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
