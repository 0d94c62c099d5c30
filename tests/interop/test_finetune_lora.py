"""examples/finetune_lora.py trains what one process trains with PEFT alone, and saves what others read."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("peft")
pytest.importorskip("transformers")

from example_files import example_file
from launch import run_job
from peft import PeftModel
from safetensors.torch import load_file
from tiny_models import Weights, assert_same
from transformers import AutoModelForCausalLM

SIZES = ["--device=cpu", "--width=16", "--heads=2", "--context=8", "--batch=4", "--steps=3", "--rank=3"]
# PEFT's use
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


def load_example() -> Any:
    with example_file("finetune_lora") as module:
        return module


def corpus(module: Any) -> Any:
    generator = torch.Generator().manual_seed(0)
    return module.Corpus(*torch.randint(256, (2, 500), generator=generator, dtype=torch.uint8), num_files=0)


def fine_tuning(folder: Path) -> dict[str, Any]:
    module = load_example()
    settings = module.parse_settings([*SIZES, f"--out={folder}"])
    module.start_processes(settings.device)
    model = module.shard(module.build_model(settings).double())
    history = module.train(model, corpus(module), settings)
    module.save_adapter(model, folder / "adapter")
    module.merge(model)
    validation, _ = module.validation_loader(
        corpus(module), settings, module.share_of_rank(), module.EVAL_BATCHES
    )
    losses = [*history.val_loss, module.evaluate(model, validation, settings)]
    module.save_merged(model, folder / "merged")
    dist.barrier()
    return {"train": history.train_loss, "norms": history.grad_norm, "validation": losses}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("lora")


@pytest.fixture(scope="module")
def tuned(folder: Path) -> Any:
    return run_job(fine_tuning, folder)


@pytest.fixture(scope="module")
def in_one_process() -> tuple[PeftModel, dict[str, Any]]:
    module = load_example()
    settings = module.parse_settings(SIZES)
    model = module.build_model(settings).double()
    with example_file("corpus") as texts:
        text, share = corpus(module), texts.Share()
    validation, _ = module.validation_loader(text, settings, share, module.EVAL_BATCHES)
    optimizer = torch.optim.AdamW(
        [param for param in model.parameters() if param.requires_grad], lr=settings.lr, weight_decay=0.0
    )

    def evaluate() -> float:
        with torch.no_grad():
            losses = [module.mean_loss(model, batch, settings.device) for batch in validation]
        return torch.stack(losses).mean().item()

    train, norms, before = [], [], evaluate()
    for batch in module.training_loader(text, settings, share):
        loss = module.mean_loss(model, batch, settings.device)
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), settings.clip).item())
        optimizer.step()
        optimizer.zero_grad()
        train.append(loss.item())
    after = evaluate()
    return model, {"train": train, "norms": norms, "validation": [before, after, after]}


def test_the_example_trains_what_one_process_trains(tuned: Any, in_one_process: Any) -> None:
    _, expected = in_one_process
    assert expected["validation"][0] != pytest.approx(expected["validation"][1], rel=1e-4)
    for name, values in expected.items():
        assert tuned[name] == pytest.approx(values, rel=1e-9), name


def test_peft_reads_the_adapter(tuned: Any, folder: Path, in_one_process: Any) -> None:
    module, (expected, _) = load_example(), in_one_process
    assert all("lora" in name for name in load_file(folder / "adapter" / "adapter_model.safetensors"))
    base = module.build_model(module.parse_settings(SIZES)).unload().double()
    read = PeftModel.from_pretrained(base, folder / "adapter", autocast_adapter_dtype=False)
    assert_same(weights(read), weights(expected))


def test_transformers_reads_the_merged_model(tuned: Any, folder: Path, in_one_process: Any) -> None:
    expected, _ = in_one_process
    read = AutoModelForCausalLM.from_pretrained(folder / "merged", dtype=torch.float64)
    assert_same(weights(read), weights(deepcopy(expected).merge_and_unload()))


def weights(model: Any) -> Weights:
    return {name: value.detach() for name, value in model.state_dict().items()}
