"""What a refusal is, for the tests of bad input.

`refusal` builds a model, does the wrong thing to it, and returns what the caller is told. Before it
does, it makes sure that the model is what it was (the same classes, parameter objects, hooks and
attributes) and that the right call then works: the model trains, with the gradients of an unsharded one.
"""

import importlib
import re
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from harness import World
from models import Tower, random_batch, shard_tower
from reference import full
from torch import Tensor, nn
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY

from shardwise import FSDPModule, fully_shard


def tower() -> nn.Module:
    return Tower(depth=2).double()


def seeded(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return build()


def shard_bottom_up(model: nn.Module) -> None:
    shard_tower(model)


def sharded_tower() -> nn.Module:
    model = tower()
    shard_bottom_up(model)
    return model


def shard_root(model: nn.Module) -> None:
    fully_shard(model)


def shard_block_1(model: nn.Module) -> None:
    fully_shard(model.blocks[1])


def start_again(model: nn.Module) -> None:
    """There is no way back from torch's own: the caller builds the model anew."""
    model.__class__ = Tower
    vars(model).clear()
    vars(model).update(vars(seeded(tower)))
    shard_bottom_up(model)


def nothing(model: nn.Module) -> None:
    """For models that are sharded already, and only have to work."""


@dataclass(frozen=True)
class Refusal:
    text: str
    changes: list[str]
    trains: str


def refuse(
    act: Callable[[nn.Module], Any],
    build: Callable[[], nn.Module] = tower,
    then: Callable[[nn.Module], Any] = shard_bottom_up,
    plain: Callable[[], nn.Module] = tower,
) -> Refusal:
    """Runs on every rank. Do `act` to a model; afterwards do the right thing, `then`, and train it."""
    model = seeded(build)
    before = portrait(model)
    try:
        act(model)
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
    else:
        text = "accepted"
    changes = differences(before, portrait(model))
    try:
        then(model)
        trains = trains_as(model, seeded(plain))
    except Exception as error:
        trains = f"{type(error).__name__}: {error}"
    return Refusal(text, changes, trains)


def refusal(world: World, act: Callable[[nn.Module], Any], **how: Any) -> str:
    """What `act` is told, the same on every rank. Nothing has changed, and the right call works."""
    return told_alike(world.run(refuse, act, **how))


def told_alike(ranks: list[Refusal]) -> str:
    first, *others = ranks
    assert first.text != "accepted", "nothing was raised"
    assert not first.changes, f"the model is not as it was: {first.changes}\nafter {first.text}"
    assert first.trains == "as the plain model", f"afterwards: {first.trains}\nafter {first.text}"
    assert all(other == first for other in others), f"ranks were told different things: {others}"
    return first.text


def refusals(world: World, *acts: Callable[[nn.Module], Any], **how: Any) -> str:
    """Several refusals, one below the other, in lines that fit on a page."""
    return "\n\n".join(wrapped(refusal(world, act, **how)) for act in acts)


@dataclass(frozen=True)
class Refused:
    """A line of a table: what is done to the model, and words of what the caller is told.

        REFUSED = {
            "an empty list": refused(lambda model: fully_shard([]), "ValueError: ", "empty"),
        }

        @pytest.mark.parametrize("case", REFUSED)
        def test_it_is_refused(world1, case):
            assert_refused(world1, __name__, case)

    Ranks look the line up in the test's module, since lambdas do not travel.
    """

    act: Callable[[nn.Module], Any]
    words: tuple[str | re.Pattern[str], ...]
    how: dict[str, Any]


def refused(act: Callable[[nn.Module], Any], *words: Any, **how: Any) -> Refused:
    """`A_REMEDY` among the words: it is said what to do. `how` is that of `refuse`."""
    return Refused(act, words, how)


def refuse_line(module: str, case: str) -> Refusal:
    """Runs on every rank."""
    line = importlib.import_module(module).REFUSED[case]
    return refuse(line.act, **line.how)


def assert_refused(world: World, module: str, case: str) -> str:
    text = told_alike(world.run(refuse_line, module, case))
    words = sys.modules[module].REFUSED[case].words
    assert_says(text, *(word for word in words if word is not A_REMEDY))
    if A_REMEDY in words:
        assert_says_what_to_do(text)
    return text


def wrapped(text: str) -> str:
    return textwrap.fill(text, 70, break_long_words=False, break_on_hyphens=False)


def assert_says(text: str, *words: str) -> None:
    missing = [word for word in words if word not in text]
    assert not missing, f"{missing} not in the message: {text}"


A_REMEDY = re.compile(
    r"[.;,:] (or )?(apply|build|call|choose|convert|copy|distribute|give|keep|leave|make|move|name|omit|"
    r"pass|put|remove|replace|run|shard|take|untie|use|wrap)\b",
    re.IGNORECASE,
)


def assert_says_what_to_do(text: str) -> None:
    """Some clause after the first begins with a verb that tells the reader what to do."""
    assert A_REMEDY.search(text), f"it is not said what to do: {text}"


HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)


def portrait(model: nn.Module) -> dict[str, Any]:
    """All that `fully_shard` could change in a model, each thing under its name."""
    seen: dict[str, Any] = {}
    for name, module in model.named_modules():
        seen[f"class of '{name}'"] = type(module)
        seen[f"attributes of '{name}'"] = attributes(module)
        for hooks in HOOKS:
            seen[f"{hooks} of '{name}'"] = list(getattr(module, hooks).values())
        for key, tensor in [*module._parameters.items(), *module._buffers.items()]:
            seen[f"'{name}.{key}'"] = tensor
            if tensor is not None:
                seen[f"attributes of '{name}.{key}'"] = set(vars(tensor))
                seen[f"version of '{name}.{key}'"] = tensor._version
    return seen


def attributes(module: nn.Module) -> set[str]:
    """The names in the instance dictionary, without torch's records of composable APIs if empty."""
    return {name for name, value in vars(module).items() if value or name not in (REGISTRY_KEY, STATE_KEY)}


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    names = dict.fromkeys([*before, *after])
    return [name for name in names if not _same(before.get(name), after.get(name))]


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return a is b
    return a == b


def trains_as(model: nn.Module, plain: nn.Module) -> str:
    """Whether one step of `model` computes what one of `plain` does; the batch is the same on all ranks."""
    if not isinstance(model, FSDPModule):
        return "not sharded"
    for each in (model, plain):
        each(random_batch(0, 4)).pow(2).mean().backward()
    wrong = [
        name
        for (name, param), other in zip(model.named_parameters(), plain.parameters(), strict=True)
        if not torch.allclose(full(param.grad), other.grad, rtol=0, atol=1e-12)  # type: ignore[arg-type]
    ]
    return f"wrong gradients of {wrong}" if wrong else "as the plain model"


def assert_trains(world: World, then: Callable[[nn.Module], Any], **how: Any) -> None:
    """`then` is accepted."""
    for result in world.run(refuse, nothing, then=then, **how):
        assert result.trains == "as the plain model", result.trains


SHARDED = {"then": nothing}  # for models that are built sharded


@dataclass(frozen=True)
class Calling:
    """A call of a method of the model, or of a part of it."""

    method: str
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    on: str = ""

    def __call__(self, model: nn.Module) -> None:
        getattr(model.get_submodule(self.on), self.method)(*self.args, **self.kwargs)
