"""What other frameworks need so that they train on the shards of this library.

install, uninstall    make torch's names for ``fully_shard`` refer to this library; undo that
installed             the same inside a ``with`` statement

PipelineStage             a stage of torch.distributed.pipelining that reduces once a step
follow_unshard_actions    makes stages unshard and reshard when the schedule asks for it
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
