"""Optimizers, norms and clipping, loss scaling.

FlatOptimizer              any elementwise optimizer, stepping neighbouring shards as one tensor
WholeParameters            any optimizer, stepping each parameter whole on the rank that owns it
Muon                       orthogonalises each matrix whole, on one rank; steps the rest with AdamW
on_whole_matrices          a function of whole matrices, on sharded tensors; for methods like Muon
WholeMatrices              its plan, for many calls
is_hidden_matrix           which parameters Muon treats as matrices
newton_schulz              the iteration with which Muon orthogonalises them
offload_optimizer_state    keep an optimizer's state in host memory between its steps
clip_grad_norm_            clip gradients by their norm over all ranks and meshes
global_norm                the norm of any tensors, over all ranks and meshes
statistics                 norm, mean, extremes, histogram of each whole parameter or gradient, or by module;
                           gives Statistics by name
GradScaler                 loss scaling that all ranks agree on
"""

from shardwise.optim.clipping import GradScaler, clip_grad_norm_, global_norm
from shardwise.optim.flat_optimizer import FlatOptimizer
from shardwise.optim.muon import Muon, is_hidden_matrix, newton_schulz
from shardwise.optim.offload import offload_optimizer_state
from shardwise.optim.tensor_statistics import Statistics, statistics
from shardwise.optim.whole_matrices import WholeMatrices, on_whole_matrices
from shardwise.optim.whole_parameters import WholeParameters

__all__ = [
    "FlatOptimizer",
    "GradScaler",
    "Muon",
    "Statistics",
    "WholeMatrices",
    "WholeParameters",
    "clip_grad_norm_",
    "global_norm",
    "is_hidden_matrix",
    "newton_schulz",
    "offload_optimizer_state",
    "on_whole_matrices",
    "statistics",
]
