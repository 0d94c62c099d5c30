"""What the tests share: a session-long world of ranks, and how it reports failures."""

from harness.world import WorkerError, World

__all__ = ["WorkerError", "World"]
