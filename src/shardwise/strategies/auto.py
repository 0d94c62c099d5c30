"""``strategy="auto"``: what exposes the fewest bytes, of what fits in the memory of a rank.

A step of each candidate runs on fake tensors (``dry_run``), on a copy of the model, as one rank of its mesh:

    ddp, zero2, hybrid_zero2   all parameters are unsharded at once
    zero3, hybrid              where those do not fit, with as many of the last groups kept until backward as
                               do fit
    zero3_hpz                  where zero2, which sends as much to other hosts, does not fit or has no mesh

zero1 is no candidate: in a step of one backward it sends what zero2 does, and holds more. The last groups are
those that are kept since backward frees them first: while it runs, gradients take their place.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from glob import escape
from operator import attrgetter
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from shardwise.dry_run.arguments import check_model, memory_in_bytes, shapes_of, training_of
from shardwise.dry_run.step import Step, dry_run
from shardwise.layout.mesh import ShardMesh, resolve_mesh
from shardwise.layout.text_tables import in_own_unit, ruled, unit_for
from shardwise.ranks.agreement import run_on_all_ranks
from shardwise.strategies.meshes import STRATEGIES, ranks_per_host
from shardwise.strategies.overrides import Overrides
from shardwise.strategies.wrap_policies import range_of_names

_log = logging.getLogger(__name__)
CHOICE = "_shardwise_choice"
"""Where the dict of the module that was sharded has its ``Choice``, for ``explain``."""

Shard = Callable[[nn.Module, DeviceMesh, str, Overrides], Any]
"""Shards a copy of the model over a mesh by the strategy of this name, with these overrides."""


# --- what was tried and chosen --------------------------------------------------------------------


@dataclass(frozen=True)
class Trial:
    """A strategy that was run on fake tensors, or for which that was not needed.

    Attributes:
        kept: the groups that it keeps unsharded from forward to backward though its name does not say so, in
            the order of forward; each by the names of its modules.
        num_bytes: the highest peak of a step on a rank; if it was not run, of parameters alone.
        where: in which phase and group that is; empty if it was not run.
        sent, exposed: bytes that a rank sends in a step, and those that count; see :func:`shard_model`.
        order: all groups but the root's, in the order of forward.
    """

    strategy: str
    kept: tuple[tuple[str, ...], ...]
    num_bytes: int
    where: str = ""
    sent: int = 0
    exposed: int = 0
    order: tuple[tuple[str, ...], ...] = ()

    @staticmethod
    def of(strategy: str, kept: tuple[tuple[str, ...], ...], shape: dict[str, int], step: Step) -> "Trial":
        """The figures of a step."""
        peak, where = step.highest()
        begin, end = step.phase("forward")
        told = (mark for time, mark in step.marks if begin <= time <= end and mark.startswith("forward "))
        inner = dict.fromkeys(mark.removeprefix("forward ") for mark in told)
        inner.pop(step.groups[0], None)
        sent = sum(step.sent.values())
        # What a host sends to others: along the first of two dimensions, each of its ranks sends that. If
        # they exchange it with all ranks, as in a ring, one of them does.
        num_senders = 1 if STRATEGIES[strategy].shards_over_both else shape.get("shard", 1)
        return Trial(
            strategy,
            kept,
            peak.num_bytes,
            where,
            sent=sent,
            exposed=sent if len(shape) == 1 else step.sent.get("replicate", 0) * num_senders,
            order=tuple(tuple(name.split(", ")) for name in inner),
        )

    def __str__(self) -> str:
        if not self.kept:
            return self.strategy
        shown = range_of_names([name for group in self.kept for name in group])
        return f"{self.strategy}, {shown} kept until backward"


@dataclass(frozen=True)
class Choice:
    """What was chosen, of what, and what the figures are for.

    ``trials`` are in the order in which they were tried. ``memory``: of a rank, in bytes; ``usable``: how
    much of it may be used. ``assumptions``: the optimizer and the batch, in words.
    """

    trial: Trial
    trials: tuple[Trial, ...]
    memory: int
    usable: int
    assumptions: str

    @property
    def overrides(self) -> Overrides:
        """As ``shard_model`` accepts them."""
        return overrides_for(self.trial.kept)

    def __str__(self) -> str:
        return (
            f'strategy "auto" chose {self.trial}: it exposes the fewest bytes of what fits in '
            f"{in_own_unit(self.memory)}, of which a tenth stays free"
        )

    def table(self) -> Iterator[str]:
        """The choice, what was tried, and what was assumed, as lines."""
        yield f"{self}."
        yield from _table(self.trials, self.usable)
        yield f"Assumed: {self.assumptions}."


def overrides_for(kept: Iterable[tuple[str, ...]]) -> Overrides:
    """What keeps these groups unsharded from forward to backward, as ``shard_model`` accepts it."""
    return {escape(name): {"reshard_after_forward": False} for group in kept for name in group}


def _table(trials: Sequence[Trial], usable: int) -> list[str]:
    unit, size = unit_for(max(usable, *(trial.num_bytes for trial in trials)))
    cells = [["tried", f"peak, {unit}", "in", f"exposed, {unit}", f"sent, {unit}", "fits"]]
    for trial in trials:
        peak = f"{trial.num_bytes / size:,.2f}"
        fits = "yes" if trial.num_bytes <= usable else "no"
        if trial.where:
            numbers = f"{trial.exposed / size:,.2f}", f"{trial.sent / size:,.2f}"
            cells.append([str(trial), peak, trial.where, *numbers, fits])
        else:
            cells.append([str(trial), f"> {peak}", "parameters alone", "", "", fits])
    return ruled(cells, right=(1, 3, 4))


# --- the search -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class AutoOptions:
    """Arguments of ``shard_model`` that are for this strategy alone."""

    memory: Any
    sample: Any
    optimizer: Any
    loss: Callable[[Any], Tensor] | None

    def refuse_any(self, strategy: Any) -> None:
        """Raise if one is given though ``strategy`` is not "auto"."""
        given = [name for name, value in vars(self).items() if value is not None]
        if given:
            raise ValueError(
                f'shard_model: strategy is {strategy!r}, but only "auto" uses {" and ".join(given)}. Leave '
                'that out, or pass strategy="auto".'
            )

    @property
    def assumptions(self) -> str:
        """What the figures are for, in words."""
        optimizer = self.optimizer or "adamw"
        named = optimizer if isinstance(optimizer, str) else getattr(optimizer, "__name__", "the one given")
        sample = self.sample if isinstance(self.sample, str) else shapes_of(self.sample)
        return f"optimizer {named}, a batch of {sample} on each rank"


def choose(
    model: nn.Module,
    options: AutoOptions,
    mesh: DeviceMesh | None,
    dims: Any,
    param_dtype: Any,
    is_offloaded: bool,
    shard: Shard,
) -> Choice:
    """The choice for ``model``, the same on all ranks. Collective; raises on all ranks.

    ``mesh`` and ``dims`` are those of ``shard_model``. ``param_dtype``: of the computation; None: the
    parameters' own. ``is_offloaded``: whether shards are kept on the host. ``shard`` shards a copy.
    """
    resolved = resolve_mesh(mesh, dims)
    axes, device = resolved.axes(), resolved.device
    same = {"memory": options.memory, 'what strategy="auto" assumes': options.assumptions}
    run_on_all_ranks(axes, device, lambda: _check(model, options), caller="shard_model", same=same)
    shapes = _shapes(resolved, mesh, dims)

    def search() -> Choice:
        on_host = device.type == "cpu"
        return Search(model, options, shapes, param_dtype, on_host, is_offloaded and not on_host, shard).run()

    choice = run_on_all_ranks(axes, device, search)
    # A difference would have them make different meshes, and wait for each other for ever.
    same = {'the choice of strategy="auto"': str(choice.trial)}
    run_on_all_ranks(axes, device, lambda: None, caller="shard_model", same=same)
    _log.info("shard_model: %s", "\n".join(choice.table()))
    return choice


def _check(model: nn.Module, options: AutoOptions) -> None:
    needed = {
        "memory": 'memory="80GB", the memory of a rank',
        "sample": "sample=batch, the input of forward on a rank",
    }
    for name, example in needed.items():
        if getattr(options, name) is None:
            raise ValueError(
                f'shard_model: strategy="auto" chooses what fits in memory, and {name} is missing. Pass '
                f"{example}."
            )
    memory_in_bytes("shard_model", options.memory)
    check_model('shard_model(strategy="auto")', model)


def _shapes(resolved: ShardMesh, mesh: DeviceMesh | None, dims: Any) -> dict[str, dict[str, int]]:
    """The sizes of the mesh dimensions of each strategy that the ranks can have. Collective."""
    sizes = {"replicate": resolved.replicate_axis.world, "shard": resolved.shard_axis.world}
    if dims is not None:  # roles are named
        named = {role: sizes[role] for role in resolved.roles}
        return {name: named for name, each in STRATEGIES.items() if each.roles == resolved.roles}
    world = resolved.num_ranks
    if mesh is None:
        per_host, _ = ranks_per_host(resolved.device.type, dist.get_world_size())
        arrangements: list[tuple[int, ...]] = [(world,)]
        if per_host is not None and 1 < per_host < world:
            arrangements.append((world // per_host, per_host))
    else:
        arrangements = [tuple(mesh.shape)]
    return {
        name: dict(zip(each.roles, arrangement, strict=True))
        for arrangement in arrangements
        for name, each in STRATEGIES.items()
        if len(each.roles) == len(arrangement)
    }


class Search:
    """Runs candidates, as one rank, and compares them.

    ``shapes``: for each strategy that is possible, the sizes of its mesh dimensions by their names.
    ``on_host``: communication is gloo's. ``is_offloaded``: shards and the optimizer's state are in the host
    memory of a device, and do not count.
    """

    def __init__(
        self,
        model: nn.Module,
        options: AutoOptions,
        shapes: dict[str, dict[str, int]],
        param_dtype: Any,
        on_host: bool,
        is_offloaded: bool,
        shard: Shard,
    ) -> None:
        self._options, self._shapes, self._shard = options, shapes, shard
        self._is_offloaded = is_offloaded
        self._memory = memory_in_bytes("shard_model", options.memory)
        self._usable = self._memory * 9 // 10
        self._training = training_of(
            "shard_model",
            model,
            "sample",
            options.sample,
            options.loss,
            options.optimizer or "adamw",
            on_host,
        )
        self._whole = sum(
            param.numel() * min(param.itemsize, getattr(param_dtype, "itemsize", param.itemsize))
            for param in model.parameters()
        )

    def run(self) -> Choice:
        """The choice."""
        trials = tuple(self._trials())
        fitting = [trial for trial in trials if self._fits(trial)]
        assumed = self._options.assumptions + ", shards in host memory" * self._is_offloaded
        if fitting:
            return Choice(_best(fitting), trials, self._memory, self._usable, assumed)
        least = min((trial for trial in trials if trial.where), key=lambda trial: trial.num_bytes)
        unit, size = unit_for(least.num_bytes)
        peak, missing = (f"{n / size:,.2f} {unit}" for n in (least.num_bytes, least.num_bytes - self._usable))
        table = "\n".join(_table(trials, self._usable))
        raise ValueError(
            f'shard_model: strategy "auto" finds nothing that fits in memory={self._options.memory!r}, of '
            f"which a tenth stays free: {least} needs least, {peak} at its peak ({least.where}), {missing} "
            f"too much. memory={-(-least.num_bytes * 10 // 9)} would be enough. Else: more ranks to shard "
            "over, activation_checkpointing=True, a smaller batch, smaller groups (wrap=), or computing in "
            'bfloat16 (mp_policy="bf16"); shardwise.estimate(...) shows how much each saves.\n'
            f"{table}\nAssumed: {assumed}."
        )

    def _fits(self, trial: Trial) -> bool:
        return trial.num_bytes <= self._usable

    def _trials(self) -> Iterator[Trial]:
        fits = {}
        for whole, resharding in (("ddp", None), ("zero2", "zero3"), ("hybrid_zero2", "hybrid")):
            if whole not in self._shapes:
                continue
            # At the end of forward all parameters are unsharded: no need to run what cannot fit.
            trial = Trial(whole, (), self._whole) if self._whole > self._usable else self._try(whole)
            yield trial
            fits[whole] = self._fits(trial)
            if resharding is not None and not fits[whole]:
                yield from self._with_kept_groups(resharding)
        if "zero3_hpz" in self._shapes and not fits.get("zero2"):
            yield self._try("zero3_hpz")

    def _with_kept_groups(self, strategy: str) -> Iterator[Trial]:
        """The strategy as it is, and with the most of its last groups kept that fit."""
        plain = best = self._try(strategy)
        yield plain
        if not self._fits(plain):
            return
        groups = plain.order
        fits, too_many = 0, len(groups)  # all of them would be what did not fit before
        spare, of_group = self._usable - plain.num_bytes, max(1, self._whole // max(1, len(groups)))
        # Of equal groups, the last is kept anyhow.
        guesses = iter([1 + spare // of_group, 2 + spare // of_group])
        while too_many - fits > 1:
            count = next(guesses, 0)
            if not fits < count < too_many:
                count = (fits + too_many) // 2
            trial = self._try(strategy, groups[-count:])
            if self._fits(trial):
                fits, best = count, trial
            else:
                too_many = count
        if best.exposed < plain.exposed or best.sent < plain.sent:
            yield best

    def _try(self, strategy: str, kept: tuple[tuple[str, ...], ...] = ()) -> Trial:
        shape = self._shapes[strategy]
        overrides = overrides_for(kept)

        def shard(copy: nn.Module, mesh: DeviceMesh) -> None:
            self._shard(copy, mesh, strategy, overrides)

        step = dry_run(self._training, shape, shard)
        return Trial.of(strategy, kept, shape, step.with_host_shards() if self._is_offloaded else step)


def _best(trials: Sequence[Trial]) -> Trial:
    """What exposes least; of those equal up to padding, what sends least, and of these what holds least."""
    for figure in (attrgetter("exposed"), attrgetter("sent")):
        least = min(map(figure, trials))
        trials = [trial for trial in trials if figure(trial) <= 1.01 * least]
    return min(trials, key=lambda trial: trial.num_bytes)
