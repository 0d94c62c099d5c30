"""The tensors of a model on the meta device, the modules that give them values, and placeholders meanwhile:
full tensors for a while, of which each rank keeps its part.

An init function sees plain tensors of the global shape, also where tensor parallelism keeps parts. What it
writes is sharded, and becomes the contents of the registered tensor. That stays the same object, for the sake
of an optimizer that has it already:

    module._parameters["weight"]    shard on meta  ->  full, plain, NaN  ->  the same shard, with values
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from shardwise.comm.full_tensors import gather_full
from shardwise.groups.group import ParameterGroup
from shardwise.groups.managed_modules import owner_of
from shardwise.layout.chunks import local_chunk
from shardwise.layout.fqns import joined, listed, names_in
from shardwise.params.parameter import Param
from shardwise.ranks.model_ranks import mesh_device
from shardwise.setup.validation import class_name
from shardwise.torch_compat import dtensor, interpreter, nn_modules, tensor_impl


@dataclass(frozen=True, eq=False)
class TensorSite:
    """Where a tensor is registered: ``entries`` are the parameters or the buffers of ``module``."""

    module: nn.Module
    entries: dict[str, Any]
    name: str


def sites_in(modules: Iterable[nn.Module]) -> Iterator[tuple[TensorSite, Tensor]]:
    """The parameters and buffers that ``modules`` have registered, except lazy ones."""
    for module in modules:
        for entries in (nn_modules.parameters(module), nn_modules.buffers(module)):
            for name, tensor in entries.items():
                if tensor is not None and not nn.parameter.is_lazy(tensor):
                    yield TensorSite(module, entries, name), tensor


@dataclass(eq=False)
class Placeholder:
    """One tensor, at all its sites. ``home``: the device of its values; ``param``: how it is sharded.

    ``had_values``: it is shown, so that an init may read it, and keeps its values.
    """

    fqn: str
    original: Tensor
    home: torch.device
    param: Param | None = None
    had_values: bool = False
    sites: list[TensorSite] = field(default_factory=list)
    _shown: Tensor | None = None
    _version: int = 0

    @property
    def is_empty(self) -> bool:
        """True while it has no values."""
        return self.original.is_meta

    @property
    def is_buffer(self) -> bool:
        """True for a buffer, persistent or not."""
        site = self.sites[0]
        return site.entries is nn_modules.buffers(site.module)

    def is_in(self, modules: set[nn.Module]) -> bool:
        """True if one of its sites is in ``modules``."""
        return any(site.module in modules for site in self.sites)

    def show(self, value: Tensor | None, device: torch.device) -> None:
        """Register the full tensor: ``value``, or one that is marked as unwritten."""
        if value is None:
            value = _unwritten(self.original, device)
        shown = value
        if isinstance(self.original, nn.Parameter):
            shown = self._as_parameter(value)
            param, own = self.param, tensor_impl.own_attributes
            vars(shown).update(own(self.original) if param is None else param.attributes)
        self._version = tensor_impl.version(shown)
        self._shown = shown
        self._register(shown)

    def _as_parameter(self, value: Tensor) -> nn.Parameter:
        wants_grad = self.original.requires_grad
        if isinstance(self.original, DTensor):
            param = self.param
            if param is None or param.is_tensor_parallel or self._local_class is not Tensor:
                return nn.Parameter(value, wants_grad)
            return param.like_original(value, wants_grad)
        return tensor_impl.as_subclass_of_parameter(type(self.original), value, wants_grad)

    def _register(self, tensor: Tensor) -> None:
        for site in self.sites:
            site.entries[site.name] = tensor
        refresh_lists(site.module for site in self.sites)

    def put_back(self) -> None:
        """Register the original again, and drop what was written."""
        self._shown = None
        self._register(self.original)

    def settle(self) -> str | None:
        """Take over what was written, and register the original again; returns a problem, if any. Local."""
        shown, self._shown = self._shown, None
        found = [site.entries.get(site.name) for site in self.sites]
        self._register(self.original)
        if self.had_values or shown is None:
            return None
        if self.is_buffer and any(tensor is shown for tensor in found):
            found, problem = self._split_off_replaced(found, shown)
            if problem:
                return f"{self.fqn}: {problem}"
        others = [tensor for tensor in found if tensor is not shown]
        new = others[0] if others else shown
        if others and any(tensor is not new for tensor in found):
            return f"{self.fqn}: it is tied, but was replaced at one place only. Replace it at all of them."
        if problem := self._misfit(new):
            return f"{self.fqn}: {problem}"
        assert new is not None
        if self.is_empty and not _is_written(new, self._version if new is shown else None):
            return None  # reported at the end of the walk
        self._take(new.detach())
        return None

    def _split_off_replaced(self, found: list[Any], shown: Tensor) -> tuple[list[Any], str | None]:
        """Split off the sites at which a shared buffer was replaced: they have another buffer now."""
        left = []
        for site, tensor in zip(self.sites, found, strict=True):
            if tensor is shown:
                left.append(site)
            elif problem := self._misfit(tensor):
                return found, problem
            else:
                site.entries[site.name] = tensor.detach().to(self.home, self.original.dtype)
        self.sites = left
        return [shown] * len(left), None

    def _misfit(self, new: Tensor | None) -> str | None:
        """Why ``new`` cannot become its value, or None."""
        if not isinstance(new, Tensor):
            return "it was removed. Give it values, or change modules before they are sharded."
        wanted = self.original
        converts = self.is_buffer and new.is_floating_point() and wanted.is_floating_point()
        fits = new.shape == wanted.shape and (new.dtype == wanted.dtype or converts)
        if isinstance(new, DTensor) or new.is_meta or not fits:
            return (
                f"it was replaced by {describe(new)}, where {describe(wanted, 'a plain tensor')} with values "
                "is expected. Copy values into the tensor that is there, or assign one like it."
            )
        return None

    def _take(self, value: Tensor) -> None:
        old = self.original
        if not self.is_empty:
            target = dtensor.plain(old.detach())
            target.copy_(self._part(value))
            return
        part = self._part(value)
        new = self._memory_for(part)
        new.copy_(part)
        new = dtensor.placed_as(old, new)
        if not isinstance(old, nn.Parameter):
            self.original = new
            self._register(new)
            return
        become_parameter(old, new, (site.module for site in self.sites))
        if self.param is not None:
            self.param.restore_metadata()

    @property
    def _local_class(self) -> type:
        """The class of the local tensor: a subclass takes plain values by ``copy_``."""
        return type(dtensor.plain(self.original.detach()))

    def _memory_for(self, part: Tensor) -> Tensor:
        """Memory that nothing else uses, not even the full tensor."""
        if not isinstance(self.original, DTensor) or self._local_class is Tensor:
            is_sharded = isinstance(self.original, DTensor)
            form = torch.contiguous_format if is_sharded else torch.preserve_format
            kind = self.original.dtype
            return torch.empty_like(part, dtype=kind, device=self.home, memory_format=form)
        made = torch.empty_like(dtensor.local_tensor(self.original), device=self.home)
        if type(made) is not self._local_class:
            raise RuntimeError(
                f"{self.fqn}: torch.empty_like of a {self._local_class.__name__} on the meta device returned "
                f"a {type(made).__name__}, which cannot hold its values. Make the class return its own type "
                "there, or load the parameter instead: to_empty(), then load_state_dict()."
            )
        return made

    def _part(self, value: Tensor) -> Tensor:
        """This rank's part of the full value."""
        if self.param is not None:
            return dtensor.local_tensor(self.param.as_shard(value))
        if isinstance(self.original, DTensor):
            return local_chunk(value, dtensor.spec_of(self.original))
        return value


def become_parameter(old: nn.Parameter, contents: Tensor, modules: Iterable[nn.Module]) -> None:
    """Give ``old``, which ``modules`` have registered, other ``contents``; it stays the same object."""
    new: nn.Parameter
    if isinstance(contents, DTensor) or type(contents) is not Tensor:
        new = nn.Parameter(contents, old.requires_grad)
    else:
        new = tensor_impl.as_subclass_of_parameter(type(old), contents, old.requires_grad)
    nn_modules.forget_weak_references(modules)
    tensor_impl.become(old, new)


def refresh_lists(modules: Iterable[nn.Module]) -> None:
    """Let RNN modules see the registered parameters."""
    nn_modules.refresh_flat_weights(
        dict.fromkeys(module for module in modules if isinstance(module, nn.RNNBase))
    )


# --- the inventory of a model -----------------------------------------------------------------------


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

        def visit(module: nn.Module) -> None:  # not by apply, which a class may have of its own
            if module not in children_first:
                for child in module.children():
                    visit(child)
                children_first[module] = None

        visit(model)
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

    def visits(self) -> Iterator[list[nn.Module]]:
        """The modules to initialise; neighbours of one group are one visit."""
        for _, modules in groupby(self.todo, lambda module: id(self.group_of.get(module))):
            yield list(modules)

    def missing(self) -> list[Placeholder]:
        """Tensors that have no values yet."""
        return [placeholder for placeholder in self.placeholders.values() if placeholder.is_empty]

    def initialise(self, modules: list[nn.Module], init_fn: Callable[[nn.Module], Any] | None) -> None:
        """Initialise the modules of a visit, while the tensors that they may write to are full. Afterwards
        the same tensors are registered, with values."""
        placeholders = self._shown_to(modules)
        for placeholder in placeholders:
            _check_place(placeholder)
        orders = {
            m: list(nn_modules.parameters(m)) for f in placeholders for m in [site.module for site in f.sites]
        }
        failed: nn.Module | None = None
        try:
            with torch.inference_mode(False), torch.no_grad():
                valued = [placeholder for placeholder in placeholders if not placeholder.is_empty]
                fulls = gather_full([placeholder.original for placeholder in valued]) if valued else []
                for placeholder, full in zip(valued, fulls, strict=True):
                    assert full is not None
                    placeholder.show(full.to(self.drawn_on), self.drawn_on)
                for placeholder in placeholders:
                    if placeholder.is_empty:
                        placeholder.show(None, self.drawn_on)
            for module in modules:
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
            # Of several groups where a parameter is tied to one of another group.
            shown = {placeholder.param for placeholder in placeholders if placeholder.param is not None}
            for group in self.groups:
                if not shown.isdisjoint(group.shards.params):
                    group.adopt_when_moved()
        if problems:
            raise RuntimeError(f"materialize: {listed(problems, 4, ' ')}")

    def _shown_to(self, modules: list[nn.Module]) -> list[Placeholder]:
        """The tensors to show: those that the modules own, and those of their group inside them."""
        own, group = set(modules), self.group_of.get(modules[0])
        inside = {module for each in modules for module in each.modules()}
        mine = set(group.shards.params) if group is not None else set()
        return [
            placeholder
            for placeholder in self.placeholders.values()
            if placeholder.is_in(own)
            or (
                placeholder.is_in(inside)
                and (placeholder.param in mine if placeholder.param else not placeholder.had_values)
            )
        ]

    def _initialise(self, module: nn.Module, init_fn: Callable[[nn.Module], Any] | None) -> None:
        init = init_fn
        if init is None:
            own = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
            if own is None:
                return
            init = lambda _: own()  # noqa: E731
        what = f"{self.names[module] or 'the model'} ({class_name(module)})"
        try:
            guard = RefuseWrites(self.shards, f"materialize: the init of {what}")
            with torch.inference_mode(False), torch.no_grad(), guard:
                init(module)
        except Exception as error:
            error.add_note(f"materialize: raised while initialising {what}.")
            raise


def _check_place(placeholder: Placeholder) -> None:
    if any(site.entries.get(site.name) is not placeholder.original for site in placeholder.sites):
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


# --- marks of unwritten values --------------------------------------------------------------------


def _unwritten(like: Tensor, device: torch.device) -> Tensor:
    """A full tensor with contents that show where nothing was written."""
    if isinstance(like, DTensor):
        value = torch.empty(like.shape, dtype=like.dtype, device=device)
    else:
        value = torch.empty_like(like, device=device, requires_grad=False)
    if type(value) is not Tensor:
        value = value.detach().as_subclass(Tensor)
    if value.dtype == torch.bool:
        return value.zero_()
    if value.itemsize == 1:
        value.view(torch.uint8).fill_(_BYTE)
        return value
    return value.fill_(_sentinel(value.dtype))


_BYTE = 0xA5


def _sentinel(dtype: torch.dtype) -> float | int:
    return torch.iinfo(dtype).max - 0x5A if _is_integer(dtype) else float("nan")


def _is_integer(dtype: torch.dtype) -> bool:
    return not (dtype.is_floating_point or dtype.is_complex)


def _is_written(tensor: Tensor, version: int | None) -> bool:
    """Whether all of ``tensor`` has values. ``version``: when it was marked; None: it is somebody else's."""
    if not tensor.numel():
        return True
    tensor = tensor.detach()
    if not (tensor.itemsize == 1 or _is_integer(tensor.dtype)):
        return not bool(tensor.isnan().any())
    if version is None or tensor_impl.version(tensor) != version:
        return True
    if tensor.dtype == torch.bool:
        return bool(tensor.any())
    if tensor.itemsize == 1:
        return bool((tensor.view(torch.uint8) != _BYTE).any())
    return not bool((tensor == _sentinel(tensor.dtype)).any())


def describe(tensor: Tensor, kind: str | None = None) -> str:
    """The kind, dtype, shape and device of a tensor, for messages."""
    kind = kind or ("a DTensor" if isinstance(tensor, DTensor) else f"a {type(tensor).__name__}")
    where = " on the meta device" if tensor.is_meta and kind != "a plain tensor" else ""
    return f"{kind} of {tensor.dtype} and shape {tuple(tensor.shape)}{where}"


# --- forbidden writes -----------------------------------------------------------------------------

_HARMLESS = {"requires_grad_", "retain_grad_"}


class RefuseWrites(TorchFunctionMode):
    """Inside, writing to a sharded parameter is an error.

    Each rank would draw the same numbers for its own rows, and on the meta device nothing would happen.
    """

    def __init__(self, names: Mapping[int, str], where: str) -> None:
        super().__init__()
        self._names = names
        self._where = where

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Looks at every function of torch that is called."""
        for written in _written_by(func, args, kwargs or {}):
            self._refuse(written)
        return func(*args, **(kwargs or {}))

    def _refuse(self, tensor: Tensor) -> None:
        name = self._names.get(id(tensor), "a sharded parameter")
        raise RuntimeError(
            f"{self._where} writes to {name}, which belongs to another group, or to no module inside this "
            "one, and is not full now: only one group at a time has full parameters, and only those inside "
            "the module. Initialise each parameter in the module that owns it: give its class "
            "reset_parameters(), or pass an init_fn that changes only the module it is called with. A "
            "function that initialises the whole model from its root does not work."
        )


def _written_by(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[DTensor]:
    """The DTensors that a call changes, or may change through what it returns."""
    name = getattr(func, "__name__", "")
    written: list[Any] = []
    is_setter = name == "__setitem__" or (name.startswith("__i") and name in _IN_PLACE_OPERATORS)
    is_in_place = name.endswith("_") and not name.endswith("__") and name not in _HARMLESS
    if name == "__get__" and func.__self__ is torch.Tensor.is_meta and interpreter.is_called_by_init(2):
        is_in_place = True  # it would leave a tensor on the meta device as it is, without a word
    is_data = name in ("__get__", "__set__") and getattr(func, "__self__", None) is torch.Tensor.data  # type: ignore[comparison-overlap]
    if args and (is_setter or is_in_place or is_data):
        written += args[0] if isinstance(args[0], (list, tuple)) else [args[0]]
    elif is_in_place:
        written += [kwargs.get("tensor"), kwargs.get("input")]
    out = kwargs.get("out")
    written += out if isinstance(out, (list, tuple)) else [out]
    return [tensor for tensor in written if isinstance(tensor, DTensor)]


_IN_PLACE_OPERATORS = {
    *("__iadd__", "__isub__", "__imul__", "__itruediv__", "__ifloordiv__", "__imod__", "__ipow__"),
    *("__iand__", "__ior__", "__ixor__", "__ilshift__", "__irshift__"),
}
