"""What the benchmarks share: which `fully_shard`, processes, alternating timing, spread, record, table.

Knows nothing of what is measured. A benchmark hands over one callable per variant; `alternate`
runs them A B C, C B A, ..., so that a slow minute of the machine falls on all of them alike, and
so does a cache that the neighbour left cold. (A second instance of the peer still measures 1 to
5% faster than the first in host_overhead: take differences of that size for noise.)
"""

import argparse
import gc
import importlib
import json
import os
import pickle
import platform
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy
import psutil
import torch
import torch.distributed as dist
from tabulate import tabulate
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

PLAIN, PEER, OURS, PEER_AGAIN = "plain", "peer", "ours", "peer again"
PEER_TUNED = "peer tuned"
PEERS = (PEER, PEER_TUNED, PEER_AGAIN)
VARIANTS = (PLAIN, PEER, PEER_TUNED, OURS)
"""What --variants may name, in running order; the peer's second instance comes with --noise."""

Sample = Mapping[str, float]
"""One step's measurements by name, the unit in the name."""

Step = Callable[[int], Sample]
"""Runs step `i` of one variant and returns what it measured."""


def find_library(variant: str) -> ModuleType:
    """Where a variant's `fully_shard` and its policies come from; exits with advice if not installed."""
    if variant in PEERS:
        return importlib.import_module("torch.distributed.fsdp")
    try:
        return importlib.import_module("shardwise")
    except ImportError as error:
        raise SystemExit(
            f"The variant 'ours' needs shardwise, which cannot be imported ({error}).\n"
            "Install it (pip install -e .) or leave it out: --variants plain peer"
        ) from error


def find_fully_shard(variant: str) -> Callable[..., Any]:
    return find_library(variant).fully_shard


def shard(variant: str, model: nn.Module, blocks: Iterable[nn.Module], **settings: Any) -> list[str]:
    """Shard ``blocks`` and then ``model`` as the variant says; return what was set by hand beside.

    Plain stays as it is. ``settings`` go to every call of `fully_shard`.
    """
    if variant == PLAIN:
        return []
    fully_shard, blocks = find_fully_shard(variant), list(blocks)
    for module in (*blocks, model):
        fully_shard(module, **settings)
    return tune_peer(model, blocks) if variant == PEER_TUNED else []


def tune_peer(model: Any, blocks: Iterable[Any]) -> list[str]:
    """Set on the peer's sharded ``model`` what its users can set by hand; return the names of the settings.

    A communicator of its own for reductions, two buffers of gradients in flight (both from torch 2.13 on:
    what the installed one lacks is left out), and unshards one block ahead, in forward, where the peer has
    nothing under way on its own without a stream, and in backward. Collective where a communicator is made:
    call it on all ranks, after `fully_shard` and before the first step.

    Args:
        model: the root.
        blocks: its other sharded modules, in the order in which forward runs them.
    """
    chain = [model, *blocks]
    done = []
    for name, value in (
        ("set_separate_reduce_scatter_group", True),
        ("set_reduce_scatter_max_input_buffers", 2),
    ):
        if hasattr(model, name):
            getattr(model, name)(value)
            done.append(name)
    for this, following in pairwise(chain):
        this.set_modules_to_forward_prefetch([following])
    # Backward begins with the root's own parameters, which stay unsharded; then come the blocks in reverse.
    for this, following in pairwise([model, *reversed(chain[1:])]):
        this.set_modules_to_backward_prefetch([following])
    return [*done, "set_modules_to_forward_prefetch", "set_modules_to_backward_prefetch"]


def choose_variants(requested: Sequence[str], *, noise: bool) -> list[str]:
    """The variants in running order: those of `VARIANTS` that are asked for, and the peer once more."""
    chosen = [name for name in VARIANTS if name in requested]
    if PLAIN not in chosen or len(chosen) < 2:
        raise SystemExit(f"--variants needs 'plain' and one of 'peer', 'peer tuned', 'ours'; got {requested}")
    for name in chosen[1:]:
        find_fully_shard(name)
    return chosen + [PEER_AGAIN] * (noise and PEER in chosen)


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Collect once, then not again until the end of the block."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def alternate(
    variants: Mapping[str, Step], *, warmup: int, steps: int
) -> dict[str, dict[str, numpy.ndarray]]:
    """Run every variant once per round; return {variant: {measure: one value per round}}.

    The order is the mapping's in even rounds and its reverse in odd ones, the same on every rank.
    The first `warmup` rounds are run and thrown away.
    """
    samples: dict[str, list[Sample]] = {name: [] for name in variants}
    with no_garbage_collection():
        for round_index in range(warmup + steps):
            order = list(variants) if round_index % 2 == 0 else list(reversed(variants))
            for name in order:
                samples[name].append(variants[name](round_index))
    return {
        name: {key: numpy.array([row[key] for row in rows[warmup:]]) for key in rows[0]}
        for name, rows in samples.items()
    }


@dataclass(frozen=True)
class Spread:
    median: float
    q1: float
    q3: float

    @classmethod
    def of(cls, values: numpy.ndarray) -> "Spread":
        q1, median, q3 = numpy.percentile(values, [25, 50, 75])
        return cls(*(round(float(value), 4) for value in (median, q1, q3)))

    def __str__(self) -> str:
        digits = 0 if self.median >= 1000 else 1 if self.median >= 10 else 3
        return f"{self.median:.{digits}f} [{self.q1:.{digits}f}, {self.q3:.{digits}f}]"


def ratios_to_peer(values: Mapping[str, numpy.ndarray]) -> dict[str, Spread]:
    """Per variant, the spread over rounds of its value over the peer's in the same round.

    In the same round, because a noisy machine slows neighbours alike. Empty without the peer.
    """
    if PEER not in values:
        return {}
    return {name: Spread.of(value / values[PEER]) for name, value in values.items()}


# --- the command line -----------------------------------------------------------------------------


def plain_parser(description: str | None) -> argparse.ArgumentParser:
    """A parser whose help is a docstring, as it stands there."""
    return argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def command_line(description: str | None, **numbers: int) -> argparse.ArgumentParser:
    """The same with an option for each of ``numbers``, its default, and --json."""
    parser = plain_parser(description)
    for name, default in numbers.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    parser.add_argument("--json", type=Path)
    return parser


def gpt_parser(description: str | None, **sizes: int) -> argparse.ArgumentParser:
    """The command line of a benchmark of the GPT: its sizes, and ``sizes`` with their defaults."""
    usual = {"processes": 2, "layers": 8, "width": 512, "heads": 8, "vocab": 256}
    return command_line(description, **{**usual, **sizes})


def parse_variants(parser: argparse.ArgumentParser, *, noise: bool | None = False) -> argparse.Namespace:
    """The options, with --variants; with --noise, the peer twice. ``noise``: its default; None: no option."""
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    if noise is not None:
        action = argparse.BooleanOptionalAction
        parser.add_argument("--noise", action=action, default=noise, help="a second instance of the peer")
    options = parser.parse_args()
    options.variants = choose_variants(options.variants, noise=bool(noise is not None and options.noise))
    return options


# --- worlds ---------------------------------------------------------------------------------------


@contextmanager
def fake_world(size: int, device: str = "cpu", *names: str) -> Iterator[DeviceMesh]:
    """A process group of ``size`` ranks that sends nothing, and its mesh; this process is rank 0."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        yield init_device_mesh(device, (size,), mesh_dim_names=names or None)
    finally:
        dist.destroy_process_group()


def join(rank: int, processes: int, folder: str) -> None:
    """Make this process rank ``rank`` of ``processes``, on one core, over gloo."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=processes,
        timeout=timedelta(minutes=5),
    )


def launch(work: Callable[[Any], Any], options: Any) -> list[Any]:
    """Run ``work(options)`` in ``options.processes`` ranks over gloo; what each of them returned."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as folder:
        # Not spawn: its children finalize Python, where gloo's threads may still drop a tensor,
        # which aborts the process (seen once in ten). Those of a fork server leave at once.
        torch.multiprocessing.start_processes(
            _be, (work, options, folder), nprocs=options.processes, start_method="forkserver"
        )
        return [pickle.loads(Path(folder, f"{rank}").read_bytes()) for rank in range(options.processes)]


def _be(rank: int, work: Callable[[Any], Any], options: Any, folder: str) -> None:
    join(rank, options.processes, folder)
    Path(folder, f"{rank}").write_bytes(pickle.dumps(work(options)))
    dist.barrier()
    dist.destroy_process_group()


# --- measures -------------------------------------------------------------------------------------


def peak_bytes(act: Callable[[], Any]) -> int:
    """The most bytes of tensors alive at once while ``act`` runs, beside what was alive before."""
    gc.collect()
    cpu = torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[cpu], profile_memory=True) as seen:
        act()
    now = most = 0
    for event in seen.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    return most


def environment() -> dict[str, Any]:
    """Versions and hardware, for the JSON record. Nothing in it comes from git."""
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cpu": cpu_model(),
        "cores": psutil.cpu_count(logical=True),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "load_average": [round(load, 2) for load in psutil.getloadavg()],
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def print_noise(rows: Sequence[Mapping[str, Any]]) -> None:
    """Say how far the peer is from itself, where it ran twice."""
    ratios = sorted(row["ratio_to_peer"]["median"] for row in rows if row["variant"] == PEER_AGAIN)
    if ratios:
        spread = f"{ratios[0]:.3f}" + (f" to {ratios[-1]:.3f}" if len(ratios) > 1 else "")
        print(f"noise: the peer against itself {spread} (median)")


def print_table(rows: Sequence[Mapping[str, Any]], columns: Mapping[str, str]) -> None:
    """Print `columns` ({key of a row: heading}) of the rows; a missing or None cell is empty."""
    cells = [[_cell(row.get(key)) for key in columns] for row in rows]
    print(tabulate(cells, headers=list(columns.values()), disable_numparse=True), flush=True)


def _cell(value: Any) -> str:
    if isinstance(value, Mapping):
        return str(Spread(**value))
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"
    return "" if value is None else str(value)


def write_json(
    path: Path | None,
    benchmark: str,
    options: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]],
    **more: Any,
) -> None:
    """Write one JSON object: what ran, with which options, on what, the rows, and `more`."""
    if path is None:
        return
    kept = {key: value for key, value in options.items() if key != "json"}
    record = {"benchmark": benchmark, "options": kept, **environment(), "rows": list(rows), **more}
    path.write_text(json.dumps(record, indent=2) + "\n")
    print(f"wrote {path}")


LOSS_TOLERANCE = 1e-3
"""How far losses of variants that do the same may be from each other."""


def time_step_ms(optimizer: Any) -> float:
    dist.barrier()
    began = time.perf_counter()
    optimizer.step()
    dist.barrier()
    return (time.perf_counter() - began) * 1e3


def loss_differences(
    ranks: Sequence[Mapping[str, Sequence[float]]], one: str, others: Iterable[str], steps: int | None = None
) -> dict[str, float]:
    """By pair, the largest difference between losses of ``one`` and of another variant, over ranks and steps.

    ``ranks``: of each, the losses of its variants. ``steps``: of the first ones alone.
    """
    losses = {variant: numpy.array([rank[variant] for rank in ranks])[:, :steps] for variant in ranks[0]}
    return {
        f"{one} against {other}": float(numpy.max(numpy.abs(losses[one] - losses[other]))) for other in others
    }


def slowest(
    ranks: Sequence[Mapping[str, Mapping[str, numpy.ndarray]]], measure: str
) -> dict[str, numpy.ndarray]:
    """By variant, a measure of each round on the rank that has most of it."""
    return {v: numpy.max([rank[v][measure] for rank in ranks], axis=0) for v in ranks[0]}


def refuse_differences(differences: Mapping[str, float]) -> None:
    """Say how far losses are from each other, by pair, and exit with 1 where that is too far."""
    for pair, difference in differences.items():
        verdict = "same trajectory" if difference < LOSS_TOLERANCE else "DIFFERENT"
        print(f"losses, {pair}: {difference:.1e} at most, {verdict}")
    if any(not difference < LOSS_TOLERANCE for difference in differences.values()):
        raise SystemExit("The variants do not train the same: the times above compare nothing.")
