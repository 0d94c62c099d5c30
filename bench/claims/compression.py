"""What sending gradients and weights in fewer bytes saves, and what it does to training.

Claim: of the bytes of float32, gradients as bf16 take a half and as int8 with a float32 scale for each 256
numbers 0.254, on the wire; weights as int8 likewise; and the example learns as before.

How, bytes: one launch; the GPT of step_time.py trains in each setting in turn; bytes through the loopback
interface over some steps, as the kernel counts them (headers included), divided by steps and ranks. How,
training: loss_curves.py, 2 processes, with the same options; its validation loss at the end.

Floor: gradients are half of the bytes of zero2 and a third of those of zero3, so that is the most that
compressing them alone can save.

Refuted by: `sent` off `formula` by more than 5 %; a validation loss that is worse by more than the
difference that another seed makes (row "exact, seed 1").

    python bench/claims/compression.py --json compression.json
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # what the benchmarks share

import torch
from common import gpt_parser, launch, print_table, write_json
from gpt import GPT, Trainer
from strategies import sent_and_ms
from torch.distributed.elastic.utils.distributed import get_free_port

from shardwise import CommPolicy, shard_model
from shardwise.policies import LowPrecisionReduction, QuantizedAllGather, QuantizedReduction
from shardwise.strategies import register_comm_hook

EXAMPLE = Path(__file__).with_name("loss_curves.py")
INT8 = (256 + 4) / 256 / 4  # of the bytes of float32
SETTINGS: dict[str, dict[str, Any]] = {
    "exact": {"hook": None, "weights": None, "gradient_share": 1.0, "weight_share": 1.0},
    "bf16 gradients": {
        **{"hook": LowPrecisionReduction(), "weights": None, "gradient_share": 0.5, "weight_share": 1.0},
        "options": ["--send-gradients", "bf16"],
    },
    "int8 gradients": {
        **{"hook": QuantizedReduction(), "weights": None, "gradient_share": INT8, "weight_share": 1.0},
        "options": ["--send-gradients", "int8"],
    },
    "int8 gradients and weights": {
        "hook": QuantizedReduction(),
        "weights": QuantizedAllGather(),
        **{"gradient_share": INT8, "weight_share": INT8},
        "options": ["--send-gradients", "int8", "--send-weights", "int8"],
    },
}
COLUMNS = {
    "setting": "setting",
    "sent_mb": "sent a step, MB",
    "formula_mb": "formula",
    "step_ms": "step, ms",
    "val_loss": "validation loss of the example, nats",
}


def measure(setting: dict[str, Any], options: argparse.Namespace) -> dict[str, float]:
    torch.manual_seed(0)
    policy = CommPolicy(quantized_all_gather=setting["weights"])
    model = shard_model(GPT(options), strategy=options.strategy, comm_policy=policy)
    if setting["hook"] is not None:
        register_comm_hook(model, None, setting["hook"])
    trainer = Trainer(model, options)
    indices = iter(range(options.warmup + options.steps))

    def step() -> None:
        trainer.forward_backward(trainer.batch(next(indices)))
        trainer.update()

    for _ in range(options.warmup):
        step()
    sent, step_ms = sent_and_ms(step, options)
    return {"sent_mb": sent, "step_ms": step_ms}


def formula(setting: dict[str, Any], options: argparse.Namespace) -> float:
    with torch.device("meta"):
        model = GPT(options)
    whole = sum(p.numel() * 4 for p in model.parameters()) / 1e6
    blocks = sum(p.numel() * 4 for block in model.blocks for p in block.parameters()) / 1e6
    all_gathers = whole if options.strategy != "zero3" else whole + blocks
    share = (options.processes - 1) / options.processes
    return (all_gathers * setting["weight_share"] + whole * setting["gradient_share"]) * share


def work(options: argparse.Namespace) -> list[dict[str, Any]]:
    return [
        {"setting": name, "formula_mb": formula(setting, options), **measure(setting, options)}
        for name, setting in SETTINGS.items()
    ]


def validation_loss(arguments: list[str], options: argparse.Namespace) -> float:
    """Of the example, after it has trained with ``arguments``."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
        command += ["--master-port", str(get_free_port()), str(EXAMPLE), "--out", folder]
        command += ["--steps", str(options.example_steps), "--eval-every", str(options.example_steps)]
        subprocess.run([*command, *arguments], check=True, capture_output=True)
        return json.loads(Path(folder, "metrics.json").read_text())["val_loss"][-1]


def main() -> None:
    parser = gpt_parser(__doc__, context=128, batch=2, steps=10, warmup=2, example_steps=600)
    parser.add_argument("--strategy", choices=["zero2", "zero3"], default="zero2")
    options = parser.parse_args()
    rows = launch(work, options)[0]
    if options.example_steps:
        for row in rows:
            row["val_loss"] = validation_loss(SETTINGS[row["setting"]].get("options", []), options)
        another = {"setting": "exact, seed 1", "val_loss": validation_loss(["--seed", "1"], options)}
        rows.insert(1, another)
    print(f"{options.processes} processes (gloo), {options.strategy}, float32; medians of {options.steps}")
    print_table(rows, COLUMNS)
    write_json(options.json, "compression", vars(options), rows)


if __name__ == "__main__":
    main()
