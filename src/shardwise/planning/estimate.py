"""``estimate``: what a model would hold on each rank and send, before anything is trained."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from shardwise.arguments import check_flags
from shardwise.dry_run.arguments import (
    bandwidths_of,
    batch_size_of,
    check_model,
    memory_in_bytes,
    resized,
    sample_of,
    shapes_of,
    speed_of,
    training_of,
)
from shardwise.dry_run.memory_log import GRADIENTS, PARAMETERS, STATE
from shardwise.dry_run.step import Training, dry_run
from shardwise.planning.report import Change, Estimate, StrategyEstimate
from shardwise.policies import CPUOffloadPolicyLike, MixedPrecisionPolicyLike, OffloadPolicy
from shardwise.setup.validation import check_offload, check_precision
from shardwise.strategies.block_options import (
    ActivationCheckpointing,
    check_offloading,
    compile_options,
    modules_to_checkpoint,
)
from shardwise.strategies.meshes import STRATEGIES, Strategy, no_strategy
from shardwise.strategies.overrides import offload_named, precision_named
from shardwise.strategies.shard_model import shard_copies
from shardwise.strategies.wrap_policies import Wrap, as_policy, chosen


def estimate(
    model: nn.Module,
    *,
    world: int | tuple[int, int] | str,
    strategy: Strategy | Sequence[Strategy] | None = None,
    batch: Any = None,
    loss: Callable[[Any], Tensor] | None = None,
    activation_checkpointing: ActivationCheckpointing | None = None,
    activation_offloading: bool = False,
    compile: bool | Mapping[str, Any] = False,
    mp_policy: MixedPrecisionPolicyLike | str | None = None,
    offload_policy: OffloadPolicy | CPUOffloadPolicyLike | str | None = None,
    optimizer: Any = "adamw",
    wrap: Wrap | None = None,
    memory: int | str | None = None,
    bandwidth: int | str | Mapping[str, int | str] | None = None,
    flops: float | str | None = None,
    largest_batch: bool = False,
    device: Literal["cuda", "cpu"] = "cuda",
    progress: Callable[[int, int, str], Any] | None = None,
) -> Estimate:
    """What training ``model`` would take on a rank and send in a step, under each strategy.

    Needs no GPU, no process group and no weights. It shards a copy of the model on the meta device as
    :func:`shard_model` does, and runs steps of it on fake tensors, with the hooks, the prefetch and the
    buffers of training. It reports the last step. ``model``, the process groups and the environment stay as
    they are. For any size, it needs a few MB of memory, and a little longer than three steps need to launch.

    The figures count the bytes requested from torch's allocators. They do not include memory inside of single
    operations, what an allocator keeps beyond that (it rounds blocks up, and memory may be fragmented), the
    CUDA context, the workspaces of cuBLAS (68 MB on an H200) and the buffers of the back end (0.4 GB for a
    communicator of NCCL there). Leave a tenth of the memory for these.

    Args:
        model: not sharded; on the meta device, or anywhere: only shapes and dtypes are read.
        world: the number of ranks, or the number of hosts and of ranks on each, ``(8, 8)`` or ``"8x8"``,
            which the hybrid strategies and ``zero3_hpz`` need.
        strategy: one strategy, or several. None: all that are possible for ``world``.
        batch: the arguments of forward on a rank: a tensor, a tuple of arguments or a dict of them by name,
            of which only shapes and dtypes are read; or shapes as text, separated by commas: ``"8x4096"``
            (int64), ``"8x4096:bf16"``. None: activations are left out, and groups are taken to
            run in the order in which they are registered.
        loss: a function that makes a scalar of the output of forward. None: the output's ``loss``, or a sum.
        activation_checkpointing: as in :func:`shard_model`; False: as the model is; None: both False and, if
            there is a batch, True.
        activation_offloading: as in :func:`shard_model`, for the rows with activation checkpointing.
        compile: as in :func:`shard_model`. Nothing is compiled: the figures are those of the model as it is.
            With Inductor, peaks of a step of a GPT on the host were 0.88 to 1.00 of that; other back ends may
            need more.
        mp_policy: as in :func:`fully_shard`; or ``"bf16"`` or ``"fp16"``, which compute in that and reduce in
            float32.
        offload_policy: as in :func:`fully_shard`; or ``"cpu"``, for :class:`CPUOffloadPolicy`. Peaks are then
            those of the device, without shards, gradients and optimizer state.
        optimizer: ``adamw``, ``adam``, ``sgd``, ``sgd-momentum``, ``adagrad``, ``rmsprop``, ``adafactor``,
            ``muon`` (matrices; AdamW for the rest), or a function of a list of parameters that returns one.
            It gets this rank's shards as plain tensors.
        wrap: which modules become groups; see :func:`shard_model`.
        memory: what a rank has, in bytes, as ``"80GB"`` or as ``"h100"``. The estimate then shows what fits
            and, if nothing does, what you could change.
        bandwidth: what a rank can send in a second, in bytes or as ``"50GB/s"``; or by mesh dimension,
            ``{"shard": "400GB/s", "replicate": "50GB/s"}``; for ``zero3_hpz``, ``shard`` is within hosts, and
            ``replicate`` among all ranks. The estimate then shows a lower bound of the time of a step, and an
            upper bound of the share of the device's speed that it can use (MFU). None: by ``flops`` alone, if
            that is given.
        flops: the speed of a device in FLOP/s, or its name; default: of the device named in ``memory``.
        largest_batch: also look for the largest batch that fits in ``memory``, all of it: name less than the
            device has. Runs some more steps.
        device: ``"cuda"``, or ``"cpu"`` for training on the host with gloo, whose reductions receive into
            buffers of their own.
        progress: called before each dry run, and at the end, with the number of finished runs, the number of
            all runs, and the name of the next. If nothing fits, more runs are added.

    Returns:
        The figures in bytes. ``print`` it, or use its ``to_json()`` and ``picture(path)``.

    Raises:
        ValueError: an unknown strategy, optimizer or name of a policy, a world or memory that is no size, a
            batch that the model does not accept, an offload policy for training on the host, or a bandwidth
            without a speed.
        TypeError: an argument is of the wrong kind, or the model cannot be copied.
        NotImplementedError: a parameter is a DTensor or of another class than plain tensors.

    Example::

        with torch.device("meta"):
            model = GPT()
        print(shardwise.estimate(model, world="8x8", batch="8x4096", mp_policy="bf16", memory="80GB"))
    """
    check_model("estimate", model)
    if device not in ("cuda", "cpu"):
        raise ValueError(f"estimate: device is {device!r}; pass 'cuda' or 'cpu'.")
    check_flags("estimate", activation_offloading=activation_offloading, largest_batch=largest_batch)
    is_checkpointed = activation_checkpointing not in (None, False)
    if is_checkpointed and batch is None:
        raise ValueError(
            "estimate: activation_checkpointing needs a batch: without one no activations are counted."
        )
    if activation_offloading and (activation_checkpointing is False or batch is None or device == "cpu"):
        raise ValueError(
            "estimate: activation_offloading needs activation checkpointing, whose inputs it moves to host "
            'memory, a batch, and device="cuda".'
        )
    compiling = compile_options("estimate", compile)
    check_offloading("estimate", activation_offloading, True, compiling)
    blocks = chosen(as_policy(wrap), model, frozenset())
    is_meant = activation_offloading or bool(blocks and batch is not None)
    wanted = activation_checkpointing if is_checkpointed else is_meant
    checkpointed = modules_to_checkpoint("estimate", wanted, model, blocks)
    is_offloaded = check_offload(offload_named("estimate", offload_policy))
    if is_offloaded and device == "cpu":
        raise ValueError(
            'estimate: offload_policy keeps shards on the host of a device, and with device="cpu" all of the '
            "training is there. Leave one of them out."
        )
    precision = precision_named("estimate", mp_policy)
    check_precision(precision)
    sizes, limit = _world_sizes(world), None if memory is None else memory_in_bytes("estimate", memory)
    strategies = _strategies_for(strategy, sizes)
    speed = speed_of("estimate", flops, memory)
    is_timed = bandwidth is not None or flops is not None
    if is_timed and (speed is None or batch is None):
        raise ValueError(
            "estimate: bandwidth needs the speed of the device and a batch, and flops needs a batch. Pass "
            "batch, and flops, such as 989e12 or 'h100', or name the device in memory."
        )
    bandwidths: dict[str, dict[str, float]] = {
        name: {} if bandwidth is None else bandwidths_of("estimate", bandwidth, STRATEGIES[name].roles)
        for name in strategies
    }
    sample = sample_of("estimate: batch", batch)
    if largest_batch and (limit is None or batch is None or not batch_size_of(sample)):
        raise ValueError("estimate: largest_batch needs memory, which the batch is to fit in, and a batch.")

    def train(sample: Any) -> Training:
        return training_of("estimate", model, "batch", sample, loss, optimizer, on_host=device == "cpu")

    runs = _Runs(
        train,
        train(sample),
        blocks,
        checkpointed,
        activation_offloading,
        precision,
        is_offloaded,
        progress or (lambda done, total, name: None),
    )
    choices = [is_checkpointed]
    if activation_checkpointing is None and checkpointed:
        choices = [False, True]
    runs.total = len(strategies) * len(choices)
    rows = tuple(runs.run(name, sizes, choice) for name in strategies for choice in choices)
    if is_timed and speed is not None:
        rows = tuple(row.timed(speed, bandwidths[row.strategy]) for row in rows)
    if largest_batch and limit is not None:
        rows = tuple(
            replace(row, largest_batch=_largest_batch(runs, row, sizes, limit, sample)) for row in rows
        )
    numel = sum(param.numel() for param in model.parameters())
    ranks = f"{'x'.join(map(str, sizes))} rank{'s' * (sizes != (1,))}"
    told = "no batch" if batch is None else f"batch {batch if isinstance(batch, str) else shapes_of(batch)}"
    if compiling is not None:
        told += ", counted without compile"
    found = Estimate(f"{type(model).__name__}, {ranks}, {told}", numel, rows, limit)
    if limit is not None and not found.fitting():
        found = replace(found, changes=tuple(_changes(runs, found, sizes, limit)))
    runs.tell(runs.done, runs.done, "")
    return found


# --- the world and its strategies -----------------------------------------------------------------


def _world_sizes(world: int | tuple[int, int] | str) -> tuple[int, ...]:
    """A number of ranks, or hosts and ranks on each: 64, (8, 8) or "8x8"."""
    sizes: Any = world
    if isinstance(world, str):
        parts = world.lower().split("x")
        sizes = tuple(int(part) if part.strip().isdecimal() else 0 for part in parts)
    elif isinstance(world, int) and not isinstance(world, bool):
        sizes = (world,)
    is_well = isinstance(sizes, tuple) and len(sizes) in (1, 2)
    if not is_well or any(type(size) is not int or size < 1 for size in sizes):
        raise ValueError(
            f"estimate: world is {world!r}; pass a number of ranks, 64, or hosts and ranks on each, (8, 8) "
            'or "8x8", all above 0.'
        )
    return sizes


def _strategies_for(strategy: Any, sizes: tuple[int, ...]) -> list[str]:
    """The strategies to estimate: the one that is named, or all that the world has a mesh for."""
    if strategy is None:
        return [name for name, each in STRATEGIES.items() if len(each.roles) == 1 or len(sizes) == 2]
    names = [strategy] if isinstance(strategy, str) else list(strategy)
    if not names:
        raise ValueError("estimate: strategy is empty; name some, or pass None for all.")
    for name in names:
        if name not in STRATEGIES:
            raise ValueError(f"estimate: {no_strategy(str(name), STRATEGIES)} None stands for all.")
        if len(STRATEGIES[name].roles) > len(sizes):
            raise ValueError(
                f"estimate: strategy '{name}' treats the ranks of a host as a unit, but world={sizes[0]} "
                "does not give the number of hosts. Pass both, world=(hosts, ranks_per_host), such as "
                f"({max(1, sizes[0] // 8)}, {min(8, sizes[0])})."
            )
    return names


# --- dry runs -------------------------------------------------------------------------------------


@dataclass
class _Runs:
    """Dry runs of a model, of which ``done`` are over.

    ``checkpointed``: where some of them checkpoint; ``offloads``: whether those keep the inputs on the host.
    """

    train: Callable[[Any], Training]
    training: Training
    blocks: list[nn.Module]
    checkpointed: list[nn.Module]
    offloads: bool
    mp_policy: Any
    is_offloaded: bool
    tell: Callable[[int, int, str], Any]
    total: int = 0
    done: int = 0

    def run(
        self,
        strategy: str,
        sizes: tuple[int, ...],
        is_checkpointed: bool,
        mp_policy: Any = None,
        sample: Any = None,
        offloads: bool = False,
    ) -> StrategyEstimate:
        """The figures of one strategy, perhaps with another ``mp_policy``, ``sample`` as its batch, or with
        inputs on the host."""
        name = strategy + " with checkpointing" * is_checkpointed
        offloads = is_checkpointed and (offloads or self.offloads)
        self.tell(self.done, max(self.total, self.done + 1), name)
        again, options = (
            self.checkpointed if is_checkpointed else [],
            {"mp_policy": mp_policy or self.mp_policy},
        )
        training = self.training if sample is None else self.train(sample)
        shard = shard_copies(training.model, self.blocks, again, offloads, options)
        roles = STRATEGIES[strategy].roles
        shape = dict(zip(roles, sizes if len(roles) == 2 else [torch.Size(sizes).numel()], strict=True))
        step = dry_run(training, shape, lambda copy, mesh: shard(copy, mesh, strategy, {}))
        self.done += 1
        has_batch = training.call is not None
        row = StrategyEstimate.of(strategy, shape, is_checkpointed, self.is_offloaded, has_batch, step)
        return replace(row, offloads_activations=offloads)


def _largest_batch(
    runs: _Runs, row: StrategyEstimate, sizes: tuple[int, ...], limit: int, sample: Any
) -> int:
    """The largest batch with which ``row`` fits; 0: none does."""
    size = batch_size_of(sample)
    peaks = {size: row.peak.num_bytes}
    while True:
        fitting = sorted(size for size, peak in peaks.items() if peak <= limit)
        others = sorted(size for size, peak in peaks.items() if peak > limit)
        least, most = max(fitting, default=0), min(others, default=_LARGEST_BATCH)
        if most - least <= 1:
            return least
        size = min(max(_next_size(peaks, limit, fitting, others), least + 1), most - 1)
        run = runs.run(row.strategy, sizes, row.is_checkpointed, sample=resized(sample, size))
        peaks[size] = run.peak.num_bytes


def _next_size(peaks: Mapping[int, int], limit: int, fitting: Sequence[int], others: Sequence[int]) -> int:
    """Where a line through two of the known ``peaks`` meets ``limit``.

    Peaks grow with the batch along a few lines, the later ones steeper. So by turns, the line is the one
    through the last size that fits and the first that does not, or through the first two that do not.
    """
    ends = others[:2] if len(peaks) % 2 or not fitting else [fitting[-1], *others[:1]]
    if not others:
        ends = fitting[-2:]
    if len(ends) == 2 and peaks[ends[0]] < peaks[ends[1]]:
        rise = (peaks[ends[1]] - peaks[ends[0]]) / (ends[1] - ends[0])
        met = int(ends[0] + (limit - peaks[ends[0]]) / rise)
        return met if others else min(met, 16 * fitting[-1])
    return ((fitting[-1] if fitting else 0) + others[0]) // 2 if others else 2 * fitting[-1]


_LARGEST_BATCH = 1 << 24


# --- what would have to change --------------------------------------------------------------------


def _changes(runs: _Runs, found: Estimate, sizes: tuple[int, ...], limit: int) -> list[Change]:
    """What would lower the peak of the row that takes least, from the smallest peak on.

    Each is run, except offloading: its step is that of the row, without what would be in host memory.
    """
    least = min(found.rows, key=lambda row: row.peak.num_bytes)
    name, is_checkpointed = least.strategy, least.is_checkpointed
    tried = {row.strategy for row in found.rows}
    peaks = {
        f"strategy {other}": runs.run(other, sizes, is_checkpointed).peak.num_bytes
        for other in _strategies_for(None, sizes)
        if other not in tried
    }
    if runs.checkpointed and not any(row.is_checkpointed for row in found.rows):
        peaks["activation checkpointing"] = runs.run(name, sizes, True).peak.num_bytes
    if runs.checkpointed and not (runs.offloads or runs.training.on_host):
        what = "activation checkpointing, with activations in host memory"
        peaks[what] = runs.run(name, sizes, True, offloads=True).peak.num_bytes
    if runs.mp_policy is None and any(p.dtype is torch.float32 for p in runs.training.model.parameters()):
        in_bf16 = runs.run(name, sizes, is_checkpointed, precision_named("estimate", "bf16"))
        peaks["computing in bf16"] = in_bf16.peak.num_bytes
    if not (runs.is_offloaded or runs.training.on_host):
        highest, _ = least.step.with_host_shards().highest()
        peaks["shards, gradients and optimizer in host memory"] = highest.num_bytes
    more = _more_ranks(least, sizes, limit)
    if more is not None:
        peaks[f"{torch.Size(more).numel()} ranks"] = runs.run(name, more, is_checkpointed).peak.num_bytes
    changes = [Change(what, peak, peak <= limit) for what, peak in peaks.items()]
    return sorted((c for c in changes if c.num_bytes < least.peak.num_bytes), key=lambda c: c.num_bytes)


def _more_ranks(row: StrategyEstimate, sizes: tuple[int, ...], limit: int) -> tuple[int, ...] | None:
    """Doubled often enough that the sharded part of the peak fits beside the rest; None if it never does."""
    if "shard" not in row.mesh:
        return None
    sharded = sum(row.peak.by_kind.get(kind, 0) for kind in (PARAMETERS, GRADIENTS, STATE))
    rest = row.peak.num_bytes - sharded
    if rest >= limit:
        return None
    factor = 2
    while rest + sharded / factor > limit and factor < 1 << 16:
        factor *= 2
    if STRATEGIES[row.strategy].shards_over_both:
        return (sizes[0] * factor, *sizes[1:])
    # Hybrid strategies shard over the ranks of a host alone.
    return (*sizes[:-1], sizes[-1] * factor)
