"""`python -m shardwise convert`: checkpoints to safetensors files, and back, by one process."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from expecttest import assert_expected_inline
from harness import World
from models import Tower, built, random_batch, shard_tower, uneven_tower
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard as peers_fully_shard

from shardwise import load_checkpoint, save_checkpoint
from shardwise.__main__ import main
from shardwise.state.model_files import FileJob


def values() -> dict[str, Tensor]:
    return dict(built(uneven_tower).state_dict())


def assert_equal(found: dict[str, Tensor], dtype: torch.dtype | None = None) -> None:
    wanted = values()
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(found[name], value.to(dtype or value.dtype)), name


def files_in(folder: Path) -> dict[str, Tensor]:
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= load_file(path)
    return found


def save(path: Path, how: str) -> None:
    model = built(uneven_tower)
    if how == "ours":
        shard_tower(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
        model(random_batch(0, 4, 7)).sum().backward()
        optimizer.step()
        save_checkpoint(path, model, optimizer, shared={"step": 3})
        return
    for module in (*model.blocks, model):
        peers_fully_shard(module)
    state = model.state_dict()
    within: dict[str, Any] = {
        "top": state,
        "app": {"app": {"model": state, "step": 3}},
        "other": {"net": {"weights": state}},
        "titan": state | {"optimizer": {"m": torch.ones(2)}, "train_state": {"step": torch.tensor(3)}},
    }
    dcp.save(within[how], checkpoint_id=path)


@pytest.mark.parametrize(
    ("how", "options"),
    [("ours", []), ("top", []), ("titan", []), ("app", []), ("other", ["--key", "net.weights"])],
)
def test_a_checkpoint_becomes_safetensors(
    world2: World, tmp_path: Path, how: str, options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    world2.run(save, tmp_path / "saved", how)
    assert main(["convert", str(tmp_path / "saved"), str(tmp_path / "out"), *options]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'out'} is written.\n"
    assert_equal(files_in(tmp_path / "out"))


def test_files_are_as_large_and_of_the_dtype_that_is_asked_for(
    world2: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world2.run(save, tmp_path / "saved", "ours")
    held = []
    write = FileJob.write

    def noting(job: FileJob, own: Any, header: Any) -> None:
        held.append(sum(tensor.nbytes for _, tensors in own for tensor in tensors.values()))
        write(job, own, header)

    monkeypatch.setattr(FileJob, "write", noting)
    options = ["--dtype", "bf16", "--shard-size", "300B"]
    assert main(["convert", str(tmp_path / "saved"), str(tmp_path / "out"), *options]) == 0
    assert_equal(files_in(tmp_path / "out"), torch.bfloat16)
    assert len(held) > 3
    assert max(held) <= 300


def load(path: Path) -> dict[str, Tensor]:
    model = shard_tower(built(uneven_tower, seed=1))
    load_checkpoint(path, model)
    return {name: value.full_tensor() for name, value in model.state_dict().items()}


def load_by_torch(path: Path) -> dict[str, Tensor]:
    state = {"model": built(uneven_tower, seed=1).state_dict()}
    dcp.load(state, checkpoint_id=path)
    return dict(state["model"])


@pytest.mark.parametrize("reader", [load, load_by_torch])
def test_safetensors_become_a_checkpoint(world2: World, tmp_path: Path, reader: Any) -> None:
    (tmp_path / "in").mkdir()
    save_file(values(), tmp_path / "in" / "model.safetensors")
    assert main(["convert", str(tmp_path / "in"), str(tmp_path / "step-0")]) == 0
    for found in world2.run(reader, tmp_path / "step-0"):
        assert_equal(found)


class WithExtra(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": 3, "sums": torch.zeros(2)}

    def set_extra_state(self, state: Any) -> None:
        pass


def test_what_is_no_tensor_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = WithExtra()
    save_checkpoint(tmp_path / "saved", model)
    assert main(["convert", str(tmp_path / "saved"), str(tmp_path / "out")]) == 0
    assert capsys.readouterr().out.endswith(
        "Left out, as not tensors of the model: _extra_state.calls, _extra_state.sums.\n"
    )
    assert files_in(tmp_path / "out").keys() == {"linear.weight", "linear.bias"}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_what_cannot_be_converted_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_checkpoint(tmp_path / "step-1", Tower())
    (tmp_path / "empty").mkdir()
    damaged = tmp_path / "damaged"
    save_checkpoint(damaged, tower := Tower())
    (data,) = damaged.glob("*.distcp")
    content = bytearray(data.read_bytes())
    content[content.index(tower.inlet.weight.detach().numpy().tobytes())] ^= 1
    data.write_bytes(content)
    model = tmp_path / "model"
    model.mkdir()
    save_file(dict(Tower().state_dict()), model / "model.safetensors")
    (tmp_path / "torn.safetensors").write_bytes((model / "model.safetensors").read_bytes()[:-1])

    save_file({}, tmp_path / "nothing.safetensors")
    both = {"a": torch.ones(2), "_orig_mod.a": torch.zeros(2)}
    save_file(both, tmp_path / "wrapped.safetensors")
    dcp.save({"model": both}, checkpoint_id=tmp_path / "wrapped")

    lines = []
    for words in (
        ["step-1", "model"],
        ["step-1", "out", "--key", "ema"],
        ["step-1", "out", "--key", ""],
        ["step-1", "out", "--key", "shardwise"],
        ["step-1", "out", "--key", "model.inlet.weight"],
        ["step-1", "step-1"],
        ["step-1", "out", "--shard-size", "much"],
        ["damaged", "out"],
        ["empty", "out"],
        ["nowhere", "out"],
        ["model", "out", "--dtype", "bf16"],
        ["model", "out", "--key", "model", "--shard-size", "1GB", "--no-verify"],
        ["model", ".out"],
        ["model", "step-1"],
        ["nothing.safetensors", "out"],
        ["torn.safetensors", "out"],
        ["wrapped.safetensors", "out"],
        ["wrapped", "files"],
    ):
        source, target, *options = words
        assert main(["convert", str(tmp_path / source), str(tmp_path / target), *options]) == 2
        lines.append(capsys.readouterr().err.replace(str(tmp_path), "TMP"))
        assert not list(tmp_path.glob("*out/*"))
    assert_expected_inline(
        "".join(lines),
        """\
python -m shardwise convert: TMP/model has model.safetensors in it already, and two models in one folder could be mixed up. Choose an empty folder, or delete the old files first.
python -m shardwise convert: TMP/step-1 has no tensors at 'ema'. At its top are model, shardwise. Name the place of the model with --key, with dots between the keys of nested dicts.
python -m shardwise convert: TMP/step-1 has no tensors at its top. At its top are model, shardwise. Name the place of the model with --key, with dots between the keys of nested dicts.
python -m shardwise convert: TMP/step-1 has no tensors at 'shardwise'. At its top are model, shardwise. Name the place of the model with --key, with dots between the keys of nested dicts.
python -m shardwise convert: TMP/step-1 has no tensors at 'model.inlet.weight'. At its top are model, shardwise. Name the place of the model with --key, with dots between the keys of nested dicts.
python -m shardwise convert: TMP/step-1 is the source; name another folder to write.
python -m shardwise convert: --shard-size 'much' is not an amount of memory. Pass a number above 0 and a unit: 80GB is 80 * 10^9 bytes, 80GiB is 80 * 2^30. Known by name are a100, a100-40gb, h100, h200, b200, mi300x, mi325x, v100, t4, l4, a10g, l40s, rtx3090, rtx4090, rtx5090.
python -m shardwise convert: TMP/damaged is damaged. These parts are not what was written: __0_0.distcp, bytes 3783 to 5616: model.inlet.weight. Nothing was loaded; load an earlier checkpoint. --no-verify loads it as it is.
python -m shardwise convert: TMP/empty holds no safetensors and is not a checkpoint: the folder has no file .metadata.
python -m shardwise convert: TMP/nowhere holds no safetensors and is not a checkpoint: it does not exist.
python -m shardwise convert: --dtype cannot be used with safetensors, which become a checkpoint. load_checkpoint can convert dtypes (convert_dtype=True).
python -m shardwise convert: --key, --shard-size, --no-verify cannot be used with safetensors, which become a checkpoint.
python -m shardwise convert: TMP/.out: a checkpoint needs a name that does not start with a dot.
python -m shardwise convert: TMP/step-1 is a checkpoint already. Name another folder, or delete it first.
python -m shardwise convert: TMP/nothing.safetensors has no tensors.
python -m shardwise convert: TMP/torn.safetensors cannot be read as safetensors (Error while deserializing header: incomplete metadata, file not fully covered): it is damaged, or was not written to its end.
python -m shardwise convert: TMP/wrapped.safetensors has '_orig_mod.a' and 'a', which are both a without the prefixes of wrappers. Remove one.
python -m shardwise convert: TMP/wrapped has 'a' and '_orig_mod.a', which are both a without the prefixes of wrappers. Remove one.
""",
    )
    assert main(["convert", str(damaged), str(tmp_path / "out"), "--no-verify"]) == 0
