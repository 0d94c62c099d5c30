"""What a model has in memory, by its own account, against the storages that exist."""

import gc
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from events import observe
from expecttest import assert_expected_inline
from harness import World
from models import SquareBlock, even_tower, random_batch, shard_tower
from on_ranks import on_ranks
from reference import mean_of_squares
from tensor_subclasses import TravelsLow, Wrapper
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import shardwise
from shardwise import MixedPrecisionPolicy, fully_shard
from shardwise.observe import GroupSnapshot, MemorySnapshot, memory_snapshot
from shardwise.params.parameter import DeferredGradient

WIDTH = 768  # so that nothing is small enough to keep its memory, on the host, while nobody uses it
MATRIX = WIDTH * WIDTH * 4
B = 2 * MATRIX  # a block's full parameters in float32
NO_MATRIX = 64 * 1024  # activations are below

Sizes = dict[str, int]
Note = tuple[str, MemorySnapshot, Sizes]


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(SquareBlock(WIDTH) for _ in range(4))
        self.ends = SquareBlock(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.ends(x)


def stack(*, replicates: bool = False, **options: Any) -> Any:
    torch.manual_seed(0)
    if replicates:
        options["mesh"] = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    model = Stack()
    return shard_tower(model, **options)


def batch() -> Tensor:
    return random_batch(0, 2, WIDTH, torch.float32)


# --- what exists ----------------------------------------------------------------------------------


def alive() -> list[Tensor]:
    found = [thing for thing in gc.get_objects() if isinstance(thing, Tensor)]
    return found + [t.grad for t in found if isinstance(t, nn.Parameter) and t.grad is not None]


def plain(tensor: Tensor) -> Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def union(tensors: Iterable[Tensor]) -> int:
    """The bytes that the storages of ``tensors`` have, counted by address: each once."""
    # Of a Wrapper, the tensors inside; on meta there is nothing, nor in a gradient that waits.
    without = (Wrapper, DeferredGradient)
    contents = [t for t in map(plain, tensors) if not isinstance(t, without) and not t.is_meta]
    storages = [tensor.untyped_storage() for tensor in contents]
    total = end = 0
    for start, size in sorted({(s.data_ptr(), s.nbytes()) for s in storages if s.nbytes() > NO_MATRIX}):
        total += max(0, start + size - max(start, end))
        end = max(end, start + size)
    return total


class Reality:
    """What has come to exist since this was made."""

    def __init__(self) -> None:
        gc.collect()
        self._others = alive()  # they stay meanwhile
        self._ids = set(map(id, self._others))

    def sizes(self) -> Sizes:
        """In bytes: all that there is, and some of it by what it looks like, where shards are no whole
        matrices."""
        new = [tensor for tensor in alive() if id(tensor) not in self._ids]
        params = [tensor for tensor in new if isinstance(tensor, nn.Parameter)]
        shards = [param for param in params if isinstance(param, DTensor)]
        fulls = [param for param in params if not isinstance(param, DTensor)]
        whole = [t for t in new if type(t) is Tensor and t.shape == (WIDTH, WIDTH) and t.is_floating_point()]
        return {
            "all": union(new),
            "shards": union(shards),
            "full parameters": union(fulls),
            "full gradients": union(whole),
            "reduced gradients": union(shard.grad for shard in shards if shard.grad is not None),
        }


Take = Callable[[str], None]


def taken(act: Callable[[Any, Take], None], build: Callable[..., Any], options: dict[str, Any]) -> list[Note]:
    """What the snapshot says, and what exists, at the moments of ``act``."""
    reality = Reality()
    model = build(**options)
    notes: list[Note] = []

    def take(moment: str) -> None:
        dist.barrier()  # gloo's threads keep what they have sent until they run again
        snapshot = memory_snapshot(model)
        notes.append((moment, snapshot, reality.sizes()))

    act(model, take)
    return notes


# --- what is done ---------------------------------------------------------------------------------


def step(model: Any) -> Tensor:
    return mean_of_squares(model, batch())


def a_step(model: Any, take: Take) -> None:
    take("before the first forward")
    step(model).backward()
    model.zero_grad()
    take("before forward")

    def look(_module: nn.Module, _args: Any, output: Tensor) -> None:
        take("in forward")
        if output.requires_grad:
            output.register_hook(lambda _: take("in backward"))

    handle = model.blocks[1].down.register_forward_hook(look)
    loss = step(model)
    handle.remove()
    take("between")
    loss.backward()
    take("after backward")


def a_step_with_kept_storage(model: Any, take: Take) -> None:
    model.blocks[1].set_keep_unsharded_storage(True)
    a_step(model, take)
    model.set_keep_unsharded_storage(False)
    take("given back")


def a_step_with_a_frozen_block(model: Any, take: Take) -> None:
    model.blocks[2].requires_grad_(False)
    a_step(model, take)


def accumulation(model: Any, take: Take) -> None:
    for moment in ("one microbatch", "two"):
        with shardwise.no_sync(model):
            step(model).backward()
        take(moment)
    step(model).backward()
    take("reduced")


def accumulation_over_replicas(model: Any, take: Take) -> None:
    model.set_requires_all_reduce(False)
    step(model).backward()
    take("summed over shards")
    model.set_requires_all_reduce(True)
    step(model).backward()
    take("summed over replicas")


def unshard_by_the_caller(model: Any, take: Take) -> None:
    handle = model.blocks[0].unshard(async_op=True)
    take("on its way")
    handle.wait()
    take("unsharded")
    model.blocks[0].reshard()
    take("resharded")


def inference_with_a_budget(model: Any, take: Take) -> None:
    with shardwise.inference(model, budget_bytes=2 * B):
        take("inside")
    take("outside")


def assigned(model: Any, take: Take) -> None:
    layer = model.blocks[0].up
    layer.weight = nn.Parameter(layer.weight.detach().clone())
    take("assigned")
    step(model)
    take("taken over")


def summoned(model: Any, take: Take) -> None:
    step(model).backward()
    with shardwise.unsharded(model, writeback=False, with_grads=True):
        take("inside")
    take("outside")


# --- sizes ----------------------------------------------------------------------------------------

Row = tuple[float, float, float, float, float]
"""Shards, full parameters, memory kept for them, full gradients and this rank's, in units of B."""

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
REDUCED_IN_F32 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def of_a_step(forward: Row, between: Row, backward: Row, after: Row) -> dict[str, Row]:
    """Before forward there are the shards alone."""
    shards = (after[0], 0, 0, 0, 0)
    rows = {"before the first forward": shards, "before forward": shards, "in forward": forward}
    return rows | {"between": between, "in backward": backward, "after backward": after}


CASES: dict[str, tuple[int, Callable[[Any, Take], None], dict[str, Any], dict[str, Row]]] = {
    "one rank": (1, a_step, {}, {
        # in forward: full parameters are the shards
        # in backward: half of the gradients of a block were summed and freed
        **of_a_step((5, 0, 0, 0, 0), (5, 0, 0, 0, 0), (5, 0, 0, 0.5, 3), (5, 0, 0, 0, 5)),
    }),
    "one rank, bf16": (1, a_step, {"mp_policy": BF16}, {
        # in backward: on a rank that is alone none are in flight
        **of_a_step((5, 1.5, 0, 0, 0), (5, 1, 0, 0, 0), (5, 1.5, 0, 0, 2.5), (5, 0, 0, 0, 5)),
    }),
    "two ranks": (2, a_step, {}, {
        # in forward: the root's, the block's, and the next block's
        # between: the root's and the last block's
        **of_a_step((2.5, 3, 0, 0, 0), (2.5, 2, 0, 0, 0), (2.5, 3, 0, 1, 1.5), (2.5, 0, 0, 0, 2.5)),
    }),
    "kept in part after forward": (4, a_step, {"reshard_after_forward": 2}, {
        **of_a_step((1.25, 3.5, 0, 0, 0), (1.25, 2.5, 0, 0, 0), (1.25, 3.5, 0, 1, 0.75), (1.25, 0, 0, 0, 1.25)),
    }),
    "bf16, reduced in float32": (2, a_step, {"mp_policy": REDUCED_IN_F32}, {
        **of_a_step((2.5, 1.5, 0, 0, 0), (2.5, 1, 0, 0, 0), (2.5, 1.5, 0, 1, 1.5), (2.5, 0, 0, 0, 2.5)),
    }),
    "kept storage": (2, a_step_with_kept_storage, {}, {
        **of_a_step((2.5, 3, 0, 0, 0), (2.5, 2, 1, 0, 0), (2.5, 3, 0, 1, 1.5), (2.5, 0, 1, 0, 2.5)),
        "before forward": (2.5, 0, 1, 0, 0),
        "given back": (2.5, 0, 0, 0, 2.5),
    }),
    "a frozen block": (2, a_step_with_a_frozen_block, {}, {
        **of_a_step((2.5, 3, 0, 0, 0), (2.5, 2, 0, 0, 0), (2.5, 3, 0, 1, 1), (2.5, 0, 0, 0, 2)),
    }),
    "accumulation": (2, accumulation, {}, {
        "one microbatch": (2.5, 0, 0, 5, 0),  # .grad has no values
        "two": (2.5, 0, 0, 5, 0),
        "reduced": (2.5, 0, 0, 0, 2.5),
    }),
    "accumulation over replicas": (2, accumulation_over_replicas, {"replicates": True}, {
        "summed over shards": (5, 0, 0, 0, 5),  # the sums; .grad has no values
        "summed over replicas": (5, 0, 0, 0, 5),
    }),
    "unshard": (2, unshard_by_the_caller, {}, {
        "on its way": (2.5, 1, 0, 0, 0),
        "unsharded": (2.5, 1, 0, 0, 0),
        "resharded": (2.5, 0, 0, 0, 0),
    }),
    "inference": (2, inference_with_a_budget, {}, {
        "inside": (2.5, 2, 0, 0, 0),
        "outside": (2.5, 0, 0, 0, 0),
    }),
    "summoned": (2, summoned, {}, {
        "inside": (2.5, 5, 0, 5, 2.5),
        "outside": (2.5, 0, 0, 0, 2.5),
    }),
    "assigned": (2, assigned, {}, {
        "assigned": (2.75, 0, 0, 0, 0),  # half a block is there twice
        "taken over": (2.5, 2, 0, 0, 0),
    }),
}  # fmt: skip


def row(snapshot: MemorySnapshot | GroupSnapshot) -> Row:
    return (
        snapshot.shard_bytes / B,
        snapshot.unsharded_bytes / B,
        snapshot.kept_storage_bytes / B,
        snapshot.full_gradient_bytes / B,
        snapshot.reduced_gradient_bytes / B,
    )


def assert_real(moment: str, snapshot: MemorySnapshot, sizes: Sizes, others: set[str]) -> None:
    """``others``: what ``sizes`` cannot tell by its looks."""
    states = {group.state for group in snapshot.groups}
    gradient_states = {group.gradient_state for group in snapshot.groups}
    told = {
        "shards": snapshot.shard_bytes,
        "full parameters": snapshot.unsharded_bytes + snapshot.kept_storage_bytes,
        "full gradients": snapshot.full_gradient_bytes,
        "reduced gradients": snapshot.reduced_gradient_bytes,
        "all": snapshot.total_bytes,
    }
    if "reducing" in gradient_states:
        others = {*others, "reduced gradients"}  # some are not in .grad yet
    if "unsharding" in states or "reducing" in gradient_states:
        assert told.pop("all") <= sizes["all"] <= snapshot.total_bytes + B, "what is sent and received"
    assert {name: size for name, size in told.items() if name not in others} == {
        name: sizes[name] for name in told if name not in others
    }, moment


def not_seen(world: World, options: dict[str, Any]) -> set[str]:
    if world.size == 1 or "replicates" in options:  # shards have the shapes of full parameters
        return {"shards", "full parameters", "full gradients", "reduced gradients"}
    if "reshard_after_forward" in options and options["reshard_after_forward"] is not False:
        return {"full parameters"}  # parts are not parameters
    return set()


@pytest.mark.sample(6)
@pytest.mark.parametrize(
    ("world", "name"), [(case[0], name) for name, case in CASES.items()], indirect=["world"]
)
def test_sizes_are_those_of_the_storages_that_exist(world: World, name: str) -> None:
    _, act, options, expected = CASES[name]
    for notes in world.run(taken, act, stack, options):
        assert {moment: row(snapshot) for moment, snapshot, _ in notes} == expected
        for moment, snapshot, sizes in notes:
            assert_real(moment, snapshot, sizes, not_seen(world, options))


def one_row() -> Any:
    return fully_shard(nn.Sequential(nn.Linear(500_000, 1, bias=False), nn.Tanh()))


def unshard_it(model: Any, take: Take) -> None:
    take("sharded")
    model.unshard()
    take("unsharded")


def test_a_rank_without_rows_keeps_padding(world2: World) -> None:
    found = world2.run(taken, unshard_it, one_row, {})
    for _, snapshot, sizes in [note for notes in found for note in notes]:
        assert snapshot.total_bytes == sizes["all"]
    (_, own, of_own), (_, full, _) = found[1]
    assert of_own["shards"] == 0
    assert own.shard_bytes == 4 * 500_000
    assert full.unsharded_bytes == 2 * own.shard_bytes


def travels_low() -> Any:
    layer = nn.Linear(WIDTH, WIDTH, bias=False)
    layer.weight = nn.Parameter(TravelsLow(layer.weight.detach()))
    return fully_shard(layer)


def unshard_twice(model: Any, take: Take) -> None:
    for moment in ("first", "again"):
        model.unshard()
        take(moment)
        model.reshard()
        take(f"{moment}, resharded")
    model.set_keep_unsharded_storage(True)
    model.unshard()
    model.reshard()
    take("kept")


def test_weights_that_all_gather_themselves_are_counted_in_the_form_that_travels(world2: World) -> None:
    shard = 0.25  # float32; what travels is bf16
    for notes in world2.run(taken, unshard_twice, travels_low, {}):
        assert {moment: row(snapshot) for moment, snapshot, _ in notes} == {
            "first": (shard, 0.25, 0, 0, 0),
            "first, resharded": (shard, 0, 0, 0, 0),
            "again": (shard, 0.25, 0, 0, 0),
            "again, resharded": (shard, 0, 0, 0, 0),
            "kept": (shard, 0, 0.25, 0, 0),
        }
        for moment, snapshot, sizes in notes:
            assert snapshot.total_bytes == sizes["all"], moment


@on_ranks(2)
def test_small_groups_on_the_host_keep_memory_for_parameters() -> None:
    """After a step, and after its gradients were cleared; then after another with a look at each event."""
    size = 256 * 256 * 4
    model = fully_shard(nn.Linear(256, 256, bias=False))
    snapshots = []
    for is_watched in (False, True, False):
        observe(model, (lambda *_: memory_snapshot(model)) if is_watched else lambda *_: None)
        model(torch.ones(2, 256)).sum().backward()
        snapshots.append(memory_snapshot(model))
        model.zero_grad()
        snapshots.append(memory_snapshot(model))
    kept = [(s.kept_storage_bytes, s.reduced_gradient_bytes) for s in snapshots]
    assert kept == [(size, size // 2), (size, 0)] * 3


# --- states and reasons ---------------------------------------------------------------------------


def tables() -> dict[str, str]:
    notes = taken(a_step, stack, {})
    return {moment: str(snapshot) for moment, snapshot, _ in notes}


def test_the_table_says_which_block_is_in_memory_and_why(world2: World) -> None:
    found, other = world2.run(tables)
    assert found == other
    assert_expected_inline(
        found["in forward"],
        """\
group     parameters  gradients  MB shards  unsharded  kept  full gradients  reduced  in memory because
----------------------------------------------------------------------------------------------------------------------------------------------------------
Stack     unsharded   empty            2.4        4.7     -               -        -  a forward or a backward uses it, or the caller has chosen to keep it
blocks.0  sharded     empty            2.4          -     -               -        -
blocks.1  unsharded   empty            2.4        4.7     -               -        -  a forward or a backward uses it, or the caller has chosen to keep it
blocks.2  unsharding  empty            2.4        4.7     -               -        -  it was prefetched
blocks.3  sharded     empty            2.4          -     -               -        -
----------------------------------------------------------------------------------------------------------------------------------------------------------
total                                 11.8       14.2     -               -        -""",
    )
    assert_expected_inline(
        found["in backward"],
        """\
group     parameters  gradients  MB shards  unsharded  kept  full gradients  reduced  in memory because
----------------------------------------------------------------------------------------------------------------------------------------------------------
Stack     unsharded   empty            2.4        4.7     -               -      2.4  a forward or a backward uses it, or the caller has chosen to keep it
blocks.0  unsharding  empty            2.4        4.7     -               -        -  it was prefetched
blocks.1  unsharded   empty            2.4        4.7     -               -        -  a forward or a backward uses it, or the caller has chosen to keep it
blocks.2  sharded     reducing         2.4          -     -             4.7      2.4
blocks.3  sharded     empty            2.4          -     -               -      2.4
----------------------------------------------------------------------------------------------------------------------------------------------------------
total                                 11.8       14.2     -             4.7      7.1""",
    )


def small_table() -> str:
    torch.manual_seed(0)
    model = even_tower()
    fully_shard(model.blocks[0])
    fully_shard([model.blocks[1], model.blocks[2]])
    fully_shard(model)
    with shardwise.no_sync(model):
        model(random_batch(0, 4, dtype=torch.float32)).sum().backward()
    model.blocks[0].unshard()
    return str(memory_snapshot(model))


def test_small_sizes_have_more_decimals(world2: World) -> None:
    found, _ = world2.run(small_table)  # gradients of one row are the first rank's alone
    assert_expected_inline(
        found,
        """\
group               parameters  gradients  MB shards  unsharded    kept  full gradients  reduced  in memory because
---------------------------------------------------------------------------------------------------------------------------------
Tower               sharded     deferred      0.0002          -  0.0004          0.0003        -
blocks.0            unsharded   deferred      0.0006     0.0012       -          0.0012        -  the caller has called unshard()
blocks.1, blocks.2  sharded     deferred      0.0012          -  0.0024          0.0024        -
---------------------------------------------------------------------------------------------------------------------------------
total                                         0.0020     0.0012  0.0027          0.0039        -""",
    )


def reasons(strategy: str) -> dict[str, tuple[str, str | None]]:
    torch.manual_seed(0)
    model = shardwise.shard_model(even_tower(), strategy=strategy)
    x = random_batch(0, 4, dtype=torch.float32)
    found = {}

    def note(moment: str) -> None:
        (block,) = memory_snapshot(model.blocks[2]).groups
        assert block.modules == (block.name,) == ("blocks.2",)
        found[moment] = block.state, block.reason

    loss = model(x).sum()
    note("between")
    with torch.no_grad():
        handle = model.inlet.register_forward_hook(lambda *_: note("in the next forward"))
        model(x)
        handle.remove()
    loss.backward()
    note("after backward")
    with shardwise.inference(model):
        note("in inference()")
    with shardwise.unsharded(model):
        note("in unsharded()")
    model.blocks[2].unshard()
    note("after unshard()")
    model.blocks[2].reshard()
    note("after reshard()")
    return found


def test_each_state_has_its_reason(world2: World) -> None:
    in_use = "a forward or a backward uses it, or the caller has chosen to keep it"
    common = {
        "in inference()": ("unsharded", "inference() keeps it"),
        "in unsharded()": ("summoned", "the caller is in unsharded()"),
        "after unshard()": ("unsharded", "the caller has called unshard()"),
        "after reshard()": ("sharded", None),
    }
    for found in world2.run(reasons, "zero3"):
        assert found == {
            "between": ("unsharded", "the next backward probably begins with it"),
            "in the next forward": ("unsharded", "the same, and another forward has begun since"),
            "after backward": ("sharded", None),
            **common,
        }
    for found in world2.run(reasons, "zero1"):
        assert found == {
            "between": ("unsharded", in_use),
            "in the next forward": ("unsharded", in_use),
            "after backward": ("unsharded", in_use),
            **common,
        }


@on_ranks(2)
def test_a_snapshot_is_of_the_groups_inside() -> None:
    model = even_tower()
    fully_shard([model.blocks[1], model.blocks[2]])
    fully_shard(model)
    assert [(group.name, group.modules) for group in memory_snapshot(model.blocks).groups] == [
        ("blocks.1, blocks.2", ("blocks.1", "blocks.2"))
    ]


@on_ranks(2)
def test_what_has_no_values_takes_no_memory() -> None:
    with torch.device("meta"):
        model = nn.Linear(4, 4)
    snapshot = memory_snapshot(fully_shard(model))
    assert snapshot.total_bytes == 0
    assert snapshot.groups[0].state == "sharded"
