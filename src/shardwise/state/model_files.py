"""Model files as Hugging Face has them: safetensors, one or several with an index.

They are read by slices, and written by several ranks at once:

    rank 0   model-00001-of-00003.safetensors   model-00003-of-00003.safetensors
             model.safetensors.index.json
    rank 1   model-00002-of-00003.safetensors

Each tensor goes, full, to the rank that writes its file, and to no other. No file has its final name before
all of it is on the disk.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from os import PathLike
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.arguments import check_bytes, check_floating, check_type
from shardwise.comm.full_tensors import batches, gather_full
from shardwise.layout.fqns import listed
from shardwise.layout.mesh import Axis
from shardwise.layout.regions import Region
from shardwise.ranks.agreement import run_on_all_ranks
from shardwise.ranks.failures import monitored
from shardwise.ranks.model_ranks import axes_of_model, device_of_model, gather_from_all, is_first, own_rank
from shardwise.state.loading import FullSource, ShapeAndDtype, own_name
from shardwise.state.named_state import check_at_rest, each_once, entries_of

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
        own = partial(own_name, keys={}, where=str(source))
        for path, expected in _files_of(source).items():
            self._open(path, expected, own)

    def _open(self, path: Path, expected: list[str] | None, own: Callable[[str], str]) -> None:
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
            raise RuntimeError(f"{path} lacks {', '.join(lost[:4])}, contrary to the index.")
        for key in there if expected is None else expected:
            piece, name = file.get_slice(key), own(key)
            if (dtype := piece.get_dtype()) not in DTYPES:
                raise RuntimeError(f"{path}: {key} has the dtype {dtype}, which torch does not have.")
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
                f"{index} names files outside of its folder: {listed(outside)}. The files of a model must be "
                "in the folder of the index. Put them there, and correct their names in the index."
            )
        for name, file in weight_map.items():
            names = files.setdefault(index.parent / file, [])
            assert names is not None
            names.append(name)
    except FileNotFoundError:
        raise RuntimeError(f"{index} does not exist.") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RuntimeError(
            f"{index} is not an index of safetensors files ({type(error).__name__}: {error})."
        ) from None
    return files


SHARD_BYTES = 1 << 30
"""The size of a file, and what a rank holds to write it."""


@monitored
def save_safetensors(
    model: nn.Module,
    directory: str | PathLike[str],
    *,
    max_shard_bytes: int = SHARD_BYTES,
    dtype: torch.dtype | None = None,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write parameters and persistent buffers as safetensors, in Hugging Face's layout.

    One file ``model.safetensors``, or several with an index, as ``from_pretrained`` and
    :func:`load_full_state_dict` read them. The ranks share the files among them and write at the same time.
    Tied parameters are written once, under their first name, as the format requires.

    Args:
        model: sharded, in parts or not at all.
        directory: a folder that all ranks see. It is created if it does not exist; other files in it stay.
        max_shard_bytes: size of a file, unless one tensor is larger. Each rank holds one file at a time.
        dtype: convert floating-point tensors to it.
        metadata: texts for the header of each file; ``{"format": "pt"}`` is always in it.

    Raises:
        FileExistsError: there are safetensors files in ``directory``.
        ImportError: the package ``safetensors`` is missing (``pip install 'shardwise[safetensors]'``).
        TypeError: a tensor has a dtype that the format does not support, ``directory`` is not a path, or
            ``max_shard_bytes`` is not an int.
        ValueError: ranks disagree on the arguments, ``max_shard_bytes`` is not above 0, or ``dtype`` is not
            floating-point.
        RuntimeError: called in a forward or backward, inside ``unsharded`` or on the meta device; or a rank
            could not write: all ranks raise the same error, and no file of the model is left in
            ``directory``.

    Collective.

    Example::

        save_safetensors(model, "out", dtype=torch.bfloat16)
    """
    axes, device = axes_of_model(model), device_of_model(model)

    def planned() -> tuple[dict[str, Tensor], list[ModelFile]]:
        check_at_rest(model, "save_safetensors")
        _check_arguments(directory, metadata)
        entries = entries_of(model).items()
        tensors = each_once((name, entry.value) for name, entry in entries if entry.is_tensor)
        return tensors, plan_files("save_safetensors", tensors, dtype, max_shard_bytes)

    tensors, files = run_on_all_ranks(axes, device, planned)
    told = {"directory": os.fspath(directory), "max_shard_bytes": max_shard_bytes, "dtype": dtype}
    told["metadata"] = sorted((metadata or {}).items())
    run_on_all_ranks(axes, device, lambda: None, caller="save_safetensors", same=told)
    ranks = list(gather_from_all(axes, None))

    def contents() -> Iterator[list[FileContents]]:
        for start in range(0, len(files), len(ranks)):
            own: list[FileContents] = []
            for file, rank in zip(files[start : start + len(ranks)], ranks, strict=False):
                wholes = gather_full([tensors[name] for name in file.names], rank, file.dtypes)
                if rank == own_rank():
                    on_host = [whole.cpu().contiguous() for whole in wholes if whole is not None]
                    own.append((file, dict(zip(file.names, on_host, strict=True))))
                del wholes
            yield own
            del own

    job = FileJob("save_safetensors", Path(directory), axes, device)
    job.run(files, contents(), {**(metadata or {}), "format": "pt"})


def sync(path: Path) -> None:
    """Write a file, or the names in a folder, through to the disk: it survives a power failure."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@dataclass(frozen=True)
class ModelFile:
    """One file: its tensors and their dtypes."""

    name: str
    names: Sequence[str]
    dtypes: Sequence[torch.dtype]
    num_bytes: int


FileContents = tuple[ModelFile, dict[str, Tensor]]


def _check_arguments(directory: Any, metadata: Any) -> None:
    check_type("save_safetensors", "directory", directory, "a folder, as a str or a Path", str, PathLike)
    if not isinstance(metadata, Mapping | None) or not all(
        isinstance(text, str) for pair in (metadata or {}).items() for text in pair
    ):
        raise ValueError(f"save_safetensors: metadata is {metadata!r}; names and values have to be strings.")


def plan_files(
    caller: str, tensors: dict[str, Tensor], dtype: torch.dtype | None, limit: int
) -> list[ModelFile]:
    """Distribute the tensors, in order, over files; floating-point ones become ``dtype``. Checks what is
    given.
    """
    check_bytes(caller, "max_shard_bytes", limit)
    check_floating(caller, dtype)
    import_safetensors()
    names, values = list(tensors), list(tensors.values())
    dtypes = [dtype if dtype and value.is_floating_point() else value.dtype for value in values]
    pairs = zip(names, dtypes, strict=True)
    if unknown := [f"{name} ({kind})" for name, kind in pairs if kind not in DTYPES.values()]:
        raise TypeError(f"{caller}: the format has no dtype for {listed(unknown)}.")
    cuts = list(batches(values, limit, dtypes))
    files = []
    for index, cut in enumerate(cuts):
        name = SINGLE if len(cuts) == 1 else f"model-{index + 1:05}-of-{len(cuts):05}.safetensors"
        num_bytes = sum(values[i].numel() * dtypes[i].itemsize for i in cut)
        files.append(ModelFile(name, [names[i] for i in cut], [dtypes[i] for i in cut], num_bytes))
    return files


class FileJob:
    """Writing the files of one model, on one rank."""

    def __init__(self, caller: str, directory: Path, axes: list[Axis], device: torch.device) -> None:
        self._caller = caller
        self._directory = directory
        self._partial = directory / ".model.partial"
        self._axes, self._device = axes, device
        self._is_first = is_first(axes)

    def run(
        self, files: list[ModelFile], contents: Iterator[list[FileContents]], header: dict[str, str]
    ) -> None:
        """Write ``files``; ``contents`` gives those that this rank writes next, as often on all ranks."""
        self._on_all_ranks(self._prepare)
        try:
            for own in contents:
                self._on_all_ranks(partial(self.write, own, header))
                del own
            self._on_all_ranks(partial(self._finish, files))
        except BaseException:
            self._clear()
            raise

    def _on_all_ranks(self, act: Callable[[], Any]) -> None:
        """Run ``act`` on all ranks; all raise if it fails on one."""

        def told() -> None:
            try:
                act()
            except FileExistsError:
                raise
            except OSError as error:
                free = ""
                if self._directory.exists():
                    free = f" {shutil.disk_usage(self._directory).free} bytes are free on its file system."
                raise RuntimeError(
                    f"{self._caller}: rank {own_rank()} cannot write to {self._directory} ({error}).{free}"
                ) from error

        run_on_all_ranks(self._axes, self._device, told, says_rank=False)

    def _prepare(self) -> None:
        """Make a folder for incomplete files; refuse those of another model, which could be confused."""
        if not self._is_first:
            return
        if found := sorted([*self._directory.glob("*.safetensors"), *self._directory.glob(INDEX)]):
            raise FileExistsError(
                f"{self._caller}: {self._directory} has {found[0].name} in it already, and two models in "
                "one folder could be mixed up. Choose an empty folder, or delete the old files first."
            )
        self._clear()  # of a save that died
        self._partial.mkdir(parents=True)

    def write(self, own: list[FileContents], header: dict[str, str]) -> None:
        """Write the files of this rank, and sync them to disk."""
        from safetensors.torch import save_file

        mode = self._partial.stat().st_mode & 0o666  # by the umask; save_file makes 0600
        for file, tensors in own:
            save_file(tensors, self._partial / file.name, header)
            (self._partial / file.name).chmod(mode)
            sync(self._partial / file.name)

    def _finish(self, files: list[ModelFile]) -> None:
        """Give the files their final names, the index last."""
        if not self._is_first:
            return
        if len(files) > 1:
            index = {
                "metadata": {"total_size": sum(file.num_bytes for file in files)},
                "weight_map": {name: file.name for file in files for name in file.names},
            }
            (self._partial / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
            sync(self._partial / INDEX)
        names = [*(file.name for file in files), *([INDEX] if len(files) > 1 else [])]
        try:
            for name in names:
                os.replace(self._partial / name, self._directory / name)
        except OSError:
            for name in names:
                (self._directory / name).unlink(missing_ok=True)
            raise
        self._partial.rmdir()
        sync(self._directory)

    def _clear(self) -> None:
        """Remove incomplete files after a failure."""
        shutil.rmtree(self._partial, ignore_errors=True)
