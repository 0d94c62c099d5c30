"""One parameter, and the bucket of those that are communicated together."""
