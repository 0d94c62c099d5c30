"""What Inductor is told about the graphs of whole models."""

from functools import partial
from typing import Any

from shardwise.compile.overlap import one_ahead


def compile_options(*, overlap: bool = True, bucket_cap_mb: float | None = None) -> dict[str, Any]:
    """Options of Inductor for a graph that sharded modules communicate in.

    ``torch.compile(model, fullgraph=True, options=shardwise.compile_options())``. Without options a graph has
    one collective for all parameters of a ``fully_shard`` call and dtype, and waits for each where it begins.
    Blocks that are compiled on their own need none: their collectives are outside of their graphs.

    Args:
        overlap: whether to let collectives run beside computation, in the order of eager runs: the next
            group is unsharded while one computes, and its gradients are waited for when the next ones leave.
            That takes memory: a model of 6 or 10 equal blocks had 3.2 of them in memory in forward, 6.0 in
            backward (full parameters, gradients and their packed copies), instead of 1.7 and 3.0.
        bucket_cap_mb: merge neighbouring collectives up to so many megabytes (10^6 bytes, as in
            :func:`shard_model`) of full parameters or gradients, by the passes that ship with torch. None
            merges none. For blocks of less than a
            few megabytes, whose collectives take longer to begin than to send. All of a bucket is in
            memory at once.

    Returns:
        A new dict, to which other options of Inductor may be added.

    Raises:
        TypeError: an argument is of another type.
        ValueError: ``bucket_cap_mb`` is not positive.
    """
    if not isinstance(overlap, bool):
        raise TypeError(f"compile_options: overlap is {overlap!r}; pass True or False.")
    options: dict[str, Any] = {}
    if overlap:
        options["reorder_for_compute_comm_overlap"] = True
        options["reorder_for_compute_comm_overlap_passes"] = [one_ahead]
    if bucket_cap_mb is not None:
        if isinstance(bucket_cap_mb, bool) or not isinstance(bucket_cap_mb, (int, float)):
            raise TypeError(
                f"compile_options: bucket_cap_mb is {bucket_cap_mb!r}; pass a number of megabytes, or None."
            )
        if not bucket_cap_mb > 0:
            raise ValueError(
                f"compile_options: bucket_cap_mb is {bucket_cap_mb}; pass a positive number of megabytes, or "
                "None to merge no collectives."
            )
        for name in ("bucket_all_gathers_fx", "bucket_reduce_scatters_fx"):
            options[name] = "all"
            options[f"{name}_bucket_size_determinator"] = partial(_same_size, bucket_cap_mb * 1e6 / 2**20)
    return options


def _same_size(size: float, index: int) -> float:
    """The size of the bucket ``index``, in the unit of torch's passes: 2^20 bytes.

    A function of the module, since graphs are cached under their options.
    """
    return size
