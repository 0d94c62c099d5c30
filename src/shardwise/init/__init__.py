"""Values for models that have none: on the meta device, or partly loaded.

materialize           values for what is on the meta device
sync_module_states    the values of one rank for all
check_replicas        raise an error if copies differ between ranks
"""

from shardwise.init.initialise import check_replicas, materialize, sync_module_states

__all__ = ["check_replicas", "materialize", "sync_module_states"]
