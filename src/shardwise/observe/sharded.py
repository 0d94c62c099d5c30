"""What is sharded in a module that an observer was given."""

from typing import Any

from torch import nn

from shardwise.engine.module_state import ModuleState, sharded_module_states


def module_states_to_observe(caller: str, model: Any) -> list[ModuleState]:
    """The groups in ``model``, each with its root, outermost first.

    Raises:
        TypeError: ``model`` is no module.
        ValueError: nothing in it is sharded.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"{caller}: {type(model).__name__} is not an nn.Module.")
    module_states = sharded_module_states(model)
    if not module_states:
        raise ValueError(
            f"{caller}: there is no sharded module in this {type(model).__name__}. Call fully_shard or "
            "shard_model first."
        )
    return module_states
