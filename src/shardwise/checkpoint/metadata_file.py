"""Reading `.metadata`, which is a pickle, without running anything that it asks for.

Unpickling calls any function that the bytes name. So the names that torch writes stand in a table here, and
any other is refused. The names of torch's classes do not call these classes: arguments are recorded, and
the real objects are made of them afterwards. That also reads what other versions of torch and Python wrote,
which add a field or move a class.
"""

import io
import pickle
from collections.abc import Sequence
from dataclasses import dataclass, fields
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
    """The index of a checkpoint; refuses as Untrusted what names something else."""
    made = _made(_Unpickler(io.BytesIO(content)).load())
    if not isinstance(made, Metadata):
        raise TypeError(f"it holds a {type(made).__name__} where a Metadata should be")
    return made


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


_MADE = {
    kind.__name__: kind
    for kind in (Metadata, TensorStorageMetadata, BytesStorageMetadata, ChunkStorageMetadata)
} | {"MetadataIndex": MetadataIndex, "StorageMeta": StorageMeta, "_StorageInfo": Record}


def _made(value: Any) -> Any:
    """What was noted, as objects of torch's: with the fields that they have here."""
    if type(value) in (list, tuple):
        return type(value)(map(_made, value))
    if type(value) is dict:
        return {_made(key): _made(each) for key, each in value.items()}
    if not isinstance(value, _Noted):
        return value
    name = type(value).__name__
    if name == "TensorProperties":
        return TensorProperties(dtype=value.state[0])
    if name not in _MADE:
        return None  # a path, or the layout of a tensor: not used
    state = value.state[1] if isinstance(value.state, tuple) else value.state  # slots are the second
    own = {field.name for field in fields(_MADE[name])}
    made = _MADE[name](**{key: _made(each) for key, each in (state or {}).items() if key in own})
    if isinstance(made, Record) and not isinstance(made.relative_path, str):
        raise TypeError(f"the file of a record is a {type(made.relative_path).__name__}")
    return made
