"""Calls that reach parameters outside the forward that unshards them, told by name.

The modules inside a sharded one see full parameters only while its forward runs. A call of such a module
from elsewhere (``model.block.linear(x)``, ``model.forward(x)``, a ``generate`` of its own) meets shards,
and DTensor says only that plain tensors and DTensors were mixed. Here the module's own call adds which
parameter that was, and what to call instead. It costs one Python frame a call, and nothing under
``torch.compile``, which passes it by.
"""

from typing import Any, NoReturn

from torch import nn

from shardwise.groups.group import ParameterGroup
from shardwise.params.replaced_parameter import name_of_replaced
from shardwise.torch_compat import dynamo, nn_modules

_MIXED = "mixed torch.Tensor and DTensor"


def explain_calls(group: ParameterGroup) -> None:
    """Let the modules that hold the parameters of ``group`` explain what a call outside of it lacks."""
    dynamo.skip_frame(_Explained.__call__)
    for module in group.managed_modules:
        if module not in group.modules and any(p is not None for p in nn_modules.parameters(module).values()):
            nn_modules.call_through(module, _Explained(module, group))


class _Explained:
    """Calls the module; if that fails because parameters are sharded, the error explains it."""

    def __init__(self, module: nn.Module, group: ParameterGroup) -> None:
        self._module = module
        self._group = group

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return self._module._call_impl(*args, **kwargs)
        except RuntimeError as error:
            if _MIXED not in str(error):
                raise
            _raise_explained(self._module, self._group, error)


def _raise_explained(module: nn.Module, group: ParameterGroup, error: RuntimeError) -> NoReturn:
    names = [
        name
        for p in nn_modules.parameters(module).values()
        if p is not None and (name := name_of_replaced(p))
    ]
    holders = {site.module for param in group.shards.params for site in param.sites}
    is_shown = group.unsharded.is_shown and module in holders
    if not names or is_shown:
        raise error
    owner = f"'{group.name}'"
    if module not in holders:
        owner = f"the module around {owner} that owns them, as they are tied to others"
    raise RuntimeError(
        f"{', '.join(names)}: {type(module).__name__} was called while its parameters are sharded. They are "
        f"unsharded for the forward of {owner} only, when that is called as a module: module(...), not "
        ".forward(...), nor the modules inside it one by one. Call it so; or name the method that does this "
        "with register_fsdp_forward_method(module, method_name); or call unshard() on it before, and "
        "reshard() after."
    ) from None
