"""Which ends are losses, and how long their replacement takes."""

from __future__ import annotations

import pytest

from elasticctl_controller.kube.pods import DROP_S, ReplacementTimer


class Bench:
    def __init__(self) -> None:
        self.now, self.heard = 1000.0, list[float]()
        self.losses = ReplacementTimer(self.heard.append, lambda: self.now)

    def replace(self, key: str) -> None:
        with self.losses.measure(key):
            self.losses.stop_clock(key)  # the watch reports it before the answer arrives


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_the_first_word_of_a_loss_counts(bench: Bench) -> None:
    bench.losses.record_loss("ns/a", "u1")
    bench.now += 2
    bench.losses.record_loss("ns/a", "u1")
    bench.now += 1
    bench.replace("ns/a")
    bench.replace("ns/a")
    assert bench.heard == [3.0]


def test_a_removal_on_purpose_is_no_loss(bench: Bench) -> None:
    bench.losses.expect_removal("u1")
    bench.losses.record_loss("ns/a", "u1")
    bench.replace("ns/a")
    assert bench.heard == []
    bench.losses.record_loss("ns/a", "u2")
    bench.replace("ns/a")
    assert bench.heard == [0.0]


def test_a_failed_creation_is_not_the_end_of_it(bench: Bench) -> None:
    bench.losses.record_loss("ns/a", "u1")
    bench.now += 1
    with pytest.raises(ValueError, match="no"), bench.losses.measure("ns/a"):
        raise ValueError("no")
    bench.now += 1
    bench.replace("ns/a")
    assert bench.heard == [2.0]


def test_a_worker_that_is_never_replaced_is_dropped(bench: Bench) -> None:
    for number in range(20_000):
        bench.losses.record_loss(f"ns/{number}", "")
    assert len(bench.losses._lost_at) == 10_000
    bench.now += DROP_S + 1
    bench.losses.record_loss("ns/last", "")
    assert list(bench.losses._lost_at) == ["ns/last"]
    bench.now += DROP_S + 1
    bench.losses.record_loss("ns/last", "")
    assert bench.losses._lost_at == {}
