"""Looking at a sharded model: counts of its collectives, and what it has in memory.

count_collectives    count those issued in a ``with`` statement, by group; yields CollectiveCounts
memory_snapshot      what each group has in memory, and why; returns a MemorySnapshot of GroupSnapshots
"""

from shardwise.observe.collectives import CollectiveCounts, count_collectives
from shardwise.observe.memory import GroupSnapshot, MemorySnapshot, memory_snapshot

__all__ = ["CollectiveCounts", "GroupSnapshot", "MemorySnapshot", "count_collectives", "memory_snapshot"]
