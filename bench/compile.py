"""Time and memory of a training step that torch.compile has compiled: by blocks, and as a whole.

Claim: compiled block by block, a step of a 25 M parameter GPT on two processes of one core each takes
shardwise at most 0.75 of the time it takes torch's FSDP2 ("the peer") by its own recipe for that. Compiled as
a whole, the model is one graph without breaks, takes no longer than the peer's blocks, and holds at most a
block more than eager steps at its peaks. What `model ahead` gains on that is shown; nothing is claimed of it.

    plain          unsharded, not compiled
    eager          shardwise, not compiled
    blocks         shardwise, then block.compile(fullgraph=True) for each
    model          shardwise, then torch.compile(model, fullgraph=True)
    model ahead    the same with options=shardwise.compile_options(), which Inductor takes
    peer           the peer, not compiled
    peer blocks    torch.compile(block, fullgraph=True) in the place of each, then the peer's fully_shard

Refuted by: a ratio to `peer blocks` above those that stands out of the noise (`--noise` runs `peer blocks`
twice); graph breaks; a peak of `model` more than a block above `eager`'s; losses 1e-3 apart (exits with 1).
How it is measured, and what it cannot show: README.md.

    python bench/compile.py --json compile.json
    python bench/compile.py --model tiny --backend aot_eager --steps 2        # tries it out
"""

import argparse
import importlib.util
import os
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import gpt
import numpy
import torch
from common import (
    OURS,
    PEER,
    PLAIN,
    Sample,
    Spread,
    alternate,
    command_line,
    fake_world,
    find_library,
    launch,
    loss_differences,
    print_table,
    refuse_differences,
    shard,
    write_json,
)
from memory import PHASES, Log, gradients_of, mark, recorded
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

EAGER, BLOCKS, MODEL, MODEL_AHEAD = "eager", "blocks", "model", "model ahead"
PEER_BLOCKS, PEER_BLOCKS_AGAIN = "peer blocks", "peer blocks again"
LIBRARIES = {
    PLAIN: PLAIN,
    EAGER: OURS,
    BLOCKS: OURS,
    MODEL: OURS,
    MODEL_AHEAD: OURS,
    PEER: PEER,
    PEER_BLOCKS: PEER,
}
COMPILED = (BLOCKS, MODEL, MODEL_AHEAD, PEER_BLOCKS, PEER_BLOCKS_AGAIN)
MODELS = {
    "25m": {"layers": 8, "width": 512, "heads": 8, "vocab": 256, "context": 128},
    "tiny": {"layers": 2, "width": 64, "heads": 2, "vocab": 32, "context": 16},
}
COLUMNS = {
    "variant": "variant",
    "step_ms": "step, ms",
    "ratio_to_peer_blocks": "ratio to peer blocks",
    "compile_s": "compile, s",
    "graphs": "graphs",
    "graph_breaks": "graph breaks",
    "forward_mb": "peak in forward, MB",
    "backward_mb": "peak in backward, MB",
    "last_loss": "last loss",
}


# --- the variants ---------------------------------------------------------------------------------


def build(variant: str, options: argparse.Namespace, mesh: DeviceMesh) -> tuple[nn.Module, Any]:
    """The same model from the same seed on every rank as the variant has it, and what a step calls."""
    torch.manual_seed(0)
    model = classes_of_its_own().GPT(options)
    how: dict[str, Any] = {"backend": options.backend, "fullgraph": True}
    library = LIBRARIES[variant.removesuffix(" again")]
    if library == PEER and variant in COMPILED:
        for index, block in enumerate(model.blocks):
            model.blocks[index] = torch.compile(block, **how)
    shard(library, model, model.blocks, **({} if library == PLAIN else {"mesh": mesh}))
    if variant == BLOCKS:
        for block in model.blocks:
            block.compile(**how)
    if variant == MODEL_AHEAD:
        how["options"] = find_library(OURS).compile_options()
    return model, torch.compile(model, **how) if variant in (MODEL, MODEL_AHEAD) else model


def classes_of_its_own() -> Any:
    """gpt.py, read anew: other code objects, to which dynamo attaches other graphs."""
    spec = importlib.util.spec_from_file_location("gpt", gpt.__file__)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Trainer(gpt.Trainer):
    def __init__(self, variant: str, options: argparse.Namespace, mesh: DeviceMesh) -> None:
        model, run = build(variant, options, mesh)
        super().__init__(model, options, run)
        self.is_compiled = variant in COMPILED
        self.first_step_ms = 0.0
        self.graphs = self.graph_breaks = 0

    def timed_step(self, index: int) -> Sample:
        """Counts graphs; the first step finds nothing that Inductor has compiled before."""
        before = num_graphs(), num_graph_breaks()
        with ExitStack() as stack:
            if self.is_compiled and index == 0:
                from torch._inductor.utils import fresh_cache

                stack.enter_context(fresh_cache())
            times = super().timed_step(index)
        self.graphs += num_graphs() - before[0]
        self.graph_breaks += num_graph_breaks() - before[1]
        self.first_step_ms = self.first_step_ms or times["step_ms"]
        return times


def log_of_step(model: nn.Module, forward: Callable[[], Tensor]) -> Log:
    """What PyTorch allocates in a step, less the gradients that it leaves; marked as forward and backward."""
    with recorded() as log:
        with mark("forward"):
            loss = forward()
        with mark("backward"):
            loss.backward()
    end = log.marks["backward"][1]
    alive = [each for each in log.allocations if each.begin <= end < each.end]
    # Small gradients may have landed where those of the step before were: in no peak.
    left = [
        gradient
        for gradient in gradients_of(model)
        if any(0 <= gradient.data_ptr() - each.address < each.num_bytes for each in alive)
    ]
    log.set_resident(left, at=end)
    return log


def peaks(variant: str, options: argparse.Namespace, mesh: DeviceMesh) -> dict[str, float]:
    """The most bytes alive at once in forward and in backward of a third step."""
    trainer = Trainer(variant, options, mesh)
    for index in range(2):
        trainer.loss(trainer.batch(index)).backward()
        trainer.model.zero_grad()
    log = log_of_step(trainer.model, lambda: trainer.loss(trainer.batch(2)))
    return {f"{phase}_mb": log.peak(*log.marks[phase])[0] / 1e6 for phase in PHASES}


def num_graphs() -> int:
    return counters["stats"]["unique_graphs"]


def num_graph_breaks() -> int:
    return sum(counters["graph_break"].values())


def quiet_dynamo() -> None:
    """Without a warning of its own, when it looks at an input that is not a leaf."""
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")


def compile_headers(backend: str) -> None:
    """Compile something small: Inductor's headers, and its import, belong to no variant."""
    x = torch.ones(4, requires_grad=True)
    torch.compile(lambda x: x.sin().sum(), backend=backend)(x).backward()


# --- rows -----------------------------------------------------------------------------------------


@dataclass
class RankRecord:
    step_ms: numpy.ndarray
    first_step_ms: float
    losses: list[float]
    graphs: int
    graph_breaks: int


def work(options: argparse.Namespace) -> dict[str, RankRecord]:
    quiet_dynamo()
    mesh = init_device_mesh("cpu", (options.processes,))
    compile_headers(options.backend)
    trainers = {variant: Trainer(variant, options, mesh) for variant in options.variants}
    steps = {variant: trainer.timed_step for variant, trainer in trainers.items()}
    times = alternate(steps, warmup=options.warmup, steps=options.steps)
    return {
        variant: RankRecord(times[variant]["step_ms"], t.first_step_ms, t.losses, t.graphs, t.graph_breaks)
        for variant, t in trainers.items()
    }


def summarize(ranks: list[dict[str, RankRecord]]) -> list[dict[str, Any]]:
    """One row per variant: times are the maximum over ranks, graphs are rank 0's."""
    steps = {v: numpy.max([rank[v].step_ms for rank in ranks], axis=0) for v in ranks[0]}
    rows: list[dict[str, Any]] = []
    for variant, step_ms in steps.items():
        mine = [rank[variant] for rank in ranks]
        row: dict[str, Any] = {"variant": variant, "step_ms": vars(Spread.of(step_ms))}
        if PEER_BLOCKS in steps:
            row["ratio_to_peer_blocks"] = vars(Spread.of(step_ms / steps[PEER_BLOCKS]))
        if variant in COMPILED:
            first_ms = max(each.first_step_ms for each in mine)
            row["compile_s"] = round((first_ms - float(numpy.median(step_ms))) / 1e3, 2)
            row |= {"graphs": mine[0].graphs, "graph_breaks": mine[0].graph_breaks}
        rows.append(row | {"last_loss": mine[0].losses[-1]})
    return rows


def disagreement(ranks: list[dict[str, RankRecord]]) -> dict[str, float]:
    """The largest difference of a loss from the last variant's, over ranks and steps."""
    losses = [{variant: record.losses for variant, record in rank.items()} for rank in ranks]
    *others, last = losses[0]
    found = loss_differences(losses, last, others)
    # Plain has learnt from other data after the first step.
    return found | loss_differences(losses, last, {PLAIN} & {*others}, steps=1)


def parse() -> argparse.Namespace:
    parser = command_line(__doc__, processes=2, batch=2, steps=20, warmup=3)
    parser.add_argument("--model", choices=MODELS, default="25m")
    parser.add_argument("--backend", choices=("inductor", "aot_eager"), default="inductor")
    parser.add_argument("--variants", nargs="+", choices=LIBRARIES, default=list(LIBRARIES))
    parser.add_argument("--noise", action="store_true", help="a second instance of 'peer blocks'")
    options = parser.parse_args()
    vars(options).update(MODELS[options.model])
    without = (MODEL_AHEAD,) if options.backend != "inductor" else ()
    options.variants = [v for v in LIBRARIES if v in options.variants and v not in without]
    if all(LIBRARIES[v] == PLAIN for v in options.variants):
        parser.error("--variants needs one that is sharded")
    if options.noise and PEER_BLOCKS in options.variants:
        options.variants.append(PEER_BLOCKS_AGAIN)
    if options.warmup < 1:
        parser.error("--warmup must be at least 1: the first step compiles")
    return options


def main() -> None:
    options = parse()
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler announces itself otherwise
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    torch.set_num_threads(1)
    quiet_dynamo()
    ranks = launch(work, options)
    with fake_world(options.processes) as mesh:
        rows = [row | peaks(row["variant"], options, mesh) for row in summarize(ranks)]
    block_mb = sum(p.nbytes for p in gpt.Block(options.width, options.heads).parameters()) / 1e6
    print(
        f"{options.processes} processes (gloo), {options.layers} blocks of {block_mb:.3g} MB of "
        f"float32, {options.backend}, median [quartiles] of {options.steps}"
    )
    print_table(rows, COLUMNS)
    apart = disagreement(ranks)
    write_json(options.json, "compile", vars(options), rows, loss_difference=apart, block_mb=block_mb)
    refuse_differences(apart)


if __name__ == "__main__":
    main()
