"""Estimate what training a model needs on each rank, before anything is trained.

MODEL is MODULE:FUNCTION, which is imported from here and called; it returns the model, or the model and a
batch: a tensor, a tuple of arguments or a dict of them. Or MODEL is a Hugging Face language model: its
config.json, a folder that has one, or its name, org/model (needs transformers). No GPU, no process group and
no weights are needed: the model is made on the meta device, in float32.

    python -m shardwise estimate train:build --world 64 --strategy zero3 --mp bf16 --optimizer adamw \\
        --batch 8x4096 --memory 80GB
    python -m shardwise estimate train:build --world 8x8 --json estimate.json --picture estimate.png
    python -m shardwise estimate llama/config.json --world 8 --mp bf16 --batch 1x4096 --memory h100 \\
        --largest-batch --bandwidth 50GB/s

The exit status is 1 if nothing fits in the memory named.
"""

import argparse
import importlib
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardwise.commands import UsageError
from shardwise.dry_run.arguments import known_optimizers, sample_of
from shardwise.planning import estimate
from shardwise.strategies.meshes import STRATEGIES


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``estimate``."""
    parser.add_argument("model", metavar="MODEL", help="MODULE:FUNCTION, a config.json, or org/model")
    parser.add_argument("--world", required=True, help="ranks (64), or hosts and ranks on each (8x8)")
    strategies = ", ".join(STRATEGIES)
    parser.add_argument("--strategy", nargs="+", help=f"{strategies}; default: all that the world allows")
    parser.add_argument("--batch", help="shapes of the inputs on a rank: 8x4096, or 8x3x224x224:bf16,8")
    parser.add_argument("--mp", help="bf16 or fp16: compute in it, reduce in float32")
    parser.add_argument("--offload", help="cpu: keep shards, gradients and optimizer state in host memory")
    parser.add_argument(
        "--optimizer", default="adamw", help=f"{', '.join(known_optimizers())}; default adamw"
    )
    parser.add_argument(
        "--checkpointing",
        choices=("yes", "no", "both", "offload"),
        help="activation checkpointing of each block; offload: with the blocks' inputs in host memory",
    )
    parser.add_argument(
        "--compile", action="store_true", help="blocks will be compiled; the figures ignore it"
    )
    parser.add_argument("--memory", help="memory of a rank, such as 80GB or h100")
    parser.add_argument(
        "--bandwidth", help="bytes that a rank sends in a second, such as 50GB/s; shows step times"
    )
    parser.add_argument(
        "--flops", help="speed of a device, such as 989e12 or h100; default: that of --memory"
    )
    parser.add_argument("--largest-batch", action="store_true", help="find the largest batch that fits")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="default cuda")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--picture", type=Path, help="draw memory over a step, to .png, .pdf or .svg")


def run(arguments: argparse.Namespace) -> int:
    """Estimate and print; 1 if nothing fits."""
    _check_files(arguments)
    is_of_hub = ":" not in arguments.model and ("/" in arguments.model or Path(arguments.model).exists())
    model, batch = (_model_of_config(arguments.model), None) if is_of_hub else _model(arguments.model)
    batch = arguments.batch or batch
    try:
        with _progress() as progress:
            found = estimate(
                model,
                world=arguments.world,
                strategy=arguments.strategy,
                batch=_with_labels(batch) if is_of_hub else batch,
                activation_checkpointing={"yes": True, "no": False, "offload": True}.get(
                    arguments.checkpointing
                ),
                activation_offloading=arguments.checkpointing == "offload",
                compile=arguments.compile,
                mp_policy=arguments.mp,
                offload_policy=arguments.offload,
                optimizer=arguments.optimizer,
                memory=arguments.memory,
                bandwidth=arguments.bandwidth,
                flops=_number(arguments.flops),
                largest_batch=arguments.largest_batch,
                device=arguments.device,
                progress=progress,
            )
        print(found)
        if arguments.json is not None:
            arguments.json.write_text(found.to_json() + "\n")
        if arguments.picture is not None:
            found.picture(arguments.picture)
    except (ValueError, TypeError, NotImplementedError, OSError) as error:
        raise UsageError(str(error)) from error
    return int(not found.fitting())


def _check_files(arguments: argparse.Namespace) -> None:
    """Refuse files that could not be written: the estimate of a large model takes minutes."""
    for path in filter(None, (arguments.json, arguments.picture)):
        if not path.absolute().parent.is_dir():
            raise UsageError(f"{path} cannot be written: there is no folder {path.absolute().parent}.")
    if arguments.picture is None:
        return
    try:
        from shardwise.planning.picture import formats
    except ImportError as error:
        raise UsageError(f"--picture: {error}") from error
    if arguments.picture.suffix.removeprefix(".").lower() not in formats():
        raise UsageError(
            f"{arguments.picture} names no format that matplotlib can write: give it a suffix of "
            f"{', '.join(sorted(formats()))}."
        )


def _number(text: str | None) -> float | str | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        return text


@contextmanager
def _progress() -> Iterator[Callable[[int, int, str], None] | None]:
    """A progress bar on stderr, if that is a terminal and tqdm is installed."""
    try:
        from tqdm import tqdm
    except ImportError:
        yield None
        return
    with tqdm(disable=None, delay=1, leave=False, bar_format="{l_bar}{bar}| {n}/{total} [{elapsed}]") as bar:

        def show(done: int, total: int, name: str) -> None:
            bar.n, bar.total = done, total
            bar.set_description(name)

        yield show


def _model_of_config(path: str) -> nn.Module:
    """The model that a Hugging Face config describes."""
    try:
        transformers = importlib.import_module("transformers")
        config = transformers.AutoConfig.from_pretrained(path)
        config.use_cache = False  # of generation
        names = [name for name in config.architectures or () if hasattr(transformers, name)]
        with torch.device("meta"):
            if names:
                return getattr(transformers, names[0])(config).float()
            return transformers.AutoModelForCausalLM.from_config(config).float()
    except Exception as error:
        raise UsageError(
            f"no model could be made of '{path}' ({type(error).__name__}: {error}). Pass MODULE:FUNCTION; "
            "or, with transformers installed, a config.json or a name that AutoConfig.from_pretrained knows."
        ) from error


def _with_labels(batch: Any) -> Any:
    """Tokens of a batch given as one shape, which are their own labels."""
    tensors = [] if batch is None else list(sample_of("estimate: batch", batch))
    return {"input_ids": tensors[0], "labels": tensors[0]} if len(tensors) == 1 else batch


def _model(path: str) -> tuple[nn.Module, Any]:
    """The model of ``module:function``, and its batch or None."""
    module_name, _, name = path.partition(":")
    if not (module_name and name):
        raise UsageError(f"'{path}' names no function. Pass MODULE:FUNCTION, such as train:build.")
    if module_name.endswith(".py"):
        module_name = module_name.removesuffix(".py").removeprefix("./").replace("/", ".")
        raise UsageError(f"'{path}' names a file. Pass the name of its module: {module_name}:{name}.")
    if os.getcwd() not in sys.path:  # as for a script that lies here
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise UsageError(
            f"importing '{module_name}' from {os.getcwd()} raised {type(error).__name__}: {error}. Put what "
            "trains under if __name__ == '__main__':, so that the module can be imported for its function."
        ) from error
    function = getattr(module, name, None)
    if function is None:
        raise UsageError(f"the module '{module_name}' has no function '{name}'.")
    try:
        with torch.device("meta"):
            made = function()
    except Exception as error:
        raise UsageError(
            f"{path}() raised {type(error).__name__}: {error}. It is called without arguments, on the meta "
            "device."
        ) from error
    model, batch = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"{path}() returned a {type(model).__name__}; return a model (an nn.Module), or a model and a "
            "batch."
        )
    return model, batch
