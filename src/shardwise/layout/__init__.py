"""Arithmetic on shapes, dtypes and ranks; no tensor is touched."""
