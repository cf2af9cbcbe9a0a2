"""`simulate --finish-by`: times as people say them, the table, the data, and refusals."""

from __future__ import annotations

import json
from datetime import datetime, timedelta
from pathlib import Path

import jsonschema
import pytest

from elasticctl.api.errors import UsageError
from elasticctl.operations.submit.job_flags import seconds_until
from tests.support.cli import Run

SCHEMA = Path(__file__).parents[2] / "docs/schemas/Simulation.json"
NOW = datetime(2026, 11, 24, 12, 0).astimezone()  # a Tuesday
SHORT = ("--gpus", "1,2", "--work", "2h", "--finish-by", "2h")


@pytest.fixture
def rates(tmp_path: Path) -> str:
    file = tmp_path / "rates.csv"
    file.write_text("1,1\n2,1.9\n")
    return str(file)


@pytest.fixture
def traces(tmp_path: Path) -> Path:
    """Two zones for two days: two hours there, an hour away, and the other way round."""
    folder = tmp_path / "traces"
    folder.mkdir()
    for zone, data in (("a", [2, 2, 0]), ("b", [0, 0, 2])):
        body = {"metadata": {"gap_seconds": 3600}, "data": data * 16}
        (folder / f"{zone}.json").write_text(json.dumps(body))
    return folder


def test_times_as_people_say_them() -> None:
    said = {
        "90m": 5400, "36h": 36 * 3600, "2d": 172_800, "18:00": 6 * 3600, "11:00": 23 * 3600,
        "tue 11:59": 7 * 86_400 - 60,
        "Fri 18:00": 78 * 3600, "friday 18:00": 78 * 3600, "2026-11-25 12:00": 86_400, "2026-11-24T13:00": 3600,
    }  # fmt: skip
    assert {text: seconds_until(text, NOW) for text in said} == said
    for wrong in ("", "soon", "0h", "25:00", "foo 18:00", "18:00 Fri", "2026-11-23", "-1h", "٣h", "0001-01-01"):
        with pytest.raises(UsageError, match="--finish-by"):
            seconds_until(wrong, NOW)
    assert seconds_until((NOW + timedelta(hours=1)).isoformat(), NOW) == 3600


def test_deadlines_and_what_they_cost(run: Run, private_home: Path, rates: str, traces: Path) -> None:
    done = run("simulate", "--table", rates, *SHORT, "--traces", str(traces))
    assert done.code == 0, done.err
    header, *rows = [line.split("\t") for line in done.out.splitlines()]
    assert header[:4] == ["FINISH BY", "BUDGET", "PROMISED", "IN TIME"]
    assert [row[0] for row in rows] == ["2h00m", "3h00m", "4h00m"]
    assert {row[3] for row in rows} == {"100%"}
    first = done.err.splitlines()[0]
    assert first == f"replayed on {traces} from 16 starts, by the policy that plans for deadlines"
    assert "no price is known: cost is in hours of one node on demand" in done.err


def test_budgets_are_kept_and_data_says_all_of_it(run: Run, private_home: Path, rates: str, traces: Path) -> None:
    run("config", "set-context", "prod", "--provider", "aws")
    priced = ("--gpu-type", "t4", "--context", "prod", "--budget", "1.5")
    done = run("simulate", "--table", rates, *SHORT, "--traces", str(traces), *priced, "-o", "json")
    data = json.loads(done.out)
    jsonschema.validate(data, json.loads(SCHEMA.read_text("utf-8")))
    rows = data["deadlines"]
    assert [(row["finishByS"], row["budgetUsd"]) for row in rows[:4]] == [
        (7200, 0.75), (7200, 1.5), (7200, 3.0), (10_800, 0.75),
    ]  # fmt: skip
    assert all(row["usdP95"] <= row["budgetUsd"] for row in rows)
    assert all(row["inTime"] >= row["promised"] for row in rows)
    assert {row["promised"] for row in rows} == {0.0, 1.0}


def test_an_error_is_one_line(run: Run, private_home: Path, rates: str, traces: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    odd = tmp_path / "odd"
    odd.mkdir()
    (odd / "x.json").write_text("{}")
    cases = {
        ("--finish-by", "2h"): "--finish-by and --traces go together",
        ("--traces", str(traces)): "--finish-by and --traces go together",
        ("--budget", "5"): "--finish-by and --traces go together",
        ("--finish-by", "2h", "--traces", str(traces), "--budget", "0"): "must be above 0",
        ("--finish-by", "2h", "--traces", str(traces), "--budget", "nan"): "must be above 0",
        ("--finish-by", "2h", "--traces", str(traces), "--budget", "5"): "no price is known",
        ("--finish-by", "60h", "--traces", str(traces)): "too short for a deadline of 5d0h",
        ("--finish-by", "2h", "--traces", str(empty)): "there is no *.json file",
        ("--finish-by", "2h", "--traces", str(odd)): "x.json: not a trace",
        ("--finish-by", "never", "--traces", str(traces)): "is not a time. FIX: give 36h",
    }  # fmt: skip
    for args, message in cases.items():
        done = run("simulate", "--table", rates, *args)
        assert (done.code, done.out, done.err.count("\n")) == (2, "", 1), (args, done.err)
        assert message in done.err
