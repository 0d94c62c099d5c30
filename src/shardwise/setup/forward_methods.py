"""Methods other than forward that unshard, and streams that several roots share."""

import inspect
from collections.abc import Sequence

from torch import nn

from shardwise.compile.hooks import wrap_method
from shardwise.engine.module_state import is_sharded, module_state_of, under_compile
from shardwise.fsdp_module import FSDPModule


def share_comm_ctx(modules: "Sequence[FSDPModule]") -> None:
    """Let several root modules share their communication streams, as pipeline stages on one rank should.

    Saves the memory that the caching allocator would reserve for each stream. Changes nothing on a CPU mesh,
    which has no streams. Needs no communication.

    Args:
        modules: a list or tuple of sharded root modules; an empty one does nothing.

    Raises:
        TypeError: ``modules`` is not a list or tuple, or a module in it is not sharded.

    Example::

        share_comm_ctx([first_stage, last_stage])
    """
    if not isinstance(modules, (list, tuple)):
        raise TypeError(
            f"share_comm_ctx: modules is a {type(modules).__name__}; pass a list of sharded modules."
        )
    for index, module in enumerate(modules):
        if not is_sharded(module):
            raise TypeError(
                f"share_comm_ctx: {type(module).__name__} at [{index}] is not sharded. Call fully_shard on "
                "it first."
            )
    if modules:
        first, *others = [module_state_of(under_compile(module)).root.lazy_init for module in modules]
        first.share_streams(others)


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Let ``module.<method_name>(...)`` unshard parameters as ``module(...)`` does.

    For modules that are run through other methods than forward, such as ``generate`` or ``encode``. Each
    call costs the all-gathers of a forward; its backward reduces gradients as usual.

    Args:
        module: any module. One that is not sharded is left as it is, so that callers need not check.
        method_name: the name of one of its methods, which returns when it is done.

    Raises:
        TypeError: ``module`` is not an ``nn.Module``, or ``method_name`` is not a string.
        ValueError: the module has no method of this name.
        NotImplementedError: the method is a generator or a coroutine: it returns before it has run, and its
            parameters would be resharded too early.

    Example::

        register_fsdp_forward_method(model, "encode")
        features = model.encode(images)
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"register_fsdp_forward_method: {type(module).__name__} is not an nn.Module.")
    if not isinstance(method_name, str):
        raise TypeError(
            f"register_fsdp_forward_method: method_name is {method_name!r}, a {type(method_name).__name__}; "
            "pass the method's name as a string."
        )
    if not callable(getattr(module, method_name, None)):
        raise ValueError(
            f"register_fsdp_forward_method: {type(module).__name__} has no method '{method_name}'."
        )
    method = inspect.unwrap(getattr(module, method_name))
    if (
        inspect.isgeneratorfunction(method)
        or inspect.iscoroutinefunction(method)
        or inspect.isasyncgenfunction(method)
    ):
        raise NotImplementedError(
            f"register_fsdp_forward_method: {type(module).__name__}.{method_name} is a generator or a "
            "coroutine: it returns before it has run, so its parameters would be freed too early. Register "
            "the methods it calls for each piece, or collect the pieces in a method that returns them."
        )
    module = under_compile(module)
    if isinstance(module, FSDPModule):
        wrap_method(module, method_name, module_state_of(module))
