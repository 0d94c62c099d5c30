"""Sharded training on one device, with values that really travel: for `gpu_parts`, and for tests.

groups.py     process groups whose ranks are on one device and exchange by copies on the current stream
lanes.py      delays of one stream at a time, and memory that is NaN while it must not be read
side.py       where a program runs: sharded among clones or threads, or plainly
recipes.py    training programs: one for each way to shard, reduce, keep and step
"""

import sys
from pathlib import Path

for _folder in ("tests", "tests/support"):  # the models that tests train
    _path = str(Path(__file__).parents[2] / _folder)
    if _path not in sys.path:
        sys.path.append(_path)
