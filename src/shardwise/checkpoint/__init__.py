"""Sharded checkpoints: saved by any number of ranks, loaded by any other.

save_checkpoint      write a checkpoint, also during training; returns a PendingSave
load_checkpoint      read a checkpoint into models and optimizers, in place; returns a Loaded
latest_checkpoint    find the newest complete checkpoint in a folder
resume               find and load that checkpoint
"""

from shardwise.checkpoint.folders import latest_checkpoint
from shardwise.checkpoint.load import Loaded, load_checkpoint, resume
from shardwise.checkpoint.pending import PendingSave
from shardwise.checkpoint.save import save_checkpoint

__all__ = ["Loaded", "PendingSave", "latest_checkpoint", "load_checkpoint", "resume", "save_checkpoint"]
