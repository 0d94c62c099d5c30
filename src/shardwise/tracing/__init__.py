"""Traces: what the groups of a model did over time, and what waited for what.

``trace`` and ``merge_traces`` stand at the top of shardwise. trace.py calls recorder.py, which notes in
timeline.py what the groups do and communicate, and when, by the ``Clock`` there; records.py is what is left
when the trace is over.
"""
