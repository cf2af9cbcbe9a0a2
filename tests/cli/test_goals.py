"""Goals on the command line: what `submit` makes of one, how one is changed, and how it is shown."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from elasticctl.api.codec import Timestamp, to_json
from elasticctl.api.errors import ConflictError, UsageError
from elasticctl.api.goal import Goal, PlanStatus, PlanStep
from elasticctl.api.observed.plan_text import outlook_text
from elasticctl.api.spec import ElasticJob
from elasticctl.api.status import JobStatus, Phase
from elasticctl.cli.views.history import history_table
from elasticctl.diagnosis import Case, diagnose
from elasticctl.operations.scale import ScaleRequest, goal_patch, scale_patch
from elasticctl.operations.submit.goals import check_goal
from tests.support.cli import Run
from tests.support.controller.goal_world import PRICES, a_goal_job

NOW = 1_800_000_000.0
HOUR_S = 3600.0


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text("import elasticctl_train\n")
    return str(path)


def goal_of(run: Run, *args: str) -> dict[str, Any]:
    done = run("submit", *args, "--no-workspace", "--dry-run", "-o", "json")
    assert done.code == 0, done.err
    found: dict[str, Any] = json.loads(done.out)["spec"]
    return found


@pytest.mark.slow
def test_a_goal_needs_no_size(run: Run, script: str) -> None:
    spec = goal_of(run, script, "--finish-by", "2h", "--budget", "37.50", "--prefer", "time", "--zones", "a,b")
    assert spec["goal"].pop("finishBy").endswith("Z")
    prices = {"onDemand": 1.0, "spot": 0.3, "source": "simulated"}
    assert spec["goal"] == {"budget": 37.5, "prefer": "time", "zones": ["a", "b"], "prices": prices}
    assert spec["sharing"]["automatic"]
    assert spec["minReplicas"] < spec["maxReplicas"]


@pytest.mark.slow
def test_a_number_is_the_upper_bound(run: Run, script: str) -> None:
    spec = goal_of(run, script, "--budget", "5", "--workers", "6", "--min-workers", "2")
    assert (spec["minReplicas"], spec["maxReplicas"]) == (2, 6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--prefer", "time"), "--prefer goes with a goal"),
        (("--budget", "lots"), "is not an amount in US dollars"),
        (("--budget", "5", "--zones", "A_B"), "is not a list of zones"),
        (("--finish-by", "2h", "--on-demand"), "FIX: leave it out"),
        (("--finish-by", "never"), "is not a time. FIX: give 36h"),
        (("--finish-by", "1h", "--budget", "2", "--work", "2h"), "the goal cannot be met, not even if no spot"),
    ],
)
def test_an_invalid_goal_is_refused(run: Run, script: str, args: tuple[str, ...], message: str) -> None:
    done = run("submit", script, *args, "--no-workspace", "--dry-run")
    assert done.code == 2, done.out
    assert message in done.err


def a_manifest(hours: float, budget: float, work_h: float) -> dict[str, Any]:
    goal = Goal(Timestamp(NOW + hours * HOUR_S), budget, work_seconds=work_h * HOUR_S, prices=PRICES)
    worker = {"replicas": 4, "template": {}}
    return {"spec": {"minReplicas": 1, "maxReplicas": 4, "goal": to_json(goal), "replicaSpecs": {"Worker": worker}}}


def test_the_two_nearest_goals_can_be_kept() -> None:
    """What is named after a refusal is promised when it is asked for."""
    now = datetime.fromtimestamp(NOW).astimezone()
    with pytest.raises(UsageError) as refused:
        list(check_goal(a_manifest(1.0, 2.0, 2.0), now))
    pairs = str(refused.value).partition("can meet: ")[2].split(", or ")
    assert len(pairs) == 2
    for pair in pairs:
        time, budget = pair.split()[1], float(pair.split()[3])
        hours = float(time[:-1]) / (60 if time.endswith("m") else 1) + 1 / 60
        assert "can be met on demand alone" in list(check_goal(a_manifest(hours, budget, 2.0), now))[-1]
    assert "is not guaranteed" in list(check_goal(a_manifest(3.0, 4.0, 2.0), now))[-1]


JOB: dict[str, Any] = {
    "metadata": {"name": "digits", "namespace": "default", "resourceVersion": "7", "uid": "u"},
    "spec": {"minReplicas": 1, "maxReplicas": 4, "replicaSpecs": {"Worker": {"replicas": 4, "template": {}}}},
    "status": {"phase": "Running"},
}


def test_a_goal_is_set_changed_and_ended() -> None:
    first = goal_patch(JOB, ScaleRequest(budget=20.0), local=True)["spec"]["goal"]
    assert (first["budget"], first["prices"]["source"]) == (20.0, "simulated")
    with_goal = {**JOB, "spec": {**JOB["spec"], "goal": first}}
    assert goal_patch(with_goal, ScaleRequest(budget=30.0), local=True)["spec"] == {"goal": {"budget": 30.0}}
    assert scale_patch(with_goal, [], ScaleRequest(to=2))["spec"]["goal"] is None
    with pytest.raises(UsageError, match="no price of the machines"):
        goal_patch(JOB, ScaleRequest(budget=20.0), local=False)
    with pytest.raises(ConflictError, match="has ended"):
        goal_patch({**JOB, "status": {"phase": "Failed"}}, ScaleRequest(budget=20.0), local=True)


def a_planned_job(**plan: Any) -> ElasticJob:
    found = PlanStatus(Timestamp(NOW), Timestamp(NOW + 300), "b", **plan)
    status = JobStatus(phase=Phase.RUNNING, plan=found, worker_seconds={"onDemand": HOUR_S, "spot": HOUR_S})
    return replace(a_goal_job(Goal(Timestamp(NOW + 9 * HOUR_S), 120.0)), status=status)


def test_status_says_whether_it_is_on_track() -> None:
    job = a_planned_job(
        pool="spot/zone-b",
        spot=6,
        measured=True,
        promised=True,
        reason="Cheapest",
        finish_at=Timestamp(NOW + 5 * HOUR_S),
        spread_s=2400.0,
        cost=2.5,
        on_demand_at=Timestamp(NOW + 7 * HOUR_S),
    )
    finish, later = (f"{datetime.fromtimestamp(NOW + hours * HOUR_S):%a %H:%M}" for hours in (5, 7))
    assert outlook_text(job, NOW) == (
        f"on track: {finish} ± 40m00s, $1.30 of $120.00, about $2.50 expected; now 6 on spot in zone-b;"
        f" on demand from {later} if spot stays away"
    )
    assert outlook_text(replace(job, goal=None), NOW) == ""


def test_a_spent_budget_is_reported_first() -> None:
    job = a_planned_job(reason="Spent", message="the budget of $120.00 is spent; the rest needs about $9.00 more")
    first = diagnose(Case(job, (), NOW))[0]
    assert first.rule == "out-of-money"
    assert "needs about $9.00 more" in first.text
    assert outlook_text(job, NOW).startswith("out of money: the budget of $120.00 is spent")


def test_history_has_each_decision() -> None:
    steps = (
        PlanStep(Timestamp(NOW), "spot/zone-b", 6, 2, "the least expected cost"),
        PlanStep(Timestamp(NOW + 60), message="the budget of $5.00 is spent"),
    )
    rows = history_table(a_planned_job(steps=steps)).rows
    assert [row[1:4] for row in rows] == [
        ("plan", "6 spot (zone-b), 2 on demand", "the least expected cost"),
        ("plan", "none", "the budget of $5.00 is spent"),
    ]
    findings = diagnose(Case(a_planned_job(spot=2, pool="spot", message="the least expected cost"), (), NOW))
    assert "Its goal asks for 2 on spot: the least expected cost." in [item.text for item in findings]
