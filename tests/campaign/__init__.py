"""Random training programs, run sharded and emulated without sharding: the numbers must be equal.

program.py    what a program is, as plain data, and how one is drawn
modules.py    the kinds of modules it is built of
actor.py      a rank that runs it, sharded or plain
compare.py    run both, compare what they have noted, make a failing program small
"""
