"""Collectives of the caller's own, which count their calls and remember what they have handed out."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise import FSDPModule


class Comm:
    """Counts calls, and remembers what it has handed out.

    `returns_work`: whether the caller gets the handle of a collective still under way, or None after it is done.
    """

    def __init__(self, returns_work: bool) -> None:
        self.returns_work = returns_work
        self.given: list[Any] = []  # storages, kept so that no address is seen twice
        self.calls: list[dict[str, Any]] = []

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        tensor = torch.empty(*size, dtype=dtype, device=device)
        self.given.append(tensor.untyped_storage())
        return tensor

    def owns(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in {storage.data_ptr() for storage in self.given}

    def note(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, **more: Any) -> None:
        call = {
            "sent": input_tensor.numel(),
            "received": output_tensor.numel(),
            "ranks": dist.get_process_group_ranks(group),
            "group": group.group_name,
            "same dtype": output_tensor.dtype == input_tensor.dtype,
            "flat": output_tensor.is_contiguous() and input_tensor.is_contiguous(),
        }
        self.calls.append(call | more)


class AllGather(Comm):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False
    ) -> dist.Work | None:
        self.note(output_tensor, input_tensor, group, owned=self.owns(output_tensor))
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        return gather(output_tensor, input_tensor, group=group, async_op=async_op and self.returns_work)


class ReduceScatter(Comm):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> dist.Work | None:
        self.note(
            output_tensor, input_tensor, group, owned=self.owns(input_tensor), op=str(op).split(".")[-1]
        )
        reduce = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        return reduce(
            output_tensor, input_tensor, op=op, group=group, async_op=async_op and self.returns_work
        )


class Comms:
    """One pair for the groups of a model, or for some of them."""

    def __init__(
        self, model: nn.Module, names: Sequence[str] | None = None, returns_work: bool = True
    ) -> None:
        self.gather, self.reduce = AllGather(returns_work), ReduceScatter(returns_work)
        for name, module in model.named_modules():
            if isinstance(module, FSDPModule) and (names is None or name in names):
                module.set_custom_all_gather(self.gather)
                module.set_custom_reduce_scatter(self.reduce)

    def clear(self) -> None:
        self.gather.calls.clear()
        self.reduce.calls.clear()

    def check(self, world: int) -> None:
        for gathered in self.gather.calls:
            assert gathered["received"] == world * gathered["sent"]
        for reduced in self.reduce.calls:
            assert reduced["sent"] == world * reduced["received"]
        for call in (*self.gather.calls, *self.reduce.calls):
            assert call["ranks"] == list(range(world))
            assert call["flat"]
            assert call["same dtype"]
            assert call["owned"], "the large buffer was not taken from allocate"
