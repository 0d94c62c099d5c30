"""Parameters of a group that are communicated together."""
