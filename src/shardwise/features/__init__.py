"""Optional parts of the runtime, each at named points of a step (engine/feature.py)."""
