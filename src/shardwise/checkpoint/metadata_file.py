"""Reading `.metadata`, which is a pickle, without running anything that it asks for.

Unpickling calls whatever the bytes name. So the names that torch writes stand in a table here, and any other
is refused. Those of torch's classes do not stand for the classes: what they would be made of is noted down,
and checked field by field when the real ones are made. That also reads what other versions of torch and
Python wrote, which add a field or move a class.
"""

import io
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

_METADATA, _FILES = "torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem"
_NOTED = {
    *((_METADATA, kind) for kind in ("Metadata", "TensorStorageMetadata", "BytesStorageMetadata")),
    *((_METADATA, kind) for kind in ("TensorProperties", "ChunkStorageMetadata", "MetadataIndex")),
    *((_METADATA, kind) for kind in ("StorageMeta", "_MEM_FORMAT_ENCODING")),
    (_FILES, "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    *(
        (module, f"{kind}Path")
        for module in ("pathlib", "pathlib._local")
        for kind in ("Posix", "Windows", "")
    ),
}


@dataclass(frozen=True)
class Record:
    """The location of a record, with the attributes that torch's reader expects."""

    relative_path: str
    offset: int
    length: int
    transform_descriptors: Sequence[str] | None = None


class Untrusted(ValueError):
    """A pickle asks for a class that is not allowed."""


def read_metadata(content: bytes) -> Metadata:
    """The index of a checkpoint.

    Raises:
        Untrusted: it names something that is not torch's index.
        Exception: it is not one at all.
    """
    return _metadata(_Unpickler(io.BytesIO(content)).load())


class _Noted:
    """A stand-in for an object: what it would have been made of, without its class."""

    __slots__ = ("args", "state")
    args: tuple[Any, ...]
    state: Any

    def __new__(cls, *args: Any) -> "_Noted":
        self = object.__new__(cls)
        self.args, self.state = args, None
        return self

    def __setstate__(self, state: Any) -> None:
        self.state = state


def _member(kind: Any, name: Any) -> _Noted:
    """A member of an enumeration, which Python 3.11.2 (of Debian 12) pickles as ``getattr(kind, name)``."""
    if not (isinstance(kind, type) and issubclass(kind, _Noted) and isinstance(name, str)):
        raise Untrusted("it asks for an attribute, which the index of a checkpoint has no use for")
    return kind(name)


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        # Made for each load: a pickle can set attributes of the classes that it names.
        self._noted: dict[str, type[_Noted]] = {}

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _NOTED:
            return self._noted.setdefault(name, type(name, (_Noted,), {}))
        if (module, name) == ("torch", "Size"):
            return torch.Size
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        if (module, name) == ("builtins", "getattr"):
            return _member
        raise Untrusted(f"it asks for {module}.{name}, which the index of a checkpoint has no use for")


# --- what was noted, made ---------------------------------------------------------------------------


def _metadata(noted: Any) -> Metadata:
    fields = _fields(noted, "Metadata")
    planner_data, storage_data = fields.get("planner_data"), fields.get("storage_data")
    return Metadata(
        state_dict_metadata={
            _text(key): _tensor(value) if _kind(value) != "BytesStorageMetadata" else BytesStorageMetadata()
            for key, value in _dict(fields["state_dict_metadata"]).items()
        },
        planner_data=None
        if planner_data is None
        else {_text(k): _place(v) for k, v in _dict(planner_data).items()},
        storage_data=None
        if storage_data is None
        else {_index(k): _record(v) for k, v in _dict(storage_data).items()},
        storage_meta=_storage_meta(fields.get("storage_meta")),
        version=_or_none(_text, fields.get("version")),
    )


def _tensor(noted: Any) -> TensorStorageMetadata:
    fields = _fields(noted, "TensorStorageMetadata")
    properties = fields["properties"]
    if _kind(properties) != "TensorProperties" or not isinstance(properties.state, tuple):
        raise TypeError(f"the properties of a tensor are {_said(properties)}")
    dtype = properties.state[0]
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"the dtype of a tensor is {_said(dtype)}")
    chunks = fields["chunks"]
    if not isinstance(chunks, list):
        raise TypeError(f"the chunks of a tensor are {_said(chunks)}")
    return TensorStorageMetadata(
        TensorProperties(dtype=dtype), _size(fields["size"]), [_chunk(c) for c in chunks]
    )


def _chunk(noted: Any) -> ChunkStorageMetadata:
    fields = _fields(noted, "ChunkStorageMetadata")
    return ChunkStorageMetadata(_size(fields["offsets"]), _size(fields["sizes"]))


def _index(noted: Any) -> MetadataIndex:
    fields = _fields(noted, "MetadataIndex")
    offset = _or_none(_size, fields.get("offset"))
    return MetadataIndex(_text(fields["fqn"]), offset, _or_none(_count, fields.get("index")))


def _record(noted: Any) -> Record:
    fields = _fields(noted, "_StorageInfo")
    descriptors = fields.get("transform_descriptors")
    return Record(
        _text(fields["relative_path"]),
        _count(fields["offset"]),
        _count(fields["length"]),
        None if descriptors is None else [_text(each) for each in descriptors],
    )


def _storage_meta(noted: Any) -> StorageMeta | None:
    if noted is None:
        return None
    return StorageMeta(save_id=_or_none(_text, _fields(noted, "StorageMeta").get("save_id")))


def _place(value: Any) -> tuple[str | int, ...]:
    if not isinstance(value, tuple) or not all(type(part) in (str, int) for part in value):
        raise TypeError(f"the place of a value is {_said(value)}")
    return value


def _fields(noted: Any, kind: str) -> dict[str, Any]:
    """The fields of a noted dataclass."""
    if _kind(noted) != kind:
        raise TypeError(f"it holds {_said(noted)} where a {kind} should be")
    return _dict(noted.state[1] if isinstance(noted.state, tuple) else noted.state)  # slots are the second


def _kind(value: Any) -> str:
    return type(value).__name__ if isinstance(value, _Noted) else ""


def _dict(value: Any) -> dict[Any, Any]:
    if type(value) is not dict:
        raise TypeError(f"it holds {_said(value)} where a dict should be")
    return value


def _text(value: Any) -> str:
    if type(value) is not str:
        raise TypeError(f"it holds {_said(value)} where a name should be")
    return value


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise TypeError(f"it holds {_said(value)} where a number should be")
    return value


def _size(value: Any) -> torch.Size:
    if not isinstance(value, (torch.Size, tuple)):
        raise TypeError(f"it holds {_said(value)} where a size should be")
    return torch.Size([_count(each) for each in value])


def _or_none(act: Callable[[Any], Any], value: Any) -> Any:
    return None if value is None else act(value)


def _said(value: Any) -> str:
    return f"a {type(value).__name__}"
