"""A step of SOAP and Shampoo on shards, each matrix stepped by its owner, against every rank stepping all.

Claim: at most 0.65 of the time on 2 processes and 0.40 on 4; at most 0.6 and 0.35 of the state on each rank.
Floor: 0.5 and 0.25, where each rank computes its part of the work and communication costs nothing. Refuted by
a ratio above the claim by more than the noise (`--noise`: a second replicated one). Exits with 1 where
parameters differ at the end. How it is measured, and what it cannot show: README.md.

`replicated` is what one does without owners; `ours` is `WholeParameters`. Both step the same class. `flat
AdamW`, beside Adafactor, is what a step of AdamW takes in a `FlatOptimizer`, where nothing travels: said, not
claimed.

    python bench/whole_parameters.py --processes 2 --optimizers soap
    python bench/whole_parameters.py --processes 4 --layers 4 --optimizers soap
    python bench/whole_parameters.py --processes 4 --width 256 --optimizers shampoo
    python bench/whole_parameters.py --processes 2 --optimizers adafactor --steps 10
"""

import argparse
import importlib.util
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy
import torch
import torch.distributed as dist
from common import OURS, Sample, Spread, alternate, gpt_parser, launch, print_table, time_step_ms, write_json
from gpt import Block
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from shardwise import fully_shard
from shardwise.optim import FlatOptimizer, WholeParameters

REPLICATED, REPLICATED_AGAIN, FLAT = "replicated", "replicated again", "flat AdamW"
LIBRARY = "pytorch_optimizer"
TOLERANCE = 1e-3
"""How far parameters may be from each other at the end, as a part of the largest change."""

COLUMNS = {
    "optimizer": "optimizer",
    "variant": "variant",
    "step_ms": "step, ms",
    "step_to_replicated": "to replicated",
    "roots_ms": "with roots, ms",
    "roots_to_replicated": "to replicated",
    "state_mb": "state, MB",
    "state_to_replicated": "to replicated",
}

Recipe = tuple[type[torch.optim.Optimizer], dict[str, Any]]
"""A class and its options."""


class Shampoo(torch.optim.Optimizer):
    """Preconditions each dim of a gradient by a root of the sum of its outer products.

    Gupta, Koren and Singer, "Shampoo: Preconditioned Stochastic Tensor Optimization", 2018, algorithm 2, with
    roots that are computed every ``period`` steps.
    """

    def __init__(self, params: Any, lr: float = 1e-3, eps: float = 1e-6, period: int = 1) -> None:
        super().__init__(params, {"lr": lr, "eps": eps, "period": period})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Perform a single optimization step."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.add_(self._direction(param, group), alpha=-group["lr"])
        return loss

    def _direction(self, param: Tensor, group: Mapping[str, Any]) -> Tensor:
        state, direction = self.state[param], param.grad
        state["step"] = state.get("step", 0) + 1
        for dim, size in enumerate(param.shape):
            outer, root = f"outer_{dim}", f"root_{dim}"
            if outer not in state:
                state[root] = torch.eye(size, dtype=param.dtype, device=param.device)
                state[outer] = state[root] * group["eps"]
            rows = param.grad.movedim(dim, 0).reshape(size, -1)
            state[outer].addmm_(rows, rows.T)
            if state["step"] % group["period"] == 0:
                values, vectors = torch.linalg.eigh(state[outer])
                powers = values.clamp(min=group["eps"]).pow(-0.5 / param.dim())
                state[root] = vectors * powers @ vectors.T
            direction = torch.tensordot(state[root], direction, ([1], [dim])).movedim(0, dim)
        return direction


def parse() -> argparse.Namespace:
    parser = gpt_parser(__doc__, steps=3)
    parser.add_argument(
        "--optimizers",
        nargs="+",
        choices=["soap", "shampoo", "reference", "adafactor"],
        default=["soap", "shampoo", "adafactor"],
    )
    parser.add_argument("--noise", action="store_true", help="a second replicated one")
    return parser.parse_args()


def recipes(options: argparse.Namespace) -> dict[str, Recipe]:
    """What to step, by its name in the table; roots are computed anew in the last of all rounds."""
    last = options.steps + 1  # counted from 0
    reference: Recipe = Shampoo, {"period": last + 1}
    found: dict[str, Recipe] = {
        "reference": reference,
        "shampoo": reference,
        "adafactor": (torch.optim.Adafactor, {}),
    }
    if importlib.util.find_spec(LIBRARY):
        import pytorch_optimizer as library

        found["shampoo"] = library.Shampoo, {"preconditioning_compute_steps": last + 1}
        found["soap"] = library.SOAP, {"precondition_frequency": last}
    return {
        f"{kind.__name__}{' (here)' if kind is Shampoo else ''}": (kind, made)
        for kind, made in (found[name] for name in options.optimizers if name in found)
    }


# --- the matrices ---------------------------------------------------------------------------------


def sharded_matrices(options: argparse.Namespace, mesh: DeviceMesh) -> list[nn.Parameter]:
    """The matrices of a GPT's blocks, the same in each call."""
    torch.manual_seed(0)
    blocks = [Block(options.width, options.heads) for _ in range(options.layers)]
    for block in blocks:
        fully_shard(block, mesh=mesh)
    return [param for block in blocks for param in block.parameters() if param.dim() == 2]


def set_gradients(params: Sequence[nn.Parameter], round_index: int) -> None:
    generator = torch.Generator().manual_seed(round_index)
    for param in params:
        rows = own_rows(torch.randn(param.shape, generator=generator), param).clone()
        param.grad = DTensor.from_local(
            rows,
            param.device_mesh,
            param.placements,
            run_check=False,
            shape=param.shape,
            stride=param.stride(),
        )


def own_rows(full: Tensor, param: nn.Parameter) -> Tensor:
    """What this rank has of a parameter that is sharded by rows."""
    chunk = -(-len(full) // param.device_mesh.size())
    return full[chunk * dist.get_rank() :][:chunk]


# --- variants -------------------------------------------------------------------------------------


class Replicated:
    """Steps all parameters on every rank."""

    def __init__(self, kind: Any, params: Sequence[nn.Parameter], options: Mapping[str, Any]) -> None:
        self.params = params
        self.wholes = [nn.Parameter(param.full_tensor().detach().clone()) for param in params]
        self.optimizer = kind(self.wholes, **options)

    @torch.no_grad()
    def step(self) -> None:
        for whole, param in zip(self.wholes, self.params, strict=True):
            whole.grad = param.grad.full_tensor()
        self.optimizer.step()
        for whole, param in zip(self.wholes, self.params, strict=True):
            param.to_local().copy_(own_rows(whole, param))
            whole.grad = None

    @property
    def state(self) -> Any:
        return self.optimizer.state


def whole_parameters(kind: Any, params: Sequence[nn.Parameter], options: Mapping[str, Any]) -> Any:
    return WholeParameters(kind, params, **options)


def flat_adamw(kind: Any, params: Sequence[nn.Parameter], options: Mapping[str, Any]) -> Any:
    return FlatOptimizer(torch.optim.AdamW(params))


def makers(kind: type[torch.optim.Optimizer], *, noise: bool) -> dict[str, Callable[..., Any]]:
    made: dict[str, Callable[..., Any]] = {REPLICATED: Replicated, OURS: whole_parameters}
    if kind is torch.optim.Adafactor:
        made[FLAT] = flat_adamw
    return made | ({REPLICATED_AGAIN: Replicated} if noise else {})


def timed(optimizer: Any, params: Sequence[nn.Parameter]) -> Callable[[int], Sample]:
    """A step of an optimizer, with gradients that were there before."""

    def step(round_index: int) -> Sample:
        set_gradients(params, round_index)
        return {"step_ms": time_step_ms(optimizer)}

    return step


# --- what is measured -----------------------------------------------------------------------------


def tensors_in(values: Any) -> Iterator[Tensor]:
    """The tensors of a state, on this rank."""
    if isinstance(values, Tensor):
        yield values.to_local() if isinstance(values, DTensor) else values
    elif isinstance(values, (Mapping, list, tuple)):
        for value in values.values() if isinstance(values, Mapping) else values:
            yield from tensors_in(value)


def most_state(state: Any) -> float:
    """Megabytes of it, on the rank that has most."""
    own = sum(tensor.numel() * tensor.element_size() for tensor in tensors_in(state))
    most = torch.tensor(float(own))
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return float(most.item()) / 1e6


def refuse_differences(
    name: str, before: Iterable[Tensor], one: Iterable[Tensor], other: Iterable[Tensor]
) -> None:
    """Exit with 1 where parameters differ at the end."""
    apart = change = 0.0
    for old, a, b in zip(before, one, other, strict=True):
        apart = max(apart, float((a - b).abs().max()))
        change = max(change, float((a - old).abs().max()))
    if not change > 0 or not apart <= TOLERANCE * change:
        raise SystemExit(
            f"{name}: parameters have changed by {change:.2g} at most, and differ by {apart:.2g}: the times "
            "compare nothing."
        )


def fulls(params: Iterable[Any]) -> list[Tensor]:
    return [param.full_tensor().detach().clone() for param in params]


def measure(name: str, recipe: Recipe, options: argparse.Namespace, mesh: DeviceMesh) -> list[dict[str, Any]]:
    kind, settings = recipe
    params, optimizers = {}, {}
    for variant, make in makers(kind, noise=options.noise).items():
        params[variant] = sharded_matrices(options, mesh)
        optimizers[variant] = make(kind, params[variant], settings)
    before = fulls(params[OURS])
    steps = {variant: timed(optimizer, params[variant]) for variant, optimizer in optimizers.items()}
    rounds = options.steps + 2
    times = {v: each["step_ms"] for v, each in alternate(steps, warmup=0, steps=rounds).items()}
    states = {variant: most_state(optimizer.state) for variant, optimizer in optimizers.items()}
    refuse_differences(name, before, fulls(params[REPLICATED]), fulls(params[OURS]))
    has_roots = kind is not torch.optim.Adafactor
    return [_row(name, variant, times, states, has_roots) for variant in steps]


def _row(
    name: str, variant: str, times: Mapping[str, numpy.ndarray], states: Mapping[str, float], has_roots: bool
) -> dict[str, Any]:
    usual = slice(1, -1) if has_roots else slice(1, None)
    own, base = times[variant], times[REPLICATED]
    row: dict[str, Any] = {
        "optimizer": name,
        "variant": variant,
        "step_ms": asdict(Spread.of(own[usual])),
        "step_to_replicated": asdict(Spread.of(own[usual] / base[usual])),
    }
    if has_roots:
        row |= {"roots_ms": round(own[-1], 1), "roots_to_replicated": round(own[-1] / base[-1], 4)}
    return row | {
        "state_mb": round(states[variant], 2),
        "state_to_replicated": round(states[variant] / states[REPLICATED], 4),
    }


def work(options: argparse.Namespace) -> list[dict[str, Any]]:
    mesh = init_device_mesh("cpu", (options.processes,))
    return [row for name, recipe in recipes(options).items() for row in measure(name, recipe, options, mesh)]


def main() -> None:
    options = parse()
    if "soap" in options.optimizers and not importlib.util.find_spec(LIBRARY):
        print(f"SOAP is left out: it is that of {LIBRARY}, which is not installed.")
    rows = launch(work, options)[0]
    print_table(rows, COLUMNS)
    write_json(options.json, "whole_parameters", vars(options), rows)


if __name__ == "__main__":
    main()
