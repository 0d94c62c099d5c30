"""What a step does, for those who look."""
