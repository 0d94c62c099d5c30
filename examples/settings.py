"""The command line of train_gpt.py: what can be asked for, and what is refused.

Every rank reads the same command line and refuses for the same reason, before any of them has
begun to wait for another.
"""

import argparse
import os
from pathlib import Path

import torch

STRATEGIES = ["ddp", "zero1", "zero2", "zero3", "hybrid", "hybrid_zero2"]


def parse_settings(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read and check the command line; `mesh` becomes a tuple and `device` a torch.device."""
    parser = argparse.ArgumentParser(
        description="Train a byte-level GPT, sharded over all processes, on Python's own sources.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--layers", type=int, default=4, help="number of blocks")
    add("--width", type=int, default=128, help="features per position")
    add("--heads", type=int, default=4, help="attention heads; must divide --width")
    add("--context", type=int, default=128, help="bytes the model looks back at most")
    add("--batch", type=int, default=16, help="windows per step, all processes together")
    add("--steps", type=int, default=600, help="optimizer steps")
    add("--lr", type=float, default=3e-3, help="highest learning rate")
    add("--optimizer", choices=["adamw", "muon"], default="adamw", help="muon: for matrices of blocks")
    add("--seed", type=int, default=0, help="fixes the weights, the batches and the sample")
    add("--mesh", default="auto", help="mesh shape, for now one number: of all processes")
    add("--dtype", choices=["float32", "bf16"], default="float32", help="bf16 means autocast")
    add("--compile", choices=["block", "model"], default=None, help="a graph for each, by torch.compile")
    add("--device", choices=["auto", "cpu", "cuda"], default="auto", help="auto prefers cuda")
    add("--eval-every", type=int, default=100, help="steps between two validations")
    add("--out", type=Path, default=Path("runs/gpt"), help="folder for the curve and the metrics")
    add("--checkpoint-dir", type=Path, default=None, help="folder to save checkpoints to; none without")
    add("--checkpoint-every", type=int, default=100, help="steps between two checkpoints")
    add("--resume", action="store_true", help="go on from the newest checkpoint, if there is one")
    add(
        "--trace",
        type=Path,
        default=None,
        help="folder for a trace of a step: a file a rank, and a page of all",
    )
    add("--strategy", choices=STRATEGIES, default="zero3", help="what each process holds and sends")
    add("--send-gradients", choices=["as-is", "bf16", "int8"], default="as-is", help="on the wire")
    add("--send-weights", choices=["as-is", "int8"], default="as-is", help="on the wire")
    add("--peer", choices=["shardwise", "torch"], default="shardwise", help="whose fully_shard")
    settings = parser.parse_args(arguments)
    try:
        world_size = int(os.environ.get("WORLD_SIZE", "1"))  # set by torchrun
        check_sizes(settings, world_size)
        settings.mesh = parse_mesh(settings.mesh, world_size)
        settings.device = choose_device(settings.device)
        check_dtype(settings.dtype, settings.device)
        check_peer(settings)
        check_checkpoints(settings)
    except ValueError as refusal:
        parser.error(str(refusal))
    return settings


def check_sizes(settings: argparse.Namespace, world_size: int) -> None:
    """Refuse sizes that are not positive or do not divide."""
    for name in ("layers", "width", "heads", "context", "batch", "steps", "lr", "eval_every"):
        if getattr(settings, name) <= 0:
            raise ValueError(f"--{name.replace('_', '-')} must be above 0")
    if settings.width % settings.heads:
        raise ValueError(
            f"--width {settings.width} does not divide into --heads {settings.heads} equal parts"
        )
    if settings.batch % world_size:
        raise ValueError(
            f"--batch {settings.batch} does not divide over {world_size} processes. It counts the "
            f"windows of all processes together, and each takes an equal share: use a multiple "
            f"of {world_size}"
        )


def check_tensor_parallel_sizes(settings: argparse.Namespace) -> None:
    """Refuse sizes that do not divide over the processes that compute one layer together."""
    for name in ("heads", "context"):
        if getattr(settings, name) % settings.tp:
            raise ValueError(
                f"--{name} {getattr(settings, name)} does not divide into --tp {settings.tp} equal parts"
            )


def parse_mesh(text: str, world_size: int) -> tuple[int]:
    """Turn '2' into (2,). It must hold all processes; 'auto' does."""
    if text == "auto":
        return (world_size,)
    if not text.isdecimal():
        raise ValueError(f"--mesh {text}: expected one number, such as --mesh {world_size}")
    if int(text) != world_size:
        raise ValueError(
            f"--mesh {text}: the mesh has {text} places and there are {world_size} processes. "
            f"Start it as: torchrun --nproc-per-node {text} examples/train_gpt.py --mesh {text}"
        )
    return (world_size,)


def choose_device(name: str) -> torch.device:
    """Give each process a GPU of its own, or all of them the CPU."""
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # on this machine; set by torchrun
    gpus = torch.cuda.device_count()
    if name == "cpu" or (name == "auto" and gpus < processes):
        return torch.device("cpu")
    if gpus < processes:
        raise ValueError(
            f"--device cuda: {processes} processes on this machine, but torch sees {gpus} GPUs. "
            f"Start fewer processes or use --device cpu"
        )
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


def check_dtype(dtype: str, device: torch.device) -> None:
    """Refuse bf16 where autocast cannot compute in it."""
    if dtype != "bf16":
        return
    if device.type == "cuda":
        supported = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        supported = torch.amp.is_autocast_available(device.type)
    if not supported:
        raise ValueError(f"--dtype bf16: torch cannot autocast to it on {device}; use float32")


def check_peer(settings: argparse.Namespace) -> None:
    """Refuse what torch's fully_shard, called on each block, cannot do."""
    chosen = (settings.strategy, settings.send_gradients, settings.send_weights)
    if settings.peer == "torch" and settings.trace is not None:
        raise ValueError("--trace records with shardwise, and --peer torch leaves it out; choose one of them")
    if settings.peer == "torch" and settings.optimizer == "muon":
        raise ValueError("--optimizer muon is shardwise's, and --peer torch leaves it out; choose one")
    if settings.peer == "torch" and chosen != ("zero3", "as-is", "as-is"):
        raise ValueError("--peer torch goes with strategy zero3, and sends everything as it is")


def check_checkpoints(settings: argparse.Namespace) -> None:
    """Refuse checkpoints that cannot be written or found."""
    if settings.checkpoint_every <= 0:
        raise ValueError("--checkpoint-every must be above 0")
    if settings.resume and settings.checkpoint_dir is None:
        raise ValueError("--resume needs --checkpoint-dir: the folder to go on from, and to save to")
    if settings.peer == "torch" and settings.checkpoint_dir is not None:
        raise ValueError(
            "--checkpoint-dir saves with shardwise, and --peer torch leaves it out; choose one of them"
        )
