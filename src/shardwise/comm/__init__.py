"""Buffers, streams and collectives. Knows no module and no parameter."""
