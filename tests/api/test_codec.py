"""Dataclasses <-> JSON: whole one way, lenient the other."""

from __future__ import annotations

import json
import math
import uuid
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elasticctl.api.codec import (
    Timestamp,
    from_json,
    from_rfc3339,
    pack_names,
    to_json,
    to_rfc3339,
    unpack_names,
)
from elasticctl.api.status import (
    CheckpointStatus,
    Curve,
    GroupGeneration,
    Interruption,
    JobStatus,
    Phase,
    ProgressStatus,
    RankFailure,
    RestartBackoff,
    Scaling,
    WorkerStatus,
)
from elasticctl.cli.views.history import clock
from elasticctl_protocol.codec import camel
from tests.support.anything import HUGE, TIMES, shaped

MOMENTS = st.integers(0, 4_000_000_000_000_000).map(lambda us: Timestamp(us / 1e6))


@given(MOMENTS)
def test_times_keep_their_microseconds(at: Timestamp) -> None:
    parsed = from_rfc3339(to_rfc3339(at))
    assert parsed is not None
    assert math.isclose(parsed, at, abs_tol=1e-6)


@pytest.mark.parametrize("text", ["", "yesterday", 5, None, "2024-13-01T00:00:00Z", "99999-01-01"])
def test_an_invalid_time_is_none(text: object) -> None:
    assert from_rfc3339(text) is None


def test_columns_of_numbers_keep_what_is_one() -> None:
    curve = from_json(
        Curve, {"atS": [1, 2.5, True, "3", None, 2**53], "step": [1, 2.0, False, 3], "metrics": {"a": [1]}}
    )
    assert curve == Curve(at_s=(1.0, 2.5), step=(1, 3), metrics={"a": (1.0,)})
    assert type(curve.at_s[0]) is float


def test_a_status_survives_the_trip() -> None:
    status = JobStatus(
        phase=Phase.RESTARTING,
        active=2,
        start_time=Timestamp(1.5),
        workers=(WorkerStatus(name="a-worker-0", uid="u", index=0),),
        restarts={"Preempted": 2},
        backoff=RestartBackoff(1, Timestamp(2.0)),
        interruptions=(Interruption(at=Timestamp(3.0), worker="a-worker-0", recovery_s=0.5, steps_redone=0),),
        scalings=(Scaling(at=Timestamp(4.0), from_workers=1, to_workers=2, by="user"),),
        progress=ProgressStatus(step=7, metrics={"loss": 0.5}),
        checkpoint=CheckpointStatus(step=5, committed=1),
        first_failure=RankFailure(rank=0, exit_code=1, last_lines=("oh",)),
    )
    assert from_json(JobStatus, json.loads(json.dumps(to_json(status)))) == status


@pytest.mark.parametrize("text", TIMES)
def test_the_first_and_the_last_year_are_none(text: str) -> None:
    assert from_rfc3339(text) is None


@pytest.mark.parametrize("text", ["0002-01-02T00:00:00.000000Z", "9998-12-30T00:00:00.000000Z"])
def test_all_other_times_can_be_written_again_and_shown(text: str) -> None:
    at = from_rfc3339(text)
    assert at is not None
    assert to_rfc3339(at) == text
    assert clock(at)


@pytest.mark.parametrize("seconds", [-1e18, 1e18, float("inf"), float("-inf")])
def test_a_time_beyond_all_dates_is_the_nearest(seconds: float) -> None:
    assert to_rfc3339(seconds)[:4] == ("9999" if seconds > 0 else "0001")


@pytest.mark.parametrize("value", [HUGE, -HUGE, 2**63, float("inf"), float("nan")])
def test_numbers_that_no_api_server_holds_are_missing(value: float) -> None:
    status = from_json(JobStatus, {"failures": value, "progress": {"step": value, "samplesPerS": value}})
    assert status == JobStatus()
    assert from_json(Curve, {"atS": [value, 1.0], "step": [value, 2]}) == Curve(at_s=(1.0,), step=(2,))


@given(shaped(JobStatus))
@settings(max_examples=50)
def test_a_status_of_any_content_is_read_as_it_is_written(data: dict[str, Any]) -> None:
    status = from_json(JobStatus, data)
    again = from_json(JobStatus, json.loads(json.dumps(to_json(status), allow_nan=False)))
    assert to_json(again) == to_json(status)


def test_empty_values_are_omitted() -> None:
    encoded = to_json(JobStatus())
    assert encoded["phase"] == "Pending"
    assert None not in encoded.values()
    assert "conditions" not in encoded


def test_names_are_camel_case() -> None:
    assert camel("steps_redone") == "stepsRedone"
    assert camel("step") == "step"


@given(
    st.lists(st.one_of(st.integers(0, 300).map("job-worker-{}".format), st.text(max_size=8)), max_size=200).filter(
        lambda names: not any(".." in name for name in names)
    )
)
def test_many_names_are_read_as_they_were_written(names: list[str]) -> None:
    assert unpack_names(pack_names(names)) == tuple(names)


def test_many_names_are_written_as_runs() -> None:
    names = [f"job-worker-{i}" for i in (*range(3, 900), *range(1000, 1002), 7)]
    assert pack_names(names) == ["job-worker-3..899", "job-worker-1000..1001", "job-worker-7"]
    assert pack_names(names[:5]) == names[:5], "of few workers everybody reads the names"


@pytest.mark.parametrize("items", ["a..b", 7, {"a": 1}])
def test_an_invalid_list_of_names_is_none(items: object) -> None:
    assert unpack_names(items) is None


def test_a_run_of_any_length_does_not_fill_the_memory() -> None:
    assert unpack_names(["a0..999999999", 5, None]) == ("a0..999999999",)


def test_a_job_of_a_thousand_workers_has_a_status_below_200_kb() -> None:
    workers = tuple(
        WorkerStatus(
            f"resnet50-imagenet-worker-{i}", str(uuid.UUID(int=i << 64 | i)), i, "Running",
            f"ip-10-0-{i // 256}-{i % 256}.eu-west-1.compute.internal", Timestamp(1.7e9 + i),
        )
        for i in range(1000)
    )  # fmt: skip
    odd = WorkerStatus("resnet50-imagenet-worker-1000", "u", 1000, "Pending", removal="ScaledIn")
    names = tuple(worker.name for worker in workers)
    generations = tuple(GroupGeneration(n, names, "lost resnet50-imagenet-worker-7") for n in range(20))
    curve = Curve(at_s=(1e6 / 3,) * 120, step=(10**6,) * 120, metrics={f"m{i}": (1 / 3,) * 120 for i in range(6)})
    status = JobStatus(workers=(*workers, odd), generations=generations, curve=curve)
    text = json.dumps(to_json(status), separators=(",", ":"))
    assert len(text) < 200_000
    assert from_json(JobStatus, json.loads(text)) == status
