"""One parameter: sharded, unsharded, and its gradient."""
