"""PEFT's adapters, added before sharding, train as in one process, and are saved in one way."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("peft")
pytest.importorskip("transformers")

from launch import run_job
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from tiny_models import ROWS, Weights, assert_same, global_batch, loss_of, tiny_llama

import shardwise

STEPS = 3
pytestmark = pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)  # PEFT's use


def with_adapters(*, dora: bool = False) -> Any:
    torch.manual_seed(1)
    config = LoraConfig(r=3, target_modules=["q_proj", "down_proj"], use_dora=dora)
    model = get_peft_model(tiny_llama(), config, autocast_adapter_dtype=False)
    for name, param in model.named_parameters():
        if "lora_B" in name:  # begins with zeros, which would hide the other factor
            torch.nn.init.normal_(param, std=0.1)
    return model.double()


def trained(model: Any, rows: slice) -> None:
    adapters = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(adapters, lr=1e-2, weight_decay=0.0)
    for step in range(STEPS):
        loss_of(model, global_batch(step)[rows]).backward()
        optimizer.step()
        optimizer.zero_grad()


def fine_tuning(folder: Path) -> dict[str, Any]:
    dist.init_process_group("gloo")
    rows = slice(dist.get_rank() * ROWS, (dist.get_rank() + 1) * ROWS)
    found = {}
    for kind in ("lora", "dora"):
        model = with_adapters(dora=kind == "dora")
        shardwise.shard_model(model, wrap={type(model.base_model.model.model.layers[0])})
        trained(model, rows)
        state = shardwise.full_state_dict(model, rank0_only=True)
        if dist.get_rank() == 0:
            model.save_pretrained(folder / kind, state_dict=state)
        dist.barrier()
        found[kind] = shardwise.full_state_dict(model)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("peft")


@pytest.fixture(scope="module")
def tuned(folder: Path) -> Any:
    return run_job(fine_tuning, folder)


def in_one_process(kind: str) -> Any:
    model = with_adapters(dora=kind == "dora")
    trained(model, slice(None))
    return model


def weights(model: Any) -> Weights:
    return {name: value.detach() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_adapters_train_as_in_one_process(tuned: Any, kind: str) -> None:
    assert_same(tuned[kind], weights(in_one_process(kind)))


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_saved_adapters_are_read_and_merged_by_peft(tuned: Any, folder: Path, kind: str) -> None:
    assert all("lora" in name for name in load_file(folder / kind / "adapter_model.safetensors"))
    read = PeftModel.from_pretrained(tiny_llama(), folder / kind, autocast_adapter_dtype=False).double()
    expected = in_one_process(kind)
    tokens = global_batch(9)
    for ours, plain in ((read, expected), (read.merge_and_unload(), expected.merge_and_unload())):
        torch.testing.assert_close(ours(input_ids=tokens).logits, plain(input_ids=tokens).logits)
