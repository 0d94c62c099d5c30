"""What a checkpoint says it holds, against what a model wants: all that can be known before reading.

Names and shapes only; nothing here changes a model, and nothing communicates.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwise.checkpoints import folders
from shardwise.states.names import listed

Place = tuple[str | int, ...]  # where a value stands in nested dicts and lists


@dataclass
class Manifest:
    """The `.metadata` of a checkpoint, by what it tells about."""

    path: Path
    metadata: Any  # torch.distributed.checkpoint.metadata.Metadata
    places: dict[Place, str] = field(default_factory=dict)  # -> key in the checkpoint

    @classmethod
    def read(cls, path: Path) -> "Manifest":
        """Read it.

        Raises:
            ValueError: it cannot be read.
        """
        from torch.distributed.checkpoint import FileSystemReader
        from torch.distributed.checkpoint.metadata import Metadata

        file = path / folders.METADATA
        try:
            metadata = FileSystemReader(path).read_metadata()
        except Exception as error:  # pickle raises whatever the bytes happen to say
            raise ValueError(
                f"{file} cannot be read ({type(error).__name__}: {error}). It was damaged after it was "
                "written, or by another program; load an earlier checkpoint."
            ) from error
        if not isinstance(metadata, Metadata) or metadata.storage_data is None:
            raise ValueError(f"{file} holds a {type(metadata).__name__}, not the index of a checkpoint.")
        paths = metadata.planner_data or {}
        places = {tuple(paths.get(key, (key,))): key for key in metadata.state_dict_metadata}
        return cls(path, metadata, places)

    def under(self, *start: str | int) -> dict[Place, str]:
        """The keys of everything below `start`, by their place below it."""
        depth = len(start)
        return {place[depth:]: key for place, key in self.places.items() if place[:depth] == start}

    def tensor(self, key: str) -> Any:
        """The shape and dtype of the tensor `key`; None: it is something else."""
        found = self.metadata.state_dict_metadata[key]
        return found if hasattr(found, "properties") else None

    def check_files(self) -> None:
        """Every file is there and as long as it should be.

        Raises:
            ValueError: some are not, by name.
        """
        needed: dict[str, int] = {}
        for info in self.metadata.storage_data.values():
            end = info.offset + info.length
            needed[info.relative_path] = max(end, needed.get(info.relative_path, 0))
        wrong = []
        for name, length in sorted(needed.items()):
            file = self.path / name
            if not file.is_file():
                wrong.append(f"{name} is missing")
            elif file.stat().st_size < length:
                wrong.append(f"{name} has {file.stat().st_size} bytes, of at least {length}")
        if wrong:
            raise ValueError(
                f"{self.path} is damaged: {listed(wrong)}. What was in them is lost; load an earlier "
                "checkpoint. If ranks are on several hosts, the path must be on a file system that all of "
                "them share."
            )


def by_first(entries: dict[Place, str]) -> dict[str, dict[Place, str]]:
    """Keys by the first part of their place: the name of a parameter, say."""
    found: dict[str, dict[Place, str]] = {}
    for (first, *rest), key in ((place, key) for place, key in entries.items() if place):
        found.setdefault(str(first), {})[tuple(rest)] = key
    return found


def nested(values: dict[Place, Any]) -> Any:
    """Values by their places, as the nested dicts they came from."""
    if () in values:
        return values[()]
    below: dict[str | int, dict[Place, Any]] = {}
    for (first, *rest), value in values.items():
        below.setdefault(first, {})[tuple(rest)] = value
    built = {key: nested(each) for key, each in below.items()}
    if all(isinstance(key, int) for key in built):
        return [built[index] for index in sorted(built)]
    return built


# --- the model ------------------------------------------------------------------------------------


def check_model(
    manifest: Manifest,
    wanted: dict[str, Any],
    ties: dict[str, list[str]],
    all_names: set[str],
    strict: bool,
    convert_dtype: bool,
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What the checkpoint lacks of `wanted`, and what it has beyond `all_names`, those of all ranks.

    `ties`: all names of a tied parameter, by each of them; one of them is enough.

    Raises:
        ValueError: shapes or dtypes differ; names differ and `strict` is True.
    """
    saved = by_first(manifest.under("model"))
    if not saved:
        tops = {str(place[0]) for place in manifest.places}
        raise ValueError(
            f"{manifest.path} holds no model: its keys are {listed(sorted(tops))}, and not 'model'. It was "
            "written by another recipe; read it with torch.distributed.checkpoint, and give it to the model "
            "by hand."
        )
    shapes, dtypes = [], []
    for name, value in wanted.items():
        md = manifest.tensor(saved[name][()]) if () in saved.get(name, {}) else None
        if not isinstance(value, Tensor) or name not in saved or is_extra_state(name):
            continue
        if md is None:
            shapes.append(f"{name} is no tensor there")
        elif md.size != value.shape:
            shapes.append(f"{name} is {tuple(md.size)} there and {tuple(value.shape)} here")
        elif md.properties.dtype != value.dtype:
            dtypes.append(f"{name} is {_plain(md.properties.dtype)} there and {_plain(value.dtype)} here")
    missing = tuple(
        name
        for name, value in wanted.items()
        # An empty dict, which a module may save beside tensors, has no key in a checkpoint.
        if not any(tied in saved for tied in ties.get(name, [name])) and not _is_empty(value)
    )
    unexpected = tuple(name for name in saved if name not in all_names)
    lines = [f"shapes differ: {listed(shapes)}"] if shapes else []
    if strict:
        lines += [f"missing in the checkpoint: {counted(missing)}"] if missing else []
        lines += [f"unknown to the model: {counted(unexpected)}"] if unexpected else []
    if lines:
        advice = "" if shapes else " strict=False loads the rest and reports these."
        raise ValueError(
            f"{manifest.path} is a checkpoint of another model; {'; '.join(lines)}. Nothing was "
            f"loaded.{advice}"
        )
    if empty := [name for name in missing if isinstance(wanted[name], Tensor) and wanted[name].is_meta]:
        raise ValueError(
            f"{manifest.path}: {listed(empty)} are missing in the checkpoint, and without values in the "
            "model. Call shardwise.materialize(model) before loading."
        )
    if dtypes and not convert_dtype:
        raise ValueError(
            f"{manifest.path}: dtypes differ: {listed(dtypes)}. Loading would round or widen without a word; "
            "pass convert_dtype=True if that is meant, or make the model in the dtype of the checkpoint."
        )
    return missing, unexpected


def is_extra_state(name: str) -> bool:
    """Whether a module saves it beside its tensors; as a tensor too, it has the length it happens to need."""
    return name.rpartition(".")[2] == "_extra_state"


def _is_empty(value: Any) -> bool:
    return isinstance(value, dict) and not value


def counted(names: Iterable[str]) -> str:
    """The first of `names`, and their number."""
    names = list(names)
    return f"{listed(names)} ({len(names)} in all)" if len(names) > 1 else listed(names)


def _plain(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
