"""What a step launches on the device, from a trace of torch's profiler.

Work on the device belongs to the call that launched it, by the correlation id; a call belongs to a collective
when a c10d operator, or a process group written in Python, was running on its thread. `exposed_ms` is the
time in which work of collectives runs on the device and nothing else does.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from one_device.groups import IN_GROUP

COUNTED = "counted step"

SYNCS = ("cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaEventSynchronize", "cudaMemcpy")
MALLOCS = ("cudaMalloc", "cudaMallocAsync", "cudaFree", "cudaHostAlloc", "cuMemCreate")


@dataclass
class Launches:
    """What the counted part of a trace launched; times in ms, without collectives' insides where named so."""

    kernels: int = 0
    in_group_kernels: int = 0
    busy_ms: float = 0.0
    in_group_ms: float = 0.0
    exposed_ms: float = 0.0
    memcpy_bytes: int = 0
    """Of the device's copy engine, which torch uses for contiguous copies of one dtype."""
    in_group_memcpy_bytes: int = 0
    syncs: int = 0
    mallocs: int = 0
    by_name: Counter[str] = field(default_factory=Counter)
    """Kernels outside of collectives."""


def read_trace(events: list[dict[str, Any]]) -> Launches:
    """Count a Chrome trace of torch's profiler, whose step stands in a `record_function(COUNTED)`."""
    spans = [event for event in events if event.get("ph") == "X"]
    step = next(e for e in spans if e["name"] == COUNTED and e.get("cat") == "user_annotation")
    begin, end = step["ts"], step["ts"] + step["dur"]
    calls = [e for e in spans if e.get("cat") in ("cuda_runtime", "cuda_driver") and begin <= e["ts"] <= end]
    collectives: dict[Any, list[tuple[float, float]]] = {}
    for e in spans:
        is_operator = e.get("cat") == "cpu_op" and e["name"].startswith("c10d::")
        if is_operator or (e.get("cat") == "user_annotation" and e["name"] == IN_GROUP):
            collectives.setdefault(e["tid"], []).append((e["ts"], e["ts"] + e["dur"]))
    inside = {
        e["args"]["correlation"]: any(a <= e["ts"] <= b for a, b in collectives.get(e["tid"], ()))
        for e in calls
        if "correlation" in e.get("args", {})
    }
    found = Launches(
        syncs=sum(e["name"] in SYNCS for e in calls), mallocs=sum(e["name"] in MALLOCS for e in calls)
    )
    busy, computing = [], []
    for e in spans:
        correlation = e.get("args", {}).get("correlation")
        if e.get("cat") not in ("kernel", "gpu_memcpy", "gpu_memset") or correlation not in inside:
            continue
        busy.append((e["ts"], e["ts"] + e["dur"]))
        num_bytes = int(e["args"].get("bytes", 0)) if e["cat"] == "gpu_memcpy" else 0
        if inside[correlation]:
            found.in_group_kernels += 1
            found.in_group_ms += e["dur"] / 1e3
            found.in_group_memcpy_bytes += num_bytes
        else:
            computing.append(busy[-1])
            found.kernels += 1
            found.memcpy_bytes += num_bytes
            found.by_name[e["name"]] += 1
    found.busy_ms = union_length(busy) / 1e3
    found.exposed_ms = found.busy_ms - union_length(computing) / 1e3
    return found


def union_length(spans: list[tuple[float, float]]) -> float:
    total, until = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total
