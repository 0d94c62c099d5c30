"""Whether the clocks of all ranks agree: logs and traces of several machines are compared by time."""

import time

from shardwise.doctor.findings import Finding, ok, wrong
from shardwise.doctor.job import Job, Surroundings

MOST_APART_S = 0.5
_ROUNDS = 5


def check_clocks(job: Job, around: Surroundings) -> list[Finding]:
    """How far the clock of each rank is from that of rank 0, as a round trip through the store tells it."""
    found = [_offset(job, around, rank) for rank in range(1, job.world)]
    offsets = job.gather(found[job.rank - 1] if job.rank else 0.0)
    if offsets is None:
        return []
    apart = {rank: offset for rank, offset in enumerate(offsets) if abs(offset) > MOST_APART_S}
    if not apart:
        largest_ms = 1e3 * max(map(abs, offsets))
        return [ok("clocks", f"at most {largest_ms:.1f} ms from that of rank 0")]
    advice = "Logs and traces of ranks cannot be compared. Start NTP (chrony) on that machine."
    return [
        wrong(
            "clocks",
            f"that of rank {rank} is {abs(offset):.1f} s {'ahead of' if offset > 0 else 'behind'} that of "
            f"rank 0. {advice}",
        )
        for rank, offset in apart.items()
    ]


def _offset(job: Job, around: Surroundings, rank: int) -> float | None:
    """How far the clock of ``rank`` is ahead of that of rank 0; None on all other ranks.

    The round trip that took least says it best: rank 0 read its clock somewhere in between.
    """
    best = (float("inf"), 0.0)
    for _ in range(_ROUNDS):
        ask, answer = job.new_key(), job.new_key()
        if job.rank == rank:
            sent, started = around.clock(), time.monotonic()
            job.board.post(ask, True)
            theirs = job.wait_for(answer)
            took = time.monotonic() - started
            best = min(best, (took, sent + took / 2 - theirs))
        elif job.rank == 0:
            job.wait_for(ask)
            job.board.post(answer, around.clock())
    return best[1] if job.rank == rank else None
