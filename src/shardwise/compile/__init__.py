"""The same in a traced graph."""
