"""What a caller of ``estimate`` writes for a world and strategies: read and checked."""

from typing import Any

import torch

from shardwise.strategies.meshes import STRATEGIES, no_strategy


def world_sizes(world: int | tuple[int, int] | str) -> tuple[int, ...]:
    """A number of ranks, or hosts and ranks on each: 64, (8, 8) or "8x8"."""
    sizes: Any = world
    if isinstance(world, str):
        parts = world.lower().split("x")
        sizes = tuple(int(part) if part.strip().isdecimal() else 0 for part in parts)
    elif isinstance(world, int) and not isinstance(world, bool):
        sizes = (world,)
    is_well = isinstance(sizes, tuple) and len(sizes) in (1, 2)
    if not is_well or any(isinstance(size, bool) or not isinstance(size, int) or size < 1 for size in sizes):
        raise ValueError(
            f"estimate: world is {world!r}; pass a number of ranks, 64, or hosts and ranks on each, (8, 8) "
            'or "8x8", all above 0.'
        )
    return sizes


def strategies_for(strategy: Any, sizes: tuple[int, ...]) -> list[str]:
    """The strategies to estimate: the one that is named, or all that the world has a mesh for."""
    if strategy is None:
        return [name for name, each in STRATEGIES.items() if len(each.roles) == 1 or len(sizes) == 2]
    names = [strategy] if isinstance(strategy, str) else list(strategy)
    for name in names:
        if name not in STRATEGIES:
            raise ValueError(f"estimate: {no_strategy(str(name), STRATEGIES)} None stands for all.")
        if len(STRATEGIES[name].roles) > len(sizes):
            raise ValueError(
                f"estimate: strategy '{name}' shards over the ranks of a host and replicates over hosts, and "
                f"world={sizes[0]} does not say how many there are. Pass both, world=(hosts, "
                f"ranks_per_host), such as ({max(1, sizes[0] // 8)}, {min(8, sizes[0])})."
            )
    return names


def mesh_shape(strategy: str, sizes: tuple[int, ...]) -> dict[str, int]:
    """The sizes of the mesh dimensions of a strategy, by their names."""
    roles = STRATEGIES[strategy].roles
    if len(roles) == 2:
        return dict(zip(roles, sizes, strict=True))
    return {roles[0]: torch.Size(sizes).numel()}
