"""A group's waits for other ranks, and what to tell when one fails."""

from collections.abc import Callable, Sequence
from typing import NoReturn

from shardwise.comm.streams import Finish
from shardwise.layout.mesh import Axis
from shardwise.ranks.failures import SILENT, Relay, Wait, relay_of_job
from shardwise.torch_compat import c10d


class Waits:
    """The two waits of one group: for its all-gathers and for its reductions."""

    def __init__(self, name: str) -> None:
        self.for_all_gather = Wait("all-gather", name, list)
        self.for_reduction = Wait("reduction", name, list)
        self._relay: Relay = SILENT

    def attach(self, name: str, axes: Callable[[], Sequence[Axis]], *, on_device: bool) -> None:
        """Name the group and its ranks, and let other ranks hear of its failures."""
        self._relay = relay_of_job()
        for wait in (self.for_all_gather, self.for_reduction):
            wait.name, wait.axes, wait.is_on_device = name, axes, on_device
            self._relay.waits.add(wait)

    def issued(self, wait: Wait) -> None:
        """Record that collectives were issued which ``wait`` will wait for."""
        self._relay.issue(wait)

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
