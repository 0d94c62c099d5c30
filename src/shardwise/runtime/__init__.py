"""The machinery behind ``fully_shard``; nothing here is public.

Imports run one way only, in the order of ``tests/test_rooms.py``::

    compat, layout, mesh, streams, outputs, deferred, precision
        <- buffers <- collectives <- custom, param, reduction <- bucket <- extension
        <- group <- schedule <- hooks <- outside, copying
"""
