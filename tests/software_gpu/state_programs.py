"""What happens around steps on devices: weights from the meta device, generation, checkpoints."""

import copy
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwise
from shardwise import CPUOffloadPolicy
from software_gpu.training import Model, join, sharded_model, train

STEPS = 3

# --- materialize ----------------------------------------------------------------------------------


class Noisy(nn.Module):
    """Draws with several kinds of kernels, among them one without an argument for a generator, and has a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(10, 7)
        self.normal = nn.Parameter(torch.empty(5, 3))
        self.uniform = nn.Parameter(torch.empty(3))
        self.register_buffer("steps", torch.empty(4))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.normal)
        nn.init.trunc_normal_(self.uniform)
        nn.init.ones_(self.steps)
        with torch.no_grad():
            self.uniform.add_(torch.rand_like(self.uniform) + torch.randperm(3, device=self.uniform.device))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).sum() + self.normal.sum() + self.uniform.sum()


class Both(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model, self.noisy = Model(), Noisy()

    def forward(self, batch: Tensor, x: Tensor) -> Tensor:
        return self.model(batch) + self.noisy(x)


def init(module: nn.Module) -> None:
    """Of what the module has itself; a block has a scalar, which nothing of torch's draws."""
    if hasattr(module, "scale"):
        nn.init.constant_(module.scale, 0.5)
    elif any(True for _ in module.parameters(recurse=False)):
        module.reset_parameters()


def drawn_by_one(device: torch.device) -> dict[str, Tensor]:
    """What one process gives the whole model on a device."""
    with torch.device("meta"):
        model = Both()
    model.to_empty(device=device)
    torch.manual_seed(5)
    with torch.no_grad():
        model.apply(init)  # children before parents
    return {name: value.cpu() for name, value in model.state_dict().items()}


def materialized(mesh: Any, strategy: str, drawn_on: str | None, **settings: Any) -> dict[str, Tensor]:
    with torch.device("meta"):
        model = Both()
    shardwise.shard_model(model, strategy=strategy, mesh=mesh, wrap=nn.Linear, **settings)
    torch.manual_seed(5)
    shardwise.materialize(model, init, device=drawn_on)
    full = shardwise.full_state_dict(model) or {}
    return {name: value.cpu() for name, value in full.items()}


def check_materialize(mesh: Any) -> None:
    """The values of one process, bit for bit, drawn on the device or on the host."""
    for drawn_on, device in ((None, mesh_device()), ("cpu", torch.device("cpu"))):
        expected = drawn_by_one(device)
        for strategy, settings in (
            ("zero3", {}),
            ("ddp", {}),
            ("zero2", {"offload_policy": CPUOffloadPolicy()}),
        ):
            found = materialized(mesh, strategy, drawn_on, **settings)
            if dist.get_rank() == 0:
                assert found.keys() == expected.keys()
            for name, value in found.items():
                assert torch.equal(value, expected[name]), (drawn_on, strategy, name)


def mesh_device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


# --- generation -----------------------------------------------------------------------------------


class Decoder(nn.Module):
    """The next token for each place."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embedding = nn.Embedding(32, 48)
        self.blocks = nn.ModuleList(nn.Linear(48, 48) for _ in range(3))
        self.out = nn.Linear(48, 32)

    def forward(self, known: Tensor) -> Tensor:
        x = self.embedding(known)
        for block in self.blocks:
            x = torch.tanh(block(x)) + x.cumsum(0)
        return self.out(x)


def generated(model: nn.Module, first: int, count: int, device: Any) -> list[int]:
    known = [first]
    with torch.no_grad():
        for _ in range(count):
            known.append(int(model(torch.tensor(known, device=device))[-1].argmax()))
    return known


def check_generation(mesh: Any) -> None:
    """Ranks generate as many tokens as they like: those of one process, with parts kept and with all."""
    rank = dist.get_rank()
    expected = generated(Decoder(), rank, 4 + rank, "cpu")
    model: Any = Decoder().cuda()
    for block in model.blocks:
        shardwise.fully_shard(block, mesh=mesh)
    shardwise.fully_shard(model, mesh=mesh)
    for budget in (None, 12000):
        with shardwise.inference(model, budget_bytes=budget):
            assert generated(model, rank, 4 + rank, "cuda") == expected, budget
    assert generated(model, rank, 4, "cuda") == expected[:5]
    with shardwise.unsharded(model):
        for name, value in Decoder().named_parameters():
            assert torch.equal(model.get_parameter(name).cpu(), value), name


# --- checkpoints ----------------------------------------------------------------------------------


def new_model(mesh: Any, strategy: str = "zero3", **settings: Any) -> tuple[Any, torch.optim.Optimizer]:
    return sharded_model(strategy=strategy, mesh=mesh, **settings)


def check_resume(mesh: Any, folder: Path) -> None:
    """A checkpoint of one strategy is resumed by others; the losses are those of the run that goes on."""
    model, optimizer = new_model(mesh)
    train(model, optimizer, range(STEPS))
    random_state = torch.cuda.get_rng_state()
    shardwise.save_checkpoint(
        folder / "3", model, optimizer, shared={"step": STEPS}, per_rank={"cuda": random_state}
    )
    expected = train(model, optimizer, range(STEPS, 2 * STEPS))
    for strategy, settings in (
        ("zero3", {}),
        ("zero2", {}),
        ("ddp", {}),
        ("zero3", {"offload_policy": "cpu"}),
    ):
        other, its_optimizer = new_model(mesh, strategy, **settings)
        train(other, its_optimizer, range(7, 8))  # something else, that loading has to replace
        loaded = shardwise.load_checkpoint(folder / "3", other, its_optimizer)
        assert loaded.shared["step"] == STEPS
        assert torch.equal(loaded.per_rank["cuda"], random_state)
        found = train(other, its_optimizer, range(STEPS, 2 * STEPS))
        assert max(abs(a - b) for a, b in zip(found, expected, strict=True)) < 2e-5, (strategy, settings)


def check_asynchronous_save(mesh: Any, folder: Path) -> None:
    """What is saved beside later steps is what there was before them, also of shards on the host."""
    for name, settings in (("device", {}), ("host", {"offload_policy": "cpu"})):
        model, optimizer = new_model(mesh, **settings)
        train(model, optimizer, range(STEPS))
        before = copy.deepcopy(shardwise.full_state_dict(model))
        pending = shardwise.save_checkpoint(folder / name, model, optimizer, asynchronous=True)
        expected = train(model, optimizer, range(STEPS, 2 * STEPS))
        pending.wait()
        other, its_optimizer = new_model(mesh, "zero2")
        shardwise.load_checkpoint(folder / name, other, its_optimizer)
        after = shardwise.full_state_dict(other)
        for key in after or {}:
            assert torch.equal(after[key].cpu(), before[key].cpu()), (name, key)
        found = train(other, its_optimizer, range(STEPS, 2 * STEPS))
        assert max(abs(a - b) for a, b in zip(found, expected, strict=True)) < 2e-5, name


def check_full_state(mesh: Any) -> None:
    """A full state of one process is loaded, and comes out again."""
    torch.manual_seed(9)
    expected = Model().state_dict()
    model, _ = new_model(mesh)
    shardwise.load_full_state_dict(model, expected if dist.get_rank() == 0 else None, src_rank=0)
    for name, value in (shardwise.full_state_dict(model) or {}).items():
        assert torch.equal(value.cpu(), expected[name]), name


def check_all(folder: Path, backend: str = "nccl") -> None:
    mesh = join(backend)
    check_materialize(mesh)
    check_generation(mesh)
    check_resume(mesh, folder / "resumed")
    check_asynchronous_save(mesh, folder / "beside")
    check_full_state(mesh)
