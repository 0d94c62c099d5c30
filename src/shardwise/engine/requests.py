"""What the caller asks of a root outside of its passes."""

from typing import TYPE_CHECKING, Any

from shardwise.engine.memory import CALLER, INFERENCE
from shardwise.groups.group import ParameterGroup
from shardwise.groups.states import PARTLY
from shardwise.torch_compat import autograd

if TYPE_CHECKING:
    from shardwise.engine.root import Root


class Requests:
    """Unshards and reshards groups of ``root`` for the caller, and hands them over to be changed."""

    def __init__(self, root: "Root") -> None:
        self._root = root
        self.post_optim_event: Any = None  # of the device's own module

    def unshard(self, group: ParameterGroup) -> None:
        """Begin to unshard ``group`` until forward has used it, or ``reshard``."""
        preparation, memory = self._root.preparation, self._root.memory
        preparation.complete()
        # The next forward waits for the event as well.
        preparation.streams.wait_for_optimizer(self.post_optim_event)
        if group.unsharded.state is PARTLY:
            memory.release(group)
        memory.release_stale([group], self.post_optim_event)
        memory.unshard(group)
        if memory.reason(group) is not INFERENCE:
            memory.hold(group, CALLER)

    def reshard(self, group: ParameterGroup) -> None:
        """Free it now."""
        if self._root.memory.reason(group) is INFERENCE:
            raise RuntimeError(f"reshard: {group.name} is kept unsharded by inference(). Leave that first.")
        self._root.memory.release(group)

    def refuse_at_work(self, caller: str, group: ParameterGroup, when: str = "before") -> None:
        """``caller`` is for between passes only; ``when`` to call it instead."""
        root = self._root
        root.calls.forget_interrupted()
        is_in_backward = autograd.is_in_backward() or (root.backward is not None and root.backward.is_running)
        if root.calls.running or is_in_backward:
            raise RuntimeError(
                f"{caller}: {group.name} is part of a model whose "
                f"{'backward' if is_in_backward else 'forward'} is running, and that needs its parameters "
                f"and gradients as they are. Call it {when}."
            )
        root.recover()
        for each in root.groups:
            each.gradients.drop_cleared()

    def hand_over(self, group: ParameterGroup, caller: str) -> None:
        """Have nothing of ``group`` unsharded, for ``caller`` to change it."""
        root = self._root
        if not root.features.ranks_run_alike:
            raise RuntimeError(f"{caller}: {group.name} is kept unsharded by inference(). Leave that first.")
        root.preparation.complete()
        streams = root.preparation.streams
        if (event := self.take_post_optim_event()) is not None:
            streams.make_compute_wait_for(event)  # and what comes after it is the caller's own work
        streams.all_gather.wait_for_compute()
        root.memory.release(group)

    def let_host_write(self) -> None:
        """Wait for copies out of shards in host memory, which the caller may change from now on."""
        self._root.preparation.streams.all_gather.wait_until_host_was_read()

    def take_post_optim_event(self) -> Any:
        """The event of ``set_post_optim_event``, for the caller, who must wait for it; it is cleared."""
        event, self.post_optim_event = self.post_optim_event, None
        return event
