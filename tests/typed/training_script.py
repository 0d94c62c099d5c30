"""A user's file, for mypy only: what type checkers accept, and what they refuse.

An error that is expected carries ``type: ignore`` with its code; mypy reports those that no longer occur.
"""

from typing import assert_type

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy as TorchCPUOffloadPolicy
from torch.distributed.fsdp import DataParallelMeshDims as TorchDataParallelMeshDims
from torch.distributed.fsdp import MixedPrecisionPolicy as TorchMixedPrecisionPolicy
from torch.distributed.tensor import Shard

import shardwise
from shardwise import (
    CommPolicy,
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    UnshardHandle,
    fully_shard,
    materialize,
    shard_model,
)
from shardwise.policies import ShardPlacementResult
from shardwise.strategies import WrapBySize


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def takes_model(model: Model) -> None: ...


def methods_and_attributes() -> None:
    mesh = init_device_mesh("cpu", (2,))
    model = Model()
    for block in model.blocks:
        assert_type(fully_shard(block, mesh=mesh).unshard(), UnshardHandle)
    sharded = fully_shard(model, mesh=mesh)
    sharded.set_requires_gradient_sync(False)
    sharded.set_requires_gradient_sync("no")  # type: ignore[arg-type]
    sharded.load_state_dict({}, strict="yes")  # type: ignore[arg-type]
    sharded.eval()
    takes_model(sharded)
    kept: Model = fully_shard(model)
    takes_model(kept)
    loss: torch.Tensor = sharded(torch.ones(4))
    loss.backward()
    for each in fully_shard([Block(), Block()]):
        each.reshard()
    fully_shard([nn.Linear(1, 1), nn.LayerNorm(1)])
    if isinstance(model, FSDPModule):
        model.reshard()
        takes_model(model)
    assert_type(materialize(model), Model)
    assert_type(shardwise.__version__, str)


def arguments() -> None:
    block = Block()
    fully_shard(block, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    fully_shard(block, mp_policy=TorchMixedPrecisionPolicy(param_dtype=torch.bfloat16))
    fully_shard(block, mp_policy=None, offload_policy=None)
    fully_shard(block, mp_policy=torch.bfloat16)  # type: ignore[call-overload]
    fully_shard(block, offload_policy=CPUOffloadPolicy())
    fully_shard(block, offload_policy=TorchCPUOffloadPolicy())
    fully_shard(block, offload_policy=True)  # type: ignore[call-overload]
    fully_shard(block, dp_mesh_dims=TorchDataParallelMeshDims(shard="shard"))
    fully_shard(block, shard_placement_fn=lambda param: Shard(param.dim() - 1))
    fully_shard(block, shard_placement_fn=lambda param: ShardPlacementResult(Shard(0)))
    fully_shard(block, reshard_after_forward="never")  # type: ignore[call-overload]
    fully_shard("blocks")  # type: ignore[call-overload]
    CommPolicy(backward_prefetch="after")
    CommPolicy(backward_prefetch="later")  # type: ignore[arg-type]


def strategies() -> None:
    model = Model()
    shard_model(model, strategy="zero2").unshard()
    shard_model(model, strategy="zreo3")  # type: ignore[arg-type]
    shard_model(model, wrap=Block)
    shard_model(model, wrap={Block, nn.Linear})
    shard_model(model, wrap=lambda module: isinstance(module, Block))
    shard_model(model, wrap=lambda name, module: name.startswith("blocks"))
    shard_model(model, wrap=WrapBySize(100))
    shard_model(model, wrap=3)  # type: ignore[arg-type]
    shard_model(model, overrides={"blocks.*": "zero2", Block: {"reshard_after_forward": False}})
    shard_model(model, overrides={"blocks.*": "zreo2"})  # type: ignore[dict-item]
    takes_model(shard_model(model))
