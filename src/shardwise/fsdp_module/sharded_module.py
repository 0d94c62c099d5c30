"""ShardedModule: what type checkers take a sharded module for."""

from typing import TYPE_CHECKING, Any

from torch import nn

from shardwise.fsdp_module.module import FSDPModule

if TYPE_CHECKING:

    class ShardedModule(FSDPModule, nn.Module, Any):
        """What ``fully_shard`` returns, as type checkers see it: an FSDPModule of the module's own class.

        Python's types have no intersections. A class with ``Any`` among its bases is accepted wherever the
        module's own class is expected, while calls of FSDPModule's and nn.Module's methods are checked.
        """

        def __getattr__(self, name: str) -> Any: ...
else:
    ShardedModule = FSDPModule
