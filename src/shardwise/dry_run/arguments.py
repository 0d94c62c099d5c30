"""What a caller passes for a dry run, read and checked: a model, memory, a batch, an optimizer."""

import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import NoneType
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.arguments import check_module, check_type
from shardwise.dry_run.step import Call, Optimizers, Training
from shardwise.engine.module_state import sharded_module_states
from shardwise.layout.fqns import listed
from shardwise.torch_compat import pytree

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNITS |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
# Nominal: memory in GB, and 1e12 FLOP/s with dense matrices of bf16 (fp16 if it has none).
_DEVICES = {
    **{"a100": (80, 312), "a100-40gb": (40, 312), "h100": (80, 989), "h200": (141, 989), "b200": (180, 2250)},
    **{"mi300x": (192, 1307), "mi325x": (256, 1307), "v100": (32, 125), "t4": (16, 65), "l4": (24, 121)},
    **{"a10g": (24, 70), "l40s": (48, 362), "rtx3090": (24, 71), "rtx4090": (24, 165), "rtx5090": (32, 209)},
}
_DTYPES = {
    **{"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32},
    **{"int64": torch.int64, "int32": torch.int32},
}


def check_model(caller: str, model: Any) -> None:
    """Refuse what no step can be tried of."""
    check_module(caller, model)
    if sharded_module_states(model):
        raise ValueError(f"{caller}: modules of the model are sharded already. Pass it as it was before.")
    if not any(param.requires_grad for param in model.parameters()):
        raise ValueError(
            f"{caller}: no parameter of the model requires a gradient, so there is no step to take."
        )


def memory_in_bytes(caller: str, memory: Any) -> int:
    """An amount of memory: a number of bytes, a text such as "80GB" (80 * 10^9) or "80GiB" (80 * 2^30), or
    the name of a device, such as "h100".

    ``caller``: the public function that was called, for messages.
    """
    check_type(caller, "memory", memory, 'a number of bytes or a text such as "80GB" or "h100"', int, str)
    if (device := _device(memory)) is not None:
        return device[0] * 10**9
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", str(memory))
    num_bytes = int(float(found[1]) * _UNITS.get(found[2].lower(), 0)) if found else 0
    if num_bytes == 0:
        raise ValueError(
            f"{caller}: memory '{memory}' is not an amount of memory. Pass a number above 0 and a unit: 80GB "
            f"is 80 * 10^9 bytes, 80GiB is 80 * 2^30. Known by name are {', '.join(_DEVICES)}."
        )
    return num_bytes


def speed_of(caller: str, flops: Any, memory: Any) -> float | None:
    """FLOP/s of a device, as a number or by its name; None: of the device named as ``memory``, if any."""
    check_type(
        caller, "flops", flops, 'a number of FLOP/s or a device such as "h100"', int, float, str, NoneType
    )
    device = _device(memory if flops is None else flops)
    if device is not None:
        return device[1] * 1e12
    if isinstance(flops, str) or (flops is not None and not flops > 0):
        raise ValueError(
            f"{caller}: flops is {flops!r}; pass FLOP/s as a number above 0, such as 989e12, or a device. "
            f"Known by name are {', '.join(_DEVICES)}."
        )
    return flops


def bandwidths_of(caller: str, bandwidth: Any, dimensions: Iterable[str]) -> dict[str, float]:
    """Bytes a second along each dimension of a mesh: one number for all, or by their names."""
    given = bandwidth if isinstance(bandwidth, Mapping) else dict.fromkeys(dimensions, bandwidth)
    if missing := [name for name in dimensions if name not in given]:
        raise ValueError(f"{caller}: bandwidth names {listed(given)}, and not {listed(missing)}.")
    wanted = 'bytes a second, as a number or a text such as "50GB/s"'
    found: dict[str, float] = {}
    for name in dimensions:
        each = given[name]
        check_type(caller, "bandwidth", each, wanted, int, float, str)
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?(?:e\d+)?)\s*([kKMGT]i?)?(B/s)?\s*", str(each))
        # Networks are sold by bits: 400 Gb/s are 50 GB/s.
        size = float(match[1]) * _UNITS[(match[2] or "").lower() + "b"] if match else 0.0
        if size <= 0 or (match and match[2] and not match[3]):
            raise ValueError(f"{caller}: bandwidth is {each!r}; pass {wanted} (bytes: 400 Gb/s is 50GB/s).")
        found[name] = size
    return found


def _device(name: Any) -> tuple[int, int] | None:
    return _DEVICES.get(name.strip().lower().replace(" ", "")) if isinstance(name, str) else None


def training_of(
    caller: str, model: nn.Module, name: str, batch: Any, loss: Any, optimizer: Any, on_host: bool
) -> Training:
    """What ``caller`` was asked to try. ``batch``: its argument ``name``; None: no computation."""
    call = None if batch is None else _call_on(caller, name, batch, loss)
    # By name, optimizers take all parameters at once on a device, as torch has them do there.
    return Training(model, call, _optimizers_named(caller, optimizer, is_foreach=not on_host), on_host)


def _call_on(caller: str, name: str, batch: Any, loss: Callable[[Any], Tensor] | None) -> Callable[[], Call]:
    """How to run a model's forward on fake tensors like ``batch``, the argument ``name`` of ``caller``."""
    sample = sample_of(f"{caller}: {name}", batch)

    def make() -> Call:
        fakes = pytree.tree_map(
            lambda leaf: torch.empty_like(leaf, device="cpu") if isinstance(leaf, Tensor) else leaf, sample
        )

        def call(model: nn.Module) -> Tensor:
            what = "forward"
            try:
                is_named = isinstance(fakes, Mapping)
                args = fakes if isinstance(fakes, (tuple, list)) else (fakes,)
                output = model(**fakes) if is_named else model(*args)
                what = "loss() on the output"
                return loss_of(output) if loss is None else _scalar(loss(output))
            except Exception as error:
                first_line = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
                told = shapes_of(sample)
                if not any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(sample)):
                    told = "which has no tensors: pass torch.empty(8, 64) or '8x64', not a shape"
                raise ValueError(
                    f"{caller}: {what} of the {type(model).__mro__[1].__name__} failed on tensors like the "
                    f"{name}, {told}: {first_line}"
                ) from error

        return call

    return make


def _scalar(found: Any) -> Tensor:
    if not (isinstance(found, Tensor) and found.numel() == 1 and found.requires_grad):
        what = (
            f"a tensor of shape {tuple(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
        )
        raise TypeError(f"it returned {what}, not a scalar tensor with a gradient")
    return found


def loss_of(output: Any) -> Tensor:
    """What is called ``loss`` in an output, a scalar, or the sum of all that has a gradient."""
    named = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(named, Tensor):
        return named
    tensors = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]
    losses = [tensor.sum() for tensor in tensors if tensor.requires_grad]
    if not losses:
        raise ValueError("none of its outputs has a gradient")
    return losses[0] if len(losses) == 1 else torch.stack(losses).sum()


def _from_text(what: str, text: str) -> tuple[Tensor, ...]:
    """Tensors from their shapes: "8x4096" is one of int64; "8x4096:bf16,8" are two."""
    made = []
    for each in text.split(","):
        shape, _, dtype = each.strip().partition(":")
        sizes = shape.lower().split("x")
        if not all(size.isdecimal() and int(size) > 0 for size in sizes) or (dtype and dtype not in _DTYPES):
            raise ValueError(
                f"{what} '{text}' is not understood. Pass the shape of each input, separated by "
                f"commas, such as 8x4096 (int64) or 8x3x224x224:bf16; dtypes are {', '.join(_DTYPES)}."
            )
        made.append(torch.empty([int(s) for s in sizes], dtype=_DTYPES[dtype or "int64"], device="meta"))
    return tuple(made)


def batch_size_of(sample: Any) -> int:
    """The size of the first dimension of the first tensor of a batch."""
    tensors = [leaf for leaf in pytree.tree_leaves(sample) if isinstance(leaf, Tensor)]
    if not tensors or not tensors[0].dim():
        raise ValueError("estimate: largest_batch needs a batch whose first tensor has a dimension for it.")
    return tensors[0].shape[0]


def resized(sample: Any, size: int) -> Any:
    """A batch with ``size`` rows: of all tensors that have as many as the first."""
    before = batch_size_of(sample)

    def like(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.dim() or leaf.shape[0] != before:
            return leaf
        return torch.empty((size, *leaf.shape[1:]), dtype=leaf.dtype, device="meta")

    return pytree.tree_map(like, sample)


def sample_of(what: str, batch: Any) -> Any:
    """A batch, whose tensors may be given by their shapes as text; ``what`` names it in messages."""
    return _from_text(what, batch) if isinstance(batch, str) else batch


def shapes_of(sample: Any) -> str:
    """The names, dtypes and shapes of the tensors of a batch, for people."""
    parts = sample.items() if isinstance(sample, Mapping) else [("", sample)]
    shown = [
        f"{name} {str(leaf.dtype).removeprefix('torch.')} {tuple(leaf.shape)}".lstrip()
        for name, part in parts
        for leaf in pytree.tree_leaves(part)
        if isinstance(leaf, Tensor)
    ]
    return ", ".join(shown) or "nothing"


# --- optimizers -----------------------------------------------------------------------------------

_KNOWN: dict[str, tuple[str, dict[str, Any]]] = {
    "adamw": ("AdamW", {}),
    "adam": ("Adam", {}),
    "sgd": ("SGD", {"lr": 0.1}),
    "sgd-momentum": ("SGD", {"lr": 0.1, "momentum": 0.9}),
    "adagrad": ("Adagrad", {}),
    "rmsprop": ("RMSprop", {}),
    "adafactor": ("Adafactor", {}),
    "muon": ("Muon", {}),
}
"""By name: the class in ``torch.optim``, and its options."""


def known_optimizers() -> list[str]:
    """The names that this torch has a class for."""
    return [name for name, (cls, _) in _KNOWN.items() if hasattr(torch.optim, cls)]


def _optimizers_named(caller: str, optimizer: Any, *, is_foreach: bool) -> Optimizers:
    """What makes the optimizers of some parameters, by a name, a class or a function."""
    known = known_optimizers()
    wanted = f"a name ({', '.join(known)}), a class, or a function of the list of parameters"
    check_type(caller, "optimizer", optimizer, wanted, str, Callable)
    if isinstance(optimizer, str):
        if optimizer.lower() not in known:
            raise ValueError(
                f"{caller}: there is no optimizer '{optimizer}'. Pass one of {', '.join(known)}."
            )
        return lambda params: list(_by_name(optimizer.lower(), is_foreach, params))

    def make(params: list[nn.Parameter]) -> list[torch.optim.Optimizer]:
        made = optimizer(params)
        wanted = "a function that returns a torch.optim.Optimizer"
        check_type(caller, "what optimizer() returned", made, wanted, torch.optim.Optimizer)
        return [made]

    return make


def _by_name(name: str, is_foreach: bool, params: list[nn.Parameter]) -> Iterator[torch.optim.Optimizer]:
    cls, options = _KNOWN[name]
    shares = {cls: params}
    if name == "muon":  # takes matrices; what is left goes to AdamW, as its authors recommend
        shares = {cls: [p for p in params if p.dim() == 2], "AdamW": [p for p in params if p.dim() != 2]}
    for cls, share in shares.items():
        make = getattr(torch.optim, cls)
        has_foreach = is_foreach and "foreach" in inspect.signature(make).parameters
        if share:
            yield make(share, **options, **({"foreach": True} if has_foreach else {}))
