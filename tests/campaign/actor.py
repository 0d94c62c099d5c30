"""A rank that runs a program, on sharded models or on plain ones.

    sharded     one actor a process; the library averages gradients
    emulated    all actors in one process, on plain copies; where gradients would be averaged, each actor
                yields, and who drives them averages (test_programs.py)

So an actor is a generator. Its notes are what must be equal.
"""

import copy
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from models import random_batch
from reference import full
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import shardwise
from campaign.blocks import Failure
from campaign.draws import Draw
from campaign.modules import WIDTH, Model, ThroughMethod
from campaign.notes import Notes
from campaign.training import fail
from shardwise import CommPolicy, CPUOffloadPolicy, DataParallelMeshDims, FSDPModule, fully_shard

ROWS = 3  # of each rank's batch

MESHES: dict[str, tuple[tuple[int, ...], tuple[str, ...], DataParallelMeshDims | None]] = {
    **{name: ((int(name),), ("shard",), None) for name in ("1", "2", "3", "4")},
    **{name: ((int(name[0]), int(name[2])), ("replicate", "shard"), None) for name in ("2x2", "1x2", "2x1")},
    "replicate_2": ((2,), ("replicate",), DataParallelMeshDims(replicate="replicate")),
}


def world_of(program: Draw) -> int:
    sizes = MESHES[program["mesh"]][0]
    return sizes[0] * (sizes[1] if len(sizes) > 1 else 1)


def base_models(program: Draw) -> tuple[Model, Model]:
    torch.manual_seed(77 + program["salt"])
    judge: list[Draw] = [{"kind": "plain"}] * program["depth_of_discriminator"]
    return Model(program["blocks"]).double(), Model(judge).double()


def shard(model: Model, program: Draw) -> None:
    sizes, names, dims = MESHES[program["mesh"]]
    last = program["shard_dim"] == -1
    options: dict[str, Any] = {
        "mesh": init_device_mesh("cpu", sizes, mesh_dim_names=names),
        "dp_mesh_dims": dims,
        "reshard_after_forward": program["reshard"],
        "shard_placement_fn": (lambda p: Shard(p.dim() - 1) if p.dim() else None) if last else None,
        "offload_policy": CPUOffloadPolicy() if program["offload"] else None,
        "comm_policy": CommPolicy(
            prefetch=program["prefetch"],
            backward_prefetch=program["backward_prefetch"],
            packing_limit_bytes=program["packing"],
        ),
    }
    for group in _groups_of(model, program["wrap"]):
        fully_shard(group, **options)
    fully_shard(model, **options)
    for module in model.modules():
        if isinstance(module, ThroughMethod):
            shardwise.register_fsdp_forward_method(module, "encode")
    if program["keep_after_backward"]:
        model.set_reshard_after_backward(False)


def _groups_of(model: Model, wrap: str) -> list[Any]:
    blocks = list(model.blocks)
    if wrap == "pairs":
        return [blocks[i : i + 2] for i in range(0, len(blocks), 2)]
    if wrap == "nested":
        return [m for block in blocks for m in _inside_first(block) if m is block or hasattr(m, "inner")]
    return {"blocks": blocks, "root": [], "some": blocks[::2]}[wrap]


def _inside_first(module: nn.Module) -> list[nn.Module]:
    found = [inner for child in module.children() for inner in _inside_first(child)]
    return [*found, *([module] if type(module).forward is not nn.Module.forward else [])]


class Actor:
    def __init__(self, program: Draw, rank: int, is_sharded: bool) -> None:
        self.program = program
        self.rank = rank
        self.is_sharded = is_sharded
        self.notes: Notes = []
        self.where = "start"
        self.num_batches = 0
        self.model, self.judge = base_models(program)
        if is_sharded:
            shard(self.model, program)
            shard(self.judge, program)
        self.optimizers = self._optimizers()

    @property
    def models(self) -> tuple[Model, Model]:
        return self.model, self.judge

    def _optimizers(self) -> list[torch.optim.Optimizer]:
        make: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
            "sgd": lambda params: torch.optim.SGD(params, lr=0.05, foreach=False),
            "momentum": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, foreach=False),
            "adamw": lambda params: torch.optim.AdamW(
                params, lr=0.01, weight_decay=0.1, foreach=False, eps=1e-3
            ),
        }
        return [make[self.program["optimizer"]](list(model.parameters())) for model in self.models]

    # --- steps ---

    def run(self) -> Iterator[None]:
        for number, step in enumerate(self.program["steps"]):
            self.where = f"step {number}"
            if step["before"] is not None:
                getattr(self, f"before_{step['before']}")()
            yield from self._train(step)
        self.where = "end"
        for model in self.models:
            for name, param in model.named_parameters():
                self.note(name, full(param.detach()))
            for name, buffer in model.named_buffers():
                self.note(name, buffer.detach().clone())

    def _train(self, step: Draw) -> Iterator[None]:
        for model, optimizer in zip(self.models, self.optimizers, strict=True):
            if step["zero"] in ("none", "zeros"):
                optimizer.zero_grad(set_to_none=step["zero"] == "none")
            elif step["zero"] == "model":
                model.zero_grad()
        for number, micro in enumerate(step["micro"]):
            self.where = f"{self.where.partition(',')[0]}, {micro['call']} {number}"
            self.sync = micro["sync"]
            if self.is_sharded:
                for model in self.models:
                    model.set_requires_gradient_sync(self.sync)
            yield from getattr(self, f"call_{micro['call']}")()
        for model, optimizer in zip(self.models, self.optimizers, strict=True):
            for name, param in model.named_parameters():
                self.note(f"gradient of {name}", full(param.grad))
            if step["clip"] is not None and any(p.grad is not None for p in model.parameters()):
                clip = shardwise.clip_grad_norm_ if self.is_sharded else nn.utils.clip_grad_norm_
                self.note("norm", full(clip(model.parameters(), step["clip"])))
            optimizer.step()

    def batch(self) -> Tensor:
        self.num_batches += 1
        return random_batch(1000 * self.num_batches + self.rank, ROWS, WIDTH)

    def loss(self, x: Tensor | None = None) -> Tensor:
        loss = self.model(self.batch() if x is None else x).pow(2).mean()
        self.note("loss", loss)
        return loss

    def backward(self, loss: Tensor, **options: Any) -> Iterator[None]:
        """With what a rank among several has after it."""
        loss.backward(**options)
        if self.sync:
            yield

    def note(self, name: str, value: Any) -> None:
        value = value.detach().clone() if isinstance(value, Tensor) else value
        self.notes.append((f"{self.where}: {name}", "same", value))

    # --- what a microbatch does ---

    def call_plain(self) -> Iterator[None]:
        yield from self.backward(self.loss())

    def call_two_losses(self) -> Iterator[None]:
        yield from self.backward(self.loss() + 2 * self.loss())

    def call_retain(self) -> Iterator[None]:
        loss = self.loss()
        yield from self.backward(loss, retain_graph=True)
        yield from self.backward(loss)

    def call_crossed(self) -> Iterator[None]:
        first, second = self.loss(), self.loss()
        yield from self.backward(second)
        yield from self.backward(first)

    def _penalty(self) -> Tensor:
        x = self.batch().requires_grad_()
        (gradient,) = torch.autograd.grad(self.model(x).sum(), [x], create_graph=True)
        self.note("input gradient", gradient)
        return (gradient.norm(dim=1) - 1).pow(2).mean()

    def call_penalty(self) -> Iterator[None]:
        yield from self.backward(self.loss() + self._penalty())

    def call_penalty_then_plain(self) -> Iterator[None]:
        penalty = self._penalty()
        yield from self.backward(self.loss())
        yield from self.backward(penalty)

    def call_input_grad(self) -> Iterator[None]:
        x = self.batch().requires_grad_()
        (gradient,) = torch.autograd.grad(self.loss(x), [x])
        self.note("input gradient", gradient)
        yield from self.backward(self.loss())

    def call_inside_autograd_grad(self) -> Iterator[None]:
        """A gradient that the loss is made of, as a constant."""
        x = self.batch().requires_grad_()
        (gradient,) = torch.autograd.grad(self.model(x).sum(), [x])
        yield from self.backward((self.model(x) * gradient.detach()).mean())

    def call_hooks(self) -> Iterator[None]:
        block = self.model.blocks[0]
        handles = [
            block.register_forward_pre_hook(lambda module, args: (args[0] * 1.5,)),
            block.register_forward_hook(lambda module, args, output: output * 0.5),
            block.register_full_backward_hook(
                lambda module, wrt_in, wrt_out: self.note("passed", wrt_out[0].sum())
            ),
        ]
        yield from self.backward(self.loss())
        for handle in handles:
            handle.remove()

    def call_tensor_hook(self) -> Iterator[None]:
        output = self.model(self.batch())
        output.register_hook(lambda gradient: gradient * 3)
        yield from self.backward(output.mean())

    def call_eval_between(self) -> Iterator[None]:
        loss = self.loss()
        self.before_eval()
        yield from self.backward(loss)

    def call_inference_between(self) -> Iterator[None]:
        loss = self.loss()
        with torch.inference_mode():
            self.note("inferred", self.model(self.batch()).sum())
        yield from self.backward(loss)

    def call_thread(self) -> Iterator[None]:
        losses: list[Tensor] = []
        thread = threading.Thread(target=lambda: losses.append(self.loss()))
        thread.start()
        thread.join()
        yield from self.backward(losses[0])

    def call_gan(self) -> Iterator[None]:
        """The judge learns from the model's outputs, then the model from the judge."""
        fake = self.model(self.batch())
        judged = self.judge(self.batch()).mean() - self.judge(fake.detach()).mean()
        self.note("judged", judged)
        yield from self.backward(judged)
        yield from self.backward(self.judge(fake).mean())

    def call_rollout(self) -> Iterator[None]:
        """Several steps without gradients, then one loss over what they met."""
        x, seen, old = self.batch(), [], []
        with torch.no_grad():
            for _ in range(3):
                seen.append(x)
                old.append(self.model(x))
                x = torch.tanh(old[-1])
        ratio = (self.model(torch.cat(seen)) - torch.cat(old)).exp()
        yield from self.backward(torch.minimum(ratio, ratio.clamp(0.8, 1.2)).mean())

    def call_fails_in_forward(self) -> Iterator[None]:
        self.model.fails_before = len(self.model.blocks) - 1
        with suppress(Failure):
            self.model(self.batch())
        self.model.fails_before = None
        yield from self.backward(self.loss())

    def call_fails_in_backward(self) -> Iterator[None]:
        """The gradients of a backward that fails are thrown away, and all before them."""
        output = self.model(self.batch())
        output.register_hook(fail)
        with suppress(Failure):
            output.mean().backward()
        for model in self.models:
            model.zero_grad()
        yield from self.backward(self.loss())

    def call_wasted_forward(self) -> Iterator[None]:
        self.loss()
        yield from self.backward(self.loss())

    def call_twice_forward(self) -> Iterator[None]:
        yield from self.backward(self.loss(torch.tanh(self.model(self.batch()))))

    def call_detached(self) -> Iterator[None]:
        """Two backwards, the first up to a tensor in between."""
        inner = self.model(self.batch())
        cut = inner.detach().requires_grad_()
        cut.pow(3).mean().backward()
        assert cut.grad is not None
        self.note("cut", cut.grad)
        yield from self.backward((inner * cut.grad).sum())

    # --- what happens between steps ---

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        self.model.eval()
        with torch.no_grad():
            yield
        self.model.train()

    def before_eval(self) -> None:
        with self.evaluating():
            self.note("evaluated", self.model(self.batch()).sum())

    def before_edit(self) -> None:
        with torch.no_grad():
            for param in self.model.parameters():
                if param.is_floating_point() or param.is_complex():
                    param.mul_(0.9)

    def before_freeze(self) -> None:
        self.model.blocks[-1].requires_grad_(False)

    def before_unfreeze(self) -> None:
        for param in self.model.blocks[-1].parameters():
            if param.is_floating_point() or param.is_complex():
                param.requires_grad_(True)

    def before_state_dict(self) -> None:
        state = {name: value.detach().clone() for name, value in self.model.state_dict().items()}
        self.before_edit()
        self.model.load_state_dict(state)

    def before_deepcopy(self) -> None:
        self.model = copy.deepcopy(self.model)
        self.optimizers = self._optimizers()

    def before_unshard(self) -> None:
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.unshard()
                module.reshard()

    def before_to_train(self) -> None:
        """Gradients that are left from a backward whose loss nobody steps on."""
        if self.is_sharded:
            self.model.set_requires_gradient_sync(False)
        self.loss().backward()
        self.model.zero_grad()
