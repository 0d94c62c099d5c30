"""Muon on shards: each matrix is orthogonalised once, on one rank, and stays sharded everywhere.

A step is elementwise on the shards except for the orthogonalisation, which whole_matrices.py does at the
owners. An AdamW on flat shards steps the other parameters. It shares its param groups with this optimizer;
the state of both is shown as one.
"""

import inspect
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwise.buckets.bucket import bucket_and_index
from shardwise.layout.fqns import clean
from shardwise.optim.flat_optimizer import FlatOptimizer
from shardwise.optim.owner_exchange import (
    BATCH_BYTES,
    known_name,
    local_gradient,
    names_in,
    names_of,
    placed_like,
    refuse_twice,
)
from shardwise.optim.owners import Block, BlockKey
from shardwise.optim.whole_matrices import WholeMatrices, check_matrix, on_stacks
from shardwise.ranks.failures import monitor_of_job
from shardwise.torch_compat import dtensor, foreach, optimizers
from shardwise.torch_compat.dynamo import break_graphs

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


RowBlocks = Callable[[str, Tensor], Sequence[int] | None]
Orthogonalize = Callable[[Tensor, Coefficients, int, float], Tensor]

BUFFER = "momentum_buffer"


class MuonPlan:
    """The matrices of all param groups, where they are assembled, and the premises of this plan."""

    def __init__(
        self, groups: Sequence[dict[str, Any]], row_blocks: RowBlocks | None, dtype: torch.dtype, limit: int
    ) -> None:
        self.params: list[Tensor] = [param for group in groups for param in group["params"]]
        self.groups = [group for group in groups for _ in group["params"]]
        self.names = names_of(groups)
        blocks: dict[int, Sequence[int]] = {}
        for index, (param, name) in enumerate(zip(self.params, self.names, strict=True)):
            if row_blocks is not None and (found := row_blocks(name, param)) is not None:
                blocks[index] = found
        steps = max((group["ns_steps"] for group in groups), default=1)
        self.exchange = WholeMatrices(
            self.params,
            row_blocks=blocks,
            dtype=dtype,
            cost=partial(newton_schulz_cost, max(1, steps)),
            batch_bytes=limit,
            names=self.names,
        ).exchange

    def is_of(self, groups: Sequence[dict[str, Any]]) -> bool:
        """Whether it is still the plan for ``groups``."""
        params = [param for group in groups for param in group["params"]]
        owners = [group for group in groups for _ in group["params"]]
        pairs = (params, self.params), (owners, self.groups)
        is_same = all(list(map(id, now)) == list(map(id, then)) for now, then in pairs)
        return is_same and self.exchange.is_of(params)


class MatrixStep:
    """One step of all matrices that have gradients."""

    def __init__(self, plan: MuonPlan, state: Any, orthogonalize: Orthogonalize) -> None:
        self._plan = plan
        self._state = state
        self._orthogonalize = orthogonalize
        self._gradients: dict[int, Tensor] = {}
        problem = None
        try:
            for index, (param, name) in enumerate(zip(plan.params, plan.names, strict=True)):
                if param.grad is not None:
                    self._gradients[index] = local_gradient(param, name, "Muon needs whole matrices")
                    _check_buffer((state.get(param) or {}).get(BUFFER), param, name)
        except Exception as error:
            problem = error
        plan.exchange.agree("Muon.step", self._gradients, problem)

    def run(self) -> None:
        """Average gradients, decay weights, and add the orthogonalised matrices."""
        self._locals = {index: dtensor.plain(self._plan.params[index]).detach() for index in self._gradients}
        self._buffers = {index: self._buffer(index) for index in self._gradients}
        for key, some in self._by(lambda group: 1 - group["momentum"]).items():
            foreach.lerp_([self._buffers[i] for i in some], [self._gradients[i] for i in some], key)
        for key, some in self._by(lambda group: 1 - float(group["lr"]) * group["weight_decay"]).items():
            foreach.mul_([self._locals[i] for i in some], key)
        self._plan.exchange.run(self._update, on_stacks(self._orthogonalized), self._add, self._gradients)

    def _by(self, value: Callable[[dict[str, Any]], float]) -> dict[float, list[int]]:
        """The matrices by a value of their groups."""
        values = {id(group): value(group) for group in self._plan.groups}
        found: dict[float, list[int]] = {}
        for index in self._gradients:
            found.setdefault(values[id(self._plan.groups[index])], []).append(index)
        return found

    def _buffer(self, index: int) -> Tensor:
        """This rank's part of the average of a matrix's gradients."""
        param, state = self._plan.params[index], self._state[self._plan.params[index]]
        if BUFFER not in state:
            state[BUFFER] = dtensor.placed_as(param, torch.zeros_like(self._gradients[index]))
        if isinstance(param, DTensor):
            state[BUFFER] = placed_like(state[BUFFER], param)
        local = dtensor.plain(state[BUFFER])
        if self._gradients[index].dtype != local.dtype:
            self._gradients[index] = self._gradients[index].to(local.dtype)
        return local

    def _update(self, index: int) -> tuple[Tensor]:
        """This rank's part of the matrix to orthogonalise."""
        group, buffer = self._plan.groups[index], self._buffers[index]
        return (self._gradients[index].lerp(buffer, group["momentum"]) if group["nesterov"] else buffer,)

    def _orthogonalized(self, matrices: Tensor, keys: list[BlockKey]) -> Tensor:
        alike: dict[Any, list[int]] = {}
        for place, key in enumerate(keys):
            group = self._plan.groups[key.tensor]
            settings = tuple(group["ns_coefficients"]), group["ns_steps"], group["eps"]
            alike.setdefault(settings, []).append(place)
        if len(alike) == 1:
            return self._orthogonalize(matrices, *next(iter(alike)))
        results = torch.empty_like(matrices)
        for settings, places in alike.items():
            results[places] = self._orthogonalize(matrices[places], *settings)
        return results

    def _add(self, matrix: Block, index: tuple[slice, ...], rows: Tensor) -> None:
        group, local = self._plan.groups[matrix.key.tensor], self._locals[matrix.key.tensor]
        lr = _adjusted(float(group["lr"]), group["adjust_lr_fn"], *matrix.shape[-2:])
        local[index].add_(rows.to(local.device), alpha=-lr)


def _adjusted(lr: float, how: str | None, rows: int, columns: int) -> float:
    """The learning rate of a matrix of this shape."""
    if how == "match_rms_adamw":
        return lr * (0.2 * math.sqrt(max(rows, columns)))
    if how == "spectral_unclamped":
        return lr * math.sqrt(rows / columns)
    return lr * math.sqrt(max(1, rows / columns))


def _check_buffer(buffer: Any, param: Tensor, name: str) -> None:
    if buffer is None:
        return
    if isinstance(buffer, DTensor) != isinstance(param, DTensor) or buffer.shape != param.shape:
        raise TypeError(
            f"{name}: '{BUFFER}' in the state is a {type(buffer).__name__} of shape {tuple(buffer.shape)}, "
            f"where a {type(param.data).__name__} of the parameter's shape, {tuple(param.shape)}, is "
            "expected. Load full states with shardwise.state.load_full_optimizer_state_dict."
        )


Optimizer = torch.optim.Optimizer
IsMatrix = Callable[[str, Tensor], bool]
MUON, ADAMW = "muon", "adamw"
ADJUSTMENTS = (None, "original", "match_rms_adamw", "spectral_unclamped")


class Muon(Optimizer):
    """``torch.optim.Muon`` for sharded models, with AdamW for all but the matrices of hidden layers.

    Computes the same numbers as torch's Muon on whole parameters in one process, up to the rounding of the
    iteration. One rank assembles each matrix, orthogonalises it, and sends its rows back; momentum and
    parameters stay sharded. torch's Muon on DTensors gathers for each product, and repeats some on all ranks.

    Args:
        params: parameters, named parameters (``model.named_parameters()``), or param groups. ``"algorithm"``
            in a group, ``"muon"`` or ``"adamw"``, selects the algorithm for all of it. ``is_matrix`` divides
            a group without it into two, the matrices first.
        lr: learning rate of the matrices, before the adjustment.
        weight_decay: decoupled weight decay.
        momentum: momentum of the average of gradients.
        nesterov: look ahead by one step of momentum.
        ns_coefficients: coefficients of the Newton-Schulz iteration.
        eps: the smallest norm that the iteration divides by.
        ns_steps: steps of the iteration, below 100.
        adjust_lr_fn: how ``lr`` grows with the shape (rows, columns) of a matrix. ``"original"`` or None: by
            ``sqrt(max(1, rows / columns))``; ``"match_rms_adamw"``: by ``0.2 * sqrt(max(rows, columns))``,
            which suits AdamW's lr and weight decay; ``"spectral_unclamped"``: by ``sqrt(rows / columns)``.
        adamw: arguments of ``torch.optim.AdamW``, for all other parameters.
        is_matrix: decides by name ("" if unknown) and parameter; see :func:`is_hidden_matrix`, the default.
        row_blocks: a function of name and parameter. For parameters in which several matrices are fused along
            the second-to-last dim, such as queries, keys and values, it returns the rows of each, and each is
            orthogonalised separately. It returns None for the others.
        iteration_dtype: dtype in which matrices are sent and orthogonalised.
        orthogonalize: a function of matrices ``[count, rows, columns]`` and of ``ns_coefficients``,
            ``ns_steps`` and ``eps``. ``torch.compile(newton_schulz)`` compiles it.
        batch_bytes: bytes of whole matrices that a rank holds at once, unless one matrix is larger.

    Raises:
        TypeError: ``params`` contains something other than parameters.
        ValueError: an argument is out of range, or a named parameter cannot be assembled.

    Matrices may be DTensors with any placements except partial ones: sharded by rows or columns, unevenly,
    over a mesh with replicas (which share the work) or with tensor parallelism, in stacks of three dims
    (experts), replicated, and plain tensors, which each rank steps alone.

    ``step`` is collective over the ranks that share matrices. It raises on all of them if some have a
    gradient that others lack. On a device the host waits once a step for the queued work.

    Costs, on W ranks: 1/W of the computation; at most 2 (W - 1) / W of the bytes of all matrices in
    ``iteration_dtype`` on the wire, over all ranks together; in memory one number of state for each element
    of a matrix, sharded, and during a step some six times ``batch_bytes`` plus the memory of the iteration.

    The iteration is from Jordan et al., "Muon: an optimizer for hidden layers in neural networks" (2024);
    ``match_rms_adamw`` from Liu et al., "Muon is scalable for LLM training" (2025).

    Example::

        optimizer = Muon(model.named_parameters(), lr=0.02, adamw={"lr": 3e-4})
        for batch in batches:
            model(batch).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: Coefficients = (3.4445, -4.7750, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        *,
        adamw: Mapping[str, Any] | None = None,
        is_matrix: IsMatrix = is_hidden_matrix,
        row_blocks: RowBlocks | None = None,
        iteration_dtype: torch.dtype = torch.bfloat16,
        orthogonalize: Orthogonalize = newton_schulz,
        batch_bytes: int = BATCH_BYTES,
    ) -> None:
        if not isinstance(iteration_dtype, torch.dtype) or not iteration_dtype.is_floating_point:
            raise ValueError(f"Muon: iteration_dtype is {iteration_dtype!r}; pass a floating dtype.")
        self._is_matrix = is_matrix
        self._row_blocks = row_blocks
        self._iteration_dtype = iteration_dtype
        self._orthogonalize = orthogonalize
        self._batch_bytes = batch_bytes
        self._adamw_defaults = _defaults_of_adamw(adamw)
        self._adamw: FlatOptimizer | None = None
        self._plan: MuonPlan | None = None
        self._own_state: Any = defaultdict(dict)
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
        }
        _check_hyperparameters("Muon", defaults)
        super().__init__(params, defaults)
        self._plan = self._make_plan()  # refuses now what cannot be assembled

    # --- param groups -----------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a param group; without ``"algorithm"`` it becomes two, for matrices and for others."""
        count = len(self.param_groups)
        try:
            for group in self._divided(dict(param_group)):
                self._add(group)
        except Exception:
            del self.param_groups[count:]  # nothing is left half-added
            raise
        self._plan = None

    def _divided(self, group: dict[str, Any]) -> list[dict[str, Any]]:
        given = group["params"]
        params = [given] if isinstance(given, Tensor) else list(given)
        algorithm = group.get("algorithm")
        if algorithm not in (MUON, ADAMW, None):
            raise ValueError(f"Muon: algorithm of a param group is {algorithm!r}; pass 'muon' or 'adamw'.")
        if algorithm is not None:
            return [group | {"params": params}]
        halves: dict[str, list[Any]] = {MUON: [], ADAMW: []}
        for each in params:
            is_matrix = self._is_matrix(_name_in(each), _param_in(each))
            halves[MUON if is_matrix else ADAMW].append(each)
        if all(halves.values()) and (unclear := sorted({"lr", "eps"} & set(group))):
            raise ValueError(
                f"Muon: a param group sets {' and '.join(unclear)}, and has both matrices and other "
                "parameters, for which these mean different things. Give matrices and others groups of their "
                "own, or set them with lr= and adamw={'lr': ...}."
            )
        named = [group | {"params": some, "algorithm": name} for name, some in halves.items() if some]
        return named or [group | {"params": [], "algorithm": MUON}]

    def _add(self, group: dict[str, Any]) -> None:
        is_muon = group["algorithm"] == MUON
        defaults = self.defaults if is_muon else self._adamw_defaults
        names = {id(_param_in(each)): _name_in(each) for each in group["params"]}
        refuse_twice(
            f"Muon: group {len(self.param_groups)}",
            [*map(_param_in, group["params"])],
            lambda param: names[id(param)] or f"a parameter of shape {tuple(param.shape)}",
        )
        super().add_param_group({**defaults, **group})
        added = self.param_groups[-1]
        for key in {*self.defaults, *self._adamw_defaults} - {*defaults}:
            added.pop(key, None)  # of the other algorithm
        _check_group(added, len(self.param_groups) - 1)
        if not is_muon:
            self._share_with_adamw()

    def _share_with_adamw(self) -> None:
        """Let AdamW share the param groups that it steps."""
        groups = [group for group in self.param_groups if group["algorithm"] == ADAMW]
        if self._adamw is None and groups:
            options = {k: v for k, v in self._adamw_defaults.items() if k != "decoupled_weight_decay"}
            self._adamw = FlatOptimizer(torch.optim.AdamW([dict(groups[0])], **options))
        if self._adamw is not None:
            self._adamw.param_groups = groups

    # --- state ------------------------------------------------------------------------------------

    @property  # type: ignore[override]
    def state(self) -> Any:
        """State by parameter, of matrices and of others."""
        return _JointState(self._own_state, self._adamw)

    @state.setter
    def state(self, state: Any) -> None:
        others = _params_of(self._adamw)
        self._own_state = defaultdict(dict, {k: v for k, v in state.items() if k not in others})
        if self._adamw is not None:
            self._adamw.state = defaultdict(dict, {k: v for k, v in state.items() if k in others})

    def __getstate__(self) -> dict[str, Any]:
        """The pickled and copied state: all except the plan."""
        kept = {key: value for key, value in vars(self).items() if key.startswith("_") and key in _KEPT}
        return kept | super().__getstate__() | {"state": dict(self.state)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Continue with a loaded or unpickled state."""
        before = vars(self).get("param_groups", [])
        others = dict(state)
        given = others.pop("state", None)
        vars(self).setdefault("_adamw", None)
        super().__setstate__(others)
        for index, group in enumerate(self.param_groups):
            # A state of torch's Muon lacks the algorithm.
            for key, value in (before[index] if index < len(before) else {}).items():
                group.setdefault(key, value)
        self._plan = None
        self._share_with_adamw()
        if given is not None:
            self.state = given

    # --- the step ---------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Perform a single optimization step. Collective over the ranks that share matrices.

        Args:
            closure: recomputes the loss, with gradients, and returns it.

        Raises:
            TypeError: the named parameter has a gradient with an impossible placement. All ranks raise.
            ValueError: ranks disagree on which parameters have gradients. All ranks raise, and nothing has
                changed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._plan is None or not self._plan.is_of(self._matrix_groups()):
            self._plan = self._make_plan()
        matrices = MatrixStep(self._plan, self._own_state, self._orthogonalize)
        with monitor_of_job().call("Muon.step", self._plan.exchange.axes):
            if self._adamw is not None:  # first: it refuses before it changes anything
                optimizers.step_without_hooks(type(self._adamw))(self._adamw)
            matrices.run()
        return loss

    def _make_plan(self) -> MuonPlan:
        return MuonPlan(self._matrix_groups(), self._row_blocks, self._iteration_dtype, self._batch_bytes)

    def _matrix_groups(self) -> list[dict[str, Any]]:
        return [group for group in self.param_groups if group["algorithm"] == MUON]


_KEPT = {"_is_matrix", "_row_blocks", "_iteration_dtype", "_orthogonalize", "_batch_bytes", "_adamw_defaults"}


class _JointState(MutableMapping[Any, Any]):
    """The state of matrices and that of AdamW, as one dict by parameter."""

    def __init__(self, own: Any, adamw: FlatOptimizer | None) -> None:
        self._own = own
        self._adamw: Any = {} if adamw is None else adamw.state
        self._others = _params_of(adamw)

    def _of(self, param: Any) -> Any:
        return self._adamw if param in self._others else self._own

    def __getitem__(self, param: Any) -> Any:
        return self._of(param)[param]

    def __setitem__(self, param: Any, state: Any) -> None:
        self._of(param)[param] = state

    def __delitem__(self, param: Any) -> None:
        del self._of(param)[param]

    def __contains__(self, param: Any) -> bool:
        return param in self._of(param)

    def get(self, param: Any, default: Any = None) -> Any:
        """Look up without making an entry."""
        return self._of(param).get(param, default)

    def __iter__(self) -> Iterator[Any]:
        return chain(self._own, self._adamw)

    def __len__(self) -> int:
        return len(self._own) + len(self._adamw)


def _params_of(optimizer: Optimizer | None) -> set[Tensor]:
    groups = [] if optimizer is None else optimizer.param_groups
    return set(chain.from_iterable(group["params"] for group in groups))


# --- arguments ------------------------------------------------------------------------------------


def _param_in(given: Any) -> Tensor:
    """The parameter, given with or without its name."""
    param = given[1] if isinstance(given, tuple) and len(given) == 2 else given
    if not isinstance(param, Tensor):
        raise TypeError(f"Muon: params contain a {type(param).__name__}, where a parameter is expected.")
    return param


def _name_in(given: Any) -> str:
    return clean(str(given[0])) if isinstance(given, tuple) else known_name(given)


def _defaults_of_adamw(given: Mapping[str, Any] | None) -> dict[str, Any]:
    """All hyperparameters of AdamW, which checks the given ones."""
    try:
        defaults: dict[str, Any] = torch.optim.AdamW([torch.zeros(1)], **(given or {})).defaults
    except (TypeError, ValueError, RuntimeError) as error:
        raise type(error)(f"Muon: adamw is {given!r}, which torch.optim.AdamW refuses: {error}") from None
    return dict(defaults)


def _check_hyperparameters(where: str, group: Mapping[str, Any]) -> None:
    if isinstance(group["lr"], Tensor) and group["lr"].numel() != 1:
        raise ValueError(f"{where}: lr is a tensor of {group['lr'].numel()} elements; pass one number.")
    for name in ("lr", "momentum", "weight_decay"):
        if not group[name] >= 0:
            raise ValueError(f"{where}: {name} is {group[name]}; it must be at least 0.")
    if group["adjust_lr_fn"] not in ADJUSTMENTS:
        raise ValueError(
            f"{where}: adjust_lr_fn is {group['adjust_lr_fn']!r}; pass one of "
            f"{', '.join(map(repr, ADJUSTMENTS))}."
        )
    if len(group["ns_coefficients"]) != 3:
        raise ValueError(f"{where}: ns_coefficients are {group['ns_coefficients']}; pass three numbers.")
    if not 0 <= group["ns_steps"] < 100:
        raise ValueError(f"{where}: ns_steps is {group['ns_steps']}; it must be from 0 to 99.")


def _check_group(group: dict[str, Any], index: int) -> None:
    params = group["params"]
    names = [name or f"parameter {i} of group {index}" for i, name in enumerate(names_in(group))]
    if group["algorithm"] == MUON:
        _check_hyperparameters(f"Muon: group {index}", group)
        for param, name in zip(params, names, strict=True):
            check_matrix(param, name)


break_graphs(inspect.unwrap(Muon.step))  # dynamo fails while it traces it
