"""The scenarios of `tests/races` on software GPUs: real streams, values in place of clocks.

Memory that is given out, or may be, is NaN until it is written (`cpp/poison.cpp`).
"""

import itertools
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import WIDTH as SMALL_WIDTH
from models import Tower
from races import caller_recipes, mutants, scenarios, settings_recipes, stream_recipes
from tensor_parallel import Stack as ParallelStack
from tensor_subclasses import Stack as SubclassStack
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwise.comm.streams import DeviceStream
from software_gpu import training

assert caller_recipes
assert settings_recipes
assert stream_recipes

STEPS = 3
TOLERANCE = 1e-5
"""Two runs of the same work differ by nothing: the CPU's kernels run in one thread, and NCCL sums in order of ranks."""

Observed = list[tuple[str, Tensor]]


class Current:
    """The current stream, as a recipe enters and leaves others. In backward, autograd does that by itself."""

    def __init__(self) -> None:
        self._of_thread = threading.local()

    def append(self, stream: Any) -> None:
        self._left().append((torch.cuda.current_stream(), stream))
        self._set(stream)

    def pop(self) -> Any:
        before, stream = self._left().pop()
        self._set(before)
        return stream

    def _left(self) -> list[tuple[Any, Any]]:
        if not hasattr(self._of_thread, "left"):
            self._of_thread.left = []
        return self._of_thread.left  # type: ignore[no-any-return]

    def _set(self, stream: Any) -> None:
        if threading.current_thread() is threading.main_thread():
            torch.cuda.set_stream(stream)


class SoftwareGpu:
    """What recipes ask of a `Simulation`."""

    def __init__(self) -> None:
        self.torch_device = torch.device("cuda", torch.cuda.current_device())
        self.device = self
        self.computing = torch.cuda.current_stream()
        self.current = Current()

    def stream(self, name: str) -> torch.cuda.Stream:
        return torch.cuda.Stream()


class Inputs:
    """Batches that lie on the device already: a copy from ordinary memory would have the host wait."""

    def __init__(self, rank: int) -> None:
        draws = torch.Generator().manual_seed(rank)
        kinds: list[tuple[int, torch.dtype]] = [
            (scenarios.WIDTH, torch.float32),
            (SMALL_WIDTH, torch.float64),
        ]
        self._made = {
            (4, width, dtype): torch.randn(16, 4, width, dtype=dtype, generator=draws).cuda().unbind()
            for width, dtype in kinds
        }
        self.restart()

    def restart(self) -> None:
        self.given: list[Tensor] = []
        self._next = {kind: itertools.cycle(batches) for kind, batches in self._made.items()}

    def __call__(self, *size: int, dtype: torch.dtype = torch.float32) -> Tensor:
        self.given.append(next(self._next[*size, dtype]).detach())
        return self.given[-1]


@contextmanager
def observed() -> Iterator[Observed]:
    """Copies, made by the computing stream, of what models returned and of gradients before they are dropped."""
    seen: Observed = []
    last_forward = (Tower, ParallelStack, SubclassStack)

    def note_output(module: nn.Module, _: Any, output: Any) -> None:
        if isinstance(module, last_forward) and isinstance(output, Tensor):
            seen.append(("output", output.detach().clone()))

    def noting_gradients(zero: Any) -> Any:
        def zero_grad(owner: Any, *args: Any, **kwargs: Any) -> None:
            groups = [owner.parameters()] if isinstance(owner, nn.Module) else _params_of(owner)
            for param in itertools.chain(*groups):
                if param.grad is not None:
                    seen.append(("gradient", local(param.grad).clone()))
            zero(owner, *args, **kwargs)

        return zero_grad

    with pytest.MonkeyPatch.context() as patch:
        for owner in (torch.optim.Optimizer, nn.Module):
            patch.setattr(owner, "zero_grad", noting_gradients(owner.zero_grad))
        handle = nn.modules.module.register_module_forward_hook(note_output)
        try:
            yield seen
        finally:
            handle.remove()


def _params_of(optimizer: torch.optim.Optimizer) -> list[Any]:
    return [group["params"] for group in optimizer.param_groups]


def local(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def plain(name: str, tensor: Tensor) -> Observed:
    """The values of a tensor; of a subclass, those of the tensors that it is made of."""
    if hasattr(tensor, "__tensor_flatten__"):
        inner = tensor.__tensor_flatten__()[0]
        return [pair for each in inner for pair in plain(f"{name}.{each}", getattr(tensor, each))]
    return [(name, tensor.detach().cpu().clone())]


class Runs:
    """Of this rank."""

    def __init__(self) -> None:
        training.join()
        torch.ops.software_gpu.poison()
        scenarios.PLACE.device_type = "cuda"
        self._inputs = scenarios.PLACE.make_input = Inputs(dist.get_rank())

    def run(self, scenario: str) -> Observed:
        """What a scenario computes in three steps."""
        torch.manual_seed(0)
        self._inputs.restart()
        with observed() as seen:
            step = scenarios.SCENARIOS[scenario].recipe(SoftwareGpu())  # type: ignore[arg-type]
            torch.cuda.synchronize()
            for _ in range(STEPS):
                model = step()
            seen += [("gradient", local(p.grad).clone()) for p in model.parameters() if p.grad is not None]
            seen += [("gradient", x.grad.clone()) for x in self._inputs.given if x.grad is not None]
        torch.cuda.synchronize()
        seen += [(name, local(param)) for name, param in model.named_parameters()]
        values = [pair for name, tensor in seen for pair in plain(name, tensor)]
        del step, model, seen
        torch.cuda.empty_cache()
        return values


def difference(values: Observed, expected: Observed) -> str:
    if len(values) != len(expected):
        return f"{len(values)} values in place of {len(expected)}"
    for index, ((name, value), (_, wanted)) in enumerate(zip(values, expected, strict=True)):
        off = (value.double() - wanted.double()).abs().max().item() if value.numel() else 0.0
        if not off <= TOLERANCE:
            return f"{name} ({index}) is off by {off:.2g}"
    return ""


def references(names: list[str], folder: Path) -> list[str]:
    """Save what scenarios compute when all work is done at once; names of those in which anything is NaN."""
    runs, unwritten = Runs(), []
    for name in names:
        print(f"{name} ...", flush=True)
        values = runs.run(name)
        torch.save(values, folder / f"{name.replace('/', '-')} {dist.get_rank()}")
        unwritten += [name] if any(value.isnan().any() for _, value in values) else []
    return unwritten


def differences(names: list[str], folder: Path) -> list[str]:
    """For each scenario what is another value than in `references`; nothing if all are the same."""
    runs, found = Runs(), []
    for name in names:
        print(f"{name} ...", flush=True)
        expected = torch.load(folder / f"{name.replace('/', '-')} {os.environ['RANK']}")
        found.append(difference(runs.run(name), expected))
    return found


def _does_not_wait(self: DeviceStream, event: Any = None, users: Any = ()) -> None:
    """For what the computation has queued."""


BROKEN: dict[str, tuple[str, mutants.Patch]] = {
    "no wait for the computation": (
        "checkpointing",
        lambda patch: patch.setattr(DeviceStream, "wait_for_compute", _does_not_wait),
    ),
    **{
        name: mutants.PATCHES[name]
        for name in (
            "gradients are dropped before their reduction was waited for",
            "parameters are freed by the stream on which the last module ran, while another reads them",
        )
    },
}


def broken() -> dict[str, str]:
    """For each of `BROKEN` what is another value than without it, under the same schedule."""
    runs, found = Runs(), {}
    for name, (scenario, apply) in BROKEN.items():
        expected = runs.run(scenario)
        assert difference(runs.run(scenario), expected) == "", "runs differ"
        with pytest.MonkeyPatch.context() as patch:
            apply(patch)
            found[name] = difference(runs.run(scenario), expected)
    return found
