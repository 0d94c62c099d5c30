"""shardwise: train PyTorch models that do not fit on one device."""

from shardwise.api import fully_shard
from shardwise.checkpoints.checkpoint import Loaded, latest_checkpoint, load_checkpoint, save_checkpoint
from shardwise.checkpoints.pending import PendingSave
from shardwise.comm_hooks import register_comm_hook
from shardwise.compiling import compile_options
from shardwise.contexts import inference, no_sync, unsharded
from shardwise.explain import explain
from shardwise.flat_optimizer import FlatOptimizer
from shardwise.gradients import clip_grad_norm_, grad_norms_by_module
from shardwise.module import (
    FSDPModule,
    GradientReductionHandle,
    UnshardHandle,
    register_fsdp_forward_method,
    share_comm_ctx,
)
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
from shardwise.states.ema import EMA
from shardwise.states.export import save_safetensors
from shardwise.states.full_load import load_full_state_dict
from shardwise.states.full_state import full_state_dict, iter_full_parameters
from shardwise.states.initialise import check_replicas, materialize, sync_module_states
from shardwise.states.loading import LoadReport
from shardwise.states.optimizer_state import load_full_optimizer_state_dict, rekey_optimizer_state_dict
from shardwise.stopping import StopSignal
from shardwise.strategy import shard_model
from shardwise.wrap import WrapBySize, WrapClasses, WrapRecursively, WrapRepeated, WrapWhere

__version__ = "0.1.0"

__all__ = [
    "EMA",
    "CPUOffloadPolicy",
    "CommPolicy",
    "DataParallelMeshDims",
    "FSDPModule",
    "FlatOptimizer",
    "GradScaler",
    "GradientReductionHandle",
    "LoadReport",
    "Loaded",
    "LowPrecisionReduction",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "PendingSave",
    "QuantizedGather",
    "QuantizedReduction",
    "ShardPlacementResult",
    "StopSignal",
    "UnshardHandle",
    "WrapBySize",
    "WrapClasses",
    "WrapRecursively",
    "WrapRepeated",
    "WrapWhere",
    "check_replicas",
    "clip_grad_norm_",
    "compile_options",
    "explain",
    "full_state_dict",
    "fully_shard",
    "grad_norms_by_module",
    "inference",
    "iter_full_parameters",
    "latest_checkpoint",
    "load_checkpoint",
    "load_full_optimizer_state_dict",
    "load_full_state_dict",
    "materialize",
    "no_sync",
    "offload_optimizer_state",
    "register_comm_hook",
    "register_fsdp_forward_method",
    "rekey_optimizer_state_dict",
    "save_checkpoint",
    "save_safetensors",
    "shard_model",
    "share_comm_ctx",
    "sync_module_states",
    "unsharded",
]
