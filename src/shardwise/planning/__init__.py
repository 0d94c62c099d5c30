"""Before training: what a model would need on each rank, under each strategy.

estimate    memory and traffic of a step; returns Estimate, with a StrategyEstimate for each strategy
"""

from shardwise.planning.estimate import estimate
from shardwise.planning.report import Change, Estimate, Peak, StrategyEstimate

__all__ = ["Change", "Estimate", "Peak", "StrategyEstimate", "estimate"]
