"""What streams that run late find of the waits that `tests/races` leaves out, and what they cannot see.

`FOUND_BY` has a schedule of `cpp/streams.h` under which values are wrong without the wait: that of the mutant's scenario
in `races/mutants.py`, or another one. `UNSEEN` has the reason where values are right under all schedules; vector clocks
find these.
"""

from races.mutants import MUTANTS, PATCHES

from software_gpu.late_recipes import Case

# By the text of a mutant's place, or the name of a patch. All that are not named: LATE (1) finds them.
FOUND_BY = {
    "enter < Unsharded.make < ParameterGroup._prepare_unshard": 2,
    "enter < Reduction.send < Gradients.reduce": 2,
    "wait_event < Root.wait_for_optimizer < ForwardPass.begin": 2,
    # The copying stream must get ahead of the all-gather that has not used what was copied: where all is late, the host
    # has the copies done in order.
    "wait_event < Root.let_host_write < ForwardPass.end": 2,
    # Events that are recorded too early, and memory that is given out again beside a collective: all must run at once.
    "record_event < Unsharded._start < Unsharded.unshard": 3,
    "record_event < Unsharded._start < Unsharded.unshard_again": 3,
    "record_event < Unsharded._start < Unsharded.unshard_ahead": 3,
    "wait_event < Unsharded._finish_all_gather < Unsharded.wait": 3,
    "record_event < Reduction.send < Gradients._send": 3,
    "wait_event < Reduction.release_part < ReductionQueue._limit": 3,
    "sums are dropped before the copy to the host was waited for": 3,
    # Collectives must begin before what they read is written: where all is late, whoever waits for them has run first
    # what was launched first.
    "wait_stream < Reduction.send < Gradients.reduce": 2,
    "wait_stream < Reduction.send < Gradients._send": 2,
}

# Where values of the scenario in `races/mutants.py` stay right, and those of another one do not.
OTHER_SCENARIO = {
    # A group that was prefetched waits for its all-gather before anything shows: the copy to the device does not.
    "enter < Unsharded._start < Unsharded.unshard_ahead": "offload",
    # With sums in float32, nothing but the copy to the host reads the memory that is given out again.
    "wait_event < Reduction.release < Gradients.release": "offload, low precision",
}

# Told by how torch's engine works; no run has shown it by itself.
_HANDED_OVER = (
    "where autograd hands a gradient to another stream, that waits for all that the first was given until then, also for "
    "reductions that it waits for; in `races` it waits for what has made this gradient"
)
_AGREED = (
    "the host has waited for the stream of the optimizer: ranks agree to enter by a collective whose answer it reads "
    "(`contexts._agreed`), which is left out on the back end of `races`"
)
UNSEEN = {
    "wait_stream < Root.wait_for_optimizer < Root.unshard": (
        "the forward that follows compares what was gathered with the shards, and gathers again: without this "
        "comparison (`UnshardedGroups._reshard_changed`) its output is wrong under schedules 1 and 2"
    ),
    "wait_stream < Root.wait_for_optimizer < begin_inference": _AGREED,
    "wait_event < Root.make_compute_wait_for_optimizer < compute_after_optimizer": _AGREED,
    "a reduction waits for the last of several streams that made gradients": _HANDED_OVER,
    "gradients go back to a stream that does not wait for their reduction": _HANDED_OVER,
    "they do, where sums are cast behind it": _HANDED_OVER,
}

# Values are wrong in some runs only: it hangs on when the threads of ranks and devices run.
SOMETIMES = {
    "wait_event < Reduction.release < Gradients.release": (
        "under schedule 4, where the stream of reductions must get ahead of the one that copies what it has summed"
    )
}


def _needs_four(scenario: str) -> bool:
    """Two mesh dimensions, or parts that some ranks keep."""
    return any(words in scenario for words in ("hybrid", "parts kept", "partly", "tensor "))


def world_of(scenario: str) -> int:
    """How many ranks it takes here."""
    return 4 if _needs_four(scenario) else 2


def mutants() -> list[Case]:
    taken: list[Case] = [(mutant.scenario, mutant.site) for mutant in MUTANTS]
    taken += [(scenario, name) for name, (scenario, _) in PATCHES.items()]
    return [(OTHER_SCENARIO.get(str(what), scenario), what) for scenario, what in taken]


def found_by(late: int, world: int) -> list[Case]:
    return [
        (scenario, what)
        for scenario, what in mutants()
        if str(what) not in {**UNSEEN, **SOMETIMES}
        and FOUND_BY.get(str(what), 1) == late
        and world_of(scenario) == world
    ]
