"""What a caller may do with a sharded module."""

from shardwise.fsdp_module.module import FSDPModule as FSDPModule
from shardwise.fsdp_module.module import ShardedModule as ShardedModule
from shardwise.fsdp_module.module import UnshardHandle as UnshardHandle
