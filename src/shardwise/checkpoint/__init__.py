"""Sharded checkpoints."""
