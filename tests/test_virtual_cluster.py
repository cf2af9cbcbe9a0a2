"""The real controller, service and launcher states in simulated clusters, in virtual time: see docs/recovery.md."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from elasticctl.api.observed.workers import Pod
from elasticctl.api.status import Activity, Cause
from elasticctl_train.inplace.newest_state import Agreement, Standing
from tests.support.virtual.launcher import Timing
from tests.support.virtual.scenario import Incident, Scenario, What, as_text, draw, fails, run_scenario, shrink
from tests.support.virtual.script import Bug, Fault, Script
from tests.support.virtual.world import Setup


def test_three_workers_outlive_their_losses() -> None:
    losses = (
        Incident(300.0, What.LOSE_NODE, 0.5, known_s=1.5),
        Incident(900.0, What.KILL, 0.0),
        Incident(1500.0, What.LOSE_NODE, 0.9, known_s=45.0),
    )
    world = run_scenario(Scenario(1, Setup(nodes=4, script=Script(steps=6000)), losses))
    status = world.status
    assert dict(status.restarts) == {"Completed": 3, "Killed": 1, "NodeLost": 2}
    assert status.failures == 0
    assert all(item.recovered_at is not None for item in status.interruptions)
    assert world.storage.step == status.checkpoint.step == 6000


@pytest.mark.seeds(40, search=1000)
def test_whatever_happens_only_the_jobs_own_code_ends_it(seed: int) -> None:
    failure = fails(draw(seed))
    assert not failure, f"{failure}\n{as_text(shrink(draw(seed)))}"


LOST_AT_FIRST = Scenario(
    123,
    Setup(
        workers=4,
        minimum=2,
        maximum=4,
        nodes=5,
        script=Script(
            import_s=0.5, load_s=2.0, first_step_s=600.0, steps=1363, save_every_s=136.3, stop_s=5.0, stays=True
        ),
    ),
    (
        Incident(2.954, What.KILL, 0.227),
        Incident(5.737, What.LOSSY, for_s=30.0, amount=0.218),
        Incident(8.545, What.LATE, 0.78, 120.0, amount=0.173),
        Incident(19.134, What.LOSE_NODE, 0.769, 1.0, 1.5),
        Incident(23.79, What.CRASH_SERVICE, for_s=30.0),
        Incident(35.354, What.DELETE_POD, 0.135),
    ),
)


def test_a_worker_whose_first_messages_to_a_restarted_service_are_lost_is_not_replaced() -> None:
    assert not fails(LOST_AT_FIRST)


CUT_OFF_UNHEARD = Scenario(
    1732,
    Setup(
        workers=2,
        minimum=1,
        maximum=2,
        backoff_limit=0,
        nodes=4,
        grace_s=30.0,
        lag_s=0.05,
        pod_start_s=0.5,
        lazy=False,
        elected=True,
        script=Script(
            import_s=5.0,
            load_s=60.0,
            first_step_s=10.0,
            step_s=10.0,
            steps=2289,
            save_every_s=2289.0,
            save_s=5.0,
            stop_s=0.5,
            teardown_s=1.0,
            export_s=10.0,
            stays=False,
        ),
        timing=Timing(prepare_s=5.0, spawn_s=0.2, stop_grace_s=5.0, leave_s=20.0),
    ),
    (
        Incident(20.24516, What.ISOLATE, 0.730685, for_s=3600.0, known_s=0.5, amount=0.582837),
        Incident(29.14219, What.CRASH_SERVICE, 0.087097, for_s=3600.0, known_s=1.5, amount=0.419063),
    ),
)


def test_a_machine_that_is_cut_off_while_no_service_runs_does_not_count_as_a_hang_of_its_peers() -> None:
    assert not fails(CUT_OFF_UNHEARD)


JUDGED_UNSTORED = Scenario(
    35521,
    Setup(
        workers=1,
        maximum=2,
        nodes=1,
        pod_start_s=0.5,
        script=Script(
            import_s=0.5,
            load_s=0.1,
            first_step_s=0.5,
            steps=574,
            save_every_s=172.2,
            save_s=5.0,
            stop_s=5.0,
            teardown_s=1.0,
            bug=Bug(Fault.KILLS_ITSELF),
        ),
    ),
    (Incident(11.103374, What.CRASH_SERVICE, for_s=3600.0),),
)


def test_a_failure_that_a_service_had_judged_and_could_not_store_counts() -> None:
    """The next generation had formed, and failed too while no service ran."""
    assert not fails(JUDGED_UNSTORED)


def test_a_story_is_the_same_each_time() -> None:
    """Otherwise, a seed that fails could not be debugged."""
    first, second = run_scenario(draw(11)), run_scenario(draw(11))
    assert first.status == second.status
    assert (first.loop.events, first.plane.requests) == (second.loop.events, second.plane.requests)
    assert first.plane.requests > 20


STAYING = Scenario(3, Setup(nodes=4, script=Script(steps=2000, stays=True)), (Incident(300.0, What.KILL, 0.0),))


LOSSES = tuple(Incident(110.0 * number, What.KILL, 0.3 * (number % 4)) for number in range(1, 7))


def test_ranks_that_stay_make_each_step_once_and_do_not_wait_for_new_workers() -> None:
    world = run_scenario(replace(STAYING, incidents=LOSSES))
    assert world.status.restarts["Killed"] == len(LOSSES)
    assert world.storage.step == 2000
    assert all(item.resumed_from == "memory" for item in world.status.generations[1:])
    assert world.figures.steps_made == 2000, "no step is made twice"


def take_the_slowest(standings: Sequence[Standing]) -> Agreement:
    whole = [rank for rank, each in enumerate(standings) if each.has_state]
    slowest = min(whole, key=lambda rank: standings[rank].step, default=None)
    return Agreement(slowest, (), tuple(standings))


def test_a_vote_that_loses_a_step_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    scenario = replace(STAYING, seed=1, incidents=LOSSES)
    assert not fails(scenario)
    monkeypatch.setattr("tests.support.virtual.staying.decide", take_the_slowest)
    assert "hold step" in fails(scenario)


def blame_whoever_ends(pod: Pod, *_: object) -> Cause | None:
    return Cause.APPLICATION if pod.ended else None


LOSS = Scenario(1, Setup(script=Script(steps=2000, stop_s=5.0)), (Incident(300.0, What.KILL, 0.0),))
BUG = Scenario(1, Setup(script=Script(bug=Bug(Fault.RAISES))))


@pytest.mark.parametrize(
    ("scenario", "name", "wrong", "failure"),
    [
        (LOSS, "core.group.signs_of_life.SILENT_S", 0.5, "replaced as unresponsive, but it called all the time"),
        (
            LOSS,
            "core.group.membership.Group.join",
            lambda *args, **options: None,
            "no steps are made though everything is in order",
        ),
        (LOSS, "rendezvous.service.describe_activity", lambda group: Activity("hung"), "status says 'hung', but"),
        (LOSS, "core.reconcile.count_ends", lambda job, status, ends, finishing: status, "restarts grew by 0"),
        (LOSS, "core.workers.classify", blame_whoever_ends, "but its ranks never failed by themselves"),
        (STAYING, "core.group.membership.Group.has_to_prepare", lambda *args: False, "waited for the start of"),
        (BUG, "core.phase.fatal_failure", lambda *args: None, "the budget allows 4"),
        (BUG, "core.phase.describe_failure", lambda failure: "an error", "which does not name the bug"),
    ],
)
def test_a_faulty_controller_is_detected(
    monkeypatch: pytest.MonkeyPatch, scenario: Scenario, name: str, wrong: Any, failure: str
) -> None:
    assert not fails(scenario)
    monkeypatch.setattr(f"elasticctl_controller.{name}", wrong)
    assert failure in fails(scenario)
