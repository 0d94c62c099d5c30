"""Observing a step: counts of collectives.

count_collectives    count those issued inside a ``with`` statement, by group; gives CollectiveCounts
"""

from shardwise.observe.collectives import CollectiveCounts, count_collectives

__all__ = ["CollectiveCounts", "count_collectives"]
