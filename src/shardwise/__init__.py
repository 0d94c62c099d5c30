"""shardwise: train PyTorch models that do not fit on one device.

This module has the names of ``torch.distributed.fsdp`` that belong to ``fully_shard``, so that you can try
this library by changing one import, and the names that an ordinary training script needs. All other names are
in the packages:

    shardwise.policies      more policies: quantized and low-precision communication, placements
    shardwise.planning      what an estimate consists of
    shardwise.strategies    wrap policies, hooks for gradients
    shardwise.init          make weights equal on all ranks, or check that they are
    shardwise.optim         Muon, flat optimizers, optimizer state in host memory
    shardwise.state         averages, safetensors files, full parameters one by one, full optimizer states
    shardwise.checkpoint    the results of saving and loading
    shardwise.ranks         stopping all ranks at the same step, and reports of long waits
    shardwise.interop       what other frameworks need: install(), pipelines
    shardwise.observe       counts of collectives, snapshots of memory
"""

from shardwise.checkpoint import latest_checkpoint, load_checkpoint, resume, save_checkpoint
from shardwise.compile.overlap import compile_options
from shardwise.engine.reduction_queue import GradientReductionHandle
from shardwise.fsdp_module import FSDPModule, UnshardHandle
from shardwise.fully_shard import fully_shard
from shardwise.init import materialize
from shardwise.optim import GradScaler, clip_grad_norm_, global_norm, statistics
from shardwise.planning import estimate
from shardwise.policies import (
    CommPolicy,
    CPUOffloadPolicy,
    DataParallelMeshDims,
    MixedPrecisionPolicy,
    OffloadPolicy,
)
from shardwise.setup.hooks import register_fsdp_forward_method, share_comm_ctx
from shardwise.state import full_state_dict, inference, load_full_state_dict, no_sync, unsharded
from shardwise.strategies import explain, shard_model
from shardwise.tracing.files import merge_traces
from shardwise.tracing.trace import trace

__version__ = "0.1.0"

__all__ = [
    "CPUOffloadPolicy",
    "CommPolicy",
    "DataParallelMeshDims",
    "FSDPModule",
    "GradScaler",
    "GradientReductionHandle",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "UnshardHandle",
    "clip_grad_norm_",
    "compile_options",
    "estimate",
    "explain",
    "full_state_dict",
    "fully_shard",
    "global_norm",
    "inference",
    "latest_checkpoint",
    "load_checkpoint",
    "load_full_state_dict",
    "materialize",
    "merge_traces",
    "no_sync",
    "register_fsdp_forward_method",
    "resume",
    "save_checkpoint",
    "shard_model",
    "share_comm_ctx",
    "statistics",
    "trace",
    "unsharded",
]
