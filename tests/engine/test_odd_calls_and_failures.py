"""Calls in odd places, and what an exception leaves behind (docs/explain/failures.md).

Exceptions are raised on all ranks at the same point and caught there, as a training loop does that skips a
bad batch.
"""

import copy
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from expecttest import assert_expected_inline
from failure_models import Chain, CheckpointedTower, Constrained, Failure, Fragile, block, fragile_tower
from meshed import refusal
from models import built, even_tower, random_batch, shard_tower
from on_ranks import on_ranks
from reference import adamw, mean_of_squares
from scenario import BATCH_SIZE, Side, same_as_plain
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from shardwise import fully_shard
from shardwise.engine.module_state import module_state_of

# --- calls in any order, and several roots --------------------------------------------------------


@same_as_plain(2)
def test_a_block_may_be_called_alone_at_any_time(side: Side) -> None:
    model = side.shard_tower(built(even_tower), reshard_after_forward=False)
    optimizer = adamw(model)
    first, second, _ = model.blocks
    with torch.no_grad():
        side.note_rows("before", first(side.inputs(0)))
    first(side.inputs(1)).pow(2).mean().backward()
    side.note_gradients(model)
    side.assert_settled(model)
    side.step(model, optimizer, 2)
    loss = mean_of_squares(model, side.inputs(3))
    loss = loss + second(side.inputs(4)).pow(2).mean()
    loss.backward()
    side.note_gradients(model)
    side.assert_settled(model)
    optimizer.step()
    optimizer.zero_grad()
    loss = second(side.inputs(5)).pow(2).mean()
    loss = loss + mean_of_squares(model, side.inputs(6))
    loss.backward()
    side.note_gradients(model)
    optimizer.step()
    with torch.no_grad():
        side.note_rows("after", second(side.inputs(7)))
    side.steps(model, optimizer, [8])


class OnAThread(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(8, 8), nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        with ThreadPoolExecutor(1) as pool:
            found = pool.submit(self.one, x).result()
        return self.scale * self.other(x) * found


@same_as_plain(2)
def test_a_forward_may_wait_for_a_block_on_another_thread(side: Side) -> None:
    model = built(OnAThread)
    side.shard(model.one, model.other, model)
    side.steps(model, adamw(model), range(3))
    side.assert_settled(model)


@on_ranks(2)
def test_models_on_one_process_group_have_messages_of_their_own() -> None:
    """So ranks that run them in different orders wait for each other, rather than mixing their shards."""
    if dist.get_rank() == 1:
        shard_tower(built(even_tower))  # never run: what one rank does alone does not count
    models = [shard_tower(built(even_tower)) for _ in range(2)]
    buckets = [group.buckets[0] for model in models for group in module_state_of(model).root.groups]
    for model in models:
        model(random_batch(0, 2)).sum().backward()
    channels = [bucket.communication.all_gather.channel for bucket in buckets]
    assert len(set(channels)) == len(buckets)
    assert channels == [bucket.communication.reduce_scatter.channel for bucket in buckets]
    everywhere: list[Any] = [None, None]
    dist.all_gather_object(everywhere, channels)
    assert everywhere == [channels] * 2


@same_as_plain(2)
def test_several_roots_may_share_a_loss(side: Side) -> None:
    """Encoder and decoder sharded apart, trained by one loss; a frozen third looks on."""
    encoder, decoder, judge = built(Chain, block, block), built(even_tower), built(Chain, block)
    encoder.outlet = built(nn.Linear, 8, 8)
    judge.requires_grad_(False)
    for model in (encoder, decoder, judge):
        side.shard_tower(model)
    optimizer = torch.optim.AdamW([*encoder.parameters(), *decoder.parameters()], lr=1e-2)
    for step in range(2):
        optimizer.zero_grad()
        code = torch.tanh(encoder(side.inputs(step)))
        output = decoder(code)
        loss = output.pow(2).mean() + (judge(code) - output).pow(2).mean()
        loss.backward()
        side.note_mean("loss", loss)
        for model in (encoder, decoder, judge):
            side.note_gradients(model)
        optimizer.step()
        side.assert_settled(encoder)
        side.assert_settled(decoder)
    side.note_parameters(encoder)


class Holder(nn.Module):
    def __init__(self, other: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([block()])
        self.outlet = nn.Linear(8, 1)
        self.others = [other]  # hidden from modules()

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        x = x * torch.tanh(self.others[0](x))
        return self.outlet(x)


@same_as_plain(2)
def test_a_root_may_call_another_root(side: Side) -> None:
    inner = side.shard_tower(built(even_tower))
    model = built(Holder, inner)
    side.shard_tower(model)
    optimizer = torch.optim.AdamW([*model.parameters(), *inner.parameters()], lr=1e-2)
    for step in range(2):
        side.step(model, optimizer, step)
        side.note_gradients(inner)
        side.assert_settled(inner)


@same_as_plain(2)
def test_the_root_may_be_sharded_between_forward_and_backward_of_a_block(side: Side) -> None:
    """The blocks are roots first, and have been trained."""
    model = built(even_tower)
    side.shard(*model.blocks)
    optimizer = adamw(model.blocks)
    side.step(nn.Sequential(*model.blocks), optimizer, 0)
    optimizer.zero_grad()
    loss = model.blocks[0](side.inputs(1)).pow(2).mean()
    side.shard(model)
    loss.backward()
    side.note_gradients(model)
    side.assert_settled(model)
    side.steps(model, adamw(model), range(2))


class Grouped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inlet, self.outlet = nn.Linear(8, 8), nn.Linear(8, 8)
        self.blocks = nn.ModuleList([block(), block()])
        self.skips: str | None = None

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.skips == "inlet" else self.inlet(x)
        for each in self.blocks:
            x = each(x)
        return (x if self.skips == "outlet" else self.outlet(x)).sum(1, keepdim=True)


@same_as_plain(2)
def test_modules_of_one_group_need_not_all_run(side: Side) -> None:
    model = built(Grouped)
    side.shard([model.inlet, model.outlet], *model.blocks, model)
    optimizer = adamw(model)
    for step, skips in enumerate([None, "inlet", None, "outlet", "inlet"]):
        model.skips = skips
        side.step(model, optimizer, step)
        with torch.no_grad():
            side.note_rows("evaluation", model(side.inputs(9)))
        side.assert_settled(model)
    side.note_parameters(model)


# --- order of sharding ----------------------------------------------------------------------------


@on_ranks(2)
def test_a_child_sharded_after_its_parent_is_refused_with_both_names() -> None:
    model = nn.ModuleDict({"tower": even_tower()})["tower"]
    fully_shard(model)
    with pytest.raises(ValueError, match="bottom-up") as caught:
        fully_shard(model.blocks[0])
    first = str(caught.value)
    assert_expected_inline(
        first,
        """fully_shard: Block 'blocks.0' is inside Tower, which was sharded before and has taken its parameters. Apply fully_shard bottom-up: on the inner modules first, then on Tower.""",
    )


# --- failures -------------------------------------------------------------------------------------


def attempt(model: nn.Module, inputs: Tensor, errors: list[BaseException]) -> None:
    try:
        mean_of_squares(model, inputs).backward()
    except (Failure, KeyboardInterrupt) as error:
        errors.append(error)


@same_as_plain(2)
@pytest.mark.parametrize(
    ("fails", "where", "keeps_error", "reshard"),
    [
        ("early", 0, False, None),
        ("early", 2, False, False),
        ("late", 1, True, None),
        ("late", 2, False, False),
        ("backward", 0, False, False),
        ("backward", 1, True, None),
        ("interrupted", 1, False, None),
        ("interrupted", 1, True, None),
    ],
)
def test_the_iteration_after_a_failed_one_is_as_if_nothing_had_been(
    side: Side, fails: str, where: int, keeps_error: bool, reshard: bool | None
) -> None:
    """Also while the caller still holds the error; nothing is left unsharded."""
    model = side.shard_tower(built(fragile_tower), reshard_after_forward=reshard)
    optimizer = adamw(model)
    errors: list[BaseException] = []
    for step in range(3):
        if step in (0, 2):  # the very first, and one in the middle
            model.blocks[where].fails = fails
            attempt(model, side.inputs(90 + step), errors)
            model.blocks[where].fails = None
            assert len(errors) == 1
            if not keeps_error:
                errors.clear()
            if step == 2 and not keeps_error:
                model.zero_grad()
                with torch.no_grad():
                    side.note_rows("evaluation", model(side.inputs(80)))
                side.assert_settled(model)
        side.step(model, optimizer, step)
        errors.clear()
    side.note_parameters(model)


class FallsBack(Chain):
    def __init__(self) -> None:
        super().__init__(Fragile, Fragile, Fragile)

    def between(self, block: nn.Module, x: Tensor) -> Tensor:
        try:
            return block(x)
        except Failure:
            return self.inlet(x)


@same_as_plain(2)
@pytest.mark.parametrize("fails", ["early", "late"])
def test_a_parent_may_catch_what_a_block_raises(side: Side, fails: str) -> None:
    model = side.shard_tower(built(FallsBack))
    optimizer = adamw(model)
    for step in range(4):
        model.blocks[1].fails = fails if step % 2 else None
        side.step(model, optimizer, step)
    side.note_parameters(model)


class FragileCheckpoints(CheckpointedTower):
    def __init__(self, where: str, reentrant: bool) -> None:
        super().__init__(where, reentrant)
        self.blocks = nn.ModuleList([Fragile(), Fragile(), Fragile()])


class Recursive(nn.Module):
    """Calls itself, catches what the inner call raises, and goes on with its own weights."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor, depth: int = 2) -> Tensor:
        if depth == 0:
            raise Failure
        x = x @ self.weight
        try:
            x = self(x, depth - 1)
        except Failure:
            x = torch.tanh(x)
        return x @ self.weight


@same_as_plain(2)
@pytest.mark.parametrize("reshard", [None, False])
def test_a_module_may_catch_what_a_call_of_itself_raises(side: Side, reshard: bool | None) -> None:
    model = side.shard_tower(built(Chain, Recursive, block), reshard_after_forward=reshard)
    side.steps(model, adamw(model), [0, 1])


@same_as_plain(2)
@pytest.mark.parametrize(
    ("where", "reentrant", "fails"),
    [
        ("around", True, "early"),
        ("around", True, "backward"),
        ("around", False, "early"),
        ("pairs", True, "late"),
    ],
)
def test_a_failed_recomputation_leaves_nothing_behind(
    side: Side, where: str, reentrant: bool, fails: str
) -> None:
    model = side.shard_tower(built(FragileCheckpoints, where, reentrant))
    optimizer = adamw(model)
    side.step(model, optimizer, 0)
    loss = model(side.inputs(7)).mean()
    model.blocks[1].fails = fails  # from now on: in the recomputation
    with pytest.raises(Failure):
        loss.backward()
    model.blocks[1].fails = None
    side.steps(model, optimizer, [1, 2])


def refuse(gradient: Tensor) -> None:
    raise RuntimeError("not this one")


@same_as_plain(2)
@pytest.mark.parametrize(
    ("synchronises", "clear"),
    [(False, "at once"), (True, "late"), (False, "to zeros"), (False, "reset"), (True, "reset")],
)
def test_a_failed_backward_after_unsynchronised_ones_asks_for_zero_grad(
    side: Side, synchronises: bool, clear: str
) -> None:
    """The second microbatch fails in backward, when some blocks have added its gradients to the first's."""
    model: Any = side.shard_tower(built(fragile_tower))
    optimizer = adamw(model)
    for step in range(2):
        side.sync(model, False)
        mean_of_squares(model, side.inputs(step)).backward()
        side.sync(model, synchronises)
        model.blocks[1].fails = "backward"
        attempt(model, side.inputs(5), [])
        model.blocks[1].fails = None
        if side.is_sharded and clear != "at once":
            told = refusal(model, side.inputs(6))
            assert "wait to be reduced" in refusal(optimizer.step)
            assert refusal(model, side.inputs(6)) == told
            if not synchronises:
                assert_expected_inline(
                    told,
                    """RuntimeError: inlet.weight, inlet.bias, outlet.weight, outlet.bias and 18 more: a backward failed while gradients of earlier ones without synchronisation waited to be reduced. Some parameters have lost these, others still have them, so that their sums would be of different microbatches. Call zero_grad(), and begin this step again.""",
                )
        if side.is_sharded and clear == "reset":
            model.reset_iter_state()
            model(side.inputs(6))
        optimizer.zero_grad(set_to_none=clear != "to zeros")
        side.sync(model, True)
        side.step(model, optimizer, step)
    side.note_parameters(model)


@same_as_plain(2)
def test_a_backward_that_fails_before_all_gradients_changes_nothing(side: Side) -> None:
    """Nothing was added to what waits: it may be added to."""
    model = side.shard_tower(built(fragile_tower))
    side.sync(model, False)
    mean_of_squares(model, side.inputs(0)).backward()
    output = model(side.inputs(1))
    output.register_hook(refuse)
    with pytest.raises(RuntimeError, match="not this one"):
        output.mean().backward()
    side.sync(model, True)
    mean_of_squares(model, side.inputs(2)).backward()
    side.note_gradients(model)


@same_as_plain(2)
def test_an_error_that_is_still_held_does_not_keep_its_backward_alive(side: Side) -> None:
    """An error that passes through our own frames in backward, held by the caller as a notebook holds the
    last one."""
    model = side.shard_tower(built(even_tower))
    optimizer = adamw(model)
    side.step(model, optimizer, 0)
    loss = mean_of_squares(model, side.inputs(1))
    hook = model.blocks[1].up.weight.register_hook(refuse)
    with pytest.raises(RuntimeError) as held:
        loss.backward()
    hook.remove()
    side.steps(model, optimizer, [2, 3])
    assert held.value.__traceback__ is not None


@same_as_plain(2)
def test_training_goes_on_after_a_refused_change_of_a_weight(side: Side) -> None:
    """A forward that changes its weight in place is refused; the next, which does not, trains."""
    model = side.shard_tower(built(Chain, lambda: Constrained("no"), block))
    optimizer = adamw(model)
    for step in range(3):
        if side.is_sharded and step in (0, 2):
            model.blocks[0].how = "no_grad"
            with pytest.raises(RuntimeError, match=r"blocks\.0\.linear\.weight: changed in place"):
                mean_of_squares(model, side.inputs(7))
            model.blocks[0].how = "no"
        side.step(model, optimizer, step)
    side.note_parameters(model)


@same_as_plain(2)
@pytest.mark.parametrize("which", ["pre", "root_post", "post_accumulate"])
def test_a_hook_of_the_caller_may_fail(side: Side, which: str) -> None:
    model = side.shard_tower(built(even_tower))
    optimizer = adamw(model)
    is_failing = False

    def hook(*_: Any) -> None:
        if is_failing:
            raise Failure("in a hook")

    middle = model.blocks[1]
    register = {
        "pre": middle.register_forward_pre_hook,
        "root_post": model.register_forward_hook,
        "post_accumulate": dict(middle.named_parameters())["up.weight"].register_post_accumulate_grad_hook,
    }
    register[which](hook)
    side.step(model, optimizer, 0)
    is_failing = True
    with pytest.raises(Failure):
        mean_of_squares(model, side.inputs(7)).backward()
    is_failing = False
    side.steps(model, optimizer, [1, 2])


@same_as_plain(2)
def test_hooks_of_the_caller_run_as_without_sharding(side: Side) -> None:
    """Backward hooks of torch on blocks and root; hooks that replace inputs and outputs."""
    model = side.shard_tower(built(even_tower))
    calls: list[str] = []
    for index, each in enumerate(model.blocks):
        each.register_full_backward_hook(lambda m, gi, go, i=index: calls.append(f"backward {i}"))
        each.register_full_backward_pre_hook(lambda m, go, i=index: calls.append(f"before {i}"))
        each.register_forward_pre_hook(lambda m, args: tuple(a * 1.1 for a in args))
        each.register_forward_hook(lambda m, args, output: output * 0.9)
    optimizer = adamw(model)
    for step in range(2):
        side.step(model, optimizer, step)
        side.note("calls", list(calls))
        calls.clear()


@same_as_plain(2)
def test_a_batch_may_be_tried_again_inside_the_except_clause(side: Side) -> None:
    """As people do after running out of memory: the next, smaller batch inside the except clause."""
    model = side.shard_tower(built(fragile_tower))
    optimizer = adamw(model)
    for step in range(3):
        optimizer.zero_grad()
        model.blocks[2].fails = "backward" if step else "late"
        try:
            mean_of_squares(model, side.inputs(step)).backward()
        except Failure:
            optimizer.zero_grad()
            model.blocks[2].fails = None
            mean_of_squares(model, side.part(random_batch(step, 12))).backward()
        side.note_gradients(model)
        optimizer.step()
        side.assert_settled(model)


@same_as_plain(4)
@pytest.mark.parametrize(("shape", "reshard"), [((2, 2), None), ((4,), False)], ids=str)
def test_ranks_of_which_one_has_failed_go_on_together(
    side: Side, shape: tuple[int, ...], reshard: bool | None
) -> None:
    """One rank's backward fails when all gradients have left; that of the others ends.

    They wait for it: between the sums over shards and those over replicas, it still has a part to play.
    """
    mesh = {"mesh": init_device_mesh("cpu", shape)} if side.is_sharded else {}
    model = side.shard_tower(built(even_tower), reshard_after_forward=reshard, **mesh)
    optimizer = adamw(model)
    for step in range(3):
        if side.is_sharded and step in (0, 2):
            inputs = side.inputs(90 + step).requires_grad_() * 1
            expected: Any = nullcontext()
            if side.rank == 1:
                inputs.register_hook(refuse)
                expected = pytest.raises(RuntimeError, match="not this one")
            with expected:
                mean_of_squares(model, inputs).backward()
        side.step(model, optimizer, step)
    side.note_parameters(model)


# --- hooks that are registered after fully_shard --------------------------------------------------


def uses_weights(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    """Replaces the output of a block by one that depends on its weights once more."""
    assert not isinstance(module.up.weight, DTensor)
    return output * module.up.weight.mean() + module.down.bias


@same_as_plain(2)
@pytest.mark.parametrize(("copies", "reshard"), [(False, None), (True, True)])
def test_forward_hooks_registered_later_see_full_parameters(
    side: Side, copies: bool, reshard: bool | None
) -> None:
    model = built(even_tower)
    model.blocks[0].register_forward_hook(uses_weights)
    side.shard_tower(model, reshard_after_forward=reshard)
    if copies and side.is_sharded:
        model = copy.deepcopy(model)
    removed = model.blocks[0].register_forward_hook(lambda *_: pytest.fail("it was removed"))
    model.blocks[0].register_forward_hook(uses_weights)
    model.blocks[1].register_forward_pre_hook(lambda module, args: uses_weights(module, args, *args))
    removed.remove()
    optimizer = adamw(model)
    side.steps(model, optimizer, range(2))
    model.blocks[2].register_forward_hook(uses_weights)
    with torch.no_grad():
        side.note_rows("evaluated", model(side.inputs(5)))
    side.steps(model, optimizer, range(2, 4))


def loss_with_penalty(model: nn.Module, inputs: Tensor) -> Tensor:
    penalty = sum(p.pow(2).sum() for p in model.parameters())
    if isinstance(penalty, DTensor):
        penalty = penalty.full_tensor()
    return mean_of_squares(model, inputs) + 0.1 * penalty


@same_as_plain(2)
def test_a_hook_after_accumulation_sees_the_complete_gradient_last(side: Side) -> None:
    """Plainly autograd adds up both gradients first, and the hook runs once."""
    model = side.shard_tower(built(even_tower))
    weight = model.blocks[1].up.weight
    seen: list[Any] = []
    weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.detach().clone()))
    side.steps(model, adamw(model), range(2), loss_with_penalty)
    assert len(seen) == (4 if side.is_sharded else 2)
    for complete in seen[1::2] if side.is_sharded else seen:
        side.note("complete", complete)


# --- the loss in chunks ---------------------------------------------------------------------------


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(torch.tanh(self.block(x)))  # the caller runs the head


@same_as_plain()
@pytest.mark.parametrize(
    ("world", "chunks", "reshard", "keeps_graph"),
    [(2, 2, True, False), (2, 2, None, True), (3, 2, False, False), (1, 1, None, False)],
    indirect=["world"],
)
def test_a_head_run_in_chunks_trains_as_a_whole_one(
    side: Side, chunks: int, reshard: bool | None, keeps_graph: bool
) -> None:
    """All of its logits, the largest tensor of a language model, are never there at once."""
    model = built(Model, seed=0)
    side.shard(model.block, [model.norm, model.head], model, reshard_after_forward=reshard)
    optimizer = adamw(model)
    for step in range(2):
        optimizer.zero_grad()
        hidden = model(side.part(random_batch(step, BATCH_SIZE, 8)))
        total: Any = 0.0
        if keeps_graph:  # one backward through all chunks
            loss = sum(model.head(rows).pow(2).sum() for rows in hidden.chunk(chunks)) / len(hidden)
            loss.backward()
            total = loss.detach()
        else:  # one a chunk, and the rest of the model at the end
            leaf = hidden.detach().requires_grad_()
            for rows in leaf.chunk(chunks):
                loss = model.head(rows).pow(2).sum() / len(hidden)
                loss.backward()
                total = total + loss.detach()
            hidden.backward(leaf.grad)
        side.note_mean(f"loss {step}", total)
        side.note_gradients(model)
        optimizer.step()
        side.assert_settled(model)
    side.note_parameters(model)
