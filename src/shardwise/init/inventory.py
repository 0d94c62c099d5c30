"""The inventory of a model on the meta device: tensors without values, and the modules that have them."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.groups.group import ParameterGroup
from shardwise.groups.managed_modules import owner_of
from shardwise.init.placeholders import Placeholder, RefuseWrites, TensorSite, show_all, sites_in
from shardwise.layout.fqns import joined, listed, names_in
from shardwise.ranks.model_ranks import mesh_device
from shardwise.setup.validation import class_name
from shardwise.torch_compat import nn_modules


class Inventory:
    """The tensors of a model that have no values, and the modules that are to give them some, in order."""

    def __init__(self, model: nn.Module, drawn_on: torch.device | None) -> None:
        self.model = model
        self.names = names_in(model)
        self.group_of: dict[nn.Module, ParameterGroup] = {
            module: owner.group for module in self.names if (owner := owner_of(module)) is not None
        }
        self.groups = list(dict.fromkeys(self.group_of.values()))
        self.device = self.groups[0].device if self.groups else mesh_device(model)
        self.drawn_on = drawn_on or self.device or torch.device("cpu")
        self.placeholders: dict[int, Placeholder] = {}
        self._add_sharded()
        home = self.device or self.drawn_on
        # Tensors that no group has, or that their group leaves alone.
        self._add({site: tensor for site, tensor in sites_in(self.names) if tensor.is_meta}, home)
        # Plain ones with values in modules that have others without: their init will write to both.
        beside = {site.module for f in self.placeholders.values() if f.is_empty for site in f.sites}
        neighbours = sites_in(module for module in self.names if module in beside)
        self._add({site: tensor for site, tensor in neighbours if not tensor.is_meta}, None)
        self.shards = {id(f.original): f.fqn for f in self.placeholders.values() if f.param is not None}
        children_first: dict[nn.Module, None] = {}
        nn.Module.apply(model, lambda module: children_first.setdefault(module))
        self.todo = [m for m in children_first if any(tensor.is_meta for _, tensor in sites_in([m]))]

    def _add_sharded(self) -> None:
        for group in self.groups:
            for bucket in group.buckets:
                for param in bucket.params:
                    sites = [
                        TensorSite(s.module, nn_modules.parameters(s.module), s.name) for s in param.sites
                    ]
                    if not any(site.module in self.names for site in sites):
                        continue  # of a module outside, where ``model`` is only a part of a sharded model
                    had_values = not param.sharded.is_meta
                    self.placeholders[id(param.sharded)] = Placeholder(
                        param.fqn, param.sharded, bucket.storage.device, param, had_values, sites
                    )

    def _add(self, found: Mapping[TensorSite, Tensor], home: torch.device | None) -> None:
        """Add what is not known yet; without ``home`` it has values, and stays where it is."""
        known = set(self.placeholders)
        for site, tensor in found.items():
            if id(tensor) not in known:
                fqn = joined(self.names[site.module], site.name)
                new = Placeholder(fqn, tensor, home or tensor.device, None, had_values=home is None)
                self.placeholders.setdefault(id(tensor), new).sites.append(site)

    def visits(self) -> Iterator["Visit"]:
        """The modules to initialise; neighbours of one group are one visit."""
        visit: list[nn.Module] = []
        for module in self.todo:
            if visit and self.group_of.get(module) is not self.group_of.get(visit[-1]):
                yield Visit(self, visit)
                visit = []
            visit.append(module)
        if visit:
            yield Visit(self, visit)

    def missing(self) -> list[Placeholder]:
        """Tensors that have no values yet."""
        return [placeholder for placeholder in self.placeholders.values() if placeholder.is_empty]


@dataclass
class Visit:
    """Modules of one group, or of none, that are initialised while the tensors they may write to are full."""

    inventory: Inventory
    modules: list[nn.Module]

    def run(self, init_fn: Callable[[nn.Module], Any] | None) -> None:
        """Initialise them. Afterwards the same tensors are registered, with values."""
        group = self.inventory.group_of.get(self.modules[0])
        placeholders = self._placeholders(group)
        for placeholder in placeholders:
            _check_place(placeholder)
        orders = {
            m: list(nn_modules.parameters(m)) for f in placeholders for m in [site.module for site in f.sites]
        }
        failed: nn.Module | None = None
        try:
            with torch.inference_mode(False), torch.no_grad():
                show_all(placeholders, self.inventory.drawn_on)
            for module in self.modules:
                failed = module
                self._initialise(module, init_fn)
            failed = None
        finally:
            with torch.inference_mode(False), torch.no_grad():
                problems = []
                for placeholder in placeholders:
                    if failed is not None and placeholder.is_in({failed}):
                        placeholder.put_back()
                    elif problem := placeholder.settle():
                        problems.append(problem)
            for module, names in orders.items():
                nn_modules.reorder(nn_modules.parameters(module), names)
            for each in self._groups_of(placeholders):
                each.adopt_when_moved()
        if problems:
            raise RuntimeError(f"materialize: {listed(problems, 4, ' ')}")

    def _placeholders(self, group: ParameterGroup | None) -> list[Placeholder]:
        """The tensors to show: those that the modules own, and those of their group inside them."""
        own = set(self.modules)
        inside = {module for each in self.modules for module in each.modules()}
        mine = set(group.shards.params) if group is not None else set()
        return [
            placeholder
            for placeholder in self.inventory.placeholders.values()
            if placeholder.is_in(own)
            or (
                placeholder.is_in(inside)
                and (placeholder.param in mine if placeholder.param else not placeholder.had_values)
            )
        ]

    def _groups_of(self, placeholders: list[Placeholder]) -> list[ParameterGroup]:
        """The groups of the shown tensors; several where a parameter is tied to one of another group."""
        shown = {placeholder.param for placeholder in placeholders if placeholder.param is not None}
        return [group for group in self.inventory.groups if not shown.isdisjoint(group.shards.params)]

    def _initialise(self, module: nn.Module, init_fn: Callable[[nn.Module], Any] | None) -> None:
        init = init_fn
        if init is None:
            own = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
            if own is None:
                return
            init = lambda _: own()  # noqa: E731
        what = f"{self.inventory.names[module] or 'the model'} ({class_name(module)})"
        try:
            guard = RefuseWrites(self.inventory.shards, f"materialize: the init of {what}")
            with torch.inference_mode(False), torch.no_grad(), guard:
                init(module)
        except Exception as error:
            error.add_note(f"materialize: raised while initialising {what}.")
            raise


def _check_place(placeholder: Placeholder) -> None:
    if not placeholder.is_in_place:
        placeholder.put_back()
        raise RuntimeError(
            f"materialize: {placeholder.fqn} was replaced by the init of a module that does not own it. What "
            "was there before is back in its place. Initialise parameters where they are owned."
        )


def refuse_what_is_missing(inventory: Inventory) -> None:
    """Check at the end: everything has values, and sharded parameters are registered where they were."""
    for placeholder in inventory.placeholders.values():
        if placeholder.param is not None:
            _check_place(placeholder)
    missing = inventory.missing()
    if not missing:
        return
    shown = [
        f"{f.fqn} ({'buffer' if f.is_buffer else 'parameter'} of {class_name(f.sites[0].module)})"
        for f in missing
    ]
    raise RuntimeError(
        f"materialize: {len(missing)} tensor{'s' if len(missing) > 1 else ''} got no values, or not "
        f"everywhere: {listed(shown)}. Nothing initialises them: the class has no "
        "reset_parameters(), or that, or init_fn, leaves them out. Give the class a reset_parameters() that "
        "writes to all of its tensors, or pass an init_fn that does. They are still on the meta device; the "
        "others have values."
    )
