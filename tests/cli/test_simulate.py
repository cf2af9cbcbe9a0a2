"""`simulate`: tables, notes, data and refusals; and of a job that really trained."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pexpect
import pytest

from elasticctl.api.errors import UsageError
from elasticctl.cli.views.simulation import basis_of_job, basis_of_table, notes, outlooks, plot, table
from elasticctl.operations import target
from elasticctl.simulation import Evidence, Point
from tests.support.cli import Run, Spawn
from tests.support.job_samples import at, job

RATES = "gpus,rate\n4,1000\n16,3500\n64,9000\n"


@pytest.fixture
def rates(tmp_path: Path) -> str:
    file = tmp_path / "rates.csv"
    file.write_text(RATES)
    return str(file)


def test_a_table_with_prices(run: Run, private_home: Path, rates: str) -> None:
    run("config", "set-context", "prod", "--provider", "aws")
    done = run("simulate", "--table", rates, "--gpus", "16,4,64", "--gpu-type", "t4", "--context", "prod")
    assert done.code == 0
    rows = [line.split("\t") for line in done.out.splitlines()]
    assert rows[0][:4] == ["GPUS", "NODES", "RATE", "SPEEDUP"]
    assert [row[0] for row in rows[1:]] == ["4", "16", "64"]
    first = dict(zip(rows[0], rows[1], strict=True))
    assert (first["SPEEDUP"], first["TIME"], first["ON DEMAND"], first["SAVED"]) == ("1.0x", "1d0h", "$50.53", "70 %")
    said = done.err.splitlines()
    assert said[0].startswith("cheapest: 4 GPUs (1d0h, $15.2")
    assert "; fastest: 64 GPUs (" in said[0]
    assert "; best per dollar (least time x cost): 64 GPUs (" in said[0]
    assert said[1] == "saved: on spot, against the same work on 4 GPUs on demand"
    assert said[-1] == ("prices: g4dn.xlarge at list prices of us-east-1, 2025-07-01; spot at 30% of them (estimated)")
    assert sum("(assumed)" in line for line in said) == 4


def test_without_a_price_node_hours_are_shown(run: Run, private_home: Path, rates: str) -> None:
    done = run("simulate", "--table", rates, "--gpus", "4", "--interrupted-every", "2h", "--save-cost", "250ms")
    assert (done.code, "$" in done.out + done.err) == (0, False)
    assert " h\t" in done.out
    assert "interruptions: a spot node lasts 2h00m (given), without notice" in done.err
    assert "each stops training for 250 ms (given)" in done.err


def test_zero_costs_zero_times_and_never_are_words(run: Run, private_home: Path, rates: str) -> None:
    free = run("simulate", "--table", rates, "--save-cost", "0s", "-o", "json")
    assert "NaN" not in free.out
    assert json.loads(free.out)["outlooks"][0]["saved"] > 0
    none = run("simulate", "--table", rates, "--work", "0s")
    assert (none.code, none.err) == (2, "error: --work 0s: must be longer than 0s\n")
    short = run("simulate", "--table", rates, "--interrupted-every", "1s", "--recovery", "10m")
    assert {tuple(line.split("\t")[7:9]) for line in short.out.splitlines()[1:]} == {("never", "-")}
    assert short.err.startswith("it would never end at any of these sizes")


def test_data_says_what_it_rests_on(run: Run, private_home: Path, rates: str) -> None:
    data = json.loads(run("simulate", "--table", rates, "--gpus", "64", "--save-every", "60s", "-o", "json").out)
    assert (data["apiVersion"], data["kind"], data["referenceGpus"]) == ("cli.elasticctl/v1", "Simulation", 4)
    assert data["conditions"]["intervalS"] == 60
    (found,) = data["outlooks"]
    assert (found["gpus"], found["speedup"], found["measured"], found["spotUsd"]) == (64, 9.0, True, None)
    assert found["spotS"] > found["onDemandS"] > 0


def test_an_error_is_one_line(run: Run, private_home: Path, rates: str, tmp_path: Path) -> None:
    cases = {
        (): "give either a job or a scaling curve with --table FILE",
        ("x", "--table", rates): "give either a job or a scaling curve with --table FILE",
        ("--table", str(tmp_path / "none")): "cannot read",
        (
            "--table",
            rates,
            "--gpus",
            "4,x",
        ): '--gpus "4,x" is not a list of numbers of GPUs. FIX: give one such as 4,8,16',
        ("--table", rates, "--gpus", "6", "--gpus-per-node", "4"): "--gpus 6: with 4 on each node",
        ("--table", rates, "--gpu-type", "t5"): 'unknown GPU type "t5"',
        ("--table", rates, "--save-every", "0s"): "--save-every 0s",
        ("--table", rates, "--interrupted-every", "0s"): "--interrupted-every 0s",
        ("--table", rates, "--save-cost", "soon"): "is not a duration",
    }
    for args, message in cases.items():
        done = run("simulate", *args)
        assert (done.code, done.out, done.err.count("\n")) == (2, "", 1), args
        assert message in done.err


def test_measurements_override_assumptions_and_options_override_both() -> None:
    evidence = Evidence((Point(2, 10.0), Point(4, 18.0)), 2, True, 3, 9 * 86_400.0, 4.0, 2.0, 5000)
    basis = basis_of_job("digits", evidence, None, {"gpus_per_node": 2, "away_s": 60.0}, None)
    assert (basis.conditions.between_s, basis.conditions.recovery_s, basis.conditions.away_s) == (2.5 * 86_400, 4.0, 60)
    text = "\n".join(notes(basis, outlooks(basis, ())))
    for said in (
        "scaling: known at 2 and 4 GPUs; of a step at the smallest size 89% shrinks",
        "work: 5000 steps, as the job says",
        "2d12h (measured: 3 interruptions in 9d0h of nodes, and one in 1d0h assumed)",
        "recovery: 4.0s until the next step (measured)",
        "after 1m00s (given)",
    ):
        assert said in text
    assert [item.gpus for item in outlooks(basis, ())] == [2, 4, 8]


def test_a_size_at_which_it_never_ends_is_named() -> None:
    basis = basis_of_table([Point(1, 1.0)], None, {"between_s": 60.0, "recovery_s": 3600.0}, None)
    found = outlooks(basis, [64])
    assert table(basis, found).rows[0][7] == "never"
    assert next(notes(basis, found)).startswith("it would never end at any of these sizes")
    assert list(plot(basis, found))[1].split() == ["64", "never"]
    with pytest.raises(UsageError):
        outlooks(basis, [10_000_000])


def test_bars_are_in_proportion() -> None:
    basis = basis_of_table([Point(1, 1.0), Point(2, 2.0)], None, {"between_s": 1e12}, None)
    lines = list(plot(basis, outlooks(basis, [1, 2]), "#"))
    assert [line.split()[1].count("#") for line in lines[1:]] == [22, 11]


def test_on_a_terminal_bars_come_below_the_table(private_home: Path, rates: str, terminal: Spawn) -> None:
    child = terminal("simulate", "--table", rates, "--gpus", "4,64", width=80, NO_COLOR="1")
    child.expect(pexpect.EOF)
    table, bars, notes = re.sub(r"\r|\x1b\[[0-9;]*m", "", str(child.before)).split("\n\n")
    assert all(len(line) <= 80 for part in (table, bars) for line in part.splitlines())
    assert "LOSS EVERY" not in table
    assert "     4  ██████████████████████ 1d0h " in bars
    assert notes.startswith("cheapest: 4 GPUs")


def test_simulating_a_job_that_has_trained(run: Run, private_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    group = {"generation": 1, "workers": ["a"], "openedAt": at(0), "firstStepAt": at(5), "resumedStep": 0}
    found = job(
        phase="Succeeded",
        completionTime=at(65),
        progress={"step": 20, "totalSteps": 20, "at": at(60)},
        generations=[{**group, "formedAt": at(4), "lastStep": 20}],
        interruptions=[],
        restarts={},
    )
    cluster = SimpleNamespace(get_job=lambda namespace, name: found)
    monkeypatch.setattr(target, "connect", lambda context: cluster)
    done = run("simulate", "digits", "--gpus", "1,2,4")
    assert done.code == 0, done.err
    rows = [line.split("\t") for line in done.out.splitlines()]
    assert [row[0] for row in rows] == ["RANKS", "1", "2", "4"]
    assert [row[-1] for row in rows[1:]] == ["known", "assumed", "assumed"]
    assert "work: 20 steps, as the job says" in done.err
    assert "--gpu-type goes with --table" in run("simulate", "digits", "--gpu-type", "t4").err
