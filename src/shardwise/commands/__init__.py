"""The commands of ``python -m shardwise``, one module each, which is imported when its command is chosen.

A module ``NAME.py`` begins with the text that ``NAME --help`` shows, and has two functions:

    add_arguments(parser)       declare options on the ``argparse.ArgumentParser`` of the command
    run(arguments) -> int       do it, and return the exit status: 0, or 1 if what was looked at is wrong

Under torchrun all ranks run the command, and rank 0 prints. To add one: a module here, and a line below.
"""

COMMANDS = {
    "estimate": "estimate what training a model needs on each rank, without a GPU",
    "doctor": "check a job's machines, network and folders before training on them",
    "convert": "convert a checkpoint to safetensors files, or back",
    "run": "run a script that was written for torch's fully_shard with this library",
}
"""What each command is for, in a line."""


class UsageError(Exception):
    """What the caller has typed cannot work on any rank. Rank 0 prints the text; the exit status is 2."""


class RankError(UsageError):
    """The same, of this rank alone, which prints the text itself."""
