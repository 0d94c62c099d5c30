"""What a sharded model does, event by event: "unshard blocks.0", "forward blocks.0", "free blocks.0", ...

The one place in which tests know where the library tells its events.
"""

from collections import Counter
from collections.abc import Callable

from torch import nn

from shardwise.engine.module_state import sharded_module_states


def observe(model: nn.Module, look: Callable[[str, str], None]) -> None:
    """Call ``look`` with each event of ``model`` and the group's name from now on."""
    sharded_module_states(model)[0].root.observe(look)


def events_of(model: nn.Module) -> list[str]:
    """The list to which every event of ``model`` is appended from now on."""
    events: list[str] = []
    observe(model, lambda event, name: events.append(f"{event} {name}"))
    return events


def counts(events: list[str], what: str) -> dict[str, int]:
    """How often each group did ``what``."""
    return dict(Counter(event.split()[1] for event in events if event.split()[0] == what))
