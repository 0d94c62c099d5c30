"""Muon on shards against torch's own on whole parameters in one process.

torch's iteration is in bfloat16, whatever the parameters. Where a test needs more, the reference is written out
here, in float64.
"""

import copy
import math
from typing import Any

import pytest
import torch
from arrangements import Way, world_of
from checkpointing import Run, first_half, second_half
from comparing import assert_all_same, assert_as_plain
from expecttest import assert_expected_inline
from harness import World
from meshed import device_mesh, refusal
from models import built, random_batch
from on_ranks import on_ranks
from reference import full
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import shardwise
from shardwise import full_state_dict, fully_shard
from shardwise.optim import Muon, is_hidden_matrix, newton_schulz
from shardwise.state import load_full_optimizer_state_dict, rekey_optimizer_state_dict

# --- the reference --------------------------------------------------------------------------------

COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def orthogonalized(matrix: Tensor, steps: int = 5, eps: float = 1e-7) -> Tensor:
    a, b, c = COEFFICIENTS
    x = matrix.T if len(matrix) > len(matrix.T) else matrix
    x = x / max(float(x.norm()), eps)
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if len(matrix) > len(matrix.T) else x


class PlainMuon(torch.optim.Optimizer):
    """Whole parameters, in float64. ``row_blocks`` as of ours; experts one by one."""

    def __init__(self, params: Any, lr: float, row_blocks: Any = None) -> None:
        self.row_blocks = row_blocks or (lambda name, param: None)
        named = list(params)
        matrices = [(n, p) for n, p in named if is_hidden_matrix(n, p) or p.dim() == 3]
        chosen = {id(p) for _, p in matrices}
        self.adamw = torch.optim.AdamW([(n, p) for n, p in named if id(p) not in chosen], lr=0.01)
        super().__init__(matrices, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.adamw.step()
        (group,) = self.param_groups
        for name, param in zip(group["param_names"], group["params"], strict=True):
            if param.grad is None:
                continue
            state = self.state[param]
            buffer = state.setdefault("momentum_buffer", torch.zeros_like(param))
            buffer.mul_(0.95).add_(param.grad, alpha=0.05)
            update = 0.05 * param.grad + 0.95 * buffer
            param.mul_(1 - group["lr"] * 0.1)
            experts = zip(param, update, strict=True) if param.dim() == 3 else [(param, update)]
            for whole, ahead in experts:
                sizes = list(self.row_blocks(name, param) or [len(whole)])
                for rows, some in zip(whole.split(sizes), ahead.split(sizes), strict=True):
                    lr = group["lr"] * math.sqrt(max(1, len(rows) / len(rows.T)))
                    rows.sub_(orthogonalized(some), alpha=lr)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.adamw.zero_grad()
        super().zero_grad()


def exact(model: nn.Module, **options: Any) -> Muon:
    options = {"lr": 0.02, "adamw": {"lr": 0.01}, "iteration_dtype": torch.float64} | options
    if not any(isinstance(param, DTensor) for param in model.parameters()):
        options["is_matrix"] = lambda name, param: is_hidden_matrix(name, param) or param.dim() == 3
    return Muon(model.named_parameters(), **options)


# --- a model for it -------------------------------------------------------------------------------


class FusedBlock(nn.Module):
    def __init__(self, width: int = 6, experts: int = 3) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width + 1)
        self.up, self.down = nn.Linear(width, 8), nn.Linear(8, width, bias=False)
        self.experts = nn.Parameter(torch.randn(experts, width, width) / width)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value, _ = self.qkv(self.norm(x)).split([6, 6, 6, 1], dim=-1)
        x = x + torch.tanh(query * key) * value
        x = x + sum(torch.tanh(x @ expert) for expert in self.experts)
        return x + self.down(torch.tanh(self.up(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList([FusedBlock(), FusedBlock()])
        self.head = nn.Linear(6, 11, bias=False)
        self.blocks[1].down.weight.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def fused(name: str, param: Tensor) -> list[int] | None:
    return [6, 6, 6, 1] if name.endswith("qkv.weight") else None


def plain_model(build: str = "") -> Any:
    """Tied: a matrix across blocks, and the embedding with the head."""
    model = built(Model, seed=0)
    if build == "tied":
        first, second = model.blocks
        second.up.weight = first.up.weight
        model.head.weight = model.embed.weight
    return model


def spread(way: Way) -> Any:
    return way.spread(plain_model(way.build))


WAYS = [
    *(Way(1), Way(2), Way(3), Way(4), Way(3, "columns"), Way(4, "hybrid"), Way(2, "offload"), Way(2, "ddp")),
    *(Way(2, "none"), Way(4, "tp"), Way(2, "tp"), Way(2, build="tied"), Way(4, "hybrid", "tied")),
    Way(2, "none", "tied"),
]


def loss_of(model: nn.Module, number: int) -> Tensor:
    tokens = torch.randint(11, (4, 5), generator=torch.Generator().manual_seed(number))
    return model(tokens).square().mean()


def train_steps(model: nn.Module, optimizer: Any, steps: range) -> dict[str, Any]:
    for number in steps:
        optimizer.zero_grad()
        loss_of(model, number).backward()
        optimizer.step()
    return {name: full(param) for name, param in model.named_parameters()}


def sharded_steps(way: Way, steps: int) -> dict[str, Any]:
    model = spread(way)
    return train_steps(model, exact(model, row_blocks=fused), range(steps))


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_twenty_steps_are_those_of_whole_matrices(way: Way, request: pytest.FixtureRequest) -> None:
    model = plain_model(way.build)
    want = train_steps(model, PlainMuon(model.named_parameters(), 0.02, fused), range(20))
    assert_all_same(world_of(way, request).run(sharded_steps, way, 20), want, 1e-10)


# --- torch's own, in bfloat16 ---------------------------------------------------------------------


class Matrices(nn.Module):
    """Hidden matrices only, as torch's takes no others; no two of one shape."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Linear(n, m, bias=False) for n, m in ((6, 9), (9, 5), (5, 16), (16, 6))
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


TORCHS = [
    {},
    {"nesterov": False, "weight_decay": 0.0, "momentum": 0.8},
    {"adjust_lr_fn": "match_rms_adamw", "ns_steps": 3, "eps": 1e-3, "ns_coefficients": (3.0, -4.0, 2.0)},
]


def trained_as_in_torch(options: dict[str, Any], kind: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    model: Any = Matrices()
    if kind is Muon:
        fully_shard(model)
    optimizer = kind(model.parameters(), lr=0.02, **options)
    for number in range(8):
        optimizer.zero_grad()
        model(random_batch(number, 12, 6, torch.float32)).square().mean().backward()
        optimizer.step()
    return {name: full(param) for name, param in model.named_parameters()}


@pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.slow)], indirect=True)
@pytest.mark.parametrize("options", TORCHS, ids=["defaults", "plain_momentum", "others"])
def test_arguments_and_numbers_are_those_of_torch(world: World, options: dict[str, Any]) -> None:
    want = trained_as_in_torch(options, torch.optim.Muon)
    for got in world.run(trained_as_in_torch, options, Muon):
        # One process has the same bits, except for how a norm is summed. Gradients of several ranks are averages,
        # which round otherwise, and the iteration rounds to three digits.
        assert_all_same([got], want, 1e-6 if world.size == 1 else 2e-2)


@pytest.mark.parametrize("world", [1], indirect=True)
@on_ranks()
def test_matrices_of_one_shape_in_groups_with_other_iterations_step_as_in_torch() -> None:
    found = {}
    for kind in (Muon, torch.optim.Muon):
        torch.manual_seed(0)
        matrices = [nn.Parameter(torch.randn(6, 4)) for _ in range(12)]  # of which a round has several
        groups = [{"params": matrices[:5], "ns_steps": 2}, {"params": matrices[5:]}]
        optimizer: Any = kind(groups, lr=0.1)

        def closure(matrices: Any = matrices) -> Tensor:
            loss = sum(matrix.pow(2).sum() * 0.01 for matrix in matrices)
            for matrix, gradient in zip(matrices, torch.autograd.grad(loss, matrices), strict=True):
                matrix.grad = gradient
            return loss

        losses = [optimizer.step(closure).item() for _ in range(2)]
        optimizer.param_groups[1] = optimizer.param_groups[1] | {"lr": 0.3}
        losses.append(optimizer.step(closure).item())
        found[kind] = [torch.tensor(losses), *matrices]
    for got, want in zip(*found.values(), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-6)


def test_of_a_group_that_becomes_two_none_is_added_if_one_fails() -> None:
    vector = nn.Parameter(torch.randn(4))
    optimizer = Muon([nn.Parameter(torch.randn(4, 4)), vector])
    before = list(optimizer.param_groups)
    with pytest.raises(ValueError, match="more than one parameter group"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.randn(4, 4)), vector]})
    assert optimizer.param_groups == before


@pytest.mark.parametrize("shape", [(32, 32), (48, 16), (16, 48)])
def test_the_iteration_is_torchs_to_the_bit(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    param = nn.Parameter(torch.zeros(shape))
    param.grad = torch.randn(shape)
    optimizer = torch.optim.Muon([param], lr=1.0, weight_decay=0.0, adjust_lr_fn="original", momentum=0.0)
    optimizer.step()
    got = newton_schulz(param.grad.bfloat16()[None], COEFFICIENTS, 5, 1e-7)[0]
    scale = math.sqrt(max(1, shape[0] / shape[1]))
    assert torch.equal(param.detach(), torch.zeros(shape).add_(got, alpha=-scale))


def test_the_iteration_compiles_to_one_graph() -> None:
    matrices = torch.randn(3, 8, 12, dtype=torch.float64)
    compiled = torch.compile(newton_schulz, backend="eager", fullgraph=True)
    want = torch.stack([orthogonalized(matrix) for matrix in matrices])
    torch.testing.assert_close(compiled(matrices, COEFFICIENTS, 5, 1e-7), want)


# --- between worlds -------------------------------------------------------------------------------

EXACT = {"lr": 0.02, "iteration_dtype": torch.float64, "adamw": {"lr": 0.05}}


@pytest.mark.parametrize(("saving", "loading"), [(2, 3), (3, 1)])
def test_a_checkpoint_goes_on_in_another_world(
    saving: int, loading: int, tmp_path: Any, request: pytest.FixtureRequest
) -> None:
    run = Run(optimizer=Muon, options=EXACT, path=str(tmp_path / "step-2"))
    want = request.getfixturevalue(f"world{saving}").run(first_half, run)
    assert any(name.endswith("momentum_buffer") for name in want[0])
    assert any(name.endswith("exp_avg") for name in want[0])
    assert_all_same(request.getfixturevalue(f"world{loading}").run(second_half, run), want[0], 1e-10)


@on_ranks(3)
def test_copies_full_states_by_name_or_id_and_state_dicts_go_on() -> None:
    """Half of the steps, and the rest with what copies, full states and state dicts make of it."""
    plain = plain_model()
    want = train_steps(plain, PlainMuon(plain.named_parameters(), 0.02, fused), range(6))
    model = spread(Way(3))
    optimizer = exact(model, row_blocks=fused)
    train_steps(model, optimizer, range(3))
    copies: list[tuple[Any, Any]] = [copy.deepcopy((model, optimizer))]
    weights, full_state = full_state_dict(model, optimizer, rank0_only=False)
    for to in ("name", "id"):
        state = rekey_optimizer_state_dict(full_state, model, optimizer, to)  # type: ignore[arg-type]
        assert {key for values in state["state"].values() for key in values} == {
            *("exp_avg", "exp_avg_sq", "momentum_buffer", "step")
        }
        other = spread(Way(3))
        shardwise.load_full_state_dict(other, weights)
        fresh = exact(other, row_blocks=fused)
        load_full_optimizer_state_dict(other, fresh, state)
        copies.append((other, fresh))
    fresh = exact(model, row_blocks=fused)
    fresh.load_state_dict(optimizer.state_dict())
    assert fresh.state_dict()["param_groups"] == optimizer.state_dict()["param_groups"]
    each = [train_steps(*each, range(3, 6)) for each in [*copies, (model, fresh)]]
    assert_all_same(each, want, 1e-10)


def test_the_state_of_torchs_muon_is_taken_over() -> None:
    model = Matrices()
    theirs = torch.optim.Muon(model.parameters(), lr=0.05)
    model(torch.randn(4, 6)).sum().backward()
    theirs.step()
    ours = Muon(model.parameters(), lr=0.01)
    ours.load_state_dict(theirs.state_dict())
    assert ours.param_groups[0]["lr"] == 0.05
    for param in model.parameters():
        assert torch.equal(ours.state[param]["momentum_buffer"], theirs.state[param]["momentum_buffer"])
    ours.step()


# --- missing gradients ----------------------------------------------------------------------------


def with_missing_gradients(way: Way | None) -> Any:
    model = spread(way) if way else plain_model()
    params = dict(model.named_parameters())
    optimizer: Any = exact(model, row_blocks=fused) if way else PlainMuon(params.items(), 0.02, fused)
    for number in range(4):
        optimizer.zero_grad()
        loss_of(model, number).backward()
        for name in list(params)[number : 4 + number]:
            params[name].grad = None
        optimizer.step()
    return {name: full(param) for name, param in params.items()}


def test_a_matrix_without_gradient_is_left_out(world3: World) -> None:
    assert_as_plain(world3, with_missing_gradients, Way(3))


@on_ranks(2)
def test_a_gradient_that_one_rank_lacks_is_refused_everywhere() -> None:
    model = spread(Way(2))
    optimizer = exact(model, row_blocks=fused)
    loss_of(model, 0).backward()
    before = [full(param) for param in model.parameters()]
    if torch.distributed.get_rank() == 1:
        model.get_parameter("blocks.0.up.weight").grad = None
    assert refusal(optimizer.step) == (
        "ValueError: Muon.step: ranks disagree on what to leave out: rank 0 has ['blocks.1.down.weight'], "
        "rank 1 has ['blocks.0.up.weight', 'blocks.1.down.weight']. Pass the same on all ranks."
    )
    assert all(map(torch.equal, before, [full(param) for param in model.parameters()]))
    assert not optimizer.state


# --- who steps what, and what is refused ----------------------------------------------------------


@on_ranks(1)
def test_embeddings_and_convolutions_are_known_by_their_modules() -> None:
    """By module where ``fully_shard`` knows it, and no name tells."""
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4), nn.Conv1d(4, 4, 3))
    fully_shard(model)
    found = [is_hidden_matrix("", param) for param in model.parameters() if param.dim() > 1]
    assert found == [False, True, False]


def test_what_is_a_hidden_matrix() -> None:
    hidden = [
        *("", "layers.0.mlp.up.weight", "bert.layer.0.attention.output.dense.weight", "experts.output"),
        "up.parametrizations.weight.original",
    ]
    others = [
        *("output.weight", "lm_head.weight", "span_head.weight", "model.embed_tokens.weight"),
        *("transformer.wte.weight", "pos_embed", "encoder.pos_embedding", "decoder.wpe"),
        *("lm_head._orig_mod.weight", "embed._checkpoint_wrapped_module.weight"),
        "lm_head.parametrizations.weight.original",
    ]
    assert [name for name in [*hidden, *others] if is_hidden_matrix(name, torch.zeros(4, 4))] == hidden
    for shape in ((1, 4), (4,), (4, 4, 3)):
        assert not is_hidden_matrix("up.weight", torch.zeros(shape))


def test_groups_override_the_rule_and_have_numbers_of_their_own() -> None:
    params = [nn.Parameter(torch.randn(4, 4)) for _ in range(4)] + [nn.Parameter(torch.randn(4))]
    groups = [
        {"params": params[:1], "algorithm": "adamw", "lr": 0.5, "betas": (0.8, 0.9)},
        {"params": params[1:2], "lr": 0.25, "nesterov": False},
        {"params": params[2:], "weight_decay": 0.0},
    ]
    optimizer = Muon(groups, lr=0.125, adamw={"lr": 0.0625, "eps": 1e-3})
    assert_expected_inline(
        "\n".join(
            " ".join(f"{key}={value}" for key, value in group.items() if key in KEYS)
            for group in optimizer.param_groups
        ),
        """\
lr=0.5 betas=(0.8, 0.9) eps=0.001 weight_decay=0.01 algorithm=adamw
lr=0.25 weight_decay=0.1 momentum=0.95 nesterov=False eps=1e-07 algorithm=muon
lr=0.125 weight_decay=0.0 momentum=0.95 nesterov=True eps=1e-07 algorithm=muon
lr=0.0625 betas=(0.9, 0.999) eps=0.001 weight_decay=0.0 algorithm=adamw""",
    )


KEYS = ("algorithm", "lr", "weight_decay", "momentum", "nesterov", "betas", "eps")


def test_bad_arguments_are_refused() -> None:
    matrix, vector = nn.Parameter(torch.zeros(4, 4)), nn.Parameter(torch.zeros(4))
    calls: list[Any] = [
        lambda: Muon([matrix], lr=-1.0),
        lambda: Muon([matrix], momentum=-1.0),
        lambda: Muon([matrix], adjust_lr_fn="other"),
        lambda: Muon([matrix], ns_steps=100),
        lambda: Muon([matrix], ns_coefficients=(1.0, 2.0)),  # type: ignore[arg-type]
        lambda: Muon([matrix], iteration_dtype=torch.int8),
        lambda: Muon([matrix], adamw={"lr": -1.0}),
        lambda: Muon([matrix], adamw={"momentum": 0.9}),
        lambda: Muon(["matrix"]),
        lambda: Muon([{"params": [matrix], "algorithm": "sgd"}]),
        lambda: Muon([{"params": [matrix, vector], "lr": 0.1}]),
        lambda: Muon([matrix, matrix]),
        lambda: Muon([("up", matrix)], row_blocks=lambda name, param: [2, 3]),
    ]
    assert_expected_inline(
        "\n".join(map(refusal, calls)),
        """\
ValueError: Muon: lr is -1.0; it must be at least 0.
ValueError: Muon: momentum is -1.0; it must be at least 0.
ValueError: Muon: adjust_lr_fn is 'other'; pass one of None, 'original', 'match_rms_adamw', 'spectral_unclamped'.
ValueError: Muon: ns_steps is 100; it must be from 0 to 99.
ValueError: Muon: ns_coefficients are (1.0, 2.0); pass three numbers.
ValueError: Muon: iteration_dtype is torch.int8; pass a floating dtype.
ValueError: Muon: adamw is {'lr': -1.0}, which torch.optim.AdamW refuses: Invalid learning rate: -1.0
TypeError: Muon: adamw is {'momentum': 0.9}, which torch.optim.AdamW refuses: AdamW.__init__() got an unexpected keyword argument 'momentum'
TypeError: Muon: params contain a str, where a parameter is expected.
ValueError: Muon: algorithm of a param group is 'sgd'; pass 'muon' or 'adamw'.
ValueError: Muon: a param group sets lr, and has both matrices and other parameters, for which these mean different things. Give matrices and others groups of their own, or set them with lr= and adamw={'lr': ...}.
ValueError: Muon: group 0 has a parameter of shape (4, 4) twice, and would step it twice. Leave one out.
ValueError: up: its row blocks are (2, 3), where positive numbers that add up to its 4 rows (shape (4, 4)) are expected.""",
    )


@on_ranks(2)
def test_what_cannot_be_put_together_is_refused_by_name() -> None:
    mesh = device_mesh((2,), ("shard",))
    good = nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, (Shard(0),)))
    optimizer = Muon([("up", good)])
    good.grad = torch.ones_like(good)
    optimizer.step()
    optimizer.state[good]["momentum_buffer"] = torch.ones(4, 4)
    assert_expected_inline(
        refusal(optimizer.step),
        """\
TypeError: up: 'momentum_buffer' in the state is a Tensor of shape (4, 4), where a DTensor of the parameter's shape, (4, 4), is expected. Load full states with shardwise.state.load_full_optimizer_state_dict.""",
    )


def test_a_sparse_gradient_is_refused() -> None:
    matrix = nn.Parameter(torch.ones(4, 4))
    optimizer = Muon([("up", matrix)])
    matrix.grad = torch.ones(4, 4).to_sparse()
    assert refusal(optimizer.step) == (
        "TypeError: up: .grad is sparse, and Muon needs whole matrices. Use a dense gradient."
    )
