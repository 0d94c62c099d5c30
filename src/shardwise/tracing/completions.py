"""When the back end's own threads are done: a thread waits in place of the caller's, and notes the time.

On the host a collective ends while the caller computes, and gloo tells nobody: only who waits learns of it.
So while a trace records, a thread for each kind of collective waits for them in the order in which they were
issued, and the caller waits for that thread. The thread does nothing else, so that the numbers and the memory
are those of a run without a trace. An error is raised where the caller waits.
"""

import threading
import time
from queue import SimpleQueue

from shardwise.comm.streams import Finish


class Completion:
    """A collective that a thread waits for."""

    def __init__(self, wait: Finish) -> None:
        self._wait = wait
        self._is_over = threading.Event()
        self._error: BaseException | None = None
        self.at: int | None = None
        """When it was complete, by ``time.perf_counter_ns``."""

    def run(self) -> None:
        """Wait for it, in the thread."""
        try:
            self._wait()
        except BaseException as error:  # of any kind: it belongs to the caller
            self._error = error
        self.at = time.perf_counter_ns()
        self._is_over.set()

    def wait(self) -> None:
        """Wait for the thread, in the caller's."""
        self._is_over.wait()
        if self._error is not None:
            raise self._error


class Watcher:
    """The thread that waits for collectives of one kind; it starts with the first of them."""

    def __init__(self, kind: str) -> None:
        self._queue: SimpleQueue[Completion | None] = SimpleQueue()
        self._kind = kind
        self._thread: threading.Thread | None = None

    def watch(self, wait: Finish) -> Completion:
        """Have the thread call ``wait``, after all that it was given before."""
        if self._thread is None:
            name = f"shardwise trace: {self._kind}"
            self._thread = threading.Thread(target=self._run, name=name, daemon=True)
            self._thread.start()
        completion = Completion(wait)
        self._queue.put(completion)
        return completion

    def close(self) -> None:
        """End the thread, once what is still under way is over."""
        self._queue.put(None)

    def _run(self) -> None:
        while (completion := self._queue.get()) is not None:
            completion.run()
