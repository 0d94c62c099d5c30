"""The Trainer of transformers trains on our shards, and so does what ``from_pretrained`` shards; the peer beside it."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("accelerate")
pytest.importorskip("transformers")

from launch import result_of, run_job
from tiny_models import (
    LIBRARIES,
    NORM,
    RANKS,
    ROWS,
    OnCpu,
    adamw,
    arguments,
    assert_same,
    facts,
    global_batch,
    loss_of,
    named,
    plain_weights,
    tiny_llama,
)
from transformers import LlamaForCausalLM, Trainer, TrainingArguments

import shardwise
from shardwise.interop import install


class Rows(torch.utils.data.Dataset):
    """The rows of all steps, in the order in which the Trainer's sampler deals them to the ranks."""

    def __init__(self, steps: int) -> None:
        self.rows = torch.cat([global_batch(step) for step in range(steps)])

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


class TrainerOnCpu(OnCpu, Trainer):
    """Trains with FSDP on the CPU as well."""


def trainer_of(model: Any, folder: Path, steps: int, *, fsdp: bool = True, **options: Any) -> Trainer:
    return TrainerOnCpu(
        model=model,
        args=TrainingArguments(**arguments(folder, steps, fsdp=fsdp) | options),
        train_dataset=Rows(8),
        eval_dataset=Rows(2),
        compute_loss_func=None if "label_smoothing_factor" in options else exact_loss,
    )


def exact_loss(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    """The mean over the tokens of all ranks, in float64; transformers' own is computed in float32."""
    logits, expected = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    count = len(expected) if num_items_in_batch is None else num_items_in_batch
    return torch.nn.functional.cross_entropy(logits, expected, reduction="sum") / count


def training(folder: Path) -> dict[str, Any]:
    found = {}
    for library in LIBRARIES:
        with named(library):
            trainer = trainer_of(tiny_llama(), folder, 3, gradient_accumulation_steps=2)
            trainer.train()
            found[library] = facts(trainer.model) | {
                "evaluated": trainer.evaluate()["eval_loss"],
                "norms": [each["grad_norm"] for each in trainer.state.log_history if "grad_norm" in each],
                "generated": trainer.model.generate(
                    global_batch(0)[:1], max_new_tokens=4, do_sample=False, pad_token_id=0
                ),
            }
            trainer.save_model(str(folder / library))
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trainer")


@pytest.fixture(scope="module")
def trained(folder: Path) -> Any:
    return run_job(training, folder)


def plain_model(weights: Any) -> Any:
    model = tiny_llama()
    model.load_state_dict(weights)
    return model


def test_it_trains_our_modules_as_one_process_does(trained: Any) -> None:
    expected = plain_weights(3, 2, NORM)
    assert (trained["ours"]["ours"], trained["peer"]["ours"]) == ([True] * 3, [False] * 3)
    assert_same(trained["ours"]["weights"], expected)
    assert_same(trained["peer"]["weights"], expected)
    assert trained["ours"]["norms"] == pytest.approx(trained["peer"]["norms"], rel=1e-12)


@pytest.mark.parametrize("library", LIBRARIES)
def test_it_evaluates_and_generates_as_one_process_does(trained: Any, library: str) -> None:
    model = plain_model(plain_weights(3, 2, NORM))
    losses = [loss_of(model, global_batch(step)).item() for step in range(2)]
    assert trained[library]["evaluated"] == pytest.approx(sum(losses) / 2, rel=1e-6)
    expected = model.generate(global_batch(0)[:1], max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert torch.equal(trained[library]["generated"], expected)


@pytest.mark.parametrize("library", LIBRARIES)
def test_the_model_it_saves_is_read_by_from_pretrained(trained: Any, folder: Path, library: str) -> None:
    saved = LlamaForCausalLM.from_pretrained(folder / library, dtype=torch.float64)
    assert_same(dict(saved.named_parameters()), trained[library]["weights"])
    assert saved.config.architectures == ["LlamaForCausalLM"]


def resuming(folder: Path) -> dict[str, Any]:
    """Four steps with a checkpoint after two; another trainer goes on from there."""
    found: dict[str, Any] = {}
    for library in LIBRARIES:
        with named(library):
            saving = {"save_strategy": "steps", "save_steps": 2, "save_total_limit": 4}
            trainer_of(tiny_llama(), folder / library, 4, **saving).train()
            trainer = trainer_of(tiny_llama(), folder / library, 4)
            trainer.train(resume_from_checkpoint=str(folder / library / "checkpoint-2"))
            found[library] = facts(trainer.model) | {"steps": [x["step"] for x in trainer.state.log_history]}
    return found


def test_it_resumes(tmp_path: Path) -> None:
    found = run_job(resuming, tmp_path)
    for library in LIBRARIES:
        assert 3 in found[library]["steps"]
        assert_same(found[library]["weights"], plain_weights(4, max_norm=NORM))
    assert found["ours"]["ours"] == [True] * 3


def odd_ways(folder: Path) -> dict[str, Any]:
    """Label smoothing, models that were sharded before, and ``from_pretrained`` that shards."""
    found: dict[str, Any] = {}

    def attempt(case: str, act: Callable[[], Any]) -> None:
        try:
            found[case] = act()
        except Exception as error:
            found[case] = f"{type(error).__name__}: {error}"

    tiny_llama().save_pretrained(folder / "plain")
    for library in LIBRARIES:
        with named(library):
            for way in (
                smoothed,
                sharded_before,
                read_sharded,
                trained_as_read_sharded,
                saved_sharded,
                saved_by_hand,
            ):
                attempt(f"{library}, {way.__name__}", partial(way, folder / library))
    return found


def smoothed(folder: Path) -> dict[str, Any]:
    trainer = trainer_of(tiny_llama(), folder, 1, label_smoothing_factor=0.1)
    trainer.train()
    return facts(trainer.model)


def sharded_before(folder: Path) -> dict[str, Any]:
    model = tiny_llama()
    for layer in model.model.layers:
        torch.distributed.fsdp.fully_shard(layer)
    torch.distributed.fsdp.fully_shard(model)
    trainer = trainer_of(model, folder, 3)
    trainer.train()
    return facts(trainer.model)


def _read_sharded(folder: Path) -> Any:
    from transformers.distributed import DistributedConfig

    return LlamaForCausalLM.from_pretrained(
        folder.parent / "plain", distributed_config=DistributedConfig(fsdp_size=RANKS), dtype=torch.float64
    )


def read_sharded(folder: Path) -> dict[str, Any]:
    model = _read_sharded(folder)
    rank = torch.distributed.get_rank()
    optimizer = adamw(model)
    for step in range(3):
        loss_of(model, global_batch(step)[rank * ROWS : (rank + 1) * ROWS]).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), NORM)
        optimizer.step()
        optimizer.zero_grad()
    return facts(model)


def trained_as_read_sharded(folder: Path) -> dict[str, Any]:
    trainer = trainer_of(_read_sharded(folder), folder, 3, fsdp=False)
    trainer.train()
    return facts(trainer.model)


def saved_sharded(folder: Path) -> dict[str, Any]:
    model = _read_sharded(folder)
    model.save_pretrained(folder / "saved")
    return facts(model) | {
        "read": dict(LlamaForCausalLM.from_pretrained(folder / "saved", dtype=torch.float64).state_dict())
    }


def saved_by_hand(folder: Path) -> dict[str, Any]:
    model = tiny_llama()
    shardwise.shard_model(model, wrap={type(model.model.layers[0])})
    state = shardwise.full_state_dict(model, rank0_only=True)
    if torch.distributed.get_rank() == 0:
        model.save_pretrained(folder / "by-hand", state_dict=state)
    torch.distributed.barrier()
    read = LlamaForCausalLM.from_pretrained(folder / "by-hand", dtype=torch.float64)
    return facts(model) | {"read": dict(read.state_dict())}


oddities = result_of(odd_ways)


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("way", [sharded_before, read_sharded, trained_as_read_sharded])
def test_models_that_are_sharded_already_train_as_in_one_process(
    oddities: Any, way: Any, library: str
) -> None:
    found = oddities[f"{library}, {way.__name__}"]
    if (library, way) == ("peer", sharded_before):
        assert "Could not find the transformer layer class LlamaDecoderLayer" in found
        return
    assert found["ours"] == [library == "ours"] * 3
    assert_same(found["weights"], plain_weights(3, max_norm=NORM))


@pytest.mark.parametrize("case", ["ours, saved_sharded", "peer, saved_sharded", "ours, saved_by_hand"])
def test_a_sharded_model_is_saved_by_save_pretrained(oddities: Any, case: str) -> None:
    assert oddities[case]["ours"] == [case.startswith("ours")] * 3
    assert_same(oddities[case]["read"], tiny_llama().state_dict())


def smoothed_in_one_process() -> Any:
    """A step of the loss that the Trainer smooths: on labels that are shifted, as for all causal models."""
    model = tiny_llama()
    tokens = global_batch(0)
    logits = model(input_ids=tokens).logits[:, :-1].flatten(0, 1)
    loss = torch.nn.functional.cross_entropy(logits, tokens[:, 1:].flatten(), label_smoothing=0.1)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), NORM)
    adamw(model).step()
    return dict(model.named_parameters())


def test_labels_are_shifted_where_they_are_smoothed(oddities: Any) -> None:
    """The Trainer knows causal models by the names of their classes. The peer changes them: other weights."""
    expected = smoothed_in_one_process()
    for name, value in oddities["ours, smoothed"]["weights"].items():
        torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-7)
    theirs = oddities["peer, smoothed"]["weights"]["lm_head.weight"]
    assert not torch.allclose(theirs, expected["lm_head.weight"], rtol=1e-2)


# --- more than one mesh dimension -----------------------------------------------------------------

MESHES: dict[str, dict[str, Any]] = {  # of a DistributedConfig, for four ranks
    "host memory": {"fsdp_size": 4, "fsdp_cpu_offload": True},
    "replicas": {"fsdp_size": 2, "dp_replicate_size": 2},
    "tensor parallel": {"fsdp_size": 2, "tp_size": 2},
}


def on_meshes(folder: Path) -> dict[str, Any]:
    """Three steps of two microbatches, of models that ``from_pretrained`` or the Trainer has sharded."""
    from accelerate import ParallelismConfig
    from transformers.distributed import DistributedConfig

    install()
    tiny_llama().save_pretrained(folder / "plain")
    found = {}
    for case, sizes in MESHES.items():
        config = DistributedConfig(**sizes)
        model = LlamaForCausalLM.from_pretrained(
            folder / "plain", distributed_config=config, dtype=torch.float64
        )
        options = {"fsdp": False, "gradient_accumulation_steps": 2}
        rows = RANKS * ROWS // config.dp_size
        found[case] = trained_on_mesh(model, folder, per_device_train_batch_size=rows, **options)
    options = {"parallelism_config": ParallelismConfig(dp_replicate_size=2, dp_shard_size=2)}
    found["parallelism_config"] = trained_on_mesh(
        tiny_llama(), folder, gradient_accumulation_steps=2, **options
    )
    return found


def trained_on_mesh(model: Any, folder: Path, **options: Any) -> dict[str, Any]:
    trainer = trainer_of(model, folder, 3, **options)
    trainer.train()
    return facts(trainer.model)


meshed = result_of(on_meshes, ranks=4)


@pytest.mark.parametrize("case", [*MESHES, "parallelism_config"])
def test_it_trains_on_meshes_as_in_one_process(meshed: Any, case: str) -> None:
    assert meshed[case]["ours"] == [True] * 3
    assert_same(meshed[case]["weights"], plain_weights(3, 2, NORM))
