"""What a sharded module knows: its parameter group, and the root that drives it."""

from typing import Any

from torch import nn

from shardwise.engine.root import Member

_MEMBER = "_shardwise_member"


def set_member(module: nn.Module, member: Member) -> None:
    """Store on a sharded module which group it belongs to."""
    module.__dict__[_MEMBER] = member


def is_member(module: nn.Module) -> bool:
    """True if ``module`` itself was given to ``fully_shard``."""
    return _MEMBER in module.__dict__


def sharded_members(module: nn.Module) -> list[Member]:
    """The members of ``module`` and of all sharded modules inside it, each once, outermost first."""
    members = [m.__dict__[_MEMBER] for m in module.modules() if _MEMBER in m.__dict__]
    return list({id(member): member for member in members}.values())


def member_of(module: Any) -> Member:
    """The member of a sharded module itself."""
    return module.__dict__[_MEMBER]
