"""Full states of models and optimizers, summoned parameters, averages.

full_state_dict                   get full values of a model, and its optimizer's state, on one rank or all
load_full_state_dict              load full values into a sharded model; returns a LoadReport
load_full_optimizer_state_dict    load the full state of an optimizer into that of a sharded model
rekey_optimizer_state_dict        convert the state of an optimizer to parameter names, or to ids
iter_full_parameters              full parameters one by one, for inference engines
save_safetensors                  files in Hugging Face's layout
EMA                               an average of the weights, in shards
unsharded, inference, no_sync     show full parameters; keep them in memory; do not reduce gradients
"""

from shardwise.state.contexts import inference, no_sync, unsharded
from shardwise.state.ema import EMA
from shardwise.state.full_state import full_state_dict, iter_full_parameters, load_full_state_dict
from shardwise.state.loading import LoadReport
from shardwise.state.model_files import save_safetensors
from shardwise.state.optimizer_state import load_full_optimizer_state_dict, rekey_optimizer_state_dict

__all__ = [
    "EMA",
    "LoadReport",
    "full_state_dict",
    "inference",
    "iter_full_parameters",
    "load_full_optimizer_state_dict",
    "load_full_state_dict",
    "no_sync",
    "rekey_optimizer_state_dict",
    "save_safetensors",
    "unsharded",
]
