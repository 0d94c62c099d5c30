"""No scenario has a race, leaves a value unwritten, has the host wait in a steady step, or an unknown wait."""

import pytest

from races import caller_recipes, settings_recipes, stream_recipes
from races.launch_order import first_disagreement
from races.mutants import HARMLESS, MUTANTS
from races.reports import told
from races.scenarios import SCENARIOS, Scenario, run

pytestmark = pytest.mark.processes  # steps of whole models: seconds

assert caller_recipes
assert settings_recipes
assert stream_recipes


LISTED = {mutant.site for mutant in MUTANTS} | set(HARMLESS)
SLOW = {  # much like others
    *("prefetch 2", "hybrid, mixed precision", "accumulation, mixed precision", "tensor parallel"),
    *("parts kept until backward, mixed precision", "int8 reduction, hybrid", "experts, hybrid"),
    *("low-precision reduction, hybrid", "offload, mixed precision", "offload, hybrid", "zero3"),
    "optimizer on a side stream, mixed precision",
}


@pytest.mark.parametrize(
    "scenario",
    [
        pytest.param(each, marks=[pytest.mark.slow] if name in SLOW else [], id=name)
        for name, each in SCENARIOS.items()
    ],
)
def test_every_access_waits_for_what_it_depends_on_and_every_wait_is_listed(scenario: Scenario) -> None:
    outcome = run(scenario)
    assert not outcome.findings, told(outcome.findings)
    assert not outcome.unwritten
    assert outcome.num_checks > 50, "nothing was in flight beside anything else"
    assert outcome.host_waits == scenario.host_waits
    unlisted = sorted(str(site) for site in outcome.sites - LISTED if site.callers)
    assert unlisted == [], "add these to mutants.py, with a scenario that finds them missing"


ROUTED = ["experts", "experts in one group"]
MORE_ROUTED = ["experts in one group, all in use", "experts, hybrid"]


@pytest.mark.parametrize(
    "name", [*ROUTED, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE_ROUTED)]
)
def test_ranks_that_route_to_other_experts_launch_in_the_same_order(name: str) -> None:
    launches = {rank: run(SCENARIOS[name], rank, steps=2).launches for rank in (0, 5)}
    assert len({launch.communicator for launch in launches[0]}) >= 2
    disagreement = first_disagreement(launches)
    assert disagreement is None, disagreement
