"""A moving average of sharded weights: that of plain weights, swapped in and out, saved and resumed."""

from contextlib import suppress

import pytest
import torch
from arrangements import WAYS, Way, built
from comparing import assert_equal
from expecttest import assert_expected_inline
from meshed import refusal
from on_ranks import on_ranks
from torch import Tensor, nn

from shardwise import full_state_dict, fully_shard
from shardwise.comm.full_tensors import full_values
from shardwise.state import EMA

STEPS, DECAY = 3, 0.7


def push(model: nn.Module, step: int) -> None:
    """Move every floating-point parameter, as an optimizer does: in place, on what the module shows."""
    with torch.no_grad():
        for number, param in enumerate(model.parameters()):
            if param.is_floating_point():
                param.mul_(1 + 0.01 * (step + number)).add_(0.1 * step)


def averaged_plainly(way: Way) -> dict[str, Tensor]:
    """By torch's own average of weights."""
    model = built(way.build)
    multi = torch.optim.swa_utils.get_ema_multi_avg_fn(DECAY)
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=multi)
    average.update_parameters(model)  # torch's first update copies
    for step in range(STEPS):
        push(model, step)
        average.update_parameters(model)
    state = average.module.state_dict()
    trainable = {name for name, p in model.named_parameters(remove_duplicate=False) if p.requires_grad}
    return {name: value for name, value in state.items() if name in trainable}


@pytest.mark.sample(9)
@pytest.mark.parametrize("way", WAYS, ids=str)
@on_ranks()
def test_the_average_is_that_of_plain_weights(way: Way) -> None:
    model, want = way.model(), averaged_plainly(way)
    ema = EMA(model, DECAY)
    for step in range(STEPS):
        push(model, step)
        ema.update()
    before = full_state_dict(model, rank0_only=False)
    with ema.swap():
        inside = full_state_dict(model, rank0_only=False)
    for name, value in want.items():
        torch.testing.assert_close(inside[name], value, rtol=1e-12, atol=0)
    kept = {name: value for name, value in inside.items() if name not in want}
    assert_equal(kept, {name: before[name] for name in kept})  # buffers, and what is not trained
    assert_equal(full_state_dict(model, rank0_only=False), before)


@pytest.mark.parametrize("way", [Way(2), Way(2, "zero2"), Way(2, "ddp"), Way(1)], ids=str)
@on_ranks()
def test_forward_uses_the_average_inside_and_the_weights_outside(way: Way) -> None:
    model, plain = way.model(), built(way.build)
    x = torch.linspace(-1, 1, 14, dtype=torch.float64).reshape(2, 7)
    ema = EMA(model, 0.0)  # the weights of the last update
    push(model, 1)
    with torch.no_grad():
        outputs = [model(x)]
        with ema.swap():
            outputs.append(model(x))
        outputs.append(model(x))
        first = plain(x)
        push(plain, 1)
        torch.testing.assert_close(outputs, [plain(x), first, plain(x)], rtol=0, atol=1e-10)


@on_ranks(2)
def test_an_average_in_float32_moves_where_bfloat16_would_not() -> None:
    plain = built("uneven", dtype=torch.bfloat16)
    start = {name: param.detach().float() for name, param in plain.named_parameters()}
    push(plain, 1)
    model = fully_shard(built("uneven", dtype=torch.bfloat16))
    ema = EMA(model, 0.999, dtype=torch.float32)
    push(model, 1)
    for _ in range(10):
        ema.update()
    with ema.swap():
        pass
    averages = full_values(ema.state_dict()["averages"], None, True)
    assert averages.keys() == start.keys()
    for name, param in plain.named_parameters():
        end = param.detach().float()
        want = end + (start[name] - end) * 0.999**10
        # float32, over ten updates
        torch.testing.assert_close(averages[name], want, rtol=1e-5, atol=1e-6)


@on_ranks(2)
def test_a_decay_may_depend_on_the_number_of_updates() -> None:
    asked: list[int] = []

    def decay(updates: int) -> float:
        asked.append(updates)
        return min(0.9, (1 + updates) / (10 + updates))

    ema = EMA(fully_shard(built("uneven")), decay)
    for _ in range(3):
        ema.update()
    assert (asked, ema.num_updates) == ([0, 1, 2], 3)
    resumed = EMA(fully_shard(built("uneven", 1)), decay)
    resumed.load_state_dict(ema.state_dict())
    assert_equal(*(full_values(each.state_dict()["averages"], None, True) for each in (resumed, ema)))
    resumed.update()
    assert (asked[-1], resumed.num_updates) == (3, 4)


@on_ranks(2)
def test_misuse_is_refused() -> None:
    model = Way(2, build="tied").model()
    ema = EMA(model)
    whole = full_values(ema.state_dict()["averages"], None, False)
    told = [
        refusal(EMA, model, 1.5),
        refusal(EMA, model, dtype=torch.int8),
        refusal(EMA, Way(2).model(device="meta")),
        refusal(ema.load_state_dict, {"averages": {"other": torch.ones(1)}, "num_updates": 1}),
        refusal(ema.load_state_dict, {}),
        refusal(ema.load_state_dict, ema.state_dict() | {"averages": whole}),
    ]
    with ema.swap():
        told += [refusal(ema.update), refusal(ema.state_dict), refusal(ema.swap().__enter__)]
    plain = built("even")
    early = EMA(plain)
    fully_shard(plain)
    told.append(refusal(early.update))
    frozen = built("even")
    frozen.inlet.requires_grad_(False)
    without = EMA(frozen)
    frozen.inlet.requires_grad_(True)
    told.append(refusal(without.update))
    assert_expected_inline(
        "\n".join(told),
        """\
ValueError: EMA: decay is 1.5; pass a number from 0 to 1, or a function that gives one.
ValueError: EMA: dtype is torch.int8; pass a floating-point dtype, or None.
RuntimeError: EMA: 22 parameters are still on the meta device: inlet.weight, inlet.bias, blocks.0.norm.weight, blocks.0.norm.bias, blocks.0.up.weight, blocks.0.up.bias, blocks.0.down.weight, blocks.0.down.bias and 14 more. Nothing has given them values. Call shardwise.materialize(model), or load a checkpoint, first.
ValueError: EMA.load_state_dict: embed.weight, norm.weight, norm.bias, blocks.0.weight, blocks.0.bias, blocks.1.bias, other are on one side only, of another shape, or whole on one side and a DTensor on the other. Make the EMA of a model with the same trainable parameters; and save and load it as states={'ema': ema} of save_checkpoint and load_checkpoint, which shard whole values.
ValueError: EMA.load_state_dict: averages, num_updates missing. Pass what state_dict() of an EMA returned.
ValueError: EMA.load_state_dict: embed.weight, norm.weight, norm.bias, blocks.0.weight, blocks.0.bias, blocks.1.bias are on one side only, of another shape, or whole on one side and a DTensor on the other. Make the EMA of a model with the same trainable parameters; and save and load it as states={'ema': ema} of save_checkpoint and load_checkpoint, which shard whole values.
RuntimeError: EMA: update() was called inside swap(), where the weights of the model are the averages.
RuntimeError: EMA: state_dict() was called inside swap(), where the weights of the model are the averages.
RuntimeError: EMA: another swap() was called inside swap(), where the weights of the model are the averages.
RuntimeError: EMA: inlet.weight was sharded after the EMA was made. Make the EMA after fully_shard.
RuntimeError: EMA: inlet.weight, inlet.bias were frozen when the EMA was made. They are trainable now, but not averaged. Unfreeze what will train before you make the EMA, or make a new one now.""",
    )


@on_ranks(2)
def test_weights_come_back_after_an_error() -> None:
    model = Way(2).model()
    before = full_state_dict(model, rank0_only=False)
    ema = EMA(model, 0.0)
    push(model, 1)
    pushed = full_state_dict(model, rank0_only=False)
    with suppress(KeyError), ema.swap():
        assert_equal(full_state_dict(model, rank0_only=False), before)
        raise KeyError
    assert_equal(full_state_dict(model, rank0_only=False), pushed)
