"""The arithmetic of bench/claims/two_hosts.py: the bound, and who is set against what."""

import argparse

import numpy
import pytest
from two_hosts import bytes_to_send, disagreement, summarize

OPTIONS = argparse.Namespace(
    layers=2, width=64, heads=2, vocab=32, context=8, batch=1, rate_mbit=1000, processes=2
)


def times(step: float, update: float, sent: float) -> dict[str, numpy.ndarray]:
    values = {"step_ms": step, "forward_backward_ms": step - update, "update_ms": update, "sent_mb": sent}
    values["cpu_ms"] = step / 2
    return {name: numpy.array([value, value]) for name, value in values.items()}


def test_all_blocks_but_the_last_are_sent_three_times_half_and_the_rest_twice() -> None:
    block = 12 * 64 * 64 + (3 + 1 + 4 + 1) * 64 + 4 * 64
    rest = 2 * 32 * 64 + 8 * 64 + 2 * 64
    assert bytes_to_send(OPTIONS) == 4 * (3 * block + 2 * (block + rest)) / 2


@pytest.mark.parametrize(("plain_ms", "bound"), [(12.0, 11.0), (3.0, None)])
def test_the_bound_is_the_larger_of_compute_and_wire(plain_ms: float, bound: float | None) -> None:
    slow, fast = times(20.0, 2.0, 1.0), times(10.0, 2.0, 1.0)
    hosts = [
        {"plain": times(plain_ms, 2.0, 0.0), "peer": slow, "ours": fast},
        {"plain": times(1.0, 0.5, 0.0), "peer": fast, "ours": fast},
    ]
    facts, rows = summarize(hosts, [500.0, 900.0], OPTIONS)
    wire = bytes_to_send(OPTIONS) * 8 / 1e9 * 1e3
    assert facts["wire_ms"] == pytest.approx(wire)
    assert facts["bound_ms"] == pytest.approx(wire if bound is None else bound)
    assert facts["raw_mbit"] == 900
    assert facts["core_share"] == 0.5
    ours = next(row for row in rows if row["variant"] == "ours")
    assert ours["ratio_to_peer"]["median"] == 0.5  # against the slower of the peer's hosts
    assert ours["to_bound"]["median"] == pytest.approx(10 / facts["bound_ms"], abs=1e-3)
    assert next(row for row in rows if row["variant"] == "plain")["to_bound"] is None


def test_losses_are_compared_between_sharded_variants_on_each_host() -> None:
    hosts = [
        {"plain": [9.0, 9.0], "peer": [1.0, 2.0], "ours": [1.0, 2.0]},
        {"plain": [0.0, 0.0], "peer": [5.0, 6.0], "ours": [5.0, 6.25]},
    ]
    assert disagreement(hosts) == 0.25
