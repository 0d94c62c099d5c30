"""Traces: what the groups of a model did over time, and what waited for what.

    trace.py         the call, and what it gives
    recorder.py      what is attached to a model while a trace records
    streams.py       through which its groups then communicate, and tell what they do
    timeline.py      spans between moments of the host or of a device, and memory over time
    records.py       what is left when the trace is over: plain numbers
    analysis.py      bytes and waits of each group, who waits for whom, and advice
    files.py         what traces are written to, and the traces of several ranks in one file
    drawings.py      pages and pictures
    step_capture.py  one step of any program, by SHARDWISE_TRACE

``trace`` and ``merge_traces`` stand at the top of shardwise.
"""
