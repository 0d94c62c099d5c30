"""Statistics of whole parameters and gradients, however they are divided between ranks.

Each rank describes what it holds of a tensor by a row of numbers. The rows of all tensors travel together, in
the all-reduces of norms.py, and every rank combines them in the same order:

    row            numel | not finite | mean | squared deviations | min | max | norm | histogram ...
    over ranks     sum     sum          weighted mean, and so on; where ranks hold copies, one row counts

Deviations are from the mean of the row, and corrected for the difference of the means when rows are combined
(Chan, Golub, LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances", 1979). A
difference of sums of squares would lose the deviation of values that are almost equal.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwise.arguments import check_number, check_type, describe
from shardwise.layout.fqns import clean, listed
from shardwise.optim.norms import (
    HeldGradient,
    NormPlan,
    PassedParameters,
    held_gradients,
    norm_of,
    refuse_meta,
    stacked,
    widest,
)
from shardwise.ranks.failures import monitored
from shardwise.torch_compat import dtensor

_NUM_FIXED = 7  # numbers in a row before the histogram
_ROOM = 2**12  # numbers, 32 KiB of each rank, that travel in one all-reduce: 585 rows without histograms
# What is converted to float64 at a time. On the host a piece fits into a cache.
_PIECE_NUMEL = {"cpu": 2**16}
_PIECE_NUMEL_ON_DEVICE = 2**24


@dataclass(frozen=True)
class Statistics:
    """Of all elements of a tensor, or of those in a module, as plain PyTorch would find them on one device.

    A NaN makes every figure NaN but the counts, as in torch. ``num_nonfinite`` tells how many there are.

    Attributes:
        numel: number of elements.
        mean: their mean; NaN if there are none, as are ``min`` and ``max``.
        std: their standard deviation, as ``torch.std`` corrects it: NaN for fewer than two elements.
        min: the smallest.
        max: the largest.
        norm: their 2-norm.
        num_nonfinite: how many are infinite or NaN.
        histogram: how many are in each interval; None unless asked for.
    """

    numel: int
    mean: float
    std: float
    min: float
    max: float
    norm: float
    num_nonfinite: int
    histogram: tuple[int, ...] | None = None

    @property
    def rms(self) -> float:
        """The root of the mean of the squares."""
        return self.norm / math.sqrt(self.numel) if self.numel else math.nan


@monitored
@torch.no_grad()
def statistics(
    model_or_tensors: nn.Module | Mapping[str, Tensor],
    *,
    of: str = "parameters",
    by: str = "parameter",
    depth: int | None = None,
    histogram: Sequence[float] | None = None,
    group: dist.ProcessGroup | None = None,
) -> dict[str, Statistics]:
    """Norm, mean, deviation, extremes and histogram of whole parameters or gradients; the same on every rank.

    Tensors may be on any meshes, sharded (unevenly, or with empty shards), replicated and tensor-parallel,
    and plain tensors among them. Sums are in float64 (float32 on MPS) for every dtype.

    Args:
        model_or_tensors: a module, whose parameters are meant, or a mapping of names to tensors: some of the
            parameters, buffers, averages, the state of an optimizer.
        of: ``"parameters"`` describes the tensors themselves; ``"gradients"`` their ``.grad``, of those that
            are trainable or have one. A missing gradient counts as zeros, as in :func:`clip_grad_norm_`.
        by: ``"parameter"`` gives an entry for each tensor, a tied one under its first name. ``"module"``
            gives one for each module that contains any, with those of its submodules; ``""`` is the whole
            model. The dots in names separate modules. A tied parameter counts once in each module around it.
        depth: with ``by="module"``, leave out modules whose names have more than ``depth`` parts: 0 leaves
            ``""`` alone, 1 the children of the model.
        histogram: edges, ascending: at least two numbers, such as ``[-1, 0, 1]`` for two intervals. As in
            ``numpy.histogram``, an interval contains its left edge, the last one both, and elements outside
            are not counted; the first and last edge may be infinite.
        group: connects ranks that hold other parameters, the stages of a pipeline. Their entries come in
            addition, and ``""`` is the whole model. Names must differ between them.

    Returns:
        Statistics by name, in the order of the model. Names are without the prefixes of ``torch.compile``.

    Collective: all ranks of a mesh call it with the same names. It costs one all-reduce for each mesh
    dimension over which a tensor is sharded, of 32 KiB a rank. This has room for 585 tensors, at 56 bytes
    each, and 8 more for each interval; the others travel in a second one. ``group`` adds an all-gather. No
    tensor is gathered: a rank reads its shards, and needs memory for a small part of one. Waits for the
    device.

    Plain tensors, and DTensors on a slice of the mesh of others, may differ by rank. Then the rank counts on
    which the tensor has the largest norm.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument has a value that is not listed above, the named tensor is complex or on the
            meta device, or ranks have passed different tensors or edges.
        RuntimeError: gradients of backwards without synchronisation wait to be reduced.

    Example::

        loss.backward()
        for name, found in statistics(model, of="gradients", by="module", depth=2).items():
            print(f"{name:40} {found.norm:.3e} {found.max:.3e}")
    """
    caller = "statistics"
    _check_choices(caller, of, by, depth)
    check_type(caller, "group", group, "a process group, or None", dist.ProcessGroup, type(None))
    edges = _check_edges(caller, histogram)
    named = _named(caller, model_or_tensors)
    arguments = f"of={of!r}, histogram={edges.tolist() or None}"
    held, passed = _held(caller, named, of), PassedParameters(caller)
    rows = _rows_over_ranks(held, named, passed, edges, arguments)
    if group is not None:
        rows = _with_those_of(caller, group, rows, edges)
    if by == "parameter":
        first = {id(row): name for name, row in reversed(rows.items())}
        return {name: _described(row, edges) for name, row in rows.items() if first[id(row)] == name}
    inside: dict[str, dict[int, Row]] = {}
    for name, row in rows.items():
        parts = name.split(".")[:-1]
        most = len(parts) if depth is None else min(depth, len(parts))
        for module in [".".join(parts[:count]) for count in range(most + 1)]:
            inside.setdefault(module, {})[id(row)] = row
    return {name: _described(_as_one(list(own.values())), edges) for name, own in inside.items()}


Row = list[float]


def _named(caller: str, given: nn.Module | Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors by all of their names, in order."""
    check_type(
        caller, "model_or_tensors", given, "a module or a mapping of names to tensors", nn.Module, Mapping
    )
    if isinstance(given, nn.Module):
        return {clean(name): param for name, param in given.named_parameters(remove_duplicate=False)}
    for name, tensor in given.items():
        check_type(caller, "a name in model_or_tensors", name, "a str", str)
        check_type(caller, f"model_or_tensors[{name!r}]", tensor, "a tensor", Tensor)
    return dict(given)


def _held(caller: str, named: dict[str, Tensor], of: str) -> list[HeldGradient]:
    def name_of(tensor: Tensor) -> str:
        return next(name for name, each in named.items() if each is tensor)

    tensors = list({id(tensor): tensor for tensor in named.values()}.values())
    for tensor in tensors:
        refuse_meta(caller, tensor, name_of)
        if tensor.is_complex():
            raise ValueError(
                f"{caller}: {name_of(tensor)} is complex, and complex numbers have no order. Pass its "
                "torch.view_as_real(), or measure it with global_norm."
            )
    measured = tensors if of == "parameters" else [tensor.grad for tensor in tensors]
    return held_gradients(tensors, measured, caller, name_of)


def _rows_over_ranks(
    held: Sequence[HeldGradient],
    named: dict[str, Tensor],
    passed: PassedParameters,
    edges: Tensor,
    arguments: str,
) -> dict[str, Row]:
    """The row of each whole tensor, by all of its names, which share one object."""
    first = {id(tensor): name for name, tensor in reversed(named.items())}
    names = [first[id(each.param)] for each in held]
    # Each by its own mesh: which of equal meshes its place has depends on what gradients this rank has.
    meshes = {
        name: dtensor.spec_of(each.param).mesh
        for name, each in zip(names, held, strict=True)
        if isinstance(each.param, DTensor)
    }
    for mesh in dict.fromkeys(meshes.values()):
        passed.add(mesh, [arguments])
    for name, mesh in meshes.items():
        passed.add(mesh, [name])
    plan = NormPlan(held, passed)
    members = [sorted(indices, key=names.__getitem__) for indices in plan.members]  # may differ by rank
    plan.labels = [[names[index] for index in indices] for indices in members]
    own = _rows(held, plan.device, edges)
    columns = [
        torch.stack([own[index] for index in indices]).to(plan.device, widest(plan.device))
        for indices in members
    ]
    found: dict[int, Row] = {}
    for indices, column in zip(
        members, plan.over_ranks(columns, _combined, _with_largest_norm, _ROOM), strict=True
    ):
        found |= {id(held[i].param): row for i, row in zip(indices, column.tolist(), strict=True)}
    return {name: found[id(tensor)] for name, tensor in named.items() if id(tensor) in found}


def _with_those_of(
    caller: str, group: dist.ProcessGroup, rows: dict[str, Row], edges: Tensor
) -> dict[str, Row]:
    """``rows``, and those of all ranks of ``group``."""
    everyone: list[Any] = [None] * group.size()
    dist.all_gather_object(everyone, (edges.tolist(), rows), group=group)
    if any(theirs != edges.tolist() for theirs, _ in everyone):
        raise ValueError(f"{caller}: ranks of group disagree on histogram. Pass the same on all of them.")
    count = Counter(name for _, theirs in everyone for name in theirs)
    if twice := [name for name, ranks in count.items() if ranks > 1]:
        raise ValueError(
            f"{caller}: several ranks of group have a tensor named {listed(twice, 4)}. Each of them must "
            "hold different parameters, as pipeline stages do: pass mappings whose names begin with the "
            "stage."
        )
    return {name: row for _, theirs in everyone for name, row in theirs.items()}


# --- rows -----------------------------------------------------------------------------------------


def _rows(held: Sequence[HeldGradient], device: torch.device, edges: Tensor) -> list[Tensor]:
    """The row of each, on the host: few rows cost less there than on a device."""
    pieces = [list(_pieces(each.measured, each.param, device)) for each in held]
    rows = [_row_of_piece(piece, edges) for own in pieces for piece in own]
    on_host = stacked(rows, torch.device("cpu")).view(-1, _NUM_FIXED + max(0, len(edges) - 1))
    return [_combined(own) for own in on_host.split([len(own) for own in pieces])]


def _pieces(tensor: Tensor | None, param: Tensor, device: torch.device) -> Iterable[Tensor]:
    """At least one piece, which may be empty. A missing gradient counts as zeros, which need no memory."""
    if tensor is None:
        flat = torch.zeros((), device=device).expand(dtensor.plain(param).numel())
    else:
        flat = (tensor.detach() if tensor.layout is torch.strided else tensor.to_dense()).reshape(-1)
    return flat.split(_PIECE_NUMEL.get(flat.device.type, _PIECE_NUMEL_ON_DEVICE))


def _row_of_piece(piece: Tensor, edges: Tensor) -> Tensor:
    values = piece.to(widest(piece.device))
    numel = values.new_full((), len(values))
    if not len(values):
        no_counts = [0] * max(0, len(edges) - 1)
        return values.new_tensor([0, 0, 0, 0, math.inf, -math.inf, 0, *no_counts])
    deviations = values.var(correction=0) * numel
    num_nonfinite = numel - values.isfinite().sum()
    fixed = [numel, num_nonfinite, values.mean(), deviations, *values.aminmax(), norm_of(values, 2.0)]
    return torch.cat([torch.stack(fixed), _counts(values, edges.to(values))])


def _counts(values: Tensor, edges: Tensor) -> Tensor:
    """How many are in each interval, as ``numpy.histogram`` counts."""
    if not len(edges):
        return edges
    places = torch.bucketize(values, edges, right=True)  # 0 is below the first; NaN is above the last
    counts = places.bincount(minlength=len(edges) + 1)[1:-1].to(values)
    counts[-1] += (values == edges[-1]).sum()
    return counts


def _as_one(rows: Sequence[Row]) -> Row:
    return _combined(torch.tensor(rows, dtype=torch.float64)).tolist()


def _combined(rows: Tensor) -> Tensor:
    """One row for several of different elements, along dim 0."""
    numel, num_nonfinite, mean, deviations, low, high, norm, *counts = rows.unbind(-1)
    total = numel.sum(0)
    joint_mean = (numel * mean).sum(0) / total.clamp(min=1)
    deviations = deviations + numel * (mean - joint_mean).square()
    fixed = [total, num_nonfinite.sum(0), joint_mean, deviations.sum(0), low.amin(0), high.amax(0)]
    return torch.stack([*fixed, norm_of(norm, 2.0, dim=0), *(count.sum(0) for count in counts)], dim=-1)


def _with_largest_norm(rows: Tensor) -> Tensor:
    """Of each tensor the row of one rank, which holds any of it."""
    norms = rows[..., 6].where(rows[..., 0] > 0, -1.0)
    return rows[norms.argmax(0), torch.arange(rows.shape[1], device=rows.device)]


def _described(row: Row, edges: Tensor) -> Statistics:
    numel, num_nonfinite, mean, deviations, low, high, norm, *counts = row
    if not numel:
        mean = low = high = math.nan
    return Statistics(
        numel=int(numel),
        mean=mean,
        std=math.sqrt(deviations / (numel - 1)) if numel > 1 else math.nan,
        min=low,
        max=high,
        norm=norm,
        num_nonfinite=int(num_nonfinite),
        histogram=tuple(map(int, counts)) if len(edges) else None,
    )


# --- arguments ------------------------------------------------------------------------------------


def _check_choices(caller: str, of: Any, by: Any, depth: Any) -> None:
    for name, value, known in (("of", of, ("parameters", "gradients")), ("by", by, ("parameter", "module"))):
        if value not in known:
            raise ValueError(f"{caller}: {name} is {describe(value)}; pass {known[0]!r} or {known[1]!r}.")
    if depth is None:
        return
    check_number(caller, "depth", depth, "a number of parts of names, at least 0, or None", above=-1)
    if by != "module":
        raise ValueError(f"{caller}: depth is {depth}, which works only with by='module'; pass both.")


def _check_edges(caller: str, histogram: Any) -> Tensor:
    """The edges in float64; none without a histogram."""
    if histogram is None:
        return torch.zeros(0, dtype=torch.float64)
    try:
        edges = torch.as_tensor(histogram, dtype=torch.float64, device="cpu")
    except (TypeError, ValueError, RuntimeError):
        edges = torch.zeros(0)
    if edges.dim() != 1 or len(edges) < 2 or not (edges[1:] > edges[:-1]).all():
        raise ValueError(
            f"{caller}: histogram is {describe(histogram)}; pass the edges of intervals: at least two "
            "numbers, ascending."
        )
    return edges
