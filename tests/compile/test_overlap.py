"""The order of collectives in compiled graphs: on made-up programs, and on what Inductor makes of a model."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from expecttest import assert_expected_inline
from hypothesis import given
from hypothesis import strategies as st

from shardwise.compile.overlap import one_ahead
from shardwise.torch_compat import dynamo

KINDS = {"G": "all_gather_into_tensor", "R": "reduce_scatter_tensor", "A": "all_reduce", "w": "wait_tensor"}


@dataclass(eq=False)
class Step:
    """Stands for a step of Inductor: `name` begins with its kind; any other letter is a computation."""

    name: str
    needs: tuple[str, ...] = ()
    follows: tuple[str, ...] = ()  # without using what they give
    unmet_dependencies: Any = field(init=False)

    def __post_init__(self) -> None:
        self.unmet_dependencies = [SimpleNamespace(name=name, is_fake=False) for name in self.needs]
        self.unmet_dependencies += [SimpleNamespace(name=name, is_fake=True) for name in self.follows]

    def get_buffer_names(self) -> list[str]:
        return [self.name]


@pytest.fixture(autouse=True)
def _kinds_by_letters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dynamo, "collective_of", lambda step: KINDS.get(step.name[0]))


def ordered(program: str) -> str:
    """`program`: steps as ``name(need need)``, in the order they were traced."""
    steps = []
    for text in program.split(", "):
        name, _, needs = text.strip().rstrip(")").partition("(")
        steps.append(Step(name, tuple(needs.split())))
    return " ".join(step.name for step in one_ahead(steps))


def test_each_all_gather_begins_before_the_one_ahead_of_it_is_waited_for() -> None:
    assert_expected_inline(
        ordered(
            "p1, G1(p1), w1(G1), c1(w1), p2, G2(p2), w2(G2), c2(c1 w2), p3, G3(p3), w3(G3), c3(c2 w3), out(c3)"
        ),
        """p1 G1 p2 G2 w1 c1 p3 G3 w2 c2 w3 c3 out""",
    )


def test_what_an_all_gather_needs_comes_no_later_than_before() -> None:
    assert_expected_inline(
        ordered("p, y, G1(p), w1(G1), c1(w1), G2(p), w2(G2), out(w2 c1)"), """p y G1 G2 w1 c1 w2 out"""
    )


BACKWARD = (
    "G3, w3(G3), c3(w3), R3(c3), x3(R3), g3(x3), G2, w2(G2), c2(c3 w2), R2(c2), x2(R2), g2(x2), "
    "G1, w1(G1), c1(c2 w1), R1(c1), x1(R1), g1(x1)"
)


def test_reductions_are_waited_for_when_the_next_one_begins() -> None:
    assert_expected_inline(
        ordered(BACKWARD.replace("x", "wx")), """G3 G2 w3 c3 R3 G1 w2 c2 wx3 g3 R2 w1 c1 wx2 g2 R1 wx1 g1"""
    )


def test_sums_over_replicas_are_waited_for_when_the_next_one_begins() -> None:
    """Each begins when its reduction over shards has ended, and holds up no all-gather."""
    program = BACKWARD
    for i in "123":
        program = program.replace(
            f"x{i}(R{i}), g{i}(x{i})", f"wx{i}(R{i}), A{i}(wx{i}), wa{i}(A{i}), g{i}(wa{i})"
        )
    assert_expected_inline(
        ordered(program), """G3 G2 w3 c3 R3 G1 w2 c2 wx3 A3 R2 w1 c1 wa3 g3 wx2 A2 R1 wa2 g2 wx1 A1 wa1 g1"""
    )


def test_sums_over_replicas_have_one_place_among_all_gathers_wherever_these_are_waited_for() -> None:
    program = "R1, wx1(R1), A1(wx1), wa1(A1), G2, {early}R2, wx2(R2), {late}G3, w3(G3)"
    assert_expected_inline(
        "\n".join(
            " ".join(name for name in ordered(order).split() if name[0] in "GRA")
            for order in (
                program.format(early="w2(G2), ", late=""),
                program.format(early="", late="w2(G2), "),
            )
        ),
        """\
G2 R1 G3 A1 R2
G2 R1 G3 A1 R2""",
    )


def test_what_depends_on_other_collectives_stays_where_it_is() -> None:
    """Gathers and reductions of activations: sequence parallelism."""
    program = "G1, w1(G1), a1(w1), G9(a1), w9(G9), c1(w9), R9(c1), wr9(R9), c2(wr9), G2, w2(G2), c3(w2 c2)"
    assert_expected_inline(ordered(program), """G1 G2 w1 a1 G9 w9 c1 R9 w2 wr9 c2 c3""")


def test_what_overwrites_follows_what_reads_and_collectives_need_not_follow_each_other() -> None:
    steps = [Step("G1"), Step("w1", ("G1",)), Step("c1", ("w1",)), Step("R1", ("c1",), ("G1",)), Step("x")]
    steps += [Step("wr1", ("R1",)), Step("z", ("x", "wr1")), Step("A", ("x",), ("z",))]
    steps += [Step("G2", (), ("R1",)), Step("w2", ("G2",)), Step("c2", ("w2",))]
    assert_expected_inline(
        " ".join(step.name for step in one_ahead(steps)), """G1 G2 w1 c1 R1 x w2 c2 wr1 z A"""
    )


def test_programs_without_collectives_stay_as_they_are() -> None:
    assert ordered("a, b(a), c") == "a b c"
    assert one_ahead([]) == []


@st.composite
def programs(draw: st.DrawFn) -> list[Step]:
    """Any order that dependencies allow; collectives are waited for at once, or later."""
    steps: list[Step] = []
    for index in range(draw(st.integers(0, 25))):
        kind = draw(st.sampled_from("ccGRA"))
        done = [step.name for step in steps if step.name[0] not in "GRA"]
        needs = tuple(draw(st.lists(st.sampled_from(done), max_size=3, unique=True))) if done else ()
        steps.append(Step(f"{kind}{index}", needs))
        if kind in "GRA":
            steps.append(Step(f"w{index}", (f"{kind}{index}",)))
    return steps


def collectives(steps: list[Step]) -> list[str]:
    return [step.name for step in steps if step.name[0] in "GRA"]


@given(programs())
def test_all_steps_are_there_once_and_after_what_they_need(steps: list[Step]) -> None:
    found = one_ahead(steps)
    assert sorted(step.name for step in found) == sorted(step.name for step in steps)
    seen: set[str] = set()
    for step in found:
        assert seen.issuperset(step.needs)
        seen.add(step.name)


def shuffled(steps: list[Step], draw: Any) -> Iterator[Step]:
    """The same program, computations and waits elsewhere, as on a rank of other sizes."""
    waiting = list(steps)
    seen: set[str] = set()
    while waiting:
        comms = [step for step in waiting if step.name[0] in "GRA"][:1]
        free = [s for s in waiting if seen.issuperset(s.needs) and (s.name[0] not in "GRA" or s in comms)]
        step = draw(st.sampled_from(free))
        waiting.remove(step)
        seen.add(step.name)
        yield step


@given(programs(), st.data())
def test_ranks_begin_collectives_in_one_order_wherever_other_steps_stand(
    steps: list[Step], data: st.DataObject
) -> None:
    elsewhere = list(shuffled(steps, data.draw))
    assert collectives(one_ahead(elsewhere)) == collectives(one_ahead(steps))


@given(st.integers(1, 8))
def test_no_more_than_two_unshards_are_under_way_or_in_use(count: int) -> None:
    steps: list[Step] = []
    for i in range(count):
        before = (f"c{i - 1}",) if i else ()
        steps += [Step(f"G{i}"), Step(f"w{i}", (f"G{i}",)), Step(f"c{i}", (f"w{i}", *before))]
    places = {step.name: place for place, step in enumerate(one_ahead(steps))}
    for i in range(2, count):
        assert places[f"G{i}"] > places[f"c{i - 2}"]
    for first, second in pairwise(range(count)):
        assert places[f"G{second}"] < places[f"w{first}"]
