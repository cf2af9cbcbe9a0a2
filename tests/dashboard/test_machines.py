"""Machines in use: the data for the page, and what it shows of workers, their GPUs, and missing GPUs."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest

from elasticctl.api.codec import to_rfc3339
from elasticctl.api.spec import ElasticJob
from elasticctl.dashboard.machines import machines_data, usage_history_data
from elasticctl.dashboard.page_data import MAX_TEXT, job_row
from tests.support.dashboard.cluster import Jobs
from tests.support.dashboard.visitor import MARKUP, Visitor, hosted, see
from tests.support.job_samples import AT, job
from tests.support.usage_samples import BARE, BUSY, HISTORY, IDLE, TIMED, sample

NOW = AT + 60.0
NO_GPUS = {**BUSY, "gpus": {}, "noGpus": "no GPU is visible"}


def shown(*workers: dict[str, Any], gpus: int = 0) -> dict[str, Any]:
    found = machines_data(ElasticJob.from_manifest(sample(*workers, gpus=gpus)), NOW)
    assert found is not None
    return found


def test_the_page_gets_what_top_prints() -> None:
    found = shown(BUSY, IDLE, BARE, gpus=2)
    assert found["summary"].startswith("GPU 4 x 71% (0-97), 61.0 of 80 GiB, 1,812 W; CPU 24.7")
    busy, idle, bare = found["workers"]
    assert (busy["name"], busy["words"][2], busy["note"]) == ("worker-0", "2 x 95%", "")
    assert busy["parts"] == [0.193, 0.238, 0.95, 0.762, *[None] * 7]
    assert (idle["note"], idle["gpus"][1]["words"][2], idle["gpus"][1]["parts"][2]) == (
        "GPU 1 idle for 12m05s",
        "0%",
        0,
    )
    assert bare["note"] == "NVML: Driver Not Loaded; measured 2m00s ago"
    assert bare["parts"] == [None] * 11
    assert found["stepTimes"] == "not known yet"
    assert found["absent"] == ""


def test_missing_gpus_are_reported_as_absent() -> None:
    assert shown(NO_GPUS)["absent"] == "No GPUs: no GPU is visible."
    assert shown(NO_GPUS, gpus=1)["workers"][0]["note"] == "no GPU is visible"
    assert len(shown({**NO_GPUS, "noGpus": "x" * 9999})["absent"]) == MAX_TEXT
    assert machines_data(ElasticJob.from_manifest(job()), NOW) is None


def test_the_list_counts_idle_gpus_without_their_seconds() -> None:
    rows = [job_row(ElasticJob.from_manifest(sample(BUSY, idle)), NOW) for idle in (IDLE, {**IDLE, "at": BUSY["at"]})]
    assert rows[0] == rows[1]
    assert rows[0]["idleGpus"] == 1


def test_columns_of_different_length_are_shown() -> None:
    odd = {**BUSY, "gpus": {"percent": [1, 200, 3], "idleS": [None, 700], "memoryBytes": [], "memoryTotalBytes": [0]}}
    found = shown(odd)["workers"][0]
    assert [gpu["words"][2] for gpu in found["gpus"]] == ["1%", "200%"]
    assert found["gpus"][1]["parts"][2] == 1.0


def test_where_the_time_of_the_steps_goes_is_shown_with_the_workers() -> None:
    found = shown(TIMED, {**TIMED, "worker": "digits-worker-1", "stepTimes": {"data": 0.5, "compute": 0.5}})
    assert found["stepTimes"] == "data 31%, compute with all-reduce and save 69%"
    assert found["workers"][0]["words"][-4:] == ("12%", "70%", "15%", "3%")
    assert found["workers"][0]["parts"][-4:] == [0.12, 0.7, 0.15, 0.03]
    assert found["workers"][0]["gpus"][0]["words"][-4:] == ("",) * 4


def test_the_history_has_columns_of_one_length() -> None:
    manifest = job(usageHistory=HISTORY)
    found = usage_history_data(ElasticJob.from_manifest(manifest).status.usage_history)
    assert {len(column) for column in found["columns"].values()} == {len(found["at"])} == {6}
    assert found["columns"]["data"] == (None, None, 0.5, 0.1, 0.1, 0.12)
    assert usage_history_data(ElasticJob.from_manifest(job()).status.usage_history) == {"at": [], "columns": {}}


@pytest.mark.browser
def test_what_machines_were_used_for_is_drawn_and_a_table_and_outlives_the_job(visitor: Visitor) -> None:
    manifest = sample(TIMED, gpus=2)
    manifest["status"]["usageHistory"] = HISTORY
    cluster = Jobs(manifest)
    with hosted(cluster) as host:
        page = visitor.open(host.link)
        part = page.get_by_role("region", name="Machines in use", exact=True)
        see(part).to_contain_text("Where the time of the steps goes: data 12%, compute 70%, all-reduce 15%, save 3%")
        charts = part.get_by_role("img")
        see(charts).to_have_count(4)
        see(charts.nth(3)).to_have_attribute(
            "aria-label", re.compile("data 12% · compute 70% · all-reduce 15% · save 3% at")
        )
        see(part).to_contain_text("is not kept")
        part.get_by_text("Use over time as a table").click()
        rows = part.get_by_role("region", name="Use over time, as a table").get_by_role("row")
        see(rows).to_have_count(7)
        see(rows.nth(1)).to_contain_text("3.252.5 GiB94%12%70%15%3%")
        see(rows.nth(6)).to_contain_text("\u2013")
        charts.nth(0).focus()
        page.keyboard.press("ArrowLeft")
        see(part.locator("figcaption").nth(0)).to_contain_text("3.25")
        cluster.change("digits", phase="Succeeded", usage=None)
        see(part).to_contain_text("The job has ended: nothing is in use any more.")
        see(charts).to_have_count(4)


@pytest.mark.browser
def test_machines_in_use_are_live_with_each_gpu_on_demand(visitor: Visitor) -> None:
    cluster = Jobs(sample(BUSY, gpus=2))
    with hosted(cluster) as host:
        page = visitor.open(host.link)
        part = page.get_by_role("region", name="Machines in use", exact=True)
        rows = part.get_by_role("row")
        see(rows).to_have_count(2)
        see(rows.nth(1)).to_have_text(
            re.compile("^worker-0measured .* ago12.3 of 6461.0 of 256 GiB2 x 95%61.0 of 80 GiB1,212 W71 C12.0 in")
        )
        cluster.change("digits", usage={"measured": 66, "workers": [BUSY, IDLE]})
        see(rows).to_have_count(3)
        see(rows.nth(2)).to_contain_text("2 x 48% (0-95)")
        see(rows.nth(2)).to_contain_text("GPU 1 idle for 12m05s")
        see(page.locator(".finding")).to_contain_text("GPUs are not being used: GPU 1 of worker-1 idle for 12m05s.")
        see(part).to_contain_text("64 workers that use their machines more are not shown")
        part.get_by_role("button", name="Each GPU").click()
        see(rows).to_have_count(7)
        see(rows.nth(6)).to_have_text(re.compile("GPU 10%60.0 of 80 GiB69 C$"))
        page.reload()
        see(rows).to_have_count(7)
        idle_bar, busy_bar = (
            rows.nth(n).locator("td").nth(4).evaluate("(cell) => cell.style.getPropertyValue('--part')") for n in (6, 5)
        )
        assert (idle_bar, busy_bar) == ("0", "0.95")
        cluster.change("digits", usage=None)
        see(part).to_contain_text("Nothing is measured yet")
        cluster.change("digits", phase="Succeeded")
        see(page.locator(".badge")).to_have_text("Succeeded")
        see(part).to_be_hidden()


@pytest.mark.browser
def test_a_job_on_cpus_has_no_empty_columns_and_says_that_there_are_no_gpus(visitor: Visitor) -> None:
    now = to_rfc3339(time.time())
    with hosted(Jobs(sample({**NO_GPUS, "at": now, "noGpus": MARKUP, "worker": f"digits-{MARKUP}"}))) as host:
        page = visitor.open(host.link)
        part = page.get_by_role("region", name="Machines in use", exact=True)
        see(part).to_contain_text(f"No GPUs: {MARKUP}.")
        see(part.get_by_role("columnheader")).to_have_text(["Worker", "CPU", "Memory", "Network"])
        see(part.get_by_role("button", name="Each GPU")).to_be_hidden()
