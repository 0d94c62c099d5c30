"""Containers that torch knows how to take apart. Its registry is private (seen on 2.11 to 2.13)."""

from collections.abc import Callable
from typing import Any

from torch.utils import _pytree

tree_leaves: Callable[[Any], list[Any]] = _pytree.tree_leaves
"""All leaves of a nest of containers; dynamo traces it."""

tree_map: Callable[..., Any] = _pytree.tree_map
"""The same nest with a function's results for leaves."""

registered: dict[type, Any] = _pytree.SUPPORTED_NODES
"""The registered classes of containers; see ``children``."""


def children(container: Any) -> list[Any]:
    """What is inside ``container``, whose class is ``registered``."""
    return list(registered[type(container)].flatten_fn(container)[0])
