"""What the caller changes after fully_shard is not lost in silence.

Inside a forward, between it and its backward, while gradients wait, and where parameters join.
"""

import copy
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from comparing import assert_all_same
from custom_comms import ReduceScatter
from expecttest import assert_expected_inline
from harness import World
from meshed import outcome, refusal
from models import Tower, average_into, built, even_tower, random_batch, shard_tower
from on_ranks import on_ranks
from refusals import assert_says, wrapped
from scenario import Side, same_as_plain
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.func import functional_call, vmap
from towers import backward, sharded_tower

import shardwise
from shardwise import fully_shard

# --- inside a forward -----------------------------------------------------------------------------


class Changing(nn.Module):
    """Changes what comes next by the time it may have been prefetched, or is in memory since an earlier call."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.first, self.twin, self.last = (nn.Linear(8, 8) for _ in range(3))
        self.how = how
        if how != "trained":
            self.twin.requires_grad_(how == "frozen")

    def forward(self, x: Tensor) -> Tensor:
        found = self.twin(x) if self.how == "frozen" else x
        found = torch.tanh(self.first(found))
        if self.how == "frozen":
            self.twin.requires_grad_(False)
        else:
            average_into(self.twin, self.first)
        found = self.twin(found)
        if self.how == "frozen":
            self.twin.requires_grad_(True)
        return self.last(found)


class Followed(nn.Module):
    """A frozen module follows another at the end of forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.twin = nn.Linear(8, 8), nn.Linear(8, 8).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        found = self.first(x) + self.twin(x)
        average_into(self.twin, self.first)
        return found


@pytest.mark.parametrize("reshards", [True, False])
@pytest.mark.parametrize("how", ["averaged", "trained", "frozen"])
@same_as_plain(1, 2)
def test_a_forward_that_changes_what_it_uses_next_computes_with_the_change(
    side: Side, how: str, reshards: bool
) -> None:
    """Momentum encoders are averaged, and critics frozen, in the forward that calls them next."""
    torch.manual_seed(0)
    model = Changing(how).double()
    side.shard(*model.children(), model, reshard_after_forward=reshards)
    trained(side, model)


@pytest.mark.parametrize(
    ("world", "how"), [(1, "frozen"), (2, "frozen"), (1, "averaged")], indirect=["world"], ids=str
)
@same_as_plain()
def test_a_forward_may_change_modules_of_its_own_group(side: Side, how: str) -> None:
    torch.manual_seed(0)
    model = Changing(how).double()
    trained(side, side.shard(model))


def trained(side: Side, model: nn.Module) -> None:
    side.steps(model, torch.optim.SGD(model.parameters(), 0.1), range(3))
    with torch.no_grad():
        for step in range(2):
            side.note_mean(f"evaluated {step}", model(side.inputs(step)).mean())
    side.note_parameters(model)


@same_as_plain(1, 2)
def test_a_forward_may_change_frozen_weights_at_its_end(side: Side) -> None:
    torch.manual_seed(0)
    model = Followed().double()
    trained(side, side.shard(model))


@on_ranks(2)
def test_a_forward_that_changes_frozen_weights_of_its_own_group_is_refused() -> None:
    """They were unsharded with those of the others, and plain PyTorch would compute with the change."""
    model = fully_shard(Changing("averaged").double())
    assert_expected_inline(
        refusal(partial(model, random_batch(0, 4))),
        """RuntimeError: twin.weight: changed after 'Changing' was unsharded, so that its module would compute with the old values. Call fully_shard on the module that forward changes, before the module around it; or change weights between forwards.""",
    )
    model.how = "trained"
    model.twin.requires_grad_(True)
    model(random_batch(0, 4)).sum().backward()


@on_ranks(2)
def test_a_freeze_in_a_forward_of_one_rank_is_told_in_the_next() -> None:
    model = Changing("trained").double()
    for module in (*model.children(), model):
        fully_shard(module)
    for _ in range(2):
        model(random_batch(0, 4)).sum().backward()
    handle = model.first.register_forward_hook(
        lambda *_: model.twin.requires_grad_(dist.get_rank() == 0) and None
    )
    model(random_batch(0, 4))
    handle.remove()
    assert_says(refusal(partial(model, random_batch(1, 4))), "plan has changed", "twin.weight: requires_grad")


@on_ranks(2)
def test_a_forward_that_changes_weights_inside_inference_is_refused() -> None:
    model = Changing("frozen").double()
    for module in (*model.children(), model):
        fully_shard(module)
    with shardwise.inference(model, budget_bytes=0):
        for _ in range(2):
            model(random_batch(0, 4))  # to freeze is no change
        model.how = "averaged"
        refused = refusal(partial(model, random_batch(1, 4)))
    assert_says(refused, "RuntimeError: twin", "changed by a forward", "inference()", "between forwards")


class Borrowing(nn.Module):
    """Calls modules inside with weights that it has computed, in place of their own."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.generate = how, nn.Linear(8, 64)
        self.target: Any = nn.Linear(8, 8)
        if how == "attention":  # which reads the weight of a module inside without calling it
            self.target = nn.MultiheadAttention(8, 2, batch_first=True)
        elif how == "recurrent":
            self.target = nn.LSTM(8, 8)
        elif how == "around":
            self.target = nn.Sequential(nn.Linear(8, 8), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        made = self.generate(torch.ones_like(x[0])).view(8, 8)
        if self.how == "detached":
            given = {name: param.detach() for name, param in self.target.named_parameters()}
            return functional_call(self.target, given, (torch.tanh(x @ made),)) - self.target(x)
        if self.how == "ensemble":
            stacked = torch.stack([made, self.target.weight])
            run = vmap(lambda weight: functional_call(self.target, {"weight": weight}, (x,)))
            return run(stacked).mean(0)
        if self.how == "attention":
            return functional_call(self.target, {"out_proj.weight": made}, (x[:, None],) * 3)[0][:, 0]
        if self.how == "recurrent":
            changed = {"weight_ih_l0": made.repeat(4, 1), "bias_hh_l0": 2 * self.target.bias_hh_l0}
            return functional_call(self.target, changed, (x[None],))[0][0] + self.target(x[None])[0][0]
        name = "0.weight" if self.how == "around" else "weight"
        return functional_call(self.target, {name: made}, (x,)) + self.target(x)


@pytest.mark.parametrize("how", ["computed", "detached", "ensemble", "attention", "recurrent", "around"])
@same_as_plain(1, 2)
def test_a_forward_may_call_its_modules_with_other_weights(side: Side, how: str) -> None:
    """Hypernetworks, actors that do not train their critic, ensembles."""
    torch.manual_seed(0)
    model = Borrowing(how).double()
    trained(side, side.shard(model))


@pytest.mark.parametrize("reshards", [True, False])
@on_ranks(2)
def test_other_weights_for_a_group_are_refused_also_while_it_is_in_memory(reshards: bool) -> None:
    model = Borrowing("computed").double()
    fully_shard(model.target, reshard_after_forward=reshards)
    fully_shard(model)
    model.forward = lambda x: model.target(x) + functional_call(model.target, {"weight": x}, (x,))
    assert_says(refusal(partial(model, random_batch(0, 8))), "target.weight: the parameter was replaced")


@on_ranks(2)
def test_shards_for_a_module_in_forward_are_refused_if_they_are_to_be_trained() -> None:
    """Their gradients would be those of one rank."""
    model = fully_shard(Borrowing("computed").double())
    given = {name: 2 * param for name, param in model.target.named_parameters()}
    run = model.target
    model.forward = lambda x: functional_call(run, given, (x,))
    refused = refusal(partial(model, random_batch(0, 4)))
    assert_says(
        refused, "target.weight: functional_call inside the forward of 'Borrowing'", "self.layer.weight"
    )


@on_ranks(2)
def test_a_module_that_is_copied_while_it_is_unsharded_is_refused() -> None:
    """The copy would compute with the full parameters of that moment."""
    model = fully_shard(Borrowing("computed").double())
    model.forward = lambda x: copy.deepcopy(model.target)(x)
    assert_says(
        refusal(partial(model, random_batch(0, 4))), "copy.deepcopy of 'target'", "before fully_shard"
    )
    copy.deepcopy(model.target)  # of shards


# --- between passes -------------------------------------------------------------------------------


@on_ranks(2)
def test_a_backward_of_parameters_that_were_made_anew_is_refused() -> None:
    """The backward of an embedding does not read its weight, so that autograd sees no change of it."""
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4))
    embedding = fully_shard(model[0], reshard_after_forward=True)
    loss = fully_shard(model)(torch.tensor([1, 2])).sum()
    embedding.set_custom_reduce_scatter(ReduceScatter(returns_work=True))
    assert_says(refusal(loss.backward), "0.weight: the group '0' was changed", "Change it between steps.")


@same_as_plain(2)
def test_a_setting_does_not_lose_reductions_in_flight(side: Side) -> None:
    torch.manual_seed(1234)
    model = side.shard_tower(even_tower().double())
    if side.is_sharded:
        model.set_manual_backward_finalization(True)
        model.set_requires_gradient_sync(False)
    model(side.inputs(0)).pow(2).mean().backward()
    if side.is_sharded:
        model.set_requires_gradient_sync(True)
        handle = model.finalize_backward(async_op=True)
        model.blocks[0].set_may_be_unused(False)
        model.unshard()
        handle.wait()
        model.reshard()
    side.note_gradients(model)


@on_ranks(2)
def test_communication_is_not_changed_while_gradients_wait() -> None:
    model = fully_shard(nn.Linear(8, 8).double())
    model.set_requires_gradient_sync(False)
    model(random_batch(0, 4)).sum().backward()
    change = partial(model.set_custom_reduce_scatter, ReduceScatter(returns_work=True))
    assert_says(refusal(change), "communication cannot be changed", "gradients deferred", "between steps")
    model.set_requires_gradient_sync(True)
    model(random_batch(1, 4)).sum().backward()
    change()


@on_ranks(1)
def test_a_frozen_weight_that_changes_before_its_backward_is_told_where_it_is_not_copied() -> None:
    model = built(even_tower)
    model.blocks[1].requires_grad_(False)
    shard_tower(model, reshard_after_forward=False)
    loss = model(random_batch(0, 4)).sum()
    with torch.no_grad():
        model.blocks[1].up.weight.mul_(2)
    assert_says(refusal(loss.backward), "RuntimeError: blocks.1.up.weight", "changed")


@on_ranks(2)
def test_a_model_that_is_moved_to_the_meta_device_cannot_run() -> None:
    model = shard_tower(built(even_tower))
    model(random_batch(0, 4)).sum().backward()
    model.to("meta")
    assert refusal(model, random_batch(0, 4)).startswith("RuntimeError: Cannot run forward: ")


@on_ranks(2)
def test_a_gradient_that_is_replaced_while_others_wait_is_told() -> None:
    torch.manual_seed(1234)
    model = fully_shard(nn.Linear(8, 8, bias=False).double())
    model.set_requires_gradient_sync(False)
    model(random_batch(0, 4)).sum().backward()
    model.weight.grad = torch.ones_like(model.weight.detach())
    model.set_requires_gradient_sync(True)
    with pytest.warns(UserWarning, match="grad") as caught:
        model(random_batch(1, 4)).sum().backward()
    assert_expected_inline(
        "\n".join([str(each.message) for each in caught]),
        """weight: .grad was replaced while gradients of backward passes without synchronisation (set_requires_gradient_sync(False)) wait to be reduced. They are dropped, as if it had been set to None. Synchronise in the last backward before replacing .grad.""",
    )


# --- what joins a sharded tree after fully_shard: noticed wherever it is put, and named -----------


class Adapter(nn.Module):
    def __init__(self, base: nn.Module, is_trained: bool = True) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(8, 2, bias=False, dtype=torch.float64).requires_grad_(is_trained)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.down(x).sum(-1, keepdim=True)


def beside_all(model: Any) -> None:
    model.blocks[1].adapter = Adapter(nn.Identity())


def in_place_of_a_child(model: Any) -> None:
    model.blocks[1].up = Adapter(model.blocks[1].up)


def in_a_leaf(model: Any) -> None:
    model.blocks[1].up.adapter = nn.Sequential(nn.Tanh(), Adapter(nn.Identity()))


def in_a_container(model: Any) -> None:
    model.blocks.append(Adapter(nn.Identity()))


def where_nothing_stood(model: Any) -> None:
    model.blocks[1].norm.register_parameter("shift", None)
    backward(model)
    model.blocks[1].norm.shift = nn.Parameter(torch.zeros(()))


def frozen_and_then_trained(model: Any) -> None:
    model.blocks[1].adapter = Adapter(nn.Identity(), is_trained=False)
    backward(model)
    model.blocks[1].adapter.requires_grad_(True)


PUT = {
    beside_all: "blocks.1.adapter.down.weight",
    in_place_of_a_child: "blocks.1.up.down.weight",
    in_a_leaf: "blocks.1.up.adapter.1.down.weight",
    in_a_container: "blocks.3.down.weight",
    where_nothing_stood: "blocks.1.norm.shift",
    frozen_and_then_trained: "blocks.1.adapter.down.weight",
}


@pytest.mark.parametrize("has_run", [False, True])
@on_ranks(2)
def test_a_parameter_added_later_is_refused_by_its_full_name(has_run: bool) -> None:
    for put, name in PUT.items():
        model = sharded_tower()
        if has_run:
            backward(model)
        put(model)
        text = refusal(backward, model)
        assert text.startswith(f"RuntimeError: {name}: this parameter was added after fully_shard"), text
        assert refusal(backward, model) == text
        if put is beside_all:
            assert_expected_inline(
                wrapped(text),
                """\
RuntimeError: blocks.1.adapter.down.weight: this parameter was added
after fully_shard (group 'blocks.1'). No group reduces the gradients,
so they would stay this rank's own and the ranks would drift apart.
Add parameters before fully_shard, call fully_shard on the new module,
or freeze what is not to be trained.""",
            )


def harmless_additions(is_sharded: bool) -> dict[str, Tensor]:
    """What may join: modules without parameters, frozen ones, and an adapter that is sharded itself."""
    model = built(Tower, seed=0)
    if is_sharded:
        model = sharded_tower()
        backward(model)
        model.zero_grad()
    model.blocks[0].up = nn.Sequential(model.blocks[0].up, nn.Dropout(0.0))
    torch.manual_seed(1)
    model.blocks[1].up = Adapter(model.blocks[1].up, is_trained=False)
    model.blocks[2].up = Adapter(model.blocks[2].up)
    if is_sharded:
        fully_shard(model.blocks[2].up.down)
    backward(model)
    grads = {name: param.grad for name, param in model.named_parameters() if param.grad is not None}
    return {name: g.full_tensor() if isinstance(g, DTensor) else g for name, g in grads.items()}


def test_what_needs_no_group_or_has_its_own_may_join(world2: World) -> None:
    assert_all_same(world2.run(harmless_additions, True), harmless_additions(False))


@pytest.mark.parametrize("keeps_others", [False, True])
@on_ranks(2)
def test_parameters_assigned_after_sharding_on_meta_are_used(keeps_others: bool) -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3)).double()
    fully_shard(model)
    for module in model if not keeps_others else model[1:]:
        for name, param in list(module.named_parameters()):
            value = torch.arange(float(param.numel()), dtype=torch.float64).view(param.shape)
            setattr(module, name, nn.Parameter(distribute_tensor(value, param.device_mesh, param.placements)))
    assert (
        "2 parameters are still on the meta device: 0.weight, 0.bias." if keeps_others else "accepted"
    ) in outcome(lambda: model(torch.ones(2, 3, dtype=torch.float64)).sum().backward())
    assert model[1].bias.full_tensor().tolist() == [0.0, 1.0, 2.0]
