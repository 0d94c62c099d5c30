"""Facts about this torch, CUDA and NCCL on which the library relies, or that decide what it should do.

Each probe says what it found; it fails where a fact on which the library's correctness rests does not hold.
Where two streams are to race, one is held up by a kernel that only waits: a read that does not wait then
finds what was there before.
"""

import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from one_device.lanes import cycles_per_ms
from torch import Tensor

from gpu_parts.plan import Item, Options, Row, Skipped
from gpu_parts.worlds import SEVERAL_RANKS_FROM, nccl_version
from shardwise.torch_compat import c10d

HELD_UP_MS = 20


def items(options: Options) -> Iterator[Item]:
    yield "versions", partial(versions, options.device)
    for probe in ON_CUDA:
        yield probe.__name__.replace("_", " "), partial(_on_cuda, probe, options.device)


def _on_cuda(probe: Callable[[], Any], device: str) -> Row:
    if device != "cuda":
        raise Skipped("asks about CUDA")
    return {"found": probe()}


def versions(device: str) -> Row:
    found: dict[str, Any] = {"torch": torch.__version__}
    if device == "cuda":
        nccl = nccl_version()
        found |= {"cuda": torch.version.cuda, "nccl": ".".join(map(str, nccl))}
        found |= {"several ranks a GPU": nccl[:2] >= SEVERAL_RANKS_FROM}
        found |= {"allocator": os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "as it comes")}
        assert "PYTORCH_NO_CUDA_MEMORY_CACHING" not in os.environ, "frees would wait, and hide races"
    return {"found": found}


# --- streams and events ---------------------------------------------------------------------------


def _written_late(record: Callable[[Any], Any], wait: Callable[[Any, Any], None]) -> bool:
    """Whether a second stream that waits in this way sees what a first one, held up, wrote before."""
    hold = int(HELD_UP_MS * cycles_per_ms())
    written, read = torch.zeros(1, device="cuda"), torch.zeros(1, device="cuda")
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(first):
        torch.cuda._sleep(hold)
        written.fill_(1)
        event = record(first)
    wait(second, event)
    with torch.cuda.stream(second):
        read.copy_(written)
    second.synchronize()  # first, as it does not wait for the first stream by itself
    torch.cuda.synchronize()
    return bool(read.item())


def _generic_event(stream: Any) -> Any:
    event = torch.Event("cuda")
    event.record(stream)
    return event


def events() -> Any:
    """A stream of CUDA waits for events of its own kind and of the generic one; a generic stream may not."""
    own = _written_late(lambda stream: stream.record_event(), lambda stream, event: stream.wait_event(event))
    nothing = _written_late(lambda stream: None, lambda stream, event: None)
    generic = _written_late(_generic_event, lambda stream, event: stream.wait_event(event))
    assert own, "a stream did not wait for a torch.cuda.Event"
    assert not nothing, f"the second stream did not run ahead: {HELD_UP_MS} ms hold nothing up"
    return {"own": own, "generic event": generic, "generic stream, own event": _generic_stream_waits()}


def _generic_stream_waits() -> bool:
    """Known not to wait up to torch 2.13: a torch.cuda.Event leaves its generic base empty."""

    def wait(stream: Any, event: Any) -> None:
        generic = torch.Stream(
            stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type
        )
        generic.wait_event(event)

    return _written_late(lambda stream: stream.record_event(), wait)


def nested_streams() -> Any:
    """`with stream:` may be nested, and gives back the stream from before; in itself, some refuse it."""
    before = torch.cuda.current_stream()
    one, other = torch.cuda.Stream(), torch.cuda.Stream()
    with one:
        assert torch.cuda.current_stream() == one, "not entered"
        with other:
            assert torch.cuda.current_stream() == other, "not entered inside of another"
        assert torch.cuda.current_stream() == one, "leaving did not give back the outer stream"
    assert torch.cuda.current_stream() == before, "leaving did not give back the first stream"
    return {"given back": True, "the same one again": _entered_again()}


def _entered_again() -> str:
    """torch 2.11 keeps one stream to give back for each stream object, and raises."""
    stream = torch.cuda.Stream()
    try:
        with stream, stream:
            pass
    except RuntimeError as error:
        return f"refused: {error}".partition("\n")[0]
    return "allowed"


def streams_of_autograd() -> Any:
    """Where hooks run whose forward ran on a side stream: of a tensor, a leaf, and at the end of backward."""
    side, seen = torch.cuda.Stream(), {}
    leaf = torch.ones(4, device="cuda", requires_grad=True)
    side.wait_stream(torch.cuda.current_stream())

    def note(name: str) -> None:
        current = torch.cuda.current_stream()
        seen[name] = "side" if current == side else "current" if current == outer else "another"

    def at_tensor(gradient: Tensor) -> None:
        note("tensor")
        torch.autograd.Variable._execution_engine.queue_callback(lambda: note("end"))

    outer = torch.cuda.current_stream()
    leaf.register_post_accumulate_grad_hook(lambda _: note("leaf"))
    with torch.cuda.stream(side):
        output = leaf * 2
        output.register_hook(at_tensor)
        total = output.sum()
    outer.wait_stream(side)
    total.backward()
    torch.cuda.synchronize()
    assert seen["tensor"] == "side", f"a tensor's hook ran on the stream that is {seen['tensor']}"
    return seen


# --- memory ---------------------------------------------------------------------------------------


def pinned_memory() -> Any:
    """How much is pinned for a little more than a power of two."""
    if not hasattr(torch.cuda, "host_memory_stats"):
        raise Skipped("this torch does not tell what it has pinned")
    asked = (64 << 20) + 4096
    before = torch.cuda.host_memory_stats()
    buffer = torch.empty(asked, dtype=torch.uint8, pin_memory=True)
    after = torch.cuda.host_memory_stats()
    grown = {
        key: after[key] - before.get(key, 0)
        for key in after
        if key.startswith("allocated_bytes") and key.endswith("current")
    }
    del buffer
    return {"asked MiB": round(asked / 2**20, 2), **{k: f"{v / 2**20:.2f} MiB" for k, v in grown.items()}}


def storage_that_is_emptied() -> Any:
    """A storage that is emptied and refilled in a stream takes its memory from that stream's own pool."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        tensor = torch.empty(32 << 20, dtype=torch.uint8, device="cuda")
        address, storage = tensor.data_ptr(), tensor.untyped_storage()
        storage.resize_(0)
        assert tensor.data_ptr() == 0, "memory is still held"
        storage.resize_(32 << 20)
        again = tensor.data_ptr()
        storage.resize_(0)
    other = torch.empty(32 << 20, dtype=torch.uint8, device="cuda")  # of another stream
    assert other.data_ptr() != again, "a stream was given memory that another had freed"
    return {"same address again": again == address}


def dlpack() -> Any:
    """A view by DLPack shares memory; of another device than the current one torch may refuse it."""
    tensor = torch.arange(8, device="cuda")
    with torch.cuda.stream(torch.cuda.Stream()):
        view = torch.from_dlpack(tensor[2:])
        assert view.data_ptr() == tensor[2:].data_ptr(), "it was copied"
    found: dict[str, Any] = {"shares memory": True}
    if torch.cuda.device_count() > 1:
        elsewhere = torch.arange(8, device="cuda:1")
        try:
            torch.from_dlpack(elsewhere)
            found["of another device"] = "taken"
        except Exception as error:
            found["of another device"] = f"{type(error).__name__}: {error}"
    else:
        found["of another device"] = "there is one device"
    return found


def symmetric_memory() -> Any:
    """Whether the library gets symmetric memory of NCCL, in a world of one rank."""
    device = torch.device("cuda", torch.cuda.current_device())
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        c10d.choose_symmetric_memory_of_nccl(device)
        return {"given": f"{c10d.symmetric_buffer(dist.group.WORLD, 1 << 20, device).numel()} bytes"}
    except Exception as error:
        return {"refused": f"{type(error).__name__}: {error}"}
    finally:
        dist.destroy_process_group()


def sleep() -> Any:
    """What a waiting kernel counts."""
    return {"cycles a ms": round(cycles_per_ms())}


ON_CUDA = (
    sleep,
    events,
    nested_streams,
    streams_of_autograd,
    pinned_memory,
    storage_that_is_emptied,
    dlpack,
    symmetric_memory,
)
