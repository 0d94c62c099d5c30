"""Observing a step: counts of collectives."""
