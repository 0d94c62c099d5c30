"""Whole models: strategies by name, wrap policies, tables."""
