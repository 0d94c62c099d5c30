"""Replicas that torchft lets die and come back train as one process on the batches that counted.

Hybrid sharding: shards over the two ranks of a replica, replicas under torchft. Ranks kill themselves with SIGKILL
where a test says; see `ft_replicas.py`.
"""

import os
import subprocess
import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from doc_programs import ROOT, blocks
from ft_replicas import LIMIT_S, PATIENCE, Line, Place, die, run_replicas
from models import built
from torch import Tensor, nn

from shardwise import FSDPModule, clip_grad_norm_, no_sync, resume, save_checkpoint, shard_model
from shardwise.optim import GradScaler

pytest.importorskip("torchft")
pytestmark = pytest.mark.processes

WIDTH = 8
GUIDE = ROOT / "docs" / "guides" / "fault-tolerance.md"
Kill = tuple[int, int, str, int]  # replica, attempt, moment, step


@dataclass(frozen=True)
class Plan:
    steps: int = 8
    kills: tuple[Kill, ...] = ()
    waits: dict[int, tuple[int, int]] = field(
        default_factory=dict
    )  # by step, of the others: replica, attempt
    manager: dict[str, Any] = field(default_factory=dict)
    strategy: str = "zero3"
    microbatches: int = 1
    scale: bool = False  # the loss, and clip: as the guide says
    overflow: int = -1  # the step in which a gradient of replica 0 is infinite
    transport: str = "http"
    patience: timedelta = PATIENCE  # with a replica that does not answer
    hidden: int = 13
    saves: bool = False
    ranks: int = 2


def tower(hidden: int) -> nn.Module:
    blocks = [nn.Sequential(nn.Linear(WIDTH, hidden), nn.Tanh(), nn.Linear(hidden, WIDTH)) for _ in range(3)]
    return nn.Sequential(*blocks, nn.Linear(WIDTH, 1))


def batch(step: int, replica: int, rank: int, microbatch: int = 0) -> Tensor:
    seed = 1000 * step + 100 * replica + 10 * rank + microbatch
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def loss_of(model: nn.Module, inputs: Tensor) -> Tensor:
    return (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()


def train(place: Place, plan: Plan) -> None:
    Trainer(place, plan).run()


class Trainer:
    def __init__(self, place: Place, plan: Plan):
        from torchft import Manager, Optimizer, ProcessGroupGloo

        self.place, self.plan = place, plan
        self.model = shard_model(built(tower, plan.hidden), wrap=nn.Sequential, strategy=plan.strategy)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-2)
        self.scaler = GradScaler("cpu", init_scale=8.0, growth_interval=3, enabled=plan.scale)
        self.step = -1
        self.reductions = 0
        pg = ProcessGroupGloo(timeout=plan.patience)
        self.manager = Manager(
            pg=pg,
            load_state_dict=self.load,
            state_dict=self.save,
            min_replica_size=1,
            replica_id=f"replica_{place.replica}",
            checkpoint_transport=(transport := transports(pg)[plan.transport]),
            timeout=PATIENCE,
            **{"init_sync": False} | plan.manager,
        )
        count_received_bytes(transport)
        self.managed_optimizer = Optimizer(self.manager, self.optimizer)
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.set_all_reduce_hook(self.average)

    def save(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
        }

    def load(self, state: dict[str, Any]) -> None:
        self.die_at("healing", -1)
        shards = [value.to_local() for value in [*state["model"].values(), *moments(state)]]
        self.place.tell(moved=Counting.moved, shards=sum(shard.nbytes for shard in shards))
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scaler.load_state_dict(state["scaler"])

    def average(self, gradient: Tensor) -> None:
        self.reductions += 1
        if self.reductions == 2:
            self.die_at("backward", self.step)
        self.manager.allreduce(gradient).wait()

    def die_at(self, moment: str, step: int) -> None:
        if (self.place.replica, self.place.attempt, moment, step) in self.plan.kills:
            die()

    def run(self) -> None:
        if self.plan.saves:
            loaded = resume(self.place.folder / "run", self.model, self.optimizer)
            self.manager.load_state_dict(loaded.shared.get("torchft", self.manager.state_dict()))
        self.place.tell()  # it is there
        for replica in range(2):
            self.place.wait_for(replica, self.place.attempt if self.plan.saves else 0)
        while self.manager.current_step() < self.plan.steps:
            self.train_step()
        full = {name: value.full_tensor() for name, value in self.model.state_dict().items()}
        if self.place.rank == 0:
            torch.save(full, self.place.folder / f"{self.place.replica}.pt")
        self.manager.shutdown(wait=False)

    def train_step(self) -> None:
        manager = self.manager
        replica, attempt = self.plan.waits.get(manager.current_step(), (self.place.replica, 0))
        if replica != self.place.replica:
            self.place.wait_for(replica, attempt)
        self.reductions = 0
        if self.plan.scale:
            manager.start_quorum()
        else:
            self.managed_optimizer.zero_grad()
        self.step = manager.current_step()
        for index in range(self.plan.microbatches):
            is_last = index == self.plan.microbatches - 1
            with nullcontext() if is_last else no_sync(self.model):
                inputs = batch(self.step, self.place.replica, self.place.rank, index)
                loss = loss_of(self.model, inputs) / self.plan.microbatches
                if self.step == self.plan.overflow and self.place.replica == 0:
                    loss = loss * torch.inf
                self.scaler.scale(loss).backward()
        step = manager.current_step()
        counted, participants = manager.is_participating(), manager.num_participants()
        if self.plan.scale:
            exec(blocks(GUIDE, "py")[1], {"clip_grad_norm_": clip_grad_norm_} | vars(self))
        else:
            self.managed_optimizer.step()
        committed = manager.current_step() > step
        if self.plan.saves and committed and step % 2 and manager.participating_rank() == 0:
            shared = {"step": step + 1, "torchft": manager.state_dict()}
            save_checkpoint(
                self.place.folder / "run" / f"step-{step + 1}", self.model, self.optimizer, shared=shared
            )
        self.place.tell(
            step=step,
            committed=committed,
            counted=counted,
            participants=participants,
            scale=self.scaler.get_scale(),
        )
        self.die_at("between", step)


def moments(state: dict[str, Any]) -> list[Any]:
    return [
        value for states in state["optimizer"]["state"].values() for value in states.values() if value.ndim
    ]


def transports(pg: Any) -> dict[str, Any]:
    from torchft.checkpointing.http_transport import HTTPTransport
    from torchft.checkpointing.pg_transport import PGTransport

    return {
        "http": HTTPTransport(timeout=PATIENCE, num_chunks=0),
        "process group": PGTransport(pg, timeout=PATIENCE, device=torch.device("cpu")),
    }


class Counting:
    """A file or process group that counts the bytes that are received from it."""

    moved = 0

    def __init__(self, inner: Any):
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def read(self, *arguments: Any) -> bytes:
        return self._counted(self._inner.read(*arguments))

    def readline(self, *arguments: Any) -> bytes:
        return self._counted(self._inner.readline(*arguments))

    def _counted(self, data: bytes) -> bytes:
        Counting.moved += len(data)
        return data

    def recv(self, tensors: list[Tensor], *arguments: Any, **options: Any) -> Any:
        Counting.moved += sum(tensor.nbytes for tensor in tensors)
        return self._inner.recv(tensors, *arguments, **options)


def count_received_bytes(transport: Any) -> None:
    from torchft.checkpointing import http_transport

    load = http_transport._streaming_load
    http_transport._streaming_load = lambda file, **options: load(Counting(file), **options)
    if hasattr(transport, "_pg"):
        transport._pg = Counting(transport._pg)


# --- what must hold -------------------------------------------------------------------------------


def trained_plainly(counted: list[list[int]], plan: Plan) -> dict[str, Tensor]:
    """One process, with the batches of the replicas that counted in each step."""
    model = built(tower, plan.hidden)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step, replicas in enumerate(counted):
        for index in range(plan.microbatches):
            inputs = torch.cat(
                [batch(step, replica, rank, index) for replica in replicas for rank in range(plan.ranks)]
            )
            (loss_of(model, inputs) / plan.microbatches).backward()
        if step == plan.overflow:
            optimizer.zero_grad()
            continue
        if plan.scale:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def committed_by(lines: list[Line]) -> dict[int, Line]:
    """By step, without what an attempt did alone before it took the weights of others."""
    healed = {line["attempt"]: index for index, line in enumerate(lines) if "moved" in line}
    return {
        line["step"]: line
        for index, line in enumerate(lines)
        if line.get("committed") and index >= healed.get(line["attempt"], 0)
    }


def counted_in(told: list[list[Line]], steps: int) -> list[list[int]]:
    """The replicas whose batches counted in each step; each said so, and all said how many."""
    counted = []
    committed = [committed_by(lines) for lines in told]
    for step in range(steps):
        lines = {number: lines[step] for number, lines in enumerate(committed) if step in lines}
        replicas = [number for number, line in lines.items() if line["counted"]]
        assert {line["participants"] for line in lines.values()} == {len(replicas)}, lines
        counted.append(replicas)
    return counted


def check(folder: Path, told: list[list[Line]], plan: Plan) -> list[list[int]]:
    """Both end with the same weights, those of one process; which replicas counted in each step."""
    counted = counted_in(told, plan.steps)
    first, second = (torch.load(folder / f"{number}.pt") for number in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)
    torch.testing.assert_close(first, dict(trained_plainly(counted, plan)), rtol=1e-9, atol=1e-12)
    return counted


def skipped(lines: list[Line]) -> list[int]:
    return [line["step"] for line in lines if line.get("committed") is False]


KILLED = Plan(
    steps=14,
    kills=((0, 0, "backward", 3), (0, 1, "healing", -1), (0, 2, "between", 8)),
    waits={4: (0, 1), 6: (0, 2), 10: (0, 3)},
)


@pytest.mark.parametrize("is_asynchronous", [False, True], ids=["synchronous", "asynchronous"])
def test_a_replica_is_killed_again_and_again(is_asynchronous: bool, tmp_path: Path) -> None:
    """In the middle of backward, while it heals, and between two steps."""
    plan = replace(KILLED, manager={"use_async_quorum": is_asynchronous})
    told = run_replicas(train, tmp_path, plan, sizes=[[2] * 4, [2]])
    counted = check(tmp_path, told, plan)
    assert sum(len(replicas) == 2 for replicas in counted) >= 10
    assert 3 in skipped(told[1])
    assert len(skipped(told[1])) <= len(plan.kills)


ONCE = Plan(kills=((1, 0, "backward", 3),), waits={4: (1, 1)})


@pytest.mark.parametrize("is_asynchronous", [False, True], ids=["synchronous", "asynchronous"])
def test_what_else_is_in_a_step(is_asynchronous: bool, tmp_path: Path) -> None:
    """Microbatches, clipping, a loss that is scaled and once overflows."""
    plan = replace(
        ONCE, microbatches=3, scale=True, overflow=5, manager={"use_async_quorum": is_asynchronous}
    )
    told = run_replicas(train, tmp_path, plan, sizes=[[2], [2] * 2])
    check(tmp_path, told, plan)
    assert told[0][-1] == told[1][-1] | {"attempt": 0}
    scales = [line["scale"] for line in told[0] if line.get("committed")]
    assert scales == [8.0, 8.0, 16.0, 16.0, 16.0, 8.0, 8.0, 8.0]


@pytest.mark.parametrize("transport", ["http", "process group"])
def test_healing_moves_shards(transport: str, tmp_path: Path) -> None:
    plan = replace(ONCE, transport=transport, hidden=256)
    told = run_replicas(train, tmp_path, plan, sizes=[[2], [2] * 2])
    check(tmp_path, told, plan)
    (line,) = (line for line in told[1] if "moved" in line)
    assert 1.0 <= line["moved"] / line["shards"] < 1.25


def test_all_die_and_go_on_from_a_checkpoint(tmp_path: Path) -> None:
    plan = Plan(kills=((0, 0, "between", 6), (1, 0, "between", 6)), saves=True)
    told = run_replicas(train, tmp_path, plan, sizes=[[2] * 2] * 2)
    check(tmp_path, told, plan)
    for lines in told:
        steps = [line["step"] for line in lines if "step" in line]
        assert steps == [*range(7), 6, 7]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 3])
def test_a_replica_that_returns_with_another_number_of_ranks_is_refused(ranks: int, tmp_path: Path) -> None:
    """By names of weights and by meshes, before it takes part; then it comes back as it was."""
    plan = replace(ONCE, waits={4: (1, 1), 5: (1, 2)}, patience=timedelta(seconds=5))
    plan = replace(plan, manager={"use_async_quorum": False})
    told = run_replicas(train, tmp_path, plan, sizes=[[2], [2, ranks, 2]])
    check(tmp_path, told, plan)
    assert not any("step" in line for line in told[1] if line["attempt"] == 1)
    refusal = "".join((tmp_path / f"1-{rank}.log").read_text() for rank in range(2))  # of whoever was first
    assert 'parameter named "0.0.weight"' in refusal
    assert f"different meshes: got DeviceMesh((fsdp={ranks}), 'cpu'" in refusal


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "hybrid", "hybrid_zero2"])
def test_strategies(strategy: str, tmp_path: Path) -> None:
    ranks = 4 if strategy.startswith("hybrid") else 2
    plan = replace(ONCE, strategy=strategy, ranks=ranks)
    told = run_replicas(train, tmp_path, plan, sizes=[[ranks], [ranks] * 2])
    check(tmp_path, told, plan)


# --- LocalSGD and DiLoCo --------------------------------------------------------------------------

EVERY = 2  # inner steps between two averages


def train_apart(place: Place, method: str, kills: bool) -> None:
    """Inner steps of each replica by itself, and averages of weights, or of how they moved, by torchft."""
    from torchft import Manager, ProcessGroupGloo
    from torchft.local_sgd import DiLoCo, LocalSGD

    model = shard_model(built(tower, 13), wrap=nn.Sequential)
    inner = torch.optim.Adam(model.parameters(), lr=1e-2)

    def save() -> dict[str, Any]:
        return {"model": model.state_dict(), "inner": inner.state_dict()}

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["inner"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=PATIENCE),
        load_state_dict=load,
        state_dict=save,
        min_replica_size=2,
        replica_id=f"replica_{place.replica}",
        use_async_quorum=False,
        init_sync=False,
        timeout=PATIENCE,
    )
    if method == "LocalSGD":
        averaging = LocalSGD(manager, model, inner, EVERY)
    else:
        outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
        averaging = DiLoCo(manager, [model], inner, outer, EVERY, pin_memory=False)
    place.tell()
    with averaging:
        while (step := manager.current_step()) < 4:
            for index in range(EVERY):
                inner.zero_grad()
                loss_of(model, batch(step, place.replica, place.rank, index)).backward()
                if kills and (place.replica, place.attempt, step, index) == (1, 0, 2, 1):
                    die()
                inner.step()
            place.tell(step=step, committed=manager.current_step() > step)
    full = {name: value.full_tensor() for name, value in model.state_dict().items()}
    if place.rank == 0:
        torch.save(full, place.folder / f"{place.replica}.pt")
    manager.shutdown(wait=False)


def plainly_apart(method: str) -> dict[str, Tensor]:
    models = [built(tower, 13) for _ in range(2)]
    inner = [torch.optim.Adam(model.parameters(), lr=1e-2) for model in models]
    common = built(tower, 13)
    outer = torch.optim.SGD(common.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    for step in range(4):
        for index in range(EVERY):
            for replica in range(2):
                inner[replica].zero_grad()
                inputs = torch.cat([batch(step, replica, rank, index) for rank in range(2)])
                loss_of(models[replica], inputs).backward()
                inner[replica].step()
        with torch.no_grad():
            for mean, *each in zip(
                common.parameters(), *(model.parameters() for model in models), strict=True
            ):
                mean.grad = mean - sum(each) / 2
                if method == "LocalSGD":
                    mean.sub_(mean.grad)
        if method == "DiLoCo":
            outer.step()
        for model in models:
            model.load_state_dict(common.state_dict())
    return common.state_dict()


@pytest.mark.parametrize("kills", [False, True], ids=["alive", "killed"])
@pytest.mark.parametrize("method", ["LocalSGD", "DiLoCo"])
def test_replicas_that_train_apart(method: str, kills: bool, tmp_path: Path) -> None:
    run_replicas(train_apart, tmp_path, method, kills, sizes=[[2], [2, 2]])
    first, second = (torch.load(tmp_path / f"{number}.pt") for number in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)
    if not kills:
        torch.testing.assert_close(first, dict(plainly_apart(method)), rtol=1e-9, atol=1e-12)


# --- the example ----------------------------------------------------------------------------------


def test_the_guide_shows_the_example() -> None:
    assert blocks(GUIDE, "py")[0] == (ROOT / "examples" / "train_ft.py").read_text()


@pytest.mark.slow
def test_the_example_goes_on_after_a_kill(tmp_path: Path) -> None:
    """Started as the guide says; a process of one replica is killed by another process."""
    from torchft.coordination import LighthouseServer

    lighthouse = LighthouseServer(bind="[::]:0", min_replicas=1, join_timeout_ms=10_000)
    environment = os.environ | {
        **{"TORCHFT_LIGHTHOUSE": lighthouse.address(), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
        **{"PYTHONPATH": str(ROOT / "src"), "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"},
    }
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += ["--max-restarts=2", str(ROOT / "examples" / "train_ft.py")]
    outputs = [tmp_path / f"{replica}.txt" for replica in range(2)]
    launchers = []
    try:
        for replica, output in enumerate(outputs):
            variables = environment | {"REPLICA": str(replica)}
            with output.open("w") as file:
                launchers.append(
                    psutil.Popen(command, cwd=tmp_path, env=variables, stdout=file, stderr=subprocess.STDOUT)
                )
        while "replica 1, step " not in outputs[1].read_text():  # 20, or later if it came late
            assert launchers[1].poll() is None, outputs[1].read_text()
            time.sleep(0.05)
        launchers[1].children()[0].kill()
        for launcher, output in zip(launchers, outputs, strict=True):
            assert launcher.wait(timeout=LIMIT_S) == 0, output.read_text()[-6000:]
    finally:
        for launcher in launchers:
            if launcher.poll() is None:
                launcher.terminate()  # torchrun ends its processes
                launcher.wait()
        lighthouse.shutdown()
    assert "replica 0, step 200:" in outputs[0].read_text()
    assert sorted(path.name for path in (tmp_path / "runs" / "ft").iterdir()) == ["step-100", "step-200"]
