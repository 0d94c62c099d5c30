"""What other frameworks need so that they train on the shards of this library.

install, uninstall    give the names of torch's ``fully_shard`` to this library, and back
installed             the same for a ``with`` statement

PipelineStage             a stage of torch.distributed.pipelining that reduces once a step
follow_unshard_actions    has it unshard and reshard when the schedule says so
"""

from typing import TYPE_CHECKING, Any

from shardwise.interop.install import install, installed, uninstall

if TYPE_CHECKING:
    from shardwise.interop.pipelines import PipelineStage, follow_unshard_actions

__all__ = ["PipelineStage", "follow_unshard_actions", "install", "installed", "uninstall"]


def __getattr__(name: str) -> Any:
    if name in ("PipelineStage", "follow_unshard_actions"):
        from shardwise.interop import pipelines  # imports torch's pipelines, and they torch's FSDP

        return getattr(pipelines, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
