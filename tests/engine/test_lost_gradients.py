"""No gradient is lost, doubled, kept back or left over, where that has happened elsewhere (docs/explain/failures.md)."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from events import counts, events_of
from failure_models import (
    Between,
    Branching,
    Chain,
    CheckpointedTower,
    PartlyUsed,
    Recursive,
    Stages,
    block,
)
from models import built, even_tower
from on_ranks import on_ranks
from reference import adamw, mean_of_squares
from scenario import Side, same_as_plain
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from shardwise import CommPolicy

FAR_AHEAD = CommPolicy(prefetch=3)


# --- checkpointing, and several forwards ----------------------------------------------------------


def preference_loss(model: nn.Module, inputs: Tensor) -> Tensor:
    run = model.run if isinstance(model, CheckpointedTower) else model
    chosen, rejected = run(inputs), run(inputs.flip(1) * 0.7)
    return -F.logsigmoid(chosen - rejected).mean() + 0.1 * chosen.pow(2).mean()


@same_as_plain(2)
@pytest.mark.parametrize(
    ("where", "reentrant", "reshard"),
    [
        ("inside", True, None),
        ("around", False, False),
        ("pairs", True, False),
        ("wrapper", False, None),
        ("wrapped", True, None),
        ("whole", True, None),
    ],
)
def test_two_checkpointed_forwards_before_one_backward_lose_no_gradient(
    side: Side, where: str, reentrant: bool, reshard: bool | None
) -> None:
    model = built(CheckpointedTower, where, reentrant)
    side.shard(*model.to_shard(), model, reshard_after_forward=reshard)
    side.steps(model, adamw(model), range(2), preference_loss)


@same_as_plain(2)
@pytest.mark.parametrize(
    ("reentrant", "order", "loss", "choices"),
    [
        (True, (0, 1), mean_of_squares, {}),
        (False, (0, 1), preference_loss, {"backward_prefetch": "after"}),
        (True, (0, 1, 1, 0), preference_loss, {"backward_prefetch": None, "max_prefetched": 2}),
        (False, (0, 0), preference_loss, {"prefetch": 3, "max_prefetched": 2}),
    ],
)
def test_checkpointed_stages_of_sharded_blocks_lose_no_gradient(
    side: Side, reentrant: bool, order: Any, loss: Any, choices: dict[str, Any]
) -> None:
    model = built(Stages, reentrant, order)
    side.shard(*model.to_shard(), model, comm_policy=CommPolicy(**choices))
    side.steps(model, adamw(model), range(2), loss)


class Selective(Chain):
    def __init__(self, everything: bool) -> None:
        super().__init__(block, block, block)
        self.everything = everything

    def between(self, block: nn.Module, x: Tensor) -> Tensor:
        def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            keeps = self.everything or op in (torch.ops.aten.addmm.default, torch.ops.aten.mm.default)
            return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE

        contexts = partial(create_selective_checkpoint_contexts, policy)
        return checkpoint(block, x, use_reentrant=False, context_fn=contexts)  # type: ignore


@same_as_plain(2)
@pytest.mark.parametrize("everything", [False, True], ids=["matmuls", "everything"])
def test_selective_checkpointing_changes_no_gradient(side: Side, everything: bool) -> None:
    model = side.shard_tower(built(Selective, everything))
    side.steps(model, adamw(model), range(2), preference_loss)


# --- accumulation, and clearing what has accumulated ----------------------------------------------


CLEARINGS: dict[str, Callable[[Any, torch.optim.Optimizer], Any]] = {
    "model_none": lambda model, _: model.zero_grad(),
    "model_zeros": lambda model, _: model.zero_grad(set_to_none=False),
    "optimizer_none": lambda _, optimizer: optimizer.zero_grad(),
    "optimizer_zeros": lambda _, optimizer: optimizer.zero_grad(set_to_none=False),
    "by_hand": lambda model, _: [setattr(param, "grad", None) for param in model.parameters()],
    "data_zeros": lambda model, _: [param.grad.data.zero_() for param in model.parameters()],
    "foreach_zeros": lambda model, _: torch._foreach_zero_([param.grad for param in model.parameters()]),
}


@same_as_plain(2)
@pytest.mark.parametrize(
    ("how", "between", "has_grad"),
    [
        ("model_none", False, False),
        ("model_zeros", False, True),
        ("optimizer_none", True, False),
        ("optimizer_zeros", False, False),
        ("by_hand", False, False),
        ("data_zeros", False, False),
        ("foreach_zeros", False, False),
    ],
)
def test_clearing_gradients_clears_the_unsynchronised_ones(
    side: Side, how: str, between: bool, has_grad: bool
) -> None:
    model = side.shard_tower(built(even_tower))
    optimizer = adamw(model)
    if has_grad:
        mean_of_squares(model, side.inputs(9)).backward()
    side.sync(model, False)
    for microbatch in range(2):
        mean_of_squares(model, side.inputs(microbatch)).backward()
    side.sync(model, True)
    if between:
        loss = mean_of_squares(model, side.inputs(2))
        CLEARINGS[how](model, optimizer)
    else:
        CLEARINGS[how](model, optimizer)
        loss = mean_of_squares(model, side.inputs(2))
    loss.backward()
    side.note_gradients(model)
    optimizer.step()
    side.assert_settled(model)
    side.steps(model, optimizer, [3])


@same_as_plain(2)
def test_clearing_one_gradient_keeps_others_that_are_zero(side: Side) -> None:
    """One gradient is changed in place; another, that is zero, has an unsynchronised part waiting."""
    model = side.shard_tower(built(Branching))
    loss = model(side.inputs(0)).mean() + 0 * model.blocks[0](side.inputs(0)).sum()
    loss.backward()
    model.zero_grad(set_to_none=False)
    side.sync(model, False)
    mean_of_squares(model, side.inputs(1)).backward()
    for name, param in model.named_parameters():
        if name == "inlet.bias":
            param.grad = None
    side.sync(model, True)
    mean_of_squares(model, side.inputs(2)).backward()
    side.note_gradients(model)


# --- what follows an evaluation -------------------------------------------------------------------


ACTIONS: dict[str, Callable[[Any, torch.optim.Optimizer, Side], Any]] = {
    "clip": lambda model, _, side: side.note("norm", clip_grad_norm_(model.parameters(), 0.01)),
    "clear": lambda model, *_: model.zero_grad(set_to_none=False),
    "edit in place": torch.no_grad()(lambda model, *_: [p.mul_(0.5).add_(0.01) for p in model.parameters()]),
    "edit data": lambda model, *_: [param.data.mul_(0.5) for param in model.parameters()],
    "optimize": lambda _, optimizer, __: optimizer.step(),
    "optimize, fused": lambda model, *_: torch.optim.AdamW(model.parameters(), lr=0.1, fused=True).step(),
    "optimize, foreach": lambda model, *_: torch.optim.SGD(model.parameters(), lr=0.1, foreach=True).step(),
    "load values": lambda model, *_: model.load_state_dict(
        {n: v * 0.5 for n, v in model.state_dict().items()}
    ),
    # As torch.distributed.checkpoint does: into the local tensors of the state dict.
    "load checkpoint": lambda model, _, side: [
        (value.to_local() if side.is_sharded else value).mul_(0.5) for value in model.state_dict().values()
    ],
}


def evaluate(model: nn.Module, side: Side, mode: Any) -> Tensor:
    with mode():
        return model(side.inputs(7)).detach().clone()


@same_as_plain(2)
@pytest.mark.parametrize(
    ("act", "mode", "reshard"),
    [
        ("clip", torch.no_grad, False),
        ("clear", torch.inference_mode, None),
        ("edit in place", torch.enable_grad, None),  # they forgot
        ("edit data", torch.enable_grad, False),
        ("optimize", torch.no_grad, False),
        ("optimize, fused", torch.no_grad, False),
        ("optimize, foreach", torch.no_grad, False),
        ("load values", torch.no_grad, False),
        ("load checkpoint", torch.no_grad, False),
    ],
)
def test_what_follows_an_evaluation_acts_on_the_weights(
    side: Side, act: str, mode: Any, reshard: bool | None
) -> None:
    model = side.shard_tower(built(even_tower), reshard_after_forward=reshard)
    optimizer = adamw(model)
    side.step(model, optimizer, 0)
    optimizer.zero_grad()
    mean_of_squares(model, side.inputs(1)).backward()
    side.note_rows("before", evaluate(model, side, mode))
    ACTIONS[act](model, optimizer, side)
    side.note_gradients(model)
    side.note_parameters(model)
    side.note_rows("after", evaluate(model, side, mode))
    side.note_rows("again", evaluate(model, side, mode))
    side.steps(model, optimizer, [2])


class Teacher(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tower = even_tower()

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        return self.tower(x)


FOLLOW: dict[str, Callable[[nn.Parameter, nn.Parameter], Any]] = {
    "lerp": torch.no_grad()(lambda mine, other: mine.lerp_(other, 0.5)),
    "data": lambda mine, other: mine.data.mul_(0.5).add_(other.data, alpha=0.5),
}


@same_as_plain(2)
@pytest.mark.parametrize(
    ("make", "how", "reshard"),
    [(even_tower, "lerp", None), (even_tower, "data", False), (Teacher, "data", True)],
)
def test_a_teacher_that_follows_the_student_is_never_stale(
    side: Side, make: Any, how: str, reshard: bool | None
) -> None:
    student, teacher = built(even_tower), built(make)
    side.shard_tower(student)
    tower = teacher.tower if isinstance(teacher, Teacher) else teacher
    side.shard(*tower.blocks, teacher, reshard_after_forward=reshard)
    teacher.requires_grad_(False)
    optimizer = adamw(student)
    for step in range(3):
        inputs = side.inputs(step)
        target = teacher(inputs)
        side.note_rows("target", target)
        loss = (student(inputs) - 1 - target).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        for mine, other in zip(teacher.parameters(), student.parameters(), strict=True):
            FOLLOW[how](mine, other)


@same_as_plain(2)
@pytest.mark.parametrize("make", [even_tower, Teacher])
def test_a_model_that_no_backward_will_visit_is_freed_after_forward(side: Side, make: Any) -> None:
    model = built(make)
    tower = model.tower if isinstance(model, Teacher) else model
    side.shard(*tower.blocks, model)
    model.requires_grad_(False)
    side.note_rows("output", model(side.inputs(0)))
    side.assert_settled(model)


@same_as_plain(2)
@pytest.mark.parametrize("reshards_after_backward", [True, False])
def test_an_edit_on_one_rank_is_unsharded_by_all(side: Side, reshards_after_backward: bool) -> None:
    """The rank that has row 0 of a weight changes it, and the other ranks do nothing."""
    model = side.shard_tower(built(even_tower))
    if side.is_sharded:
        model.set_reshard_after_backward(reshards_after_backward)
    mean_of_squares(model, side.inputs(0)).backward()
    if reshards_after_backward:
        model(side.inputs(0))  # the root stays unsharded for a backward that does not come
    if side.rank == 0:
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if name in ("inlet.weight", "blocks.1.up.weight"):
                    local = weight.to_local() if side.is_sharded else weight
                    local[0].zero_()
    for step in range(2):
        mean_of_squares(model, side.inputs(step)).backward()
        side.note_gradients(model)


# --- unused parameters and blocks -----------------------------------------------------------------


@same_as_plain(2)
@pytest.mark.parametrize(
    ("use", "options"),
    [
        ([(0, 2)] * 3, {}),
        ([(0, 1, 2), (1,), (), (2, 1, 0), (0, 0, 1)], {}),
        ([(0, 1, 2), (0, 2), (1,), (0, 1, 2)], {"reshard_after_forward": True, "comm_policy": FAR_AHEAD}),
        ([(0, 1, 2), (0, 2), (1,), (0, 1, 2)], {"reshard_after_forward": False, "comm_policy": FAR_AHEAD}),
    ],
    ids=["never", "changing", "unsharded_ahead", "kept_unsharded"],
)
def test_blocks_that_are_not_used_get_no_gradient(
    side: Side, use: list[tuple[int, ...]], options: Any
) -> None:
    """Nor do they stay unsharded, nor is anything of theirs reduced."""
    model = side.shard_tower(built(Branching), **options)
    optimizer = adamw(model)
    for step, used in enumerate(use):
        model.used = used
        events = events_of(model) if side.is_sharded else []
        side.step(model, optimizer, step)
        reduced = counts(events, "reduce")
        assert not side.is_sharded or [f"blocks.{i}" in reduced for i in range(3)] == [
            i in used for i in range(3)
        ]
    side.note_parameters(model)


@same_as_plain(2)
@pytest.mark.parametrize(
    ("make", "reshard", "has_other"),
    [(even_tower, None, True), (even_tower, False, False), (Between, True, False)],
)
def test_a_loss_on_features_trains_what_made_them(
    side: Side, make: Any, reshard: bool | None, has_other: bool
) -> None:
    """What comes after the second block runs as well, but nothing it made reaches the loss, or another one."""
    model = side.shard_tower(built(make), reshard_after_forward=reshard)
    optimizer = adamw(model)
    kept: list[Tensor] = []
    model.blocks[1].register_forward_hook(lambda module, args, output: kept.append(output))
    for step in range(3):
        kept.clear()
        optimizer.zero_grad()
        output = model(side.inputs(step))
        if has_other:
            output.pow(2).mean().backward(retain_graph=True)
            side.note_gradients(model)
        kept[0].pow(2).mean().backward()
        side.note_gradients(model)
        optimizer.step()
        side.assert_settled(model)


@on_ranks(2)
def test_frozen_blocks_that_no_gradient_reaches_are_unsharded_once() -> None:
    side = Side(is_sharded=True)
    model = side.shard_tower(built(even_tower))
    model.inlet.requires_grad_(False)
    model.blocks[:2].requires_grad_(False)
    model.blocks[2].set_reshard_after_forward(True)  # else it is kept for backward
    mean_of_squares(model, side.inputs(0)).backward()
    events = events_of(model)
    mean_of_squares(model, side.inputs(0)).backward()
    assert counts(events, "unshard") == {"Tower": 1, "blocks.0": 1, "blocks.1": 1, "blocks.2": 2}


# --- backward through backward --------------------------------------------------------------------


class ForceField(nn.Module):
    """Energy and its gradient, both made in forward; parameters of the root are used after that."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = even_tower()
        self.blocks = self.tower.blocks
        self.scale = nn.Parameter(torch.tensor([1.5, 0.5]))

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            energy = self.tower(x)
            (force,) = torch.autograd.grad(energy.sum(), x, create_graph=self.training)
        return self.scale[0] * energy + self.scale[1] * force.sum(1, keepdim=True)


@same_as_plain(2)
def test_a_forward_may_run_a_backward_of_its_own(side: Side) -> None:
    model = side.shard_tower(built(ForceField), reshard_after_forward=True)
    optimizer = adamw(model)
    for step in range(2):
        side.step(model, optimizer, step)
        model.eval()
        with torch.no_grad():
            side.note_rows("evaluation", model(side.inputs(step)))
        side.note_rows("evaluation with gradients", model(side.inputs(step)))
        model.train()


# --- freezing and thawing -------------------------------------------------------------------------


@same_as_plain(2)
def test_freezing_and_thawing_between_steps_is_followed(side: Side) -> None:
    model = side.shard_tower(built(even_tower), reshard_after_forward=False)
    model.blocks[2].requires_grad_(False)  # before the first forward
    optimizer = adamw(model)
    side.step(model, optimizer, 0)
    model.blocks[2].requires_grad_(True)
    model.blocks[0].up.requires_grad_(False)
    side.step(model, optimizer, 1)
    model.inlet.requires_grad_(False)
    model.blocks[0].requires_grad_(False)
    side.step(model, optimizer, 2)
    model.requires_grad_(False)
    side.note_rows("all frozen", model(side.inputs(3)))
    model.outlet.requires_grad_(True)
    side.step(model, optimizer, 4)
    model.requires_grad_(True)
    side.steps(model, optimizer, [5])


@same_as_plain(2)
def test_freezing_before_backward_is_followed_as_without_sharding(side: Side) -> None:
    """Between forward and backward: the graph is made, and gradients come all the same."""
    model = side.shard_tower(built(even_tower))
    for step in range(2):
        loss = mean_of_squares(model, side.inputs(step))
        model.blocks[1].requires_grad_(step == 1)
        loss.backward()
        side.note_gradients(model)
        side.assert_settled(model)


@same_as_plain(2)
def test_freezing_ahead_in_backward_is_followed_as_without_sharding(side: Side) -> None:
    """A hook freezes a weight of the block before its own, whose parameters are on their way already."""
    model = side.shard_tower(built(even_tower))

    def freeze(gradient: Tensor) -> None:
        model.blocks[1].up.weight.requires_grad_(False)

    for step in range(3):
        model.zero_grad()
        if step == 2:
            model.blocks[2].norm.register_forward_hook(
                lambda _, __, output: output.register_hook(freeze) and None
            )
        mean_of_squares(model, side.inputs(step)).backward()
        side.note_gradients(model)


# --- parameters that some steps or microbatches use -----------------------------------------------


@same_as_plain(2)
@pytest.mark.parametrize(
    ("patterns", "packing_limit_bytes"),
    [
        ([[False], [True]] * 2, 0),
        ([[False, False, True]] * 2, None),
        ([[True, False, False]] * 2, 0),
    ],
    ids=["in turn", "last only", "first only"],
)
def test_a_parameter_used_at_times_gets_the_gradients_of_these(
    side: Side, patterns: list[list[bool]], packing_limit_bytes: int | None
) -> None:
    model = built(Chain, PartlyUsed, block, PartlyUsed)
    side.shard_tower(model, comm_policy=CommPolicy(packing_limit_bytes=packing_limit_bytes))
    optimizer = adamw(model)
    for step, pattern in enumerate(patterns):
        optimizer.zero_grad()
        for microbatch, uses_extra in enumerate(pattern):
            model.blocks[0].uses_extra = uses_extra
            side.sync(model, microbatch == len(pattern) - 1)
            mean_of_squares(model, side.inputs(10 * step + microbatch)).backward()
        side.note_gradients(model)
        optimizer.step()
        side.assert_settled(model)


# --- other ways to ask for gradients --------------------------------------------------------------


@same_as_plain(2)
@pytest.mark.parametrize(("guesses", "reshard"), [(False, None), (False, False), (True, True)])
def test_a_model_that_calls_itself_trains(side: Side, guesses: bool, reshard: bool | None) -> None:
    model = side.shard_tower(built(Recursive, guesses), reshard_after_forward=reshard)
    side.steps(model, adamw(model), range(3))
    with torch.no_grad():
        side.note_rows("evaluation", model(side.inputs(9)))


@same_as_plain(2)
def test_saved_tensor_hooks_change_no_gradient(side: Side) -> None:
    model = side.shard_tower(built(even_tower))

    def loss_of(model: nn.Module, inputs: Tensor) -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            return preference_loss(model, inputs)

    side.steps(model, adamw(model), range(2), loss_of)


class Equilibrium(nn.Module):
    """A fixed point found without gradients; a hook solves for its gradient by inner backwards."""

    def __init__(self) -> None:
        super().__init__()
        self.inlet = nn.Linear(8, 8)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.Tanh())])
        self.outlet = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        block = self.blocks[0]
        x = self.inlet(x)
        z = torch.zeros_like(x)
        with torch.no_grad():
            for _ in range(4):
                z = block(z + x)
        z = block(z + x)
        z_in = z.detach().requires_grad_()
        again = block(z_in + x.detach())

        def solve(gradient: Tensor) -> Tensor:
            total = gradient
            for _ in range(3):
                (step,) = torch.autograd.grad(again, z_in, total, retain_graph=True)
                total = gradient + 0.3 * step
            return total

        z.register_hook(solve)
        return self.outlet(z)


@same_as_plain(2)
def test_hooks_that_run_inner_backwards_lose_no_gradient(side: Side) -> None:
    model = side.shard_tower(built(Equilibrium))
    side.steps(model, adamw(model), range(2))
