"""``SHARDWISE_TRACE``: trace one step of a program that does not ask for it.

    SHARDWISE_TRACE=step torchrun --nproc-per-node 8 train.py    its fifth step
    SHARDWISE_TRACE=200 torchrun --nproc-per-node 8 train.py     its 200th

A step lasts from the end of the optimizer's last step to the end of its next one, and thus contains what the
program does between steps, such as loading data.
"""

import logging
import os
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path

from torch import nn

from shardwise.buckets.bucket import Bucket
from shardwise.buckets.optimizer_steps import add_step_listener
from shardwise.comm.streams import is_captured
from shardwise.engine.root import Feature, Root
from shardwise.ranks.model_ranks import own_rank
from shardwise.tracing.recorder import TracedRoot
from shardwise.tracing.trace import trace

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
