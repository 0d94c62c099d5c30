"""Lightning's Fabric and Trainer train on our shards with their strategy for models in parallel; the peer beside it."""

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("lightning")
pytest.importorskip("transformers")

import lightning
from launch import result_of, run_job
from lightning.fabric.strategies import ModelParallelStrategy as FabricStrategy
from lightning.pytorch.strategies import ModelParallelStrategy
from sent_bytes import counting_bytes
from tiny_models import (
    LIBRARIES,
    RANKS,
    adamw,
    assert_same,
    facts,
    global_batch,
    loss_of,
    named,
    plain_weights,
    rows_of,
    tiny_llama,
)

NORM = 0.5


def sharded(model: Any, mesh: Any) -> Any:
    """What Lightning calls ``parallelize_fn``: written for torch's function, wherever it comes from."""
    llama = getattr(model, "llama", model)
    for layer in llama.model.layers:
        torch.distributed.fsdp.fully_shard(layer, mesh=mesh["data_parallel"])
    torch.distributed.fsdp.fully_shard(llama, mesh=mesh["data_parallel"])
    return model


def with_fabric(folder: Path) -> dict[str, Any]:
    """Three steps of two microbatches; a checkpoint after two of them, from which another model goes on."""
    found: dict[str, Any] = {}
    for library in LIBRARIES:
        with named(library):
            strategy = FabricStrategy(sharded, data_parallel_size=RANKS, tensor_parallel_size=1)
            fabric = lightning.Fabric(accelerator="cpu", devices=RANKS, strategy=strategy)
            fabric.launch()
            model = fabric.setup(tiny_llama())
            optimizer = fabric.setup_optimizers(adamw(model))
            sent = fabric_steps(fabric, model, optimizer, range(2))
            fabric.save(folder / library, {"model": model, "optimizer": optimizer})
            fabric_steps(fabric, model, optimizer, range(5, 6))  # other weights than those saved
            fabric.load(folder / library, {"model": model, "optimizer": optimizer})
            fabric_steps(fabric, model, optimizer, range(2, 3))
            found[library] = facts(model.module) | {"sent": sent}
    return found


def fabric_steps(fabric: Any, model: Any, optimizer: Any, steps: range) -> list[int]:
    """The bytes that this rank sent in each microbatch; only the second of a step is to reduce gradients."""
    sent: list[int] = []
    for step in steps:
        for part in range(2):
            with counting_bytes(sent), fabric.no_backward_sync(model, enabled=part == 0):
                loss = loss_of(model, rows_of(2 * step + part, fabric.global_rank)) / 2
                fabric.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), NORM)
        optimizer.step()
        optimizer.zero_grad()
    return sent


fabric = result_of(with_fabric)


@pytest.mark.parametrize("library", LIBRARIES)
def test_fabric_trains_saves_and_resumes_as_one_process_trains(fabric: Any, library: str) -> None:
    assert fabric[library]["ours"] == [library == "ours"] * 3
    assert_same(fabric[library]["weights"], plain_weights(3, 2, NORM))


@pytest.mark.parametrize("library", LIBRARIES)
def test_no_backward_sync_sends_no_gradients(fabric: Any, library: str) -> None:
    shard_bytes = sum(8 * value.numel() for value in fabric[library]["weights"].values()) // RANKS
    without, with_gradients = fabric[library]["sent"][2:]
    assert with_gradients - without > 0.9 * shard_bytes


class Module(lightning.LightningModule):
    def __init__(self, first: int = 0) -> None:
        super().__init__()
        self.llama = tiny_llama()
        self.first = first  # batch

    def configure_model(self) -> None:
        """Shard, as Lightning's guide says; called once more by each stage."""
        if not any(hasattr(param, "placements") for param in self.parameters()):
            sharded(self, self.device_mesh)

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        return loss_of(self.llama, batch)

    def validation_step(self, batch: torch.Tensor, index: int) -> None:
        self.log("validation", loss_of(self.llama, batch).float(), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return adamw(self)

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(
            [rows_of((self.first + step) % 6, self.global_rank) for step in range(6)], batch_size=None
        )

    def val_dataloader(self) -> Any:
        return torch.utils.data.DataLoader([rows_of(9, self.global_rank)], batch_size=None)


def with_trainer(folder: Path) -> dict[str, Any]:
    """Two steps of two microbatches and a checkpoint; another trainer goes on from there for a third."""
    found: dict[str, Any] = {}
    for library in LIBRARIES:
        with named(library):
            trainer_of(2).fit(module := Module())
            first = facts(module.llama)
            trainer = module.trainer
            trainer.save_checkpoint(folder / f"{library}.ckpt")
            trainer_of(3).fit(module := Module(first=4), ckpt_path=folder / f"{library}.ckpt")
            found[library] = facts(module.llama) | {
                "first": first["weights"],
                "validation": float(module.trainer.callback_metrics["validation"]),
            }
    return found


def trainer_of(steps: int) -> lightning.Trainer:
    return lightning.Trainer(
        accelerator="cpu",
        devices=RANKS,
        strategy=ModelParallelStrategy(data_parallel_size=RANKS, tensor_parallel_size=1),
        max_steps=steps,
        accumulate_grad_batches=2,
        use_distributed_sampler=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
    )


def test_the_trainer_trains_saves_and_resumes_as_one_process_trains(tmp_path: Path) -> None:
    for library, found in run_job(with_trainer, tmp_path).items():
        assert found["ours"] == [library == "ours"] * 3
        assert_same(found["first"], plain_weights(2, 2))
        assert_same(found["weights"], plain_weights(3, 2))
        model = tiny_llama()
        model.load_state_dict(found["weights"])
        assert found["validation"] == pytest.approx(loss_of(model, global_batch(9)).item(), rel=1e-6)
