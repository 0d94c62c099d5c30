"""A program as plain data: a world, how models are sharded, a tree of modules, and a list of steps.

What may be drawn stands in `PROGRAMS`.
"""

import copy
from collections.abc import Iterator
from typing import Any

from hypothesis.strategies import SearchStrategy

from campaign.blocks import names
from campaign.draws import Draw, choice, many, record, tree
from campaign.modules import CONTAINER_KINDS, LEAF_KINDS

# How ranks and models are arranged.
SETTINGS: dict[str, SearchStrategy[Any]] = {
    "mesh": choice("2", "1", "3", "2x2", "1x2", "2x1", "replicate_2", "4"),
    "wrap": choice("blocks", "blocks", "root", "nested", "some", "pairs"),
    "reshard": choice(None, True, False),
    "keep_after_backward": choice(False, False, False, True),
    "prefetch": choice(1, 0, 2),
    "backward_prefetch": choice("before", "after", None),
    "packing": choice(None, 0, 1 << 30),
    "offload": choice(False, False, False, True),
    "shard_dim": choice(0, 0, -1),
    "optimizer": choice("sgd", "adamw", "momentum"),
    "depth_of_discriminator": choice(1, 2),
    "salt": choice(*range(5)),
}

# What one microbatch does between forward and backward.
CALLS = names(
    "plain plain two_losses retain crossed penalty penalty_then_plain input_grad hooks tensor_hook eval_between",
    "inference_between thread gan rollout fails_in_forward fails_in_backward wasted_forward twice_forward",
    "detached inside_autograd_grad",
)
MICRO = record({"call": choice(*CALLS), "sync": choice(True, True, False)})
STEP = record(
    {
        "micro": many(MICRO, least=1, most=2),
        "before": choice(
            *(None, None, None, "eval", "edit", "freeze", "unfreeze", "state_dict", "deepcopy", "unshard"),
            "to_train",
        ),
        "zero": choice("none", "zeros", "model", "keep"),
        "clip": choice(None, None, 0.1),
    }
)

PROGRAMS = record(
    {
        "steps": many(STEP, least=1, most=3),
        "blocks": many(tree(tuple(LEAF_KINDS), tuple(CONTAINER_KINDS)), least=1, most=4),
        **SETTINGS,
    }
)


def _nodes(nodes: list[Draw]) -> Iterator[Draw]:
    for node in nodes:
        yield node
        yield from _nodes(node.get("children", []))


def calls_in(program: Draw) -> set[str]:
    return {micro["call"] for step in program["steps"] for micro in step["micro"]}


DOUBLE_BACKWARD = ("penalty", "penalty_then_plain")


def settled(program: Draw) -> Draw:
    """The nearest program that plain PyTorch can run and that the documentation allows."""
    program = copy.deepcopy(program)
    for step in program["steps"]:
        step["micro"][-1]["sync"] = True
        for micro in step["micro"]:
            # Nothing runs the discriminator again, so that its gradients would wait for ever.
            micro["sync"] |= micro["call"] == "gan"
    if any(call in calls_in(program) for call in DOUBLE_BACKWARD):
        # torch has no second derivative of these on the host, and reentrant checkpoints no autograd.grad.
        _replace(
            program, dict.fromkeys(("lstm", "gru", "bag", "attention"), "plain") | {"reentrant": "chain"}
        )
        program["reshard"] = False  # what a second backward needs must have been kept
    if {"input_grad", "inside_autograd_grad"} & calls_in(program):
        _replace(program, {"reentrant": "chain"})
    return program


def _replace(program: Draw, kinds: dict[str, str]) -> None:
    for node in _nodes(program["blocks"]):
        node["kind"] = kinds.get(node["kind"], node["kind"])
