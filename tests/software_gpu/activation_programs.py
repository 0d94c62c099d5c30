"""Activations in host memory between forward and backward: their numbers, and what they leave on a device."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwise
from software_gpu import inside
from software_gpu.training import join

WIDTH, ROWS, DEPTH = 16, 1024, 6
NUM_BYTES = 8 * ROWS * WIDTH  # of an input


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.3)

    def forward(self, x: Tensor, *, context: dict[str, Tensor]) -> Tensor:
        return x + self.dropout(self.down(torch.tanh(self.up(x) * context["gate"] + context["mask"])))


class ChangesItsInput(Layer):
    def forward(self, x: Tensor, *, context: dict[str, Tensor]) -> Tensor:
        y = super().forward(x, context=context)
        x += 1
        return y


class Notes(Layer):
    """Gives the caller more than it returns, and asks whether an input that it gets twice is one tensor."""

    def forward(self, x: Tensor, *, context: dict[str, Any]) -> Tensor:
        y = super().forward(x, context=context)
        context["noted"].append(y.square().mean() if x is context["input"] else y.abs().mean())
        return y


class Decoder(nn.Module):
    """Layers that share an activation and a mask. ``passes_weights``: a parameter and a view of it as well."""

    def __init__(self, passes_weights: bool = False, kind: type[Layer] = Layer) -> None:
        super().__init__()
        self.inlet = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(kind() for _ in range(DEPTH))
        self.scale = nn.Parameter(torch.rand(2, WIDTH))
        self.passes_weights = passes_weights

    def forward(self, x: Tensor) -> Tensor:
        context: dict[str, Any] = {"gate": torch.sigmoid(self.inlet(x)), "mask": torch.ones_like(x)}
        if self.passes_weights:
            context = {"gate": self.scale[0], "mask": self.scale[1]}
        x = self.inlet(x)
        noted: list[Tensor] = []
        for layer in self.layers:
            x = layer(x, context={**context, "input": x, "noted": noted})
        return x.square().mean() + sum(noted)


class OnTwoStreams(nn.Module):
    """Two models, each on a stream of its own, by turns."""

    def __init__(self) -> None:
        super().__init__()
        self.halves = nn.ModuleList(Decoder() for _ in range(2))
        self.streams: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        now = torch.cuda.current_stream()
        self.streams = self.streams or [torch.cuda.Stream() for _ in self.halves]
        found = [x, x]
        for stream in self.streams:
            stream.wait_stream(now)
        for index in range(DEPTH):
            for number, (half, stream) in enumerate(zip(self.halves, self.streams, strict=True)):
                with torch.cuda.stream(stream):
                    x = found[number] if index else half.inlet(found[number])
                    context = {"gate": half.scale[0], "mask": half.scale[1]}
                    found[number] = half.layers[index](x, context=context)
        for stream in self.streams:
            now.wait_stream(stream)
        return (found[0] * found[1]).square().mean()


MODELS: dict[str, Callable[[], nn.Module]] = {
    "activations passed": Decoder,
    "weights passed": partial(Decoder, True),
    "noting": partial(Decoder, False, Notes),
    "on two streams": OnTwoStreams,
}


def sharded(offloads: bool | None, make: Callable[[], nn.Module] = Decoder) -> Any:
    """``offloads``: None without checkpointing."""
    torch.manual_seed(0)
    model = make().double().cuda()
    checkpoints = offloads is not None and Layer
    return shardwise.shard_model(
        model, wrap=Layer, activation_checkpointing=checkpoints, activation_offloading=bool(offloads)
    )


def batch(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * seed + dist.get_rank())
    return torch.randn(ROWS, WIDTH, dtype=torch.float64, generator=generator).cuda()


# --- numbers --------------------------------------------------------------------------------------


def a_step(model: Any) -> None:
    model(batch(0)).backward()


def steps_with_and_without_backward(model: Any) -> None:
    for seed in range(3):
        model(batch(seed))
        model(batch(seed)).backward()
        with torch.no_grad():
            model(batch(seed))


def two_forwards(model: Any) -> None:
    first, second = model(batch(0)), model(batch(1))
    first.backward()
    second.backward()


def two_backwards(model: Any) -> None:
    loss = model(batch(0))
    loss.backward(retain_graph=True)
    loss.backward()


def through_a_gradient(model: Any) -> None:
    x = batch(0).requires_grad_()
    (gradient,) = torch.autograd.grad(model(x), x, create_graph=True)
    gradient.square().sum().backward()


def of_a_copy(model: Any) -> None:
    twin = copy.deepcopy(model)
    twin(batch(0)).backward()
    model(batch(1)).backward()
    for param, other in zip(model.parameters(), twin.parameters(), strict=True):
        param.grad = None if other.grad is None else param.grad + other.grad


PROGRAMS: dict[str, Callable[[Any], None]] = {
    program.__name__: program
    for program in (
        *(a_step, steps_with_and_without_backward, two_forwards, two_backwards, through_a_gradient),
        of_a_copy,
    )
}


def gradients_of(program: Callable[[Any], None], model: Any) -> list[Tensor]:
    torch.manual_seed(7)
    program(model)
    torch.cuda.synchronize()
    return [param.grad.to_local().cpu() for param in model.parameters() if param.grad is not None]


def differences(names: list[str]) -> dict[str, float]:
    """From the gradients of the same model that keeps everything."""
    join()
    torch.ops.software_gpu.poison()
    found = {}
    for name in names:
        for kind, make in MODELS.items():
            plain, moved = (
                gradients_of(PROGRAMS[name], sharded(offloads, make)) for offloads in (None, True)
            )
            assert len(plain) == len(moved) > 0
            off = max((a - b).abs().max().item() for a, b in zip(plain, moved, strict=True) if a.numel())
            found[f"{name}, {kind}"] = off
    return found


# --- memory and waits -----------------------------------------------------------------------------


def kept(offloads: bool | None) -> dict[str, int]:
    """In inputs of a layer: what forward leaves, and the peak; then what later steps pin and wait for."""
    model = sharded(offloads)
    x = batch(0)
    torch.cuda.reset_peak_memory_stats()
    before = {"bytes": torch.cuda.memory_allocated()}
    # Without backward, whose thread frees its last tensors when it comes to it.
    loss = model(x)
    found = {"after forward": round((torch.cuda.memory_allocated() - before["bytes"]) / NUM_BYTES)}
    loss.backward()
    found["peak"] = round((torch.cuda.max_memory_allocated() - before["bytes"]) / NUM_BYTES)
    for step in range(5):
        if step == 2:
            torch.cuda.synchronize()
            before = counted()
        model(x).backward()
        model.zero_grad()
    torch.cuda.synchronize()
    return found | {name: value - before[name] for name, value in counted().items()}


def counted() -> dict[str, int]:
    counts = inside.counts()
    waits = {name: counts[name] for name in ("stream waits", "event waits")}
    return {**waits, "pinned": torch.cuda.host_memory_stats()["num_host_alloc"]}


def kept_each_way() -> dict[str, dict[str, int]]:
    join()
    return {str(offloads): kept(offloads) for offloads in (None, False, True)}


# --- errors ---------------------------------------------------------------------------------------


def change_an_input() -> str:
    join()
    model = sharded(True, partial(Decoder, False, ChangesItsInput))
    try:
        model(batch(0)).backward()
    except RuntimeError as error:
        return str(error)
    return ""
