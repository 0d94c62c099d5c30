"""The weights in a checkpoint of DeepSpeed's ZeRO, read without DeepSpeed.

    mp_rank_00_model_states.pt                        stages 0 to 2: what the model computes with; buffers
    zero_pp_rank_R_mp_rank_00_model_states.pt         stage 3: buffers, rank R's part of frozen parameters
    [bf16_]zero_pp_rank_R_mp_rank_00_optim_states.pt  rank R's part of the float32 weights that were trained

In stages 1 and 2 the parameters of a param group lie back to back, and each rank has an equal part of that.
In stage 3 each parameter is cut into equal parts, and those of a rank lie back to back. Parts are padded at
the end.

Seen in files of DeepSpeed 0.19.8.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwise.checkpoint.manifest import unsafe_names
from shardwise.layout.fqns import clean, listed, listed_ranks

_MODEL = re.compile(r"(?:zero_pp_rank_(?P<rank>\d+)_)?mp_rank_(?P<model_rank>\d+)_model_states\.pt")
_OPTIMIZER = re.compile(r"(?:bf16_)?zero_pp_rank_(?P<rank>\d+)_mp_rank_(?P<model_rank>\d+)_optim_states\.pt")
_OF_STAGE_3, _OF_STAGE_2 = "fp32_flat_groups", "single_partition_of_fp32_groups"


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
    """A checkpoint of ZeRO: ``tensors``, on the meta device, and their values."""

    def __init__(self, folder: Path) -> None:
        """Map the files into memory."""
        self._folder = folder
        models, optimizers = _by_rank(folder, _MODEL), _by_rank(folder, _OPTIMIZER)
        self._models = [_loaded(models[rank]) for rank in sorted(models)]
        is_cut = any(path.name.startswith("zero_pp_rank_") for path in models.values())  # of stage 3
        ranks = set(range(int(self._models[0].get("dp_world_size", 1))))
        self._refuse_others("model_states", models, ranks if is_cut else {0})
        self._refuse_others("optim_states", optimizers, ranks if is_cut or optimizers else set())
        self._parts = [_loaded(optimizers[rank])["optimizer_state_dict"] for rank in sorted(optimizers)]
        self._reads: dict[str, Callable[[], Tensor]] = {}
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

    def _find(self) -> None:
        first, part = self._models[0], (self._parts or [{}])[0]
        tied = first.get("shared_params") or {}
        trained = [] if first.get("param_shapes") is None or not self._parts else first["param_shapes"]
        if _OF_STAGE_3 in part:
            flats = [each[_OF_STAGE_3] for each in self._parts]
            self._add_cut(flats, {name: shape for group in trained for name, shape in group.items()})
            for name, shape in (first.get("frozen_param_shapes") or {}).items():
                self._add_cut(
                    [[each["frozen_param_fragments"][name]] for each in self._models], {name: shape}
                )
        elif _OF_STAGE_2 in part:
            self._add_back_to_back(trained, part.get("param_alignment_paddings"))
        elif part:
            raise ValueError(f"convert: {self._folder} holds optimizer states of an unknown stage of ZeRO.")
        buffers = first.get("buffer_names") or ()
        for name, value in first["module"].items():
            is_whole = isinstance(value, Tensor) and (name in buffers or _OF_STAGE_3 not in part)
            if is_whole and name not in self.tensors and name not in tied:
                self._add(name, value.shape, value.dtype, value.clone)

    def _add(self, name: str, shape: Sequence[int], dtype: torch.dtype, read: Callable[[], Tensor]) -> None:
        name = clean(name)
        self._reads[name] = read
        self.tensors[name] = torch.empty(tuple(shape), dtype=dtype, device="meta")

    def _add_cut(self, flats: Sequence[Sequence[Tensor]], shapes: dict[str, Sequence[int]]) -> None:
        """Parameters that are cut, each into a part for each rank; ``flats``: the parts of each rank."""
        offset = 0
        for name, shape in shapes.items():
            size = -(-prod(shape) // len(flats))
            pieces = [piece for parts in flats for piece in _stretch(parts, offset, size)]
            self._add(name, shape, flats[0][0].dtype, partial(_joined, pieces, shape))
            offset += size
        if any(sum(part.numel() for part in parts) < offset for parts in flats):
            raise ValueError(f"convert: {self._folder} is damaged: parts of {listed(shapes)} are too short.")

    def _add_back_to_back(self, groups: Sequence[dict[str, Sequence[int]]], paddings: Any) -> None:
        """Param groups whose parameters lie back to back over all ranks."""
        for index, group in enumerate(groups):
            parts = [each[_OF_STAGE_2][index] for each in self._parts]
            own, offset = paddings[index] if paddings else [0] * len(group), 0
            for (name, shape), padding in zip(group.items(), own, strict=True):
                pieces = list(_stretch(parts, offset, prod(shape)))
                self._add(name, shape, parts[0].dtype, partial(_joined, pieces, shape))
                offset += prod(shape) + padding
            if offset - sum(own[-1:]) > sum(part.numel() for part in parts):
                raise ValueError(
                    f"convert: {self._folder} is damaged: parts of {listed(group)} are too short."
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


def _loaded(path: Path) -> Any:
    with torch.serialization.safe_globals([(_Unread, name) for name in _CLASSES]):
        try:
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except Exception as error:
            others = [name for name in unsafe_names(path) if name not in _CLASSES]
            why = f"it may be damaged ({str(error).splitlines()[0]})."
            if others:
                why = f"making objects of {listed(others)} could run any code. Save without client_state."
            raise ValueError(f"convert: {path} cannot be read: {why}") from error


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
