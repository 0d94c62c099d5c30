"""Contexts: accumulate without communication, summon full parameters, stay unsharded for inference."""

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from shardwise.engine.members import sharded_members
from shardwise.engine.root import Member, Root
from shardwise.features.inference import begin_inference, end_inference
from shardwise.fsdp_module.identity import is_sharded
from shardwise.groups.group import ParameterGroup
from shardwise.layout.mesh import axes_of
from shardwise.ranks.agreement import run_on_all_ranks
from shardwise.ranks.failures import relay_of_job
from shardwise.ranks.model_ranks import axes_of_given, mesh_device
from shardwise.ranks.replicas import are_fake
from shardwise.state.summon import SummonedGroup, SummonOptions, check_can_summon

T = TypeVar("T")


@contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Leave gradients unreduced: those of backwards inside add up, full, until a backward outside.

    For accumulation over microbatches without communication. Applies to all sharded modules in ``model``,
    which need not be sharded itself. Costs the memory of the full gradients. Modules that keep their
    parameters after forward (strategies zero1, zero2, hybrid_zero2) keep them after backward as well, so that
    all microbatches share one gather. Afterwards each module has its own former setting again, also after an
    exception. May be nested.

    Raises:
        ValueError: nothing in ``model`` is sharded.
        RuntimeError: entered inside a running forward or backward.

    Example::

        for microbatch in microbatches[:-1]:
            with no_sync(model):
                loss_of(model, microbatch).backward()
        loss_of(model, microbatches[-1]).backward()
        optimizer.step()
    """
    members = _members_to_change(model, "no_sync")
    groups = [member.group for member in members]
    before = [group.settings for group in groups]
    for group in groups:
        group.configure(requires_gradient_sync=False)
        if group.settings.reshard_after_forward is False:
            group.configure(reshard_after_backward=False)
    try:
        yield
    finally:
        for group, settings in zip(groups, before, strict=True):
            group.configure(
                requires_gradient_sync=settings.requires_gradient_sync,
                reshard_after_backward=settings.reshard_after_backward,
            )


@contextmanager
def unsharded(
    module: nn.Module,
    *,
    recurse: bool = True,
    writeback: bool = True,
    rank0_only: bool = False,
    offload_to_cpu: bool = False,
    with_grads: bool = False,
) -> Iterator[None]:
    """Have full parameters in place of the shards, to look at, save or edit.

    Inside, ``module.weight``, ``named_parameters()``, ``state_dict()``, ``load_state_dict()`` and ``apply()``
    alike see full parameters: plain ones in the dtype that is stored, whatever a mixed-precision policy
    computes with, and DTensors of tensor parallelism as they were before ``fully_shard``. Afterwards the same
    shards as before are registered, so that an optimizer built before goes on; with what was changed in the
    full parameters, in place, through ``.data``, by replacing them, or in ``requires_grad``. That holds after
    an exception as well.

    Collective: all ranks must enter it. Parameters of a group share memory: clone one that is saved alone.
    Costs the memory of the full model (of one group at a time where ranks do not see it, or on a device from
    which it is offloaded), and with ``writeback`` that of the shards once more. Forward and backward are
    refused inside; so is an overlapping ``unsharded``.

    Args:
        module: a module with sharded modules in it.
        recurse: all sharded modules inside, or only the group of ``module`` itself.
        writeback: False drops what was changed. True takes over from each rank the part that it keeps: ranks
            must make equal changes.
        rank0_only: full parameters on the first rank of the mesh alone; the others see their shards. Needs
            ``writeback=False``.
        offload_to_cpu: full parameters in host memory. On every rank, unless ``rank0_only``.
        with_grads: ``.grad`` of the full parameters is the full gradient, and is written back as well.

    Raises:
        ValueError: ``rank0_only`` with ``writeback``, or nothing there is sharded.
        RuntimeError: entered in a forward or backward, in an overlapping ``unsharded`` or in ``inference``;
            ``with_grads`` while gradients wait unreduced; parameters on the meta device. At the end: a change
            that cannot be taken over.
        NotImplementedError: a parameter is of a class that gathers itself.

    Example::

        with unsharded(model, writeback=False, rank0_only=True, offload_to_cpu=True):
            if dist.get_rank() == 0:
                torch.save(model.state_dict(), "model.pt")
    """
    same = {
        "recurse": recurse,
        "writeback": writeback,
        "rank0_only": rank0_only,
        "with_grads": with_grads,
    }

    def check() -> dict[Member, SummonOptions]:
        for name, value in {**same, "offload_to_cpu": offload_to_cpu}.items():
            if not isinstance(value, bool):
                raise TypeError(
                    f"unsharded: {name} is {value!r}, a {type(value).__name__}; pass True or False."
                )
        if rank0_only and writeback:
            raise ValueError(
                "unsharded: rank0_only=True with writeback=True: the other ranks would have nothing to write "
                "back, and their shards would not follow what rank 0 changes. Pass writeback=False."
            )
        members = _members_to_change(module, "unsharded", recurse)
        options = {
            each: _options(each, writeback, rank0_only, offload_to_cpu, with_grads) for each in members
        }
        for each in members:
            check_can_summon(each.group, options[each])
        return options

    options = _agreed("unsharded", module, check, same)
    summoned: list[SummonedGroup] = []
    has_failed = True
    try:
        with relay_of_job().call("unsharded", lambda: axes_of_given(module)):
            for member in options:
                member.root.free_between_passes(member.group, "unsharded")
                summoned.append(SummonedGroup(member.group, options[member]))
        yield
        has_failed = False
    finally:
        problems = [problem for each in summoned for problem in each.write_back()]
        if problems and not has_failed:
            raise RuntimeError(f"unsharded: not everything could be taken over. {' '.join(problems)}")


@contextmanager
def inference(model: nn.Module, *, budget_bytes: int | None = None) -> Iterator[None]:
    """Keep full parameters gathered between forwards: for decode loops, and evaluation of many batches.

    Runs without gradients. What is kept are the full parameters as they are computed with. They are gathered
    on entry, and modules show them until the end, so that methods that call parts of the model, such as a
    ``generate`` that begins with the encoder, find them; ``parameters()`` and ``state_dict()`` show the
    shards. Weights must not be changed inside.

    Ranks may call ``model`` different numbers of times, as they do where they generate different numbers of
    tokens: a rank that leaves first takes part in the gathers of the others until all have left. With all
    parameters kept there are none, and no communication at all. A method that was registered with
    :func:`register_fsdp_forward_method` counts as one call: where not everything is kept, it must run the
    blocks equally often on all ranks.

    Args:
        model: a module with sharded modules in it.
        budget_bytes: how many bytes of full parameters to keep, in the order of the modules; groups that do
            not fit any more are gathered in each forward, as usual. None: all are kept.

    Raises:
        ValueError: nothing in ``model`` is sharded.
        RuntimeError: entered in a forward or backward, in ``unsharded`` or in another ``inference``. Inside:
            a backward, or weights that were changed.

    Example::

        with inference(model):
            while not done:
                tokens = torch.cat([tokens, model(tokens)[:, -1:].argmax(-1)], dim=1)
    """

    def check() -> list[Member]:
        if budget_bytes is not None and (isinstance(budget_bytes, bool) or not isinstance(budget_bytes, int)):
            raise TypeError(
                f"inference: budget_bytes is {budget_bytes!r}, a {type(budget_bytes).__name__}; pass a "
                "number of bytes, or None for no limit."
            )
        if budget_bytes is not None and budget_bytes < 0:
            raise ValueError(f"inference: budget_bytes is {budget_bytes}; it must be 0 or more.")
        members = _members_to_change(model, "inference")
        for member in members:
            member.group.refuse_if_summoned("inference()")
        return members

    members = _agreed("inference", model, check, {"budget_bytes": budget_bytes})
    left = math.inf if budget_bytes is None else budget_bytes
    with ExitStack() as stack:
        for root, groups in _by_root(members).items():
            left -= begin_inference(root, groups, left)
            stack.callback(end_inference, root)
        with torch.no_grad():
            yield


def _agreed(caller: str, module: Any, check: Callable[[], T], same: dict[str, Any]) -> T:
    """What ``check`` returns, once it has passed on all ranks that share the module, with equal arguments.

    Where nothing is sharded, the check says so, without the others.
    """
    params = list(module.parameters()) if isinstance(module, nn.Module) else []
    device = mesh_device(module) if params else None
    axes = [] if device is None or are_fake(axes_of(params), device) else axes_of(params)
    with relay_of_job().call(caller, lambda: axes_of_given(module)):
        return run_on_all_ranks(axes, device or torch.device("cpu"), check, caller=caller, same=same)


def _members_to_change(module: Any, caller: str, recurse: bool = True) -> list[Member]:
    """The groups of a context, each once, none of them in a forward or backward."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"{caller}: {type(module).__name__} is not an nn.Module.")
    if not recurse and not is_sharded(module):
        raise ValueError(
            f"{caller}: {type(module).__name__} is not sharded itself, so that recurse=False leaves nothing. "
            "Pass a sharded module, or recurse=True."
        )
    members = sharded_members(module)
    if not members:
        raise ValueError(
            f"{caller}: there is no sharded module in this {type(module).__name__}. Call fully_shard or "
            "shard_model first."
        )
    members = members if recurse else members[:1]
    for member in members:
        member.root.refuse_at_work(caller, member.group)
    return members


def _options(
    member: Member, writeback: bool, rank0_only: bool, to_host: bool, with_grads: bool
) -> SummonOptions:
    ranks = member.group.mesh.mesh.mesh
    is_shown = not rank0_only or dist.get_rank() == int(ranks.min())
    return SummonOptions(writeback, is_shown, to_host, with_grads)


def _by_root(members: list[Member]) -> dict[Root, list[ParameterGroup]]:
    found: dict[Root, list[ParameterGroup]] = {}
    for member in members:
        found.setdefault(member.root, []).append(member.group)
    return found
