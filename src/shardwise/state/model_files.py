"""Model files as Hugging Face writes them: safetensors, one or several with an index, read by slices."""

import json
from collections.abc import Iterable
from contextlib import ExitStack
from os import PathLike
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import torch

from shardwise.layout.fqns import clean, listed
from shardwise.layout.regions import Region
from shardwise.state.loading import FullSource, ShapeAndDtype

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

# The names of dtypes in the format.
DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "I32": torch.int32,
    "I64": torch.int64, "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64, "F16": torch.float16,
    "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2, "C64": torch.complex64,
}  # fmt: skip

Paths = str | PathLike[str] | Iterable[str | PathLike[str]]


def import_safetensors() -> Any:
    """Import safetensors, which is an optional dependency."""
    try:
        import safetensors
    except ImportError:
        raise ImportError(
            "safetensors files are read and written by the package safetensors, which is not installed: "
            "pip install 'shardwise[safetensors]'."
        ) from None
    return safetensors


class ModelFiles(FullSource):
    """Open safetensors files. Headers are read when they are opened, values slice by slice."""

    def __init__(self, source: Paths, stack: ExitStack) -> None:
        """``stack`` closes them."""
        super().__init__({})
        self._safetensors = import_safetensors()
        self._stack = stack
        self._slices: dict[str, tuple[Path, Any]] = {}
        for path, expected in _files_of(source).items():
            self._open(path, expected)

    def _open(self, path: Path, expected: list[str] | None) -> None:
        try:
            file: Any = self._stack.enter_context(self._safetensors.safe_open(path, framework="pt"))
        except FileNotFoundError:
            held = f", which should hold {', '.join((expected or ())[:4])} according to the index"
            held = "" if expected is None else held
            raise RuntimeError(f"{path} does not exist{held}. Was a part of the model not copied?") from None
        except Exception as error:
            raise RuntimeError(
                f"{path} cannot be read as safetensors ({error}): it is damaged, or was not written to its "
                "end."
            ) from None
        there = list(file.keys())
        if lost := [name for name in expected or () if name not in there]:
            raise RuntimeError(f"{path} does not hold {', '.join(lost[:4])}, which the index says is there.")
        for key in there if expected is None else expected:
            piece, name = file.get_slice(key), clean(key)
            if (dtype := piece.get_dtype()) not in DTYPES:
                raise RuntimeError(f"{path}: {key} is of the dtype {dtype}, for which torch has no tensors.")
            self._slices[name] = path, piece
            self.facts[name] = ShapeAndDtype(tuple(piece.get_shape()), DTYPES[dtype])

    def read(self, name: str, region: Region) -> torch.Tensor:
        """Read a part of a value."""
        path, piece = self._slices[name]
        try:
            return piece[region.slices] if region.sizes else piece[...]
        except Exception as error:
            raise RuntimeError(f"{path}: {name} cannot be read ({error}).") from None


def _files_of(source: Paths) -> dict[Path, list[str] | None]:
    """The files of a model, and the names that an index says are in each."""
    if not isinstance(source, (str, PathLike)):
        return {Path(path): None for path in source}
    path = Path(source)
    if path.is_dir():
        if (path / INDEX).exists():
            return _files_of_index(path / INDEX)
        if (path / SINGLE).exists():
            return {path / SINGLE: None}
        found = sorted(path.glob("*.safetensors"))
        if len(found) == 1:
            return {found[0]: None}
        others = f", but {len(found)} other safetensors files: pass those that belong together"
        raise RuntimeError(f"{path} has neither {INDEX} nor {SINGLE} in it{others if found else ''}.")
    return _files_of_index(path) if path.suffix == ".json" else {path: None}


def leaves_folder(name: Any) -> bool:
    """Whether a file name that an index gives would lead out of the index's own folder.

    As it is written: links that somebody has put into the folder are followed.
    """
    if not isinstance(name, str) or not name or "\0" in name:
        return True
    of_any_system = (PurePosixPath(name), PureWindowsPath(name))
    return any(path.anchor or ".." in path.parts for path in of_any_system)


def _files_of_index(index: Path) -> dict[Path, list[str] | None]:
    try:
        weight_map = json.loads(index.read_text())["weight_map"]
        files: dict[Path, list[str] | None] = {}
        if outside := sorted({repr(file) for file in weight_map.values() if leaves_folder(file)}):
            raise RuntimeError(
                f"{index} names files outside of its folder: {listed(outside)}. Files of a model are beside "
                "their index; put them there and name them so."
            )
        for name, file in weight_map.items():
            names = files.setdefault(index.parent / file, [])
            assert names is not None
            names.append(name)
    except FileNotFoundError:
        raise RuntimeError(f"{index} does not exist.") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RuntimeError(
            f"{index} is no index of safetensors files ({type(error).__name__}: {error})."
        ) from None
    return files
