"""A test case whose ranks are threads of this process, on torch's own process group of threads."""

import os

from torch.testing._internal.common_distributed import MultiThreadedTestCase

STACK_TRACES = "TORCH_SHOW_CPP_STACKTRACES"


class ThreadRanks(MultiThreadedTestCase):
    """Start the ranks. Torch's class also sets a variable of the environment, which later tests would inherit."""

    def setUp(self) -> None:
        before = os.environ.get(STACK_TRACES)
        super().setUp()
        if before is None:
            os.environ.pop(STACK_TRACES, None)
        else:
            os.environ[STACK_TRACES] = before
        self._spawn_threads()
