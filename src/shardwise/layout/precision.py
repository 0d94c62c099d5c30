"""Mixed precision: the dtypes of a parameter and its gradient, and the casts around forward."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.layout.nested import find_tensors, find_tensors_in_trace, map_tensors
from shardwise.policies import MixedPrecisionPolicy


@dataclass(frozen=True, slots=True)
class Precision:
    """The dtypes of one parameter. ``precision_of`` makes them; equal ones are one object.

    ``stored``: the sharded parameter. ``computed``: the unsharded parameter. ``accumulated``: its unsharded
    gradient. ``reduced``: the sum over ranks. ``kept``: ``.grad`` of the sharded parameter.
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


_shared: dict[Precision, Precision] = {}


def precision_of(dtype: torch.dtype, policy: Any) -> Precision:
    """The dtypes of a parameter of ``dtype`` under ``policy``; None keeps its own dtype throughout."""
    made = Precision(dtype, dtype, dtype, dtype, dtype)
    if dtype.is_floating_point and policy is not None:
        computed = policy.param_dtype or dtype
        accumulated = getattr(policy, "accumulate_dtype", None) or policy.reduce_dtype or computed
        reduced = policy.reduce_dtype or computed
        kept = reduced if getattr(policy, "keep_low_precision_grads", False) else dtype
        made = Precision(dtype, computed, accumulated, reduced, kept)
    return _shared.setdefault(made, made)


class PrecisionRule:
    """Which part of a policy applies to which parameter: some keep their own dtype, throughout
    (``full_precision``) or in computation (``param_dtype_override_fn``).

    ``modules``: the modules of the call. ``managed_modules``: those inside whose parameters it takes.
    """

    def __init__(self, policy: Any, modules: list[nn.Module], managed_modules: list[nn.Module]) -> None:
        self._policy = policy
        self._override: Any = getattr(policy, "param_dtype_override_fn", None)
        self._predicate: Callable[..., bool] | None = None
        self.full_precision_modules: list[nn.Module] = []
        """The managed modules of the given classes, whose inputs must fit their parameters."""
        self._inside: set[nn.Module] = set()
        rule: Any = getattr(policy, "full_precision", None)
        if rule is None:
            return
        if not isinstance(rule, (type, tuple, list)):
            self._predicate = rule
            return
        classes = (rule,) if isinstance(rule, type) else tuple(rule)
        managed = set(managed_modules)
        # Inner groups included: their tied parameters may move to the group of this call.
        for module in (each for root in modules for each in root.modules()):
            if isinstance(module, classes) and module not in self._inside:
                self._inside.update(module.modules())
                if module in managed:
                    self.full_precision_modules.append(module)

    def policy_for(self, places: Sequence[tuple[str, nn.Module]], param: nn.Parameter) -> Any:
        """The policy for ``param``, registered at ``places``: names and the modules around them."""
        computes_as_stored = self._override is not None and self._asks_for_own(places[0][0], param)
        if any(self._is_full(name, module, param) for name, module in places):
            return None
        return _computing_as_stored(self._policy) if computes_as_stored else self._policy

    def _is_full(self, name: str, module: nn.Module, param: nn.Parameter) -> bool:
        if self._predicate is not None:
            return bool(self._predicate(name, module, param))
        return module in self._inside

    def _asks_for_own(self, name: str, param: nn.Parameter) -> bool:
        dtype = self._override(param)
        if dtype is None or dtype == self._policy.param_dtype:
            return False
        if dtype == param.dtype:
            return True
        where = f"fully_shard: mp_policy.param_dtype_override_fn returned {dtype!r} for {name}"
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"{where}, a {type(dtype).__name__}. Return a torch.dtype, or None.")
        raise ValueError(
            f"{where}, which is of {param.dtype}, under a policy of param_dtype={self._policy.param_dtype}: "
            "a parameter is computed with in its own dtype or in that of the policy. Return "
            f"{param.dtype} or None."
        )


def _computing_as_stored(policy: Any) -> MixedPrecisionPolicy:
    """``policy`` without a compute dtype: gradients are still reduced and kept as it specifies."""
    return MixedPrecisionPolicy(
        reduce_dtype=policy.reduce_dtype,
        accumulate_dtype=getattr(policy, "accumulate_dtype", None),
        keep_low_precision_grads=getattr(policy, "keep_low_precision_grads", False),
    )


# --- casts around forward -------------------------------------------------------------------------


class Casts:
    """The casts of inputs and outputs of one module's forward."""

    def __init__(self, policy: Any) -> None:
        self.policy = policy
        casts_inputs = getattr(policy, "cast_forward_inputs", True)
        self._input = policy.param_dtype if policy is not None and casts_inputs else None
        self._output = getattr(policy, "output_dtype", None)
        self.casts_inputs = self._input is not None
        self.casts_output = self._output is not None

    def inputs(self, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """The inputs, cast for forward; None if they are unchanged."""
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
    """Hook ``module``, kept in full precision: cast its inputs to its own dtype, and its outputs back."""
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
