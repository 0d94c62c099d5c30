"""Give the names of torch's ``fully_shard`` to this library, for frameworks that import them, and back.

This is the one file of the library that imports torch's FSDP, and it does when ``install`` is called.

A name is replaced in the modules of torch that offer it, and in every loaded module that has imported it at
its top, under any name. Modules that are imported later find the replacement in torch. Other modules
of torch are left alone: they reach into torch's own classes.

What stands under the names meanwhile is neither this library's nor torch's: a module that imported it can be
told from one that imported shardwise, and gets torch's back. In ``isinstance``, a stand-in stands for the
classes of both: a framework still recognises a policy of torch's that it was given before.
"""

import functools
import importlib
import inspect
import logging
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any

from torch import nn

from shardwise.engine.module_state import sharded_module_states
from shardwise.fsdp_module import FSDPModule, UnshardHandle
from shardwise.fully_shard import fully_shard
from shardwise.policies import CPUOffloadPolicy, DataParallelMeshDims, MixedPrecisionPolicy, OffloadPolicy
from shardwise.setup.hooks import register_fsdp_forward_method, share_comm_ctx
from shardwise.state.contexts import unsharded

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
        told = "; ".join(f"{place}: {', '.join(sorted(names))}" for place, names in sorted(replaced.items()))
        _log.info("shardwise took the place of torch's fully_shard: %s.", told)


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
    pairs = [(theirs, _stand_in_for(ours, theirs)) for ours, theirs in there if theirs is not None]
    stage = types.new_class("PipelineStage", (InstalledStage,))  # an object of its own, as all stand-ins
    summon = vars(peer.FullyShardedDataParallel)["summon_full_params"]  # a static method
    summons = staticmethod(_summon_stand_in(summon.__func__))
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
    package = module_name.partition(".")[0]
    is_ours_to_change = module_name in HOMES if package == "torch" else package != "shardwise"
    return isinstance(module, types.ModuleType) and is_ours_to_change


# --- what stands there ----------------------------------------------------------------------------


class _StandIn(type):
    """The class of classes that stand for one of this library and its counterpart in torch."""

    stands_for: tuple[type, type]

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        """Make an instance of this library's class, or of a class that was derived from the stand-in."""
        if "stands_for" in vars(cls):
            return cls.stands_for[0](*args, **kwargs)
        return super().__call__(*args, **kwargs)

    def __instancecheck__(cls, instance: Any) -> bool:
        if "stands_for" in vars(cls):
            return isinstance(instance, cls.stands_for)
        return super().__instancecheck__(instance)

    def __subclasscheck__(cls, subclass: type) -> bool:
        if "stands_for" in vars(cls):
            return super().__subclasscheck__(subclass) or issubclass(subclass, cls.stands_for)
        return super().__subclasscheck__(subclass)


def _stand_in_for(ours: Any, theirs: Any) -> Any:
    """What stands for ``ours`` in the place of ``theirs``, torch's thing of the same name."""
    if isinstance(ours, type):
        body = {"stands_for": (ours, theirs), "__doc__": ours.__doc__, "__module__": theirs.__module__}
        return _StandIn(ours.__name__, (ours,), body)
    # A second function of the same code: no frame more in tracebacks, and warnings point to the caller.
    twin = types.FunctionType(
        ours.__code__, ours.__globals__, ours.__name__, ours.__defaults__, ours.__closure__
    )
    twin.__kwdefaults__ = ours.__kwdefaults__
    return functools.update_wrapper(twin, ours)


def _summon_stand_in(theirs: Callable[..., Any]) -> Callable[..., Any]:
    """``summon_full_params`` of torch's FSDP1, which would show the shards of this library as they are."""

    @functools.wraps(theirs)
    def summon_full_params(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not sharded_module_states(module):
            return theirs(module, *args, **kwargs)
        return unsharded(**inspect.signature(theirs).bind(module, *args, **kwargs).arguments)

    return summon_full_params
