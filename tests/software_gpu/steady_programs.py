"""What a steady step takes and asks on a device: memory of the allocator, waits of the host, collectives."""

import argparse
import gc
import os
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from gpt import GPT, batch_of
from models import shard_tower
from torch import nn

import shardwise
from shardwise.optim import FlatOptimizer
from software_gpu import inside
from software_gpu.training import BF16, OFFLOAD, Model, join, mesh_of, tokens

# --- allocations and waits ------------------------------------------------------------------------

# Settings of fully_shard, and whether there are two replicas.
STEADY: dict[str, dict[str, Any]] = {
    "zero3": {},
    "zero2": {"reshard_after_forward": False},
    "hybrid": {"hybrid": True},
    "bfloat16": {"mp_policy": BF16},
    "bfloat16, zero2": {"mp_policy": BF16, "reshard_after_forward": False},
    "hybrid, bfloat16": {"mp_policy": BF16, "hybrid": True},
    "offloaded": {"offload_policy": OFFLOAD},
    "offloaded, bfloat16": {"offload_policy": OFFLOAD, "mp_policy": BF16},
    "clipped": {"max_norm": 0.1},
    "flat": {"is_flat": True},
    "accumulated without sync": {"accumulated": 2},
    "storage kept": {"keeps_storage": True},
    "two forwards before a backward": {"forwards": 2},
}


def sharded_model(hybrid: bool = False, **settings: Any) -> Any:
    torch.manual_seed(0)
    model: Any = Model().cuda()
    world = dist.get_world_size()
    shape, names = ((2, world // 2), ("replicate", "shard")) if hybrid else ((world,), ("shard",))
    mesh = mesh_of(shape, names)
    shard_tower(model, mesh=mesh, **settings)
    return model


def costs(
    max_norm: float | None = None,
    is_flat: bool = False,
    accumulated: int = 1,
    keeps_storage: bool = False,
    forwards: int = 1,
    **settings: Any,
) -> dict[str, int]:
    """What three steps from the third on take and wait for. What torch itself calls a wait raises in them."""
    model = sharded_model(**settings)
    model.set_keep_unsharded_storage(keeps_storage)
    is_on_host = next(model.parameters()).device.type == "cpu"
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    optimizer = FlatOptimizer(optimizer) if is_flat else optimizer
    batches = [tokens(number, dist.get_rank()).cuda() for number in range(5 * accumulated)]
    before: dict[str, int] = {}
    for number, batch in enumerate(batches):
        if number == 2 * accumulated:
            torch.cuda.synchronize()
            before = counted()
            torch.cuda.set_sync_debug_mode("default" if is_on_host and max_norm else "error")
        is_last = number % accumulated == accumulated - 1
        model.set_requires_gradient_sync(is_last)
        sum(model(batch) for _ in range(forwards)).backward()
        if is_last:
            if max_norm is not None:
                shardwise.clip_grad_norm_(model.parameters(), max_norm)
            optimizer.step()
            optimizer.zero_grad()
    torch.cuda.set_sync_debug_mode("default")
    found = {name: value - before[name] for name, value in counted().items()}
    torch.cuda.synchronize()
    return {name: value for name, value in found.items() if value}


_asked: Counter[str] = Counter()


def _counting(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def counted_function(*args: Any, **kwargs: Any) -> Any:
        _asked[name] += 1
        return function(*args, **kwargs)

    return counted_function


if torch.backends.cuda.is_built():  # the test collects this file with every build, and skips then
    # Beneath torch.cuda.current_stream.
    torch._C._cuda_getCurrentStream = _counting("current streams", torch._C._cuda_getCurrentStream)
    # Made by the Python methods of torch.cuda's streams, of which torch.Stream has its own in C.
    torch.cuda.Event.__new__ = _counting("events in Python", torch.cuda.Event.__new__)  # type: ignore[assignment]


def counted() -> dict[str, int]:
    """What the host asked of devices that takes time, and memory that it pinned."""
    counts = inside.counts()
    waits = {name: counts[name] for name in ("allocations", "device waits", "stream waits", "event waits")}
    pinned = torch.cuda.host_memory_stats()["num_host_alloc"]
    asked = {name: _asked[name] for name in ("current streams", "events in Python")}
    return {**waits, **asked, "pinned": pinned}


def steady(names: list[str], backend: str = "nccl") -> dict[str, dict[str, int]]:
    join(backend)
    return {name: costs(**STEADY[name]) for name in names}


# --- peaks ----------------------------------------------------------------------------------------

SIZES = argparse.Namespace(vocab=64, width=384, heads=4, layers=5, context=8, batch=1)
SMALL = argparse.Namespace(vocab=256, width=128, heads=4, layers=4, context=64, batch=8)  # groups below 1 MB


def peaks_of(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> tuple[dict[str, int], int]:
    """The allocator's peaks of a later step by phase, and what is allocated between steps."""
    peaks = {}
    rest = 0
    for _ in range(3):
        optimizer.zero_grad()
        torch.cuda.synchronize()
        rest = torch.cuda.memory_allocated()
        kept: list[Any] = []
        for phase, act in (
            ("forward", lambda kept=kept: kept.append(model(*batch))),
            ("backward", lambda kept=kept: kept.pop().backward()),
            ("optimizer", optimizer.step),
        ):
            torch.cuda.reset_peak_memory_stats()
            act()
            torch.cuda.synchronize()
            peaks[phase] = torch.cuda.max_memory_allocated()
    return peaks, rest


def measured(
    strategy: str, sharded: bool = True, sizes: Any = SIZES, **settings: Any
) -> tuple[dict[str, int], int]:
    # The model before this one is in cycles that pass through C++: the first collection frees none of its memory. If it
    # were freed during the steps below, they would seem to take less by that much.
    while gc.collect():
        pass
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.manual_seed(0)
    with torch.device("cuda"):
        model: Any = GPT(sizes)
    batch = [tensor.cuda() for tensor in batch_of(dist.get_rank(), sizes)]
    before += sum(each.nbytes for each in batch)
    if sharded:
        shardwise.shard_model(model, strategy=strategy, **settings)
    else:
        model.to(settings.get("dtype"))
    optimizer = torch.optim.AdamW(model.parameters())
    peaks, rest = peaks_of(model, optimizer, batch)
    return {phase: peak - before for phase, peak in peaks.items()}, rest - before


def estimated(strategy: str, sizes: Any = SIZES, **settings: Any) -> dict[str, int]:
    with torch.device("meta"):
        model = GPT(sizes)
    world = dist.get_world_size()
    (row,) = shardwise.estimate(
        model,
        world=(2, world // 2) if strategy.startswith("hybrid") else world,
        strategy=strategy,
        batch=batch_of(0, sizes),
        **{"activation_checkpointing": False, **settings},
    ).rows
    return {phase: peak.num_bytes for phase, peak in row.peaks.items()}


def peaks_against_estimates(strategies: list[str], **more: Any) -> dict[str, dict[str, float]]:
    """What the allocator says of each phase, as a part of what the estimate said."""
    join()
    os.environ["LOCAL_WORLD_SIZE"] = str(dist.get_world_size() // 2)  # hosts that hybrid strategies see
    found = {}
    for name in strategies:
        for what, settings in (("", {}), (", bf16", {"mp_policy": "bf16"})):
            (peaks, _), said = measured(name, **settings, **more), estimated(name, **settings, **more)
            found[name + what] = {phase: peaks[phase] / said[phase] for phase in said}
    return found


def peaks_in_blocks() -> dict[str, dict[str, float]]:
    """Memory of a step beside what is there between steps and activations, in blocks: see docs/explain/memory.md."""
    join()
    found = {}
    in_parts = {"comm_policy": shardwise.CommPolicy(part_bytes=0)}
    for name, dtype, settings in (
        ("float32", torch.float32, {}),
        ("float32, in parts", torch.float32, in_parts),
        ("bf16", torch.bfloat16, {"mp_policy": "bf16"}),
        ("bf16, in parts", torch.bfloat16, {"mp_policy": "bf16", **in_parts}),
    ):
        plain, plain_rest = measured("", sharded=False, dtype=dtype)
        ours, rest = measured("zero3", **settings)
        block = sum(param.numel() for param in GPT(SIZES).blocks[0].parameters()) * dtype.itemsize
        # Forward of the plain model adds activations alone; its backward adds all gradients as well.
        activations = plain["forward"] - plain_rest
        shards_of_gradients = (
            sum(param.numel() for param in GPT(SIZES).parameters()) * 4 / dist.get_world_size()
        )
        found[name] = {
            "forward": (ours["forward"] - rest - activations) / block,
            "backward": (ours["backward"] - rest - activations - shards_of_gradients) / block,
        }
    return found


# --- collectives ----------------------------------------------------------------------------------

LINE = re.compile(
    r"\[nccl\] (?P<comm>\S+) rank \d+ stream (?P<stream>\S+): (?P<kind>\S+) of (?P<elements>\d+) elements of type "
    r"(?P<type>\d+) \(reduction (?P<reduction>\d+), root \d+\)"
)
TYPES = {7: "float32", 9: "bfloat16", 4: "int64", 2: "int32", 1: "uint8", 0: "int8"}
REDUCTIONS = {0: "sum", 2: "max", 4: "mean", 5: "scaled sum"}


@contextmanager
def noted_collectives(lines: list[str]) -> Iterator[None]:
    """What NCCL is asked for meanwhile, in words. SOFTWARE_GPU_LOG has to be set: the library writes to stderr."""
    with tempfile.TemporaryFile() as log:
        stderr = os.dup(2)
        os.dup2(log.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
        log.seek(0)
        text = log.read().decode()
    names: dict[str, dict[str, str]] = {"communicator": {}, "stream": {}}

    def named(kind: str, value: str) -> str:
        known = names[kind]
        return known.setdefault(value, f"{kind} {'ABCDEFGH'[len(known)]}")

    for found in LINE.finditer(text):
        kind, reduction = found["kind"], REDUCTIONS[int(found["reduction"])]
        what = f"{kind} ({reduction})" if "reduce" in kind else kind
        where = f"{named('communicator', found['comm'])}, {named('stream', found['stream'])}"
        lines.append(f"{what:<27} {found['elements']:>6} {TYPES[int(found['type'])]:<8}  {where}")


def collectives_of_a_step(settings: dict[str, Any]) -> list[str]:
    """Of the third step of a small model."""
    join()
    model = sharded_model(**settings)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    lines: list[str] = []
    for step in range(3):
        batch = tokens(step, dist.get_rank()).cuda()
        lines.clear()
        with noted_collectives(lines):
            model(batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            torch.cuda.synchronize()
    return lines


# --- memory that the simulation refuses -----------------------------------------------------------


def one_tensor() -> float:
    return torch.ones(1, device="cuda").item()
