"""The groups of a model as a table, with their memory.

Reads what the groups know: starts nothing, unshards nothing, communicates nothing.
"""

from collections import Counter
from collections.abc import Iterator, Sequence

from torch import Tensor, nn

from shardwise.engine.module_state import ModuleState, is_sharded, states_to_use
from shardwise.groups.group import ParameterGroup
from shardwise.layout.fqns import joined, listed, names_in
from shardwise.layout.mesh import ShardMesh
from shardwise.layout.text_tables import ruled
from shardwise.setup.validation import class_name
from shardwise.strategies.auto import CHOICE
from shardwise.strategies.block_options import done_lines
from shardwise.strategies.wrap_policies import range_of_names
from shardwise.torch_compat import nn_modules
from shardwise.tracing.analysis import HEAD, figures_of


def explain(model: nn.Module) -> str:
    """The groups of ``model`` as a table, with one line for each, indented as they are nested.

    - group: the name, as in errors and events. A group of several modules shows the first and the last.
    - class: what the modules were before they were sharded.
    - strategy: the name of these settings in :func:`shard_model`. Unsharded parameters are freed after
      forward and after backward (``zero3``, ``hybrid``; the root and the last group keep them from forward to
      backward by default), after backward (``zero2``, ``hybrid_zero2``), or not (``zero1``).
      With ``zero3_hpz (within 2)``, pairs of ranks keep them together from forward to backward.
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
    group was unsharded and reduced, what it sent, how long its transfers and its computation took, how long
    the computation waited, and the share of its transfers that no computation covered.

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
    sizes = [_sizes(group) for _, group in rows]
    total = [sum(column) for column in zip(*sizes, strict=True)]
    decimals = 1 if total[1] >= 10e6 else 4

    def shown(numel: int, *num_bytes: int) -> list[str]:
        return [f"{numel:,}", *(f"{each / 1e6:,.{decimals}f}" for each in num_bytes)]

    cells = [["group", "class", "strategy", "mesh", "parameters", "MB unsharded", "MB per rank", "dtype"]]
    for (name, group), own in zip(rows, sizes, strict=True):
        cells.append([name, _classes(group), _strategy(group), _mesh(group), *shown(*own), _dtypes(group)])
    cells.append(["total", f"{len(rows)} group{'s' * (len(rows) > 1)}", "", "", *shown(*total), ""])
    lines = ruled(cells, right=(4, 5, 6), has_total=True)
    left = _not_managed(model, [group for _, group in rows])
    if left:
        numel = sum(param.numel() for param in left)
        number, megabytes = shown(numel, sum(param.numel() * param.element_size() for param in left))
        what = f"{number} parameter{'s' * (numel != 1)}, {megabytes} MB"
        lines.append(f"not managed: {what} ({listed(left.values(), 4)})")
    choice = model.__dict__.get(CHOICE)
    chosen = [] if choice is None else ["", *choice.table()]
    return "\n".join([*lines, *done_lines(model), *chosen, *_traced(rows)])


def _rows(model: nn.Module, module_states: Sequence[ModuleState]) -> Iterator[tuple[str, ParameterGroup]]:
    """Names, indented, and groups, each before those inside it; modules of a group stand together."""
    groups = {m: module_state.group for module_state in module_states for m in module_state.group.modules}
    names = names_in(model)
    seen: set[nn.Module] = set()

    def visit(module: nn.Module, depth: int) -> Iterator[tuple[str, ParameterGroup]]:
        if module in seen:
            return
        group = groups.get(module)
        together = [module] if group is None else [m for m in group.modules if m in names]
        seen.update(together)
        if group is not None:
            # Else its groups do not know their whole names.
            is_named = is_sharded(model)
            found = group.name.split(", ") if is_named else [names[m] for m in together]
            yield "  " * depth + range_of_names(found), group
        for each in together:
            for child in each.children():
                yield from visit(child, depth + (group is not None))

    return visit(model, 0)


# --- cells ----------------------------------------------------------------------------------------


def _sizes(group: ParameterGroup) -> tuple[int, int, int]:
    """Elements over all ranks, bytes of unsharded parameters, bytes that a rank stores."""
    numel = sum(param.sharded.numel() for param in group.shards.params)
    unsharded = sum(bucket.computed.unsharded_bytes for bucket in group.buckets)
    return numel, unsharded, sum(bucket.stored.shard_bytes for bucket in group.buckets)


def _classes(group: ParameterGroup) -> str:
    counts = Counter(class_name(module) for module in group.modules)
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
    stage = "zero3"
    if after_forward is not None and after_forward is not True:
        stage, note = "zero3_hpz", f" (within {after_forward}){note}"
    return ("hybrid" if "replicate" in roles else stage) + note


def _mesh(group: ParameterGroup) -> str:
    found = {}
    for bucket in group.buckets:
        own = len(bucket.mesh.roles)
        has_inner = any(param.sharded.device_mesh.ndim > own for param in bucket.params)  # type: ignore[attr-defined]
        found[_axes(bucket.mesh) + (" x tensor parallel" if has_inner else "")] = bucket
    return ", ".join(found) or _axes(group.mesh)


def _axes(mesh: ShardMesh) -> str:
    sizes = {"replicate": mesh.replicate_axis.world, "shard": mesh.shard_axis.world}
    return " x ".join(f"{role} {sizes[role]}" for role in mesh.roles)


def _dtypes(group: ParameterGroup) -> str:
    found = {}
    for bucket in group.buckets:
        where = f" on {bucket.storage.device.type}" if bucket.is_offloaded else ""
        for param in bucket.params:
            stored, computed = param.precision.stored, param.precision.computed
            found[f"{stored}{where}" + (f" -> {computed}" if computed != stored else "")] = param
    return "; ".join(found).replace("torch.", "")


def _not_managed(model: nn.Module, groups: Sequence[ParameterGroup]) -> dict[Tensor, str]:
    """The parameters of ``model`` that belong to no group, and their names."""
    sites = [site for group in groups for param in group.shards.params for site in param.sites]
    sites += [tie.site for group in groups for tie in group.ties]
    managed = {(site.module, site.name) for site in sites}
    left: dict[Tensor, str] = {}
    for module, prefix in names_in(model).items():
        for name, param in nn_modules.parameters(module).items():
            if param is not None and (module, name) not in managed:
                left.setdefault(param, joined(prefix, name))
    return left


def _traced(rows: Sequence[tuple[str, ParameterGroup]]) -> list[str]:
    """A table of what the last trace saw; nothing if there was none."""
    if not any(group.traced for _, group in rows):
        return []
    cells = [[name, *(figures_of(group.traced) if group.traced else [""] * 7)] for name, group in rows]
    return ["", "the last trace, on this rank", *ruled([HEAD, *cells], right=range(1, len(HEAD)))]
