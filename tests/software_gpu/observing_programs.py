"""What tells about training on devices: traces, snapshots of memory, the doctor, the choice of a strategy."""

import argparse
import contextlib
import gc
import io
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gpt import GPT, batch_of

import shardwise
from shardwise.commands import doctor
from shardwise.observe import count_collectives, memory_snapshot
from software_gpu.training import join, sharded_model, train

SIZES = argparse.Namespace(vocab=64, width=256, heads=4, layers=4, context=8, batch=1)


def check_trace(folder: Path) -> None:
    """Spans by events of the device lie in the order of a step; ranks' files are merged."""
    model, optimizer = sharded_model()
    train(model, optimizer, range(2))
    with shardwise.trace(model) as trace:
        train(model, optimizer, [2])
    works = {work.name: (work.unshards, work.reductions) for work in trace.groups}
    assert works == {"Model": (1, 1), "blocks.0": (2, 1), "blocks.1": (2, 1), "blocks.2": (1, 1)}
    spans = trace.recording.of_row("computation")
    blocks = ["blocks.0", "blocks.1", "blocks.2"]
    for phase, order in (("forward", ["Model", *blocks]), ("backward", ["Model", *reversed(blocks)])):
        assert list(dict.fromkeys(span.name for span in spans if span.phase == phase)) == order
    assert all(span.start_ns <= span.end_ns for span in trace.recording.spans)
    assert "AdamW" in [span.name for span in trace.recording.of_row("optimizer")]
    trace.save(folder / f"rank{dist.get_rank()}.json")
    dist.barrier()
    if dist.get_rank() == 0:
        shardwise.merge_traces(sorted(folder.glob("rank*.json")), folder / "step.html")
        assert "cuda" in str(trace)
        assert "rank 1" in (folder / "step.html").read_text()


def check_snapshots(folder: Path) -> None:
    """The allocator's own snapshot holds what the library's counts: the shards, by their sizes."""
    torch.cuda.memory._record_memory_history()
    gc.collect()  # an earlier model has cycles
    before = active_bytes()
    model, optimizer = sharded_model()
    train(model, optimizer, [0])
    with count_collectives(model) as counts:
        train(model, optimizer, [1])
    blocks = {"blocks.0": 2, "blocks.1": 2, "blocks.2": 1}
    assert counts.all_gather == {"Model": 1, **blocks}
    assert counts.reduce_scatter == dict.fromkeys(["Model", *blocks], 1)
    expected = memory_snapshot(model).shard_bytes * 3  # with AdamW's two states, which are not padded
    found = active_bytes() - before
    assert 0.95 * expected < found < 1.05 * expected, (expected, found)
    theirs = torch.cuda.memory._snapshot()
    assert {"alloc", "free_completed"} <= {
        event["action"] for event in theirs["device_traces"][dist.get_rank()]
    }
    torch.cuda.memory._dump_snapshot(str(folder / f"snapshot{dist.get_rank()}.pickle"))
    torch.cuda.memory._record_memory_history(enabled=None)


def active_bytes() -> int:
    torch.cuda.synchronize()
    blocks = (block for segment in torch.cuda.memory._snapshot()["segments"] for block in segment["blocks"])
    return sum(block["requested_size"] for block in blocks if block["state"] == "active_allocated")


def check_doctor(folder: Path) -> None:
    """It finds the devices and how fast they are, and that they have no access to each other's memory."""
    parser = argparse.ArgumentParser()
    doctor.add_arguments(parser)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        status = doctor.run(parser.parse_args(["--timeout", "20", "--folder", str(folder / "saved")]))
    assert status == 0, printed.getvalue()
    if dist.get_rank() == 0:
        for part in ("over nccl", "shard: reduce-scatter", "cannot access devices [1]", "2 slow, 0 wrong"):
            assert part in printed.getvalue(), printed.getvalue()


def check_auto() -> None:
    """What it chooses takes the memory that it was given, less the tenth that stays free."""
    batch = [tensor.cuda() for tensor in batch_of(dist.get_rank(), SIZES)]
    torch.manual_seed(0)
    with torch.device("meta"):
        model: Any = GPT(SIZES)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    shardwise.shard_model(model, strategy="auto", memory="48MB", sample=tuple(batch))
    assert "48" in shardwise.explain(model)
    shardwise.materialize(model, init)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        torch.cuda.reset_peak_memory_stats()
        model(*batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.cuda.synchronize()
    assert 30e6 < torch.cuda.max_memory_allocated() - before < 0.9 * 48e6


def init(module: Any) -> None:
    if isinstance(module, GPT):
        torch.nn.init.normal_(module.positions)
    elif any(True for _ in module.parameters(recurse=False)):
        module.reset_parameters()


def check_all(folder: Path) -> None:
    join()
    check_trace(folder)
    check_snapshots(folder)
    check_doctor(folder)
    check_auto()
