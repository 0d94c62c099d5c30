"""What stands under the names of torch's ``fully_shard`` while they are replaced.

Each stand-in is an object of its own, neither this library's nor torch's: so a module that imported it in the
meantime can be told from one that imported shardwise, and gets torch's back.

In ``isinstance``, a class stands for those of both libraries: a framework still recognises one of torch's
policies that it was given before, or a model that torch has sharded.
"""

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

from torch import nn

from shardwise.engine.module_state import sharded_module_states
from shardwise.state.contexts import unsharded


class StandInClass(type):
    """The class of classes that stand for one of this library and its counterpart of torch."""

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


def stand_in_for(ours: Any, theirs: Any) -> Any:
    """What stands for ``ours`` in the place of ``theirs``, torch's thing of the same name."""
    return _class(ours, theirs) if isinstance(ours, type) else _function(ours)


def _class(ours: type, theirs: type) -> type:
    body = {"stands_for": (ours, theirs), "__doc__": ours.__doc__, "__module__": theirs.__module__}
    return StandInClass(ours.__name__, (ours,), body)


def _function(ours: Callable[..., Any]) -> Callable[..., Any]:
    """A second function of the same code: no frame more in tracebacks, and warnings point to the caller."""
    assert isinstance(ours, types.FunctionType)
    twin = types.FunctionType(
        ours.__code__, ours.__globals__, ours.__name__, ours.__defaults__, ours.__closure__
    )
    twin.__kwdefaults__ = ours.__kwdefaults__
    return functools.update_wrapper(twin, ours)


def summon_stand_in(theirs: Callable[..., Any]) -> Callable[..., Any]:
    """``summon_full_params`` of torch's FSDP1, which would show the shards of this library as they are."""

    @functools.wraps(theirs)
    def summon_full_params(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not sharded_module_states(module):
            return theirs(module, *args, **kwargs)
        return unsharded(**inspect.signature(theirs).bind(module, *args, **kwargs).arguments)

    return summon_full_params
