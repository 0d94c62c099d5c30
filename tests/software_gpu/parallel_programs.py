"""Pipelines and tensor parallelism on devices, beside plain torch on the host of the same process."""

from typing import Any

import torch.distributed as dist
from meshed import Layout
from pipelines import Pipeline, pipelined, plain
from tensor_parallel import Run, in_bfloat16, trained

from shardwise import CPUOffloadPolicy
from software_gpu.training import join

KEPT, OFFLOADED = {"reshard_after_forward": False}, {"offload_policy": CPUOffloadPolicy()}


def furthest(got: dict[str, Any], want: dict[str, Any]) -> float:
    """How far a tensor is off, as a part of the largest number in it."""
    return max(((got[name] - want[name]).abs().max() / want[name].abs().max()).item() for name in got)


def pipeline(schedule: str, **settings: Any) -> float:
    """How far gradients of two stages, or twice as many, are off that are sharded over half of the ranks."""
    asked = Pipeline(schedule, (2, dist.get_world_size() // 2), device="cuda", **settings)
    steps = zip(pipelined(asked).gradients, plain(asked).gradients, strict=True)
    return max(furthest(got, want) for got, want in steps)


def tensor_parallel(program: Any, *args: Any) -> float:
    """The same of matrices that are split over two ranks, and sharded over the others."""
    layout = Layout((dist.get_world_size() // 2, 2), ("dp", "tp"), ("dp",), "cuda")
    return furthest(program(layout, *args), program(None, *args))


def differences(backend: str = "nccl") -> dict[str, float]:
    join(backend)
    is_sharded, found = dist.get_world_size() > 2, {}
    for name in ("GPipe", "1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble"):
        found[name] = pipeline(name, reshard=None)
        if is_sharded:
            found[f"{name}, kept"] = pipeline(name)
    if is_sharded:
        found["1F1B, offloaded"] = pipeline("1F1B", reshard=None, offloads=True)
        for name, options in (("freed", {}), ("kept", KEPT), ("offloaded", OFFLOADED)):
            run = Run(optimizer="adamw_loop", options=options)
            found[f"tensor parallel, {name}"] = tensor_parallel(trained, run)
        found["tensor parallel, bfloat16"] = tensor_parallel(in_bfloat16, 2, 0.5)
    return found
