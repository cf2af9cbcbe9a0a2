"""Reports of ranks, which run the user's code: with any content, the job's status can be stored and read back."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elasticctl.api.codec import from_json, to_json
from elasticctl.api.status import Activity, GroupGeneration, JobStatus
from elasticctl.api.usage import JobUsage
from elasticctl_controller.core.group.group_record import ScriptReports
from elasticctl_controller.core.group.members import Members
from elasticctl_controller.core.group.membership import Group
from elasticctl_controller.core.history import MAX_METRICS, TrainingHistory, fold_reports
from elasticctl_controller.core.observation import GroupView
from elasticctl_controller.rendezvous.reports import note_report
from elasticctl_controller.rendezvous.requests import MAX_STEP
from elasticctl_protocol.reports import describe_hang
from tests.support.anything import HUGE, JSON

NOW = 1_700_000_000.0


def status_after(*messages: Any) -> JobStatus:
    """The status after these reports of generation 1."""
    group = Group("j", history=TrainingHistory([GroupGeneration(1, ("digits-worker-0",))]))
    for message in messages:
        note_report(group, message, NOW)
    known = group.history
    seen = GroupView(progress=known.progress, checkpoint=known.checkpoint, generations=tuple(known.generations))
    return fold_reports(JobStatus(), seen)


def check_storable(status: JobStatus) -> None:
    """Fails unless an API server can hold the status: no NaN, no number beyond 64 bits, no half of a character."""
    text = json.dumps(to_json(status), allow_nan=False, ensure_ascii=False)
    text.encode("utf-8")
    assert from_json(JobStatus, json.loads(text)) == status


def progress(**fields: Any) -> dict[str, Any]:
    return {"kind": "progress", "generation": 1, "step": 3, **fields}


def test_a_report_is_taken_over() -> None:
    status = status_after(
        progress(total_steps=560, epoch=2, total_epochs=8, samples_per_s=8123, metrics={"loss": 0.5, "n": 7}),
        {
            "kind": "committed",
            "generation": 1,
            "step": 2,
            "committed": 1,
            "size_bytes": 81234,
            "duration_s": 0.5,
            "url": "file:///x",
        },
    )
    found = status.progress
    assert (found.step, found.total_steps, found.epoch, found.total_epochs) == (3, 560, 2, 8)
    assert (found.samples_per_s, found.metrics) == (8123.0, {"loss": 0.5, "n": 7.0})
    commit = status.checkpoint
    assert (commit.step, commit.size_bytes, commit.duration_s, commit.url) == (2, 81234, 0.5, "file:///x")
    check_storable(status)


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), HUGE, -HUGE, -1, True, "7", [7], {}])
def test_numbers_that_no_object_can_hold_are_left_out(odd: Any) -> None:
    status = status_after(
        progress(total_steps=odd, epoch=odd, total_epochs=odd, samples_per_s=0.5, metrics={"good": 1.0}),
        {"kind": "committed", "generation": 1, "step": 2, "committed": 1, "size_bytes": odd, "duration_s": 0.5},
    )
    assert (status.progress.total_steps, status.progress.epoch, status.progress.total_epochs) == (None, None, None)
    assert status.progress.metrics == {"good": 1.0}
    assert status.checkpoint.size_bytes == 0
    check_storable(status)


def test_the_largest_float_as_a_metric_can_be_stored() -> None:
    status = status_after(progress(metrics={"best": sys.float_info.max, "worst": -sys.float_info.max}))
    assert status.curve.metrics["best"] == (sys.float_info.max,)
    check_storable(status)


def test_metrics_that_are_no_numbers_are_kept_until_they_are_again() -> None:
    lost = {"value": "NaN", "since_step": 2}
    reports = [progress(step=1, metrics={"loss": 0.5, "n": 1}), progress(metrics={"loss": lost})]
    status = status_after(
        *reports, progress(step=9), progress(step=10, metrics={"loss": {"value": "inf", "since_step": 3}})
    )
    assert status.progress.metrics == {"n": 1.0}
    found = status.progress.not_finite["loss"]
    assert (found.value, found.step) == ("inf", 2)
    assert status.curve.metrics == {"n": (1.0,), "loss": (None,)}
    check_storable(status)
    assert status_after(*reports, progress(step=9, metrics={"loss": 0.25})).progress == replace(
        status_after(progress(step=9)).progress, metrics={"n": 1.0, "loss": 0.25}
    )


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (float("nan"), ("NaN", 3)),
        (float("-inf"), ("-inf", 3)),
        ({"value": "NaN", "since_step": HUGE}, ("NaN", 3)),
        ({"value": "NaN", "since_step": 4}, ("NaN", 3)),
        ({"value": "nan"}, None),
        ({"value": ["NaN"]}, None),
        ({}, None),
    ],
)
def test_a_metric_that_is_not_finite_is_reported(value: Any, found: tuple[str, int] | None) -> None:
    status = status_after(progress(metrics={"loss": value}))
    lost = status.progress.not_finite.get("loss")
    assert (None if lost is None else (lost.value, lost.step)) == found
    check_storable(status)


@pytest.mark.parametrize("step", [HUGE, MAX_STEP, -1, True, 1.5, "3", None])
def test_an_invalid_step_is_skipped(step: Any) -> None:
    assert status_after(progress(step=step)).progress.step is None


def test_a_script_that_names_its_metrics_by_the_step_fills_nothing() -> None:
    messages = [progress(step=step, metrics={f"loss_{step}": 1.0, "loss": 2.0}) for step in range(1000)]
    metrics = status_after(*messages).progress.metrics
    assert len(metrics) == MAX_METRICS
    assert {"loss", "loss_999"} <= metrics.keys()


NUMBERS = ("total_steps", "epoch", "total_epochs", "samples_per_s", "size_bytes", "duration_s")
MESSAGES = st.fixed_dictionaries(
    {
        "kind": st.sampled_from(["progress", "resumed", "committed"]),
        "generation": st.just(1),
        "step": st.just(3) | JSON,
        "committed": st.just(1) | JSON,
    },
    optional={
        "metrics": st.dictionaries(st.text(max_size=5) | st.just("\ud800"), JSON, max_size=4) | JSON,
        **dict.fromkeys((*NUMBERS, "url"), JSON),
    },
)


@given(st.lists(MESSAGES, max_size=4))
@settings(max_examples=80)
def test_the_status_can_be_stored_with_any_report_of_a_script(messages: list[Any]) -> None:
    check_storable(status_after(*messages))


def test_where_ranks_stand_is_known_until_they_move() -> None:
    group = Group("j", generation=2, reports=ScriptReports(obstacle="the storage"))
    ranks = [{"rank": 0, "where": "all_reduce", "for_s": 61.0, "waits": True}, {"rank": 1, "where": "load (data.py:9)"}]
    assert note_report(group, {"kind": "hang", "generation": 2, "step": 7, "ranks": ranks}, NOW)
    assert describe_hang(group.reports.places) == "rank 1 stands in load (data.py:9); rank 0 waits for it in all_reduce"
    assert group.reports.obstacle == "the storage", "only a rank says that this is over"
    assert not note_report(group, {"kind": "hang", "generation": 1, "step": 7, "ranks": ranks}, NOW)
    moved = [{"rank": 0, "where": ""}, {"rank": 1, "where": ""}]
    note_report(group, {"kind": "hang", "generation": 2, "step": 7, "ranks": moved}, NOW)
    assert group.reports.places == {}


@given(JSON)
def test_any_places_can_be_stored(ranks: Any) -> None:
    group = Group("j", generation=2)
    note_report(group, {"kind": "hang", "generation": 2, "step": 7, "ranks": [ranks, {"rank": 1, "where": ranks}]}, NOW)
    check_storable(JobStatus(activity=Activity("hung", None, describe_hang(group.reports.places))))


def test_what_protects_the_state_and_where_it_came_from_are_in_the_history() -> None:
    resumed = {"kind": "resumed", "generation": 1, "step": 8}
    copied = {"kind": "copied", "generation": 1, "step": 9, "every_steps": 7}
    known = status_after(
        resumed | {"source": "storage", "source_because": "no whole copy"}, copied | {"lack": "no room"}
    )
    group = known.generations[-1]
    assert (group.resumed_from, group.resumed_because) == ("storage", "no whole copy")
    assert (group.copied_every_steps, group.copies_lack) == (7, "no room")
    again = status_after(
        resumed | {"source": "copies"}, copied, copied | {"generation": 2, "every_steps": 1}
    ).generations[-1]
    assert (again.resumed_from, again.copied_every_steps, again.copies_lack) == ("copies", 7, "")


@given(JSON)
def test_newcomers_get_the_examples_of_the_others_if_these_are_a_list(examples: Any) -> None:
    group = Group("j", generation=2, reports=ScriptReports(examples="[1]"))
    note_report(group, {"kind": "inputs", "generation": 2, "step": 7, "examples": examples}, NOW)
    assert group.reports.examples == ""
    text = json.dumps([examples, "\0\ud800"])
    note_report(group, {"kind": "inputs", "generation": 2, "step": 7, "examples": text}, NOW)
    assert group.reports.examples == (text if len(text) <= 8000 else "")
    assert group.reports.examples.isascii()
    assert group.reports.examples.isprintable()


@pytest.mark.parametrize("examples", ["[" * 7000, "[NaN", "{}", "1", "[" + " " * 8000 + "]"])
def test_examples_that_are_not_a_short_list_are_not_passed_to_newcomers(examples: str) -> None:
    group = Group("j", generation=2, reports=ScriptReports(examples="[1]"))
    note_report(group, {"kind": "inputs", "generation": 2, "step": 7, "examples": examples}, NOW)
    assert group.reports.examples == ""


def usage_of(message: Any) -> JobUsage | None:
    group = Group("j", members=Members({"u0": "digits-worker-0"}))
    note_report(group, {"kind": "usage", "uid": "u0", **message}, NOW)
    return group.usage.of_group(group.members.alive)


def test_what_a_worker_uses_is_taken_over() -> None:
    gpus = {"percent": [97, None], "memory_bytes": [1, 2], "memory_total_bytes": [3, 3], "idle_s": [0, 9.5]}
    usage = usage_of({"cpus_used": 3, "memory_bytes": 5, "worker": "another", "no_gpus": "", "gpus": gpus})
    assert usage is not None
    (worker,) = usage.workers
    assert (worker.worker, worker.at, worker.cpus_used, worker.memory_bytes) == ("digits-worker-0", NOW, 3.0, 5)
    assert (worker.gpus.percent, worker.gpus.idle_s) == ((97.0, None), (0.0, 9.5))
    check_storable(JobStatus(usage=usage))


def test_a_worker_that_is_not_alive_uses_nothing() -> None:
    assert usage_of({"uid": "another"}) is None


@given(st.dictionaries(st.sampled_from(["cpus_used", "memory_bytes", "no_gpus", "gpus", "at", "uid"]), JSON))
@settings(max_examples=40)
def test_any_reported_usage_can_be_stored(message: Any) -> None:
    usage = usage_of(message)
    check_storable(JobStatus(usage=usage))


def test_a_machine_has_so_many_gpus_and_no_more() -> None:
    usage = usage_of({"gpus": {"percent": [1.0] * 1000, "idle_s": "none"}, "no_gpus": "x" * 10_000})
    assert usage is not None
    assert len(usage.workers[0].gpus.percent) == 32
    assert len(usage.workers[0].no_gpus) <= 512
