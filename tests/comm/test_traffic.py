"""How much is cast, sent and held: one cast an all-gather, one sum over replicas a group, few at a time."""

from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from events import events_of
from expecttest import assert_expected_inline
from harness import World
from on_ranks import on_ranks
from simulated_device import streams_on_the_host
from strange_optimizers import CountsBesideParameters
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise import MixedPrecisionPolicy, fully_shard
from shardwise.comm import communicators
from shardwise.comm.communicators import BackendCollectives, unless_alone
from shardwise.observe import memory_snapshot
from shardwise.optim import offload_optimizer_state

DEPTH = 5


def stack(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8)) for _ in range(DEPTH))
    )
    for block in model:
        fully_shard(block, **options)
    return fully_shard(model, **options)


class Casts(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.numels: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default and args[0].dtype != args[1].dtype:
            self.numels.append(args[0].numel())
        return func(*args, **(kwargs or {}))


@on_ranks(2)
def test_an_all_gather_casts_the_flat_shard_once() -> None:
    model = stack(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    model(torch.ones(2, 8))
    with Casts() as casts:
        model[0].unshard()
    model[0].reshard()
    assert casts.numels == [(memory_snapshot(model[0]).shard_bytes // 4)]


@on_ranks(2)
def test_one_sum_over_replicas_a_group_and_two_reductions_at_a_time() -> None:
    """So their memory does not pile up over layers."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    model = stack(mesh=mesh)
    events = events_of(model)
    sizes: list[int] = []
    plain = dist.all_reduce

    def counted(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        sizes.append(tensor.numel())
        events.append("sum over replicas")
        return plain(tensor, *args, **kwargs)

    loss = model(torch.ones(2, 8)).sum()
    events.clear()
    with mock.patch.object(dist, "all_reduce", counted):
        loss.backward()
    own = [memory_snapshot(block).shard_bytes // 4 for block in model]
    assert sizes == own[::-1]
    # Where nothing is sharded, the sum over replicas begins when the group's gradients are complete.
    assert_expected_inline(
        "\n".join(e for e in events if e.startswith(("reduce", "sum"))),
        """\
sum over replicas
reduce 4
sum over replicas
reduce 3
sum over replicas
reduce 2
reduced 4
sum over replicas
reduce 1
reduced 3
sum over replicas
reduce 0
reduced 2
reduced 1
reduced 0""",
    )


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(4, 4, bias=False), nn.Parameter(torch.tensor(2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * self.scale


def streams_of_a_scalar(shape: tuple[int, ...]) -> tuple[list[str], float]:
    """The streams that broadcasts of its gradient ran on, and that gradient."""
    names = ("replicate", "shard")[-len(shape) :]
    make = unless_alone(BackendCollectives)
    on_back_end = mock.patch.object(communicators, "make_communicator", make)
    with streams_on_the_host() as device, on_back_end:
        torch.manual_seed(0)
        model = Scaled()
        fully_shard(model, mesh=init_device_mesh("cpu", shape, mesh_dim_names=names))
        used: list[str] = []
        plain = dist.broadcast

        def noted(*args: Any, **kwargs: Any) -> Any:
            used.append(device.current[-1].name)
            return plain(*args, **kwargs)

        with mock.patch.object(dist, "broadcast", noted):
            model(torch.full((1, 4), 1.0 + dist.get_rank())).sum().backward()
        streams = [line for line in device.log if line == "replicate is current"]
    return used + streams, model.scale.grad.full_tensor().item()  # type: ignore[attr-defined]


def test_scalars_are_broadcast_by_the_stream_that_reduces(world2: World) -> None:
    """On the stream of the replicas, later reductions of the same communicator would wait for it."""
    torch.manual_seed(0)
    plain = Scaled()
    sum(plain(torch.full((1, 4), 1.0 + rank)).sum() / 2 for rank in range(2)).backward()  # type: ignore[union-attr]
    for used, gradient in world2.run(streams_of_a_scalar, (2,)):
        assert used == ["reduce"]
        torch.testing.assert_close(gradient, plain.scale.grad.item())  # type: ignore[union-attr]


def test_with_replicas_they_are_broadcast_once_replicas_are_summed(world4: World) -> None:
    for used, _ in world4.run(streams_of_a_scalar, (2, 2)):
        assert used == ["replicate", "replicate is current"]


def test_state_that_is_of_no_parameter_stays_where_it_is() -> None:
    param = nn.Parameter(torch.ones(2))
    optimizer = CountsBesideParameters([param], lr=0.5)
    offload_optimizer_state(optimizer, pin_memory=False)
    for _ in range(2):
        param.grad = torch.ones(2)
        optimizer.step()
    assert optimizer.state["all"] == {"count": 2}
    assert torch.equal(param.detach(), torch.full((2,), 0.25))
