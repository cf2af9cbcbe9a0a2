"""`list` and `status` as screens of several widths show them, and as a pipe gets them."""

from __future__ import annotations

import cProfile
import os
import pstats
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import pytest

from elasticctl.api.errors import ForbiddenError
from elasticctl.cli.framework.output import bar, format_tabs
from elasticctl.cli.views.job import status_table
from elasticctl.cli.views.jobs import ListColumns, job_table, waiting_reasons
from elasticctl.cli.views.watch import most_relevant
from elasticctl.operations.target import Target
from elasticctl.settings.contexts import Context
from tests.support.job_samples import AT, FAILED, at, cloud_job, drawn, job

FOLDER = Path(__file__).with_name("snapshots")


def check(name: str, lines: Sequence[str]) -> None:
    """Fail where the lines are not those of the file `name`.txt."""
    path, text = FOLDER / f"{name}.txt", "".join(f"{line}\n" for line in lines)
    if os.environ.get("UPDATE_SNAPSHOTS"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, "utf-8")
    assert text == path.read_text("utf-8"), f"{path.name} differs"


NOW = AT + 60.4
WIDTHS = [40, 80, 120]
SWEEP = "a-sweep-over-learning-rates-seed-1"
REASONS = {f"uid-{SWEEP}": "2 workers are waiting to be placed. worker-0 cannot be placed: 0/3 nodes have a free GPU."}


pytestmark = pytest.mark.usefixtures("utc")


def unbounded() -> dict[str, Any]:
    """A job that waits, and says nothing of the most workers it takes."""
    found = job(SWEEP, phase="Pending", active=0, progress={}, checkpoint={}, restarts={})
    del found["spec"]["maxReplicas"]
    return found


JOBS = [cloud_job(), job(), unbounded(), job("bad", **FAILED)]


@pytest.mark.parametrize("width", WIDTHS)
def test_a_list_fits_the_screen(width: int) -> None:
    lines = drawn(job_table(JOBS, NOW, reasons=REASONS), width)
    assert max(map(len, lines)) <= width
    check(f"list-{width}", lines)


@pytest.mark.parametrize("width", WIDTHS)
def test_a_wide_list_of_all_namespaces_fits_the_screen(width: int) -> None:
    lines = drawn(job_table(JOBS, NOW, ListColumns(wide=True, namespaces=True), REASONS), width)
    assert max(map(len, lines)) <= width
    check(f"list-wide-{width}", lines)


@pytest.mark.parametrize("width", WIDTHS)
def test_a_status_fits_the_screen(width: int) -> None:
    lines = drawn(status_table(cloud_job(), [], NOW, bar_encoding="utf-8"), width)
    assert max(map(len, lines)) <= width
    check(f"status-{width}", lines)


@pytest.mark.parametrize("shape", [ListColumns(), ListColumns(wide=True, namespaces=True)])
def test_a_pipe_gets_every_column_of_every_job(shape: ListColumns) -> None:
    lines = format_tabs(job_table(JOBS, NOW, shape, REASONS)).split("\n")
    assert {line.count("\t") for line in lines} == {len(shape.header) - 1}
    check("list-wide-pipe" if shape.wide else "list-pipe", lines)


def test_jobs_are_listed_without_the_right_to_list_pods() -> None:
    class NoPods:
        def pods_of(self, jobs: object) -> NoReturn:
            raise ForbiddenError("pods is forbidden")

    target = Target(Context("prod", "aws"), "default", NoPods())  # type: ignore[arg-type]
    assert waiting_reasons(target, [unbounded()], NOW) == {}


def test_empty_columns_are_left_out_on_a_screen() -> None:
    header, _ = drawn(job_table([job()], NOW), 200)
    assert header.split() == ["NAME", "PHASE", "WORKERS", "STEP", "EPOCH", "RATE", "CHECKPOINT", "RESTARTS", "AGE"]


def test_a_cancelled_job_shows_no_reason() -> None:
    gone = job(phase="Cancelled", reason="Cancelled", message="cancelled on request")
    assert [row[-1] for row in job_table([gone, job(**FAILED)], NOW).rows] == [
        "",
        "BackoffLimitExceeded: 4 failures, 3 allowed",
    ]


def test_a_long_life_is_summarized() -> None:
    lost = [{"at": at(second), "worker": f"digits-worker-{second}", "cause": "Preempted"} for second in range(8)]
    rows = status_table(job(interruptions=lost), [], NOW).rows
    lines = [text for name, text in rows if name == "Interruption"]
    assert lines[0] == "5 before: elasticctl history digits"
    assert [text.split()[2] for text in lines[1:]] == ["digits-worker-5", "digits-worker-6", "digits-worker-7"]


def test_a_bar_is_drawn_for_people_only() -> None:
    assert "21%" not in format_tabs(status_table(cloud_job(), [], NOW))
    assert bar(0.25, 8, "utf-8") == "██░░░░░░"
    assert bar(1.0, 4, "latin-1") == "####"
    assert bar(0.99, 4, None) == "###."


def test_a_full_screen_shows_what_goes_on_and_what_ended_last() -> None:
    jobs = [job(f"job-{number}", phase="Running" if number % 5 == 0 else "Succeeded") for number in range(20)]
    names = [each["metadata"]["name"] for each in most_relevant(jobs, 6)]
    assert names == ["job-0", "job-5", "job-10", "job-15", "job-18", "job-19"]
    assert most_relevant(jobs, 20) == jobs
    assert len(most_relevant(jobs, -3)) == 1


def test_many_jobs_are_fast() -> None:
    """2,000 function calls for each job are half a second for a thousand, of the aim of 1 s."""
    jobs = [cloud_job(f"job-{number}") for number in range(100)]
    counted = cProfile.Profile()
    with counted:
        format_tabs(job_table(jobs, NOW, ListColumns(wide=True)))
    assert pstats.Stats(counted).total_calls < 2000 * len(jobs)
