"""Many tensors in one message: a buffer of bytes, in which each begins at a multiple of 16.

Both ends know the forms of the tensors, in the same order:

    forms     (3, 4) of float32 | (5,) of int8
    buffer    48 bytes          | 5 bytes, 11 of padding

Large tensors are cut by rows, so that no message is much longer than the others.
"""

from collections.abc import Iterable, Iterator, Sequence
from math import prod
from typing import TypeVar

import torch
from torch import Tensor

from shardwise.layout.chunks import round_up
from shardwise.layout.slots import ALIGNMENT

T = TypeVar("T")

Form = tuple[Sequence[int], torch.dtype]
"""The shape and dtype of a tensor in a message."""


def num_packed_bytes(forms: Iterable[Form]) -> int:
    """The length of a message."""
    return sum(round_up(prod(shape) * dtype.itemsize, ALIGNMENT) for shape, dtype in forms)


def views_in(message: Tensor, forms: Iterable[Form]) -> list[Tensor]:
    """Views of the tensors in a message, to write before it is sent and read after it is received."""
    found, start = [], 0
    for shape, dtype in forms:
        end = start + prod(shape) * dtype.itemsize
        found.append(message[start:end].view(dtype).view(shape))
        start = round_up(end, ALIGNMENT)
    return found


def in_messages(items: Iterable[tuple[T, int, int]], limit: int) -> Iterator[list[tuple[T, int, int]]]:
    """Cut items, each with its number of rows and the bytes of a row, into messages of ``limit`` bytes, or of
    one row. Items are consumed one by one; those of a message come with their rows [start, end) in it."""
    message: list[tuple[T, int, int]] = []
    left = limit
    for item, num_rows, row_bytes in items:
        start, is_over = 0, False
        while not is_over:
            fitting = left // row_bytes if row_bytes else num_rows
            if fitting < 1 and num_rows and message:
                yield message
                message, left = [], limit
                continue
            end = min(num_rows, start + max(1, fitting))
            message.append((item, start, end))
            left -= round_up((end - start) * row_bytes, ALIGNMENT)
            start, is_over = end, end == num_rows
    if message:
        yield message
