"""The metrics page: the documented names, and numbers that are true."""

from __future__ import annotations

from dataclasses import replace

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


def test_there_is_no_series_beside_the_documented_ones() -> None:
    metrics = ControllerMetrics()
    metrics.observe_pass(0.02, "conflict")
    metrics.count_request("GET", "ok")
    assert not [name for name in samples(metrics) if "_created" in name or not name.startswith("elasticctl_")]


def test_a_status_that_somebody_has_written_by_hand_hides_no_other() -> None:
    odd = [{"status": {"placed": value, "phase": ["Running"]}} for value in ("many", [1], {}, 10**400)]
    assert workers_by_state([*odd, {"status": {"placed": 2}}, {"status": 1}])["placed"] == 2


def test_who_asks_all_the_time_takes_a_fifth_of_it_at_most() -> None:
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
