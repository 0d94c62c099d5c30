"""The features that every root has."""

import torch

from shardwise.engine.root import Root
from shardwise.features.double_backward import DoubleBackward
from shardwise.features.finalization import ManualFinalization
from shardwise.features.kept_parts import KeptParts
from shardwise.features.last_block import LastBlock
from shardwise.features.optional_blocks import OptionalBlocks
from shardwise.features.plan_check import PlanCheck
from shardwise.features.split_backward import SplitBackward


def new_root(device: torch.device) -> Root:
    """A root for a tree on ``device``, with all features that a training script may use."""
    features = [
        PlanCheck,
        OptionalBlocks,
        KeptParts,
        LastBlock,
        DoubleBackward,
        ManualFinalization,
        SplitBackward,
    ]
    return Root(device, features)
