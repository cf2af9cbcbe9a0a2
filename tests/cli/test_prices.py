"""Prices as they are shown: in the plan, and in the status of a job."""

from __future__ import annotations

from pathlib import Path

import pytest

from elasticctl.api.observed.cost import cost, rate
from elasticctl.cli.framework.output import format_tabs
from elasticctl.cli.views.history import cost_text, saved_line, totals_lines
from elasticctl.cli.views.job import status_table
from elasticctl.operations.prices import plan_line
from tests.support.cli import Run
from tests.support.job_samples import AT, job
from tests.support.jobs import made


def test_the_plan_of_a_cloud_job_has_its_price(
    run: Run, private_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    assert run("config", "set-context", "prod", "--provider", "aws", "--storage", "s3://b/p", "--image", "i").code == 0
    done = run("submit", "train.py", "--context", "prod", "--gpus", "4", "--gpu-type", "t4", "--dry-run")
    assert done.code == 0
    assert done.err.splitlines()[1] == (
        "4 x g4dn.xlarge to g4dn.16xlarge: $0.63 to $5.22 an hour on spot (estimated), $2.10 to $17.41 on demand;"
        " list prices of us-east-1, 2025-07-01"
    )
    here = run("submit", "train.py", "--dry-run")
    assert (here.code, here.err.count("\n")) == (0, 2)
    assert "$" not in here.err


def test_one_instance_type_has_one_price() -> None:
    one = rate("gcp", ("a3-highgpu-8g",), "h100", 8)
    assert one is not None
    assert plan_line(one, 20) == (
        "20 x a3-highgpu-8g: $529.50 an hour on spot (estimated), $1,765.00 on demand; list prices of us-central1,"
        " 2025-07-01"
    )


def test_status_and_history_show_what_spot_has_saved() -> None:
    on_spot = made(workerSeconds={"spot": 36_000.0})
    assert cost_text(on_spot, AT) == (
        "about $1.58 so far; on demand it would be $5.26 (g4dn.xlarge at list prices of us-east-1, 2025-07-01, spot at"
        " 30% of them)"
    )
    assert list(totals_lines(on_spot, AT))[-1].startswith("spot saved about $3.68 of $5.26 (")
    paid = cost(made(spot=False, workerSeconds={"onDemand": 3600.0}), AT)
    assert paid is not None
    assert saved_line(paid) == "it cost about $0.53 (g4dn.xlarge at list prices of us-east-1, 2025-07-01)"


def test_without_a_known_price_nothing_is_shown() -> None:
    assert "Cost" not in format_tabs(status_table(job(workerSeconds={"unknown": 3600.0}), [], AT))
