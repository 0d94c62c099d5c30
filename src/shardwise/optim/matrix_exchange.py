"""How matrices travel to their owners, and results back, while others are computed.

They travel in rounds, their rows packed into one buffer, by an exchange between all ranks that share them:

    communication   there 0 | there 1            back 0, there 2           back 1, there 3 ...
    computation             | function, round 0 | function, round 1       | function, round 2 ...

An exchange is queued before the computation beside which it travels, and all ranks queue them in one order.
Buffers of two rounds live at a time.
"""

from collections.abc import Callable, Collection, Sequence
from functools import cached_property
from hashlib import sha256
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardwise.comm.full_tensors import sharding_of
from shardwise.comm.streams import Finish, nothing, waiting_for
from shardwise.layout.mesh import Axis, device_of
from shardwise.layout.regions import Split
from shardwise.optim.matrix_plan import Matrix, MatrixKey, MatrixPiece, MatrixPlan, Pieces, Placed, Round
from shardwise.ranks.agreement import run_on_all_ranks
from shardwise.ranks.model_ranks import own_rank
from shardwise.torch_compat import c10d, foreach

Function = Callable[[Tensor, list[MatrixKey]], Tensor]
"""Takes matrices of one shape, stacked, and which they are; returns as many of the same shape."""

Read = Callable[[int], Tensor]
"""This rank's part of the tensor at an index."""

Write = Callable[[Matrix, tuple[int | slice, ...], Tensor], None]
"""Takes a matrix, an index into this rank's part of its tensor, and what of the result goes there."""


class SharingRanks:
    """The ranks of a mesh in ascending order; this one alone, for a plain tensor. Several meshes may be of
    them."""

    def __init__(self, tensor: Tensor) -> None:
        self.ranks, self.device = _ranks_and_device(tensor)
        self.own = self.ranks.index(own_rank())
        self._mesh = tensor.device_mesh if isinstance(tensor, DTensor) else None
        self._seats: dict[Any, Any] = {}

    def share(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` is on a mesh of them."""
        return _ranks_and_device(tensor) == (self.ranks, self.device)

    def placed(self, tensor: Tensor, row_blocks: tuple[int, ...] | None) -> Placed:
        """How ``tensor`` lies on them."""
        split, places = Split(tuple(tensor.shape), (1,), ()), [(0,)]
        if isinstance(tensor, DTensor):
            mesh = tensor.device_mesh.mesh
            found = [tuple(place) for place in torch.ones_like(mesh).nonzero().tolist()]
            split, places = sharding_of(tensor), sorted(found, key=lambda place: int(mesh[place]))
        seats = tuple(places)
        return Placed(split, self._seats.setdefault(seats, seats), row_blocks)

    @cached_property
    def axes(self) -> list[Axis]:
        """What connects them, made when it is first asked for; nothing for a single rank."""
        if len(self.ranks) == 1:
            return []
        assert self._mesh is not None
        is_flat = self._mesh.ndim == 1 and self._mesh.mesh.tolist() == list(self.ranks)
        pg = self._mesh.get_group(0) if is_flat else _group_of(self.ranks, self.device)
        return [Axis(pg, len(self.ranks), self.own)]


def _ranks_and_device(tensor: Tensor) -> tuple[tuple[int, ...], torch.device]:
    if not isinstance(tensor, DTensor):
        return (own_rank(),), tensor.device
    mesh = tensor.device_mesh
    return tuple(sorted(mesh.mesh.flatten().tolist())), device_of(mesh)


_groups: "WeakKeyDictionary[Any, dict[Any, dist.ProcessGroup]]" = WeakKeyDictionary()


def _group_of(ranks: tuple[int, ...], device: torch.device) -> dist.ProcessGroup:
    """A process group of all ``ranks``: that of the job, or one that is made once."""
    world = dist.group.WORLD
    assert world is not None
    everyone = c10d.ranks_of(world)
    if tuple(everyone) == ranks:
        return world
    made = _groups.setdefault(world, {})
    if (ranks, device) not in made:
        made[ranks, device] = c10d.subgroup(
            world, [everyone.index(rank) for rank in ranks], device, "matrices"
        )
    return made[ranks, device]


class Exchange:
    """Matrices that the same ranks share, on their way to owners and back.

    ``limit``: elements of matrices that an owner has in one round.
    """

    def __init__(self, ranks: SharingRanks, plan: MatrixPlan, dtype: torch.dtype, limit: int) -> None:
        self._ranks = ranks
        self._plan = plan
        self._dtype = dtype
        self._limit = limit
        self._rounds: tuple[frozenset[int], list[Round]] | None = None

    @property
    def axes(self) -> list[Axis]:
        """What connects the ranks."""
        return self._ranks.axes

    @property
    def owned(self) -> list[MatrixKey]:
        """Of this rank."""
        return [key for key, owner in self._plan.owners.items() if owner == self._ranks.own]

    def agree(self, caller: str, left_out: list[str], problem: Exception | None) -> None:
        """Raise on all ranks if there is a problem on any, or if they would not exchange the same.

        Raises:
            ValueError: ranks have other matrices, or leave out other ones.
        """

        def check() -> None:
            if problem is not None:
                raise problem

        same = {"the matrices": self._digest, "what to leave out": left_out}
        run_on_all_ranks(self.axes, self._ranks.device, check, caller=caller, same=same)

    @cached_property
    def _digest(self) -> str:
        """Differs where the plans of two ranks do."""
        plan = self._plan
        what = (
            sorted(plan.owners.items()),
            [plan.matrices[i] for i in plan.matrices],
            self._limit,
            self._dtype,
        )
        return f"{len(plan.owners)} matrices, {sha256(repr(what).encode()).hexdigest()[:12]}"

    def run(self, read: Read, function: Function, write: Write, active: Collection[int]) -> None:
        """Apply ``function`` to the whole matrices of the tensors ``active``."""
        rounds = self._rounds_of(frozenset(active))
        arriving = self._send_there(rounds[0], read) if rounds else None
        leaving: Finish = nothing
        for index, current in enumerate(rounds):
            assert arriving is not None
            wait, stacks = arriving
            arriving = self._send_there(rounds[index + 1], read) if index + 1 < len(rounds) else None
            wait()
            results = [(matrices, self._applied(function, matrices, stack)) for matrices, stack in stacks]
            del stacks
            sent_back = self._send_back(current, results, write)
            leaving()
            leaving = sent_back
        leaving()

    def _rounds_of(self, active: frozenset[int]) -> list[Round]:
        own = frozenset(self._plan.matrices) & active
        if self._rounds is None or self._rounds[0] != own:
            self._rounds = own, self._plan.rounds(own, self._ranks.own, self._limit)
        return self._rounds[1]

    def _applied(self, function: Function, matrices: Sequence[Matrix], stack: Tensor) -> Tensor:
        keys = [matrix.key for matrix in matrices]
        result = function(stack, keys)
        if not isinstance(result, Tensor) or result.shape != stack.shape:
            got = tuple(result.shape) if isinstance(result, Tensor) else type(result).__name__
            raise ValueError(
                f"the function of whole matrices returned {got} for {len(keys)} matrices of shape "
                f"{matrices[0].shape}; it has to return as many of that shape: {tuple(stack.shape)}."
            )
        return result

    # --- one round --------------------------------------------------------------------------------

    def _send_there(self, current: Round, read: Read) -> tuple[Finish, list[tuple[list[Matrix], Tensor]]]:
        """Send this rank's pieces to their owners; its own matrices are complete after the wait."""
        stacks = self._stacks(current.owned)
        views = {
            matrix.key: view
            for matrices, stack in stacks
            for matrix, view in zip(matrices, stack.unbind(), strict=True)
        }
        values = _ReadOnce(read)
        own = self._ranks.own
        _copy(
            [views[piece.matrix.key][piece.in_matrix] for piece in current.sent_there[own]],
            [values(piece) for piece in current.sent_there[own]],
        )
        if not current.travels_there:
            return nothing, stacks
        send = self._packed(current.sent_there, values)
        received, wait = self._exchanged(send, current.sent_there, current.received_there)

        def finish() -> None:
            wait()
            pieces = list(self._of_others(current.received_there))
            targets = [views[piece.matrix.key][piece.in_matrix] for piece in pieces]
            _copy(targets, _unpacked(received, pieces))

        return finish, stacks

    def _stacks(self, matrices: Sequence[Matrix]) -> list[tuple[list[Matrix], Tensor]]:
        """Memory for whole matrices, those of one shape together."""
        alike: dict[tuple[int, int], list[Matrix]] = {}
        for matrix in matrices:
            alike.setdefault(matrix.shape, []).append(matrix)
        return [
            (some, torch.empty((len(some), *shape), dtype=self._dtype, device=self._ranks.device))
            for shape, some in alike.items()
        ]

    def _send_back(
        self, current: Round, results: Sequence[tuple[Sequence[Matrix], Tensor]], write: Write
    ) -> Finish:
        """Send results to the ranks that have parts of them; what comes back is written at the end."""
        result_of = {
            matrix.key: view
            for matrices, result in results
            for matrix, view in zip(matrices, result.unbind(), strict=True)
        }

        def values(piece: MatrixPiece) -> Tensor:
            return result_of[piece.matrix.key][piece.in_matrix]

        own = current.sent_back[self._ranks.own]
        received, wait = None, nothing
        if current.travels_back:
            send = self._packed(current.sent_back, values)
            received, wait = self._exchanged(send, current.sent_back, current.received_back)

        def finish() -> None:
            wait()
            for piece in own:
                write(piece.matrix, piece.in_local, values(piece).to(self._dtype))
            if received is not None:
                others = list(self._of_others(current.received_back))
                for piece, rows in zip(others, _unpacked(received, others), strict=True):
                    write(piece.matrix, piece.in_local, rows)

        return finish

    def _of_others(self, pieces: Pieces) -> Any:
        """The pieces that travel, in the order in which they are packed."""
        return chain.from_iterable(some for member, some in enumerate(pieces) if member != self._ranks.own)

    def _packed(self, pieces: Pieces, values: Callable[[MatrixPiece], Tensor]) -> Tensor:
        """What goes to other ranks, one rank's after another's."""
        travelling = list(self._of_others(pieces))
        numel = sum(piece.numel for piece in travelling)
        buffer = torch.empty(numel, dtype=self._dtype, device=self._ranks.device)
        _copy(_unpacked(buffer, travelling), [values(piece) for piece in travelling])
        return buffer

    def _exchanged(self, send: Tensor, sent: Pieces, expected: Pieces) -> tuple[Tensor, Finish]:
        """Start an exchange; the tensor is complete once it was waited for."""
        expected_numels = [self._numel(some, member) for member, some in enumerate(expected)]
        sent_numels = [self._numel(some, member) for member, some in enumerate(sent)]
        received = send.new_empty(sum(expected_numels))
        (axis,) = self.axes
        work = dist.all_to_all_single(
            received, send, expected_numels, sent_numels, group=axis.pg, async_op=True
        )
        wait = waiting_for([work])

        def finish() -> None:
            nonlocal send
            wait()
            del send  # it had to live as long

        return received, finish

    def _numel(self, pieces: Sequence[MatrixPiece], member: int) -> int:
        return 0 if member == self._ranks.own else sum(piece.numel for piece in pieces)


class _ReadOnce:
    """Parts of this rank's tensors, each read once in a round."""

    def __init__(self, read: Read) -> None:
        self._read = read
        self._found: dict[int, Tensor] = {}

    def __call__(self, piece: MatrixPiece) -> Tensor:
        index = piece.matrix.key.tensor
        if index not in self._found:
            self._found[index] = self._read(index)
        return self._found[index][piece.in_local]


def _unpacked(buffer: Tensor, pieces: Sequence[MatrixPiece]) -> list[Tensor]:
    """The pieces in a buffer, as matrices."""
    parts = buffer.split([piece.numel for piece in pieces]) if pieces else ()
    return [part.view(piece.shape) for part, piece in zip(parts, pieces, strict=True)]


def _copy(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    if targets:
        foreach.copy_(list(targets), list(sources))
