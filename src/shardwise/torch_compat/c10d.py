"""Process groups: collectives, subgroups, stores, and how to end waits. Seen on 2.11 to 2.15."""

import logging
import platform
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from threading import Lock, Thread, get_ident
from threading import enumerate as enumerate_threads
from time import monotonic
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _register_process_group, _unregister_process_group

_log = logging.getLogger(__name__)

# torch 2.13 renamed these methods and warns on the old names, which are all that 2.11 has.
_NAMES_BEFORE_2_13 = {
    "all_gather_single": "_allgather_base",
    "all_gather_single_coalesced": "allgather_into_tensor_coalesced",
    "reduce_scatter_single": "_reduce_scatter_base",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
    "all_to_all_single": "alltoall_base",
}
ALL_GATHER, _ALL_GATHER_MANY, REDUCE_SCATTER, _REDUCE_MANY, _ = (
    name if hasattr(dist.ProcessGroup, name) else older for name, older in _NAMES_BEFORE_2_13.items()
)
_ProcessGroup: Any = dist.ProcessGroup  # whose annotations differ from version to version


class PythonGroup(_ProcessGroup):
    """A process group written in Python: what torch asks of each. Subclasses add collectives.

    Those take what the back ends of torch 2.13 take, under the names of that version. ``backend``: the name
    under which the back end was registered. ``name``: one in the process; where torch makes the group, it
    sets another.
    """

    def __init__(self, rank: int, size: int, backend: str, name: str = "") -> None:
        super().__init__(rank, size)
        self._rank, self._size, self._backend_name, self._name = rank, size, backend, name

    def __init_subclass__(cls) -> None:
        """Give collectives their older names as well."""
        for name, older in _NAMES_BEFORE_2_13.items():
            if name in vars(cls):
                setattr(cls, older, vars(cls)[name])

    def getBackendName(self) -> str:
        """Asked by torch."""
        return self._backend_name

    def setGroupName(self, name: str) -> None:
        """Called by torch."""
        self._name = name

    def getGroupName(self) -> str:
        """Asked by torch."""
        return self._name

    @property
    def group_name(self) -> str:
        """Its name."""
        return self._name


@cache
def all_gather_options(is_async: bool) -> Any:
    """What the method ``ALL_GATHER`` of a process group takes beside output and input."""
    options = dist.distributed_c10d.AllgatherOptions()
    options.asyncOp = is_async
    return options


def all_gather(pg: dist.ProcessGroup, output: Tensor, source: Tensor, is_async: bool) -> Any:
    """One all-gather; returns the work (None if ``is_async`` is False and the back end has none)."""
    return getattr(pg, ALL_GATHER)(output, source, all_gather_options(is_async))


def all_gather_coalesced(
    pg: dist.ProcessGroup, outputs: Sequence[Tensor], sources: Sequence[Tensor], is_async: bool
) -> Any:
    """Several all-gathers as one call, which torch offers only by a private context."""
    return getattr(pg, _ALL_GATHER_MANY)(outputs, sources, all_gather_options(is_async))


@dataclass(frozen=True)
class PremultipliedSum:
    """A reduction that multiplies each number by ``factor`` before it is added: of NCCL only.

    Torch has no public way to ask for it, and its own objects for two factors count as equal. Not for
    bfloat16: up to torch 2.13 the factor is read there from the wrong half of a float, which for powers of
    two is zero, and so are all sums (pytorch issue 190745).
    """

    factor: float

    dtypes = (torch.float32, torch.float64, torch.float16)


@cache
def reduce_options(op: Any, is_async: bool) -> Any:
    """What the method ``REDUCE_SCATTER`` takes beside them; ``op`` is a ``ReduceOp`` or a
    ``PremultipliedSum``."""
    options = dist.ReduceScatterOptions()
    if isinstance(op, PremultipliedSum):
        make: Any = dist._make_nccl_premul_sum  # type: ignore[attr-defined]
        op = make(op.factor)
    options.reduceOp = op
    options.asyncOp = is_async
    return options


def reduce_scatter(pg: dist.ProcessGroup, output: Tensor, source: Tensor, op: Any, is_async: bool) -> Any:
    """One reduce-scatter; ``op`` is a ``ReduceOp`` or a ``PremultipliedSum``."""
    return getattr(pg, REDUCE_SCATTER)(output, source, reduce_options(op, is_async))


def reduce_scatter_coalesced(
    pg: dist.ProcessGroup, outputs: Sequence[Tensor], sources: Sequence[Tensor], op: Any, is_async: bool
) -> Any:
    """Several reduce-scatters as one call."""
    return getattr(pg, _REDUCE_MANY)(outputs, sources, reduce_options(op, is_async))


def _backend_of(pg: Any, device: torch.device) -> Any:
    """The back end for ``device`` in ``pg``; None of a process group that is written in Python."""
    try:
        return pg._get_backend(device)
    except (RuntimeError, AttributeError, TypeError):
        return None


def backend_name(pg: dist.ProcessGroup, device: torch.device) -> str:
    """The back end for ``device`` in ``pg``; ``dist.get_backend`` says "undefined" if there are several."""
    try:
        return str(_backend_of(pg, device).name()).lower()
    except (RuntimeError, AttributeError, TypeError):  # it has no back end, or that has no name
        return str(dist.get_backend(pg)).lower()


_NCCL = {"nccl", "nccl2", "nccl-legacy", "nccl-lazy"}


def is_nccl(pg: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether NCCL carries what ``pg`` communicates on ``device``.

    Torch 2.15 has three back ends for it: "nccl" makes the new one, whose name is "nccl2", and "nccl-legacy"
    (or TORCH_DIST_USE_NCCL2=0) the older, whose name is "nccl" still; "nccl-lazy" is the new one with
    communicators of their own for pairs of ranks.
    """
    return backend_name(pg, device) in _NCCL


def _registered_name(pg: dist.ProcessGroup, device: torch.device) -> str:
    """The name by which ``new_group`` makes the back end that ``pg`` has for ``device``: see ``is_nccl``."""
    found = dict(each.split(":", 1) for each in dist.get_backend_config(pg).split(",") if ":" in each)
    return found.get(device.type) or backend_name(pg, device)


def bound_device(pg: dist.ProcessGroup) -> torch.device | None:
    """The only device whose tensors ``pg`` takes; None where it takes those of any."""
    return getattr(pg, "bound_device_id", None)  # not of one that is written in Python


def identity_of(device: torch.device) -> str:
    """What no other CUDA device has, on any machine: an index depends on what a process may see."""
    return f"{platform.node()} {torch.cuda.get_device_properties(device)}"  # with its UUID and its bus


def _with_index(device: torch.device) -> torch.device:
    """The current device of its type, where ``device`` does not say which."""
    if device.index is not None or device.type == "cpu":
        return device
    return torch.device(device.type, torch.get_device_module(device).current_device())


def subgroup(
    parent: dist.ProcessGroup,
    members: Iterable[int],
    device: torch.device,
    purpose: str,
    backend: str | None = None,
) -> dist.ProcessGroup:
    """A process group of some ranks of ``parent``, with its timeout, and its back end or another.

    ``dist.new_group`` makes the name from the number of groups that a rank is in, so ranks in different
    numbers of groups wait for each other for ever. Here the name identifies the group.

    Called by all members, and only by them. No communication yet, see ``connect``, except with torch 2.14's
    "nccl2", which connects here: torch 2.15 has an option against it.

    The newer back ends for NCCL are bound to a device. Without one, they use that of LOCAL_RANK, even if
    the parent has another.
    """
    if hasattr(parent, "part"):  # of a dry run, which has no store
        return parent.part(list(members))  # type: ignore[no-any-return]
    c10d = dist.distributed_c10d
    all_ranks = dist.get_process_group_ranks(parent)
    ranks = [all_ranks[member] for member in members]
    own = ranks.index(dist.get_rank())
    name = f"shardwise_{purpose}_{parent.group_name}_{'_'.join(map(str, ranks))}"
    while name in c10d._world.pg_names.values():  # of an earlier model: made as often on all ranks
        name += "'"
    backend = backend or _registered_name(parent, device)
    bound: dict[str, Any] = {}
    if backend in _NCCL and backend_name(parent, device) in ("nccl2", "nccl-lazy"):
        options: Any = dist.ProcessGroupNCCL.Options()
        if hasattr(options, "lazy_init"):  # not in torch 2.14, where TORCH_DIST_USE_NCCL2=1 chooses "nccl2"
            options.lazy_init = True
        bound = {"device_id": _with_index(device), "backend_options": options}
    make: Any = c10d._new_process_group_helper
    with _without_split():
        args = len(ranks), own, ranks, c10d.Backend(backend), job_store(), name
        pg, _ = make(*args, timeout=timeout_of(parent, device), **bound)
    c10d._world.pg_group_ranks[pg] = {rank: index for index, rank in enumerate(ranks)}
    return pg


_BOUND_DEVICE_LOCK = Lock()  # a checkpoint in the background makes a group of its own


@contextmanager
def _without_split() -> Iterator[None]:
    """Inside, process groups are made without splitting the communicator of the default group.

    After ``init_process_group(device_id=...)`` torch makes the communicator of a group by such a split, at
    the first collective. All ranks of the default group have to take part, also those that are not in the
    group and do not know it: other stages of a pipeline, ranks without a sharded model. Torch splits if the
    default group is bound to a device; there is no public switch.
    """
    world = dist.group.WORLD
    if world is None or getattr(world, "bound_device_id", None) is None:
        yield
        return
    with _BOUND_DEVICE_LOCK:
        device, world.bound_device_id = world.bound_device_id, None
        try:
            yield
        finally:
            world.bound_device_id = device


def connect(pg: dist.ProcessGroup, device: torch.device) -> None:
    """Have the members of ``pg`` connect now. Back ends such as NCCL otherwise do so at the first collective,
    which may be in the middle of other communication; there is no public way to ask for it."""
    backend = _backend_of(pg, device)
    if getattr(backend, "supports_splitting", False):  # as torch asks: those that have a communicator
        backend.eager_connect_single_device(_with_index(device))
    elif backend is not None and is_nccl(pg, device):
        # What ``subgroup`` made with ``lazy_init`` connects only at its first collective.
        dist.all_reduce(torch.zeros(1, device=device), group=pg)


def timeout_of(pg: dist.ProcessGroup | None, device: torch.device) -> timedelta:
    """The timeout of collectives of ``pg``; nothing public tells it."""
    try:
        return _backend_of(pg, device).options._timeout  # type: ignore[no-any-return]
    except (RuntimeError, AttributeError, TypeError):
        return dist.distributed_c10d.default_pg_timeout


def job_store() -> dist.Store:
    """The key-value store of the job; no public function gives it."""
    return dist.distributed_c10d._get_default_store()


def job_store_client() -> dist.Store:
    """The same with a connection of its own, which waits of other threads do not block.

    Stores that cannot be cloned (in memory, in a file) have no connections.
    """
    store: Any = job_store()
    with suppress(RuntimeError, AttributeError, NotImplementedError):
        store = store.clone()
    return store


def is_fake(pg: dist.ProcessGroup) -> bool:
    """True for the fake back end, which moves nothing: for plans with more ranks than there are."""
    return "fake" in str(dist.get_backend(pg)).lower()


_UNTIL_EXIT: list[Any] = []


def keep_until_exit(work: Any) -> None:
    """Keep communication alive that no one will wait for any more, and the memory that it writes into.

    gloo stops receiving anything once such memory is freed, and nothing public cancels a collective.
    """
    _UNTIL_EXIT.append(work)


_TAG_OF_NOTHING = 0x59FFFFFF


Aborts = dict[dist.ProcessGroup, Thread]
_ABORT_THREAD = "shardwise abort"


def end_waits(pgs: Sequence[dist.ProcessGroup], aborts: Aborts) -> None:
    """Make every wait of this process in ``pgs`` raise now. They are unusable afterwards. If NCCL carries one
    of them, all process groups of this process that it carries become unusable.

    ``aborts``: empty at the first call after a failure; the caller keeps it for further calls, which abort
    once more what still runs, and no group that was made since.

    gloo's ``abort`` does not end waits (seen on 2.13), but a receive that times out closes the connections
    of its process group, upon which all waits in it raise, on both sides.

    NCCL's releases this rank's streams, so that what follows reads undefined numbers: the caller has to
    raise. It does not end waits of the host inside a call, as while it connects. It also frees memory of the
    device, which waits for all that runs there. So while one communicator is aborted, no other may wait for
    another rank: all that torch knows are aborted at the same time (pytorch/pytorch#119797), each by a thread
    of its own. A communicator that torch does not know, as torchft's, can still make an abort wait.
    """
    uses_nccl = False
    for pg in pgs:
        for kind in group_devices(pg):
            name = backend_name(pg, torch.device(kind))
            if name == "gloo":
                for peer in set(range(pg.size())) - {pg.rank()}:  # some may have closed theirs already
                    with suppress(RuntimeError):
                        work = pg.recv([torch.empty(1)], peer, _TAG_OF_NOTHING)
                        work.wait(timedelta(milliseconds=1))
            uses_nccl |= _can_abort(name)
    if uses_nccl:
        for pg in {*pgs, *(aborts or dist.distributed_c10d._world.pg_map)}:
            if pg not in aborts or not aborts[pg].is_alive():
                aborts[pg] = Thread(target=_abort, args=(pg,), daemon=True, name=_ABORT_THREAD)
                aborts[pg].start()


def wait_for_aborts(seconds: float) -> None:
    """Wait for threads of ``end_waits``.

    Inside torch at the interpreter's end, one crashes the process. While one aborts a communicator of torch
    2.15's NCCL, ``destroy_process_group`` may hang: both join the same thread (seen in one of ten).
    """
    until = monotonic() + seconds
    for thread in enumerate_threads():
        if thread.name == _ABORT_THREAD:
            thread.join(max(0.0, until - monotonic()))


def _can_abort(name: str) -> bool:
    return name in _NCCL or name == "xccl"  # xccl: not run here


def _abort(pg: dist.ProcessGroup) -> None:
    try:
        for kind in group_devices(pg):
            device = torch.device(kind)
            if _can_abort(backend_name(pg, device)):
                pg._get_backend(device).abort()
    except Exception as error:  # it was destroyed meanwhile, or has nothing to abort
        _log.debug("A process group was not aborted: %s", error)


def is_timeout(error: Exception) -> bool:
    """Whether the timeout of the process group has passed: back ends say so only in the text."""
    text = str(error).lower()
    return "timed out" in text or "timeout" in text


def is_communication_error(error: Exception) -> bool:
    """Whether a back end has raised it.

    gloo raises plain RuntimeErrors with its file names in the text; so does "nccl2", which is the "nccl" of
    torch 2.15, with texts such as "NCCL AllReduce failed: remote process exited ...".
    """
    if isinstance(error, dist.DistError):
        return True
    text = str(error)
    return type(error) is RuntimeError and (
        text.startswith("NCCL ")
        or any(each in text for each in ("gloo", "pair closure", "Operation timed out!"))
    )


def is_unsupported(error: RuntimeError) -> bool:
    """Whether a back end lacks a collective: c10d's base class says so in the text alone, before anything was
    sent."""
    return "does not support" in str(error) or "not implemented" in str(error)


def ranks_of(pg: dist.ProcessGroup) -> list[int]:
    """Global ranks of the members of ``pg``."""
    return list(dist.get_process_group_ranks(pg))


def can_allocate(pg: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether the back end of ``pg`` has an allocator of its own for ``device``."""
    try:
        return bool(_backend_of(pg, device).supports_tensor_alloc(device))
    except (RuntimeError, AttributeError, TypeError):
        return False


def allocate_from_group(
    pg: dist.ProcessGroup, numel: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """A tensor from the allocator of the back end of ``pg``; there is no public function for it."""
    return pg._get_backend(device).allocate_tensor(numel, dtype=dtype, device=device)


def choose_symmetric_memory_of_nccl(device: torch.device) -> None:
    """Have symmetric memory on ``device`` be NCCL's, which its collectives need; torch's default is another.

    The choice is one for the process, and final once anything is allocated: torch raises a RuntimeError if
    another has allocated already. The module is still private (2.11 to 2.15).
    """
    import torch.distributed._symmetric_memory as symmetric

    if symmetric.get_backend(device) != "NCCL":
        symmetric.set_backend("NCCL")


def symmetric_buffer(pg: dist.ProcessGroup, num_bytes: int, device: torch.device) -> Tensor:
    """A buffer of bytes that all ranks of ``pg`` can address. Collective, and the host waits for the device.

    NCCL registers memory with a communicator, which torch makes at the first collective: without one, the
    rendezvous fails with "invalid argument".
    """
    import torch.distributed._symmetric_memory as symmetric

    dist.all_reduce(torch.zeros(1, device=device), group=pg)
    buffer = symmetric.empty(num_bytes, dtype=torch.uint8, device=device)
    symmetric.rendezvous(buffer, pg.group_name)
    return buffer


def group_devices(pg: dist.ProcessGroup) -> set[str]:
    """Device types for which ``pg`` has a back end; empty where it does not say (threads as ranks)."""
    return {device.type for device in pg._device_types}


class _OwnWorld:
    """What torch keeps of process groups, for one thread. All other threads see what was there before.

    torch offers the object as a point of extension, which its own tests of ranks as threads use.
    """

    def __init__(self, others: Any) -> None:
        # Names of process groups are known to all threads: these count from a number that others never reach.
        mine = SimpleNamespace(default_pg=None, group_count=1 << 40, comms=[])
        of_groups = ("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "pg_to_tag")
        for name in (*of_groups, "tags_to_pg", "pg_coalesce_state"):
            setattr(mine, name, {})
        vars(self).update(_thread=get_ident(), _mine=mine, _others=others)

    def _seen(self) -> Any:
        return self._mine if get_ident() == self._thread else self._others

    def __getattr__(self, name: str) -> Any:
        return getattr(self._seen(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._seen(), name, value)


@contextmanager
def own_world() -> Iterator[None]:
    """Inside, this thread has no process groups but those that it adds with ``add_group``."""
    c10d: Any = dist.distributed_c10d
    before = c10d._world
    own = c10d._world = _OwnWorld(before)
    try:
        yield
    finally:
        for name in own.pg_names.values():
            _unregister_process_group(name)
        c10d._world = before


def add_group(pg: dist.ProcessGroup, name: str, *, is_default: bool = False) -> None:
    """Make a process group known that was not made by ``new_group``, inside of ``own_world``.

    ``name``: of its back end.
    """
    world: Any = dist.distributed_c10d._world
    _register_process_group(pg.group_name, pg)
    world.pg_map[pg] = (name, dist.HashStore())
    world.pg_names[pg] = pg.group_name
    world.pg_group_ranks[pg] = {rank: rank for rank in range(pg.size())}
    world.pg_backend_config[pg] = f"cpu:{name}"
    world.pg_to_tag[pg] = ""
    world.tags_to_pg.setdefault("", []).append(pg)
    if is_default:
        world.default_pg = pg
