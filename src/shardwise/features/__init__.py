"""Optional parts of the runtime, called at named points of a step (``Feature`` in engine/root.py)."""
