"""A moving average of the weights, kept in shards as the weights are."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwise.arguments import check_floating
from shardwise.engine.module_state import module_states_at_rest
from shardwise.layout.fqns import listed
from shardwise.state.named_state import check_at_rest, each_once, named_parameters
from shardwise.torch_compat import dtensor, foreach


class EMA:
    """An exponential moving average of the parameters of ``model``: ``average = d * average + (1 - d) *
    weight``.

    Each rank averages its own shards, without communication; the average costs as much memory as they do. The
    EMA averages the floating-point parameters that are trainable when it is made.

    Args:
        model: sharded, in parts or not at all; with values.
        decay: d, from 0 to 1, or a function from the number of updates so far to d, to begin with smaller
            values.
        dtype: of the average; None: that of each parameter. An average of bfloat16 weights in bfloat16 stops
            moving soon: pass ``torch.float32``.

    Raises:
        ValueError: ``decay`` or ``dtype`` is not as above.
        RuntimeError: the model is in a forward or backward, inside ``unsharded``, on the meta device, or only
            partly loaded.

    Example::

        ema = EMA(model, decay=0.999)
        for batch in batches:
            train_step(model, optimizer, batch)
            ema.update()
        with ema.swap():
            evaluate(model)
            averaged = full_state_dict(model)
    """

    def __init__(
        self,
        model: nn.Module,
        decay: float | Callable[[int], float] = 0.999,
        *,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_at_rest(model, "EMA")
        if not callable(decay):
            _checked(decay)
        check_floating("EMA", dtype)
        self._model = model
        self._decay = decay
        self._is_swapped = False
        self.num_updates = 0
        with torch.inference_mode(False), torch.no_grad():
            self._averages: dict[str, Tensor] = {
                name: param.detach().to(dtype, copy=True)
                for name, param in _averaged(model).items()
                if param.requires_grad
            }

    @torch.no_grad()
    def update(self) -> None:
        """Add the current weights to the average. Call it after each step of the optimizer.

        Raises:
            RuntimeError: inside ``swap()``, or in a forward or backward; or a parameter was frozen when the
                EMA was made, and no longer is.
        """
        self._refuse_swapped("update()")
        module_states_at_rest("EMA.update", self._model)
        params = _averaged(self._model)
        if new := [name for name, p in params.items() if p.requires_grad and name not in self._averages]:
            raise RuntimeError(
                f"EMA: {listed(new)} were frozen when the EMA was made. They are trainable now, but not "
                "averaged. Unfreeze what will train before you make the EMA, or make a new one now."
            )
        decay = _checked(self._decay(self.num_updates)) if callable(self._decay) else self._decay
        averages, weights = self._pairs(params)
        by_dtype: dict[Any, tuple[list[Tensor], list[Tensor]]] = {}
        for average, weight in zip(averages, weights, strict=True):
            some = by_dtype.setdefault((average.dtype, average.device), ([], []))
            some[0].append(average)
            some[1].append(weight.to(average.device, average.dtype))
        with torch.inference_mode(False), torch.no_grad():
            for some_averages, some_weights in by_dtype.values():
                foreach.lerp_(some_averages, some_weights, 1 - decay)
        self.num_updates += 1

    @contextmanager
    def swap(self) -> Iterator[None]:
        """Inside, the model's weights are the averages; afterwards, even after an error, its own again.

        Works in place on the shards; the weights are kept in memory of the same size. Changes of the weights
        inside are lost: evaluate and save there, but do not train.

        Raises:
            RuntimeError: inside another ``swap()``, or in a forward or backward.
        """
        self._refuse_swapped("another swap()")
        module_states_at_rest("EMA.swap", self._model)
        averages, weights = self._pairs(_averaged(self._model))
        with torch.inference_mode(False), torch.no_grad():
            own = [weight.clone() for weight in weights]
            _copy(averages, weights)
        self._is_swapped = True
        try:
            yield
        finally:
            self._is_swapped = False
            with torch.inference_mode(False), torch.no_grad():
                _copy(own, self._pairs(_averaged(self._model))[1])

    def state_dict(self) -> dict[str, Any]:
        """The averages by parameter name, sharded as the parameters are, and the number of updates.

        For ``torch.distributed.checkpoint``, or ``torch.save`` on each rank. The tensors are the averages
        themselves, which the next ``update()`` changes: copy what you want to keep.
        """
        self._refuse_swapped("state_dict()")
        return {"averages": dict(self._averages), "num_updates": self.num_updates}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what ``state_dict`` returned.

        Raises:
            ValueError: it is of other parameters, or has whole tensors instead of DTensors.

        After an error the average is unchanged.
        """
        self._refuse_swapped("load_state_dict()")
        if missing := {"averages", "num_updates"} - state.keys():
            raise ValueError(
                f"EMA.load_state_dict: {listed(sorted(missing))} missing. Pass what state_dict() of an EMA "
                "returned."
            )
        loaded = state["averages"]
        own, theirs = _forms(self._averages), _forms(loaded)
        if wrong := [name for name in {**own, **theirs} if own.get(name) != theirs.get(name)]:
            raise ValueError(
                f"EMA.load_state_dict: {listed(wrong)} are on one side only, of another shape, or whole on "
                "one side and a DTensor on the other. Make the EMA of a model with the same trainable "
                "parameters; and save and load it as states={'ema': ema} of save_checkpoint and "
                "load_checkpoint, which shard whole values."
            )
        for name, value in loaded.items():
            self._averages[name].copy_(value)
        self.num_updates = state["num_updates"]

    def _pairs(self, params: dict[str, nn.Parameter]) -> tuple[list[Tensor], list[Tensor]]:
        """Local tensors: averages, and the current weights, of ``params``, which the model has now."""
        if lost := [name for name in self._averages if name not in params]:
            raise RuntimeError(f"EMA: the model no longer has the parameter {listed(lost)}.")
        averages = [dtensor.plain(average) for average in self._averages.values()]
        weights = [dtensor.plain(params[name]).detach() for name in self._averages]
        for name, average, weight in zip(self._averages, averages, weights, strict=True):
            if average.shape != weight.shape:
                raise RuntimeError(
                    f"EMA: {name} was sharded after the EMA was made. Make the EMA after fully_shard."
                )
        return averages, weights

    def _refuse_swapped(self, what: str) -> None:
        if self._is_swapped:
            raise RuntimeError(
                f"EMA: {what} was called inside swap(), where the weights of the model are the averages."
            )


def _averaged(model: nn.Module) -> dict[str, nn.Parameter]:
    """Floating-point parameters, each once."""
    return each_once((name, param) for name, param in named_parameters(model) if param.is_floating_point())


def _forms(averages: dict[str, Tensor]) -> dict[str, Any]:
    return {name: (value.shape, isinstance(value, DTensor)) for name, value in averages.items()}


def _copy(sources: list[Tensor], targets: list[Tensor]) -> None:
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source)


def _checked(decay: Any) -> float:
    if isinstance(decay, bool) or not isinstance(decay, (int, float)) or not 0 <= decay <= 1:
        raise ValueError(f"EMA: decay is {decay!r}; pass a number from 0 to 1, or a function that gives one.")
    return float(decay)
