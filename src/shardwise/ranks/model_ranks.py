"""Broadcasts over all ranks of a model.

A model may live on meshes of several dimensions, and no process group needs to contain all of its ranks. So
a broadcast goes along one dimension after another, from the ranks that already have the value:

    mesh (2, 3), from rank 1      0 1 2   along the rows   * * *   along the columns   * * *
                                  3 4 5        ->          . . .         ->            * * *
"""

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwise.layout.mesh import Axis, axes_of, default_device_type, device_of, ranks_along

T = TypeVar("T")


def axes_of_model(model: nn.Module) -> list[Axis]:
    """The axes that connect the ranks of ``model``, in the same order on all of them: without sharded
    parameters, all ranks of the default process group, if any."""
    axes = axes_of(model.parameters())
    if axes or not dist.is_initialized() or any(isinstance(param, DTensor) for param in model.parameters()):
        return axes
    pg = dist.group.WORLD
    assert pg is not None
    return [] if pg.size() == 1 else [Axis(pg, pg.size(), pg.rank())]


def axes_of_given(given: Any) -> list[Axis]:
    """The axes of a caller's argument, a module or parameters; if it is neither, of all ranks."""
    if isinstance(given, nn.Module):
        return axes_of_model(given)
    params = [given] if isinstance(given, Tensor) else given if isinstance(given, (list, tuple)) else []
    return axes_of(params) or axes_of_model(nn.Module())


def mesh_device(model: nn.Module) -> torch.device | None:
    """The device of the meshes of ``model``; None if it has none."""
    for param in model.parameters():
        if isinstance(param, DTensor):
            return device_of(param.device_mesh)
    return None


def device_of_model(model: nn.Module) -> torch.device:
    """The device on which its ranks communicate: that of its meshes, or of the process group."""
    found = mesh_device(model)
    if found is not None or not dist.is_initialized():
        return found or torch.device("cpu")
    return torch.device(default_device_type("shardwise"))


def gather_from_all(axes: Sequence[Axis], own: T) -> dict[int, T]:
    """The values of all ranks that ``axes`` connect, by global rank in ascending order. Collective."""
    found = {own_rank(): own}
    for axis in [*axes, *axes[-2::-1]]:  # there and back, as in all_reduce_max
        everyone: list[Any] = [None] * axis.world
        dist.all_gather_object(everyone, found, group=axis.pg)
        for each in everyone:
            found.update(each)
    return dict(sorted(found.items()))


def is_first(axes: Sequence[Axis]) -> bool:
    """True on the one rank that is the first along each of ``axes``."""
    return all(axis.rank == 0 for axis in axes)


class Broadcast:
    """Broadcasts from global rank ``src``, or from the first rank, to all ranks that ``axes`` connect.

    Collective, as are its methods. All ranks name the same ``src``.

    Raises:
        ValueError: ``src`` is not among these ranks. All of them raise.
    """

    def __init__(self, axes: Sequence[Axis], src: int | None, device: torch.device) -> None:
        self.is_source = is_first(axes) if src is None else own_rank() == src
        self._steps: list[tuple[Axis, int]] = []
        self._device = device
        self._has_single_axis = len(axes) == 1
        has_it = self.is_source
        for axis in [*axes, *axes[-2::-1]]:  # there and back, as in all_reduce_max
            # The highest rank with the value sends it; -1: no rank of this axis has it yet.
            sender = torch.tensor([axis.rank if has_it else -1, 0 if has_it else 1], device=device)
            dist.all_reduce(sender, op=dist.ReduceOp.MAX, group=axis.pg)
            rank, is_missing = sender.tolist()
            if rank >= 0 and is_missing:
                self._steps.append((axis, rank))
                has_it = True
        if not has_it:
            ranks = sorted({rank for axis in axes for rank in ranks_along(axis)} | {own_rank()})
            raise ValueError(
                f"rank {src} does not hold this model: this rank shares it with {ranks}, and those with "
                "others perhaps. Name one of the ranks that were given the model, by its global rank."
            )

    @property
    def single_axis(self) -> tuple[Axis, int] | None:
        """The one axis that connects all ranks, and the source's rank on it; None if there are several."""
        return self._steps[0] if self._has_single_axis else None

    def tensor(self, tensor: Tensor) -> None:
        """Copy the source's contents into every rank's ``tensor``, contiguous and of equal size."""
        for axis, sender in self._steps:
            dist.broadcast(tensor, group=axis.pg, group_src=sender)

    def object(self, value: Any) -> Any:
        """The source's ``value``, sent as a pickle, on all ranks."""
        values = [value]
        for axis, sender in self._steps:
            dist.broadcast_object_list(values, group=axis.pg, group_src=sender, device=self._device)
        return values[0]


def own_rank() -> int:
    """The global rank of this process; 0 without a process group."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
