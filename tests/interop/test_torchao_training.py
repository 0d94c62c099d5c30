"""torchao's training in low precision gives the weights of one process; float8 is tested with the tensors it travels as."""

import logging
import warnings
from typing import Any

import pytest
import torch
from harness import World
from reference import full
from torch import nn

from shardwise import fully_shard

pytest.importorskip("torchao")


def prepare(model: nn.Module, how: str) -> None:
    logging.disable()  # what it has no kernels for
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torchao.prototype.quantized_training import Int8MixedPrecisionTrainingConfig
        from torchao.quantization import quantize_
        from torchao.quantization.qat import IntxFakeQuantizeConfig, QATConfig

        weights = IntxFakeQuantizeConfig(torch.int4, group_size=32)
        configs = {
            "QAT": QATConfig(weight_config=weights, step="prepare"),
            "int8": Int8MixedPrecisionTrainingConfig(),
        }
        quantize_(model, configs[how], filter_fn=lambda module, name: isinstance(module, nn.Linear))
    logging.disable(logging.NOTSET)


def trained(how: str, is_sharded: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 64))
    prepare(model, how)
    if is_sharded:
        fully_shard(model[0])
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(3):
        # Each rank takes the whole batch, lest scales of inputs differ from those of the reference.
        x = torch.randn(16, 64, generator=torch.Generator().manual_seed(step))
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: full(param.detach()).float() for name, param in model.named_parameters()}


@pytest.mark.parametrize("how", ["QAT", "int8"])
def test_it_trains_as_in_one_process(world2: World, how: str) -> None:
    for found in world2.run(trained, how, is_sharded=True):
        for name, value in trained(how, is_sharded=False).items():
            torch.testing.assert_close(found[name], value)
