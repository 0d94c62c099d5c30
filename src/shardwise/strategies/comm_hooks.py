"""``register_comm_hook``: gradients communicated in the caller's way, or in fewer bytes."""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from shardwise.buckets.bucket import Bucket
from shardwise.comm.communicators import unless_alone
from shardwise.comm.custom import HookedCollectives
from shardwise.comm.quantized import LowPrecisionCollectives, QuantizedCollectives
from shardwise.engine.module_state import compute_after_optimizer, states_to_use
from shardwise.groups.group import ParameterGroup
from shardwise.groups.states import EMPTY
from shardwise.layout.fqns import listed
from shardwise.policies import LowPrecisionReduction, QuantizedReduction

_NAME = "register_comm_hook"
_ELSEWHERE = ("set_custom_reduce_scatter", "set_allocate_memory_from_process_group_for_comm")

Hook = Callable[..., None] | LowPrecisionReduction | QuantizedReduction


def register_comm_hook(model: nn.Module, state: Any, hook: Hook) -> None:
    """Reduce gradients with ``hook``, in all sharded modules inside ``model``.

    A function does the whole communication of gradients, including the division: it is called with one flat
    tensor for each mesh and dtype of a group. Its arguments depend on the mesh, as in FSDP1:

    - sharded: ``hook(state, grad, output)``. ``grad``: the full gradient of this rank, 1D, of world * n
      numbers; numbers r * n to (r + 1) * n belong to rank r. ``output``: n numbers, to fill with this rank's
      part of the average over ranks. On a mesh (replicate, shard) it reduces over the shards, and its results
      are averaged over the replicas.
    - replicated (strategy ddp): ``hook(state, grad)``. ``grad``: the full gradient, to replace in place by
      the average over ranks.

    A function with an optional third argument works for both. ``LowPrecisionReduction`` and
    ``QuantizedReduction`` of ``shardwise.policies`` send fewer bytes, over shards and over replicas, and
    divide as usual. A hook that needs the gradients of a group in one piece costs copies, since small and
    large parameters are then sent together.

    Args:
        model: a module with sharded modules in it.
        state: passed to the function; None with an object of ``shardwise.policies``.
        hook: the function, or :class:`shardwise.policies.LowPrecisionReduction` or
            :class:`shardwise.policies.QuantizedReduction`.

    Raises:
        TypeError: ``model`` is not a module, or the function does not have the arguments that a group's mesh
            requires.
        ValueError: nothing in ``model`` is sharded; a group already communicates or divides in another way; a
            state is passed with an object of ``shardwise.policies``.
        RuntimeError: a hook is registered already, or gradients wait to be reduced.

    Example::

        def all_to_one(state, grad, output):
            dist.reduce_scatter_tensor(output, grad, group=state.group)
            output.div_(state.group.size())

        register_comm_hook(model, state, all_to_one)
        register_comm_hook(other_model, None, QuantizedReduction(block_size=256))
    """
    module_states = states_to_use(_NAME, model)
    for module_state in module_states:
        module_state.root.refuse_at_work(_NAME, module_state.group)
        module_state.group.refuse_if_summoned(_NAME)
    make = _maker(state, hook)
    choices = [[make(bucket, m.group) for bucket in m.group.buckets] for m in module_states]
    is_ready_made = isinstance(hook, (LowPrecisionReduction, QuantizedReduction))
    for module_state in module_states:
        _check_group(module_state.group, divides_as_usual=is_ready_made)
    compute_after_optimizer(module_states)
    for module_state in module_states:
        module_state.root.hand_over(module_state.group, _NAME)
    for module_state, own in zip(module_states, choices, strict=True):
        group = module_state.group
        for bucket, choice in zip(group.buckets, own, strict=True):
            group.replan(partial(Bucket.communicate, **choice), bucket)
        group.choices |= {_NAME, *([repr(hook)] if is_ready_made else [])}
        module_state.root.start_over()


def _maker(state: Any, hook: Any) -> Callable[[Bucket, ParameterGroup], dict[str, Any]]:
    """The function that chooses the communicators of a bucket."""
    if isinstance(hook, LowPrecisionReduction):
        own = unless_alone(LowPrecisionCollectives, hook.dtype)
    elif isinstance(hook, QuantizedReduction):
        own = unless_alone(QuantizedCollectives, hook.block_size, hook.error_feedback)
    elif isinstance(hook, type) or not callable(hook):
        raise TypeError(
            f"{_NAME}: hook is {hook!r}; pass a function (state, grad, output), a LowPrecisionReduction() or "
            "a QuantizedReduction() of shardwise.policies."
        )
    else:
        return partial(_callers_hook, state, hook)
    if state is not None:
        raise ValueError(
            f"{_NAME}: state is {state!r}, which {type(hook).__name__} does not use: it keeps its own. Pass "
            "None."
        )
    return lambda bucket, group: {"make_reduce_scatter": own, "make_all_reduce": own}


def _callers_hook(
    state: Any, hook: Callable[..., None], bucket: Bucket, group: ParameterGroup
) -> dict[str, Any]:
    shards = "shard" in bucket.mesh.roles
    wanted = ("state", "grad", "output") if shards else ("state", "grad")
    try:
        inspect.signature(hook).bind(*wanted)
    except TypeError:
        kind = "sharded" if shards else "replicated"
        raise TypeError(
            f"{_NAME}: the parameters of {group.name} are {kind}, for which the hook is called with "
            f"({', '.join(wanted)}), but its signature is {inspect.signature(hook)}."
        ) from None
    except ValueError:
        pass  # a built-in that does not tell
    make = partial(HookedCollectives, partial(hook, state), bucket.mesh.replicate_axis.world)
    return {"make_reduce_scatter" if shards else "make_all_reduce": make}


def _check_group(group: ParameterGroup, divides_as_usual: bool) -> None:
    if _NAME in group.choices:
        raise RuntimeError(
            f"{_NAME}: {group.name} has a hook already, and can have only one: two would both reduce its "
            "gradients. Combine them in one function."
        )
    for other in _ELSEWHERE:
        if other in group.choices:
            raise ValueError(f"{_NAME}: {other} has set how {group.name} reduces. Use one of the two.")
    if group.settings.divide_factor is not None and not divides_as_usual:
        raise ValueError(
            f"{_NAME}: {group.name} was given a factor by set_gradient_divide_factor, but a hook divides by "
            "itself. Use one of the two."
        )
    complex_ones = [param.fqn for param in group.shards.params if param.precision.reduced.is_complex]
    if complex_ones and divides_as_usual:
        raise ValueError(
            f"{_NAME}: {listed(complex_ones)} are complex, and LowPrecisionReduction and QuantizedReduction "
            "send real numbers. Shard them as a group of their own, and register no hook there."
        )
    if group.gradients.state is not EMPTY:
        raise RuntimeError(
            f"{_NAME}: gradients of {group.name} wait to be reduced. Register the hook between steps, after "
            "a backward with gradient synchronisation."
        )
