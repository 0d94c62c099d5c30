"""Looking at a sharded model: counts of its collectives, and what it has in memory.

count_collectives    count those issued inside a ``with`` statement, by group; gives CollectiveCounts
memory_snapshot      what each group has in memory, in bytes, and why; gives MemorySnapshot of GroupSnapshot
"""

from shardwise.observe.collectives import CollectiveCounts, count_collectives
from shardwise.observe.memory import GroupSnapshot, MemorySnapshot, memory_snapshot

__all__ = ["CollectiveCounts", "GroupSnapshot", "MemorySnapshot", "count_collectives", "memory_snapshot"]
