"""What ranks tell each other beside tensors: agreements, comparisons, failures, the signal to stop.

StopSignal        all ranks leave the training loop at the same step when the job is told to end
set_wait_limit    how long a rank waits before all report where they are
"""

from shardwise.ranks.failures import set_wait_limit
from shardwise.ranks.stop_signal import StopSignal

__all__ = ["StopSignal", "set_wait_limit"]
