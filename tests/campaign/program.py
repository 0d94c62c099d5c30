"""A program as plain data: a world, how models are sharded, a tree of modules, and a list of steps.

Every value that may be drawn stands in a table, the simplest first: that is what shrinking goes to, and
what a program that is written by hand has where it says nothing.
"""

import copy
import pprint
import random
from collections.abc import Iterator
from typing import Any

Program = dict[str, Any]
Node = dict[str, Any]
Step = dict[str, Any]

# How ranks and models are arranged.
SETTINGS: dict[str, tuple[Any, ...]] = {
    "mesh": ("2", "1", "3", "2x2", "1x2", "2x1", "replicate_2", "4"),
    "wrap": ("blocks", "blocks", "root", "nested", "some", "pairs"),
    "reshard": (None, True, False),
    "keep_after_backward": (False, False, False, True),
    "prefetch": (1, 0, 2),
    "backward_prefetch": ("before", "after", None),
    "packing": (None, 0, 1 << 30),
    "offload": (False, False, False, True),
    "shard_dim": (0, 0, -1),
    "optimizer": ("sgd", "adamw", "momentum"),
    "depth_of_discriminator": (1, 2),
    "salt": tuple(range(5)),
}

LEAVES = (
    *("linear", "norm", "conv", "lstm", "attention", "bag", "batch_norm", "parametrized", "complex"),
    *("odd", "tied", "frozen", "lora", "unused", "twice_used", "spectral"),
)
CONTAINERS = (
    "chain",
    "residual",
    "again",
    "checkpoint",
    "reentrant",
    "dict",
    "list",
    "dataclass",
    "raw",
    "method",
)

# What one microbatch does between forward and backward.
CALLS = (
    *(
        "plain",
        "plain",
        "two_losses",
        "retain",
        "crossed",
        "penalty",
        "penalty_then_plain",
        "input_grad",
        "hooks",
    ),
    *("tensor_hook", "eval_between", "inference_between", "thread", "gan", "rollout", "fails_in_forward"),
    *("fails_in_backward", "wasted_forward", "twice_forward", "detached", "inside_autograd_grad"),
)
MICRO: dict[str, tuple[Any, ...]] = {"call": CALLS, "sync": (True, True, False)}
STEPS: dict[str, tuple[Any, ...]] = {
    "before": (
        None,
        None,
        None,
        "eval",
        "edit",
        "freeze",
        "unfreeze",
        "state_dict",
        "deepcopy",
        "unshard",
        "to_train",
    ),
    "zero": ("none", "zeros", "model", "keep"),
    "clip": (None, None, 0.1),
}


def drawn(seed: int) -> Program:
    """The program of a seed."""
    chance = random.Random(seed)
    program: Program = {name: chance.choice(values) for name, values in SETTINGS.items()}
    program["blocks"] = [_drawn_node(chance, 0) for _ in range(chance.randint(1, 4))]
    program["steps"] = [_drawn_step(chance) for _ in range(chance.randint(1, 3))]
    return settled(program)


def _drawn_node(chance: random.Random, depth: int) -> Node:
    if depth < 2 and chance.random() < (0.6, 0.3)[depth]:
        children = [_drawn_node(chance, depth + 1) for _ in range(chance.randint(1, 2))]
        return {"kind": chance.choice(CONTAINERS), "children": children}
    return {"kind": chance.choice(LEAVES)}


def _drawn_step(chance: random.Random) -> Step:
    step = {name: chance.choice(values) for name, values in STEPS.items()}
    count = chance.choice((1, 1, 2))
    step["micro"] = [{n: chance.choice(v) for n, v in MICRO.items()} for _ in range(count)]
    return step


def completed(program: Program) -> Program:
    """What a program written by hand leaves out has the simplest value."""
    steps = []
    for step in program.get("steps", [{}]):
        micro = [{**_simplest(MICRO), **each} for each in step.get("micro", [{}])]
        steps.append({**_simplest(STEPS), **step, "micro": micro})
    return settled({**_simplest(SETTINGS), "blocks": [{"kind": "linear"}], **program, "steps": steps})


def _simplest(table: dict[str, tuple[Any, ...]]) -> dict[str, Any]:
    return {name: values[0] for name, values in table.items()}


def kinds_in(program: Program) -> set[str]:
    """All kinds of modules in it."""
    return {node["kind"] for node in _nodes(program["blocks"])}


def _nodes(nodes: list[Node]) -> Iterator[Node]:
    for node in nodes:
        yield node
        yield from _nodes(node.get("children", []))


def calls_in(program: Program) -> set[str]:
    """All calls that its microbatches make."""
    return {micro["call"] for step in program["steps"] for micro in step["micro"]}


DOUBLE_BACKWARD = ("penalty", "penalty_then_plain")


def settled(program: Program) -> Program:
    """The nearest program that plain PyTorch can run and that the documentation allows."""
    program = copy.deepcopy(program)
    for step in program["steps"]:
        step["micro"][-1]["sync"] = True
        for micro in step["micro"]:
            # Nothing runs the discriminator again, so that its gradients would wait for ever.
            micro["sync"] |= micro["call"] == "gan"
    if any(call in calls_in(program) for call in DOUBLE_BACKWARD):
        # torch has no second derivative of these on the host, and reentrant checkpoints no autograd.grad.
        _replace(program, {"lstm": "linear", "bag": "linear", "attention": "norm", "reentrant": "chain"})
        program["reshard"] = False  # what a second backward needs must have been kept
    if {"input_grad", "inside_autograd_grad"} & calls_in(program):
        _replace(program, {"reentrant": "chain"})
    return program


def _replace(program: Program, kinds: dict[str, str]) -> None:
    for node in _nodes(program["blocks"]):
        node["kind"] = kinds.get(node["kind"], node["kind"])


# --- smaller programs -----------------------------------------------------------------------------


def simpler(program: Program) -> Iterator[Program]:
    """Programs with one thing less, or one thing simpler."""
    for name in ("steps", "blocks"):
        for fewer in _without_one(program[name]):
            yield {**program, name: fewer}
    for index, step in enumerate(program["steps"]):
        for changed in _simpler_steps(step):
            yield {**program, "steps": _with(program["steps"], index, changed)}
    for index, node in enumerate(program["blocks"]):
        for changed in _simpler_nodes(node):
            yield {**program, "blocks": _with(program["blocks"], index, changed)}
    for name, values in SETTINGS.items():
        if program[name] != values[0]:
            yield {**program, name: values[0]}


def _without_one(items: list[Any]) -> Iterator[list[Any]]:
    if len(items) > 1:
        for index in range(len(items)):
            yield items[:index] + items[index + 1 :]


def _with(items: list[Any], index: int, item: Any) -> list[Any]:
    return [*items[:index], item, *items[index + 1 :]]


def _simpler_steps(step: Step) -> Iterator[Step]:
    for fewer in _without_one(step["micro"]):
        yield {**step, "micro": fewer}
    for name, values in STEPS.items():
        if step[name] != values[0]:
            yield {**step, name: values[0]}
    for index, micro in enumerate(step["micro"]):
        for name, values in MICRO.items():
            if micro[name] != values[0]:
                yield {**step, "micro": _with(step["micro"], index, {**micro, name: values[0]})}


def _simpler_nodes(node: Node) -> Iterator[Node]:
    children = node.get("children", [])
    yield from children
    for fewer in _without_one(children):
        yield {**node, "children": fewer}
    for index, child in enumerate(children):
        for changed in _simpler_nodes(child):
            yield {**node, "children": _with(children, index, changed)}
    if children and node["kind"] != "chain":
        yield {**node, "kind": "chain"}
    elif not children and node["kind"] != "linear":
        yield {"kind": "linear"}


def shown(program: Program) -> str:
    """The program without what is simplest anyway."""
    steps = []
    for step in program["steps"]:
        micro = [_told(each, MICRO) for each in step["micro"]]
        steps.append({**_told(step, STEPS), **({"micro": micro} if micro != [{}] else {})})
    text = {**_told(program, SETTINGS), "blocks": program["blocks"], "steps": steps}
    return pprint.pformat(text, width=110, sort_dicts=False)


def _told(values: dict[str, Any], table: dict[str, tuple[Any, ...]]) -> dict[str, Any]:
    return {name: values[name] for name in table if values[name] != table[name][0]}
