"""A sharded model written as Hugging Face style safetensors files, by several ranks at once.

    rank 0   model-00001-of-00003.safetensors   model-00003-of-00003.safetensors
    model.safetensors.index.json rank 1   model-00002-of-00003.safetensors

Each tensor goes, full, to the rank that writes its file, and to no other. No file has its final name before
all of it is on the disk.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.arguments import check_bytes, check_floating, check_type
from shardwise.comm.full_tensors import batches, gather_full
from shardwise.layout.fqns import listed
from shardwise.layout.mesh import Axis
from shardwise.ranks.agreement import run_on_all_ranks
from shardwise.ranks.failures import monitored
from shardwise.ranks.model_ranks import axes_of_model, device_of_model, gather_from_all, is_first, own_rank
from shardwise.state.model_files import DTYPES, INDEX, SINGLE, import_safetensors
from shardwise.state.named_state import check_at_rest, each_once, entries_of

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
    """Write parameters and persistent buffers as safetensors, in the layout of Hugging Face.

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
