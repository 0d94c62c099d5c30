"""For each module that becomes a group: its strategy, and the arguments of its ``fully_shard``."""

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from shardwise.layout.fqns import names_in, uncompiled
from shardwise.layout.mesh import resolve_mesh
from shardwise.setup.validation import check_offload, check_precision, check_reshard, class_name, describe
from shardwise.strategies.meshes import Strategy, StrategySettings, mesh_arguments, strategy_named
from shardwise.strategies.named_policies import offload_named, precision_named

_OVERRIDABLE = (
    *("strategy", "mesh", "dp_mesh_dims", "mp_policy", "offload_policy", "comm_policy"),
    *("reshard_after_forward", "shard_placement_fn"),
)

_Override = Strategy | Mapping[str, Any]
Overrides = Mapping[str | type[nn.Module], _Override]


class StrategyPlan:
    """For each module that becomes a group: its strategy, and the arguments of its ``fully_shard``.

    Everything is resolved and checked here, before the first module is touched.
    """

    def __init__(
        self, options: dict[str, Any], overrides: Overrides | None, model: nn.Module, blocks: list[nn.Module]
    ) -> None:
        self._meshes: dict[tuple[Any, ...], dict[str, Any]] = {}
        self._keys: dict[nn.Module, tuple[Any, ...]] = {}
        self._resolved: dict[tuple[Any, ...], tuple[StrategySettings, dict[str, Any]]] = {}
        names = names_in(model)
        changes = _matched(overrides, [*blocks, model], names)
        for module in [*blocks, model]:
            asked = {**options, **changes.get(module, {})}
            key = tuple(value if isinstance(value, str) else id(value) for value in asked.values())
            key = (*asked, *key)
            self._keys[module] = key
            if key not in self._resolved:
                self._resolved[key] = self._resolve(asked)

    def __getitem__(self, module: nn.Module) -> tuple[StrategySettings, dict[str, Any]]:
        return self._resolved[self._keys[module]]

    def key(self, module: nn.Module) -> Any:
        """Equal for modules that are to be treated alike."""
        return self._keys[module]

    def _resolve(self, asked: dict[str, Any]) -> tuple[StrategySettings, dict[str, Any]]:
        strategy = strategy_named(asked.pop("strategy"))
        mesh, dims = asked.pop("mesh"), asked.pop("dp_mesh_dims")
        key = (strategy.roles, id(mesh), id(dims))
        if key not in self._meshes:
            self._meshes[key] = mesh_arguments(strategy, mesh, dims)
        arguments = {"reshard_after_forward": strategy.reshard_after_forward, **asked, **self._meshes[key]}
        check_precision(arguments["mp_policy"])
        check_offload(arguments["offload_policy"])
        resolved = resolve_mesh(arguments["mesh"], arguments.get("dp_mesh_dims"))
        check_reshard(arguments["reshard_after_forward"], resolved)
        return strategy, arguments


def _matched(
    overrides: Overrides | None, candidates: list[nn.Module], names: dict[nn.Module, str]
) -> dict[nn.Module, dict[str, Any]]:
    """The changes of ``overrides`` for each module that becomes a group."""
    if overrides is not None and not isinstance(overrides, Mapping):
        raise TypeError(
            f"shard_model: overrides is {describe(overrides)}; pass a dict from module names or classes to a "
            "strategy or a dict of arguments."
        )
    changes: dict[nn.Module, dict[str, Any]] = {}
    for key, change in (overrides or {}).items():
        change = _check_change(key, change)
        found = [module for module in candidates if _matches(key, module, names[module])]
        if not found:
            *blocks, root = candidates
            shown = "".join(f"'{names[module]}', " for module in blocks[:4])
            more = f"{len(blocks) - 4} more, " if len(blocks) > 4 else ""
            raise ValueError(
                f"shard_model: the override for {_key_text(key)} matches no module that becomes a group. "
                f"Those are {shown}{more}and {class_name(root)} itself (''). Have wrap= choose the "
                "module, or name one of these."
            )
        for module in found:
            changes[module] = {**changes.get(module, {}), **change}
    return changes


def _matches(key: Any, module: nn.Module, name: str) -> bool:
    return fnmatchcase(name, key) if isinstance(key, str) else isinstance(uncompiled(module), key)


def _check_change(key: Any, change: Any) -> dict[str, Any]:
    if not isinstance(key, str) and not (isinstance(key, type) and issubclass(key, nn.Module)):
        raise TypeError(
            f"shard_model: overrides has {describe(key)} for a key; pass module names, patterns or classes."
        )
    if isinstance(change, str):
        change = {"strategy": change}
    if not isinstance(change, Mapping):
        raise TypeError(
            f"shard_model: the override for {_key_text(key)} is {describe(change)}; pass the name of a "
            "strategy or a dict of arguments."
        )
    for name in change:
        if name not in _OVERRIDABLE:
            raise ValueError(
                f"shard_model: the override for {_key_text(key)} sets '{name}'. What can be set for a single "
                f"group is {', '.join(_OVERRIDABLE)}."
            )
    if "strategy" in change:
        strategy_named(change["strategy"], f", in the override for {_key_text(key)}")
    where = f"shard_model: the override for {_key_text(key)}"
    named = {"mp_policy": precision_named, "offload_policy": offload_named}
    return {name: named[name](where, value) if name in named else value for name, value in change.items()}


def _key_text(key: Any) -> str:
    return f"'{key}'" if isinstance(key, str) else key.__name__
