"""`python -m shardwise convert` reads what DeepSpeed's ZeRO saves, without DeepSpeed.

The files here are made as DeepSpeed 0.19.8 makes them; tests/interop/test_deepspeed.py has DeepSpeed make some.
"""

import enum
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from comparing import assert_equal
from expecttest import assert_expected_inline
from safetensors.torch import load_file
from torch import Tensor, nn

from shardwise.__main__ import main
from shardwise.checkpoint import load_checkpoint

WORLD = 3
TRAINED = [{"a.weight": (4, 5), "a.bias": (4,)}, {"b.weight": (7, 2)}]  # by param group; nothing divides by 3
FROZEN = {"frozen": (5,)}


def values() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {name: shape for group in (*TRAINED, FROZEN) for name, shape in group.items()}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


@pytest.fixture
def deepspeed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Classes of the names that stand in its files; they are gone when those are read."""

    class LossScaler:
        def __init__(self) -> None:
            self.cur_scale = 1.0

    class ZeroStageEnum(enum.IntEnum):
        gradients = 2
        weights = 3

    classes = {
        "deepspeed.runtime.fp16.loss_scaler": LossScaler,
        "deepspeed.runtime.zero.config": ZeroStageEnum,
    }
    with monkeypatch.context() as patch:
        for parent in ("deepspeed", "deepspeed.runtime", "deepspeed.runtime.fp16", "deepspeed.runtime.zero"):
            patch.setitem(sys.modules, parent, types.ModuleType(parent))
        for name, each in classes.items():
            each.__module__, each.__qualname__ = name, each.__name__
            module = types.ModuleType(name)
            setattr(module, each.__name__, each)
            patch.setitem(sys.modules, name, module)
        yield types.SimpleNamespace(LossScaler=LossScaler, ZeroStageEnum=ZeroStageEnum)


def parts_of(value: Tensor) -> list[Tensor]:
    size = -(-value.numel() // WORLD)
    flat = torch.zeros(size * WORLD)
    flat[: value.numel()] = value.flatten()
    return list(flat.split(size))


def adam_of(parts: list[Tensor]) -> dict[str, Any]:
    """The first moment is the weight, the second its square; steps are counted as DeepSpeed's own Adam does."""
    hyper = {"lr": 0.5, "betas": (0.8, 0.9), "eps": 1e-3, "step": 7, "bias_correction": True}
    return {
        "state": {i: {"exp_avg": part.clone(), "exp_avg_sq": part * part} for i, part in enumerate(parts)},
        "param_groups": [hyper | {"weight_decay": 0.1 * i, "params": [i]} for i in range(len(parts))],
    }


def save_zero(folder: Path, stage: int, deepspeed: Any, paddings: list[list[int]] | None = None) -> None:
    folder.mkdir(parents=True)
    whole = values()
    module = {name: value.bfloat16() for name, value in whole.items()} | {
        "tied": whole["a.weight"].bfloat16()
    }
    model: dict[str, Any] = {
        "module": module | {"buffer": torch.arange(3)},
        "buffer_names": ["buffer"],
        "param_shapes": [{name: torch.Size(shape) for name, shape in group.items()} for group in TRAINED],
        "frozen_param_shapes": {name: torch.Size(shape) for name, shape in FROZEN.items()},
        "shared_params": {"tied": "a.weight"},
        "dp_world_size": WORLD,
        "global_steps": 7,
    }
    common = {"loss_scaler": deepspeed.LossScaler(), "zero_stage": deepspeed.ZeroStageEnum(stage)}
    if stage == 3:
        groups = [
            [torch.cat([parts_of(whole[n])[rank] for n in group]) for group in TRAINED]
            for rank in range(WORLD)
        ]
        states = [
            common | {"fp32_flat_groups": groups[rank], "optimizer_state_dict": adam_of(groups[rank])}
            for rank in range(WORLD)
        ]
        for rank in range(WORLD):
            frozen = {name: parts_of(whole[name].float())[rank].bfloat16() for name in FROZEN}
            empty = {name: value.new_empty(0) for name, value in module.items()} | {"buffer": torch.arange(3)}
            own = model | {"module": empty, "frozen_param_fragments": frozen}
            torch.save(own, folder / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
    else:
        own_paddings = paddings or [[0] * len(group) for group in TRAINED]
        flats = [
            torch.cat(
                [torch.cat([whole[n].flatten(), torch.zeros(p)]) for n, p in zip(group, pads, strict=True)]
            )
            for group, pads in zip(TRAINED, own_paddings, strict=True)
        ]
        cut = [parts_of(flat) for flat in flats]
        more = {} if paddings is None else {"param_alignment_paddings": paddings}
        states = []
        for rank in range(WORLD):
            own = [each[rank] for each in cut]
            adam = {"base_optimizer_state": adam_of(own)}
            if rank == WORLD - 1:  # without the padding
                own = [part[: len(flat) - rank * len(part)] for part, flat in zip(own, flats, strict=True)]
            states.append(common | more | {"single_partition_of_fp32_groups": own} | adam)
        torch.save(model, folder / "mp_rank_00_model_states.pt")
    for rank, state in enumerate(states):
        path = folder / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        torch.save({"optimizer_state_dict": state, "ds_version": "0.19.8"}, path)


def converted(source: Path, out: Path, *options: str) -> dict[str, Tensor]:
    assert main(["convert", str(source), str(out), *options]) == 0
    return {
        name: value for path in sorted(out.glob("*.safetensors")) for name, value in load_file(path).items()
    }


def assert_all_there(found: dict[str, Tensor]) -> None:
    whole = values()
    assert found.keys() == whole.keys() | {"buffer"}  # tied weights once
    assert torch.equal(found["buffer"], torch.arange(3))
    for name, value in whole.items():
        wanted = value.bfloat16() if name in FROZEN else value
        assert torch.equal(found[name], wanted), name


@pytest.mark.parametrize(
    ("stage", "paddings"), [(2, None), (2, [[4, 1], [3]]), (3, None)], ids=["2", "2, aligned", "3"]
)
def test_trained_weights_are_those_of_the_optimizer(
    tmp_path: Path,
    deepspeed: Any,
    stage: int,
    paddings: list[list[int]] | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    save_zero(tmp_path / "run" / "global_step3", stage, deepspeed, paddings)
    (tmp_path / "run" / "latest").write_text("global_step3\n")
    for name in [name for name in sys.modules if name.startswith("deepspeed")]:
        monkeypatch.delitem(sys.modules, name)
    assert_all_there(converted(tmp_path / "run", tmp_path / "out"))
    # Also the folder itself, and file by file.
    assert_all_there(converted(tmp_path / "run" / "global_step3", tmp_path / "again", "--shard-size", "100B"))


def test_weights_of_a_compiled_model_are_those_of_the_optimizer_too(tmp_path: Path, deepspeed: Any) -> None:
    """Its names have a prefix, in all the places of the file."""
    save_zero(tmp_path / "run", 2, deepspeed)
    path = tmp_path / "run" / "mp_rank_00_model_states.pt"
    saved = torch.load(path, weights_only=False)
    of_model = [saved["module"], *saved["param_shapes"], saved["frozen_param_shapes"], saved["shared_params"]]
    for named in of_model:
        for name in list(named):
            named["_orig_mod." + name] = named.pop(name)
    saved["buffer_names"] = ["_orig_mod.buffer"]
    torch.save(saved, path)
    assert_all_there(converted(tmp_path / "run", tmp_path / "out"))
    assert main(["convert", str(tmp_path / "run"), str(tmp_path / "step-7"), "--optimizer"]) == 0


@pytest.mark.parametrize("stage", [2, 3])
def test_an_optimizer_goes_on_where_deepspeeds_was(tmp_path: Path, deepspeed: Any, stage: int) -> None:
    save_zero(tmp_path / "saved", stage, deepspeed)
    assert main(["convert", str(tmp_path / "saved"), str(tmp_path / "step-7"), "--optimizer"]) == 0
    model = nn.Module()
    model.a, model.b = nn.Linear(5, 4), nn.Linear(2, 7, bias=False)
    model.frozen = nn.Parameter(torch.zeros(5, dtype=torch.bfloat16), requires_grad=False)
    model.register_buffer("buffer", torch.zeros(3, dtype=torch.int64))
    groups = [{"params": [*model.a.parameters()]}, {"params": [*model.b.parameters()]}]
    optimizer = torch.optim.Adam(groups, lr=1.0)
    assert load_checkpoint(tmp_path / "step-7", model, optimizer).step == 7
    assert [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups] == [
        (0.5, 0),
        (0.5, 0.1),
    ]
    for name, value in values().items():
        assert torch.equal(model.get_parameter(name), value.bfloat16() if name in FROZEN else value), name
        if name not in FROZEN:
            state = optimizer.state[model.get_parameter(name)]
            assert_equal(
                state, {"step": torch.tensor(7.0), "exp_avg": value, "exp_avg_sq": value * value}, name
            )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["saved", "step-7"]


def test_what_is_no_state_of_such_an_optimizer_is_refused(
    tmp_path: Path, deepspeed: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    save_zero(tmp_path / "factored", 2, deepspeed)
    save_zero(tmp_path / "elastic", 2, deepspeed)
    (tmp_path / "empty").mkdir()
    for rank in range(WORLD):
        name = f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        for folder in ("factored", "elastic"):
            saved = torch.load(tmp_path / folder / name, weights_only=False)
            own = saved["optimizer_state_dict"]
            if folder == "elastic":
                own["base_optimizer_state"] = [own["base_optimizer_state"]]
            else:
                own["base_optimizer_state"]["state"][0]["row"] = torch.ones(4)
            torch.save(saved, tmp_path / folder / name)
    of_files = ["--key", "model", "--shard-size", "1GB"]
    for source, *options in (
        *(["factored", "--optimizer"], ["elastic", "--optimizer"], ["empty", "--optimizer"]),
        *(["factored", "--optimizer", "--dtype", "bf16"], ["factored", "--optimizer", *of_files]),
        ["factored", *of_files],
    ):
        arguments = [str(tmp_path / source), str(tmp_path / "out"), *options]
        assert main(["convert", *arguments]) == 2
        assert not (tmp_path / "out").exists()
    assert_expected_inline(
        capsys.readouterr().err.replace(str(tmp_path), "TMP"),
        """\
python -m shardwise convert: TMP/factored has 'row' in the optimizer's state, of other shapes than the parameters, so it is unknown which part belongs to which. Leave out --optimizer.
python -m shardwise convert: TMP/elastic has no state of an optimizer as stages 1 to 3 save it, without elastic_checkpoint. Leave out --optimizer to convert the weights.
python -m shardwise convert: --optimizer is for a folder of DeepSpeed's ZeRO, and TMP/empty is none. load_checkpoint(path, model, optimizer) reads the others as they are.
python -m shardwise convert: --dtype cannot be used with --optimizer, which writes a checkpoint. load_checkpoint can convert dtypes (convert_dtype=True).
python -m shardwise convert: --key, --shard-size cannot be used with --optimizer, which writes a checkpoint.
python -m shardwise convert: --key cannot be used with a folder of ZeRO.
""",
    )


@pytest.mark.parametrize("options", [[], ["--optimizer"]])
@pytest.mark.parametrize(("stage", "file"), [(2, "optim"), (3, "optim"), (3, "model")])
def test_files_of_two_saves_are_refused(
    stage: int, file: str, options: list[str], tmp_path: Path, deepspeed: Any, capsys: Any
) -> None:
    save_zero(tmp_path / "saved", stage, deepspeed)
    (path,) = (tmp_path / "saved").glob(f"*zero_pp_rank_1_*{file}_states.pt")
    saved = torch.load(path, weights_only=False)
    if file == "model":
        saved["global_steps"] = 8
    else:
        of_stage = "optimizer_state_dict" if stage == 3 else "base_optimizer_state"
        for group in saved["optimizer_state_dict"][of_stage]["param_groups"]:
            group["step"] = 8
    torch.save(saved, path)
    assert main(["convert", str(tmp_path / "saved"), str(tmp_path / "out"), *options]) == 2
    said = capsys.readouterr().err
    assert f"*_{file}_states.pt of different steps: step 7 of ranks 0, 2; step 8 of rank 1." in said
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("options", [[], ["--optimizer"]])
def test_a_flipped_bit_is_found(options: list[str], tmp_path: Path, deepspeed: Any, capsys: Any) -> None:
    save_zero(tmp_path / "saved", 2, deepspeed)
    path = next((tmp_path / "saved").glob("*zero_pp_rank_1_*optim_states.pt"))
    data = bytearray(path.read_bytes())
    weights = torch.load(path, weights_only=False)["optimizer_state_dict"]["single_partition_of_fp32_groups"]
    data[data.index(weights[0].numpy().tobytes())] ^= 1
    path.write_bytes(data)
    arguments = ["convert", str(tmp_path / "saved"), str(tmp_path / "out"), *options]
    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert f"{path} is damaged" in said
    assert "--no-verify reads it as it is" in said
    assert not (tmp_path / "out").exists()
    assert main([*arguments, "--no-verify"]) == 0


def test_without_an_optimizers_parts_the_weights_are_the_models(tmp_path: Path, deepspeed: Any) -> None:
    """Stage 0 has none."""
    save_zero(tmp_path / "saved", 2, deepspeed)
    for path in (tmp_path / "saved").glob("*optim_states.pt"):
        path.unlink()
    found = converted(tmp_path / "saved", tmp_path / "out")
    for name, value in values().items():
        assert torch.equal(found[name], value.bfloat16())


def test_what_is_incomplete_or_split_otherwise_is_refused(
    tmp_path: Path, deepspeed: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = []

    def refuse(name: str) -> None:
        assert main(["convert", str(tmp_path / name), str(tmp_path / "out")]) == 2
        lines.append(capsys.readouterr().err.replace(str(tmp_path), "TMP"))
        assert not (tmp_path / "out").exists()

    for name in ("lost", "short", "split", "strange", "more", "none", "twice"):
        save_zero(tmp_path / name, 3, deepspeed)
    optimizer = "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
    (tmp_path / "lost" / optimizer).unlink()
    refuse("lost")
    state = torch.load(tmp_path / "short" / optimizer, weights_only=False)
    state["optimizer_state_dict"]["fp32_flat_groups"][1] = torch.zeros(1)
    torch.save(state, tmp_path / "short" / optimizer)
    refuse("short")
    (tmp_path / "split" / optimizer).rename(
        tmp_path / "split" / optimizer.replace("mp_rank_00", "mp_rank_01")
    )
    refuse("split")
    path = tmp_path / "strange" / "zero_pp_rank_0_mp_rank_00_model_states.pt"
    torch.save(torch.load(path) | {"client": types.SimpleNamespace(step=3)}, path)
    refuse("strange")
    (tmp_path / "more" / optimizer.replace("rank_1_", "rank_3_")).write_bytes(
        (tmp_path / "more" / optimizer).read_bytes()
    )
    refuse("more")
    for path in (tmp_path / "none").glob("*optim_states.pt"):
        path.unlink()
    refuse("none")
    (tmp_path / "twice" / optimizer.removeprefix("bf16_")).write_bytes(
        (tmp_path / "twice" / optimizer).read_bytes()
    )
    refuse("twice")
    (tmp_path / "latest").write_text("step-9")
    refuse(".")
    assert_expected_inline(
        "".join(lines),
        """\
python -m shardwise convert: TMP/lost has no *_optim_states.pt of rank 1 of 3, so a part of each weight is missing. Copy the files of all hosts into one folder.
python -m shardwise convert: TMP/short is damaged: parts of a.weight, a.bias, b.weight are too short.
python -m shardwise convert: TMP/split holds a model that was split by tensor or pipeline parallelism, or experts in files of their own. Only ZeRO on its own is supported. Have DeepSpeed write the weights itself (save_16bit_model, or its converter to universal checkpoints).
python -m shardwise convert: TMP/strange/zero_pp_rank_0_mp_rank_00_model_states.pt cannot be read: making objects of types.SimpleNamespace could run any code. Save without client_state.
python -m shardwise convert: TMP/more has *_optim_states.pt of rank 3, but 3 ranks saved it. Those files are of an earlier save; remove them.
python -m shardwise convert: TMP/none has no *_optim_states.pt of ranks 0-2 of 3, so a part of each weight is missing. Copy the files of all hosts into one folder.
python -m shardwise convert: TMP/twice has files of two saves: bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt and zero_pp_rank_1_mp_rank_00_optim_states.pt.
python -m shardwise convert: TMP/latest names TMP/step-9, which does not exist.
""",
    )
