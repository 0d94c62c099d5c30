"""The weights in a checkpoint of DeepSpeed's ZeRO, and the state of its optimizer, read without DeepSpeed.

    mp_rank_00_model_states.pt                        stages 0 to 2: what the model computes with; buffers
    zero_pp_rank_R_mp_rank_00_model_states.pt         stage 3: buffers, rank R's part of frozen parameters
    [bf16_]zero_pp_rank_R_mp_rank_00_optim_states.pt  rank R's part of the float32 weights that were trained

In stages 1 and 2 the parameters of a param group lie back to back, and each rank has an equal part of that.
In stage 3 each parameter is cut into equal parts, and those of a rank lie back to back. Parts are padded at
the end. The optimizer's state of a flat part is cut like the part.

Seen in files of DeepSpeed 0.19.8.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from math import prod
from pathlib import Path
from typing import Any
from zipfile import BadZipFile, ZipFile

import torch
from torch import Tensor

from shardwise.checkpoint.manifest import unsafe_names
from shardwise.layout.fqns import clean, listed, listed_ranks, ranks_by_value
from shardwise.state.loading import own_name

_MODEL = re.compile(r"(?:zero_pp_rank_(?P<rank>\d+)_)?mp_rank_(?P<model_rank>\d+)_model_states\.pt")
_OPTIMIZER = re.compile(r"(?:bf16_)?zero_pp_rank_(?P<rank>\d+)_mp_rank_(?P<model_rank>\d+)_optim_states\.pt")
_OF_STAGE_3, _OF_STAGE_2 = "fp32_flat_groups", "single_partition_of_fp32_groups"
_OPTIMIZER_OF_STAGE_3, _OPTIMIZER_OF_STAGE_2 = "optimizer_state_dict", "base_optimizer_state"
_OF_FUSED_ADAM = {"step", "bias_correction"}  # in param groups; torch's Adam counts steps in its state

Shapes = Mapping[str, Sequence[int]]
Read = Callable[[], Tensor]


class _Unread:
    """Stands for an object of DeepSpeed's, whose contents are not needed."""

    def __init__(self, *args: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        pass


_CLASSES = (
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
)


def zero_folder(source: Path) -> Path | None:
    """The folder with the files of ``source``: itself, or the one that its file ``latest`` names."""
    latest = source / "latest"
    folder = source / latest.read_text().strip() if latest.is_file() else source
    if not folder.is_dir():
        raise ValueError(f"convert: {latest} names {folder}, which does not exist.")
    return folder if any(_MODEL.fullmatch(each.name) for each in folder.iterdir()) else None


class ZeroFiles:
    """A checkpoint of ZeRO: ``tensors`` of the model, on the meta device, and their values."""

    def __init__(self, folder: Path, verify: bool = True) -> None:
        """Map the files into memory. ``verify``: read each once before, to check the sums of its contents."""
        self._folder = folder
        models, optimizers = _by_rank(folder, _MODEL), _by_rank(folder, _OPTIMIZER)
        self._models = [_loaded(models[rank], verify) for rank in sorted(models)]
        is_cut = any(path.name.startswith("zero_pp_rank_") for path in models.values())  # of stage 3
        ranks = set(range(int(self._models[0].get("dp_world_size", 1))))
        self._refuse_others("model_states", models, ranks if is_cut else {0})
        self._refuse_others("optim_states", optimizers, ranks if is_cut or optimizers else set())
        saved = [_loaded(optimizers[rank], verify) for rank in sorted(optimizers)]
        self._parts = [each["optimizer_state_dict"] for each in saved]
        self._refuse_mixed("model_states", (each.get("global_steps") for each in self._models))
        self._refuse_mixed("optim_states", map(_steps_of, self._parts))
        self._reads: dict[str, Read] = {}
        self._keys: dict[str, str] = {}  # the names in the files, by those of the model
        self.tensors: dict[str, Tensor] = {}
        self._find()

    def read(self, name: str) -> Tensor:
        """The value of a tensor, in memory of its own."""
        return self._reads[name]()

    def _refuse_others(self, kind: str, files: dict[int, Path], ranks: set[int]) -> None:
        """Refuse the files of fewer ranks, or of more: each has a part of every weight."""
        if lost := ranks - files.keys():
            raise ValueError(
                f"convert: {self._folder} has no *_{kind}.pt of {listed_ranks(lost)} of {len(ranks)}, so a "
                "part of each weight is missing. Copy the files of all hosts into one folder."
            )
        if more := files.keys() - ranks:
            raise ValueError(
                f"convert: {self._folder} has *_{kind}.pt of {listed_ranks(more)}, but {len(ranks)} ranks "
                "saved it. Those files are of an earlier save; remove them."
            )

    def _refuse_mixed(self, kind: str, steps: Iterable[Any]) -> None:
        """Refuse files of different saves; ``steps``: of each rank, None if its file has none."""
        found = ranks_by_value((rank, step) for rank, step in enumerate(steps) if step is not None)
        if len(found) > 1:
            each = "; ".join(f"step {step:g} of {listed_ranks(ranks)}" for step, ranks in found.items())
            raise ValueError(
                f"convert: {self._folder} has *_{kind}.pt of different steps: {each}. Copy the files of one "
                "save from all hosts into one folder."
            )

    def _find(self) -> None:
        first, part = self._models[0], (self._parts or [{}])[0]
        tied = first.get("shared_params") or {}
        self._trained: Sequence[Shapes] = (self._parts and first.get("param_shapes")) or []
        self._is_stage_3 = _OF_STAGE_3 in part
        kind = _OF_STAGE_3 if self._is_stage_3 else _OF_STAGE_2
        if part and kind not in part:
            raise ValueError(f"convert: {self._folder} holds optimizer states of an unknown stage of ZeRO.")
        self._weights: list[Sequence[Tensor]] = [each[kind] for each in self._parts]  # by rank, flat
        for name, shape, read in self._cut(self._weights):
            self._add(name, shape, self._weights[0][0].dtype, read)
        for name, shape in ((self._is_stage_3 and first.get("frozen_param_shapes")) or {}).items():
            parts = [[each["frozen_param_fragments"][name]] for each in self._models]
            (_, _, read) = next(self._each_cut(parts, {name: shape}))
            self._add(name, shape, parts[0][0].dtype, read)
        buffers = first.get("buffer_names") or ()
        for name, value in first["module"].items():
            is_whole = isinstance(value, Tensor) and (name in buffers or not self._is_stage_3)
            if is_whole and self._keys.get(clean(name)) != name and name not in tied:
                self._add(name, value.shape, value.dtype, value.clone)

    def _add(self, name: str, shape: Sequence[int], dtype: torch.dtype, read: Read) -> None:
        name = own_name(name, self._keys, f"convert: {self._folder}")
        self._reads[name] = read
        self.tensors[name] = torch.empty(tuple(shape), dtype=dtype, device="meta")

    def _cut(self, flats: Sequence[Sequence[Tensor]]) -> Iterator[tuple[str, Sequence[int], Read]]:
        """What belongs to each trained parameter in ``flats``: by rank, a flat part of each group."""
        if self._is_stage_3:
            shapes = {name: shape for group in self._trained for name, shape in group.items()}
            yield from self._each_cut(flats, shapes)
        elif flats:
            paddings = self._parts[0].get("param_alignment_paddings")
            for index, group in enumerate(self._trained):
                own = paddings[index] if paddings else [0] * len(group)
                yield from self._back_to_back([each[index] for each in flats], group, own)

    def _each_cut(
        self, flats: Sequence[Sequence[Tensor]], shapes: Shapes
    ) -> Iterator[tuple[str, Sequence[int], Read]]:
        """Parameters that are cut, each into a part for each rank; ``flats``: the parts of each rank."""
        sizes = {name: -(-prod(shape) // len(flats)) for name, shape in shapes.items()}
        self._refuse_short(
            shapes, min(sum(part.numel() for part in parts) for parts in flats), sizes.values()
        )
        offset = 0
        for name, shape in shapes.items():
            pieces = [piece for parts in flats for piece in _stretch(parts, offset, sizes[name])]
            yield name, shape, partial(_joined, pieces, shape)
            offset += sizes[name]

    def _back_to_back(
        self, parts: Sequence[Tensor], shapes: Shapes, paddings: Sequence[int]
    ) -> Iterator[tuple[str, Sequence[int], Read]]:
        """A param group whose parameters lie back to back over all ranks, each with padding behind it."""
        sizes = [prod(shape) + padding for shape, padding in zip(shapes.values(), paddings, strict=True)]
        needed = [*sizes[:-1], sizes[-1] - paddings[-1]] if sizes else []
        self._refuse_short(shapes, sum(part.numel() for part in parts), needed)
        offset = 0
        for (name, shape), size in zip(shapes.items(), sizes, strict=True):
            yield name, shape, partial(_joined, list(_stretch(parts, offset, prod(shape))), shape)
            offset += size

    def _refuse_short(self, shapes: Shapes, found: int, needed: Iterable[int]) -> None:
        if found < sum(needed):
            raise ValueError(f"convert: {self._folder} is damaged: parts of {listed(shapes)} are too short.")

    # --- the optimizer ----------------------------------------------------------------------------

    @property
    def num_steps(self) -> int:
        """How many steps the optimizer has taken."""
        return int(self._models[0].get("global_steps", 0))

    def optimizer_state(self) -> tuple[dict[str, dict[str, Read]], list[dict[str, Any]]]:
        """The state of each trained parameter, by name, and the param groups, with names as ``params``."""
        kind = _OPTIMIZER_OF_STAGE_3 if self._is_stage_3 else _OPTIMIZER_OF_STAGE_2
        saved = [each.get(kind) for each in self._parts]
        if not saved or not all(isinstance(each, Mapping) for each in saved):
            raise NotImplementedError(
                f"convert: {self._folder} has no state of an optimizer as stages 1 to 3 save it, without "
                "elastic_checkpoint. Leave out --optimizer to convert the weights."
            )
        groups = [dict(group) for group in saved[0]["param_groups"]]
        for group in groups:
            for number in group["params"] if "step" in group else ():
                for each in saved:
                    each["state"].setdefault(number, {}).setdefault("step", group["step"])
            group["params"] = [clean(name) for number in group["params"] for name in self._trained[number]]
        groups = [{k: v for k, v in group.items() if k not in _OF_FUSED_ADAM} for group in groups]
        state: dict[str, dict[str, Read]] = {}
        numbers = range(len(self._trained))
        for key in dict.fromkeys(key for each in saved[0]["state"].values() for key in each):
            values = [[each["state"].get(number, {}).get(key) for number in numbers] for each in saved]
            for name, read in self._state_at(key, values):
                state.setdefault(clean(name), {})[key] = read
        return state, groups

    def _state_at(self, key: str, values: Sequence[Sequence[Any]]) -> Iterator[tuple[str, Read]]:
        """What belongs to each trained parameter in ``values``: by rank, one for each flat part."""
        flat = [value for each in values for value in each]
        weights = [part for each in self._weights for part in each]
        first_of_last = len(flat) - len(values[-1])  # of weights, the last rank leaves out padding
        if all(
            isinstance(value, Tensor)
            and value.dim() == 1
            and (value.numel() == part.numel() or (value.numel() > part.numel() and index >= first_of_last))
            for index, (value, part) in enumerate(zip(flat, weights, strict=True))
        ):
            yield from ((name, read) for name, _, read in self._cut(values))
        elif not any(isinstance(value, Tensor) and value.dim() for value in flat):  # a number, or nothing
            for group, value in zip(self._trained, values[0], strict=True):
                for name in group if value is not None else ():
                    yield name, partial(torch.tensor, float(value))
        else:
            raise NotImplementedError(
                f"convert: {self._folder} has '{key}' in the optimizer's state, of other shapes than the "
                "parameters, so it is unknown which part belongs to which. Leave out --optimizer."
            )


def _by_rank(folder: Path, pattern: re.Pattern[str]) -> dict[int, Path]:
    found = {each: match for each in folder.iterdir() if (match := pattern.fullmatch(each.name))}
    if any(int(match["model_rank"]) for match in found.values()) or any(folder.glob("layer_*")):
        raise NotImplementedError(
            f"convert: {folder} holds a model that was split by tensor or pipeline parallelism, or experts "
            "in files of their own. Only ZeRO on its own is supported. Have DeepSpeed write the weights "
            "itself (save_16bit_model, or its converter to universal checkpoints)."
        )
    ranks: dict[int, Path] = {}
    for path, match in sorted(found.items()):
        other = ranks.setdefault(int(match["rank"] or 0), path)
        if other is not path:
            raise ValueError(f"convert: {folder} has files of two saves: {other.name} and {path.name}.")
    return ranks


def _steps_of(part: Mapping[str, Any]) -> float | None:
    """How many steps an optimizer has taken, as its part of one rank has it."""
    saved = part.get(_OPTIMIZER_OF_STAGE_3, part.get(_OPTIMIZER_OF_STAGE_2))
    if not isinstance(saved, Mapping):
        return None
    holders = [*saved.get("param_groups", ()), *saved.get("state", {}).values()]
    return max((float(each["step"]) for each in holders if "step" in each), default=None)


def _loaded(path: Path, verify: bool) -> Any:
    if verify and (why := _why_damaged(path)):
        raise ValueError(
            f"convert: {path} is damaged: {why}. Copy it again, or convert an earlier checkpoint. "
            "verify=False reads it as it is."
        )
    with torch.serialization.safe_globals([(_Unread, name) for name in _CLASSES]):
        try:
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except Exception as error:
            others = [name for name in unsafe_names(path) if name not in _CLASSES]
            why = f"it may be damaged ({str(error).splitlines()[0]})."
            if others:
                why = f"making objects of {listed(others)} could run any code. Save without client_state."
            raise ValueError(f"convert: {path} cannot be read: {why}") from error


def _why_damaged(path: Path) -> str | None:
    """What differs from the sums that torch has saved with each part of a file."""
    try:
        with ZipFile(path) as archive:
            bad = archive.testzip()
    except (BadZipFile, EOFError, OSError, NotImplementedError) as error:
        return str(error)
    return None if bad is None else f"{bad} is not what was written"


def _stretch(parts: Sequence[Tensor], start: int, numel: int) -> Iterator[Tensor]:
    """The elements [start, start + numel) of ``parts``, one after the other."""
    for part in parts:
        end = min(part.numel(), start + numel)
        if numel and start < part.numel():
            yield part[start:end]
            numel -= end - start
        start = max(0, start - part.numel())


def _joined(pieces: Sequence[Tensor], shape: Sequence[int]) -> Tensor:
    return torch.cat([*pieces])[: prod(shape)].view(tuple(shape))
