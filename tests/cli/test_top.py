"""`top` and the line of `status`: machines in use, GPUs that do nothing, and those that are not there."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from elasticctl.api.errors import NotFoundError
from elasticctl.api.observed.usage import step_times_text, times_text
from elasticctl.api.spec import ElasticJob
from elasticctl.cli.framework.output import format_tabs
from elasticctl.cli.verbs.see_what_jobs_do.top import usage_of_jobs, worker_table
from elasticctl.cli.views.job import status_table
from elasticctl.diagnosis import Case, diagnose
from elasticctl.operations import target
from tests.support.cli import Run
from tests.support.job_samples import AT, drawn, job
from tests.support.usage_samples import BARE, BUSY, IDLE, TIMED, sample

NOW = AT + 60.0


def shown(*workers: dict[str, Any], gpus: int = 2, **options: bool) -> list[list[str]]:
    table = worker_table(ElasticJob.from_manifest(sample(*workers, gpus=gpus)), NOW, **options)
    return [line.split("\t") for line in format_tabs(table).split("\n")]


def test_a_row_for_each_worker() -> None:
    header, busy, idle, bare = shown(BUSY, IDLE, BARE)
    assert header == [
        "WORKER", "CPU", "MEMORY", "GPU", "GPU MEMORY", "POWER", "TEMP", "NETWORK", "DATA", "COMPUTE",
        "ALL-REDUCE", "SAVE", "NOTE",
    ]  # fmt: skip
    assert busy == [
        "worker-0", "12.3 of 64", "61.0 of 256 GiB", "2 x 95%", "61.0 of 80 GiB", "1,212 W", "71 C",
        "12.0 in, 3.4 out MB/s", "-", "-", "-", "-", "-",
    ]  # fmt: skip
    assert (idle[3], idle[5], idle[-1]) == ("2 x 48% (0-95)", "600 W", "GPU 1 idle for 12m05s")
    assert bare == ["worker-2", *["-"] * 11, "NVML: Driver Not Loaded; measured 2m00s ago"]
    assert shown(BARE, gpus=0)[1][-1] == "measured 2m00s ago"


def test_wide_is_a_row_for_each_gpu() -> None:
    rows = shown(IDLE, each_gpu=True)
    assert [row[0] for row in rows[1:]] == ["worker-1", "gpu 0", "gpu 1"]
    assert rows[3][1:] == ["-", "-", "0%", "60.0 of 80 GiB", "-", "69 C", *["-"] * 6]


def test_jobs_are_summed_up_and_status_says_the_same() -> None:
    manifest = sample(BUSY, IDLE, gpus=2)
    jobs = [ElasticJob.from_manifest(manifest)]
    cells = format_tabs(usage_of_jobs(jobs)).split("\n")[1].split("\t")
    assert cells[:5] == ["digits", "2", "24.7", "122.0 GiB", "4 x 71% (0-97)"]
    facts = format_tabs(status_table(manifest, [], NOW)).split("\n")
    assert "In use\tGPU 4 x 71% (0-97), 61.0 of 80 GiB, 1,812 W; CPU 24.7; memory 122.0 GiB" in facts
    assert "Idle\tGPU 1 of worker-1 idle for 12m05s" in facts
    assert not any(line.startswith("Idle") for line in format_tabs(status_table(sample(BUSY), [], NOW)).split("\n"))


def test_where_the_time_of_the_steps_goes() -> None:
    slower = {**TIMED, "stepTimes": {"data": 0.52, "compute": 0.3, "allReduce": 0.09, "save": 0.09}}
    assert shown(TIMED, slower)[1][8:12] == ["12%", "70%", "15%", "3%"]
    manifest = sample(TIMED, slower, BUSY)
    assert format_tabs(usage_of_jobs([ElasticJob.from_manifest(manifest)])).split("\n")[1].split("\t")[9] == "32%"
    facts = format_tabs(status_table(manifest, [], NOW)).split("\n")
    assert "Step time\tdata 32%, compute 50%, all-reduce 12%, save 6%" in facts
    partly = {**TIMED, "stepTimes": {"compute": 0.95, "save": 0.05}}
    text = times_text(ElasticJob.from_manifest(sample(partly)).status.usage.workers[0].step_times)  # type: ignore[union-attr]
    assert text == "compute with data and all-reduce 95%, save 5%"


def test_without_reports_of_a_script_the_times_are_unknown() -> None:
    busy = ElasticJob.from_manifest(sample(BUSY))
    assert worker_table(busy, NOW).notes == (f"Where the time of the steps goes is {step_times_text(busy.status)}.",)
    assert worker_table(ElasticJob.from_manifest(sample(TIMED)), NOW).notes == ()


@pytest.mark.parametrize(
    ("times", "percent", "rule", "words"),
    [
        ({"data": 0.4, "compute": 0.6}, None, "data-bound", "for data 40% of the time:"),
        ({"data": 0.4, "compute": 0.6}, 99, None, ""),
        ({"data": 0.1, "compute": 0.3, "allReduce": 0.6}, 50, "communication-bound", "other ranks 60% of"),
        ({"data": 0.1, "compute": 0.7, "save": 0.2}, None, "save-bound", "Saves stop training 20% of"),
        ({"data": 0.1, "compute": 0.9}, None, None, ""),
    ],
)
def test_explain_names_what_training_waits_for(
    times: dict[str, float], percent: float | None, rule: str | None, words: str
) -> None:
    gpus = {} if percent is None else {"percent": [percent], "idleS": [0]}
    manifest = sample({**BUSY, "stepTimes": times, "gpus": gpus})
    manifest["status"]["progress"] = {"step": 7}
    found = {each.rule: each.text for each in diagnose(Case(ElasticJob.from_manifest(manifest), (), NOW))}
    bound = {name: text for name, text in found.items() if name.endswith("-bound")}
    assert list(bound) == ([] if rule is None else [rule])
    assert words in "".join(bound.values())


def test_idle_gpus_are_a_finding_and_many_are_counted() -> None:
    every = {**BUSY["gpus"], "idleS": [601, 900]}
    workers = [{**BUSY, "worker": f"digits-worker-{n}", "gpus": every} for n in range(5)]
    found = {each.rule: each for each in diagnose(Case(ElasticJob.from_manifest(sample(*workers)), (), NOW))}
    assert found["idle-gpus"].text == (
        "GPUs are not being used: all 2 GPUs of worker-0 idle for 10m01s; all 2 GPUs of worker-1 idle for 10m01s; "
        "all 2 GPUs of worker-2 idle for 10m01s; and GPUs of 2 more workers."
    )
    assert found["idle-gpus"].mends[0].command == "elasticctl stacks digits"


@pytest.mark.parametrize("width", [40, 80, 120])
def test_the_output_fits_the_terminal(width: int) -> None:
    lines = drawn(worker_table(ElasticJob.from_manifest(sample(BUSY, IDLE, gpus=2)), NOW), width)
    assert all(len(line.rstrip()) <= width for line in lines)
    assert "12.3 of 64" in "\n".join(lines)


def test_columns_of_different_length_are_shown() -> None:
    """A launcher runs next to the user's code: what it sends is shown as far as it makes sense."""
    odd = {**BUSY, "gpus": {"percent": [1, 2, 3], "idleS": [None, 700], "memoryBytes": []}}
    assert shown(odd, each_gpu=True)[2][3] == "1%"
    assert usage_of_jobs([ElasticJob.from_manifest(sample(odd, BUSY))]).rows[0][4].startswith("4 x")


def test_the_view_before_the_first_measurement(run: Run, private_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs: list[dict[str, Any]] = []

    def get_job(namespace: str, name: str) -> dict[str, Any]:
        for found in jobs:
            if found["metadata"]["name"] == name:
                return found
        raise NotFoundError(name)

    cluster = SimpleNamespace(list_jobs=lambda namespace: jobs, get_job=get_job)
    monkeypatch.setattr(target, "connect", lambda context: cluster)
    assert run("top").err == "no job is running. Next: elasticctl list\n"
    jobs.append(job())
    assert json.loads(run("top", "-o", "json").out)["jobs"][0]["measured"] == 0
    assert json.loads(run("top", "digits", "-o", "json").out)["jobs"][0]["name"] == "digits"
    assert run("top", "digits").err.startswith("no measurements yet")
    assert run("top").out.splitlines()[1].split("\t")[-1] == "nothing measured yet"
    assert run("top", "nothere").code == 3
