"""The machinery behind ``fully_shard``; nothing here is public.

Imports run one way only::

    compat, layout, mesh, streams, outputs, deferred
        <- buffers <- collectives <- param <- group <- schedule <- hooks
"""
