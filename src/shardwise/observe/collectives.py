"""What a sharded model communicates, counted.

torch's ``CommDebugMode`` sees the collectives that pass through its dispatcher. Not all of ours do: on gloo
an exchange goes from rank to rank. The groups themselves know what they issue.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

from torch import nn

from shardwise.engine.module_state import some_module_states
from shardwise.engine.root import Root
from shardwise.groups.group import ParameterGroup
from shardwise.groups.unsharded import Observer


@dataclass(frozen=True)
class CollectiveCounts:
    """How often each group of parameters was all-gathered and reduced; by the name of the group.

    A group counts once however many messages its bytes travel in. What it does not need, it does not count:
    a rank that shares shards with nobody unshards without communication.

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
        TypeError: ``model`` is no module.
        ValueError: nothing in it is sharded.

    Example::

        with count_collectives(model) as counts:
            model(x).sum().backward()
        assert counts.all_gather["blocks.0"] == 2  # before forward, and again before backward
        assert counts.reduce_scatter["blocks.0"] == 1
    """
    roots: dict[Root, list[ParameterGroup]] = {}
    for module_state in some_module_states("count_collectives", model):
        roots.setdefault(module_state.root, []).append(module_state.group)
    counts = CollectiveCounts()
    before = {root: root.observer for root in roots}
    for root, groups in roots.items():
        named = {group.name: group for group in groups}
        root.observe(partial(_count, counts, named, root.observer))
    try:
        yield counts
    finally:
        for root, observer in before.items():
            root.observe(observer)


def _count(
    counts: CollectiveCounts, named: dict[str, ParameterGroup], others: Observer | None, event: str, name: str
) -> None:
    if others is not None:
        others(event, name)
    group = named.get(name)
    if group is None:  # of the same model, but not of the module that was asked about
        return
    shares = any(not bucket.mesh.shard_axis.is_alone for bucket in group.buckets)
    if event == "unshard" and shares:
        counts.all_gather[name] += 1
    elif event == "reduce":
        counts.reduce_scatter[name] += shares
        counts.all_reduce[name] += group.shards.are_replicated and group.settings.requires_all_reduce
