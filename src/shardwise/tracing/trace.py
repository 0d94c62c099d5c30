"""``trace``: record what the groups of a model do, and when.

With ``SHARDWISE_TRACE``, one step of a program that does not ask for it is traced:

    SHARDWISE_TRACE=step torchrun --nproc-per-node 8 train.py    its fifth step
    SHARDWISE_TRACE=200 torchrun --nproc-per-node 8 train.py     its 200th

A step lasts from the end of the optimizer's last step to the end of its next one, and thus contains what the
program does between steps, such as loading data.
"""

import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardwise.buckets.bucket import Bucket
from shardwise.buckets.optimizer_steps import add_step_listener
from shardwise.comm.streams import is_captured
from shardwise.engine.module_state import ModuleState, states_to_use
from shardwise.engine.root import Feature, Root
from shardwise.layout.mesh import Axis, all_reduce_max
from shardwise.ranks.agreement import run_on_all_ranks
from shardwise.ranks.failures import monitor_of_job
from shardwise.ranks.model_ranks import axes_of_model, device_of_model, gather_from_all, own_rank
from shardwise.ranks.replicas import are_fake
from shardwise.tracing.analysis import TracedWork, advice, compare, summary, work_of_groups
from shardwise.tracing.files import writer_for
from shardwise.tracing.recorder import Recorder, TracedRoot
from shardwise.tracing.records import Recording
from shardwise.tracing.timeline import Clock


class Trace:
    """What ``trace`` has recorded on this rank; there once its block is over. ``str()`` is a table of it."""

    def __init__(self) -> None:
        self._recording: Recording | None = None

    @property
    def recording(self) -> Recording:
        """All spans and samples of memory.

        Raises:
            RuntimeError: the block still runs, or has raised.
        """
        if self._recording is None:
            raise RuntimeError(
                "This trace has recorded nothing yet: its block still runs, or has raised an exception. Save "
                "it after the block: with shardwise.trace(model) as trace: ...; trace.save('step.html')."
            )
        return self._recording

    @property
    def groups(self) -> list[TracedWork]:
        """What each group did: times unsharded and reduced, bytes sent, time waited; outermost first."""
        return work_of_groups(self.recording)

    @property
    def advice(self) -> list[str]:
        """Sentences on what would shorten the step, where there is no doubt.

        Which rank others wait for, and where it takes longer; whether the host is the limit of a device;
        prefetch that came too late; communication that nothing covers.
        """
        return advice(self.recording)

    def save(self, path: str | Path) -> None:
        """Write the trace as a picture, or as a file for a trace viewer.

        Args:
            path: the file to write; its suffix selects the format. ``.html``: a self-contained page for a
                browser. ``.json``: for Perfetto (ui.perfetto.dev) or chrome://tracing, and for
                ``merge_traces``. ``.png``: a picture, which needs matplotlib. Folders are made.

        Raises:
            ValueError: another ending.
            ImportError: matplotlib is missing.
            RuntimeError: the block still runs, or has raised.
        """
        writer_for(path, "trace.save")([self.recording], Path(path))

    def __str__(self) -> str:
        """A line for each group, totals, and advice."""
        return summary(self.recording)


@contextmanager
def trace(model: nn.Module, *, on_all_ranks: bool = True) -> Iterator[Trace]:
    """Record what the sharded modules of ``model`` do inside: computation, collectives, waits, memory.

    A trace shows where a step spends its time, and which transfers no computation covers. Do not trace the
    first step, which records the order of blocks. The environment variable ``SHARDWISE_TRACE=step`` traces a
    step of a program that does not call this.

    On the host, transfers end when the back end is done; one thread for each kind of collective waits for
    that. On a device, times are those of events on its streams, and the host waits for the device at both
    ends of the block. Computation is what runs between entering and leaving the modules of a group, forward
    and backward. A trace does not record the caller's own communication, work inside a graph of a model
    compiled as a whole, or the memory of activations and optimizer states. If a communication hook sends
    gradients in fewer bytes, it sends fewer than the trace shows.

    Outside of the block a trace costs nothing. Inside, the host needs about twice the time for each group.

    Args:
        model: a sharded module, or one with sharded modules inside; those are recorded.
        on_all_ranks: all ranks of the model enter and leave together. Their files then share one time axis.
            At the end the ranks tell each other when they began their transfers, some KB each, so that
            ``advice`` can name the rank that others wait for. False: only this rank records, and the others
            need not enter.

    Yields:
        The trace. Print and save it after the block.

    Raises:
        TypeError: ``model`` is no module.
        ValueError: nothing in it is sharded.
        RuntimeError: a trace of the model is running.

    Example::

        with shardwise.trace(model) as trace:
            model(x).sum().backward()
            optimizer.step()
        trace.save(f"traces/rank{torch.distributed.get_rank()}.json")
        if torch.distributed.get_rank() == 0:
            print(trace)
    """
    axes: Sequence[Axis] = axes_of_model(model) if on_all_ranks and isinstance(model, nn.Module) else ()
    device = device_of_model(model) if axes else torch.device("cpu")
    monitor = monitor_of_job()
    with monitor.call("trace", lambda: axes):
        module_states = run_on_all_ranks(axes, device, lambda: _module_states_to_trace(model))
        if axes:  # all ranks begin here
            all_reduce_max(together := torch.zeros(1, device=device), axes)
            together.item()  # on a device, the host waits
        clock = Clock(module_states[0].group.device)
    recorder = Recorder(module_states, clock, is_aligned=on_all_ranks)
    found = Trace()
    try:
        with recorder.attached():
            yield found
    except Exception as error:
        if axes:  # at its end, other ranks wait for this one
            monitor.report(error, "the block of trace")
        raise
    found._recording = recorder.recording()
    if axes and not are_fake(axes, device):
        with monitor.call("trace", lambda: axes):
            gather = partial(gather_from_all, axes)
            found._recording = compare(found.recording, recorder.sharers(), gather)
    for module_state, work in zip(module_states, found.groups, strict=True):
        module_state.group.traced = work  # for ``explain``


def _module_states_to_trace(model: Any) -> list[ModuleState]:
    module_states = states_to_use("trace", model)
    if any(module_state.root.find(TracedRoot) is not None for module_state in module_states):
        raise RuntimeError(
            "trace: a trace of this model is running, and one model has one at a time. Leave the block of "
            "the first one, or record all in it."
        )
    return module_states


VARIABLE = "SHARDWISE_TRACE"
FOLDER = Path("shardwise-trace")
_DEFAULT = 5  # the first step records the order of blocks, others may compile

_log = logging.getLogger(__name__)


def step_to_trace() -> int | None:
    """The number of the step that ``SHARDWISE_TRACE`` names; None: it is not set."""
    text = os.environ.get(VARIABLE, "").strip()
    if text in ("", "step"):
        return _DEFAULT if text else None
    if not text.isdecimal() or int(text) < 2:
        raise ValueError(
            f"{VARIABLE} is {text!r}; set it to the number of the step to trace, from 2 on (the first one "
            f"records the order of blocks), or to 'step' for step {_DEFAULT}."
        )
    return int(text)


class StepCapture(Feature):
    """Traces step ``number`` of one root, and writes a file for each rank."""

    def __init__(self, root: Root, number: int) -> None:
        super().__init__(root)
        self._number = number
        self._steps = 0  # that are over
        self._has_stepped = False  # since the last forward: a model may have several optimizers
        self._running = ExitStack()

    def forward_begins(self) -> None:
        """A forward begins."""
        add_step_listener(self)
        self._has_stepped = False

    def optimizer_stepped(self, buckets: Iterable[Bucket]) -> None:
        """An optimizer has stepped."""
        own = {id(bucket) for group in self.root.groups for bucket in group.buckets}
        if self._has_stepped or own.isdisjoint(map(id, buckets)):
            return
        self._has_stepped = True
        self._steps += 1
        if self._steps == self._number - 1:
            # The same on all ranks.
            why = None if self.root.find(TracedRoot) is None else "the program traces this model itself"
            if is_captured(self.root.device):
                why = "a CUDA graph is being captured"
            if why is not None:
                _log.warning("%s: step %d is not traced: %s.", VARIABLE, self._number, why)
                self.root.remove(self)
                return
            self._trace = self._running.enter_context(trace(nn.ModuleList(self.root.group.modules)))
        elif self._steps == self._number:
            self.root.remove(self)
            self._running.close()
            self._write()

    def _write(self) -> None:
        path = FOLDER / f"{self.root.name}-step{self._number}-rank{own_rank()}.json"
        try:
            self._trace.save(path)
            if own_rank() == 0:
                self._trace.save(path.with_suffix(".html"))
                print(f"{self._trace}\n{VARIABLE}: see {path.with_suffix('.html')}", flush=True)
        except OSError as error:  # training goes on
            _log.warning("%s: step %d was traced, but not written: %s", VARIABLE, self._number, error)
