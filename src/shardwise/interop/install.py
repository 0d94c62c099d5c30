"""Give the names of torch's ``fully_shard`` to this library, for frameworks that import them, and back.

This is the one file of the library that imports torch's FSDP, and it does when ``install`` is called.

A name is replaced in the modules of torch that offer it, and in every loaded module that has imported it at
its top, as whatever it calls it. Modules that are imported later find the replacement in torch. Other modules
of torch are left alone: they reach into torch's own classes.
"""

import importlib
import logging
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any

from shardwise.fsdp_module import FSDPModule, UnshardHandle
from shardwise.fully_shard import fully_shard
from shardwise.interop.stand_ins import stand_in_for, summon_stand_in
from shardwise.policies import CPUOffloadPolicy, DataParallelMeshDims, MixedPrecisionPolicy, OffloadPolicy
from shardwise.setup.hooks import register_fsdp_forward_method, share_comm_ctx

_log = logging.getLogger("shardwise")

# What has a counterpart of the same name in torch, where that version of torch has one.
OURS = (
    fully_shard,
    FSDPModule,
    UnshardHandle,
    MixedPrecisionPolicy,
    OffloadPolicy,
    CPUOffloadPolicy,
    DataParallelMeshDims,
    register_fsdp_forward_method,
    share_comm_ctx,
)
# Where torch offers them to others.
HOMES = (
    "torch.distributed.fsdp",
    "torch.distributed._composable.fsdp",
    "torch.distributed._composable.fsdp.fully_shard",
    "torch.distributed.pipelining",
)

_lock = Lock()
_pairs: list[tuple[Any, Any]] = []  # torch's thing and its stand-in, made once: a cache
_is_installed = False  # of the process, as the names of modules are


def install() -> None:
    """From now on, make code that was written for torch's ``fully_shard`` use this library.

    This replaces the names of ``fully_shard`` in ``torch.distributed.fsdp`` and
    ``torch.distributed._composable.fsdp`` (the function, ``FSDPModule``, its policies and helpers) and
    ``PipelineStage`` in ``torch.distributed.pipelining``. It also replaces them in each loaded module that
    has imported them at its top. The logger ``shardwise`` lists the replaced names once, at level INFO.

    While installed, ``isinstance(module, torch.distributed.fsdp.FSDPModule)`` is true for modules that this
    library or torch has sharded. Policies of torch's classes work. Pipeline stages that are made while
    installed are :class:`shardwise.interop.PipelineStage` if this library has sharded their module, and
    torch's otherwise. ``FullyShardedDataParallel.summon_full_params`` summons the full parameters of what
    this library has sharded, as :func:`shardwise.unsharded` does; otherwise that class stays as it is.

    Applies to the whole process; call it before the model is sharded. A second call also replaces names in
    modules that were loaded since. Names that a function has stored in its own variables before are not
    replaced.

    Example::

        from shardwise.interop import install

        install()
        accelerator = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))
    """
    global _is_installed
    with _lock:
        if not _pairs:
            _pairs.extend(_make_pairs())
        replaced = _replace(_pairs)
        _is_installed = True
    if replaced:
        _log.info("shardwise took the place of torch's fully_shard: %s.", _told(replaced))


def uninstall() -> None:
    """Restore torch's names that ``install`` has replaced, in modules imported meanwhile as well.

    Sharded models stay as they are, and can still train. Does nothing if nothing is installed.
    """
    global _is_installed
    with _lock:
        if _is_installed:
            _replace([(stand_in, theirs) for theirs, stand_in in _pairs])
            _is_installed = False


@contextmanager
def installed() -> Iterator[None]:
    """Inside the ``with`` statement, make code that was written for torch's ``fully_shard`` use this library.

    See :func:`install`. If it was installed before, it stays installed afterwards.

    Example::

        with installed():
            model, optimizer = accelerator.prepare(model, optimizer)
    """
    was_installed = _is_installed
    install()
    try:
        yield
    finally:
        if not was_installed:
            uninstall()


def _make_pairs() -> list[tuple[Any, Any]]:
    """Also loads torch's pipelines: they keep torch's own ``FSDPModule``, into whose state they reach."""
    peer, *_, pipelining = [importlib.import_module(home) for home in HOMES]
    from shardwise.interop.pipelines import InstalledStage

    there = [(ours, getattr(peer, ours.__name__, None)) for ours in OURS]
    pairs = [(theirs, stand_in_for(ours, theirs)) for ours, theirs in there if theirs is not None]
    stage = types.new_class("PipelineStage", (InstalledStage,))  # an object of its own, as all stand-ins
    summon = vars(peer.FullyShardedDataParallel)["summon_full_params"]  # a static method
    summons = staticmethod(summon_stand_in(summon.__func__))
    return [*pairs, (pipelining.PipelineStage, stage), (summon, summons)]


def _replace(pairs: list[tuple[Any, Any]]) -> dict[str, list[str]]:
    """Put the second of each pair wherever a module, or torch's FSDP1, has the first.

    Returns the names by module.
    """
    by_id = {id(old): new for old, new in pairs}
    loaded = list(sys.modules.items())
    places: dict[str, Any] = {name: module for name, module in loaded if _is_open(name, module)}
    places[f"{HOMES[0]}.FullyShardedDataParallel"] = sys.modules[HOMES[0]].FullyShardedDataParallel
    replaced: dict[str, list[str]] = {}
    for place_name, place in places.items():
        for name, value in list(vars(place).items()):
            if id(value) in by_id:
                setattr(place, name, by_id[id(value)])
                replaced.setdefault(place_name, []).append(name)
    return replaced


def _is_open(module_name: str, module: Any) -> bool:
    """Whether names may be replaced in this module."""
    if not isinstance(module, types.ModuleType):
        return False
    package = module_name.partition(".")[0]
    if package == "torch":
        return module_name in HOMES
    return package != "shardwise"


def _told(replaced: dict[str, list[str]]) -> str:
    return "; ".join(f"{module}: {', '.join(sorted(names))}" for module, names in sorted(replaced.items()))
