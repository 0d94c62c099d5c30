"""The setters of FSDPModule that choose how tensors travel: divisors, custom collectives, memory, streams."""

import math
from collections.abc import Callable
from typing import Any

from torch import Tensor

from shardwise.comm.communicators import unless_alone
from shardwise.comm.custom import CustomCollectives
from shardwise.comm.streams import has_streams, in_stream
from shardwise.engine.module_state import module_state_of
from shardwise.fsdp_module.arguments import check_bool, groups_to_configure
from shardwise.fsdp_module.comm_choices import (
    allocate_from_process_group,
    check_choice,
    check_comm,
    check_of_device,
    communicate,
    use_symmetric_memory,
)


class CommunicationSetters:
    """The part of FSDPModule that is about communication."""

    # --- what is reduced --------------------------------------------------------------------------

    def set_gradient_divide_factor(self, factor: float, *, recurse: bool = True) -> None:
        """Divide the sum of the ranks' gradients by ``factor`` instead of the number of ranks.

        Args:
            factor: a finite number above 0. The number of ranks (default) averages; 1.0 sums.
            recurse: also set it for all sharded modules inside this one (default True).

        Raises:
            ValueError: ``factor`` is anything else, or the gradients are reduced by a function that was given
                to ``register_comm_hook``: it divides by itself.
            TypeError: ``recurse`` is not a bool.

        Example::

            model.set_gradient_divide_factor(1.0)  # sum, for losses that are divided by all tokens
            (model(batch).sum() / num_tokens).backward()
        """
        if isinstance(factor, bool) or not isinstance(factor, (int, float)) or not 0 < factor < math.inf:
            raise ValueError(
                f"set_gradient_divide_factor: factor is {factor!r}; it must be a number above 0. The "
                "default is the number of ranks, which averages; 1.0 sums."
            )
        groups = list(groups_to_configure(self, recurse, "set_gradient_divide_factor"))
        for group in groups:
            if any(bucket.communication.averages_itself for bucket in group.buckets):
                raise ValueError(
                    f"set_gradient_divide_factor: the gradients of {group.name} are reduced by a hook "
                    "(register_comm_hook), which divides by itself. Divide there."
                )
        for group in groups:
            group.configure(divide_factor=float(factor))

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """Do what :meth:`set_gradient_divide_factor` does, for this module and all sharded modules inside it.

        This is FSDP2's former name for it.

        Args:
            factor: a finite number above 0. The number of ranks (default) averages; 1.0 sums.

        Raises:
            ValueError: as :meth:`set_gradient_divide_factor`.

        Example::

            model.set_reduce_scatter_divide_factor(1.0)
        """
        CommunicationSetters.set_gradient_divide_factor(self, factor)

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

        Example::

            model.set_all_reduce_hook(lambda gradient: gradient.clamp_(-1.0, 1.0))
            model(batch).sum().backward()
        """
        if not callable(hook):
            raise TypeError(
                f"set_all_reduce_hook: hook is {hook!r}, a {type(hook).__name__}; pass a function."
            )
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

        The division is then an operation of its own instead of part of the collective.

        Args:
            enable: True for back ends that cannot average. False (the initial state) averages where the back
                end can.

        Raises:
            TypeError: ``enable`` is not a bool.

        Example::

            model.set_force_sum_reduction_for_comms(True)
            model(batch).sum().backward()
        """
        check_bool("set_force_sum_reduction_for_comms", "enable", enable)
        for bucket in module_state_of(self).group.buckets:
            bucket.communication.force_sums(enable)

    # --- the caller's own collectives and memory --------------------------------------------------

    def set_custom_all_gather(self, comm: Any) -> None:
        """Unshard this module's own group with the caller's all-gather.

        All parameters of the group then travel packed in one call: this costs a buffer of the group's full
        parameters, and a copy out of it.

        Args:
            comm: an object with ``allocate(size, *, dtype, device) -> Tensor``, which returns the output
                buffer, and ``__call__(output_tensor, input_tensor, group, async_op=False) -> Work | None``.

        Raises:
            TypeError: ``comm`` is a class, or lacks one of the two methods.
            ValueError: ``set_symm_mem_for_comm`` was called on this module.
            RuntimeError: the group is unsharded, or has unreduced gradients.

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

        All gradients of one dtype then travel packed in one call: this costs a buffer of the group's full
        gradients, and a copy into it. The division by the number of ranks comes after the call (float16: in
        part before it, lest the sum overflow).

        Args:
            comm: an object with ``allocate(size, *, dtype, device) -> Tensor``, which returns the input
                buffer, and ``__call__(output_tensor, input_tensor, group, op, async_op=False) ->
                Work | None``. ``op`` is always ``ReduceOp.SUM``.

        Raises:
            TypeError: ``comm`` is a class, or lacks one of the two methods.
            ValueError: ``set_symm_mem_for_comm`` or ``register_comm_hook`` was called on this module.
            RuntimeError: the group is unsharded, or has unreduced gradients.

        Example::

            class ReduceScatter:
                def allocate(self, size, *, dtype, device):
                    return torch.empty(size, dtype=dtype, device=device)

                def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
                    inputs = list(input_tensor.chunk(group.size()))
                    return dist.reduce_scatter(output_tensor, inputs, op, group=group, async_op=async_op)

            model.set_custom_reduce_scatter(ReduceScatter())
        """
        check_comm("set_custom_reduce_scatter", comm)
        check_choice(self, "set_custom_reduce_scatter", ["set_symm_mem_for_comm", "register_comm_hook"])
        communicate(
            self, "set_custom_reduce_scatter", make_reduce_scatter=unless_alone(CustomCollectives, comm)
        )

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Choose whether this module's own group communicates from memory of the process group's allocator.

        All its parameters, and all its gradients, then travel packed in one call each, with a copy, instead
        of directly from and to where they lie. Shards are all-gathered in place, so that the back end reads
        and writes parameters in that memory alone. Changes nothing if the back end has no allocator. A custom
        all-gather or reduce-scatter that is set afterwards takes its place.

        Args:
            enable: True allocates there. False (the initial state) goes back to ordinary memory.

        Raises:
            TypeError: ``enable`` is not a bool.
            ValueError: the group has a custom all-gather, reduce-scatter or communication hook already.
            RuntimeError: the group is unsharded, or has unreduced gradients.

        Example::

            model.set_allocate_memory_from_process_group_for_comm(True)
            model(batch).sum().backward()
        """
        method = "set_allocate_memory_from_process_group_for_comm"
        check_bool(method, "enable", enable)
        allocate_from_process_group(self, method, enable)

    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> None:
        """Unshard this module's own group through symmetric memory. Needs CUDA and NCCL.

        All parameters of the group then travel packed in one call: each rank copies its shard to its place in
        a buffer of full parameters, the call fills the rest, and a copy leads out of it. The buffer is set up
        collectively, in the first forward, and kept; groups of one size share it. NCCL chooses faster
        kernels for such memory. None at all, but the copy engines, so that all-gathers take nothing from the
        computation, if the process group of the mesh was made for it (NCCL 2.28 or later; ranks within
        NVLink's reach)::

            options = dist.ProcessGroupNCCL.Options()
            options.config.cta_policy = dist.ProcessGroupNCCL.NCCL_CTA_POLICY_ZERO
            dist.init_process_group("nccl", device_id=device, pg_options=options)

        Not run on a GPU yet.

        Args:
            backend: "NCCL" (default), the only one supported.

        Raises:
            ValueError: ``backend`` is another, the mesh is not of CUDA devices, or the group has a custom
                all-gather, reduce-scatter or communication hook already.
            RuntimeError: the group is unsharded, or has unreduced gradients; or symmetric memory of another
                back end was allocated before in this process, which has one back end for it.

        Example::

            for block in model.blocks:
                block.set_symm_mem_for_comm()
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

    # --- when it runs -----------------------------------------------------------------------------

    def set_separate_reduce_scatter_group(self, enable: bool = True, *, recurse: bool = True) -> None:
        """Choose whether reduce-scatters have a process group of their own, apart from the all-gathers.

        On NCCL they have one by default, since collectives of one communicator run one after the other, in
        the order of their calls: backward would wait for the all-gather of a block behind the reduce-scatter
        of the block before. On other back ends they do not. The next forward creates the process group, which
        is collective, and the next with gradients connects it: inference alone does not.

        A second communicator takes memory on each device, which ``torch.cuda.max_memory_allocated`` does not
        count (``torch.cuda.mem_get_info`` does): buffers for each channel and peer, of hundreds of megabytes
        by NCCL's defaults. Neither they nor the time that they buy have been measured yet. Where they do not
        fit, set ``NCCL_BUFFSIZE`` or ``NCCL_MAX_CTAS`` lower, or share the communicator. All ranks call
        both in one common order, also where their data take different routes through a block.

        Args:
            enable: True (default) creates one; False shares that of the all-gathers, and saves the back
                end's memory for a second.
            recurse: also set it for all sharded modules inside this one (default True).

        Raises:
            TypeError: an argument is not a bool.
            RuntimeError: in the next forward: ``unshard()`` has left a group unsharded that would change, or
                it has unreduced gradients.

        Example::

            model.set_separate_reduce_scatter_group(True)
            model(batch).sum().backward()
        """
        check_bool("set_separate_reduce_scatter_group", "enable", enable)
        for group in groups_to_configure(self, recurse, "set_separate_reduce_scatter_group"):
            group.configure(separate_reduce_group=enable)
        module_state_of(self).root.start_over()

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """Limit how many groups' full gradients may be in flight, beside those of the group in backward.

        A larger limit lets communication that is slower than the computation fall further behind, for the
        memory of that many groups' full gradients. Where large gradients are reduced before the rest of
        their group (``CommPolicy.part_bytes``), those present and in flight take no more memory than
        ``max_input_buffers`` of the largest groups.

        Args:
            max_input_buffers: how many groups, 1 (default) or more.
            recurse: also set it for all sharded modules inside this one (default True).

        Raises:
            TypeError: ``max_input_buffers`` is not an int, or ``recurse`` is not a bool.
            ValueError: ``max_input_buffers`` is below 1.

        Example::

            model.set_reduce_scatter_max_input_buffers(2)  # a slow network, and memory to spare
            model(batch).sum().backward()
        """
        caller = "set_reduce_scatter_max_input_buffers"
        if isinstance(max_input_buffers, bool) or not isinstance(max_input_buffers, int):
            raise TypeError(
                f"{caller}: max_input_buffers is {max_input_buffers!r}, a "
                f"{type(max_input_buffers).__name__}; pass an int."
            )
        if max_input_buffers < 1:
            raise ValueError(f"{caller}: max_input_buffers is {max_input_buffers}; it must be 1 or more.")
        for group in groups_to_configure(self, recurse, caller):
            group.configure(max_reductions=max_input_buffers)
        module_state_of(self).root.start_over()

    def set_post_optim_event(self, event: Any) -> None:
        """Have the all-gathers of the next forward wait only for ``event``, not for the whole compute stream.

        The event is used once. For the root module.

        Args:
            event: recorded after the optimizer step: a ``torch.cuda.Event`` for a mesh of CUDA devices, or
                an event of the mesh's device. On a CPU mesh it does nothing and may be None, which is what
                ``torch.cpu.current_stream().record_event()`` returns.

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
        module_state.root.post_optim_event = event
