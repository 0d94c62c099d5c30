"""shardwise: train PyTorch models that do not fit on one device."""

from shardwise.api import fully_shard
from shardwise.module import FSDPModule, UnshardHandle, register_fsdp_forward_method, share_comm_ctx
from shardwise.offload import offload_optimizer_state
from shardwise.policy import (
    CommPolicy,
    CPUOffloadPolicy,
    DataParallelMeshDims,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardPlacementResult,
)

__all__ = [
    "CPUOffloadPolicy",
    "CommPolicy",
    "DataParallelMeshDims",
    "FSDPModule",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "ShardPlacementResult",
    "UnshardHandle",
    "fully_shard",
    "offload_optimizer_state",
    "register_fsdp_forward_method",
    "share_comm_ctx",
]
