"""Full state in and out of a sharded model, one bucket at a time: nobody ever holds the model twice."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from os import PathLike
from typing import Any, overload

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise.runtime.mesh import Axis
from shardwise.runtime.spread import Spread, agreed_error, axes_of_model, device_of_model
from shardwise.runtime.transfer import BUCKET_BYTES, STAGING_BYTES, batches, full_values, gather_full
from shardwise.states.loading import (
    Facts,
    LoadReport,
    Pairs,
    Targets,
    Whole,
    load_everywhere,
    load_from_one,
    of_mapping,
)
from shardwise.states.meta_memory import give_memory, is_on_meta, refuse_lost
from shardwise.states.model_files import ModelFiles, Paths
from shardwise.states.names import canonical, check_at_rest, check_idle, entries_of, listed, parameters_of
from shardwise.states.optimizer_state import full_optimizer_state
from shardwise.states.partial_loads import clear_partly_loaded, mark_partly_loaded

State = dict[str, Any]
Source = Mapping[str, Any] | Iterable[tuple[str, Any]] | Paths | None


# --- out ------------------------------------------------------------------------------------------


@overload
def full_state_dict(
    model: nn.Module, optimizer: None = None, *, cpu: bool = True, rank0_only: bool = True
) -> State: ...
@overload
def full_state_dict(
    model: nn.Module, optimizer: torch.optim.Optimizer, *, cpu: bool = True, rank0_only: bool = True
) -> tuple[State, State]: ...


def full_state_dict(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    cpu: bool = True,
    rank0_only: bool = True,
) -> State | tuple[State, State]:
    """The state of ``model`` as plain PyTorch has it: full tensors, that a model which is not sharded loads.

    Names are those of the model without wrappers of ``torch.compile`` or activation checkpointing. Tied
    parameters stand under each of their names, as one tensor. All values are copies.

    Args:
        model: sharded, in parts or not at all; on any meshes.
        optimizer: its state is wanted as well, as a second dict ``{"state": ..., "param_groups": ...}`` by
            parameter name; :func:`rekey_optimizer_state_dict` turns names into the ids that an optimizer
            which is not sharded loads.
        cpu: bring each tensor to host memory as soon as it is full.
        rank0_only: only the first rank of the model gets them; all others get empty dicts.

    Returns:
        The dict, or with ``optimizer`` two of them.

    Raises:
        RuntimeError: called in a forward or backward, inside ``unsharded``, or on the meta device.

    Collective. Beside what is returned, needs a bucket of 64 MiB, or of the largest tensor, on each rank
    that gets the state, and less on the others.

    Example::

        state = full_state_dict(model)
        if dist.get_rank() == 0:
            torch.save(state, "model.pt")
    """
    check_at_rest(model, "full_state_dict")
    owner = _first_rank(model) if rank0_only else None
    entries = {entry.name: entry.value for entry in entries_of(model)}
    state = full_values(entries, owner, cpu)
    if optimizer is None:
        return state
    return state, full_optimizer_state(model, optimizer, owner, cpu)


def iter_full_parameters(
    model: nn.Module,
    bucket_bytes: int = BUCKET_BYTES,
    dtype: torch.dtype | None = None,
    names: Collection[str] | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Name and full value of one parameter after the other, on all ranks, gathered in buckets.

    For export, for weights on their way to an inference engine, for anything that looks at one parameter at
    a time. Values are copies on the device of the mesh; a bucket's memory is free once the caller has let go
    of what is in it.

    Args:
        model: sharded, in parts or not at all.
        bucket_bytes: what the full tensors gathered at once, and the buffers for it, may take together. A
            parameter that is larger comes alone.
        dtype: floating-point parameters are converted to it before they travel.
        names: which parameters, by canonical names; in the order of the model. None: all of them, tied ones
            once, under their first name.

    Raises:
        KeyError: the model has no parameter of one of the ``names``.
        ValueError: ``bucket_bytes`` is not above 0, or ``dtype`` is not of floating-point numbers.
        RuntimeError: called in a forward or backward, inside ``unsharded``, or on the meta device.

    Collective: all ranks go through it to the same point. Weights must not change on the way.

    Example::

        for name, weight in iter_full_parameters(model, dtype=torch.bfloat16):
            engine.update_weight(name, weight)
    """
    check_at_rest(model, "iter_full_parameters")
    if isinstance(bucket_bytes, bool) or not isinstance(bucket_bytes, int) or bucket_bytes <= 0:
        raise ValueError(f"iter_full_parameters: bucket_bytes is {bucket_bytes!r}; pass a number above 0.")
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ValueError(f"iter_full_parameters: dtype is {dtype!r}; pass a floating-point dtype, or None.")
    chosen = _chosen(model, names)
    return _full_parameters(chosen, bucket_bytes, dtype)


def _chosen(model: nn.Module, names: Collection[str] | None) -> list[tuple[str, nn.Parameter]]:
    every = list(parameters_of(model))
    if names is None:
        first: dict[int, tuple[str, nn.Parameter]] = {}
        for name, param in every:
            first.setdefault(id(param), (name, param))
        return list(first.values())
    if isinstance(names, str):
        raise TypeError("iter_full_parameters: names is a string; pass a collection of names.")
    if unknown := sorted(set(names) - {name for name, _ in every}):
        raise KeyError(f"iter_full_parameters: the model has no parameter named {listed(unknown)}.")
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
        bucket = gather_full(some, None, [dtypes[index] for index in batch], staging)
        for index in batch:
            full, bucket[index - batch.start] = bucket[index - batch.start], None  # held by the caller alone
            assert full is not None
            yield chosen[index][0], full
            del full


def _first_rank(model: nn.Module) -> int | None:
    """The global rank that is the first of the model's; None without a process group."""
    if not dist.is_initialized():
        return None
    spread = Spread(axes_of_model(model), None, device_of_model(model))
    return spread.object(dist.get_rank())


# --- in -------------------------------------------------------------------------------------------


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
        source: where the values are; one of

            - a dict of full tensors, on the rank ``src_rank``;
            - an iterable of ``(name, full tensor)``, on that rank, for values that are made or read one by
              one;
            - safetensors files: a file, an index, a folder with either, or a list of files. Every rank reads
              its own rows of them, and nothing is sent.

            Other ranks than ``src_rank`` pass None (or anything: it is not looked at).
        src_rank: the global rank whose dict or iterable counts. None: each rank has one and takes its rows
            from it; nothing is sent.
        strict: refuse names that are missing or too many. False reports them.
        convert_dtype: convert floating-point values to the dtype of the model. False refuses other dtypes.

    Returns:
        Names that were missing, unexpected or converted.

    Raises:
        RuntimeError: names, shapes or dtypes do not fit; the message lists them by name. Files that are
            missing or damaged, by name. An iterable that fails, or a source of another kind. All ranks raise
            alike.
        ValueError: ``src_rank`` is not among the ranks of the model.

    A dict and files are checked before anything is written: after such an error the model is unchanged. When
    an iterable fails on the way, the model is marked as partly loaded, and its forward refuses to run until
    a load has succeeded. Collective. Beside the source needs 64 MiB on each rank.

    Example::

        load_full_state_dict(model, torch.load("model.pt", mmap=True) if dist.get_rank() == 0 else None)
        load_full_state_dict(model, "path/to/hugging-face-model")
    """
    check_idle(model, "load_full_state_dict")
    axes, device = axes_of_model(model), device_of_model(model)
    load = _Load(model, axes, device, strict, convert_dtype)
    if _is_files(source):
        files = load.agreed(lambda: ModelFiles(source))  # type: ignore[arg-type]
        try:
            return load.everywhere(files.whole())
        finally:
            files.close()
    if src_rank is None:
        return load.everywhere(load.agreed(lambda: of_mapping(_as_mapping(source))))
    spread = Spread(axes, src_rank, device)
    return load.from_one(source, spread)


def _is_files(source: Any) -> bool:
    if isinstance(source, (str, PathLike)):
        return True
    return isinstance(source, (list, tuple)) and bool(source) and isinstance(source[0], (str, PathLike))


def _as_mapping(source: Any) -> Mapping[str, Any]:
    return source if isinstance(source, Mapping) else dict(_as_pairs(source))


def _as_pairs(source: Any) -> Pairs:
    """Name and value one after the other, with a message where something else comes."""
    if isinstance(source, Mapping):
        yield from source.items()
        return
    _check_iterable(source)
    for item in source:
        if not (isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str)):
            raise TypeError(f"load_full_state_dict: source gave a {type(item).__name__}, not (name, tensor).")
        yield item


class _Load:
    """One call of ``load_full_state_dict``."""

    def __init__(
        self, model: nn.Module, axes: list[Axis], device: torch.device, strict: bool, converts: bool
    ) -> None:
        self._model, self._axes, self._device = model, axes, device
        self._targets = Targets("load_full_state_dict", self._entries(), strict, converts)

    def _entries(self) -> dict[str, Any]:
        return {entry.name: entry for entry in entries_of(self._model)}

    def agreed(self, act: Any) -> Any:
        """What ``act`` gives, if it fails on no rank; else all raise."""
        found, error = None, None
        try:
            found = act()
        except Exception as caught:
            error = caught
        text = agreed_error(self._axes, self._device, None if error is None else str(error))
        if text is not None:
            raise RuntimeError(text) from error
        return found

    def everywhere(self, source: Whole) -> LoadReport:
        """Each rank reads its rows of a source that is checked first."""
        self._check(source.facts)
        try:
            self.agreed(lambda: load_everywhere(self._targets, source))
            self._finish()
        except Exception as error:
            mark_partly_loaded(self._model, str(error))
            raise
        return self._targets.report()

    def from_one(self, source: Any, spread: Spread) -> LoadReport:
        """One rank reads, and sends to the others."""
        facts = spread.object(_facts_of(source) if spread.holds else None)
        if isinstance(facts, str):
            raise RuntimeError(facts)
        if facts is not None:
            self._check(facts)
            self.agreed(lambda: self._check_ties(source) if spread.holds else None)
        else:
            self._give_memory()
        try:
            pairs = _as_pairs(source) if spread.holds else None
            load_from_one(self._targets, pairs, spread, self._device, BUCKET_BYTES)
            self._targets.check_complete()
            self._finish()
        except Exception as error:
            mark_partly_loaded(self._model, str(error))
            raise
        return self._targets.report()

    def _check(self, facts: Mapping[str, Facts]) -> None:
        """Before anything is written."""
        self._targets.expect(facts)
        self._targets.check_complete()
        self._give_memory()

    def _check_ties(self, source: Mapping[str, Any]) -> None:
        self._targets.refuse_broken_ties({canonical(name): value for name, value in source.items()})

    def _give_memory(self) -> None:
        """To what is on the meta device."""
        if is_on_meta(self._model):
            entries = self._targets.entries.values()
            refuse_lost(self._model, "load_full_state_dict", [entry.value for entry in entries])
            give_memory(self._model)
            self._targets.entries = self._entries()

    def _finish(self) -> None:
        """What only modules can put in place; then the model is whole."""
        if self._targets.whole:
            self._model.load_state_dict(self._targets.whole, strict=False)
        clear_partly_loaded(self._model)


def _facts_of(source: Any) -> dict[str, Facts] | str | None:
    """What is known of a source before it is read; None: nothing. A text: it is of no use."""
    try:
        if isinstance(source, Mapping):
            return dict(of_mapping(source).facts)
        _check_iterable(source)
    except (TypeError, ValueError) as error:
        return str(error)
    return None


def _check_iterable(source: Any) -> None:
    if not isinstance(source, Iterable):
        raise TypeError(
            f"load_full_state_dict: source is a {type(source).__name__} on the rank it is read from; pass a "
            "dict of full tensors, an iterable of (name, tensor), or the path of safetensors files."
        )
