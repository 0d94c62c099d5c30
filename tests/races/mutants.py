"""Broken waits: every place where `src/shardwise` orders streams, and the scenario that finds it missing.

A wait is left out where the named functions ask for it (`Site`: those inside of `comm/streams.py` are not named):

    wait_stream, wait_event    the wait does not take place
    record_event               the event is recorded before the work that it stands for
    enter                      work and memory go to the current stream instead
    *.synchronize              the host does not wait

`PATCHES` break more than one call. `HARMLESS` are those that no program can notice, each with the reason. `test_races.py` holds that there are no others.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from races.device import Site
from shardwise.comm import reduction
from shardwise.comm.streams import DeviceStream
from shardwise.groups.unsharded import StreamUsers


@dataclass(frozen=True)
class Mutant:
    """A wait that is left out, and the scenario that finds it."""

    site: Site
    scenario: str

    def __str__(self) -> str:
        return str(self.site)


def _mutants(operation: str, *rows: tuple[str, str, str]) -> list[Mutant]:
    return [Mutant(Site(operation, (inner, outer)), scenario) for inner, outer, scenario in rows]


_ADVANCE = ("Reduction.advance", "Reduction.close")
_FORWARD = ("Root.wait_for_optimizer", "ForwardPass.begin")
_INFERENCE = ("Root.wait_for_optimizer", "begin_inference")
_HOOK = ("Reduction._start_stage.<locals>.finish", "Reduction.advance")
_SEND = ("Reduction.send", "Gradients._send")
_SEND_ALL = ("Reduction.send", "Gradients.reduce")
_GATHER = ("Unsharded._start", "Unsharded.unshard")
_GATHER_AGAIN = ("Unsharded._start", "Unsharded.unshard_again")
_GATHER_AHEAD = ("Unsharded._start", "Unsharded.unshard_ahead")
_FREE = ("Unsharded._free_buffers", "Unsharded._free")
_KEEP_PARTS = [
    ("Unsharded.keep_part", caller) for caller in ("ForwardPass._reshard", "UnshardedGroups.keep_for_next")
]
_COPY_IN = ("UnshardedBucket._on_device", "UnshardedBucket.start_all_gather")
_HOST_WRITES = ("Root.let_host_write", "Root.finish_reductions")
_HOST_WRITES_SOON = ("Root.let_host_write", "ForwardPass.end")

MUTANTS = [
    *_mutants(
        "enter",
        (*_ADVANCE, "offload"),
        (*_SEND, "offload"),
        (*_SEND_ALL, "int8 reduction, hybrid"),
        (*_GATHER, "offload"),
        (*_GATHER_AGAIN, "parts kept until backward"),
        (*_GATHER_AHEAD, "parts kept until backward"),
        ("Unsharded.make", "ParameterGroup._prepare_unshard", "parts kept until backward"),
    ),
    *_mutants(
        "record_event",
        (*_ADVANCE, "offload"),
        (*_SEND, "checkpointing"),
        (*_SEND_ALL, "extension: bytes and scales"),
        (*_GATHER, "extension: bytes and scales"),
        (*_GATHER_AGAIN, "prefetch 0"),
        (*_GATHER_AHEAD, "extension: bytes and scales"),
    ),
    *_mutants(
        "wait_event",
        (*_FORWARD, "optimizer on a side stream"),
        (
            "UnshardedGroups.reshard_stale",
            "ForwardPass._drop_kept",
            "optimizer of nobody's on a side stream, kept after backward",
        ),
        (
            "Root.make_compute_wait_for_optimizer",
            "compute_after_optimizer",
            "optimizer on a side stream, summon",
        ),
        (*_INFERENCE, "optimizer on a side stream, inference"),
        (*_ADVANCE, "offload"),
        ("Reduction.release_part", "Reduction.release_parts", "extension: bytes and scales"),
        ("Reduction.release_part", "ReductionQueue._limit", "checkpointing"),
        ("Reduction.release", "Reduction.finish", "hook on its own stream"),
        ("Reduction.release", "Gradients.release", "offload"),
        ("Unsharded._finish_all_gather", "Unsharded.wait", "extension: bytes and scales"),
    ),
    *_mutants(
        "wait_stream",
        (*_GATHER, "averaged in forward"),
        ("BackwardPass.begin", "graph_task", "edits between forward and backward"),
        (*_FORWARD, "custom collectives"),
        (*_HOOK, "hook on its own stream"),
        (*_SEND, "checkpointing"),
        (*_SEND_ALL, "extension: bytes and scales"),
        ("Root.wait_for_optimizer", "Root.unshard", "unshard by hand"),
        (*_FREE, "custom collectives"),
        ("ParameterGroup._prepare_unshard", "Unsharded.unshard", "shards assigned anew"),
        (*_INFERENCE, "inference"),
    ),
    *_mutants("event.synchronize", ("Reduction.finish", "BucketReduction.accumulate", "offload")),
    *_mutants(
        "event.synchronize",
        (*_HOST_WRITES_SOON, "offload, edits between passes"),
        (*_HOST_WRITES, "offload, edits after a backward that did not reach all"),
    ),
    *_mutants(
        "stream.synchronize",
        ("Root.unshard", "FSDPModule.unshard", "unshard on a side stream, of shards assigned anew"),
    ),
    *_mutants("enter", (*_COPY_IN, "offload, edits between passes")),
    *_mutants("record_event", (*_COPY_IN, "offload, edits between passes")),
    *_mutants(
        "wait_event",
        (*_COPY_IN, "offload, edits between passes"),
        (*_HOST_WRITES_SOON, "offload, edits between passes"),
        ("StreamUsers.note_current", "Unsharded.wait", "a group on two streams, the branch last"),
        ("StreamUsers.gathered", "Unsharded._finish_all_gather", "a group on two streams, the branch first"),
    ),
]

HARMLESS = {
    Site(
        "enter", _HOOK
    ): "the hook then runs on the stream that it would wait for, and that would wait for it",
    Site("enter", _FREE): "freed memory goes back to the stream that allocated it, whichever is current",
    **dict.fromkeys(
        (Site("enter", keep) for keep in _KEEP_PARTS),
        "the part then belongs to the computing stream, which waits for each all-gather from it before it is dropped",
    ),
    **{
        Site("wait_stream", ("Root.hand_over", caller)): (
            "to free memory waits by itself, and full tensors are gathered on the computing stream"
        )
        for caller in ("register_comm_hook", "unsharded")
    },
    Site("wait_stream", _COPY_IN): (
        "asked for when the copying stream is made, when no stream has written to shards in host memory"
    ),
    Site("wait_event", _HOST_WRITES): (
        "the next forward has the copying stream wait for all of the all-gathers before it allocates"
    ),
    **dict.fromkeys(
        (Site("wait_stream", keep) for keep in _KEEP_PARTS),
        "what is copied was gathered on the same stream; the computation only reads it",
    ),
}


# --- memory that is dropped too early, and streams that are forgotten -------------------------------


def _drops_gradients_unwaited(self: Any) -> None:
    self._unreduced.popleft()
    self.held_bytes.popleft()


def _drops_sums_at_once(self: Any, *result: Any) -> None:
    _MOVE(self, *result)
    self._scratch.clear()


def _forgets_other_streams(self: Any, event: Any = None, users: Any = ()) -> None:
    _WAIT_FOR_COMPUTE(self, event)


def _is_waited_for_by_one(self: Any, done: Any, users: Any) -> None:
    _LET_COMPUTE_WAIT(self, done, ())


def _forgets_who_made_gradients(self: Any) -> None:
    self._made_on = ()
    _ADVANCE_REDUCTION(self)


_MOVE = reduction.Reduction._move
_ADVANCE_REDUCTION = reduction.Reduction.advance
_WAIT_FOR_COMPUTE = DeviceStream.wait_for_compute
_LET_COMPUTE_WAIT = DeviceStream._let_compute_wait

Patch = Callable[[pytest.MonkeyPatch], None]

PATCHES: dict[str, tuple[str, Patch]] = {
    "gradients are dropped before their reduction was waited for": (
        "direct",
        lambda patch: patch.setattr(reduction.Reduction, "release_part", _drops_gradients_unwaited),
    ),
    "sums are dropped before the copy to the host was waited for": (
        "offload, low precision",
        lambda patch: patch.setattr(reduction.Reduction, "_move", _drops_sums_at_once),
    ),
    "a reduction waits for the last of several streams that made gradients": (
        "a branch on a stream of its own, packed",
        lambda patch: patch.setattr(DeviceStream, "wait_for_compute", _forgets_other_streams),
    ),
    "gradients go back to a stream that does not wait for their reduction": (
        "a branch on a stream of its own",
        lambda patch: patch.setattr(DeviceStream, "_let_compute_wait", _is_waited_for_by_one),
    ),
    "they do, where sums are cast behind it": (
        "a branch on a stream of its own, groups beside it",
        lambda patch: patch.setattr(reduction.Reduction, "advance", _forgets_who_made_gradients),
    ),
    "parameters are freed by the stream on which the last module ran, while another reads them": (
        "a group on two streams, the branch last",
        lambda patch: patch.setattr(StreamUsers, "streams", ()),
    ),
}
