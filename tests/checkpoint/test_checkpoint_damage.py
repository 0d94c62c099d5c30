"""Checkpoints whose bytes have changed, or that differ from host to host: refused by file and key, model untouched."""

import os
import random
import shutil
import struct
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from checkpointing import (
    OWN,
    Net,
    Run,
    everything,
    first_half,
    needs_own_disks,
    on_own_disk,
    rewritten,
    second_half,
    uninterrupted,
)
from comparing import alike, assert_all_same
from expecttest import assert_expected_inline
from harness import World
from meshed import refusal
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.state_dict import get_state_dict

from shardwise import load_checkpoint, save_checkpoint
from shardwise.layout.regions import Region, why_not_covered
from shardwise.state import EMA


def saved(path: str, by_torch: bool) -> None:
    run = Run(path=path)
    model, optimizer = run.start(1)
    run.train(model, optimizer, 0)
    if by_torch:
        state, optim = get_state_dict(model, optimizer)
        dcp.save({"model": state, "optimizer": optim}, checkpoint_id=path)
    else:
        states = {"ema": EMA(model)} if dist.is_initialized() else {}
        save_checkpoint(path, model, optimizer, states=states, shared={"step": 2, "notes": ["a", {"b": 1.5}]})


@dataclass
class Target:
    """What a damaged checkpoint is loaded into; it stays as it is unless a load succeeds."""

    path: Path

    def __post_init__(self) -> None:
        self.run = Run(path=str(self.path))
        self.model, self.optimizer = self.run.start(2)
        self.run.train(self.model, self.optimizer, 0, 1)
        self.before = self.values()

    def values(self) -> dict[str, Any]:
        found = everything(self.model, self.optimizer)
        return {name: value.clone() if torch.is_tensor(value) else value for name, value in found.items()}

    def refused(self, **options: Any) -> str:
        text = refusal(load_checkpoint, self.path, self.model, self.optimizer, **options)
        assert_all_same([everything(self.model, self.optimizer)], self.before, 0.0)
        return text.replace(str(self.path), "PATH")


def spoilt(content: bytes, draw: random.Random) -> tuple[int, bytes]:
    """Some bytes, of which at least one bit is another: a bit, a byte or 16 bytes. And where."""
    at, length = draw.randrange(len(content)), draw.choice([0, 1, 16])
    old = content[at : at + max(1, length)]
    new = bytes([old[0] ^ 1 << draw.randrange(8)]) if length == 0 else old
    while new == old:
        new = draw.randbytes(len(old))
    return at, new


def key_at(index: Metadata, file: str, at: int) -> str:
    for each, info in index.storage_data.items():
        if info.relative_path == file and info.offset <= at < info.offset + info.length:
            return each.fqn
    raise AssertionError(f"nothing is at {at} of {file}")


SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 25))]


@pytest.mark.parametrize("seed", SEEDS)
def test_every_flipped_bit_is_refused_by_file_and_key(world2: World, tmp_path: Path, seed: int) -> None:
    path = tmp_path / "step-2"
    world2.run(saved, str(path), False)
    index = dcp.FileSystemReader(path).read_metadata()
    target, draw, files = Target(path), random.Random(seed), sorted(path.iterdir())
    assert [each.name for each in files] == [".digests", ".metadata", "__0_0.distcp", "__1_0.distcp"]
    # The averages are not loaded: what nobody reads is not verified.
    for file in [*files, *draw.choices(files, k=12)]:
        content = file.read_bytes()
        at, new = spoilt(content, draw)
        is_data = file.name.endswith(".distcp")
        if is_data and (key := key_at(index, file.name, at)).startswith("states."):
            continue
        file.write_bytes(content[:at] + new + content[at + len(new) :])
        text = target.refused()
        assert text.startswith("ValueError: PATH is damaged"), (seed, file, at, text)
        assert file.name in text, (seed, file, at, text)
        assert not is_data or key in text, (seed, file, at, text)
        file.write_bytes(content)
    load_checkpoint(path, target.model, target.optimizer)
    target.run.train(target.model, target.optimizer, 2)
    assert_all_same([everything(target.model, target.optimizer)], uninterrupted(target.run), 1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_damage_in_torchs_checkpoints_is_refused_or_harmless(
    world2: World, tmp_path: Path, seed: int
) -> None:
    """They have no digests: bytes that mean nothing, as padding, may change; values may not."""
    path = tmp_path / "step-2"
    world2.run(saved, str(path), True)
    target, draw, files = Target(path), random.Random(seed), sorted(path.iterdir())
    load_checkpoint(path, target.model, target.optimizer)
    want = target.values()
    num_refused = 0
    for file in [*files, *draw.choices(files, k=37)]:
        target = Target(path)
        content = file.read_bytes()
        at, new = spoilt(content, draw)
        file.write_bytes(content[:at] + new + content[at + len(new) :])
        try:
            load_checkpoint(path, target.model, target.optimizer)
        except (ValueError, RuntimeError):
            num_refused += 1
            assert_all_same([everything(target.model, target.optimizer)], target.before, 0.0)
        else:
            assert_all_same([target.values()], want, 0.0)
        file.write_bytes(content)
    assert num_refused > 10


def refused_on_each(path: str, **options: Any) -> str:
    return Target(Path(path)).refused(**options)


def flip(file: Path, at: int) -> None:
    content = bytearray(file.read_bytes())
    content[at] ^= 1
    file.write_bytes(bytes(content))


def values_of(path: Path, key: str, rank: int = 0) -> tuple[Path, int]:
    """The file of a rank, and where in it the first number of its part of a tensor is."""
    name = f"__{rank}_0.distcp"
    for each, info in dcp.FileSystemReader(path).read_metadata().storage_data.items():
        if each.fqn == key and info.relative_path == name:
            content = (path / name).read_bytes()[info.offset : info.offset + info.length]
            header = ZipFile(BytesIO(content)).getinfo("archive/data/0").header_offset
            lengths = struct.unpack_from("<HH", content, header + 26)  # of its name and what follows that
            return path / name, info.offset + header + 30 + sum(lengths)
    raise KeyError(key)


def test_ranks_say_the_same_and_each_verifies_what_it_reads(
    world2: World, world3: World, tmp_path: Path
) -> None:
    path = tmp_path / "step-2"
    world2.run(saved, str(path), False)
    file, at = values_of(path, "model.outlet.weight")
    flip(file, at)
    for world in (world2, world3):
        told = alike(world.run(refused_on_each, str(path)))
        assert f"{file.name}, bytes " in told
        assert ": model.outlet.weight. Nothing was loaded" in told
    # It comes through where it is not verified: torch's reader looks at no sums.
    assert world2.run(loads_unverified, str(path)) == [True, True]


def loads_unverified(path: str) -> bool:
    target = Target(Path(path))
    load_checkpoint(path, target.model, target.optimizer, verify=False)
    damaged = everything(target.model, target.optimizer)["outlet.weight"]
    run = Run()
    model, optimizer = run.start(1)
    run.train(model, optimizer, 0)
    return not torch.equal(damaged, everything(model, optimizer)["outlet.weight"])


def without_a_chunk(index: Metadata) -> None:
    chunk = index.state_dict_metadata["model.inlet.weight"].chunks.pop()
    del index.storage_data[MetadataIndex("model.inlet.weight", chunk.offsets)]


def chunk_moved(index: Metadata) -> None:
    chunk = index.state_dict_metadata["model.inlet.weight"].chunks[1]
    info = index.storage_data.pop(MetadataIndex("model.inlet.weight", chunk.offsets))
    chunk.offsets = torch.Size([2, 0])
    index.storage_data[MetadataIndex("model.inlet.weight", chunk.offsets)] = info


def chunk_longer(index: Metadata) -> None:
    index.state_dict_metadata["model.inlet.weight"].chunks[1].sizes = torch.Size([4, 6])


def record_lost(index: Metadata) -> None:
    chunk = index.state_dict_metadata["model.inlet.weight"].chunks[0]
    del index.storage_data[MetadataIndex("model.inlet.weight", chunk.offsets)]


def record_of_the_other(index: Metadata) -> None:
    """Where the shards of two ranks have one size, each would fit in place of the other."""
    one, other = (
        MetadataIndex("model.inlet.weight", chunk.offsets)
        for chunk in index.state_dict_metadata["model.inlet.weight"].chunks
    )
    index.storage_data[one] = index.storage_data[other]


def key_renamed(index: Metadata) -> None:
    index.planner_data["model.inlet.weight"] = ("model", "outlet", "weight")


EDITS = [without_a_chunk, chunk_moved, chunk_longer, record_lost, record_of_the_other, key_renamed]


def test_an_index_that_does_not_cover_its_tensors_is_refused(world2: World, tmp_path: Path) -> None:
    world2.run(saved, str(tmp_path / "whole"), True)
    paths = [tmp_path / f"step-{number}" for number in range(len(EDITS))]
    for path, edit in zip(paths, EDITS, strict=True):
        shutil.copytree(tmp_path / "whole", path)
        rewritten(path, edit)
    texts = [alike(world2.run(refused_on_each, str(p), verify=n % 2 == 0)) for n, p in enumerate(paths)]
    assert_expected_inline(
        "\n".join(texts),
        """\
ValueError: PATH is damaged: .metadata contradicts itself: model.inlet.weight: its chunks have 18 of 36 elements. Nothing was loaded; load an earlier checkpoint.
ValueError: PATH is damaged: .metadata contradicts itself: model.inlet.weight: chunks of (3, 6) at (0, 0) and of (3, 6) at (2, 0) overlap. Nothing was loaded; load an earlier checkpoint.
ValueError: PATH is damaged: .metadata contradicts itself: model.inlet.weight: a chunk of (4, 6) at (3, 0) is not inside of (6, 6). Nothing was loaded; load an earlier checkpoint.
ValueError: PATH is damaged: .metadata contradicts itself: model.inlet.weight at (0, 0) is in no file. Nothing was loaded; load an earlier checkpoint.
ValueError: PATH is damaged: .metadata contradicts itself: model.inlet.weight at (0, 0) and model.inlet.weight at (3, 0) share bytes of __1_0.distcp. Nothing was loaded; load an earlier checkpoint.
ValueError: PATH is damaged: .metadata contradicts itself: model.inlet.weight has the path model.outlet.weight. Nothing was loaded; load an earlier checkpoint.""",
    )


def test_coverage_of_a_tensor() -> None:
    def told(size: tuple[int, ...], *chunks: tuple[tuple[int, ...], tuple[int, ...]]) -> str | None:
        return why_not_covered(size, [Region(*chunk) for chunk in chunks])

    assert told((), ((), ())) is None
    assert told((0, 3), ((0, 0), (0, 3))) is None
    assert told((5, 2), ((3, 0), (2, 2)), ((0, 0), (3, 2)), ((5, 0), (0, 2))) is None
    grid = [((i, j), (2, 3)) for i in (0, 2, 4) for j in (0, 3)]
    assert told((6, 6), *grid) is None
    # No cut goes through all of it: a windmill around the middle.
    windmill = [((0, 0), (1, 2)), ((0, 2), (2, 1)), ((2, 1), (1, 2)), ((1, 0), (2, 1)), ((1, 1), (1, 1))]
    assert told((3, 3), *windmill) is None
    assert told((3, 3), *windmill[:-1]) == "its chunks have 8 of 9 elements"
    assert told((6, 6), *grid[1:]) == "its chunks have 30 of 36 elements"
    assert told((6, 6), *grid, grid[0]) == "chunks of (2, 3) at (0, 0) and of (2, 3) at (0, 0) overlap"
    assert told((6,), ((0,), (3,)), ((2,), (3,))) == "chunks of (3,) at (0,) and of (3,) at (2,) overlap"
    assert told((6,), ((0,), (3,)), ((3,), (4,))) == "a chunk of (4,) at (3,) is not inside of (6,)"
    assert told((6,), ((0, 0), (3, 1))) == "a chunk of (3, 1) at (0, 0) is not inside of (6,)"
    assert told((6, 6)) == "its chunks have 0 of 36 elements"


def test_files_that_are_longer_or_gone_are_refused(world2: World, tmp_path: Path) -> None:
    path = tmp_path / "step-2"
    world2.run(saved, str(path), False)
    with (path / "__1_0.distcp").open("ab") as file:
        file.write(b"more")
    size = (path / "__1_0.distcp").stat().st_size
    told = alike(world2.run(refused_on_each, str(path)))
    assert f"__1_0.distcp has {size} bytes, but {size - 4} according to .digests" in told
    os.truncate(path / "__1_0.distcp", size - 4)
    (path / ".digests").write_bytes(b"")
    assert "PATH is damaged: .digests is not what was written" in alike(
        world2.run(refused_on_each, str(path))
    )
    (path / ".digests").unlink()
    assert "PATH is damaged: .digests is missing" in alike(world2.run(refused_on_each, str(path)))


# --- another checkpoint on each host ----------------------------------------------------------------


OWN_PATH = str(OWN / "run/step-2")


@pytest.mark.slow
@needs_own_disks
def test_halves_of_two_saves_are_not_put_together(world2: World, tmp_path: Path) -> None:
    for host in (0, 1):  # the same run, saved twice: all that differs is which save it is
        world2.run(first_half, Run(path=str(tmp_path / f"host-{host}" / "run" / "step-2")))
    first = alike(world2.run(on_own_disk, str(tmp_path), refused_on_each, OWN_PATH))
    assert "ValueError: ranks see different checkpoints: rank 0 on " in first
    for host in (0, 1):
        folder = tmp_path / f"host-{host}" / "run" / "step-2"
        assert dcp.FileSystemReader(folder).read_metadata().storage_meta.save_id in first
    assert "copy one of these to all hosts. If another job was saving, load again. Nothing was" in first
    shutil.rmtree(tmp_path / "host-1" / "run")
    shutil.copytree(tmp_path / "host-0" / "run", tmp_path / "host-1" / "run")
    run = Run(path=OWN_PATH)
    assert_all_same(world2.run(on_own_disk, str(tmp_path), second_half, run), uninterrupted(run), 1e-10)


@needs_own_disks
def test_a_file_of_another_save_on_one_host_is_refused(world2: World, tmp_path: Path) -> None:
    world2.run(saved, str(tmp_path / "host-0" / "run" / "step-2"), False)
    shutil.copytree(tmp_path / "host-0", tmp_path / "host-1")
    world2.run(saved, str(tmp_path / "other"), False)
    file, at = values_of(tmp_path / "other", "model.inlet.weight", rank=1)
    flip(file, at)
    name = file.name
    shutil.copy(tmp_path / "other" / name, tmp_path / "host-1" / "run" / "step-2" / name)
    first = alike(world2.run(on_own_disk, str(tmp_path), refused_on_each, OWN_PATH))
    assert "ValueError: rank 1: PATH is damaged. These parts are not what was written: " in first
    assert name in first


def test_a_plain_module_is_verified_too(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "x", Net())
    flip(*values_of(tmp_path / "x", "model.outlet.weight"))
    model = Net()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert "model.outlet.weight" in refusal(load_checkpoint, tmp_path / "x", model)
    assert_all_same([model.state_dict()], before, 0.0)
