"""Steps beside the peer's on one GPU: time, host, launches, waits, memory; and what a wire would leave.

Claim: where copies around collectives weigh most (sequences of 8), a step takes shardwise at most 0.80 of the
time of torch's FSDP2 ("the peer"), and its peak memory is at most 0.85 of the peer's. Of the time of a wire
no more is left over than with the peer as it comes. Refuted by a ratio above those by more than the
quartiles.

`items` runs steps on torch's fake process group: kernels, copies, allocations and launches are real, the wire
is not. `items_of_overlap` runs them in a world of clones whose collectives last as long as their bytes would
take on a wire. The columns, and what it cannot show: README.md.
"""

import argparse
import gc
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import (
    OURS,
    PEER,
    PEER_TUNED,
    PLAIN,
    VARIANTS,
    Sample,
    Spread,
    alternate,
    fake_world,
    find_library,
    print_table,
    ratios_to_peer,
    shard,
)
from copies import Copies, count_copies
from gpt import GPT, batch_of
from one_device.groups import CloneWorld
from one_device.lanes import Wire, cycles_per_ms
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from gpu_parts.plan import Item, Options, Row
from gpu_parts.trace import COUNTED, Launches, read_trace

WORLD = 8
WIDE = {"layers": 4, "width": 4096, "heads": 32, "vocab": 256, "batch": 1}
MODELS: dict[str, dict[str, int]] = {
    "4 x 4096, 8 tokens": {**WIDE, "context": 8},
    "4 x 4096, 512 tokens": {**WIDE, "context": 512},
    # 16 x 12 x 2048^2 and two tables of 50304 x 2048: 1.01 B.
    "GPT of 1 B": {"layers": 16, "width": 2048, "heads": 16, "vocab": 50304, "context": 1024, "batch": 4},
    # Only where there is a wire: enough to compute to hide it.
    "8 x 4096, 4096 tokens": {**WIDE, "layers": 8, "context": 2048, "batch": 2},
    "4 x 1024, 8 tokens": {**WIDE, "width": 1024, "heads": 16, "context": 8},
    "tiny": {"layers": 2, "width": 64, "heads": 2, "vocab": 32, "context": 8, "batch": 1},
}
MEASURED = ("4 x 4096, 8 tokens", "4 x 4096, 512 tokens", "GPT of 1 B")
WITH_WIRE = ("8 x 4096, 4096 tokens",)
PRECISIONS = ("bf16", "mixed")
WIRES_GB_PER_S = (50.0, 200.0)
TIME_COLUMNS = {
    "name": "model",
    "variant": "variant",
    "step_ms": "step, ms",
    "ratio_to_peer": "ratio to peer",
    "host_ms": "host, ms",
    "host_to_peer": "ratio to peer",
    "group_host_ms": "in the group, ms",
    "added_to_peer": "added",
    "busy_ms": "busy, ms",
    "in_group_ms": "in group, ms",
    "exposed_ms_a_block": "exposed, ms a block",
}
COUNT_COLUMNS = {
    "name": "model",
    "variant": "variant",
    "kernels": "kernels",
    "in_group_kernels": "in group",
    "copied_mb": "copied, MB",
    "filled_mb": "filled, MB",
    "syncs": "syncs",
    "mallocs": "mallocs",
    "allocated_mb": "allocated, MB",
    "allocated_to_peer": "to peer",
    "reserved_mb": "reserved, MB",
    "reserved_to_peer": "to peer",
}
WIRE_COLUMNS = {
    "name": "model",
    "variant": "variant",
    "without_ms": "without, ms",
    "with_ms": "with, ms",
    "wire_ms": "the wire's time, ms",
    "left_ms": "left over, ms",
    "left_ms_a_block": "a block",
    "left_to_peer": "ratio to peer",
}


# --- a step, timed --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    model: str
    world: int
    precision: str
    device: str

    @property
    def sizes(self) -> argparse.Namespace:
        return argparse.Namespace(**MODELS[self.model])


class Trainer:
    def __init__(self, variant: str, case: Case) -> None:
        self.case = case
        torch.manual_seed(0)
        is_mixed = case.precision == "mixed"
        with torch.device(case.device):
            model = GPT(case.sizes)
        settings: dict[str, Any] = {"mesh": init_device_mesh(case.device, (case.world,))}
        if is_mixed and variant != PLAIN:
            policy = find_library(variant).MixedPrecisionPolicy
            settings["mp_policy"] = policy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        else:
            model.to(torch.bfloat16)
        shard(variant, model, model.blocks, **settings)
        self.model = model
        self.batch = [tensor.to(case.device) for tensor in batch_of(0, case.sizes)]

    def step(self) -> Tensor:
        loss: Tensor = self.model(*self.batch)
        loss.backward()
        return loss.detach()

    def timed_step(self, _: int) -> Sample:
        """Time a step on the device and on the host, from an idle device on."""
        moments: list[float] = []

        def step() -> None:
            moments.append(time.perf_counter())
            self.step()
            moments.append(time.perf_counter())

        times = timed_act(step, self.case.device)
        moments.append(time.perf_counter())
        self.model.zero_grad()
        begin, returned, idle = moments
        return {**times, "host_ms": (returned - begin) * 1e3, "wall_ms": (idle - begin) * 1e3}

    def copies(self) -> Copies:
        with torch.autograd.set_multithreading_enabled(False):
            counted = count_copies(self.step)
        self.model.zero_grad()
        if not counted.saw_backward:
            raise RuntimeError("The dispatch mode saw no operator of backward; counts are wrong.")
        return counted

    def group_host_ms(self, times: int = 10) -> float:
        """What the host spends in the fake group's own calls of a step, timed alone on other tensors."""
        with torch.autograd.set_multithreading_enabled(False), _Collectives() as recorded:
            self.step()
        self.model.zero_grad()
        calls = [(func, tree_map_only(_Spec, _Spec.tensor, args)) for func, args in recorded.calls]
        found = []
        for _ in range(times):
            synchronize(self.case.device)
            start = time.perf_counter()
            for func, args in calls:
                func(*args)
            found.append((time.perf_counter() - start) * 1e3)
        synchronize(self.case.device)
        return statistics.median(found)

    def launches(self) -> Launches:
        """What a step launches on the device, from the profiler's trace."""
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (self.case.device == "cuda")
        synchronize(self.case.device)
        with profile(activities=activities, acc_events=True) as seen:
            with record_function(COUNTED):
                self.step()
            synchronize(self.case.device)
        self.model.zero_grad()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "trace.json")
            seen.export_chrome_trace(str(path))
            return read_trace(json.loads(path.read_text())["traceEvents"])


@dataclass(frozen=True)
class _Spec:
    """A tensor's shape, dtype and device, without its memory."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    def tensor(self) -> Tensor:
        return torch.zeros(self.shape, dtype=self.dtype, device=self.device)


class _Collectives(TorchDispatchMode):
    """Records the collectives that pass, with specs in place of tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            specs = tree_map_only(Tensor, lambda t: _Spec(t.shape, t.dtype, t.device), args)
            self.calls.append((func, specs))
        return func(*args, **(kwargs or {}))


class Iterations:
    """Whole iterations of one variant, each on tokens of its own: forward, backward, AdamW, zero_grad."""

    def __init__(self, variant: str, case: Case, keeps: bool = False, **settings: Any) -> None:
        self.trainer = Trainer(variant, case)
        model: Any = self.trainer.model
        if keeps:
            model.set_reshard_after_forward(False)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, **settings)

    def load(self, index: int) -> None:
        """The tokens of an iteration, into memory that stays where it is."""
        for here, there in zip(self.trainer.batch, batch_of(index, self.trainer.case.sizes), strict=True):
            here.copy_(there)

    def take(self) -> Tensor:
        loss = self.trainer.step()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def eager(self, indices: Iterable[int]) -> list[Tensor]:
        losses = []
        for index in indices:
            self.load(index)
            losses.append(self.take())
        return losses


def timed_act(act: Callable[[], Any], device: str) -> Sample:
    """The time that something takes from an idle device on; on the device, if it is one."""
    synchronize(device)
    if device != "cuda":
        start = time.perf_counter()
        act()
        return {"step_ms": (time.perf_counter() - start) * 1e3}
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    act()
    end.record()
    torch.cuda.synchronize()
    return {"step_ms": begin.elapsed_time(end)}


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


# --- memory ---------------------------------------------------------------------------------------


def peaks(variant: str, case: Case) -> dict[str, float]:
    """The most memory of three steady steps of a model of its own, in MB; empty without a CUDA device."""
    if case.device != "cuda":
        return {}
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before, before_reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    trainer = Trainer(variant, case)
    for index in range(6):
        if index == 3:  # what building and the first steps left is not what a step needs
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        trainer.step()
        trainer.model.zero_grad()
    torch.cuda.synchronize()
    return {
        "allocated_mb": (torch.cuda.max_memory_allocated() - before) / 1e6,
        "reserved_mb": (torch.cuda.max_memory_reserved() - before_reserved) / 1e6,
    }


# --- rows -----------------------------------------------------------------------------------------


def measure(case: Case, *, warmup: int, steps: int) -> list[dict[str, Any]]:
    trainers = {variant: Trainer(variant, case) for variant in VARIANTS}
    timed = {variant: trainer.timed_step for variant, trainer in trainers.items()}
    times = alternate(timed, warmup=warmup, steps=steps)
    copies = {variant: trainer.copies() for variant, trainer in trainers.items()}
    launches = {variant: trainer.launches() for variant, trainer in trainers.items()}
    group_host_ms = {variant: trainer.group_host_ms() for variant, trainer in trainers.items()}
    has_device = case.device == "cuda"
    trainers.clear()
    timed.clear()
    memory = {variant: peaks(variant, case) for variant in VARIANTS}
    host = {v: each["host_ms"] for v, each in times.items()}
    added = {v: host[v] - host[PLAIN] - group_host_ms[v] for v in times if v != PLAIN}
    ratios = {
        "ratio_to_peer": ratios_to_peer({v: each["step_ms"] for v, each in times.items()}),
        "host_to_peer": ratios_to_peer(host),
        "added_to_peer": ratios_to_peer(added),
    }
    rows = []
    for variant, measured in times.items():
        beyond, launched = copies[variant].beyond(copies[PLAIN]), launches[variant]
        row = {
            "variant": variant,
            **{name: vars(Spread.of(measured[name])) for name in ("step_ms", "host_ms", "wall_ms")},
            **{name: vars(of[variant]) if variant in of else None for name, of in ratios.items()},
            "group_host_ms": group_host_ms[variant],
            **{f"{kind}_mb": beyond.total(kind) / 1e6 for kind in ("copied", "filled", "arithmetic")},
            "collectives": beyond.num_collectives,
            **memory[variant],
            **{key: value if has_device else None for key, value in vars(launched).items()},
            "exposed_ms_a_block": launched.exposed_ms / case.sizes.layers if has_device else None,
            "by_name": dict(launched.by_name.most_common(12)),
        }
        for key in ("allocated_mb", "reserved_mb"):
            if key in row and PEER in memory:
                row[key.replace("_mb", "_to_peer")] = row[key] / memory[PEER][key]
        rows.append(row)
    return rows


# --- items ----------------------------------------------------------------------------------------


def items(options: Options) -> Iterator[Item]:
    for model in ("tiny",) if options.is_tiny else MEASURED:
        for precision in PRECISIONS:
            case = Case(model, WORLD, precision, options.device)
            yield f"{model}, {precision}", partial(_measured, case, options)


def _measured(case: Case, options: Options) -> list[Row]:
    with fake_world(case.world):
        return measure(case, warmup=1 if options.is_tiny else 5, steps=2 if options.is_tiny else 20)


def items_of_overlap(options: Options) -> Iterator[Item]:
    for model in ("tiny",) if options.is_tiny else WITH_WIRE:
        for speed in WIRES_GB_PER_S:
            case = Case(model, WORLD, "bf16", options.device)
            yield f"{model}, {speed:.0f} GB/s", partial(_with_wire, case, speed, options)


def _with_wire(case: Case, gigabytes_per_s: float, options: Options) -> list[Row]:
    """What of the wire's time is left over in a step: steps with and without it take turns as well."""
    warmup, steps = (1, 2) if options.is_tiny else (3, 10)
    wire = Wire(case.world, gigabytes_per_s, cycles_per_ms() if case.device == "cuda" else 0.0)
    with CloneWorld(case.world, wire).joined():
        trainers = {variant: Trainer(variant, case) for variant in (PLAIN, PEER, PEER_TUNED, OURS)}
        one_step(trainers[OURS])
        wire.total_ms = 0.0
        one_step(trainers[OURS])
        total_ms = wire.total_ms
        turns = {
            (variant, is_up): partial(_timed_step, trainer, wire, is_up)
            for variant, trainer in trainers.items()
            for is_up in (False, True)
        }
        timed = alternate({str(turn): act for turn, act in turns.items()}, warmup=warmup, steps=steps)
        trainers.clear()
        turns.clear()
    gc.collect()
    step_ms = {turn: each["step_ms"] for turn, each in timed.items()}
    left = {v: step_ms[str((v, True))] - step_ms[str((v, False))] for v in (PEER, PEER_TUNED, OURS)}
    peers = Spread.of(left[PEER]).median
    return [
        {
            "variant": variant,
            "plain_ms": vars(Spread.of(step_ms[str((PLAIN, False))])),
            "without_ms": vars(Spread.of(step_ms[str((variant, False))])),
            "with_ms": vars(Spread.of(step_ms[str((variant, True))])),
            "wire_ms": total_ms,
            "left_ms": vars(Spread.of(beyond)),
            "left_ms_a_block": Spread.of(beyond).median / case.sizes.layers,
            "left_to_peer": Spread.of(beyond).median / peers if peers else None,
        }
        for variant, beyond in left.items()
    ]


def _timed_step(trainer: Trainer, wire: Wire, is_up: bool, index: int) -> Sample:
    wire.is_up = is_up
    return trainer.timed_step(index)


def one_step(trainer: Trainer) -> None:
    """A step whose time does not count."""
    trainer.step()
    trainer.model.zero_grad()


def print_rows(rows: Sequence[Row]) -> None:
    measured = [row for row in rows if "variant" in row]
    with_wire = [row for row in measured if "wire_ms" in row]
    if with_wire:
        print_table(with_wire, WIRE_COLUMNS)
        return
    print_table(measured, TIME_COLUMNS)
    print()
    print_table(measured, COUNT_COLUMNS)
