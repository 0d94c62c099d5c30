"""What a sharded model communicates, counted.

torch's ``CommDebugMode`` sees the collectives that pass through its dispatcher. Not all of ours do: on gloo
an exchange goes from rank to rank. The groups themselves know what they issue.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

from torch import nn

from shardwise.engine.module_state import ModuleState, states_to_use
from shardwise.engine.root import Root
from shardwise.groups.group import ParameterGroup
from shardwise.groups.unsharded import Observer


@dataclass(frozen=True)
class CollectiveCounts:
    """How often each group of parameters was all-gathered and reduced; by the name of the group.

    A group counts once, even if its bytes are sent in many messages. Work without communication does not
    count: a rank that shares no shards with others unshards without communication.

    Attributes:
        all_gather: all-gathers of parameters over the ranks that share them.
        reduce_scatter: reductions of gradients over these ranks.
        all_reduce: reductions over replicas.
    """

    all_gather: Counter[str] = field(default_factory=Counter)
    reduce_scatter: Counter[str] = field(default_factory=Counter)
    all_reduce: Counter[str] = field(default_factory=Counter)


@contextmanager
def count_collectives(model: nn.Module) -> Iterator[CollectiveCounts]:
    """Count the collectives that the sharded modules in ``model`` issue inside, on this rank.

    Costs a Python call for each unshard and reduction inside, and nothing outside. Counts do not grow for
    what runs inside a graph of ``torch.compile``; ``torch.distributed.tensor.debug.CommDebugMode`` sees that.

    Args:
        model: a module with sharded modules in it.

    Raises:
        TypeError: ``model`` is not a module.
        ValueError: nothing in it is sharded.

    Example::

        with count_collectives(model) as counts:
            model(x).sum().backward()
        assert counts.all_gather["blocks.0"] == 2  # before forward, and again before backward
        assert counts.reduce_scatter["blocks.0"] == 1
    """
    counts = CollectiveCounts()
    with hear_events(states_to_use("count_collectives", model), partial(count_event, counts)):
        yield counts


def count_event(counts: CollectiveCounts, event: str, group: ParameterGroup | None) -> None:
    """Count what ``group`` communicates, as an event of it tells."""
    if group is None:
        return
    shares = any(not bucket.mesh.shard_axis.is_alone for bucket in group.buckets)
    if event == "unshard":
        counts.all_gather[group.name] += shares
    elif event == "reduce":
        counts.reduce_scatter[group.name] += shares
        counts.all_reduce[group.name] += group.shards.are_replicated and group.settings.requires_all_reduce


@contextmanager
def hear_events(
    module_states: Sequence[ModuleState], hear: Callable[[str, ParameterGroup | None], None]
) -> Iterator[None]:
    """Inside, tell ``hear`` every event of these models; with its group, if that is of ``module_states``."""
    groups = {(each.root, each.group.name): each.group for each in module_states}
    before = {each.root: each.root.observer for each in module_states}

    def tell(root: Root, others: Observer | None, event: str, name: str) -> None:
        if others is not None:
            others(event, name)
        hear(event, groups.get((root, name)))

    for root, others in before.items():
        root.observe(partial(tell, root, others))
    try:
        yield
    finally:
        for root, others in before.items():
            root.observe(others)
