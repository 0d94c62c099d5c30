"""Optimizers, norms and clipping, loss scaling.

FlatOptimizer              any elementwise optimizer, stepping neighbouring shards as one tensor
offload_optimizer_state    keep an optimizer's state in host memory between its steps
clip_grad_norm_            clip gradients by their norm over all ranks and meshes
grad_norms_by_module       where that norm comes from
GradScaler                 loss scaling that all ranks agree on
"""

from shardwise.optim.clipping import clip_grad_norm_, grad_norms_by_module
from shardwise.optim.flat_optimizer import FlatOptimizer
from shardwise.optim.loss_scaling import GradScaler
from shardwise.optim.offload import offload_optimizer_state

__all__ = [
    "FlatOptimizer",
    "GradScaler",
    "clip_grad_norm_",
    "grad_norms_by_module",
    "offload_optimizer_state",
]
