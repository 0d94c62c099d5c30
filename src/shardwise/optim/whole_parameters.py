"""Any optimizer class on sharded parameters: each parameter is stepped whole, by the rank that owns it.

In a step, gradients and parameters are sent to their owners, round by round. There an instance of the class
steps plain tensors, and rows of the new values are sent back (owner_exchange.py). Between steps, owners hold
only the state of their parameters:

    rank        0                          1
    owns        A, C                       B, D
    round 0     class([A]).step()          class([B]).step()        C, D are on their way
    round 1     class([C]).step()          class([D]).step()        A, B are on their way back
    state       of A, C                    of B, D

Each round has an instance for its parameters, with separate param groups. They get the hyperparameters of the
caller's groups before a step, and what the class changes in them, such as a count of steps, is copied back to
the caller's. If instances change them differently, the class computes something over several parameters.
This is detected before anything is written, except in a step after one that changed nothing.
"""

import inspect
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwise.arguments import check_bytes, check_flags, describe
from shardwise.layout.regions import Region
from shardwise.optim.flat_optimizer import FlatOptimizer
from shardwise.optim.muon import Muon
from shardwise.optim.owner_exchange import (
    BATCH_BYTES,
    OwnerExchange,
    RoundKey,
    Stack,
    Travel,
    check_divisible,
    local_gradient,
    name_or_shape,
    names_of,
    sharing_of,
)
from shardwise.optim.owners import Block, BlockKey
from shardwise.ranks.agreement import RankGroup
from shardwise.ranks.failures import monitor_of_job
from shardwise.ranks.model_ranks import own_rank
from shardwise.torch_compat import dtensor, optimizers, tensor_impl
from shardwise.torch_compat.dynamo import break_graphs

Optimizer = torch.optim.Optimizer
ParameterCost = Callable[[tuple[int, ...]], float]
Changes = dict[int, dict[str, Any]]
"""The changes of a step to param groups, by group number; a key for each group that was stepped."""

STEP = "WholeParameters.step"


class WholeParameters(Optimizer):
    """Runs any optimizer class unchanged, on whole parameters: each is stepped by one rank, its owner.

    For classes that need more than one element of a parameter (Shampoo, SOAP, Adafactor, LAMB), and for
    those that do not support DTensors. Schedulers, gradient scalers, clipping and checkpoints see an
    optimizer with the caller's param groups, and work with it. An elementwise class is faster in a
    :class:`FlatOptimizer`.

    Args:
        optimizer_class: a subclass of ``torch.optim.Optimizer``.
        params: parameters, named parameters, or param groups, as for the class. DTensors with any placements
            except partial ones, on any meshes; each rank steps plain ones alone.
        single_owner: one rank owns all parameters, in one instance. For classes that compute something over
            all parameters (Prodigy, a norm of all gradients) or call a closure themselves (LBFGS). Neither
            memory nor work is divided then.
        cost: cost of a parameter from its shape, to balance owners by; None: its number of elements.
        batch_bytes: bytes of whole parameters that an owner holds at once, unless one is larger.
        options: options of the class.

    Raises:
        TypeError: ``optimizer_class`` is not one; or what the class raises for its options.
        ValueError: a named parameter cannot be assembled; the class needs ``single_owner``; ranks pass
            different classes, options or parameters. All ranks raise.

    The constructor, ``add_param_group`` and ``step`` are collective over the ranks that share parameters; in
    each the host waits once for a device. A step raises on all ranks if some have a gradient that others
    lack; if the class raises in the first step, no parameter has changed. Each instance draws its random
    numbers, if any. A parameter without gradient never changes, even if the class would change it.
    ``add_param_group`` and ``load_state_dict`` reset what instances keep in attributes, as loading does for
    any optimizer.

    ``state`` and ``state_dict()`` contain what this rank owns, as plain full tensors. ``load_state_dict``
    keeps only what this rank owns, so all ranks may load the state of the plain class in one process. Owners
    may differ from one run to the next: ``save_checkpoint`` and ``full_state_dict`` have the whole state by
    name.

    Costs, on W ranks: 1/W of the computation and of the state; a parameter and its gradient are sent to the
    owner, and the parameter back: at most 3 (W - 1) / W of their bytes, over all ranks together; in memory
    some six times ``batch_bytes`` during a step. If the class changes its param groups in a step (counts of
    steps), new values of all that a rank owns, 1/W of the parameters, live until the end of the step.

    Example::

        optimizer = WholeParameters(SOAP, model.parameters(), lr=3e-3)
        for batch in batches:
            model(batch).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    """

    _exchange: OwnerExchange | None = None

    def __init__(
        self,
        optimizer_class: type[Optimizer],
        params: Any,
        *,
        single_owner: bool = False,
        cost: ParameterCost | None = None,
        batch_bytes: int = BATCH_BYTES,
        **options: Any,
    ) -> None:
        _check_class(optimizer_class, single_owner)
        check_bytes("WholeParameters", "batch_bytes", batch_bytes)
        self.optimizer_class = optimizer_class
        self._options = options
        self._single_owner = single_owner
        self._cost = cost
        self._batch_bytes = batch_bytes
        self._owner_of: dict[Tensor, int] = {}
        self._grad_dtypes: dict[Tensor, torch.dtype] = {}  # where they differ from the parameters'
        self._forget_plan()
        self._is_made = False
        super().__init__(params, {})
        self._is_made = True
        self._complete_groups(self.param_groups)
        self._make_exchange("WholeParameters")

    # --- param groups -----------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a param group. Earlier parameters keep their owners. Collective."""
        super().add_param_group(param_group)
        if not self._is_made:
            return
        try:
            self._complete_groups(self.param_groups[-1:])
            self._make_exchange("WholeParameters.add_param_group")
        except Exception:
            del self.param_groups[-1]  # nothing is left half-added
            self._forget_plan()
            raise

    def _complete_groups(self, groups: list[dict[str, Any]]) -> None:
        """Add the class's defaults to groups, and have it check their options."""
        completed = _stand_in(self.optimizer_class, groups, self._options)
        if not self._single_owner and _looks_across(
            self.optimizer_class, completed.param_groups, self._options
        ):
            raise ValueError(
                f"WholeParameters: with these options {self.optimizer_class.__name__} uses all parameters to "
                "step each of them (norms, estimates), but each owner has only some. Pass single_owner=True, "
                "which gives all of them to one rank."
            )
        self.defaults = completed.defaults
        for group, full in zip(groups, completed.param_groups, strict=True):
            for key, value in full.items():
                group.setdefault(key, value)

    # --- owners -----------------------------------------------------------------------------------

    def owns(self, param: Tensor) -> bool:
        """Whether this rank owns ``param``, and has its state. Local."""
        self._made()
        return self._index.get(param) in self._owned

    def _made(self) -> OwnerExchange:
        """The exchange for the current parameters and dtypes of gradients."""
        params = [param for group in self.param_groups for param in group["params"]]
        others = {
            p: p.grad.dtype for p in params if p.grad is not None and p.grad.dtype != self._grad_dtype(p)
        }
        made = self._exchange
        if (
            made is None
            or others
            or list(map(id, params)) != list(map(id, self._params))
            or self._group_sizes() != self._sizes
            or not made.is_of(params)
        ):
            self._grad_dtypes |= others
            made = self._plan(params)
        return made

    def _group_sizes(self) -> list[int]:
        return [len(group["params"]) for group in self.param_groups]

    def _grad_dtype(self, param: Tensor) -> torch.dtype:
        return self._grad_dtypes.get(param, param.dtype)

    def _plan(self, params: list[Tensor]) -> OwnerExchange:
        names = names_of(self.param_groups)
        for param, name in zip(params, names, strict=True):
            check_divisible(param, name)
            if self._single_owner and sharing_of(param) != sharing_of(params[0]):
                raise ValueError(
                    "WholeParameters: single_owner=True needs all parameters on the same ranks, but "
                    f"{names[0]} and {name} are not. Give some of them to another optimizer."
                )
        fixed = {
            BlockKey(index, 0): 0 if self._single_owner else self._owner_of[param]
            for index, param in enumerate(params)
            if self._single_owner or param in self._owner_of
        }
        cost = self._cost
        made = OwnerExchange(
            params,
            names,
            [[Region.all_of(param.shape)] for param in params],
            [
                Travel((param.dtype, self._grad_dtype(param)), param.dtype, dtensor.plain(param).device)
                for param in params
            ],
            cost=lambda block: float(block.numel) if cost is None else cost(block.shape),
            batch_bytes=None if self._single_owner else self._batch_bytes,
            alike=lambda block: block.key,  # separate memory, aligned like any parameter's
            fixed=fixed,
        )
        self._forget_plan()
        self._exchange = made
        self._params: list[Tensor] = params
        self._sizes = self._group_sizes()
        self._names = names
        self._index = {param: index for index, param in enumerate(params)}
        self._owned = {key.tensor for key in made.owned}
        self._owner_of = {params[key.tensor]: owner for key, owner in made.owners.items()}
        return made

    def _forget_plan(self) -> None:
        self._exchange = None
        self._instances: dict[RoundKey, _Instance] = {}
        self._state_beside = _beside_parameters(vars(self).get("state", {}))
        self._is_first_step = True
        self._waits_for_changes = True  # while steps change the groups

    def _make_exchange(self, caller: str) -> None:
        """Make the exchange, the same on all ranks."""
        made = self._made()
        same = {
            "the optimizer": f"{self.optimizer_class.__qualname__} with {_described(self._options)}",
            "param groups": [
                f"{len(group['params'])} with {_described(_hyperparameters(group))}"
                for group in self.param_groups
            ],
            "single_owner": self._single_owner,
            "parameters": self._names,  # of one shape, they may be in another order
        }
        made.agree(caller, range(len(self._params)), None, same)

    # --- state ------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        """The pickled and copied state: all except the plan and its instances."""
        kept = ("optimizer_class", "_options", "_single_owner", "_cost", "_batch_bytes", "_is_made")
        owners = [self._owner_of[param] for param in self._params]
        return super().__getstate__() | {key: vars(self)[key] for key in kept} | {"owners": owners}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Continue with a loaded or unpickled state."""
        others = dict(state)
        owners = others.pop("owners", None)
        for param, values in others.get("state", {}).items():
            pairs = values.items() if isinstance(param, Tensor) and isinstance(values, Mapping) else ()
            if sharded := next((key for key, value in pairs if isinstance(value, DTensor)), None):
                raise ValueError(
                    f"{name_or_shape(param)}: {sharded!r} in its state is a DTensor, but WholeParameters "
                    "keeps state whole, on one rank. Load a full state, or a sharded one with "
                    "shardwise.load_checkpoint."
                )
        super().__setstate__(others)
        params = [param for group in self.param_groups for param in group["params"]]
        if owners is not None:
            self._owner_of = dict(zip(params, owners, strict=True))
            self._grad_dtypes = {}
        self._plan(params)
        kept = {k: v for k, v in self.state.items() if not isinstance(k, Tensor) or self.owns(k)}
        self.state = defaultdict(dict, kept)

    def __repr__(self) -> str:
        name = f"WholeParameters of {self.optimizer_class.__name__}"
        return super().__repr__().replace("WholeParameters", name, 1)

    # --- the step ---------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Perform a single optimization step. Collective over the ranks that share parameters.

        Args:
            closure: recomputes the loss, with gradients, and returns it. With ``single_owner``, the class
                calls it any number of times, and gets the mean of the losses of all ranks; otherwise it is
                called once, before the step.

        Raises:
            TypeError: the named parameter has a gradient with an impossible placement. All ranks raise.
            ValueError: ranks disagree on which parameters have gradients; or the class has computed
                something over all parameters. All ranks raise. No parameter has changed, except in the
                latter case in the first such step after one that left param groups unchanged.
        """
        if closure is not None and self._single_owner:
            return self._step_with_closure(closure)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        exchange, problem = self._made(), None
        shards: _Shards | None = None
        try:
            shards = _Shards(self._params, self._names)
        except Exception as error:
            problem = error
        exchange.agree(STEP, shards.gradients if shards else (), problem)
        assert shards is not None
        self._step_rounds(exchange, shards)
        return loss

    def _step_rounds(self, exchange: OwnerExchange, shards: "_Shards") -> None:
        waits = self._waits_for_changes
        changes: Changes = {}
        problems: list[Exception] = []

        def stepped(key: RoundKey, stacks: list[Stack]) -> list[Tensor]:
            try:
                own = self._step_round(key, shards.wholes(stacks))
                _join(changes, own, self.optimizer_class, own_rank())
            except Exception as error:
                if not waits:
                    raise
                problems.append(error)
            return [stack.tensors[0] for stack in stacks]

        def check() -> None:
            everyone = exchange.tell(STEP, changes, problems[0] if problems else None)
            joint: Changes = {}
            for rank, theirs in everyone.items():
                _join(joint, theirs, self.optimizer_class, rank)
            self._take_changes(joint)

        travelling = range(len(self._params)) if self._is_first_step else shards.gradients
        with monitor_of_job().call(STEP, exchange.axes):
            exchange.run(shards.read, stepped, shards.write, travelling, check if waits else None)
            if not waits:
                check()
        self._is_first_step = False

    def _step_round(self, key: RoundKey, wholes: "Wholes") -> Changes:
        """Step this rank's parameters of a round."""
        if key not in self._instances:
            if not wholes:
                return {}
            self._instances[key] = self._make_instance(wholes)
        instance = self._instances[key]
        try:
            instance.take(wholes, self.param_groups, self.state)
            return instance.step(self.param_groups)
        finally:
            instance.give(wholes, self.state)

    def _make_instance(self, wholes: "Wholes") -> "_Instance":
        numbers = {id(param): n for n, group in enumerate(self.param_groups) for param in group["params"]}
        by_group: dict[int, list[int]] = {}
        for index in sorted(wholes):
            by_group.setdefault(numbers[id(self._params[index])], []).append(index)
        make = partial(self.optimizer_class, **self._options)
        beside = deepcopy(self._state_beside)
        return _Instance(make, by_group, wholes, self._params, self.param_groups, self.state, beside)

    def _take_changes(self, changes: Changes) -> None:
        for number, values in changes.items():
            group = self.param_groups[number]
            for key, value in values.items():
                old = group.get(key)
                group[key] = value.to(old.device) if isinstance(old, Tensor) else value
        self._waits_for_changes = self._single_owner or any(changes.values())

    def _step_with_closure(self, closure: Callable[[], Any]) -> Any:
        """The owner of all parameters runs the class's step; the others evaluate with it until it ends."""
        exchange = self._made()
        exchange.agree(STEP, range(len(self._params)))
        with monitor_of_job().call(STEP, exchange.axes):
            shared = _SharedClosure(exchange, self._params, self._names, closure)
            wholes = shared.gather()
            if not self._owned:
                outcome = shared.evaluate_with_owner()
            else:
                if (0, 0) not in self._instances:
                    self._instances[0, 0] = self._make_instance(wholes)
                outcome = shared.step(self._instances[0, 0], wholes, self.param_groups, self.state)
        if isinstance(outcome, Exception):
            raise outcome
        loss, changes = outcome
        self._take_changes(changes)
        return loss


class _Instance:
    """An instance of the class, over this rank's parameters of one round.

    ``make``: the class, with its options. ``by_group``: indices of parameters, by param group. ``params``,
    ``groups``, ``state``: the caller's; the state gets the instance's initial one. ``beside``: state under
    other keys.
    """

    def __init__(
        self,
        make: Callable[[Any], Any],
        by_group: Mapping[int, Sequence[int]],
        wholes: "Wholes",
        params: Sequence[Tensor],
        groups: Sequence[dict[str, Any]],
        state: Any,
        beside: Mapping[Any, Any],
    ) -> None:
        self.loss: Any = None
        self._groups = list(by_group)
        self._params = {index: params[index] for index in wholes}
        self._own = {
            index: nn.Parameter(values, requires_grad=params[index].requires_grad)
            for index, (values, _) in wholes.items()
        }
        for index, own in self._own.items():
            vars(own).update(vars(params[index]))  # attributes that the caller has set for the class
        self._optimizer = make(
            [
                _hyperparameters(groups[number]) | {"params": [self._own[index] for index in some]}
                for number, some in by_group.items()
            ]
        )
        self._optimizer.state.update(beside)
        self._step = optimizers.step_without_hooks(type(self._optimizer))
        for index, own in self._own.items():
            if own in self._optimizer.state:
                state.setdefault(params[index], self._optimizer.state[own])

    def take(self, wholes: "Wholes", groups: Sequence[dict[str, Any]], state: Any) -> None:
        """Take the parameters' values and gradients, the hyperparameters and the state for a step."""
        for index, (values, gradient) in wholes.items():
            own = self._own[index]
            own.data = values
            if gradient is not None and gradient.dtype != own.dtype:
                tensor_impl.set_grad_dtype(own, gradient.dtype)
            own.grad = gradient
        for own_group, number in zip(self._optimizer.param_groups, self._groups, strict=True):
            own_group.update(deepcopy(_hyperparameters(groups[number])))  # others change theirs
        own_state = self._optimizer.state
        for index, param in self._params.items():
            own_state.pop(self._own[index], None)
            if param in state:
                own_state[self._own[index]] = state[param]

    def set_gradients(self, wholes: "Wholes") -> None:
        """Continue a step with new gradients."""
        for index, (_, gradient) in wholes.items():
            self._own[index].grad = gradient

    def step(self, groups: Sequence[dict[str, Any]], closure: Callable[[], Any] | None = None) -> Changes:
        """Step; return the class's changes to its param groups."""
        own_groups = self._optimizer.param_groups
        params = [list(group["params"]) for group in own_groups]
        self.loss = self._step(self._optimizer) if closure is None else self._step(self._optimizer, closure)
        name = type(self._optimizer).__name__
        if [list(map(id, group["params"])) for group in own_groups] != [
            list(map(id, some)) for some in params
        ]:
            raise TypeError(f"{STEP}: {name} has replaced parameters by other objects.")
        return {
            number: {
                key: value.detach().cpu() if isinstance(value, Tensor) else value
                for key, value in _hyperparameters(group).items()
                if key not in groups[number] or not are_equal(groups[number][key], value)
            }
            for number, group in zip(self._groups, own_groups, strict=True)
        }

    def leave_values(self, wholes: "Wholes") -> None:
        """Copy values back to where they were taken from, if the class has moved them."""
        for index, (values, _) in wholes.items():
            if self._own[index].data_ptr() != values.data_ptr():
                values.copy_(self._own[index])

    def give(self, wholes: "Wholes", state: Any) -> None:
        """Give back values and state; keep no tensors."""
        self.leave_values(wholes)
        for index, own in self._own.items():
            own.grad = None
            own.data = own.data.new_empty(0)
            if own in self._optimizer.state:
                state[self._params[index]] = self._optimizer.state[own]
        state.update(_beside_parameters(self._optimizer.state))


class _Shards:
    """This rank's parts of parameters and of their current gradients."""

    def __init__(self, params: Sequence[Tensor], names: Sequence[str]) -> None:
        self._locals = [dtensor.plain(param).detach() for param in params]
        self.gradients = {
            index: local_gradient(param, name, "WholeParameters needs it whole")
            for index, (param, name) in enumerate(zip(params, names, strict=True))
            if param.grad is not None
        }

    def read(self, index: int) -> Sequence[Tensor]:
        """The tensors to send to the owner."""
        gradient = self.gradients.get(index)
        return self._locals[index], torch.zeros_like(self._locals[index]) if gradient is None else gradient

    def write(self, block: Block, index: tuple[slice, ...], values: Tensor) -> None:
        """Write received values, only of parameters with gradients."""
        if block.key.tensor in self.gradients:
            self.write_any(block, index, values)

    def write_any(self, block: Block, index: tuple[slice, ...], values: Tensor) -> None:
        """Write received values."""
        self._locals[block.key.tensor][index].copy_(values)

    def wholes(self, stacks: Sequence[Stack]) -> "Wholes":
        """What the owner has received."""
        return {
            stack.blocks[0].key.tensor: (
                stack.tensors[0][0],
                stack.tensors[1][0] if stack.blocks[0].key.tensor in self.gradients else None,
            )
            for stack in stacks
        }


Wholes = dict[int, tuple[Tensor, Tensor | None]]
"""Parameters with their gradients, if any, by index."""


class _SharedClosure:
    """A closure that the owner of all parameters evaluates as often as it likes, on all ranks."""

    def __init__(
        self,
        exchange: OwnerExchange,
        params: Sequence[Tensor],
        names: Sequence[str],
        closure: Callable[[], Any],
    ) -> None:
        axes = exchange.axes()
        self._exchange = exchange
        self._make_shards = partial(_Shards, params, names)
        self._closure = closure
        self._rank_group = RankGroup(axes[0].pg if axes else None)
        self._is_evaluating = False

    def gather(self) -> Wholes:
        """The current parameters and gradients on the owner; nothing on other ranks."""
        self._shards = self._make_shards()
        self._stacks = self._exchange.gather(self._shards.read)
        return self._shards.wholes(self._stacks)

    def step(self, instance: _Instance, wholes: Wholes, groups: Sequence[dict[str, Any]], state: Any) -> Any:
        """On the owner: step. Returns the loss and the changes to param groups, or an error."""
        outcome: Any
        told: Any
        stacks = self._stacks

        def evaluate() -> Any:
            self._is_evaluating = True
            instance.leave_values(wholes)
            self._tell(None, stacks)
            loss = self._evaluated()
            instance.set_gradients(self.gather())
            self._is_evaluating = False
            return loss

        try:
            instance.take(wholes, groups, state)
            changes = instance.step(groups, evaluate)
            outcome = told = instance.loss, changes
        except Exception as error:
            if self._is_evaluating:  # the other ranks are not waiting for the outcome
                raise
            outcome = error
            told = RuntimeError(f"{STEP}: on the owner of all: {type(error).__name__}: {error}")
        finally:
            instance.give(wholes, state)
        self._tell(told, stacks)
        return outcome

    def evaluate_with_owner(self) -> Any:
        """On the other ranks: evaluate until the owner's step ends. Returns its outcome."""
        while True:
            outcome = self._tell(None, [])
            if outcome is not None:
                return outcome
            self._evaluated()
            self.gather()

    def _tell(self, outcome: Any, stacks: list[Stack]) -> Any:
        """Send all ranks the outcome, None before the end, and the values of parameters."""
        told = self._rank_group.broadcast_object(outcome, 0)
        self._exchange.scatter(stacks, [stack.tensors[0] for stack in stacks], self._shards.write_any)
        return told

    def _evaluated(self) -> Any:
        """The loss; the mean over ranks if it is a tensor of one element."""
        with torch.enable_grad():
            loss = self._closure()
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            return loss
        loss = (loss.full_tensor() if isinstance(loss, DTensor) else loss).detach().clone()
        if self._rank_group.pg is not None:
            dist.all_reduce(loss, group=self._rank_group.pg)
        return loss / self._rank_group.size


# --- param groups ---------------------------------------------------------------------------------


def _beside_parameters(state: Mapping[Any, Any]) -> dict[Any, Any]:
    """The class's state under other keys, which each instance keeps separately."""
    return {key: value for key, value in state.items() if not isinstance(key, Tensor)}


def _hyperparameters(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def _join(joint: Changes, changes: Changes, kind: type[Optimizer], rank: int) -> None:
    """Add the changes of other instances, which must be equal."""
    for number, values in changes.items():
        known = joint.setdefault(number, values)
        for key in {**known, **values}:
            if key not in known or key not in values or not are_equal(known[key], values[key]):
                raise ValueError(
                    f"{STEP}: {kind.__name__} has changed {key!r} of param group {number} to "
                    f"{values.get(key)} on rank {rank}, and to {known.get(key)} for other parameters: it "
                    "computes this from all parameters, but each owner has only some. Pass "
                    "single_owner=True, which gives all of them to one rank."
                )


def are_equal(one: Any, other: Any) -> bool:
    """Whether hyperparameters are equal; some are tensors."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and bool(torch.equal(one.cpu(), other.cpu()))
    if isinstance(one, (list, tuple)) and type(one) is type(other) and len(one) == len(other):
        return all(map(are_equal, one, other))
    return type(one) is type(other) and bool(one == other)


def _stand_in(kind: Any, groups: Sequence[dict[str, Any]], options: Mapping[str, Any]) -> Optimizer:
    """An instance over parameters without memory: it makes the class's groups, and checks options.

    The parameters are on the meta device, or, if the class rejects that, one element expanded to the shape.
    """

    def made(device: torch.device | None) -> Any:
        def empty(param: Tensor) -> nn.Parameter:
            one = torch.zeros((), dtype=param.dtype, device=device or dtensor.plain(param).device)
            return nn.Parameter(one.expand(param.shape), requires_grad=param.requires_grad)

        return kind(
            [_hyperparameters(group) | {"params": list(map(empty, group["params"]))} for group in groups],
            **options,
        )

    try:
        found = made(torch.device("meta"))
    except Exception:
        found = made(None)
    if [len(group["params"]) for group in found.param_groups] != [len(group["params"]) for group in groups]:
        raise ValueError(
            f"WholeParameters: {kind.__name__} changes the param groups that it is given, so they would "
            "differ from yours. Pass groups in the form that it makes."
        )
    return found  # type: ignore[no-any-return]


def _looks_across(kind: Any, groups: Sequence[dict[str, Any]], options: Mapping[str, Any]) -> bool:
    """Whether a step of a parameter depends on the gradient of another, tried on small ones in three steps.

    A norm over all gradients leaves no trace in state or param groups, so only a trial finds it. Also False
    if the class cannot step small matrices.
    """

    def stepped(scale: float) -> Tensor:
        pairs = [[nn.Parameter(torch.eye(4).double() + 0.5) for _ in range(2)] for _ in groups]
        some = [_hyperparameters(group) | {"params": pair} for group, pair in zip(groups, pairs, strict=True)]
        torch.default_generator.manual_seed(0)  # only the host's: those of devices are the caller's
        optimizer = kind(deepcopy(some), **options)
        pairs = [group["params"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group.update({"lr": 1e-3} if group.get("lr") == 0 else {})  # a schedule begins
        for step in range(3):
            for first, second in pairs:
                first.grad = torch.sin(torch.arange(16.0).double() + step).view(4, 4)
                second.grad = first.grad.cos() * scale
            optimizers.step_without_hooks(type(optimizer))(optimizer)
        return torch.stack([first.detach().nan_to_num() for first, _ in pairs])

    with torch.random.fork_rng(devices=[]):
        try:
            calm, *stirred = map(stepped, (1.0, 1e6, 0.0))  # 0.0: for classes that normalise each gradient
        except Exception:
            return False
    return not all(torch.equal(calm, each) for each in stirred)


def _described(values: Mapping[str, Any]) -> str:
    """A text that is equal on ranks that pass the same; objects count by class alone."""
    plain = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)

    def text(value: Any) -> str:
        if isinstance(value, (list, tuple)):
            return f"[{', '.join(map(text, value))}]"
        return repr(value) if isinstance(value, plain) else type(value).__qualname__

    return ", ".join(f"{key}={text(value)}" for key, value in values.items()) or "no options"


def _check_class(kind: Any, single_owner: Any) -> None:
    if not isinstance(kind, type) or not issubclass(kind, Optimizer):
        raise TypeError(
            f"WholeParameters: optimizer_class is {describe(kind)}; pass a subclass of "
            "torch.optim.Optimizer, not an instance, and its options beside it."
        )
    if issubclass(kind, (WholeParameters, FlatOptimizer, Muon)):
        raise TypeError(f"WholeParameters: {kind.__name__} steps sharded parameters by itself.")
    check_flags("WholeParameters", single_owner=single_owner)
    closure = inspect.signature(kind.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty and not single_owner:
        raise ValueError(
            f"WholeParameters: {kind.__name__} calls a closure within its step, after changing all "
            "parameters. Pass single_owner=True, which gives all of them to one rank."
        )


break_graphs(inspect.unwrap(WholeParameters.step))  # dynamo fails while it traces it
