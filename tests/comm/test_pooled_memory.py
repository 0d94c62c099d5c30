"""Communication from memory of a process group's allocator, and from symmetric memory of NCCL.

Neither exists here, so stand-ins allocate. They are as strict as torch: what it refuses, they refuse. That the
numbers stay right, that the back end sees memory of its own alone, and the order of the calls is what is tested.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric
from expecttest import assert_expected_inline
from models import built, even_tower, uneven_tower
from on_ranks import on_ranks
from reference import adamw
from scenario import Side, same_as_plain
from torch import Tensor

from shardwise import fully_shard
from shardwise.comm import custom
from shardwise.comm.custom import PooledCollectives, SymmetricMemoryPool
from shardwise.fsdp_module import use_symmetric_memory
from shardwise.torch_compat import c10d


class Symmetric:
    """What stands in for torch's module, and what it was asked for."""

    def __init__(self, others_backend: str | None = None) -> None:
        self.log: list[str] = []
        self.backend, self.has_allocated = others_backend, others_backend is not None
        self.connected: set[str] = set()
        self.registered: dict[int, Tensor] = {}  # by address
        self._all_reduce = dist.all_reduce

    def get_backend(self, device: torch.device) -> str | None:
        assert isinstance(device, torch.device)
        return self.backend

    def set_backend(self, name: str) -> None:
        if self.has_allocated:
            raise RuntimeError("symmetric memory is allocated already")
        assert name in ("NVSHMEM", "CUDA", "NCCL")
        self.log.append(f"set_backend {name}")
        self.backend = name

    def empty(self, *size: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
        assert self.backend == "NCCL", f"NCCL cannot register memory of {self.backend}"
        assert all(isinstance(number, int) for number in size)
        self.has_allocated = True
        self.log.append(f"empty {size}")
        return torch.empty(*size, dtype=dtype, device=device)

    def rendezvous(self, tensor: Tensor, group: str) -> object:
        assert isinstance(group, str)
        if group not in self.connected:
            raise RuntimeError("Failed to window register / invalid argument")
        self.log.append(f"rendezvous of {tensor.numel()}")
        self.registered[tensor.data_ptr()] = tensor
        return object()

    def all_reduce(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        self.connected.add(kwargs["group"].group_name)
        return self._all_reduce(tensor, *args, **kwargs)

    def holds(self, tensor: Tensor) -> bool:
        return any(0 <= tensor.data_ptr() - start < whole.numel() for start, whole in self.registered.items())


@contextmanager
def symmetric_memory(others_backend: str | None = None) -> Iterator[Symmetric]:
    """Inside, the host has symmetric memory, and may be told to use it."""
    stand_in = Symmetric(others_backend)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("get_backend", "set_backend", "empty", "rendezvous"):
            patch.setattr(symmetric, name, getattr(stand_in, name))
        patch.setattr(dist, "all_reduce", stand_in.all_reduce)
        yield stand_in


@contextmanager
def all_gathers_checked(holds: Any) -> Iterator[list[str]]:
    """Inside, each all-gather of the back end is checked: in place, and in memory that it knows."""
    found: list[str] = []
    gather = PooledCollectives.all_gather

    def checked(comm: PooledCollectives, outputs: Any, inputs: Any) -> Any:
        (output,), (source,) = outputs, inputs
        start = output.data_ptr() + comm._pg.rank() * source.numel() * source.itemsize
        found.append("in place" if source.data_ptr() == start else "from elsewhere")
        if not (holds(output) and holds(source)):
            found.append("memory that the back end does not know")
        return gather(comm, outputs, inputs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PooledCollectives, "all_gather", checked)
        yield found


def take_steps(side: Side, model: Any, make: Any) -> None:
    side.steps(model, adamw(model), range(2), width=7 if make is uneven_tower else 8)
    side.note_parameters(model)


@same_as_plain()
@pytest.mark.parametrize(("world", "make"), [(2, even_tower), (3, uneven_tower)], indirect=["world"])
def test_groups_all_gather_in_place_in_symmetric_memory(side: Side, make: Any) -> None:
    model = built(make)
    if not side.is_sharded:
        take_steps(side, model, make)
        return
    with symmetric_memory() as memory, all_gathers_checked(memory.holds) as found:
        side.shard_tower(model)
        for module in (*model.blocks, model):
            use_symmetric_memory(module, "set_symm_mem_for_comm")
        take_steps(side, model, make)
    assert set(found) == {"in place"}, found


@on_ranks(2)
def test_the_back_end_is_chosen_the_communicator_made_and_equal_blocks_take_turns() -> None:
    """One buffer, and on the host, where the next all-gather begins before this one has ended, one more."""
    torch.manual_seed(0)
    model: Any = even_tower()
    with symmetric_memory() as memory:
        for block in model.blocks:
            fully_shard(block)
            use_symmetric_memory(block, "set_symm_mem_for_comm")
        fully_shard(model)
        for _ in range(2):
            model(torch.randn(4, 8)).sum().backward()
    SymmetricMemoryPool._kept.clear()
    assert_expected_inline(
        "\n".join(memory.log),
        """\
set_backend NCCL
empty (1184,)
rendezvous of 1184
empty (1184,)
rendezvous of 1184""",
    )


@on_ranks(2)
def test_a_new_process_group_has_its_communicator_before_the_rendezvous() -> None:
    """No collective has run in it yet."""
    cpu = torch.device("cpu")
    with symmetric_memory() as memory:
        c10d.choose_symmetric_memory_of_nccl(cpu)
        c10d.symmetric_buffer(dist.new_group(), 64, cpu)
    assert memory.log == ["set_backend NCCL", "empty (64,)", "rendezvous of 64"]


@on_ranks(1)
def test_a_back_end_that_was_chosen_before_is_named() -> None:
    model: Any = even_tower()
    fully_shard(model)
    with symmetric_memory(others_backend="CUDA"), pytest.raises(RuntimeError) as caught:
        use_symmetric_memory(model, "set_symm_mem_for_comm")
    text = str(caught.value)
    assert_expected_inline(
        text,
        """\
set_symm_mem_for_comm: symmetric memory of this process belongs to another back end than NCCL \
(symmetric memory is allocated already), and NCCL's collectives, by which Tower is unsharded, cannot use \
that. Call this before anything else allocates symmetric memory.""",
    )


@same_as_plain(2)
@pytest.mark.parametrize("make", [even_tower, uneven_tower])
def test_groups_all_gather_in_place_in_memory_of_the_process_group(side: Side, make: Any) -> None:
    model = built(make)
    if not side.is_sharded:
        take_steps(side, model, make)
        return
    allocated: list[Tensor] = []

    def allocate(pg: Any, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        assert isinstance(pg, dist.ProcessGroup)
        allocated.append(torch.full((numel,), 7, dtype=dtype, device=device))
        return allocated[-1]

    def holds(tensor: Tensor) -> bool:
        return any(0 <= tensor.data_ptr() - a.data_ptr() < a.numel() * a.itemsize for a in allocated)

    with pytest.MonkeyPatch.context() as patch, all_gathers_checked(holds) as found:
        patch.setattr(c10d, "can_allocate", lambda pg, device: True)
        patch.setattr(custom.c10d, "allocate_from_group", allocate)
        side.shard_tower(model)
        for module in (*model.blocks, model):
            module.set_allocate_memory_from_process_group_for_comm(True)
        take_steps(side, model, make)
    assert set(found) == {"in place"}, found
