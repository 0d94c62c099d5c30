"""Whole models: strategies by name, wrap policies, tables, hooks for the gradients of all groups.

shard_model           shard a model and its blocks, by a strategy
WrapClasses, WrapWhere, WrapRecursively, WrapBySize, WrapRepeated
                      which modules become groups: shard_model(model, wrap=...)
explain               the groups of a model as a table
register_comm_hook    gradients reduced in the caller's way, or in fewer bytes
"""

from shardwise.strategies.comm_hooks import register_comm_hook
from shardwise.strategies.explain import explain
from shardwise.strategies.shard_model import shard_model
from shardwise.strategies.wrap_policies import (
    WrapBySize,
    WrapClasses,
    WrapRecursively,
    WrapRepeated,
    WrapWhere,
)

__all__ = [
    "WrapBySize",
    "WrapClasses",
    "WrapRecursively",
    "WrapRepeated",
    "WrapWhere",
    "explain",
    "register_comm_hook",
    "shard_model",
]
