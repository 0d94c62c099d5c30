"""FSDPModule: the methods of a sharded module, and what type checkers take such a module for."""

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from shardwise.arguments import check_flags, check_number, check_type
from shardwise.comm.communicators import Communicator, unless_alone
from shardwise.comm.custom import AllocatorPool, CustomCollectives, PooledCollectives, SymmetricMemoryPool
from shardwise.comm.streams import has_streams, in_stream, is_of_device
from shardwise.engine.module_state import (
    ModuleState,
    module_state_of,
    module_states_of,
    sharded_module_states,
)
from shardwise.engine.reduction_queue import GradientReductionHandle
from shardwise.groups.group import ParameterGroup
from shardwise.groups.states import is_of_microbatch
from shardwise.torch_compat import c10d


class UnshardHandle:
    """An unshard in progress, returned by :meth:`FSDPModule.unshard`."""

    def __init__(self, group: ParameterGroup) -> None:
        self._group = group

    def wait(self) -> None:
        """Wait for the unshard; from then on the module's attributes are the full parameters.

        Does nothing if they are unsharded already, or were resharded since.

        Raises:
            RuntimeError: the all-gather failed, usually because another rank did.

        Example::

            handle = model.blocks[0].unshard(async_op=True)
            batch = next(batches)  # the all-gather runs meanwhile
            handle.wait()
        """
        self._group.unsharded.wait_if_on_the_way()


class FSDPModule:
    """Mixed into the class of every module given to ``fully_shard``.

    A module's own parameter group holds the parameters that its ``fully_shard`` call took; sharded modules
    inside it have groups of their own. All setters have this in common:

    - ``recurse``: also set it for all sharded modules inside this one (default True). A setter without this
      argument acts on the module's own group.
    - A flag that is neither True nor False raises ``TypeError``, and changes nothing.
    - A setting stays until it is changed. If it decides which collectives run, it must be the same on all
      ranks. The next forward with gradients compares settings, except, after the first forward, those that
      may change with each microbatch (gradient synchronisation, all-reduce, reshard after backward).
    - A setter of the caller's own collectives, or of the memory for them, raises ``RuntimeError`` while the
      group is unsharded or has unreduced gradients, and ``ValueError`` after another that it cannot be
      combined with: each brings buffers or collectives of its own.

    Example::

        for microbatch in microbatches:
            is_last = microbatch is microbatches[-1]
            model.set_requires_gradient_sync(is_last)
            model.set_reshard_after_backward(is_last)
            model(microbatch).sum().backward()
        optimizer.step()
    """

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> Iterator[str]:
        """``DistributedDataParallel`` makes a set of this before it does anything else, which raises."""
        yield from ()
        raise TypeError(
            f"DistributedDataParallel: {module_state_of(self).group.name} is sharded, and this library "
            "reduces its gradients. Train the model as it is, without a wrapper. To replicate as well, shard "
            'it with strategy="hybrid" or on a mesh with a dimension to replicate over; strategy="ddp" '
            "replicates alone."
        )

    # --- unshard and reshard ----------------------------------------------------------------------

    def unshard(self, async_op: bool = False) -> UnshardHandle:
        """Unshard this module's own parameter group, but not those of sharded modules inside it.

        The module shows full parameters until its forward has used them, or until :meth:`reshard`. They take
        the memory of the whole group in its compute dtype. Collective: costs one all-gather of the group,
        which all ranks of the mesh must enter in the same order.

        Args:
            async_op: True returns while the all-gather runs; the next forward waits for it, or the handle
                does. False (default) waits here.

        Returns:
            A handle whose ``wait()`` returns once the full parameters may be used.

        Raises:
            TypeError: ``async_op`` is not a bool.
            RuntimeError: parameters have no values yet (meta device), were added after ``fully_shard``, or
                are summoned by ``unsharded()``.

        Example::

            handle = model.unshard(async_op=True)
            batch = next(batches)  # the all-gather runs meanwhile
            handle.wait()
            output = model(batch)
        """
        check_flags("unshard", async_op=async_op)
        module_state = module_state_of(self)
        module_state.root.unshard(module_state.group)
        handle = UnshardHandle(module_state.group)
        if not async_op:
            handle.wait()
        return handle

    def reshard(self) -> None:
        """Reshard this module's own parameter group: free its full parameters.

        Needs no communication. Does nothing if the group is sharded; waits for an all-gather in flight.

        Raises:
            RuntimeError: a full parameter was changed in place, and the change would be lost; or
                ``inference()`` keeps the group unsharded.

        Example::

            model.blocks[0].unshard()
            norm = model.blocks[0].up.weight.norm()  # of the full weight
            model.blocks[0].reshard()
        """
        module_state = module_state_of(self)
        module_state.root.reshard(module_state.group)

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Choose whether parameters are resharded after forward; overrides the argument of ``fully_shard``.

        A forward without gradients reshards at its end in either case: no backward will use the parameters.

        Args:
            reshard_after_forward: True frees the full parameters after forward and unshards them again for
                backward: least memory, one more all-gather per group. False keeps them until backward.
        """
        _set_flag(self, "reshard_after_forward", reshard_after_forward, recurse)

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Choose whether parameters are resharded after backward (by default they are).

        The next forward unshards again what has changed meanwhile. After the step of an optimizer of torch's,
        or of a class derived from one, these are all trainable groups. After a backward without gradient
        synchronisation (``set_requires_gradient_sync(False)``, ``no_sync``), weights may not change, and
        nothing is unsharded. In all other cases, such as a step that you write yourself, each rank compares
        its shards, and an all-reduce of one flag per group shows whether those of any rank have changed; the
        host waits for the device.

        Args:
            reshard_after_backward: False keeps the full parameters, and their memory, for the next
                microbatch, whose forward then needs no all-gather.

        Raises:
            RuntimeError: in the next forward: parameters were changed between microbatches without
                synchronisation. A CUDA device reports it later, unless the change was one that torch counts.
        """
        _set_flag(self, "reshard_after_backward", reshard_after_backward, recurse)

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Choose whether backward unshards this module's own group (by default it does).

        Args:
            unshard_in_backward: False saves an all-gather if backward does not read the parameters, as for an
                embedding. A backward that does read them raises autograd's error about variables
                "modified by an inplace operation", since their memory was freed.
        """
        _set_flag(self, "unshard_in_backward", unshard_in_backward, recurse=False)

    def set_keep_unsharded_storage(self, keep: bool, *, recurse: bool = True) -> None:
        """Choose whether full parameters keep their memory while they are resharded (by default they do not).

        Costs the memory of the full parameters of all these groups at once. All-gathers still run.

        Args:
            keep: True keeps the data pointers of full parameters the same from the first unshard on, as CUDA
                graphs need, until the group's dtypes, device or collectives change. False frees the memory
                of groups that are sharded at once.
        """
        check_flags("set_keep_unsharded_storage", keep=keep, recurse=recurse)
        for module_state in _module_states(self, recurse):
            module_state.group.unsharded.keep_storage(keep)

    # --- prefetch ---------------------------------------------------------------------------------

    def set_modules_to_forward_prefetch(self, modules: "Sequence[FSDPModule]") -> None:
        """Choose what this module's forward prefetches, in place of the recorded order.

        Each prefetched group holds its full parameters from then on. ``CommPolicy.max_prefetched`` still
        limits the number of these groups. All ranks must choose the same.

        Args:
            modules: sharded modules of the same model, whose groups are unsharded in this order when this
                module's forward begins. An empty list turns forward prefetch off for this module.

        Raises:
            TypeError: ``modules`` is not a list or tuple.
            ValueError: a module in it is not sharded.
            RuntimeError: in the next forward: a module in it belongs to another model.

        Example::

            model.blocks[0].set_modules_to_forward_prefetch([model.blocks[1], model.blocks[2]])
            model(batch).sum().backward()
        """
        _set_prefetch(self, "forward_prefetch", modules)

    def set_modules_to_backward_prefetch(self, modules: "Sequence[FSDPModule]") -> None:
        """Choose what this module's backward prefetches, in place of the recorded order.

        Otherwise the same as :meth:`set_modules_to_forward_prefetch`.

        Args:
            modules: sharded modules of the same model, in the order in which to unshard them when this
                module's backward begins.
        """
        _set_prefetch(self, "backward_prefetch", modules)

    # --- which gradients are reduced --------------------------------------------------------------

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Choose whether backward reduces gradients (by default it does).

        Without synchronisation a microbatch needs no reduce-scatter, and each rank holds the full gradients
        of these groups until a backward with synchronisation reduces the sums. ``zero_grad()`` clears them
        like any other gradient. Also sets :meth:`set_requires_all_reduce` to the same.

        Args:
            requires_gradient_sync: False lets full gradients accumulate, unreduced. True reduces them at the
                next backward.
        """
        _set_flag(self, "requires_gradient_sync", requires_gradient_sync, recurse)
        _configure(self, recurse, requires_all_reduce=requires_gradient_sync)

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Choose whether backward all-reduces gradients over the replicas of the mesh (by default it does).

        Without the all-reduce, gradients are reduce-scattered over the shards only. The sharded sums, which
        take the memory of a sharded gradient, join those of the next backward that all-reduces.
        ``zero_grad()`` clears them like any other gradient. Changes nothing on a mesh without replicas.

        Args:
            requires_all_reduce: False leaves the all-reduce to a later backward.
        """
        _set_flag(self, "requires_all_reduce", requires_all_reduce, recurse)

    def set_reduce_scatter_unused_params(
        self, reduce_scatter_unused_params: bool, *, recurse: bool = True
    ) -> None:
        """Choose whether parameters without a gradient are reduced as zeros (by default they are left out).

        Use it if ranks use different parameters of one group. The group then reduces at the end of backward,
        not as soon as its gradients are complete, so more full gradients are in memory at once. All ranks
        must run the module itself, and its outputs must enter the loss. A parameter that no rank has used
        gets a gradient of zeros.

        Args:
            reduce_scatter_unused_params: True lets every rank take part with zeros.
        """
        flag, setting = "reduce_scatter_unused_params", "zeros_for_unused"
        _set_flag(self, flag, reduce_scatter_unused_params, recurse, setting)

    def set_may_be_unused(self, may_be_unused: bool = True) -> None:
        """Choose whether some ranks may skip this module while others run it.

        Its groups, and those of sharded modules inside it, are then unsharded and resharded together with
        the sharded module around it, whether they run or not: their full parameters stay in memory for that
        long. Their gradients are reduced at the end of backward, with zeros from ranks that have none.

        Args:
            may_be_unused: True (default) allows it; False has all ranks run the module again.

        Raises:
            RuntimeError: in forward: no sharded module around this one is run by all ranks.
        """
        _set_flag(self, "may_be_unused", may_be_unused, recurse=True)
        module_state_of(self).root.start_over()

    def set_reduce_ignored_params(self, reduce_ignored_params: bool, *, recurse: bool = True) -> None:
        """Choose whether the gradients of ``ignored_params`` are averaged over the ranks (by default not).

        Costs one all-reduce per dtype and mesh dimension for each group that ignores parameters, at the end
        of each backward that synchronises. A trainable parameter without a gradient takes part with zeros.

        Args:
            reduce_ignored_params: True averages them.
        """
        _set_flag(self, "reduce_ignored_params", reduce_ignored_params, recurse, "averages_ignored")

    # --- how they are reduced ---------------------------------------------------------------------

    def set_gradient_divide_factor(self, factor: float, *, recurse: bool = True) -> None:
        """Divide the sum of the ranks' gradients by ``factor`` instead of the number of ranks.

        Args:
            factor: a finite number above 0. The number of ranks (default) averages; 1.0 sums.

        Raises:
            TypeError: ``factor`` is no number.
            ValueError: it is not above 0 or not finite, or a function given to ``register_comm_hook`` reduces
                the gradients, since that function also divides.

        Example::

            model.set_gradient_divide_factor(1.0)  # sum, for losses that are divided by all tokens
            (model(batch).sum() / num_tokens).backward()
        """
        caller = "set_gradient_divide_factor"
        wanted = "a number above 0: the number of ranks averages, 1.0 sums"
        check_number(caller, "factor", factor, wanted, above=0, kinds=(int, float))
        check_flags(caller, recurse=recurse)
        for module_state in _module_states(self, recurse):
            group = module_state.group
            if any(bucket.communication.averages_itself for bucket in group.buckets):
                raise ValueError(
                    f"{caller}: the gradients of {group.name} are reduced by a hook (register_comm_hook), "
                    "which divides by itself. Divide there."
                )
        _configure(self, recurse, divide_factor=float(factor))

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """Do the same as :meth:`set_gradient_divide_factor`; this is FSDP2's former name for it.

        Args:
            factor: a finite number above 0.
        """
        FSDPModule.set_gradient_divide_factor(self, factor)

    def set_all_reduce_hook(self, hook: Callable[[Tensor], None], *, stream: Any = None) -> None:
        """Call ``hook`` with the reduced gradients of this module's own group, before ``.grad`` gets them.

        It runs after the reduce-scatter, and after the all-reduce over the mesh's replicas, once in each
        reduction for each mesh and reduce dtype of the group.

        Args:
            hook: gets this rank's sharded gradients as one flat tensor of the reduce dtype and changes it in
                place, for example by an all-reduce over replicas that the mesh does not have.
            stream: the stream of the mesh's device to run ``hook`` in; only on a mesh without replicas,
                whose all-reduce has a stream that the hook shares. None (default): the stream of the
                reduction. A ``torch.cpu`` stream changes nothing.

        Raises:
            TypeError: ``hook`` is not callable, or ``stream`` is not a stream of the mesh's device.
            ValueError: ``stream`` was given, and the mesh has replicas.
        """
        check_type("set_all_reduce_hook", "hook", hook, "a function", Callable)
        group = module_state_of(self).group
        if stream is not None:
            if any(not bucket.mesh.replicate_axis.is_alone for bucket in group.buckets):
                raise ValueError(
                    "set_all_reduce_hook: stream was given, but the mesh has replicas, whose all-reduce "
                    "runs in a stream of its own; the hook runs there as well. Leave stream out."
                )
            why = "the hook would not be ordered behind the reduction"
            check_of_device("set_all_reduce_hook", "Stream", stream, group.device, why)
            if has_streams(group.device):
                hook = in_stream(hook, stream)
        group.configure(all_reduce_hook=hook)
        module_state_of(self).root.plan_check.plan_changed()

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Choose whether the back end only sums the gradients of this module's own group.

        The division is then a separate operation instead of part of the collective.

        Args:
            enable: True for back ends that cannot average. False (the initial state) averages where the back
                end can.
        """
        check_flags("set_force_sum_reduction_for_comms", enable=enable)
        for bucket in module_state_of(self).group.buckets:
            bucket.communication.force_sums(enable)

    # --- the caller's own collectives and memory --------------------------------------------------

    def set_custom_all_gather(self, comm: Any) -> None:
        """Unshard this module's own group with the caller's all-gather.

        All parameters of the group are then packed and sent in one call. This costs a buffer of the group's
        full parameters, and a copy out of it.

        Args:
            comm: an object with ``allocate(size, *, dtype, device) -> Tensor``, which returns the output
                buffer, and ``__call__(output_tensor, input_tensor, group, async_op=False) -> Work | None``.

        Raises:
            TypeError: ``comm`` is a class, or lacks one of the two methods.

        Example::

            class AllGather:
                def allocate(self, size, *, dtype, device):
                    return torch.empty(size, dtype=dtype, device=device)

                def __call__(self, output_tensor, input_tensor, group, async_op=False):
                    outputs = list(output_tensor.chunk(group.size()))
                    return dist.all_gather(outputs, input_tensor, group=group, async_op=async_op)

            model.set_custom_all_gather(AllGather())
        """
        check_comm("set_custom_all_gather", comm)
        check_choice(self, "set_custom_all_gather", ["set_symm_mem_for_comm"])
        communicate(self, "set_custom_all_gather", make_all_gather=unless_alone(CustomCollectives, comm))

    def set_custom_reduce_scatter(self, comm: Any) -> None:
        """Reduce the gradients of this module's own group with the caller's reduce-scatter.

        The counterpart of :meth:`set_custom_all_gather`. All gradients of one dtype are then packed and sent
        in one call. This costs a buffer of the group's full gradients, and a copy into it. The division by
        the number of ranks comes after the call (for float16, partly before it, so that the sum does not
        overflow).

        Args:
            comm: an object with ``allocate(size, *, dtype, device) -> Tensor``, which returns the input
                buffer, and ``__call__(output_tensor, input_tensor, group, op, async_op=False) ->
                Work | None``. ``op`` is always ``ReduceOp.SUM``.

        Raises:
            TypeError: ``comm`` is a class, or lacks one of the two methods.
        """
        check_comm("set_custom_reduce_scatter", comm)
        check_choice(self, "set_custom_reduce_scatter", ["set_symm_mem_for_comm", "register_comm_hook"])
        communicate(
            self, "set_custom_reduce_scatter", make_reduce_scatter=unless_alone(CustomCollectives, comm)
        )

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Choose whether this module's own group communicates from memory of the process group's allocator.

        All its parameters, and all its gradients, are then packed and sent in one call each, which costs a
        copy. Shards are all-gathered in place, so that the back end reads and writes parameters only in that
        memory. Changes nothing if the back end has no allocator. A custom all-gather or reduce-scatter that
        is set afterwards replaces it.

        Args:
            enable: True allocates there. False (the initial state) goes back to ordinary memory.
        """
        method = "set_allocate_memory_from_process_group_for_comm"
        check_flags(method, enable=enable)
        allocate_from_process_group(self, method, enable)

    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> None:
        """Unshard this module's own group through symmetric memory. Needs CUDA and NCCL.

        All parameters of the group are then packed and sent in one call: each rank copies its shard to its
        place in a buffer of full parameters, the call fills the rest, and parameters are copied out of it.
        The ranks set up the buffer together in the first forward, and keep it; groups of one size share it.
        NCCL chooses faster kernels for such memory. With NCCL 2.28 or later, and ranks that NVLink connects,
        it can use the copy engines instead of kernels, so that all-gathers do not slow the computation. The
        process group of the mesh must be made for that::

            options = dist.ProcessGroupNCCL.Options()
            options.config.cta_policy = dist.ProcessGroupNCCL.NCCL_CTA_POLICY_ZERO
            dist.init_process_group("nccl", device_id=device, pg_options=options)

        This has run on a GPU only with one rank.

        Args:
            backend: "NCCL" (default), the only one supported.

        Raises:
            ValueError: ``backend`` is another, or the mesh is not of CUDA devices.
            RuntimeError: symmetric memory of another back end was allocated before in this process, which can
                have only one such back end.
        """
        if backend != "NCCL":
            raise ValueError(f"set_symm_mem_for_comm: backend is {backend!r}; only 'NCCL' is supported.")
        group = module_state_of(self).group
        if group.device.type != "cuda":
            raise ValueError(
                f"set_symm_mem_for_comm: the mesh is of {group.device.type}, and symmetric memory of NCCL is "
                "memory of CUDA devices. Leave the call out."
            )
        use_symmetric_memory(self, "set_symm_mem_for_comm")

    def set_separate_reduce_scatter_group(self, enable: bool = True, *, recurse: bool = True) -> None:
        """Choose whether reduce-scatters have a process group of their own, apart from the all-gathers.

        By default they have one only on NCCL, where the collectives of one communicator run one after the
        other. The next forward creates the process group, which is collective, and the next forward with
        gradients connects it. A second communicator needs memory on each device: 0.4 GB with the defaults of
        NCCL 2.28 on an H200, which ``torch.cuda.max_memory_allocated`` does not show. ``NCCL_BUFFSIZE`` and
        ``NCCL_MAX_CTAS`` make it smaller. We have not measured the time that it saves.

        Args:
            enable: True (default) creates one; False shares that of the all-gathers.

        Raises:
            RuntimeError: in the next forward: ``unshard()`` has left a group unsharded that would change, or
                it has unreduced gradients.
        """
        check_flags("set_separate_reduce_scatter_group", enable=enable, recurse=recurse)
        _configure(self, recurse, separate_reduce_group=enable)
        module_state_of(self).root.start_over()

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """Limit how many groups' full gradients may be in flight, beside those of the group in backward.

        With a larger limit, communication that is slower than the computation may fall further behind, at the
        cost of memory for that many groups' full gradients. If large gradients are reduced before the rest of
        their group (``CommPolicy.part_bytes``), those present and in flight need no more memory than
        ``max_input_buffers`` of the largest groups and a part.

        Args:
            max_input_buffers: how many groups, 1 (default) or more.

        Raises:
            TypeError: ``max_input_buffers`` is not an int.
            ValueError: ``max_input_buffers`` is below 1.
        """
        caller = "set_reduce_scatter_max_input_buffers"
        wanted = "a number of groups, 1 or more"
        check_number(caller, "max_input_buffers", max_input_buffers, wanted, above=0)
        check_flags(caller, recurse=recurse)
        _configure(self, recurse, max_reductions=max_input_buffers)
        module_state_of(self).root.start_over()

    # --- the optimizer, and the end of a backward -------------------------------------------------

    def set_post_optim_event(self, event: Any) -> None:
        """Have the all-gathers of the next forward wait only for ``event``, not for the whole compute stream.

        The event is used once. Call it on the root module. Saves, loads, ``full_state_dict`` and ``EMA`` wait
        for it on the current stream; other code that reads or changes the shards before that forward must
        wait itself. If shards were changed, forward waits for the whole compute stream as well.

        Args:
            event: of the mesh's device, recorded after the optimizer step. On a CPU mesh it does nothing and
                may be None, which is what ``torch.cpu.current_stream().record_event()`` returns.

        Raises:
            TypeError: ``event`` is not an event of the mesh's device; the all-gathers would not wait for it.

        Example::

            with torch.cuda.stream(side):
                optimizer.step()
            model.set_post_optim_event(side.record_event())
            optimizer.zero_grad()
        """
        module_state = module_state_of(self)
        device = module_state.group.device
        if event is not None or has_streams(device):
            why = "all-gathers would not wait for the optimizer"
            check_of_device("set_post_optim_event", "Event", event, device, why)
        module_state.root.expect(event)

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Accept FSDP2's hint about the last backward before the optimizer step; it changes nothing.

        Args:
            is_last_backward: True or False.
        """
        check_flags("set_is_last_backward", is_last_backward=is_last_backward)

    def set_manual_backward_finalization(self, enabled: bool) -> None:
        """Choose whether the caller ends backwards, with :meth:`finalize_backward`. Call it on the root.

        Use it for pipeline schedules in which the reduction of gradients is a separate step. Gradients that a
        backward reduces as it runs are still in ``.grad`` when it returns. Two kinds of gradients stay
        unreduced in memory until the caller reduces them: full gradients of backwards without
        synchronisation, and those that ranks reduce at the same moment (of modules with
        ``set_reduce_scatter_unused_params`` or ``set_may_be_unused``, and of ``set_reduce_ignored_params``).

        Args:
            enabled: True leaves these reductions to ``finalize_backward()``. False (the initial state) runs
                them at the end of each backward.

        Raises:
            RuntimeError: this is not the root module, a forward or backward is running, or an earlier
                backward was not finalized.
        """
        check_flags("set_manual_backward_finalization", enabled=enabled)
        module_state = _root_module_state(self, "set_manual_backward_finalization")
        module_state.root.end_by_hand(module_state.group, enabled)

    def finalize_backward(self, *, async_op: bool = False) -> GradientReductionHandle | None:
        """Reduce the gradients that earlier backwards left, in groups that synchronise gradients now.

        Call it after ``set_manual_backward_finalization(True)``, once for all backwards of an iteration and
        before gradients are read or cleared. It frees the full gradients. Collective: one reduce-scatter per
        group, which all ranks of the mesh must enter. Before the first forward it does nothing.

        Args:
            async_op: True returns while the reductions run; wait with the handle before the gradients are
                used and before the next forward. False (default) waits here.

        Returns:
            None, or a handle if ``async_op`` is True.

        Raises:
            TypeError: ``async_op`` is not a bool.
            RuntimeError: this is not the root module, finalization is not manual, a forward or backward is
                running, or the handle of an earlier call was not waited for.

        Example::

            model.set_manual_backward_finalization(True)
            model.set_requires_gradient_sync(False)
            for microbatch in microbatches:
                model(microbatch).sum().backward()
            model.set_requires_gradient_sync(True)
            model.finalize_backward()
        """
        check_flags("finalize_backward", async_op=async_op)
        module_state = _root_module_state(self, "finalize_backward")
        handle = module_state.root.finalize(module_state.group)
        if async_op:
            return handle
        handle.wait()
        return None

    def reset_iter_state(self) -> None:
        """Drop what a failed iteration left behind, including gradients that wait to be reduced.

        After ``zero_grad()`` the next iteration runs without this call as well: it notices the failure and
        drops that backward's gradients. This call also drops, and frees, the unreduced gradients of earlier
        microbatches. Call it on the root module; it needs no communication.

        Raises:
            RuntimeError: this is not the root module.

        Example::

            try:
                model(batch).sum().backward()
            except torch.OutOfMemoryError:
                model.reset_iter_state()
        """
        _root_module_state(self, "reset_iter_state").root.reset()


# --- what several methods do ----------------------------------------------------------------------


def _module_states(module: Any, recurse: bool) -> list[ModuleState]:
    return sharded_module_states(module) if recurse else [module_state_of(module)]


def _configure(module: Any, recurse: bool, **setting: Any) -> None:
    """Change a setting of the groups that a setter acts on.

    Ranks compare it in the next forward, unless it is one that changes from one microbatch to the next.
    """
    for module_state in _module_states(module, recurse):
        module_state.group.configure(**setting)
        if not all(map(is_of_microbatch, setting)):
            module_state.root.plan_check.plan_changed()


def _set_flag(module: Any, flag: str, value: bool, recurse: bool, setting: str | None = None) -> None:
    """What the setter of ``flag`` does: change the setting of this or another name."""
    check_flags(f"set_{flag}", **{flag: value}, recurse=recurse)
    _configure(module, recurse, **{setting or flag: value})


def _set_prefetch(module: Any, setting: str, modules: Any) -> None:
    """Have the group of ``module`` prefetch those of ``modules``, a list of sharded modules."""
    chosen = module_states_of(f"set_modules_to_{setting}", modules)
    module_state = module_state_of(module)
    module_state.group.configure(**{setting: tuple(each.group for each in chosen)})
    module_state.root.start_over()


def _root_module_state(module: Any, caller: str) -> ModuleState:
    """The state of ``module``, which has to be the root."""
    module_state = module_state_of(module)
    if module_state.root.group is not module_state.group:
        raise RuntimeError(
            f"{caller}: {module_state.group.name} is not the root, but inside a sharded module that drives "
            "it. Call it on the outermost sharded module."
        )
    return module_state


if TYPE_CHECKING:

    class ShardedModule(FSDPModule, nn.Module, Any):
        """What ``fully_shard`` returns, as type checkers see it: an FSDPModule of the module's own class.

        Python's types have no intersections. A class with ``Any`` among its bases is accepted wherever the
        module's own class is expected, while calls of FSDPModule's and nn.Module's methods are checked.
        """

        def __getattr__(self, name: str) -> Any: ...
else:
    ShardedModule = FSDPModule


CUSTOM = ("set_custom_all_gather", "set_custom_reduce_scatter", "register_comm_hook")
MEMORY = ("set_allocate_memory_from_process_group_for_comm", "set_symm_mem_for_comm")


# --- the caller's own collectives and memory, checked and set for a group -------------------------


def check_choice(module: Any, method: str, others: Sequence[str]) -> None:
    """Refuse ``method`` if one of ``others``, which it cannot be combined with, was called before."""
    group = module_state_of(module).group
    for other in others:
        if other in group.choices:
            raise ValueError(
                f"{method}: {other} has set how {group.name} communicates, and the two cannot be "
                "combined: each brings its own buffers or collectives. Use one of the two."
            )


def communicate(module: Any, method: str, **choices: Any) -> None:
    """Give all buckets of a module's own group these ``choices``, fields of CommOptions."""
    module_state = module_state_of(module)
    module_state.group.replan(lambda bucket: bucket.communicate(**choices))
    module_state.group.choices.add(method)
    module_state.root.start_over()


def allocate_from_process_group(module: Any, method: str, enable: bool) -> None:
    """Choose whether a module's own group communicates from memory of its process groups' allocators."""
    group = module_state_of(module).group
    if enable:
        check_choice(module, method, CUSTOM)
        pgs = [b.mesh.shard_axis.pg for b in group.buckets if b.mesh.shard_axis.pg is not None]
        if all(c10d.can_allocate(pg, group.device) for pg in pgs):
            communicate(module, method, make_all_gather=with_memory, make_reduce_scatter=with_memory)
        group.choices.add(method)
    elif method in group.choices:
        options = group.buckets[0].communication.options  # alike in all of them
        chosen = {name: getattr(options, name) for name in ("make_all_gather", "make_reduce_scatter")}
        communicate(module, method, **{name: None for name in chosen if chosen[name] is with_memory})
        group.choices.discard(method)


def use_symmetric_memory(module: Any, method: str) -> None:
    """Have a module's own group be unsharded through symmetric memory of NCCL."""
    group = module_state_of(module).group
    check_choice(module, method, CUSTOM)
    try:
        c10d.choose_symmetric_memory_of_nccl(group.device)
    except RuntimeError as error:
        raise RuntimeError(
            f"{method}: symmetric memory of this process belongs to another back end than NCCL ({error}), "
            f"and NCCL's collectives, by which {group.name} is unsharded, cannot use that. Call this before "
            "anything else allocates symmetric memory."
        ) from error
    communicate(module, method, make_all_gather=with_symmetric_memory)


@unless_alone
def with_memory(pg: Any, device: torch.device) -> Communicator:
    """Plain collectives over memory from the process group's allocator."""

    def allocate(size: tuple[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return c10d.allocate_from_group(pg, size[0], dtype, device)

    return PooledCollectives(pg, device, AllocatorPool(allocate))


@unless_alone
def with_symmetric_memory(pg: Any, device: torch.device) -> Communicator:
    """Plain collectives over symmetric memory."""
    return PooledCollectives(pg, device, SymmetricMemoryPool(pg))


def check_comm(caller: str, comm: Any) -> None:
    """Refuse an object that cannot serve as a custom collective."""
    if isinstance(comm, type) or not (callable(comm) and callable(getattr(comm, "allocate", None))):
        raise TypeError(
            f"{caller}: comm is {comm!r}; pass an object with a method allocate(size, *, dtype, device) that "
            "can be called with the tensors and the process group."
        )


def check_of_device(caller: str, kind: str, value: Any, device: torch.device, why: str) -> None:
    """Refuse ``value`` unless it is a ``kind`` ("Stream" or "Event") of ``device``; ``why`` is the reason."""
    if not is_of_device(value, kind, device):
        found = f"{value!r} ({type(value).__module__}.{type(value).__qualname__})"
        raise TypeError(
            f"{caller}: {kind.lower()} is {found}, not one of '{device.type}', the device of the mesh: "
            f"{why}. Pass a torch.{device.type}.{kind}."
        )
