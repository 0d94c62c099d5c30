"""An optimizer step on plain tensors: neighbouring shards of a param group are stepped as one.

torch's optimizers cost microseconds a tensor, and ten times as much on DTensors. They compute element by
element, so they can step the flat shards directly. The user still sees param groups with the sharded
parameters, and state by parameter in DTensors. Therefore

- `param_groups` are the user's. While the optimizer's class steps, their "params" are flat tensors;
- the state is either flat, kept by the runs, or shown by parameter, as views of the flat state;
- each step checks in a few passes whether anything has moved; if so, it makes new runs.
"""

import inspect
import types
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import cache
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardwise.arguments import check_flags, check_type
from shardwise.buckets.optimizer_steps import ELEMENTWISE, SteppedParameters
from shardwise.comm.buffers import with_own_storage
from shardwise.optim.flat_runs import (
    MAX_GAP,
    FlatRun,
    ParamState,
    RunMember,
    StateSlice,
    StepPlan,
    has_eps,
    locate,
    make_runs,
    own_copy,
)
from shardwise.optim.owner_exchange import name_or_shape, placed_gradient, placed_like, refuse_twice
from shardwise.torch_compat import dtensor, optimizers
from shardwise.torch_compat.dynamo import break_graphs

Optimizer = torch.optim.Optimizer

NOT_ELEMENTWISE = {
    "LBFGS": "it looks at all parameters together",
    "Adafactor": "it keeps sums over rows and columns",
    "Muon": "it orthogonalises whole matrices",
    "SparseAdam": "it accepts only sparse gradients",
}


class FlatOptimizer(Optimizer):
    """An elementwise optimizer that steps the flat shards of a sharded model.

    Computes the same numbers as the plain optimizer, for a fraction of the host time: neighbouring shards of
    a param group are stepped as one tensor. The optimizer remains an instance of its class, with the same
    ``param_groups``, hooks, and ``state`` by parameter in DTensors. Learning rate schedulers, gradient
    scalers and checkpoints, including those of the plain optimizer, work unchanged.

    Args:
        optimizer: SGD, Adam, AdamW, NAdam, RAdam, Adamax, Adagrad, Adadelta, RMSprop, Rprop or ASGD of
            ``torch.optim``, before or after its first step. The same object becomes a FlatOptimizer and is
            returned.
        elementwise: True accepts another class. You promise that it treats each element of a parameter
            independently, with the same hyperparameters in the whole param group, and that its state has the
            shape of the parameter or is a number. A closure is called before the step.

    Raises:
        TypeError: ``optimizer`` is not a ``torch.optim.Optimizer``, or is a FlatOptimizer already.
        ValueError: it is not elementwise, or not known to be; it is ``differentiable``; it steps by another
            optimizer; or its ``step`` is already wrapped, as by a learning rate scheduler: make schedulers
            afterwards.

    Parameters may also be plain tensors, DTensors of other origin, frozen, or without gradient. One that is
    not in a flat shard, or whose gradient was replaced, is stepped on its local tensor. Where torch chooses
    between ``foreach`` and a loop, it chooses as for plain tensors: ``foreach`` on a GPU.

    No communication, and no memory besides the state and its padding: less than 16 elements a parameter. The
    next step needs a few milliseconds more if parameters have moved, if different parameters have gradients,
    or if ``state`` was read. That shows views of the flat state: look it up again after each step, since
    numbers such as step counts are copies.

    Example::

        optimizer = FlatOptimizer(torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True))
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1000)
        for batch in batches:
            model(batch).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
    """

    _plan: "StepPlan | None" = None
    _shown: Any = None  # state by parameter, while the runs do not have it
    is_stepping = False
    _made_of: tuple[Any, Any]  # this class, or a subclass of it, and the optimizer's class

    _kinds_step: Callable[[], Any]  # that of the optimizer's class, without hooks

    def __new__(cls, optimizer: Any, *, elementwise: bool = False) -> "FlatOptimizer":
        """Turn ``optimizer`` itself into one, so that other references to it stay valid."""
        _check(optimizer, elementwise)
        classes: Any = cls, type(optimizer)
        optimizer.__class__ = _flat_class(*classes)
        return optimizer  # type: ignore[no-any-return]

    def __init__(self, optimizer: Optimizer, *, elementwise: bool = False) -> None:
        self.state = vars(self).pop("state")

    # --- the step ---------------------------------------------------------------------------------

    @optimizers.hooked_step
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Perform a single optimization step.

        Args:
            closure: recomputes the loss, with gradients, and returns it.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            gradients = None if self._plan is None else self._plan.gradients(self.param_groups)
            if gradients is None:
                gradients = self._replan()
            assert self._plan is not None
            self._step_flat(self._plan, gradients)
        return loss

    def _step_flat(self, plan: "StepPlan", gradients: Sequence[Tensor]) -> None:
        groups = list(self.param_groups)
        given = [group["params"] for group in groups]
        try:
            for run, gradient in zip(plan.runs, gradients, strict=True):
                run.flat.grad = gradient
            for group, flats in zip(groups, plan.flats, strict=True):
                group["params"] = flats
            self.is_stepping = True
            self._kinds_step()
        finally:
            self.is_stepping = False
            for group, params in zip(groups, given, strict=True):
                group["params"] = params
            for run in plan.runs:
                run.flat.grad = None

    def stepped_parameters(self) -> SteppedParameters | None:
        """The parameters that the last step changed."""
        return None if self._plan is None else self._plan.stepped

    # --- state ------------------------------------------------------------------------------------

    @property  # type: ignore[override]
    def state(self) -> Any:
        """State by parameter: views of the flat state, valid until the next step."""
        if self.is_stepping:
            return self._flat_state
        if self._shown is None:
            self._shown = self._show()
        return self._shown

    @state.setter
    def state(self, state: Any) -> None:
        self._shown = state
        self._plan = None
        self._flat_state: defaultdict[Any, Any] = defaultdict(dict)
        self._resting: dict[Tensor, ParamState] = {}
        # Where shown views lie, by their ids. The flat state lives as long as any of them.
        self._shown_views: dict[int, tuple[weakref.ref[Tensor], StateSlice]] = {}

    def __reduce__(self) -> Any:
        """Pickles name the two classes that this class, made at run time, consists of."""
        return _rebuilt, self._made_of, self.__getstate__()

    def _show(self) -> Any:
        """Take the state out of the runs: from now on the shown state is authoritative."""
        apart, others = self._taken_apart()
        self.state = None
        shown: defaultdict[Any, Any] = defaultdict(dict)
        for param in chain.from_iterable(group["params"] for group in self.param_groups):
            if param in apart:
                shown[param] = self._views(param, apart.pop(param))
            elif param in others:
                shown[param] = others.pop(param)
        shown.update({param: self._views(param, values) for param, values in apart.items()})
        shown.update(others)
        return shown

    def _taken_apart(self) -> tuple[dict[Tensor, ParamState], dict[Any, Any]]:
        """The state of sharded parameters, by parameter, and that of other parameters."""
        apart, others = dict(self._resting), dict(self._flat_state)
        for run in self._plan.runs if self._plan is not None else ():
            if run.flat in others:
                apart.update(zip(run.params, run.take_apart(others.pop(run.flat)), strict=True))
        return apart, others

    def _views(self, param: Tensor, values: ParamState) -> dict[str, Any]:
        shown: dict[str, Any] = {}
        local = dtensor.local_tensor(param)
        for key, value in values.items():
            if not isinstance(value, StateSlice):
                shown[key] = own_copy(value)
                continue
            view = value.values(local.numel()).view(local.shape)
            view = with_own_storage(view) if type(view) is Tensor else view
            shown[key] = dtensor.placed_as(param, view)
            if value.is_ours:
                self._note(view, value)
        return shown

    def _note(self, view: Tensor, part: StateSlice) -> None:
        views, key = self._shown_views, id(view)
        views[key] = weakref.ref(view, lambda _: views.pop(key, None)), part

    def _taken_back(self) -> tuple[dict[Tensor, ParamState], dict[Any, Any]]:
        """The shown state: that of sharded parameters, and that of other parameters."""
        apart: dict[Tensor, ParamState] = {}
        others: dict[Any, Any] = {}
        for param, values in self._shown.items():
            if isinstance(param, DTensor):
                apart[param] = {key: self._part(param, key, value) for key, value in values.items()}
            else:
                others[param] = values
        return apart, others

    def _part(self, param: DTensor, key: str, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if isinstance(value, DTensor) and value.shape == param.shape:
            ref, part = self._shown_views.get(id(dtensor.local_tensor(value)), (None, None))
            if ref is not None and ref() is dtensor.local_tensor(value):
                return part
            return StateSlice(dtensor.local_tensor(placed_like(value, param)), 0, is_ours=False)
        if isinstance(value, DTensor) or (
            value.numel() != 1 and value.shape != dtensor.local_tensor(param).shape
        ):
            raise ValueError(
                f"{name_or_shape(param)}: '{key}' in the state of {type(self).__name__} is a "
                f"{type(value).__name__} of shape {tuple(value.shape)}, where a DTensor of the parameter's "
                f"shape, {tuple(param.shape)}, is expected: this rank cannot tell which part of the whole it "
                "holds. Load full states with shardwise.state.load_full_optimizer_state_dict."
            )
        return value if value.numel() == 1 else StateSlice(value, 0, is_ours=False)

    def _replan(self) -> list[Tensor]:
        """Make runs of the current parameters; return their gradients."""
        apart, others = self._taken_apart() if self._shown is None else self._taken_back()
        found: list[tuple[FlatRun, list[RunMember]]] = []
        flats: list[list[Tensor]] = []
        for index, group in enumerate(self.param_groups):
            _check_group(type(self).__name__, index, group)
            sharded = [param for param in group["params"] if isinstance(param, DTensor)]
            members = [_run_member(p, apart.get(p)) for p in sharded if p.grad is not None]
            # No padding in runs if the optimizer may turn zeros into other numbers.
            keeps_zeros = self._made_of[1] in ELEMENTWISE and has_eps(group)
            runs = make_runs(members, MAX_GAP if keeps_zeros else 0)
            plain = [param for param in group["params"] if not isinstance(param, DTensor)]
            flats.append([*plain, *(run.flat for run, _ in runs)])
            found += runs
        plan = StepPlan(self.param_groups, flats, found)
        # Nothing can fail from here on: the state moves now.
        self.state = None
        self._flat_state.update(others)
        for run, members in found:
            if members[0].state is not None:
                self._flat_state[run.flat] = run.join([member.state or {} for member in members])
            for member in members:
                apart.pop(member.param, None)
                member.state = None
        self._resting = apart
        self._plan = plan
        return [run.gradient(members[0].gradient) for run, members in found]


def _run_member(param: DTensor, state: ParamState | None) -> RunMember:
    given, gradient = param.grad, placed_gradient(param, name_or_shape(param))
    is_usual = type(given) is DTensor and given.placements == param.placements
    local, own = dtensor.local_tensor(param), dtensor.local_tensor(gradient)
    return RunMember(param, local, own, is_usual, locate(param, local, own), state)


# --- checks ---------------------------------------------------------------------------------------


def _check(optimizer: Any, elementwise: Any) -> None:
    check_type("FlatOptimizer", "optimizer", optimizer, "a torch.optim.Optimizer", Optimizer)
    if isinstance(optimizer, FlatOptimizer):
        raise TypeError(f"FlatOptimizer: this {type(optimizer).__name__} is a FlatOptimizer already.")
    check_flags("FlatOptimizer", elementwise=elementwise)
    _check_kind(type(optimizer), elementwise)
    if "step" in vars(optimizer):
        raise ValueError(
            f"FlatOptimizer: step() of this {type(optimizer).__name__} was wrapped, as learning rate "
            "schedulers do, and would still step parameter by parameter. Create the FlatOptimizer first, and "
            "then schedulers for it."
        )
    if "state" not in vars(optimizer):
        raise ValueError(
            f"FlatOptimizer: {type(optimizer).__name__} keeps no state of its own; it seems to call the step "
            "of another optimizer. Make that one a FlatOptimizer before you wrap it."
        )
    for index, group in enumerate(optimizer.param_groups):
        _check_group(type(optimizer).__name__, index, group)


def _check_kind(kind: type[Optimizer], elementwise: bool) -> None:
    whys = [why for name, why in NOT_ELEMENTWISE.items() if issubclass(kind, getattr(torch.optim, name, ()))]
    if whys:
        raise ValueError(
            f"FlatOptimizer: {kind.__name__} does not treat each element of a parameter by itself: "
            f"{whys[0]}. So its parameters cannot be stepped as one flat tensor. WholeParameters steps them "
            "whole."
        )
    if kind not in ELEMENTWISE and not elementwise:
        raise ValueError(
            f"FlatOptimizer: {kind.__module__}.{kind.__qualname__} is not known to treat each element of a "
            "parameter by itself. If it does, pass elementwise=True. If it looks at whole parameters (norms, "
            "matrices), use WholeParameters: it would compute something else on flat shards. Known are "
            f"{', '.join(each.__name__ for each in ELEMENTWISE)} of torch.optim."
        )


def _check_group(kind: str, index: int, group: dict[str, Any]) -> None:
    if group.get("differentiable"):
        raise ValueError(
            f"FlatOptimizer: group {index} of {kind} is differentiable, but autograd does not see a step on "
            "flat shards. Use the optimizer without FlatOptimizer."
        )
    refuse_twice(f"FlatOptimizer: group {index} of {kind}", group["params"], name_or_shape)


# --- the class ------------------------------------------------------------------------------------


def _set_state(self: FlatOptimizer, state: dict[str, Any]) -> None:
    """Continue with a loaded or unpickled state."""
    others = dict(state)
    if "state" in others:
        self.state = others.pop("state")
    self._made_of[1].__setstate__(self, others)


def _repr(self: FlatOptimizer) -> str:
    return f"FlatOptimizer({self._made_of[1].__repr__(self)})"


@cache
def _flat_class(flat: Any, kind: Any) -> Any:
    """``kind`` with our step. It keeps its name, by which checkpoints identify optimizers.

    An object may change its class if the first bases of both begin with the same fields. So ours comes first,
    or, if ``kind`` begins with another class, such as ``ABC``, second, with its overrides in the class
    itself.
    """
    body = {
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__doc__": kind.__doc__,
        "_made_of": (flat, kind),
        "_kinds_step": optimizers.step_without_hooks(kind),
        # Not methods of FlatOptimizer: those of ``kind`` would call them through super().
        "__setstate__": _set_state,
        "__repr__": _repr,
    }
    bases: tuple[Any, ...] = (flat, kind)
    first = kind
    while first not in (Optimizer, object):
        first = first.__base__
    if first is object:
        bases = (kind, flat)
        overrides: dict[str, Any] = {}
        for each in reversed(flat.__mro__[: flat.__mro__.index(Optimizer)]):
            overrides |= vars(each)
        not_ours = ("__dict__", "__weakref__", "__new__")
        body = {key: value for key, value in overrides.items() if key not in not_ours} | body
    return types.new_class(kind.__name__, bases, exec_body=lambda namespace: namespace.update(body))


def _rebuilt(flat: Any, kind: Any) -> FlatOptimizer:
    """An empty optimizer, for ``copy`` and ``pickle``."""
    made: FlatOptimizer = object.__new__(_flat_class(flat, kind))
    return made


break_graphs(inspect.unwrap(FlatOptimizer.step))  # dynamo fails while it traces it
