"""A function of whole matrices, applied once to each of them, on tensors that are sharded.

Who has to do with which matrix is in matrix_plan.py, and how matrices travel in matrix_exchange.py.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardwise.comm.full_tensors import sharding_of
from shardwise.layout.mesh import Axis
from shardwise.optim.matrix_exchange import Exchange, Function, Read, SharingRanks, Write
from shardwise.optim.matrix_plan import Cost, Matrix, MatrixKey, MatrixPlan, Placed
from shardwise.params.replaced_parameter import name_of_replaced
from shardwise.ranks.failures import monitor_of_job
from shardwise.torch_compat import dtensor

BATCH_BYTES = 64 << 20
"""Bytes of whole matrices that an owner has at once, unless one matrix is larger."""


def on_whole_matrices(
    tensors: Sequence[Tensor],
    function: Function,
    *,
    row_blocks: Mapping[int, Sequence[int]] | None = None,
    dtype: torch.dtype | None = None,
    cost: Cost | None = None,
    batch_bytes: int = BATCH_BYTES,
) -> list[Tensor]:
    """Apply ``function`` to the whole matrices of sharded tensors, each on one rank, and shard the results.

    For optimizers that look at whole matrices. Each matrix is put together on one of the ranks that share it,
    its owner; ``function`` is called there, and its result sent back as the tensor is sharded.
    :class:`WholeMatrices` makes the plan for this once, for many calls.

    Args:
        tensors: with 2 dims, or 3 for a stack of matrices; sharded, replicated or plain.
        function: called with matrices of one shape, ``[count, rows, columns]``, and their keys, ``(index in
            tensors, index of the matrix in that tensor)``. Returns as many of that shape.
        row_blocks: as for :class:`WholeMatrices`.
        dtype: as for :class:`WholeMatrices`.
        cost: as for :class:`WholeMatrices`.
        batch_bytes: as for :class:`WholeMatrices`.

    Returns:
        New tensors, placed as ``tensors`` are, in their dtypes.

    Raises:
        ValueError: a tensor cannot be put together, by name, or ranks have different tensors.

    Collective over the ranks that share the tensors, with the same tensors in the same order.

    Example::

        def orthogonal(matrices, keys):
            u, _, vh = torch.linalg.svd(matrices, full_matrices=False)
            return u @ vh

        updates = on_whole_matrices([p.grad for p in hidden], orthogonal)
    """
    whole = WholeMatrices(tensors, row_blocks=row_blocks, dtype=dtype, cost=cost, batch_bytes=batch_bytes)
    return whole.apply(tensors, function)


class WholeMatrices:
    """The plan by which functions are applied to whole matrices of tensors that are sharded alike each time.

    Args:
        tensors: with 2 dims, or 3 for a stack of matrices. DTensors on any meshes with any placements but
            partial ones, or plain tensors, which each rank treats by itself. Only their shapes, placements
            and devices matter, so that parameters may stand for their gradients.
        row_blocks: for tensors in which several matrices are fused along the last dim but one, by index: the
            rows of each.
        dtype: in which matrices travel and are computed; None: that of the first tensor.
        cost: of a matrix of so many rows and columns, to balance owners by; None: rows times columns times
            the smaller of the two, as products of matrices cost.
        batch_bytes: of whole matrices that an owner has at once, unless one matrix is larger. Buffers take
            up to six times as much, and what the function needs comes on top.
        names: of the tensors, for messages.

    Raises:
        ValueError: a tensor cannot be put together, by name.

    A key, ``(index in tensors, index of the matrix in that tensor)``, has the same owner at every call: a
    function may keep state by key in a dict. Making the plan is local; the first call makes a process group
    where no mesh has one of all its ranks.

    Costs, for a world of W: 1/W of the work on each rank, and an exchange of at most 2 (W - 1) / W of the
    bytes of all matrices, over all ranks together. A matrix that a rank has whole, such as one of a stack
    that is sharded on dim 0, stays there. Replicas share the work, and results are sent to all of them.

    Example::

        whole = WholeMatrices([p for p in hidden])
        for batch in batches:
            model(batch).mean().backward()
            updates = whole.apply([p.grad for p in hidden], orthogonal)
    """

    def __init__(
        self,
        tensors: Sequence[Tensor],
        *,
        row_blocks: Mapping[int, Sequence[int]] | None = None,
        dtype: torch.dtype | None = None,
        cost: Cost | None = None,
        batch_bytes: int = BATCH_BYTES,
        names: Sequence[str] | None = None,
    ) -> None:
        self._names = list(names) if names is not None else [_name(t, i) for i, t in enumerate(tensors)]
        if isinstance(batch_bytes, bool) or not isinstance(batch_bytes, int) or batch_bytes < 1:
            raise ValueError(
                f"WholeMatrices: batch_bytes is {batch_bytes!r}; pass a number of bytes above 0."
            )
        if dtype is None:
            dtype = tensors[0].dtype if len(tensors) else torch.float32
        blocks = row_blocks or {}
        shared: list[tuple[SharingRanks, dict[int, Placed]]] = []
        for index, (tensor, name) in enumerate(zip(tensors, self._names, strict=True)):
            check_matrix(tensor, name)
            own_blocks = checked_blocks(tensor, name, blocks.get(index))
            found = next((each for each in shared if each[0].share(tensor)), None)
            if found is None:
                shared.append(found := (SharingRanks(tensor), {}))
            found[1][index] = found[0].placed(tensor, own_blocks)
        self._forms = [_form(tensor) for tensor in tensors]
        limit = max(1, batch_bytes // dtype.itemsize)
        self._exchanges = [
            Exchange(ranks, MatrixPlan(some, len(ranks.ranks), cost or _products), dtype, limit)
            # In an order that ranks have in common; ranks that are part of others first: see agree.
            for ranks, some in sorted(shared, key=lambda each: (len(each[0].ranks), each[0].ranks))
        ]

    @property
    def owned(self) -> list[MatrixKey]:
        """The keys of the matrices that this rank owns."""
        return [key for exchange in self._exchanges for key in exchange.owned]

    @torch.no_grad()
    def apply(self, tensors: Sequence[Tensor], function: Function) -> list[Tensor]:
        """Apply ``function`` to the matrices of ``tensors``, placed as those that the plan was made of.

        Returns:
            New tensors, placed as ``tensors`` are, in their dtypes.

        Raises:
            ValueError: tensors have other forms than in the plan, or ranks have different ones.

        Collective, with the same tensors in the same order.
        """
        active = range(len(self._names))
        self.agree("WholeMatrices", active, self._unlike(tensors))
        locals_ = [dtensor.plain(tensor).detach() for tensor in tensors]
        results = [torch.empty_like(local) for local in locals_]

        def write(matrix: Matrix, index: tuple[int | slice, ...], values: Tensor) -> None:
            results[matrix.key.tensor][index].copy_(values)

        self.run(locals_.__getitem__, function, write, active)
        return [
            dtensor.make_dtensor(result, dtensor.spec_of(tensor)) if isinstance(tensor, DTensor) else result
            for result, tensor in zip(results, tensors, strict=True)
        ]

    def agree(self, caller: str, active: Collection[int], problem: Exception | None = None) -> None:
        """Raise on all ranks if there is a problem on any, or if they would not exchange the same matrices.

        Args:
            caller: the public function, for messages.
            active: which tensors are to be treated next, by index.
            problem: what is wrong on this rank.

        Raises:
            ValueError: ranks have different tensors, or different ones are active; besides ``problem``.

        Collective. On a device the host waits, for what is queued there.
        """
        chosen = set(active)
        left_out = [name for index, name in enumerate(self._names) if index not in chosen]
        with monitor_of_job().call(caller, self.axes):
            for exchange in self._exchanges:  # what is wrong among some ranks is told to all they share with
                try:
                    exchange.agree(caller, left_out, problem)
                except Exception as error:
                    problem = error
        if problem is not None:
            raise problem

    def run(self, read: Read, function: Function, write: Write, active: Collection[int]) -> None:
        """Apply ``function`` to the tensors at the indices ``active``, reading and writing batch by batch.

        Args:
            read: gives this rank's part of the tensor at an index, when its first matrix is about to travel.
            function: as for :func:`on_whole_matrices`.
            write: takes a matrix, an index into this rank's part of its tensor, and the rows and columns of
                the result that go there. Called once for each matrix that this rank has a part of.
            active: the same on all ranks; :meth:`agree` checks it.

        Collective.
        """
        with monitor_of_job().call("WholeMatrices", self.axes):
            for exchange in self._exchanges:
                exchange.run(read, function, write, active)

    def axes(self) -> list[Axis]:
        """What connects this rank with those that share tensors with it."""
        return [axis for exchange in self._exchanges for axis in exchange.axes]

    def _unlike(self, tensors: Sequence[Tensor]) -> Exception | None:
        if len(tensors) != len(self._names):
            return ValueError(
                f"WholeMatrices: {len(tensors)} tensors were passed, and the plan is of {len(self._names)}. "
                "Make another plan for others."
            )
        for tensor, name, form in zip(tensors, self._names, self._forms, strict=True):
            if _form(tensor) != form:
                return ValueError(
                    f"{name} has {_form_text(_form(tensor))}, where the plan was made for "
                    f"{_form_text(form)}. Make another plan for others."
                )
        return None


def _products(rows: int, columns: int) -> float:
    return float(rows * columns * min(rows, columns))


def _form(tensor: Tensor) -> tuple[Any, ...]:
    is_placed = isinstance(tensor, DTensor)
    return (
        tuple(tensor.shape),
        tuple(tensor.placements) if is_placed else None,  # type: ignore[attr-defined]
        tensor.device_mesh if is_placed else None,  # type: ignore[attr-defined]
    )


def _form_text(form: tuple[Any, ...]) -> str:
    shape, placements, mesh = form
    return f"shape {shape}" + ("" if mesh is None else f", placements {placements} on {mesh}")


def _name(tensor: Tensor, index: int) -> str:
    name = name_of_replaced(tensor) if isinstance(tensor, torch.nn.Parameter) else None
    return name or f"tensor {index}"


# --- what is refused ------------------------------------------------------------------------------


def check_matrix(tensor: Tensor, name: str) -> None:
    """Refuse ``tensor`` if whole matrices of it cannot be put together.

    Raises:
        ValueError: naming it ``name``.
    """
    if tensor.dim() not in (2, 3):
        raise ValueError(
            f"{name} has shape {tuple(tensor.shape)}: it is neither a matrix, of 2 dims, nor a stack of "
            "matrices, of 3. Leave it out, or view it as a matrix."
        )
    if tensor.is_complex() or not tensor.is_floating_point():
        raise ValueError(f"{name} has dtype {tensor.dtype}; only matrices of floating numbers are supported.")
    local = dtensor.plain(tensor)
    if type(local) not in (Tensor, torch.nn.Parameter):
        raise ValueError(
            f"{name} holds a {type(local).__name__}, a class of its own, which cannot be packed with other "
            "matrices. Leave it out."
        )
    if local.layout is not torch.strided:
        raise ValueError(f"{name} has the layout {local.layout}; only dense tensors have whole matrices.")
    if isinstance(tensor, DTensor):
        if tensor.device_mesh.get_coordinate() is None:
            raise ValueError(
                f"{name} is on a mesh of the ranks {tensor.device_mesh.mesh.flatten().tolist()}, which this "
                "rank is none of, so that it has no part of it. Leave it out here."
            )
        try:
            sharding_of(tensor)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None


def checked_blocks(tensor: Tensor, name: str, given: Sequence[int] | None) -> tuple[int, ...] | None:
    """The rows of each of the matrices that are fused in ``tensor``, if ``given``.

    Raises:
        ValueError: they do not add up to its rows.
    """
    if given is None:
        return None
    blocks = tuple(given)
    rows = tensor.shape[-2]
    if not all(isinstance(each, int) and each > 0 for each in blocks) or sum(blocks) != rows:
        raise ValueError(
            f"{name}: its row blocks are {blocks}, where positive numbers that add up to its {rows} rows "
            f"(shape {tuple(tensor.shape)}) are expected."
        )
    return blocks
