"""torchao's training in low precision gives the weights of one process; float8 is tested with the tensors it travels as."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch._functorch.config
from harness import World
from on_ranks import on_ranks
from reference import full
from scenario import one_thread
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from shardwise import fully_shard, load_checkpoint, save_checkpoint
from shardwise.optim import WholeParameters

pytest.importorskip("torchao")


@contextmanager
def quietly() -> Iterator[None]:
    """Without what torchao logs of kernels that it does not have, and torch of its own compiler."""
    logging.disable()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    logging.disable(logging.NOTSET)


def prepare(model: nn.Module, how: str) -> None:
    with quietly():
        from torchao.prototype.quantized_training import Int8MixedPrecisionTrainingConfig
        from torchao.quantization import quantize_
        from torchao.quantization.qat import IntxFakeQuantizeConfig, QATConfig

        weights = IntxFakeQuantizeConfig(torch.int4, group_size=32)
        configs = {
            "QAT": QATConfig(weight_config=weights, step="prepare"),
            "int8": Int8MixedPrecisionTrainingConfig(),
        }
        quantize_(model, configs[how], filter_fn=lambda module, name: isinstance(module, nn.Linear))


def trained(how: str, is_sharded: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 64))
    prepare(model, how)
    if is_sharded:
        fully_shard(model[0])
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(3):
        # Each rank has the whole batch, so that scales of inputs are those of the reference.
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


# --- optimizers with state in low precision -------------------------------------------------------

LOW_BIT = ("Adam4bit", "Adam8bit", "AdamFp8", "AdamW4bit", "AdamW8bit", "AdamWFp8")
STEPS = 4
Shape = tuple[int, int]


def optimizers() -> Any:
    with quietly():
        import torchao.optim

    return torchao.optim


def uncompiled(function: Any, **_: Any) -> Any:
    return function


def low_bit_model(shape: Shape, is_sharded: bool, dim: int = 0) -> nn.Sequential:
    torch.manual_seed(0)
    rows, columns = shape
    model = nn.Sequential(nn.Linear(columns, rows, bias=False), nn.Tanh(), nn.Linear(rows, 8, bias=False))
    if is_sharded:
        fully_shard(model, shard_placement_fn=lambda param: Shard(dim))
    return model


def backward(model: nn.Sequential, step: int) -> None:
    columns = model[0].in_features
    assert isinstance(columns, int)
    # Each rank takes the whole batch: the average of two equal gradients is exact.
    x = torch.randn(16, columns, generator=torch.Generator().manual_seed(step))
    model(x).square().mean().backward()


def with_low_bits(
    kind: str, shape: Shape, is_sharded: bool, dim: int = 0, is_whole: bool = False
) -> tuple[Tensor, bool | None]:
    """The weight after some steps, and whether this rank keeps its state quantised; None: it has none."""
    model = low_bit_model(shape, is_sharded, dim)
    weight = model[0].weight
    assert isinstance(weight, nn.Parameter)
    name, _, how = kind.partition(" ")
    optimizer_class = getattr(torch.optim if name == "AdamW" else optimizers(), name)
    compiler = torch.compile if how == "compiled" else uncompiled
    # On disk, ranks whose shards differ find each other's graphs (torch 2.13).
    without_cache = torch._functorch.config.patch(enable_autograd_cache=False)
    with quietly(), without_cache, patch("torch.compile", compiler):
        if is_whole:
            optimizer = WholeParameters(optimizer_class, [weight], lr=0.01)
        else:
            optimizer = optimizer_class([weight], lr=0.01)
        for step in range(STEPS):
            backward(model, step)
            optimizer.step()
            optimizer.zero_grad()
    state = optimizer.state[weight].get("exp_avg")
    state = state.to_local() if isinstance(state, DTensor) else state
    return full(weight.detach()), None if state is None else type(state) is not Tensor


def distance(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize(
    ("kind", "shape", "is_quantised"),
    [
        ("AdamW8bit compiled", (131, 256), True),
        *((kind, (131, 256), True) for kind in LOW_BIT),
        ("AdamW4bit", (129, 128), True),
        ("AdamW8bit", (128, 128), True),
        ("AdamW8bit", (3, 4096), True),
        ("AdamW8bit", (33, 128), False),
    ],
)
def test_shards_of_whole_blocks_train_as_in_one_process(
    world2: World, kind: str, shape: Shape, is_quantised: bool
) -> None:
    with one_thread():
        expected, _ = with_low_bits(kind, shape, is_sharded=False)
    for found, is_quantised_here in world2.run(with_low_bits, kind, shape, is_sharded=True):
        assert is_quantised_here == is_quantised
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["AdamW8bit", "AdamWFp8"])
def test_where_no_shard_is_quantised_the_weights_are_those_of_full_precision(
    world2: World, kind: str
) -> None:
    shape = (130, 128)  # 65 rows: 32.5 blocks
    whole, is_quantised = with_low_bits(kind, shape, is_sharded=False)
    assert is_quantised
    expected, _ = with_low_bits("AdamW", shape, is_sharded=False)
    assert distance(whole, expected) > 5e-3
    for found, is_quantised in world2.run(with_low_bits, kind, shape, is_sharded=True):
        assert not is_quantised
        assert distance(found, expected) < 1e-4  # another order of operations


@pytest.mark.parametrize(("kind", "most"), [("AdamW8bit", 0.02), ("AdamWFp8", 0.02), ("AdamW4bit", 0.2)])
def test_shards_of_columns_have_other_blocks(world2: World, kind: str, most: float) -> None:
    """The limits are what quantisation itself changes, and what the page says."""
    expected, _ = with_low_bits(kind, (128, 128), is_sharded=False)
    precise, _ = with_low_bits("AdamW", (128, 128), is_sharded=False)
    for found, is_quantised in world2.run(with_low_bits, kind, (128, 128), is_sharded=True, dim=1):
        assert is_quantised
        assert 1e-3 < distance(found, expected) < most
        assert distance(found, precise) < most


@pytest.mark.parametrize("kind", LOW_BIT)
def test_shards_may_be_quantised_on_some_ranks_only(world2: World, kind: str) -> None:
    expected, is_quantised = with_low_bits(kind, (3, 2048), is_sharded=False)
    assert is_quantised
    found = world2.run(with_low_bits, kind, (3, 2048), is_sharded=True)
    assert [is_quantised for _, is_quantised in found] == [True, False]
    assert all(distance(weight, expected) > 1e-3 for weight, _ in found)


@pytest.mark.parametrize(
    ("kind", "shape"), list(zip(LOW_BIT, [(3, 2048), (130, 128), (129, 128)] * 2, strict=True))
)
def test_whole_parameters_train_as_in_one_process(world2: World, kind: str, shape: Shape) -> None:
    with one_thread():
        expected, is_quantised = with_low_bits(kind, shape, is_sharded=False)
    found = world2.run(with_low_bits, kind, shape, is_sharded=True, is_whole=True)
    assert [is_quantised_here for _, is_quantised_here in found] == [is_quantised, None]
    for weight, _ in found:
        torch.testing.assert_close(weight, expected, rtol=0, atol=0)


# --- checkpoints ----------------------------------------------------------------------------------


def contents(optimizer: Any, param: nn.Parameter) -> list[Tensor]:
    moments = (optimizer.state[param][key].to_local() for key in ("exp_avg", "exp_avg_sq"))
    return [full(param.detach()), *(moment.dequantize() for moment in moments)]


@pytest.mark.parametrize("asynchronous", [False, True])
@on_ranks(2)
def test_states_of_one_shape_are_saved_apart(tmp_path: Path, asynchronous: bool) -> None:
    """Two parameters of one shape, each with two moments of that shape: all four states differ."""
    path = str(tmp_path / "checkpoint")
    torch.manual_seed(0)
    runs = []
    for _ in range(2):
        model = fully_shard(nn.Sequential(nn.Linear(128, 128, bias=False), nn.Linear(128, 128, bias=False)))
        optimizer = optimizers().AdamW8bit(model.parameters(), lr=0.01)
        with quietly(), patch("torch.compile", uncompiled):
            model(torch.randn(16, 128)).square().mean().backward()
            optimizer.step()
        runs.append((model, optimizer))
    saved, loaded = runs
    save_checkpoint(path, *saved, asynchronous=asynchronous).wait()
    load_checkpoint(path, *loaded)
    expected, found = ([contents(optimizer, p) for p in model.parameters()] for model, optimizer in runs)
    assert all(torch.equal(*pair) for pair in zip(chain(*expected), chain(*found), strict=True))
