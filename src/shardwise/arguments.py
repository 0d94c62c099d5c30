"""Arguments of public calls: checked, with one text for all that are of a wrong type or out of range."""

import math
from typing import Any

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
    caller: str, name: str, value: Any, wanted: str, *, above: float, kinds: tuple[type, ...] = (int,)
) -> None:
    """Refuse ``value`` unless it is a finite number of ``kinds`` that is larger than ``above``."""
    check_type(caller, name, value, wanted, *kinds)
    if not above < value < math.inf:
        raise ValueError(f"{caller}: {name} is {value}; pass {wanted}.")


def check_flags(caller: str, **flags: object) -> None:
    """Refuse flags that are neither True nor False."""
    for name, value in flags.items():
        check_type(caller, name, value, "True or False", bool)


def check_module(caller: str, model: object) -> None:
    """Refuse ``model`` unless it is a module."""
    check_type(caller, "model", model, "an nn.Module", nn.Module)
