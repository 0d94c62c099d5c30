"""What ranks tell each other beside tensors: agreements, comparisons, failures, the signal to stop.

StopSignal    all ranks leave the training loop at the same step when the job is told to end
"""

from shardwise.ranks.stop_signal import StopSignal

__all__ = ["StopSignal"]
