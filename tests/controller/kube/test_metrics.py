"""The metrics page: the documented names, and numbers that are true."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from elasticctl.api.codec import Manifest
from elasticctl.api.status import Interruption, JobStatus
from elasticctl_controller.kube.metrics import ControllerMetrics, jobs_by_phase, workers_by_state


def samples(metrics: ControllerMetrics) -> dict[str, float]:
    """Every sample as Prometheus reads it: `name{label=value,...}` -> value."""
    found = {}
    for family in text_string_to_metric_families(metrics.render().decode()):
        for sample in family.samples:
            labels = ",".join(f"{name}={value}" for name, value in sample.labels.items())
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found


def test_the_documented_metrics_are_served() -> None:
    metrics = ControllerMetrics()
    metrics.observe_pass(0.02, "ok")
    metrics.observe_pass(7.0, "conflict")
    metrics.count_request("GET", "ok")
    metrics.observe_replacement(0.4)
    jobs = [{"status": {"phase": "Running", "desired": 3, "active": 2}}, {}]
    metrics.register_gauges(lambda: jobs, lambda: 4, lambda: True)
    assert samples(metrics).items() >= {
        ("elasticctl_reconcile_seconds_bucket{le=0.05}", 1),
        ("elasticctl_reconcile_seconds_bucket{le=+Inf}", 2),
        ("elasticctl_reconcile_seconds_sum", 7.02),
        ("elasticctl_reconcile_errors_total{kind=conflict}", 1),
        ("elasticctl_api_requests_total{outcome=ok,verb=GET}", 1),
        ("elasticctl_replacement_seconds_count", 1),
        ("elasticctl_jobs{phase=Running}", 1),
        ("elasticctl_jobs{phase=Pending}", 1),
        ("elasticctl_jobs{phase=Failed}", 0),
        ("elasticctl_workers{state=active}", 2),
        ("elasticctl_workers{state=desired}", 3),
        ("elasticctl_workqueue_depth", 4),
        ("elasticctl_leader", 1),
    }


def test_all_series_are_documented() -> None:
    metrics = ControllerMetrics()
    metrics.observe_pass(0.02, "conflict")
    metrics.count_request("GET", "ok")
    assert not [name for name in samples(metrics) if "_created" in name or not name.startswith("elasticctl_")]


def test_a_status_that_was_written_by_hand_hides_no_other() -> None:
    odd = [{"status": {"placed": value, "phase": ["Running"]}} for value in ("many", [1], {}, 10**400)]
    assert workers_by_state([*odd, {"status": {"placed": 2}}, {"status": 1}])["placed"] == 2


def test_frequent_scrapes_take_a_fifth_of_the_time_at_most() -> None:
    times = iter([0.0, 1.0, 1.5, 4.9, 5.0, 5.5, 6.0])  # it takes a second, and is kept for four
    metrics, asked = ControllerMetrics(lambda: next(times)), []
    metrics.register_gauges(lambda: asked.append(1) or [], lambda: 0, lambda: True)
    for count in (1, 1, 1, 2, 2):
        assert b"elasticctl_leader 1.0" in metrics.render_at_rest()
        assert len(asked) == count


def test_gauges_are_computed_at_each_scrape() -> None:
    metrics = ControllerMetrics()
    jobs: list[Manifest] = []
    metrics.register_gauges(lambda: jobs, lambda: len(jobs), lambda: bool(jobs))
    assert (samples(metrics)["elasticctl_leader"], samples(metrics)["elasticctl_workqueue_depth"]) == (0, 0)
    jobs.append({})
    assert (samples(metrics)["elasticctl_leader"], samples(metrics)["elasticctl_workqueue_depth"]) == (1, 1)


def test_jobs_of_any_content_are_counted() -> None:
    jobs = [{}, {"status": "text"}, {"status": {"phase": "Failed", "desired": 5}}, {"status": {"phase": "Mystery"}}]
    assert jobs_by_phase(jobs)["Pending"] == 2
    assert set(workers_by_state(jobs).values()) == {0}
    waits = {"status": {"phase": "Running", "desired": 4, "active": 4, "placed": 3, "starting": 1, "training": 2}}
    assert workers_by_state([waits, *jobs]) == {"desired": 4, "active": 4, "placed": 3, "starting": 1, "training": 2}


def test_losses_are_counted_once_each_with_what_they_cost() -> None:
    metrics = ControllerMetrics()
    lost = Interruption(uid="a", at=1.0)
    first = JobStatus(restarts={"Unresponsive": 1}, interruptions=(lost,))
    metrics.observe_status(JobStatus(), first)
    corrected = JobStatus(restarts={"NodeLost": 1}, interruptions=(lost,))
    metrics.observe_status(first, corrected)
    recovered = JobStatus(
        restarts={"NodeLost": 1, "Drained": 2},
        interruptions=(
            replace(lost, recovery_s=4.0, steps_redone=7),
            Interruption(uid="b", at=2.0, recovery_s=0.5),
            Interruption(uid="c", at=2.0),
            Interruption(uid="d", at=3.0, recovered_at=5.0, recovery_s=2.0, steps_redone=3),
            Interruption(uid="e", at=4.0, recovered_at=5.0, recovery_s=1.0, steps_redone=3),
        ),
    )
    metrics.observe_status(corrected, recovered)
    metrics.observe_status(recovered, recovered)
    found = samples(metrics)
    assert found["elasticctl_worker_losses_total{cause=Unresponsive}"] == 1
    assert "elasticctl_worker_losses_total{cause=NodeLost}" not in found
    assert found["elasticctl_worker_losses_total{cause=Drained}"] == 2
    assert found["elasticctl_recovery_seconds_count"] == 4
    assert found["elasticctl_recovery_seconds_sum"] == 7.5
    assert found["elasticctl_steps_redone_total"] == 10  # those of the last two are the same


MONITORING = Path(__file__).parents[3] / "controller" / "monitoring"
RULES = MONITORING / "alerts.yaml"
DASHBOARD: dict[str, Any] = json.loads((MONITORING / "dashboard.json").read_text("utf-8"))
METRIC = re.compile(r"\belasticctl_\w+")


def rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(RULES.read_text("utf-8"))["groups"] for rule in group["rules"]]


def expressions() -> Iterator[str]:
    yield from (rule["expr"] for rule in rules())
    yield from (target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"])


def served() -> dict[str, set[str]]:
    """Every sample on the metrics page with its labels, once each metric has a value."""
    metrics = ControllerMetrics()
    metrics.observe_pass(0.02, "conflict")
    metrics.count_request("GET", "ok")
    metrics.observe_replacement(0.4)
    lost = Interruption(uid="u", at=1.0, recovery_s=2.0, steps_redone=3)
    metrics.observe_status(JobStatus(), JobStatus(restarts={"NodeLost": 1}, interruptions=(lost,)))
    metrics.register_gauges(lambda: [{}], lambda: 0, lambda: True)
    families = text_string_to_metric_families(metrics.render().decode())
    found: dict[str, set[str]] = {}
    for sample in (sample for family in families for sample in family.samples):
        found.setdefault(sample.name, set()).update(sample.labels)
    return found


@pytest.mark.parametrize("expression", list(expressions()))
def test_every_metric_and_label_that_is_asked_for_is_served(expression: str) -> None:
    names = METRIC.findall(expression)
    assert names
    assert set(names) <= served().keys()
    for name, chosen in re.findall(r"(\w+)\{([^}]*)\}", expression):
        assert set(re.findall(r"(\w+)=", chosen)) <= served()[name]


def test_every_metric_is_on_the_dashboard_and_in_the_docs() -> None:
    shown = {re.sub(r"_bucket$", "", name) for text in expressions() for name in METRIC.findall(text)}
    documented = (MONITORING.parents[1] / "docs" / "operations.md").read_text("utf-8")
    for name in {re.sub(r"_(bucket|sum|count)$", "", name) for name in served()}:
        assert name in shown
        assert f"`{name}" in documented


def test_every_alert_is_documented_and_says_what_it_means() -> None:
    documented = (MONITORING.parents[1] / "docs" / "operations.md").read_text("utf-8")
    for rule in rules():
        assert f"`{rule['alert']}`" in documented
        assert rule["annotations"].keys() == {"summary", "description"}
        assert rule["labels"].keys() == {"severity"}


@pytest.mark.needs("promtool")
def test_prometheus_accepts_the_rules_and_they_fire_when_they_should() -> None:
    for words in (["check", "rules", RULES], ["test", "rules", MONITORING / "alerts_test.yaml"]):
        done = subprocess.run(["promtool", *words], capture_output=True, text=True, timeout=240, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.needs("promtool")
def test_prometheus_understands_what_the_dashboard_asks(tmp_path: Path) -> None:
    asked = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
    recorded = [
        {"record": f"panel:{n}", "expr": text.replace("$__rate_interval", "5m")} for n, text in enumerate(asked)
    ]
    path = tmp_path / "rules.yaml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": recorded}]}))
    done = subprocess.run(
        ["promtool", "check", "rules", path], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
