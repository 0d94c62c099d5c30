"""Full state out of a sharded model, one bucket at a time, and full values into one: from one rank, from all
of them, or from files. No rank ever holds the model twice.

Before any value is written, all ranks agree on which values exist and whether they fit: a rank that raises
alone would leave the others waiting for it.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from os import PathLike, fspath
from typing import Any, TypeVar, overload

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise.arguments import check_bytes, check_flags, check_floating, check_module, check_rank
from shardwise.comm.full_tensors import (
    BUCKET_BYTES,
    STAGING_BYTES,
    batches,
    full_values,
    gather_full,
    own_region,
)
from shardwise.engine.module_state import module_states_at_rest
from shardwise.init.initialise import (
    give_memory,
    is_on_meta,
    mark_partly_loaded,
    note_complete_load,
    refuse_lost,
)
from shardwise.layout.fqns import listed
from shardwise.ranks.agreement import run_on_all_ranks
from shardwise.ranks.failures import monitor_of_job, monitored
from shardwise.ranks.model_ranks import Broadcast, axes_of_given, axes_of_model, device_of_model
from shardwise.state.loading import (
    FullSource,
    LoadReport,
    LoadTargets,
    Pairs,
    ShapeAndDtype,
    by_name,
    load_everywhere,
    load_from_one,
)
from shardwise.state.model_files import ModelFiles, Paths
from shardwise.state.named_state import check_at_rest, each_once, entries_of, named_parameters
from shardwise.state.optimizer_state import full_optimizer_state

State = dict[str, Any]
T = TypeVar("T")


@overload
def full_state_dict(
    model: nn.Module, optimizer: None = None, *, cpu: bool = True, rank0_only: bool = True
) -> State: ...
@overload
def full_state_dict(
    model: nn.Module, optimizer: torch.optim.Optimizer, *, cpu: bool = True, rank0_only: bool = True
) -> tuple[State, State]: ...


@monitored
def full_state_dict(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    cpu: bool = True,
    rank0_only: bool = True,
) -> State | tuple[State, State]:
    """The state of ``model`` as plain PyTorch has it: full tensors, that a model which is not sharded loads.

    Names are those of the model without wrappers of ``torch.compile`` or activation checkpointing. Tied
    parameters appear under each of their names, as one tensor. All values are copies.

    Args:
        model: sharded, in parts or not at all; on any meshes.
        optimizer: also return its state, as a second dict ``{"state": ..., "param_groups": ...}`` by
            parameter name. :func:`shardwise.state.rekey_optimizer_state_dict` turns names into the ids that
            an optimizer of a model that is not sharded loads.
        cpu: move each tensor to host memory as soon as it is full.
        rank0_only: only the first rank of the model gets them; all others get empty dicts.

    Returns:
        The dict, or with ``optimizer`` two of them.

    Raises:
        RuntimeError: called in a forward or backward, inside ``unsharded``, or on the meta device.

    Collective. In addition to the result, it needs a bucket of 64 MiB, or of the largest tensor, on each rank
    that gets the state, and less on the others.

    Example::

        state = full_state_dict(model)
        if dist.get_rank() == 0:
            torch.save(state, "model.pt")
    """

    def check() -> None:
        check_at_rest(model, "full_state_dict")
        check_flags("full_state_dict", cpu=cpu, rank0_only=rank0_only)

    told = {"rank0_only": rank0_only, "optimizer": "None" if optimizer is None else "an optimizer"}
    _check_together(model, check, "full_state_dict", told)
    owner = None
    if rank0_only and dist.is_initialized():  # the model's first rank
        owner = Broadcast(axes_of_model(model), None, device_of_model(model)).object(dist.get_rank())
    state = full_values({name: entry.value for name, entry in entries_of(model).items()}, owner, cpu)
    if optimizer is None:
        return state
    return state, full_optimizer_state(model, optimizer, owner, cpu)


@monitored
def iter_full_parameters(
    model: nn.Module,
    *,
    bucket_bytes: int = BUCKET_BYTES,
    dtype: torch.dtype | None = None,
    names: Collection[str] | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Iterate over names and full values of parameters, on all ranks, gathered in buckets.

    Use it to export weights, to send them to an inference engine, or to look at one parameter at a time.
    Values are copies on the device of the mesh. The memory of a bucket is free once the caller has dropped
    all values in it (a loop variable holds its last value while the next one is gathered).

    Args:
        model: sharded, in parts or not at all.
        bucket_bytes: the most memory for full tensors that are gathered at once, including buffers. A larger
            parameter is gathered alone.
        dtype: floating-point parameters are converted to it before they are sent.
        names: which parameters, by canonical names; in the order of the model. None: all of them, tied ones
            once, under their first name.

    Raises:
        TypeError: ``bucket_bytes`` is not an int.
        ValueError: the model has no parameter of one of the ``names``; ``bucket_bytes`` is not above 0, or
            ``dtype`` is not of floating-point numbers.
        RuntimeError: called in a forward or backward, inside ``unsharded``, or on the meta device.

    Collective: all ranks must iterate to the same point. Weights must not change meanwhile.

    Example::

        for name, weight in iter_full_parameters(model, dtype=torch.bfloat16):
            engine.update_weight(name, weight)
    """

    def check() -> list[tuple[str, nn.Parameter]]:
        check_at_rest(model, "iter_full_parameters")
        check_bytes("iter_full_parameters", "bucket_bytes", bucket_bytes)
        check_floating("iter_full_parameters", dtype)
        return _chosen(model, names)

    is_collection = isinstance(names, Collection) and not isinstance(names, str)
    same_names = sorted(map(str, names)) if is_collection else names  # type: ignore[arg-type]
    told = {"bucket_bytes": bucket_bytes, "dtype": dtype, "names": same_names}
    chosen = _check_together(model, check, "iter_full_parameters", told)
    return _full_parameters(chosen, bucket_bytes, dtype)


def _check_together(model: Any, check: Callable[[], T], caller: str, same: dict[str, Any]) -> T:
    """Check on all ranks: if one check fails, or arguments differ, all ranks raise."""
    check_module(caller, model)
    return run_on_all_ranks(axes_of_model(model), device_of_model(model), check, caller=caller, same=same)


def _chosen(model: nn.Module, names: Collection[str] | None) -> list[tuple[str, nn.Parameter]]:
    every = list(named_parameters(model))
    if names is None:
        return list(each_once(every).items())
    if isinstance(names, str):
        raise TypeError("iter_full_parameters: names is a string; pass a collection of names.")
    if unknown := sorted(set(names) - {name for name, _ in every}):
        raise ValueError(f"iter_full_parameters: the model has no parameter named {listed(unknown)}.")
    wanted = set(names)
    return [(name, param) for name, param in every if name in wanted]


def _full_parameters(
    chosen: list[tuple[str, nn.Parameter]], bucket_bytes: int, dtype: torch.dtype | None
) -> Iterator[tuple[str, Tensor]]:
    staging = min(STAGING_BYTES, bucket_bytes // 4)
    dtypes = [dtype if dtype and p.dtype.is_floating_point else p.dtype for _, p in chosen]
    params: list[Tensor] = [param for _, param in chosen]
    for batch in batches(params, bucket_bytes - 2 * staging, dtypes):
        some = [params[index] for index in batch]
        with monitor_of_job().call("iter_full_parameters", lambda: axes_of_given(params)):
            bucket = gather_full(some, None, [dtypes[index] for index in batch], staging)
        for index in batch:
            full, bucket[index - batch.start] = bucket[index - batch.start], None  # only the caller holds it
            assert full is not None
            yield chosen[index][0], full
            del full


Source = Mapping[str, Any] | Iterable[tuple[str, Any]] | Paths | None
CALLER = "load_full_state_dict"


@monitored
@torch.inference_mode(False)
@torch.no_grad()
def load_full_state_dict(
    model: nn.Module,
    source: Source,
    *,
    src_rank: int | None = 0,
    strict: bool = True,
    convert_dtype: bool = False,
) -> LoadReport:
    """Load full values into the shards of ``model``, in place and a bucket at a time.

    Args:
        model: sharded, in parts or not at all. Parameters on the meta device get memory first.
        source: on the rank ``src_rank``, a dict of full tensors, or an iterable of ``(name, full tensor)``,
            for values that you create or read one by one; or safetensors files: a file, an index, a folder
            with either, or a list of files, of which every rank reads its own rows, and nothing is sent.
            Other ranks pass None; their value is ignored.
        src_rank: the global rank whose ``source`` counts. None: each rank has its own source and reads its
            rows from it; nothing is sent.
        strict: raise an error for names that are missing or unexpected. False reports them.
        convert_dtype: convert floating-point values to the dtype of the model. False refuses other dtypes.

    Returns:
        A :class:`shardwise.state.LoadReport`: names that were missing, unexpected or converted.

    Raises:
        RuntimeError: names, shapes or dtypes do not fit, files are missing or damaged (the message lists them
            by name), or an iterable fails. All ranks raise the same error.
        RuntimeError, TypeError or ValueError: ``source`` is of another kind: the first with ``src_rank``, the
            others if each rank has a source.
        TypeError: ``model`` is not an nn.Module.
        ValueError: ``src_rank`` is not among the ranks of the model.

    A dict and files are checked before anything is written, so after an error the model is unchanged. If an
    iterable fails half-way, the model is marked as partly loaded, and its forward raises an error until a
    load has given it all values. Hooks of modules for ``load_state_dict`` run only for values that hooks have
    added to the state dict (and for ``set_extra_state``).

    Collective. Rows of large parameters sharded over one mesh dimension are sent directly to their place;
    others need a bucket of 64 MiB on each rank. Values that cannot be written directly into the model's
    memory (of tensor subclasses, and those that hooks of modules have added to the state dict) are held whole
    until the end.

    Example::

        load_full_state_dict(model, torch.load("model.pt", mmap=True) if dist.get_rank() == 0 else None)
        load_full_state_dict(model, "path/to/hugging-face-model")
    """
    check_module(CALLER, model)
    axes, device = axes_of_model(model), device_of_model(model)

    def check() -> None:
        module_states_at_rest(CALLER, model)
        check_rank(CALLER, "src_rank", src_rank)
        check_flags(CALLER, strict=strict, convert_dtype=convert_dtype)

    told = {"src_rank": src_rank, "strict": strict, "convert_dtype": convert_dtype}
    together = partial(run_on_all_ranks, axes, device)
    together(check, caller=CALLER, same=told)
    targets = LoadTargets(CALLER, entries_of(model), strict, convert_dtype)
    with ExitStack() as files:
        offer: Any = None
        if src_rank is not None:
            broadcast = Broadcast(axes, src_rank, device)
            own, offer = _offer_of(source) if broadcast.is_source else (None, None)
            offer = broadcast.object(offer)
        if isinstance(offer, str):
            raise RuntimeError(offer)
        if src_rank is None or isinstance(offer, list):
            full = together(lambda: _opened(offer or _in_form(source), files))
            return _load(
                model,
                targets,
                together,
                full.facts,
                lambda name: full.read(name, own_region(targets.entries[name].value)),
                lambda: together(lambda: load_everywhere(targets, full)),
            )

        def write() -> None:
            pairs = iter(own.items()) if isinstance(own, dict) else own
            load_from_one(targets, pairs, broadcast, device, BUCKET_BYTES)
            targets.refuse(targets.missing_problems())

        read = own.__getitem__ if isinstance(own, dict) else None
        return _load(model, targets, together, offer, read, write)


def _in_form(source: Any) -> list[str] | dict[str, Any] | Pairs:
    """Paths of files, full values by names, or pairs that come one by one."""
    if isinstance(source, (str, PathLike)):
        return [fspath(source)]
    if isinstance(source, (list, tuple)) and source and isinstance(source[0], (str, PathLike)):
        return [fspath(path) for path in source]
    if isinstance(source, Mapping):
        return by_name(source.items())
    if not isinstance(source, Iterable):
        raise TypeError(
            f"{CALLER}: source is of type {type(source).__name__} on the rank it is read from; pass a dict "
            "of full tensors, an iterable of (name, tensor), or the path of safetensors files."
        )
    pairs = map(_checked_pair, source)
    return by_name(pairs) if isinstance(source, (list, tuple)) else pairs


def _checked_pair(item: Any) -> tuple[str, Any]:
    if not (isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str)):
        raise TypeError(
            f"{CALLER}: source yielded something of type {type(item).__name__}, not (name, tensor)."
        )
    return item


def _offer_of(source: Any) -> tuple[Any, Any]:
    """The source in its form, and what its rank tells the others of it before anything is read: paths of
    files, what is known of the values, None of pairs that are to come, or why it is of no use.

    Never raises: the other ranks wait for it.
    """
    try:
        own = _in_form(source)
        if isinstance(own, dict):
            return own, {name: ShapeAndDtype.of(value) for name, value in own.items()}
        return own, own if isinstance(own, list) else None
    except Exception as error:
        return None, str(error) or type(error).__name__


def _opened(own: list[str] | dict[str, Any] | Pairs, files: ExitStack) -> FullSource:
    """Open a source that every rank has."""
    if isinstance(own, list):
        return ModelFiles(own[0] if len(own) == 1 else own, files)
    return FullSource(own if isinstance(own, dict) else by_name(own))


def _load(
    model: nn.Module,
    targets: LoadTargets,
    together: Callable[[Callable[[], Any]], Any],
    facts: Mapping[str, ShapeAndDtype] | None,
    read: Callable[[str], Any] | None,
    write: Callable[[], object],
) -> LoadReport:
    """Check all that is known, give memory, write values, and load what only modules can; a failure after
    the check marks the model. ``together`` runs on all ranks; ``read`` returns values that are here."""

    def check() -> None:
        if facts is not None:
            targets.expect(facts, is_all=True)
        refuse_lost(model, CALLER, [entry.value for entry in targets.entries.values()])
        if facts is not None and read is not None:
            targets.refuse_broken_ties(read)

    def give() -> None:
        if is_on_meta(model):
            give_memory(model)
            targets.entries = entries_of(model)

    together(check)
    try:
        together(give)
        write()
        if targets.whole:
            together(lambda: model.load_state_dict(targets.whole, strict=False))
    except Exception as error:
        mark_partly_loaded(model, str(error))
        raise
    if not targets.missing():
        note_complete_load(model)
    return targets.report()
