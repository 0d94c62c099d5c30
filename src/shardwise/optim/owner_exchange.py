"""How blocks of sharded tensors reach their owners, and results return, while others are computed.

They are sent in rounds, their pieces packed into one buffer of bytes, by an exchange between all ranks that
share them:

    communication   there 0 | there 1            back 0, there 2           back 1, there 3 ...
    computation             | function, round 0 | function, round 1       | function, round 2 ...

An exchange is queued before the computation that hides it. All ranks queue exchanges in the same order.
Buffers of two rounds live at a time.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from hashlib import sha256
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardwise.comm.full_tensors import sharding_of
from shardwise.comm.streams import Finish, nothing, waiting_for
from shardwise.layout.fqns import clean
from shardwise.layout.mesh import Axis, device_of
from shardwise.layout.regions import Region, Split
from shardwise.optim.owners import Block, BlockCost, BlockKey, BlockPiece, OwnerPlan, Pieces, Placed, Round
from shardwise.params.parameter import name_of_replaced
from shardwise.ranks.agreement import run_on_all_ranks
from shardwise.ranks.failures import monitor_of_job
from shardwise.ranks.model_ranks import gather_from_all, own_rank
from shardwise.ranks.packing import Form, num_packed_bytes, views_in
from shardwise.torch_compat import c10d, dtensor, foreach

T = TypeVar("T")

BATCH_BYTES = 64 << 20
"""Bytes of whole blocks that an owner holds at once, unless one block is larger."""


@dataclass(frozen=True)
class Travel:
    """How a tensor is sent: dtypes of what its owner receives and sends back, and the owner's device."""

    there: tuple[torch.dtype, ...]
    back: torch.dtype
    device: torch.device


class Stack(NamedTuple):
    """Whole blocks of one shape, ``[count, *shape]`` in each of ``tensors``."""

    blocks: list[Block]
    tensors: tuple[Tensor, ...]


RoundKey = tuple[int, int]
"""A round: the index of a set of ranks that share tensors, and the index of the round in it."""

Function = Callable[[RoundKey, list[Stack]], list[Tensor]]
"""Takes the blocks of a round that this rank owns; returns a result for each stack, of its shape."""

Read = Callable[[int], Sequence[Tensor]]
"""Returns this rank's part of what is sent of the tensor at an index."""

Write = Callable[[Block, tuple[slice, ...], Tensor], None]
"""Takes a block, an index into this rank's part of its tensor, and the part of the result for it."""


Sharing = tuple[tuple[int, ...], torch.device]
"""The ranks that share a tensor, in ascending order, and their device. Several meshes may have the same."""


def sharing_of(tensor: Tensor) -> Sharing:
    """The ranks of its mesh; only this one for a plain tensor."""
    if not isinstance(tensor, DTensor):
        return (own_rank(),), tensor.device
    mesh = tensor.device_mesh
    return tuple(sorted(mesh.mesh.flatten().tolist())), device_of(mesh)


def _placed(tensor: Tensor, regions: Sequence[Region], seen: dict[Any, Any]) -> Placed:
    """How ``tensor`` lies on the ranks that share it; ``regions`` of its blocks. ``seen``: coordinates, so
    that equal ones are one object."""
    split, places = Split(tuple(tensor.shape), (1,), ()), [(0,)]
    if isinstance(tensor, DTensor):
        mesh = tensor.device_mesh.mesh
        found = [tuple(place) for place in torch.ones_like(mesh).nonzero().tolist()]
        split, places = sharding_of(tensor), sorted(found, key=lambda place: int(mesh[place]))
    coordinates = tuple(places)
    return Placed(split, seen.setdefault(coordinates, coordinates), tuple(regions))


_groups: "WeakKeyDictionary[Any, dict[Any, dist.ProcessGroup]]" = WeakKeyDictionary()


def _group_of(ranks: tuple[int, ...], device: torch.device) -> dist.ProcessGroup:
    """A process group of all ``ranks``: that of the job, or one made once."""
    world = dist.group.WORLD
    assert world is not None
    everyone = c10d.ranks_of(world)
    if tuple(everyone) == ranks:
        return world
    made = _groups.setdefault(world, {})
    if (ranks, device) not in made:
        made[ranks, device] = c10d.subgroup(world, [everyone.index(rank) for rank in ranks], device, "owners")
    return made[ranks, device]


class OwnerExchange:
    """Sends blocks of tensors to their owners, and the owners' results back.

    Args:
        tensors: DTensors on any meshes with any placements except partial ones, or plain tensors, which each
            rank owns. Only their forms matter; they are not kept.
        names: for messages.
        regions: of the blocks of each tensor.
        travels: of each tensor.
        cost: of a block, to balance owners by.
        batch_bytes: of whole blocks that an owner holds at once; None: all in one round.
        alike: what blocks in one stack have in common, besides shape and travel.
        fixed: owners that are already known, as members of the ranks that share a tensor.

    Local; ``agree`` makes a process group for each mesh that has none of all its ranks.
    """

    def __init__(
        self,
        tensors: Sequence[Tensor],
        names: Sequence[str],
        regions: Sequence[Sequence[Region]],
        travels: Sequence[Travel],
        *,
        cost: BlockCost,
        batch_bytes: int | None = BATCH_BYTES,
        alike: Callable[[Block], Any] = lambda _: None,
        fixed: Mapping[BlockKey, int] | None = None,
    ) -> None:
        self.names = list(names)
        self.forms = list(map(form_of, tensors))
        shared: dict[Sharing, dict[int, Placed]] = {}
        seen: dict[Any, Any] = {}
        meshes: dict[Sharing, DeviceMesh | None] = {}
        for index, tensor in enumerate(tensors):
            sharing = sharing_of(tensor)
            shared.setdefault(sharing, {})[index] = _placed(tensor, regions[index], seen)
            meshes.setdefault(sharing, tensor.device_mesh if isinstance(tensor, DTensor) else None)
        self._among = [
            _RankExchange(
                sharing,
                meshes[sharing],
                OwnerPlan(shared[sharing], len(sharing[0]), cost, fixed or {}),
                travels,
                batch_bytes,
                alike,
            )
            # In the same order on all ranks; subsets of other sets first: see agree.
            for sharing in sorted(shared, key=lambda each: (len(each[0]), each[0]))
        ]

    @property
    def owned(self) -> list[BlockKey]:
        """The blocks that this rank owns."""
        return [key for each in self._among for key, owner in each.plan.owners.items() if owner == each.own]

    @property
    def owners(self) -> dict[BlockKey, int]:
        """The owners of all blocks, as members of the ranks that share a tensor."""
        return {key: owner for each in self._among for key, owner in each.plan.owners.items()}

    def axes(self) -> list[Axis]:
        """The axes that connect this rank with those that share tensors with it."""
        return [axis for each in self._among for axis in each.axes]

    def is_of(self, tensors: Sequence[Tensor]) -> bool:
        """Whether ``tensors`` have the forms that this exchange was made for."""
        return len(tensors) == len(self.forms) and list(map(form_of, tensors)) == self.forms

    def agree(
        self,
        caller: str,
        active: Collection[int],
        problem: Exception | None = None,
        same: Mapping[str, Any] | None = None,
    ) -> None:
        """Raise on all ranks if any has a problem, or if they would not exchange the tensors ``active``
        alike.

        ``same``: what else must be equal. Collective. On a device the host waits for the queued work.
        """
        chosen = set(active)
        told: dict[str, Any] = {
            "what to leave out": [name for i, name in enumerate(self.names) if i not in chosen]
        }
        told |= same or {}
        self._in_every_set(caller, problem, lambda each, problem: each.agree(caller, told, problem))

    def tell(self, caller: str, own: T, problem: Exception | None) -> dict[int, T]:
        """The ``own`` of each rank that shares tensors, by global rank; raises a ``problem`` of any.
        Collective.
        """
        found = {own_rank(): own}

        def tell(each: _RankExchange, problem: Exception | None) -> None:
            run_on_all_ranks(each.axes, each.device, partial(_raise, problem))
            found.update(gather_from_all(each.axes, own))

        self._in_every_set(caller, problem, tell)
        return found

    def _in_every_set(
        self,
        caller: str,
        problem: Exception | None,
        act: Callable[["_RankExchange", Exception | None], None],
    ) -> None:
        """Call ``act`` for each set of ranks; a problem in one goes on to the next, and is raised last."""
        with monitor_of_job().call(caller, self.axes):
            for each in self._among:
                try:
                    act(each, problem)
                except Exception as error:
                    problem = error
        if problem is not None:
            raise problem

    def run(
        self,
        read: Read,
        function: Function,
        write: Write,
        active: Collection[int],
        check: Callable[[], None] | None = None,
    ) -> None:
        """Apply ``function`` to the blocks of the tensors at the indices ``active``, round by round.
        Collective.

        Args:
            read: called when the first block of a tensor is about to be sent.
            function: called on all ranks in every round, even if they own nothing of it.
            write: called once for each block that this rank has a part of.
            active: the same on all ranks; :meth:`agree` checks it.
            check: called after all rounds, before anything is sent back; it may raise. All results are kept
                until then; without it, only those of two rounds.
        """
        computed: Any = (
            back for i, each in enumerate(self._among) for back in each.run(i, read, function, active)
        )
        if check is not None:
            computed = list(computed)
            check()
        leaving: Finish = nothing
        for send_back in computed:
            sent = send_back(write)
            leaving()
            leaving = sent
        leaving()

    def gather(self, read: Read) -> list[Stack]:
        """All blocks that this rank owns, in one round, if the same ranks share all tensors. Collective."""
        (among,) = self._among
        wait, stacks = among.send_there(among.only_round, read)
        wait()
        return stacks

    def scatter(self, stacks: Sequence[Stack], results: Sequence[Tensor], write: Write) -> None:
        """Send back the results for gathered blocks. Collective."""
        (among,) = self._among
        among.send_back(among.only_round, [stack.blocks for stack in stacks], results, write)()


class _RankExchange:
    """The blocks that the same ranks share; ``mesh`` is one of theirs."""

    def __init__(
        self,
        sharing: Sharing,
        mesh: DeviceMesh | None,
        plan: OwnerPlan,
        travels: Sequence[Travel],
        batch_bytes: int | None,
        alike: Callable[[Block], Any],
    ) -> None:
        self._ranks, self.device = sharing
        self._mesh = mesh
        self.plan = plan
        self.own = self._ranks.index(own_rank())
        self._travels = travels
        self._batch_bytes = batch_bytes
        self._alike = alike
        self._owned = plan.owned_in_rounds(self._size, batch_bytes)
        self._rounds: tuple[frozenset[int], list[Round]] | None = None

    def _size(self, block: Block) -> int:
        return block.numel * self._travels[block.key.tensor].there[0].itemsize

    @cached_property
    def axes(self) -> list[Axis]:
        """The axes that connect the ranks, made at the first use; none for a single rank."""
        if self._mesh is None or len(self._ranks) == 1:
            return []
        is_flat = self._mesh.ndim == 1 and self._mesh.mesh.tolist() == list(self._ranks)
        pg = self._mesh.get_group(0) if is_flat else _group_of(self._ranks, self.device)
        return [Axis(pg, len(self._ranks), self.own)]

    def agree(self, caller: str, same: Mapping[str, Any], problem: Exception | None) -> None:
        """Raise on all ranks if any has a problem, or if they would not exchange the same."""
        told = {**same, "the tensors": self._digest}
        run_on_all_ranks(self.axes, self.device, partial(_raise, problem), caller=caller, same=told)

    @cached_property
    def _digest(self) -> str:
        """Differs between ranks whose plans differ."""
        plan = self.plan
        travels = [(each.there, each.back) for each in map(self._travels.__getitem__, plan.blocks)]
        what = sorted(plan.owners.items()), list(plan.blocks.values()), travels, self._batch_bytes
        return (
            f"{len(plan.blocks)} in {len(plan.owners)} parts, {sha256(repr(what).encode()).hexdigest()[:12]}"
        )

    def run(
        self, number: int, read: Read, function: Function, active: Collection[int]
    ) -> Iterator[Callable[[Write], Finish]]:
        """Compute round after round; yield for each a function that sends its results back."""
        rounds = self._rounds_of(frozenset(active))
        arriving = self.send_there(rounds[0], read) if rounds else None
        for index, current in enumerate(rounds):
            assert arriving is not None
            wait, stacks = arriving
            arriving = self.send_there(rounds[index + 1], read) if index + 1 < len(rounds) else None
            wait()
            results = function((number, index), stacks)
            blocks = [stack.blocks for stack in stacks]
            del stacks  # results may be kept until all rounds are over; their inputs need not
            yield partial(self.send_back, current, blocks, results)
            del results

    @property
    def only_round(self) -> Round:
        """The round of all blocks."""
        (found,) = self._rounds_of(frozenset(self.plan.blocks))
        return found

    def _rounds_of(self, active: frozenset[int]) -> list[Round]:
        if self._rounds is None or self._rounds[0] != active:
            self._rounds = active, [self.plan.round(owned, active, self.own) for owned in self._owned]
        return self._rounds[1]

    # --- one round --------------------------------------------------------------------------------

    def send_there(self, current: Round, read: Read) -> tuple[Finish, list[Stack]]:
        """Send this rank's pieces to their owners; its own blocks are complete after the wait."""
        stacks = self._stacks(current.owned)
        views = {
            block.key: views
            for stack in stacks
            for block, *views in zip(stack.blocks, *(each.unbind() for each in stack.tensors), strict=True)
        }
        read_once = cache(read)

        def values(piece: BlockPiece) -> list[Tensor]:
            return [value[piece.in_local] for value in read_once(piece.block.key.tensor)]

        def targets(pieces: Sequence[BlockPiece]) -> list[Tensor]:
            return [view[piece.in_block] for piece in pieces for view in views[piece.block.key]]

        own = current.sent_there[self.own]
        _copy(targets(own), [value for piece in own for value in values(piece)])
        if not current.travels_there:
            return nothing, stacks
        received, wait = self._exchanged(
            current.sent_there, current.received_there, values, lambda travel: travel.there
        )

        def finish() -> None:
            wait()
            _copy(targets(self._of_others(current.received_there)), received)

        return finish, stacks

    def _stacks(self, blocks: Sequence[Block]) -> list[Stack]:
        """Memory for whole blocks, alike ones stacked."""
        alike: dict[Any, list[Block]] = {}
        for block in blocks:
            alike.setdefault((block.shape, self._travels[block.key.tensor], self._alike(block)), []).append(
                block
            )
        return [
            Stack(
                some,
                tuple(
                    torch.empty((len(some), *shape), dtype=dtype, device=travel.device)
                    for dtype in travel.there
                ),
            )
            for (shape, travel, _), some in alike.items()
        ]

    def send_back(
        self, current: Round, blocks: Sequence[Sequence[Block]], results: Sequence[Tensor], write: Write
    ) -> Finish:
        """Send results to the ranks that have parts of them; the wait writes what is received."""
        result_of = {
            block.key: view
            for some, result in zip(blocks, results, strict=True)
            for block, view in zip(some, result.unbind(), strict=True)
        }

        def values(piece: BlockPiece) -> Sequence[Tensor]:
            return (result_of[piece.block.key][piece.in_block],)

        own = current.sent_back[self.own]
        others: list[BlockPiece] = []
        received: list[Tensor] = []
        wait = nothing
        if current.travels_back:
            others = self._of_others(current.received_back)
            received, wait = self._exchanged(
                current.sent_back, current.received_back, values, lambda travel: (travel.back,)
            )

        def finish() -> None:
            wait()
            for piece in own:
                dtype = self._travels[piece.block.key.tensor].back
                write(piece.block, piece.in_local, values(piece)[0].to(dtype))
            for piece, part in zip(others, received, strict=True):
                write(piece.block, piece.in_local, part)

        return finish

    def _of_others(self, pieces: Pieces) -> list[BlockPiece]:
        """The pieces that are sent, in the order of packing."""
        return [piece for member, some in enumerate(pieces) if member != self.own for piece in some]

    def _exchanged(
        self,
        sent: Pieces,
        expected: Pieces,
        values: Callable[[BlockPiece], Sequence[Tensor]],
        dtypes: Callable[[Travel], Sequence[torch.dtype]],
    ) -> tuple[list[Tensor], Finish]:
        """Start an exchange with the other ranks; received pieces are complete after the wait."""

        def forms(pieces: Sequence[BlockPiece]) -> list[Form]:
            return [(p.shape, dtype) for p in pieces for dtype in dtypes(self._travels[p.block.key.tensor])]

        def sizes(pieces: Pieces) -> list[int]:
            return [0 if i == self.own else num_packed_bytes(forms(some)) for i, some in enumerate(pieces)]

        sizes_sent, sizes_expected = sizes(sent), sizes(expected)
        travelling = self._of_others(sent)
        send = torch.empty(sum(sizes_sent), dtype=torch.uint8, device=self.device)
        _copy(views_in(send, forms(travelling)), [value for piece in travelling for value in values(piece)])
        received = send.new_empty(sum(sizes_expected))
        (axis,) = self.axes
        work = dist.all_to_all_single(
            received, send, sizes_expected, sizes_sent, group=axis.pg, async_op=True
        )
        wait = waiting_for([work])

        def finish() -> None:
            nonlocal send
            wait()
            del send  # alive until here: the exchange reads it

        return views_in(received, forms(self._of_others(expected))), finish


def _raise(problem: Exception | None) -> None:
    if problem is not None:
        raise problem


def _copy(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    if targets:
        foreach.copy_(list(targets), list(sources))


# --- tensors --------------------------------------------------------------------------------------


def form_of(tensor: Tensor) -> Any:
    """The properties that determine owners and pieces."""
    if isinstance(tensor, DTensor):
        return tuple(tensor.shape), tuple(tensor.placements), tensor.device_mesh
    return tuple(tensor.shape), tensor.device, None


def known_name(tensor: Any) -> str:
    """The name that ``fully_shard`` has given a parameter; "" if none."""
    return (name_of_replaced(tensor) if isinstance(tensor, torch.nn.Parameter) else None) or ""


def name_or_shape(param: Tensor) -> str:
    """The name of a parameter, or what can be said of it."""
    return known_name(param) or f"a parameter of shape {tuple(param.shape)}"


def names_in(group: Mapping[str, Any]) -> list[str]:
    """The names of the parameters of a group; "" if unknown."""
    return [*map(clean, group.get("param_names") or map(known_name, group["params"]))]


def names_of(groups: Sequence[Mapping[str, Any]]) -> list[str]:
    """The names of the parameters of all groups."""
    return [
        name or f"parameter {place} of group {index}"
        for index, group in enumerate(groups)
        for place, name in enumerate(names_in(group))
    ]


def refuse_twice(where: str, params: Sequence[Any], name_of: Callable[[Any], str]) -> None:
    """Refuse a parameter that is twice in the group ``where``, of which torch only warns."""
    seen: set[int] = set()
    for param in params:
        if id(param) in seen:
            raise ValueError(f"{where} has {name_of(param)} twice, and would step it twice. Leave one out.")
        seen.add(id(param))


def check_divisible(tensor: Tensor, name: str) -> None:
    """Refuse ``tensor`` if its blocks cannot be assembled."""
    local = dtensor.plain(tensor)
    if type(local) not in (Tensor, torch.nn.Parameter):
        raise ValueError(
            f"{name} holds a {type(local).__name__}, a tensor subclass, which cannot be packed with other "
            "tensors. Leave it out."
        )
    if local.layout is not torch.strided:
        raise ValueError(f"{name} has the layout {local.layout}; only dense tensors are supported.")
    if isinstance(tensor, DTensor):
        if tensor.device_mesh.get_coordinate() is None:
            raise ValueError(
                f"{name} is on a mesh of the ranks {tensor.device_mesh.mesh.flatten().tolist()}. This rank "
                "is not one of them and has no part of it. Leave it out on this rank."
            )
        try:
            sharding_of(tensor)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None


def local_gradient(param: Tensor, name: str, why: str) -> Tensor:
    """This rank's part of the gradient, placed as the parameter is; sparse ones are refused, as ``why``
    says.
    """
    gradient = param.grad
    assert gradient is not None
    if dtensor.plain(gradient).layout is not torch.strided:
        raise TypeError(f"{name}: .grad is sparse, and {why}. Use a dense gradient.")
    if not isinstance(param, DTensor):
        if isinstance(gradient, DTensor):
            raise TypeError(
                f"{name}: .grad is a DTensor, where a plain one is expected, as the parameter is."
            )
        return gradient.detach()
    return dtensor.local_tensor(placed_gradient(param, name)).detach()


def placed_gradient(param: DTensor, name: str) -> DTensor:
    """The gradient of a sharded parameter, placed as the parameter is."""
    gradient = param.grad
    if not isinstance(gradient, DTensor):
        raise TypeError(
            f"{name}: .grad is a plain {type(gradient).__name__}, where a DTensor is expected, as the "
            "parameter is one: this rank cannot tell which part of the whole it holds. Assign only DTensors "
            "or None to .grad of sharded parameters."
        )
    return placed_like(gradient, param)


def placed_like(value: DTensor, param: DTensor) -> DTensor:
    """``value`` on the mesh and with the placements of ``param``."""
    if value.placements == param.placements and value.device_mesh == param.device_mesh:
        return value
    return value.redistribute(param.device_mesh, param.placements)
