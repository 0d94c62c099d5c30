"""Autograd: the running backward, hooks, version counters, and the transforms of ``torch.func``. Seen on 2.11
to 2.15.
"""

import sys
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial, wraps
from operator import attrgetter, itemgetter
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._C import _functorch
from torch._functorch import pyfunctorch
from torch.autograd import Variable, forward_ad

from shardwise.torch_compat import interpreter

current_graph_task_id: Callable[[], int] = torch._C._current_graph_task_id
"""The running backward's number, -1 outside of one. No public function tells whether autograd is
running; ``torch.utils.checkpoint`` relies on the same one."""


def is_in_backward() -> bool:
    """True inside of a backward: in a hook, or in a forward that is recomputed."""
    return current_graph_task_id() != -1


current_node: Callable[[], Any] = torch._C._current_autograd_node
"""The node that the running backward is at. A hook is not told which node it is called for, and must not hold
the node itself: such a cycle is never freed."""


keeps_graph: Callable[[], bool] = torch._C._autograd._get_current_graph_task_keep_graph
"""True while a backward runs that keeps its graph for another one (``retain_graph=True``). 2.11 to 2.15."""


def queue_end_of_backward(callback: Callable[[], None]) -> None:
    """Have ``callback`` run when the running backward ends. DDP uses the same queue."""
    Variable._execution_engine.queue_callback(callback)


def number_of_stream(device: torch.device) -> Callable[[], Hashable] | None:
    """A function that returns the number of the current stream, without making an object of it; None where
    torch has none. Private; 2.11 to 2.15 have it for CUDA.

    Autograd runs a node, and the hooks of a leaf, on the stream that was current in forward.
    """
    number = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    if number is None or device.type != "cuda" or device.index is None:
        return None
    return partial(number, device.index)


set_versions: Callable[..., None] = torch._C._autograd._unsafe_set_version_counter
"""Set the version counters of tensors, which autograd compares when it uses a saved tensor.

The public ``torch.autograd._unsafe_preserve_version_counter`` is a context; we need the setter beneath it,
because the version of an unsharded parameter follows that of the sharded one."""


def is_autograd_compiled() -> bool:
    """True while compiled autograd runs a backward, whose end ``queue_end_of_backward`` does not see.

    If it was not imported, it is not running.
    """
    compiled_autograd: Any = sys.modules.get("torch._dynamo.compiled_autograd")
    return compiled_autograd is not None and compiled_autograd.in_compiled_autograd_region


Hooks = dict[int, Callable[..., Any]]


gradient_hooks: Callable[[Tensor], Hooks | None] = attrgetter("_backward_hooks")
"""Where ``tensor.register_hook`` keeps its hooks; torch has no public way to list them."""

post_accumulate_hooks: Callable[[Tensor], Hooks | None] = attrgetter("_post_accumulate_grad_hooks")
"""Where ``register_post_accumulate_grad_hook`` keeps its hooks."""


def profiler_is_on() -> bool:
    """True while a profiler records: only then labels are worth their microseconds."""
    return torch.autograd.profiler._is_profiler_enabled


def labelled(label: str, work: Callable[[], Any]) -> Callable[[], Any]:
    """``work`` in a profiler range, a row of a trace. Asked for while a profiler records."""

    def run() -> Any:
        with torch.autograd.profiler.record_function(label):
            return work()

    return run


def run_gradient_hooks(hooks: Hooks, gradient: Tensor) -> Tensor:
    """What ``hooks`` make of ``gradient``, one after the other, as autograd runs them."""
    for hook in list(hooks.values()):
        changed = hook(gradient)
        gradient = gradient if changed is None else changed
    return gradient


# --- the two halves of a backward, which pipeline schedules run apart ---------------------------------
#
# ``torch.distributed.pipelining`` cuts the graph of a stage into what leads to its inputs and what branches
# off to weights. Only its own stages call these functions, which have no public names (2.11 to 2.15). They
# are imported where they are called, since that import brings torch's FSDP along.


def run_full_backward(outputs: Any, gradients: Any, inputs: Sequence[Any]) -> Any:
    """Accumulate the gradients of all leaves; return those of ``inputs``. ``outputs`` may be a loss."""
    from torch.distributed.pipelining._backward import stage_backward

    return stage_backward(outputs, gradients, inputs)


def run_backward_of_inputs(
    outputs: Any, gradients: Any, inputs: Sequence[Any], weights: Iterable[Any]
) -> Any:
    """Compute the gradients of ``inputs`` alone; return them, and in parts what is left for ``weights``."""
    from torch.distributed.pipelining._backward import stage_backward_input

    return stage_backward_input(outputs, gradients, list(inputs), iter(weights))


def run_backward_of_weights(
    weights: Iterable[Any], parts: list[dict[str, Any]], *, keeps_graph: bool = False
) -> None:
    """Add the gradients of ``weights`` to their ``.grad``: those that ``parts`` lead to."""
    from torch.distributed.pipelining._backward import stage_backward_weight

    stage_backward_weight(iter(weights), parts, retain_graph=keeps_graph)


def begins_at_several_nodes(part: dict[str, Any]) -> bool:
    """True if ``part`` passes nodes of other parts, as from one use of a weight to the next.

    If it does not keep the graph, nothing is left of these nodes for the others.
    """
    return len(part["intermediates"]) > 1


nodes_of_part: Callable[[dict[str, Any]], Iterable[Any]] = itemgetter("params")
"""The nodes that accumulate the gradients of the weights of a part."""


def backward_of_inputs_runs() -> bool:
    """True while ``run_backward_of_inputs``, or a pipeline stage of torch's, runs in any thread.

    Autograd runs hooks in threads of its own for other devices, so this looks at all of them.
    """
    pipelining: Any = sys.modules.get("torch.distributed.pipelining._backward")
    if pipelining is None:
        return False
    return interpreter.runs_in_any_thread(pipelining.stage_backward_input.__code__)


stages_of: Callable[[Any], list[Any]] = attrgetter("_stages")
"""The stages of this rank in a schedule of several stages a rank; it has no public name for them."""


_Function = TypeVar("_Function", bound=Callable[..., Any])


# --- the transforms of torch.func -----------------------------------------------------------------


def outside_transforms(function: _Function) -> _Function:
    """Have ``function`` run outside of all transforms that it is called in."""

    @wraps(function)
    def outside(*args: Any, **kwargs: Any) -> Any:
        if not is_in_transform():
            return function(*args, **kwargs)
        with without_transforms():
            return function(*args, **kwargs)

    return outside  # type: ignore[return-value]


def with_layers(tensors: Iterable[Tensor]) -> list[Tensor]:
    """``tensors``, their tangents, and all that these wrap."""
    return [layer for tensor in tensors for layer in _layers(tensor)]


def _layers(tensor: Tensor) -> Iterator[Tensor]:
    yield tensor
    with in_transform_of(tensor):
        its_tangent = tangent(tensor)
    if its_tangent is not None:
        yield from _layers(its_tangent)
    if is_wrapped(tensor):
        yield from _layers(unwrapped(tensor))


def innermost(tensor: Tensor) -> Tensor:
    """The tensor that has memory."""
    while is_wrapped(tensor):
        tensor = unwrapped(tensor)
    return tensor


# torch.func has no public way to tell whether a transform runs, to step out of it, or to look into what it
# wraps. It keeps transforms on a stack, the innermost last.

is_in_transform: Callable[[], bool] = torch._C._are_functorch_transforms_active
"""True inside a transform of ``torch.func``."""

is_wrapped: Callable[[Tensor], bool] = _functorch.is_functorch_wrapped_tensor
"""True for a tensor that a transform has wrapped. It has no memory of its own."""

unwrapped: Callable[[Tensor], Tensor] = _functorch.get_unwrapped
"""What such a tensor wraps; perhaps a tensor wrapped by an outer transform."""


def is_in_forward_mode() -> bool:
    """True where tensors may have tangents."""
    return forward_ad._current_level >= 0


def is_in_transform_or_forward_mode() -> bool:
    """True where a tensor may be wrapped by a transform or have a tangent."""
    return is_in_transform() or is_in_forward_mode()


is_batched: Callable[[Tensor], bool] = _functorch.is_legacy_batchedtensor
"""Whether a gradient stands for several, as with ``is_grads_batched=True``. What it wraps is hidden, its node
as well."""


without_transforms: Callable[[], AbstractContextManager[Any]] = (
    pyfunctorch.temporarily_clear_interpreter_stack
)
"""Inside, no transform is active."""


@contextmanager
def in_transform_of(tensor: Tensor) -> Iterator[None]:
    """Inside, the transform that has wrapped ``tensor`` is the innermost; none is active if none has."""
    level, inner = _functorch.maybe_get_level(tensor), []
    try:
        while is_in_transform() and _functorch.current_level() > level:
            inner.append(pyfunctorch.pop_dynamic_layer_stack())
        yield
    finally:
        while inner:
            pyfunctorch.push_dynamic_layer_stack(inner.pop())


def tangent(tensor: Tensor) -> Tensor | None:
    """The tangent that forward-mode differentiation has given to ``tensor``, for the innermost transform.

    Transforms other than ``jvp`` cannot be asked.
    """
    if not is_in_forward_mode():
        return None
    transform = _functorch.peek_interpreter_stack()
    if transform is not None and transform.key() != _functorch.TransformType.Jvp:
        return None
    return forward_ad.unpack_dual(tensor).tangent


def is_recorded() -> bool:
    """True while ``make_fx`` (or ``torch.func.linearize``) records what is computed."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None
