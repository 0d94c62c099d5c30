"""What a step does once all is planned: the same each time, and nothing that waits for a device.

This is what capturing a step in a CUDA graph needs of a library.
"""

from typing import Any

import pytest
import torch
from models import even_tower, random_batch, shard_tower
from on_ranks import on_ranks
from reference import mean_of_squares
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise import MixedPrecisionPolicy
from shardwise.optim import FlatOptimizer

WAIT_FOR_A_DEVICE = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "unique", "masked_select")
ALLOCATE = ("empty", "zeros", "new_empty", "new_zeros", "empty_like", "zeros_like", "clone")


class Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("world", "dtype"), [(1, None), (2, None), (2, torch.bfloat16)], indirect=["world"], ids=str
)
@on_ranks()
def test_a_steady_step_runs_the_same_operators_allocates_little_and_waits_for_no_device(
    dtype: torch.dtype | None,
) -> None:
    num_parameters = len(list(even_tower().parameters()))
    torch.manual_seed(0)
    model = even_tower()
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=None if dtype is None else torch.float32)
    shard_tower(model, mp_policy=policy)
    optimizer = FlatOptimizer(torch.optim.AdamW(model.parameters(), fused=True))
    of_steps = []
    for step in range(8):
        inputs = random_batch(step, 4, dtype=torch.float32)
        with Recorder() as recorder:
            mean_of_squares(model, inputs).backward()
            optimizer.step()
            optimizer.zero_grad()
        of_steps.append(recorder.names)
    first, second, third = of_steps[-3:]
    assert first == second == third
    assert "_fused_adamw_" in first  # the recorder sees what happens
    assert not set(first).intersection(WAIT_FOR_A_DEVICE)
    if dtype is None:
        assert sum(name in ALLOCATE for name in first) < num_parameters
