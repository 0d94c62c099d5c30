"""shardwise: train PyTorch models that do not fit on one device."""

from shardwise.api import fully_shard
from shardwise.module import FSDPModule, UnshardHandle, register_fsdp_forward_method
from shardwise.policy import CommPolicy, CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

__all__ = [
    "CPUOffloadPolicy",
    "CommPolicy",
    "FSDPModule",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "UnshardHandle",
    "fully_shard",
    "register_fsdp_forward_method",
]
