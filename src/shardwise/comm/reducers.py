"""Communicators that reduce gradients as the caller chooses: by a hook, or in a smaller dtype.

For int8, see ``quantized.py``.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.comm.communicators import Communicator, factor_before_sum, make_communicator
from shardwise.comm.streams import Finish, nothing


class HookedCollectives(Communicator):
    """FSDP1's hooks: ``(grad)`` over replicas, ``(grad, output)`` over shards, each with its state bound.

    On a mesh of both, the hook reduces over shards, and the averages over ``replicas`` are as usual.
    """

    packs_everything = True
    averages = True

    def __init__(
        self, hook: Callable[..., None], replicas: int, pg: dist.ProcessGroup | None, device: torch.device
    ) -> None:
        super().__init__(pg)
        self._hook = hook
        self._replicas = replicas

    def reduce_scatter(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], divisor: float) -> Finish:
        """The hook's result for one flat gradient of each dtype, as one of ``replicas`` summands."""
        for dtype in dict.fromkeys(source.dtype for source in inputs):
            pairs = [(o, i) for o, i in zip(outputs, inputs, strict=True) if i.dtype == dtype]
            if len(pairs) > 1:  # on a single rank, or for parameters packed separately
                sizes = [output.numel() for output, _ in pairs]
                rows = [
                    source.view(self._world, size) for (_, source), size in zip(pairs, sizes, strict=True)
                ]
                flat = torch.cat(rows, dim=1).view(-1)
                result = flat.new_empty(sum(sizes))
                _filled(result, partial(self._hook, flat.detach()))
                for (output, _), part in zip(pairs, result.split(sizes), strict=True):
                    output.copy_(part)
            else:
                _filled(pairs[0][0], partial(self._hook, pairs[0][1].detach()))
            if self._replicas > 1:
                for output, _ in pairs:
                    output.div_(self._replicas)
        return nothing

    def all_reduce(self, tensors: Sequence[Tensor]) -> Finish:
        """Call the hook, if it is for replicas only."""
        for tensor in tensors:
            _filled(tensor, self._hook)
        return nothing


def _filled(target: Tensor, hook: Callable[[Tensor], None]) -> None:
    """Have ``hook`` fill ``target``, even if it gives its argument other memory, as torch's hooks do."""
    given = target.detach()
    hook(given)
    if given.data_ptr() != target.data_ptr() or given.dtype != target.dtype:
        target.copy_(given)


class LowPrecisionCollectives(Communicator):
    """Sums in ``dtype``, over shards and replicas. Sums of float16 are kept in range."""

    def __init__(self, pg: dist.ProcessGroup, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(pg)
        self._plain = make_communicator(pg, device)
        self._dtype = dtype
        self.smallest_part_bytes = self._plain.smallest_part_bytes
        self.reduce_memory_factor = self._plain.reduce_memory_factor + 1.0  # the casts, which are smaller

    def reduce_scatter(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], divisor: float) -> Finish:
        """Cast, sum, cast back, divide. For a sum in float16, numbers are divided before the cast."""
        before = factor_before_sum(self._dtype, divisor)
        sources = [(s if before == 1.0 else s / before).to(self._dtype) for s in inputs]
        results = [torch.empty_like(output, dtype=self._dtype) for output in outputs]
        self._plain.channel = self.channel
        wait = self._plain.reduce_scatter(results, sources, 1.0)

        def finish() -> None:
            wait()
            for output, result in zip(outputs, results, strict=True):
                output.copy_(result)
                if divisor != before:
                    output.div_(divisor / before)

        return finish

    def all_reduce(self, tensors: Sequence[Tensor]) -> Finish:
        """Cast, sum, cast back."""
        casts = [tensor.to(self._dtype) for tensor in tensors]
        wait = self._plain.all_reduce(casts)

        def finish() -> None:
            wait()
            for tensor, cast in zip(tensors, casts, strict=True):
                tensor.copy_(cast)

        return finish
