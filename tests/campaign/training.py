"""What runs of a draw have in common, whether they train plainly or sharded, with settings or strategies.

`Run` has the model, its optimizer and the notes. A campaign's own run says what a step and a batch are.
"""

import copy
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any
from unittest import mock

import pytest
import torch
from meshed import BATCH_SIZE, part
from models import random_batch
from reference import full
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.tensor import DTensor

from campaign.blocks import SIZES, Failure
from campaign.draws import Draw
from campaign.notes import Notes
from shardwise.comm import buffers


class Run:
    """A draw being run. ``index`` of ``count`` is the part of each batch that is this rank's."""

    model: Any
    optimizer: torch.optim.Optimizer

    def __init__(self, draw: Draw, is_sharded: bool, index: int, count: int) -> None:
        self.draw = draw
        self.is_sharded = is_sharded
        self.index, self.count = index, count
        self.notes: Notes = []
        self.num_batches = 0
        self.place = "start"

    def make_optimizer(self, foreach: bool | None = False) -> torch.optim.Optimizer:
        params, name = list(self.model.parameters()), self.draw["optimizer"]
        if name.startswith("adamw"):
            # The bias of attention's keys has no gradient, only rounding: not to be divided by its own size.
            return torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1, eps=1e-3, foreach=foreach)
        return torch.optim.SGD(params, lr=0.05, momentum=0.9 if name == "momentum" else 0.0, foreach=False)

    def loss(self) -> Tensor:
        raise NotImplementedError

    def act_before(self, number: int, step: Draw) -> None:
        raise NotImplementedError

    def train(self, number: int, step: Draw) -> None:
        raise NotImplementedError

    def call(self, module: nn.Module, x: Tensor) -> Tensor:
        return module(x)

    def run_steps(self) -> None:
        """Also notes models that a copy has replaced meanwhile."""
        spared = []
        for number, step in enumerate(self.draw["steps"]):
            model = self.model
            self.act_before(number, step)
            if self.model is not model:
                spared.append(model)
            self.place = f"step {number}"
            self.train(number, step)
        self.place = "at the end"
        for model in [*spared, self.model]:
            self.note_parameters(model)

    def batch(self) -> Tensor:
        self.num_batches += 1
        width = SIZES[self.draw["sizes"]][0]
        return part(random_batch(self.num_batches, BATCH_SIZE, width), self.index, self.count)

    def zero_gradients(self, style: str) -> None:
        if style in ("none", "zeros"):
            self.optimizer.zero_grad(set_to_none=style == "none")
        elif style != "keep":
            self.model.zero_grad(set_to_none=style == "model")

    # --- microbatches ---

    def micro_plain(self) -> None:
        self.loss().backward()

    def micro_both(self) -> None:
        (self.loss() + self.loss()).backward()

    def micro_in_order(self) -> None:
        first, second = self.loss(), self.loss()
        first.backward()
        second.backward()

    def micro_crossed(self) -> None:
        first, second = self.loss(), self.loss()
        second.backward()
        first.backward()

    def micro_retain(self) -> None:
        loss = self.loss()
        loss.backward(retain_graph=True)
        loss.backward()

    def micro_eval_between(self) -> None:
        loss = self.loss()
        self.evaluate(self.model)
        loss.backward()

    # --- between them ---

    def evaluate(self, module: nn.Module) -> None:
        self.model.eval()
        with torch.no_grad():
            output = self.call(module, self.batch())
        self.note("output", output.double().pow(2).mean(), "mean")
        self.model.train()

    def fail_forward(self, place: int) -> None:
        """The root's own code fails, before or between its blocks."""
        self.model.fails_at = place
        with pytest.raises(Failure):
            self.call(self.model, self.batch())
        self.model.fails_at = None

    def scale(self, factor: float, through_data: bool = False) -> None:
        with torch.no_grad():
            for param in self.model.parameters():
                if param.is_floating_point():
                    (param.data if through_data else param).mul_(factor)

    def through_state(self, full_values: bool, assign: bool = False) -> None:
        state: dict[str, Any] = {n: value.detach().clone() for n, value in self.model.state_dict().items()}
        if full_values:
            state = {name: full(value) for name, value in state.items()}
        self.note("keys", list(state))
        self.scale(0.5)
        self.model.load_state_dict(state, assign=assign)

    def through_dcp(self, options: StateDictOptions) -> None:
        """The same by torch's functions, which a plain run need not do."""
        if self.is_sharded:
            state = get_model_state_dict(self.model, options=options)
            state = {name: value.detach().clone() for name, value in state.items()}
            self.scale(0.5)
            set_model_state_dict(self.model, state, options=options)

    def reload_optimizer(self) -> None:
        state = copy.deepcopy(self.optimizer.state_dict())
        self.optimizer = self.make_optimizer()
        self.optimizer.load_state_dict(state)

    def fail_in_backward(self, block: nn.Module) -> bool:
        """Backward fails when it reaches a block, and whether it did; its gradients are thrown away."""
        has_failed = True

        def hook(module: nn.Module, args: Any, output: Tensor) -> None:
            if output.requires_grad:
                output.register_hook(fail)

        handle = block.register_forward_hook(hook)
        with suppress(Failure):
            self.loss().backward()
            has_failed = False
        handle.remove()
        self.optimizer.zero_grad()
        return has_failed

    # --- noting ---

    def note(self, name: str, value: Any, kind: str = "same") -> None:
        if isinstance(value, DTensor):
            value = value.full_tensor()
        if isinstance(value, Tensor):
            value = value.detach().clone()
        self.notes.append((f"{self.place}: {name}", kind, value))

    def note_gradients(self) -> None:
        for name, param in self.model.named_parameters():
            self.note(f"gradient of {name}", full(param.grad))

    def note_parameters(self, model: nn.Module) -> None:
        for name, param in model.named_parameters():
            self.note(name, full(param))


def fail(*_: Any) -> None:
    raise Failure


def emptying_buffers(draw: Draw) -> AbstractContextManager[Any]:
    """Small buffers lose their memory as large ones do, where the draw says so."""
    return mock.patch.object(buffers, "KEPT_ON_HOST_BYTES", 0) if draw["empties_buffers"] else nullcontext()
