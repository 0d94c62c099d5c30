"""Models of diffusers train on our shards as in one process: a denoiser and its average, and an autoencoder's halves."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

pytest.importorskip("diffusers")
pytest.importorskip("transformers")

from diffusers import AutoencoderKL, UNet2DConditionModel
from diffusers.training_utils import EMAModel
from launch import result_of
from tiny_models import NORM, RANKS, assert_same, mean_of_ranks, own, whole

from shardwise import register_fsdp_forward_method, shard_model

STEPS, ROWS = 3, 2


def unet() -> Any:
    torch.manual_seed(0)
    return UNet2DConditionModel(
        sample_size=8,
        in_channels=2,
        out_channels=2,
        block_out_channels=(8, 16),
        layers_per_block=1,
        norm_num_groups=4,
        cross_attention_dim=6,
        attention_head_dim=4,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    ).double()


def autoencoder() -> Any:
    torch.manual_seed(0)
    return AutoencoderKL(
        block_out_channels=(4, 8),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=2,
        norm_num_groups=2,
        sample_size=8,
    ).double()


def of_all_ranks(step: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(RANKS * ROWS, *shape, generator=generator, dtype=torch.float64)


def denoising(model: Any, step: int) -> Tensor:
    noisy, text = own(of_all_ranks(step, 2, 8, 8)), own(of_all_ranks(step + 100, 3, 6))
    times = own(torch.arange(RANKS * ROWS) * 10 + step)
    return (model(noisy, times, text).sample - noisy).pow(2).mean()


def coding(model: Any, step: int) -> Tensor:
    """By the two methods that a training script calls, not by ``forward``."""
    pictures = own(of_all_ranks(step, 3, 8, 8))
    posterior = model.encode(pictures).latent_dist
    return (model.decode(posterior.mode()).sample - pictures).pow(2).mean() + posterior.kl().mean()


LOSSES = {"unet": (unet, denoising), "autoencoder": (autoencoder, coding)}


def trained(model: Any, loss_of: Any) -> dict[str, Any]:
    """Losses of the global batches, the weights, their average by diffusers, and the loss with that."""
    average = EMAModel(model.parameters(), decay=0.5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(STEPS):
        loss = loss_of(model, step)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), NORM)
        optimizer.step()
        optimizer.zero_grad()
        average.step(model.parameters())
        losses.append(mean_of_ranks(loss))
    average.store(model.parameters())
    average.copy_to(model.parameters())
    averages = whole(model)
    with torch.no_grad():
        losses.append(mean_of_ranks(loss_of(model, STEPS)))
    average.restore(model.parameters())
    return {"losses": torch.stack(losses), "weights": whole(model), "averages": averages}


def training(folder: Path) -> dict[str, Any]:
    dist.init_process_group("gloo")
    found = {}
    for kind, (build, loss_of) in LOSSES.items():
        model = shard_model(build())
        if kind == "autoencoder":
            register_fsdp_forward_method(model, "encode")
            register_fsdp_forward_method(model, "decode")
        found[kind] = trained(model, loss_of)
    return found


sharded = result_of(training)


@pytest.mark.parametrize("kind", LOSSES)
def test_it_trains_and_averages_as_in_one_process(sharded: Any, kind: str) -> None:
    found, (build, loss_of) = sharded[kind], LOSSES[kind]
    expected = trained(build(), loss_of)
    torch.testing.assert_close(found["losses"], expected["losses"])
    assert_same(found["weights"], expected["weights"])
    assert_same(found["averages"], expected["averages"])
