"""Conversions between checkpoints and model files: by one process, in the memory of one file."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from shardwise.checkpoint import folders
from shardwise.checkpoint.load import opened
from shardwise.checkpoint.manifest import HAS_DIGESTS, INFO, Manifest, read_objects
from shardwise.checkpoint.save import write
from shardwise.checkpoint.stateful import STATES
from shardwise.checkpoint.zero_files import ZeroFiles
from shardwise.layout.fqns import listed
from shardwise.layout.regions import Region
from shardwise.ranks.agreement import RankGroup
from shardwise.state.loading import own_name
from shardwise.state.model_files import SHARD_BYTES, FileContents, FileJob, ModelFiles, plan_files

MODEL_KEYS = ("model", "app.model", "state_dict", "module")
"""Where programs put the model in a checkpoint of ``torch.distributed.checkpoint``, if not at the top."""


def to_safetensors(
    source: Path,
    directory: Path,
    *,
    key: str | None = None,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = SHARD_BYTES,
    verify: bool = True,
) -> list[str]:
    """Write the model of a checkpoint in Hugging Face's layout; return the names of what was left out.

    Args:
        source: a folder that ``save_checkpoint`` or ``torch.distributed.checkpoint`` wrote, on any number of
            ranks, with any sharding.
        directory: a folder without safetensors files; it is made if it is not there.
        key: the place of the model in the checkpoint, with dots; "": the tensors at its top; None: the first
            of ``MODEL_KEYS`` that is there, or else the top.
        dtype: convert floating-point tensors to it.
        max_shard_bytes: size of a file, unless one tensor is larger; what is in memory at a time.
        verify: check the digests of what is read, where the checkpoint has them.
    """
    with ExitStack() as stack:
        manifest = opened(stack, source, verify, trust=False)
        manifest.check()
        keys = _keys_of_model(manifest, key)
        tensors = {
            name: torch.empty(md.size, dtype=md.properties.dtype, device="meta")
            for name, at in keys.items()
            if (md := manifest.tensor(at)) is not None and "_extra_state" not in name.split(".")
        }

        def read(names: Sequence[str]) -> list[Tensor]:
            found = read_objects(manifest, [keys[name] for name in names], verify, trust=False)
            return [found.pop(keys[name]) for name in names]

        _write(directory, tensors, read, dtype, max_shard_bytes)
    return [name for name in keys if name not in tensors]


def zero_to_safetensors(
    source: Path,
    directory: Path,
    *,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = SHARD_BYTES,
    verify: bool = True,
) -> None:
    """Write the weights of a checkpoint of DeepSpeed's ZeRO: the trained ones as the optimizer has them, in
    float32, frozen ones and buffers as the model has them. Tied parameters are written once.
    """
    files = ZeroFiles(source, verify)
    _write(
        directory, files.tensors, lambda names: [files.read(name) for name in names], dtype, max_shard_bytes
    )


def zero_to_checkpoint(source: Path, path: Path, verify: bool = True) -> None:
    """Write a checkpoint at ``path`` with the weights of a checkpoint of DeepSpeed's ZeRO, as
    ``zero_to_safetensors`` finds them, the state of its optimizer, and ``shared={"step": ...}``.

    They are put together in temporary files that are mapped into memory, beside ``path``.
    """
    _check_target(path)
    files = ZeroFiles(source, verify)
    state, groups = files.optimizer_state()
    path.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=path.parent, prefix=".convert-") as folder:
        numbers = count()

        def mapped(value: Tensor) -> Tensor:
            if value.numel() < 2:
                return value
            name = str(Path(folder, str(next(numbers))))
            made = torch.from_file(name, shared=True, size=value.numel(), dtype=value.dtype)
            return made.copy_(value.flatten()).view(value.shape)

        model = {name: mapped(files.read(name)) for name in files.tensors}
        own = {name: {key: mapped(read()) for key, read in each.items()} for name, each in state.items()}
        optimizer = {"state": own, "param_groups": groups}
        _write_checkpoint(path, model, optimizer=optimizer, shared={"step": files.num_steps})


def _write(
    directory: Path,
    tensors: dict[str, Tensor],
    read: Callable[[Sequence[str]], list[Tensor]],
    dtype: torch.dtype | None,
    max_shard_bytes: int,
) -> None:
    """Write ``tensors``, of the meta device, with the values that ``read`` returns for their names."""
    files = plan_files("convert", tensors, dtype, max_shard_bytes)

    def contents() -> Iterator[list[FileContents]]:
        for file in files:
            values, own = read(file.names)[::-1], {}
            for name, kind in zip(file.names, file.dtypes, strict=True):
                own[name] = values.pop().to(kind).contiguous()
            yield [(file, own)]

    FileJob("convert", directory, [], torch.device("cpu")).run(files, contents(), {"format": "pt"})


def _keys_of_model(manifest: Manifest, key: str | None) -> dict[str, str]:
    """The names of the model's values, and their keys in the checkpoint."""
    places = [tuple(each.split(".")) for each in (MODEL_KEYS if key is None else filter(None, [key]))]
    for place in places:
        found = {path: at for path, at in manifest.under(*place).items() if path}
        if any(manifest.tensor(at) is not None for at in found.values()):
            return _named({".".join(map(str, path)): at for path, at in found.items()}, manifest)
    if not key:
        top = {str(path[0]): at for path, at in manifest.places.items() if len(path) == 1}
        if any(manifest.tensor(at) is not None for at in top.values()):
            return _named(top, manifest)
    tops = sorted({str(path[0]) for path in manifest.places})
    wanted = f"'{key}'" if key else "its top" + f" or at any of {', '.join(MODEL_KEYS)}" * (key is None)
    raise ValueError(
        f"convert: {manifest.path} has no tensors at {wanted}. At its top are {listed(tops)}. Name the place "
        "of the model with --key, with dots between the keys of nested dicts."
    )


def _named(keys: dict[str, str], manifest: Manifest) -> dict[str, str]:
    """``keys`` by the names that the model has, without the prefixes of wrappers."""
    taken: dict[str, str] = {}
    return {own_name(key, taken, f"convert: {manifest.path}"): at for key, at in keys.items()}


def from_safetensors(source: Path, path: Path) -> None:
    """Write a checkpoint at ``path`` with the model of safetensors files (a folder in the layout of Hugging
    Face, an index, or one file), which are mapped into memory, and read while they are written.
    """
    _check_target(path)
    with ExitStack() as stack:
        files = ModelFiles(source, stack)
        if not files.facts:
            raise ValueError(f"convert: {source} has no tensors.")
        model = {name: files.read(name, Region.all_of(facts.shape)) for name, facts in files.facts.items()}
        _write_checkpoint(path, model, shared={})


def _check_target(path: Path) -> None:
    """Refuse what cannot become a checkpoint, or is one: that may be of training, with more in it."""
    folders.check_name("convert", path)
    if folders.found(path) is not None:
        raise ValueError(f"convert: {path} is a checkpoint already. Name another folder, or delete it first.")


def _write_checkpoint(path: Path, model: dict[str, Tensor], **more: Any) -> None:
    state: dict[str, Any] = {"model": model, STATES: {}, **more}
    state[INFO] = {"world_size": 1, HAS_DIGESTS: True}
    write(RankGroup(None), folders.absolute(path), state, keep=None, is_staged=True)
