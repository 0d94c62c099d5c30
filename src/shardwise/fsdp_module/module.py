"""FSDPModule: the methods of a sharded module, but for those of its communication (communication.py)."""

from collections.abc import Iterator, Sequence

from shardwise.engine.finalization import GradientReductionHandle
from shardwise.engine.module_state import module_state_of
from shardwise.fsdp_module.arguments import (
    check_bool,
    groups_to_configure,
    groups_to_prefetch,
    root_module_state,
)
from shardwise.fsdp_module.communication import CommunicationSetters
from shardwise.groups.group import ParameterGroup


class UnshardHandle:
    """An unshard in progress, returned by :meth:`FSDPModule.unshard`."""

    def __init__(self, group: ParameterGroup) -> None:
        self._group = group

    def wait(self) -> None:
        """Wait for the unshard; from then on the module's attributes are the full parameters.

        Does nothing if they are there already, or were resharded since.

        Raises:
            RuntimeError: the all-gather failed, usually because another rank did.

        Example::

            handle = model.blocks[0].unshard(async_op=True)
            batch = next(batches)  # the all-gather runs meanwhile
            handle.wait()
        """
        self._group.unsharded.wait_if_on_the_way()


class FSDPModule(CommunicationSetters):
    """Mixed into the class of every module given to ``fully_shard``.

    A module's own parameter group holds the parameters that its ``fully_shard`` call took; sharded modules
    inside it have groups of their own. Setters with ``recurse`` act on all of these groups by default.
    Settings stay until they are changed. Those that decide which collectives run must be the same on all
    ranks. The next forward with gradients compares them, except, after the first forward, those that may
    change with each microbatch (gradient synchronisation, all-reduce, reshard after backward).
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
            RuntimeError: parameters have no values yet (meta device), were added after ``fully_shard`` or
                are summoned by ``unsharded()``.

        Example::

            handle = model.unshard(async_op=True)
            batch = next(batches)  # the all-gather runs meanwhile
            handle.wait()
            output = model(batch)
        """
        check_bool("unshard", "async_op", async_op)
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
        """Choose whether parameters are resharded after forward, in place of what ``fully_shard`` was told.

        A forward without gradients reshards at its end in either case: no backward will use the parameters.

        Args:
            reshard_after_forward: True frees the full parameters after forward and unshards them again for
                backward: least memory, one more all-gather per group. False keeps them until backward.
            recurse: also set it for all sharded modules inside this one (default True).

        Raises:
            TypeError: an argument is not a bool.

        Example::

            model.set_reshard_after_forward(False)  # enough memory: save an all-gather per group
            model(batch).sum().backward()
        """
        caller = "set_reshard_after_forward"
        check_bool(caller, "reshard_after_forward", reshard_after_forward)
        for group in groups_to_configure(self, recurse, caller):
            group.configure(reshard_after_forward=reshard_after_forward)

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Choose whether parameters are resharded after backward (by default they are).

        The next forward unshards again what has changed meanwhile. After the step of an optimizer of torch's,
        or of a class derived from one, these are all trainable groups. After a backward without gradient
        synchronisation (``set_requires_gradient_sync(False)``, ``no_sync``) nothing may change, and nobody is
        asked. In any other case, such as a step that is written by hand, each rank compares its shards, and
        an all-reduce of one flag per group tells whether those of any rank have changed; the host waits for
        the device there.

        Args:
            reshard_after_backward: False keeps the full parameters, and their memory, for the next
                microbatch, whose forward then needs no all-gather.
            recurse: also set it for all sharded modules inside this one (default True).

        Raises:
            TypeError: an argument is not a bool.
            RuntimeError: in the next forward: parameters were changed between microbatches without
                synchronisation. A CUDA device reports it later, unless the change was one that torch counts.

        Example::

            for microbatch in microbatches:
                model.set_reshard_after_backward(microbatch is microbatches[-1])
                model(microbatch).sum().backward()
            optimizer.step()
        """
        caller = "set_reshard_after_backward"
        check_bool(caller, "reshard_after_backward", reshard_after_backward)
        for group in groups_to_configure(self, recurse, caller):
            group.configure(reshard_after_backward=reshard_after_backward)

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Choose whether backward unshards this module's own group (by default it does).

        Args:
            unshard_in_backward: False saves an all-gather where backward does not read the parameters, as
                for an embedding. A backward that does read them raises autograd's error about variables
                "modified by an inplace operation", for their memory was freed.

        Raises:
            TypeError: ``unshard_in_backward`` is not a bool.

        Example::

            model.embed.set_unshard_in_backward(False)
            model(tokens).sum().backward()
        """
        check_bool("set_unshard_in_backward", "unshard_in_backward", unshard_in_backward)
        module_state_of(self).group.configure(unshard_in_backward=unshard_in_backward)
        module_state_of(self).root.plan_check.plan_changed()

    def set_keep_unsharded_storage(self, keep: bool, *, recurse: bool = True) -> None:
        """Choose whether full parameters keep their memory while they are resharded (by default they do not).

        Costs the memory of the full parameters of all these groups at once; the all-gathers stay.

        Args:
            keep: True keeps the data pointers of full parameters the same from the first unshard on, as CUDA
                graphs need, until the group's dtypes, device or collectives change. False frees the memory
                of groups that are sharded at once.
            recurse: also set it for all sharded modules inside this one (default True).

        Raises:
            TypeError: an argument is not a bool.

        Example::

            model.set_keep_unsharded_storage(True)
            model(batch).sum().backward()
        """
        check_bool("set_keep_unsharded_storage", "keep", keep)
        for group in groups_to_configure(self, recurse, "set_keep_unsharded_storage"):
            group.unsharded.keep_storage(keep)

    # --- prefetch ---------------------------------------------------------------------------------

    def set_modules_to_forward_prefetch(self, modules: "Sequence[FSDPModule]") -> None:
        """Choose what this module's forward prefetches, in place of the recorded order.

        Each prefetched group holds its full parameters from then on. ``CommPolicy.max_prefetched`` still
        limits how many there are at once. All ranks must choose the same.

        Args:
            modules: sharded modules of the same model, whose groups are unsharded in this order when this
                module's forward begins. An empty list turns forward prefetch off for this module.

        Raises:
            TypeError: ``modules`` is not a list or another sequence.
            ValueError: a module in it is not sharded.
            RuntimeError: in forward: a module in it belongs to another model.

        Example::

            model.blocks[0].set_modules_to_forward_prefetch([model.blocks[1], model.blocks[2]])
            model(batch).sum().backward()
        """
        chosen = groups_to_prefetch(modules, "set_modules_to_forward_prefetch")
        module_state_of(self).group.configure(forward_prefetch=chosen)
        module_state_of(self).root.plan_check.plan_changed()

    def set_modules_to_backward_prefetch(self, modules: "Sequence[FSDPModule]") -> None:
        """Choose what this module's backward prefetches, in place of the recorded order.

        Each prefetched group holds its full parameters from then on. ``CommPolicy.max_prefetched`` still
        limits how many there are at once. All ranks must choose the same.

        Args:
            modules: sharded modules of the same model, whose groups are unsharded in this order when this
                module's backward begins. An empty list turns backward prefetch off for this module.

        Raises:
            TypeError: ``modules`` is not a list or another sequence.
            ValueError: a module in it is not sharded.
            RuntimeError: in backward: a module in it belongs to another model.

        Example::

            model.blocks[2].set_modules_to_backward_prefetch([model.blocks[1], model.blocks[0]])
            model(batch).sum().backward()
        """
        chosen = groups_to_prefetch(modules, "set_modules_to_backward_prefetch")
        module_state_of(self).group.configure(backward_prefetch=chosen)
        module_state_of(self).root.tree_changed()
        module_state_of(self).root.plan_check.plan_changed()

    # --- gradients --------------------------------------------------------------------------------

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Choose whether backward reduces gradients (by default it does).

        Without synchronisation a microbatch needs no reduce-scatter, and each rank holds the full gradients
        of these groups until a backward with synchronisation reduces the sums. ``zero_grad()`` clears them
        like any other gradient.

        Args:
            requires_gradient_sync: False lets full gradients accumulate, unreduced. True reduces them at the
                next backward.
            recurse: also set it for all sharded modules inside this one (default True).

        Raises:
            TypeError: an argument is not a bool.

        Example::

            for microbatch in microbatches:
                model.set_requires_gradient_sync(microbatch is microbatches[-1])
                model(microbatch).sum().backward()
            optimizer.step()
        """
        caller = "set_requires_gradient_sync"
        check_bool(caller, "requires_gradient_sync", requires_gradient_sync)
        for group in groups_to_configure(self, recurse, caller):
            group.configure(requires_gradient_sync=requires_gradient_sync)

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Choose whether backward all-reduces gradients over the replicas of the mesh (by default it does).

        Without the all-reduce, gradients are reduce-scattered over the shards only. The sharded sums, which
        take the memory of a sharded gradient, join those of the next backward that all-reduces.
        ``zero_grad()`` clears them like any other gradient. Changes nothing on a mesh without replicas.

        Args:
            requires_all_reduce: False leaves the all-reduce to a later backward.
            recurse: also set it for all sharded modules inside this one (default True).

        Raises:
            TypeError: an argument is not a bool.

        Example::

            for microbatch in microbatches:
                model.set_requires_all_reduce(microbatch is microbatches[-1])
                model(microbatch).sum().backward()
            optimizer.step()
        """
        check_bool("set_requires_all_reduce", "requires_all_reduce", requires_all_reduce)
        for group in groups_to_configure(self, recurse, "set_requires_all_reduce"):
            group.configure(requires_all_reduce=requires_all_reduce)

    def set_reduce_scatter_unused_params(
        self, reduce_scatter_unused_params: bool, *, recurse: bool = True
    ) -> None:
        """Choose whether parameters without a gradient are reduced as zeros (by default they are left out).

        For ranks that use different parameters of one group. The group then reduces at the end of backward
        instead of as soon as its gradients are complete, so more full gradients are held at once. All ranks
        must run the module itself, and its outputs must enter the loss. A parameter that no rank has used
        gets a gradient of zeros.

        Args:
            reduce_scatter_unused_params: True lets every rank take part with zeros.
            recurse: also set it for all sharded modules inside this one (default True).

        Raises:
            TypeError: an argument is not a bool.

        Example::

            model.set_reduce_scatter_unused_params(True)
            model(batch).sum().backward()
        """
        caller = "set_reduce_scatter_unused_params"
        check_bool(caller, "reduce_scatter_unused_params", reduce_scatter_unused_params)
        for group in groups_to_configure(self, recurse, caller):
            group.configure(zeros_for_unused=reduce_scatter_unused_params)

    def set_may_be_unused(self, may_be_unused: bool = True) -> None:
        """Choose whether some ranks may skip this module while others run it.

        Its groups, and those of sharded modules inside it, are then unsharded and resharded together with
        the sharded module around it, whether they run or not: their full parameters stay in memory for that
        long. Their gradients are reduced at the end of backward, with zeros from ranks that have none.

        Args:
            may_be_unused: True (default) allows it; False has all ranks run the module again.

        Raises:
            TypeError: ``may_be_unused`` is not a bool.
            RuntimeError: in forward: no sharded module around this one is run by all ranks.

        Example::

            model.blocks[1].set_may_be_unused()  # which blocks run depends on the rank
            model(batch).sum().backward()
        """
        check_bool("set_may_be_unused", "may_be_unused", may_be_unused)
        for group in groups_to_configure(self, True, "set_may_be_unused"):
            group.configure(may_be_unused=may_be_unused)
        module_state_of(self).root.start_over()

    def set_reduce_ignored_params(self, reduce_ignored_params: bool, *, recurse: bool = True) -> None:
        """Choose whether the gradients of ``ignored_params`` are averaged over the ranks (by default not).

        Costs one all-reduce per dtype and mesh dimension for each group that ignores parameters, at the end
        of each backward that synchronises. A trainable parameter without a gradient takes part with zeros.

        Args:
            reduce_ignored_params: True averages them.
            recurse: also set it for all sharded modules inside this one (default True).

        Raises:
            TypeError: an argument is not a bool.

        Example::

            model.set_reduce_ignored_params(True)
            model(batch).sum().backward()
        """
        check_bool("set_reduce_ignored_params", "reduce_ignored_params", reduce_ignored_params)
        for group in groups_to_configure(self, recurse, "set_reduce_ignored_params"):
            group.configure(averages_ignored=reduce_ignored_params)

    # --- the end of a backward --------------------------------------------------------------------

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Accept FSDP2's hint about the last backward before the optimizer step; it changes nothing.

        Every backward ends with its reductions finished: ``.grad`` is complete, and ``zero_grad()`` clears
        all of it.

        Args:
            is_last_backward: True or False.

        Raises:
            TypeError: ``is_last_backward`` is not a bool.

        Example::

            for microbatch in microbatches:
                model.set_is_last_backward(microbatch is microbatches[-1])
                model(microbatch).sum().backward()
        """
        check_bool("set_is_last_backward", "is_last_backward", is_last_backward)

    def set_manual_backward_finalization(self, enabled: bool) -> None:
        """Choose whether the caller ends backwards, with :meth:`finalize_backward`. For the root module.

        For pipeline schedules in which the reduction of gradients is a step of its own. Gradients that a
        backward reduces as it goes are still in ``.grad`` when it returns. Left to the caller, unreduced and
        in memory, are full gradients of backwards without synchronisation, and those that ranks reduce at
        the same moment: of modules with ``set_reduce_scatter_unused_params`` or ``set_may_be_unused``, and
        of ``set_reduce_ignored_params``.

        Args:
            enabled: True leaves these reductions to ``finalize_backward()``. False (the initial state) runs
                them at the end of each backward.

        Raises:
            TypeError: ``enabled`` is not a bool.
            RuntimeError: this is not the root module, a forward or backward is running, or an earlier
                backward was not finalized.

        Example::

            model.set_manual_backward_finalization(True)
            model(batch).sum().backward()
            model.finalize_backward()
        """
        check_bool("set_manual_backward_finalization", "enabled", enabled)
        module_state = root_module_state(self, "set_manual_backward_finalization")
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
                running, or nobody has waited for the handle of an earlier call.

        Example::

            model.set_manual_backward_finalization(True)
            model.set_requires_gradient_sync(False)
            for microbatch in microbatches:
                model(microbatch).sum().backward()
            model.set_requires_gradient_sync(True)
            model.finalize_backward()
        """
        check_bool("finalize_backward", "async_op", async_op)
        module_state = root_module_state(self, "finalize_backward")
        handle = module_state.root.finalize(module_state.group)
        if async_op:
            return handle
        handle.wait()
        return None

    def reset_iter_state(self) -> None:
        """Drop what a failed iteration left behind, including gradients that wait to be reduced.

        After ``zero_grad()`` the next iteration runs without this call as well: it notices the failure and
        drops that backward's gradients. This call also drops, and frees, the unreduced gradients of earlier
        microbatches. For the root module; needs no communication.

        Raises:
            RuntimeError: this is not the root module.

        Example::

            try:
                model(batch).sum().backward()
            except torch.OutOfMemoryError:
                model.reset_iter_state()
        """
        root_module_state(self, "reset_iter_state").root.reset()
