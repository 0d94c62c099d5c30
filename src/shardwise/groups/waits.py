"""A group's waits for other ranks, and what to tell when one fails."""

from collections.abc import Callable, Sequence
from typing import NoReturn, TypeVar

from shardwise.comm.streams import CommStreams, Finish
from shardwise.layout.mesh import Axis
from shardwise.ranks.failures import SILENT, Relay, relay_of_job
from shardwise.ranks.position import Wait
from shardwise.torch_compat import c10d

T = TypeVar("T")


class Waits:
    """What one group waits for: its all-gathers, its reductions, the gradients it averages unsharded."""

    def __init__(self, name: str) -> None:
        self.for_all_gather = Wait("all-gather", name, list)
        self.for_reduction = Wait("reduction", name, list)
        self.for_ignored = Wait("average of ignored_params' gradients", name, list)
        self._relay: Relay = SILENT

    def attach(self, name: str, axes: Callable[[], Sequence[Axis]], streams: CommStreams) -> None:
        """Name the group and its ranks, and let other ranks hear of its failures."""
        self._relay = relay_of_job()
        for wait, stream in (
            (self.for_all_gather, streams.all_gather),
            (self.for_reduction, streams.reduce_scatter),
        ):
            wait.name, wait.axes = name, axes
            wait.stream = stream if streams.are_device_streams else None
            self._relay.note_wait(wait)
        self.for_ignored.name, self.for_ignored.axes = name, axes

    def issue(self, start: Callable[[], T], wait: Wait) -> T:
        """The result of ``start``, which hands collectives to the back end that ``wait`` will wait for.

        A back end may block here as well: while it connects, or until all ranks have come.
        """
        relay = self._relay
        relay.issuing = wait
        try:
            result = start()
        except BaseException as error:
            relay.issuing = None
            if isinstance(error, RuntimeError):
                self.raise_explained(error, wait)
            raise
        relay.issue(wait)
        return result

    def finish(self, finish: Finish, wait: Wait) -> None:
        """Run ``finish``, which waits for other ranks; if that fails, explain why."""
        relay = self._relay
        around, relay.waiting = relay.waiting, wait
        try:
            finish()
        except RuntimeError as error:
            self.raise_explained(error, wait)
        finally:
            relay.waiting = around

    def raise_explained(self, error: RuntimeError, wait: Wait) -> NoReturn:
        """Raise the failure behind ``error`` if communication failed, or ``error`` itself."""
        if not c10d.is_communication_error(error):
            raise error
        raise self._relay.explained(error, wait.event, wait.name, wait.axes()) from error
