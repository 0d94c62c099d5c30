"""Peak transient memory of forward and backward, in units of the largest group's full parameters.

Claim: beside its shards a step holds at most 2 units in forward and 3 in backward, plus what is packed and
the root's own parameters; torch's FSDP2 ("the peer") 3, and 4 to 5. Floor: 1 in forward and 2 in backward (a
block's parameters and their gradients) without any overlap; 2 and 3 with the next block's parameters under
way.

Refuted by: more than 2 and 3 by more than the rest that `--explain` names: it shows what is alive at the
peaks, by what allocated it and when. How it is measured, and what it cannot show: README.md.

    python bench/memory.py --json memory.json
    python bench/memory.py --explain --variants plain ours --dtypes float32 --backends fake
"""

import argparse
import bisect
import gc
import os
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from common import (
    PEER,
    PLAIN,
    fake_world,
    find_library,
    gpt_parser,
    launch,
    parse_variants,
    print_table,
    shard,
    write_json,
)
from gpt import GPT, batch_of
from torch import Tensor, nn
from torch._C._profiler import _EventType
from torch.distributed.device_mesh import init_device_mesh
from torch.profiler import ProfilerActivity, profile, record_function

STEPS = 3
PHASES = ("forward", "backward")
DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16}
COLUMNS = {
    "backend": "group",
    "dtype": "parameters",
    "variant": "variant",
    "forward_units": "forward, units",
    "backward_units": "backward, units",
    "forward_to_peer": "forward, to peer",
    "backward_to_peer": "backward, to peer",
    "kept_units": "kept, units",
    "transport_units": "in transport a step, units",
    "resident_mb": "resident, MB",
}
CUDA_COLUMNS = {
    "forward_allocated_units": "forward, allocator, units",
    "backward_allocated_units": "backward, allocator, units",
    "reserved_mb": "reserved, MB",
}


# --- what was allocated ---------------------------------------------------------------------------


@dataclass
class Allocation:
    """A piece of memory from its allocation to its release."""

    address: int
    num_bytes: int
    begin: int
    chain: tuple[str, ...]
    """What ran when it was allocated, innermost first."""
    end: float = float("inf")
    resident: int = 0
    """So many bytes of it are shards of parameters or of gradients."""

    @property
    def transient(self) -> int:
        """Bytes that count, except those of the transport."""
        return 0 if self.is_transport else self.num_bytes - self.resident

    @property
    def is_transport(self) -> bool:
        """Whether an operator of c10d allocated it, not the library that called the operator."""
        return any(name.startswith("c10d::") for name in self.chain)


@dataclass
class Log:
    """All allocations of one device in order, and when the marked parts ran."""

    allocations: list[Allocation] = field(default_factory=list)
    marks: dict[str, tuple[int, int]] = field(default_factory=dict)

    def set_resident(self, tensors: list[Tensor], at: int) -> int:
        """Count the bytes of ``tensors`` as resident in the memory alive at a moment; return their sum."""
        alive = sorted((a for a in self.allocations if a.begin <= at < a.end), key=lambda a: a.address)
        addresses = [a.address for a in alive]
        for tensor in tensors:
            where = bisect.bisect_right(addresses, tensor.data_ptr()) - 1
            if tensor.numel() == 0:
                continue
            found = alive[where] if where >= 0 else None
            if found is None or tensor.data_ptr() + tensor.nbytes > found.address + found.num_bytes:
                raise RuntimeError(f"A tensor of {tensor.nbytes} bytes lies in no memory that was recorded.")
            found.resident += tensor.nbytes
        return sum(tensor.nbytes for tensor in tensors)

    def peak(self, begin: int, end: int) -> tuple[int, int]:
        """The most transient bytes alive at once between two moments, and when."""
        changes = [(a.begin, a.transient) for a in self.allocations]
        changes += [(int(a.end), -a.transient) for a in self.allocations if a.end != float("inf")]
        now, most, when = 0, 0, begin
        for time, change in sorted(changes):
            if time > end:
                break
            now += change
            if time >= begin and now > most:
                most, when = now, time
        # Without any change between the two there is what was alive at the first.
        at_begin = self.alive_bytes(begin)
        return (most, when) if most >= at_begin else (at_begin, begin)

    def transport_bytes(self, begin: int, end: int) -> int:
        """What the transport allocated between two moments, in all."""
        return sum(a.num_bytes for a in self.allocations if a.is_transport and begin <= a.begin <= end)

    def alive_bytes(self, at: int) -> int:
        return sum(a.transient for a in self.allocations if a.begin <= at < a.end)


@contextmanager
def recorded(device_type: str = "cpu") -> Iterator[Log]:
    """What PyTorch allocates inside, to be read afterwards; ``mark`` names parts."""
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device_type == "cuda")
    log = Log()
    gc.collect()
    with profile(activities=activities, profile_memory=True, acc_events=True) as seen:
        yield log
    vars(log).update(vars(read_log(seen, device_type)))


def mark(name: str) -> Any:
    return record_function(f"mark {name}")


def read_log(seen: profile, device_type: str) -> Log:
    """The log of a profile with ``profile_memory=True``."""
    log, alive = Log(), {}
    tree = seen.profiler.kineto_results.experimental_event_tree()
    for event in sorted(_all(tree), key=lambda event: event.start_time_ns):
        if event.tag == _EventType.TorchOp and event.name.startswith("mark "):
            log.marks[event.name.removeprefix("mark ")] = (event.start_time_ns, event.end_time_ns)
        if event.tag != _EventType.Allocation or event.extra_fields.device.type != device_type:
            continue
        what, now = event.extra_fields, event.start_time_ns
        before = alive.pop(what.ptr, None)
        if before is not None:  # also where its release was not seen: the address is used anew
            before.end = now
        if what.alloc_size > 0:
            alive[what.ptr] = Allocation(what.ptr, what.alloc_size, now, tuple(_chain(event)))
            log.allocations.append(alive[what.ptr])
    return log


def _all(events: Any) -> Iterator[Any]:
    stack = list(events)
    while stack:
        event = stack.pop()
        yield event
        stack.extend(event.children)


def _chain(event: Any) -> Iterator[str]:
    while (event := event.parent) is not None:
        yield event.name


# --- one variant ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    backend: str
    dtype: str
    device: str

    def settings(self, variant: str) -> dict[str, Any]:
        settings: dict[str, Any] = {"mesh": init_device_mesh(self.device, (dist.get_world_size(),))}
        if self.dtype != "float32" and variant != PLAIN:
            policy = find_library(variant).MixedPrecisionPolicy
            settings["mp_policy"] = policy(param_dtype=DTYPES[self.dtype], reduce_dtype=torch.float32)
        return settings


def build(variant: str, case: Case, options: argparse.Namespace) -> GPT:
    """The model as the variant has it; unsharded, in the dtype of computation, for its activations."""
    torch.manual_seed(0)
    with torch.device(case.device):
        model = GPT(options)
    if variant == PLAIN:
        return model.to(DTYPES[case.dtype])
    shard(variant, model, model.blocks, **case.settings(variant))
    return model


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def gradients_of(model: nn.Module) -> list[Tensor]:
    return [local(p.grad) for p in model.parameters() if p.grad is not None]


@dataclass
class Peaks:
    """What one variant held, in bytes."""

    phases: dict[str, int]
    kept: int
    transport: int
    resident: int
    holders: dict[str, list[tuple[int, int, str, str]]]
    """Per phase: bytes, number, allocated by what, and when."""
    allocator: dict[str, int]


def measure(variant: str, case: Case, options: argparse.Namespace) -> Peaks:
    """Build and train a variant for three steps under the profiler; read the third."""
    batch = [tensor.to(case.device) for tensor in batch_of(dist.get_rank(), options)]
    with recorded(case.device) as log:
        model = build(variant, case, options)
        for index in range(STEPS):
            gc.collect()  # at a moment that is not left to chance
            with mark(f"forward {index}"):
                loss = model(*batch)
            with mark(f"backward {index}"):
                loss.backward()
            del loss
            left = gradients_of(model)
            if index < STEPS - 1:
                del left
            model.zero_grad()
            with mark(f"rest {index}"):
                pass
    last = STEPS - 1
    rest = log.marks[f"rest {last}"][0]
    resident = log.set_resident([local(p) for p in model.parameters()], at=rest)
    # `left` keeps the memory of the last gradients, so that it is alive at the end of the log as well.
    log.set_resident(left, at=log.marks[f"backward {last}"][1])
    phases, holders = {}, {}
    for phase in PHASES:
        phases[phase], when = log.peak(*log.marks[f"{phase} {last}"])
        holders[phase] = holders_at(log, when)
    kept = log.alive_bytes(rest)
    transport = log.transport_bytes(log.marks[f"forward {last}"][0], rest)
    allocator = allocator_peaks(model, batch) if case.device == "cuda" else {}
    return Peaks(phases, kept, transport, resident, holders, allocator)


def allocator_peaks(model: nn.Module, batch: list[Tensor]) -> dict[str, int]:
    """What CUDA's caching allocator says of one more step, outside of the profiler."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    rest = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    loss = model(*batch)
    forward = torch.cuda.max_memory_allocated() - rest
    torch.cuda.reset_peak_memory_stats()
    loss.backward()
    torch.cuda.synchronize()
    backward = torch.cuda.max_memory_allocated() - rest
    reserved = torch.cuda.max_memory_reserved()
    model.zero_grad()
    return {"forward": forward, "backward": backward, "reserved": reserved}


def holders_at(log: Log, when: int) -> list[tuple[int, int, str, str]]:
    """What is alive and transient at a moment: bytes, number, allocated by what, and when; largest first."""
    num_bytes: Counter[tuple[str, str]] = Counter()
    numbers: dict[tuple[str, str], int] = defaultdict(int)
    for each in log.allocations:
        if each.begin <= when < each.end and each.transient > 0:
            key = (cause(each.chain), phase_of(each.begin, log))
            num_bytes[key] += each.transient
            numbers[key] += 1
    return [(size, numbers[key], *key) for key, size in num_bytes.most_common()]


def cause(chain: tuple[str, ...]) -> str:
    """The innermost two names that say why: what a library calls it, or the operator and its node."""
    dull = ("autograd::engine", "torch::autograd::AccumulateGrad", "mark ", "aten::empty")
    names = [name for name in chain if not name.startswith(dull)]
    return " in ".join(names[:2]) or "(no operator)"


def phase_of(moment: int, log: Log) -> str:
    """Which marked part a moment lies in; of earlier steps, with their number."""
    for name, (begin, end) in log.marks.items():
        if begin <= moment <= end:
            phase, index = name.split()
            return phase if int(index) == STEPS - 1 else f"{phase} of step {int(index) + 1}"
    return "between steps" if moment > log.marks["forward 0"][0] else "building"


# --- rows -----------------------------------------------------------------------------------------


def unit_of(case: Case, options: argparse.Namespace) -> int:
    """Bytes of the largest group: a block's full parameters in the dtype of computation."""
    with torch.device("meta"):
        block = GPT(options).blocks[0]
    return sum(p.numel() for p in block.parameters()) * DTYPES[case.dtype].itemsize


def rows_of(case: Case, options: argparse.Namespace) -> list[dict[str, Any]]:
    unit = unit_of(case, options)
    peaks = {variant: measure(variant, case, options) for variant in options.variants}
    rows = []
    for variant, mine in peaks.items():
        if variant == PLAIN:
            continue
        beyond = {phase: (mine.phases[phase] - peaks[PLAIN].phases[phase]) / unit for phase in PHASES}
        row = {
            "backend": f"{case.backend} {dist.get_world_size()}" + ", cuda" * (case.device == "cuda"),
            "dtype": case.dtype,
            "variant": variant,
            **{f"{phase}_units": round(beyond[phase], 3) for phase in PHASES},
            "kept_units": round(mine.kept / unit, 3),
            "transport_units": round(mine.transport / unit, 3),
            "unit_mb": unit / 1e6,
            "resident_mb": mine.resident / 1e6,
            "activations_units": round(peaks[PLAIN].phases["backward"] / unit, 3),
            "alive": {phase: in_units(mine.holders[phase], unit) for phase in PHASES},
        }
        if mine.allocator:
            row |= {f"{phase}_allocated_units": round(mine.allocator[phase] / unit, 3) for phase in PHASES}
            row["reserved_mb"] = mine.allocator["reserved"] / 1e6
        rows.append(row)
    return rows


def in_units(holders: list[tuple[int, int, str, str]], unit: int) -> list[dict[str, Any]]:
    """The holders of at least a hundredth of a unit, and the others as one."""
    shown = [
        {"units": round(size / unit, 3), "number": number, "allocated_by": why, "in": phase}
        for size, number, why, phase in holders
        if size >= unit / 100
    ]
    small = [(size, number) for size, number, *_ in holders if size < unit / 100]
    if small:
        total = round(sum(size for size, _ in small) / unit, 3)
        number = sum(number for _, number in small)
        shown.append({"units": total, "number": number, "allocated_by": "(smaller ones)", "in": ""})
    return shown


def largest(ranks: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Of each row the rank's that holds most in backward."""
    return [max(rows, key=lambda row: row["backward_units"]) for rows in zip(*ranks, strict=True)]


def beside_peer(rows: list[dict[str, Any]]) -> None:
    """Add what each row is to the peer's of the same case."""
    peers = {(row["backend"], row["dtype"]): row for row in rows if row["variant"] == PEER}
    for row in rows:
        peer = peers.get((row["backend"], row["dtype"]))
        for phase in PHASES:
            ratio = None if peer is None else row[f"{phase}_units"] / peer[f"{phase}_units"]
            row[f"{phase}_to_peer"] = ratio


def all_dtypes(options: argparse.Namespace, backend: str, device: str = "cpu") -> list[dict[str, Any]]:
    return [row for dtype in options.dtypes for row in rows_of(Case(backend, dtype, device), options)]


def on_gloo(options: argparse.Namespace) -> list[dict[str, Any]]:
    return all_dtypes(options, "gloo")


def explain(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        for phase in PHASES:
            print(f"\n{row['backend']}, {row['dtype']}, {row['variant']}: alive at the peak of {phase}")
            columns = {"units": "units", "number": "pieces", "allocated_by": "allocated by", "in": "in"}
            print_table(row["alive"][phase], columns)


def parse() -> argparse.Namespace:
    parser = gpt_parser(__doc__, width=1024, context=4, batch=1, world=8)
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    backends = ("fake", "gloo", "cuda")
    parser.add_argument("--backends", nargs="+", choices=backends, default=list(backends))
    parser.add_argument("--explain", action="store_true", help="what is alive at the peaks")
    return parse_variants(parser, noise=None)


def main() -> None:
    options = parse()
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler announces itself otherwise
    torch.set_num_threads(1)
    rows = largest(launch(on_gloo, options)) if "gloo" in options.backends else []
    if "fake" in options.backends:
        with fake_world(options.world):
            rows = [*all_dtypes(options, "fake"), *rows]
    has_cuda = torch.cuda.is_available() and "cuda" in options.backends
    if has_cuda:
        with fake_world(options.world, "cuda"):
            rows += all_dtypes(options, "fake", "cuda")
    beside_peer(rows)
    for dtype in options.dtypes:
        unit = unit_of(Case("", dtype, "cpu"), options) / 1e6
        print(f"{dtype}: a unit is a block's full parameters, {unit:.3g} MB")
    print_table(rows, COLUMNS | (CUDA_COLUMNS if has_cuda else {}))
    if options.explain:
        explain(rows)
    write_json(options.json, "memory", vars(options), rows)


if __name__ == "__main__":
    sys.exit(main())
