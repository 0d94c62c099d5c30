"""Parameters that are communicated together, and the states they go through.

A group decides nothing about *when*: schedule.py does. It knows *whether* a step is allowed, and how
to do it.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from enum import Enum
from functools import partial
from itertools import accumulate
from operator import attrgetter, is_, methodcaller
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwise.comm.reduction import Hook, PartReduction, Reduction
from shardwise.comm.streams import CommStreams, CommWork, Finish
from shardwise.engine.added_parameters import ModuleWatch
from shardwise.engine.casts import Casts
from shardwise.engine.gradient_parts import Departure, Departures
from shardwise.layout.fqns import clean
from shardwise.layout.mesh import Axis, ShardMesh
from shardwise.params.bucket import Bucket
from shardwise.params.changes import ShardSnapshot, UnshardedView, are_all_there, take_gradients
from shardwise.params.extension import check_protocol, has_methods, split_off
from shardwise.params.parameter import FREED, Param, Site
from shardwise.params.replaced_parameter import name_of_replaced
from shardwise.policies import CommPolicy
from shardwise.ranks.failures import SILENT, Relay, Wait, relay_of_job
from shardwise.torch_compat import autograd, c10d, dtensor, dynamo
from shardwise.torch_compat.functorch import innermost, outside_transforms
from shardwise.torch_compat.nn_modules import refresh_flat_weights


class State(Enum):
    """Where the full parameters are."""

    SHARDED = "sharded"  # only the shard is in memory
    GATHERING = "gathering"  # the gathered buffer is allocated and being filled
    GATHERED = "gathered"  # full parameters shadow the sharded ones
    PARTLY = "partly gathered"  # a few ranks keep the full parameters together, for backward
    LENT = "lent out"  # full parameters stand in place of the shards, for the caller: unsharded()

    __hash__ = object.__hash__  # Enum's own is a Python function, and tables are looked up at every step


class GradientState(Enum):
    """Where the gradients of the full parameters are."""

    EMPTY = "empty"  # nothing but .grad of the shards
    PENDING = "pending"  # full gradients of the running backward, perhaps not all
    DEFERRED = "deferred"  # gradients of earlier backwards, left unreduced, in part or at all, on request
    REDUCING = "reducing"  # full gradients and the reduced ones, in flight

    __hash__ = object.__hash__


# By these names, since an attribute of an Enum takes Python 3.11 0.2 us, at a dozen places of every step.
SHARDED, GATHERING, GATHERED, PARTLY, LENT = State
EMPTY, PENDING, DEFERRED, REDUCING = GradientState

STATES: dict[tuple[State, str], State] = {
    (SHARDED, "unshard"): GATHERING,
    (GATHERING, "wait"): GATHERED,
    (GATHERED, "reshard"): SHARDED,
    (GATHERED, "keep_part"): PARTLY,
    (PARTLY, "unshard"): GATHERING,
    (PARTLY, "reshard"): SHARDED,
    (SHARDED, "lend"): LENT,
    (LENT, "take_back"): SHARDED,
}

GRADIENT_STATES: dict[tuple[GradientState, str], GradientState] = {
    (EMPTY, "accumulate"): PENDING,
    (PENDING, "accumulate"): PENDING,
    (DEFERRED, "accumulate"): PENDING,
    (PENDING, "defer"): DEFERRED,
    (PENDING, "reduce"): REDUCING,
    (DEFERRED, "reduce"): REDUCING,
    (REDUCING, "finish"): EMPTY,
    (REDUCING, "defer"): DEFERRED,
    (EMPTY, "join"): REDUCING,  # with zeros, where other ranks may have more
    (PENDING, "drop"): EMPTY,
    (DEFERRED, "drop"): EMPTY,
    (REDUCING, "drop"): EMPTY,
}

_S = TypeVar("_S", bound=Enum)
_is_on_meta = attrgetter("shard.bytes.is_meta")
_lands_on_host, _gathered = attrgetter("arrives_on_host"), attrgetter("unsharded_buffer")

Observer = Callable[[str, str], None]
"""Hears (event, name of the group)."""


@dataclass(frozen=True, eq=False)
class Tie:
    """A place where a parameter is registered that another group has taken: the two are tied."""

    site: Site
    original: nn.Parameter


class Group:
    """The parameters of one ``fully_shard`` call.

    ``on_gradient``, ``on_part`` and ``on_complete`` are called during backward, when the first gradient of a
    parameter, those of a part that may leave, and those of all trainable parameters are in.
    """

    def __init__(
        self,
        name: str,
        modules: Sequence[nn.Module],
        owners: Sequence[nn.Module],
        buckets: list[Bucket],
        mesh: ShardMesh,
        policy: CommPolicy,
        casts: Casts,
    ) -> None:
        self.name = name
        self.modules = tuple(modules)
        self.buckets = buckets
        self.mesh = mesh  # of the call; single parameters may have been given others
        self.device = mesh.device
        self.policy = policy
        self.casts = casts
        self.owners = tuple(owners)
        self.ties: list[Tie] = []
        self.ignored: list[nn.Parameter] = []
        self.averages_ignored = False
        self.choices: set[str] = set()  # which setters of communication were called
        self.partly_loaded: str | None = None  # why a load failed half-way
        self.modules_watch = ModuleWatch(owners)
        is_torchs = {module: type(module).__module__.startswith("torch.nn.") for module in owners}
        self._own_attributes = [module.__dict__ for module in owners if not is_torchs[module]]
        self._torch_attributes = [module.__dict__ for module in owners if is_torchs[module]]
        self._num_torch_attributes = -1
        self.state = SHARDED
        self.gradient_state = EMPTY
        self.observer: Observer | None = None
        self.on_gradient: Callable[[Group], None] = _ignore
        self.on_part: Callable[[Group], None] = _ignore
        self.on_complete: Callable[[Group], None] = _ignore
        # The parameters are others, or trained otherwise; and such changes have been followed in a pass.
        self.on_new_plan: Callable[[Group], None] = _ignore
        self.on_followed: Callable[[Group], None] = _ignore
        # What the caller may set through FSDPModule.
        self.reshard_after_forward: bool | int | None = None
        self.reshard_after_backward = True
        self.requires_gradient_sync = True
        self.requires_all_reduce = True
        self.unshard_in_backward = True
        self.keeps_unsharded_storage = False
        self.zeros_for_unused = False
        self.may_be_unused = False
        self.divide_factor: float | None = None
        self.max_reductions = 1
        self.separate_reduce_group: bool | None = None  # None: where it pays
        self.all_reduce_hook: Hook | None = None
        self.forward_prefetch: list[Group] | None = None
        self.backward_prefetch: list[Group] | None = None

        self._gathering: CommWork | None = None
        self._relay: Relay = SILENT
        self._gather_wait = Wait("gather", name, list)
        self._reduction_wait = Wait("reduction", name, list)
        self.is_shown = False
        self._take_stock()

    _SETTINGS = (
        *("reshard_after_forward", "reshard_after_backward", "requires_gradient_sync", "requires_all_reduce"),
        *("unshard_in_backward", "zeros_for_unused", "may_be_unused", "divide_factor", "max_reductions"),
        *(
            "keeps_unsharded_storage",
            "separate_reduce_group",
            "all_reduce_hook",
            "averages_ignored",
            "partly_loaded",
        ),
    )

    def take_settings(self, other: "Group") -> None:
        """Take over what the caller has set for ``other``, but for the modules to prefetch."""
        for name in self._SETTINGS:
            setattr(self, name, getattr(other, name))
        self.choices = set(other.choices)

    # --- setting up -------------------------------------------------------------------------------

    def _take_stock(self) -> None:
        """Begin anew with the parameters that the buckets have now, none of them gathered."""
        self.on_new_plan(self)
        self.params = [param for bucket in self.buckets for param in bucket.params]
        self._is_tensor_parallel = any(param.is_tensor_parallel for param in self.params)
        self.replicates = any(not bucket.mesh.replicate.is_alone for bucket in self.buckets)
        self._watch: ShardSnapshot | None = None  # made when the shards are first looked at
        self._versions: list[int] = [0] * len(self.params)
        self._fulls: tuple[nn.Parameter, ...] = ()
        self._freed: tuple[nn.Parameter, ...] = ()  # those that lose their contents when they are freed
        self._full_watch = UnshardedView((), ())
        self._reductions: list[Reduction | None] = [None] * len(self.buckets)
        # Whether some parameters may remember unreduced gradients.
        self._has_deferred = any(param.remembers_deferred for param in self.params)
        self._departures: Departures | None = None  # None: all gradients leave together
        self._hooked: set[int] = set()
        self._trainable: frozenset[int] = frozenset()
        self._awaited: set[int] = set()
        self._rnns = [
            module
            for module in dict.fromkeys(site.module for p in self.params for site in p.sites)
            if isinstance(module, nn.RNNBase)
        ]

    @torch.no_grad()
    def plan(self) -> list[nn.Parameter]:
        """Lay out the buckets and make their shards from the full parameters; touches no module."""
        with torch.inference_mode(False):
            return [shard for bucket in self.buckets for shard in bucket.make_shards()]

    def install(self, shards: Sequence[nn.Parameter]) -> None:
        """Register the shards in the modules, in place of the full parameters."""
        for param, sharded in zip(self.params, shards, strict=True):
            param.install_shard(sharded)

    def attach(self, lanes: CommStreams) -> None:
        """Tell the group where its communication runs."""
        self._lanes = lanes
        self._relay = relay_of_job()
        for wait in (self._gather_wait, self._reduction_wait):
            wait.name, wait.axes = self.name, self.all_axes
            self._relay.waits.add(wait)

    def replan(self, change: Callable[[Bucket], None], only: Bucket | None = None) -> None:
        """Let ``change`` plan buckets anew, while nothing is gathered."""
        self._refuse_change()
        for bucket in self.buckets if only is None else [only]:
            change(bucket)
        self._take_stock()

    def _refuse_change(self) -> None:
        if self.state is not SHARDED or self.gradient_state is not EMPTY:
            raise RuntimeError(
                f"{self.name}: its communication cannot be changed while its parameters are "
                f"{self.state.value} and its gradients {self.gradient_state.value}. Change it between steps, "
                "after a backward with gradient synchronisation."
            )

    def follow_protocols(self) -> None:
        """Give shards a bucket each whose local tensors were told since ``fully_shard`` how they gather."""
        if not any(map(has_methods, self.buckets)):
            return
        self._refuse_change()
        for param in self.params:
            check_protocol(param.local, param.fqn)
        with torch.inference_mode(False), torch.no_grad():
            split = [split_off(bucket, self.casts.policy) for bucket in self.buckets]
        self.buckets = [bucket for buckets in split for bucket in buckets]
        self._take_stock()

    def give_up(self, param: Param) -> None:
        """Leave a parameter to another group, which is about to take it."""
        owner = next(bucket for bucket in self.buckets if param in bucket.params)
        owner.params.remove(param)
        if owner.params:
            owner.rebuild_flat_shard()
        else:
            self.buckets.remove(owner)
        self._take_stock()

    def take_in(self, param: Param, bucket_for: Callable[[Param], Bucket]) -> None:
        """Own a parameter that another group has given up, in the bucket of its mesh."""
        for bucket in self.buckets:
            if bucket.mesh is param.mesh and bucket.takes_more:
                bucket.params.append(param)
                break
        else:
            bucket = bucket_for(param)
            self.buckets.append(bucket)
        bucket.rebuild_flat_shard()
        self._take_stock()

    def refuse_open_ties(self) -> None:
        """No parameter may be tied to one of a group that nothing sharded has in common with this one."""
        if self.ties:
            tie = self.ties[0]
            raise RuntimeError(open_tie_message(tie.site.fqn, f"{name_of_replaced(tie.original)}, which"))

    def axes(self) -> list[Axis]:
        """The axes along which its shards are spread, the longest first."""
        axes = {id(axis.pg): axis for b in self.buckets for axis in b.mesh.axes() if axis is b.mesh.shard}
        return sorted(axes.values(), key=lambda axis: -axis.world)

    def all_axes(self) -> list[Axis]:
        """Those, and the axes along which there are copies."""
        axes = {id(axis.pg): axis for bucket in self.buckets for axis in bucket.mesh.axes()}
        return sorted(axes.values(), key=lambda axis: -axis.world)

    def rename(self, names: Mapping[nn.Module, str]) -> None:
        """Take names from the view of a module further out, where ``names`` knows our modules."""
        found = [clean(names[module]) for module in self.modules if module in names]
        if len(found) == len(self.modules):
            self.name = ", ".join(found)
        for param in self.params:
            param.rename(names)

    def adopt_replaced(self) -> None:
        """Take over parameters that the caller has put in place of ours, while nothing is gathered."""
        if self.state is not SHARDED:
            return
        for param in self.params:
            new = param.replaced_by()
            if new is not None:
                param.adopt(new)

    def meta_parameters(self) -> list[str]:
        """Names of parameters that have no values yet."""
        return [param.fqn for param in self.params if param.sharded.is_meta]

    # --- full parameters --------------------------------------------------------------------------

    def refuse_added(self, names: Mapping[nn.Module, str]) -> None:
        """Refuse parameters that were added after sharding: nobody would reduce their gradients.

        ``names`` are those of all modules of the tree.
        """
        added = self.modules_watch.find_added(names, self._fulls)
        if not added:
            return
        for where, tensor in added:
            ours = [param.fqn for param in self.params if param.unsharded is tensor]
            if ours:
                raise RuntimeError(
                    f"{where}: forward assigned the gathered parameter {ours[0]} to this attribute, which "
                    "makes it a second parameter, and its memory is freed after forward. Keep a copy "
                    "(.clone())."
                )
        shown = ", ".join(where for where, _ in added[:4])
        more = f" and {len(added) - 4} more" if len(added) > 4 else ""
        were = "these parameters were" if len(added) > 1 else "this parameter was"
        raise RuntimeError(
            f"{shown}{more}: {were} added after fully_shard (group '{self.name}'). No group reduces the "
            "gradients, so they would stay this rank's own and the ranks would drift apart. Add parameters "
            "before fully_shard, call fully_shard on the new module, or freeze what is not to be trained."
        )

    def lend(self) -> None:
        """Leave the modules to the caller, who puts full parameters there; see state/summon.py."""
        self._follow_changes()
        self.state = self._next(STATES, self.state, "lend")

    def take_back(self) -> None:
        """The shards are in their places again."""
        self.state = self._next(STATES, self.state, "take_back")

    def refuse_if_lent(self, what: str, instead: str = "Leave the context first.") -> None:
        """Inside ``unsharded()`` the caller has the parameters."""
        if self.state is LENT:
            raise RuntimeError(
                f"{self.name}: {what} is not possible inside unsharded(), which has put full parameters in "
                f"place of the shards that its group works with. {instead}"
            )

    def refuse_partly_loaded(self) -> None:
        """Some of its parameters are of a checkpoint that could not be loaded to its end."""
        if self.partly_loaded is not None:
            raise RuntimeError(
                f"{self.name}: the model is partly loaded, for a load failed half-way "
                f"({self.partly_loaded}). Load a complete checkpoint before the next forward."
            )

    def refresh_flat_weights(self) -> None:
        """Let RNN modules see what stands in their places now."""
        if self._rnns:
            refresh_flat_weights(self._rnns)

    def unshard(self) -> None:
        """Begin to gather the full parameters, if they are not there or on their way."""
        if self.state is SHARDED:
            if self._follow_changes():
                self.on_followed(self)
                self._lanes.all_gather.wait_for_compute()  # which is where the shards were just moved
            if len(self._fulls) != len(self.params):
                self._make_full_parameters()
        self._gather()

    def unshard_again(self) -> None:
        """As ``unshard``, for the backward of a forward that has gathered them.

        From the same shards, whatever was assigned to the modules since: a backward is of what forward has
        used. Changes in place are left to autograd to find, by their versions; freezing is followed.
        """
        if self._watch is None or not self._fulls:
            self.unshard()
            return
        if not self._watch.is_as_trainable() and self.gradient_state is not PENDING:
            self._follow_freezing()
            self.on_followed(self)
        self._gather()

    def unshard_ahead(self) -> None:
        """As ``unshard_again``, before its turn in backward: what is frozen until then is followed then."""
        if self._watch is None or not self._fulls:
            self.unshard()
        else:
            self._gather()

    def _gather(self) -> None:
        if self.state is GATHERED or self.state is GATHERING:
            return
        self.refuse_if_lent("gathering for a forward, a backward or unshard()", _FOR_FORWARDS)
        if self.state is SHARDED:
            assert self._watch is not None
            self._versions = self._watch.versions()
        self._tell("gather")
        with self._label("gather"):
            try:
                self._gathering = self._lanes.all_gather.submit(self._start_gather)
            except RuntimeError as error:
                self._raise_explained(error, self._gather_wait)
        self._relay.issue(self._gather_wait)
        self.state = self._next(STATES, self.state, "unshard")

    def _start_gather(self) -> Finish:
        if len(self.buckets) == 1:
            return self.buckets[0].start_all_gather(self._lanes.all_gather)
        finishes: list[Finish] = []

        def finish() -> None:
            for each in finishes:
                each()

        try:
            for bucket in self.buckets:
                finishes.append(bucket.start_all_gather(self._lanes.all_gather))
        except BaseException:
            finish()  # all ranks have issued these; dropped, they would hold up whatever comes after them
            raise
        return finish

    def wait(self) -> None:
        """Wait for the gather and let the modules see the full parameters."""
        if self.state is GATHERED:
            self.show()
            return
        state = self._next(STATES, self.state, "wait")
        assert self._gathering is not None
        self._await(self._gathering.wait, self._gather_wait)
        self._gathering = None
        for bucket in self.buckets:
            bucket.drop_post_forward_shard()
        autograd.set_versions(self._fulls, self._versions)
        self.show()
        self.state = state

    def changed_since_gather(self) -> list[str]:
        """Names of parameters whose shards have changed since, where PyTorch has counted it."""
        return [
            param.fqn
            for param, version in zip(self.params, self._versions, strict=True)
            if param.version() != version
        ]

    @property
    def gathered_bytes(self) -> int:
        """What its full parameters take, as they are computed with."""
        return sum(bucket.computed.unsharded_bytes for bucket in self.buckets)

    @property
    def computes_on_shards(self) -> bool:
        """True if the full parameters are the shards themselves, as where a rank is alone."""
        return bool(self._fulls) and not self._freed

    def follow_versions(self) -> None:
        """Let kept full parameters carry the versions of their shards, which have the same contents."""
        self._versions = [param.version() for param in self.params]
        autograd.set_versions(self._fulls, self._versions)

    def show(self) -> None:
        """Let the modules see the full parameters, which are in place."""
        if not self.is_shown:
            self.is_shown = True
            self._full_watch.shadow()
            if self._rnns:
                self.refresh_flat_weights()

    def hide(self) -> None:
        """Let the modules see the shards, also where the full parameters are kept in memory.

        Between a forward and what follows it, the caller's edits of ``module.weight`` are meant for the
        shard.
        """
        if self.is_shown:
            self.is_shown = False
            self._full_watch.unshadow()
            if self._rnns:
                self.refresh_flat_weights()

    def reshard(self) -> None:
        """Free the full parameters.

        Raises:
            RuntimeError: a full parameter was changed in place; the change would be lost.
        """
        if self.state is PARTLY:
            self._drop_parts()
            return
        state = self._next(STATES, self.state, "reshard")
        changed = self.changed_in_place()
        self._free(state)
        if changed:
            self._refuse_changes(changed)

    def keep_part(self) -> None:
        """Free the full parameters, but for what a few ranks keep together until backward."""
        state = self._next(STATES, self.state, "keep_part")
        changed = self.changed_in_place()
        lane = self._lanes.all_gather
        lane.wait_for_compute()
        with lane.allocation_scope(), torch.inference_mode(False), torch.no_grad():
            for bucket in self.buckets:
                bucket.keep_post_forward_shard()
        self._free(state)
        if changed:
            self._refuse_changes(changed)

    def _drop_parts(self) -> None:
        self.state = self._next(STATES, self.state, "reshard")
        with self._lanes.all_gather.allocation_scope():
            for bucket in self.buckets:
                bucket.drop_post_forward_shard()

    def changed_in_place(self) -> list[str]:
        """Names of full parameters that are no longer what was gathered: what ``reshard`` refuses to lose."""
        changed: list[str] = []
        for bucket in self.buckets:
            changed += bucket.relocated_params()
        versions = self._full_watch.versions()
        if versions != self._versions:
            rows = zip(self.params, versions, self._versions, strict=True)
            moved = [param for param, now, before in rows if now != before]
            # Of a frozen embedding each forward renormalises anew, which gives what doing it once would.
            changed += [p.fqn for p in moved if p.sharded.requires_grad or not _is_renormalised(p)]
        return changed

    def _refuse_changes(self, changed: list[str]) -> NoReturn:
        renormalised = [p.fqn for p in self.params if p.fqn in changed and _is_renormalised(p)]
        if renormalised:
            raise RuntimeError(
                f"{', '.join(renormalised)}: nn.Embedding(max_norm=...) renormalises rows of its weight in "
                f"place in each forward, here those of a gathered copy (group '{self.name}'). The shard "
                "would keep the rows as they were, and training would go another way than in plain PyTorch. "
                "Set max_norm to None and renormalise the shard after each optimizer step, under "
                "torch.no_grad(). A frozen weight is allowed: requires_grad_(False)."
            )
        raise RuntimeError(
            f"{', '.join(changed)}: changed in place while gathered (group '{self.name}'). Inside "
            "forward a module sees a gathered copy, which is now freed, so the change would be "
            "lost. Change the sharded parameter outside of forward, under torch.no_grad()."
        )

    def abandon(self) -> None:
        """Return to SHARDED from any state, after a failed iteration."""
        if self.state is GATHERING:
            assert self._gathering is not None
            self._await(self._gathering.wait, self._gather_wait)
            self._gathering = None
        if self.state is PARTLY:
            self._drop_parts()
        elif self.state is not SHARDED:
            self._free(SHARDED)

    @property
    def is_trainable(self) -> bool:
        """True if any of its parameters wants a gradient."""
        if self._fulls:
            return bool(self._trainable)
        return any(param.sharded.requires_grad for param in self.params)

    @property
    def is_all_trainable(self) -> bool:
        """True if all of its parameters want gradients."""
        return len(self._trainable) == len(self.params)

    def side_tensors(self) -> list[Tensor]:
        """Tensors of a graph that forward left on attributes of its modules, such as auxiliary losses."""
        found = self._left_on(self._own_attributes)
        # Those of torch hold none of their own accord: they are searched where something was added to them.
        if sum(map(len, self._torch_attributes)) != self._num_torch_attributes:
            on_torch = self._left_on(self._torch_attributes)
            if not on_torch:
                self._num_torch_attributes = sum(map(len, self._torch_attributes))
            found += on_torch
        return found

    def _left_on(self, attributes: list[dict[str, Any]]) -> list[Tensor]:
        with_tensors = [own for own in attributes if Tensor in map(type, own.values())]
        return [t for own in with_tensors for t in own.values() if type(t) is Tensor and t.requires_grad]

    def owns(self, tensor: Tensor) -> bool:
        """True if ``tensor`` is a full parameter that is gathered, or shares memory with one.

        Where a rank is alone, freeing takes nothing, but the caller is handed a copy there as everywhere.
        """
        if self.state is not GATHERED:
            return False
        if any(map(partial(is_, tensor), self._fulls)):
            return True
        if isinstance(tensor, DTensor):
            tensor = dtensor.local_tensor(tensor)
        if type(tensor) not in (Tensor, nn.Parameter):
            return False
        address = innermost(tensor).data_ptr()
        return any(map(methodcaller("holds", address), map(_gathered, self.buckets)))

    def wait_if_unsharded(self) -> None:
        """Have the full parameters visible, unless they were freed meanwhile."""
        if self.state in (GATHERING, GATHERED):
            self.wait()

    def is_stale(self) -> bool:
        """True if this rank's shards changed since the full parameters were gathered from them."""
        return any(bucket.is_stale() for bucket in self.buckets)

    def follow_changes(self) -> None:
        """Take over shards that were just moved, cast or assigned, as soon as all have values here."""
        for bucket in self.buckets:
            here = (bucket.storage.device, self.device)
            for param in bucket.params:
                for tensor in [site.registered() for site in param.sites]:
                    if not (isinstance(tensor, DTensor) and dtensor.local_tensor(tensor).device in here):
                        return
        if self.state is SHARDED:
            self._follow_changes()
        for param in self.params:
            param.describe_itself()

    def _free(self, state: State) -> None:
        self.hide()
        autograd.set_versions(self._freed, (FREED,) * len(self._freed))
        lane = self._lanes.all_gather
        lane.wait_for_compute()
        with lane.allocation_scope():
            for bucket in self.buckets:
                bucket.unsharded_buffer.free()
        self._tell("free")
        self.state = state

    def keep_unsharded_storage(self, keep: bool) -> None:
        """Whether full parameters keep their memory while nobody uses them."""
        self.keeps_unsharded_storage = keep
        if not self._fulls:
            return
        for bucket in self.buckets:
            bucket.unsharded_buffer.keep_memory(keep)
        if self.state is not GATHERED and self.state is not GATHERING:
            self._free_memory()

    def _free_memory(self) -> None:
        lane = self._lanes.all_gather
        lane.wait_for_compute()
        with lane.allocation_scope():
            for bucket in self.buckets:
                bucket.unsharded_buffer.free()

    def _make_full_parameters(self) -> None:
        """Full parameters over gathered buffers. They stay the same objects from now on."""
        if names := self.meta_parameters():
            raise RuntimeError(f"Cannot run forward: {meta_message(names)}")
        with self._lanes.all_gather.allocation_scope(), torch.inference_mode(False), torch.no_grad():
            for bucket in self.buckets:
                bucket.make_unsharded_params()
                bucket.unsharded_buffer.keep_memory(self.keeps_unsharded_storage)
        self._fulls = tuple(full for bucket in self.buckets for full in bucket.unsharded_params)
        self._freed = tuple(
            full for b in self.buckets if not b.unsharded_buffer.is_alias for full in b.unsharded_params
        )
        self._full_watch = UnshardedView(self.params, self._fulls)
        self._watch_gradients()

    # --- what the caller does to the shards -------------------------------------------------------

    def _follow_changes(self) -> bool:
        """See what was assigned, moved, cast, frozen or unfrozen since the last gather; True if any was."""
        if self._watch is not None and self._watch.is_untouched(self._fulls) and not self._are_on_meta():
            return False
        self.adopt_replaced()
        if self._are_on_meta() or any(dtensor.local_tensor(p.sharded) is not p.local for p in self.params):
            self._move_in()
        self._follow_freezing()
        return True

    def _follow_freezing(self) -> None:
        for param in self.params:
            if param.unsharded is not None and param.unsharded.requires_grad != param.sharded.requires_grad:
                param.unsharded.requires_grad_(param.sharded.requires_grad)
                self.on_new_plan(self)
        self._watch_gradients()
        self._watch = ShardSnapshot(self.params)

    def _are_on_meta(self) -> bool:
        return any(map(_is_on_meta, self.buckets))

    def _move_in(self) -> None:
        """Bring shards that live elsewhere into the flat shards, planned anew if dtypes changed."""
        if names := self.meta_parameters():
            raise RuntimeError(f"Cannot run forward: {meta_message(names)}")
        carried = [full.grad for full in self._fulls]
        is_planned_anew = [bucket.sync_flat_shard() for bucket in self.buckets]
        if any(is_planned_anew):
            self._take_stock()
            if any(gradient is not None for gradient in carried):
                self._make_full_parameters()
                for bucket in self.buckets:
                    bucket.unsharded_buffer.free()
                for full, gradient, param in zip(self._fulls, carried, self.params, strict=True):
                    full.grad = None if gradient is None else gradient.to(param.precision.accumulated)
            else:
                for bucket in self.buckets:
                    bucket.drop_unsharded_params()

    def _watch_gradients(self) -> None:
        """Have trainable full parameters report their gradients."""
        own = weakref.ref(self)
        trainable = [i for i, full in enumerate(self._fulls) if full.requires_grad]
        for index in trainable:
            if index not in self._hooked:
                self.params[index].attach_hooks_to_unsharded()
                self._fulls[index].register_post_accumulate_grad_hook(partial(_tell_arrival, own, index))
                self._hooked.add(index)
        self._trainable = frozenset(trainable)
        self._awaited = set(self._trainable)
        self._departures = self._plan_departures()

    def _plan_departures(self) -> Departures | None:
        """None where all gradients leave together."""
        if all(len(bucket.parts) == 1 for bucket in self.buckets):
            return None
        firsts = accumulate([len(bucket.params) for bucket in self.buckets], initial=0)
        parts = [bucket.parts for bucket in self.buckets]
        return Departures(list(zip(firsts, parts, strict=False)), self._trainable)

    # --- gradients --------------------------------------------------------------------------------

    @outside_transforms
    def arrived(self, index: int) -> None:
        """Autograd has put the gradient of one full parameter in place."""
        departures = self._departures
        if self.gradient_state is not PENDING:
            if not self._freed:
                self._refuse_changed_shards()
            self.on_gradient(self)
            if self.gradient_state is REDUCING:
                self.finish_reduce()
            self.gradient_state = self._next(GRADIENT_STATES, self.gradient_state, "accumulate")
            self._awaited = set(self._trainable)
            if departures is not None:
                departures.begin()
        elif departures is not None and index in departures.gone:
            self._finish_sent()  # a sum of its own: this gradient is of another nested backward
        elif self.policy.backward_prefetch == "after":
            self.on_gradient(self)  # it may be of a nested backward, which decides when the group is freed
        self._awaited.discard(index)
        if not self._awaited:
            self._awaited = set(self._trainable)  # of a call that a nested backward has yet to come to
            self.on_complete(self)
        elif departures is not None and departures.arrive(index):
            self.on_part(self)

    def _refuse_changed_shards(self) -> None:
        """Shards may have changed on which a graph was computed that nothing has announced."""
        if changed := self.changed_since_gather():
            raise RuntimeError(
                f"{', '.join(changed)}: changed in place between the forward that used it and this backward "
                f"(group '{self.name}'), so that the gradient would be that of other weights. Run backward "
                "before the weights are changed, as by an optimizer's step."
            )

    @property
    def leaves_in_parts(self) -> bool:
        """True if some gradients may leave before all are there."""
        return self._departures is not None

    def send_ready(self) -> list[PartReduction]:
        """Begin to reduce the parts of the gradients that may leave before the others."""
        assert self._departures is not None
        departures = self._departures
        with _without_graph(), self._label("reduce"):
            return self._issue_reduction(lambda: self._send(departures.leave()))

    def reduce(self) -> list[PartReduction]:
        """Begin to reduce the full gradients that are there; all that is in flight now."""
        joins = self.zeros_for_unused and self.gradient_state is EMPTY
        state = self._next(GRADIENT_STATES, self.gradient_state, "join" if joins else "reduce")
        with _without_graph(), self._label("reduce"):
            if not self._fulls:  # it has not run here
                self._departures = self._plan_departures()
            part_reductions = self._issue_reduction(self._send_rest)
            for bucket, reduction in zip(self.buckets, self._reductions, strict=True):
                self._close(bucket, reduction)
        self.gradient_state = state
        self._tell("reduce")
        return part_reductions

    def _issue_reduction(self, send: Callable[[], list[PartReduction]]) -> list[PartReduction]:
        try:
            part_reductions = send()
        except RuntimeError as error:
            self._raise_explained(error, self._reduction_wait)
        self._relay.issue(self._reduction_wait)
        return part_reductions

    def _send_rest(self) -> list[PartReduction]:
        """All gradients that have not left yet."""
        if self._departures is None:
            return self._send_all()
        if self.gradient_state is not PENDING:
            self._departures.begin()
        return self._send(self._departures.rest())

    def _send_all(self) -> list[PartReduction]:
        """The gradients of each bucket, all together."""
        part_reductions = []
        gradients = self._take_gradients(self.params, self._fulls)
        for number, bucket in enumerate(self.buckets):
            own = gradients
            if len(self.buckets) > 1:
                own, gradients = gradients[: len(bucket.params)], gradients[len(bucket.params) :]
            reduction = self._open(number, is_filled=are_all_there(own))
            part_reductions += [reduction.send(part, own) for part in bucket.parts]
        return part_reductions

    def _send(self, departures: Iterable[Departure]) -> list[PartReduction]:
        """The gradients of these parts."""
        part_reductions = []
        for departure in departures:
            reduction = self._reductions[departure.bucket] or self._open(departure.bucket, is_filled=False)
            params = [self.params[index] for index in departure.indices]
            fulls = [self._fulls[index] for index in departure.indices] if self._fulls else ()
            gradients: list[Tensor | None] = [None] * len(self.buckets[departure.bucket].params)
            taken = self._take_gradients(params, fulls)
            for index, gradient in zip(departure.part.indices, taken, strict=True):
                gradients[index] = gradient
            part_reductions.append(reduction.send(departure.part, gradients))
        return part_reductions

    def _open(self, number: int, *, is_filled: bool) -> Reduction:
        bucket = self.buckets[number]
        divisor = self.divide_factor or float(bucket.mesh.num_ranks)
        self._reductions[number] = made = bucket.open_reduction(self._lanes, divisor, is_filled=is_filled)
        return made

    def _close(self, bucket: Bucket, reduction: Reduction | None) -> None:
        assert reduction is not None
        bucket.close_reduction(reduction, self.requires_all_reduce, self.all_reduce_hook)

    @torch.no_grad()
    def _finish_sent(self) -> None:
        """Bring to an end what has left before the other gradients of the running backward."""
        for number, (bucket, reduction) in enumerate(zip(self.buckets, self._reductions, strict=True)):
            if reduction is not None:
                self._close(bucket, reduction)
                self._finish(number)
        there = [i for i in self._trainable if self._fulls[i].grad is not None]
        self._awaited = set(self._trainable.difference(there))
        if self._departures is not None:
            self._departures.begin(there)

    @property
    def max_in_flight(self) -> int:
        """How many reductions may be in flight beside each other: memory against overlap."""
        return self.max_reductions + (1 if self.replicates else 0)

    def average_ignored(self) -> None:
        """Average over all ranks the gradients of parameters that the group was told to ignore.

        All of them take part on every rank, with zeros where there is none, lest ranks send different
        amounts.
        """
        if not self.averages_ignored:
            return
        trainable = [param for param in self.ignored if param.requires_grad]
        if not trainable:
            return
        for param in trainable:
            if param.grad is None:
                param.grad = torch.zeros_like(param)
        gradients = [dtensor.plain(param.grad) for param in trainable if param.grad is not None]
        for axis in self.mesh.axes():
            _average(gradients, axis)

    def advance_reduce(self) -> None:
        """Let the reduction go on to the replicas."""
        for reduction in self._in_flight():
            self._await(reduction.advance, self._reduction_wait)

    @property
    def lands_on_host(self) -> bool:
        """True if a reduction in flight ends in host memory, where it is better waited for late."""
        return any(map(_lands_on_host, self._in_flight()))

    def release_shipment(self, part_reduction: PartReduction) -> None:
        """Free the full gradients of one part_reduction, as soon as they have been summed."""
        self._await(part_reduction.release, self._reduction_wait)

    def _await(self, finish: Finish, wait: Wait) -> None:
        """Run ``finish``, which waits for other ranks; say why where it fails."""
        relay = self._relay
        around, relay.waiting = relay.waiting, wait
        try:
            finish()
        except RuntimeError as error:
            self._raise_explained(error, wait)
        finally:
            relay.waiting = around

    def _raise_explained(self, error: RuntimeError, wait: Wait) -> NoReturn:
        """Raise the failure behind ``error``, if that comes from communicating."""
        if not c10d.is_communication_error(error):
            raise error
        raise self._relay.explained(error, wait.event, self.name, self.all_axes()) from error

    def _in_flight(self) -> Iterator[Reduction]:
        return filter(None, self._reductions)

    def release_gradients(self) -> None:
        """Free the full gradients of a reduction in flight."""
        for reduction in self._in_flight():
            self._await(reduction.release, self._reduction_wait)

    def finish_reduce(self) -> None:
        """Wait for the reduction and add its result to ``.grad`` of the shards."""
        finished = self._next(GRADIENT_STATES, self.gradient_state, "finish")
        with _without_graph():
            waits = [self._finish(number) for number in range(len(self.buckets))]
            deferred = self._next(GRADIENT_STATES, self.gradient_state, "defer")
            self.gradient_state = deferred if any(waits) else finished
            self._tell("reduced")
            self._has_deferred = self._has_deferred and any(p.remembers_deferred for p in self.params)
            if any(waits):
                self._mark_deferred()

    def _finish(self, number: int) -> bool:
        """Wait for the sums of one bucket; True if they wait for those over replicas."""
        bucket, reduction = self.buckets[number], self._reductions[number]
        assert reduction is not None
        self._await(reduction.finish, self._reduction_wait)
        self._reductions[number] = None
        self._watch = self._watch or ShardSnapshot(self.params)
        return bucket.accumulate(
            reduction, without_hooks=not self._has_deferred and self._watch.has_no_gradient_hooks()
        )

    def defer(self) -> None:
        """Leave the full gradients unreduced until a later backward."""
        if any(self._in_flight()):
            self._finish_sent()  # synchronisation was switched off in the midst of a backward
        self.gradient_state = self._next(GRADIENT_STATES, self.gradient_state, "defer")
        with _without_graph():
            self._mark_deferred()

    def _mark_deferred(self) -> None:
        self._has_deferred = True
        fulls = [full.grad for full in self._fulls] or [None] * len(self.params)
        for param, waits, full in zip(self.params, self._waiting(), fulls, strict=True):
            if waits:
                param.defer_gradient(full)

    def _waiting(self) -> list[bool]:
        """Of which parameters gradients of earlier backwards wait, full ones or sums."""
        sums = [bucket.waits(i) for bucket in self.buckets for i in range(len(bucket.params))]
        if not self._fulls:
            return sums
        return [s or full.grad is not None for s, full in zip(sums, self._fulls, strict=True)]

    @property
    def has_sums_to_reduce(self) -> bool:
        """True if deferred gradients are there that a reduction now would bring further."""
        if self.gradient_state is not DEFERRED:
            return False
        if any(full.grad is not None for full in self._fulls):
            return True
        return self.requires_all_reduce and any(bucket.has_earlier for bucket in self.buckets)

    def drop_cleared(self) -> None:
        """Drop deferred gradients of parameters whose ``.grad`` the caller has cleared since."""
        if self.gradient_state is not DEFERRED:
            return
        index = 0
        for bucket in self.buckets:
            for own, param in enumerate(bucket.params):
                if param.was_cleared():
                    if self._fulls:
                        self._fulls[index].grad = None
                    if bucket.waits(own):
                        bucket.drop_earlier(own)
                index += 1
        if any(self._waiting()):
            self._mark_deferred()
        else:
            self.gradient_state = self._next(GRADIENT_STATES, self.gradient_state, "drop")

    def drop_gradients(self) -> None:
        """Forget full gradients, in flight or not."""
        for reduction in self._in_flight():
            self._await(reduction.drop, self._reduction_wait)
        self._reductions = [None] * len(self.buckets)
        for full in self._fulls:
            full.grad = None
        for param in self.params:
            param.hide_deferred()
        for bucket in self.buckets:
            bucket.drop_all_earlier()
        if self.gradient_state is not EMPTY:
            self.gradient_state = self._next(GRADIENT_STATES, self.gradient_state, "drop")

    def _take_gradients(
        self, params: Sequence[Param], fulls: Sequence[nn.Parameter]
    ) -> Sequence[Tensor | None]:
        """The full gradients of ``params``, which belong to the reduction from now on."""
        if not fulls:
            return [self._zeros_for(param) if param.sharded.requires_grad else None for param in params]
        makes_graph = torch.is_grad_enabled()
        if not (makes_graph or self.zeros_for_unused or self._is_tensor_parallel):
            plain = take_gradients(fulls)
            if plain is not None:
                return plain
        gradients: list[Tensor | None] = []
        for param, full in zip(params, fulls, strict=True):
            gradient = full.grad
            if gradient is not None:
                full.grad = None
                if makes_graph:  # create_graph=True
                    gradient = gradient.detach()
                if gradient.layout is not torch.strided:
                    raise RuntimeError(
                        f"{param.fqn}: its gradient has layout {gradient.layout}; only dense gradients "
                        "can be reduce-scattered. Build the module without sparse gradients "
                        "(nn.Embedding(sparse=False))."
                    )
                if param.is_tensor_parallel:
                    gradient = param.content_of(gradient)
            elif full.requires_grad:
                gradient = self._zeros_for(param)
            gradients.append(gradient)
        return gradients

    def _zeros_for(self, param: Param) -> Tensor | None:
        """What stands for a gradient that has not come, if anything is to."""
        if not self.zeros_for_unused:
            return None
        return torch.zeros(param.shape, dtype=param.precision.reduced, device=self.device)

    # --- small things -----------------------------------------------------------------------------

    def __del__(self) -> None:
        """What is under way stays: a back end writes into memory that it was given, whoever dies (gloo stops
        to receive anything at all)."""
        own = vars(self)  # perhaps not all of it: a copy that failed
        under_way = [own.get("_gathering"), *own.get("_reductions", ())]
        if any(each is not None for each in under_way):
            _ADRIFT.append(under_way)

    def _next(self, table: dict[tuple[_S, str], _S], state: _S, event: str) -> _S:
        """The state after ``event``; anything the table does not list is a bug."""
        try:
            return table[state, event]
        except KeyError:
            allowed = [f"{e}()" for s, e in table if s is state]
            raise RuntimeError(
                f"{self.name}: cannot {event}() while {state.value}; from here only {' or '.join(allowed)} "
                "is possible. Did a hook call into the group out of turn?"
            ) from None

    def _label(self, what: str) -> AbstractContextManager[Any]:
        """A profiler range for ``what``, if a profiler records."""
        if not autograd.profiler_is_on():
            return _NO_CONTEXT
        return torch.autograd.profiler.record_function(f"shardwise.{what} {self.name}")

    def _tell(self, event: str) -> None:
        if self.observer is not None:
            self.observer(event, self.name)


def meta_message(names: Sequence[str]) -> str:
    """What to say when parameters without values are about to be used."""
    shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
    are = "parameters are" if len(names) > 1 else "parameter is"
    return (
        f"{len(names)} {are} still on the meta device: {shown}. Nothing has given them values. Call "
        "shardwise.materialize(model), or load a checkpoint, first."
    )


def open_tie_message(fqn: str, other: str) -> str:
    """What to say of the parameter ``fqn``, which is tied to one that ``other`` begins a clause about."""
    return (
        f"{fqn} is tied to {other} was sharded in another fully_shard call, and no sharded module contains "
        "both, to own the parameter. Call fully_shard on the module around both, after these two, or shard "
        "both in one call, as a list."
    )


def axes_of(groups: Sequence[Group]) -> list[Axis]:
    """The axes along which the shards of ``groups`` are spread, the longest first."""
    axes = {id(axis.pg): axis for group in groups for axis in group.axes() if not axis.is_alone}
    return sorted(axes.values(), key=lambda axis: -axis.world)


def _is_renormalised(param: Param) -> bool:
    """True if an embedding writes to the weight in forward: ``max_norm``."""
    return any(
        isinstance(site.module, (nn.Embedding, nn.EmbeddingBag)) and site.module.max_norm is not None
        for site in param.sites
    )


@torch.no_grad()
def _average(gradients: list[Tensor], axis: Axis) -> None:
    """Average tensors over the ranks of ``axis``, in place, all of one dtype together."""
    for dtype in dict.fromkeys(g.dtype for g in gradients):
        same = [g for g in gradients if g.dtype == dtype]
        flat = torch.cat([g.reshape(-1) for g in same]).div_(axis.world)
        dist.all_reduce(flat, group=axis.pg)
        for gradient, part in zip(same, flat.split([g.numel() for g in same]), strict=True):
            gradient.copy_(part.view_as(gradient))


def _tell_arrival(group: "weakref.ref[Group]", index: int, _full: Tensor) -> None:
    """A hook on a full parameter. Weak: Python's collector sees no hooks that C++ holds; models lived on."""
    if (alive := group()) is not None:
        alive.arrived(index)


dynamo.break_graphs(_tell_arrival)  # of compiled autograd


def _ignore(group: Group) -> None:
    """No schedule listens yet."""


_ADRIFT: list[Any] = []
"""Communication of groups that died before it ended."""

_NO_CONTEXT = nullcontext()

_FOR_FORWARDS = (
    "Leave the context first. To run forwards with parameters that stay gathered, as generation does, use "
    "inference()."
)


@contextmanager
def _neither_graph_nor_inference() -> Iterator[None]:
    with torch.inference_mode(False), torch.no_grad():
        yield


def _without_graph() -> AbstractContextManager[Any]:
    """No graph is recorded inside, and tensors made inside may be trained: so it is in most backwards."""
    if torch.is_grad_enabled() or torch.is_inference_mode_enabled():
        return _neither_graph_nor_inference()
    return _NO_CONTEXT
