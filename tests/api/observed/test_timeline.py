"""What happened to a job, in order of time."""

from __future__ import annotations

from typing import Any

from elasticctl.api.observed.timeline import TimelineEntry, fold_repeated, timeline
from elasticctl.api.spec import ElasticJob
from tests.support.job_samples import AT, FAILED, at, job

GROUP = {
    "generation": 2,
    "workers": ["digits-worker-0"],
    "reason": "lost digits-worker-1",
    "formedAt": at(21),
    "firstStepAt": at(22.5),
    "resumedStep": 88,
}
CONDITIONS = [
    {"type": "Created", "status": "True", "lastTransitionTime": at(0)},
    {"type": "Running", "status": "True", "lastTransitionTime": at(2)},
    {"type": "Suspended", "status": "False", "lastTransitionTime": at(10)},
    {"type": "Restarting", "status": "False", "lastTransitionTime": at(11)},
]


def event(kind: str, reason: str, seconds: float) -> dict[str, Any]:
    about = {"kind": kind, "name": "digits-worker-0"}
    return {"involvedObject": about, "reason": reason, "message": "two\n lines", "firstTimestamp": at(seconds)}


def test_everything_is_reported_once_and_in_order() -> None:
    manifest = job(generations=[GROUP], conditions=CONDITIONS)
    entries = timeline(ElasticJob.from_manifest(manifest), [event("Pod", "Started", 1), event("ElasticJob", "x", 3)])
    assert [(entry.at - AT, entry.what, entry.about, entry.details) for entry in entries] == [
        (0, "created", "digits", "4 workers wanted (1-4)"),
        (1, "Started", "digits-worker-0", "two lines"),
        (2, "running", "digits", ""),
        (10, "resumed", "digits", ""),
        (20, "interruption", "digits-worker-1", "Preempted"),
        (21, "group formed", "generation 2", "1 worker: lost digits-worker-1"),
        (22.5, "first step", "generation 2", "from step 88"),
        (22.5, "recovered", "digits-worker-1", "after 2.5s, 12 steps done again"),
        (30, "scaling", "digits", "3 -> 4 workers, by user"),
        (57, "checkpoint", "step 100", "number 6"),
    ]


def test_an_entry_does_not_change_when_more_becomes_known() -> None:
    """So that no one must read it twice."""
    open_end = {**job()["status"]["interruptions"][0], "recoveredAt": None, "recoveryS": None, "stepsRedone": None}
    before = timeline(ElasticJob.from_manifest(job(interruptions=[open_end])))
    after = timeline(ElasticJob.from_manifest(job()))
    assert set(before) < set(after)
    assert [entry.what for entry in set(after) - set(before)] == ["recovered"]


def test_how_it_ended_is_reported() -> None:
    conditions = [{"type": "Failed", "status": "True", "lastTransitionTime": at(100), "message": "exit code 1"}]
    entries = timeline(ElasticJob.from_manifest(job(**FAILED, conditions=conditions)))
    assert entries[-1] == TimelineEntry(AT + 100, "failed", "digits", "exit code 1")


def test_a_scaling_shows_who_asked_and_why() -> None:
    scaling = {"at": at(30), "fromWorkers": 4, "toWorkers": 2, "by": "sharing", "message": "gives 2 workers to b/guest"}
    entries = timeline(ElasticJob.from_manifest(job("digits", scalings=[scaling])))
    assert "4 -> 2 workers, by sharing: gives 2 workers to b/guest" in [entry.details for entry in entries]


def unplaced(index: int, seconds: float, **more: Any) -> dict[str, Any]:
    about = {"kind": "Pod", "name": f"digits-worker-{index}"}
    said = {"type": "Warning", "reason": "FailedScheduling", "message": "0/3 nodes are available"}
    return {"involvedObject": about, **said, "firstTimestamp": at(seconds), "lastTimestamp": at(seconds), **more}


def folded(events: list[dict[str, Any]], *, counted: bool = True) -> list[tuple[float, str, str]]:
    entries = fold_repeated(timeline(ElasticJob.from_manifest(job()), events), events, counted=counted)
    assert [entry.at for entry in entries] == sorted(entry.at for entry in entries)
    return [(entry.at - AT, entry.about, entry.details) for entry in entries if entry.what == "FailedScheduling"]


def test_equal_warnings_are_one_line_that_says_how_often() -> None:
    thirteen = [unplaced(2, second) for second in range(13)]
    (line,) = folded(thirteen)
    assert line == (0, "digits-worker-2", "0/3 nodes are available (13 times in 12s)")
    (line,) = folded([unplaced(1, 0), unplaced(2, 5, count=7, lastTimestamp=at(65))])
    assert line == (0, "2 workers", "0/3 nodes are available (8 times in 1m05s)")
    assert folded([unplaced(2, 3)]) == [(3, "digits-worker-2", "0/3 nodes are available")]
    other = {**unplaced(2, 4), "message": "0/4 nodes are available"}
    assert len(folded([*thirteen, other])) == 2


def test_watching_reports_a_warning_once() -> None:
    first = folded([unplaced(2, 0)], counted=False)
    assert folded([unplaced(2, second) for second in range(13)], counted=False) == first


def test_the_end_and_the_start_of_each_worker_are_lines_of_their_own() -> None:
    events = [{**unplaced(2, second), "type": "Normal", "reason": "Started"} for second in (3, 9)]
    entries = fold_repeated(timeline(ElasticJob.from_manifest(job()), events), events)
    assert [entry.at - AT for entry in entries if entry.what == "Started"] == [3, 9]


def test_a_refused_worker_has_the_line_of_its_condition() -> None:
    refused = {"type": "WorkersWaiting", "status": "True", "reason": "FailedCreate", "message": "exceeded quota"}
    condition = {**refused, "lastTransitionTime": at(5)}
    entries = timeline(ElasticJob.from_manifest(job(conditions=[condition])))
    assert TimelineEntry(AT + 5, "FailedCreate", "digits", "exceeded quota") in entries
    for other in ({**condition, "reason": "Unschedulable"}, {**condition, "status": "False"}):
        assert not any(
            "quota" in entry.details for entry in timeline(ElasticJob.from_manifest(job(conditions=[other])))
        )
