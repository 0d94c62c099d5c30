"""The colours of rows, waits and kinds of memory, alike on pages and pictures."""

from shardwise.tracing.records import (
    ALL_GATHER,
    ALL_REDUCE,
    COMPUTATION,
    COPIES,
    OPTIMIZER,
    REDUCE_SCATTER,
    Span,
)

WAIT = "#d1495b"
BACKWARD_COMPUTATION = "#5b7f95"
ROWS = {
    COMPUTATION: "#8fb8ca",
    ALL_GATHER: "#e9a23b",
    REDUCE_SCATTER: "#5f9e6e",
    ALL_REDUCE: "#8e6fb0",
    COPIES: "#b8b3a7",
    OPTIMIZER: "#6d6a75",
}
KINDS = {
    "shards": "#6d6a75",
    "reduced_gradients": "#5f9e6e",
    "unsharded": "#e9a23b",
    "full_gradients": "#d98880",
    "kept": "#d5d0c4",
}


def color_of(span: Span) -> str:
    """The colour of a span: waits and backward stand out from the rest of their row."""
    if span.awaits is not None:
        return WAIT
    if span.row == COMPUTATION and span.phase != "forward":
        return BACKWARD_COMPUTATION
    return ROWS[span.row]
