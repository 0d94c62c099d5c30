"""What tensor subclasses may rely on while they all-gather themselves.

Classes that were written for torch's fully_shard keep a scale beside the bytes that travel and refresh it in
place, pad uneven shards, ask the mesh how many ranks share a weight, begin on the meta device, or are no
classes at all but methods put on single tensors. The reference is plain training with the same rounding.
"""

from types import MethodType
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from expecttest import assert_expected_inline
from models import WIDTH, random_batch
from on_ranks import on_ranks
from reference import full, mean_of_squares
from scenario import Side, same_as_plain
from tensor_subclasses import TravelsLow, Wrapper
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from shardwise import DataParallelMeshDims, fully_shard, materialize

# --- the classes ----------------------------------------------------------------------------------


class Coded(Wrapper):
    """A full weight: int8 codes that travelled, and a scale beside them that did not."""

    inner = ("_codes",)
    scale: Tensor

    @classmethod
    def of(cls, codes: Tensor, scale: Tensor, dtype: torch.dtype) -> "Coded":
        made = cls(codes, dtype=dtype)
        made.scale = scale
        return made

    def values(self) -> Tensor:  # type: ignore[override]
        return self._codes.to(self.dtype) * self.scale

    def keeping_class(self, func: Any, args: Any, kwargs: Any) -> Any:
        out = super().keeping_class(func, args, kwargs)
        for each in out if isinstance(out, list) else [out]:
            each.scale = self.scale
        return out


class Scaled(Wrapper):
    """Trained in full precision; travels as int8 with one scale, which all ranks that share it agree on."""

    inner = ("_master",)
    pads = False
    asked: list[tuple[int, int]] = []  # noqa: RUF012 (size and dims of the mesh, one list a process)

    def values(self) -> Tensor:  # type: ignore[override]
        return self._master

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        return args[0] if func._schema.name.endswith("_") and isinstance(args[0], cls) else result

    def keeping_class(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func is torch.ops.aten.copy_.default and type(args[1]) is Tensor:
            self._master.copy_(args[1])
            return self
        return super().keeping_class(func, args, kwargs)

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], Any]:
        Scaled.asked.append((mesh.size(), mesh.ndim))
        highest = self._master.abs().amax() if self._master.numel() else self._master.new_zeros(())
        dist.all_reduce(highest, dist.ReduceOp.MAX, group=mesh.get_group())
        codes = (self._master / (highest / 127)).round().to(torch.int8)
        if self.pads:
            chunk = -(-outer_size[0] // mesh.size())
            codes = F.pad(codes, (0, 0, 0, chunk - len(codes)))
        return (codes,), (highest / 127,)

    def fsdp_post_all_gather(
        self, outputs: tuple[Tensor, ...], metadata: Any, param_dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        ((codes,), (scale,)) = outputs, metadata
        if out is not None:
            out.scale = scale
            return None
        return Coded.of(codes, scale, param_dtype), (codes,)


class Padded(Scaled):
    pads = True


class _RoundAsCoded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        scale = weight.abs().amax() / 127
        return (weight / scale).round() * scale

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0]


class CodedLinear(nn.Linear):
    """A linear layer that computes with what has travelled; plainly, with the same rounding."""

    def forward(self, x: Tensor) -> Tensor:
        weight: Any = self.weight
        return F.linear(x, weight if isinstance(weight, Coded) else _RoundAsCoded.apply(weight), self.bias)


def model_of(side: Side, kind: type[Scaled], rows: int, device: str = "cpu") -> nn.Module:
    with torch.device(device):
        torch.manual_seed(1)
        model = nn.Sequential(
            CodedLinear(WIDTH, rows, dtype=torch.float64),
            nn.Tanh(),
            CodedLinear(rows, rows, dtype=torch.float64),
            nn.Linear(rows, 1, dtype=torch.float64),
        )
    for layer in (model[0], model[2]) if side.is_sharded else ():
        layer.weight = nn.Parameter(kind(layer.weight.detach()))
    return model


def train(side: Side, model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(3):
        optimizer.zero_grad()
        loss = mean_of_squares(model, side.inputs(step))
        loss.backward()
        side.note_mean("loss", loss)
        side.note_gradients(model)
        optimizer.step()
        with torch.inference_mode():
            side.note_rows("evaluation", model(side.inputs(9 + step)))


# --- what it carries beside its data --------------------------------------------------------------


@same_as_plain(1, 2)
@pytest.mark.parametrize("reshard", [True, False])
def test_a_scale_that_each_unshard_refreshes_is_what_the_module_computes_with(
    side: Side, reshard: bool
) -> None:
    model = model_of(side, Scaled, 6)
    side.shard(model[2], model, reshard_after_forward=reshard)
    train(side, model)


# --- padding, and meshes --------------------------------------------------------------------------

MESHES: dict[str, tuple[tuple[int, ...], tuple[str, ...] | None, Any, int]] = {
    "hybrid": ((2, 2), ("dp_r", "dp_s"), None, 2),
    "hybrid without names": ((2, 2), None, None, 2),
    "sharded over both": ((2, 2), ("a", "b"), DataParallelMeshDims(shard=("a", "b")), 4),
    "only replicated": ((4,), ("dp",), DataParallelMeshDims(replicate="dp"), 1),
}


@same_as_plain(4)
@pytest.mark.slow
@pytest.mark.parametrize("rows", [5, 8])
def test_the_padding_is_cut_and_the_mesh_is_of_the_ranks_that_share(side: Side, rows: int) -> None:
    for shape, names, dims, sharing in MESHES.values():
        model = model_of(side, Padded, rows)
        if side.is_sharded:
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
            Scaled.asked.clear()
            side.shard(model[2], model, mesh=mesh, dp_mesh_dims=dims)
        train(side, model)
        if side.is_sharded:
            assert set(Scaled.asked) == {(sharing, 1)}


@on_ranks(2)
def test_a_result_of_another_shape_is_refused() -> None:
    model = model_of(Side(is_sharded=True), Scaled, 6)
    fully_shard(model, shard_placement_fn=lambda p: Shard(p.dim() - 1))
    with pytest.raises(RuntimeError) as caught:
        model(random_batch(0, 4))
    assert_expected_inline(
        str(caught.value),
        """0.weight: Scaled.fsdp_post_all_gather returned shape (12, 4), where a tensor of shape (6, 8) is expected; or one with more rows, which are cut off, if it is sharded on dim 0. Return a tensor of the shape of the whole parameter.""",
    )


# --- values that come late ------------------------------------------------------------------------


@same_as_plain(2)
@pytest.mark.parametrize("how", ["materialize", "to_empty and load_state_dict"])
def test_weights_that_all_gather_themselves_may_begin_on_the_meta_device(side: Side, how: str) -> None:
    model = model_of(side, Padded, 5, "meta")
    side.shard(model[2], model)
    if how != "materialize":
        source = side.shard(model_of(side, Padded, 5))
        model.to_empty(device="cpu")
        model.load_state_dict(source.state_dict())
    elif side.is_sharded:
        torch.manual_seed(3)
        materialize(model)
    else:
        model.to_empty(device="cpu")
        torch.manual_seed(3)
        for layer in (model[0], model[2], model[3]):
            layer.reset_parameters()
    train(side, model)


# --- methods of single tensors --------------------------------------------------------------------


def pre(self: Tensor, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any) -> Any:
    assert type(self) is Tensor
    return (self.bfloat16(),), tuple(outer_size)


def post(self: Tensor, outputs: Any, metadata: Any, param_dtype: Any, *, out: Any = None) -> Any:
    (low,) = outputs
    if out is None:
        full = low.to(param_dtype)
        return full, (low, full)
    assert out.shape == metadata
    out.copy_(low)
    return None


class _Round(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        return weight.bfloat16().to(weight.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0]


class LowLinear(nn.Linear):
    """Rounded by whoever all-gathers it; plainly, by itself."""

    rounds = False

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, _Round.apply(self.weight) if self.rounds else self.weight, self.bias)


def give_methods(tensor: Any) -> None:
    tensor.fsdp_pre_all_gather = MethodType(pre, tensor)
    tensor.fsdp_post_all_gather = MethodType(post, tensor)


def low_model(side: Side) -> nn.Module:
    torch.manual_seed(1)
    model = nn.Sequential(LowLinear(WIDTH, 5), nn.Tanh(), LowLinear(5, 5), nn.Linear(5, 1)).double()
    for layer in (model[0], model[2]):
        layer.rounds = not side.is_sharded
    return model


@same_as_plain(2)
def test_methods_put_on_local_tensors_are_called(side: Side) -> None:
    model = low_model(side)
    side.shard(model[2], model, reshard_after_forward=True)
    for layer in (model[0], model[2]) if side.is_sharded else ():
        give_methods(layer.weight._local_tensor)
    if side.is_sharded:
        model.set_force_sum_reduction_for_comms(True)
    train(side, model)
    if side.is_sharded:  # what was chosen for the group holds for its parameter with methods as well
        buckets = model._shardwise_state.group.buckets
        assert [bucket.communication.reduce_scatter.force_sum for bucket in buckets] == [True, True]


@on_ranks(2)
def test_half_of_the_methods_or_lost_ones_are_an_error() -> None:
    side = Side(is_sharded=True)
    model = side.shard(low_model(side))
    local: Any = model[0].weight._local_tensor
    local.fsdp_pre_all_gather = MethodType(pre, local)
    with pytest.raises(TypeError) as half:
        model(random_batch(0, 4))
    give_methods(local)
    model(random_batch(0, 4))
    model.load_state_dict(model.state_dict(), assign=True)
    with pytest.raises(RuntimeError) as lost:  # once another bucket's all-gather was issued
        model(random_batch(0, 4))
    dist.all_reduce(torch.ones(1))
    assert_expected_inline(
        "\n".join((str(half.value), str(lost.value))),
        """\
0.weight holds a Tensor, which has fsdp_pre_all_gather but no fsdp_post_all_gather; an all-gather needs both. Add it to the class, or to the tensor that has the other.
0.weight: its shard was replaced by a Tensor without fsdp_pre_all_gather and fsdp_post_all_gather. Methods that were put on a tensor stay with that tensor: put them on the new local tensor as well, or on its class.""",
    )


# --- laid out anew --------------------------------------------------------------------------------


class BesideAnOrdinaryOne(nn.Module):
    def __init__(self, is_extended: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.low, self.plain = nn.Linear(8, 8, bias=False), nn.Linear(8, 8)
        weight = self.low.weight.detach().bfloat16().float()
        self.low.weight = nn.Parameter(TravelsLow(weight, dtype=weight.dtype) if is_extended else weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.plain(torch.tanh(self.low(x)).to(self.plain.weight.dtype))


@on_ranks(2)
def test_gradients_wait_while_a_neighbour_is_cast() -> None:
    model, reference = BesideAnOrdinaryOne(True), BesideAnOrdinaryOne(False)
    fully_shard(model)
    model.set_requires_gradient_sync(False)
    for each in (model, reference):
        each(torch.ones(4, 8)).square().sum().backward()
        each.plain.double()
    model.set_requires_gradient_sync(True)
    for each in (model, reference):
        each(torch.ones(4, 8)).square().sum().backward()
    torch.testing.assert_close(full(model.plain.bias.grad), reference.plain.bias.grad, rtol=1e-2, atol=1e-2)
