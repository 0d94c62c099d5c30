"""Every public call that communicates tells the other ranks that this rank is in it, before anything waits.

Here stands which calls do. The others are listed by name, so that a new public name has to be put on one side.
"""

import inspect
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from comparing import alike
from expecttest import assert_expected_inline
from harness import World
from test_public_names import public_names
from torch import nn

from shardwise import (
    GradScaler,
    clip_grad_norm_,
    full_state_dict,
    fully_shard,
    global_norm,
    inference,
    load_checkpoint,
    load_full_state_dict,
    materialize,
    no_sync,
    resume,
    save_checkpoint,
    shard_model,
    statistics,
    trace,
    unsharded,
)
from shardwise.init import check_replicas, sync_module_states
from shardwise.optim import Muon, WholeMatrices, WholeParameters, on_whole_matrices
from shardwise.ranks import StopSignal
from shardwise.ranks.failures import monitor_of_job
from shardwise.state import iter_full_parameters, load_full_optimizer_state_dict, save_safetensors

COLLECTIVES = (
    *("all_reduce", "broadcast", "all_to_all_single", "all_gather", "gather", "reduce_scatter", "barrier"),
    *("all_gather_object", "gather_object", "scatter_object_list", "broadcast_object_list"),
)

# --- those that communicate -------------------------------------------------------------------------


class Job:
    """A model after a step, and what calls are about."""

    def __init__(self, folder: str) -> None:
        torch.manual_seed(0)
        self.folder = folder
        self.model = shard_model(plain(), wrap=nn.Linear)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.train()
        self.optimizer.step()

    def train(self, model: nn.Module | None = None) -> None:
        (model or self.model)(torch.ones(2, 4)).sum().backward()

    @property
    def matrices(self) -> list[Any]:
        return [self.model[0].weight, self.model[1].weight]


def plain() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def negated(matrices: torch.Tensor, _: Any) -> torch.Tensor:
    return -matrices


def _finalize_backward(job: Job) -> None:
    job.model.set_manual_backward_finalization(True)
    with no_sync(job.model):
        job.train()
    job.model.finalize_backward(async_op=True).wait()
    job.model.set_manual_backward_finalization(False)


def _unsharded(job: Job) -> None:
    with unsharded(job.model, with_grads=True):
        pass


def _inference(job: Job) -> None:
    with inference(job.model, budget_bytes=0):
        job.model(torch.ones(2, 4))


def _trace(job: Job) -> None:
    with trace(job.model):
        pass


def _load_full_state_dict(job: Job) -> None:
    load_full_state_dict(job.model, {name: torch.ones_like(v) for name, v in plain().state_dict().items()})


def _load_full_optimizer_state_dict(job: Job) -> None:
    _, state = full_state_dict(job.model, job.optimizer)
    load_full_optimizer_state_dict(job.model, job.optimizer, state)


def _materialize(job: Job) -> None:
    with torch.device("meta"):
        model = plain()
    materialize(fully_shard(model))


def _grad_scaler(job: Job) -> None:
    scaler = GradScaler("cpu")
    scaler.scale(torch.ones(1))
    scaler.unscale_(job.optimizer)


def _muon(job: Job) -> None:
    Muon(job.model.parameters(), is_matrix=lambda name, param: param.dim() == 2).step()


def _whole_parameters(job: Job) -> Any:
    return WholeParameters(torch.optim.SGD, job.model[0].parameters(), lr=0.1)


def _stop_signal(job: Job) -> None:
    with StopSignal() as stop:
        stop.requested()
        stop.requested()


def _hybrid(job: Job) -> None:
    with mock.patch.dict(os.environ, LOCAL_WORLD_SIZE="2"):
        shard_model(plain(), strategy="hybrid", sync_module_states=True)


def _kept_and_ignored(job: Job) -> None:
    """A pass that compares what stayed unsharded, and averages gradients of parameters that it ignores."""
    model = plain()
    with pytest.warns(UserWarning, match="ignored_params contains trainable"):
        shard_model(model, strategy="zero1", ignored_params={model[0].weight})
    model.set_reduce_ignored_params(True)
    for _ in range(2):
        job.train(model)


CALLS: dict[str, Callable[[Job], Any]] = {
    "a forward and a backward": _kept_and_ignored,
    "FSDPModule.unshard": lambda job: job.model.unshard(),
    "UnshardHandle.wait": lambda job: job.model[0].unshard(async_op=True).wait(),
    "FSDPModule.finalize_backward": _finalize_backward,
    "GradientReductionHandle.wait": _finalize_backward,
    "GradScaler.unscale_gradients": _grad_scaler,
    "clip_grad_norm_": lambda job: clip_grad_norm_(job.model, 1.0),
    "full_state_dict": lambda job: full_state_dict(job.model, job.optimizer),
    "fully_shard": lambda job: fully_shard(plain(), sync_module_states=True),
    "global_norm": lambda job: global_norm(job.model.parameters()),
    "inference": _inference,
    "load_checkpoint": lambda job: load_checkpoint(f"{job.folder}/step-1", job.model, job.optimizer),
    "load_full_state_dict": _load_full_state_dict,
    "materialize": _materialize,
    "resume": lambda job: resume(job.folder, job.model, job.optimizer),
    "save_checkpoint": lambda job: save_checkpoint(f"{job.folder}/step-2", job.model, job.optimizer),
    "shard_model": _hybrid,
    "statistics": lambda job: statistics(job.model),
    "trace": _trace,
    "unsharded": _unsharded,
    "init.check_replicas": lambda job: check_replicas(job.model),
    "init.sync_module_states": lambda job: sync_module_states(job.model),
    "optim.Muon.step": _muon,
    "optim.WholeMatrices.apply": lambda job: WholeMatrices(job.matrices).apply(job.matrices, negated),
    "optim.WholeParameters": _whole_parameters,
    "optim.WholeParameters.add_param_group": lambda job: _whole_parameters(job).add_param_group(
        {"params": list(job.model[1].parameters())}
    ),
    "optim.WholeParameters.step": lambda job: _whole_parameters(job).step(),
    "optim.on_whole_matrices": lambda job: on_whole_matrices(job.matrices, negated),
    "state.iter_full_parameters": lambda job: list(iter_full_parameters(job.model)),
    "state.load_full_optimizer_state_dict": _load_full_optimizer_state_dict,
    "state.save_safetensors": lambda job: save_safetensors(job.model, f"{job.folder}/files"),
    "ranks.StopSignal": _stop_signal,
    "ranks.StopSignal.requested": _stop_signal,
}

# --- those that do not ------------------------------------------------------------------------------

LOCAL = {
    *("FSDPModule", "FSDPModule.reshard", "FSDPModule.reset_iter_state"),
    *("GradScaler", "GradientReductionHandle", "GradientReductionHandle.drop", "UnshardHandle"),
    *("compile_options", "estimate", "explain", "latest_checkpoint", "merge_traces", "no_sync"),
    *("register_fsdp_forward_method", "share_comm_ctx", "strategies.register_comm_hook"),
    *("optim.FlatOptimizer", "optim.FlatOptimizer.step", "optim.FlatOptimizer.stepped_parameters"),
    *("optim.Muon", "optim.Muon.add_param_group", "optim.WholeMatrices", "optim.WholeParameters.owns"),
    *("optim.Statistics", "optim.is_hidden_matrix", "optim.newton_schulz", "optim.offload_optimizer_state"),
    *("state.EMA", "state.EMA.load_state_dict", "state.EMA.state_dict", "state.EMA.swap", "state.EMA.update"),
    *("state.LoadReport", "state.rekey_optimizer_state_dict", "ranks.set_wait_limit"),
    *("interop.follow_unshard_actions", "interop.install", "interop.installed", "interop.uninstall"),
    *("CPUOffloadPolicy", "CommPolicy", "DataParallelMeshDims", "MixedPrecisionPolicy", "OffloadPolicy"),
}
# Of setters, values and results; a save in the background communicates in a thread of its own, which no other
# rank has to enter; stages of a pipeline do what forwards, backwards and methods of modules do.
LOCAL_OF = ("FSDPModule.set_", "policies.", "planning.", "observe.", "checkpoint.", "interop.PipelineStage")
LOCAL_OF += tuple(
    f"strategies.Wrap{kind}" for kind in ("BySize", "Classes", "Recursively", "Repeated", "Where")
)


def callables() -> Iterator[str]:
    """Public functions, classes, and methods that are ours, each once."""
    for name, thing in {
        id(thing): (name, thing) for name, thing in reversed(public_names().items())
    }.values():
        if callable(thing):
            yield name
        for method in dir(thing) if inspect.isclass(thing) else ():
            home = getattr(inspect.getattr_static(thing, method), "__module__", None) or ""
            if (
                not method.startswith("_")
                and home.startswith("shardwise")
                and callable(getattr(thing, method))
            ):
                yield f"{name}.{method}"


def test_every_public_call_is_known_to_communicate_or_not_to() -> None:
    names = set(callables())
    unknown = {name for name in names - CALLS.keys() - LOCAL if not name.startswith(LOCAL_OF)}
    assert unknown == set()
    assert (LOCAL | CALLS.keys()) - names == {"a forward and a backward"}


@contextmanager
def unannounced() -> Iterator[set[str]]:
    """Names of the collectives that were issued while no other rank could know what this one waits for."""
    found: set[str] = set()
    training_thread = threading.get_ident()

    def wrapped(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() == training_thread and monitor_of_job().on_host is None:
                found.add(name)
            return function(*args, **kwargs)

        return call

    with mock.patch.multiple(dist, **{name: wrapped(name, getattr(dist, name)) for name in COLLECTIVES}):
        yield found


def announced(folder: str) -> dict[str, str]:
    """For each call what it announced, and what it communicated beside that."""
    monitor, told = monitor_of_job(), {}
    save_checkpoint(f"{folder}/step-1", (job := Job(folder)).model, job.optimizer)
    for name, call in CALLS.items():
        job = Job(folder)
        calls, issued = monitor.calls.copy(), monitor.issued
        with unannounced() as found:
            call(job)
        what = [*(monitor.calls - calls), *(["collectives of passes"] if monitor.issued > issued else [])]
        told[name] = ", ".join([*what, *(f"UNANNOUNCED {each}" for each in sorted(found))])
    return told


def test_a_public_call_that_communicates_announces_itself(world2: World, tmp_path: Any) -> None:
    first = alike(world2.run(announced, str(tmp_path)))
    assert_expected_inline(
        "\n".join(f"{name}: {what}" for name, what in first.items()),
        """\
a forward and a backward: shard_model, collectives of passes
FSDPModule.unshard: collectives of passes
UnshardHandle.wait: collectives of passes
FSDPModule.finalize_backward: collectives of passes
GradientReductionHandle.wait: collectives of passes
GradScaler.unscale_gradients: GradScaler
clip_grad_norm_: clip_grad_norm_
full_state_dict: full_state_dict
fully_shard: fully_shard
global_norm: global_norm
inference: inference, collectives of passes
load_checkpoint: load_checkpoint
load_full_state_dict: load_full_state_dict
materialize: materialize
resume: resume
save_checkpoint: save_checkpoint
shard_model: shard_model
statistics: statistics
trace: trace
unsharded: unsharded
init.check_replicas: check_replicas
init.sync_module_states: sync_module_states
optim.Muon.step: Muon.step
optim.WholeMatrices.apply: WholeMatrices
optim.WholeParameters: WholeParameters
optim.WholeParameters.add_param_group: WholeParameters, WholeParameters.add_param_group
optim.WholeParameters.step: WholeParameters, WholeParameters.step
optim.on_whole_matrices: WholeMatrices
state.iter_full_parameters: iter_full_parameters
state.load_full_optimizer_state_dict: full_state_dict, load_full_optimizer_state_dict
state.save_safetensors: save_safetensors
ranks.StopSignal: StopSignal
ranks.StopSignal.requested: StopSignal""",
    )
