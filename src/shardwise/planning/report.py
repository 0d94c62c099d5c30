"""The result of an estimate: figures for each strategy, as a table, as JSON and as a picture."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from os import PathLike
from typing import Any

from shardwise.dry_run.memory_log import ACTIVATIONS, GRADIENTS, PARAMETERS, STATE, UNSHARDED
from shardwise.dry_run.step import PHASES, Step
from shardwise.layout.text_tables import in_own_unit, ruled, unit_for


@dataclass(frozen=True)
class Peak:
    """The moment of a phase at which the most memory is in use.

    Attributes:
        num_bytes: all of it.
        where: the group that was running, by the name of its module.
        by_kind: bytes of each kind of memory.
    """

    num_bytes: int
    where: str
    by_kind: dict[str, int]


@dataclass(frozen=True)
class StrategyEstimate:
    """What one strategy needs on the rank that holds the most, in bytes.

    Attributes:
        strategy: its name.
        mesh: the sizes of its mesh dimensions, by their names.
        is_checkpointed: whether each block keeps only its inputs, and runs again in backward.
        offloads_activations: whether those inputs are in host memory meanwhile.
        is_offloaded: whether parameters, gradients and optimizer state are in host memory. The peaks are
            those of the device, and then do not contain them.
        parameters: sharded parameters, through the whole step.
        gradients: sharded gradients, from backward to the optimizer's step.
        optimizer_state: what the optimizer keeps.
        unsharded: unsharded parameters, at the moment when most of them are in memory.
        activations: the most that forward keeps for backward and uses itself; None without a batch.
        peaks: of ``forward``, ``backward`` and ``optimizer``; all kinds of memory together.
        sent: by mesh dimension, the bytes that a rank sends in a step.
        flops: floating-point operations of a rank's forward and backward, with recomputation: those of matrix
            products, convolutions and attention, which counts without its mask. 0 without a batch.
        seconds: the minimum time of a step: its arithmetic at the full speed of the device, or what it sends
            at the full bandwidth, whichever takes longer. With causal attention over long sequences, the
            arithmetic is up to twice too much. None if no speed was given.
        utilization: the share of the device's speed that the model itself, without recomputation, would then
            use ("MFU"): the most that can be reached.
        largest_batch: the size of the first dimension of the largest batch that fits; 0 if none does. None if
            that was not asked.
        step: memory over the step.
    """

    strategy: str
    mesh: dict[str, int]
    is_checkpointed: bool
    is_offloaded: bool
    parameters: int
    gradients: int
    optimizer_state: int
    unsharded: int
    activations: int | None
    peaks: dict[str, Peak]
    sent: dict[str, int]
    flops: int
    step: Step = field(repr=False)
    offloads_activations: bool = field(default=False, kw_only=True)
    seconds: float | None = field(default=None, kw_only=True)
    utilization: float | None = field(default=None, kw_only=True)
    largest_batch: int | None = field(default=None, kw_only=True)

    @property
    def peak(self) -> Peak:
        """The highest of the peaks."""
        return max(self.peaks.values(), key=lambda peak: peak.num_bytes)

    @staticmethod
    def of(
        strategy: str,
        mesh: dict[str, int],
        is_checkpointed: bool,
        is_offloaded: bool,
        has_batch: bool,
        step: Step,
    ) -> "StrategyEstimate":
        """The figures of a step."""
        on_device = step.with_host_shards() if is_offloaded else step
        peaks = {}
        for phase in PHASES:
            moment = on_device.peak(phase)
            by_kind = {kind: size for kind, size in moment.by_kind.items() if size}
            peaks[phase] = Peak(moment.num_bytes, step.where(moment.time), by_kind)

        def most(kind: str) -> int:
            return max(moment.by_kind[kind] for moment in step.timeline)

        return StrategyEstimate(
            strategy,
            mesh,
            is_checkpointed,
            is_offloaded,
            parameters=most(PARAMETERS),
            gradients=most(GRADIENTS),
            optimizer_state=most(STATE),
            unsharded=most(UNSHARDED),
            activations=most(ACTIVATIONS) if has_batch else None,
            peaks=peaks,
            sent=step.sent,
            flops=step.flops,
            step=on_device,
        )

    def timed(self, speed: float, bandwidths: dict[str, float]) -> "StrategyEstimate":
        """With the minimum time on a device of ``speed`` FLOP/s; bandwidths in bytes a second."""
        sending = [self.sent.get(name, 0) / bandwidth for name, bandwidth in bandwidths.items()]
        seconds = max([self.flops / speed, *sending])
        of_model = self.flops - self.step.recomputed_flops
        return replace(self, seconds=seconds, utilization=of_model / speed / seconds if seconds else None)

    def as_dict(self) -> dict[str, Any]:
        """All but the memory over time, for JSON."""
        figures = ("parameters", "gradients", "optimizer_state", "unsharded", "activations")
        return {
            "strategy": self.strategy,
            "mesh": self.mesh,
            "checkpointing": self.is_checkpointed,
            "activations_offloaded": self.offloads_activations,
            "offloaded": self.is_offloaded,
            **{name: getattr(self, name) for name in figures},
            "peak": self.peak.num_bytes,
            "peaks": {
                phase: {"bytes": peak.num_bytes, "where": peak.where, "by_kind": peak.by_kind}
                for phase, peak in self.peaks.items()
            },
            "sent": self.sent,
            **{name: getattr(self, name) for name in ("flops", "seconds", "utilization", "largest_batch")},
        }


@dataclass(frozen=True)
class Change:
    """A change that would lower the peak.

    Attributes:
        what: to do, in words.
        num_bytes: the peak after it.
        fits: whether that peak fits in the given memory.
    """

    what: str
    num_bytes: int
    fits: bool


@dataclass(frozen=True)
class Estimate:
    """Estimates of a model; ``str()`` makes a table of them.

    Attributes:
        model: its class, the number of ranks and the batch, in words.
        num_parameters: of the model.
        rows: one for each strategy, without and with activation checkpointing if there is a batch.
        memory: the given memory in bytes, or None.
        changes: if nothing fits, changes that lower the peak, the smallest peak first.
    """

    model: str
    num_parameters: int
    rows: tuple[StrategyEstimate, ...]
    memory: int | None = None
    changes: tuple[Change, ...] = ()

    def fitting(self) -> list[StrategyEstimate]:
        """The rows that fit in the given memory; all of them if none was given."""
        return [row for row in self.rows if self.memory is None or row.peak.num_bytes <= self.memory]

    def to_json(self) -> str:
        """All figures, in bytes."""
        return json.dumps(
            {
                "model": self.model,
                "num_parameters": self.num_parameters,
                "memory": self.memory,
                "rows": [row.as_dict() for row in self.rows],
                "changes": [vars(change) for change in self.changes],
            },
            indent=2,
        )

    def picture(self, path: str | PathLike[str]) -> None:
        """Draw the memory over one step, stacked by kind, for each row. The suffix of ``path`` selects the
        format.

        Raises:
            ImportError: matplotlib is not installed, or cannot be imported.
        """
        from shardwise.planning.picture import figure_of  # matplotlib is no dependency

        figure_of(self).savefig(path, dpi=110)

    def __str__(self) -> str:
        """A line for each strategy; sizes are in the unit that the first line names."""
        unit, size = unit_for(max(row.peak.num_bytes for row in self.rows))

        def shown(num_bytes: int | None) -> str:
            return "-" if num_bytes is None else f"{num_bytes / size:,.2f}"

        head = ["strategy", "checkpointing", "parameters", "gradients", "state", "unsharded", "activations"]
        head += ["forward", "backward", "optimizer", "peak in", "sent"]
        head += ["fits"] * (self.memory is not None)
        has_time = any(row.seconds is not None for row in self.rows)
        has_batch = any(row.largest_batch is not None for row in self.rows)
        head += (["step, s", "MFU"] if has_time else []) + (["largest batch"] if has_batch else [])
        cells = []
        for row in self.rows:
            held = row.parameters, row.gradients, row.optimizer_state, row.unsharded, row.activations
            sent = ", ".join(f"{name} {shown(n)}" for name, n in row.sent.items()) or "-"
            fits = [] if self.memory is None else ["yes" if row.peak.num_bytes <= self.memory else "no"]
            cells.append(
                [
                    f"{row.strategy} {'x'.join(map(str, row.mesh.values()))}",
                    "offloaded" if row.offloads_activations else "yes" if row.is_checkpointed else "no",
                    *map(shown, (*held, *(row.peaks[phase].num_bytes for phase in PHASES))),
                    row.step.highest()[1],
                    sent,
                    *fits,
                    *([f">= {row.seconds or 0:.3g}", f"<= {row.utilization or 0:.1%}"] if has_time else []),
                    *([str(row.largest_batch)] if has_batch else []),
                ]
            )
        top = f"{self.model}: {self.num_parameters:,} parameters; {unit} on each rank"
        if any(row.is_offloaded for row in self.rows):
            top += "; parameters, gradients and state are in host memory"
        return "\n".join([top, "", *ruled([head, *cells], right=range(2, 10)), *self._verdict(shown, unit)])

    def _verdict(self, shown: Any, unit: str) -> Iterator[str]:
        if self.memory is None:
            return
        yield ""
        if fitting := self.fitting():
            best = min(fitting, key=lambda row: sum(row.sent.values()))
            yield (
                f"{len(fitting)} of {len(self.rows)} fit in {in_own_unit(self.memory)}; {_name(best)} sends "
                "least of them."
            )
            return
        least = min(self.rows, key=lambda row: row.peak.num_bytes)
        yield (
            f"None fits in {in_own_unit(self.memory)}: {_name(least)} needs the least, and is "
            f"{shown(least.peak.num_bytes - self.memory)} {unit} over."
        )
        for change in self.changes:
            verdict = "fits" if change.fits else "does not fit"
            yield f"  {change.what}: {shown(change.num_bytes)} {unit}, {verdict}"


def _name(row: StrategyEstimate) -> str:
    return row.strategy + " with checkpointing" * row.is_checkpointed
