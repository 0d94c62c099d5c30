"""The caller's own collectives and communication memory: checked, and set for a group."""

from collections.abc import Sequence
from typing import Any

import torch

from shardwise.comm.communicators import Communicator, unless_alone
from shardwise.comm.custom import AllocatorPool, PooledCollectives, SymmetricMemoryPool
from shardwise.comm.streams import is_of_device
from shardwise.engine.module_state import module_state_of
from shardwise.torch_compat import c10d

CUSTOM = ("set_custom_all_gather", "set_custom_reduce_scatter", "register_comm_hook")
MEMORY = ("set_allocate_memory_from_process_group_for_comm", "set_symm_mem_for_comm")


def check_choice(module: Any, method: str, others: Sequence[str]) -> None:
    """Refuse ``method`` if one of ``others``, which it cannot be combined with, was called before."""
    group = module_state_of(module).group
    for other in others:
        if other in group.choices:
            raise ValueError(
                f"{method}: {other} has set how {group.name} communicates, and the two cannot be "
                "combined: each brings its own buffers or collectives. Use one of the two."
            )


def communicate(module: Any, method: str, **choices: Any) -> None:
    """Give all buckets of a module's own group these ``choices``, fields of CommOptions."""
    module_state = module_state_of(module)
    module_state.group.replan(lambda bucket: bucket.communicate(**choices))
    module_state.group.choices.add(method)
    module_state.root.start_over()


def allocate_from_process_group(module: Any, method: str, enable: bool) -> None:
    """Choose whether a module's own group communicates from memory of its process groups' allocators."""
    group = module_state_of(module).group
    if enable:
        check_choice(module, method, CUSTOM)
        pgs = [b.mesh.shard_axis.pg for b in group.buckets if b.mesh.shard_axis.pg is not None]
        if all(c10d.can_allocate(pg, group.device) for pg in pgs):
            communicate(module, method, make_all_gather=with_memory, make_reduce_scatter=with_memory)
        group.choices.add(method)
    elif method in group.choices:
        options = group.buckets[0].communication.options  # alike in all of them
        chosen = {name: getattr(options, name) for name in ("make_all_gather", "make_reduce_scatter")}
        communicate(module, method, **{name: None for name in chosen if chosen[name] is with_memory})
        group.choices.discard(method)


def use_symmetric_memory(module: Any, method: str) -> None:
    """Have a module's own group be unsharded through symmetric memory of NCCL."""
    group = module_state_of(module).group
    check_choice(module, method, CUSTOM)
    try:
        c10d.choose_symmetric_memory_of_nccl(group.device)
    except RuntimeError as error:
        raise RuntimeError(
            f"{method}: symmetric memory of this process belongs to another back end than NCCL ({error}), "
            f"and NCCL's collectives, by which {group.name} is unsharded, cannot use that. Call this before "
            "anything else allocates symmetric memory."
        ) from error
    communicate(module, method, make_all_gather=with_symmetric_memory)


@unless_alone
def with_memory(pg: Any, device: torch.device) -> Communicator:
    """Plain collectives over memory from the process group's allocator."""

    def allocate(size: tuple[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return c10d.allocate_from_group(pg, size[0], dtype, device)

    return PooledCollectives(pg, device, AllocatorPool(allocate))


@unless_alone
def with_symmetric_memory(pg: Any, device: torch.device) -> Communicator:
    """Plain collectives over symmetric memory."""
    return PooledCollectives(pg, device, SymmetricMemoryPool(pg))


def check_comm(caller: str, comm: Any) -> None:
    """Refuse an object that cannot serve as a custom collective."""
    if isinstance(comm, type) or not (callable(comm) and callable(getattr(comm, "allocate", None))):
        raise TypeError(
            f"{caller}: comm is {comm!r}; pass an object with a method allocate(size, *, dtype, device) that "
            "can be called with the tensors and the process group."
        )


def check_of_device(caller: str, kind: str, value: Any, device: torch.device, why: str) -> None:
    """Refuse ``value`` unless it is a ``kind`` ("Stream" or "Event") of ``device``; ``why`` is the reason."""
    if not is_of_device(value, kind, device):
        found = f"{value!r} ({type(value).__module__}.{type(value).__qualname__})"
        raise TypeError(
            f"{caller}: {kind.lower()} is {found}, not one of '{device.type}', the device of the mesh: "
            f"{why}. Pass a torch.{device.type}.{kind}."
        )
