"""Reading keys of a checkpoint: first planned, to know which records are read; then read."""

import io
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, cast

import torch

from shardwise.checkpoint.folders import OpenFolder
from shardwise.checkpoint.manifest import Manifest
from shardwise.layout.fqns import listed


class Objects(Exception):
    """Objects that are only made from a trusted checkpoint."""


def read(manifest: Manifest, targets: dict[str, Any], trust: bool) -> None:
    """Read the keys of `targets` into its tensors; other values replace their items."""
    from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader

    class Planner(DefaultLoadPlanner):
        """Makes no objects of classes that torch does not allow."""

        def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
            key = read_item.dest_index.fqn
            self.state_dict[key] = _made(manifest, key, value, trust)

    reader = FileSystemReader(manifest.path)
    reader.fs = cast(Any, _FilesOf(manifest.folder))
    planner = Planner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(targets, manifest.metadata, True)
    reader.set_up_storage_reader(manifest.metadata, True)
    plan = reader.prepare_local_plan(planner.create_local_plan())
    plan = planner.finish_plan(reader.prepare_global_plan(planner.create_global_plan([plan]))[0])
    reader.read_data(plan, planner).wait()


class _FilesOf:
    """The file system of a torch reader: a folder that is open already."""

    def __init__(self, folder: OpenFolder) -> None:
        self._folder = folder

    def concat_path(self, path: Any, name: str) -> str:
        """What torch's reader passes on to `create_stream`."""
        return name

    def create_stream(self, path: str, mode: str) -> AbstractContextManager[Any]:
        """A file of the folder, for reading."""
        return self._folder.open(path)


def check_records(manifest: Manifest, targets: Mapping[str, Any], verify: bool) -> None:
    """Check the records that reading `targets` would read on this rank; see `Manifest`."""
    manifest.check_records(_records_for(manifest, targets), verify)


def files_for(manifest: Manifest, targets: Mapping[str, Any]) -> list[str]:
    """The names of the files that reading `targets` would read on this rank."""
    records = manifest.metadata.storage_data
    return list(dict.fromkeys(records[index].relative_path for index in _records_for(manifest, targets)))


def _records_for(manifest: Manifest, targets: Mapping[str, Any]) -> list[Any]:
    from torch.distributed.checkpoint.default_planner import create_default_local_load_plan

    # Not by the planner itself: it would give memory to what is on the meta device.
    plan = create_default_local_load_plan(dict(targets), manifest.metadata)
    return [item.storage_index for item in plan.items]


def read_objects(manifest: Manifest, keys: list[str], verify: bool, trust: bool) -> dict[str, Any]:
    """The values of `keys`, such as are no tensors of the model; verified first."""
    targets: dict[str, Any] = {}
    for key in keys:
        md = manifest.tensor(key)
        targets[key] = None if md is None else torch.empty(md.size, dtype=md.properties.dtype)
    check_records(manifest, targets, verify)
    try:
        read(manifest, targets, trust)
    except (PermissionError, FileNotFoundError):
        raise
    except Objects as error:
        raise ValueError(str(error)) from error
    except Exception as error:
        raise ValueError(
            f"{manifest.path} cannot be read: {type(error).__name__}: {error}. It is damaged, or holds "
            "objects of classes that are not to be found here. Nothing was loaded."
        ) from error
    return targets


def _made(manifest: Manifest, key: str, value: io.BytesIO, trust: bool) -> Any:
    try:
        return torch.load(value, weights_only=not trust)
    except Exception as error:
        if not trust and (unknown := unsafe_names(value)):
            raise Objects(
                f"{manifest.path}: {key} holds objects of {listed(unknown)}. Making such an object can run "
                "any code, so only tensors and plain values are read. If you trust whoever wrote it, pass "
                "trust=True, or name the classes in torch.serialization.add_safe_globals. Nothing was loaded."
            ) from error
        raise


def unsafe_names(value: io.BytesIO | Path) -> list[str]:
    """The classes in a pickle that torch does not allow; empty if that is unknown."""
    try:
        if isinstance(value, io.BytesIO):
            value.seek(0)
        return list(torch.serialization.get_unsafe_globals_in_checkpoint(value))
    except Exception:
        return []
