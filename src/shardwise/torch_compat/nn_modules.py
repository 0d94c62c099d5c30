"""What ``nn.Module`` keeps private: its dicts of parameters, buffers and children, and how it is called; and
torch's record of composable APIs. Seen on 2.11 to 2.13."""

from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Any

from torch import Tensor, nn
from torch.distributed._composable.contract import REGISTRY_KEY, RegistryItem

# --- what is registered ---------------------------------------------------------------------------

parameters: Callable[[nn.Module], dict[str, Any]] = attrgetter("_parameters")
"""The module's own parameters, None included, to be read and written.

``named_parameters(recurse=False)`` takes 20 times as long, leaves None out, and shows a tied parameter once;
``register_parameter`` refuses a name that stands in ``__dict__``, where the unsharded parameter is.
"""


def registered(module: nn.Module, name: str) -> Any:
    """The parameter that ``module`` has under ``name``, None if it has none. Dynamo can trace this one."""
    return module._parameters.get(name)


buffers: Callable[[nn.Module], dict[str, Any]] = attrgetter("_buffers")
"""The module's own buffers, None included, to be read and written."""

children: Callable[[nn.Module], dict[str, Any]] = attrgetter("_modules")
"""The module's own children, None included; ``named_children()`` shows a child that stands twice once."""


def parameters_in_graph(module: nn.Module) -> dict[str, Any]:
    """As ``parameters``, where ``torch.compile`` traces: it cannot call an attrgetter."""
    return module._parameters


def children_in_graph(module: nn.Module) -> dict[str, Any]:
    """As ``children``, where ``torch.compile`` traces."""
    return module._modules


def reorder(entries: dict[str, Any], names: list[str]) -> None:
    """Have ``names`` come first in ``entries``, in this order."""
    if list(entries)[: len(names)] != names:
        in_order = {name: entries[name] for name in [*names, *entries] if name in entries}
        entries.clear()
        entries.update(in_order)


def map_tensors(module: nn.Module, function: Callable[[Tensor], Tensor]) -> None:
    """Apply ``function`` to all parameters, gradients and buffers, as ``module.to()`` does, which is built on
    the same method."""
    module._apply(function)


# --- names of wrappers ----------------------------------------------------------------------------

WRAPPED = "_orig_mod"
"""The child of what ``torch.compile(module)`` returns: ``module``. There is no public way to get it."""

WRAPPER_NAMES = (WRAPPED, "_checkpoint_wrapped_module")
"""The children under which torch's wrappers keep what they wrap: compiled modules, checkpointed ones."""


# --- RNN modules ----------------------------------------------------------------------------------


def refresh_flat_weights(modules: Iterable[nn.Module]) -> None:
    """Let RNN modules, which keep a list of their weights beside the parameters, see what modules see now."""
    for module in modules:
        names: list[str] = module._flat_weights_names  # type: ignore[assignment]
        module.__dict__["_flat_weights"] = [getattr(module, name, None) for name in names]


def forget_weak_references(modules: Iterable[nn.Module]) -> None:
    """Drop the weak references of RNN modules to their weights: a tensor that has any cannot be swapped."""
    for module in modules:
        if isinstance(module, nn.RNNBase):
            module._flat_weight_refs = [None] * len(module._flat_weights_names)  # type: ignore[arg-type]


# --- how modules are called -----------------------------------------------------------------------


def call_through(module: nn.Module, call: Callable[..., Any]) -> None:
    """Have ``module(...)`` run ``call``, unless ``module.compile()`` has taken that place, or takes it later.

    The only way for an instance to wrap ``nn.Module.__call__`` without its slow path for hooks. Copies and
    pickles of the module leave it out.
    """
    if module._compiled_call_impl is None:
        module.__dict__["_compiled_call_impl"] = call


def put_last(module: nn.Module, hook: int) -> None:
    """Have the forward hook with the id ``hook`` run after the others of ``module``.

    Torch can put a hook first (``prepend=True``), but not keep one last.
    """
    hooks = module._forward_hooks
    if len(hooks) > 1 and next(reversed(hooks)) != hook and hook in hooks:
        hooks[hook] = hooks.pop(hook)


def applied_apis(module: nn.Module) -> list[str]:
    """Which of torch's composable APIs that exclude this library were applied to ``module`` itself."""
    return [name for name in ("fully_shard", "replicate") if name in module.__dict__.get(REGISTRY_KEY, ())]


def register_api(module: nn.Module) -> None:
    """Enter this library in torch's record of composable APIs, under both names that torch asks for.

    ``fully_shard``: torch's own ``fully_shard`` and ``replicate`` refuse the module instead of sharding it
    twice. ``replicate``: torch's ``fully_shard`` of a module around this one leaves it as it is (seen on
    2.13); otherwise it takes the shards for full parameters.
    """
    for name in ("fully_shard", "replicate"):
        module.__dict__.setdefault(REGISTRY_KEY, {})[name] = RegistryItem()


def is_managed_by_torch(module: nn.Module) -> bool:
    """True if torch's own FSDP says that it manages the parameters of ``module``."""
    return "_is_fsdp_managed_module" in module.__dict__


def mark_managed(module: nn.Module) -> None:
    """Tell dynamo and Transformers, which read these names, that parameters come and go."""
    module.__dict__["_is_fsdp_managed_module"] = True
    module.__dict__["_fsdp_use_orig_params"] = True
