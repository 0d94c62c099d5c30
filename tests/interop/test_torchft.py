"""Replicas that torchft lets die and come back train as one process on the batches that counted.

Hybrid sharding: shards over the two ranks of a replica, replicas under torchft. Ranks kill themselves with SIGKILL
where a test says; see `ft_replicas.py`.
"""

from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from ft_replicas import PATIENCE, Line, Place, die, run_replicas
from models import built
from torch import Tensor, nn

from shardwise import FSDPModule, clip_grad_norm_, no_sync, resume, save_checkpoint, shard_model
from shardwise.optim import GradScaler

pytest.importorskip("torchft")
pytestmark = pytest.mark.processes

WIDTH = 8
Kill = tuple[int, int, str, int]  # replica, attempt, moment, step


@dataclass(frozen=True)
class Plan:
    """What a run does."""

    steps: int = 8
    kills: tuple[Kill, ...] = ()
    waits: dict[int, tuple[int, int]] = field(
        default_factory=dict
    )  # by step, of the others: replica, attempt
    manager: dict[str, Any] = field(default_factory=dict)
    strategy: str = "zero3"
    microbatches: int = 1
    clip: bool = False
    scale: bool = False
    overflow: int = -1  # the step in which a gradient of replica 0 is infinite
    transport: str = "http"
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
    """One rank of a replica."""
    Trainer(place, plan).run()


class Trainer:
    def __init__(self, place: Place, plan: Plan):
        from torchft import Manager, ProcessGroupGloo

        self.place, self.plan = place, plan
        self.model = shard_model(built(tower, plan.hidden), wrap=nn.Sequential, strategy=plan.strategy)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-2)
        self.scaler = GradScaler("cpu", init_scale=8.0, growth_interval=3, enabled=plan.scale)
        self.step = -1
        self.reductions = 0
        pg = ProcessGroupGloo(timeout=PATIENCE)
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
            self.place.wait_for(replica, 0)
        while (self.manager.current_step()) < self.plan.steps:
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
        manager.start_quorum()
        self.step = manager.current_step()
        for index in range(self.plan.microbatches):
            is_last = index == self.plan.microbatches - 1
            with nullcontext() if is_last else no_sync(self.model):
                inputs = batch(self.step, self.place.replica, self.place.rank, index)
                loss = loss_of(self.model, inputs) / self.plan.microbatches
                if self.step == self.plan.overflow and self.place.replica == 0:
                    loss = loss * torch.inf
                self.scaler.scale(loss).backward()
        counted, participants, step = (
            manager.is_participating(),
            manager.num_participants(),
            manager.current_step(),
        )
        committed = manager.should_commit()
        if committed:
            self.scaler.unscale_(self.optimizer)
            if self.plan.clip:
                clip_grad_norm_(self.model, 0.5)
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.optimizer.zero_grad()
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
        if plan.clip:
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def counted_in(told: list[list[Line]], steps: int) -> list[list[int]]:
    """The replicas whose batches counted in each step; each said so, and all said how many."""
    counted = []
    committed = [{line["step"]: line for line in lines if line.get("committed")} for lines in told]
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
        ONCE, microbatches=3, clip=True, scale=True, overflow=5, manager={"use_async_quorum": is_asynchronous}
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
    print(line)
    assert 1.0 <= line["moved"] / line["shards"] < 1.25


def test_all_die_and_go_on_from_a_checkpoint(tmp_path: Path) -> None:
    plan = Plan(kills=((0, 0, "between", 6), (1, 0, "between", 6)), saves=True)
    told = run_replicas(train, tmp_path, plan, sizes=[[2] * 2] * 2)
    check(tmp_path, told, plan)
    for lines in told:
        steps = [line["step"] for line in lines if "step" in line]
        assert steps == [*range(7), 6, 7]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "hybrid", "hybrid_zero2"])
def test_strategies(strategy: str, tmp_path: Path) -> None:
    ranks = 4 if strategy.startswith("hybrid") else 2
    plan = replace(ONCE, strategy=strategy, ranks=ranks)
    told = run_replicas(train, tmp_path, plan, sizes=[[ranks], [ranks] * 2])
    check(tmp_path, told, plan)
