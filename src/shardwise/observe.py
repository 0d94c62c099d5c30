"""What a sharded model communicates, counted; and what it has in memory on this rank, by group, and why.

torch's ``CommDebugMode`` sees the collectives that pass through its dispatcher. Not all of ours do: on gloo
an exchange goes from rank to rank. The groups themselves know what they issue.

Sizes in memory are those allocated when the snapshot is taken, padding included: not what a layout plans, but
what storages have. Memory that two things share is counted once. Two ranks in backward, in units of a block's
unsharded parameters; blocks.1 comes next, blocks.2 is over:

    group     parameters  gradients  shards  unsharded  kept  full gradients  reduced
    blocks.0  unsharding  empty         0.5          1     -               -        -
    blocks.1  unsharded   empty         0.5          1     -               -        -
    blocks.2  sharded     reducing      0.5          -     -               1      0.5
    blocks.3  sharded     empty         0.5          -     -               -      0.5

A snapshot reads what the groups know and what storages have: no contents, no collective.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

from torch import Tensor, nn

from shardwise.engine.module_state import ModuleState, states_to_use
from shardwise.engine.root import Root
from shardwise.groups.group import ParameterGroup
from shardwise.groups.states import SUMMONED, UNSHARDED, UNSHARDING
from shardwise.groups.unsharded import Observer
from shardwise.layout.text_tables import ruled
from shardwise.torch_compat import dtensor, tensor_impl

__all__ = ["CollectiveCounts", "GroupSnapshot", "MemorySnapshot", "count_collectives", "memory_snapshot"]


# --- collectives ----------------------------------------------------------------------------------


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


_SIZES = {
    "shard_bytes": "MB shards",
    "unsharded_bytes": "unsharded",
    "kept_storage_bytes": "kept",
    "full_gradient_bytes": "full gradients",
    "reduced_gradient_bytes": "reduced",
}
"""The sizes in a snapshot, and what the table calls them."""


# --- memory ---------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What is in memory, in bytes; of what, see ``GroupSnapshot``."""

    shard_bytes: int
    unsharded_bytes: int
    kept_storage_bytes: int
    full_gradient_bytes: int
    reduced_gradient_bytes: int

    @property
    def total_bytes(self) -> int:
        """All of it."""
        return sum(getattr(self, name) for name in _SIZES)


@dataclass(frozen=True)
class GroupSnapshot(Sizes):
    """What the parameters of one ``fully_shard`` call had in memory on this rank, in bytes.

    Attributes:
        name: of the group, as in errors and events, seen from the outermost sharded module.
        modules: the names of its modules.
        state: where the unsharded parameters are: ``sharded`` (nowhere), ``unsharding`` (an all-gather runs,
            their memory is allocated), ``unsharded`` (in memory), ``partly unsharded`` (a few ranks keep them
            together, with ``reshard_after_forward=n``), or ``summoned`` (the caller has them, in
            ``unsharded()``).
        reason: why they are in memory, in words; None if they are not.
        gradient_state: where the full gradients are: ``empty`` (nowhere), ``pending`` (some of the running
            backward are in memory), ``deferred`` (not reduced, as inside ``no_sync``) or ``reducing``.
        shard_bytes: this rank's shards; in host memory if they are offloaded. 0 on the meta device.
        unsharded_bytes: unsharded parameters, or the part of them that this rank keeps; with ``unsharded()``
            those that the caller sees. 0 if they are the shards themselves, as on a single rank without mixed
            precision.
        kept_storage_bytes: memory that is unused now but not freed, of parameters that are sharded
            (``set_keep_unsharded_storage``, and up to 1 MiB on the host, where allocating takes longer than
            copying).
        full_gradient_bytes: gradients that have not been reduced, or whose reduction was not waited for.
        reduced_gradient_bytes: this rank's gradients: in ``.grad``, in a reduction that was not waited for,
            or waiting for a sum over replicas.
    """

    name: str
    modules: tuple[str, ...]
    state: str
    reason: str | None
    gradient_state: str


@dataclass(frozen=True)
class MemorySnapshot(Sizes):
    """What the groups of a model had in memory on this rank. ``str()`` makes a table of it.

    Attributes:
        groups: outermost first. The snapshot has all sizes of a group itself, summed over them.
    """

    groups: tuple[GroupSnapshot, ...]

    @staticmethod
    def of(groups: tuple[GroupSnapshot, ...]) -> "MemorySnapshot":
        """That of ``groups``."""
        return MemorySnapshot(groups, **{name: sum(getattr(g, name) for g in groups) for name in _SIZES})

    def __str__(self) -> str:
        """A line for each group: its states, its memory in MB (10^6 bytes), and why it is in memory."""
        decimals = 1 if self.total_bytes >= 10e6 else 4

        def sizes(of: Sizes) -> list[str]:
            return [f"{size / 1e6:,.{decimals}f}" if (size := getattr(of, name)) else "-" for name in _SIZES]

        rows = [[g.name, g.state, g.gradient_state, *sizes(g), g.reason or ""] for g in self.groups]
        head = ["group", "parameters", "gradients", *_SIZES.values(), "in memory because"]
        total = ["total", "", "", *sizes(self), ""]
        return "\n".join(ruled([head, *rows, total], right=range(3, 8), has_total=True))


def memory_snapshot(model: nn.Module) -> MemorySnapshot:
    """What ``model`` has in memory now on this rank: shards, unsharded parameters, gradients, and why.

    Use it to find the block that still has unsharded parameters. You may call it at any time, even in a hook
    of a forward or backward, and on only one rank: it unshards, waits for and changes nothing. It needs about
    10 us for each parameter.

    It counts what the groups have allocated for parameters and gradients. It does not count activations, the
    optimizer's state, parameters that no group manages, buffers of a running collective, and work inside a
    graph of a model compiled as a whole.

    Args:
        model: a sharded module, or one with sharded modules inside; the snapshot is of those.

    Returns:
        Sizes in bytes, by group, without references to the model.

    Raises:
        TypeError: ``model`` is no module.
        ValueError: nothing in it is sharded.

    Example::

        model.blocks[3].register_forward_hook(lambda *_: print(memory_snapshot(model)))
        loss = model(x).sum()
        assert memory_snapshot(model.blocks[3]).unsharded_bytes == 0
    """
    module_states = states_to_use("memory_snapshot", model)
    with tensor_impl.plain_access():
        return MemorySnapshot.of(tuple(map(_snapshot_of, module_states)))


def _snapshot_of(module_state: ModuleState) -> GroupSnapshot:
    group, storages = module_state.group, _Storages()
    state, reason = group.unsharded.state, module_state.root.unsharded_groups.reasons.get(group)
    here, kept = bytes_of_unsharded(group)
    summoned = _summoned_params(group)
    return GroupSnapshot(
        name=group.name,
        modules=tuple(group.name.split(", ")),
        state=state.value,
        reason="the caller is in unsharded()" if state is SUMMONED else reason and reason.value,
        gradient_state=group.gradients.state.value,
        shard_bytes=storages.add(_shards(group)),
        unsharded_bytes=here + storages.add(summoned),
        full_gradient_bytes=storages.add(_full_gradients(group, summoned)),
        reduced_gradient_bytes=storages.add(_reduced_gradients(group)),
        kept_storage_bytes=kept,
    )


def bytes_of_shards(group: ParameterGroup) -> int:
    """This rank's shards, as in a snapshot."""
    with tensor_impl.plain_access():
        return _Storages().add(_shards(group))


def bytes_of_unsharded(group: ParameterGroup) -> tuple[int, int]:
    """Unsharded parameters that the group has made, and memory that is kept for them; in a moment."""
    state = group.unsharded.state
    buffers = [bucket.allocated_bytes() for bucket in group.unsharded.buckets]
    here, kept = sum(whole for whole, _ in buffers), 0
    if state is not UNSHARDED and state is not UNSHARDING:
        here, kept = 0, here
    return here + sum(part for _, part in buffers), kept


def bytes_of_gradients(group: ParameterGroup) -> tuple[int, int]:
    """Full gradients, and this rank's reduced ones, as in a snapshot."""
    storages = _Storages()
    with tensor_impl.plain_access():
        full = storages.add(_full_gradients(group, _summoned_params(group)))
        return full, storages.add(_reduced_gradients(group))


# --- tensors and their storages -------------------------------------------------------------------


def _shards(group: ParameterGroup) -> Iterator[Tensor]:
    """The flat shards, and what was put in place of their parts and not taken over yet."""
    for bucket in group.buckets:
        flat = bucket.flat_shard.bytes
        yield flat
        for param in bucket.params:
            # Registered are shards that were assigned, and unsharded parameters while these are summoned.
            is_summoned = group.unsharded.state is SUMMONED
            registered = [] if is_summoned else [site.registered() for site in param.sites]
            for tensor in (param.sharded, *registered):
                yield from (part for part in _parts_of(tensor) if not _lies_in(part, flat))


def _summoned_params(group: ParameterGroup) -> list[Tensor]:
    if group.unsharded.state is not SUMMONED:
        return []
    places = [(param, site.registered()) for param in group.shards.params for site in param.sites]
    return [found for param, found in places if found is not None and found is not param.sharded]


def _full_gradients(group: ParameterGroup, summoned: list[Tensor]) -> Iterator[Tensor | None]:
    for full in (*group.unsharded.full_params, *summoned):
        yield full.grad
    for reduction in group.gradients.in_flight():
        yield from reduction.gradients


def _reduced_gradients(group: ParameterGroup) -> Iterator[Tensor | None]:
    for param in group.shards.params:
        yield param.reduced_gradient
    for reduction in group.gradients.in_flight():
        yield from reduction.buffers
    for bucket in group.buckets:
        yield bucket.reduction.earlier


# --- how large it is ------------------------------------------------------------------------------


class _Storages:
    """The storages that were counted: each once, with any number of tensors in it."""

    def __init__(self) -> None:
        self._seen: set[int] = set()

    def add(self, tensors: Iterable[Tensor | None]) -> int:
        """The bytes of the storages of ``tensors``, without those that were added before."""
        total = 0
        for tensor in tensors:
            for part in _parts_of(tensor):
                storage = part.untyped_storage()
                key = tensor_impl.storage_key(storage)
                if key not in self._seen and not part.is_meta:
                    total += storage.nbytes()
                self._seen.add(key)
        return total


def _parts_of(tensor: Tensor | None) -> list[Tensor]:
    return [] if tensor is None else tensor_impl.plain_parts(dtensor.plain(tensor))


def _lies_in(tensor: Tensor, flat: Tensor) -> bool:
    """True if ``tensor`` is a part of the flat shard: a storage of its own, over that one's memory."""
    if tensor.device != flat.device or tensor.is_meta:
        return False
    return 0 <= tensor.untyped_storage().data_ptr() - flat.data_ptr() < flat.numel()
