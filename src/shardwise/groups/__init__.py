"""The parameters of one ``fully_shard`` call: what they are, whether they may be unsharded and reduced, and how."""
