"""torchao's float8 training, whose weights travel as float8 with a scale that each unshard refreshes.

Not among the test requirements: run where torchao is installed. The reference is the same layers unsharded.
"""

import logging
import warnings
from typing import Any

import pytest
import torch
from scenario import Side, same_as_plain
from torch import Tensor, nn

pytest.importorskip("torchao")

WIDTH = 32  # torchao's float8 wants multiples of 16


def float8_model(side: Side) -> nn.Module:
    logging.disable()  # what it has no kernels for
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    logging.disable(logging.NOTSET)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 64), nn.Tanh(), nn.Linear(64, WIDTH))
    config = Float8LinearConfig(enable_fsdp_float8_all_gather=side.is_sharded, emulate=True)
    return convert_to_float8_training(model, config=config)


def squares(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) - x.flip(0)).pow(2).mean()


@same_as_plain(2, atol=1e-05)
@pytest.mark.parametrize("precomputes", [False, True])
def test_float8_weights_are_all_gathered_with_the_scale_of_their_step(side: Side, precomputes: bool) -> None:
    model: Any = float8_model(side)
    side.shard(model[2], model, reshard_after_forward=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for step in range(4):
        # Each rank has the whole batch, so that scales of inputs are those of the reference.
        torch.manual_seed(10 + step)
        batch = torch.randn(16, WIDTH)
        optimizer.zero_grad()
        loss = squares(model, batch)
        loss.backward()
        side.note("loss", loss)
        optimizer.step()
        if precomputes and side.is_sharded:
            from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

            precompute_float8_dynamic_scale_for_fsdp(model)
