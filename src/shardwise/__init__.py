"""shardwise: train PyTorch models that do not fit on one device."""

from shardwise.api import fully_shard
from shardwise.comm_hooks import register_comm_hook
from shardwise.contexts import inference, no_sync, unsharded
from shardwise.explain import explain
from shardwise.gradients import clip_grad_norm_, grad_norms_by_module
from shardwise.module import FSDPModule, UnshardHandle, register_fsdp_forward_method, share_comm_ctx
from shardwise.offload import offload_optimizer_state
from shardwise.policy import (
    CommPolicy,
    CPUOffloadPolicy,
    DataParallelMeshDims,
    LowPrecisionReduction,
    MixedPrecisionPolicy,
    OffloadPolicy,
    QuantizedGather,
    QuantizedReduction,
    ShardPlacementResult,
)
from shardwise.scaler import GradScaler
from shardwise.strategy import shard_model
from shardwise.wrap import WrapBySize, WrapClasses, WrapRecursively, WrapRepeated, WrapWhere

__all__ = [
    "CPUOffloadPolicy",
    "CommPolicy",
    "DataParallelMeshDims",
    "FSDPModule",
    "GradScaler",
    "LowPrecisionReduction",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "QuantizedGather",
    "QuantizedReduction",
    "ShardPlacementResult",
    "UnshardHandle",
    "WrapBySize",
    "WrapClasses",
    "WrapRecursively",
    "WrapRepeated",
    "WrapWhere",
    "clip_grad_norm_",
    "explain",
    "fully_shard",
    "grad_norms_by_module",
    "inference",
    "no_sync",
    "offload_optimizer_state",
    "register_comm_hook",
    "register_fsdp_forward_method",
    "shard_model",
    "share_comm_ctx",
    "unsharded",
]
