"""Whole iterations captured into a CUDA graph equal plain torch, and what cannot be captured is refused by name."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from doc_programs import Program, programs
from models import shard_tower
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import shardwise
from software_gpu import recipe_programs, training
from software_gpu.launch import on_the_older_back_end, run_on_gpus

WARM_UP, LAUNCHES, AFTER = 3, 4, 2


# --- the simulation -------------------------------------------------------------------------------------


def captured_program() -> list[float]:
    """Results of three launches of a graph that forks to another stream, and joins it again."""
    number, result = torch.zeros(4, device="cuda"), torch.ones(4, device="cuda")
    side = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result.mul_(2)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            doubled = number * 2 + result
        torch.cuda.current_stream().wait_stream(side)
        result.copy_(doubled)
    results = []
    for launch in range(3):
        number.fill_(launch)
        graph.replay()
        results.append(result.clone())
    return [each[0].item() for each in results]


def wait_for_earlier_work() -> None:
    event = torch.cuda.Event()
    event.record(torch.cuda.Stream())
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        torch.cuda.current_stream().wait_event(event)


def leave_a_stream_behind() -> None:
    ones, side = torch.ones(4, device="cuda"), torch.cuda.Stream()
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            ones.add_(1)


def read() -> None:
    ones = torch.ones(4, device="cuda")
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        ones.sum().item()


def draw() -> None:
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        torch.randn(4, device="cuda")


def errors_of(*programs: Callable[[], None]) -> list[str]:
    torch.cuda.init()
    errors = []
    for program in programs:
        try:
            program()
        except RuntimeError as error:
            errors.append(f"{error} {error.__context__}")
        else:
            errors.append("")
    return errors


@pytest.mark.slow
def test_a_graph_is_done_at_each_launch_late() -> None:
    assert run_on_gpus(1, captured_program, late=1) == [[2.0, 6.0, 16.0]]


@pytest.mark.slow
def test_cuda_rules_of_capture_are_kept() -> None:
    programs = (wait_for_earlier_work, leave_a_stream_behind, read, draw)
    (errors,) = run_on_gpus(1, errors_of, *programs)
    expected = (
        "an event that was recorded outside of the capture",
        "has not waited for another one's",
        "not permitted while a stream is captured|of a stream that is captured",
        "draws are not simulated",
    )
    for error, text in zip(errors, expected, strict=True):
        assert any(each in error for each in text.split("|")), error


# --- training -------------------------------------------------------------------------------------------


class Training:
    def __init__(
        self,
        mesh: Any,
        prepare: Callable[[Any], None] | None = None,
        max_norm: float | None = None,
        microbatches: int = 1,
        **settings: Any,
    ) -> None:
        torch.manual_seed(0)
        self.model: Any = training.Model().cuda()
        shard_tower(self.model, mesh=mesh, **settings)
        if prepare is not None:
            prepare(self.model)
        self.max_norm, self.microbatches = max_norm, microbatches
        on_device = "offload_policy" not in settings
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, capturable=on_device)
        self.batch = training.tokens(0, 0).cuda()

    def load(self, step: int) -> None:
        self.batch.copy_(training.tokens(step, dist.get_rank()))

    def step(self) -> Tensor:
        """The loss. The microbatches are one batch again and again: their mean gradient is that of the batch."""
        for number in range(self.microbatches):
            if self.microbatches > 1:
                self.model.set_requires_gradient_sync(number == self.microbatches - 1)
            loss = self.model(self.batch) / self.microbatches
            loss.backward()
        if self.max_norm is not None:
            shardwise.clip_grad_norm_(self.model.parameters(), self.max_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach() * self.microbatches

    def warm_up(self, steps: int) -> list[Tensor]:
        """As torch asks for it: on a side stream."""
        losses = []
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for step in range(steps):
                self.load(step)
                losses.append(self.step())
        torch.cuda.current_stream().wait_stream(stream)
        return losses


def plain_losses(max_norm: float | None = None, **unused: Any) -> list[float]:
    recipe = recipe_programs.Recipe(optimizer=recipe_programs.adamw, max_norm=max_norm)
    return recipe_programs.plain(recipe, steps=WARM_UP + LAUNCHES + AFTER)[0]


def captured_losses(mesh: Any, **settings: Any) -> list[float]:
    """First steps one by one, then launches of a graph, and steps one by one again."""
    run = Training(mesh, **settings)
    losses = run.warm_up(WARM_UP)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = run.step()
    for step in range(WARM_UP, WARM_UP + LAUNCHES):
        run.load(step)
        graph.replay()
        losses.append(loss.clone())
    for step in range(WARM_UP + LAUNCHES, WARM_UP + LAUNCHES + AFTER):
        run.load(step)
        losses.append(run.step())
    return [each.item() for each in losses]


CASES: dict[str, dict[str, Any]] = {
    "zero3": {},
    "zero2": {"reshard_after_forward": False},
    "storage kept": {"prepare": lambda model: model.set_keep_unsharded_storage(True)},
    "kept after backward": {
        "reshard_after_forward": False,
        "prepare": lambda model: model.set_reshard_after_backward(False),
    },
    "clipped": {"max_norm": 0.1},
    "accumulated": {"microbatches": 2},
    "separate reductions": {"prepare": lambda model: model.set_separate_reduce_scatter_group(True)},
    "bfloat16": {"mp_policy": training.BF16},
}
TOLERANCE = {"bfloat16": 0.1}


def differences(cases: list[str], shape: tuple[int, ...], backend: str = "nccl") -> dict[str, float]:
    """From plain torch, the largest of each case."""
    training.join(backend)
    names = ("replicate", "shard")[-len(shape) :]
    mesh = init_device_mesh("cuda", shape, mesh_dim_names=names)
    found = {}
    for case in cases:
        pairs = zip(plain_losses(**CASES[case]), captured_losses(mesh, **CASES[case]), strict=True)
        found[case] = max(abs(expected - here) for expected, here in pairs)
    return found


def check(results: list[dict[str, float]]) -> None:
    for rank, found in enumerate(results):
        for case, off in found.items():
            assert off <= TOLERANCE.get(case, 2e-5), f"rank {rank}, {case}: off by {off}"


def small_programs() -> tuple[list[float], dict[str, float], list[str]]:
    """All in one process, which takes seconds to start."""
    found = differences(["zero3", "zero2"], (2,))
    return captured_program(), found, refusals()


@pytest.fixture(scope="module")
def found() -> list[Any]:
    return run_on_gpus(2, small_programs)


def test_a_graph_is_done_at_each_launch(found: list[Any]) -> None:
    assert [results for results, _, _ in found] == [[2.0, 6.0, 16.0]] * 2


def test_captured_iterations_equal_plain_torch(found: list[Any]) -> None:
    check([off for _, off, _ in found])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("late", "backend"),
    [
        (0, "nccl"),
        (1, "nccl"),
        (2, "nccl"),
        (11, "nccl"),
        pytest.param(0, "nccl-legacy", marks=on_the_older_back_end),
    ],
)
def test_captured_iterations_equal_plain_torch_in_any_order(late: int, backend: str) -> None:
    check(run_on_gpus(2, differences, list(CASES), (2,), backend, late=late, timeout_s=400))


@pytest.mark.slow
def test_they_do_over_replicas() -> None:
    check(run_on_gpus(4, differences, ["zero3", "clipped"], (2, 2), timeout_s=400))


def last_and_first_loss_of(code: str) -> tuple[float, float]:
    names: dict[str, Any] = {}
    exec(code, names)
    return names["losses"][-1].item(), names["losses"][0].item()


@pytest.mark.slow
@pytest.mark.parametrize("program", [each for each in programs() if each.needs_gpus], ids=str)
def test_a_program_of_the_guide_learns(program: Program) -> None:
    for last, first in run_on_gpus(2, last_and_first_loss_of, program.code):
        assert last < 0.9 * first


# --- what is refused ------------------------------------------------------------------------------------


def the_first_iteration(mesh: Any) -> None:
    run = Training(mesh)
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        run.step()


def offloaded_parameters(mesh: Any) -> None:
    run = Training(mesh, offload_policy=training.OFFLOAD)
    run.warm_up(WARM_UP)
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        run.step()


def groups_kept_without_a_step(mesh: Any) -> None:
    run = Training(mesh, **CASES["kept after backward"])
    run.warm_up(WARM_UP)
    run.model(run.batch).backward()
    torch.cuda.synchronize()
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        run.model(run.batch).backward()


REFUSED = {
    the_first_iteration: "Model: a CUDA graph cannot capture the first iteration",
    offloaded_parameters: "a CUDA graph cannot capture parameters that are offloaded to the host",
    groups_kept_without_a_step: "kept unsharded since a backward, and perhaps changed since",
}


def refusals() -> list[str]:
    mesh = training.join()
    return errors_of(*(lambda program=program: program(mesh) for program in REFUSED))  # type: ignore[misc]


def test_what_cannot_be_captured_is_refused_by_name(found: list[Any]) -> None:
    for _, _, errors in found:
        for error, text in zip(errors, REFUSED.values(), strict=True):
            assert text in error
