"""A function of whole matrices, applied once to each, on sharded tensors.

owners.py decides which rank owns which matrix, and owner_exchange.py sends matrices.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor

from shardwise.arguments import check_bytes
from shardwise.layout.regions import Region
from shardwise.optim.owner_exchange import (
    BATCH_BYTES,
    OwnerExchange,
    RoundKey,
    Stack,
    Travel,
    check_divisible,
    form_of,
    known_name,
    sharing_of,
)
from shardwise.optim.owners import Block, BlockKey
from shardwise.ranks.failures import monitor_of_job
from shardwise.torch_compat import dtensor

Cost = Callable[[int, int], float]
"""The cost of a matrix to its owner, from its rows and columns, in any unit."""

MatrixFunction = Callable[[Tensor, list[BlockKey]], Tensor]
"""Takes matrices, ``[count, rows, columns]``, and their keys; returns a tensor of the same shape."""


def on_whole_matrices(
    tensors: Sequence[Tensor],
    function: MatrixFunction,
    *,
    row_blocks: Mapping[int, Sequence[int]] | None = None,
    dtype: torch.dtype | None = None,
    cost: Cost | None = None,
    batch_bytes: int = BATCH_BYTES,
) -> list[Tensor]:
    """Apply ``function`` to the whole matrices of sharded tensors, each on one rank, and shard the results.

    Each matrix is assembled on its owner, one of the ranks that share it. The owner calls ``function``, and
    sends the result back. :class:`WholeMatrices` makes the plan for this once, for many calls.

    Args:
        tensors: with 2 dims, or 3 for a stack of matrices; sharded, replicated or plain.
        function: called with matrices of one shape, ``[count, rows, columns]``, and their keys, ``(index in
            tensors, index of the matrix in that tensor)``. Returns a tensor of the same shape.
        row_blocks: as for :class:`WholeMatrices`.
        dtype: as for :class:`WholeMatrices`.
        cost: as for :class:`WholeMatrices`.
        batch_bytes: as for :class:`WholeMatrices`.

    Returns:
        New tensors, placed as ``tensors`` are, in their dtypes.

    Raises:
        ValueError: a named tensor cannot be assembled, or ranks have different tensors.

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
    """A plan to apply functions to whole matrices, for tensors that are sharded alike in every call.

    Args:
        tensors: with 2 dims, or 3 for a stack of matrices. DTensors on any meshes with any placements except
            partial ones, or plain tensors, which each rank processes alone. Only their shapes, placements
            and devices matter, so parameters may stand in for their gradients.
        row_blocks: for tensors in which several matrices are fused along the second-to-last dim, by index:
            the rows of each.
        dtype: dtype in which matrices are sent and computed; None: that of the first tensor.
        cost: the cost of a matrix from its rows and columns, to balance owners by; None: rows times columns
            times the smaller of the two, the cost of a matrix product.
        batch_bytes: bytes of whole matrices that an owner holds at once, unless one matrix is larger. Buffers
            take up to six times as much, and the function's own memory comes on top.
        names: names of the tensors, for messages.

    Raises:
        ValueError: a named tensor cannot be assembled.

    A key, ``(index in tensors, index of the matrix in that tensor)``, has the same owner in every call, so a
    function may keep state by key in a dict. The constructor is local; the first call makes a process group
    for each mesh that has none of all its ranks.

    Costs, for a world of W: 1/W of the work on each rank, and an exchange of at most 2 (W - 1) / W of the
    bytes of all matrices, over all ranks together. A matrix that a rank has whole, such as one of a stack
    sharded on dim 0, stays there. Replicas share the work, and results are sent to all of them.

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
        if names is None:
            names = [known_name(tensor) or f"tensor {i}" for i, tensor in enumerate(tensors)]
        check_bytes("WholeMatrices", "batch_bytes", batch_bytes)
        if dtype is None:
            dtype = tensors[0].dtype if len(tensors) else torch.float32
        blocks = row_blocks or {}
        for tensor, name in zip(tensors, names, strict=True):
            check_matrix(tensor, name)
        self.exchange = OwnerExchange(
            tensors,
            names,
            [
                matrices_in(tensor.shape, checked_blocks(tensor, name, blocks.get(index)))
                for index, (tensor, name) in enumerate(zip(tensors, names, strict=True))
            ],
            [Travel((dtype,), dtype, sharing_of(tensor)[1]) for tensor in tensors],
            cost=lambda block: (cost or _products)(*block.shape[-2:]),
            batch_bytes=batch_bytes,
        )

    @property
    def owned(self) -> list[BlockKey]:
        """The keys of the matrices that this rank owns."""
        return self.exchange.owned

    @torch.no_grad()
    def apply(self, tensors: Sequence[Tensor], function: MatrixFunction) -> list[Tensor]:
        """Apply ``function`` to the matrices of ``tensors``, placed like those of the plan.

        Returns:
            New tensors, placed as ``tensors`` are, in their dtypes.

        Raises:
            ValueError: the forms of tensors differ from the plan, or between ranks.

        Collective, with the same tensors in the same order.
        """
        active = range(len(self.exchange.names))
        self.exchange.agree("WholeMatrices", active, self._unlike(tensors))
        locals_ = [dtensor.plain(tensor).detach() for tensor in tensors]
        results = [torch.empty_like(local) for local in locals_]

        def write(matrix: Block, index: tuple[slice, ...], values: Tensor) -> None:
            results[matrix.key.tensor][index].copy_(values)

        with monitor_of_job().call("WholeMatrices", self.exchange.axes):
            self.exchange.run(lambda index: (locals_[index],), on_stacks(function), write, active)
        return list(map(dtensor.placed_as, tensors, results))

    def _unlike(self, tensors: Sequence[Tensor]) -> Exception | None:
        names, forms = self.exchange.names, self.exchange.forms
        if len(tensors) != len(names):
            return ValueError(
                f"WholeMatrices: {len(tensors)} tensors were passed, but the plan was made for {len(names)}. "
                "Make another plan for other tensors."
            )
        for tensor, name, form in zip(tensors, names, forms, strict=True):
            if form_of(tensor) != form:
                return ValueError(
                    f"{name} has {_form_text(form_of(tensor))}, but the plan was made for "
                    f"{_form_text(form)}. Make another plan for other tensors."
                )
        return None


def on_stacks(function: MatrixFunction) -> Callable[[RoundKey, list[Stack]], list[Tensor]]:
    """``function`` of matrices, for an exchange."""
    return lambda _, stacks: [_applied(function, stack) for stack in stacks]


def _applied(function: MatrixFunction, stack: Stack) -> Tensor:
    (whole,) = stack.tensors
    matrices = whole.flatten(0, -3)
    result = function(matrices, [block.key for block in stack.blocks])
    if not isinstance(result, Tensor) or result.shape != matrices.shape:
        got = tuple(result.shape) if isinstance(result, Tensor) else type(result).__name__
        raise ValueError(
            f"the function of whole matrices returned {got} for {len(matrices)} matrices of shape "
            f"{tuple(matrices.shape[1:])}; it has to return as many of that shape: {tuple(matrices.shape)}."
        )
    return result.reshape(whole.shape)


def matrices_in(shape: Sequence[int], row_blocks: tuple[int, ...] | None) -> list[Region]:
    """The matrices in a tensor, those of the first expert first."""
    *stacked, rows, columns = shape
    found = []
    for place in product(*map(range, stacked)):
        start = 0
        for size in row_blocks or (rows,):
            found.append(Region((*place, start, 0), (*(1 for _ in place), size, columns)))
            start += size
    return found


def _products(rows: int, columns: int) -> float:
    return float(rows * columns * min(rows, columns))


def _form_text(form: tuple[Any, ...]) -> str:
    shape, place, mesh = form
    return f"shape {shape}" + ("" if mesh is None else f", placements {place} on {mesh}")


def check_matrix(tensor: Tensor, name: str) -> None:
    """Refuse ``tensor`` if its matrices cannot be assembled."""
    if tensor.dim() not in (2, 3):
        raise ValueError(
            f"{name} has shape {tuple(tensor.shape)}: it is neither a matrix, of 2 dims, nor a stack of "
            "matrices, of 3. Leave it out, or view it as a matrix."
        )
    if tensor.is_complex() or not tensor.is_floating_point():
        raise ValueError(f"{name} has dtype {tensor.dtype}; only matrices of floating numbers are supported.")
    check_divisible(tensor, name)


def checked_blocks(tensor: Tensor, name: str, given: Sequence[int] | None) -> tuple[int, ...] | None:
    """The rows of each matrix fused in ``tensor``, if ``given``; refused if they do not add up to its
    rows.
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
