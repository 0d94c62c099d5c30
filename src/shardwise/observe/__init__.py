"""Looking at a sharded model: counts of its collectives, and what it has in memory."""

from shardwise.observe.collectives import CollectiveCounts, count_collectives
from shardwise.observe.memory import GroupSnapshot, MemorySnapshot, memory_snapshot

__all__ = ["CollectiveCounts", "GroupSnapshot", "MemorySnapshot", "count_collectives", "memory_snapshot"]
