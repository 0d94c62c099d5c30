"""The caller's own collectives and memory, checked and set."""

from collections.abc import Sequence
from typing import Any

import torch

from shardwise.comm.communicators import make_communicator
from shardwise.comm.custom import PooledCollectives, ProcessGroupPool, SymmetricMemoryPool
from shardwise.comm.streams import is_of_device
from shardwise.engine.members import member_of

CUSTOM = ("set_custom_all_gather", "set_custom_reduce_scatter", "register_comm_hook")
MEMORY = ("set_allocate_memory_from_process_group_for_comm", "set_symm_mem_for_comm")


def check_choice(module: Any, method: str, others: Sequence[str]) -> None:
    """``method`` does not go together with ``others``."""
    group = member_of(module).group
    for other in others:
        if other in group.choices:
            raise ValueError(
                f"{method}: {group.name} was told by {other} how to communicate, and the two do not go "
                "together: each brings buffers or collectives of its own. Use one of the two."
            )


def communicate(module: Any, method: str, **choices: Any) -> None:
    """Have the buckets of a module's group communicate as ``choices`` (of CommOptions) say."""
    member = member_of(module)
    member.group.shards.replan(lambda bucket: bucket.communicate(**choices))
    member.group.choices.add(method)
    member.root.prepare_anew()


def made(kind: Any, comm: Any, pg: Any, device: torch.device) -> Any:
    """The caller's own collective, where there is somebody to communicate with."""
    return make_communicator(pg, device) if pg is None or pg.size() == 1 else kind(comm, pg, device)


def with_memory(pg: Any, device: torch.device) -> Any:
    """Plain collectives over memory that the process group allocates."""
    return _from_pool(ProcessGroupPool, pg, device)


def with_symmetric_memory(pg: Any, device: torch.device) -> Any:
    """Plain collectives over symmetric memory."""
    return _from_pool(SymmetricMemoryPool, pg, device)


def _from_pool(kind: Any, pg: Any, device: torch.device) -> Any:
    return make_communicator(pg, device) if pg is None else PooledCollectives(pg, device, kind(pg))


def check_comm(caller: str, comm: Any) -> None:
    """Refuse what is no collective of the caller's."""
    if isinstance(comm, type) or not (callable(comm) and callable(getattr(comm, "allocate", None))):
        raise TypeError(
            f"{caller}: comm is {comm!r}; pass an object with a method allocate(size, *, dtype, device) that "
            "can be called with the tensors and the process group."
        )


def check_of_device(caller: str, kind: str, value: Any, device: torch.device, why: str) -> None:
    """``value`` is a stream or an event, as ``kind`` says, of ``device``; ``why`` that matters."""
    if not is_of_device(value, kind, device):
        found = f"{value!r} ({type(value).__module__}.{type(value).__qualname__})"
        raise TypeError(
            f"{caller}: {kind.lower()} is {found}, not one of '{device.type}', the device of the mesh: "
            f"{why}. Pass a torch.{device.type}.{kind}."
        )
