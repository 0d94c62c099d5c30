"""Full values into a sharded model, from one rank, from all of them, or from files.

First all ranks agree on which values exist and whether they fit, and only then write any: a rank that raises
alone would leave the others waiting for it.
"""

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from functools import partial
from os import PathLike, fspath
from typing import Any

import torch
from torch import nn

from shardwise.arguments import check_flags, check_module, check_rank
from shardwise.comm.full_tensors import BUCKET_BYTES, own_region
from shardwise.engine.module_state import module_states_at_rest
from shardwise.init.loads import (
    give_memory,
    is_on_meta,
    mark_partly_loaded,
    note_complete_load,
    refuse_lost,
)
from shardwise.ranks.agreement import run_on_all_ranks
from shardwise.ranks.failures import monitored
from shardwise.ranks.model_ranks import Broadcast, axes_of_model, device_of_model
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
from shardwise.state.named_state import entries_of

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
