"""Who waits for whom, in words: what each rank has told, and the report that all of them print."""

from dataclasses import replace
from typing import Any

from expecttest import assert_expected_inline

from shardwise.layout.fqns import listed_ranks
from shardwise.ranks.activity import RankStatus
from shardwise.ranks.watch import deadlock, report_of

ISSUED = {"all-gather layers.3": 12, "all-gather layers.4": 11, "call clip_grad_norm_": 11}


def waits(name: str = "layers.4", count: int = 12, **more: Any) -> RankStatus:
    issued = {**ISSUED, f"all-gather {name}": count}
    status = RankStatus(12, "forward", "all-gather", name, count=count, ranks=range(4), issued=issued)
    status = replace(status, **{"quiet_s": 31.0, "is_late": True, **more})
    kind = f"{status.event} {status.name}"
    return replace(status, kind=kind, due={kind: status.count, **more.get("due", {})})


def elsewhere(step: int = 11, phase: str = "", **more: Any) -> RankStatus:
    return RankStatus(step, phase, quiet_s=40.0, issued=ISSUED, **more)


def test_a_rank_that_computes() -> None:
    assert_expected_inline(
        report_of({0: waits(), 1: elsewhere(12, "forward", code="model.py:{7} in <lambda>")}),
        """No progress for 31 s: rank 0 waiting for the all-gather of 'layers.4' (step 12, forward); rank 1 computing (step 12, forward), at model.py:{7} in <lambda>""",
    )


def test_ranks_that_ended_or_do_not_answer() -> None:
    assert_expected_inline(
        report_of({0: waits(), 1: elsewhere(has_ended=True), 2: None, 3: None}),
        """No progress for 31 s: rank 0 waiting for the all-gather of 'layers.4' (step 12, forward); rank 1 ended after step 11; ranks 2, 3 not answering: ended, stopped, or no longer in the process group""",
    )


def test_ranks_that_wait_for_each_other() -> None:
    assert_expected_inline(
        report_of({0: waits(), 1: waits("layers.5", 9), 2: waits(), 3: waits()}),
        """No progress for 31 s: ranks 0, 2, 3 waiting for the all-gather of 'layers.4' (step 12, forward); rank 1 waiting for the all-gather of 'layers.5' (step 12, forward); they wait for each other, because they disagree on what to communicate. Usual cause: control flow that differs by rank""",
    )


def test_nothing_is_told_of_a_call_that_all_ranks_have_made() -> None:
    issued = {**ISSUED, "call save_checkpoint": 1}
    saves = waits(event="call", name="save_checkpoint", count=1, phase="", issued=issued)
    assert report_of({0: saves, 1: replace(elsewhere(12), issued=issued), 2: saves}) == ""


def test_a_rank_that_saves_while_others_go_on_is_told_to_those_that_wait() -> None:
    issued = {**ISSUED, "call save_checkpoint": 1}
    saves = waits(
        event="call", name="save_checkpoint", count=1, phase="", step=11, quiet_s=40.0, issued=issued
    )
    other = waits(issued={**waits().issued, "call save_checkpoint": 1})
    assert_expected_inline(
        report_of({0: saves, 1: other, 2: other, 3: other}),
        """No progress for 31 s: ranks 1-3 waiting for the all-gather of 'layers.4' (step 12, forward); rank 0 in save_checkpoint() (after step 11)""",
    )


def test_what_all_ranks_have_issued_is_not_blamed_on_one() -> None:
    issued = {**ISSUED, "all-gather layers.4": 12}
    computes = replace(elsewhere(12, "forward"), issued=issued)
    assert_expected_inline(
        report_of({0: waits(), 1: computes}),
        """No progress for 31 s: rank 0 waiting for the all-gather of 'layers.4' (step 12, forward); rank 1 computing (step 12, forward); all ranks have issued what is waited for: the network does not deliver, or the back end needs ranks that compute""",
    )
    reduces, has_reduced = waits(event="reduction"), replace(computes, issued={"reduction layers.4": 12})
    assert report_of({0: reduces, 1: has_reduced}).endswith(
        "or the back end needs ranks that compute, or ranks use different parameters of the group"
    )
    on_device = waits(is_on_device=True, phase="")
    assert_expected_inline(
        report_of({0: on_device, 1: on_device}),
        """No progress for 31 s: ranks 0, 1 waiting for the all-gather of 'layers.4' on the device (after step 12); all ranks have issued what is waited for: a device still computes, or the network does not deliver""",
    )


def test_a_rank_that_has_issued_the_same_and_waits_in_issuing_is_not_behind() -> None:
    connects = waits(count=12, issued={**ISSUED, "all-gather layers.4": 11})
    assert "all ranks have issued" in report_of({0: connects, 1: connects})


def test_a_collective_that_was_left_out_before_is_named() -> None:
    """A back end that matches collectives by their order misses the last one."""
    last = waits(due={"all-gather layers.3": 12, "all-gather layers.4": 12})
    other = replace(elsewhere(12), issued={**waits().issued, "all-gather layers.3": 11})
    assert_expected_inline(
        report_of({0: last, 1: other}),
        """No progress for 31 s: rank 0 waiting for the all-gather of 'layers.4' (step 12, forward); rank 1 in no step since step 12; rank 1 left out the all-gather of 'layers.3', so that later collectives miss one""",
    )


def test_two_models_of_one_name_are_not_compared() -> None:
    unclear = replace(elsewhere(12, "forward"), issued={"all-gather layers.4": None})
    assert "all ranks have issued" in report_of({0: waits(), 1: unclear})


def test_nothing_is_told_where_nobody_waits() -> None:
    assert report_of({0: elsewhere(), 1: elsewhere(12, "forward"), 2: None}) == ""
    assert report_of({0: waits(is_late=False), 1: elsewhere()}) == ""


def test_other_groups_of_ranks_are_left_alone() -> None:
    """Rank 0 shares a mesh with rank 1 only: ranks 2 and 3 train something else."""
    report = report_of({0: waits(ranks=(0, 1)), 1: elsewhere(), 2: elsewhere(), 3: None})
    assert "2" not in report.partition("rank 1 in no step")[2].replace("step 12", "")
    assert "ranks" not in report


def test_ranks_of_which_each_keeps_another_waiting_are_a_deadlock() -> None:
    text = deadlock({0: waits(), 1: waits("layers.5", 9)})
    assert text is not None
    assert text.startswith(
        "the ranks disagree on what to communicate: rank 0 waiting for the all-gather of 'layers.4' (step 12, "
        "forward); rank 1 waiting for the all-gather of 'layers.5' (step 12, forward)."
    )


def test_ranks_that_a_slow_one_or_one_that_has_not_told_may_free_are_none() -> None:
    slow = waits("layers.5", 9, issued={"all-gather layers.4": 12, "all-gather layers.5": 9})
    assert deadlock({0: replace(waits(), issued=slow.issued), 1: slow}) is None
    assert deadlock({0: waits(), 1: waits("layers.5", 9), 2: None}) is None


def test_ranks_are_listed_as_ranges_and_only_the_first_few_of_many() -> None:
    assert listed_ranks([3]) == "rank 3"
    assert listed_ranks([5, 4]) == "ranks 4, 5"
    assert listed_ranks([5, 2, 0, 1]) == "ranks 0-2, 5"
    scattered = [rank for rank in range(60) if rank % 5]
    assert listed_ranks(scattered, 3) == "ranks 1-4, 6-9, 11-14 and 36 more"
