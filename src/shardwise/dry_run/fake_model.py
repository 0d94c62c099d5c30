"""A copy of a model without memory: on the meta device, to be sharded there, and then of fake tensors."""

import copy
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwise.groups.group import ParameterGroup
from shardwise.layout.fqns import clean
from shardwise.params.parameter import Site
from shardwise.torch_compat import nn_modules


def meta_copy(model: nn.Module) -> nn.Module:
    """A copy of ``model`` with its parameters and buffers on the meta device. No memory of them is read.

    Tied parameters stay tied. Hooks of modules are copied, those of parameters are not.
    """
    memo: dict[int, Any] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        if isinstance(param, DTensor) or type(param.data) is not Tensor:
            kind = "DTensor" if isinstance(param, DTensor) else type(param.data).__name__
            raise NotImplementedError(
                f"{clean(name)} is a {kind}. A dry run shards plain parameters: pass the model as it is "
                "before tensor parallelism, quantisation or fully_shard."
            )
        memo[id(param)] = nn.Parameter(torch.empty_like(param, device="meta"), param.requires_grad)
    for module in model.modules():
        for buffer in nn_modules.buffers(module).values():
            if buffer is not None:
                memo[id(buffer)] = torch.empty_like(buffer, device="meta")
        for value in vars(module).values():
            if isinstance(value, Tensor):  # neither parameter nor buffer; not changed in place
                memo[id(value)] = value
    try:
        return copy.deepcopy(model, memo)
    except Exception as error:
        raise TypeError(
            f"The {type(model).__name__} cannot be copied ({type(error).__name__}: {error}), and a dry run "
            "works on a copy, so that the model stays as it is. Build the model anew for it, without what "
            "cannot be copied, or give its class a __deepcopy__."
        ) from error


def make_fake(model: nn.Module) -> None:
    """Give everything that is on the meta device fake memory on the host, where fake tensors are made."""
    model.to_empty(device="cpu")
    for module in model.modules():
        for name, value in vars(module).items():
            if isinstance(value, Tensor) and value.is_meta:
                module.__dict__[name] = torch.empty_like(value, device="cpu")


# --- other forwards -------------------------------------------------------------------------------


class _Reading(torch.autograd.Function):
    """Takes parameters, computes nothing, and returns memory of their shapes as gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *params: Tensor) -> Tensor:
        ctx.likes = [(p.shape, p.dtype) if p.requires_grad else None for p in params]
        return x + 1

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        made = [
            None if like is None else gradients[0].new_empty(like[0], dtype=like[1]) for like in ctx.likes
        ]
        return (*gradients, *made)


def without_computation(root: nn.Module, groups: Sequence[ParameterGroup]) -> None:
    """Give ``root`` and all modules of ``groups`` forwards that read their parameters and compute nothing.

    Modules are called in the order of ``groups``; the first one of a group reads all its parameters.
    """
    sites: list[Site] = []
    blocks: list[Any] = []
    for group in groups:
        own = [site for param in group.shards.params for site in param.sites]
        if root in group.modules:
            sites = own
            continue
        for module in group.modules:
            blocks.append(module)
            blocks[-1].forward = partial(_read, own if module is group.modules[0] else [])

    def forward(x: Tensor) -> Tensor:
        x = _read(sites, x)
        for block in blocks:
            x = block(x)
        return x

    root.forward = forward  # type: ignore[method-assign]


def _read(sites: Sequence[Site], x: Tensor) -> Tensor:
    return _Reading.apply(x, *(getattr(site.module, site.name) for site in sites))
