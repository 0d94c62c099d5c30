"""How many bytes a training step copies, and how many of them sharding is to blame for.

`count_copies(step)` runs `step` under a dispatch mode and sums, by operator, the bytes written
by copies, by fills, and by anything unknown, and the bytes read by arithmetic. What a sharded
step has beyond the plain one (`Copies.beyond`) is what it moves around its collectives.

Why a dispatch mode and not the profiler: the mode sees every operator called from Python or from
autograd exactly once, with its tensors, so it knows what was written; the profiler nests
(`clone` holds a `copy_`) and does not know the sizes in a list of tensors. On CPU backward
runs on the calling thread, so a mode around the step sees backward; the example below shows it.

What the mode does not see is memory that the transport moves inside a collective, in C++, partly
on its own threads (gloo's all-gather copies its whole output once). `count_transport_copies`
asks the profiler for that, and only for that. One exception: gloo's reduce-scatter copies its
result out in `wait()`, on the calling thread and outside the collective's operator, so the mode
counts that copy, a shard, as `aten.copy_`. A test that expects zero must not meet it. The other way
round, shardwise's exchange over gloo is written in Python: the copy of a rank's own part, which
every all-gather makes, would be seen, and is counted as "in transport" (`_transport_marked`).

    >>> import torch
    >>> w = torch.ones(1000, requires_grad=True)
    >>> _ = w.register_hook(lambda grad: grad.clone())
    >>> count_copies(lambda: (w * 2).sum().backward()).total("copied")
    4000
"""

import contextlib
import math
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch._subclasses import FakeTensor
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

COPIES = {
    *("copy_", "copy", "clone", "_to_copy", "cat", "stack", "hstack", "vstack", "repeat"),
    *("contiguous", "_chunk_cat", "constant_pad_nd", "pad", "roll", "flip", "narrow_copy"),
    *("_foreach_copy_", "_foreach_copy", "_foreach_clone", "slice_scatter", "select_scatter"),
    *("index_select", "index_copy_", "index_put_", "index", "gather", "scatter_", "scatter"),
    *("masked_scatter_", "masked_select", "resize_as_", "lift_fresh_copy", "_reshape_copy"),
}
FILLS = {
    *("zero_", "fill_", "zeros", "zeros_like", "new_zeros", "ones", "ones_like", "new_ones"),
    *("full", "full_like", "new_full", "_foreach_zero_", "scalar_tensor", "zero", "fill"),
}
ARITHMETIC = {"sum", "mean", "add", "sub", "mul", "div", "lerp", "addcmul", "addcdiv", "sqrt"}
ALLOCATIONS = {
    *("empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided", "resize_"),
    *("set_", "detach_", "_unsafe_view", "lift_fresh", "record_stream", "_local_scalar_dense"),
}
KINDS = ("copied", "in transport", "filled", "arithmetic", "other")
NUM_BYTES_OF_DTYPE = {
    **{"double": 8, "long int": 8, "float": 4, "int": 4, "c10::BFloat16": 2, "c10::Half": 2},
    **{"bool": 1, "unsigned char": 1, "signed char": 1},
}


@dataclass(frozen=True)
class Copies:
    """Bytes by kind and operator, and calls by operator, of one step on one rank.

    `copied`, `filled` and `other` are bytes written, `arithmetic` is bytes read. `other` holds
    operators in no list here (compute, mostly): a copy under a new name turns up there.
    """

    num_bytes: Mapping[str, Counter[str]]
    num_calls: Counter[str] = field(default_factory=Counter)

    def total(self, kind: str) -> int:
        return sum(self.num_bytes[kind].values())

    def beyond(self, plain: "Copies") -> "Copies":
        """What this step has and the plain one has not, operator by operator, never negative.

        Operator by operator, so that a copy saved here cannot hide one added there.
        """
        return Copies(
            {kind: self.num_bytes[kind] - plain.num_bytes[kind] for kind in KINDS},
            self.num_calls - plain.num_calls,
        )

    def __add__(self, other: "Copies") -> "Copies":
        return Copies(
            {kind: self.num_bytes[kind] + other.num_bytes[kind] for kind in KINDS},
            self.num_calls + other.num_calls,
        )

    @property
    def num_collectives(self) -> int:
        """Calls of operators that communicate (waiting apart)."""
        return sum(n for op, n in self.num_calls.items() if _is_collective(op))

    @property
    def saw_backward(self) -> bool:
        return any("backward" in op for op in self.num_calls)


def count_copies(step: Callable[[], object]) -> Copies:
    """Run `step` once and count what it moves on the calling thread, forward and backward.

    DTensor operators are counted by what they do to the local tensors.
    """
    counter = _Counter()
    with _transport_marked(counter), counter:
        step()
    return Copies(counter.num_bytes, counter.num_calls)


def copied_around_collectives(sharded_step: Callable[[], object], plain_step: Callable[[], object]) -> int:
    """Bytes that the sharded step copies and the plain step does not. Runs each step once.

    Warm both up first: buffers made on the first step are not what a step costs.
    """
    return count_copies(sharded_step).beyond(count_copies(plain_step)).total("copied")


class _Counter(TorchDispatchMode):
    """Sums bytes per operator; runs every operator unchanged."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes: dict[str, Counter[str]] = {kind: Counter() for kind in KINDS}
        self.num_calls: Counter[str] = Counter()
        self.thread = threading.get_ident()
        self.is_in_transport = False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Let subclasses unwrap first (their inner operators come back here), then count."""
        if any(issubclass(t, FakeTensor) for t in types):
            return func(*args, **(kwargs or {}))  # DTensor asking for shapes: moves nothing
        if any(t not in (Tensor, Parameter) for t in types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        op = f"{func.namespace}.{func._opname}"
        self.num_calls[op] += 1
        kind = _kind(func)
        if kind is not None:
            if kind == "copied" and self.is_in_transport:
                kind = "in transport"
            self.num_bytes[kind][op] += _moved(func, kind, args, kwargs or {}, result)
        return result


@contextlib.contextmanager
def _transport_marked(counter: _Counter) -> Iterator[None]:
    """Tell `counter` when shardwise's own exchange over gloo puts a rank's part of a gather in place.

    Every all-gather makes that copy, gloo's in C++, where the mode does not see it. Beside the same
    copy of gloo's it belongs under "in transport", not among the copies around collectives.
    """
    try:
        from shardwise.comm.communicators import GlooExchange
    except ImportError:
        yield
        return
    place_own = GlooExchange._copy_own

    def marked(self: GlooExchange, pairs: Any) -> None:
        counter.is_in_transport = True
        try:
            place_own(self, pairs)
        finally:
            counter.is_in_transport = False

    GlooExchange._copy_own = marked  # type: ignore[method-assign]
    try:
        yield
    finally:
        GlooExchange._copy_own = place_own  # type: ignore[method-assign]


def _is_collective(op: str) -> bool:
    name = op.partition(".")[2]
    return op.startswith(("c10d.", "_c10d_functional.")) and not name.startswith("wait")


def _kind(func: Any) -> str | None:
    """Which of `KINDS` an operator belongs to; None for views, allocations and collectives."""
    name = func._opname
    if func.namespace in ("c10d", "_c10d_functional", "profiler", "prim"):
        return None
    if func.is_view or name in ALLOCATIONS:
        return None
    if name in COPIES or name.endswith("_copy") or func.namespace == "fsdp":
        return "copied"
    if name in FILLS:
        return "filled"
    if name.removeprefix("_foreach_").rstrip("_") in ARITHMETIC:
        return "arithmetic"
    return "other"


def _moved(func: Any, kind: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> int:
    """Bytes read by arithmetic, bytes written by the rest."""
    if kind == "arithmetic":
        return _num_bytes((args, dict(kwargs)))
    if func.namespace not in ("aten", "fsdp"):
        return _num_bytes((args, dict(kwargs)))  # a custom operator: at most all it was given
    if func._opname == "all_gather_copy_in":
        return _num_bytes(args[0])  # its schema does not say that it writes
    return _written(func, args, kwargs, result)


def _written(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> int:
    """Bytes of the arguments that the schema marks as written and of the fresh results."""
    schema = func._schema
    written = [
        kwargs.get(argument.name, args[index] if index < len(args) else None)
        for index, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    results = result if isinstance(result, tuple) and len(schema.returns) > 1 else (result,)
    fresh = [
        value for value, returned in zip(results, schema.returns, strict=False) if returned.alias_info is None
    ]
    return _num_bytes((written, fresh))


def _num_bytes(tree: Any) -> int:
    tensors = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
    return sum(t.numel() * t.element_size() for t in tensors if not t.is_meta)


def count_transport_copies(step: Callable[[], object]) -> int | None:
    """Run `step` once; bytes that collectives copy inside themselves, on any thread.

    None where this torch cannot profile the transport's threads, or not tell dtypes (2.11).
    """
    from torch._C._profiler import _ExperimentalConfig
    from torch.profiler import ProfilerActivity, profile, record_function

    try:
        config = _ExperimentalConfig(profile_all_threads=True)
    except TypeError:
        return None
    with (
        profile(
            activities=[ProfilerActivity.CPU], record_shapes=True, acc_events=True, experimental_config=config
        ) as profiled,
        record_function("counted step"),
    ):
        step()
    events = profiled.events()
    if not hasattr(events[0], "input_dtypes"):
        return None
    (caller,) = {event.thread for event in events if event.name == "counted step"}
    return sum(
        math.prod(event.input_shapes[0]) * NUM_BYTES_OF_DTYPE.get(event.input_dtypes[0], 4)
        for event in events
        if event.name == "aten::copy_" and (event.thread != caller or _is_in_collective(event))
    )


def _is_in_collective(event: Any) -> bool:
    parent = event.cpu_parent
    while parent is not None and not parent.name.startswith("c10d::"):
        parent = parent.cpu_parent
    return parent is not None
