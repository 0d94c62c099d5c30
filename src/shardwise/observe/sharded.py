"""What is sharded in a module that an observer was given."""

from typing import Any

from torch import nn

from shardwise.engine.members import Member, sharded_members


def members_to_observe(caller: str, model: Any) -> list[Member]:
    """The groups in ``model``, each with its root, outermost first.

    Raises:
        TypeError: ``model`` is no module.
        ValueError: nothing in it is sharded.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"{caller}: {type(model).__name__} is not an nn.Module.")
    members = sharded_members(model)
    if not members:
        raise ValueError(
            f"{caller}: there is no sharded module in this {type(model).__name__}. Call fully_shard or "
            "shard_model first."
        )
    return members
