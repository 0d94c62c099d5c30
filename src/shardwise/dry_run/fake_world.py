"""A world of ranks that are not there, for this thread only and for the time of a dry run.

Nothing is left behind: no default process group, no environment variable, no back end; and a process group
that the caller has initialised is there again afterwards.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardwise.torch_compat import c10d, dtensor

Sent = Callable[[str, int, Sequence[Tensor]], None]
"""Told of each collective: the mesh dimension, the bytes that this rank sends, the tensors."""

_BACKEND = "shardwise_fake"  # c10d.is_fake knows it by its name


class _Done(dist.Work):
    """A collective that is over."""

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


class SilentGroup(c10d.PythonGroup):
    """A process group whose collectives end at once, write nothing, and say what they would send.

    Bytes sent are the fewest possible: those of a ring, or of an exchange between all pairs.
    """

    def __init__(self, dimension: str, world: int, sent: Sent, last_dimension: str) -> None:
        super().__init__(0, world, _BACKEND, f"shardwise_dry_run_{dimension}_{id(self)}")
        self._dimension = dimension
        self._last_dimension = last_dimension
        self._sent = sent

    def part(self, members: Sequence[int]) -> "SilentGroup":
        """A group of some of these ranks, neighbours along the last dimension."""
        made = SilentGroup(self._last_dimension, len(members), self._sent, self._last_dimension)
        c10d.add_group(made, _BACKEND)
        return made

    def _tell(self, num_bytes: int, rounds: int, tensors: Sequence[Tensor]) -> _Done:
        world = self.size()
        self._sent(self._dimension, rounds * num_bytes * (world - 1) // world, tensors)
        return _Done()

    def _one(self, output: Any, source: Any, *_: Any) -> _Done:
        return self._many([output], [source])

    def _many(self, outputs: Any, sources: Any, *_: Any) -> _Done:
        """All-gathers and reduce-scatters: the larger side is whole on all ranks."""
        num_bytes = max(sum(tensor.nbytes for tensor in side) for side in (outputs, sources))
        return self._tell(num_bytes, 1, [*outputs, *sources])

    def _sum(self, tensors: Any, *_: Any) -> _Done:
        return self._tell(sum(tensor.nbytes for tensor in tensors), 2, tensors)

    def send(self, tensors: Any, *_: Any) -> _Done:
        """To one rank."""
        self._sent(self._dimension, sum(tensor.nbytes for tensor in tensors), tensors)
        return _Done()

    def recv(self, tensors: Any, *_: Any) -> _Done:
        """From one rank."""
        self._sent(self._dimension, 0, tensors)
        return _Done()

    def _nothing(self, *_: Any) -> _Done:
        return _Done()

    all_gather_single = reduce_scatter_single = _one
    all_gather_single_coalesced = reduce_scatter_single_coalesced = _many
    allreduce = allreduce_coalesced = _sum
    barrier = broadcast = _nothing


@contextmanager
def fake_world(shape: dict[str, int], sent: Sent) -> Iterator[DeviceMesh]:
    """Inside, this thread is rank 0 of a world that is not there; gives its mesh, of sizes by names."""
    sizes = torch.Size(shape.values())
    # DTensor takes equal meshes for the same: the process groups of this world are not those of another.
    with c10d.own_world(), ExitStack() as stack:
        dtensor.forget_operations()
        stack.callback(dtensor.forget_operations)
        first, last = next(iter(shape)), list(shape)[-1]
        along = {name: SilentGroup(name, size, sent, last) for name, size in shape.items()}
        # What all ranks exchange is as slow as the first dimension.
        everyone = along[first] if len(along) == 1 else SilentGroup(first, sizes.numel(), sent, last)
        for group in {*along.values(), everyone}:
            c10d.add_group(group, _BACKEND, is_default=group is everyone)
        groups: Any = everyone if len(along) == 1 else list(along.values())
        ranks = None if len(along) == 1 else torch.arange(sizes.numel()).view(sizes)
        yield DeviceMesh.from_group(groups, "cpu", ranks, mesh_dim_names=tuple(shape))
