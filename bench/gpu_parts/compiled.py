"""Compiled steps: a CUDA graph of a step, reduce-overhead for each block, Inductor over the whole model.

Claim: a step is made of work that a CUDA graph can hold, and so is a whole iteration with its optimizer;
blocks may be compiled with `mode="reduce-overhead"` where unsharded parameters keep their addresses
(`set_keep_unsharded_storage`); a whole model becomes one graph. Losses and gradients are those of the eager
step, to the rounding of the dtype. Values are compared in a world of clones; Inductor over the whole model
has the fake group, whose collectives it may bucket, and losses are compared in a world of one.
"""

import gc
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from common import OURS, PEER, Spread, alternate, fake_world
from one_device.groups import CloneWorld
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import shardwise
from gpu_parts.plan import Item, Options, Row, Skipped
from gpu_parts.speed import WORLD, Case, Iterations, Trainer, timed_act

MODEL = "4 x 4096, 512 tokens"
TOLERANCE = 2e-2
"""Of losses in bfloat16, relative."""
WARM_UP, LAUNCHES = 3, 6


def items(options: Options) -> Iterator[Item]:
    case = Case("tiny" if options.is_tiny else MODEL, WORLD, "bf16", options.device)
    yield "CUDA graph of a step", partial(graph_of_a_step, case, keeps=False)
    yield "CUDA graph of a step, kept addresses", partial(graph_of_a_step, case, keeps=True)
    for name, keeps in (("CUDA graph of an iteration", False), ("the same, groups kept", True)):
        yield name, partial(_in_clones, partial(iteration_in_a_graph, case, keeps))
    yield "reduce-overhead, each block", partial(_in_clones, partial(blocks, case, options))
    yield "Inductor, whole model", partial(whole_model, case, options, OURS)
    yield "Inductor, whole model, the peer", partial(whole_model, case, options, PEER)


def _in_clones(act: Callable[[], Row]) -> Row:
    with CloneWorld(WORLD).joined():
        return act()


def _steps(options: Options) -> dict[str, int]:
    return {"warmup": 1, "steps": 2} if options.is_tiny else {"warmup": 5, "steps": 20}


def loss_of(trainer: Trainer) -> float:
    """Without changing anything.

    Without a backward that follows, torch takes each call of a graph for a step of its own, and overwrites
    what the one before gave.
    """
    torch.compiler.cudagraph_mark_step_begin()
    with torch.no_grad():
        return float(trainer.model(*trainer.batch))


def captured(warm_up: Callable[[], Any], act: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any, Any]:
    """A CUDA graph of ``act``, after ``warm_up`` on the same stream; and what the two returned."""
    capturing = torch.cuda.Stream()
    capturing.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(capturing):
        before = warm_up()
    torch.cuda.synchronize()
    gc.collect()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=capturing):
        return graph, before, act()


def graph_of_a_step(case: Case, keeps: bool) -> Row:
    """Capture forward and backward, replay it, and compare gradients with those of an eager step."""
    if case.device != "cuda":
        raise Skipped("there are no CUDA graphs on the host")
    with CloneWorld(WORLD).joined():
        trainer = Trainer(OURS, case)
        model: Any = trainer.model
        if keeps:
            model.set_keep_unsharded_storage(True)

        def warm_up() -> list[Tensor]:
            for _ in range(3):
                model.zero_grad()
                trainer.step()
            found = _gradients(model)
            model.zero_grad()
            return found

        graph, expected, _ = captured(warm_up, trainer.step)
        for gradient in _local_gradients(model):
            gradient.fill_(float("nan"))  # a replay that writes nothing would be noticed
        graph.replay()
        torch.cuda.synchronize()
        off = max((a - b).abs().max().item() for a, b in zip(_gradients(model), expected, strict=True))
        assert off == 0, f"gradients of a replayed step are off by {off}"
        timed = alternate({"graph": lambda _: timed_act(graph.replay, case.device)}, warmup=2, steps=10)
        return {"step_ms": vars(Spread.of(timed["graph"]["step_ms"])), "off_by": off}


@sdpa_kernel(SDPBackend.MATH)  # the backward of cuDNN's attention adds in an order that changes
def iteration_in_a_graph(case: Case, keeps: bool) -> Row:
    """Launch a captured iteration again and again, and compare with the same iterations one by one.

    Losses are alike only if the optimizer's step is in the graph, and the all-gathers of what it changed.
    """
    if case.device != "cuda":
        raise Skipped("there are no CUDA graphs on the host")
    expected = torch.stack(Iterations(OURS, case, keeps, capturable=True).eager(range(WARM_UP + LAUNCHES)))
    run = Iterations(OURS, case, keeps, capturable=True)
    graph, losses, loss = captured(lambda: run.eager(range(WARM_UP)), run.take)
    for index in range(WARM_UP, WARM_UP + LAUNCHES):
        run.load(index)
        graph.replay()
        losses.append(loss.clone())
    off = ((torch.stack(losses) - expected) / expected).abs().max().item()
    changed = ((expected[-1] - expected[0]) / expected[0]).abs().item()
    assert off <= TOLERANCE, f"losses of replayed iterations are off by {off}"
    assert changed > 5 * TOLERANCE, f"losses only changed by {changed}: nothing would be noticed"
    return {"off_by": off, "changed by": changed}


def _local_gradients(model: Any) -> list[Tensor]:
    return [param.grad.to_local() for param in model.parameters()]


def _gradients(model: Any) -> list[Tensor]:
    return [gradient.detach().float().clone() for gradient in _local_gradients(model)]


def blocks(case: Case, options: Options) -> Row:
    eager, compiled = Trainer(OURS, case), Trainer(OURS, case)
    model: Any = compiled.model
    model.set_keep_unsharded_storage(True)
    for block in model.blocks:
        if case.device == "cuda":
            block.compile(mode="reduce-overhead")
        else:
            block.compile(backend="aot_eager")  # what the host has of it: hooks around compiled frames
    return _compared(eager, compiled, options)


def whole_model(case: Case, options: Options, variant: str) -> Row:
    with fake_world(case.world):
        eager, compiled = Trainer(variant, case), Trainer(variant, case)
        settings = shardwise.compile_options() if variant == OURS and case.device == "cuda" else {}
        backend = "inductor" if case.device == "cuda" else "aot_eager"
        compiled.model = torch.compile(  # type: ignore[assignment]
            compiled.model, backend=backend, fullgraph=variant == OURS, options=settings or None
        )
        row = _compared(eager, compiled, options, compares=False)
    if variant == OURS:
        alone = Case(case.model, 1, case.precision, case.device)
        with CloneWorld(1).joined():
            eager, compiled = Trainer(variant, alone), Trainer(variant, alone)
            compiled.model = torch.compile(compiled.model, backend=backend, fullgraph=True)  # type: ignore[assignment]
            row["off_by"] = _assert_alike(eager, compiled)
    return row


def _compared(eager: Trainer, compiled: Trainer, options: Options, compares: bool = True) -> Row:
    timed = alternate({"eager": eager.timed_step, "compiled": compiled.timed_step}, **_steps(options))
    step_ms = {name: each["step_ms"] for name, each in timed.items()}
    row: Row = {
        "step_ms": vars(Spread.of(step_ms["compiled"])),
        "eager_ms": vars(Spread.of(step_ms["eager"])),
        "ratio": vars(Spread.of(step_ms["compiled"] / step_ms["eager"])),
    }
    if compares:
        row["off_by"] = _assert_alike(eager, compiled)
    return row


def _assert_alike(eager: Trainer, compiled: Trainer) -> float:
    expected, got = loss_of(eager), loss_of(compiled)
    off = abs(got - expected) / abs(expected)
    assert off <= TOLERANCE, f"the loss is {got} instead of {expected}"
    return off
