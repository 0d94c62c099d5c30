"""Which parameters are matrices of hidden layers, and the iteration that orthogonalises them."""

import torch
from torch import Tensor, nn

from shardwise.buckets.bucket import bucket_and_index
from shardwise.layout.fqns import clean

_EMBEDDINGS = ("embed", "wte", "wpe", "emb")
_HEADS = ("head", "output", "classifier", "score", "logits", "embed_out")

Coefficients = tuple[float, float, float]


def is_hidden_matrix(name: str, param: Tensor) -> bool:
    """Whether :class:`Muon` orthogonalises a parameter by default; AdamW steps the others.

    It does if the parameter has two dims of more than one element, or three, as matrices of experts
    stacked on dim 0 have. It does not if the parameter belongs to

    - an ``nn.Embedding`` or ``nn.EmbeddingBag``, even one that shares its weight with a head (known of
      parameters that ``fully_shard`` has made), or to a module with ``embed``, ``emb``, ``wte`` or ``wpe``
      in its own name; nor if the parameter itself has one of these in its name, as ``pos_embed`` has;
    - a head: a module called ``head``, ``output``, ``classifier``, ``score``, ``logits`` or ``embed_out``,
      or whose name ends with ``_head``;
    - a convolution, or, with three dims, an unknown module, which may be a convolution.

    Args:
        name: its fully qualified name; "" if it has none.
        param: sharded or not.

    Example::

        def is_matrix(name, param):
            return is_hidden_matrix(name, param) and "router" not in name

        optimizer = Muon(model.named_parameters(), lr=0.02, is_matrix=is_matrix)
    """
    if param.dim() not in (2, 3) or min(param.shape[-2:]) < 2 or not param.is_floating_point():
        return False
    found = bucket_and_index(param)
    modules = [] if found is None else [site.module for site in found[0].params[found[1]].sites]
    others = (nn.Embedding, nn.EmbeddingBag, nn.modules.conv._ConvNd)
    if any(isinstance(module, others) for module in modules) or (param.dim() == 3 and not modules):
        return False
    path = clean(name).split(".")
    if "parametrizations" in path:  # by torch.nn.utils.parametrize: up.parametrizations.weight.original
        at = path.index("parametrizations")
        path = [*path[:at], *path[at + 1 : at + 2]]
    own = path[-2] if len(path) > 1 else path[-1]
    is_head = own in _HEADS or own.endswith("_head")
    return not (is_head or _is_embedding(own) or _is_embedding(path[-1]))


def _is_embedding(name: str) -> bool:
    """Judged by the name of a module or parameter alone."""
    return any(part in _EMBEDDINGS for part in name.split("_")) or "embed" in name


def newton_schulz(matrices: Tensor, coefficients: Coefficients, steps: int, eps: float) -> Tensor:
    """Approximate the nearest matrices with orthonormal rows or columns, by iterating a quintic polynomial.

    Brings all singular values close to one: with the usual coefficients between 0.7 and 1.2. From
    Jordan et al., "Muon: an optimizer for hidden layers in neural networks" (2024).

    Args:
        matrices: ``[count, rows, columns]``, or ``[rows, columns]``, in the dtype to compute in.
        coefficients: of the polynomial: of the first, third and fifth power.
        steps: how many times to apply it.
        eps: the smallest norm to divide by beforehand.

    Returns:
        The results, in the same shape and dtype.

    No branch depends on values, so ``torch.compile`` makes one graph for each shape.
    """
    if matrices.dim() == 3 and len(matrices) == 1:  # use the kernel of plain matrices
        return newton_schulz(matrices[0], coefficients, steps, eps).unsqueeze(0)
    first, third, fifth = coefficients
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if is_tall else matrices
    x = x / torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp(min=eps)
    multiply_add = torch.addmm if x.dim() == 2 else torch.baddbmm
    for _ in range(steps):
        gram = x @ x.mT
        polynomial = multiply_add(gram, gram, gram, beta=third, alpha=fifth)
        x = multiply_add(x, polynomial, x, beta=first)
    return x.mT if is_tall else x


def newton_schulz_cost(steps: int, rows: int, columns: int) -> float:
    """Multiplications and additions of :func:`newton_schulz` on one matrix."""
    small, large = min(rows, columns), max(rows, columns)
    return float(steps * (4 * small * small * large + 2 * small**3))
