"""When collectives begin and end in Inductor's graphs of whole models.

Inductor keeps the order in which a graph was traced: all-gather, wait, compute, all-gather, wait, compute.
Its own passes go by estimates of times, or all-gather as early as they can. This one does what
engine/forward.py does::

    traced    all-gather 1, wait 1, compute 1, all-gather 2, wait 2, compute 2 ...
    ordered   all-gather 1, all-gather 2, wait 1, compute 1, all-gather 3, wait 2, compute 2 ...

An all-gather begins when the one before it is about to be waited for; a reduction is waited for when the
next one is about to begin, the last at the end, and so is a sum over replicas. So no more than two of a kind
are under way at once.

Ranks must begin collectives in one order. Which that is follows from the order in the graph alone, not from
where other steps stand: ranks of which one has fewer rows fuse and order those differently.
"""

import heapq
import math
import sys
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

from shardwise.arguments import check_flags, check_number
from shardwise.torch_compat import dynamo

Step = Any
"""Of a program of Inductor: ``torch._inductor.scheduler.BaseSchedulerNode``."""
Edges = dict[Step, list[Step]]


def compile_options(*, overlap: bool = True, bucket_cap_mb: float | None = None) -> dict[str, Any]:
    """Options of Inductor for a graph that sharded modules communicate in.

    ``torch.compile(model, fullgraph=True, options=shardwise.compile_options())``. Without options, a graph
    has one collective for all parameters of a ``fully_shard`` call and dtype, and waits for each as soon as
    it has started it. Blocks that are compiled separately need no options, since their collectives are
    outside of their graphs.

    Args:
        overlap: whether collectives run during computation, in the order of eager runs: the next group is
            unsharded while one computes, and the graph waits for its gradients when the next ones are sent.
            This needs memory: a model of 6 or 10 equal blocks had 3.2 of them in memory in forward, and 6.0
            in backward (full parameters, gradients and their packed copies), instead of 1.7 and 3.0.
        bucket_cap_mb: merge neighbouring collectives up to this many megabytes (10^6 bytes, as in
            :func:`shard_model`) of full parameters or gradients, with torch's own passes. None merges none.
            Use it for blocks of less than a few megabytes, whose collectives take longer to start than to
            send. All of a bucket is in memory at once.

    Returns:
        A new dict, to which other options of Inductor may be added.

    Raises:
        TypeError: an argument is of another type.
        ValueError: ``bucket_cap_mb`` is not positive.
    """
    check_flags("compile_options", overlap=overlap)
    options: dict[str, Any] = {}
    if overlap:
        options["reorder_for_compute_comm_overlap"] = True
        options["reorder_for_compute_comm_overlap_passes"] = [one_ahead]
        options |= dynamo.without_later_moves()
    if bucket_cap_mb is not None:
        wanted = "a number of megabytes above 0, or None to merge no collectives"
        kinds = (int, float)
        check_number(
            "compile_options", "bucket_cap_mb", bucket_cap_mb, wanted, above=0, kinds=kinds, most=math.inf
        )
        size = partial(_same_size, min(bucket_cap_mb, sys.float_info.max) * 1e6 / 2**20)
        for name in ("bucket_all_gathers_fx", "bucket_reduce_scatters_fx"):
            options[name] = "all"
            options[f"{name}_bucket_size_determinator"] = size
    return options


def _same_size(size: float, index: int) -> float:
    """The size of the bucket ``index``, in 2^20 bytes. In the module, since options are keys of a cache."""
    return size


def one_ahead(steps: list[Step]) -> list[Step]:
    """``steps``, which are in an order that their dependencies allow, in another such."""
    program = _Program(steps)
    for first, second in pairwise(program.all_gathers):
        if (wait := program.wait_of(first)) is not None:
            program.advance(second, program.places[wait])
    for first, second in pairwise([*program.reductions, None]):
        if (wait := program.wait_of(first)) is not None:
            program.delay(wait, math.inf if second is None else program.places[second] - 0.5)
    for first, second in pairwise([*program.sums, None]):  # each begins where its reduction was waited for
        if (wait := program.wait_of(first)) is not None:
            program.delay(wait, math.inf if second is None else program.wanted[second])
    return program.ordered(_chain(program))


def _chain(program: "_Program") -> list[Step]:
    """Collectives in the order in which they begin: that of the graph, with each all-gather of parameters
    where the one before it was, and each sum over replicas right before the next reduction.
    """
    after = dict(pairwise(program.all_gathers))
    found, sums = list(program.all_gathers[:1]), []
    for each in program.collectives:
        if each in program.sums:
            sums.append(each)
            continue
        if each in program.reductions:
            found += sums
            sums = []
        if each not in program.all_gathers:
            found.append(each)
        elif each in after:
            found.append(after[each])
    return found + sums


class _Program:
    """Steps, what each needs, and where each is wanted."""

    def __init__(self, steps: Sequence[Step]) -> None:
        self._steps = steps
        self.places: dict[Step, float] = {step: float(place) for place, step in enumerate(steps)}
        self.wanted = dict(self.places)
        makers = {name: step for step in steps for name in dynamo.made_by(step)}
        kinds = {step: dynamo.collective_of(step) for step in steps}
        self._needs: Edges = {step: _makers_for(step, makers, kinds) for step in steps}
        self._feeds: Edges = {step: [] for step in steps}
        for step, needed in self._needs.items():
            for each in needed:
                self._feeds[each].append(step)
        self._waits = {step for step, kind in kinds.items() if kind == "wait_tensor"}
        self.collectives = [step for step, kind in kinds.items() if kind and step not in self._waits]
        own_needs = {step: _reached(self._needs[step], self._needs) for step in self.collectives}
        self.all_gathers = [
            step
            for step in self.collectives
            if kinds[step] == "all_gather_into_tensor" and own_needs[step].isdisjoint(self.collectives)
        ]
        """Of parameters: what they all-gather depends on no other collective."""
        others = [step for step in self.collectives if kinds[step] != "all_reduce"]
        self.reductions = [
            step
            for step in others
            if kinds[step] == "reduce_scatter_tensor"
            and _reached(self._feeds[step], self._feeds).isdisjoint(others)
        ]
        """Of gradients: nothing but a sum over replicas depends on what they give."""
        self.sums = [step for step in self.collectives if not own_needs[step].isdisjoint(self.reductions)]
        """Of reduced gradients over replicas."""

    def wait_of(self, collective: Step) -> Step | None:
        """The step that waits for ``collective``."""
        return next((step for step in self._feeds[collective] if step in self._waits), None)

    def advance(self, step: Step, place: float) -> None:
        """Have ``step`` run right before what was at ``place``, and what it needs as well."""
        for each in _reached([step], self._needs):
            self.wanted[each] = min(self.wanted[each], place - 0.5)

    def delay(self, step: Step, place: float) -> None:
        """Have ``step`` run at ``place``, and what needs it no earlier."""
        for each in _reached([step], self._feeds):
            self.wanted[each] = max(self.wanted[each], place)

    def ordered(self, chain: Sequence[Step]) -> list[Step]:
        """The steps in the order wanted, as far as their needs allow; those of ``chain`` in its own."""
        for first, second in pairwise(chain):
            self._needs[second].append(first)
            self._feeds[first].append(second)
        missing = {step: len(needed) for step, needed in self._needs.items()}
        ready = [(self.wanted[step], self.places[step], step) for step in self._steps if not missing[step]]
        heapq.heapify(ready)
        found: list[Step] = []
        while ready:
            step = heapq.heappop(ready)[-1]
            found.append(step)
            for each in self._feeds[step]:
                missing[each] -= 1
                if not missing[each]:
                    heapq.heappush(ready, (self.wanted[each], self.places[each], each))
        return found


def _makers_for(step: Step, makers: dict[str, Step], kinds: dict[Step, str | None]) -> list[Step]:
    """The steps that ``step`` must come after; not the order that torch has put collectives in."""
    needed, followed = dynamo.needed_by(step)
    found = [makers[name] for name in needed if name in makers]
    for name in followed:
        other = makers.get(name)
        if other is not None and not (kinds[step] and kinds[other]):
            found.append(other)
    return list(dict.fromkeys(found))


def _reached(steps: Iterable[Step], edges: Edges) -> set[Step]:
    """``steps``, and all that ``edges`` lead to from them."""
    found: set[Step] = set()
    left = list(steps)
    while left:
        step = left.pop()
        if step not in found:
            found.add(step)
            left += edges[step]
    return found
