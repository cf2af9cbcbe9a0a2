"""What a start costs, as a job's own workers have shown it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest

from elasticctl.api.codec import Timestamp
from elasticctl.api.goal import ON_DEMAND, SPOT
from elasticctl.api.observed.workers import Pod
from elasticctl.api.spec import PodPhase
from elasticctl.api.status import GroupGeneration, JobStatus
from elasticctl.planning.situation import Costs
from elasticctl_controller.core.goal.pools import Present, kept_costs, measured_costs
from tests.support.controller.samples import NOW

KNOWN = Costs(200.0, 10.0, 30.0, 300.0)
STEP = 1.2
"""What is measured is rounded up by at most that much."""


def a_pod(number: int, pool: str, scheduled_s: float) -> Pod:
    """A pod that was asked for at NOW, and on a machine so much later."""
    started_at = Timestamp(NOW + scheduled_s)
    return Pod(f"w-{number}", f"u-{number}", number, "", PodPhase.RUNNING, Timestamp(NOW), started_at, pool=pool)


def start_s(pods: Iterable[Pod], steps_s: float, known: Costs | None = None) -> float:
    """Of a job whose only group, of these pods, made its first step so long after they were asked for."""
    by_pool: dict[str, tuple[Pod, ...]] = {}
    for pod in pods:
        by_pool[pod.pool] = (*by_pool.get(pod.pool, ()), pod)
    names = tuple(pod.name for pods_there in by_pool.values() for pod in pods_there)
    first_step_at = Timestamp(NOW + steps_s)
    group = GroupGeneration(1, names, formed_at=Timestamp(NOW + steps_s - 1), first_step_at=first_step_at)
    return measured_costs(JobStatus(generations=(group,)), Present(by_pool, frozenset()), known, 10.0).start_s


def test_a_start_lasts_until_the_first_step_not_only_until_there_is_a_machine() -> None:
    assert 60 <= start_s([a_pod(0, ON_DEMAND, 20)], 60) <= 60 * STEP


def test_a_machine_that_was_there_already_does_not_say_how_long_others_take() -> None:
    assert start_s([a_pod(0, ON_DEMAND, 1)], 15, KNOWN) >= KNOWN.start_s
    assert start_s([a_pod(0, SPOT, 1)], 15, KNOWN) >= KNOWN.start_s
    assert start_s([a_pod(0, ON_DEMAND, 40), a_pod(1, ON_DEMAND, 1)], 60, KNOWN) <= 60 * STEP
    assert start_s([a_pod(0, ON_DEMAND, 1)], 15) <= 15 * STEP  # where nothing else is known


def test_of_spot_machines_the_quickest_counts_and_more() -> None:
    """One had to wait for a machine."""
    assert start_s([a_pod(0, SPOT, 20)], 40) >= 1.5 * 40
    assert start_s([a_pod(0, SPOT, 20), a_pod(1, ON_DEMAND, 30)], 40) <= 40 * STEP


def test_a_spot_worker_that_waited_for_hours_does_not_say_that_a_start_takes_hours() -> None:
    assert KNOWN.start_s <= start_s([a_pod(0, SPOT, 7200)], 7230, KNOWN) <= KNOWN.start_s * STEP
    assert Costs().start_s <= start_s([a_pod(0, SPOT, 7200)], 7230) <= Costs().start_s * STEP


@pytest.mark.parametrize("took_s", [22.0, 31.0, 76.0, 136.0, 480.0])
def test_what_is_known_of_a_start_stays_as_it_is_while_nothing_contradicts_it(took_s: float) -> None:
    """Neither rounding it up again, nor the leaving of on-demand workers, makes it longer."""
    known = start_s([a_pod(0, ON_DEMAND, 6)], took_s)
    for pods in ([a_pod(0, ON_DEMAND, 1)], [a_pod(0, SPOT, 1)], [a_pod(0, SPOT, 6)]):
        assert start_s(pods, took_s * 0.9 if pods[0].pool == SPOT else took_s, replace(KNOWN, start_s=known)) == known


def test_workers_whose_group_has_made_no_step_say_nothing() -> None:
    present = Present({ON_DEMAND: (a_pod(0, ON_DEMAND, 20),)}, frozenset())
    assert measured_costs(JobStatus(), present, KNOWN, 10.0).start_s == KNOWN.start_s
    forgotten = GroupGeneration(7, ("w-0",), formed_at=Timestamp(NOW + 900), first_step_at=Timestamp(NOW + 910))
    assert measured_costs(JobStatus(generations=(forgotten,)), present, KNOWN, 10.0).start_s == KNOWN.start_s


def test_a_guess_is_not_kept_as_if_it_were_known() -> None:
    guess = Costs()
    assert kept_costs((guess.start_s, guess.reform_s, guess.loss_s, guess.save_every_s)) is None
    assert kept_costs(()) is None
    assert kept_costs((20.0, 2.0, 9.0, 30.0)) == Costs(20.0, 2.0, 9.0, 30.0)
