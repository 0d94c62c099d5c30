"""The state on a sharded module: its parameter group, and the root that drives it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from shardwise.arguments import check_module, check_type, describe
from shardwise.engine.backward import GradientListener
from shardwise.engine.root import Root
from shardwise.engine.unsharded_groups import IN_USE
from shardwise.groups.group import ParameterGroup
from shardwise.groups.states import SHARDED
from shardwise.torch_compat import dynamo, nn_modules

_ATTRIBUTE = "_shardwise_state"


@dataclass(eq=False, slots=True)
class ModuleState:
    """The state on a sharded module: its group, and the root that currently drives it.

    ``in_graphs``: replaces the hooks while ``torch.compile`` traces them (``compile/traced.py``).
    """

    group: ParameterGroup
    root: Root
    in_graphs: Any

    @dynamo.call_while_tracing
    def names_of_reduce_groups(self) -> str:
        """A line for each bucket: the name of its process group for reductions, empty if none.

        For graphs that are compiled before any eager forward has made the process groups.
        """
        process_groups = self.root.lazy_init.process_groups
        groups = [
            process_groups.for_reductions(self.group, bucket.mesh.shard_axis.pg)
            for bucket in self.group.buckets
        ]
        return "".join("\n" if pg is None else f"{pg.group_name}\n" for pg in groups)


def set_module_state(module: nn.Module, module_state: ModuleState) -> None:
    """Store the state on a sharded module."""
    module.__dict__[_ATTRIBUTE] = module_state


def under_compile(module: nn.Module) -> nn.Module:
    """The sharded module inside a wrapper of ``torch.compile``, or the uncompiled module.

    A wrapper that is itself sharded is the sharded module.
    """
    inner = nn_modules.children(module).get(nn_modules.WRAPPED)
    return module if inner is None or _ATTRIBUTE in module.__dict__ else under_compile(inner)


def is_sharded(module: Any) -> bool:
    """True if ``module``, or the module that ``torch.compile`` wrapped in it, is sharded."""
    return isinstance(module, nn.Module) and _ATTRIBUTE in under_compile(module).__dict__


def sharded_module_states(module: nn.Module) -> list[ModuleState]:
    """The states of ``module`` and of all sharded modules inside it, each once, outermost first."""
    module_states = [m.__dict__[_ATTRIBUTE] for m in module.modules() if _ATTRIBUTE in m.__dict__]
    return list({id(module_state): module_state for module_state in module_states}.values())


def states_to_use(caller: str, model: Any) -> list[ModuleState]:
    """Like ``sharded_module_states``, for a public function.

    Raises:
        TypeError: ``model`` is not a module.
        ValueError: nothing in it is sharded.
    """
    check_module(caller, model)
    module_states = sharded_module_states(model)
    if not module_states:
        raise ValueError(
            f"{caller}: there is no sharded module in this {type(model).__name__}. Call fully_shard or "
            "shard_model first."
        )
    return module_states


def module_states_at_rest(caller: str, model: Any) -> list[ModuleState]:
    """Like ``sharded_module_states``, for a public function that may not run during their passes.

    Raises:
        TypeError: ``model`` is not a module.
        RuntimeError: one of them is in a forward or backward, or inside ``unsharded``.
    """
    check_module(caller, model)
    module_states = sharded_module_states(model)
    for module_state in module_states:
        module_state.root.refuse_at_work(caller, module_state.group)
        module_state.group.refuse_if_summoned(caller)
    compute_after_optimizer(module_states)
    return module_states


def compute_after_optimizer(module_states: Iterable[ModuleState]) -> None:
    """Let what is now computed from the shards wait for the optimizer: see ``set_post_optim_event``."""
    for root in {module_state.root for module_state in module_states}:
        root.make_compute_wait_for_optimizer()


def module_states_of(caller: str, modules: Any) -> list[ModuleState]:
    """The states of ``modules``, a list of sharded modules that was given to ``caller``."""
    check_type(caller, "modules", modules, "a list of sharded modules", list, tuple)
    for index, module in enumerate(modules):
        if not is_sharded(module):
            raise ValueError(
                f"{caller}: {describe(module)} at [{index}] is not sharded. Call fully_shard on it first, or "
                "leave it out."
            )
    return [module_state_of(under_compile(module)) for module in modules]


def module_state_of(module: Any) -> ModuleState:
    """The state of a sharded module."""
    return module.__dict__[_ATTRIBUTE]


def drive(root: Root, module_states: Sequence[ModuleState], own: ModuleState) -> None:
    """Let ``root`` drive all groups of a newly sharded module's tree; ``own`` is the module's."""
    root.group = own.group
    root.groups[:] = [module_state.group for module_state in module_states]
    for module_state in module_states:
        _take_over(root, module_state)
    root.tree_changed()
    root.observe(root.observer)


def _take_over(root: Root, module_state: ModuleState) -> None:
    group, other = module_state.group, module_state.root
    module_state.root = root
    if other is not root:
        root.finalization.by_hand |= other.finalization.by_hand
        root.lazy_init.process_groups.take_over(other.lazy_init.process_groups)
    group.plan_changed = group.gradients.left_out_changed = root.plan_check.plan_changed
    group.changes_adopted = root.plan_check.changes_adopted
    group.trained_changed = root.plan_check.trained_changed
    group.gradients.listener = GradientListener(root, group)
    if group.unsharded.state is not SHARDED:
        root.unsharded_groups.reasons[group] = other.unsharded_groups.reasons.get(group, IN_USE)
