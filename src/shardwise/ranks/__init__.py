"""What ranks exchange besides tensors: agreements, comparisons, failures, the signal to stop.

StopSignal        all ranks leave the training loop at the same step when the job must end
set_wait_limit    how long a rank waits before all ranks report where they are
"""

from shardwise.ranks.failures import set_wait_limit
from shardwise.ranks.stop_signal import StopSignal

__all__ = ["StopSignal", "set_wait_limit"]
