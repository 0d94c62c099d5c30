"""Optimizers, norms and clipping, loss scaling."""
