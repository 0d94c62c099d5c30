"""Of large cross products some cases always run, such that every value has its turn."""

from itertools import product

import pytest
from conftest import THINNED
from thinning import covering, pairs, pairs_of, sampled, values_of


@pytest.mark.parametrize("sizes", [(2, 3), (5, 5), (3, 6, 2), (2, 2, 2, 3), (9, 4), (1, 7)])
@pytest.mark.parametrize("every", [2, 3, 5, 7, 100])
def test_every_value_is_in_a_case_that_is_chosen_and_pairs_differ(sizes: tuple[int, ...], every: int) -> None:
    cases = list(product(*map(range, sizes)))
    wanted = -(-len(cases) // every)
    chosen = [cases[index] for index in covering(cases, wanted)]
    assert len(chosen) == len(set(chosen)) == max(wanted, *sizes)
    assert set().union(*map(values_of, chosen)) == set().union(*map(values_of, cases))
    if len(chosen) <= min(a * b for i, a in enumerate(sizes) for b in sizes[i + 1 :]) // 2:
        seen = [pair for case in chosen for pair in pairs_of(case)]
        assert len(set(seen)) > 0.7 * len(seen)


def test_holes_in_a_cross_product_are_no_matter() -> None:
    cases = [case for case in product(range(4), range(4)) if sum(case) != 3]
    chosen = [cases[index] for index in covering(cases, 1)]
    assert set().union(*map(values_of, chosen)) == set().union(*map(values_of, cases))


def test_pairs_leave_no_entry_out() -> None:
    left, right = ({name: name.upper() for name in names} for names in ("a", "vwxyz"))
    (_, cells), _ = pairs(("x", "y"), left, right, every=3).args, None
    assert {cell.values for cell in cells if not cell.marks} == set(product("A", "VWXYZ"))


def test_samples_of_tests_over_one_list_differ() -> None:
    samples = {name: sampled(name, 12, 3) for name in ("test_a", "test_b", "test_c", "test_d", "test_e")}
    assert all(each == list(range(each[0], 12, 3)) for each in samples.values())
    assert {each[0] for each in samples.values()} == {0, 1, 2}


def test_every_value_has_its_turn_in_what_was_collected_here(request: pytest.FixtureRequest) -> None:
    """Of the whole suite, where all of it is run."""
    for name, (cases, chosen) in request.config.stash[THINNED].items():
        always = set().union(*(values_of(cases[index]) for index in chosen))
        assert always == set().union(*map(values_of, cases)), name


@pytest.mark.thin(4)
@pytest.mark.parametrize("left", "abc")
@pytest.mark.parametrize(("middle", "number"), [("x", 1), ("y", 1), ("z", 2)])
@pytest.mark.parametrize("right", [True, False])
def test_a_thinned_test_is_noted(
    request: pytest.FixtureRequest, left: str, middle: str, number: int, right: bool
) -> None:
    (name,) = [
        name for name in request.config.stash[THINNED] if name.endswith("::test_a_thinned_test_is_noted")
    ]
    cases, chosen = request.config.stash[THINNED][name]
    assert [len({case[axis] for case in cases}) for axis in range(3)] == [2, 3, 3]
    assert len(chosen) == 5
