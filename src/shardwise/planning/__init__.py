"""Before training: what a model would take on each rank, under each strategy.

estimate    memory and traffic of a step; gives Estimate, a StrategyEstimate for each strategy
"""

from shardwise.planning.estimate import estimate
from shardwise.planning.report import Change, Estimate, Peak, StrategyEstimate

__all__ = ["Change", "Estimate", "Peak", "StrategyEstimate", "estimate"]
