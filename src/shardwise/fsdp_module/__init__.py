"""What a caller may do with a sharded module."""

from shardwise.fsdp_module.module import FSDPModule, UnshardHandle

__all__ = ["FSDPModule", "UnshardHandle"]
