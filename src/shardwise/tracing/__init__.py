"""Traces: what the groups of a model did over time, and what waited for what.

    trace.py         the call, and what it gives
    recorder.py      what is attached to a model while a trace records
    timeline.py      what modules compute, and all other spans
    transfers.py     what groups communicate, over the streams of streams.py
    completions.py   when the back end of the host is done
    clocks.py        of the host, or of a device
    records.py       what is left when the trace is over: plain numbers
    analysis.py      bytes and waits of each group, and advice
    files/           what traces are written to, and the traces of several ranks in one file

``trace`` and ``merge_traces`` stand at the top of shardwise.
"""
