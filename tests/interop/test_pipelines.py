"""Pipelines of sharded stages: in every schedule of torch's, the gradients of one process, reduced once a step."""

from typing import Any

import pytest
import torch
from harness import WorkerError, World
from meshed import refusal
from models import built
from on_ranks import on_ranks
from pipelines import Pipeline, Stage, Trained, batch_of, mean_of_squares, pipelined, plain, schedule_of
from reference import full
from torch import nn
from torch.distributed import pipelining

from shardwise import fully_shard
from shardwise.interop import PipelineStage, follow_unshard_actions
from shardwise.interop.pipelines import InstalledStage

WHOLE = ["1F1B", "Interleaved1F1B"]  # each backward in one piece
MORE_WHOLE = [pytest.param(schedule, marks=pytest.mark.slow) for schedule in ("GPipe", "LoopedBFS")]
SPLIT = ["InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"]
GROUPS = 3  # of a stage


def trained(world: World, pipeline: Pipeline) -> list[Trained]:
    if pipeline.has_neighbours and not hasattr(pipelining.PipelineStage, "_warmup_forward_vote"):
        pytest.skip("torch 2.11 sends between stages of one rank as well, and gloo cannot send to itself")
    return world.run(pipelined, pipeline)


def assert_trains_alike(got: list[Trained], pipeline: Pipeline) -> None:
    want = plain(pipeline)
    names = {name for rank in got for name in rank.gradients[0]}
    assert names == want.gradients[0].keys()
    for rank in got:
        for mine, expected in zip(rank.gradients, want.gradients, strict=True):
            for name, gradient in mine.items():
                torch.testing.assert_close(gradient, expected[name], rtol=0, atol=1e-12, msg=name)


def assert_reduces_once(pipeline: Pipeline, got: list[Trained]) -> None:
    """One reduction a group and step, and no question to the other ranks whether shards have changed."""
    for rank in got:
        assert rank.events["reduce"] == GROUPS * len(pipeline.indices(0))
        assert not rank.collectives["allreduce_"]


@pytest.mark.parametrize("schedule", [*WHOLE, *MORE_WHOLE, *SPLIT])
def test_each_schedule_gets_the_gradients_of_one_process_and_communicates_once(
    world4: World, schedule: str
) -> None:
    pipeline = Pipeline(schedule)
    got = trained(world4, pipeline)
    assert_trains_alike(got, pipeline)
    assert_reduces_once(pipeline, got)
    for rank in got:
        assert rank.events["unshard"] == rank.events["reduce"]


# The actions of a step of four microbatches that use parameters, on the two pipeline ranks. The first stage computes
# both halves of a backward where it would compute the second.
USES = [("1F1B", [8, 8]), ("InterleavedZeroBubble", [8 + 12, 12 + 12])]


@pytest.mark.parametrize(("schedule", "uses"), USES)
def test_groups_that_are_resharded_after_forward_are_unsharded_for_each_half_of_a_backward(
    world4: World, schedule: str, uses: list[int]
) -> None:
    pipeline = Pipeline(schedule, reshard=True)
    got = trained(world4, pipeline)
    assert_trains_alike(got, pipeline)
    assert_reduces_once(pipeline, got)
    for pipe, rank in zip([0, 0, 1, 1], got, strict=True):
        assert rank.events["unshard"] == rank.events["free"] == GROUPS * uses[pipe]


@pytest.mark.parametrize(
    ("world", "schedule", "syncs"), [(4, "1F1B", True), (2, "ZBVZeroBubble", False)], indirect=["world"]
)
def test_gradients_of_several_steps_add_up(world: World, schedule: str, syncs: bool) -> None:
    pipeline = Pipeline(schedule, (world.size // 2, 2), accumulate=2, syncs=syncs)
    got = trained(world, pipeline)
    assert_trains_alike(got, pipeline)
    assert_reduces_once(pipeline, got)


def test_stages_are_sharded_and_replicated(world4: World) -> None:
    names, data = ("pipe", "replicate", "shard"), ("replicate", "shard")
    pipeline = Pipeline("InterleavedZeroBubble", (1, 2, 2), names, data, microbatches=2)
    got = trained(world4, pipeline)
    assert_trains_alike(got, pipeline)
    for rank in got:
        assert rank.events["reduce"] == rank.events["unshard"] == 2 * GROUPS


def test_microbatches_may_be_uneven_where_nothing_is_sent(world2: World) -> None:
    """torch's stages receive into buffers of the first microbatch's shape, so only where all are on one rank."""
    pipeline = Pipeline("ZBVZeroBubble", (1, 2), microbatches=3, mean=False)
    assert_trains_alike(trained(world2, pipeline), pipeline)


@pytest.mark.slow
def test_a_schedule_unshards_stages_ahead(world4: World) -> None:
    pipeline = Pipeline("ZBVZeroBubble", follows=True)
    got = trained(world4, pipeline)
    assert_trains_alike(got, pipeline)
    assert_reduces_once(pipeline, got)
    for rank in got:
        assert rank.events["unshard"] == rank.events["reduce"]


@pytest.mark.parametrize("reshard", [True, None])
@pytest.mark.parametrize("what", [{"freezes": True}, {"checkpoints": True}], ids=str)
def test_split_backwards_follow_frozen_parameters_and_checkpoints(
    world2: World, what: dict[str, bool], reshard: bool | None
) -> None:
    pipeline = Pipeline("InterleavedZeroBubble", (1, 2), reshard=reshard, microbatches=2, **what)
    assert_trains_alike(trained(world2, pipeline), pipeline)


def test_split_backwards_add_up_what_a_layer_that_runs_twice_gets(world2: World) -> None:
    pipeline = Pipeline("InterleavedZeroBubble", (1, 2), microbatches=2, ties=True)
    assert_trains_alike(trained(world2, pipeline), pipeline)


def test_a_rank_alone_trains_alike(world1: World) -> None:
    pipeline = Pipeline("ZBVZeroBubble", (1, 1), accumulate=2, syncs=False)
    assert_trains_alike(trained(world1, pipeline), pipeline)


def test_evaluation_between_steps_of_accumulation_changes_no_gradient(world1: World) -> None:
    """Also where stages that follow each other are on one rank, for which torch's own stages fail."""
    pipeline = Pipeline("InterleavedZeroBubble", (1, 1), accumulate=2, evaluates=True)
    got = trained(world1, pipeline)
    assert_trains_alike(got, pipeline)
    means = [sum(losses) / len(losses) for losses in got[0].evaluations]
    assert means == pytest.approx(plain(pipeline).losses)


# --- stages of frameworks, which know torch's name ------------------------------------------------


@pytest.mark.parametrize(
    ("world", "schedule"), [(4, "1F1B"), (2, "InterleavedZeroBubble")], indirect=["world"]
)
def test_a_stage_that_install_has_put_in_the_place_of_torchs_becomes_ours(
    world: World, schedule: str
) -> None:
    pipeline = Pipeline(schedule, (world.size // 2, 2), microbatches=2, kind=InstalledStage)
    got = trained(world, pipeline)
    assert_trains_alike(got, pipeline)
    assert_reduces_once(pipeline, got)


class CountsForwards(InstalledStage):
    forwards = 0

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        self.forwards += 1
        return super().forward_one_chunk(*args, **kwargs)


def steps_of_a_derived_stage(is_sharded: bool) -> tuple[int, bool, dict[str, torch.Tensor]]:
    module = built(Stage, seed=0)
    if is_sharded:
        fully_shard(module)
    stage = CountsForwards(module, 0, 1, torch.device("cpu"))
    schedule = pipelining.ScheduleGPipe(stage, 2, loss_fn=mean_of_squares)
    for step in range(2):
        x, target = batch_of(step)
        schedule.step(x, target=target)
    gradients = {name: full(param.grad) for name, param in module.named_parameters()}
    return stage.forwards, isinstance(stage, PipelineStage), gradients


def test_a_derived_stage_keeps_its_methods_and_torchs_where_nothing_is_sharded(world1: World) -> None:
    module = built(Stage, seed=0)
    for step in range(2):
        x, target = batch_of(step)
        mean_of_squares(module(x), target).backward()
    for is_sharded in (True, False):
        ((forwards, is_ours, gradients),) = world1.run(steps_of_a_derived_stage, is_sharded)
        assert (forwards, is_ours) == (4, is_sharded)
        if is_sharded:  # torch's stages divide what earlier steps have left once more
            for name, param in module.named_parameters():
                torch.testing.assert_close(gradients[name], param.grad, rtol=0, atol=1e-12)


# --- refusals -------------------------------------------------------------------------------------


def test_a_split_backward_without_our_stage_is_refused(world2: World) -> None:
    pipeline = Pipeline("InterleavedZeroBubble", (1, 2), kind=pipelining.PipelineStage)
    with pytest.raises(WorkerError, match=r"shardwise\.interop\.PipelineStage, which accepts the"):
        trained(world2, pipeline)


def test_whole_backwards_without_our_stage_go_on(world2: World) -> None:
    pipeline = Pipeline("Interleaved1F1B", (1, 2), kind=pipelining.PipelineStage)
    assert_trains_alike(trained(world2, pipeline), pipeline)


@on_ranks(1)
def test_gradients_of_inputs_alone_are_no_business_of_pipelines() -> None:
    model = fully_shard(Stage().double())
    x, _ = batch_of(0)
    x.requires_grad_()
    loss = model(x).sum()
    (first,) = torch.autograd.grad(loss, x, retain_graph=True)
    loss.backward()
    assert bool((first == x.grad).all())
    assert all(p.grad is not None for p in model.parameters())


def act(what: str, schedule: Any, module: Any) -> None:
    x, target = batch_of(0)
    if what == "no actions":
        follow_unshard_actions(schedule)
    schedule.step(x, target=target)
    if what == "microbatches":
        module.set_requires_gradient_sync(False)
        for microbatches in (4, 2):
            schedule_of(Pipeline("1F1B", (1, 1), microbatches=microbatches), [module], [0], None).step(
                x, target=target
            )
    if what in ("dw_builder", "not ended"):
        builder = {"dw_builder": list} if what == "dw_builder" else {}
        stage = PipelineStage(module, 0, 1, torch.device("cpu"), **builder)
        stage.perform_reduce_grad = lambda factor: None
        schedule = pipelining.ScheduleGPipe(stage, 2, loss_fn=mean_of_squares)
        for _ in range(2):
            schedule.step(x, target=target)


REFUSALS = {
    "nothing sharded": "PipelineStage 0: nothing in its module, a Stage, is sharded. Call fully_shard on the",
    "a part": "do not have the same parameter groups, so a step of one would not be a step of the other. Call",
    "no actions": "a Schedule1F1B has one stage a rank, which it neither unshards nor reshards. Leave the call out.",
    "microbatches": "were divided by 4 microbatches, those of this step are to be divided by 2, and they are one sum",
    "dw_builder": "it was given a dw_builder, which computes gradients of weights that would not be reduced. Leave",
    "not ended": "the last step of microbatches was not ended, so its gradients are neither reduced nor divided.",
}


@pytest.mark.parametrize("what", REFUSALS)
@on_ranks(1)
def test_refusals_say_what_to_do(what: str) -> None:
    module = Stage().double()
    if what != "nothing sharded":
        fully_shard(module)
    if what == "a part":
        fully_shard(nn.Sequential(module, nn.Linear(8, 8).double()))
    schedule = schedule_of(Pipeline("1F1B", (1, 1)), [module], [0], None)
    assert REFUSALS[what] in refusal(act, what, schedule, module)
