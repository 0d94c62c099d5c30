"""What other frameworks need so that they train on the shards of this library.

install, uninstall    give the names of torch's ``fully_shard`` to this library, and back
installed             the same for a ``with`` statement
"""

from shardwise.interop.install import install, installed, uninstall

__all__ = ["install", "installed", "uninstall"]
