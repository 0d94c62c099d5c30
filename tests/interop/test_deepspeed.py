"""Checkpoints that DeepSpeed's ZeRO writes are converted to the weights that it finds in them itself, and to the state
of its optimizer.
"""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from launch import run_job
from safetensors.torch import load_file
from torch import Tensor, nn

from shardwise.__main__ import main
from shardwise.checkpoint import load_checkpoint

pytest.importorskip("deepspeed")


class Model(nn.Module):
    """Nothing divides by two; some is frozen, tied, or a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.frozen = nn.Linear(7, 13), nn.LayerNorm(5), nn.Linear(5, 5)
        self.b, self.tied = nn.Linear(13, 5, bias=False), nn.Linear(13, 5, bias=False)
        self.tied.weight = self.b.weight
        self.register_buffer("buffer", torch.arange(3.0))
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.a(x))
        return self.frozen(self.norm(self.b(hidden) + self.tied(hidden)))


def trained(folder: Path) -> dict[str, Tensor]:
    """Two steps; what DeepSpeed itself reads from what it has saved, in float32."""
    import deepspeed
    from deepspeed.utils import safe_get_full_optimizer_state
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    stage = int(folder.name.removeprefix("stage"))
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage, "sub_group_size": 40},
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": True},
    }
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    engine, _, _, _ = deepspeed.initialize(model=model, config=config, optimizer=optimizer)
    for _ in range(2):
        loss = engine(torch.randn(2, 7, dtype=torch.bfloat16)).float().pow(2).mean()
        engine.backward(loss)
        engine.step()
    engine.save_checkpoint(str(folder), tag="step-2")
    torch.distributed.barrier()
    moments = {
        f"{key} of {name}": safe_get_full_optimizer_state(param, key)
        for name, param in engine.module.named_parameters()
        for key in ("exp_avg", "exp_avg_sq")
        if param.requires_grad
    }
    return moments | dict(get_fp32_state_dict_from_zero_checkpoint(str(folder)))


@pytest.mark.parametrize("stage", [2, 3])
def test_weights_and_moments_are_those_that_deepspeed_finds(
    stage: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(os.environ, "DS_ACCELERATOR", "cpu")
    folder = tmp_path / f"stage{stage}"
    folder.mkdir()
    wanted = run_job(trained, folder)
    (folder / "result.pt").unlink()
    assert main(["convert", str(folder), str(tmp_path / "out")]) == 0
    assert main(["convert", str(folder), str(tmp_path / "step-2"), "--optimizer"]) == 0
    model = Model()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    load_checkpoint(tmp_path / "step-2", model, optimizer, convert_dtype=True)
    assert optimizer.param_groups[0]["lr"] == 1e-2
    for name, param in model.named_parameters():
        for key in ("exp_avg", "exp_avg_sq") if param.requires_grad else ():
            assert torch.equal(optimizer.state[param][key], wanted.pop(f"{key} of {name}")), (name, key)
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert wanted.keys() - found.keys() == {"tied.weight"}  # once, as the format wants it
    assert found.keys() <= wanted.keys()
    for name, value in found.items():
        assert torch.equal(value.float(), wanted[name]), name
