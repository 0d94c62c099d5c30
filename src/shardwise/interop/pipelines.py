"""Stages of ``torch.distributed.pipelining`` whose modules are sharded.

torch's own stage gets right gradients from schedules that run whole backwards, but lets each of them reduce.
Schedules that compute gradients of inputs and of weights apart do not find the weights; see
``features/microbatches.py``.
"""

from typing import Any

from torch import nn
from torch.distributed import pipelining
from torch.distributed.pipelining import schedules

from shardwise.engine.module_state import sharded_module_states
from shardwise.features.microbatches import Microbatches
from shardwise.torch_compat import autograd


class PipelineStage(pipelining.PipelineStage):
    """A pipeline stage whose module was given to ``fully_shard``: gradients are reduced once a step.

    It has the arguments of ``torch.distributed.pipelining.PipelineStage``, and works with all schedules. The
    module may be sharded before or after the stage is made. Its mesh has no pipeline dimension: it may shard,
    replicate and, by tensor parallelism, divide the module over the ranks of one stage.

    Full gradients of all groups, summed over microbatches, stay in memory until the end of the step.
    Parameters with ``reshard_after_forward=False`` are all-gathered once a step and stay as well; others are
    gathered for each forward, each backward and each half of a backward.

    Each step adds the mean of its microbatches to ``.grad``, or their sum (``scale_grads=False``), even if
    ``.grad`` was not cleared. ``set_requires_gradient_sync(False)`` leaves the reduction to a later step.

    Raises:
        ValueError: in the first step: the module is not sharded, or is only a part of a sharded model; or
            there is a ``dw_builder``.
        RuntimeError: in a step: the previous step has not ended and its gradients were not cleared, or
            gradients of other steps were not cleared and were divided by another number of microbatches.

    Example::

        mesh = init_device_mesh("cuda", (2, 4), mesh_dim_names=("pipe", "shard"))
        for block in stage_module.layers:
            fully_shard(block, mesh=mesh["shard"], reshard_after_forward=False)
        fully_shard(stage_module, mesh=mesh["shard"], reshard_after_forward=False)
        rank, group = mesh.get_local_rank("pipe"), mesh.get_group("pipe")
        stage = PipelineStage(stage_module, rank, 2, device, group=group)
        schedule = Schedule1F1B(stage, n_microbatches=8, loss_fn=loss_fn)
        schedule.step(tokens) if rank == 0 else schedule.step(target=targets)
        optimizer.step()
    """

    _microbatches: Microbatches  # of the running step

    # --- a step -----------------------------------------------------------------------------------

    def clear_runtime_states(self) -> None:
        """A step begins."""
        super().clear_runtime_states()
        if self.dw_builder is not None:
            raise ValueError(
                f"PipelineStage {self.stage_index}: it was given a dw_builder, which computes gradients of "
                "weights that would not be reduced. Leave it out: schedules can split backward without it."
            )
        if self.has_backward:
            self._microbatches = microbatches_of(self.submod, self.stage_index)
            states = sharded_module_states(self.submod)
            sharded = {id(param.sharded) for state in states for param in state.group.shards.params}
            of_no_group = [param for param in self.submod.parameters() if id(param) not in sharded]
            self._microbatches.begin(of_no_group)

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """All backwards of the step are over: reduce."""
        if self.has_backward:
            self._microbatches.reduce(grad_scale_factor)

    # torch's schedules ask for gradients of the next stage on the same rank even in eval(), and fail (2.13).

    def get_local_bwd_output(self, mb_index: int) -> Any:
        """Gradients for the stage before, on the same rank; none in evaluation."""
        return super().get_local_bwd_output(mb_index) if self.has_backward else ()

    def set_local_bwd_input(self, next_stage_bwd_outputs: Any, mb_index: int) -> None:
        """Take gradients from the stage behind, on the same rank; none in evaluation."""
        if self.has_backward:
            super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)

    # torch 2.15 asks for the reduction in two calls where it takes the module for one of its own.

    def start_gradient_reduction(self) -> None:
        """Nothing yet: how to divide comes with the second call."""

    def wait_for_gradient_reduction(self, grad_scale_factor: int) -> None:
        """All backwards of the step are over: reduce."""
        self.perform_reduce_grad(grad_scale_factor)

    # --- what a schedule does in a step -----------------------------------------------------------

    def unshard(self) -> None:
        """Begin to all-gather the groups with ``reshard_after_forward=False``, ahead of their next use."""
        if self.has_backward:
            self._microbatches.unshard()

    def reshard(self) -> None:
        """Free the full parameters of all groups; sums of gradients stay."""
        if self.has_backward:
            self._microbatches.reshard()

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> tuple[Any, Any]:
        """Run a backward of one microbatch, or half of it, without a reduction."""
        microbatches = self._microbatches
        if backward_type == "weight":
            microbatches.compute_weights(bwd_kwargs["param_groups"])
            return (), None
        outputs, gradients = bwd_kwargs["stage_output"], bwd_kwargs["output_grads"]
        inputs = bwd_kwargs["input_values"]
        with microbatches.without_reductions():
            if backward_type == "full":
                return autograd.run_full_backward(outputs, gradients, inputs), None
            return autograd.run_backward_of_inputs(outputs, gradients, inputs, microbatches.weights())


class InstalledStage(pipelining.PipelineStage):
    """A stage of torch's that becomes one of ours in its first step, if this library has sharded its module.

    ``install`` puts it in the place of torch's. Frameworks make stages before they shard, and stages of
    modules that are never sharded. A class that is derived from it keeps its methods in front of ours.
    """

    def clear_runtime_states(self) -> None:
        """A step begins."""
        if not isinstance(self, PipelineStage) and sharded_module_states(self.submod):
            self.__class__ = type(type(self).__name__, (type(self), PipelineStage), {})
        super().clear_runtime_states()


def follow_unshard_actions(schedule: Any) -> None:
    """Make the UNSHARD and RESHARD actions of ``schedule`` act on its stages, each a :class:`PipelineStage`.

    A schedule with several stages per rank unshards the stages that come next, three by default, and reshards
    the others. Without this call, a stage with ``reshard_after_forward=False`` is all-gathered when it is
    first used, and stays unsharded until the end of the step. With this call, all-gathers begin earlier, and
    ranks with four or more stages have the full parameters of three in memory, at the cost of more
    all-gathers. Other stages are resharded after each use in either case.

    Args:
        schedule: one with several stages per rank, such as ``ScheduleInterleaved1F1B``.

    Raises:
        TypeError: ``schedule`` has no such actions (GPipe, 1F1B), or a stage is not a :class:`PipelineStage`.

    Example::

        schedule = ScheduleInterleaved1F1B(stages, n_microbatches=16, loss_fn=loss_fn)
        follow_unshard_actions(schedule)
    """
    if not hasattr(schedule, "register_custom_function"):
        raise TypeError(
            f"follow_unshard_actions: a {type(schedule).__name__} has one stage a rank, which it neither "
            "unshards nor reshards. Leave the call out."
        )
    stages = autograd.stages_of(schedule)
    for stage in stages:
        if not isinstance(stage, PipelineStage):
            raise TypeError(
                f"follow_unshard_actions: stage {stage.stage_index} is a {type(stage).__name__} of "
                f"{type(stage).__module__}; build all stages as shardwise.interop.PipelineStage."
            )
    by_index = {stage.stage_index: stage for stage in stages}

    def unshard(action: Any, context: Any) -> None:
        by_index[action.stage_index].unshard()

    def reshard(action: Any, context: Any) -> None:
        by_index[action.stage_index].reshard()

    schedule.register_custom_function(schedules.UNSHARD, unshard)
    schedule.register_custom_function(schedules.RESHARD, reshard)


def microbatches_of(module: nn.Module, stage_index: int) -> Microbatches:
    """What drives the steps of a stage's module; made in its first step."""
    module_states = sharded_module_states(module)
    if not module_states:
        raise ValueError(
            f"PipelineStage {stage_index}: nothing in its module, a {type(module).__name__}, is sharded. "
            "Call fully_shard on the blocks of the module and on the module itself, or use torch's own "
            "PipelineStage."
        )
    root = module_states[0].root
    if {id(module_state.group) for module_state in module_states} != {id(group) for group in root.groups}:
        raise ValueError(
            f"PipelineStage {stage_index}: its module, a {type(module).__name__}, and the model that "
            f"fully_shard has sharded ('{root.name}') do not have the same parameter groups, so a step of "
            "one would not be a step of the other. Call fully_shard on the module of each stage itself, and "
            "on no module around several stages."
        )
    microbatches = root.find(Microbatches)
    if microbatches is None:
        root.add(microbatches := Microbatches(root))
    return microbatches
