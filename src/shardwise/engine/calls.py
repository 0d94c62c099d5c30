"""The calls of sharded modules that are running, and the clock that orders them."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from operator import attrgetter
from types import FrameType
from typing import Any

from torch import nn

from shardwise.groups.group import ParameterGroup
from shardwise.torch_compat import interpreter

_group_of = attrgetter("group")


@dataclass(eq=False, slots=True)
class Call:
    """One call of a module of ``group``: when it was entered, and when it exited."""

    group: ParameterGroup
    module: nn.Module
    enter: int
    parent: "Call | None"  # None: no sharded module called it
    exit: int = 0
    input_nodes: Mapping[int, Any] | None = None  # of the graph, by id, while it runs
    frame: FrameType | None = None  # only for the outermost call; shows whether it still runs
    handled: BaseException | None = None  # the exception that was being handled when it was entered


class Outcome(Enum):
    """How a call ended, and whether a backward follows."""

    FAILED = "raised an exception"
    NO_BACKWARD = "no gradient will flow through it"
    ANNOUNCED = "its outputs will announce its backward"
    UNANNOUNCED = "gradients may come, but nothing announces them"


FAILED, NO_BACKWARD, ANNOUNCED, UNANNOUNCED = Outcome  # faster than attributes, see groups/states.py


class CallStack:
    """The running calls of one root, outermost first."""

    def __init__(self) -> None:
        self.clock = 0
        """Ticks at every enter and exit."""
        self.running: list[Call] = []
        self.first_entries: dict[ParameterGroup, int] = {}
        """The clock of each group's first call that backward will reach; until backward ends."""

    def open(self, group: ParameterGroup, module: nn.Module) -> Call:
        """Push a call of ``module``."""
        self.clock += 1
        parent = self.running[-1] if self.running else None
        call = Call(group, module, self.clock, parent, handled=sys.exc_info()[1])
        if parent is None:
            call.frame = interpreter.frame_of_call()
        self.running.append(call)
        return call

    def close(self, call: Call) -> None:
        """Pop ``call``, which has ended. Calls inside it that are still open have failed."""
        self.clock += 1
        call.exit = self.clock
        while self.running and self.running.pop() is not call:
            pass
        call.frame = call.handled = None
        call.input_nodes = None

    def innermost(self, module: nn.Module) -> Call | None:
        """The innermost running call of ``module``; None if there is none."""
        for call in reversed(self.running):
            if call.module is module:
                return call
        return None

    def drop_interrupted(self) -> None:
        """Drop a forward whose frame no longer runs: an interrupt ended it without running hooks."""
        frame = self.running[0].frame if self.running else None
        if frame is not None and not interpreter.is_running(frame):
            self.running.clear()

    def runs(self, group: ParameterGroup) -> bool:
        """Whether a module of ``group`` is running."""
        return group in map(_group_of, self.running)
