"""What the bytes of a checkpoint were when they were written, and whether they still are.

A file `.digests` in the folder says so; torch's own reader does not know it. torch writes the data files and
syncs them, through a stream that sums what passes (`create_stream`).

    {"save": ..., "host": ..., "metadata": {"bytes": ..., "sha256": ...},
     "files": {"__0_0.distcp": {"ends": [1261, 2838, ...], "crc32": "26770dca83dcefb7..."}, ...}}
    sha256 of that line

A file is summed in segments, which end where torch asks for its position: at the end of each record. So a
rank reads and verifies the records that it loads, and no others. CRC32 finds each error of up to 32 bits in a
row, and all but one in 4e9 of the others; it takes a fifth of the time of sha256 where that has no
instructions of its own. It is no protection against intent: who can change a file can change its sum.
"""

import io
import json
import os
import socket
import zlib
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast
from zipfile import ZipFile

import torch

if TYPE_CHECKING:
    from shardwise.checkpoint.folders import OpenFolder
    from shardwise.checkpoint.metadata_file import Record

DIGESTS = ".digests"
_BLOCK = 1 << 20  # bytes that are in memory at a time


@dataclass
class Sums:
    """CRC32 of a file, segment by segment."""

    ends: list[int] = field(default_factory=list)
    crcs: list[int] = field(default_factory=list)

    @property
    def num_bytes(self) -> int:
        """Length of the file."""
        return self.ends[-1] if self.ends else 0

    def segments(self, start: int, end: int) -> range:
        """The segments of the bytes [start, end)."""
        return range(bisect_right(self.ends, start), bisect_right(self.ends, max(start, end - 1)) + 1)

    def start(self, segment: int) -> int:
        """The offset of a segment."""
        return self.ends[segment - 1] if segment else 0


# --- writing --------------------------------------------------------------------------------------


class SummingFileSystem:
    """The file system of a torch writer, whose files are summed while they are written.

    From the bytes in memory: what the disk makes of them is verified with the rest.
    """

    def __init__(self, of_writer: Any) -> None:
        self._of_writer = of_writer
        self.sums: dict[str, Sums] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._of_writer, name)

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        """A stream of the writer's own file system; sums what is written."""
        with self._of_writer.create_stream(path, mode) as stream:
            if mode != "wb":
                yield stream
                return
            summing = _Summing(stream)
            try:
                yield summing
            finally:
                if summing.failures:  # torch raises another, about the archive that it cannot close then
                    summing.failures[0].filename = os.fspath(path)
                    raise summing.failures.pop()
            self.sums[Path(path).name] = summing.result()


class _Summing:
    """A stream for writing. Its position only grows: torch writes records one after the other."""

    def __init__(self, stream: io.IOBase) -> None:
        self._stream: Any = stream
        self._sums = Sums()
        self._position, self._crc = 0, 0
        self.failures: list[OSError] = []  # the last write that failed

    def write(self, data: Any) -> int:
        self._crc = zlib.crc32(data, self._crc)
        try:
            written: int = self._stream.write(data)
        except OSError as error:
            self.failures = [error]
            raise
        self._position += written
        return written

    def tell(self) -> int:
        self._cut()
        return self._position

    def result(self) -> Sums:
        self._cut()
        return self._sums

    def _cut(self) -> None:
        if self._position > self._sums.num_bytes:
            self._sums.ends.append(self._position)
            self._sums.crcs.append(self._crc)
            self._crc = 0

    def __getattr__(self, name: str) -> Any:  # flush, fileno, close
        return getattr(self._stream, name)


def write_digests(folder: Path, save: str | None, metadata: bytes, files: Mapping[str, Sums]) -> None:
    """Write the file of digests, and sync it to disk."""
    told = {
        "save": save,
        "host": socket.gethostname(),
        "metadata": {"bytes": len(metadata), "sha256": sha256(metadata).hexdigest()},
        "files": {
            name: {"ends": sums.ends, "crc32": "".join(f"{crc:08x}" for crc in sums.crcs)}
            for name, sums in sorted(files.items())
        },
    }
    line = json.dumps(told)
    with (folder / DIGESTS).open("w") as file:
        file.write(f"{line}\n{sha256(line.encode()).hexdigest()}\n")
        file.flush()
        os.fsync(file.fileno())


# --- reading --------------------------------------------------------------------------------------


Digests = dict[str, Sums]
"""By file."""


def read_digests(folder: "OpenFolder", metadata: bytes) -> Digests | None:
    """Read `.digests`, and verify `metadata`, the content of the index; None: there is none."""
    if folder.size(DIGESTS) is None:
        return None
    with folder.open(DIGESTS) as file:
        content = file.read()
    line, _, rest = content.partition(b"\n")
    if rest != sha256(line).hexdigest().encode() + b"\n":
        raise ValueError(
            f"{folder.path} is damaged: {DIGESTS} is not what was written, so the other files cannot be "
            "checked. Load an earlier checkpoint; verify=False loads this one as it is."
        )
    told = json.loads(line)
    if told["metadata"] != {"bytes": len(metadata), "sha256": sha256(metadata).hexdigest()}:
        raise ValueError(
            f"{folder.path} is damaged: .metadata is not what was written, or is that of another save. "
            "Nothing can be loaded without its list of keys. Load an earlier checkpoint."
        )
    files = {name: (each["ends"], each["crc32"]) for name, each in told["files"].items()}
    return {
        name: Sums(ends, [int(text[at : at + 8], 16) for at in range(0, len(text), 8)])
        for name, (ends, text) in files.items()
    }


@dataclass(frozen=True)
class Wanted:
    """A record to read."""

    key: str
    record: "Record"
    form: tuple[tuple[int, ...], torch.dtype] | None  # what it should be; None: it is no tensor


def damaged(
    folder: "OpenFolder", digests: Digests | None, records: Mapping[str, Iterable[Wanted]]
) -> list[str]:
    """What of the records is not what was written, by file and key.

    Where there are no digests, as torch writes none, by the sums that are in the records themselves.
    """
    found: list[str] = []
    for name, wanted in records.items():
        with folder.open(name, buffering=0) as file:
            sums = None if digests is None else digests[name]
            found += _damaged_zips(name, file, wanted) if sums is None else _damaged(name, file, wanted, sums)
    return found


def _damaged(name: str, file: io.FileIO, wanted: Iterable[Wanted], sums: Sums) -> Iterator[str]:
    keys: dict[int, list[str]] = {}
    for each in wanted:
        for segment in sums.segments(each.record.offset, each.record.offset + each.record.length):
            keys.setdefault(segment, []).append(each.key)
    block = memoryview(bytearray(_BLOCK))
    for segment in sorted(keys):
        start, end = sums.start(segment), sums.ends[segment]
        if _crc(file, start, end, block) != sums.crcs[segment]:
            yield f"{name}, bytes {start} to {end}: {', '.join(dict.fromkeys(keys[segment]))}"


def _crc(file: io.FileIO, start: int, end: int, block: memoryview) -> int | None:
    """The sum of [start, end); None: the file ends before."""
    crc = 0
    file.seek(start)
    while start < end:
        num_read = file.readinto(block[: min(len(block), end - start)])
        if not num_read:
            return None
        crc = zlib.crc32(block[:num_read], crc)
        start += num_read
    return crc


def _damaged_zips(name: str, file: io.FileIO, wanted: Iterable[Wanted]) -> Iterator[str]:
    """Check records by themselves: each is a zip archive, with sums of its contents."""
    for each in wanted:
        record = each.record
        if record.transform_descriptors:  # compressed: its own form finds damage
            continue
        try:
            bad = _why_bad(_FileRange(file, record.offset, record.length), each)
        except Exception as error:  # damaged archives and pickles raise errors of any type
            bad = f"{type(error).__name__}: {error}"
        if bad is not None:
            yield f"{name}, bytes {record.offset} to {record.offset + record.length}: {each.key} ({bad})"


def _why_bad(part: "_FileRange", wanted: Wanted) -> str | None:
    """Also finds damage that Python's reader of archives tolerates, and torch's fails at half-way."""
    with ZipFile(cast(Any, part)) as archive:
        bad = archive.testzip()
    if bad is not None or wanted.form is None:
        return bad
    part.seek(0)
    tensor = torch.load(cast(Any, part), map_location="cpu", weights_only=True)
    if (found := (tuple(tensor.shape), tensor.dtype)) != wanted.form:
        return f"it holds {found}, not {wanted.form}"
    return None


class _FileRange(io.RawIOBase):
    """A part of a file, for reading."""

    def __init__(self, file: io.FileIO, offset: int, length: int) -> None:
        self._file, self._offset, self._length = file, offset, length
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._length}[whence]
        if base + offset < 0:
            raise OSError(f"position {base + offset} is before the beginning")
        self._position = base + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        wanted = max(0, min(len(buffer), self._length - self._position))
        self._file.seek(self._offset + self._position)
        num_read = self._file.readinto(memoryview(buffer)[:wanted]) or 0
        self._position += num_read
        return num_read
