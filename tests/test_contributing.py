"""What CONTRIBUTING draws is what is there: packages, files, functions, states, the order of a step."""

import importlib
import re
from operator import attrgetter
from pathlib import Path

import pytest
import torch
from events import events_of
from models import Tower, random_batch
from on_ranks import on_ranks
from test_packages import ARROWS

import shardwise
from shardwise import fully_shard
from shardwise.engine.unsharded_groups import Reason
from shardwise.groups.states import GRADIENT_STATES, UNSHARD_STATES

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "CONTRIBUTING.md").read_text()
ROOTS = (ROOT, ROOT / "tests", Path(shardwise.__file__).parent)
CALLS = re.findall(r"^ +([\w/]+)\.py +((?:[\w.]+, )*[\w.]+)", TEXT, flags=re.MULTILINE)


def rows(title: str) -> list[list[str]]:
    (table,) = re.findall(rf"^\| {title} \|.*\n\|[-|]+\n((?:\|.*\n)+)", TEXT, flags=re.MULTILINE)
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]


@pytest.mark.parametrize("path", sorted(set(re.findall(r"[\w.]*\w/[\w/]*\w\.(?:py|md|json)", TEXT))))
def test_every_file_it_names_exists(path: str) -> None:
    assert any((root / path).is_file() for root in ROOTS)


@pytest.mark.parametrize("path", sorted(set(re.findall(r"`([\w/]+/)`", TEXT))))
def test_every_folder_it_names_exists(path: str) -> None:
    assert any((root / path).is_dir() for root in ROOTS)


@pytest.mark.parametrize(("module", "names"), CALLS)
def test_every_function_of_its_call_chains_exists(module: str, names: str) -> None:
    home = importlib.import_module("shardwise." + module.replace("/", "."))
    for name in names.split(", "):
        assert callable(attrgetter(name)(home))


def test_it_shows_call_chains() -> None:
    assert len(CALLS) > 30


def test_it_lists_all_packages_and_what_they_import() -> None:
    assert {name.strip("`"): re.findall(r"\w+", imports) for name, imports, *_ in rows("package")} == ARROWS


def test_it_lists_all_transitions_of_parameters_and_gradients() -> None:
    for title, table in (("parameters", UNSHARD_STATES), ("gradients", GRADIENT_STATES)):
        shown = {
            (state, event, after)
            for state, _, leaves in rows(title)
            for event, after in re.findall(r"`(\w+)` -> (\w+)", leaves)
        }
        assert shown == {(state.name, event, after.name) for (state, event), after in table.items()}


def test_it_lists_all_reasons_to_stay_in_memory() -> None:
    assert [reason for reason, *_ in rows("reason")] == [reason.name for reason in Reason]


@on_ranks(2)
def test_it_shows_the_events_of_a_step_in_order() -> None:
    (diagram,) = re.findall(r"```\n(unshard R.*?)```", TEXT, flags=re.DOTALL)
    lines = [re.split(r" {2,}", line)[0] for line in diagram.splitlines()]
    torch.manual_seed(0)
    model = Tower().double()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    events: list[str] = []
    for index in range(2):
        events = events_of(model)
        model(random_batch(index, 4)).sum().backward()
    assert ", ".join(events).replace("blocks.", "").replace("Tower", "R") == ", ".join(lines)
