"""NCCL itself, in small: what `bench/gpu.py --only nccl` asks of it, with as many ranks as it takes on one GPU."""

import pytest
import torch
from gpu_parts import nccl
from gpu_parts.plan import Options, Skipped

ITEMS = dict(nccl.items(Options("cuda", is_tiny=True)))


@pytest.mark.gpu
@pytest.mark.processes
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ITEMS)
def test_nccl_gives_what_is_asked_of_it(name: str) -> None:
    try:
        ITEMS[name]()
    except Skipped as reason:
        pytest.skip(str(reason))
