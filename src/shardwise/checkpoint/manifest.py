"""The manifest: what a checkpoint holds, checked against itself and its files; and reading of its keys: first
planned, to know which records are read and check them, then read.

Nothing here changes a model, and nothing communicates.
"""

import io
import pickle
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import torch

from shardwise.checkpoint import folders
from shardwise.checkpoint.digests import DIGESTS, Digests, Wanted, damaged, read_digests
from shardwise.checkpoint.folders import OpenFolder
from shardwise.layout.fqns import listed
from shardwise.layout.regions import Region, why_not_covered
from shardwise.state.loading import ShapeAndDtype
from shardwise.state.model_files import leaves_folder
from shardwise.state.named_state import StatePath

INFO = "shardwise"  # the key under which a checkpoint says who wrote it
HAS_DIGESTS = "digests"  # below it: that there are digests


@dataclass
class Manifest:
    """The `.metadata` of a checkpoint."""

    folder: folders.OpenFolder
    metadata: Any  # torch.distributed.checkpoint.metadata.Metadata
    identity: str  # of the save: no other has the same
    digests: Digests | None = None
    places: dict[StatePath, str] = field(default_factory=dict)  # -> key in the checkpoint

    @property
    def path(self) -> Path:
        """The folder of the checkpoint."""
        return self.folder.path

    @classmethod
    def read(cls, folder: folders.OpenFolder, verify: bool = True, trust: bool = False) -> "Manifest":
        """Read it; with `verify` its digests too, where there are any; with `trust` objects of any class."""
        from torch.distributed.checkpoint.metadata import Metadata

        path = folder.path
        with folder.open(folders.METADATA) as file:
            content = file.read()
        digests = read_digests(folder, content) if verify else None
        metadata = _unpickled(path, content, trust)
        if not isinstance(metadata, Metadata) or metadata.storage_data is None:
            raise ValueError(
                f"{path / folders.METADATA} holds a {type(metadata).__name__}, not the index of a checkpoint."
            )
        paths = metadata.planner_data or {}
        places = {tuple(paths.get(key, (key,))): key for key in metadata.state_dict_metadata}
        save = getattr(metadata.storage_meta, "save_id", None) or "without a name"
        manifest = cls(folder, metadata, f"{save} ({sha256(content).hexdigest()[:12]})", digests, places)
        if verify and digests is None and (INFO, HAS_DIGESTS) in places:
            raise ValueError(
                f"{path} is damaged: {DIGESTS} is missing, which is needed to verify the other files. Was it "
                "left out when the folder was copied? verify=False loads without it."
            )
        if outside := sorted(
            {i.relative_path for i in metadata.storage_data.values() if leaves_folder(i.relative_path)}
        ):
            raise ValueError(
                f"{path / folders.METADATA} names files outside of its folder: {listed(map(repr, outside))}. "
                "No save writes such names: the file is damaged, or was forged to read other files. Nothing "
                "was loaded."
            )
        return manifest

    def under(self, *start: str | int) -> dict[StatePath, str]:
        """The keys of everything below the path `start`, by their paths below it."""
        depth = len(start)
        return {place[depth:]: key for place, key in self.places.items() if place[:depth] == start}

    def tensor(self, key: str) -> Any:
        """The shape and dtype of the tensor `key`; None: it is something else."""
        found = self.metadata.state_dict_metadata[key]
        return found if hasattr(found, "properties") else None

    def files_of(self, keys: Iterable[str]) -> list[str]:
        """The files that hold the values `keys`."""
        wanted, records = set(keys), self.metadata.storage_data
        return list(dict.fromkeys(records[i].relative_path for i in records if i.fqn in wanted))

    def facts(self, key: str | None) -> ShapeAndDtype:
        """What is known of the value `key`."""
        md = None if key is None else self.tensor(key)
        return ShapeAndDtype(None) if md is None else ShapeAndDtype(tuple(md.size), md.properties.dtype)

    def check(self) -> None:
        """Check that its entries agree with each other and with the sizes of files."""
        try:
            wrong = [*self._wrong_entries(), *self._wrong_records()]
        except Exception as error:  # damaged values may have any type
            wrong = [f"{type(error).__name__}: {error}"]
        if wrong:
            raise ValueError(
                f"{self.path} is damaged: {folders.METADATA} contradicts itself: {listed(wrong)}. Nothing "
                "was loaded; load an earlier checkpoint."
            )
        self.check_files(self.metadata.storage_data.values())

    def _wrong_entries(self) -> Iterator[str]:
        """Names, which are stored as keys and as paths, that differ, and tensors that are not whole."""
        for key, place in (self.metadata.planner_data or {}).items():
            if ".".join(map(str, place)) != key:
                yield f"{key} has the path {'.'.join(map(str, place))}"
        if self.metadata.planner_data and (
            lost := self.metadata.state_dict_metadata.keys() - self.metadata.planner_data
        ):
            yield f"{listed(sorted(lost))} have no path"

        for key in self.metadata.state_dict_metadata:
            if (md := self.tensor(key)) is None:
                continue
            if not isinstance(md.properties.dtype, torch.dtype):
                yield f"the dtype of {key} is a {type(md.properties.dtype).__name__}"
            chunks = [Region(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in md.chunks]
            if why := why_not_covered(md.size, chunks):
                yield f"{key}: {why}"

    def _wrong_records(self) -> Iterator[str]:
        """Yields chunks without a record, records without a chunk, and records that share bytes."""
        from torch.distributed.checkpoint.metadata import MetadataIndex

        records, needed = self.metadata.storage_data, set()
        for key in self.metadata.state_dict_metadata:
            md = self.tensor(key)
            needed |= (
                {MetadataIndex(key)} if md is None else {MetadataIndex(key, c.offsets) for c in md.chunks}
            )
        for index in needed - records.keys():
            yield f"{index.fqn}{_at(index)} is in no file"
        for index in records.keys() - needed:
            yield f"{index.fqn}{_at(index)} in {records[index].relative_path} is not part of the checkpoint"
        by_file: dict[str, list[Any]] = {}
        for index, record in records.items():
            if record.offset < 0 or record.length < 0:
                yield f"{index.fqn}{_at(index)} has a negative offset or length in {record.relative_path}"
            by_file.setdefault(record.relative_path, []).append((record.offset, record.length, index))
        for name, each in by_file.items():
            each.sort(key=lambda part: part[:2])
            for (offset, length, one), (start, _, other) in pairwise(each):
                if offset + length > start:
                    yield f"{one.fqn}{_at(one)} and {other.fqn}{_at(other)} share bytes of {name}"

    def check_files(self, records: Iterable[Any]) -> None:
        """Check that every file exists with the right length."""
        needed: dict[str, int] = {}
        for info in records:
            end = info.offset + info.length
            needed[info.relative_path] = max(end, needed.get(info.relative_path, 0))
        exact = {name: sums.num_bytes for name, sums in (self.digests or {}).items()}
        wrong = []
        for name, length in sorted(needed.items()):
            size = self.folder.size(name)
            if size is None:
                wrong.append(f"{name} is missing")
                continue
            folders.refuse_forbidden(self.path / name)
            if size < length:
                wrong.append(f"{name} has {size} bytes, where at least {length} are expected")
            elif exact and size != exact.get(name):
                wrong.append(f"{name} has {size} bytes, but {exact.get(name)} according to {DIGESTS}")
        if wrong:
            raise ValueError(
                f"{self.path} is damaged: {listed(wrong)}. These contents are lost; load an earlier "
                "checkpoint. If ranks are on several hosts, the path must be on a file system that all of "
                "them share."
            )


def _unpickled(path: Path, content: bytes, trust: bool) -> Any:
    from shardwise.checkpoint.metadata_file import Untrusted, read_metadata

    file = path / folders.METADATA
    try:
        return pickle.loads(content) if trust else read_metadata(content)
    except Untrusted as error:
        raise ValueError(
            f"{file} is not read: {error}. Loading it could run any code. If you trust whoever wrote it, "
            "pass trust=True. Nothing was loaded."
        ) from error
    except Exception as error:  # damaged pickles raise errors of any type
        raise ValueError(
            f"{file} cannot be read ({type(error).__name__}: {error}). It was damaged after it was written, "
            "or another program wrote it; load an earlier checkpoint."
        ) from error


def _at(index: Any) -> str:
    return "" if not index.offset else f" at {tuple(index.offset)}"


def by_first(entries: dict[StatePath, str]) -> dict[str, dict[StatePath, str]]:
    """Keys by the first part of their path, such as the name of a parameter."""
    found: dict[str, dict[StatePath, str]] = {}
    for (first, *rest), key in ((place, key) for place, key in entries.items() if place):
        found.setdefault(str(first), {})[tuple(rest)] = key
    return found


def is_extra_state(name: str) -> bool:
    """Whether it is a module's extra state; if that is a tensor, it may have any length."""
    return name.rpartition(".")[2] == "_extra_state"


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
    """Check that what reading `targets` would read on this rank is there and, if `verify`, as written."""
    wanted: dict[str, list[Wanted]] = {}
    for index in dict.fromkeys(_records_for(manifest, targets)):
        record, md = manifest.metadata.storage_data[index], manifest.tensor(index.fqn)
        form = None  # the expected shape and dtype of a tensor
        if manifest.digests is None and md is not None:
            sizes = next(tuple(chunk.sizes) for chunk in md.chunks if chunk.offsets == index.offset)
            form = sizes, md.properties.dtype
        wanted.setdefault(record.relative_path, []).append(Wanted(index.fqn, record, form))
    manifest.check_files(one.record for each in wanted.values() for one in each)
    manifest.folder.keep_open(wanted)
    if verify and (wrong := damaged(manifest.folder, manifest.digests, wanted)):
        raise ValueError(
            f"{manifest.path} is damaged. These parts are not what was written: {listed(wrong)}. Nothing was "
            "loaded; load an earlier checkpoint. verify=False loads it as it is."
        )


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
            "objects of classes that cannot be imported here. Nothing was loaded."
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
