"""The text that the example learns from: the Python standard library's own source files.

Every machine that can run the example has them, so nothing is downloaded. The model reads bytes,
so there is no tokenizer either: the text is one long tensor of numbers from 0 to 255.

What this file does not know: models, processes, devices.
"""

import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch

# Not prose by a programmer: other people's packages, tests, and tables written by scripts.
SKIPPED_FOLDERS = {
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "idle_test",
    "encodings",
    "pydoc_data",
}
MAX_BYTES = 16_000_000
VALIDATION_EVERY = 10  # each tenth file is kept from training


@dataclass(frozen=True)
class Corpus:
    """Two texts with no file in common, each a 1-D uint8 tensor."""

    train: torch.Tensor
    validation: torch.Tensor
    num_files: int


def read_corpus(root: Path | None = None) -> Corpus:
    """Read the source files below `root` (default: the standard library) and split them by file.

    The order is sorted by path, so every rank and every run on one machine sees the same text.
    Reading stops before `MAX_BYTES` would be passed.
    """
    root = root or Path(sysconfig.get_path("stdlib"))
    parts: dict[str, list[bytes]] = {"train": [], "validation": []}
    num_files = num_bytes = 0
    for path in sorted(root.rglob("*.py")):
        if SKIPPED_FOLDERS.intersection(path.relative_to(root).parts):
            continue
        source = path.read_bytes()
        num_bytes += len(source)
        if num_bytes > MAX_BYTES:
            break
        num_files += 1
        parts["validation" if num_files % VALIDATION_EVERY == 0 else "train"].append(source)
    if num_files < VALIDATION_EVERY:
        raise FileNotFoundError(
            f"{root}: found {num_files} Python source files, expected at least {VALIDATION_EVERY}. "
            f"The example trains on the standard library's sources; this Python seems to ship "
            f"without them."
        )
    # bytearray, because torch warns about tensors over memory that cannot be written.
    train, validation = (
        torch.frombuffer(bytearray(b"".join(files)), dtype=torch.uint8) for files in parts.values()
    )
    return Corpus(train, validation, num_files)


def draw_offsets(text: torch.Tensor, context: int, batch: int, generator: torch.Generator):
    """Draw where the `batch` windows of one training step begin.

    Every rank draws the whole global batch from its own equally seeded generator and then takes
    its rows. So step 17 reads the same bytes on one process as on eight.
    """
    return torch.randint(len(text) - context, (batch,), generator=generator)


def evenly_spaced_offsets(text: torch.Tensor, context: int, count: int):
    """Begin `count` windows at equal distances, from the first byte to the last."""
    return torch.linspace(0, len(text) - context - 1, count, dtype=torch.float64).long()


def windows_at(text: torch.Tensor, offsets: torch.Tensor, context: int) -> torch.Tensor:
    """Cut out the windows, shape (offsets, context + 1): inputs and targets overlap but for one."""
    return text.unfold(0, context + 1, 1)[offsets].long()


def unigram_cross_entropy(train: torch.Tensor, targets: torch.Tensor) -> float:
    """Nats per byte of the best guess that looks at no context at all.

    It predicts each byte of `targets` with that byte's frequency in `train`. A model has learned
    something about the order of bytes only if its loss on the same `targets` is lower.
    """
    counts = torch.bincount(train, minlength=256).double() + 1  # +1: an unseen byte costs, not inf
    return -(counts / counts.sum()).log()[targets.long()].mean().item()
