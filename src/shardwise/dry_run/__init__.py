"""A training step without memory, ranks or devices: what it would hold, and what it would send.

The step is the real one. It runs on fake tensors, which have shapes and no contents, as one rank of a world
whose other ranks are not there.
"""
