"""Ranks compare their plans before they communicate: all of them hear the first difference, and who is where."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from expecttest import assert_expected_inline
from harness import World
from meshed import device_mesh, refusal
from models import Tower, built, random_batch, shard_tower
from on_ranks import on_ranks
from torch import Tensor, nn
from towers import backward

from shardwise import CommPolicy, MixedPrecisionPolicy, fully_shard, no_sync, shard_model
from shardwise.engine import plan_check
from shardwise.engine.plan_check import OwnDevice, first_difference, wrong_device
from shardwise.policies import LowPrecisionReduction
from shardwise.strategies import register_comm_hook


def tower(hidden: int = 16) -> Any:
    return built(Tower, hidden=hidden, seed=0)


def is_other() -> bool:
    return dist.get_rank() == 1


def pick(usual: Any, other: Any) -> Any:
    return other if is_other() else usual


def changed(change: Callable[[Any], Any]) -> Any:
    """A model to which ``change`` is made on one rank alone."""
    model = shard_tower(tower())
    if is_other():
        change(model)
    return model


def reduced_otherwise() -> Any:
    model = shard_tower(tower())
    register_comm_hook(model, None, LowPrecisionReduction(pick(torch.bfloat16, torch.float16)))
    return model


def ordered_otherwise() -> Any:
    model = shard_tower(tower())
    model.blocks[0].set_modules_to_forward_prefetch([model.blocks[pick(1, 2)]])
    return model


def deeper() -> Any:
    model = tower()
    if is_other():
        model.blocks.append(tower().blocks[0])
    return shard_tower(model)


UNLIKE: tuple[Callable[[], Any], ...] = (
    lambda: changed(lambda model: model.blocks[1].up.weight.requires_grad_(False)),
    lambda: shard_tower(tower(hidden=pick(16, 24))),
    lambda: pick(shard_tower, fully_shard)(tower()),
    lambda: shard_model(tower(), strategy=pick("zero3", "ddp")),
    lambda: shard_model(tower(), strategy=pick("zero2", "zero1")),
    lambda: shard_tower(pick(tower(), tower().float())),
    lambda: shard_tower(tower(), mp_policy=MixedPrecisionPolicy(pick(None, torch.bfloat16))),
    lambda: shard_tower(tower(), comm_policy=CommPolicy(prefetch=pick(1, 2))),
    lambda: changed(lambda model: model.set_reshard_after_forward(False)),
    reduced_otherwise,
    lambda: changed(lambda model: model.set_all_reduce_hook(Tensor.zero_)),
    ordered_otherwise,
    deeper,
)


def first_differences(texts: list[str]) -> str:
    return "\n".join(text.split("fit together. ")[1].split(" Build, shard")[0] for text in texts)


@on_ranks(2)
def test_ranks_with_different_plans_all_hear_the_first_difference() -> None:
    told = []
    for make in UNLIKE:
        model = make()
        told.append(refusal(backward, model))
        assert refusal(backward, model) == told[-1]
    backward(shard_tower(tower()))  # nothing is left of it all
    assert_expected_inline(
        first_differences(told),
        """\
blocks.1.up.weight: requires_grad is True on rank 0, False on rank 1.
blocks.0.up.weight: shape is (16, 8) on rank 0, (24, 8) on rank 1 (8 more differences follow).
blocks.0.norm.weight: its group is 'blocks.0' on rank 0, 'Tower' on rank 1 (75 more differences follow).
inlet.weight: mesh is (fsdp=2) on rank 0, (replicate=2) on rank 1 (47 more differences follow).
Tower: reshard_after_backward is True on rank 0, False on rank 1 (3 more differences follow).
inlet.weight: dtype is float64 on rank 0, float32 on rank 1 (87 more differences follow).
inlet.weight: dtype of computation is float64 on rank 0, bfloat16 on rank 1 (43 more differences follow).
Tower: comm_policy is CommPolicy(packing_limit_bytes=None, prefetch=1, backward_prefetch='before', max_prefetched=None, quantized_all_gather=None, part_bytes=None) on rank 0, CommPolicy(packing_limit_bytes=None, prefetch=2, backward_prefetch='before', max_prefetched=None, quantized_all_gather=None, part_bytes=None) on rank 1 (3 more differences follow).
Tower: reshard_after_forward is None on rank 0, False on rank 1 (3 more differences follow).
Tower: communication chosen by is LowPrecisionReduction(dtype=torch.bfloat16), register_comm_hook on rank 0, LowPrecisionReduction(dtype=torch.float16), register_comm_hook on rank 1 (3 more differences follow).
Tower: set_all_reduce_hook is False on rank 0, True on rank 1.
blocks.0: set_modules_to_forward_prefetch is ['blocks.1'] on rank 0, ['blocks.2'] on rank 1.
the model: the order of its groups is Tower, blocks.0, blocks.1, blocks.2 on rank 0, Tower, blocks.0, blocks.1, blocks.2, blocks.3 on rank 1 (85 more differences follow).""",
    )
    assert told[0] == (
        "RuntimeError: The ranks have different plans for the model, so that they would communicate what does not fit "
        "together. blocks.1.up.weight: requires_grad is True on rank 0, False on rank 1. Build, shard, freeze and "
        "configure the model alike on all ranks."
    )


@on_ranks(4)
def test_meshes_of_different_shapes_are_named() -> None:
    """One rank of four: on a mesh of its own shape, and frozen."""
    other = dist.get_rank() == 2
    square = device_mesh((2, 2), ("replicate", "shard"))
    line = device_mesh((4,), ("shard",))
    told = [refusal(backward, shard_tower(tower(), mesh=line if other else square))]
    model = shard_tower(tower(), mesh=square)
    if other:
        model.outlet.bias.requires_grad_(False)
    told.append(refusal(backward, model))
    assert_expected_inline(
        first_differences(told),
        """\
inlet.weight: mesh is (replicate=2, shard=2) on ranks 0, 1, 3, (shard=4) on rank 2 (47 more differences follow).
outlet.bias: requires_grad is True on ranks 0, 1, 3, False on rank 2.""",
    )


def told_after(change: Callable[[Any], Any]) -> str:
    """What a backward is told after a step and a change: the differences."""
    model = shard_tower(tower())
    backward(model)
    change(model)
    return refusal(backward, model).split("fit together. ")[1].split(" Build")[0]


@on_ranks(2)
def test_plans_that_come_apart_later_are_refused() -> None:
    """At once on both ranks, and in different ways."""
    texts = [
        told_after(
            lambda model: (model.blocks[1].up if is_other() else model.blocks[1].down).bias.requires_grad_(
                False
            )
        ),
        told_after(lambda model: model.set_gradient_divide_factor(pick(2.0, 4.0))),
    ]
    told = [
        text.split(f" On rank {dist.get_rank()} the plan has changed since the ranks last agreed on it ")
        for text in texts
    ]
    assert_expected_inline(
        "\n".join(differs for differs, _ in told),
        """\
blocks.1.up.bias: requires_grad is True on rank 0, False on rank 1 (1 more differences follow).
Tower: divide_factor is 2.0 on rank 0, 4.0 on rank 1 (3 more differences follow).""",
    )
    assert [own for _, own in told] == [
        f"(blocks.1.{pick('down', 'up')}.bias: requires_grad was True and is False).",
        f"(Tower: divide_factor was None and is {pick(2.0, 4.0)}, and 3 more changes).",
    ]


def changes_on_one_rank_alone(change: Callable[[Any], None]) -> list[str]:
    model = shard_tower(tower())
    backward(model)
    change(model)
    return [refusal(backward, model)]


def freeze(model: Any) -> None:
    model.blocks[1].down.bias.requires_grad_(not is_other())


def freeze_elsewhere(model: Any) -> None:
    """Noticed by the other rank later, which it never comes to."""
    model.blocks[1 if is_other() else 2].down.bias.requires_grad_(False)


def set_divisor(model: Any) -> None:
    if is_other():
        model.set_gradient_divide_factor(3.0)


def leave_out_bias(layer: Any) -> None:
    """From now on its forward does not use it, so that it gets no gradient."""
    if isinstance(layer, nn.LayerNorm):
        layer.forward = lambda x: nn.functional.layer_norm(x, layer.normalized_shape, layer.weight)
    else:
        layer.forward = lambda x: nn.functional.linear(x, layer.weight)


def train_without_bias(model: Any) -> None:
    if is_other():
        leave_out_bias(model.blocks[1].down)
    backward(model)


@pytest.mark.processes
@pytest.mark.parametrize("change", [freeze, freeze_elsewhere, set_divisor, train_without_bias])
def test_a_plan_that_changes_on_one_rank_alone_ends_in_an_error_on_all(change: Any) -> None:
    world = World(2)  # its connections are closed
    try:
        first, second = world.run(changes_on_one_rank_alone, change)
    finally:
        world.close()
    alone = "on rank 1 the plan has changed since the ranks last agreed on it ("
    what = {
        freeze: alone + "blocks.1.down.bias: requires_grad was True and is False)",
        freeze_elsewhere: "blocks.1.down.bias: requires_grad is True on rank 0, False on rank 1",
        set_divisor: alone + "Tower: divide_factor was None and is 3.0, and 3 more changes)",
        train_without_bias: alone
        + "blocks.1: a backward without gradients of blocks.1.down.bias (set_reduce_scatter_unused_params(True) "
        "lets ranks differ) was missing and is seen)",
    }[change]
    for text in (first[0], second[0]):
        assert what in text, text
        assert "configure the model alike on all ranks." in text


@on_ranks(2)
def test_a_steady_step_compares_nothing_and_a_change_is_compared_once() -> None:
    """The store is asked at first, and where plans change alike."""
    model = shard_tower(tower())
    found = []
    with mock.patch.object(plan_check, "compare", wraps=plan_check.compare) as made:

        def note() -> None:
            found.append(made.call_count)
            made.reset_mock()

        with torch.no_grad():
            model(random_batch(0, 4))
        note()
        backward(model)
        note()
        for _ in range(2):
            with no_sync(model):
                backward(model)
            backward(model)
            model.set_reshard_after_backward(False)
            model.set_gradient_divide_factor(2.0)
            backward(model)
        note()
        model.requires_grad_(False)
        model.outlet.requires_grad_(True)
        backward(model)
        note()
        model.requires_grad_(True)
        with torch.no_grad():
            model(random_batch(0, 4))
        note()
        backward(model)
        backward(model)
        note()
    assert found == [0, 1, 1, 1, 0, 1]


@on_ranks(2)
def test_ranks_whose_gradients_are_of_different_parameters_hear_of_it_at_the_next_forward() -> None:
    """Their messages may even be of the same size, so that nothing else fails."""
    model = shard_tower(tower())
    backward(model)
    leave_out_bias(pick(model.blocks[1].down, model.blocks[1].norm))
    backward(model)
    told = [refusal(backward, model), refusal(backward, model)]
    assert told[0] == told[1]
    assert_expected_inline(
        first_differences(told[:1]).split(" On rank")[0],
        """blocks.1: a backward without gradients of blocks.1.down.bias (set_reduce_scatter_unused_params(True) lets ranks differ) is seen on rank 0, missing on rank 1 (1 more differences follow).""",
    )
    model.set_reduce_scatter_unused_params(True)
    backward(model)


@on_ranks(2)
def test_parameters_that_all_ranks_leave_out_are_compared_once_for_each_set_of_them() -> None:
    model = shard_tower(tower())
    layers = [model.blocks[0].down, model.blocks[1].down]
    found = []
    with mock.patch.object(plan_check, "compare", wraps=plan_check.compare) as made:
        for left_out in ([], [0], [0], [0, 1], [1], [0, 1], []):
            for index, layer in enumerate(layers):
                vars(layer).pop("forward", None)
                if index in left_out:
                    leave_out_bias(layer)
            backward(model)
            found.append(made.call_count)
    assert found == [1, 1, 2, 2, 3, 3, 3]


def test_first_difference_names_ranks_with_and_without_a_fact() -> None:
    told = [([0, 2], {("w", "shape"): "(2,)"}), ([1], {("w", "shape"): "(3,)"}), ([3], {})]
    assert first_difference(told) == "w: shape is (2,) on ranks 0, 2, (3,) on rank 1, missing on rank 3"


def test_ranks_on_devices_that_nccl_cannot_use_are_named() -> None:
    first, second = OwnDevice("cuda:0", "", "GPU-a"), OwnDevice("cuda:0", "", "GPU-b")
    advice = (
        ". With NCCL each rank has a device of its own. Choose it in each process before anything is put on a "
        'device and before init_process_group: torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))'
    )
    assert wrong_device({0: first, 1: second}) == ""  # each process sees one device only, another one
    assert wrong_device({0: OwnDevice(), 1: OwnDevice()}) == ""
    assert wrong_device({2: first, 4: second, 6: first}) == f"ranks 2, 6 use the same device, cuda:0{advice}"
    bound = {0: OwnDevice("cuda:0", "cuda:0", "GPU-a"), 1: OwnDevice("cuda:0", "cuda:1", "GPU-a")}
    assert wrong_device(bound) == f"rank 1 uses cuda:0, but its process group is bound to cuda:1{advice}"


@on_ranks(2)
def test_all_ranks_hear_of_a_device_that_two_of_them_use() -> None:
    def own_device(_: Any) -> OwnDevice:
        return OwnDevice("cuda:0", "", "GPU-a")

    with mock.patch.object(plan_check.PlanCheck, "_own_device", own_device):
        text = refusal(lambda: backward(shard_tower(tower())))
    assert text.startswith("RuntimeError: ranks 0, 1 use the same device, cuda:0. With NCCL each rank")
