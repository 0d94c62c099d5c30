"""The reductions of a group's gradients, one for each bucket: sent, waited for, dropped.

Knows no states and no order: ``Gradients`` (gradients.py) tells what is sent, and whether that is allowed.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from shardwise.comm.reduction import PartReduction, Reduction
from shardwise.groups.gradient_parts import QueuedPart
from shardwise.params.changes import are_all_there, take_gradients
from shardwise.params.parameter import Param
from shardwise.torch_compat import autograd

if TYPE_CHECKING:
    from shardwise.groups.group import ParameterGroup

_arrives_on_host = attrgetter("arrives_on_host")


class Reductions:
    """The reductions of ``group`` that are in flight; nobody has waited for these."""

    def __init__(self, group: "ParameterGroup") -> None:
        self._group = group
        self.forget()

    def forget(self) -> None:
        """Start over with the buckets that the group has now."""
        self._of_buckets: list[Reduction | None] = [None] * len(self._group.buckets)

    def in_flight(self) -> list[Reduction]:
        """Those that nobody has waited for."""
        return [reduction for reduction in self._of_buckets if reduction is not None]

    # --- send -------------------------------------------------------------------------------------

    def send(self, parts: Iterable[QueuedPart]) -> list[PartReduction]:
        """Begin to reduce some parts before the others."""
        with without_graph():
            return self._issue(partial(self._send, parts))

    def send_rest(self, parts: Iterable[QueuedPart] | None) -> list[PartReduction]:
        """Begin to reduce all that is left: ``parts``, or all gradients together if that is None."""
        with without_graph():
            sent = self._issue(self._send_all if parts is None else partial(self._send, parts))
            self.close()
        return sent

    def _issue(self, send: Callable[[], list[PartReduction]]) -> list[PartReduction]:
        waits = self._group.waits
        if autograd.profiler_is_on():
            send = self._group.labelled("reduce-scatter", send)
        return waits.issue(send, waits.for_reduction)

    def _send_all(self) -> list[PartReduction]:
        """Begin to reduce the gradients of each bucket, all together."""
        part_reductions = []
        buckets = self._group.buckets
        gradients = self._take(self._group.shards.params, self._group.unsharded.params)
        for number, bucket in enumerate(buckets):
            own = gradients
            if len(buckets) > 1:
                own, gradients = gradients[: len(bucket.params)], gradients[len(bucket.params) :]
            reduction = self._open(number, is_filled=are_all_there(own))
            part_reductions += [
                reduction.send(part, own, made_on=self._group.gradients.made_on)
                for part in bucket.reduction.parts
            ]
        return part_reductions

    def _send(self, parts: Iterable[QueuedPart]) -> list[PartReduction]:
        part_reductions = []
        all_params, all_fulls = self._group.shards.params, self._group.unsharded.params
        for queued in parts:
            reduction = self._of_buckets[queued.bucket] or self._open(queued.bucket, is_filled=False)
            params = [all_params[index] for index in queued.indices]
            fulls = [all_fulls[index] for index in queued.indices] if all_fulls else ()
            gradients: list[Tensor | None] = [None] * len(self._group.buckets[queued.bucket].params)
            taken = self._take(params, fulls)
            for index, gradient in zip(queued.part.indices, taken, strict=True):
                gradients[index] = gradient
            made_on = self._group.gradients.made_on
            part_reductions.append(reduction.send(queued.part, gradients, made_on=made_on))
        return part_reductions

    def _open(self, number: int, *, is_filled: bool) -> Reduction:
        bucket = self._group.buckets[number]
        divisor = self._group.settings.divide_factor or float(bucket.mesh.num_ranks)
        self._of_buckets[number] = made = bucket.reduction.open(
            self._group.streams, divisor, is_filled=is_filled
        )
        return made

    def close(self) -> None:
        """All that will be reduced is sent: let the sums go on to the replicas."""
        settings = self._group.settings
        for bucket, reduction in zip(self._group.buckets, self._of_buckets, strict=True):
            if reduction is not None:
                bucket.reduction.close(reduction, settings.requires_all_reduce, settings.all_reduce_hook)

    # --- take -------------------------------------------------------------------------------------

    def _take(self, params: Sequence[Param], fulls: Sequence[nn.Parameter]) -> Sequence[Tensor | None]:
        """Take the unsharded gradients of ``params``, which belong to the reduction from now on."""
        if not fulls:
            return [self._zeros_for(param) if param.sharded.requires_grad else None for param in params]
        if not (self._group.settings.ranks_may_differ or self._group.shards.is_tensor_parallel):
            plain = take_gradients(fulls)
            if plain is not None:
                return plain
        gradients: list[Tensor | None] = []
        for param, full in zip(params, fulls, strict=True):
            gradient = full.grad
            if gradient is not None:
                full.grad = None
                if gradient.layout is not torch.strided:
                    raise RuntimeError(
                        f"{param.fqn}: its gradient has layout {gradient.layout}; only dense gradients "
                        "can be reduce-scattered. Build the module without sparse gradients "
                        "(nn.Embedding(sparse=False))."
                    )
                if param.original.is_tensor_parallel:
                    gradient = param.original.content_of(gradient, param.mesh)
            elif full.requires_grad:
                gradient = self._zeros_for(param)
            gradients.append(gradient)
        return gradients

    def _zeros_for(self, param: Param) -> Tensor | None:
        """Zeros in place of a gradient that has not arrived; None unless unused parameters take part."""
        if not self._group.settings.ranks_may_differ:
            return None
        return torch.zeros(param.shape, dtype=param.precision.reduced, device=self._group.device)

    # --- wait -------------------------------------------------------------------------------------

    def advance(self) -> None:
        """Let them proceed to the all-reduce over replicas."""
        for reduction in self.in_flight():
            self._wait_for_ranks(reduction.advance)

    @property
    def arrive_on_host(self) -> bool:
        """True if one copies its result to host memory: wait for it as late as possible."""
        return any(map(_arrives_on_host, self.in_flight()))

    def release_part(self, part_reduction: PartReduction) -> None:
        """Wait for the sums of one part, and free its unsharded gradients."""
        self._wait_for_ranks(part_reduction.release)

    def release_unsharded(self) -> None:
        """Wait for the sums over the shard axis, and free the unsharded gradients; replicas may follow."""
        for reduction in self.in_flight():
            self._wait_for_ranks(reduction.release_parts)

    def release(self) -> None:
        """Wait for the results, and free what the device made them of."""
        for reduction in self.in_flight():
            self._wait_for_ranks(reduction.release)

    def finish(self, *, without_hooks: bool) -> bool:
        """Wait for the sums and add them to ``.grad`` of the shards.

        ``without_hooks``: no shard has gradient hooks, or a ``.grad`` that stands for deferred gradients.
        True if some are deferred until a sum over replicas.
        """
        is_some_left = False
        for number, reduction in enumerate(self._of_buckets):
            if reduction is not None:
                self._wait_for_ranks(reduction.finish)
                self._of_buckets[number] = None
                bucket = self._group.buckets[number]
                is_some_left |= bucket.reduction.accumulate(reduction, without_hooks=without_hooks)
        return is_some_left

    def drop(self) -> None:
        """Forget them, once what other ranks take part in is over."""
        for reduction in self.in_flight():
            self._wait_for_ranks(reduction.drop)
        self.forget()

    def _wait_for_ranks(self, finish: Callable[[], Any]) -> None:
        """Run ``finish``, which waits for other ranks; if that fails, explain why."""
        self._group.waits.finish(finish, self._group.waits.for_reduction)


_NO_CONTEXT = nullcontext()


@contextmanager
def _neither_graph_nor_inference() -> Iterator[None]:
    with torch.inference_mode(False), torch.no_grad():
        yield


def without_graph() -> AbstractContextManager[Any]:
    """A context without grad mode or inference mode; most backwards run without both already."""
    is_needed = torch.is_grad_enabled() or torch.is_inference_mode_enabled()
    return _neither_graph_nor_inference() if is_needed else _NO_CONTEXT
