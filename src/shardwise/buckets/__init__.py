"""The parameters of a group that are communicated together."""
