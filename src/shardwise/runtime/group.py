"""Parameters that are communicated together, and the states they go through.

A group decides nothing about *when*: schedule.py does. It knows *whether* a step is allowed, and how
to do it.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from enum import Enum
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwise.policy import CommPolicy
from shardwise.runtime import compat
from shardwise.runtime.buffers import FlatShard, GatheredBuffer
from shardwise.runtime.collectives import Communicator, Gather, Reduce
from shardwise.runtime.layout import Entry, Layout, plan_layout
from shardwise.runtime.mesh import ShardMesh
from shardwise.runtime.param import FREED, Param, refresh_flat_weights
from shardwise.runtime.streams import Lanes, Ticket


class State(Enum):
    """Where the full parameters are."""

    SHARDED = "sharded"  # only the shard is in memory
    GATHERING = "gathering"  # the gathered buffer is allocated and being filled
    GATHERED = "gathered"  # full parameters shadow the sharded ones


class GradientState(Enum):
    """Where the gradients of the full parameters are."""

    NONE = "empty"  # nothing but .grad of the shards
    PENDING = "pending"  # full gradients of the running backward, perhaps not all
    DEFERRED = "deferred"  # full gradients of earlier backwards, left unreduced on request
    REDUCING = "reducing"  # full gradients and the reduced ones, in flight


STATES: dict[tuple[State, str], State] = {
    (State.SHARDED, "unshard"): State.GATHERING,
    (State.GATHERING, "wait"): State.GATHERED,
    (State.GATHERED, "reshard"): State.SHARDED,
}

GRADIENT_STATES: dict[tuple[GradientState, str], GradientState] = {
    (GradientState.NONE, "accumulate"): GradientState.PENDING,
    (GradientState.PENDING, "accumulate"): GradientState.PENDING,
    (GradientState.DEFERRED, "accumulate"): GradientState.PENDING,
    (GradientState.PENDING, "defer"): GradientState.DEFERRED,
    (GradientState.PENDING, "reduce"): GradientState.REDUCING,
    (GradientState.DEFERRED, "reduce"): GradientState.REDUCING,
    (GradientState.REDUCING, "finish"): GradientState.NONE,
    (GradientState.PENDING, "drop"): GradientState.NONE,
    (GradientState.DEFERRED, "drop"): GradientState.NONE,
    (GradientState.REDUCING, "drop"): GradientState.NONE,
}

_S = TypeVar("_S", bound=Enum)

Observer = Callable[[str, str], None]
"""Hears (event, name of the group)."""


class Group:
    """The parameters of one ``fully_shard`` call.

    ``on_gradient`` and ``on_complete`` are called during backward, when the first gradient of a
    parameter and when those of all trainable parameters are in.
    """

    def __init__(
        self,
        name: str,
        modules: Sequence[nn.Module],
        owners: Sequence[nn.Module],
        params: list[Param],
        mesh: ShardMesh,
        policy: CommPolicy,
    ) -> None:
        self.name = name
        self.modules = tuple(modules)
        self.params = params
        self.mesh = mesh
        self._owners = tuple(owners)
        self._num_registered = sum(len(module._parameters) for module in owners)
        self.policy = policy
        self.state = State.SHARDED
        self.gradient_state = GradientState.NONE
        self.observer: Observer | None = None
        self.on_gradient: Callable[[Group], None] = _ignore
        self.on_complete: Callable[[Group], None] = _ignore
        # What the caller may set through FSDPModule.
        self.reshard_after_forward: bool | None = None
        self.reshard_after_backward = True
        self.requires_gradient_sync = True
        self.divide_factor: float = float(mesh.world)
        self.forward_prefetch: list[Group] | None = None
        self.backward_prefetch: list[Group] | None = None

        self._versions: list[int] = [0] * len(params)
        self._fulls: list[nn.Parameter] = []
        self._freed = [FREED] * len(params)
        self._hooked: set[int] = set()
        self._trainable: frozenset[int] = frozenset()
        self._awaited: set[int] = set()
        self._gathering: Ticket | None = None
        self._is_shown = False
        self._memory: range | None = None
        self._reduction: tuple[Ticket, list[Tensor | None], Tensor] | None = None
        self._rnns = [
            module
            for module in dict.fromkeys(site.module for p in params for site in p.sites)
            if isinstance(module, nn.RNNBase)
        ]

    # --- setting up -------------------------------------------------------------------------------

    def plan(self, comm: Communicator) -> list[nn.Parameter]:
        """Lay out the group and make its shards from the full parameters; touches no module."""
        self._comm = self._reduce_comm = comm
        self._lay_out([param.sharded for param in self.params], self._initial_device())
        rank = self.mesh.rank
        shards = []
        with torch.no_grad(), torch.inference_mode(False):
            for param, slot, view in zip(self.params, self.layout.slots, self.shard.views, strict=True):
                part = param.sharded.detach()
                if not slot.is_replicated:
                    part = part[slice(*slot.row_range(rank))]
                if view.is_meta and not part.is_meta:
                    # Others of the group have no values yet: this one waits for them beside the buffer.
                    view = torch.empty_like(
                        part, device=self.mesh.device, memory_format=torch.contiguous_format
                    )
                shards.append(param.make_shard(view.copy_(part)))
        return shards

    def install(self, shards: Sequence[nn.Parameter]) -> None:
        """Register the shards in the modules, in place of the full parameters."""
        for param, sharded in zip(self.params, shards, strict=True):
            param.install_shard(sharded)

    def attach(self, lanes: Lanes, reduce_comm: Communicator | None = None) -> None:
        """Tell the group where its communication runs."""
        self._lanes = lanes
        if reduce_comm is not None and reduce_comm is not self._reduce_comm:
            self._reduce_comm = reduce_comm
            self._reduce = Reduce(reduce_comm, self.layout, self.shard.bytes.device)

    def rename(self, names: Mapping[nn.Module, str]) -> None:
        """Take names from the view of a module further out, where ``names`` knows our modules."""
        found = [names[module] for module in self.modules if module in names]
        if len(found) == len(self.modules):
            self.name = ", ".join(found)
        for param in self.params:
            param.rename(names)

    def meta_parameters(self) -> list[str]:
        """Names of parameters that have no values yet."""
        return [param.fqn for param in self.params if param.sharded.is_meta]

    def _initial_device(self) -> torch.device:
        on_meta = any(param.sharded.is_meta for param in self.params)
        return torch.device("meta") if on_meta else self.mesh.device

    def _lay_out(self, tensors: Sequence[Tensor], device: torch.device) -> None:
        """Plan buffers and collectives for parameters of these shapes and dtypes."""
        entries = [Entry(tuple(t.shape), t.dtype.itemsize, t.dtype) for t in tensors]
        limit = self.policy.packing_limit_bytes
        if limit is None:
            limit = self._comm.packing_limit_bytes
        self.layout: Layout = plan_layout(entries, self.mesh.world, lambda size: size >= limit)
        rank = self.mesh.rank
        with torch.inference_mode(False):
            self.shard = FlatShard(self.layout, rank, device)
        self._gather: Gather | None = None
        self._reduce = Reduce(self._reduce_comm, self.layout, device)
        self._gradient_places = [
            (slot.local_shape(rank), _contiguous_stride(slot.local_shape(rank)),
             slot.shard_offset // slot.entry.itemsize)
            for slot in self.layout.slots
        ]  # fmt: skip
        for param in self.params:
            param.full = None
        self._fulls = []
        self._hooked = set()

    # --- full parameters --------------------------------------------------------------------------

    def check_modules(self) -> None:
        """Refuse parameters that were added after sharding: nobody would reduce their gradients."""
        if sum([len(module._parameters) for module in self._owners]) == self._num_registered:
            return
        known = {(site.module, site.name): site.fqn for p in self.params for site in p.sites}
        prefixes = {site.module: site.fqn.rpartition(".")[0] for p in self.params for site in p.sites}
        for module in self._owners:
            for name, tensor in module._parameters.items():
                if tensor is not None and (module, name) not in known:
                    where = f"{prefixes.get(module, self.name)}.{name}".lstrip(".")
                    self._refuse_added(where, tensor)

    def _refuse_added(self, where: str, tensor: Tensor) -> None:
        ours = [param.fqn for param in self.params if param.full is tensor]
        if ours:
            raise RuntimeError(
                f"{where}: forward assigned the gathered parameter {ours[0]} to this attribute, which makes "
                "it a second parameter, and its memory is freed after forward. Keep a copy (.clone())."
            )
        raise RuntimeError(
            f"{where}: this parameter was added after fully_shard (group '{self.name}'). Its gradient would "
            "stay this rank's own and the ranks would drift apart. Add parameters before fully_shard, or in "
            "a module that is sharded itself."
        )

    def unshard(self) -> None:
        """Begin to gather the full parameters, if they are not there or on their way."""
        if self.state is not State.SHARDED:
            return
        if self._follow_changes():
            self._lanes.gather.follow_compute()  # which is where the shards were just moved
        if self._gather is None:
            self._make_full_parameters()
        assert self._gather is not None
        self._versions = [param.version() for param in self.params]
        self._tell("gather")
        with _label(f"shardwise.gather {self.name}"):
            self._gathering = self._lanes.gather.submit(partial(self._gather.start, self._lanes.gather))
        self.state = self._next(STATES, self.state, "unshard")

    def wait(self) -> None:
        """Wait for the gather and let the modules see the full parameters."""
        if self.state is State.GATHERED:
            self.show()
            return
        state = self._next(STATES, self.state, "wait")
        assert self._gathering is not None
        self._gathering.wait()
        self._gathering = None
        compat.set_versions(self._fulls, self._versions)
        self._memory = self._gathered.addresses()
        self.show()
        self.state = state

    def show(self) -> None:
        """Let the modules see the full parameters, which are in place."""
        if not self._is_shown:
            self._is_shown = True
            for param in self.params:
                param.shadow()
            if self._rnns:
                refresh_flat_weights(self._rnns)

    def hide(self) -> None:
        """Let the modules see the shards, also where the full parameters are kept in memory.

        Between a forward and what follows it, the caller's edits of ``module.weight`` are meant for the
        shard.
        """
        if self._is_shown:
            self._is_shown = False
            for param in self.params:
                param.unshadow()
            if self._rnns:
                refresh_flat_weights(self._rnns)

    def reshard(self) -> None:
        """Free the full parameters.

        Raises:
            RuntimeError: a full parameter was changed in place; the change would be lost.
        """
        state = self._next(STATES, self.state, "reshard")
        start = self._gathered.bytes.data_ptr()
        changed = [
            param.fqn
            for param, full, slot, version in zip(
                self.params, self._fulls, self.layout.slots, self._versions, strict=True
            )
            if full._version != version or (slot.slot_bytes and full.data_ptr() != start + slot.slot_offset)
        ]
        self._free(state)
        if changed:
            raise RuntimeError(
                f"{', '.join(changed)}: changed in place while gathered (group '{self.name}'). Inside "
                "forward a module sees a gathered copy, which is now freed, so the change would be "
                "lost. Change the sharded parameter outside of forward, under torch.no_grad()."
            )

    def abandon(self) -> None:
        """Return to SHARDED from any state, after a failed iteration."""
        if self.state is State.GATHERING:
            assert self._gathering is not None
            self._gathering.wait()
            self._gathering = None
        if self.state is not State.SHARDED:
            self._free(State.SHARDED)

    @property
    def is_trainable(self) -> bool:
        """True if any of its parameters wants a gradient."""
        return bool(self._trainable)

    def side_tensors(self) -> list[Tensor]:
        """Tensors of a graph that forward left on attributes of its modules, such as auxiliary losses."""
        return [
            value
            for module in self._owners
            for value in module.__dict__.values()
            if type(value) is Tensor and value.requires_grad
        ]

    def owns(self, tensor: Tensor) -> bool:
        """True if ``tensor`` lies in the gathered buffer, so that freeing would take its contents."""
        if self._memory is None or type(tensor) not in (Tensor, nn.Parameter):
            return False
        return tensor.data_ptr() in self._memory

    def wait_if_unsharded(self) -> None:
        """Have the full parameters visible, unless they were freed meanwhile."""
        if self.state is not State.SHARDED:
            self.wait()

    def is_stale(self) -> bool:
        """True if this rank's shards changed since the full parameters were gathered from them.

        Compares contents with its own part of the gathered buffer: versions do not tell, since foreach
        and fused optimizers, and changes through ``.data``, count none on a DTensor.
        """
        if self.mesh.world == 1:
            return False
        rank = self.mesh.rank
        return not all(param.is_untouched() for param in self.params) or any(
            not torch.equal(self.shard.chunk(slot), self._gathered.slot(slot).view(slot.world, -1)[rank])
            for slot in self.layout.slots
            if slot.chunk_bytes
        )

    def follow_changes(self) -> None:
        """Take over shards that were just moved, cast or assigned, as soon as all have values here."""
        tensors = [site.registered() for param in self.params for site in param.sites]
        if not all(isinstance(t, DTensor) and t.to_local().device == self.mesh.device for t in tensors):
            return
        if self.state is State.SHARDED:
            self._follow_changes()
        for param in self.params:
            param.describe_itself()

    def _free(self, state: State) -> None:
        self.hide()
        compat.set_versions(self._fulls, self._freed)
        lane = self._lanes.gather
        lane.follow_compute()
        with lane.memory():
            self._gathered.free()
        self._tell("free")
        self.state = state

    def _make_full_parameters(self) -> None:
        """Full parameters over a gathered buffer. They stay the same objects from now on."""
        if names := self.meta_parameters():
            raise RuntimeError(meta_message(names))
        lane = self._lanes.gather
        with lane.memory(), torch.inference_mode(False), torch.no_grad():
            self._gathered = GatheredBuffer(self.layout, self.shard, self.shard.bytes.device)
            for param, slot in zip(self.params, self.layout.slots, strict=True):
                param.make_full(self._gathered.full_tensor(slot))
            self._gather = Gather(self._comm, self.layout, self.shard, self._gathered)
        self._fulls = [param.full for param in self.params if param.full is not None]
        self._watch_gradients()

    # --- what the caller does to the shards -------------------------------------------------------

    def _follow_changes(self) -> bool:
        """See what was assigned, moved, cast, frozen or unfrozen since the last gather; True if any was."""
        if all(param.is_untouched() for param in self.params) and not self.shard.bytes.is_meta:
            return False
        for param in self.params:
            new = param.replaced_by()
            if new is not None:
                param.adopt(new)
        if self.shard.bytes.is_meta or any(
            compat.local_tensor(p.sharded) is not p.local for p in self.params
        ):
            self._move_in()
        for param in self.params:
            if param.full is not None and param.full.requires_grad != param.sharded.requires_grad:
                param.full.requires_grad_(param.sharded.requires_grad)
        self._watch_gradients()
        return True

    @torch.no_grad()
    def _move_in(self) -> None:
        """Copy shards that live elsewhere into the flat shard, planned anew if dtypes changed."""
        names_of_meta = self.meta_parameters()
        if names_of_meta:
            raise RuntimeError(meta_message(names_of_meta))
        locals_ = [compat.local_tensor(param.sharded) for param in self.params]
        for param, local in zip(self.params, locals_, strict=True):
            if local.device != self.mesh.device:
                raise RuntimeError(
                    f"{param.fqn}: its shard is on {local.device}, but its mesh is of "
                    f"{self.mesh.device}, where it has to be gathered. Move the model back with "
                    f".to('{self.mesh.device}'), or shard it over a mesh of the other device."
                )
        carried = [full.grad for full in self._fulls]
        same_dtypes = all(
            param.sharded.dtype == slot.entry.kind
            for param, slot in zip(self.params, self.layout.slots, strict=True)
        )
        if not same_dtypes or self.shard.bytes.device != self.mesh.device:
            self._lay_out([param.sharded for param in self.params], self.mesh.device)
        with torch.inference_mode(False):
            self.shard.fill(locals_)
        for param, view, last in zip(self.params, self.shard.views, self._versions, strict=True):
            param.rebase(view, last)
        if not self._fulls and any(gradient is not None for gradient in carried):
            self._make_full_parameters()
            self._gathered.free()
            for full, gradient in zip(self._fulls, carried, strict=True):
                full.grad = None if gradient is None else gradient.to(full.dtype)

    def _watch_gradients(self) -> None:
        """Have trainable full parameters report their gradients."""
        trainable = [i for i, full in enumerate(self._fulls) if full.requires_grad]
        for index in trainable:
            if index not in self._hooked:
                self.params[index].attach_hooks_of_full()
                self._fulls[index].register_post_accumulate_grad_hook(partial(self._accumulated, index))
                self._hooked.add(index)
        self._trainable = frozenset(trainable)
        self._awaited = set(self._trainable)

    # --- gradients --------------------------------------------------------------------------------

    def _accumulated(self, index: int, _full: Tensor) -> None:
        """Autograd has put the gradient of one full parameter in place."""
        if self.gradient_state is not GradientState.PENDING:
            self.on_gradient(self)
            if self.gradient_state is GradientState.REDUCING:
                self.finish_reduce()
            self.gradient_state = self._next(GRADIENT_STATES, self.gradient_state, "accumulate")
            self._awaited = set(self._trainable)
        self._awaited.discard(index)
        if not self._awaited:
            self.on_complete(self)

    def reduce(self) -> None:
        """Begin to reduce the full gradients that are there."""
        state = self._next(GRADIENT_STATES, self.gradient_state, "reduce")
        gradients = self._take_gradients()
        lane = self._lanes.reduce
        with torch.no_grad(), torch.inference_mode(False), _label(f"shardwise.reduce {self.name}"):
            make = torch.zeros if self.layout.has_padding else torch.empty
            output = make(self.layout.shard_bytes, dtype=torch.uint8, device=self.shard.bytes.device)
            lane.follow_compute()
            start = partial(self._reduce.start, lane, gradients, output, self.divide_factor)
            ticket = lane.submit(start)
        self._reduction = (ticket, gradients, output)
        self.gradient_state = state
        self._tell("reduce")

    @torch.no_grad()
    def finish_reduce(self) -> None:
        """Wait for the reduction and add its result to ``.grad`` of the shards."""
        state = self._next(GRADIENT_STATES, self.gradient_state, "finish")
        assert self._reduction is not None
        ticket, gradients, output = self._reduction
        ticket.wait()
        self._reduction = None
        self.gradient_state = state
        self._tell("reduced")
        typed: dict[torch.dtype, Tensor] = {}
        with torch.inference_mode(False):
            for param, gradient, place in zip(self.params, gradients, self._gradient_places, strict=True):
                if gradient is None:
                    continue
                base = typed.get(gradient.dtype)
                if base is None:
                    base = typed[gradient.dtype] = output.view(gradient.dtype)
                param.add_gradient(base.as_strided(*place))

    def defer(self) -> None:
        """Leave the full gradients unreduced until a later backward."""
        self.gradient_state = self._next(GRADIENT_STATES, self.gradient_state, "defer")
        with torch.no_grad(), torch.inference_mode(False):
            for param, full in zip(self.params, self._fulls, strict=True):
                if full.grad is not None:
                    param.defer_gradient()

    def drop_cleared(self) -> None:
        """Drop deferred gradients of parameters whose ``.grad`` the caller has cleared since."""
        if self.gradient_state is not GradientState.DEFERRED:
            return
        is_empty = True
        for param, full in zip(self.params, self._fulls, strict=True):
            if param.was_cleared():
                full.grad = None
            elif full.grad is not None:
                is_empty = False
        if is_empty:
            self.gradient_state = self._next(GRADIENT_STATES, self.gradient_state, "drop")
        else:
            for param, full in zip(self.params, self._fulls, strict=True):
                if full.grad is not None:
                    param.defer_gradient()

    def drop_gradients(self) -> None:
        """Forget full gradients, in flight or not."""
        if self._reduction is not None:
            self._reduction[0].wait()
            self._reduction = None
        for full in self._fulls:
            full.grad = None
        if self.gradient_state is not GradientState.NONE:
            self.gradient_state = self._next(GRADIENT_STATES, self.gradient_state, "drop")

    def _take_gradients(self) -> list[Tensor | None]:
        gradients: list[Tensor | None] = []
        for param, full in zip(self.params, self._fulls, strict=True):
            gradient = full.grad
            if gradient is not None:
                full.grad = None
                if gradient.requires_grad:  # made by create_graph=True
                    gradient = gradient.detach()
                if gradient.layout is not torch.strided:
                    raise RuntimeError(
                        f"{param.fqn}: its gradient has layout {gradient.layout}; only dense gradients "
                        "can be reduce-scattered. Build the module without sparse gradients "
                        "(nn.Embedding(sparse=False))."
                    )
            gradients.append(gradient)
        return gradients

    # --- small things -----------------------------------------------------------------------------

    def _next(self, table: dict[tuple[_S, str], _S], state: _S, event: str) -> _S:
        """The state after ``event``; anything the table does not list is a bug."""
        try:
            return table[state, event]
        except KeyError:
            allowed = [f"{e}()" for s, e in table if s is state]
            raise RuntimeError(
                f"{self.name}: cannot {event}() while {state.value}; from here only "
                f"{' or '.join(allowed)} is possible. Did a hook call into the group out of turn?"
            ) from None

    def _tell(self, event: str) -> None:
        if self.observer is not None:
            self.observer(event, self.name)


def meta_message(names: Sequence[str]) -> str:
    """What to say when parameters without values are about to be used."""
    shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
    return (
        f"Cannot run forward: {len(names)} parameter{'s are' if len(names) > 1 else ' is'} still on "
        f"the meta device: {shown}. Nothing has given them values. Call model.to_empty(device=...) and "
        "initialise the parameters, or load a checkpoint, before the first forward."
    )


def _contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    return torch.empty(tuple(shape), device="meta").stride()


def _ignore(group: Group) -> None:
    """No schedule listens yet."""


_NO_LABEL = nullcontext()


def _label(text: str) -> AbstractContextManager[Any]:
    """A profiler range named ``text``, if a profiler records."""
    return torch.autograd.profiler.record_function(text) if compat.profiler_is_on() else _NO_LABEL
