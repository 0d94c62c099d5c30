"""What `bench/gpu.py` runs: a day's work for one GPU, in parts that also run on the host, as far as they can.

plan.py         the parts: what each shows, how long it takes, where it lives
processes.py    a part in a process of its own, with time limits; its findings; the record that runs share
probes.py       facts about this torch, CUDA and NCCL on which the library relies
correctness.py  recipes in a world of clones, with delays; and with ranks as threads, against plain training
worlds.py       processes that are ranks, on a GPU each or all on one
nccl.py         NCCL itself
ranks.py        a rank that fails, devices in other orders, coalesced against packed all-gathers
steady.py       waits of the host in steady steps, memory reserved against allocated
speed.py        steps beside the peer's: time, host, memory, and what a wire would leave
trace.py        what a step launches
compiled.py     CUDA graphs of a step and an iteration, reduce-overhead a block, Inductor over the whole model
tools.py        compute-sanitizer over a step, a picture of memory
"""
