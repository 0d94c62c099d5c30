"""The pieces of scripts on the pages of docs/interop run as they stand, in scripts that have what they leave out.

Each but those that need GPUs is executed on two ranks, with the names that a reader's script has, and two ranks for
eight. What they train is compared with one process in the other tests of this folder.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as peer
from doc_programs import ROOT, blocks
from harness import World
from launch import run_job
from torch import nn

import shardwise
from shardwise.interop import uninstall
from shardwise.optim import WholeParameters

PAGES = ROOT / "docs" / "interop"
LAYERS = 2  # of the models here


def run_piece(page: str, index: int, *replaced: tuple[str, str], **names: Any) -> dict[str, Any]:
    """All names after a block of a page has run; ``names`` are those it takes for granted."""
    code = blocks(PAGES / f"{page}.md", "py")[index]
    for old, new in replaced:
        assert old in code, f"{page}.md no longer says {old!r}"
        code = code.replace(old, new)
    exec(compile(code, f"{page}.md", "exec"), names)
    return names


def num_groups(model: Any) -> int:
    return sum(isinstance(module, shardwise.FSDPModule) for module in model.modules())


def peft(folder: Path) -> list[str]:
    from safetensors.torch import load_file
    from tiny_models import tiny_llama

    here = (f'"{name}"' for name in ("adapters", folder / "adapters"))
    run_piece("peft", 0, tuple(here), model=tiny_llama(), torch=torch, dist=dist)
    dist.barrier()
    return sorted({name.split(".")[-3] for name in load_file(folder / "adapters/adapter_model.safetensors")})


def added_later(folder: Path) -> int:
    from peft import LoraConfig, get_peft_model
    from tiny_models import tiny_llama

    base: Any = shardwise.fully_shard(tiny_llama())
    model = get_peft_model(base, LoraConfig(target_modules=["q_proj", "v_proj"]))
    run_piece("peft", 1, model=model, fully_shard=shardwise.fully_shard)
    return num_groups(model)


def torchao(folder: Path) -> int:
    from torchao.quantization.qat import IntxFakeQuantizeConfig

    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(LAYERS)))
    # A configuration of quantised weights asks for kernels that CPUs lack; one of fakes is taken in its place.
    fakes = IntxFakeQuantizeConfig(torch.int4, group_size=32)
    replaced = ("QATConfig(base_config, ", "QATConfig(weight_config=fakes, ")
    return num_groups(run_piece("torchao", 0, replaced, model=model, fakes=fakes)["model"])


def whole_parameters(folder: Path) -> str:
    return made_on("optimizers", 0)


def derived(folder: Path) -> str:
    return made_on("optimizers", 1, torch=torch, WholeParameters=WholeParameters)


def low_bits(folder: Path) -> str:
    return made_on("torchao", 1)


def made_on(page: str, index: int, **names: Any) -> str:
    model = shardwise.fully_shard(nn.Linear(8, 8))
    with mock.patch("torch.compile", lambda function, **_: function):  # torchao's step, a minute of C++
        optimizer = run_piece(page, index, model=model, **names)["optimizer"]
    return str(optimizer.optimizer_class.__name__)


def torchtitan(folder: Path) -> int:
    from test_torchtitan import Decoder
    from torch.distributed.device_mesh import init_device_mesh
    from torchtitan.distributed.fsdp import apply_fsdp_to_decoder

    model = Decoder(is_tied=False)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",))
    run_piece(
        "torchtitan", 0, model=model, mesh=mesh, torch=torch, apply_fsdp_to_decoder=apply_fsdp_to_decoder
    )
    return num_groups(model)


def loaded(folder: Path) -> int:
    from tiny_models import tiny_llama
    from transformers import AutoModelForCausalLM

    from shardwise.interop import install

    if dist.get_rank() == 0:
        tiny_llama().save_pretrained(folder / "plain")
    dist.barrier()
    names = run_piece(
        "transformers",
        1,
        ("fsdp_size=8", "fsdp_size=2"),
        install=install,
        name=folder / "plain",
        AutoModelForCausalLM=AutoModelForCausalLM,
    )
    return num_groups(names["model"])


def saved(folder: Path) -> bool:
    from tiny_models import tiny_llama
    from transformers import LlamaForCausalLM

    model = shardwise.shard_model(tiny_llama())
    run_piece("transformers", 2, ('"folder"', f'"{folder}"'), shardwise=shardwise, model=model, dist=dist)
    dist.barrier()
    again, before = LlamaForCausalLM.from_pretrained(folder), tiny_llama()
    return all(
        torch.equal(a.double(), b) for a, b in zip(again.parameters(), before.parameters(), strict=True)
    )


PIECES: dict[tuple[str, int], tuple[Callable[[Path], Any], str, Any]] = {
    ("optimizers", 0): (whole_parameters, "torch", "Adafactor"),
    ("optimizers", 1): (derived, "pytorch_optimizer", "LookaheadAdamW"),
    ("peft", 0): (peft, "peft", ["q_proj", "v_proj"]),
    ("peft", 1): (added_later, "peft", 1 + 2 * 2 * LAYERS),
    ("torchao", 0): (torchao, "torchao", LAYERS + 1),
    ("torchao", 1): (low_bits, "torchao", "AdamW8bit"),
    ("torchtitan", 0): (torchtitan, "torchtitan", 6),
    ("transformers", 1): (loaded, "transformers", 6),
    ("transformers", 2): (saved, "transformers", True),
}
# Accelerate, and with it the Trainer, turns FSDP off on the CPU, and Fabric would take all of its devices. The tests of
# these frameworks do what the pieces say, and choose the type and the number by hand.
NEED_GPUS = {("accelerate", 0), ("lightning", 0), ("transformers", 0)}


def test_every_piece_is_run() -> None:
    found = {(page.stem, index) for page in PAGES.glob("*.md") for index in range(len(blocks(page, "py")))}
    assert found == set(PIECES) | NEED_GPUS | {("scripts", 0)}


def test_the_one_call() -> None:
    before = peer.fully_shard
    try:
        run_piece("scripts", 0)
        assert peer.fully_shard is not before
    finally:
        uninstall()


def run_in_a_group(folder: Path) -> Any:
    """The job that the folder is called after."""
    dist.init_process_group("gloo")
    return globals()[folder.name](folder)


@pytest.mark.parametrize("piece", PIECES, ids=lambda piece: f"{piece[0]} {piece[1]}")
def test_a_piece_runs(world2: World, piece: tuple[str, int], tmp_path: Path) -> None:
    job, package, expected = PIECES[piece]
    pytest.importorskip(package)
    if package == "torch":  # which changes nothing for later tests
        assert world2.run(job, tmp_path)[0] == expected
        return
    folder = tmp_path / job.__name__
    folder.mkdir()
    assert run_job(run_in_a_group, folder) == expected
