"""The parameters of one ``fully_shard`` call: whether they may be unsharded or reduced, and how."""
