"""A step of all matrices of Muon: elementwise on the shards, orthogonalised at their owners."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from operator import is_
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardwise.optim.hidden_matrices import Coefficients, newton_schulz_cost
from shardwise.optim.owner_exchange import local_gradient, names_of
from shardwise.optim.owners import Block, BlockKey
from shardwise.optim.whole_matrices import WholeMatrices, on_stacks
from shardwise.torch_compat import dtensor, foreach

RowBlocks = Callable[[str, Tensor], Sequence[int] | None]
Orthogonalize = Callable[[Tensor, Coefficients, int, float], Tensor]

BUFFER = "momentum_buffer"


class MuonPlan:
    """The matrices of all param groups, where they are assembled, and the premises of this plan."""

    def __init__(
        self, groups: Sequence[dict[str, Any]], row_blocks: RowBlocks | None, dtype: torch.dtype, limit: int
    ) -> None:
        self.params: list[Tensor] = [param for group in groups for param in group["params"]]
        self.groups = [group for group in groups for _ in group["params"]]
        self.names = names_of(groups)
        blocks: dict[int, Sequence[int]] = {}
        for index, (param, name) in enumerate(zip(self.params, self.names, strict=True)):
            if row_blocks is not None and (found := row_blocks(name, param)) is not None:
                blocks[index] = found
        steps = max((group["ns_steps"] for group in groups), default=1)
        self.exchange = WholeMatrices(
            self.params,
            row_blocks=blocks,
            dtype=dtype,
            cost=partial(newton_schulz_cost, max(1, steps)),
            batch_bytes=limit,
            names=self.names,
        ).exchange

    def is_of(self, groups: Sequence[dict[str, Any]]) -> bool:
        """Whether it is still the plan for ``groups``."""
        params = [param for group in groups for param in group["params"]]
        owners = [group for group in groups for _ in group["params"]]
        is_same = len(params) == len(self.params) and all(map(is_, params, self.params))
        return is_same and all(map(is_, owners, self.groups)) and self.exchange.is_of(params)


class MatrixStep:
    """One step of all matrices that have gradients."""

    def __init__(self, plan: MuonPlan, state: Any, orthogonalize: Orthogonalize) -> None:
        self._plan = plan
        self._state = state
        self._orthogonalize = orthogonalize
        self._gradients: dict[int, Tensor] = {}
        problem = None
        try:
            for index, (param, name) in enumerate(zip(plan.params, plan.names, strict=True)):
                if param.grad is not None:
                    self._gradients[index] = local_gradient(param, name, "Muon needs whole matrices")
                    _check_buffer((state.get(param) or {}).get(BUFFER), param, name)
        except Exception as error:
            problem = error
        plan.exchange.agree("Muon.step", self._gradients, problem)

    def run(self) -> None:
        """Average gradients, decay weights, and add the orthogonalised matrices."""
        self._locals = {index: dtensor.plain(self._plan.params[index]).detach() for index in self._gradients}
        self._buffers = {index: self._buffer(index) for index in self._gradients}
        for key, some in self._by(lambda group: 1 - group["momentum"]).items():
            foreach.lerp_([self._buffers[i] for i in some], [self._gradients[i] for i in some], key)
        for key, some in self._by(lambda group: 1 - float(group["lr"]) * group["weight_decay"]).items():
            foreach.mul_([self._locals[i] for i in some], key)
        self._plan.exchange.run(self._update, on_stacks(self._orthogonalized), self._add, self._gradients)

    def _by(self, value: Callable[[dict[str, Any]], float]) -> dict[float, list[int]]:
        """The matrices by a value of their groups."""
        values = {id(group): value(group) for group in self._plan.groups}
        found: dict[float, list[int]] = {}
        for index in self._gradients:
            found.setdefault(values[id(self._plan.groups[index])], []).append(index)
        return found

    def _buffer(self, index: int) -> Tensor:
        """This rank's part of the average of a matrix's gradients."""
        param, state = self._plan.params[index], self._state[self._plan.params[index]]
        if BUFFER not in state:
            state[BUFFER] = dtensor.placed_as(param, torch.zeros_like(self._gradients[index]))
        buffer = state[BUFFER]
        if isinstance(buffer, DTensor) and (
            buffer.placements != param.placements or buffer.device_mesh != param.device_mesh  # type: ignore[attr-defined]
        ):
            state[BUFFER] = buffer = buffer.redistribute(param.device_mesh, param.placements)  # type: ignore[attr-defined]
        local = dtensor.plain(buffer)
        if self._gradients[index].dtype != local.dtype:
            self._gradients[index] = self._gradients[index].to(local.dtype)
        return local

    def _update(self, index: int) -> tuple[Tensor]:
        """This rank's part of the matrix to orthogonalise."""
        group, buffer = self._plan.groups[index], self._buffers[index]
        return (self._gradients[index].lerp(buffer, group["momentum"]) if group["nesterov"] else buffer,)

    def _orthogonalized(self, matrices: Tensor, keys: list[BlockKey]) -> Tensor:
        alike: dict[Any, list[int]] = {}
        for place, key in enumerate(keys):
            group = self._plan.groups[key.tensor]
            settings = tuple(group["ns_coefficients"]), group["ns_steps"], group["eps"]
            alike.setdefault(settings, []).append(place)
        if len(alike) == 1:
            return self._orthogonalize(matrices, *next(iter(alike)))
        results = torch.empty_like(matrices)
        for settings, places in alike.items():
            results[places] = self._orthogonalize(matrices[places], *settings)
        return results

    def _add(self, matrix: Block, index: tuple[slice, ...], rows: Tensor) -> None:
        group, local = self._plan.groups[matrix.key.tensor], self._locals[matrix.key.tensor]
        lr = _adjusted(float(group["lr"]), group["adjust_lr_fn"], *matrix.shape[-2:])
        local[index].add_(rows.to(local.device), alpha=-lr)


def _adjusted(lr: float, how: str | None, rows: int, columns: int) -> float:
    """The learning rate of a matrix of this shape."""
    if how == "match_rms_adamw":
        return lr * (0.2 * math.sqrt(max(rows, columns)))
    if how == "spectral_unclamped":
        return lr * math.sqrt(rows / columns)
    return lr * math.sqrt(max(1, rows / columns))


def _check_buffer(buffer: Any, param: Tensor, name: str) -> None:
    if buffer is None:
        return
    if isinstance(buffer, DTensor) != isinstance(param, DTensor) or buffer.shape != param.shape:
        raise TypeError(
            f"{name}: '{BUFFER}' in the state is a {type(buffer).__name__} of shape {tuple(buffer.shape)}, "
            f"where a {type(param.data).__name__} of the parameter's shape, {tuple(param.shape)}, is "
            "expected. Load full states with shardwise.state.load_full_optimizer_state_dict."
        )
