"""What happens once, before the first step: validation, discovery, shared parameters."""
