"""`shard_model(model, strategy="auto")`: never more than the memory named, the fewest bytes, alike on all ranks."""

import argparse
import logging
from functools import partial
from typing import Any

import estimate as bench
import pytest
import torch
import torch.distributed as dist
from comparing import alike
from expecttest import assert_expected_inline
from gpt import GPT, batch_of
from harness import World
from models import Tower, random_batch
from reference import full
from refusals import refusal
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import shardwise
from shardwise import DataParallelMeshDims, MixedPrecisionPolicy, explain, shard_model
from shardwise.dry_run.fakes import fake_world
from shardwise.strategies.auto import CHOICE, AutoOptions, Choice, Search, Trial

pytestmark = pytest.mark.processes  # steps of whole models: seconds

SIZES = argparse.Namespace(layers=6, width=192, heads=4, vocab=64, context=32, batch=2)
TWO = {"ddp": {"replicate": 2}, "zero2": {"shard": 2}, "zero3": {"shard": 2}}
FOUR = {"ddp": {"replicate": 4}, "zero2": {"shard": 4}, "zero3": {"shard": 4}}
HOSTS = FOUR | {name: {"replicate": 2, "shard": 2} for name in ("hybrid", "hybrid_zero2", "zero3_hpz")}


def shard_copy(copy: nn.Module, mesh: Any, strategy: Any, overrides: Any) -> None:
    shard_model(copy, strategy=strategy, mesh=mesh, overrides=overrides, check_equal_weights=False)


def choice_for(shapes: dict[str, dict[str, int]], memory: str, is_offloaded: bool = False) -> Choice:
    """For one rank of a world that is not there; of devices, if shards are offloaded."""
    with torch.device("meta"):
        model = GPT(SIZES)
    options = AutoOptions(memory, batch_of(0, SIZES), None, None)
    return Search(model, options, shapes, None, not is_offloaded, is_offloaded, shard_copy).run()


# --- against measurement --------------------------------------------------------------------------


def gpt(layers: int = 4) -> Any:
    torch.manual_seed(0)
    return GPT(argparse.Namespace(**vars(SIZES) | {"layers": layers}))


def measured(choice: Choice) -> int:
    def shard() -> Any:
        strategy: Any = choice.trial.strategy
        return shard_model(
            gpt(len(choice.trial.order)),
            strategy=strategy,
            mesh=bench.mesh_of(strategy),
            overrides=choice.overrides,
            check_equal_weights=False,
        )

    return bench.held(shard, SIZES)["highest"]


def assert_fits(world: World, choice: Choice) -> None:
    most = max(world.run(measured, choice, timeout=200))
    assert most <= choice.memory
    assert choice.trial.num_bytes == pytest.approx(most, rel=0.03)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "memory", "expected"),
    [
        (2, "200MB", "zero2"),
        (2, "36MB", "zero3, blocks.2 ... blocks.5 kept until backward"),
        (4, "60MB", "hybrid_zero2"),
        (4, "36MB", "hybrid, blocks.2 ... blocks.5 kept until backward"),
        (4, "32MB", "zero2"),
        (4, "28MB", "zero3, blocks.2 ... blocks.5 kept until backward"),
    ],
    indirect=["world"],
)
def test_no_choice_takes_more_than_the_memory_named(world: World, memory: str, expected: str) -> None:
    choice = choice_for(TWO if world.size == 2 else HOSTS, memory)
    assert str(choice.trial) == expected
    assert_fits(world, choice)


# --- what is chosen -------------------------------------------------------------------------------


def chosen(model: nn.Module, memory: str, shape: dict[str, int], **options: Any) -> Choice:
    sample = options.pop("sample", torch.zeros(4, 64))
    with fake_world(shape, lambda *_: None) as mesh:
        shard_model(model, strategy="auto", memory=memory, sample=sample, mesh=mesh, **options)
        choice: Choice = model.__dict__[CHOICE]
    return choice


def tower(**sizes: int) -> nn.Module:
    return Tower(**({"width": 64, "hidden": 128, "depth": 4} | sizes))


def test_shards_in_host_memory_do_not_count() -> None:
    """tests/software_gpu compares such estimates with what the allocator of a device says."""
    choice = choice_for({name: FOUR[name] for name in ("zero2", "zero3")}, "30MB", is_offloaded=True)
    with torch.device("meta"):
        model = GPT(SIZES)
    options: Any = {"offload_policy": "cpu", "device": "cuda", "activation_checkpointing": False}
    found = shardwise.estimate(model, world=4, strategy="zero2", batch=batch_of(0, SIZES), **options)
    assert choice.trial.num_bytes == found.rows[0].peak.num_bytes
    assert [trial.strategy for trial in choice.trials] == ["zero2"]
    assert choice.assumptions.endswith("on each rank, shards in host memory")


@pytest.mark.slow
def test_reduction_in_more_bytes_than_parameters_speaks_for_sharding_and_frozen_ones_against() -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    choice = chosen(tower(), "1GB", {"shard": 2}, mp_policy=policy)
    ddp, zero2 = choice.trials
    assert choice.trial is zero2
    assert zero2.exposed == pytest.approx(0.75 * ddp.exposed, rel=0.02)  # 2 + 4 bytes, for 4 + 4
    frozen = tower()
    for block in frozen.blocks:
        block.requires_grad_(False)
    choice = chosen(frozen, "1GB", {"shard": 2})
    assert choice.trial.strategy == "ddp"
    assert choice.trial.exposed < 0.3 * choice.trials[1].exposed


def test_groups_are_those_of_the_real_call() -> None:
    """Chosen by identity, merged, some ignored: a copy of the model is sharded in the same way."""
    model = tower(depth=3)
    blocks = set(model.blocks)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    given: dict[str, Any] = {
        "wrap": lambda module: module in blocks,
        "ignored_params": set(model.inlet.parameters()),
        "bucket_cap_mb": 0.15,
        "mp_policy": policy,
    }
    with pytest.warns(UserWarning, match="ignored_params contains trainable parameters"):
        choice = chosen(model, "1GB", {"shard": 4}, **given)
    assert choice.trial.strategy == "zero2"
    assert choice.trial.order == (("blocks.0", "blocks.1"), ("blocks.2",))
    blocks_alone = sum(param.numel() * (2 + 2) for block in blocks for param in block.parameters())
    assert choice.trial.sent == pytest.approx(blocks_alone * 3 / 4, rel=0.02)


def test_of_hybrid_strategies_what_leaves_a_host_counts() -> None:
    """All ranks of a host send their parts of the gradients over its network; a ring crosses it once."""
    whole = sum(param.nbytes for param in tower(depth=2).parameters())
    choice = chosen(tower(depth=2), "1GB", {"replicate": 4, "shard": 2})
    hybrid, sharded = choice.trials
    assert [choice.trial.strategy, hybrid.strategy, sharded.strategy] == ["hybrid_zero2"] * 2 + ["zero3_hpz"]
    assert hybrid.exposed == pytest.approx(2 * whole * 3 / 4, rel=0.05)
    assert sharded.exposed == pytest.approx(2 * whole * 7 / 8, rel=0.05)
    # Computed in fewer bytes than it is reduced in.
    choice = chosen(tower(depth=2), "1GB", {"replicate": 4, "shard": 2}, mp_policy="bf16")
    assert choice.trial.strategy == "zero3_hpz"
    # No candidate where zero2 fits, which exposes as much.
    assert [trial.strategy for trial in choice_for(HOSTS, "1GB").trials] == ["ddp", "zero2", "hybrid_zero2"]
    assert choice.trial.exposed == pytest.approx(1.5 * whole * 7 / 8, rel=0.05)


def test_roles_that_are_named_leave_their_strategies_alone_and_an_optimizer_and_a_loss_count() -> None:
    seen: list[Any] = []

    def loss(output: torch.Tensor) -> torch.Tensor:
        seen.append(output.shape)
        return output.pow(2).sum()

    def only(role: str, **options: Any) -> Trial:
        dims = DataParallelMeshDims(**{role: "shard"})
        (trial,) = chosen(tower(depth=2), "1GB", {"shard": 2}, dp_mesh_dims=dims, **options).trials
        return trial

    sharded, with_state = only("shard"), only("replicate")
    without = only("replicate", optimizer="sgd", loss=loss)
    assert [each.strategy for each in (sharded, with_state, without)] == ["zero2", "ddp", "ddp"]
    assert sharded.exposed == sharded.sent  # on one host
    whole = sum(param.nbytes for param in tower(depth=2).parameters())
    assert with_state.num_bytes - without.num_bytes == pytest.approx(2 * whole, rel=0.5)
    assert set(seen) == {(4, 1)}


class Arithmetic(Search):
    """Of groups whose memory is known: the first ones that are kept cost nothing."""

    def __init__(self, num_groups: int, usable: int) -> None:
        self._usable, self._whole, self._shapes, self.tried = usable, 10 * num_groups, TWO, 0
        self.order = tuple((f"blocks.{n}",) for n in range(num_groups))

    def peak(self, count: int) -> int:
        return 20 + 10 * max(0, count - 2)

    def _try(self, strategy: str, kept: tuple[tuple[str, ...], ...] = ()) -> Trial:
        self.tried += 1
        count = len(kept)
        assert kept == self.order[len(self.order) - count :]
        sent = 100 - count
        return Trial(strategy, kept, self.peak(count), "backward", sent, sent, self.order)


@pytest.mark.parametrize("num_groups", [1, 2, 3, 7, 8, 11])
def test_as_many_of_the_last_groups_are_kept_as_fit(num_groups: int) -> None:
    for usable in range(15, 20 + 10 * num_groups, 5):
        search = Arithmetic(num_groups, usable)
        *_, last = search._with_kept_groups("zero3")
        fitting = [count for count in range(num_groups) if search.peak(count) <= usable]
        assert len(last.kept) == max(fitting, default=0)
        assert search.tried <= 3 + num_groups.bit_length()


def test_what_cannot_fit_is_not_run() -> None:
    """Where parameters alone are too much."""
    search = Arithmetic(8, usable=79)
    trials = list(search._trials())
    assert [(trial.strategy, bool(trial.where)) for trial in trials] == [
        ("ddp", False), ("zero2", False), ("zero3", True), ("zero3", True),
    ]  # fmt: skip
    assert [(trial.strategy, bool(trial.where)) for trial in Arithmetic(8, usable=80)._trials()] == [
        ("ddp", True), ("zero2", True),
    ]  # fmt: skip


# --- in a job -------------------------------------------------------------------------------------


def told(memory: str) -> tuple[Choice, str, list[str], bool]:
    """What is chosen, what `explain` and the log say, and whether the model trains as one not sharded."""
    records: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(record.getMessage())

    log, handler = logging.getLogger("shardwise.strategies"), Handler()
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    model, plain = gpt(), gpt()
    try:
        shard_model(model, strategy="auto", memory=memory, sample=batch_of(0, SIZES))
    finally:
        log.removeHandler(handler)
        log.setLevel(logging.NOTSET)
    batch = batch_of(0, SIZES)
    model(*batch).backward()
    plain(*batch).backward()
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    trains = all(torch.allclose(full(p.grad), q.grad, atol=1e-6) for p, q in pairs)
    choice: Choice = model.__dict__[CHOICE]
    return choice, explain(model), records, trains


@pytest.mark.slow
def test_the_choice_fits_and_explain_and_the_log_say_why(world2: World) -> None:
    choice, text, records, trains = alike(world2.run(told, "26.8MB", timeout=200))
    assert trains
    assert_fits(world2, choice)
    assert_expected_inline(
        text,
        """\
group       class     strategy  mesh     parameters  MB unsharded  MB per rank  dtype
---------------------------------------------------------------------------------------
GPT         GPT       zero3     shard 2      31,104        0.1244       0.0622  float32
  blocks.0  Block     zero3     shard 2     444,864        1.7795       0.8897  float32
  blocks.1  Block     zero2     shard 2     444,864        1.7795       0.8897  float32
  blocks.2  Block     zero2     shard 2     444,864        1.7795       0.8897  float32
  blocks.3  Block     zero2     shard 2     444,864        1.7795       0.8897  float32
---------------------------------------------------------------------------------------
total       5 groups                      1,810,560        7.2422       3.6211

strategy "auto" chose zero3, blocks.1 ... blocks.3 kept until backward: it exposes the fewest bytes of what fits in 26.80 MB, of which a tenth stays free.
tried                                             peak, MB  in                    exposed, MB  sent, MB  fits
-------------------------------------------------------------------------------------------------------------
ddp                                                  33.38  backward of blocks.3         7.24      7.24  no
zero2                                                25.41  backward of blocks.2         7.24      7.24  no
zero3                                                23.73  backward of blocks.1         9.91      9.91  yes
zero3, blocks.1 ... blocks.3 kept until backward     23.73  backward of blocks.1         8.13      8.13  yes
Assumed: optimizer adamw, a batch of int64 (2, 32), int64 (2, 32) on each rank.""",
    )
    assert [line for line in records if "auto" in line] == ["shard_model: " + text.partition("\n\n")[2]]


def refused(**options: Any) -> Any:
    return partial(shard_model, **options)


class OfRank:
    """Another sample on each rank."""

    def __call__(self, model: nn.Module) -> Any:
        sample = torch.zeros(2 + dist.get_rank(), 8, dtype=torch.float64)
        return shard_model(model, strategy="auto", memory="1GB", sample=sample)


def for_own_precision(model: nn.Module) -> Any:
    """Whose choice differs: gradients of more bytes than parameters speak for sharding."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return shard_model(model, **AUTO, mp_policy=policy if dist.get_rank() else None)


def on_square(model: nn.Module) -> Any:
    mesh = init_device_mesh("cpu", (1, 2, 1))
    return shard_model(model, strategy="auto", memory="1GB", sample=random_batch(0, 2), mesh=mesh)


BATCH = random_batch(0, 2)
AUTO: dict[str, Any] = {"strategy": "auto", "memory": "1GB", "sample": BATCH}


def test_refusals(world2: World) -> None:
    acts = [
        refused(strategy="auto", sample=BATCH),
        refused(strategy="auto", memory="1GB"),
        refused(memory="1GB"),
        refused(strategy="zero2", memory="1GB", sample=BATCH, optimizer="sgd"),
        refused(**AUTO | {"sample": torch.zeros(2, 5, dtype=torch.float64)}),
        refused(**AUTO, overrides={"blocks.0": "zero2"}),
        OfRank(),
        for_own_precision,
        on_square,
    ]
    assert_expected_inline(
        "\n".join(refusal(world2, act) for act in acts),
        """\
ValueError: shard_model: strategy="auto" chooses what fits in memory, and memory is missing. Pass memory="80GB", the memory of a rank.
ValueError: shard_model: strategy="auto" chooses what fits in memory, and sample is missing. Pass sample=batch, the input of forward on a rank.
ValueError: shard_model: strategy is 'zero3', but only "auto" uses memory. Leave that out, or pass strategy="auto".
ValueError: shard_model: strategy is 'zero2', but only "auto" uses memory and sample and optimizer. Leave that out, or pass strategy="auto".
ValueError: shard_model: forward of the Tower failed on tensors like the sample, float64 (2, 5): RuntimeError: a and b must have same reduction dim, but got [2, 5] X [8, 8].
ValueError: shard_model: overrides does not work with strategy="auto", which chooses for all groups, with shards on dim 0. Leave it out, or name a strategy.
ValueError: shard_model: ranks disagree on what strategy="auto" assumes: rank 0 has 'optimizer adamw, a batch of float64 (2, 8) on each rank', rank 1 has 'optimizer adamw, a batch of float64 (3, 8) on each rank'. Pass the same on all ranks.
ValueError: shard_model: ranks disagree on the choice of strategy="auto": rank 0 has 'ddp', rank 1 has 'zero2'. Pass the same on all ranks.
ValueError: fully_shard: the mesh has 3 dimensions (dim 0=1, dim 1=2, dim 2=1). Pass one (shard) or two (replicate, shard) of them, as mesh['name'] or mesh['name', 'name'], or say with dp_mesh_dims which are data-parallel.""",
    )


def test_nothing_fits(world2: World) -> None:
    text = refusal(world2, refused(**AUTO | {"memory": "9kB"}))
    assert_expected_inline(
        text,
        """\
ValueError: shard_model: strategy "auto" finds nothing that fits in memory='9kB', of which a tenth stays free: ddp needs least, 23.92 kB at its peak (optimizer), 15.82 kB too much. memory=26578 would be enough. Else: more ranks to shard over, activation_checkpointing=True, a smaller batch, smaller groups (wrap=), or computing in bfloat16 (mp_policy="bf16"); shardwise.estimate(...) shows how much each saves.
tried  peak, kB  in                    exposed, kB  sent, kB  fits
------------------------------------------------------------------
ddp       23.92  optimizer                    5.39      5.39  no
zero2     34.50  backward of blocks.0         5.47      5.47  no
zero3     34.50  backward of blocks.0         6.66      6.66  no
Assumed: optimizer adamw, a batch of float64 (2, 8) on each rank.""",
    )
