"""What calls that save and load have in common."""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from shardwise.arguments import check_flags, check_module, check_type
from shardwise.checkpoint import folders

OptimizerOrMany = torch.optim.Optimizer | Iterable[torch.optim.Optimizer]


@contextmanager
def in_plain_mode() -> Iterator[None]:
    """Neither inference mode, where versions of tensors cannot be counted, nor gradients."""
    with torch.inference_mode(False), torch.no_grad():
        yield


def check_call(caller: str, path: Any, model: Any, flags: dict[str, Any]) -> Path:
    """The folder that a call is about; what it was given is of the right kinds.

    Raises:
        TypeError: something is not.
    """
    if path is None and caller == "load_checkpoint":
        raise TypeError(
            "load_checkpoint: path is None. That is what latest_checkpoint returns where it finds no "
            "checkpoint: the folder does not exist on this host, or has none yet. Ask on one rank, tell the "
            "others what it found, and load only if that is a path; and have checkpoints on a file system "
            "that all hosts share."
        )
    check_type(caller, "path", path, "the folder of a checkpoint, as a str or a Path", str, os.PathLike)
    check_module(caller, model)
    check_flags(caller, **flags)
    return folders.absolute(path)


def latest_checkpoint(directory: str | os.PathLike[str]) -> Path | None:
    """The newest complete checkpoint in `directory`; None if it has none, or does not exist.

    Newest is the highest number in a name: step-100 after step-90, whatever the dates of files. Of names with
    several numbers these count from the left: epoch-2-step-100 after epoch-1-step-900. A number may have
    decimals: epoch-1.5 after epoch-1.25. With more than one point, as in a date, the parts are numbers each.
    Names without a number are not considered; if there are no others, a warning says so. What an unfinished
    save has left behind is skipped. Wait for a save with ``keep`` that is still running: it removes older
    checkpoints.

    Not collective: each rank looks for itself. On a file system that shows hosts old states, they may find
    different ones. load_checkpoint refuses different paths, but a host that finds none does not call it, and
    the others wait. There, ask on one rank and send the answer to the others
    (``torch.distributed.broadcast_object_list``).

    Args:
        directory: where the folders `step-10`, `step-20` and so on are.

    Returns:
        A path for :func:`load_checkpoint`. After a crash in the middle of replacing a checkpoint by one of
        the same name this is the older one, under the name at which it was set aside.

    Raises:
        ValueError: `directory` is itself a checkpoint.
        PermissionError: this process may not read it.

    Example::

        path = latest_checkpoint("run")
        first_step = 0 if path is None else load_checkpoint(path, model, optimizer).shared["step"]
    """
    return folders.newest(folders.absolute(directory))
