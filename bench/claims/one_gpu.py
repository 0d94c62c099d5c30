"""Iterations on one GPU beside FSDP2 and Megatron-FSDP, and what reducing gradients in parts takes.

Claim: no library takes less time for its memory. How: the GPTs of gpu_parts/speed.py on torch's fake process
group of 8 ranks; forward, backward and a foreach AdamW, in turns. `mixed`: parameters and optimizer in
float32, computed in bfloat16, summed in float32. Megatron-FSDP (pip install megatron-fsdp) is left out where
it is not installed, and with bf16; its models are built in bfloat16, and it keeps float32 copies of them.

Refuted by: a ratio to FSDP2 above that of another library, with no less memory. Not shown: networks; losses,
since the fake group sends nothing.

    PYTHONPATH=src python bench/claims/one_gpu.py --models "4 x 4096, 8 tokens" "GPT of 1 B"

Needs a CUDA device; without one it exits with 2.
"""

import argparse
import gc
import importlib.util
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # what the benchmarks share

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
    print_table,
    ratios_to_peer,
    shard,
    write_json,
)
from gpt import GPT, batch_of
from gpu_parts.speed import MEASURED, MODELS, WORLD, timed_act
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardwise import CommPolicy

PARTS = {OURS: None, f"{OURS}, in quarters": 0, f"{OURS}, whole": 1 << 50}
MEGATRON, MEGATRON_EXPERIMENTAL = "megatron-fsdp", "megatron-fsdp, experimental"
COLUMNS = {
    "variant": "variant",
    "fwd_bwd_ms": "forward + backward, ms",
    "fwd_bwd_to_peer": "ratio to peer",
    "iteration_ms": "iteration, ms",
    "iteration_to_peer": "ratio to peer",
    "peak_mb": "peak, MB",
}

Sharded = tuple[nn.Module, torch.optim.Optimizer]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)


def sharded(variant: str, precision: str, model: Any, mesh: DeviceMesh) -> Sharded:
    """As torch's FSDP2 or shardwise does it, or unsharded in bfloat16."""
    library, settings = variant.partition(",")[0], {}
    if precision == "bf16" or library == PLAIN:
        model.to(torch.bfloat16)
    else:
        policy = find_library(library).MixedPrecisionPolicy
        settings["mp_policy"] = policy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if variant in PARTS:
        settings["comm_policy"] = CommPolicy(part_bytes=PARTS[variant])
    shard(library, model, model.blocks, mesh=mesh, **settings)
    return model, adamw(model)


def by_megatron(model: Any, _: DeviceMesh) -> Sharded:
    from megatron_fsdp import fully_shard_model, fully_shard_optimizer

    mesh = init_device_mesh("cuda", (WORLD, 1), mesh_dim_names=("dp", "tp"))
    whole = fully_shard_model(
        model.to(torch.bfloat16),
        device_mesh=mesh,
        dp_shard_dim="dp",
        tp_dim="tp",
        fsdp_unit_modules=[type(model.blocks[0])],
        mixed_precision_policy=_in_float32(),
    )
    optimizer = adamw(whole)
    return whole, fully_shard_optimizer(optimizer) or optimizer


def by_megatron_experimental(model: Any, mesh: DeviceMesh) -> Sharded:
    from megatron_fsdp import experimental
    from megatron_fsdp.experimental.placement import Flat, Placements

    model.to(torch.bfloat16)
    for module in (*model.blocks, model):
        placements = Placements(["dp"], [Flat()], [Flat()], [Flat()])
        experimental.fully_shard(module, mesh, placements, mixed_precision_policy=_in_float32())
    optimizer = adamw(model)
    experimental.fully_shard_optimizer(optimizer)
    return model, optimizer


def _in_float32() -> Any:
    from megatron_fsdp import MixedPrecisionPolicy

    full = torch.float32
    return MixedPrecisionPolicy(main_params_dtype=full, main_grads_dtype=full, grad_comm_dtype=full)


class Run:
    """One variant's model and optimizer, and the most memory of its third iteration."""

    def __init__(self, make: Callable[[Any, DeviceMesh], Sharded], name: str, mesh: DeviceMesh) -> None:
        gc.collect()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        torch.manual_seed(0)
        sizes = argparse.Namespace(**MODELS[name])
        with torch.device("cuda"):
            model = GPT(sizes)
        self._model, self._optimizer = make(model, mesh)
        self._batch = [tensor.cuda() for tensor in batch_of(0, sizes)]
        for index in range(3):
            if index == 2:
                torch.cuda.reset_peak_memory_stats()
            self.iteration(0)
        self.peak_mb = round((torch.cuda.max_memory_allocated() - before) / 1e6)

    def iteration(self, _: int) -> Sample:
        """Time it on the device: forward and backward, and all of it."""
        fwd_bwd_ms = timed_act(self._forward_and_backward, "cuda")["step_ms"]
        update_ms = timed_act(self._update, "cuda")["step_ms"]
        return {"fwd_bwd_ms": fwd_bwd_ms, "iteration_ms": fwd_bwd_ms + update_ms}

    def _forward_and_backward(self) -> None:
        loss: Tensor = self._model(*self._batch)
        loss.backward()

    def _update(self) -> None:
        self._optimizer.step()
        self._optimizer.zero_grad()


def measure(name: str, precision: str, steps: int) -> list[dict[str, Any]]:
    makers: dict[str, Any] = {v: partial(sharded, v, precision) for v in (PLAIN, PEER, *PARTS)}
    if precision == "mixed" and importlib.util.find_spec("megatron_fsdp"):
        makers |= {MEGATRON: by_megatron, MEGATRON_EXPERIMENTAL: by_megatron_experimental}
    with fake_world(WORLD, "cuda", "dp") as mesh:
        runs = {variant: Run(make, name, mesh) for variant, make in makers.items()}
        times = alternate({v: run.iteration for v, run in runs.items()}, warmup=3, steps=steps)
    rows = [{"variant": variant, "peak_mb": run.peak_mb} for variant, run in runs.items()]
    for measured in ("fwd_bwd", "iteration"):
        of_each = {v: each[f"{measured}_ms"] for v, each in times.items()}
        ratios = ratios_to_peer(of_each)
        for row in rows:
            row[f"{measured}_ms"] = vars(Spread.of(of_each[row["variant"]]))
            row[f"{measured}_to_peer"] = vars(ratios[row["variant"]])
    return rows


def main() -> None:
    parser = command_line(__doc__, steps=12)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MEASURED))
    parser.add_argument("--precisions", nargs="+", choices=("bf16", "mixed"), default=["bf16", "mixed"])
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("There is no CUDA device.")
        sys.exit(2)
    found = []
    for name in options.models:
        for precision in options.precisions:
            rows = measure(name, precision, options.steps)
            print(f"\n{name}, {precision}")
            print_table(rows, COLUMNS)
            found += [{"model": name, "precision": precision, **row} for row in rows]
    write_json(options.json, "one_gpu", vars(options), found)


if __name__ == "__main__":
    main()
