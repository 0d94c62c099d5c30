"""What became of a model: its groups as a table, with what they take in memory.

Reads what the groups know: starts nothing, unshards nothing, communicates nothing.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from shardwise.buckets.bucket import Bucket
from shardwise.engine.module_state import ModuleState, is_sharded, states_to_use
from shardwise.groups.group import ParameterGroup
from shardwise.layout.fqns import joined, listed, names_in
from shardwise.layout.mesh import ShardMesh
from shardwise.layout.text_tables import ruled
from shardwise.setup.validation import class_name
from shardwise.strategies.auto import remembered
from shardwise.strategies.block_options import done_lines
from shardwise.strategies.module_trees import range_of_names
from shardwise.torch_compat import nn_modules


def explain(model: nn.Module) -> str:
    """The groups of ``model`` as a table, with one line for each, indented as they are nested.

    - group: the name, as in errors and events. A group of several modules shows the first and the last.
    - class: what the modules were before they were sharded.
    - strategy: the name of these settings in :func:`shard_model`. Unsharded parameters are freed after
      forward and after backward (``zero3``, ``hybrid``; the root and the last group keep them from forward to
      backward unless told otherwise), after backward (``zero2``, ``hybrid_zero2``), or not (``zero1``).
      ``(within 2)``: pairs of ranks keep them together from forward to backward.
    - mesh: the number of ranks over which parameters are replicated and sharded.
    - parameters: the number of elements, over all ranks.
    - MB unsharded: the memory of unsharded parameters on a rank, in the dtype of computation. With ``ddp``
      they are not all-gathered; if the dtype is that of the shards, unsharded and stored parameters are the
      same memory.
    - MB per rank: what a rank stores. Gradients and the optimizer's state are additional.
    - dtype: the dtype of the stored parameters and, after an arrow, that of computation, if it differs.

    MB are 10^6 bytes of buffers, including padding. The text is the same on every rank, except for tensor
    parallelism with uneven sizes. It shows the current settings.

    After ``shard_model(model, strategy="auto")`` a second table shows the candidates and the reason for the
    choice: for each strategy, the peak of memory in a step on a rank and where it occurs, the bytes that a
    step exposes and sends, and whether it fits.

    After a trace (:func:`shardwise.trace`) another table shows what it recorded on this rank: how often each
    group was unsharded and reduced, what it sent, how long the computation waited, and the share of its
    transfers that no computation covered.

    Args:
        model: a sharded module, or one with sharded modules inside.

    Returns:
        Text to print: a header, the groups, totals, and parameters that no group manages, if any.

    Raises:
        TypeError: ``model`` is no module.
        ValueError: nothing in it is sharded.

    Example::

        print(explain(shard_model(model)))
    """
    rows = list(_rows(model, states_to_use("explain", model)))
    decimals = 1 if sum(_unsharded_bytes(row.group) for row in rows) >= 10e6 else 4

    def megabytes(num_bytes: int) -> str:
        return f"{num_bytes / 1e6:,.{decimals}f}"

    cells = [_HEADER, *(_cells(row, megabytes) for row in rows), _total(rows, megabytes)]
    lines = ruled(cells, right=_ALIGNED_RIGHT, has_total=True)
    choice = remembered(model)
    chosen = [] if choice is None else ["", *choice.table()]
    left = _not_managed(model, rows, megabytes)
    return "\n".join([*lines, *left, *done_lines(model), *chosen, *_traced(rows)])


# --- which groups, in which order -----------------------------------------------------------------


@dataclass(frozen=True)
class _Row:
    name: str
    depth: int
    group: ParameterGroup


def _rows(model: nn.Module, module_states: Sequence[ModuleState]) -> Iterator[_Row]:
    """The groups, each before those inside it; modules of a group stand together."""
    groups = {m: module_state.group for module_state in module_states for m in module_state.group.modules}
    names = names_in(model)
    seen: set[nn.Module] = set()

    def visit(module: nn.Module, depth: int) -> Iterator[_Row]:
        if module in seen:
            return
        group = groups.get(module)
        together = [module] if group is None else [m for m in group.modules if m in names]
        seen.update(together)
        if group is not None:
            # Else its groups do not know their whole names.
            is_named = is_sharded(model)
            found = group.name.split(", ") if is_named else [names[m] for m in together]
            yield _Row(range_of_names(found), depth, group)
        for each in together:
            for child in each.children():
                yield from visit(child, depth + (group is not None))

    return visit(model, 0)


# --- cells ----------------------------------------------------------------------------------------

_HEADER = ["group", "class", "strategy", "mesh", "parameters", "MB unsharded", "MB per rank", "dtype"]
_ALIGNED_RIGHT = (4, 5, 6)

Megabytes = Callable[[int], str]


def _cells(row: _Row, megabytes: Megabytes) -> list[str]:
    group = row.group
    return [
        "  " * row.depth + row.name,
        _classes(group),
        _strategy(group),
        ", ".join(dict.fromkeys(map(_mesh, group.buckets))) or _axes(group.mesh),
        f"{_numel(group):,}",
        megabytes(_unsharded_bytes(group)),
        megabytes(_stored_bytes(group)),
        "; ".join(dict.fromkeys(dtype for bucket in group.buckets for dtype in _dtypes(bucket))),
    ]


def _total(rows: list[_Row], megabytes: Megabytes) -> list[str]:
    groups = [row.group for row in rows]
    return [
        "total",
        f"{len(groups)} group{'s' * (len(groups) > 1)}",
        "",
        "",
        f"{sum(map(_numel, groups)):,}",
        megabytes(sum(map(_unsharded_bytes, groups))),
        megabytes(sum(map(_stored_bytes, groups))),
        "",
    ]


def _classes(group: ParameterGroup) -> str:
    names = [class_name(module) for module in group.modules]
    counts = {name: names.count(name) for name in names}
    return ", ".join(name if count == 1 else f"{name} x {count}" for name, count in counts.items())


def _strategy(group: ParameterGroup) -> str:
    """The name of the strategy that has such settings, and what else is set."""
    roles, after_forward = group.mesh.roles, group.settings.reshard_after_forward
    if "shard" not in roles:
        return "ddp"
    if after_forward is False:
        stage = "zero2" if group.settings.reshard_after_backward else "zero1"
        return f"hybrid_{stage}" if "replicate" in roles else stage
    note = "" if group.settings.reshard_after_backward else " (kept after backward)"
    if after_forward is not None and after_forward is not True:
        note = f" (within {after_forward}){note}"
    return ("hybrid" if "replicate" in roles else "zero3") + note


def _mesh(bucket: Bucket) -> str:
    own = len(bucket.mesh.roles)
    has_inner = any(param.sharded.device_mesh.ndim > own for param in bucket.params)  # type: ignore[attr-defined]
    return _axes(bucket.mesh) + (" x tensor parallel" if has_inner else "")


def _axes(mesh: ShardMesh) -> str:
    sizes = {"replicate": mesh.replicate_axis.world, "shard": mesh.shard_axis.world}
    return " x ".join(f"{role} {sizes[role]}" for role in mesh.roles)


def _dtypes(bucket: Bucket) -> Iterator[str]:
    where = f" on {bucket.storage.device.type}" if bucket.is_offloaded else ""
    for param in bucket.params:
        stored, computed = param.precision.stored, param.precision.computed
        text = f"{stored}{where}" + (f" -> {computed}" if computed != stored else "")
        yield text.replace("torch.", "")


def _numel(group: ParameterGroup) -> int:
    return sum(param.sharded.numel() for param in group.shards.params)


def _unsharded_bytes(group: ParameterGroup) -> int:
    return sum(bucket.computed.unsharded_bytes for bucket in group.buckets)


def _stored_bytes(group: ParameterGroup) -> int:
    return sum(bucket.stored.shard_bytes for bucket in group.buckets)


# --- what is left ---------------------------------------------------------------------------------


def _not_managed(model: nn.Module, rows: list[_Row], megabytes: Megabytes) -> list[str]:
    """A line on the parameters of ``model`` that belong to no group."""
    managed = {(site.module, site.name) for row in rows for p in row.group.shards.params for site in p.sites}
    managed |= {(tie.site.module, tie.site.name) for row in rows for tie in row.group.ties}
    left: dict[Tensor, str] = {}
    for module, prefix in names_in(model).items():
        for name, param in nn_modules.parameters(module).items():
            if param is not None and (module, name) not in managed:
                left.setdefault(param, joined(prefix, name))
    if not left:
        return []
    numel = sum(param.numel() for param in left)
    num_bytes = sum(param.numel() * param.element_size() for param in left)
    shown = f"{numel:,} parameter{'s' * (numel != 1)}, {megabytes(num_bytes)} MB"
    return [f"not managed: {shown} ({listed(left.values(), 4)})"]


# --- what happened --------------------------------------------------------------------------------


def _traced(rows: list[_Row]) -> list[str]:
    """A table of what the last trace saw; nothing if there was none."""
    if not any(row.group.traced for row in rows):
        return []
    head = ["group", "unsharded", "reduced", "MB sent", "ms waited", "uncovered"]
    cells = [head, *(_traced_cells(row) for row in rows)]
    return ["", "the last trace, on this rank", *ruled(cells, right=range(1, len(head)))]


def _traced_cells(row: _Row) -> list[str]:
    name, traced = "  " * row.depth + row.name, row.group.traced
    if traced is None:
        return [name, "", "", "", "", ""]
    both = traced.both
    sent, waited = f"{both.num_bytes / 1e6:,.4f}", f"{both.waited_ns / 1e6:,.1f}"
    return [name, str(traced.unshards), str(traced.reductions), sent, waited, f"{both.uncovered:.0%}"]
