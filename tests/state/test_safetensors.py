"""Model files in Hugging Face's layout: written by several ranks, read by slices."""

import json
import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from arrangements import WAYS, Way, built, world_of
from common import peak_bytes
from comparing import alike, assert_equal, same
from expecttest import assert_expected_inline
from harness import World
from meshed import refusal
from on_ranks import on_ranks
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from shardwise import full_state_dict, fully_shard, load_full_state_dict
from shardwise.state import save_safetensors
from shardwise.state.model_files import INDEX, SINGLE, ModelFiles
from shardwise.torch_compat import dtensor


def state_of(way: Way, seed: int = 0) -> dict[str, Tensor]:
    """Of the plain model, without second names of tied tensors: as the files have it."""
    return {
        name: value for name, value in built(way.build, seed).state_dict().items() if name != "head.weight"
    }


def read_all(folder: Path) -> dict[str, Tensor]:
    """By the package alone, by way of the index where there is one."""
    if not (folder / INDEX).exists():
        return load_file(folder / SINGLE)
    weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
    files = {name: load_file(folder / name) for name in set(weight_map.values())}
    assert {name: file for file, held in files.items() for name in held} == weight_map
    return {name: files[file][name] for name, file in weight_map.items()}


# --- writing --------------------------------------------------------------------------------------


def written(way: Way, folder: str, max_shard_bytes: int) -> list[str]:
    import safetensors.torch

    with mock.patch.object(safetensors.torch, "save_file", wraps=save_file) as saved:
        save_safetensors(way.model(), folder, max_shard_bytes=max_shard_bytes)
    return [Path(call.args[1]).name for call in saved.call_args_list]


@pytest.mark.sample(9)
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_ranks_write_one_model_together(way: Way, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    names = world_of(way, request).run(written, way, str(tmp_path), 300)
    want = state_of(way)
    got = read_all(tmp_path)
    assert same(got, {name: want[name] for name in got})
    assert got.keys() == want.keys()
    every = [name for own in names for name in own]
    assert len(every) > way.ranks
    assert min(len(own) for own in names) >= len(every) // way.ranks  # shared evenly
    assert sorted(every) == sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*every, INDEX])


def test_a_small_model_is_one_file_and_the_format_is_named(world2: World, tmp_path: Path) -> None:
    names = world2.run(written, Way(2), str(tmp_path), 1 << 30)
    assert names == [[SINGLE], []]
    assert [path.name for path in tmp_path.iterdir()] == [SINGLE]
    with safe_open(tmp_path / SINGLE, framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
    assert same(read_all(tmp_path), state_of(Way(2)))


def test_the_index_is_as_hugging_face_has_it(world2: World, tmp_path: Path) -> None:
    world2.run(written, Way(2), str(tmp_path), 3000)
    index = json.loads((tmp_path / INDEX).read_text())
    index["weight_map"] = dict(list(index["weight_map"].items())[:3])
    assert_expected_inline(
        json.dumps(index, indent=1),
        """\
{
 "metadata": {
  "total_size": 5696
 },
 "weight_map": {
  "blocks.0.down.bias": "model-00001-of-00003.safetensors",
  "blocks.0.down.weight": "model-00001-of-00003.safetensors",
  "blocks.0.norm.bias": "model-00001-of-00003.safetensors"
 }
}""",
    )


@on_ranks(2)
def test_files_may_be_read_by_those_whom_the_umask_lets(tmp_path: Path) -> None:
    umask = os.umask(0o026)
    try:
        save_safetensors(Way(2).model(), tmp_path, max_shard_bytes=3000)
    finally:
        os.umask(umask)
    assert len(list(tmp_path.iterdir())) > 2
    assert {oct(path.stat().st_mode & 0o777) for path in tmp_path.iterdir()} == {"0o640"}


@on_ranks(2)
def test_floating_point_tensors_are_converted(tmp_path: Path) -> None:
    way = Way(2, build="tied")
    save_safetensors(way.model(), tmp_path, dtype=torch.bfloat16, metadata={"by": "us"})
    want = {n: v.to(torch.bfloat16) if v.is_floating_point() else v for n, v in state_of(way).items()}
    assert any(value.dtype == torch.int64 for value in want.values())
    assert_equal(read_all(tmp_path), want)
    with safe_open(tmp_path / SINGLE, framework="pt") as file:
        assert file.metadata() == {"format": "pt", "by": "us"}


LAYER = 256 * 256 * 4


@on_ranks(2)
def test_each_rank_holds_one_file(tmp_path: Path) -> None:
    model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(4)))
    for layer in (*model, model):
        fully_shard(layer)
    peak = peak_bytes(lambda: save_safetensors(model, tmp_path, max_shard_bytes=LAYER)) / LAYER
    assert 1 <= peak <= 2.1  # what was gathered before is let go of as the next is there


# --- writing that fails ---------------------------------------------------------------------------


def fails_at(rank: int, folder: str) -> str:
    import safetensors.torch

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    model = Way(2).model()
    if dist.get_rank() != rank:
        return refusal(save_safetensors, model, folder, max_shard_bytes=500)
    with mock.patch.object(safetensors.torch, "save_file", full):
        return refusal(save_safetensors, model, folder, max_shard_bytes=500)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_full_disk_on_one_rank_is_told_by_all_and_nothing_is_left(
    world2: World, tmp_path: Path, rank: int
) -> None:
    for told in world2.run(fails_at, rank, str(tmp_path)):
        start, end = f"RuntimeError: save_safetensors: rank {rank} cannot write to {tmp_path} (", "system."
        assert told.startswith(start + "[Errno 28] No space left on device). ")
        assert told.endswith(" bytes are free on its file system.")
        assert end in told
    assert list(tmp_path.iterdir()) == []


def fails_while_renaming(folder: str) -> str:
    """The third file cannot be put under its name."""
    moved = 0

    def replace(source: Any, target: Any) -> None:
        nonlocal moved
        moved += 1
        if moved == 3:
            raise OSError(5, "Input/output error")
        os.rename(source, target)

    with mock.patch.object(os, "replace", replace):
        return refusal(save_safetensors, Way(2).model(), folder, max_shard_bytes=500)


def test_a_failure_while_files_get_their_names_leaves_none(world2: World, tmp_path: Path) -> None:
    for told in world2.run(fails_while_renaming, str(tmp_path)):
        assert "Input/output error" in told
    assert list(tmp_path.iterdir()) == []


@on_ranks(2)
def test_what_cannot_be_saved_is_refused(tmp_path: Path) -> None:
    folder = str(tmp_path)
    model = Way(2, build="odd").model()
    told = [
        refusal(save_safetensors, model, folder, max_shard_bytes=0),
        refusal(save_safetensors, model, folder, dtype=torch.int8),
        refusal(save_safetensors, model, folder, metadata={"step": 7}),
        refusal(save_safetensors, Way(2).model(device="meta"), folder),
    ]
    save_safetensors(model, folder)
    (Path(folder) / "incomplete").mkdir(exist_ok=True)
    (Path(folder) / "incomplete" / INDEX).write_text("{}")  # without its files
    told += [refusal(save_safetensors, model, each) for each in (folder, f"{folder}/incomplete")]
    assert_expected_inline(
        "\n".join([text.replace(folder, "FOLDER") for text in told]),
        """\
ValueError: save_safetensors: max_shard_bytes is 0; pass a number of bytes above 0.
ValueError: save_safetensors: dtype is torch.int8; pass a floating-point dtype, or None.
ValueError: save_safetensors: metadata is {'step': 7}; names and values have to be strings.
RuntimeError: save_safetensors: 22 parameters are still on the meta device: inlet.weight, inlet.bias, blocks.0.norm.weight, blocks.0.norm.bias, blocks.0.up.weight, blocks.0.up.bias, blocks.0.down.weight, blocks.0.down.bias and 14 more. Nothing has given them values. Call shardwise.materialize(model), or load a checkpoint, first.
FileExistsError: save_safetensors: FOLDER has model.safetensors in it already, and two models in one folder could be mixed up. Choose an empty folder, or delete the old files first.
FileExistsError: save_safetensors: FOLDER/incomplete has model.safetensors.index.json in it already, and two models in one folder could be mixed up. Choose an empty folder, or delete the old files first.""",
    )


class Fused(nn.Module):
    """Its state dict has one tensor for two parameters, made by a hook, and a buffer that is not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.register_buffer("turned", torch.arange(6.0).reshape(2, 3).t())
        self.register_state_dict_post_hook(Fused.fuse)

    def fuse(self, state: dict[str, Tensor], prefix: str, _: Any) -> None:
        q, k = (dtensor.plain(state.pop(f"{prefix}{name}.weight").detach()) for name in "qk")
        state[f"{prefix}qk"] = torch.cat([q, k])

    def forward(self, x: Tensor) -> Tensor:
        return self.q(x) + self.k(x)


@on_ranks(2)
def test_what_modules_make_for_their_state_is_saved(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Fused()
    save_safetensors(model, tmp_path)
    assert_equal(read_all(tmp_path), dict(model.state_dict()))


def test_a_model_of_one_process_is_saved_without_a_process_group(tmp_path: Path) -> None:
    model = built("tied")
    save_safetensors(model, tmp_path)
    assert same(read_all(tmp_path), state_of(Way(1, build="tied")))
    other = built("tied", 1)
    load_full_state_dict(other, tmp_path)
    assert same(full_state_dict(other), model.state_dict())


# --- reading --------------------------------------------------------------------------------------


def loaded(way: Way, source: Any) -> Any:
    model = way.model(seed=1)
    load_full_state_dict(model, source)
    return full_state_dict(model, rank0_only=False)


@pytest.mark.sample(6)
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_any_way_loads_the_files(way: Way, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    state = {name: value.contiguous() for name, value in state_of(way).items()}
    half = len(state) // 2
    parts = {"a.safetensors": list(state)[:half], "b.safetensors": list(state)[half:]}
    for file, names in parts.items():
        save_file({name: state[name] for name in names}, tmp_path / file)
    weight_map = {name: file for file, names in parts.items() for name in names}
    (tmp_path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    for got in world_of(way, request).run(loaded, way, str(tmp_path)):
        assert same(got, built(way.build).state_dict())


@pytest.mark.parametrize("kind", ["file", "path", "index", "list"])
def test_files_are_named_in_any_of_these_ways(world2: World, tmp_path: Path, kind: str) -> None:
    way = Way(2)
    save_safetensors_plainly(way, tmp_path)
    source: Any = {
        "file": str(tmp_path / SINGLE),
        "path": tmp_path,
        "index": str(tmp_path / INDEX),
        "list": [tmp_path / SINGLE],
    }[kind]
    if kind == "index":
        (tmp_path / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(state_of(way), SINGLE)}))
    for got in world2.run(loaded, way, source):
        assert same(got, state_of(way))


def save_safetensors_plainly(way: Way, folder: Path, seed: int = 0) -> None:
    save_file({name: value.contiguous() for name, value in state_of(way, seed).items()}, folder / SINGLE)


def bytes_read(folder: str) -> float:
    """How much of the file a rank asks for, in parts of the whole."""
    model = Way(4, build="even").model(seed=1)
    asked = 0
    before = ModelFiles.read

    def counted(self: Any, name: str, box: Any) -> Tensor:
        nonlocal asked
        piece = before(self, name, box)
        asked += piece.numel() * piece.itemsize
        return piece

    with mock.patch.object(ModelFiles, "read", counted):
        load_full_state_dict(model, folder)
    return asked / sum(value.numel() * value.itemsize for value in state_of(Way(4, build="even")).values())


def test_each_rank_reads_its_rows_only(world4: World, tmp_path: Path) -> None:
    save_safetensors_plainly(Way(4, build="even"), tmp_path)
    shares = world4.run(bytes_read, str(tmp_path))
    assert sum(shares) == pytest.approx(1)  # the file is read once, by all together
    assert max(shares) < 0.3


# --- files that are no good -----------------------------------------------------------------------


def spoil(kind: str, folder: Path) -> None:
    way = Way(2)
    state = {name: value.contiguous() for name, value in state_of(way).items()}
    first, second = dict(list(state.items())[:3]), dict(list(state.items())[3:])
    save_file(first, folder / "a.safetensors")
    save_file(second, folder / "b.safetensors")
    weight_map = dict.fromkeys(first, "a.safetensors") | dict.fromkeys(second, "b.safetensors")
    if kind == "a file is missing":
        os.remove(folder / "b.safetensors")
    elif kind == "a file is cut off":
        os.truncate(folder / "b.safetensors", 300)
    elif kind == "a file lacks its end":
        os.truncate(folder / "b.safetensors", (folder / "b.safetensors").stat().st_size - 8)
    elif kind == "a file is no such file":
        (folder / "b.safetensors").write_bytes(b"hello, this is no tensor file")
    elif kind == "the index names what is not there":
        weight_map["blocks.9.weight"] = "a.safetensors"
    elif kind == "the index is cut off":
        (folder / INDEX).write_text('{"weight_map": {"inlet')
        return
    elif kind == "of another model":
        weight_map.pop("inlet.weight")
    elif kind == "no index":
        return
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))


def refused_load(folder: str) -> tuple[str, bool]:
    model = Way(2).model(seed=1)
    told = refusal(load_full_state_dict, model, folder)
    model(torch.ones(1, 7, dtype=torch.float64))  # is as it was
    return told.replace(folder, "FOLDER"), same(full_state_dict(model, rank0_only=False), state_of(Way(2), 1))


KINDS = (
    *("a file is missing", "a file is cut off", "a file lacks its end", "a file is no such file"),
    *("no index", "of another model"),
    *("the index names what is not there", "the index is cut off", "nothing there"),
)


def test_bad_files_are_named_and_the_model_is_unchanged(world2: World, tmp_path: Path) -> None:
    told = {}
    for kind in KINDS:
        folder = tmp_path / kind.replace(" ", "_")
        if kind != "nothing there":
            folder.mkdir()
            spoil(kind, folder)
        told[kind], is_same = alike(world2.run(refused_load, str(folder)))
        assert is_same
    assert_expected_inline(
        "\n".join(f"{kind}: {text}" for kind, text in told.items()),
        """\
a file is missing: RuntimeError: FOLDER/b.safetensors does not exist, which should hold blocks.0.norm.bias, blocks.0.up.weight, blocks.0.up.bias, blocks.0.down.weight according to the index. Was a part of the model not copied?
a file is cut off: RuntimeError: FOLDER/b.safetensors cannot be read as safetensors (Error while deserializing header: invalid header length): it is damaged, or was not written to its end.
a file lacks its end: RuntimeError: FOLDER/b.safetensors cannot be read as safetensors (Error while deserializing header: incomplete metadata, file not fully covered): it is damaged, or was not written to its end.
a file is no such file: RuntimeError: FOLDER/b.safetensors cannot be read as safetensors (Error while deserializing header: header too large): it is damaged, or was not written to its end.
no index: RuntimeError: FOLDER has neither model.safetensors.index.json nor model.safetensors in it, but 2 other safetensors files: pass those that belong together.
of another model: RuntimeError: load_full_state_dict: missing in the source: inlet.weight (pass strict=False to keep what the model has).
the index names what is not there: RuntimeError: FOLDER/a.safetensors lacks blocks.9.weight, contrary to the index.
the index is cut off: RuntimeError: FOLDER/model.safetensors.index.json is not an index of safetensors files (JSONDecodeError: Unterminated string starting at: line 1 column 17 (char 16)).
nothing there: RuntimeError: FOLDER does not exist. Was a part of the model not copied?""",
    )


def refused_on_one_rank(folder: str) -> str:
    """The file is there for rank 0 alone, as it is where hosts share no file system."""
    model = Way(2).model(seed=1)
    own = folder if dist.get_rank() == 0 else folder + "_gone"
    return refusal(load_full_state_dict, model, own, src_rank=None)


def test_a_file_that_one_rank_lacks_is_told_by_all(world2: World, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    save_safetensors_plainly(Way(2), folder)
    assert "model_gone does not exist" in alike(world2.run(refused_on_one_rank, str(folder)))


@on_ranks(2)
def test_without_the_package_the_message_says_what_to_install() -> None:
    model = Way(2).model()
    with mock.patch.dict("sys.modules", {"safetensors": None}):
        for act in (load_full_state_dict, save_safetensors):
            assert "pip install 'shardwise[safetensors]'" in refusal(act, model, "x")
