"""Each wait that is left out is found by some scenario. That there are no others: test_races.py."""

import pytest

from races import caller_recipes, settings_recipes, stream_recipes
from races.mutants import MUTANTS, PATCHES, Mutant
from races.scenarios import SCENARIOS, run

pytestmark = pytest.mark.processes  # steps of whole models: seconds

assert caller_recipes
assert settings_recipes
assert stream_recipes


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
