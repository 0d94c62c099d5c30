"""torchtitan's own trainer and Llama on CPUs: a device it can do with, its debug model, batches of known tokens.

torchtitan takes "cuda" for its device where there is none, and its attention has no backward on CPUs. So this module
names the CPU as the device, before torchtitan is imported, and `llama` asks for torch's attention. What else runs is
torchtitan's, as `torchtitan.train` starts it:

    torchrun --nproc-per-node 2 -m shardwise run tests/interop/titan.py --module titan --config llama
    SHARDWISE_INSTALL=0 torchrun --nproc-per-node 2 -m shardwise run tests/interop/titan.py --module titan --config llama
"""

from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch._utils
from torch import Tensor
from torch.utils.data import IterableDataset

torch._utils._get_available_device_type = lambda: "cpu"
torch.cpu.current_device = lambda: 0
for _name, _value in {
    "get_device_name": lambda device=None: "CPU",
    "get_device_properties": lambda device=None: SimpleNamespace(total_memory=1 << 30, name="CPU"),
    "reset_peak_memory_stats": lambda device=None: None,
    "empty_cache": lambda: None,
    "memory_stats": lambda device=None: {},
}.items():
    if not hasattr(torch.cpu, _name):
        setattr(torch.cpu, _name, _value)

if not hasattr(
    torch.distributed, "set_timeout"
):  # of newer torch; 100 s after the first step, as torchtitan wants
    torch.distributed.set_timeout = lambda timeout, group=None: None

from torchtitan.components.dataloader import ParallelAwareDataloader  # noqa: E402
from torchtitan.models.common.attention import ScaledDotProductAttention  # noqa: E402
from torchtitan.models.llama3.config_registry import llama3_debugmodel  # noqa: E402
from torchtitan.trainer import Trainer  # noqa: E402

ROWS, LENGTH, VOCABULARY = 4, 16, 2048  # of all ranks together


class _Rows(IterableDataset):
    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world = rank, world

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        for step in range(100):
            tokens = torch.randint(
                VOCABULARY, (ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(step)
            )
            share = ROWS // self.world
            for row in tokens[self.rank * share : (self.rank + 1) * share]:
                yield {"input": row[:-1], "positions": torch.arange(LENGTH)}, row[1:]


class Batches(ParallelAwareDataloader):
    @dataclass(kw_only=True, slots=True)
    class Config(ParallelAwareDataloader.Config):
        """Nothing to choose."""

    def __init__(
        self, config: Config, *, dp_world_size: int, dp_rank: int, local_batch_size: int, **_: Any
    ) -> None:
        super().__init__(
            _Rows(dp_rank, dp_world_size),
            dp_rank=dp_rank,
            dp_world_size=dp_world_size,
            batch_size=local_batch_size,
        )


class NoTokenizer:
    @dataclass(kw_only=True, slots=True)
    class Config:
        def build(self, **_: Any) -> None:
            """No tokenizer."""


def llama() -> Trainer.Config:
    """torchtitan's debug model of Llama 3 and its options, in float32."""
    config = llama3_debugmodel()
    assert config.model_spec is not None
    for layer in config.model_spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    config.tokenizer = NoTokenizer.Config()
    config.dataloader = Batches.Config()
    config.training.seq_len = LENGTH
    config.training.local_batch_size = 2
    config.training.steps = 3
    config.training.mixed_precision_param = "float32"
    config.training.disable_cuda_graphs = True
    return config


if __name__ == "__main__":
    from torchtitan.train import main

    main()
