"""The text that the examples learn from, the Python standard library's own source files, and batches of it.

Every machine that can run the examples has them, so nothing is downloaded. The model reads bytes, so there is
no tokenizer: the text is one long tensor of numbers from 0 to 255, and a row of a batch is a window of it.

What this file does not know: models, process groups.
"""

import argparse
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

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
            f"The examples train on the standard library's sources; this Python seems to ship "
            f"without them."
        )
    # bytearray, because torch warns about tensors over memory that cannot be written.
    train, validation = (
        torch.frombuffer(bytearray(b"".join(files)), dtype=torch.uint8) for files in parts.values()
    )
    return Corpus(train, validation, num_files)


class Windows(Dataset):
    """A text, cut into windows of `context` + 1 bytes: inputs, and targets one byte later."""

    def __init__(self, text: torch.Tensor, context: int):
        self.text, self.context = text, context

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.context

    def __getitem__(self, index: int) -> torch.Tensor:
        begin = index * self.context
        return self.text[begin : begin + self.context + 1].long()


@dataclass(frozen=True)
class Share:
    """Which part of each global batch a process reads: of `count` equal ones, the one at `index`."""

    index: int = 0
    count: int = 1

    def of(self, batch: torch.Tensor) -> list[int]:
        return batch.chunk(self.count)[self.index].tolist()


@dataclass(frozen=True)
class ShuffledBatches(Sampler[list[int]]):
    """The windows that a process reads in each step: its share of a batch that all of them draw alike.

    Step 17 reads the same windows on one process as on eight, and after a restart as before: they follow from
    the seed and the step alone. Each epoch reads all windows once, except a rest below one batch.
    """

    num_windows: int
    batch: int  # windows of all processes together
    seed: int
    share: Share
    steps: range

    def __len__(self) -> int:
        return len(self.steps)

    def __iter__(self) -> Iterator[list[int]]:
        shuffled = None  # the epoch that `order` is of
        for step in self.steps:
            epoch, index = divmod(step, self.num_windows // self.batch)
            if epoch != shuffled:
                generator = torch.Generator().manual_seed(self.seed + epoch)
                order, shuffled = torch.randperm(self.num_windows, generator=generator), epoch
            yield self.share.of(order[index * self.batch : (index + 1) * self.batch])


def training_loader(
    corpus: Corpus, settings: argparse.Namespace, share: Share, first_step: int = 0
) -> DataLoader:
    """A batch for each step from `first_step` on: windows, (batch / share.count, context + 1) numbers."""
    windows = Windows(corpus.train, settings.context)
    if len(windows) < settings.batch:
        raise ValueError(f"--batch {settings.batch}: the text has only {len(windows)} windows")
    steps = range(first_step, settings.steps)
    return DataLoader(
        windows,
        batch_sampler=ShuffledBatches(len(windows), settings.batch, settings.seed, share, steps),
        num_workers=getattr(settings, "workers", 0),
        pin_memory=settings.device.type == "cuda",
        generator=torch.Generator(),  # without, it draws from torch's own, which a restart does not repeat
    )


def validation_loader(
    corpus: Corpus, settings: argparse.Namespace, share: Share, num_batches: int
) -> tuple[DataLoader, float]:
    """Batches spread evenly over the validation text, and what the byte frequencies alone cost on them."""
    windows = Windows(corpus.validation, settings.context)
    count = num_batches * settings.batch
    spread = torch.linspace(0, len(windows) - 1, count, dtype=torch.float64).long()
    batches = [share.of(batch) for batch in spread.split(settings.batch)]
    targets = torch.stack([windows[index][1:] for index in spread.tolist()])
    return DataLoader(windows, batch_sampler=batches), unigram_cross_entropy(corpus.train, targets)


def unigram_cross_entropy(train: torch.Tensor, targets: torch.Tensor) -> float:
    """Nats per byte of the best guess that looks at no context at all.

    It predicts each byte of `targets` with that byte's frequency in `train`. A model has learned something
    about the order of bytes only if its loss on the same `targets` is lower.
    """
    counts = torch.bincount(train, minlength=256).double() + 1  # +1: an unseen byte costs, not inf
    return -(counts / counts.sum()).log()[targets].mean().item()
