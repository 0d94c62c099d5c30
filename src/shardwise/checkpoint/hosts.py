"""Checkpoints in a folder of each host's own, such as its memory, which outlives the processes of a job.

Each host keeps the files of its own ranks, and a copy of those of the host before it:

    host 0   /dev/shm/run/step-20   .metadata .digests   __0_0 __1_0   __4_0 __5_0
    host 1                          .metadata .digests   __2_0 __3_0   __0_0 __1_0
    host 2                          .metadata .digests   __4_0 __5_0   __2_0 __3_0

A save is published on all hosts after all have their files, and removes older ones after it is published on
all. So at each moment one save is complete, even if any one host is lost. A load finds the newest save whose
files are on some host, and copies to each host what its ranks read and it lacks.
"""

import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardwise.checkpoint import folders
from shardwise.checkpoint.digests import DIGESTS
from shardwise.checkpoint.folders import METADATA, OpenFolder
from shardwise.checkpoint.manifest import Manifest
from shardwise.layout.fqns import listed
from shardwise.ranks.agreement import RankGroup
from shardwise.state.model_files import sync

_CHUNK = 16 << 20  # bytes of a file that are in flight between two hosts


@dataclass(frozen=True)
class Held:
    """What a host has of one save, and all files of the save, with their sizes."""

    save: str  # equal only for the same save
    files: dict[str, int]
    all_files: dict[str, int]


@dataclass(frozen=True)
class _Move:
    """A file that one rank sends to another."""

    name: str
    num_bytes: int
    source: int
    target: int


class Hosts:
    """The hosts of a group of ranks: those that see the same `directory`. Every method is collective.

    The ranks must have a process group that no other thread uses, and that sends tensors in host memory.
    """

    def __init__(self, rank_group: RankGroup, directory: Path) -> None:
        def seen() -> tuple[str, int, int]:
            directory.mkdir(parents=True, exist_ok=True)
            found = directory.stat()
            return folders.this_host(), found.st_dev, found.st_ino

        self._rank_group, self._directory = rank_group, directory
        places = rank_group.all_gather_objects(rank_group.run_on_all_ranks(seen))
        self._firsts = [places.index(place) for place in dict.fromkeys(places)]
        self._host_of = [self._firsts.index(places.index(place)) for place in places]
        self._host = self._host_of[rank_group.rank]
        self.is_first = self._firsts[self._host] == rank_group.rank

    def new_token(self) -> str:
        """A token of a save (see folders.py), the same on all ranks of a host."""
        tokens: list[str] = self._of_hosts(folders.new_token() if self.is_first else "")
        return tokens[self._host]

    def once(self, act: Callable[[], Any], explain: Callable[[Exception], str] = str) -> None:
        """Run `act` on the first rank of each host; all ranks raise alike."""
        self._rank_group.run_on_all_ranks(lambda: act() if self.is_first else None, explain)

    # --- saving -----------------------------------------------------------------------------------

    def replicate(self, folder: Path, explain: Callable[[Exception], str]) -> list[dict[str, int]]:
        """Give all hosts the index that rank 0 has written, and each the data files of the one before it.

        Returns the data files that each host has written, with their sizes.
        """
        self._share_index(folder, 0, explain)
        own = self._rank_group.run_on_all_ranks(lambda: _data_files(folder) if self.is_first else {}, explain)
        of_hosts: list[dict[str, int]] = self._of_hosts(own)
        moves = []
        num_hosts = len(self._firsts)
        if num_hosts > 1:
            # Every second host sends first, so that hosts do not wait for each other around the ring.
            for host in [*range(0, num_hosts, 2), *range(1, num_hosts, 2)]:
                ends = self._firsts[host], self._firsts[(host + 1) % num_hosts]
                moves += [_Move(name, size, *ends) for name, size in sorted(of_hosts[host].items())]
        self._transfer(folder, moves, explain)
        return of_hosts

    # --- loading ----------------------------------------------------------------------------------

    def _held(self, names: Iterable[str] | None = None) -> dict[str, list[Held | None]]:
        """What each host has of the saves in the directory, by name; `names`: only of these."""

        def look() -> dict[str, Held]:
            if not self.is_first:
                return {}
            complete = folders.complete_in(self._directory)
            wanted = complete if names is None else [name for name in names if name in complete]
            return {name: each for name in wanted if (each := _held_at(complete[name])) is not None}

        of_hosts = self._of_hosts(self._rank_group.run_on_all_ranks(look))
        found = dict.fromkeys(name for of_host in of_hosts for name in of_host)
        return {name: [of_host.get(name) for of_host in of_hosts] for name in found}

    def newest(self, other: Path | None) -> Path | None:
        """The newest complete checkpoint of the hosts; None if there is none that is as new as `other`."""
        complete = [name for name, held in self._held().items() if _complete_save(held) is not None]
        newest = max(filter(folders.numbered, complete), key=folders.newness, default=None)
        if newest is None or (other is not None and folders.newness(newest) < folders.newness(other.name)):
            return None
        return self._directory / newest

    def open(self, files: ExitStack, path: Path) -> "LocalFolder":
        """The complete save among those that hosts hold at `path`; those without it get its index."""
        held = self._held([path.name]).get(path.name, [])
        save = _complete_save(held)
        if save is None:
            raise FileNotFoundError(
                f"{path.name}: {_why_not_complete(held)}. Load an older checkpoint, or one on a shared file "
                "system; resume(folder, ..., local=...) finds the newest."
            )
        parts = [each if each is not None and each.save == save else None for each in held]
        of_hosts = [{} if part is None else part.files for part in parts]
        source = next(host for host, part in enumerate(parts) if part is not None)
        lacks = parts[self._host] is None

        def make() -> None:
            if lacks:
                while (other := folders.found(path)) is not None:
                    folders.remove(other)
                if folders.is_remains(path):
                    folders.remove(path)
                path.mkdir(parents=True)

        self.once(make)
        place = self._rank_group.run_on_all_ranks(
            lambda: path if lacks else folders.found(path) or path  # a crash may have left it aside
        )
        self._share_index(place, self._firsts[source], str, is_wanted=lacks)
        return self._rank_group.run_on_all_ranks(
            lambda: files.enter_context(LocalFolder(place, self, of_hosts))
        )

    def fetch(self, folder: "LocalFolder", names: Iterable[str], of_hosts: list[dict[str, int]]) -> None:
        """Copy the files `names`, which this rank is about to read, to its host, if it lacks them."""
        needed: list[dict[str, None]] = [{} for _ in self._firsts]
        for rank, own in enumerate(self._rank_group.all_gather_objects(sorted(set(names)))):
            needed[self._host_of[rank]].update(dict.fromkeys(own))
        moves = []
        for host, wanted in enumerate(needed):
            for name in wanted.keys() - of_hosts[host].keys():
                source = next(h for h, files in enumerate(of_hosts) if name in files)
                ends = self._firsts[source], self._firsts[host]
                moves.append(_Move(name, of_hosts[source][name], *ends))
        moves.sort(key=lambda move: (move.name, move.target))
        self._transfer(folder.path, moves)
        for move in moves:
            of_hosts[self._host_of[move.target]][move.name] = move.num_bytes

    # --- between hosts ----------------------------------------------------------------------------

    def _of_hosts(self, of_first: Any) -> list[Any]:
        every = self._rank_group.all_gather_objects(of_first)
        return [every[first] for first in self._firsts]

    def _share_index(
        self, folder: Path, source: int, explain: Callable[[Exception], str], is_wanted: bool = True
    ) -> None:
        """Write the files that every host has, which rank `source` has in `folder`."""

        def read() -> dict[str, bytes]:
            # The one that makes a folder a checkpoint is the last.
            names = (DIGESTS, METADATA) if source == self._rank_group.rank else ()
            return {name: (folder / name).read_bytes() for name in names}

        index = self._rank_group.broadcast_object(self._rank_group.run_on_all_ranks(read, explain), source)

        def write() -> None:
            if is_wanted and self._host_of[source] != self._host:
                for name, content in index.items():
                    (folder / name).write_bytes(content)
                    sync(folder / name)

        self.once(write, explain)

    def _transfer(
        self, folder: Path, moves: Sequence[_Move], explain: Callable[[Exception], str] = str
    ) -> None:
        """Send and receive files, one after the other, in an order common to all ranks."""
        rank = self._rank_group.rank
        own = [move for move in moves if rank in (move.source, move.target)]
        failures = [failure for move in own if (failure := self._move(folder / move.name, move)) is not None]

        def refuse() -> None:
            if failures:
                raise failures[0]

        def keep() -> None:
            for path in [folder / move.name for move in own if move.target == rank]:
                _part_of(path).rename(path)

        self._rank_group.run_on_all_ranks(refuse, explain)
        self._rank_group.run_on_all_ranks(keep, explain)

    def _move(self, path: Path, move: _Move) -> OSError | None:
        """Send or receive one file; return what failed here. The other end waits for all of it, so go on."""
        is_source, pg = move.source == self._rank_group.rank, self._rank_group.pg
        failure: OSError | None = None

        def attempt(act: Callable[..., Any], *args: Any) -> Any:
            nonlocal failure
            try:
                return act(*args)
            except OSError as error:
                failure = failure or error

        def read(chunk: torch.Tensor) -> None:
            if file.readinto(chunk.numpy()) != len(chunk):
                raise OSError(f"{path} became shorter while it was sent to another host")

        file = attempt(path.open, "rb") if is_source else attempt(_part_of(path).open, "wb")
        buffer = torch.empty(min(_CHUNK, move.num_bytes), dtype=torch.uint8)
        for start in range(0, move.num_bytes, _CHUNK):
            chunk = buffer[: min(_CHUNK, move.num_bytes - start)]
            if is_source:
                if failure is None:
                    attempt(read, chunk)
                dist.send(chunk, group=pg, group_dst=move.target)
            else:
                dist.recv(chunk, group=pg, group_src=move.source)
                if failure is None:
                    attempt(file.write, chunk.numpy())
        if file is not None:
            attempt(file.close)
        if not is_source and failure is None:
            attempt(sync, _part_of(path))
        return failure


class LocalFolder(OpenFolder):
    """A checkpoint of whose files this host has some, and others can be fetched from other hosts."""

    def __init__(self, path: Path, hosts: Hosts, of_hosts: list[dict[str, int]]) -> None:
        super().__init__(path)
        self._hosts, self._of_hosts = hosts, of_hosts

    def size(self, name: str) -> int | None:
        """The length of a file, here or on another host; None: no host has it."""
        known = next((files[name] for files in self._of_hosts if name in files), None)
        return super().size(name) if known is None else known

    def fetch(self, names: Iterable[str]) -> None:
        """Copy files that are about to be read here. Collective."""
        self._hosts.fetch(self, names, self._of_hosts)


def _complete_save(held: Sequence[Held | None]) -> str | None:
    """The save all of whose files are on some host; None: there is none."""
    for save in dict.fromkeys(each.save for each in held if each is not None):
        parts = [each for each in held if each is not None and each.save == save]
        if all(any(name in part.files for part in parts) for name in parts[0].all_files):
            return save
    return None


def _why_not_complete(held: Sequence[Held | None]) -> str:
    parts = [each for each in held if each is not None]
    if not parts:
        return "no host has it"
    lost = [name for name in parts[0].all_files if not any(name in part.files for part in parts)]
    return (
        f"hosts that had {listed(sorted(lost))} are lost" if lost else "hosts have files of different saves"
    )


def _part_of(path: Path) -> Path:
    """What a file is called until all of it is there."""
    return path.with_name(f".{path.name}.part")


def _held_at(place: Path) -> Held | None:
    """What is at `place`; None if that has been damaged."""
    try:
        with OpenFolder(place) as folder:
            manifest = Manifest.read(folder)
    except (OSError, ValueError):
        return None
    if manifest.digests is None:
        return None
    every = {name: sums.num_bytes for name, sums in manifest.digests.items()}
    # One of another size was cut off.
    whole = {name: size for name, size in _data_files(place).items() if every.get(name) == size}
    return Held(manifest.identity, whole, every)


def _data_files(folder: Path) -> dict[str, int]:
    files = (each for each in folder.iterdir() if not each.name.startswith("."))
    return {each.name: os.stat(each).st_size for each in files}
