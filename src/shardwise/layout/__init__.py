"""Arithmetic on shapes, dtypes, meshes and ranks. It knows no buffers, parameters or groups."""
