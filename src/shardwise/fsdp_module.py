"""FSDPModule: what a caller may do with a sharded module."""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from shardwise.comm.custom import (
    CustomAllGather,
    CustomReduceScatter,
)
from shardwise.comm.streams import has_streams, in_stream
from shardwise.engine.comm_choices import (
    CUSTOM,
    check_choice,
    check_comm,
    check_of_device,
    communicate,
    made,
    with_memory,
    with_symmetric_memory,
)
from shardwise.engine.members import member_of, sharded_members
from shardwise.engine.root import Member
from shardwise.features.finalization import GradientReductionHandle, ManualFinalization
from shardwise.groups.group import ParameterGroup
from shardwise.torch_compat import c10d


class UnshardHandle:
    """Returned by :meth:`FSDPModule.unshard`; ``wait`` until the full parameters may be used."""

    def __init__(self, group: ParameterGroup) -> None:
        self._group = group

    def wait(self) -> None:
        """Wait for the gather. From then on the module's attributes are the full parameters."""
        self._group.unsharded.wait_if_on_the_way()


class FSDPModule:
    """Mixed into the class of every module given to ``fully_shard``.

    A setter acts on this module and, with ``recurse=True``, on all sharded modules inside it.
    """

    def unshard(self, async_op: bool = False) -> UnshardHandle:
        """Gather this module's own group (not those of sharded modules inside it).

        Args:
            async_op: return at once; the caller waits with the handle, or the next forward does.

        Returns:
            A handle whose ``wait()`` returns when the full parameters may be used.

        The full parameters stay until forward has used them, or ``reshard()``. Collective: all ranks
        of the mesh must call it in the same order.
        """
        check_bool("unshard", "async_op", async_op)
        member = member_of(self)
        member.root.unshard_for_caller(member.group)
        handle = UnshardHandle(member.group)
        if not async_op:
            handle.wait()
        return handle

    def reshard(self) -> None:
        """Free the full parameters of this module's own group.

        Raises:
            RuntimeError: a full parameter was changed in place; the change would be lost.
        """
        member = member_of(self)
        member.root.reshard_for_caller(member.group)

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Whether backward reduces gradients. False: they stay full and unreduced, and add up.

        For accumulation over microbatches without communication: False for all but the last. Costs
        the memory of the full gradients. ``zero_grad()`` clears them as any other gradient.
        """
        check_bool("set_requires_gradient_sync", "requires_gradient_sync", requires_gradient_sync)
        for group in _groups(self, recurse, "set_requires_gradient_sync"):
            group.configure(requires_gradient_sync=requires_gradient_sync)

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Whether parameters are freed after forward and gathered again for backward.

        False keeps them until backward. A forward without gradients has no backward to keep them
        for: they are freed at its end either way.
        """
        check_bool("set_reshard_after_forward", "reshard_after_forward", reshard_after_forward)
        for group in _groups(self, recurse, "set_reshard_after_forward"):
            group.configure(reshard_after_forward=reshard_after_forward)

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Whether parameters are freed after backward. False spares the next microbatch a gather.

        While they are kept, the next forward compares the shards with what was gathered from them; if
        any rank's have changed, all gather anew.
        """
        check_bool("set_reshard_after_backward", "reshard_after_backward", reshard_after_backward)
        for group in _groups(self, recurse, "set_reshard_after_backward"):
            group.configure(reshard_after_backward=reshard_after_backward)

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Whether the next backward is the last before the optimizer step; accepted and not needed.

        Every backward here ends with its reductions finished, so that ``.grad`` is complete and
        ``zero_grad()`` clears all of it, whether it is the last or not.
        """
        check_bool("set_is_last_backward", "is_last_backward", is_last_backward)

    def set_modules_to_forward_prefetch(self, modules: "Sequence[FSDPModule]") -> None:
        """Choose what this module's forward gathers ahead, in order, in place of the recorded order.

        An empty list turns prefetching off for this module. All ranks must choose the same.
        """
        chosen = _groups_of(modules, "set_modules_to_forward_prefetch")
        member_of(self).group.configure(forward_prefetch=chosen)
        member_of(self).root.plan_changed()

    def set_modules_to_backward_prefetch(self, modules: "Sequence[FSDPModule]") -> None:
        """Choose what this module's backward gathers ahead, in order, in place of the recorded order.

        An empty list turns prefetching off for this module. All ranks must choose the same.
        """
        chosen = _groups_of(modules, "set_modules_to_backward_prefetch")
        member_of(self).group.configure(backward_prefetch=chosen)
        member_of(self).root.plan_changed()

    def set_gradient_divide_factor(self, factor: float, *, recurse: bool = True) -> None:
        """Divide the sum of the ranks' gradients by ``factor`` instead of the world size."""
        if isinstance(factor, bool) or not isinstance(factor, (int, float)) or not 0 < factor < math.inf:
            raise ValueError(
                f"set_gradient_divide_factor: factor is {factor!r}; it must be a number above 0. The "
                "default is the number of ranks, which averages; 1.0 sums."
            )
        groups = list(_groups(self, recurse, "set_gradient_divide_factor"))
        for group in groups:
            if any(bucket.averages_itself for bucket in group.buckets):
                raise ValueError(
                    f"set_gradient_divide_factor: the gradients of {group.name} are reduced by a hook "
                    "(register_comm_hook), which divides by itself. Divide there."
                )
        for group in groups:
            group.configure(divide_factor=float(factor))

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """The former name of :meth:`set_gradient_divide_factor`."""
        FSDPModule.set_gradient_divide_factor(self, factor)

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Whether backward sums gradients over replicas, where the mesh has any.

        False: they are reduce-scattered over the shards only; the sums are kept, sharded, and join those of
        the next backward that all-reduces. ``zero_grad()`` clears them as any other gradient.
        """
        check_bool("set_requires_all_reduce", "requires_all_reduce", requires_all_reduce)
        for group in _groups(self, recurse, "set_requires_all_reduce"):
            group.configure(requires_all_reduce=requires_all_reduce)

    def set_reduce_scatter_unused_params(
        self, reduce_scatter_unused_params: bool, *, recurse: bool = True
    ) -> None:
        """Reduce zeros for parameters without a gradient: for ranks that use different parameters of a
        group.

        All ranks must run the module itself, and gather it in backward: its outputs must enter the loss. A
        parameter that no rank has used gets a gradient of zeros. The group then reduces at the end of
        backward, not as soon as its gradients are in.
        """
        check_bool(
            "set_reduce_scatter_unused_params", "reduce_scatter_unused_params", reduce_scatter_unused_params
        )
        for group in _groups(self, recurse, "set_reduce_scatter_unused_params"):
            group.configure(zeros_for_unused=reduce_scatter_unused_params)

    def set_may_be_unused(self, may_be_unused: bool = True) -> None:
        """Whether some ranks may leave out this module while others run it.

        It is then gathered when the sharded module around it runs, used or not, and freed with that; its
        gradients are reduced at the end of backward, with zeros from ranks that have none. Costs the memory
        of its full parameters, and those of sharded modules inside it, for that long.
        """
        check_bool("set_may_be_unused", "may_be_unused", may_be_unused)
        for group in _groups(self, True, "set_may_be_unused"):
            group.configure(may_be_unused=may_be_unused, zeros_for_unused=may_be_unused)
        member_of(self).root.prepare_anew()

    def set_reduce_ignored_params(self, reduce_ignored_params: bool, *, recurse: bool = True) -> None:
        """Average the gradients of ``ignored_params`` over the ranks at the end of each synchronised
        backward."""
        check_bool("set_reduce_ignored_params", "reduce_ignored_params", reduce_ignored_params)
        for group in _groups(self, recurse, "set_reduce_ignored_params"):
            group.configure(averages_ignored=reduce_ignored_params)

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Whether backward needs this module's full parameters. An embedding does not, for one.

        False spares a gather; a backward that uses the parameters after all raises autograd's error about
        variables "modified by an inplace operation": their memory was freed.
        """
        check_bool("set_unshard_in_backward", "unshard_in_backward", unshard_in_backward)
        member_of(self).group.configure(unshard_in_backward=unshard_in_backward)
        member_of(self).root.plan_changed()

    def set_keep_unsharded_storage(self, keep: bool, *, recurse: bool = True) -> None:
        """Whether full parameters keep their memory after they are resharded.

        True: their data pointers stay the same from the first gather on, as CUDA graphs need, for as long as
        dtypes, devices and collectives of the group stay what they are. Costs the memory of all full
        parameters of these modules at once. By default it is given back.
        """
        check_bool("set_keep_unsharded_storage", "keep", keep)
        for group in _groups(self, recurse, "set_keep_unsharded_storage"):
            group.configure(keeps_unsharded_storage=keep)
            group.unsharded.keep_storage(keep)

    def set_manual_backward_finalization(self, enabled: bool) -> None:
        """Whether the caller ends a backward, by :meth:`finalize_backward`. For the root module.

        For schedules in which the reduction of gradients is a step of its own. What backward reduces with
        synchronisation is in ``.grad`` when it returns, as ever; left to the caller's call are gradients of
        passes without synchronisation, and what ranks reduce at a moment that they have in common: modules of
        ``set_reduce_scatter_unused_params`` and ``set_may_be_unused``, and ``set_reduce_ignored_params``.

        Raises:
            RuntimeError: this is not the root module, a pass is running, or one was not finalized.
        """
        check_bool("set_manual_backward_finalization", "enabled", enabled)
        member = _root_member(self, "set_manual_backward_finalization")
        _finalization(member).end_by_hand(member.group, enabled)

    def finalize_backward(self, *, async_op: bool = False) -> GradientReductionHandle | None:
        """Reduce the gradients that backward passes have left, for groups that synchronise now.

        After ``set_manual_backward_finalization(True)``, once for all backward passes of an iteration, and
        before gradients are read or cleared. Collective: all ranks of the mesh call it. Before the first
        forward it does nothing.

        Args:
            async_op: return at once; the caller waits with the handle before gradients are used and before
                the next pass.

        Returns:
            None, or the handle where ``async_op`` is True.

        Raises:
            RuntimeError: this is not the root module, it ends its backwards by itself, a pass is running, or
                nobody has waited for the handle of an earlier call.

        Example::

            model.set_manual_backward_finalization(True)
            model.set_requires_gradient_sync(False)
            for batch in microbatches:
                model(batch).sum().backward()
            model.set_requires_gradient_sync(True)
            model.finalize_backward()
        """
        check_bool("finalize_backward", "async_op", async_op)
        member = _root_member(self, "finalize_backward")
        handle = _finalization(member).finalize(member.group)
        if async_op:
            return handle
        handle.wait()
        return None

    # --- the caller's own communication -----------------------------------------------------------

    def set_custom_all_gather(self, comm: Any) -> None:
        """Gather this module's group by ``comm``.

        Args:
            comm: an object with ``allocate(size, *, dtype, device) -> Tensor``, which gives the output
                buffer, and ``__call__(output_tensor, input_tensor, group, async_op=False) -> Work | None``.

        All parameters of the group then travel in one call, and are copied out of the buffer after it.
        """
        check_comm("set_custom_all_gather", comm)
        check_choice(self, "set_custom_all_gather", ["set_symm_mem_for_comm"])
        communicate(self, "set_custom_all_gather", make_all_gather=partial(made, CustomAllGather, comm))

    def set_custom_reduce_scatter(self, comm: Any) -> None:
        """Reduce-scatter the gradients of this module's group by ``comm``.

        Args:
            comm: an object with ``allocate``, as for the gather, which gives the input buffer, and
                ``__call__(output_tensor, input_tensor, group, op, async_op=False) -> Work | None``.

        ``op`` is always a sum; the division comes after it.
        """
        check_comm("set_custom_reduce_scatter", comm)
        check_choice(self, "set_custom_reduce_scatter", ["set_symm_mem_for_comm", "register_comm_hook"])
        communicate(
            self, "set_custom_reduce_scatter", make_reduce_scatter=partial(made, CustomReduceScatter, comm)
        )

    def set_all_reduce_hook(self, hook: Callable[[Tensor], None], *, stream: Any = None) -> None:
        """Call ``hook`` with this module's reduced gradients, before they are added to ``.grad``.

        It gets a flat tensor of the reduce dtype, once a reduction (once a dtype in groups of several), after
        the reduce-scatter and the sum over replicas, and changes it in place: by an all-reduce over replicas
        of its own, for one.

        Args:
            hook: the function.
            stream: a stream of the mesh's device to run it in; only without replicas in the mesh, which have
                a stream. One of ``torch.cpu``, where there are none, changes nothing.
        """
        if not callable(hook):
            raise TypeError(
                f"set_all_reduce_hook: hook is {hook!r}, a {type(hook).__name__}; pass a function."
            )
        group = member_of(self).group
        if stream is not None:
            if any(not bucket.mesh.replicate.is_alone for bucket in group.buckets):
                raise ValueError(
                    "set_all_reduce_hook: stream was given, but the mesh has replicas, whose all-reduce "
                    "runs in a stream of its own; the hook runs there as well. Leave stream out."
                )
            why = "the hook would not be ordered behind the reduction"
            check_of_device("set_all_reduce_hook", "Stream", stream, group.device, why)
            if has_streams(group.device):
                hook = in_stream(hook, stream)
        group.configure(all_reduce_hook=hook)
        member_of(self).root.plan_changed()

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Have the back end sum only, never average, for this module's group; the division comes after it."""
        check_bool("set_force_sum_reduction_for_comms", "enable", enable)
        for bucket in member_of(self).group.buckets:
            bucket.force_sums(enable)

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Take buffers to send from and receive into from the allocator of the process group, if it has one.

        All parameters of this module's group then travel packed, in one call and with a copy, instead of
        straight from where they lie to where they belong. A collective of the caller's own
        (``set_custom_all_gather``, ``set_custom_reduce_scatter``) that is set afterwards takes its place.
        """
        check_bool("set_allocate_memory_from_process_group_for_comm", "enable", enable)
        method = "set_allocate_memory_from_process_group_for_comm"
        group = member_of(self).group
        if enable:
            check_choice(self, method, CUSTOM)
            pgs = [b.mesh.shard.pg for b in group.buckets if b.mesh.shard.pg is not None]
            if all(c10d.can_allocate(pg, group.device) for pg in pgs):
                communicate(self, method, make_all_gather=with_memory, make_reduce_scatter=with_memory)
            group.choices.add(method)
        elif method in group.choices:
            comms = group.buckets[0].comms  # alike in all of them
            made = {name: getattr(comms, name) for name in ("make_all_gather", "make_reduce_scatter")}
            communicate(self, method, **{name: None for name in made if made[name] is with_memory})
            group.choices.discard(method)

    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> None:
        """Gather this module's group through symmetric memory. Needs CUDA and NCCL.

        All parameters of the group then travel packed, in one call and with a copy.
        """
        if backend != "NCCL":
            raise ValueError(f"set_symm_mem_for_comm: backend is {backend!r}; only 'NCCL' is supported.")
        group = member_of(self).group
        if group.device.type != "cuda":
            raise ValueError(
                f"set_symm_mem_for_comm: the mesh is of {group.device.type}, and symmetric memory of NCCL is "
                "memory of CUDA devices. Leave the call out."
            )
        check_choice(self, "set_symm_mem_for_comm", CUSTOM)
        communicate(self, "set_symm_mem_for_comm", make_all_gather=with_symmetric_memory)

    def set_separate_reduce_scatter_group(self, enable: bool = True, *, recurse: bool = True) -> None:
        """Whether reductions have a process group of their own, beside that of the gathers.

        Without this call they have on NCCL, where they would wait for each other otherwise. Collective: the
        process group is made at the next forward.
        """
        check_bool("set_separate_reduce_scatter_group", "enable", enable)
        for group in _groups(self, recurse, "set_separate_reduce_scatter_group"):
            group.configure(separate_reduce_group=enable)
        member_of(self).root.prepare_anew()

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """How many groups' full gradients may be on their way at once, beside those of the running group.

        More lets communication that is slower than the computation fall behind further, for their memory.
        Where large gradients leave before the rest of their group (``CommPolicy.part_bytes``), those that are
        there and under way take no more memory than so many of the largest groups.
        """
        caller = "set_reduce_scatter_max_input_buffers"
        if isinstance(max_input_buffers, bool) or not isinstance(max_input_buffers, int):
            raise TypeError(
                f"{caller}: max_input_buffers is {max_input_buffers!r}, a "
                f"{type(max_input_buffers).__name__}; pass an int."
            )
        if max_input_buffers < 1:
            raise ValueError(f"{caller}: max_input_buffers is {max_input_buffers}; it must be 1 or more.")
        for group in _groups(self, recurse, "set_reduce_scatter_max_input_buffers"):
            group.configure(max_reductions=max_input_buffers)
        member_of(self).root.prepare_anew()

    def set_post_optim_event(self, event: Any) -> None:
        """Have the gathers of the next forward wait for ``event`` only, recorded after the optimizer's step.

        Without it they wait for all that the computing stream has been given. For the root module; used once.

        Args:
            event: an event of the mesh's device: a ``torch.cuda.Event`` for a mesh of CUDA, or a
                ``torch.Event`` of that device. On the host it is needless and does nothing, and may be None,
                which is what ``torch.cpu.current_stream().record_event()`` returns.

        Raises:
            TypeError: ``event`` is no event of the mesh's device, which the gathers would not wait for.

        Example::

            with torch.cuda.stream(side):
                optimizer.step()
            model.set_post_optim_event(side.record_event())
            optimizer.zero_grad()
        """
        member = member_of(self)
        device = member.group.device
        if event is not None or has_streams(device):
            why = "gathers would not wait for the optimizer"
            check_of_device("set_post_optim_event", "Event", event, device, why)
        member.root.post_optim_event = event

    def reset_iter_state(self) -> None:
        """Forget what a failed iteration left behind, gradients that wait to be reduced included.

        The next iteration runs without it as well: a failure is noticed and its own gradients dropped. This
        drops those of earlier microbatches too.

        Raises:
            RuntimeError: this is not the root module.
        """
        _root_member(self, "reset_iter_state").root.reset()


if TYPE_CHECKING:

    class ShardedModule(FSDPModule, nn.Module, Any):
        """What ``fully_shard`` returns, as type checkers see it: an FSDPModule of the module's own class.

        Python's types have no intersections. A class with ``Any`` among its bases is accepted wherever the
        module's own class is expected, while calls of FSDPModule's and nn.Module's methods are checked.
        """

        def __getattr__(self, name: str) -> Any: ...
else:
    ShardedModule = FSDPModule


def under_compile(module: nn.Module) -> nn.Module:
    """The sharded module that ``torch.compile`` was given to return ``module``; else as ``uncompiled``.

    What it returned may have been sharded itself, and is then given back.
    """
    while not isinstance(module, FSDPModule) and (inner := module._modules.get("_orig_mod")) is not None:
        module = inner
    return module


def is_sharded(module: Any) -> bool:
    """True if ``module`` is, or what ``torch.compile`` was given to return it."""
    return isinstance(module, nn.Module) and isinstance(under_compile(module), FSDPModule)


_MOMENTARY = ("set_requires_gradient_sync", "set_requires_all_reduce", "set_reshard_after_backward")
"""What callers set from one microbatch to the next, and ranks do not compare each time."""


def _root_member(module: Any, caller: str) -> Member:
    """The member of ``module``, which has to be the root."""
    member = member_of(module)
    if member.root.group is not member.group:
        raise RuntimeError(
            f"{caller}: {member.group.name} is not the root, but inside a sharded module that drives it. "
            "Call it on the outermost sharded module."
        )
    return member


def _finalization(member: Member) -> ManualFinalization:
    found = member.root.feature(ManualFinalization)
    assert found is not None
    return found


def _groups(module: Any, recurse: bool, caller: str) -> Iterator[ParameterGroup]:
    """What a setter acts on."""
    check_bool(caller, "recurse", recurse)
    members = sharded_members(module) if recurse else [member_of(module)]
    for member in members if caller not in _MOMENTARY else ():
        member.root.plan_changed()
    return (member.group for member in members)


def _groups_of(modules: Any, caller: str) -> tuple[ParameterGroup, ...]:
    if isinstance(modules, (nn.Module, str)) or not isinstance(modules, Sequence):
        raise TypeError(f"{caller}: modules is a {type(modules).__name__}; pass a list of sharded modules.")
    for index, module in enumerate(modules):
        if not is_sharded(module):
            raise ValueError(
                f"{caller}: {type(module).__name__} at [{index}] is not sharded, so there is nothing to "
                "prefetch. Call fully_shard on it first, or leave it out."
            )
    return tuple(member_of(under_compile(module)).group for module in modules)


def check_bool(caller: str, name: str, value: object) -> None:
    """Refuse what is neither True nor False."""
    if not isinstance(value, bool):
        raise TypeError(f"{caller}: {name} is {value!r}, a {type(value).__name__}; pass True or False.")
