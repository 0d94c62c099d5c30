"""shardwise: train PyTorch models that do not fit on one device."""

from shardwise.checkpoint.calls import latest_checkpoint
from shardwise.checkpoint.load import Loaded, load_checkpoint
from shardwise.checkpoint.pending import PendingSave
from shardwise.checkpoint.save import save_checkpoint
from shardwise.compile.options import compile_options
from shardwise.features.finalization import GradientReductionHandle
from shardwise.fsdp_module import FSDPModule, UnshardHandle
from shardwise.fully_shard import fully_shard
from shardwise.init.initialise import check_replicas, materialize, sync_module_states
from shardwise.optim.clipping import clip_grad_norm_, grad_norms_by_module
from shardwise.optim.flat_optimizer import FlatOptimizer
from shardwise.optim.loss_scaling import GradScaler
from shardwise.optim.offload import offload_optimizer_state
from shardwise.policies import (
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
from shardwise.ranks.stop_signal import StopSignal
from shardwise.setup.forward_methods import register_fsdp_forward_method, share_comm_ctx
from shardwise.state.contexts import inference, no_sync, unsharded
from shardwise.state.ema import EMA
from shardwise.state.export import save_safetensors
from shardwise.state.full_load import load_full_state_dict
from shardwise.state.full_state import full_state_dict, iter_full_parameters
from shardwise.state.loading import LoadReport
from shardwise.state.optimizer_state import load_full_optimizer_state_dict, rekey_optimizer_state_dict
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
