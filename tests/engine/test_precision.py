"""Mixed precision: what is computed, sent, added up and kept in which dtype.

The reference re-implements the casts in plain PyTorch (`simulated`): every rank's part of the batch
runs through low-precision copies of the weights, gradients are added over microbatches and ranks in
the dtypes that the policy names, and end in the dtype of the parameter. Tolerances are roundings of
the coarsest dtype on the way, relative to the largest number of a tensor: kernels may add up in
another order, and a sum over ranks may be rounded once or once per addend. Where one rounding decides
(256 + 1 in bfloat16), numbers are chosen so that everything else is exact, and equality is asked for.
"""

from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from comparing import assert_equal
from expecttest import assert_expected_inline
from lending import lent_buffers
from meshed import gradients_of, parameters_of, part, refusal, tensors_of, whole
from models import (
    built,
    even_tower,
    language_model,
    next_token_loss,
    random_batch,
    shard_tower,
    token_batch,
    uneven_batch,
    uneven_tower,
)
from on_ranks import on_ranks
from reference import full
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.func import functional_call
from torch.utils._pytree import tree_map

from shardwise import MixedPrecisionPolicy, fully_shard
from shardwise.layout.precision import precision_of

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
SPLIT = {"param_dtype": BF16, "reduce_dtype": F32}  # the usual policy
HALF = {"param_dtype": F16, "reduce_dtype": F32}
KEEPS_LOW = {"keep_low_precision_grads": True}

Policy = dict[str, Any]


def alternately(names: tuple[str, ...], cases: dict[str, tuple[Any, ...]]) -> pytest.MarkDecorator:
    """Cases by name, on one rank and on two in turn."""
    rows = [(1 + index % 2, *case) for index, case in enumerate(cases.values())]
    return pytest.mark.parametrize(("world", *names), rows, ids=cases, indirect=["world"])


def cast(tree: Any, dtype: torch.dtype | None) -> Any:
    """Floating tensors of nested containers in `dtype`; everything else as it is."""

    def one(value: Any) -> Any:
        is_floating = isinstance(value, Tensor) and value.is_floating_point()
        return value.to(dtype) if is_floating and dtype is not None else value

    return tree_map(one, tree)


# --- the reference --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Program:
    """A short training run. Callables are module-level functions: programs travel by pickle."""

    build: Callable[[], nn.Module]
    batch: Callable[[int, int], Tensor]
    loss: Callable[[nn.Module, Tensor], Tensor]
    dtype: torch.dtype = F32  # of the parameters
    microbatches: int = 1
    steps: int = 2

    def model(self) -> nn.Module:
        torch.manual_seed(1234)
        return self.build().to(self.dtype)

    def part(self, index: int, rank: int, world: int) -> Tensor:
        return cast(part(self.batch(index, 12), rank, world), F32)


def float_loss(model: nn.Module, inputs: Tensor) -> Tensor:
    return (model(inputs).float() - inputs.float().sum(dim=-1, keepdim=True)).pow(2).mean()


def text_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    return next_token_loss(lambda t: model(t).float(), tokens)  # type: ignore[arg-type]


TOWER = Program(even_tower, random_batch, float_loss)
UNEVEN = Program(uneven_tower, uneven_batch, float_loss)
TEXT = Program(language_model, token_batch, text_loss)
MICROBATCHES = Program(even_tower, random_batch, float_loss, microbatches=3)


@dataclass
class Simulation:
    tensors: dict[str, Tensor]
    largest: dict[str, float]  # the largest number that was added up for each


def simulated(program: Program, policy: Policy, world: int) -> Simulation:
    model = program.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    params = dict(model.named_parameters())
    found = Simulation({}, {})
    reduce = policy.get("reduce_dtype") or policy.get("param_dtype")
    for module in [*model.blocks, model]:
        cast_around(module, policy if module is model else inner(policy))
    for step in range(program.steps):
        by_rank = [rank_gradients(program, model, policy, step, rank, world) for rank in range(world)]
        for name, param in params.items():
            sent = [gradients[name].to(reduce or param.dtype) for gradients in by_rank]
            mean = sum(sent[1:], sent[0]) / world
            param.grad = mean.to(param.dtype)
            what = f"step {step}: gradient of {name}"
            found.tensors[what] = mean if policy.get("keep_low_precision_grads") else param.grad.clone()
            found.largest[what] = max(each.abs().max().item() for each in sent)
        optimizer.step()
    for name, param in params.items():
        found.tensors[name] = param.detach().clone()
        found.largest[name] = max(1.0, param.abs().max().item())
    return found


def rank_gradients(
    program: Program, model: nn.Module, policy: Policy, step: int, rank: int, world: int
) -> dict[str, Tensor]:
    """What one rank has accumulated over its microbatches before anything is sent."""
    compute = policy.get("param_dtype")
    accumulate = policy.get("accumulate_dtype") or policy.get("reduce_dtype")
    sums: dict[str, Tensor] = {}
    for microbatch in range(program.microbatches):
        low = {
            name: param.detach().to(compute or param.dtype).requires_grad_()
            for name, param in model.named_parameters()
        }
        inputs = program.part(10 * step + microbatch, rank, world)
        program.loss(partial(functional_call, model, low), inputs).backward()  # type: ignore[arg-type]
        for name, leaf in low.items():
            assert leaf.grad is not None
            is_kept = program.microbatches > 1
            gradient = leaf.grad.to(accumulate or leaf.grad.dtype) if is_kept else leaf.grad
            sums[name] = sums[name] + gradient if name in sums else gradient
    return sums


def cast_around(module: nn.Module, policy: Policy) -> None:
    """Casts what goes into a module and what comes out, as a sharded module does."""
    dtype_in = policy.get("param_dtype") if policy.get("cast_forward_inputs", True) else None
    dtype_out = policy.get("output_dtype")
    module.register_forward_pre_hook(lambda module, args: cast(args, dtype_in))
    module.register_forward_hook(lambda module, args, output: cast(output, dtype_out))


def inner(policy: Policy) -> Policy:
    return {**policy, "output_dtype": None}


def sharded(model: nn.Module, policy: Policy) -> nn.Module:
    for block in model.blocks:
        fully_shard(block, mp_policy=MixedPrecisionPolicy(**inner(policy)))
    return fully_shard(model, mp_policy=MixedPrecisionPolicy(**policy))


def eps(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps


# What trains under which policy, and how many roundings of which dtype the numbers may differ by. Sums in the
# dtype of reduction are rounded once per rank; steps feed back through the weights of the next forward.
TRAINED: dict[str, tuple[Program, Policy, float]] = {
    "bf16_reduced_in_f32": (TOWER, SPLIT, 4 * eps(BF16)),
    "bf16": (TOWER, {"param_dtype": BF16}, 8 * eps(BF16)),
    "f16_reduced_in_f32": (TOWER, HALF, 4 * eps(F16)),
    "f64": (TOWER, {"param_dtype": F64}, 2 * eps(F32)),
    "f32_reduced_in_bf16": (TOWER, {"reduce_dtype": BF16}, 8 * eps(BF16)),
    "f32_reduced_in_f64": (TOWER, {"reduce_dtype": F64}, 32 * eps(F32)),
    "bf16_out_in_f32": (TOWER, {**SPLIT, "output_dtype": F32}, 4 * eps(BF16)),
    "gradients_kept_in_bf16": (TOWER, {**KEEPS_LOW, "param_dtype": BF16}, 8 * eps(BF16)),
    "uneven_shards": (UNEVEN, SPLIT, 4 * eps(BF16)),
    "tokens": (TEXT, SPLIT, 4 * eps(BF16)),
    "microbatches_in_f32": (MICROBATCHES, SPLIT, 4 * eps(BF16)),
    "microbatches_in_bf16": (MICROBATCHES, {"param_dtype": BF16}, 12 * eps(BF16)),
    "microbatches_in_f64": (MICROBATCHES, {"param_dtype": F64}, 2 * eps(F32)),
    "f32_microbatches_in_bf16": (MICROBATCHES, {"reduce_dtype": BF16}, 12 * eps(BF16)),
    "f16_microbatches_in_f64": (MICROBATCHES, {**HALF, "accumulate_dtype": F64}, 4 * eps(F16)),
    "bf16_microbatches_in_f32": (MICROBATCHES, {"param_dtype": BF16, "accumulate_dtype": F32}, 8 * eps(BF16)),
}


@alternately(("program", "policy", "roundings"), TRAINED)
@on_ranks()
def test_training_equals_a_simulation_of_the_casts(
    program: Program, policy: Policy, roundings: float
) -> None:
    """Up to `roundings`, a bound relative to the largest number that went into each tensor."""
    rank, world = dist.get_rank(), dist.get_world_size()
    model = sharded(program.model(), policy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, foreach=False)  # foreach takes one dtype
    found: dict[str, Any] = {}
    for step in range(program.steps):
        optimizer.zero_grad()
        for microbatch in range(program.microbatches):
            model.set_requires_gradient_sync(microbatch == program.microbatches - 1)
            program.loss(model, program.part(10 * step + microbatch, rank, world)).backward()
        found |= {f"step {step}: {name}": value for name, value in gradients_of(model).items()}
        optimizer.step()
    found |= parameters_of(model)
    simulation = simulated(program, policy, world)
    assert found.keys() == simulation.tensors.keys()
    for name, value in simulation.tensors.items():
        assert found[name].dtype == value.dtype, f"{name}: {found[name].dtype}, not {value.dtype}"
        atol = roundings * simulation.largest[name]
        assert_equal(found[name], value, name, atol)


# --- what modules and callers see -----------------------------------------------------------------


class Probe(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width, width))
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen = [x.dtype, self.weight.dtype]
        return x.to(self.weight.dtype) @ self.weight


# Policy, dtype of the parameter, dtype of the input; then what is seen: input and weight in forward,
# output, parameter and gradient.
DTYPES: dict[str, tuple[Policy, torch.dtype, torch.dtype, list[torch.dtype]]] = {
    "nothing": ({}, F32, F32, [F32, F32, F32, F32, F32]),
    "bf16": (SPLIT, F32, F32, [BF16, BF16, BF16, F32, F32]),
    "f16": (HALF, F32, F64, [F16, F16, F16, F32, F32]),
    "f64": ({"param_dtype": F64}, F32, F32, [F64, F64, F64, F32, F32]),
    "reduce_only": ({"reduce_dtype": BF16}, F32, F32, [F32, F32, F32, F32, F32]),
    "output": ({**SPLIT, "output_dtype": F32}, F32, F32, [BF16, BF16, F32, F32, F32]),
    "output_only": ({"output_dtype": F64}, F32, F32, [F32, F32, F64, F32, F32]),
    "no_cast": ({**SPLIT, "cast_forward_inputs": False}, F32, F32, [F32, BF16, BF16, F32, F32]),
    "no_cast_needed": ({**SPLIT, "cast_forward_inputs": False}, F32, BF16, [BF16, BF16, BF16, F32, F32]),
    "bf16_model": ({"reduce_dtype": F32}, BF16, BF16, [BF16, BF16, BF16, BF16, BF16]),
    "bf16_model_in_f32": ({"param_dtype": F32}, BF16, BF16, [F32, F32, F32, BF16, BF16]),
    "low_gradients": ({**KEEPS_LOW, "param_dtype": BF16}, F32, F32, [BF16, BF16, BF16, F32, BF16]),
    "low_gradients_reduced_in_f16": (
        {**KEEPS_LOW, "param_dtype": BF16, "reduce_dtype": F16},
        F32,
        F32,
        [BF16, BF16, BF16, F32, F16],
    ),
    "high_gradients": ({**KEEPS_LOW, **SPLIT}, BF16, F32, [BF16, BF16, BF16, BF16, F32]),
}


@alternately(("policy", "own", "inputs", "expected"), DTYPES)
@on_ranks()
def test_each_tensor_has_the_dtype_that_the_policy_names(
    policy: Policy, own: torch.dtype, inputs: torch.dtype, expected: list[torch.dtype]
) -> None:
    model = fully_shard(Probe().to(own), mp_policy=MixedPrecisionPolicy(**policy))
    x = torch.ones(2, 4, dtype=inputs, requires_grad=True)
    output = model(x)
    output.sum().backward()
    weight = model.weight
    assert isinstance(weight, DTensor)
    assert isinstance(weight.grad, DTensor)
    torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9).step()
    assert x.grad is not None
    assert x.grad.dtype == inputs
    assert torch.equal(x.grad, torch.full_like(x, 4.0))  # it came back through the cast
    assert [*model.seen, output.dtype, weight.dtype, weight.grad.dtype] == expected


Pair = namedtuple("Pair", ["first", "second"])


class Collector(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.seen = dtypes((args, kwargs))
        return {"given": (args, kwargs), "computed": self.weight * 2}


def dtypes(tree: Any) -> Any:
    return tree_map(lambda value: value.dtype if isinstance(value, Tensor) else value, tree)


def nested_inputs() -> tuple[tuple[Any, ...], dict[str, Any]]:
    x = torch.ones(4)
    args = (x, (x.double(), [x.long(), {"half": x.half(), "mask": x.bool()}]), None, 3, "text")
    return args, {
        "pair": Pair(x, x.int()),
        "number": 2.5,
        "complex": x.to(torch.complex64),
        "deep": {"x": [x]},
    }


@pytest.mark.parametrize(("casts", "dtype_out"), [(True, None), (True, F64), (False, F64)])
@on_ranks(2)
def test_floating_tensors_in_containers_are_cast_and_nothing_else(
    casts: bool, dtype_out: torch.dtype | None
) -> None:
    policy = MixedPrecisionPolicy(param_dtype=BF16, output_dtype=dtype_out, cast_forward_inputs=casts)
    model = fully_shard(Collector(), mp_policy=policy)
    args, kwargs = nested_inputs()
    output = model(*args, **kwargs)
    given = cast(nested_inputs(), BF16 if casts else None)
    assert model.seen == dtypes(given)
    assert dtypes(output) == {"given": dtypes(cast(given, dtype_out)), "computed": dtype_out or BF16}
    assert dtypes((args, kwargs)) == dtypes(nested_inputs()), "the caller's own containers were changed"


@on_ranks(2)
def test_each_block_follows_its_own_policy() -> None:
    """A router in float32 between blocks in bfloat16, as mixtures of experts have it."""
    model = nn.Sequential(Probe(), Probe(), Probe())
    low = MixedPrecisionPolicy(**SPLIT)
    for index, policy in enumerate([low, MixedPrecisionPolicy(param_dtype=F32, output_dtype=F64), low]):
        fully_shard(model[index], mp_policy=policy)
    fully_shard(model, mp_policy=MixedPrecisionPolicy(output_dtype=F32, cast_forward_inputs=False))
    output = model(torch.ones(2, 4) / 64)
    output.sum().backward()
    seen = [*(each.seen for each in model), output.dtype]
    tensors = tensors_of(model)
    assert seen == [[BF16, BF16], [F32, F32], [BF16, BF16], F32]
    assert all(each.dtype == F32 for each in tensors.values())
    # All values are powers of two, so the gradients are exact.
    assert all(torch.equal(tensors[f"gradient of {i}.weight"], torch.full((4, 4), 0.5)) for i in range(3))


@on_ranks(2)
def test_evaluating_in_low_precision_leaves_weights_and_states_in_float32() -> None:
    plain = TOWER.model().state_dict()
    model = sharded(TOWER.model(), SPLIT)
    before = {name: full(value) for name, value in model.state_dict().items()}
    with torch.inference_mode():  # before anything else has made buffers and their views
        inferred = model(torch.ones(2, 8))
    model.eval()
    with torch.no_grad():
        output = model(torch.ones(2, 8))
    after = {name: full(value) for name, value in model.state_dict().items()}
    optimizer = torch.optim.AdamW(model.parameters())
    float_loss(model, torch.ones(2, 8)).backward()
    optimizer.step()
    states = {v.dtype for state in optimizer.state.values() for v in state.values() if v.ndim}
    assert (output.dtype, inferred.dtype, states) == (BF16, BF16, {F32})
    for name, value in plain.items():
        assert torch.equal(before[name], value), name
        assert torch.equal(after[name], value), name


# --- where sums are rounded -----------------------------------------------------------------------


class Gain(nn.Module):
    """Its gradient is what it is multiplied with: exact in bfloat16 where that is a small integer."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(6))
        self.late = nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor, uses_late: bool = False) -> Tensor:
        x = x * self.gain
        return x * self.late if uses_late else x


LOW = {"param_dtype": BF16, "reduce_dtype": BF16}
IN_F32 = {**LOW, "accumulate_dtype": F32}

# Policy, microbatches, whether each is synchronised, their sum. In bfloat16 256 + 1 is 256, and 258 is the
# next number.
SUMS: dict[str, tuple[Policy, list[float], bool, float]] = {
    "reduced_in_f32": (SPLIT, [256.0, 1.0], False, 257.0),
    "compute_dtype_is_the_default": ({"param_dtype": BF16}, [256.0, 1.0, 1.0], False, 256.0),
    "f32_gradients_added_up_in_bf16": ({"reduce_dtype": BF16}, [256.0, 1.0, 1.0], False, 256.0),
    "added_up_in_f32": (IN_F32, [256.0, 1.0, 1.0], False, 258.0),
    "added_up_in_f32_reduced_in_f32": ({**SPLIT, "accumulate_dtype": F32}, [256.0, 1.0], False, 257.0),
    "added_up_in_bf16": ({**SPLIT, "accumulate_dtype": BF16}, [256.0, 1.0, 1.0], False, 256.0),
    "synchronised_each_time": (LOW, [256.0, 1.0], True, 257.0),  # the shard's gradient is float32
    "synchronised_and_kept_low": ({**LOW, **KEEPS_LOW}, [256.0, 1.0, 1.0], True, 256.0),
}


@alternately(("policy", "microbatches", "syncs", "expected"), SUMS)
@on_ranks()
def test_microbatches_add_up_in_the_dtype_asked_for(
    policy: Policy, microbatches: list[float], syncs: bool, expected: float
) -> None:
    model = fully_shard(Gain(), mp_policy=MixedPrecisionPolicy(**policy))
    for index, number in enumerate(microbatches):
        model.set_requires_gradient_sync(syncs or index == len(microbatches) - 1)
        model(torch.full((6,), number)).sum().backward()
    assert model.late.grad is None
    assert model.gain.grad.dtype == (BF16 if policy.get("keep_low_precision_grads") else F32)
    assert torch.equal(whole(model.gain.grad).float(), torch.full((6,), expected))


@pytest.mark.parametrize(
    ("policy", "by_rank", "mean"),
    [
        (SPLIT, [256.0, 1.0], 128.5),  # which bfloat16 does not have
        ({"reduce_dtype": BF16}, [257.0, 257.0], 256.0),  # 257 cannot be sent
    ],
    ids=str,
)
@on_ranks(2)
def test_gradients_are_sent_and_added_up_in_the_dtype_of_reduction(
    policy: Policy, by_rank: list[float], mean: float
) -> None:
    model = fully_shard(Gain(), mp_policy=MixedPrecisionPolicy(**policy))
    model(torch.full((6,), by_rank[dist.get_rank()])).sum().backward()
    assert torch.equal(whole(model.gain.grad), torch.full((6,), mean))


@pytest.mark.parametrize(
    ("world", "policy", "uses", "late"),
    [
        (2, IN_F32, [True, False], 2.0),
        (2, {"param_dtype": F64}, [False, False, True], 4.0),
        (1, SPLIT, [False, True], 3.0),
    ],
    indirect=["world"],
)
@on_ranks()
def test_a_parameter_first_used_in_the_last_microbatch_is_reduced_with_the_others(
    policy: Policy, uses: list[bool], late: float
) -> None:
    """Its gradient has the dtype of computation, that of the others the one they add up in."""
    total = sum(2.0 + i for i in range(len(uses)))
    model = fully_shard(Gain(), mp_policy=MixedPrecisionPolicy(**policy))
    for index, uses_late in enumerate(uses):
        model.set_requires_gradient_sync(index == len(uses) - 1)
        model(torch.full((6,), 2.0 + index), uses_late).sum().backward()
    found = gradients_of(model)
    assert torch.equal(found["gradient of gain"], torch.full((6,), total))
    assert torch.equal(found["gradient of late"], torch.full((6,), late))


# --- several dtypes in one group ------------------------------------------------------------------


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 6).to(BF16)
        self.norm = nn.LayerNorm(6)
        self.down = nn.Linear(6, 4).to(BF16)

    def forward(self, x: Tensor) -> Tensor:
        self.seen = [self.up.weight.dtype, self.norm.weight.dtype, self.down.bias.dtype]
        x = self.up(x.to(self.up.weight.dtype))
        x = self.norm(x.to(self.norm.weight.dtype))
        return self.down(x.to(self.down.weight.dtype))


@pytest.mark.parametrize(
    ("world", "policy"),
    [(2, SPLIT), (1, {"reduce_dtype": F32}), (2, {"param_dtype": F32})],
    indirect=["world"],
)
@on_ranks()
def test_parameters_of_several_dtypes_share_a_group(policy: Policy) -> None:
    """Ranks see the same data, so the mean is their gradient, to a rounding of bfloat16."""
    torch.manual_seed(1234)
    model, plain = Mixed(), Mixed()
    plain.load_state_dict(model.state_dict())
    fully_shard(model, mp_policy=MixedPrecisionPolicy(**policy))
    inputs = random_batch(0, 8, 4).float()
    compute = policy.get("param_dtype")
    low = {
        name: param.detach().to(compute or param.dtype).requires_grad_()
        for name, param in plain.named_parameters()
    }
    (model(inputs).float() - 1).pow(2).mean().backward()
    (functional_call(plain, low, (cast(inputs, compute),)).float() - 1).pow(2).mean().backward()
    found = gradients_of(model)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    with torch.no_grad():
        model(inputs)  # the new weights can be unsharded
    assert model.seen == plain.seen
    for name, param in plain.named_parameters():
        want = low[name].grad.to(param.dtype)
        atol = 2 * eps(BF16) * want.abs().max().item()
        torch.testing.assert_close(found[f"gradient of {name}"], want, rtol=0.0, atol=atol)


# --- models that change under way -----------------------------------------------------------------

FROZEN: list[tuple[str, ...]] = [("inlet",), (), ("blocks.0", "outlet"), ("blocks.1.norm", "inlet"), ()]


@on_ranks(2)
def test_parameters_may_be_frozen_and_thawed_under_mixed_precision() -> None:
    """Gradients of the trained parameters equal those of a model in which all are trained."""
    model, twin = (sharded(TOWER.model(), {"param_dtype": BF16}) for _ in range(2))
    for step, frozen in enumerate(FROZEN):
        for name, param in model.named_parameters():
            param.requires_grad_(not name.startswith(frozen) if frozen else True)
        for each in (model, twin):
            each.zero_grad()
            float_loss(each, TOWER.part(step, dist.get_rank(), dist.get_world_size())).backward()
        found = gradients_of(model)
        for name, value in gradients_of(twin).items():
            if frozen and name.removeprefix("gradient of ").startswith(frozen):
                assert found[name] is None, name
            else:
                assert torch.equal(found[name], value), name


@pytest.mark.parametrize(("dtype", "policy"), [(F64, SPLIT), (F16, SPLIT), (BF16, {"param_dtype": BF16})])
@on_ranks(2)
def test_a_sharded_model_may_be_converted_and_still_computes_as_its_policy_says(
    dtype: torch.dtype, policy: Policy
) -> None:
    simulation = simulated(replace(TOWER, steps=1, dtype=dtype), policy, 2)
    expected = {name.removeprefix("step 0: "): value for name, value in simulation.tensors.items()}
    model = sharded(TOWER.model(), policy)
    inputs = TOWER.part(0, dist.get_rank(), dist.get_world_size())
    float_loss(model, inputs).backward()
    model.zero_grad()
    model.half() if dtype == F16 else model.to(dtype)
    seen: list[torch.dtype] = []
    model.blocks[0].up.register_forward_hook(
        lambda module, args, output: seen.extend([args[0].dtype, module.weight.dtype, output.dtype])
    )
    float_loss(model, inputs).backward()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    optimizer.step()
    assert seen == [BF16, BF16, BF16]
    for name, value in tensors_of(model).items():
        want = expected[name]
        assert value.dtype == dtype, name
        atol = 8 * eps(BF16) * want.abs().max().item()
        torch.testing.assert_close(value, want, rtol=0.0, atol=atol)


# --- float16 with a gradient scaler ---------------------------------------------------------------


@on_ranks(2)
def test_a_gradient_scaler_skips_the_step_on_every_rank() -> None:
    """Four steps of two microbatches; in the second one, one rank's loss is too large for float16."""
    rank, world = dist.get_rank(), dist.get_world_size()
    model = sharded(TOWER.model(), HALF)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    scales, weights = [], []
    for step in range(4):
        optimizer.zero_grad()
        for microbatch in range(2):
            model.set_requires_gradient_sync(microbatch == 1)
            loss = float_loss(model, TOWER.part(10 * step + microbatch, rank, world))
            scaler.scale(loss * (1e9 if step == 1 and rank == microbatch == 0 else 1.0)).backward()
        scaler.unscale_(optimizer)
        norm = whole(nn.utils.clip_grad_norm_(model.parameters(), 1.0)).item()
        assert (norm < float("inf")) is (step != 1)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        weights.append(whole(model.inlet.weight))
    assert scales == [2.0**10, 2.0**9, 2.0**9, 2.0**10]
    assert torch.equal(weights[0], weights[1]), "the step with infinite gradients was taken"
    assert not torch.equal(weights[1], weights[2])


# --- parameters that stay in full precision -------------------------------------------------------


class Watched(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        output = self.layer(x)
        self.seen = [x.dtype, self.layer.weight.dtype, output.dtype]
        return output


class Router(nn.Module):
    """Computes in the dtype of its weight, and gives back what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.gate.dtype
        return (x.to(self.gate.dtype) * self.gate).to(x.dtype)


class Selective(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = Watched(nn.Linear(8, 8))
        self.router = Router()
        self.last = nn.RMSNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.up(self.router(self.norm(x))))


def keeps_gate(name: str, module: nn.Module, param: nn.Parameter) -> bool:
    assert dict(module.named_parameters(recurse=False))[name.split(".")[-1]] is param
    return name.endswith("router.gate")


KEPT: dict[str, tuple[Any, dict[str, torch.dtype]]] = {
    "nothing": (None, {}),
    "class": (nn.LayerNorm, {"norm": F32}),
    "tuple": ((nn.LayerNorm, nn.RMSNorm), {"norm": F32, "last": F32}),
    "class_around_others": (Watched, {"up": F32}),
    "tuple_with_own_class": ((nn.RMSNorm, Router), {"last": F32, "router": F32}),
    "predicate": (keeps_gate, {"router": F32}),
}


@pytest.mark.parametrize(("keep", "kept"), KEPT.values(), ids=KEPT)
@on_ranks(2)
def test_chosen_parameters_stay_in_full_precision_in_the_same_group(
    keep: Any, kept: dict[str, torch.dtype]
) -> None:
    torch.manual_seed(1234)
    model = Selective()
    seen: dict[nn.Module, torch.dtype] = {}
    for norm in (model.norm, model.last):
        norm.register_forward_hook(lambda module, *_: seen.update({module: module.weight.dtype}))
    assert fully_shard(model, mp_policy=MixedPrecisionPolicy(**SPLIT, full_precision=keep)) is model
    output = model(random_batch(0, 4).float())
    output.float().pow(2).mean().backward()
    for param in model.parameters():
        assert param.dtype == param.grad.dtype == F32
    assert model.router.seen == kept.get("router", BF16)
    assert seen == {model.norm: kept.get("norm", BF16), model.last: kept.get("last", BF16)}
    # What leaves a module that was kept has the dtype of its neighbours again.
    assert model.up.seen == [kept.get("up", BF16)] * 3
    assert output.dtype == BF16


class Last(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype))


class TiedEnds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Embedding(8, 8)
        self.last = Last(8, 8, bias=False)
        self.last.weight = self.first.weight
        self.dtypes: list[torch.dtype] = []

    def forward(self, x: Tensor) -> Tensor:
        self.dtypes = [self.first.weight.dtype, self.last.weight.dtype]
        return self.last(self.first(x))


def is_last(name: str, module: nn.Module, param: nn.Parameter) -> bool:
    return name.endswith("last.weight")


@pytest.mark.parametrize(
    ("keep", "alone"), [(Last, None), (is_last, None), (is_last, "first"), (Last, "first"), (Last, "last")]
)
@on_ranks(2)
def test_a_tied_parameter_stays_in_full_precision_if_it_does_at_one_of_its_places(
    keep: Any, alone: str | None
) -> None:
    torch.manual_seed(1234)
    model = TiedEnds()
    policy = MixedPrecisionPolicy(**SPLIT, full_precision=keep)
    if alone is not None:
        fully_shard(model.get_submodule(alone), mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    model(torch.arange(4)).float().sum().backward()
    assert model.first.weight.grad is not None
    assert model.dtypes == [F32, F32]


# --- param_dtype_override_fn ----------------------------------------------------------------------


def keeps_router(param: nn.Parameter) -> torch.dtype | None:
    return param.dtype if hasattr(param, "is_gate") else None


def asks_for_both(param: nn.Parameter) -> torch.dtype | None:
    return param.dtype if hasattr(param, "is_gate") else BF16


@pytest.mark.parametrize(
    ("override", "reduce_dtype"), [(keeps_router, None), (keeps_router, BF16), (asks_for_both, F32)]
)
@on_ranks(2)
def test_a_function_chooses_what_is_computed_with_in_its_own_dtype(
    override: Any, reduce_dtype: torch.dtype | None
) -> None:
    """Its gradient is reduced as the policy says, and inputs are cast as without it."""
    torch.manual_seed(1234)
    model = Selective()
    model.router.gate.is_gate = True  # type: ignore[attr-defined]
    asked: dict[int, int] = {}

    def counting(param: nn.Parameter) -> torch.dtype | None:
        asked[id(param)] = asked.get(id(param), 0) + 1
        return override(param)  # type: ignore[no-any-return]

    policy = MixedPrecisionPolicy(
        param_dtype=BF16, reduce_dtype=reduce_dtype, param_dtype_override_fn=counting
    )
    fully_shard(model, mp_policy=policy)
    params = {p.fqn: p.precision for p in model._shardwise_state.group.shards.params}  # type: ignore[union-attr]
    model(random_batch(0, 4).float()).float().pow(2).mean().backward()
    assert all(param.dtype == param.grad.dtype == F32 for param in model.parameters())
    dtypes = {name: (p.computed, p.reduced) for name, p in params.items()}
    assert model.up.seen == [BF16, BF16, BF16]
    assert model.router.seen == F32
    assert list(asked.values()) == [1] * 6
    assert dtypes.pop("router.gate") == (F32, reduce_dtype or F32)
    assert set(dtypes.values()) == {(BF16, reduce_dtype or BF16)}


@on_ranks(1)
def test_other_dtypes_are_refused_by_the_name_of_the_parameter() -> None:
    answers = []
    for returned in (F16, "bfloat16", 16):
        model = Selective()
        before = dict(model.named_parameters())
        policy = MixedPrecisionPolicy(
            param_dtype=BF16, param_dtype_override_fn=lambda _, returned=returned: returned
        )
        answers.append(refusal(fully_shard, model, mp_policy=policy))
        assert all(param is before[name] for name, param in model.named_parameters())  # left as it was
    assert_expected_inline(
        "\n".join(answers),
        """\
ValueError: fully_shard: mp_policy.param_dtype_override_fn returned torch.float16 for norm.weight, which is of torch.float32, under a policy of param_dtype=torch.bfloat16: a parameter is computed with in its own dtype or in that of the policy. Return torch.float32 or None.
TypeError: fully_shard: mp_policy.param_dtype_override_fn returned 'bfloat16' for norm.weight, a str. Return a torch.dtype, or None.
TypeError: fully_shard: mp_policy.param_dtype_override_fn returned 16 for norm.weight, a int. Return a torch.dtype, or None.""",
    )


def norm_of_close_numbers() -> nn.LayerNorm:
    norm = nn.LayerNorm(8)
    nn.init.constant_(norm.weight, 1 + 2.0**-12)  # 1 in bfloat16
    return norm


@on_ranks(2)
def test_a_norm_kept_in_float32_computes_in_float32() -> None:
    """Its input was rounded to bfloat16 on entering the sharded module, its output on leaving the norm."""
    inputs = random_batch(0, 4).float().to(BF16)
    norm = norm_of_close_numbers()
    want = norm(inputs.float()).to(BF16).float()
    want.pow(2).sum().backward()
    assert norm.weight.grad is not None
    model = nn.Sequential(norm_of_close_numbers())
    policy = MixedPrecisionPolicy(**SPLIT, full_precision=nn.LayerNorm, output_dtype=F32)
    fully_shard(model, mp_policy=policy)
    output = model(random_batch(0, 4).float())
    output.pow(2).sum().backward()
    assert torch.equal(output, want)
    torch.testing.assert_close(whole(model[0].weight.grad), norm.weight.grad, rtol=1e-5, atol=1e-5)


# --- buffers ------------------------------------------------------------------


class Buffered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.BatchNorm1d(4)
        self.weight = nn.Parameter(torch.ones(4))
        self.register_buffer("mask", torch.tensor([True, False, True, True]))
        self.register_buffer("table", torch.arange(4, dtype=F64) / 4, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * self.weight + self.table.to(x.dtype)


@pytest.mark.parametrize(
    ("policy", "floating"),
    [({}, None), ({**SPLIT, "buffer_dtype": BF16}, BF16), ({"buffer_dtype": F32}, F32)],
    ids=["nothing", "bf16", "f32"],
)
@on_ranks(2)
def test_floating_buffers_are_cast_and_others_left(policy: Policy, floating: torch.dtype | None) -> None:
    plain = Buffered()
    model = fully_shard(Buffered(), mp_policy=MixedPrecisionPolicy(**policy))
    output = model(torch.arange(12.0).view(3, 4))
    output.float().sum().backward()
    found = {name: buffer.dtype for name, buffer in model.named_buffers()}
    assert set(model.state_dict()) == set(plain.state_dict())
    assert torch.equal(model.table.double(), plain.table.double())  # quarters are exact in every dtype
    for name, buffer in plain.named_buffers():
        is_floating = buffer.is_floating_point() and floating is not None
        assert found[name] == (floating if is_floating else buffer.dtype), name


def test_equal_precisions_are_one_object() -> None:
    made = [precision_of(F32, MixedPrecisionPolicy(**SPLIT)) for _ in range(2)]
    plain = [precision_of(F32, policy) for policy in (None, MixedPrecisionPolicy())]
    assert made[0] is made[1] != plain[0]
    assert plain[0] is plain[1]


@on_ranks(2)
def test_buffers_that_casts_and_packing_borrow_are_given_back() -> None:
    with lent_buffers() as lent:
        model = shard_tower(built(even_tower).float(), mp_policy=MixedPrecisionPolicy(param_dtype=BF16))
        model(random_batch(0, 4).float()).sum().backward()
    assert lent.total > 0
    assert not lent.out
