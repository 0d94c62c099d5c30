"""Equal and reproducible beginnings: values for models on the meta device, copies made equal and compared.

Also for models that are about to be loaded: memory for what is on the meta device, and marks on those whose
load failed half-way, so that no one trains with half of the weights.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwise.arguments import check_module, check_type
from shardwise.engine.module_state import module_states_at_rest, sharded_module_states
from shardwise.groups.shards import meta_message
from shardwise.groups.states import SHARDED
from shardwise.init.placeholders import (
    Inventory,
    TensorSite,
    become_parameter,
    refresh_lists,
    refuse_what_is_missing,
    sites_in,
)
from shardwise.layout.fqns import clean, listed, uncompiled
from shardwise.layout.mesh import all_reduce_max, axes_of
from shardwise.ranks.agreement import run_on_all_ranks
from shardwise.ranks.failures import monitored
from shardwise.ranks.model_ranks import Broadcast, axes_of_model, device_of_model
from shardwise.ranks.replicas import (
    Named,
    TensorInfo,
    are_fake,
    make_equal,
    refuse_unequal,
    sends_copies,
    tensor_infos,
)
from shardwise.setup.validation import groups_in
from shardwise.torch_compat import dtensor, nn_modules

# --- loads ----------------------------------------------------------------------------------------


def named_tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Parameters and buffers, persistent or not, each once."""
    return [(clean(name), t) for name, t in [*model.named_parameters(), *model.named_buffers()]]


def is_on_meta(model: nn.Module) -> bool:
    """Whether any tensor of ``model`` has no values yet."""
    return any(tensor.is_meta for _, tensor in named_tensors(model))


def refuse_meta(named: Iterable[tuple[str, Tensor]], caller: str) -> None:
    """Refuse tensors without values."""
    if names := [name for name, tensor in named if tensor.is_meta]:
        raise RuntimeError(f"{caller}: {meta_message(names)}")


def refuse_lost(model: nn.Module, caller: str, coming: Iterable[Any]) -> None:
    """Refuse tensors without values that are not among those ``coming``."""
    known = {id(tensor) for tensor in coming}
    lost = [name for name, tensor in named_tensors(model) if tensor.is_meta and id(tensor) not in known]
    if lost:
        are = "is" if len(lost) == 1 else "are"
        raise RuntimeError(
            f"{caller}: {listed(lost)} {are} on the meta device, without values, and will not be loaded (no "
            "state dict contains buffers with persistent=False). Call shardwise.materialize(model) first."
        )


def give_memory(model: nn.Module) -> None:
    """Give tensors on the meta device memory with undefined contents, on the device of the model.

    Parameters stay the same objects, for the sake of ties and of an optimizer that has them already; a shared
    buffer stays shared.
    """
    device = device_of_model(model)
    with torch.inference_mode(False), torch.no_grad():
        _give_plain_memory(model, device)
        # Only sharded parameters are left: their groups notice, and move them into flat shards.
        nn_modules.map_tensors(
            model, lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor
        )
        for group in groups_in(model):
            for param in group.shards.params:
                param.restore_metadata()


def _give_plain_memory(model: nn.Module, device: torch.device) -> None:
    """Give memory to parameters without a group (ignored, or outside sharded modules), and to buffers."""
    sharded = {id(param.sharded) for group in groups_in(model) for param in group.shards.params}
    sites: dict[int, tuple[Tensor, list[TensorSite]]] = {}
    for site, tensor in sites_in(model.modules()):
        if tensor.is_meta and id(tensor) not in sharded:
            sites.setdefault(id(tensor), (tensor, []))[1].append(site)
    for tensor, places in sites.values():
        memory = dtensor.placed_as(tensor, torch.empty_like(dtensor.plain(tensor).detach(), device=device))
        if isinstance(tensor, nn.Parameter):
            become_parameter(tensor, memory, (site.module for site in places))
        else:
            for site in places:
                site.entries[site.name] = memory
    refresh_lists(site.module for _, places in sites.values() for site in places)


_MARK = "_shardwise_partly_loaded"


def mark_partly_loaded(model: nn.Module, why: str) -> None:
    """Make forwards raise a RuntimeError with ``why``, until a load has given all values.

    Forwards of all groups with parameters in ``model``; if nothing in it is sharded, that of ``model``.
    """
    why, model = why.rstrip("."), uncompiled(model)
    groups = groups_in(model)
    for group in groups:
        group.partly_loaded = why
        sharded_module_states(group.modules[0])[0].root.start_over()
    if not groups and _MARK not in model.__dict__:
        model.__dict__[_MARK] = _PartialLoadHooks(model, why)


def note_complete_load(model: nn.Module) -> None:
    """All of ``model`` has values again, on all ranks, which compare what they kept unsharded with them."""
    model = uncompiled(model)
    for group in groups_in(model):
        group.partly_loaded = None
        for param in group.shards.params:
            param.full_load = None
    for module_state in sharded_module_states(model):
        module_state.root.unsharded_groups.is_mid_accumulation = False
    if _MARK in model.__dict__:
        model.__dict__.pop(_MARK).remove()


def why_partly_loaded(model: nn.Module) -> str | None:
    """The failure, if ``model`` is marked; else None."""
    model = uncompiled(model)
    mark: _PartialLoadHooks | None = model.__dict__.get(_MARK)
    reasons = [group.partly_loaded for group in groups_in(model)] + [None if mark is None else mark.why]
    return next((why for why in reasons if why is not None), None)


class _PartialLoadHooks:
    """The mark of a model in which nothing is sharded."""

    def __init__(self, model: nn.Module, why: str) -> None:
        self.why = why
        self._handles = [
            model.register_forward_pre_hook(self._refuse),
            model.register_load_state_dict_post_hook(self._loaded),
        ]

    def remove(self) -> None:
        """Remove the mark."""
        for handle in self._handles:
            handle.remove()

    def _refuse(self, model: nn.Module, _: Any) -> None:
        raise RuntimeError(
            f"{type(model).__name__}: the model is only partly loaded, because an earlier load failed "
            f"({self.why}). Load a complete checkpoint before the next forward."
        )

    def _loaded(self, model: nn.Module, incompatible_keys: Any) -> None:
        if not incompatible_keys.missing_keys:
            note_complete_load(model)


_ModuleT = TypeVar("_ModuleT", bound=nn.Module)


@monitored
def materialize(
    model: _ModuleT,
    init_fn: Callable[[nn.Module], Any] | None = None,
    *,
    device: torch.device | str | None = None,
) -> _ModuleT:
    """Give memory and values to all parameters and buffers of ``model`` that are on the meta device.

    Use it for models that do not fit on one rank: build the model on the meta device, shard it, and
    initialise it with this function, which works on one group at a time. The values have the same bits as if
    one process initialised the whole model, with any number of ranks, strategy and grouping::

        model.to_empty(device=device)
        for module in modules_with_meta_tensors_of_their_own:  # children before parents
            init(module)

    where ``init`` is ``init_fn`` if given, else the module's ``reset_parameters()`` or
    ``_reset_parameters()``. Each is called once for each module that directly has tensors without values,
    under ``torch.no_grad()``; every rank draws all numbers and keeps its part. Meanwhile the module sees
    plain tensors of the global shape (with tensor parallelism as well): its own, and those of modules inside
    it that are in its group. Everything else is sharded, and must not be written. Sharded parameters are
    drawn as if they were contiguous.

    Existing values do not change. Parameters stay the same objects, so you may build an optimizer before. All
    ranks draw from the random state of the first rank, on the CPU and on ``device``. A rank that had the same
    state continues from where it ends, as one process would; any other rank gets its own state back. The
    caller must handle random numbers of other libraries.

    Collective. Costs the full parameters of one group in addition to the shards. It communicates random
    states, and parameters of a group that later modules see again.

    Args:
        model: sharded, in part or not at all; also a part of a sharded model.
        init_fn: called with a module, to initialise its own parameters and buffers: in place, through
            ``.data``, or by assigning tensors of the same shape and dtype.
        device: where values are drawn. "cpu" draws the values of a CPU, for shards on any device. None: the
            device of the mesh. Shards and buffers always move to where they are kept.

    Returns:
        ``model`` itself.

    Raises:
        TypeError, ValueError: an argument is of the wrong kind.
        RuntimeError: tensors got no values, or values that do not fit; an init wrote to a shard; ranks
            disagree about which tensors have no values; a forward, a backward or ``unsharded`` is running. An
            error in an init is raised with a note that names the module, which then has no values.

    Example::

        with torch.device("meta"):
            model = Transformer(config)
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
        torch.manual_seed(0)
        materialize(model)
    """
    check_module("materialize", model)

    def look() -> Inventory:
        check_type("materialize", "init_fn", init_fn, "a function of a module", Callable, type(None))
        module_states_at_rest("materialize", model)
        drawn_on = None if device is None else torch.device(device)
        if drawn_on is not None and drawn_on.type == "meta":
            raise ValueError("materialize: device is 'meta', where nothing has values. Pass 'cpu', or None.")
        inventory = Inventory(model, drawn_on)
        for group in inventory.groups:
            group.refuse_if_summoned("materialize")
            group.refuse_open_ties()
        return inventory

    told = {"init_fn": "None" if init_fn is None else "a function", "device": str(device).partition(":")[0]}
    inventory = run_on_all_ranks(
        axes_of_model(model), device_of_model(model), look, caller="materialize", same=told
    )
    all_fresh = all(p.is_empty for p in inventory.placeholders.values() if p.param is not None)
    with _one_random_state(model, inventory):
        for modules in inventory.visits():
            inventory.initialise(modules, init_fn)
    refuse_what_is_missing(inventory)
    if all_fresh:
        note_complete_load(model)
    return model


@monitored
def sync_module_states(model: nn.Module, *, src: int = 0) -> None:
    """Give all ranks the parameters and buffers, persistent or not, of rank ``src``.

    Ranks that receive may have theirs on the meta device; these get memory first, and stay the same objects.

    Of a sharded parameter, each rank gets the shards of the replica that contains ``src``. What every rank
    keeps whole (buffers, scalars, ignored parameters and ones that are not sharded) comes from ``src``. If
    the model is not sharded, everything comes from ``src``, over the default process group: call it before
    ``fully_shard`` if ranks may have loaded or drawn different values.

    Collective. Sends every such byte once along each mesh dimension of copies, packed into broadcasts of 32
    MiB, and needs that much memory.

    Args:
        model: sharded or not.
        src: the global rank that has the right values.

    Raises:
        ValueError: ``src`` is not one of the ranks that share the model.
        RuntimeError: the values to send are on the meta device, ranks have different models, or a forward, a
            backward or ``unsharded`` is running.
        NotImplementedError: a parameter is of a tensor subclass.

    All ranks raise the same error.

    Example::

        with torch.device("cpu" if dist.get_rank() == 0 else "meta"):
            model = Transformer(config)
        if dist.get_rank() == 0:
            model.load_state_dict(torch.load("model.pt"))
        sync_module_states(model)
        fully_shard(model)
    """
    check_module("sync_module_states", model)
    axes = axes_of_model(model)
    comm_device = device_of_model(model)
    check = partial(_check_syncable, model, src)
    run_on_all_ranks(axes, comm_device, check, caller="sync_module_states", same={"src": src})
    broadcast = Broadcast(axes, src, comm_device)
    if not axes or are_fake(axes, comm_device):
        refuse_meta(named_tensors(model), "sync_module_states")
        return
    infos = broadcast.object(tensor_infos(named_tensors(model)))
    run_on_all_ranks(axes, comm_device, lambda: _prepare_to_receive(model, infos, broadcast.is_source, src))
    try:
        make_equal(named_tensors(model), infos, broadcast, comm_device)
        groups = [module_state.group for module_state in sharded_module_states(model)]
        for param in [param for group in groups for param in group.shards.params]:
            if not param.mesh.replicate_axis.is_alone:
                param.full_load = None  # of one replica alone, perhaps, and now of all
    except BaseException as error:
        mark_partly_loaded(model, f"sync_module_states: {error}")
        raise


@monitored
def check_replicas(model: nn.Module) -> None:
    """Raise an error if copies of a parameter differ between ranks that must hold the same values.

    Such copies are the shards of replicas (strategies ddp and hybrid), scalars in sharded groups, and what
    tensor parallelism replicates. Plain parameters, ignored or in modules that are not sharded, are not
    compared, since the library does not keep them equal.

    In a model with replicas, the first forward with gradients does this automatically, once. It is therefore
    collective over the replicas, as its backward is: if only one rank runs it, as a dry run, it hangs. Run it
    under ``torch.no_grad()``, where nothing is compared.

    Collective. Reads each shard once, and sums a few numbers over each mesh dimension; no parameters are
    sent.

    Raises:
        RuntimeError: on all ranks, with the names of the parameters and the ranks that differ; also if one of
            the ranks cannot compare, because parameters have no values or a forward is running.

    Example::

        check_replicas(model)  # every thousand steps, say
    """
    check_module("check_replicas", model)
    named: list[Named] = [(clean(name), t) for name, t in model.named_parameters() if isinstance(t, DTensor)]

    def check() -> None:
        module_states_at_rest("check_replicas", model)
        refuse_meta(named, "check_replicas")

    run_on_all_ranks(axes_of(tensor for _, tensor in named), device_of_model(model), check)
    if named:
        refuse_unequal(named, device_of_model(model))


# --- the random state -----------------------------------------------------------------------------


@contextmanager
def _one_random_state(model: nn.Module, inventory: Inventory) -> Iterator[None]:
    """Have all ranks draw as the first of them does, once they agree on which tensors to draw."""
    axes = axes_of_model(model)
    comm_device = device_of_model(model)
    if are_fake(axes, comm_device):
        axes = []
    own = _random_states(inventory.drawn_on)
    missing = [placeholder.fqn for placeholder in inventory.missing()]
    broadcast = Broadcast(axes, None, comm_device)
    states, theirs = broadcast.object((own, missing))
    differs = torch.tensor([int(theirs != missing)], device=comm_device)
    if axes:
        all_reduce_max(differs, axes)
    if differs.item():
        here, there = (listed(names, 4) or "none" for names in (missing, theirs))
        raise RuntimeError(
            f"materialize: ranks disagree about which tensors have no values: here {here}, on the first rank "
            f"{there}. Build the model on the meta device on all ranks. If one rank has loaded values, send "
            "them to the others with load_full_state_dict."
        )
    is_same = all(torch.equal(a, b) for a, b in zip(own, states, strict=True))
    _set_random_states(states, inventory.drawn_on)
    try:
        yield
    finally:
        if not is_same:
            _set_random_states(own, inventory.drawn_on)


def _random_states(device: torch.device) -> list[Tensor]:
    states = [torch.get_rng_state()]
    if device.type != "cpu":
        states.append(torch.get_device_module(device.type).get_rng_state(device))
    return states


def _set_random_states(states: list[Tensor], device: torch.device) -> None:
    torch.set_rng_state(states[0])
    if device.type != "cpu":
        torch.get_device_module(device.type).set_rng_state(states[1], device)


def _check_syncable(model: nn.Module, src: Any) -> None:
    check_type("sync_module_states", "src", src, "a global rank", int)
    for module_state in module_states_at_rest("sync_module_states", model):
        if module_state.group.unsharded.state is not SHARDED:
            module_state.root.hand_over(module_state.group, "sync_module_states")
    for name, tensor in named_tensors(model):
        kind = type(dtensor.plain(tensor))
        if kind not in (Tensor, nn.Parameter):
            raise NotImplementedError(
                f"sync_module_states: {name} is a {kind.__name__}, a tensor subclass, which cannot be sent. "
                "Make its copies equal before you convert it."
            )


def _prepare_to_receive(model: nn.Module, infos: Sequence[TensorInfo], is_source: bool, src: int) -> None:
    """Memory for what comes; refuse what has to be sent from here and is not here."""
    named = named_tensors(model)
    own = tensor_infos(named)
    # Names may differ: experts, say, that count on from rank to rank.
    unlike = [name for (name, _), info, its in zip(named, own, infos, strict=False) if not info.fits(its)]
    if unlike or len(own) != len(infos):
        raise RuntimeError(
            f"sync_module_states: this rank ({dist.get_rank()}) has {len(own)} tensors, and rank {src} "
            f"{len(infos)}; they differ in shape or dtype at: {listed(unlike, 4) or 'their end'}. "
            "Build the same model on all ranks."
        )
    sends = [
        is_source if info.coordinate is None else sends_copies(tensor, info.coordinate)
        for (_, tensor), info in zip(named, infos, strict=True)
    ]
    if names := [name for (name, tensor), here in zip(named, sends, strict=True) if here and tensor.is_meta]:
        raise RuntimeError(
            f"sync_module_states: rank {dist.get_rank()} must send values that it does not have: "
            f"{meta_message(names)}"
        )
    if any(tensor.is_meta for _, tensor in named):
        give_memory(model)
