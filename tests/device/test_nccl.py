"""NCCL itself, in small: what `bench/gpu.py --only nccl ranks` asks of it, with as many ranks as there can be."""

import pytest
import torch
from gpu_parts import nccl, ranks
from gpu_parts.plan import Options, Skipped

TINY = Options("cuda", is_tiny=True)
ITEMS = {**dict(nccl.items(TINY)), **dict(ranks.items(TINY))}


@pytest.mark.gpu
@pytest.mark.processes
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ITEMS)
def test_nccl_gives_what_is_asked_of_it(name: str) -> None:
    try:
        found = ITEMS[name]()
    except Skipped as reason:
        pytest.skip(str(reason))
    rows = found if isinstance(found, list) else [found]
    assert [row for row in rows if row.get("status", "ok") not in ("ok", "skipped")] == []
