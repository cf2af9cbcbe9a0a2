"""Sweeps: the grid, the jobs that are made of it, whose turn it is, who stops early, and the table."""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import elasticctl
from elasticctl.api.errors import UsageError
from elasticctl.api.spec import ElasticJob
from elasticctl.cli.verbs.start_jobs.sweep import sweep_table
from elasticctl.cluster.base import LogQuery
from elasticctl.cluster.local.client import LocalCluster
from elasticctl.operations import sweep
from elasticctl.operations.sweep import Axis
from elasticctl.operations.target import Target
from elasticctl.settings.contexts import Context
from elasticctl.terminal import Terminal
from tests.support.cli import Run
from tests.support.job_samples import AT, job


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("lr=0.1,1e-3", ("0.1", "1e-3")),
        ("seed=1..3", ("1", "2", "3")),
        ("n=-1..1,7", ("-1", "0", "1", "7")),
        ("n=0..100:50", ("0", "50", "100")),
        ("name=a b,c=d,a b", ("a b", "c=d")),
        ("path=../x", ("../x",)),
    ],
)
def test_an_axis(text: str, values: tuple[str, ...]) -> None:
    assert sweep.axis(text).values == values


@pytest.mark.parametrize("text", ["", "lr", "lr=", "=1", "a b=1", "n=3..1", "n=1..9999999"])
def test_no_axis(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not of the form NAME=V1,V2|is no range of 1 to"):
        sweep.axis(text)


def test_points_are_all_combinations() -> None:
    found = sweep.points((Axis("a", ("1", "2")), Axis("b", ("x", "y"))))
    assert [tuple(point.values()) for point in found] == [("1", "x"), ("1", "y"), ("2", "x"), ("2", "y")]
    many = Axis("n", tuple(map(str, range(100))))
    for wrong in ((), (many, many), (many, Axis("m", many.values[:11]))):
        with pytest.raises(UsageError):
            sweep.points(wrong)


def test_values_replace_their_names_or_are_appended() -> None:
    point = {"lr": "0.1", "seed": "-1"}
    assert sweep.arguments(["t.py", "opt.lr={lr}", "{other}"], point) == ["t.py", "opt.lr=0.1", "{other}", "--seed=-1"]
    assert sweep.arguments(["t.py"], {"lr": "0.1"}) == ["t.py", "--lr", "0.1"]


def made(number: int, phase: str = "Running", *, waits: bool = False, **status: Any) -> dict[str, Any]:
    point = {"lr": f"0.{number}", "seed": "$(HOME)"}
    base = copy.deepcopy(job("base"))
    found = sweep.job_of_point(base, "lr", number, point, f"file:///state/{number}", waits=waits)
    found["status"] = {**found["status"], "phase": phase, **status}
    return found


def test_a_job_says_which_point_it_is() -> None:
    found = made(3, waits=True)
    assert (found["metadata"]["name"], found["metadata"]["labels"][sweep.SWEEP_LABEL]) == ("lr-3", "lr")
    assert sweep.point_of(found) == {"lr": "0.3", "seed": "$(HOME)"}
    assert sweep.waits(found)
    container = found["spec"]["replicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]
    assert container["args"][-4:] == ["--lr", "0.3", "--seed", "$$(HOME)"]
    assert not sweep.waits(made(4))
    assert sweep.point_of({"metadata": {"annotations": {sweep.ANNOTATION_POINT: "no JSON"}}}) == {}


def test_a_point_of_any_content_is_read() -> None:
    for text in ("[" * 100_000, "[1]", "{", '{"lr": 1}'):
        point = sweep.point_of({"metadata": {"annotations": {sweep.ANNOTATION_POINT: text}}})
        assert point == ({"lr": "1"} if "lr" in text else {})


def test_whose_turn_it_is() -> None:
    def jobs(*phases: str) -> list[dict[str, Any]]:
        return [made(at, phase, waits=phase == "Suspended") for at, phase in enumerate(phases)]

    assert sweep.next_to_start(jobs("Running", "Suspended", "Suspended"), 2) == ["lr-1"]
    assert sweep.next_to_start(jobs("Running", "Pending", "Suspended"), 2) == []
    assert sweep.next_to_start(jobs("Failed", "Succeeded", "Suspended", "Suspended", "Suspended"), 2) == [
        "lr-2",
        "lr-3",
    ]
    cancelled = jobs("Suspended", "Suspended")
    cancelled[0]["spec"]["cancel"] = True
    assert sweep.next_to_start(cancelled, 1) == ["lr-1"]
    by_hand = made(9, "Suspended")
    by_hand["spec"]["suspend"] = True
    assert sweep.next_to_start([by_hand, *jobs("Suspended")], 1) == [], "what somebody suspended stays so, and counts"


def curve(*values: float | None) -> dict[str, Any]:
    return {"curve": {"atS": [*range(len(values))], "step": [10 * (n + 1) for n in range(len(values))],
                      "metrics": {"loss": [*values]}}}  # fmt: skip


def test_the_median_rule() -> None:
    jobs = [
        made(1, **curve(5.0, 4.0, 3.0)),
        made(2, "Succeeded", **curve(5.0, 3.0, 2.0)),
        made(3, **curve(5.0, 3.5, 2.5)),
        made(4, **curve(9.0, None, 8.0)),
        made(5, **curve(9.9)),
        made(6, "Suspended", waits=True),
    ]
    assert sweep.to_stop(jobs, "loss", lowest=True, after_step=20) == ["lr-1", "lr-4"]
    assert sweep.to_stop(jobs, "loss", lowest=True, after_step=40) == []
    rising = [made(number, **curve(float(number))) for number in range(1, 5)]
    assert sweep.to_stop(rising, "loss", lowest=False, after_step=1) == ["lr-1", "lr-2"]
    assert sweep.to_stop(jobs[:3], "loss", lowest=True, after_step=20) == [], "two others are no median"
    assert sweep.to_stop(jobs, "accuracy", lowest=True, after_step=1) == []


def test_the_table_has_the_best_first_and_those_without_last() -> None:
    reported: list[dict[str, float]] = [{"loss": 2.0}, {}, {"loss": 1.0}]
    jobs = [made(n, "Succeeded", progress={"step": 5, "metrics": metrics}) for n, metrics in enumerate(reported)]
    points = [sweep.point_of(each) for each in jobs]
    table = sweep_table(jobs, points, AT + 60, "loss")
    assert table.header[:6] == ("NAME", "PHASE", "LR", "SEED", "STEP", "LOSS")
    assert [row[0] for row in table.rows] == ["lr-2", "lr-0", "lr-1"]
    assert [row[0] for row in sweep_table(jobs, points, AT + 60, "loss", lowest=False).rows] == ["lr-0", "lr-2", "lr-1"]
    assert [row[0] for row in sweep_table(jobs, points, AT + 60).rows] == ["lr-0", "lr-1", "lr-2"]


class Cluster:
    """Jobs end at the second query after they were started."""

    def __init__(self, jobs: list[dict[str, Any]]) -> None:
        self.jobs, self.most = jobs, 0

    def list_jobs(self, namespace: str | None) -> list[dict[str, Any]]:
        active = [each for each in self.jobs if each["status"]["phase"] == "Running"]
        self.most = max(self.most, len(active))
        seen = copy.deepcopy(self.jobs)
        for each in active:
            each["status"]["phase"] = "Succeeded"
        return seen

    def patch_job(self, namespace: str, name: str, patch: Any) -> None:
        found = next(each for each in self.jobs if each["metadata"]["name"] == name)
        assert patch["metadata"]["annotations"] == {sweep.ANNOTATION_WAITS: None}
        del found["metadata"]["annotations"][sweep.ANNOTATION_WAITS]
        found["spec"]["suspend"] = patch["spec"]["suspend"]
        found["status"]["phase"] = "Running"


def test_no_more_run_at_a_time_than_parallel(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sweep, "POLL_EVERY_S", 0.0)
    cluster = Cluster([made(n, "Suspended" if n > 2 else "Running", waits=n > 2) for n in range(1, 8)])
    target = Target(Context("lab", "kubernetes"), "default", cluster, Terminal())  # type: ignore[arg-type]
    ended = sweep.run(target, "lr", sweep.SweepPlan(parallel=2))
    assert [each["status"]["phase"] for each in ended] == ["Succeeded"] * 7
    assert cluster.most == 2
    assert capsys.readouterr().err.count("succeeded") == 7


@pytest.mark.usefixtures("local_cluster")
def test_an_invalid_combination_is_a_one_line_error(run: Run, tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    for words, message in (
        ("train.py", "--grid is needed"),
        ("--grid lr=1", "nothing to run"),
        ("train.py --grid lr=1 --early-stop 3", "FIX: add --metric loss"),
        ("--continue nothing", "no jobs of a sweep"),
        ("train.py --continue x", "cannot be used together"),
        ("train.py --grid lr=1 --queue q", "--queue cannot be used with a sweep"),
    ):
        done = run("sweep", *(str(tmp_path / word) if word == "train.py" else word for word in words.split()))
        assert done.code in (2, 3), words
        assert message in done.err


@pytest.mark.timeout(1200)
@pytest.mark.usefixtures("light_spares", "forked_workers")
def test_a_sweep_on_this_machine(
    run: Run, local_cluster: LocalCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweep, "POLL_EVERY_S", 0.1)
    (tmp_path / "code").mkdir()
    script = tmp_path / "code/train.py"
    script.write_text("import sys\nprint('args', sys.argv[1:], flush=True)\n")
    done = run("sweep", str(script), "--grid", "lr=0.1,0.2", "--workers", "1", "--", "--epochs", "3")
    assert done.code == 0, done.err
    assert [line.split("\t")[:3] for line in done.out.splitlines()] == [
        ["NAME", "PHASE", "LR"], ["train-1", "Succeeded", "0.1"], ["train-2", "Succeeded", "0.2"],
    ]  # fmt: skip
    for number, value in ((1, "0.1"), (2, "0.2")):
        lines = [line.text for line in local_cluster.logs("default", f"train-{number}", LogQuery(everything=True))]
        assert f"args ['--epochs', '3', '--lr', '{value}']" in lines
    storages = {json.dumps(each["spec"]).partition("/storage/")[2][:12] for each in local_cluster.list_jobs("default")}
    assert len(storages) == 2, "each keeps its own state"
    again = run("sweep", "--continue", "train")
    assert again.out == done.out
    taken = run("sweep", str(script), "--grid", "lr=0.1", "--workers", "1")
    assert taken.code != 0
    assert "elasticctl sweep --continue train" in taken.err


def test_the_recipe_for_optuna(monkeypatch: pytest.MonkeyPatch, private_home: Path, run: Run, tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs/jobs.md").read_text("utf-8")
    recipe = page.partition("```python\n")[2].partition("```")[0]
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    done = ElasticJob.from_manifest(job("lr-0", progress={"metrics": {"loss": 0.25}})).status
    found: list[float] = []

    def submitted(script: str, args: list[object], *, name: str) -> SimpleNamespace:
        made = run("submit", "--dry-run", script, "--name", name, "--", *map(str, args))
        assert made.code == 0, made.err
        assert "name: lr-0" in made.out
        return SimpleNamespace(wait=lambda check: done)

    trial = SimpleNamespace(number=0, suggest_float=lambda *a, **k: 0.01)
    study = SimpleNamespace(optimize=lambda objective, **how: found.append(objective(trial)))
    fake = ModuleType("optuna")
    vars(fake).update(create_study=lambda **how: study, Trial=SimpleNamespace)
    monkeypatch.setitem(sys.modules, "optuna", fake)
    monkeypatch.setattr(elasticctl, "submit", submitted, raising=False)
    exec(compile(recipe, "jobs.md", "exec"), {})
    assert found == [0.25]
