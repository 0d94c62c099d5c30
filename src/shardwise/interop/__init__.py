"""What other frameworks need so that they train on the shards of this library."""
