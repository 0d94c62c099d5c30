"""What ``strategy="auto"`` has tried and chosen, in words."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from glob import escape
from typing import Any

from torch import nn

from shardwise.dry_run.step import Step
from shardwise.layout.text_tables import ruled, unit_for
from shardwise.strategies.module_trees import range_of_names
from shardwise.strategies.overrides import Overrides

_CHOICE = "_shardwise_choice"  # in the dict of the module that was sharded


@dataclass(frozen=True)
class Trial:
    """A strategy that was run on fake tensors, or for which that was not needed.

    Attributes:
        strategy: its name.
        kept: the groups that it keeps unsharded from forward to backward though its name does not say so, in
            the order of forward; each by the names of its modules.
        num_bytes: the highest peak of a step on a rank; if it was not run, of parameters alone.
        where: in which phase and group that is; empty if it was not run.
        sent: bytes that a rank sends in a step.
        exposed: bytes that count; see :func:`shard_model`.
        order: all groups but the root's, in the order of forward.
    """

    strategy: str
    kept: tuple[tuple[str, ...], ...]
    num_bytes: int
    where: str = ""
    sent: int = 0
    exposed: int = 0
    order: tuple[tuple[str, ...], ...] = ()

    @classmethod
    def of(
        cls, strategy: str, kept: tuple[tuple[str, ...], ...], shape: dict[str, int], step: Step
    ) -> "Trial":
        """The figures of a step."""
        peak, where = step.highest()
        begin, end = step.phase("forward")
        entered = [
            mark.removeprefix("forward ")
            for time, mark in step.marks
            if begin <= time <= end and mark.startswith("forward ")
        ]
        inner = dict.fromkeys(name for name in entered if name != step.groups[0])
        return cls(
            strategy,
            kept,
            peak.num_bytes,
            where,
            sent=sum(step.sent.values()),
            # Of two dimensions, what a host sends to others counts.
            exposed=sum(step.sent.values())
            if len(shape) == 1
            else step.sent.get("replicate", 0) * shape["shard"],
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

    Attributes:
        trial: the choice.
        trials: all that is worth telling, in the order in which they were tried.
        memory: of a rank, in bytes, as named by the caller.
        usable: how much of it may be used.
        assumptions: the optimizer and the batch, in words.
    """

    trial: Trial
    trials: tuple[Trial, ...]
    memory: int
    usable: int
    assumptions: str

    @property
    def overrides(self) -> Overrides:
        """As ``shard_model`` takes them."""
        return overrides_for(self.trial.kept)

    def __str__(self) -> str:
        """The choice in a sentence."""
        unit, size = unit_for(self.memory)
        return (
            f'strategy "auto" chose {self.trial}: it exposes the fewest bytes of what fits in '
            f"{self.memory / size:,.2f} {unit}, of which a tenth stays free"
        )

    def table(self) -> Iterator[str]:
        """The choice, what was tried, and what was assumed, as lines."""
        yield f"{self}."
        yield from _table(self.trials, self.usable)
        yield f"Assumed: {self.assumptions}."


def overrides_for(kept: Iterable[tuple[str, ...]]) -> Overrides:
    """What keeps these groups unsharded from forward to backward, as ``shard_model`` takes it."""
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


def message_that_nothing_fits(trials: Sequence[Trial], memory: Any, usable: int, assumptions: str) -> str:
    """What is closest, and what would have to change."""
    least = min((trial for trial in trials if trial.where), key=lambda trial: trial.num_bytes)
    unit, size = unit_for(least.num_bytes)
    peak, missing = (f"{each / size:,.2f} {unit}" for each in (least.num_bytes, least.num_bytes - usable))
    table = "\n".join(_table(trials, usable))
    return (
        f'shard_model: strategy "auto" finds nothing that fits in memory={memory!r}, of which a tenth stays '
        f"free: {least} needs least, {peak} at its peak ({least.where}), {missing} too much. "
        f"memory={-(-least.num_bytes * 10 // 9)} would be enough. Else: more ranks to shard over, "
        "activation_checkpointing=True, a smaller batch, smaller groups (wrap=), or computing in bfloat16 "
        '(mp_policy="bf16"); '
        f"shardwise.estimate(...) shows how much each saves.\n{table}\nAssumed: {assumptions}."
    )


def remember(model: nn.Module, choice: Choice) -> None:
    """Have ``explain`` know of it."""
    model.__dict__[_CHOICE] = choice


def remembered(model: nn.Module) -> Choice | None:
    """What was chosen for ``model``, if anything was."""
    return model.__dict__.get(_CHOICE)
