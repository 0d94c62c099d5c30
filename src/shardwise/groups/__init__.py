"""The parameters of one ``fully_shard`` call: whether and how they may be unsharded or reduced."""
