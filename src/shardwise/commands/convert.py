"""Convert a checkpoint to safetensors files, or safetensors files to a checkpoint.

    python -m shardwise convert run/step-1000 out --dtype bf16
    python -m shardwise convert zero/global_step1000 out
    python -m shardwise convert zero/global_step1000 run/step-1000 --optimizer
    python -m shardwise convert out run/step-0

A checkpoint is a folder with a file .metadata, from save_checkpoint or torch.distributed.checkpoint (FSDP1,
FSDP2, torchtitan and others), or a folder of DeepSpeed's ZeRO, which is read without DeepSpeed: trained
weights in float32, as its optimizer has them. The model is written in the form that from_pretrained and
load_full_state_dict read; the optimizer's state is left out. With --optimizer, a folder of ZeRO becomes a
checkpoint with that state, for load_checkpoint(path, model, optimizer), which reads the others directly.

Any other source is a folder, an index or a file of safetensors, and becomes a checkpoint for
load_checkpoint(path, model). One process converts, and holds one file at a time (--shard-size).
"""

import argparse
import os
from pathlib import Path

import torch

from shardwise.checkpoint import folders
from shardwise.checkpoint.convert import (
    MODEL_KEYS,
    from_safetensors,
    to_safetensors,
    zero_to_checkpoint,
    zero_to_safetensors,
)
from shardwise.checkpoint.zero_files import zero_folder
from shardwise.commands import UsageError
from shardwise.dry_run.arguments import memory_in_bytes
from shardwise.layout.fqns import listed

SHARD_SIZE = "1GB"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``convert``."""
    parser.add_argument("source", type=Path, metavar="SOURCE")
    parser.add_argument("target", type=Path, metavar="TARGET", help="the folder to write")
    parser.add_argument(
        "--key", help=f"where the model is in the checkpoint (default: the first of {', '.join(MODEL_KEYS)})"
    )
    parser.add_argument("--dtype", choices=DTYPES, help="convert floating-point tensors to it")
    parser.add_argument("--shard-size", help=f"size of a safetensors file (default {SHARD_SIZE})")
    parser.add_argument(
        "--optimizer", action="store_true", help="from ZeRO: a checkpoint with the optimizer's state as well"
    )
    parser.add_argument("--no-verify", action="store_true", help="do not compare digests before reading")


def run(arguments: argparse.Namespace) -> int:
    """Convert; what was left out is printed."""
    try:
        left_out = _convert(arguments)
    except (OSError, ValueError, RuntimeError, TypeError, ImportError, LookupError) as error:
        text = str(error).replace("convert: memory", "--shard-size").removeprefix("convert: ")
        text = text.replace("verify=False", "--no-verify")
        raise UsageError(text) from error
    tail = f" Left out, as not tensors of the model: {listed(left_out)}." if left_out else ""
    print(f"{arguments.target} is written.{tail}")
    return 0


def _convert(arguments: argparse.Namespace) -> list[str]:
    """Convert; returns what was left out."""
    source, target = arguments.source, arguments.target
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise UsageError("one process converts: run it without torchrun.")
    if source.resolve() == target.resolve():
        raise UsageError(f"{target} is the source; name another folder to write.")
    if arguments.optimizer:
        _convert_with_optimizer(arguments)
        return []
    dtype = DTYPES.get(arguments.dtype)
    num_bytes = memory_in_bytes("convert", arguments.shard_size or SHARD_SIZE)
    if folders.found(source) is not None:
        verify = not arguments.no_verify
        return to_safetensors(
            source, target, key=arguments.key, dtype=dtype, max_shard_bytes=num_bytes, verify=verify
        )
    if source.is_dir() and (zero := zero_folder(source)) is not None:
        _refuse_all_but(arguments, "a folder of ZeRO", "--dtype", "--shard-size", "--no-verify")
        verify = not arguments.no_verify
        zero_to_safetensors(zero, target, dtype=dtype, max_shard_bytes=num_bytes, verify=verify)
        return []
    if not (source.is_file() or any(source.glob("*.safetensors"))):
        why = folders.why_not_a_checkpoint(source)
        raise UsageError(f"{source} holds no safetensors and is not a checkpoint: {why}.")
    _refuse_all_but(arguments, "safetensors, which become a checkpoint")
    from_safetensors(source, target)
    return []


def _convert_with_optimizer(arguments: argparse.Namespace) -> None:
    source = arguments.source
    zero = zero_folder(source) if source.is_dir() else None
    if zero is None:
        raise UsageError(
            f"--optimizer is for a folder of DeepSpeed's ZeRO, and {source} is none. load_checkpoint(path, "
            "model, optimizer) reads the others as they are."
        )
    _refuse_all_but(arguments, "--optimizer, which writes a checkpoint", "--no-verify")
    zero_to_checkpoint(zero, arguments.target, verify=not arguments.no_verify)


def _refuse_all_but(arguments: argparse.Namespace, what: str, *allowed: str) -> None:
    """Refuse the options that have no meaning for ``what``."""
    options = ("--key", "--dtype", "--shard-size", "--no-verify")
    given = [name for name in options if vars(arguments)[name[2:].replace("-", "_")] not in (None, False)]
    if refused := [name for name in given if name not in allowed]:
        hint = " load_checkpoint can convert dtypes (convert_dtype=True)." if "--dtype" in refused else ""
        raise UsageError(f"{listed(refused)} cannot be used with {what}.{hint}")
