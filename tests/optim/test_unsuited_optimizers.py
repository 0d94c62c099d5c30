"""Optimizers that DTensors do not suit: stepped on flat shards, or refused before anything has changed."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from harness import World
from reference import full
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from shardwise import fully_shard
from shardwise.optim import FlatOptimizer

Optimizer = torch.optim.Optimizer
ROWS = 6  # of a batch


def small_model(width: int, is_sharded: bool) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width)).double()
    if is_sharded:
        fully_shard(model[0])
        fully_shard(model)
    return model


def backward(model: nn.Module, step: int) -> Tensor:
    width = model[0].in_features  # type: ignore[index]
    x = torch.randn(ROWS, width, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
    loss = model(x).square().sum()
    loss.backward()
    return loss


def values(model: nn.Module) -> dict[str, Tensor]:
    return {name: full(param.detach()).clone() for name, param in model.named_parameters()}


def assert_equal(found: list[dict[str, Tensor]], expected: dict[str, Tensor]) -> None:
    for values in found:
        assert values.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(values[name], value, rtol=1e-10, atol=1e-12)


# --- classes whose first base is another ----------------------------------------------------------


class Abstract(ABC, Optimizer):
    """As the classes of some packages are made."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            group.setdefault("beta", 0.5)

    @abstractmethod
    def update(self, gradient: Tensor, state: Any, beta: float) -> Tensor: ...

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    beta = group.get("beta", 0.9)
                    param.add_(self.update(param.grad, self.state[param], beta), alpha=-group["lr"])
        return loss


class SignMomentum(Abstract):
    """Elementwise, with state."""

    def update(self, gradient: Tensor, state: Any, beta: float) -> Tensor:
        average = state.setdefault("average", torch.zeros_like(gradient))
        average.mul_(beta).add_(gradient, alpha=1 - beta)
        return average.sign() + 0.1 * average


def sign_momentum(params: Any, lr: float, is_flat: bool) -> Any:
    optimizer = SignMomentum(params, lr)
    return FlatOptimizer(optimizer, elementwise=True) if is_flat else optimizer


def trained_by_sign_momentum(is_sharded: bool) -> dict[str, Tensor]:
    model = small_model(5, is_sharded)
    optimizer = sign_momentum(model.parameters(), 0.01, is_sharded)
    for step in range(6):
        if step == 3:
            state = optimizer.state_dict()
            optimizer = sign_momentum(model.parameters(), 1.0, is_sharded)
            optimizer.load_state_dict(state)
            assert isinstance(optimizer, SignMomentum)
            assert optimizer.param_groups[0]["beta"] == 0.5  # by the __setstate__ of its class
            assert repr(optimizer).startswith("FlatOptimizer(SignMomentum (" if is_sharded else "SignMom")
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step()
    return values(model)


def test_a_class_behind_an_abstract_one_is_stepped_flat(world2: World) -> None:
    assert_equal(world2.run(trained_by_sign_momentum, True), trained_by_sign_momentum(False))


# --- what only claims to be elementwise -----------------------------------------------------------


class ByNorms(Abstract):
    def update(self, gradient: Tensor, state: Any, beta: float) -> Tensor:
        return gradient / gradient.norm()


class ByRows(Abstract):
    def update(self, gradient: Tensor, state: Any, beta: float) -> Tensor:
        return gradient * gradient.sum(-1, keepdim=True)


class AtRandom(Abstract):
    def update(self, gradient: Tensor, state: Any, beta: float) -> Tensor:
        return gradient * torch.rand_like(gradient)


class Clipping(torch.optim.SGD):
    """Elementwise, unless it clips: by the norm of all parameters together, and of large gradients only."""

    most = float("inf")

    def step(self, closure: Any = None) -> Any:
        nn.utils.clip_grad_norm_(self.param_groups[0]["params"], self.most)
        return super().step(closure)


def refusal(function: Callable[..., Any], *args: Any, **options: Any) -> str:
    with pytest.raises(ValueError, match="FlatOptimizer: ") as caught:
        function(*args, **options)
    return str(caught.value)


@pytest.mark.parametrize("kind", [ByNorms, ByRows, AtRandom, Clipping, torch.optim.Adafactor])
def test_what_small_tensors_show_not_to_be_elementwise_is_refused(kind: Any) -> None:
    torch.optim.SGD([nn.Parameter(torch.ones(2, 2))])  # puts hooks around the step that Clipping's calls
    optimizer = kind([nn.Parameter(torch.ones(2, 2))], lr=0.1)
    optimizer.most = 3.0
    before, draws = deepcopy(optimizer.state_dict()), torch.get_rng_state()
    hooks: list[Any] = []
    optimizer.register_step_pre_hook(lambda *args: hooks.append(args))
    assert "does not treat each element" in refusal(FlatOptimizer, optimizer, elementwise=True)
    assert type(optimizer) is kind
    assert optimizer.state_dict() == before
    assert torch.equal(torch.get_rng_state(), draws)
    assert not hooks


def test_blocks_with_a_scale_each_are_refused() -> None:
    """Small tensors show nothing: what has fewer than 4096 elements is not quantised."""
    optimizer = AdamW8bit([nn.Parameter(torch.ones(2, 2))])
    assert_expected_inline(
        refusal(FlatOptimizer, optimizer, elementwise=True),
        """FlatOptimizer: AdamW8bit does not treat each element of a parameter by itself: it keeps state in blocks with a scale each. So parameters cannot be stepped as one flat tensor. Use it without FlatOptimizer.""",
    )


def test_what_is_known_to_look_at_whole_parameters_is_refused() -> None:
    """Lamb here is Adam, on which small tensors would show nothing."""
    optimizer = Lamb([nn.Parameter(torch.ones(2, 2))])
    assert_expected_inline(
        refusal(FlatOptimizer, optimizer, elementwise=True),
        """FlatOptimizer: Lamb does not treat each element of a parameter by itself: it looks at whole parameters. So parameters cannot be stepped as one flat tensor. Use it without FlatOptimizer.""",
    )


def test_options_decide_what_is_elementwise() -> None:
    optimizer = Clipping([nn.Parameter(torch.ones(2, 2))], lr=0.1)
    assert isinstance(FlatOptimizer(optimizer, elementwise=True), Clipping)


class Wrapper(Optimizer):
    """Steps by another, as some packages do."""

    def __init__(self, inner: Optimizer) -> None:
        self.inner = inner
        self.defaults = inner.defaults
        self._optimizer_step_pre_hooks = self._optimizer_step_post_hooks = {}  # type: ignore[assignment]

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        return self.inner.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.inner.state


def test_an_optimizer_around_another_is_refused_and_left_as_it_was() -> None:
    wrapper = Wrapper(torch.optim.SGD([nn.Parameter(torch.ones(2))]))
    assert_expected_inline(
        refusal(FlatOptimizer, wrapper, elementwise=True),
        """FlatOptimizer: Wrapper keeps no state of its own; it seems to step by another optimizer. Make that one a FlatOptimizer, before it is wrapped.""",
    )
    assert type(wrapper) is Wrapper


# --- flat by default ------------------------------------------------------------------------------


def halve(optimizer: Optimizer, *_: Any) -> None:
    for param in optimizer.param_groups[0]["params"]:
        param.grad.mul_(0.5)


def trained_by_rprop(is_sharded: bool, how: str) -> tuple[dict[str, Tensor], list[float]]:
    model = small_model(5, is_sharded)
    optimizer = torch.optim.Rprop(model.parameters(), lr=0.01)
    losses = []
    if how == "scheduler":  # keeps the step that the optimizer has now
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    if how != "closure":
        optimizer.register_step_pre_hook(halve)
    seen: list[int] = []
    optimizer.register_step_post_hook(lambda stepped, *_: seen.append(id(stepped)))
    for step in range(5):
        if how == "closure":

            def closure(step: int = step) -> Tensor:
                model.zero_grad()
                return backward(model, step)

            losses.append(float(full(optimizer.step(closure))))
            continue
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step()
        if how == "scheduler":
            scheduler.step()
        if how == "saved" and step == 2:
            state = deepcopy(optimizer.state_dict())
            optimizer = torch.optim.Rprop(model.parameters())
            optimizer.register_step_pre_hook(halve)
            optimizer.load_state_dict(state)
    assert set(seen) <= {id(optimizer)} or how == "saved"
    assert len(seen) == (3 if how == "saved" else 5)
    return values(model), losses


@pytest.mark.parametrize("how", ["plainly", "closure", "scheduler", "saved"])
def test_rprop_is_stepped_on_flat_shards_by_default(world2: World, how: str) -> None:
    expected, expected_losses = trained_by_rprop(False, how)
    for found, losses in world2.run(trained_by_rprop, True, how):
        assert_equal([found], expected)
        assert losses == pytest.approx(expected_losses)


class Adan(Clipping):
    """An elementwise one by name, which is not with all of its options."""

    __module__ = "pytorch_optimizer.optimizer"


def stepped_by_name(most: float) -> Any:
    model = small_model(4, True)
    torch.optim.SGD(model.parameters())  # from here on there are hooks around the step that Adan's calls
    optimizer = Adan(model.parameters(), lr=0.1)
    optimizer.most = most
    backward(model, 0)
    before = values(model)
    try:
        optimizer.step()
    except RuntimeError as error:
        assert_equal([values(model)], before)
        return str(error)
    return isinstance(optimizer, FlatOptimizer)


def test_what_is_flat_by_default_is_so_only_where_options_allow(world2: World) -> None:
    assert world2.run(stepped_by_name, float("inf")) == [True, True]
    first, second = world2.run(stepped_by_name, 1.0)
    assert first == second
    assert_expected_inline(
        first,
        """0.weight: Adan of pytorch_optimizer cannot step sharded parameters with these options: it uses an operation that torch's DTensor lacks, and cannot be stepped on flat shards, since it does not treat each element by itself. Nothing was changed. Choose other options or another optimizer: docs/interop/optimizers.md of shardwise lists what works.""",
    )


def resumed(num_steps: int, optimizer_class: Any) -> dict[str, Tensor]:
    """Goes on after half of the steps in another model and optimizer, which have done nothing before."""
    model = small_model(5, is_sharded=True)
    optimizer = optimizer_class(model.parameters(), lr=0.01)
    for step in range(num_steps):
        if step == num_steps // 2:
            state, own = get_state_dict(model, optimizer)
            model = small_model(5, is_sharded=True)
            optimizer = optimizer_class(model.parameters(), lr=0.01)
            set_state_dict(model, optimizer, model_state_dict=state, optim_state_dict=own)
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step()
    return values(model)


def test_torch_loads_its_state_before_the_first_forward(world2: World) -> None:
    plain = small_model(5, is_sharded=False)
    optimizer = torch.optim.Rprop(plain.parameters(), lr=0.01)
    for step in range(6):
        optimizer.zero_grad()
        backward(plain, step)
        optimizer.step()
    assert_equal(world2.run(resumed, 6, torch.optim.Rprop), values(plain))


# --- refused at the first step --------------------------------------------------------------------


class Lamb(torch.optim.Adam):
    __module__ = "pytorch_optimizer.optimizer.lamb"


class OwnLamb(Lamb):
    """Of somebody who knows better."""


KINDS: dict[str, Callable[..., Any]] = {
    "Adafactor": torch.optim.Adafactor,
    "LBFGS": torch.optim.LBFGS,
    "Lamb": Lamb,
    "OwnLamb": OwnLamb,
}


def first_step(kind: str, width: int) -> str:
    model = small_model(width, True)
    optimizer = KINDS[kind](model.parameters())
    loss = backward(model, 0).detach()
    before = values(model)
    called: list[int] = []

    def closure() -> Tensor:
        called.append(1)
        return loss

    try:
        optimizer.step(closure)
    except RuntimeError as error:
        assert_equal([values(model)], before)
        assert not called
        assert not optimizer.state
        return str(error)
    return "steps"


def test_what_cannot_step_shards_is_refused_before_anything_changes(world2: World) -> None:
    texts = []
    for kind, width in (("Adafactor", 4), ("LBFGS", 4), ("LBFGS", 5), ("Lamb", 4), ("OwnLamb", 4)):
        first, second = world2.run(partial(first_step, kind, width))
        assert first == second
        texts.append(f"{kind}, {width} rows: {first}")
    assert_expected_inline(
        "\n".join(texts),
        """\
Adafactor, 4 rows: 0.weight: Adafactor of torch.optim cannot step sharded parameters: it computes norms or sums over whole parameters in ways that torch's DTensor does not support. Nothing was changed. Use another optimizer: docs/interop/optimizers.md of shardwise lists what works. Functions of whole matrices run with shardwise.optim.on_whole_matrices.
LBFGS, 4 rows: steps
LBFGS, 5 rows: 0.weight: LBFGS of torch.optim flattens parameters, which torch's DTensor cannot do with shape (5, 5) in 2 shards of different sizes. Nothing was changed. Choose sizes that divide by the ranks, or another optimizer: docs/interop/optimizers.md of shardwise lists what works.
Lamb, 4 rows: 0.weight: Lamb of pytorch_optimizer cannot step sharded parameters: it computes norms or sums over whole parameters in ways that torch's DTensor does not support. Nothing was changed. Use another optimizer: docs/interop/optimizers.md of shardwise lists what works. Functions of whole matrices run with shardwise.optim.on_whole_matrices.
OwnLamb, 4 rows: steps""",
    )


def first_step_on_two_dims(
    shape: tuple[int, int], names: tuple[str, str], dims: tuple[int, int | None]
) -> str:
    """Of LBFGS, compared with that in one process. ``dims``: that of the shards, and that of ``"tp"``."""
    torch.manual_seed(0)
    dim, tp_dim = dims
    layer = with_weight(shape, dim, init_device_mesh("cpu", (2, 2), mesh_dim_names=names), tp_dim)
    alone = nn.Linear(shape[1], shape[0], bias=False)
    alone.load_state_dict(values(layer))
    for model in (alone, layer):
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)

        def closure(weight: nn.Parameter = model.weight) -> Tensor:
            weight.grad = weight.detach() ** 3
            return full(weight.detach()).pow(4).sum() / 4

        before = values(model)
        try:
            optimizer.step(closure)
        except RuntimeError as error:
            assert_equal([values(model)], before)
            assert not optimizer.state
            return str(error)
    torch.testing.assert_close(values(layer), values(alone))
    return "steps"


@pytest.mark.parametrize(
    ("shape", "names", "dims", "expected"),
    [
        ((8, 4), ("shard", "tp"), (0, 0), "steps"),
        ((6, 4), ("shard", "tp"), (0, 0), "weight: LBFGS of torch.optim flattens parameters"),
        ((10, 4), ("shard", "tp"), (0, 0), "shape (10, 4) in 4 shards of different sizes"),
        ((6, 4), ("shard", "tp"), (0, 1), "steps"),
        ((6, 4), ("replicate", "shard"), (0, None), "steps"),
        ((5, 4), ("replicate", "shard"), (0, None), "shape (5, 4) in 2 shards of different sizes"),
    ],
)
def test_shards_of_two_mesh_dims_are_flattened_where_all_have_one_size(
    world4: World, shape: tuple[int, int], names: tuple[str, str], dims: tuple[int, int | None], expected: str
) -> None:
    if expected == "steps" and "tp" in names and torch.__version__.startswith("2.11"):
        pytest.skip("2.11 does not concatenate what two dimensions of a mesh shard")
    assert expected in alike(world4.run(first_step_on_two_dims, shape, names, dims))


# --- quantised on some ranks only -----------------------------------------------------------------


class AdamW8bit(torch.optim.AdamW):
    """Quantises nothing: what counts is its name, and its blocks."""

    __module__ = "torchao.optim.adam"
    block_size = 256


class AdamW4bit(AdamW8bit):
    __module__ = "torchao.optim.adam"
    block_size = 128


class OwnAdamW8bit(AdamW8bit):
    """Of somebody who knows better."""


LOW_BIT = {"AdamW8bit": AdamW8bit, "AdamW4bit": AdamW4bit, "OwnAdamW8bit": OwnAdamW8bit}


def with_weight(
    shape: tuple[int, int], dim: int = 0, mesh: DeviceMesh | None = None, tp_dim: int | None = None
) -> nn.Linear:
    """A sharded layer; with ``tp_dim`` its weight was distributed before, over the dimension tp of ``mesh``."""
    layer = nn.Linear(shape[1], shape[0], bias=False)
    if tp_dim is not None:
        assert mesh is not None
        layer.weight = nn.Parameter(distribute_tensor(layer.weight, mesh["tp"], [Shard(tp_dim)]))
        mesh = mesh["shard"]
    return fully_shard(layer, mesh=mesh, shard_placement_fn=lambda param: Shard(dim))


def first_low_bit_step(kind: str, layer: nn.Linear) -> str:
    optimizer = LOW_BIT[kind](layer.parameters())
    layer.weight.grad = torch.ones_like(layer.weight)
    before = values(layer)
    try:
        optimizer.step()
    except RuntimeError as error:
        assert_equal([values(layer)], before)
        assert not optimizer.state
        return str(error)
    assert not torch.equal(values(layer)["weight"], before["weight"])
    return "steps"


def low_bit(kind: str, *shape_and_dim: Any) -> str:
    return first_low_bit_step(kind, with_weight(*shape_and_dim))


def alike(found: list[str]) -> str:
    """What all ranks say."""
    assert len(set(found)) == 1
    return found[0]


def test_state_quantised_on_some_ranks_only_is_refused_before_anything_changes(world2: World) -> None:
    found = {kind: alike(world2.run(low_bit, kind, (129, 128))) for kind in LOW_BIT}
    assert_expected_inline(
        "\n".join(f"{kind}: {text}" for kind, text in found.items()),
        """\
AdamW8bit: weight: AdamW8bit of torchao quantises its state where a shard has at least 4096 elements, in whole blocks of 256. Of the 2 shards of shape (129, 128), one of 8192 elements would be quantised, and one of 8320 would not: parts of one parameter would be trained in different precision, and its state could not be gathered. Nothing was changed. Choose sizes that divide by the ranks, shard this parameter on another dim (shard_placement_fn), or give it a torch.optim.AdamW of its own: docs/interop/optimizers.md of shardwise lists what works.
AdamW4bit: steps
OwnAdamW8bit: steps""",
    )


@pytest.mark.parametrize(
    ("kind", "shape", "dim", "expected"),
    [
        ("AdamW8bit", (128, 128), 0, "steps"),
        ("AdamW8bit", (131, 256), 0, "steps"),  # uneven, in whole blocks
        ("AdamW8bit", (3, 4096), 0, "steps"),
        ("AdamW8bit", (130, 128), 0, "steps"),  # in one process only
        ("AdamW8bit", (33, 128), 0, "steps"),  # nowhere: too few
        ("AdamW4bit", (33, 128), 0, "steps"),  # in one process only
        ("AdamW8bit", (63, 128), 0, "4096 elements would be quantised, and one of 3968"),
        (
            "AdamW8bit",
            (3, 2048),
            0,
            "4096 elements would be quantised, and one of 2048",
        ),  # in one process too
        ("AdamW8bit", (128, 129), 1, "8192 elements would be quantised, and one of 8320"),
        ("AdamW8bit", (129, 128), 1, "steps"),  # the advice of the refusal
    ],
)
def test_shards_are_all_quantised_or_none(
    world2: World, kind: str, shape: tuple[int, int], dim: int, expected: str
) -> None:
    assert expected in alike(world2.run(low_bit, kind, shape, dim))


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((130, 128), "steps"),  # 44, 44 and 42 rows
        ((2, 4096), "steps"),  # the third rank has nothing
        ((128, 128), "one of 5376 elements would be quantised, and one of 5504"),
    ],
)
def test_of_three_ranks_the_last_may_have_less(world3: World, shape: tuple[int, int], expected: str) -> None:
    assert expected in alike(world3.run(low_bit, "AdamW8bit", shape))


def on_two_dims(shape: tuple[int, int], names: tuple[str, str], tp_dim: int | None) -> str:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
    return first_low_bit_step("AdamW8bit", with_weight(shape, 0, mesh, tp_dim))


@pytest.mark.parametrize(
    ("shape", "names", "tp_dim", "expected"),
    [
        (
            (129, 128),
            ("replicate", "shard"),
            None,
            "Of the 2 shards of shape (129, 128), one of 8192 elements",
        ),
        ((131, 256), ("replicate", "shard"), None, "steps"),
        ((129, 256), ("shard", "tp"), 1, "Of the 4 shards of shape (129, 256), one of 8192 elements"),
        ((131, 512), ("shard", "tp"), 1, "steps"),
        ((129, 256), ("shard", "tp"), 0, "steps"),  # 65 rows and 64, of these 33 and 32, and 32 and 32
        ((129, 128), ("shard", "tp"), 0, "one of 4096 elements would be quantised, and one of 4224"),
    ],
)
def test_all_ranks_of_two_mesh_dims_say_the_same(
    world4: World, shape: tuple[int, int], names: tuple[str, str], tp_dim: int | None, expected: str
) -> None:
    assert expected in alike(world4.run(on_two_dims, shape, names, tp_dim))


def with_frozen(has_grad: bool) -> str:
    layer = with_weight((129, 128))
    layer.weight.requires_grad_(False)
    other = nn.Parameter(torch.ones(2))
    other.grad = torch.ones(2)
    if has_grad:  # frozen after backward
        layer.weight.grad = torch.ones_like(layer.weight)
    try:
        AdamW8bit([*layer.parameters(), other]).step()
    except RuntimeError:
        assert torch.equal(other, torch.ones(2))
        return "refused"
    return "steps"


def test_what_is_never_stepped_is_not_refused(world2: World) -> None:
    assert alike(world2.run(with_frozen, False)) == "steps"
    assert alike(world2.run(with_frozen, True)) == "refused"


# --- left alone -----------------------------------------------------------------------------------


def test_optimizers_of_plain_parameters_are_left_alone(world2: World) -> None:
    """In a process where the hook is there."""
    assert world2.run(steps_of_plain_parameters) == ["Rprop Adafactor Lamb"] * 2


def steps_of_plain_parameters() -> str:
    first_step("OwnLamb", 4)
    names = []
    for kind in (torch.optim.Rprop, torch.optim.Adafactor, Lamb):
        param = nn.Parameter(torch.ones(3, 3))
        optimizer = kind([param])
        param.grad = torch.ones(3, 3)
        optimizer.step()
        assert type(optimizer) is kind
        assert not torch.equal(param, torch.ones(3, 3))
        names.append(kind.__name__)
    return " ".join(names)
