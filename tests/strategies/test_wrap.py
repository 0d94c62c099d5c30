"""Which modules `wrap=` chooses: the same as FSDP1 where it has the same rule, and what it refuses."""

import functools
import logging
import random
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from models import CausalBlock, LanguageModel, Tower
from on_ranks import on_ranks
from refusals import assert_says_what_to_do
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import (
    CustomPolicy,
    ModuleWrapPolicy,
    lambda_auto_wrap_policy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
)

from shardwise import fully_shard
from shardwise.strategies import WrapBySize, WrapClasses, WrapRecursively, WrapRepeated, WrapWhere
from shardwise.strategies.wrap_policies import as_policy, chosen, merge_neighbours

S, L = nn.Sequential, nn.Linear


def names_of(model: nn.Module, modules: Iterable[nn.Module]) -> list[str]:
    names = {module: name for name, module in model.named_modules()}
    return [names[module] for module in modules]


def choice(wrap: Any, model: nn.Module, ignored: Iterable[nn.Parameter] = ()) -> list[str]:
    return names_of(model, chosen(as_policy(wrap), model, {id(param) for param in ignored}))


# --- models ---------------------------------------------------------------------------------------


class Bag(nn.Module):
    def __init__(self, **modules: nn.Module) -> None:
        super().__init__()
        for name, module in modules.items():
            setattr(self, name, module)

    def forward(self) -> None:
        """There is one, and nobody calls it."""


class Experts(nn.Module):
    """As in a mixture: a router, and experts in a ModuleDict."""

    def __init__(self) -> None:
        super().__init__()
        self.router = L(4, 3)
        self.experts = nn.ModuleDict({str(i): S(L(4, 8), nn.ReLU(), L(8, 4)) for i in range(3)})

    def forward(self) -> None:
        """There is one, and nobody calls it."""


def nested() -> nn.Module:
    """Sizes: 0 has 20 and 20, 1 has 72 and (6 and 110)."""
    return S(S(L(4, 4), nn.ReLU(), L(4, 4)), S(L(8, 8), S(L(2, 2), L(10, 10))))


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    return Bag(embed=nn.Embedding(11, 8), encoder=nn.TransformerEncoder(layer, 2), head=L(8, 11))


def mixture() -> nn.Module:
    return Bag(embed=nn.Embedding(7, 4), blocks=nn.ModuleList([Experts(), Experts()]), head=L(4, 7))


def tied() -> nn.Module:
    """`text` has 44 parameters twice and 8 once, and `rest` 60."""
    model = Bag(
        text=Bag(embed=nn.Embedding(11, 4), norm=nn.LayerNorm(4)), rest=S(*(L(4, 4) for _ in range(3)))
    )
    model.text.head = L(4, 11, bias=False)
    model.text.head.weight = model.text.embed.weight
    return model


def random_tree(seed: int) -> nn.Module:
    """Sequentials of Sequentials, with Linears of 6 to 156 parameters and attention in between."""
    rng = random.Random(seed)

    def grow(depth: int) -> nn.Module:
        if depth == 0 or rng.random() < 0.2:
            if rng.random() < 0.15:
                return nn.MultiheadAttention(4, 2)
            return L(rng.randint(2, 12), rng.randint(2, 12))
        return S(*(grow(depth - 1) for _ in range(rng.randint(1, 3))))

    return S(*(grow(3) for _ in range(3)))


# --- the same modules as FSDP1 --------------------------------------------------------------------


def modern(module: nn.Module, recurse: bool, nonwrapped_numel: int, min_num_params: int = 30) -> bool:
    """The example of FSDP's documentation."""
    return nonwrapped_numel >= min_num_params


def not_into_sequentials_of_two(module: nn.Module, recurse: bool, **kwargs: int) -> bool:
    if recurse:
        return not (isinstance(module, S) and len(module) == 2)
    return kwargs["nonwrapped_numel"] >= 10


def ask_before(module: nn.Module, recurse: bool, limit: int, nonwrapped_numel: int) -> bool:
    return recurse or nonwrapped_numel > limit


def everything(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
    return True


def nothing_inside(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
    return not recurse


def is_narrow(module: nn.Module) -> bool:
    return isinstance(module, L) and module.in_features < 8


def by_size(limit: int) -> Callable[..., bool]:
    return functools.partial(size_based_auto_wrap_policy, min_num_params=limit)


def by_class(*classes: type[nn.Module]) -> Callable[..., bool]:
    return functools.partial(transformer_auto_wrap_policy, transformer_layer_cls=set(classes))


POLICIES: dict[str, Any] = {
    "documentation": modern,
    "documentation, 5": functools.partial(modern, min_num_params=5),
    "documentation, 100": functools.partial(modern, min_num_params=100),
    "kwargs": not_into_sequentials_of_two,
    "partial in the middle": functools.partial(ask_before, limit=20),
    "everything": everything,
    "no descent": nothing_inside,
    **{f"size {n}": by_size(n) for n in (1, 20, 21, 40, 41, 100, 150, 288, 500)},
    "lambda": functools.partial(lambda_auto_wrap_policy, lambda_fn=is_narrow),
    "transformer": by_class(nn.TransformerEncoderLayer, Experts, L),
    "ModuleWrapPolicy": ModuleWrapPolicy({nn.TransformerEncoderLayer, Experts, S}),
}
WHOLE: dict[str, Any] = {  # FSDP1 supports ties inside what it wraps only
    **{f"size {n}": by_size(n) for n in (45, 52, 53, 60, 61, 96, 97)},
    "classes": by_class(Bag, S),
}
MODELS = {
    "nested": (nested, POLICIES),
    "encoder": (encoder, POLICIES),
    "mixture": (mixture, POLICIES),
    "tied": (tied, WHOLE),
}


def wrapped_by_peer(model: nn.Module, policy: Any, **options: Any) -> set[str] | None:
    """The names of the modules with parameters that FullyShardedDataParallel wraps, except the model itself.

    None if it wraps one without a forward, and warns that this does not work: we do not choose it.
    """
    names = {module: name for name, module in model.named_modules()}
    managed = {module for module in names if list(module.parameters())}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "FSDP will not all-gather parameters for containers")
        root = FullyShardedDataParallel(
            model, auto_wrap_policy=policy, device_id=torch.device("cpu"), **options
        )
    inside = [instance.module for instance in FullyShardedDataParallel.fsdp_modules(root)[1:]]
    if any(isinstance(module, (nn.ModuleList, nn.ModuleDict)) for module in inside):
        return None
    return {names[module] for module in inside if module in managed}


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", MODELS)
@on_ranks(2)
def test_the_recursion_chooses_what_fsdp1_wraps(name: str) -> None:
    build, policies = MODELS[name]
    found = {which: wrapped_by_peer(build(), policy) for which, policy in policies.items()}
    peers = {which: wrapped for which, wrapped in found.items() if wrapped is not None}
    for which, peer in peers.items():
        model = build()
        ours = names_of(model, as_policy(policies[which]).choose(model, set()))
        assert sorted(ours) == sorted(peer), which
    assert len(peers) >= 8
    assert len(set(map(frozenset, peers.values()))) >= 3, "the policies hardly differ"


def with_ignored(seed: int) -> tuple[nn.Module, list[nn.Module], int]:
    model = random_tree(seed)
    rng = random.Random(-seed)
    candidates = [module for module in model.modules() if module is not model]
    return model, rng.sample(candidates, k=min(2, len(candidates))), rng.choice([1, 10, 50, 100, 150, 250])


RANDOM = range(40)


@on_ranks(2)
def test_size_with_ignored_modules_chooses_what_fsdp1_wraps() -> None:
    found = []
    for seed in RANDOM:
        model, ignored, limit = with_ignored(seed)
        names = {name for module in ignored for name in names_of(model, module.modules())}
        wrapped = wrapped_by_peer(model, by_size(limit), ignored_modules=ignored)
        assert wrapped is not None
        assert not wrapped & names
        found.append(wrapped)
    for seed, peer in zip(RANDOM, found, strict=True):
        model, modules, limit = with_ignored(seed)
        ignored = {id(param) for module in modules for param in module.parameters()}
        for policy in (WrapBySize(limit), as_policy(by_size(limit))):
            assert sorted(names_of(model, policy.choose(model, ignored))) == sorted(peer), (seed, policy)
    assert sum(map(bool, found)) > 20
    assert any("." in name for peer in found for name in peer)


# --- recursive functions --------------------------------------------------------------------------


def asked(model: nn.Module, limit: int = 10**9) -> str:
    """What the function is asked, in order."""
    names = {module: name or "model" for name, module in model.named_modules()}
    lines = []

    def policy(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
        lines.append(f"{names[module]}: {'into it' if recurse else 'choose'} with {nonwrapped_numel}?")
        return recurse or nonwrapped_numel >= limit

    WrapRecursively(policy).choose(model, set())
    return "\n".join(lines)


def test_a_parameter_counts_once_wherever_it_is_tied() -> None:
    """FSDP1 subtracts it for each chosen module that has it, down to numbers below 0."""
    model = Bag(inner=S(L(4, 4), L(4, 4), L(3, 3)), outer=L(2, 2))
    model.inner[1].weight = model.inner[0].weight
    assert_expected_inline(
        asked(model, limit=20),
        """\
model: into it with 42?
inner: into it with 36?
inner.0: into it with 20?
inner.0: choose with 20?
inner.1: into it with 20?
inner.1: choose with 20?
inner.2: into it with 12?
inner.2: choose with 12?
inner: choose with 12?
outer: into it with 6?
outer: choose with 6?""",
    )


def test_a_module_in_two_places_is_asked_for_once_and_chosen_once() -> None:
    shared = L(4, 4)
    model = S(S(shared, L(2, 2)), S(shared, L(3, 3)))
    assert asked(model).count("0.0: choose") == 1
    assert choice(WrapBySize(20), model) == ["0.0"]


def test_parameters_of_a_container_without_forward_go_to_the_module_around() -> None:
    model = Bag(inner=Bag(items=nn.ModuleList([L(4, 4), L(4, 4)])), other=L(2, 2))
    for wrap in (WrapBySize(30), functools.partial(modern, min_num_params=30)):
        assert choice(wrap, model) == ["inner"]


def test_a_module_inside_itself_ends_the_recursion() -> None:
    model = S(L(4, 4), S(L(4, 4)))
    model[1].back = model
    assert choice(WrapBySize(20), model) == ["0", "1.0"]


@pytest.mark.parametrize(
    "policy",
    [
        lambda module, recurse, nonwrapped_numel: recurse or nonwrapped_numel == 72,
        lambda module, recurse, unwrapped_params: recurse or unwrapped_params == 72,
        lambda module, recurse, unwrapped_params=0, **kwargs: recurse or unwrapped_params == 72,
        lambda m, r, n: r or n == 72,
        lambda m, r, n, /: r or n == 72,
        lambda m, r, nonwrapped_numel: r or nonwrapped_numel == 72,
        functools.partial(lambda m, r, limit, nonwrapped_numel: r or nonwrapped_numel == limit, limit=72),
        lambda *, module, recurse, nonwrapped_numel: recurse or nonwrapped_numel == 72,
        lambda module, recurse, **kwargs: recurse or kwargs == {"nonwrapped_numel": 72},
        lambda module, recurse: recurse or (isinstance(module, L) and module.in_features == 8),
        functools.partial(
            lambda wanted, module, recurse, nonwrapped_numel: recurse or nonwrapped_numel == wanted, 72
        ),
    ],
)
def test_a_recursive_function_is_known_by_its_arguments(policy: Any) -> None:
    assert isinstance(as_policy(policy), WrapRecursively)
    assert choice(policy, nested()) == ["1.0"]


# --- by size --------------------------------------------------------------------------------------


def test_attention_is_divided_where_it_is_asked_for() -> None:
    inside, model = "encoder.layers.0.self_attn.out_proj", encoder()
    assert inside not in choice(WrapBySize(70), model)
    assert inside in names_of(model, WrapBySize(70, keep_whole=()).choose(model))


def test_descend_only_names_classes_that_are_not_chosen() -> None:
    assert choice(WrapBySize(30), nested()) == ["0", "1.0", "1.1.1"]
    assert choice(WrapBySize(30, descend_only={S}), nested()) == ["1.0", "1.1.1"]


def test_the_default_size_is_that_of_fsdp1() -> None:
    with torch.device("meta"):
        model = S(L(9_999, 10_000, bias=False), L(10_000, 10_000, bias=False), L(10, 10))
    assert choice(WrapBySize(), model) == ["1"]


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
def test_parameters_without_a_shape_yet_count_nothing() -> None:
    """fully_shard says what they lack."""
    assert choice(WrapBySize(20), S(S(nn.LazyLinear(3), L(4, 4)), L(2, 2))) == ["0.1"]


# --- by class and predicate -----------------------------------------------------------------------


def test_classes_choose_matches_inside_matches_and_inner_ones_first() -> None:
    assert choice({CausalBlock, nn.LayerNorm}, LanguageModel()) == [
        *("blocks.0.norm_1", "blocks.0.norm_2", "blocks.0"),
        *("blocks.1.norm_1", "blocks.1.norm_2", "blocks.1", "norm"),
    ]


def test_the_model_itself_is_never_chosen() -> None:
    assert choice(S, nested()) == ["0", "1.1", "1"]
    assert choice(lambda module: isinstance(module, S), nested()) == ["0", "1.1", "1"]
    assert choice(lambda name, module: name in ("", "0"), nested()) == ["0"]


def test_modules_without_parameters_to_manage_are_passed_over() -> None:
    model = S(L(2, 2), nn.ReLU(), L(2, 2), nn.LayerNorm(2, elementwise_affine=False))
    assert choice(nn.Module, model, model[0].parameters()) == ["2"]
    assert choice(lambda module: True, model, model[0].parameters()) == ["2"]
    assert choice(everything, model, model[0].parameters()) == ["2"]


def test_a_module_in_two_places_comes_after_all_that_is_inside_it() -> None:
    shared = S(L(2, 2))
    model = Bag(early=S(shared), late=shared)
    late_first = Bag(late=S(shared, L(3, 3)), early=shared[0])
    assert choice(nn.Module, model) == ["early.0.0", "early.0", "early"]
    assert choice(nn.Module, late_first) == ["late.0.0", "late.0", "late.1", "late"]


def test_a_predicate_gets_the_name_if_it_takes_two_arguments() -> None:
    assert choice(lambda name, module: name.endswith("1") and isinstance(module, S), nested()) == ["1.1", "1"]
    assert choice(lambda module, limit=5: len(module._modules) == 2, nested()) == ["1.1", "1"]
    assert choice(functools.partial(lambda width, m: m.weight.shape[0] == width, 8), S(L(8, 8), L(3, 3))) == [
        "0"
    ]


def test_modules_inside_attention_are_never_groups_as_nobody_calls_them() -> None:
    assert [name for name in choice(L, encoder()) if "out_proj" in name] == []

    class Calls(nn.MultiheadAttention):
        def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return self.out_proj(x)

    assert choice(L, S(Calls(4, 2))) == ["0.out_proj"]


@on_ranks(1)
def test_a_module_that_is_sharded_already_is_still_of_its_class() -> None:
    blocks = ["blocks.0", "blocks.1", "blocks.2"]
    model = Tower()
    fully_shard(model.blocks[1])
    assert (choice(type(model.blocks[0]), model), choice(None, model)) == (blocks, blocks)


# --- repeated blocks ------------------------------------------------------------------------------


def test_repeated_blocks_are_chosen_and_nothing_inside_them() -> None:
    assert choice(None, LanguageModel(depth=3)) == ["blocks.0", "blocks.1", "blocks.2"]
    assert choice(None, mixture()) == ["blocks.0", "blocks.1"]
    assert choice(None, encoder()) == ["encoder.layers.0", "encoder.layers.1"]


def test_children_of_sequentials_dicts_and_the_model_itself_are_repeated_too() -> None:
    assert choice(None, S(L(2, 2), nn.ReLU(), L(2, 2), nn.ReLU(), nn.LayerNorm(2))) == ["0", "2"]
    model = Bag(heads=nn.ModuleDict({"a": L(2, 2), "b": L(2, 3), "c": nn.Embedding(2, 2)}))
    assert choice(None, model) == ["heads.a", "heads.b"]


def test_containers_inside_containers_are_looked_into() -> None:
    stages = nn.ModuleList([nn.ModuleList([L(2, 2), L(2, 2)]), nn.ModuleList([L(3, 3), L(3, 3)])])
    assert choice(None, Bag(stages=stages)) == ["stages.0.0", "stages.0.1", "stages.1.0", "stages.1.1"]
    single = nn.ModuleList([S(L(2, 2), L(2, 2)), nn.Embedding(2, 2)])
    assert choice(None, Bag(single=single)) == ["single.0.0", "single.0.1"]


def test_what_stands_once_is_not_repeated() -> None:
    layer = L(2, 2)
    assert choice(None, Bag(blocks=nn.ModuleList([layer, layer, nn.LayerNorm(2)]), head=L(2, 2))) == []
    assert choice(None, Bag(blocks=nn.ModuleList([layer, L(2, 2), layer]))) == ["blocks.0", "blocks.1"]
    model = S(L(2, 2), L(2, 2))
    assert choice(None, model, model[0].parameters()) == []


def test_a_block_inside_another_is_not_chosen_for_standing_elsewhere_too() -> None:
    blocks = [S(L(2, 2)), S(L(3, 3))]
    model = Bag(again=nn.ModuleList([block[0] for block in blocks]), blocks=nn.ModuleList(blocks))
    assert names_of(model, chosen(as_policy(None), model, set())) == ["blocks.0", "blocks.1"]


def test_the_choice_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    twice = nn.ModuleList([L(2, 2), L(2, 2)])
    with caplog.at_level(logging.INFO, logger="shardwise"):
        choice(None, LanguageModel(depth=4))
        choice(None, Bag(a=twice, b=nn.ModuleList([*twice, L(1, 1), nn.LayerNorm(2), nn.LayerNorm(2)])))
        choice(None, L(2, 2))
    assert_expected_inline(
        "\n".join(caplog.messages),
        """\
shard_model: chose 4 x CausalBlock (blocks.0 ... blocks.3)
shard_model: chose 2 x Linear (a.0, a.1), 1 x Linear (b.2), 2 x LayerNorm (b.3, b.4)
shard_model: chose no module besides the model itself, as nothing in it is repeated""",
    )


def test_other_ranks_do_not_repeat_what_the_first_logs(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardwise.strategies.wrap_policies.own_rank", lambda: 1)
    with caplog.at_level(logging.INFO, logger="shardwise"):
        choice(None, LanguageModel(depth=4))
    assert caplog.messages == []


# --- from the argument to a policy ----------------------------------------------------------------


class Own:
    def __init__(self, *result: Any, kind: type = list) -> None:
        self.result = kind(result)

    def choose(self, model: nn.Module, ignored: set[int]) -> Any:
        return self.result


def test_what_the_argument_may_be() -> None:
    arguments = [
        *(None, L, {L, CausalBlock}, [L, nn.Embedding, L], (L,), frozenset({L}), dict.fromkeys([L]).keys()),
        *(is_narrow, lambda name, module: True, modern, by_size(1000), by_class(L, CausalBlock)),
        functools.partial(lambda_auto_wrap_policy, lambda_fn=is_narrow),
        *(ModuleWrapPolicy({L}), WrapBySize(), WrapBySize(2e7), WrapRepeated()),
    ]
    assert_expected_inline(
        "\n".join(map(repr, map(as_policy, arguments))),
        """\
WrapRepeated()
WrapClasses(Linear)
WrapClasses(CausalBlock, Linear)
WrapClasses(Linear, Embedding)
WrapClasses(Linear)
WrapClasses(Linear)
WrapClasses(Linear)
WrapWhere(is_narrow)
WrapWhere(<lambda>)
WrapRecursively(modern)
WrapRecursively(partial(size_based_auto_wrap_policy))
WrapRecursively(partial(transformer_auto_wrap_policy))
WrapRecursively(partial(lambda_auto_wrap_policy))
WrapRecursively(ModuleWrapPolicy)
WrapBySize(min_num_params=100_000_000)
WrapBySize(min_num_params=20_000_000)
WrapRepeated()""",
    )


def message(call: Callable[[], Any], kind: type[Exception]) -> str:
    with pytest.raises(kind) as error:
        call()
    assert type(error.value) is kind
    text = str(error.value)
    assert " at 0x" not in text, "an address"
    return text


def messages(kind: type[Exception], *calls: Callable[[], Any]) -> str:
    return "\n".join(message(call, kind) for call in calls)


def no_arguments() -> bool:
    return True


def keyword_only(module: nn.Module, *, names: list[str]) -> bool:
    return True


REMEDIES = {
    "[a policy]": "Pass a module class or a set of them, a function of (module), (name, module) or (module, recurse, "
    "nonwrapped_numel), a policy such as shardwise.strategies.WrapBySize(...), or None for the repeated blocks. In place "
    "of a policy of FSDP1, pass the function that it was made of, and settings of single modules as overrides=.",
    "[classes]": "pass module classes, or a function (name, module) -> bool to choose single modules.",
    "[arguments]": "Pass a function of (module), of (name, module) or of (module, recurse, nonwrapped_numel); give "
    "further arguments defaults, or values with functools.partial.",
}


def test_what_the_argument_may_not_be() -> None:
    arguments = [
        *(3, "blocks.*", L(2, 2), WrapBySize, dict, {L: True}, CustomPolicy(is_narrow)),
        *({"Block"}, [L(2, 2)], {L, int}),
        *(no_arguments, keyword_only, lambda *args: True, max, transformer_auto_wrap_policy),
    ]
    texts = [message(lambda a=argument: as_policy(a), TypeError) for argument in arguments]
    for text in texts:
        assert_says_what_to_do(text)
    told = "\n".join(texts)
    for short, remedy in REMEDIES.items():
        told = told.replace(remedy, short)
    assert_expected_inline(
        told.replace("torch.nn.modules.module.", ""),
        """\
shard_model: wrap is 3, an int. [a policy]
shard_model: wrap is 'blocks.*', a str. [a policy]
shard_model: wrap is a Linear. [a policy]
shard_model: wrap is the class WrapBySize. [a policy]
shard_model: wrap is the class dict. [a policy]
shard_model: wrap is a dict. [a policy]
shard_model: wrap is a CustomPolicy. [a policy]
shard_model: wrap contains 'Block', a str; [classes]
shard_model: wrap contains a Linear; [classes]
shard_model: wrap contains the class int; [classes]
shard_model: wrap is no_arguments, whose signature is () -> bool. [arguments]
shard_model: wrap is keyword_only, whose signature is (module: Module, *, names: list[str]) -> bool. [arguments]
shard_model: wrap is <lambda>, whose signature is (*args). [arguments]
shard_model: wrap is max, whose signature Python cannot read. Pass a function that calls it: lambda module: ...
WrapRecursively: transformer_auto_wrap_policy has the signature (module: Module, recurse: bool, nonwrapped_numel: int, transformer_layer_cls: set[type[Module]]) -> bool, and would be given (module, recurse, nonwrapped_numel). Give values to further arguments with functools.partial; pass a function of (module) or of (name, module) to shardwise.strategies.WrapWhere.""",
    )


def test_what_the_policies_refuse() -> None:
    assert_expected_inline(
        messages(
            TypeError,
            lambda: WrapClasses("Block"),  # type: ignore[arg-type]
            lambda: WrapBySize("1e8"),  # type: ignore[arg-type]
            lambda: WrapBySize(True),
            lambda: WrapBySize(3, keep_whole=[3]),  # type: ignore[list-item]
            lambda: WrapWhere(modern),
            lambda: WrapWhere(L),
            lambda: WrapRecursively(is_narrow),
            lambda: choice(lambda module: {"strategy": "zero2"}, nested()),
        )
        + "\n"
        + messages(
            ValueError, lambda: as_policy([]), lambda: WrapBySize(0), lambda: WrapBySize(float("nan"))
        ),
        """\
WrapClasses: classes is 'Block', a str; pass a module class or a set of them.
WrapBySize: min_num_params is '1e8', a str; pass the least number of parameters of a group, above 0.
WrapBySize: min_num_params is True, a bool; pass the least number of parameters of a group, above 0.
WrapBySize: keep_whole contains 3, an int; pass module classes, or a function (name, module) -> bool to choose single modules.
WrapWhere: modern has the arguments of FSDP1's recursive policies. Pass it to shardwise.strategies.WrapRecursively, or a function of (module) or of (name, module).
WrapWhere: predicate is the class Linear; pass a function.
WrapRecursively: is_narrow has the signature (module: torch.nn.modules.module.Module) -> bool, and would be given (module, recurse, nonwrapped_numel). Give values to further arguments with functools.partial; pass a function of (module) or of (name, module) to shardwise.strategies.WrapWhere.
WrapWhere(<lambda>) returned a dict for '0.0'. It only chooses modules: return True or False, and pass settings of single groups as shard_model(overrides={...}).
shard_model: wrap is empty; pass a module class, or wrap=None for the repeated blocks.
WrapBySize: min_num_params is 0; pass the least number of parameters of a group, above 0.
WrapBySize: min_num_params is nan; pass the least number of parameters of a group, above 0.""",
    )


# --- what a policy may choose ---------------------------------------------------------------------


def test_a_policy_that_chooses_nothing_is_told_what_the_model_has() -> None:
    model = LanguageModel(depth=12)
    assert_expected_inline(
        messages(
            ValueError,
            lambda: choice(nn.Conv2d, model),
            lambda: choice(L, model, model.parameters()),
            lambda: choice(Own(), encoder()),
        ),
        """\
shard_model: WrapClasses(Conv2d) chose no module with parameters inside the LanguageModel, so the whole model would be one group, unsharded at once. Modules that can be chosen: 49 x Linear, 25 x LayerNorm, 12 x CausalBlock, 1 x Embedding. Choose some of these with wrap=, or pass wrap=None for the repeated blocks.
shard_model: WrapClasses(Linear) chose no module with parameters inside the LanguageModel, so the whole model would be one group, unsharded at once. Modules that can be chosen: none. Choose some of these with wrap=, or pass wrap=None for the repeated blocks.
shard_model: Own chose no module with parameters inside the Bag, so the whole model would be one group, unsharded at once. Modules that can be chosen: 5 x Linear, 4 x LayerNorm, 2 x NonDynamicallyQuantizableLinear, 2 x MultiheadAttention, 2 x TransformerEncoderLayer, 1 x Embedding and 1 more. Choose some of these with wrap=, or pass wrap=None for the repeated blocks.""",
    )


def test_what_a_policy_returns_is_checked() -> None:
    model = nested()
    assert_expected_inline(
        messages(
            TypeError,
            lambda: choice(Own("0"), model),
            lambda: choice(Own((1, L(2, 2)), kind=dict), model),
            lambda: choice(Own(kind=lambda _: None), model),
        )
        + "\n"
        + messages(
            ValueError,
            lambda: choice(Own(model), model),
            lambda: choice(Own(L(2, 2)), model),
            lambda: choice(WrapClasses(nn.ModuleList), LanguageModel()),
        ),
        """\
shard_model: Own.choose() returned a list that contains '0', a str; return modules only.
shard_model: Own.choose() returned a dict; return a list of modules.
shard_model: Own.choose() returned None; return a list of modules.
shard_model: Own.choose() returned the model itself, a Sequential, which is sharded in any case, after what was chosen inside it. Leave it out.
shard_model: Own.choose() returned a Linear that is not inside the Sequential to be sharded. Return modules of the model it was given.
shard_model: WrapClasses(ModuleList).choose() returned 'blocks', a ModuleList, which has no forward: its children are called one by one, so it is unknown when to unshard its parameters. Choose its children, or the module around it.""",
    )


def test_what_a_policy_of_the_callers_own_returns_is_put_in_order() -> None:
    model = nested()
    assert choice(Own(model[1], model[1][1], model[0], model[0][1], model[1][1][0]), model) == [
        *("0", "1.1.0", "1.1", "1")
    ]
    assert choice(Own(model[1], model[0], kind=set), model) == ["0", "1"]
    assert choice(Own(model[1], model[0], model[1]), model) == ["0", "1"]


# --- neighbours in one group ----------------------------------------------------------------------


def groups(
    model: nn.Module, names: str, cap: float, ignored: Iterable[nn.Parameter] = (), key: Any = lambda _: 0
) -> str:
    """`merged`, on names and with the cap in float32 parameters."""
    wanted = {model.get_submodule(name) for name in names.split()}
    order = chosen(Own(*wanted), model, set())
    found = merge_neighbours(model, order, {id(param) for param in ignored}, 4 * cap, key)
    return " | ".join(" ".join(names_of(model, group)) for group in found)


def test_neighbours_share_a_group_up_to_the_cap() -> None:
    model = S(*(L(4, 4) for _ in range(5)), nn.ReLU(), L(4, 4))
    names = "0 1 2 3 4 6"
    assert groups(model, names, 40) == "0 1 | 2 3 | 4 6"
    assert groups(model, names, 59) == "0 1 | 2 3 | 4 6"
    assert groups(model, names, 60) == "0 1 2 | 3 4 6"
    assert groups(model, names, 1e9) == "0 1 2 3 4 6"
    assert groups(model, names, 1) == "0 | 1 | 2 | 3 | 4 | 6"
    assert groups(model, "0 3 4", 40) == "0 3 | 4"


def test_a_module_above_the_cap_is_alone() -> None:
    model = S(L(1, 1), L(9, 9), L(1, 1), L(1, 1))
    assert groups(model, "0 1 2 3", 50) == "0 | 1 | 2 3"


def test_modules_to_be_treated_otherwise_do_not_share() -> None:
    model = S(L(4, 4), L(4, 4), L(4, 5), L(4, 5), L(4, 4))
    assert groups(model, "0 1 2 3 4", 1e9, key=lambda m: m.out_features) == "0 1 | 2 3 | 4"


def test_children_of_different_modules_do_not_share() -> None:
    assert groups(nested(), "0.0 0.2 1.0 1.1.0 1.1.1", 1e9) == "0.0 0.2 | 1.0 | 1.1.0 1.1.1"


def test_what_lies_inside_a_group_comes_before_it() -> None:
    model = S(S(L(4, 4), L(2, 2)), S(L(4, 4), L(2, 2)))
    assert groups(model, "0 0.0 1 1.0", 1e9) == "0.0 | 1.0 | 0 1"
    assert groups(model, "0 0.0 0.1 1 1.0 1.1", 26) == "0.0 0.1 | 1.0 1.1 | 0 1"


def test_parameters_of_inner_groups_ignored_ones_and_the_second_of_a_tie_take_no_room() -> None:
    model = S(S(L(4, 4), L(2, 2)), S(L(4, 4), L(2, 2)))
    assert groups(model, "0 1", 12) == "0 | 1"
    assert groups(model, "0 0.0 1 1.0", 12) == "0.0 | 1.0 | 0 1"
    assert groups(model, "0 1", 12, [*model[0][0].parameters(), *model[1][0].parameters()]) == "0 1"
    model[1][0] = model[0][0]
    assert groups(model, "0 1", 32) == "0 1"


def test_sizes_are_in_the_parameters_own_dtype() -> None:
    model = S(L(4, 4), L(4, 4), L(4, 4)).double()
    assert groups(model, "0 1 2", 80) == "0 1 | 2"


def test_a_module_in_several_places_is_alone() -> None:
    shared = L(4, 4)
    model = S(L(4, 4), shared, L(4, 4), L(4, 4), S(shared))
    assert groups(model, "0 1 2 3", 1e9) == "0 | 1 | 2 3"
