"""Whether a module is sharded, also where ``torch.compile`` has wrapped it."""

from typing import Any

from torch import nn

from shardwise.engine.module_state import has_module_state
from shardwise.torch_compat import nn_modules


def under_compile(module: nn.Module) -> nn.Module:
    """The sharded module inside what ``torch.compile`` returned for it, or the uncompiled module.

    A wrapper that ``torch.compile`` returned may be sharded itself; then it is the sharded module.
    """
    while (
        not has_module_state(module) and (inner := nn_modules.children(module).get("_orig_mod")) is not None
    ):
        module = inner
    return module


def is_sharded(module: Any) -> bool:
    """True if ``module``, or the module that ``torch.compile`` wrapped in it, is sharded."""
    return isinstance(module, nn.Module) and has_module_state(under_compile(module))
