"""Sharded checkpoints on torch.distributed.checkpoint."""
