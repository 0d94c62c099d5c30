"""Buffers, streams and collectives. Knows no modules and no parameters."""
