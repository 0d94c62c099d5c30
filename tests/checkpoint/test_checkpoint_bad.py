"""Checkpoints that are damaged, or not of this model, and disks that are full: refused before anything changes.

All ranks raise the same, and name the file and the key.
"""

import copy
import errno
import os
import pickle
import resource
import shutil
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from checkpointing import (
    Net,
    Run,
    by_block,
    everything,
    first_half,
    refused_to_save,
    second_half,
    uninterrupted,
)
from comparing import alike, assert_all_same
from expecttest import assert_expected_inline
from harness import World
from meshed import parameters_of, refusal
from on_ranks import on_ranks
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.state_dict import get_state_dict

from shardwise import fully_shard, latest_checkpoint, load_checkpoint, save_checkpoint
from shardwise.checkpoint import PendingSave
from shardwise.init.initialise import mark_partly_loaded, why_partly_loaded
from shardwise.state import EMA, save_safetensors


def refused(run: Run, *paths: str, with_optimizer: bool = True, **options: Any) -> str:
    """How loading each of `paths` is refused; neither the model nor the optimizer has changed, and both go on."""
    model, optimizer = run.start(2)
    run.train(model, optimizer, 0, 1)
    before, texts = everything(model, optimizer), []
    for path in paths or [run.path]:
        given = optimizer if with_optimizer else None
        texts.append(refusal(load_checkpoint, path, model, given, **options))
        assert_all_same([everything(model, optimizer)], before, 0.0)
    run.train(model, optimizer, 1, 1)
    return "\n".join(texts).replace(os.path.dirname(run.path), "RUN")


@pytest.fixture(scope="module")
def saved(world2: World, tmp_path_factory: pytest.TempPathFactory) -> str:
    run = Run(path=str(tmp_path_factory.mktemp("saved") / "step-2"))
    world2.run(first_half, run)
    return run.path


@pytest.fixture
def run(saved: str, tmp_path: Path) -> Run:
    shutil.copytree(saved, tmp_path / "step-2")
    return Run(path=str(tmp_path / "step-2"))


def at(run: Run, name: str) -> Path:
    return Path(run.path) / name


# --- no checkpoint --------------------------------------------------------------------------------


def test_what_is_no_checkpoint_is_said_to_be_none(world2: World, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    (tmp_path / ".dead.partial").mkdir()
    (tmp_path / ".dead.partial" / ".metadata").touch()
    for name in ("step-1", "step-2"):
        (tmp_path / "many" / name).mkdir(parents=True)
        (tmp_path / "many" / name / ".metadata").touch()
    names = ["nowhere", "file", "empty", "dead", ".dead.partial", "many"]
    paths = [str(tmp_path / name) for name in names]
    assert_expected_inline(
        alike(world2.run(refused, Run(path=paths[0]), *paths)),
        """\
FileNotFoundError: RUN/nowhere is not a checkpoint: it does not exist.
FileNotFoundError: RUN/file is not a checkpoint: it is a file; a checkpoint is a folder.
FileNotFoundError: RUN/empty is not a checkpoint: the folder has no file .metadata.
FileNotFoundError: RUN/dead is not a checkpoint: only RUN/.dead.partial is there, which an unfinished save left behind.
FileNotFoundError: RUN/.dead.partial is not a checkpoint: an unfinished save left it behind; load the checkpoint before it.
FileNotFoundError: RUN/many is not a checkpoint: it is a folder of checkpoints; load one of them, or what latest_checkpoint returns: step-1, step-2.""",
    )


def test_a_damaged_index_is_named(world2: World, run: Run) -> None:
    whole, paths = at(run, ".metadata").read_bytes(), []
    for number, content in enumerate((whole[:100], b"", pickle.dumps({"a": 1}))):
        paths.append(run.path + str(number))
        shutil.copytree(run.path, paths[-1])
        Path(paths[-1], ".metadata").write_bytes(content)
    for number, text in enumerate(alike(world2.run(refused, run, *paths)).splitlines()):
        start = f"ValueError: RUN/step-2{number} is damaged: .metadata is not what was written"
        assert text.startswith(start)
    texts = alike(world2.run(refused, run, *paths, verify=False)).splitlines()
    for number, text in enumerate(texts):
        assert text.startswith(f"ValueError: RUN/step-2{number}/.metadata cannot be read ")
    assert_expected_inline(
        texts[-1],
        """ValueError: RUN/step-22/.metadata cannot be read (TypeError: it holds a dict where a Metadata should be). It was damaged after it was written, or another program wrote it; load an earlier checkpoint.""",
    )


def test_a_missing_or_truncated_file_is_named(world2: World, world3: World, run: Run) -> None:
    paths = [run.path, run.path + "-short"]
    shutil.copytree(*paths)
    os.truncate(paths[1] + "/__0_0.distcp", 5000)
    at(run, "__1_0.distcp").unlink()
    text = alike([each for world in (world2, world3) for each in world.run(refused, run, *paths)])
    missing, short = text.splitlines()
    assert "is damaged: __0_0.distcp has 5000 bytes, where at least " in short
    assert_expected_inline(
        missing,
        """ValueError: RUN/step-2 is damaged: __1_0.distcp is missing. These contents are lost; load an earlier checkpoint. If ranks are on several hosts, the path must be on a file system that all of them share.""",
    )


# --- another model --------------------------------------------------------------------------------


class Renamed(Net):
    def __init__(self) -> None:
        super().__init__()
        self.entry = self.inlet
        del self.inlet

    def forward(self, x: Any) -> Any:
        return self.outlet(self.blocks[0](self.entry(x)))


@on_ranks(2)
def test_what_is_missing_and_what_is_unknown_may_be_passed_by(run: Run) -> None:
    model, _ = replace(run, build=Renamed).start(2)
    before, saved = parameters_of(model), run.start(3)[0]
    load_checkpoint(run.path, saved)
    told = refusal(load_checkpoint, run.path, model)
    assert "unexpected in the source: inlet.weight, inlet.bias (pass strict=False" in told
    assert "missing in the source: entry.weight, entry.bias (pass strict=False" in told
    loaded = load_checkpoint(run.path, model, strict=False)
    assert loaded.missing == ("entry.weight", "entry.bias")
    assert loaded.unexpected == ("inlet.weight", "inlet.bias")
    want = parameters_of(saved) | {name: before[name] for name in loaded.missing}
    found = parameters_of(model)
    assert_all_same([found], {name: want[name] for name in found}, 0.0)


def in_float32(model: nn.Module, layout: Any) -> nn.Module:
    return by_block(model.float(), layout)


@on_ranks(2)
def test_another_dtype_is_refused_unless_it_is_meant(run: Run) -> None:
    model, optimizer = replace(run, shard=in_float32).start(2)
    before, saved = everything(model, optimizer), run.start(3)
    told = refusal(load_checkpoint, run.path, model, optimizer).replace(os.path.dirname(run.path), "RUN")
    assert_all_same([everything(model, optimizer)], before, 0.0)
    load_checkpoint(run.path, model, optimizer, convert_dtype=True)
    load_checkpoint(run.path, *saved)
    want = {name: value.float() for name, value in everything(*saved).items()}
    assert_all_same([everything(model, optimizer)], want, 0.0)
    assert_expected_inline(
        told,
        """ValueError: RUN/step-2: dtypes differ: inlet.weight is torch.float64 in the source and torch.float32 in the model, inlet.bias is torch.float64 in the source and torch.float32 in the model, blocks.0.up.weight is torch.float64 in the source and torch.float32 in the model, blocks.0.up.bias is torch.float64 in the source and torch.float32 in the model, blocks.0.down.weight is torch.float64 in the source and torch.float32 in the model, blocks.0.down.bias is torch.float64 in the source and torch.float32 in the model, blocks.1.up.weight is torch.float64 in the source and torch.float32 in the model, blocks.1.up.bias is torch.float64 in the source and torch.float32 in the model and 7 more (pass convert_dtype=True to convert floating-point values).""",
    )


@on_ranks(2)
def test_a_checkpoint_without_a_model_says_what_it_has(tmp_path: Path) -> None:
    path = str(tmp_path / "checkpoint")
    model = by_block(Net(), None)
    dcp.save({"net": model.state_dict(), "step": 3}, checkpoint_id=path)
    text = refusal(load_checkpoint, path, model).replace(path, "PATH")
    assert_expected_inline(
        text,
        """ValueError: PATH holds no model: its keys are net, step, and not 'model'. Another program saved it in a different layout; read it with torch.distributed.checkpoint, and load the values into the model yourself.""",
    )


# --- another optimizer ----------------------------------------------------------------------------


def two_groups(params: Any, **options: Any) -> torch.optim.Optimizer:
    params = list(params)
    return torch.optim.AdamW([{"params": params[:3]}, {"params": params[3:], "lr": 0.5}], **options)


def without_the_last(params: Any, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(list(params)[:-1], **options)


def by_torchs_recipe(run: Run) -> None:
    model, optimizer = run.start(1)
    run.train(model, optimizer, 0)
    state, optim = get_state_dict(model, optimizer)
    dcp.save({"model": state, "optimizer": optim}, checkpoint_id=run.path)


def model_alone(run: Run) -> None:
    save_checkpoint(run.path, run.start(1)[0])


def test_another_optimizer_is_refused(world2: World, run: Run) -> None:
    for saving, name in ((first_half, "groups"), (by_torchs_recipe, "torch"), (model_alone, "alone")):
        optimizer = two_groups if name == "groups" else run.optimizer
        world2.run(saving, replace(run, path=f"{run.path}-{name}", optimizer=optimizer))
    cases = [
        (torch.optim.Adam, ""),
        (torch.optim.SGD, ""),
        (torch.optim.SGD, "-torch"),
        (two_groups, ""),
        (run.optimizer, "-groups"),
        (without_the_last, ""),
        (run.optimizer, "-alone"),
    ]
    texts = [world2.run(refused, replace(run, optimizer=other, path=run.path + end)) for other, end in cases]
    assert_expected_inline(
        "\n".join(map(alike, texts)),
        """\
ValueError: RUN/step-2 holds the state of AdamW, but is loaded into Adam. One kind of optimizer cannot use the state of another: build the same kind, or load only the model.
ValueError: RUN/step-2 holds the state of AdamW, but is loaded into SGD. One kind of optimizer cannot use the state of another: build the same kind, or load only the model.
ValueError: RUN/step-2-torch: group 0 of SGD has dampening, momentum, nesterov, but the saved group has amsgrad, betas, capturable, decoupled_weight_decay, eps: this is the state of another kind of optimizer. Build the same kind, or load only the model.
ValueError: RUN/step-2: inlet.weight and blocks.0.up.weight share a param group in the saved state, and are in two groups of the optimizer. Build the optimizer with the same groups as the one that was saved.
ValueError: RUN/step-2-groups: group 0 of AdamW joins parameters of several saved groups, which differ in 'lr': 0.05, 0.5. Build the optimizer with the same groups as the one that was saved.
ValueError: RUN/step-2: the optimizer has other parameters; saved only: outlet.bias. Nothing was loaded. strict=False keeps the state of those not saved.
ValueError: RUN/step-2-alone holds no optimizer. To start with a fresh one, call load_checkpoint(path, model).""",
    )


@on_ranks(2)
def test_state_without_one_owner_or_of_a_rank_is_not_saved(tmp_path: Path) -> None:
    run = Run(path=str(tmp_path / "x"))
    model, optimizer = run.start(1)
    _, of_another_model = run.start(1)
    told = [
        refusal(save_checkpoint, run.path, model, of_another_model),
        refusal(save_checkpoint, run.path, model, [optimizer, copy.copy(optimizer)]),
    ]
    optimizer.state["global"] = {"norm": 1.0}
    local = Local(model.parameters())
    local.step()
    assert_expected_inline(
        "\n".join([*told, *(refusal(save_checkpoint, run.path, model, each) for each in (optimizer, local))]),
        """\
ValueError: AdamW: parameter 0 of group 0, of shape (6, 6), does not belong to the model, so its state has no name in a checkpoint. Build the optimizer from model.parameters(), after the model was sharded.
ValueError: AdamW: another optimizer has inlet.weight, inlet.bias, blocks.0.gain, blocks.0.up.weight, blocks.0.up.bias, blocks.0.down.weight, blocks.0.down.bias, blocks.1.gain and 6 more as well, and a checkpoint holds one state and one set of hyperparameters for each. Give each parameter to one optimizer.
ValueError: AdamW: it keeps state under the key 'global', which is not a parameter, so the state has no name in a checkpoint. Keep it elsewhere, and save it beside the optimizer.
ValueError: inlet.weight: Local keeps 'mine' of it as a plain tensor of shape (19,), but the parameter is sharded: this rank cannot tell which part of the whole it holds. shardwise.optim.WholeParameters keeps such state whole, so that it can be saved.""",
    )
    assert not list(tmp_path.iterdir())


class Local(torch.optim.SGD):
    """Keeps the shard of this rank as if it were something of its own."""

    def step(self, closure: Any = None) -> None:
        for param in self.param_groups[0]["params"]:
            self.state[param]["mine"] = torch.zeros(param.to_local().numel() + 1)


# --- half-way -------------------------------------------------------------------------------------


def overwrite(run: Run, key: str) -> None:
    """Other bytes where the tensor `key` lies, as many as before."""
    for index, info in dcp.FileSystemReader(run.path).read_metadata().storage_data.items():
        if index.fqn == key:
            with at(run, info.relative_path).open("r+b") as file:
                file.seek(info.offset)
                file.write(os.urandom(info.length))


def corrupt_then_whole(run: Run, good: str) -> list[str]:
    model, optimizer = run.start(2)
    seen = [refusal(load_checkpoint, run.path, model, optimizer, verify=False)]
    seen.append(refusal(model, torch.ones(2, 6, dtype=torch.float64)))
    seen.append(refusal(save_checkpoint, good + "-new", model, optimizer))
    load_checkpoint(good, model, optimizer)
    run.train(model, optimizer, 2)
    return seen


def test_a_model_that_was_loaded_half_does_not_run(world2: World, world3: World, run: Run) -> None:
    good = run.path
    run = replace(run, path=good + "-bad")
    shutil.copytree(good, run.path)
    overwrite(run, "model.outlet.weight")
    for world in (world2, world3):
        seen = world.run(corrupt_then_whole, run, good)
        first, forward, saving = seen[0]
        assert all(each == seen[0] for each in seen)
        assert first.startswith("RuntimeError: ")
        assert f"{run.path}: reading its tensors failed. Files may have been damaged" in first
        assert first.endswith(
            "The weights are a mix of those of the checkpoint and others. Load another one."
        )
        assert first.removeprefix("RuntimeError: ").rstrip(".") in forward
        assert "Load a complete checkpoint before saving" in saving
        assert latest_checkpoint(Path(good).parent) == Path(good)


class Stubborn(nn.Linear):
    def set_extra_state(self, state: Any) -> None:
        raise ValueError("no, thank you")

    def get_extra_state(self) -> Any:
        return "please"


@on_ranks(2)
def test_damage_is_not_blamed_for_what_the_model_does_or_torch_warns_of(tmp_path: Path) -> None:
    path = str(tmp_path / "x")

    def warn(*args: Any) -> None:
        warnings.warn("use another function", DeprecationWarning, stacklevel=2)

    model = fully_shard(nn.Sequential(Stubborn(2, 2)))
    save_checkpoint(path, model)
    told = [refusal(load_checkpoint, path, model)]
    with mock.patch.object(dcp.DefaultLoadPlanner, "commit_tensor", warn):
        told.append(refusal(load_checkpoint, path, model))
    assert_expected_inline(
        "\n".join([text.replace(path, "PATH") for text in told]),
        """\
RuntimeError: PATH: loading what was read into the model failed: ValueError: no, thank you. The weights are a mix of those of the checkpoint and others. Load another one.
RuntimeError: PATH: reading its tensors failed: DeprecationWarning: use another function. The weights are a mix of those of the checkpoint and others. Load another one.""",
    )


@on_ranks(2)
def test_a_part_of_the_weights_does_not_make_a_model_whole(run: Run) -> None:
    model = by_block(Renamed().double(), None)
    mark_partly_loaded(model, "a load failed half-way.")
    load_checkpoint(run.path, model, strict=False)
    refused = refusal(model, torch.ones(2, 6, dtype=torch.float64))
    whole = by_block(Net().double(), None)
    mark_partly_loaded(whole, "a load failed half-way.")
    load_checkpoint(run.path, whole, strict=False)
    whole(torch.ones(2, 6, dtype=torch.float64))
    assert "a load failed half-way" in refused


# --- objects beside the model ---------------------------------------------------------------------


@on_ranks(2)
def test_states_of_other_objects_are_refused(tmp_path: Path) -> None:
    path = str(tmp_path / "x")
    model = fully_shard(nn.Linear(4, 2))
    ema = EMA(model)
    save_checkpoint(path, model, states={"ema": ema})
    wider = fully_shard(nn.Linear(4, 3))
    told = [
        refusal(load_checkpoint, path, model, states={"ema": EMA(wider)}),
        refusal(
            load_checkpoint, path, model, states={"ema": EMA(fully_shard(nn.Sequential(nn.Linear(4, 2))))}
        ),
        refusal(load_checkpoint, path, model, states={"ema": EMA(model, dtype=torch.float64)}),
        refusal(load_checkpoint, path, model, states={"mean": ema}),
        refusal(load_checkpoint, path, model, states={"ema": ema.state_dict()}),
        refusal(save_checkpoint, path, model, states=[1]),
    ]
    assert load_checkpoint(path, model, states={"mean": ema}, strict=False).missing == ("states.mean",)
    assert why_partly_loaded(model) is None
    assert_expected_inline(
        "\n".join([text.replace(path, "PATH") for text in told]),
        """\
ValueError: PATH: states do not fit: ema.averages.weight has shape (2, 4) in the source and (3, 4) in the model; ema.averages.bias has shape (2,) in the source and (3,) in the model.
ValueError: PATH: states do not fit: unexpected in the source: ema.averages.weight, ema.averages.bias; missing in the source: ema.averages.0.weight, ema.averages.0.bias.
ValueError: PATH: states do not fit: dtypes differ: ema.averages.weight is torch.float32 in the source and torch.float64 in the model, ema.averages.bias is torch.float32 in the source and torch.float64 in the model (pass convert_dtype=True to convert floating-point values).
ValueError: PATH holds no state of mean; it has ema. Nothing was loaded. strict=False leaves the object as it is.
TypeError: states['ema'] is a dict, which has no state_dict() and load_state_dict(). Pass the object itself, not its state; what has no such methods goes into `shared` or `per_rank`.
TypeError: states must be a dict with names as keys, not [1]""",
    )


# --- disks ----------------------------------------------------------------------------------------


def full_disk(run: Run, on_rank: int, num_bytes: int, asynchronous: bool) -> list[str]:
    model, optimizer = run.start(1)
    run.train(model, optimizer, 0)
    save_checkpoint(run.path, model, optimizer, shared={"step": 2})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == on_rank:
        resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limits[1]))
    seen = []
    try:
        if asynchronous:
            pending = save_checkpoint(run.path, model, optimizer, asynchronous=True)
            seen = [refusal(pending.wait), refusal(pending.wait)]
            assert seen[0] == seen[1]
        else:
            seen = [refusal(save_checkpoint, run.path, model, optimizer)]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        dist.barrier()
    assert os.listdir(os.path.dirname(run.path)) == ["step-2"]
    run.train(model, optimizer, 2)
    save_checkpoint(run.path + "0", model, optimizer)  # the next one works
    return seen


@pytest.mark.parametrize(("on_rank", "asynchronous"), [(0, False), (1, True)])
def test_a_full_disk_is_told_by_all_ranks_and_loses_nothing(
    world2: World, tmp_path: Path, on_rank: int, asynchronous: bool
) -> None:
    run = Run(path=str(tmp_path / "step-2"))
    text = alike([" ".join(each) for each in world2.run(full_disk, run, on_rank, 3000, asynchronous)])
    assert f"rank {on_rank} could not write the checkpoint {run.path} (into {tmp_path}/.step-2." in text
    assert os.strerror(errno.EFBIG) in text
    assert "bytes free. A checkpoint that was there before is still there." in text
    assert_all_same(world2.run(second_half, run), uninterrupted(run), 1e-10)


def test_a_write_that_fails_is_told_in_the_words_of_the_system(tmp_path: Path) -> None:
    """And not as torch does, which cannot close its archive then."""
    real, error = FileSystem.create_stream, OSError(errno.EIO, os.strerror(errno.EIO))

    @contextmanager
    def create_stream(fs: Any, place: Any, mode: str) -> Iterator[Any]:
        with real(fs, place, mode) as file:
            yield mock.Mock(wraps=file, write=mock.Mock(side_effect=error))

    with mock.patch.object(FileSystem, "create_stream", create_stream):
        text = refusal(save_checkpoint, tmp_path / "step-1", nn.Linear(2, 2))
    assert text.startswith("OSError: rank 0 could not write the checkpoint")
    assert "OSError: [Errno 5] Input/output error: '" in text
    assert "partial/__0_0.distcp'. The file system has " in text
    assert not list(tmp_path.iterdir())


def test_what_is_not_ours_is_not_replaced(world2: World, tmp_path: Path) -> None:
    folder = tmp_path / "thesis"
    folder.mkdir()
    (folder / "chapter.tex").touch()
    assert "exists and is not a checkpoint" in alike(world2.run(refused_to_save, str(folder)))
    assert "exists and is not a checkpoint" in alike(world2.run(refused_to_save, str(folder / "chapter.tex")))
    assert "NotADirectoryError" in alike(world2.run(refused_to_save, str(folder / "chapter.tex" / "step-1")))
    assert [each.name for each in folder.iterdir()] == ["chapter.tex"]
    assert [each.name for each in tmp_path.iterdir()] == ["thesis"]


class Unpicklable:
    def __reduce__(self) -> Any:
        raise TypeError("this cannot be written down")


@pytest.mark.parametrize("where", ["shared", "per_rank"])
@on_ranks(2)
def test_what_cannot_be_pickled_is_told_by_all_ranks(tmp_path: Path, where: str) -> None:
    own = {"it": Unpicklable()} if dist.get_rank() == 1 or where == "shared" else {}
    text = refusal(save_checkpoint, tmp_path / "x", fully_shard(nn.Linear(2, 2)), **{where: own})
    assert f"rank {0 if where == 'shared' else 1} could not write" in text
    assert "this cannot be written down" in text


@on_ranks(2)
def test_shards_of_one_rank_are_not_taken_for_all(tmp_path: Path) -> None:
    model = fully_shard(nn.Linear(2, 2))
    nested = {"step": 1, "ema": EMA(model).state_dict()}
    told = [
        refusal(save_checkpoint, tmp_path / "x", model, shared=nested),
        refusal(save_checkpoint, tmp_path / "x", model, shared={"weight": model.weight}),
        refusal(save_checkpoint, tmp_path / "x", model, per_rank={"all": [(0, {"weight": model.weight})]}),
    ]
    assert list(tmp_path.iterdir()) == []
    assert_expected_inline(
        "\n".join(told),
        """\
ValueError: shared['ema']['averages']['weight'] is a DTensor of shape (2, 2) with placements (Shard(dim=0),), of which each rank has a part. Only the part of one rank would be saved, and all ranks would load that part. Pass the object whose state it is in `states`, as states={'ema': ema}, or the full tensor.
ValueError: shared['weight'] is a DTensor of shape (2, 2) with placements (Shard(dim=0),), of which each rank has a part. Only the part of one rank would be saved, and all ranks would load that part. Pass the object whose state it is in `states`, as states={'ema': ema}, or the full tensor.
ValueError: per_rank['all'][0][1]['weight'] is a DTensor of shape (2, 2) with placements (Shard(dim=0),), of which each rank has a part. Only the part of one rank would be saved, and all ranks would load that part. Pass the object whose state it is in `states`, as states={'ema': ema}, or the full tensor.""",
    )


@on_ranks(2)
def test_whole_parameters_that_differ_by_rank_are_not_lost(tmp_path: Path) -> None:
    torch.manual_seed(0)
    rank = dist.get_rank()
    model = nn.Sequential(OrderedDict(shared=nn.Linear(2, 2), expert=nn.Linear(2, 2)))
    with pytest.warns(UserWarning, match="ignored_params contains trainable"):
        fully_shard(model, ignored_params=set(model.expert.parameters()))
    save_checkpoint(tmp_path / "equal-1", model)
    nn.init.constant_(model.expert.weight, rank + 1.0)
    own, path = {"expert": model.expert.state_dict()}, tmp_path / "step-1"
    optimizer = torch.optim.AdamW(model.parameters())
    first, *others = [
        refusal(save_checkpoint, path, model, optimizer),
        refusal(save_checkpoint, path, model, asynchronous=True),
        refusal(save_checkpoint, path, model, per_rank={} if rank else own),
    ]
    assert others == [first] * 2
    save_checkpoint(path, model, optimizer, per_rank=own)
    nn.init.zeros_(model.expert.weight)
    loaded = load_checkpoint(path, model)
    assert loaded.per_rank is not None
    model.expert.load_state_dict(loaded.per_rank["expert"])
    assert model.expert.weight.unique().tolist() == [rank + 1]
    model.expert.weight.requires_grad_(False)  # each rank's own matter, as buffers do
    save_checkpoint(tmp_path / "frozen-1", model)
    assert_expected_inline(
        first,
        """ValueError: save_checkpoint: expert.weight: not sharded, trainable, and different on ranks 0 and 1. A checkpoint holds such parameters once, and would lose what rank 1 has. If each rank trains its own, as with experts in ignored_params, pass the values in per_rank as well, per_rank={'experts': model.experts.state_dict()}, and restore them after a load. Do the same with the state of their optimizer. If they should be equal, call sync_module_states(model), and model.set_reduce_ignored_params(True).""",
    )


class Marked(torch.Tensor):
    """A class of tensors that torch was not told to trust."""


@on_ranks(2)
def test_what_could_not_be_read_again_is_not_written(tmp_path: Path) -> None:
    path = str(tmp_path / "x")
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].register_buffer("marked", torch.ones(2).as_subclass(Marked))
    told = refusal(save_checkpoint, path, model)
    with torch.serialization.safe_globals([Marked]):
        save_checkpoint(path, model)
        model[0].marked.zero_()
        load_checkpoint(path, model)
    assert model[0].marked.tolist() == [1.0, 1.0]
    assert_expected_inline(
        told,
        """ValueError: 0.marked of the model is a test_checkpoint_bad.Marked. torch loads tensors only of classes that it trusts, so this one could be saved, but not loaded. Call torch.serialization.add_safe_globals with the class and with what its pickles need, before saving and before loading; or convert the model back before saving.""",
    )


# --- calls that differ by rank --------------------------------------------------------------------


@on_ranks(2)
def test_what_one_rank_alone_passes_is_refused_by_all(tmp_path: Path) -> None:
    path = str(tmp_path / "step-1")
    model = fully_shard(nn.Linear(2, 2))
    save_checkpoint(path, model, keep=3)
    optimizer = torch.optim.SGD(model.parameters())
    alone = dist.get_rank() == 1

    def told(act: Callable[..., Any], *args: Any, **bad: Any) -> str:
        good = {"path": path, "model": model, "directory": path + "-st"}
        taken = ("model", "directory") if act is save_safetensors else ("path", "model")
        return refusal(act, **{name: good[name] for name in taken} | (bad if alone else {}))

    seen = [
        told(load_checkpoint, path=None),
        told(load_checkpoint, path=3),
        told(load_checkpoint, model=None),
        told(load_checkpoint, optimizer="SGD"),
        told(load_checkpoint, optimizer=optimizer),
        told(load_checkpoint, states=[model]),
        told(load_checkpoint, strict=Unpicklable()),
        told(load_checkpoint, strict=False),
        told(load_checkpoint, verify=None),
        told(load_checkpoint, trust=True),
        told(save_checkpoint, path=None),
        told(save_checkpoint, path=path + "0"),
        told(save_checkpoint, optimizer=optimizer),
        told(save_checkpoint, model=None),
        told(save_checkpoint, keep="all"),
        told(save_checkpoint, keep=1),
        told(save_checkpoint, keep=0),
        told(save_checkpoint, keep=1, path=path + "x"),
        told(save_checkpoint, path=tmp_path / ".hidden"),
        told(save_checkpoint, asynchronous=Unpicklable()),
        told(save_checkpoint, shared=[1]),
        told(save_checkpoint, states={"ema": EMA(model)} if alone else None),
        told(save_safetensors, directory=None),
        told(save_safetensors, directory=path),
        told(save_safetensors, max_shard_bytes=4),
        told(save_safetensors, metadata=[1]),
        told(save_safetensors, dtype=torch.float16),
    ]
    save_checkpoint(path, model)  # nobody waits for anybody
    load_checkpoint(path, model)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["step-1"]
    assert_expected_inline(
        "\n".join(seen).replace(str(tmp_path), "RUN"),
        """\
TypeError: rank 1: load_checkpoint: path is None; pass the folder of a checkpoint, as a str or a Path (latest_checkpoint returns None if it finds none: call resume).
TypeError: rank 1: load_checkpoint: path is 3, an int; pass the folder of a checkpoint, as a str or a Path.
TypeError: rank 1: load_checkpoint: model is None; pass an nn.Module.
TypeError: rank 1: optimizer is a str; pass a torch.optim.Optimizer, or a list of them
ValueError: load_checkpoint: ranks disagree on optimizer: rank 0 has False, rank 1 has True. Pass the same on all ranks.
TypeError: rank 1: states must be a dict with names as keys, not [FSDPLinear(in_features=2, out_features=2, bias=True)]
TypeError: rank 1: load_checkpoint: strict is a Unpicklable; pass True or False.
ValueError: load_checkpoint: ranks disagree on strict: rank 0 has True, rank 1 has False. Pass the same on all ranks.
TypeError: rank 1: load_checkpoint: verify is None; pass True or False.
ValueError: load_checkpoint: ranks disagree on trust: rank 0 has False, rank 1 has True. Pass the same on all ranks.
TypeError: rank 1: save_checkpoint: path is None; pass the folder of a checkpoint, as a str or a Path.
ValueError: save_checkpoint: ranks disagree on path: rank 0 has 'RUN/step-1', rank 1 has 'RUN/step-10'. Pass the same on all ranks.
ValueError: save_checkpoint: ranks disagree on optimizer: rank 0 has False, rank 1 has True. Pass the same on all ranks.
TypeError: rank 1: save_checkpoint: model is None; pass an nn.Module.
TypeError: rank 1: save_checkpoint: keep is 'all', a str; pass how many checkpoints to keep, or None.
ValueError: save_checkpoint: ranks disagree on keep: rank 0 has None, rank 1 has 1. Pass the same on all ranks.
ValueError: rank 1: save_checkpoint: keep=0 for step-1: keep must be at least 1, and needs names that end in a number, such as step-100.
ValueError: rank 1: save_checkpoint: keep=1 for step-1x: keep must be at least 1, and needs names that end in a number, such as step-100.
ValueError: rank 1: save_checkpoint: RUN/.hidden: a checkpoint needs a name that does not start with a dot.
TypeError: rank 1: save_checkpoint: asynchronous is a Unpicklable; pass True or False.
TypeError: rank 1: shared must be a dict with names as keys, not [1]
ValueError: save_checkpoint: ranks disagree on states: rank 0 has [], rank 1 has ['ema']. Pass the same on all ranks.
TypeError: rank 1: save_safetensors: directory is None; pass a folder, as a str or a Path.
ValueError: save_safetensors: ranks disagree on directory: rank 0 has 'RUN/step-1-st', rank 1 has 'RUN/step-1'. Pass the same on all ranks.
ValueError: save_safetensors: ranks disagree on max_shard_bytes: rank 0 has 1073741824, rank 1 has 4. Pass the same on all ranks.
ValueError: rank 1: save_safetensors: metadata is [1]; names and values have to be strings.
ValueError: save_safetensors: ranks disagree on dtype: rank 0 has None, rank 1 has torch.float16. Pass the same on all ranks.""",
    )


class Several(torch.optim.SGD):
    """One stage of a pipeline, whose param groups hold what no other rank may have."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)
        if dist.get_rank() == 1:
            self.param_groups[0]["mine"] = Unpicklable()


@on_ranks(2)
def test_param_groups_that_cannot_travel_are_told_by_all_ranks(tmp_path: Path) -> None:
    model = nn.Sequential(OrderedDict({f"stage{dist.get_rank()}": nn.Linear(2, 2)}))
    text = refusal(save_checkpoint, str(tmp_path / "x"), model, Several(model.parameters()))
    assert text == "TypeError: rank 1: this cannot be written down"


# --- a failure that nobody asks for ---------------------------------------------------------------


def test_a_background_save_that_loses_another_rank_says_what_was_not_saved(tmp_path: Path) -> None:
    pending = PendingSave(tmp_path / "step-1")
    pending.run_in_thread(mock.Mock(side_effect=dist.DistBackendError("read error")))
    text = refusal(pending.wait)
    assert text.replace(str(tmp_path), "RUN") == (
        "CommunicationError: RUN/step-1 was not saved: an exchange with another rank failed (read error). If "
        "that rank has ended, see its log."
    )


def test_a_failure_in_the_background_is_not_lost(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fails = mock.patch.object(dcp.FileSystemWriter, "write_data", side_effect=OSError(errno.ENOSPC, "full"))
    with fails:
        pending = save_checkpoint(tmp_path / "step-1", nn.Linear(2, 2), asynchronous=True)
        while not pending.done():
            pass
    (record,) = caplog.records  # the job may end here
    assert record.levelname == "ERROR"
    assert "step-1 was not saved: " in record.getMessage()
    with pytest.warns(RuntimeWarning, match="the save before this one failed: .*full"):
        save_checkpoint(tmp_path / "step-2", nn.Linear(2, 2))
    assert [each.name for each in tmp_path.iterdir()] == ["step-2"]
