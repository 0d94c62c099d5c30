"""What the hooks of a sharded module do where ``torch.compile`` traces them, inside a larger graph.

A module that is compiled on its own has its hooks outside of its graph: they run as ever. Where what is
compiled calls the module (a model its blocks, a function a model), its hooks are in the graph, and come here:

    before forward    full tensors are a function of the shards, and shadow them
    after forward     the shadows go
    backward          is what autograd makes of that function

Nothing of the eager runtime takes part: no buffers, no states, no recorded order. Both can alternate, since
the graph reads the registered shards and leaves gradients on them. Full parameters are plain tensors there,
no ``nn.Parameter`` and without attributes of the caller's, for dynamo can give a tensor neither.

What the graph could not do is refused: under ``fullgraph=True`` with the reason, else the graph breaks there
and the hooks run as ever.

The function, and its derivative::

    shards  --cast, flatten, concatenate-->  packed  --all-gather-->  (world, packed)  --cut-->  full tensors
    sums    <--cut--------- reduce-scatter, all-reduce, divide  <--pack--  full gradients, cast

One operator, ``shardwise::unshard``, made of ordinary ones: what compiles the graph sees those, with one
all-gather for all tensors of one dtype, and in backward one reduce-scatter for all gradients of one dtype.
It is given nothing but tensors and constants, knows no parameters and keeps no state. That it is an operator
makes dynamo leave it to autograd to run its derivative, so that a parameter that is not used gets no
gradient, instead of zeros.

World 2, weight (3, 2) and bias (3,), each rank's row of the packed buffer::

    rank 0   | w row 0, w row 1 | b 0, b 1 |        chunks of ceil(3 / 2) rows;
    rank 1   | w row 2, pad     | b 2, pad |        the full tensor is its first 3

In a graph a copy is cheap and a collective is not: compilers fuse the one with its neighbours and cannot
merge the others before they start. So, unlike in eager runs, large tensors are packed as well.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from shardwise.buckets.bucket import Bucket
from shardwise.comm.communicators import factor_before_sum
from shardwise.engine.module_state import ModuleState
from shardwise.groups.group import ParameterGroup, open_tie_message
from shardwise.groups.shards import meta_message
from shardwise.groups.states import DEFERRED
from shardwise.layout.chunks import chunk_size
from shardwise.layout.mesh import Axis
from shardwise.layout.nested import map_tensors
from shardwise.params.parameter import Param
from shardwise.torch_compat import dynamo

_SCHEMA = (
    "(Tensor[] shards, int[] sizes, int[] num_dims, int[] sharded_dims, int[] own_sizes, str[] computed, "
    "str[] reduced, Device device, int world, str? all_gather_group, str? reduce_group, "
    "str? replicate_group, float divisor) -> Tensor[]"
)


@dataclass(frozen=True)
class Piece:
    """One tensor: its full shape, which of its dims is sharded, and in which dtypes it travels.

    ``own_size``: what this rank has of the sharded dim. It stands in the graph as a number, because torch's
    caches of compiled graphs, which ranks share, tell DTensors apart by their full shapes only: a rank with
    fewer rows would be given the graph of one with more.
    """

    shape: tuple[int, ...]
    dim: int
    own_size: int
    computed: torch.dtype
    reduced: torch.dtype


@dataclass(frozen=True)
class Ways:
    """Between whom tensors travel, by names of process groups; None where there is no other rank.

    Gradients are divided by ``divisor`` once they are summed.
    """

    device: torch.device
    world: int
    all_gather_group: str | None
    reduce_group: str | None
    replicate_group: str | None
    divisor: float


def unshard(shards: Sequence[Tensor], pieces: Sequence[Piece], ways: Ways) -> list[Tensor]:
    """The full tensors of ``shards``, differentiable: gradients come back summed over all ranks."""
    return torch.ops.shardwise.unshard(  # type: ignore[no-any-return]
        list(shards),
        [size for piece in pieces for size in piece.shape],
        [len(piece.shape) for piece in pieces],
        [piece.dim for piece in pieces],
        [piece.own_size for piece in pieces],
        [str(piece.computed) for piece in pieces],
        [str(piece.reduced) for piece in pieces],
        ways.device,
        ways.world,
        ways.all_gather_group,
        ways.reduce_group,
        ways.replicate_group,
        ways.divisor,
    )


def _unshard(
    shards: Sequence[Tensor],
    sizes: Sequence[int],
    num_dims: Sequence[int],
    sharded_dims: Sequence[int],
    own_sizes: Sequence[int],
    computed: Sequence[str],
    reduced: Sequence[str],
    *ways: Any,
) -> list[Tensor]:
    """The operator: its arguments put together again."""
    dynamo.put_random_states_before_objects()  # the graph that it is traced into is cut next
    left = iter(sizes)
    shapes = [tuple(next(left) for _ in range(count)) for count in num_dims]
    dtypes = [[_dtype(name) for name in names] for names in (computed, reduced)]
    pieces = [Piece(*row) for row in zip(shapes, sharded_dims, own_sizes, *dtypes, strict=True)]
    return list(_Unsharded.apply(pieces, Ways(*ways), *shards))


def _dtype(name: str) -> torch.dtype:
    """From its name: lists of dtypes reach an operator as numbers."""
    return getattr(torch, name.removeprefix("torch."))  # type: ignore[no-any-return]


torch.library.define("shardwise::unshard", _SCHEMA)
# Composite: what traces it sees the operators that it is made of, and autograd those of its derivative.
torch.library.impl("shardwise::unshard", "CompositeImplicitAutograd", _unshard)


class _Unsharded(torch.autograd.Function):
    """Forward all-gathers; backward sums and scatters the gradients of what was used."""

    @staticmethod
    def forward(ctx: Any, pieces: list[Piece], ways: Ways, *shards: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)  # None stays None: of a parameter that was not used
        ctx.pieces, ctx.ways = pieces, ways
        ctx.kept = [(shard.device, shard.dtype) for shard in shards]
        fulls = _unsharded(shards, pieces, ways)
        wanted = ctx.needs_input_grad[2:]
        ctx.mark_non_differentiable(*(f for f, is_wanted in zip(fulls, wanted, strict=True) if not is_wanted))
        return tuple(fulls)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        found: list[Tensor | None] = [None] * len(gradients)
        for indices in _by_dtype([piece.reduced for piece in ctx.pieces], gradients):
            pieces = [ctx.pieces[index] for index in indices]
            present = [gradient for index in indices if (gradient := gradients[index]) is not None]
            for index, chunk in zip(indices, _reduce(present, pieces, ctx.ways), strict=True):
                found[index] = chunk.to(*ctx.kept[index])
        return (None, None, *found)


def _by_dtype(dtypes: Sequence[torch.dtype], values: Sequence[Any]) -> Iterator[list[int]]:
    """Indices of the values that are there, those of one dtype together."""
    there = [index for index, value in enumerate(values) if value is not None]
    for dtype in dict.fromkeys(dtypes[index] for index in there):
        yield [index for index in there if dtypes[index] is dtype]


def _unsharded(shards: Sequence[Tensor], pieces: Sequence[Piece], ways: Ways) -> list[Tensor]:
    casts = [shard.to(ways.device, p.computed) for shard, p in zip(shards, pieces, strict=True)]
    # A scalar is whole on every rank. What forward has been given must not be what it returns.
    fulls = [cast.view_as(cast) for cast in casts]
    if ways.all_gather_group is None:
        return fulls
    travelling = [cast if piece.shape else None for cast, piece in zip(casts, pieces, strict=True)]
    for indices in _by_dtype([piece.computed for piece in pieces], travelling):
        chunks = [_padded(casts[i], _chunk_shape(pieces[i], ways.world)) for i in indices]
        packed = torch.cat([chunk.reshape(-1) for chunk in chunks])
        rows = _all_gather(packed, ways.world, ways.all_gather_group)
        columns = rows.split([chunk.numel() for chunk in chunks], dim=1)
        for index, column in zip(indices, columns, strict=True):
            fulls[index] = _joined(column, pieces[index], ways.world)
    return fulls


def _all_gather(packed: Tensor, world: int, group: str) -> Tensor:
    """What all ranks have packed, one row each."""
    c10d = dynamo.functional_collectives
    rows = c10d.all_gather_into_tensor(packed, world, group)
    return c10d.wait_tensor(rows).view(world, -1)  # type: ignore[no-any-return]


def _reduce(gradients: Sequence[Tensor], pieces: Sequence[Piece], ways: Ways) -> list[Tensor]:
    """This rank's part of the averages of gradients of one dtype."""
    rows = [_cut(g.to(p.reduced), p, ways.world) for g, p in zip(gradients, pieces, strict=True)]
    summed = _sum(torch.cat(rows, dim=1).view(-1), ways)
    chunks = list(summed.split([row.shape[1] for row in rows]))
    scalars = [index for index, piece in enumerate(pieces) if not piece.shape]
    if scalars and ways.reduce_group is not None and ways.world > 2:
        # All ranks keep them, but may have added them up in different orders: the first one's count.
        own = torch.cat([chunks[index] for index in scalars])
        agreed = _all_gather(own, ways.world, ways.reduce_group)[0].split(1)
        for index, chunk in zip(scalars, agreed, strict=True):
            chunks[index] = chunk
    return [_own(chunk, piece, ways.world) for chunk, piece in zip(chunks, pieces, strict=True)]


def _sum(rows: Tensor, ways: Ways) -> Tensor:
    """This rank's row of the sum over all ranks, divided."""
    c10d = dynamo.functional_collectives
    before = factor_before_sum(rows.dtype, ways.divisor)
    summed = rows / before if before != 1 else rows
    if ways.reduce_group is not None:
        scattered = c10d.reduce_scatter_tensor(summed, "sum", ways.world, ways.reduce_group)
        summed = c10d.wait_tensor(scattered)
    if ways.replicate_group is not None:
        summed = c10d.wait_tensor(c10d.all_reduce(summed, "sum", ways.replicate_group))
    after = ways.divisor / before
    return summed / after if after != 1 else summed


def _chunk_shape(piece: Piece, world: int) -> tuple[int, ...]:
    """What a rank keeps at most."""
    if not piece.shape:
        return ()
    shape, dim = piece.shape, piece.dim
    return (*shape[:dim], chunk_size(shape[dim], world), *shape[dim + 1 :])


def _joined(rows: Tensor, piece: Piece, world: int) -> Tensor:
    """The full tensor, of the chunks of all ranks, one a row."""
    shape, dim = _chunk_shape(piece, world), piece.dim
    joined = rows.reshape(world, *shape).movedim(0, dim).flatten(dim, dim + 1)
    return joined.narrow(dim, 0, piece.shape[dim]).contiguous()


def _cut(full: Tensor, piece: Piece, world: int) -> Tensor:
    """The chunks of all ranks, one a row."""
    if not piece.shape:
        return full.reshape(1, 1).expand(world, 1)  # all ranks keep it
    dim, shape = piece.dim, _chunk_shape(piece, world)
    whole = _padded(full, (*shape[:dim], world * shape[dim], *shape[dim + 1 :]))
    return whole.unflatten(dim, (world, shape[dim])).movedim(dim, 0).reshape(world, -1)


def _padded(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """``tensor`` with zeros behind it, up to ``shape``."""
    if tuple(tensor.shape) == tuple(shape):
        return tensor
    padding = [n for size, own in zip(shape, tensor.shape, strict=True) for n in (size - own, 0)]
    return F.pad(tensor, padding[::-1])


def _own(chunk: Tensor, piece: Piece, world: int) -> Tensor:
    """What belongs to this rank of a flat chunk, padding aside."""
    whole = chunk.reshape(_chunk_shape(piece, world))
    return whole.narrow(piece.dim, 0, piece.own_size) if piece.shape else whole


# --- the hooks ------------------------------------------------------------------------------------


def before_forward(module_state: ModuleState, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Let the module see full tensors, and bring inputs to the device and dtype of the computation."""
    group = module_state.group
    is_root = group is module_state.root.group
    _refuse_in_graphs(module_state)
    unshards_again = module_state.root.reshards_after_forward(group) and torch.is_grad_enabled()
    reduce_groups = module_state.names_of_reduce_groups().splitlines()
    for bucket, reduce_group in zip(group.buckets, reduce_groups, strict=True):
        params = _params_of(module, group, bucket)
        ways = _ways(group, bucket, reduce_group)
        fulls = _full_tensors(ways, params, unshards_again)
        dynamo.allowed_in_checkpoints(_shadow, params, fulls)
    if is_root and group.device.type != "cpu":
        args, kwargs = map_tensors((args, kwargs), lambda t: t.to(group.device, non_blocking=True))
    return group.casts.inputs(args, kwargs) or (args, kwargs)


def after_forward(module_state: ModuleState, module: nn.Module, output: Any) -> Any:
    """Let the module see its shards again."""
    group = module_state.group
    for bucket in group.buckets:
        dynamo.allowed_in_checkpoints(_unshadow, _params_of(module, group, bucket))
    return group.casts.output(output)


def _params_of(module: nn.Module, group: ParameterGroup, bucket: Bucket) -> list[Param]:
    """Those that are unsharded for a call of ``module``: its own, where the group is of several modules."""
    if len(group.modules) == 1:
        return bucket.params
    inside = list(module.modules())
    return [p for p in bucket.params if any(site.module is m for site in p.sites for m in inside)]


def _full_tensors(ways: Ways, params: Sequence[Param], unshards_again: bool) -> list[Tensor]:
    shards = [_registered(param).to_local() for param in params]
    pieces = []
    for param, shard in zip(params, shards, strict=True):
        own_size = shard.shape[param.dim] if param.shape else 1
        dtypes = param.precision.computed, param.precision.reduced
        pieces.append(Piece(param.shape, param.dim, own_size, *dtypes))

    def unsharded(*shards: Tensor) -> list[Tensor]:
        return unshard(shards, pieces, ways)

    # Again in backward, by the mark of activation checkpointing, which the partitioners of AOTAutograd obey.
    # Uncompiled graphs (backend="eager") keep the tensors, for what uses them has saved them.
    if unshards_again:
        fulls: list[Tensor] = checkpoint(unsharded, *shards, use_reentrant=False)
    else:
        fulls = unsharded(*shards)
    return [param.as_seen_in_graphs(full) for param, full in zip(params, fulls, strict=True)]


def _ways(group: ParameterGroup, bucket: Bucket, reduce_group: str) -> Ways:
    mesh = bucket.mesh
    if group.settings.separate_reduce_group is False:  # read here, so that a graph ends with the choice
        reduce_group = ""
    return Ways(
        group.device,
        mesh.shard_axis.world,
        _name(mesh.shard_axis),
        reduce_group or _name(mesh.shard_axis),
        _name(mesh.replicate_axis),
        group.settings.divide_factor or float(mesh.num_ranks),
    )


def _name(axis: Axis) -> str | None:
    return None if axis.pg is None or axis.is_alone else axis.pg.group_name


def _registered(param: Param) -> DTensor:
    """What stands in the module now: it may have been replaced since the last eager forward."""
    site = param.sites[0]
    found = site.registered()
    if not isinstance(found, DTensor) or dynamo.is_shadowed(site.module, site.name):
        dynamo.refuse_graph(
            f"{param.fqn}: a graph is being compiled that unshards this parameter, but a full one stands "
            "where its shard should: inside unsharded(), after unshard(), or where a module calls itself. "
            "Leave the context, or call reshard(), before the first compiled forward."
        )
    assert isinstance(found, DTensor)
    if found is not param.sharded and not dynamo.RESTORES_ALL_IN_GRAPHS:
        dynamo.refuse_graph(
            f"{param.fqn}: another parameter was put in its place since the last eager forward, and a "
            f"graph of torch {torch.__version__} would put back the one before. Run one forward uncompiled, "
            "or use load_state_dict(assign=True)."
        )
    return found


def _shadow(params: Sequence[Param], fulls: Sequence[Tensor]) -> None:
    for param, full in zip(params, fulls, strict=True):
        for site in param.sites:
            dynamo.shadow_in_graph(site.module, site.name, full)


def _unshadow(params: Sequence[Param]) -> None:
    for param in params:
        for site in param.sites:
            dynamo.unshadow_in_graph(site.module, site.name, param.sharded)


# --- what is not possible -------------------------------------------------------------------------


def _refuse_in_graphs(module_state: ModuleState) -> None:
    """Break the graph where it would not do what the caller has asked for."""
    if reason := _about_model(module_state):
        dynamo.refuse_graph(reason)
    if asked := _asked_in_vain(module_state):
        dynamo.refuse_graph(
            f"{module_state.group.name}: {asked}. The graph of a whole model does not do that. Leave it out, "
            "or compile the sharded modules one by one (module.compile()), not the one around them: their "
            "hooks are then outside of their graphs, and do all that they do in eager runs."
        )


def _about_model(module_state: ModuleState) -> str:
    """What eager runs refuse as well, when they begin or at the end of a forward: the whole message."""
    group = module_state.group
    if group.ties:  # without a look at what they are tied to, which dynamo would ask for its gradient
        return open_tie_message(group.ties[0].site.fqn, "a parameter that")
    try:
        group.refuse_partly_loaded()
        if not group.added.is_untouched_in_graph():
            group.refuse_added(module_state.root.lazy_init.module_names())
    except RuntimeError as error:
        return str(error)
    # As the modules have them: of tensors that it meets elsewhere first, dynamo takes the sizes for dynamic.
    standing = [(param.fqn, param.sites[0].registered()) for param in group.shards.params]
    if names := [fqn for fqn, tensor in standing if tensor is not None and tensor.is_meta]:
        return f"Cannot run forward: {meta_message(names)}"
    return ""


def _asked_in_vain(module_state: ModuleState) -> str:
    """What was asked of the group that a graph does not do; empty if all of it can be done."""
    group, settings = module_state.group, module_state.group.settings
    if not module_state.root.ranks_run_alike:
        return "parameters stay unsharded inside inference()"
    if module_state.root.post_optim_event is not None:
        return "all-gathers wait for the event of set_post_optim_event()"
    if torch.is_grad_enabled():
        if not settings.requires_gradient_sync:
            return "gradients are to stay unreduced (no_sync)"
        if not settings.requires_all_reduce and group.shards.are_replicated:
            return "gradients are not to be summed over replicas (set_requires_all_reduce)"
        if group.gradients.state is DEFERRED:
            return "gradients of earlier backwards wait to be reduced together with these"
        if settings.ranks_that_keep is not None:
            return f"reshard_after_forward={settings.ranks_that_keep} keeps parameters among a few ranks"
        if settings.ranks_may_differ:
            return "ranks were said to differ in what they use"
        if settings.all_reduce_hook is not None or settings.averages_ignored:
            return "set_all_reduce_hook() or set_reduce_ignored_params() was called"
    for bucket in group.buckets:
        if asked := _asked_of_bucket(bucket):
            return asked
    return ""


def _asked_of_bucket(bucket: Bucket) -> str:
    options = bucket.communication.options
    if type(bucket) is not Bucket:
        return "its parameters are tensor subclasses that define their own all-gather"
    quantized = bucket.policy.quantized_all_gather
    own = (options.make_all_gather, options.make_reduce_scatter, options.make_all_reduce, quantized)
    if any(each is not None for each in own):  # torch 2.11 cannot trace whether a partial is true
        return (
            "it was given collectives or memory of its own (set_custom_all_gather, "
            "set_custom_reduce_scatter, register_comm_hook, quantized_all_gather, or an allocator)"
        )
    for param in bucket.params:
        precision = param.precision
        if param.has_own_class:
            return f"{param.fqn} is of a class of its own, not nn.Parameter"
        if param.has_original_hooks:
            return f"{param.fqn} had hooks for its full gradient before fully_shard"
        if precision.accumulated not in (precision.computed, precision.reduced):
            return f"gradients of {param.fqn} are to add up in {precision.accumulated} (accumulate_dtype)"
        if precision.kept != precision.stored:
            return f"gradients of {param.fqn} are kept in {precision.kept} (keep_low_precision_grads)"
        if param.is_tensor_parallel and param.mesh.full_mesh is not None:
            return f"{param.fqn} is a DTensor on the whole mesh, so that its gradient would be summed twice"
    return ""
