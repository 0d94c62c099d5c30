"""Arguments of public calls: checked, with one text for all that are of a wrong type or out of range."""

import sys
from typing import Any

import torch
from torch import nn


def describe(value: object) -> str:
    """What was passed, for messages: numbers and texts as they are; of anything else, the kind."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    kind = type(value).__name__
    kind = f"{'an' if kind[0] in 'aeiou' else 'a'} {kind}"
    if isinstance(value, (bool, int, float, str)):
        return f"{value!r:.80}, {kind}"
    return "None" if value is None else kind


def check_type(caller: str, name: str, value: object, wanted: str, *kinds: Any) -> None:
    """Refuse ``value``, the argument ``name``, unless it is of ``kinds``. True and False are no numbers."""
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        raise TypeError(f"{caller}: {name} is {describe(value)}; pass {wanted}.")


def check_number(
    caller: str,
    name: str,
    value: Any,
    wanted: str,
    *,
    above: float,
    kinds: tuple[type, ...] = (int,),
    most: float = sys.float_info.max,
) -> None:
    """Refuse ``value`` unless it is a number of ``kinds``, larger than ``above`` and at most ``most``."""
    check_type(caller, name, value, wanted, *kinds)
    if not above < value <= most:
        raise ValueError(f"{caller}: {name} is {value}; pass {wanted}.")


def check_flags(caller: str, **flags: object) -> None:
    """Refuse flags that are neither True nor False."""
    for name, value in flags.items():
        check_type(caller, name, value, "True or False", bool)


def check_module(caller: str, model: object) -> None:
    """Refuse ``model`` unless it is a module."""
    check_type(caller, "model", model, "an nn.Module", nn.Module)


def check_rank(caller: str, name: str, rank: object) -> None:
    """Refuse anything but a global rank or None."""
    check_type(caller, name, rank, "a global rank, or None", int, type(None))


def check_bytes(caller: str, name: str, num_bytes: object) -> None:
    """Refuse what is no number of bytes."""
    check_number(caller, name, num_bytes, "a number of bytes above 0", above=0)


def check_floating(caller: str, dtype: object) -> None:
    """Refuse a dtype that is not of floating-point numbers."""
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ValueError(f"{caller}: dtype is {dtype!r}; pass a floating-point dtype, or None.")
