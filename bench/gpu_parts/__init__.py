"""What `bench/gpu.py` runs: a day's work for one GPU, in parts that also run on the host, as far as they can.

plan.py         the parts: what each shows, how long it takes, where it lives
processes.py    a part in a process of its own, with time limits; its findings; the record that runs share
probes.py       facts about this torch, CUDA and NCCL on which the library relies
correctness.py  recipes in a world of clones, with delays; and with ranks as threads, against plain training
nccl.py         NCCL itself, with as many ranks on one GPU as its version allows
speed.py        steps beside the peer's: time, host, memory, and what a wire would leave
trace.py        what a step launches
compiled.py     a CUDA graph of a step, reduce-overhead a block, Inductor over the whole model
tools.py        compute-sanitizer over a step, a picture of memory
"""
