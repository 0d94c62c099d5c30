"""torchtitan's recipe and its trainer shard with this library, and its own scale of gradients holds.

The recipe turns the division of gradients off, in modules that it knows by ``isinstance``. The decoder that it is
tried on in float64 has the attributes of torchtitan's models. Its trainer runs with its own Llama, in float32, as
`titan.py` says; it needs triton to be installed, though nothing of it runs.
"""

import importlib.util
import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import World
from launch import run_job
from models import built
from reference import full
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor

import shardwise
from shardwise import interop

pytest.importorskip("torchtitan")
pytest.importorskip("spmd_types")

WIDTH, VOCABULARY, RANKS = 8, 11, 2


class Decoder(nn.Module):
    def __init__(self, is_tied: bool) -> None:
        super().__init__()
        self.enable_weight_tying = is_tied
        self.tok_embeddings = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleDict(
            {
                str(i): nn.TransformerEncoderLayer(WIDTH, 2, 12, dropout=0.0, batch_first=True)
                for i in range(2)
            }
        )
        self.norm = nn.LayerNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if is_tied:
            self.lm_head.weight = self.tok_embeddings.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            x = layer(x)
        return self.lm_head(self.norm(x))


def trained(is_sharded: bool, is_tied: bool) -> dict[str, Any]:
    """Two steps on sums of losses: torchtitan divides by the tokens of all ranks itself."""
    model = built(Decoder, is_tied, seed=0)
    rows = slice(None)
    if is_sharded:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from torchtitan.distributed.fsdp import apply_fsdp_to_decoder

        mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("fsdp",))
        with interop.installed():
            apply_fsdp_to_decoder(model, mesh, torch.float64, torch.float64, pp_enabled=False)
        rank = torch.distributed.get_rank()
        rows = slice(2 * rank, 2 * rank + 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        tokens = torch.randint(VOCABULARY, (2 * RANKS, 6), generator=torch.Generator().manual_seed(step))[
            rows
        ]
        logits = model(tokens[:, :-1]).flatten(0, 1)
        loss = nn.functional.cross_entropy(logits, tokens[:, 1:].flatten(), reduction="sum")
        (loss / (2 * RANKS * 5)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {
        "ours": [isinstance(each, shardwise.FSDPModule) for each in (model, *model.layers.values())],
        "weights": {name: full(param) for name, param in model.named_parameters()},
    }


@pytest.mark.parametrize("is_tied", [False, True], ids=["untied", "tied"])
def test_its_recipe_for_decoders_trains_as_one_process_does(world2: World, is_tied: bool) -> None:
    expected = trained(is_sharded=False, is_tied=is_tied)["weights"]
    for found in world2.run(trained, is_sharded=True, is_tied=is_tied):
        assert found["ours"] == [True] * 3
        for name, value in expected.items():
            torch.testing.assert_close(found["weights"][name], value)


# --- its own trainer, on its own Llama ------------------------------------------------------------

STEPS = 4
needs_trainer = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("triton", "datasets", "tensorboard")),
    reason="torchtitan's trainer needs triton, datasets and tensorboard",
)


def nothing_parallel(model: nn.Module, **_: Any) -> nn.Module:
    return model


def its_trainer(
    folder: Path, library: str, *, steps: int = STEPS, saves: bool = False, **parallelism: Any
) -> dict[str, Any]:
    """What its trainer comes to, going on from the newest checkpoint in `folder` if it saves."""
    warnings.simplefilter("ignore")
    from titan import ROWS, llama
    from torchtitan.components.optimizer import default_adamw

    if library == "ours":
        interop.install()
    config = llama()
    config.optimizer = default_adamw(
        lr=8e-4, eps=1e-2
    )  # else rounding decides where gradients are next to zero
    config.training.local_batch_size = ROWS // int(os.environ["WORLD_SIZE"])
    config.training.steps = steps
    config.lr_scheduler.total_steps = STEPS
    config.dump_folder = str(folder)
    config.checkpoint.enable = saves
    config.checkpoint.interval = 2
    for name, value in parallelism.items():
        setattr(config.parallelism, name, value)
    if library == "nobody's":
        config.model_spec.parallelize_fn = nothing_parallel
    trainer = config.build()
    (model,) = trainer.model_parts
    draw(model)
    trainer.train()
    trainer.close()
    return {
        "ours": [isinstance(each, shardwise.FSDPModule) for each in (model, *model.layers.values())],
        "step": trainer.step,
        "weights": {
            name.replace("_checkpoint_wrapped_module.", ""): full(param)
            for name, param in model.named_parameters()
        },
    }


@torch.no_grad()
def draw(model: nn.Module) -> None:
    """The same values however the model is sharded: torchtitan draws from generators of each rank."""
    torch.manual_seed(0)
    for name, param in model.named_parameters():
        value = torch.randn(param.shape) * 0.05 + ("norm" in name)
        if isinstance(param, DTensor):
            value = distribute_tensor(value, param.device_mesh, param.placements)
        param.copy_(value)


def unsharded(folder: Path) -> dict[str, Any]:
    return its_trainer(folder, "nobody's")


def sharded(folder: Path) -> dict[str, Any]:
    return its_trainer(folder, "ours")


def hybrid(folder: Path) -> dict[str, Any]:
    return its_trainer(folder, "ours", data_parallel_replicate_degree=2)


def interrupted(folder: Path) -> dict[str, Any]:
    return its_trainer(folder, "ours", steps=2, saves=True)


def resumed(folder: Path) -> dict[str, Any]:
    return its_trainer(folder, "ours", saves=True)


def of_the_peer(folder: Path) -> dict[str, Any]:
    return its_trainer(folder, "peer", spmd_backend="partial_dtensor")


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    return run_job(unsharded, tmp_path_factory.mktemp("unsharded"), ranks=1)["weights"]


def assert_trained_alike(found: dict[str, Any], expected: dict[str, Tensor]) -> None:
    assert found["ours"] == [True] * 7
    assert found["step"] == STEPS
    assert found["weights"].keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found["weights"][name], value, rtol=0, atol=2e-6, msg=name)


@needs_trainer
@pytest.mark.parametrize(("job", "ranks"), [(sharded, 2), (hybrid, 4)])
def test_its_trainer_trains_its_llama_as_one_process_does(
    expected: dict[str, Tensor], tmp_path: Path, job: Any, ranks: int
) -> None:
    assert_trained_alike(run_job(job, tmp_path, ranks=ranks), expected)


@needs_trainer
def test_its_trainer_saves_and_resumes(expected: dict[str, Tensor], tmp_path: Path) -> None:
    assert run_job(interrupted, tmp_path)["step"] == 2
    assert_trained_alike(run_job(resumed, tmp_path), expected)


@needs_trainer
def test_the_peer_cannot_reduce_as_it_asks_on_gloo(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="PREMUL_SUM"):
        run_job(of_the_peer, tmp_path)
