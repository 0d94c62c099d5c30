"""Each wait that is left out is found by some scenario; there is no wait but these and those that are argued away."""

import pytest

from races import caller_recipes, settings_recipes, stream_recipes
from races.mutants import HARMLESS, MUTANTS, PATCHES, Mutant
from races.scenarios import SCENARIOS, run

pytestmark = pytest.mark.processes  # steps of whole models: seconds

assert caller_recipes
assert settings_recipes
assert stream_recipes

SITES_SHOWN_BY = [
    *("direct", "hybrid", "int8 reduction", "hook on its own stream", "parts kept until backward", "offload"),
    *(
        "offload, edits between passes",
        "inference",
        "unshard by hand",
        "optimizer on a side stream",
        "summon",
        "a group on two streams, the branch last",
    ),
]
"""Scenarios that, together, order streams at every place that any does."""


@pytest.mark.sample(3)
@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_a_wait_that_is_left_out_is_found(mutant: Mutant) -> None:
    outcome = run(SCENARIOS[mutant.scenario], dropped=mutant.site)
    assert mutant.site in outcome.sites, "nobody asks for this wait any more: was a function renamed?"
    assert outcome.findings or outcome.unwritten


@pytest.mark.parametrize("name", PATCHES)
def test_what_more_than_one_call_gets_wrong_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    scenario, patch = PATCHES[name]
    patch(monkeypatch)
    assert run(SCENARIOS[scenario]).findings


def unlisted(*names: str) -> list[str]:
    listed = {mutant.site for mutant in MUTANTS} | set(HARMLESS)
    found = {site for name in names for site in run(SCENARIOS[name], steps=2).sites if site.callers}
    return sorted(str(site) for site in found - listed)


def test_every_wait_is_a_mutant_or_argued_away() -> None:
    assert unlisted(*SITES_SHOWN_BY) == [], "add these to mutants.py, with a scenario that finds them missing"


@pytest.mark.slow
def test_every_wait_of_any_scenario_is_a_mutant_or_argued_away() -> None:
    assert unlisted(*SCENARIOS) == []
