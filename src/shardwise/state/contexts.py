"""Contexts: accumulate gradients without communication, summon full parameters, stay unsharded to infer."""

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import torch
from torch import nn

from shardwise.arguments import check_flags, check_number, check_rank
from shardwise.engine.module_state import ModuleState, compute_after_optimizer, is_sharded, states_to_use
from shardwise.engine.root import Root
from shardwise.features.inference import begin_inference, end_inference
from shardwise.groups.group import ParameterGroup
from shardwise.layout.mesh import axes_of
from shardwise.ranks.agreement import run_on_all_ranks
from shardwise.ranks.failures import monitor_of_job
from shardwise.ranks.model_ranks import axes_of_given, mesh_device
from shardwise.ranks.replicas import Checksums, are_fake, differing, message_on_edits
from shardwise.state.summon import SummonedGroup, broadcast_changes, check_can_summon

T = TypeVar("T")


@contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Do not reduce the gradients of backwards inside; they accumulate until a backward outside.

    Use it to accumulate gradients over microbatches. It saves the reduce-scatters, and costs the memory of
    the full gradients. Modules that keep their parameters after forward (strategies zero1, zero2,
    hybrid_zero2) keep them after backward as well, so all microbatches share one all-gather. On exit, even
    after an exception, each module gets its former settings back. May be nested.

    Args:
        model: a module with sharded modules in it, which need not be sharded itself.

    Raises:
        TypeError: ``model`` is not an ``nn.Module``.
        ValueError: nothing in ``model`` is sharded.
        RuntimeError: a forward or backward is running.

    Example::

        for microbatch in microbatches[:-1]:
            with no_sync(model):
                loss_of(model, microbatch).backward()
        loss_of(model, microbatches[-1]).backward()
        optimizer.step()
    """
    module_states = _module_states_to_change(model, "no_sync")
    groups = [module_state.group for module_state in module_states]
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
    src_rank: int | None = None,
) -> Iterator[None]:
    """Summon full parameters in place of the shards, to inspect, save or edit them.

    Inside, ``module.weight``, ``parameters()``, ``state_dict()`` and ``load_state_dict()`` see full
    parameters: in the dtype that is stored, and DTensors of tensor parallelism as they were before
    ``fully_shard``. On exit, even after an exception, the same shards as before are registered, so an
    existing optimizer keeps working. They get the changes of the full parameters: in place, through
    ``.data``, by replacing a parameter, or of ``requires_grad``.

    Collective: all ranks must enter it, for one all-gather per group. Costs the memory of the full model (of
    one group at a time on ranks that do not see it, or on a device from which it is offloaded), and with
    ``writeback`` that of the shards once more. The parameters of a group share memory; clone one to save it
    alone. Forward, backward and an overlapping ``unsharded`` raise an error inside.

    Args:
        module: a module with sharded modules in it.
        recurse: True (default) for all sharded modules inside; False for the group of ``module`` only.
        writeback: True (default) writes changes back to the shards. Each rank writes its own part, so all
            ranks must make equal changes, which they compare on exit by a checksum (not those of parameters
            with ``check_equal_weights=False``). False drops them, and communicates nothing on exit.
        rank0_only: True summons full parameters on the first rank of the mesh only, while the others see
            their shards. Needs ``writeback=False``. Default False.
        offload_to_cpu: True puts the full parameters in host memory, on every rank unless ``rank0_only``.
            Default False.
        with_grads: True also summons full gradients in ``.grad``, and writes them back. Default False.
        src_rank: the global rank whose changes all ranks get. It sends the parameters that it has changed,
            and changes on other ranks are dropped. After an exception inside, its changes are dropped too.
            None (default): all ranks make equal changes.

    Raises:
        TypeError: ``module`` is not an ``nn.Module``, or a flag is not a bool.
        ValueError: ``rank0_only`` with ``writeback``, ``src_rank`` without it or with ``with_grads``, a
            ``src_rank`` that does not hold all parameters, ``recurse=False`` for a module that is not sharded
            itself, nothing in ``module`` is sharded, or the ranks' arguments differ.
        RuntimeError: a forward or backward is running; inside an overlapping ``unsharded`` or ``inference``;
            ``with_grads`` while gradients are unreduced; parameters are on the meta device. On exit: a change
            cannot be written back, or ranks have made different changes, of which none is written.
        NotImplementedError: a parameter is of a class that all-gathers itself.

    Example::

        with unsharded(model, writeback=False, rank0_only=True, offload_to_cpu=True):
            if dist.get_rank() == 0:
                torch.save(model.state_dict(), "model.pt")
    """
    flags = {"recurse": recurse, "writeback": writeback, "rank0_only": rank0_only, "with_grads": with_grads}

    def check() -> list[ModuleState]:
        check_flags("unsharded", **flags, offload_to_cpu=offload_to_cpu)
        if rank0_only and writeback:
            raise ValueError(
                "unsharded: rank0_only=True with writeback=True: the other ranks would have nothing to write "
                "back, and their shards would not follow what rank 0 changes. Pass writeback=False."
            )
        module_states = _module_states_to_change(module, "unsharded", recurse)
        if src_rank is not None:
            _check_source(src_rank, module_states, writeback, with_grads)
        for each in module_states:
            check_can_summon(each.group, with_grads)
        return module_states

    module_states = _agreed("unsharded", module, check, {**flags, "src_rank": src_rank})
    summoned: list[SummonedGroup] = []
    has_failed = True
    try:
        with monitor_of_job().call("unsharded", lambda: axes_of_given(module)):
            compute_after_optimizer(module_states)
            for module_state in module_states:
                group = module_state.group
                module_state.root.hand_over(group, "unsharded")
                summoned.append(SummonedGroup(group, writeback, rank0_only, offload_to_cpu, with_grads))
        yield
        has_failed = False
    finally:
        for each in summoned:
            each.end()
        try:
            if writeback and not has_failed:
                with monitor_of_job().call("unsharded", lambda: axes_of_given(module)):
                    _make_changes_equal(summoned, module_states, src_rank)
            if src_rank is None or not has_failed:
                problems = [problem for each in summoned for problem in each.write_back()]
                if problems and not has_failed:
                    raise RuntimeError(
                        f"unsharded: some changes could not be written back. {' '.join(problems)}"
                    )
        finally:
            for each in summoned:
                each.release()


def _check_source(src_rank: Any, module_states: list[ModuleState], writeback: bool, with_grads: bool) -> None:
    check_rank("unsharded", "src_rank", src_rank)
    if not writeback or with_grads:
        raise ValueError(
            "unsharded: src_rank sends values that are written back. Pass writeback=True with it, and leave "
            "out with_grads."
        )
    for param in [param for module_state in module_states for param in module_state.group.shards.params]:
        ranks = param.mesh.mesh.mesh.flatten().tolist()
        if src_rank not in ranks:
            raise ValueError(
                f"unsharded: rank {src_rank} was named as src_rank, but does not hold {param.fqn}, which is "
                f"on ranks {ranks}. Summon modules that it holds whole, or make the same change on all ranks."
            )


def _make_changes_equal(
    summoned: list[SummonedGroup], module_states: list[ModuleState], src_rank: int | None
) -> None:
    """Let all ranks have the changes of ``src_rank``; or, if it is None, raise on all if they differ."""
    params = [param for module_state in module_states for param in module_state.group.shards.params]
    axes, device = axes_of(param.sharded for param in params), module_states[0].root.device
    if not axes or are_fake(axes, device):
        return
    if src_rank is not None:
        broadcast_changes(summoned, src_rank)
        return
    checksums = Checksums()
    claims = [claim for each in summoned for claim in each.claims(checksums)]
    if findings := differing(claims, axes, device):
        raise RuntimeError(f"unsharded: {message_on_edits(findings)}")


@contextmanager
def inference(model: nn.Module, *, budget_bytes: int | None = None) -> Iterator[None]:
    """Keep parameters unsharded between forwards, for decode loops and the evaluation of many batches.

    Runs without gradients. The parameters are unsharded on entry, in their compute dtype, and modules show
    them until the end. Methods that call parts of the model therefore see them, such as a ``generate`` that
    begins with the encoder. ``parameters()`` and ``state_dict()`` show the shards. Do not change weights
    inside. For groups that are kept, changes that torch counts raise an error at the next forward; others
    (``.data``, foreach operations on DTensors) are ignored until the end.

    Ranks may call ``model`` different numbers of times, for example to generate different numbers of tokens:
    a rank that leaves first takes part in the all-gathers of the others until all have left. If everything is
    kept, forwards do not communicate. A method that was registered with :func:`register_fsdp_forward_method`
    counts as one call: unless everything is kept, it must run the blocks equally often on all ranks.

    Args:
        model: a module with sharded modules in it.
        budget_bytes: how many bytes of full parameters to keep, filled in the order of the modules. Groups
            that do not fit are unsharded and resharded in each forward, as usual. None (default): keep all.

    Raises:
        TypeError: ``model`` is not an ``nn.Module``, or ``budget_bytes`` is not an int.
        ValueError: nothing in ``model`` is sharded, ``budget_bytes`` is below 0, or the ranks' arguments
            differ.
        RuntimeError: a forward or backward is running, or this is inside ``unsharded`` or another
            ``inference``. Inside the context: a backward, or a forward after weights were changed.

    Example::

        with inference(model):
            while not done:
                tokens = torch.cat([tokens, model(tokens)[:, -1:].argmax(-1)], dim=1)
    """

    def check() -> list[ModuleState]:
        if budget_bytes is not None:
            wanted = "a number of bytes, 0 or more, or None for no limit"
            check_number("inference", "budget_bytes", budget_bytes, wanted, above=-1)
        module_states = _module_states_to_change(model, "inference")
        for module_state in module_states:
            module_state.group.refuse_if_summoned("inference()")
        return module_states

    module_states = _agreed("inference", model, check, {"budget_bytes": budget_bytes})
    left = math.inf if budget_bytes is None else budget_bytes
    with ExitStack() as stack:
        by_root: dict[Root, list[ParameterGroup]] = {}
        for module_state in module_states:
            by_root.setdefault(module_state.root, []).append(module_state.group)
        for root, groups in by_root.items():
            left -= begin_inference(root, groups, left)
            stack.callback(end_inference, root)
        with torch.no_grad():
            yield


def _agreed(caller: str, module: Any, check: Callable[[], T], same: dict[str, Any]) -> T:
    """Run ``check`` on all ranks that share the module, and return its result once it has passed on all.

    The arguments ``same`` have to be equal on these ranks. If nothing is sharded, ``check`` runs on this rank
    only, and says so.
    """
    params = list(module.parameters()) if isinstance(module, nn.Module) else []
    device = mesh_device(module) if params else None
    axes = [] if device is None else axes_of(params)
    with monitor_of_job().call(caller, lambda: axes_of_given(module)):
        return run_on_all_ranks(axes, device or torch.device("cpu"), check, caller=caller, same=same)


def _module_states_to_change(module: Any, caller: str, recurse: bool = True) -> list[ModuleState]:
    """The states of the modules that a context acts on; raises if one is in a forward or backward."""
    module_states = states_to_use(caller, module)
    if not recurse and not is_sharded(module):
        raise ValueError(
            f"{caller}: {type(module).__name__} is not sharded itself, so recurse=False leaves nothing to "
            "unshard. Pass a sharded module, or recurse=True."
        )
    module_states = module_states if recurse else module_states[:1]
    for module_state in module_states:
        module_state.root.refuse_at_work(caller, module_state.group)
    return module_states
