"""What an example does before it trains: read the command line, choose a device, join the other processes.

Every rank reads the same command line and refuses for the same reason, before any of them has begun to wait
for another; one of them says it.
"""

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from corpus import Share
from torch.distributed.rendezvous import rendezvous

SPEECH_LIMIT = timedelta(seconds=60)


# --- the command line -----------------------------------------------------------------------------


class Parser(argparse.ArgumentParser):
    """A command line whose help and errors appear once, and not once a rank."""

    def __init__(self, description: str):
        super().__init__(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)

    def print_help(self, file: Any = None) -> None:
        say_once(lambda: super(Parser, self).print_help(file))

    def error(self, message: str) -> None:
        def say() -> None:
            self.print_usage(sys.stderr)
            print(f"{self.prog}: error: {message}", file=sys.stderr, flush=True)

        say_once(say)
        sys.exit(2)

    @contextlib.contextmanager
    def refusing(self) -> Iterator[None]:
        """Inside, a ValueError is an error of the command line."""
        try:
            yield
        except ValueError as refusal:
            self.error(str(refusal))


def say_once(say: Callable[[], None]) -> None:
    """Call it on the rank that is first to come here, and let others wait for that.

    Not on rank 0, as it may be another machine that lacks a GPU. They wait since torchrun ends all processes
    as soon as one has exited.
    """
    if not dist.is_torchelastic_launched():
        say()
        return
    store, *_ = next(rendezvous("env://", timeout=SPEECH_LIMIT))
    if store.add("ranks with something to say", 1) == 1:
        say()
        store.set("said", "")
    else:
        with contextlib.suppress(dist.DistError):  # whoever has said it and is gone may have been the store
            store.wait(["said"], SPEECH_LIMIT)


def world_size() -> int:
    """How many processes there are; torchrun sets it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def check_above_0(settings: argparse.Namespace, *names: str) -> None:
    """Refuse numbers that are not positive; one that may be left out may be None."""
    for name in names:
        value = getattr(settings, name)
        if value is not None and value <= 0:
            raise ValueError(f"--{name.replace('_', '-')} must be above 0")


def check_sizes(settings: argparse.Namespace, shares: int) -> None:
    """Refuse sizes that are not positive or do not divide; a batch is read in so many equal `shares`."""
    check_above_0(settings, "layers", "width", "heads", "context", "batch", "steps", "lr")
    if settings.width % settings.heads:
        raise ValueError(
            f"--width {settings.width} does not divide into --heads {settings.heads} equal parts"
        )
    if settings.batch % shares:
        raise ValueError(
            f"--batch {settings.batch} does not divide into {shares} equal parts. It counts the windows of "
            f"all processes and microbatches together, and each takes an equal share: use a multiple of "
            f"{shares}"
        )


def check_tensor_parallel_sizes(settings: argparse.Namespace) -> None:
    """Refuse sizes that do not divide over the processes that compute one layer together."""
    for name in ("heads", "context"):
        if getattr(settings, name) % settings.tp:
            raise ValueError(
                f"--{name} {getattr(settings, name)} does not divide into --tp {settings.tp} equal parts"
            )


def check_unchanged(settings: argparse.Namespace, saved: dict[str, Any]) -> None:
    """Refuse to go on with a run that was asked for with other settings."""
    now = {name: getattr(settings, name) for name in saved}
    different = [name for name in saved if saved[name] != now[name]]
    if different:
        was, wanted = (" ".join(f"--{name} {each[name]}" for name in different) for each in (saved, now))
        raise ValueError(
            f"{settings.checkpoint_dir} holds a run with {was}, and this one has {wanted}. It cannot go on "
            f"from there and be either of them: ask for what it began with, or give another "
            f"--checkpoint-dir."
        )


# --- devices --------------------------------------------------------------------------------------


def choose_device(name: str) -> tuple[torch.device, str]:
    """Give each process a GPU of its own, or all of them the CPU; and say which and why."""
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # on this machine; set by torchrun
    gpus = torch.cuda.device_count()
    seen = f"GPUs that torch sees: {gpus}, processes on this machine: {processes}"
    if name == "cuda" and gpus < processes:
        raise ValueError(f"--device cuda: {seen}. Start fewer processes or use --device cpu")
    device = torch.device("cpu")
    if name != "cpu" and gpus >= processes:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    reason = f"chosen by --device auto: {seen}" if name == "auto" else f"as --device {name} says"
    return device, f"{device_name(device)}, {reason}"


def device_name(device: torch.device) -> str:
    """What a person calls it."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def check_dtype(dtype: str, device: torch.device) -> None:
    """Refuse bf16 where the device would emulate it."""
    if dtype == "bf16" and device.type == "cuda":
        with torch.cuda.device(device):
            if not torch.cuda.is_bf16_supported(including_emulation=False):
                raise ValueError(f"--dtype bf16: {device_name(device)} cannot compute in it; use float32")


# --- processes ------------------------------------------------------------------------------------


def start_processes(device: torch.device) -> None:
    """Join the processes that torchrun started, or be the only one."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    # "gloo" alone would serve GPUs too, and a mesh without a device is of the GPU where its group serves one.
    backend = "nccl" if device.type == "cuda" else "cpu:gloo"
    device_id = device if device.type == "cuda" else None
    if "WORLD_SIZE" in os.environ:
        store, rank, size = next(rendezvous("env://"))
        store = dist.PrefixStore(attempt_of_torchrun(), store)
    else:
        # In this process: a world of one needs no address and no port.
        store, rank, size = dist.HashStore(), 0, 1
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, device_id=device_id)


def attempt_of_torchrun() -> str:
    """Name this attempt, for a store that torchrun keeps from one restart to the next.

    The addresses of processes that have died are in it still, and who reads one of them before the new one
    is written fails (pytorch issue 135712). On several machines each counts restarts for itself, and no
    name would be common: there, start torchrun with --rdzv-backend c10d and
    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, which makes it open a new store for each attempt.
    """
    on_one_machine = os.environ.get("GROUP_WORLD_SIZE") == "1"
    return "attempt " + (os.environ["TORCHELASTIC_RESTART_COUNT"] if on_one_machine else "0")


def share_of_rank() -> Share:
    """Each rank reads an equal part of every global batch."""
    return Share(dist.get_rank(), dist.get_world_size())


def mean_over_ranks(value: torch.Tensor) -> float:
    """Average a number over all ranks, and wait for it. By a sum, because gloo has no averaging reduction."""
    total = value.detach().clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def random_states() -> dict[str, torch.Tensor]:
    """Take down torch's random state of this rank, on the CPU and on the GPU it uses."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def set_random_states(states: dict[str, torch.Tensor]) -> None:
    """Put back what `random_states` returned, as far as this run is on the same devices."""
    torch.set_rng_state(states["cpu"])
    if "cuda" in states and torch.cuda.is_initialized():
        torch.cuda.set_rng_state(states["cuda"])
