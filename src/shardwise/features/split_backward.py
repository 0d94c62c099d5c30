"""Refuses the first half of a split backward where nobody would see the second.

Zero-bubble schedules of torch's pipelines compute the gradients of a stage's inputs first, and those of its
weights later. A stage of torch's looks for the weights among ``module.parameters()``, which are the shards.
No graph has these: it finds none, and ``.grad`` would stay None without a word. Our own stage knows better.
"""

from shardwise.engine.feature import Feature
from shardwise.features.microbatches import Microbatches
from shardwise.torch_compat import autograd


class SplitBackward(Feature):
    """Refuses split backwards of pipeline stages that are not ours."""

    def backward_ended(self) -> None:
        """Ask only after a backward that keeps its graph, as the first half does; few others do."""
        if not autograd.keeps_graph() or not autograd.backward_of_inputs_runs():
            return
        microbatches = self.root.features.find(Microbatches)
        if microbatches is not None and microbatches.is_under_way:
            return
        if any(group.gradients.are_wanted for group in self.root.groups):
            raise RuntimeError(
                f"{self.root.label}: a pipeline schedule computes the gradients of this stage's inputs apart "
                "from those of its weights, as zero-bubble schedules do. torch's PipelineStage would look "
                "for the weights among the shards, which are in no graph, and leave .grad None. Build the "
                "stage as shardwise.interop.PipelineStage, which takes the same arguments."
            )
