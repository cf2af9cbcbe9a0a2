"""`compare`: what differs between two jobs, what came of each, and their code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from elasticctl.api.spec import ElasticJob
from elasticctl.cluster.local.client import LocalCluster
from elasticctl.operations.compare import arguments, compare, comparison_rows, differences
from elasticctl.operations.metrics import RunMetrics
from tests.support.cli import Run
from tests.support.job_samples import AT, job


def with_command(*words: str, name: str = "digits", env: dict[str, str] | None = None) -> ElasticJob:
    manifest = job(name)
    (container,) = manifest["spec"]["replicaSpecs"]["Worker"]["template"]["spec"]["containers"]
    container["command"] = ["elasticctl-launch", "--nproc-per-node", "2", "--", "python", "train.py", *words]
    container["env"] += [{"name": key, "value": value} for key, value in (env or {}).items()]
    return ElasticJob.from_manifest(manifest)


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["--lr", "0.1"], {"--lr": "0.1"}),
        (["--lr=0.1", "--offset", "-3"], {"--lr": "0.1", "--offset": "-3"}),
        (["--amp", "--layer", "1", "--layer", "2"], {"--amp": "yes", "--layer": "1 2"}),
        (["data.csv"], {"argument 3": "data.csv"}),
    ],
)
def test_arguments_have_names(words: list[str], found: dict[str, str]) -> None:
    common = {"argument 1": "python", "argument 2": "train.py"}
    assert arguments(with_command(*words)) == common | found


def test_secrets_differ_unseen() -> None:
    assert differences(
        {"--key-heads": "1", "$API_KEY": "a"}, {"--key-heads": "2", "$API_KEY": "b", "$T_TOKEN": "c"}
    ) == {
        "--key-heads": ("1", "2"),
        "$API_KEY": ("(hidden)", "(hidden)"),
        "$T_TOKEN": ("", "(hidden)"),
    }


def test_only_what_differs_of_the_settings_and_all_of_the_results() -> None:
    one = with_command("--lr", "0.1", "--seed", "1", env={"MODE": "fast"})
    two = with_command("--lr", "0.2", "--seed=1", "--amp", name="digits-2")
    results: list[dict[str, Any]] = [
        {"loss": {"last": 0.5, "min": 0.25, "max": 2.0, "lost": None}},
        {"loss": {"last": 0.7, "min": 0.7, "max": 3.0, "lost": (81.0, "NaN")}},
    ]
    rows = comparison_rows([one, two], results, AT + 60)
    assert rows[:3] == [("--lr", "0.1", "0.2"), ("$MODE", "fast", ""), ("--amp", "", "yes")]
    assert ("step", "120/560", "120/560") in rows
    assert ("loss last", "0.5", "NaN since step 81") in rows
    assert ("loss lowest", "0.25", "0.7") in rows
    assert not any(row[0] == "--seed" for row in rows)


@pytest.mark.usefixtures("idle_jobs")
def test_two_jobs_of_a_folder_that_has_changed(run: Run, tmp_path: Path, local_cluster: LocalCluster) -> None:
    folder = tmp_path / "code"
    folder.mkdir()
    (folder / "train.py").write_text("lr = 0.1\nprint(lr)\n")
    (folder / "old.py").write_text("x = 1\n")
    assert run("submit", str(folder / "train.py"), "--name", "one", "-d").code == 0
    (folder / "train.py").write_text("lr = 0.2\nprint(lr)\n")
    (folder / "old.py").unlink()
    (folder / "weights.bin").write_bytes(b"\0\1" * 50)
    assert run("submit", str(folder / "train.py"), "--name", "two", "-d", "--", "--epochs", "3").code == 0
    done = run("compare", "one", "two")
    assert done.code == 0, done.err
    lines = done.out.splitlines()
    assert "--epochs\t-\t3" in lines
    assert "code: 1 file changed, 1 file new, 1 file gone" in lines
    assert {"-lr = 0.1", "+lr = 0.2", "-x = 1", "weights.bin: differs (no text, or too large to show)"} <= set(lines)
    assert "code" not in run("compare", "one", "two", "--no-code").out
    assert "code: the same" in run("compare", "one", "one").out
    compared = json.loads(run("compare", "one", "two", "-o", "json").out)
    assert (compared["kind"], compared["code"]["gone"]) == ("Comparison", ["old.py"])
    assert {"name": "--epochs", "values": ["", "3"]} in compared["settings"]
    assert run("compare", "one", "nothere").code == 3
    jobs = [ElasticJob.from_manifest(local_cluster.get_job("default", name)) for name in ("one", "two")]
    found = compare((jobs[0], jobs[1]), RunMetrics(), AT)
    assert found.code is not None
    assert found.code.words == "1 file changed, 1 file new, 1 file gone"
    assert "+lr = 0.2" in found.code.lines
    assert ("--epochs", "", "3") in found.rows
