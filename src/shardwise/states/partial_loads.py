"""What a load that fails half-way leaves on a model, so that nobody trains with half of its weights."""

from torch import nn

from shardwise.module import sharded_members


def mark_partly_loaded(model: nn.Module, why: str) -> None:
    """Have the next forwards of the sharded modules in ``model`` raise a RuntimeError with ``why``."""
    for member in sharded_members(model):
        member.group.partly_loaded = why.rstrip(".")
        member.schedule.prepare_anew()


def clear_partly_loaded(model: nn.Module) -> None:
    """All of ``model`` has values again."""
    for member in sharded_members(model):
        member.group.partly_loaded = None
