"""Models of timm train on our shards as in one process, and so does its average of weights and buffers."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

pytest.importorskip("transformers")

from launch import result_of
from tiny_models import RANKS, assert_same, mean_of_ranks, whole

from shardwise import shard_model

try:
    from timm.models import ResNet, VisionTransformer
    from timm.models.resnet import BasicBlock
    from timm.models.vision_transformer import Block
    from timm.utils import ModelEmaV3
except (ImportError, RuntimeError) as error:  # the latter of a torchvision that does not fit torch
    pytest.skip(str(error), allow_module_level=True)

STEPS, ROWS, CLASSES = 3, 3, 5


def vit() -> nn.Module:
    torch.manual_seed(0)
    return VisionTransformer(
        img_size=8, patch_size=4, embed_dim=12, depth=2, num_heads=2, num_classes=CLASSES
    ).double()


def resnet() -> nn.Module:
    """With BatchNorm: its statistics are buffers."""
    torch.manual_seed(0)
    return ResNet(
        BasicBlock, (1, 1, 1, 1), num_classes=CLASSES, channels=(4, 6, 8, 10), stem_width=4
    ).double()


MODELS = {"vit": vit, "resnet": resnet}


def loss_of(model: nn.Module, step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(step * RANKS + rank)
    pictures = torch.randn(ROWS, 3, 8, 8, generator=generator, dtype=torch.float64)
    return nn.functional.cross_entropy(model(pictures), torch.arange(ROWS) % CLASSES)


class Run:
    """A model, its optimizer and its average."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        # Of shards and buffers together torch refuses ``_foreach_lerp_``.
        self.average = ModelEmaV3(model, decay=0.5, foreach=not list(model.buffers()))
        self.losses: list[Tensor] = []

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.average.update(self.model)

    def found(self, evaluated: Tensor) -> dict[str, Any]:
        average = self.average.module
        return {
            "losses": torch.stack([*self.losses, evaluated.detach()]),
            "weights": whole(self.model) | dict(self.model.named_buffers()),
            "averages": whole(average) | dict(average.named_buffers()),
        }


def sharded(build: Any) -> dict[str, Any]:
    run, rank = Run(shard_model(build(), wrap={Block, BasicBlock})), dist.get_rank()
    for step in range(STEPS):
        loss = loss_of(run.model, step, rank)
        loss.backward()
        run.step()
        run.losses.append(mean_of_ranks(loss))
    return run.found(loss_of(run.average.module, STEPS, 0))


def plain(build: Any) -> dict[str, Any]:
    """As on rank 0. A rank has statistics of its own rows, so that each is a model here; one has the optimizer."""
    models = [build() for _ in range(RANKS)]
    run = Run(models[0])
    for step in range(STEPS):
        losses = torch.stack([loss_of(model, step, rank) for rank, model in enumerate(models)])
        losses.mean().backward()
        for first, *others in zip(*(model.parameters() for model in models), strict=True):
            first.grad += sum(other.grad for other in others)
        run.step()
        for first, *others in zip(*(model.parameters() for model in models), strict=True):
            for other in others:
                other.data.copy_(first.data)
                other.grad = None
        run.losses.append(losses.detach().mean())
    return run.found(loss_of(run.average.module, STEPS, 0))


def training(folder: Path) -> dict[str, Any]:
    dist.init_process_group("gloo")
    return {kind: sharded(build) for kind, build in MODELS.items()}


trained = result_of(training)


@pytest.mark.parametrize("kind", MODELS)
def test_it_trains_and_averages_as_in_one_process(trained: Any, kind: str) -> None:
    found, expected = trained[kind], plain(MODELS[kind])
    torch.testing.assert_close(found["losses"], expected["losses"])
    assert_same(found["weights"], expected["weights"])
    assert_same(found["averages"], expected["averages"])
