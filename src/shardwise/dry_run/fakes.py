"""What a dry run has in place of the real: ranks that are not there, and a model without memory.

The world is fake for this thread only and for the time of a dry run. Nothing is left behind: no default
process group, no environment variable, no back end; and a process group that the caller has initialised is
there again afterwards. The model is a copy on the meta device, to be sharded there, and then of fake tensors.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardwise.groups.group import ParameterGroup
from shardwise.layout.fqns import clean
from shardwise.params.parameter import Site
from shardwise.torch_compat import c10d, dtensor, nn_modules

Sent = Callable[[str, int, Sequence[Tensor]], None]
"""Told of each collective: the mesh dimension, the bytes that this rank sends, the tensors."""

_BACKEND = "shardwise_fake"  # c10d.is_fake knows it by its name


class _Done(dist.Work):
    """A collective that is over."""

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


class SilentGroup(c10d.PythonGroup):
    """A process group whose collectives end at once, write nothing, and say what they would send.

    Bytes sent are the fewest possible: those of a ring, or of an exchange between all pairs.
    """

    def __init__(self, dimension: str, world: int, sent: Sent, last_dimension: str) -> None:
        super().__init__(0, world, _BACKEND, f"shardwise_dry_run_{dimension}_{id(self)}")
        self._dimension = dimension
        self._last_dimension = last_dimension
        self._sent = sent

    def part(self, members: Sequence[int]) -> "SilentGroup":
        """A group of some of these ranks, neighbours along the last dimension."""
        made = SilentGroup(self._last_dimension, len(members), self._sent, self._last_dimension)
        c10d.add_group(made, _BACKEND)
        return made

    def _tell(self, num_bytes: int, rounds: int, tensors: Sequence[Tensor]) -> _Done:
        world = self.size()
        self._sent(self._dimension, rounds * num_bytes * (world - 1) // world, tensors)
        return _Done()

    def _one(self, output: Any, source: Any, *_: Any) -> _Done:
        return self._many([output], [source])

    def _many(self, outputs: Any, sources: Any, *_: Any) -> _Done:
        """All-gathers and reduce-scatters: the larger side is whole on all ranks."""
        num_bytes = max(sum(tensor.nbytes for tensor in side) for side in (outputs, sources))
        return self._tell(num_bytes, 1, [*outputs, *sources])

    def _sum(self, tensors: Any, *_: Any) -> _Done:
        return self._tell(sum(tensor.nbytes for tensor in tensors), 2, tensors)

    def send(self, tensors: Any, *_: Any) -> _Done:
        """To one rank."""
        self._sent(self._dimension, sum(tensor.nbytes for tensor in tensors), tensors)
        return _Done()

    def recv(self, tensors: Any, *_: Any) -> _Done:
        """From one rank."""
        self._sent(self._dimension, 0, tensors)
        return _Done()

    def _nothing(self, *_: Any) -> _Done:
        return _Done()

    all_gather_single = reduce_scatter_single = _one
    all_gather_single_coalesced = reduce_scatter_single_coalesced = _many
    allreduce = allreduce_coalesced = _sum
    barrier = broadcast = _nothing


# --- the model ------------------------------------------------------------------------------------


@contextmanager
def fake_world(shape: dict[str, int], sent: Sent) -> Iterator[DeviceMesh]:
    """Inside, this thread is rank 0 of a world that is not there; gives its mesh, of sizes by names."""
    sizes = torch.Size(shape.values())
    # DTensor takes equal meshes for the same: the process groups of this world are not those of another.
    with c10d.own_world(), ExitStack() as stack:
        dtensor.forget_operations()
        stack.callback(dtensor.forget_operations)
        first, last = next(iter(shape)), list(shape)[-1]
        along = {name: SilentGroup(name, size, sent, last) for name, size in shape.items()}
        # What all ranks exchange is as slow as the first dimension.
        everyone = along[first] if len(along) == 1 else SilentGroup(first, sizes.numel(), sent, last)
        for group in {*along.values(), everyone}:
            c10d.add_group(group, _BACKEND, is_default=group is everyone)
        groups: Any = everyone if len(along) == 1 else list(along.values())
        ranks = None if len(along) == 1 else torch.arange(sizes.numel()).view(sizes)
        yield DeviceMesh.from_group(groups, "cpu", ranks, mesh_dim_names=tuple(shape))


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
