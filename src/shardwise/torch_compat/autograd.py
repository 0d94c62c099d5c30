"""What autograd does not make public: the running backward, hooks, version counters."""

import sys
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable

# --- autograd -------------------------------------------------------------------------------------

current_graph_task_id: Callable[[], int] = torch._C._current_graph_task_id
"""The running backward's number, -1 outside of one. No public function tells whether autograd is
running; ``torch.utils.checkpoint`` relies on the same one."""


current_node: Callable[[], Any] = torch._C._current_autograd_node
"""The node that the running backward is at. Hooks on nodes are not told which node they are called for, and
must not hold it themselves: such a cycle is never freed."""


def queue_end_of_backward(callback: Callable[[], None]) -> None:
    """Have ``callback`` run when the running backward ends. DDP stands on the same queue."""
    Variable._execution_engine.queue_callback(callback)


set_versions: Callable[..., None] = torch._C._autograd._unsafe_set_version_counter
"""Set the version counters of some tensors, which autograd compares when a saved one is used again, to some
numbers.

The public ``torch.autograd._unsafe_preserve_version_counter`` is a context; we need the setter beneath it,
because a full parameter's version follows its shard's."""


def is_autograd_compiled() -> bool:
    """True while compiled autograd runs a backward, which has no end that ``queue_end_of_backward`` sees.

    Where it was not imported it is not running.
    """
    compiled_autograd: Any = sys.modules.get("torch._dynamo.compiled_autograd")
    return compiled_autograd is not None and compiled_autograd.in_compiled_autograd_region


Hooks = dict[int, Callable[..., Any]]


gradient_hooks: Callable[[Tensor], Hooks | None] = attrgetter("_backward_hooks")
"""Where ``tensor.register_hook`` keeps its hooks; torch has no public way to list them."""

post_accumulate_hooks: Callable[[Tensor], Hooks | None] = attrgetter("_post_accumulate_grad_hooks")
"""Where ``register_post_accumulate_grad_hook`` keeps its hooks."""


def profiler_is_on() -> bool:
    """True while a profiler records: labels cost microseconds and are only then worth it."""
    return torch.autograd.profiler._is_profiler_enabled
