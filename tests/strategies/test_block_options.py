"""Activation checkpointing and torch.compile as switches of `shard_model`."""

import copy
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from dynamo import forget_graphs
from expecttest import assert_expected_inline
from harness import WorkerError, World
from models import Block, SquareBlock, Tower, built, random_batch
from on_ranks import on_ranks
from reference import adamw, mean_of_squares
from refusals import A_REMEDY, assert_refused, refused
from scenario import BATCH_SIZE, Side, same_as_plain
from torch import Tensor, nn

from shardwise import explain, shard_model


class DropoutBlock(nn.Module):
    """Takes its input by name, in a dict, and draws random numbers."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.runs = 0

    def forward(self, *, inputs: dict[str, Tensor]) -> Tensor:
        self.runs += 1
        x = inputs["x"]
        return x + nn.functional.dropout(torch.tanh(self.linear(x)), 0.5)


class DropoutTower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(DropoutBlock() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(inputs={"x": x})
        return x


WAYS: dict[str, dict[str, Any]] = {
    "blocks": {"activation_checkpointing": True},
    "a class": {"activation_checkpointing": nn.Linear},
    "on the host already": {"activation_checkpointing": True, "activation_offloading": True},
    "a predicate": {"activation_checkpointing": lambda module: isinstance(module, nn.LayerNorm)},
    "compiled": {"compile": {"backend": "aot_eager"}},
    "both": {"activation_checkpointing": "blocks", "compile": {"backend": "aot_eager"}},
}


@same_as_plain(2)
@pytest.mark.parametrize(("strategy", "way"), [("zero2", "both"), *(("zero3", way) for way in WAYS)])
def test_training_stays_the_same(side: Side, strategy: str, way: str) -> None:
    forget_graphs()
    model = built(Tower)
    if side.is_sharded:
        shard_model(model, strategy=strategy, wrap=Block, **WAYS[way])
    side.steps(model, adamw(model), range(3))


def saved_bytes(model: nn.Module) -> int:
    """What autograd keeps of forward."""
    num_bytes = 0

    def pack(tensor: Tensor) -> Tensor:
        nonlocal num_bytes
        num_bytes += 0 if isinstance(tensor, nn.Parameter) else tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = mean_of_squares(model, random_batch(0, BATCH_SIZE))
    loss.backward()
    return num_bytes


@on_ranks(2)
def test_blocks_keep_their_inputs_alone_which_stay_on_the_host_if_they_are_there() -> None:
    plain, checkpointed, offloaded = (
        saved_bytes(
            shard_model(built(Tower), wrap=Block, activation_checkpointing=on, activation_offloading=offloads)
        )
        for on, offloads in ((False, False), (True, False), (True, True))
    )
    assert checkpointed < plain / 3
    # Inlet and outlet, the loss, and an input each.
    assert checkpointed <= 8 * random_batch(0, BATCH_SIZE).nbytes
    assert offloaded == checkpointed


@on_ranks(2)
def test_random_numbers_are_drawn_again_and_arguments_are_passed_as_they_were() -> None:
    gradients = []
    for on in (False, True):
        model = shard_model(built(DropoutTower), wrap=DropoutBlock, activation_checkpointing=on)
        torch.manual_seed(7)
        mean_of_squares(model, random_batch(0, 4)).backward()
        gradients.append([param.grad.to_local() for param in model.parameters()])
        assert [block.runs for block in model.blocks] == [1 + on] * 3
    for plain, again in zip(*gradients, strict=True):
        assert torch.equal(plain, again)


@on_ranks(2)
def test_a_module_looks_as_before_and_a_copy_is_one_of_its_own() -> None:
    model = shard_model(built(Tower), wrap=Block, activation_checkpointing=True)
    block = model.blocks[0]
    assert isinstance(block, Block)
    assert list(inspect.signature(block.forward).parameters) == ["x"]
    assert [name for name, _ in model.named_modules()] == [name for name, _ in Tower().named_modules()]
    assert model.state_dict().keys() == Tower().state_dict().keys()
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    assert not model(random_batch(0, 4)).any()
    twin(random_batch(0, 4)).sum().backward()
    assert all(param.grad is None for param in model.parameters())
    assert all(param.grad is not None for param in twin.parameters())


@on_ranks(1)
def test_of_modules_inside_each_other_the_outermost_is_run_again() -> None:
    model = built(Tower)
    counts = {name: 0 for name, _ in model.named_modules()}

    def counting(name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            counts[name] += 1
            return forward(*args)

        return run

    for name, module in model.named_modules():
        module.forward = counting(name, module.forward)
    shard_model(model, wrap={Block, nn.Linear}, activation_checkpointing=True)
    mean_of_squares(model, random_batch(0, 4)).backward()
    assert counts["blocks.0"] == counts["blocks.0.up"] == 2


@on_ranks(2)
def test_each_group_is_compiled_and_the_model_where_there_is_no_other() -> None:
    forget_graphs()
    seen = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        seen.append(graph)
        return graph.forward

    model = shard_model(built(Tower), wrap=Block, compile={"backend": backend})
    assert not seen  # at the first call
    model(random_batch(0, 4))
    assert seen
    seen.clear()
    with pytest.warns(UserWarning, match="the root's own group"):
        alone = shard_model(built(SquareBlock, 8), compile={"backend": backend})
    alone(random_batch(0, 4))
    assert seen


def explained(**options: Any) -> str:
    return explain(shard_model(built(Tower), wrap=Block, **options))


def test_explain_shows_what_was_done(world2: World) -> None:
    plain, both = (
        world2.run(explained, **options)[0].splitlines()
        for options in ({}, {"activation_checkpointing": nn.Linear, "compile": True})
    )
    assert both[: len(plain)] == plain
    assert_expected_inline(
        "\n".join(both[len(plain) :]),
        """\
activation checkpointing: inlet ... outlet
compiled: blocks.0 ... blocks.2""",
    )
    offloaded = world2.run(explained, activation_checkpointing=True, activation_offloading=True)[0]
    assert_expected_inline(
        "\n".join(offloaded.splitlines()[len(plain) :]),
        """\
activation checkpointing: blocks.0 ... blocks.2
activation offloading: blocks.0 ... blocks.2""",
    )


def chosen_automatically(activation_checkpointing: Any) -> str:
    model = built(Tower, width=8, hidden=64)
    batch = random_batch(0, 256, dtype=torch.float32)
    checks = {"wrap": Block, "activation_checkpointing": activation_checkpointing}
    text = explain(shard_model(model, strategy="auto", memory="645kB", sample=batch, **checks))
    return text.split('strategy "auto" chose ')[1].partition(":")[0]


def test_auto_counts_what_checkpointing_frees(world2: World) -> None:
    assert world2.run(chosen_automatically, Block) == ["ddp"] * 2
    with pytest.raises(WorkerError, match="finds nothing that fits"):
        world2.run(chosen_automatically, False)


REFUSED = {
    "a number": refused(
        lambda model: shard_model(model, wrap=Block, activation_checkpointing=1),
        "TypeError",
        "is 1",
        A_REMEDY,
    ),
    "modules": refused(
        lambda model: shard_model(model, wrap=Block, activation_checkpointing=[model.blocks[0]]), A_REMEDY
    ),
    "nothing": refused(lambda model: shard_model(model, activation_checkpointing=set()), A_REMEDY),
    "a class that is not there": refused(
        lambda model: shard_model(model, wrap=Block, activation_checkpointing=nn.Conv2d),
        "ValueError",
        "chooses no module inside the Tower",
        A_REMEDY,
    ),
    "what has no forward": refused(
        lambda model: shard_model(model, activation_checkpointing=nn.ModuleList),
        "'blocks'",
        "no forward",
        A_REMEDY,
    ),
    "offloading of what is not kept": refused(
        lambda model: shard_model(model, activation_offloading=True),
        "ValueError",
        "activation_checkpointing is not set",
        A_REMEDY,
    ),
    "offloading in graphs": refused(
        lambda model: shard_model(
            model, activation_checkpointing=True, activation_offloading=True, compile=True
        ),
        "ValueError",
        "does not work with compile",
        A_REMEDY,
    ),
    "a device to offload to": refused(
        lambda model: shard_model(model, activation_checkpointing=True, activation_offloading="cpu"),
        "TypeError",
        "is 'cpu'",
        A_REMEDY,
    ),
    "an unknown backend": refused(
        lambda model: shard_model(model, wrap=Block, compile={"backend": "inductr"}), "ValueError", "inductr"
    ),
    "an unknown option": refused(
        lambda model: shard_model(model, wrap=Block, compile={"bogus": 1}), "ValueError", "bogus"
    ),
    "a backend alone": refused(
        lambda model: shard_model(model, wrap=Block, compile="inductor"),
        "TypeError",
        "is 'inductor'",
        A_REMEDY,
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_other_values_are_refused_before_anything_is_sharded(world1: World, case: str) -> None:
    assert_refused(world1, __name__, case)
