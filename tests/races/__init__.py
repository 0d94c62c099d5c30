"""Races on a simulated device: does every access to memory wait for the one that it depends on?

A model trains on a device whose memory is that of the host and whose streams are lists of what waits for what. Each
operation runs at once; that it *may* run when it does is checked with vector clocks.

clocks.py        what each lane (a stream, the host) knows to be over in every other
memory.py        which lane last read and wrote which bytes; the caching allocator; memory that begins as NaN
reports.py       what was found, with the lines of both accesses
device.py        tensors and streams of the device
dispatch.py      every operation: what it reads and writes, on which lane, and where the host waits
collectives.py   process groups of the device, whose results arrive when they are waited for
simulation.py    all of it together

scenarios.py         what a way to train is; runs one
settings_recipes.py  settings and strategies
caller_recipes.py    other parameters, memory and collectives, and what a caller does between passes
stream_recipes.py    modules that run a branch on a stream of its own
launch_order.py      whether ranks launch collectives in one order
mutants.py           ways to break the waits of `src/shardwise`

test_checker.py  short programs with and without races
test_races.py    no scenario has a race, or a wait that is no mutant; what the host waits for; the order of collectives
test_mutants.py  each mutant is found by some scenario
"""
