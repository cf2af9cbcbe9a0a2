"""Any command as people have it: translated, started by its interpreter, or refused."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from elasticctl.api.errors import UsageError
from elasticctl.cluster.base import LogQuery
from elasticctl.cluster.local.client import LocalCluster
from elasticctl.operations.submit.training_command import TrainingCommand, of_words
from tests.support.cli import Run, with_programs


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where commands are typed: a package, shell scripts."""
    folder = tmp_path / "project"
    (folder / "pkg").mkdir(parents=True)
    (folder / "train.py").write_text("print('hello')\n")
    (folder / "pkg/__init__.py").touch()
    (folder / "pkg/digits.py").touch()
    (folder / "pkg/train.py").write_text("import sys\nprint('module', sys.argv[1:], flush=True)\n")
    (folder / "train.sh").write_text('echo "shell $* of $RANK"\npython -m pkg.train inner\n')
    monkeypatch.chdir(folder)
    with_programs(tmp_path / "bin", monkeypatch, "bash")
    return folder


@pytest.fixture
def folder(project: Path, private_home: Path) -> Path:
    """The same, in a home in which no cluster is ever started."""
    return project


def words_of(run: Run, *words: str) -> list[str]:
    done = run("submit", "--dry-run", "-o", "json", *words)
    assert done.code == 0, done.err
    spec: dict[str, Any] = json.loads(done.out)["spec"]
    found: list[str] = spec["replicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]["args"]
    return found


@pytest.mark.parametrize(
    ("line", "command"),
    [
        ("python train.py --x 1", TrainingCommand("train.py", ("--x", "1"))),
        ("python3 -u train.py", TrainingCommand("", ("python3", "-u", "train.py"))),
        ("python -m pkg.train --x", TrainingCommand("", ("python", "-m", "pkg.train", "--x"))),
        ("A=1 B= ./go now", TrainingCommand("", ("./go", "now"), env=(("A", "1"), ("B", "")))),
    ],
)
def test_a_command_without_a_launcher_is_unchanged(line: str, command: TrainingCommand) -> None:
    assert of_words(shlex.split(line)) == command


@pytest.mark.parametrize(
    ("line", "script", "args", "options"),
    [
        ("torchrun train.py", "train.py", (), {}),
        (
            "torchrun --standalone --nproc-per-node=2 train.py --lr 1",
            "train.py",
            ("--lr", "1"),
            {"gpus_per_node": 2},
        ),
        (
            "OMP_NUM_THREADS=1 torchrun --nnodes 2:8 --nproc_per_node gpu --max-restarts 5 --rdzv-backend c10d"
            " --rdzv-endpoint h:1 train.py",
            "train.py",
            (),
            {"workers": 8, "min_workers": 2, "max_workers": 8, "backoff_limit": 5},
        ),
        ("python -m torch.distributed.run --nnodes 3 a.py -x", "a.py", ("-x",), {"workers": 3}),
        ("torchrun -m pkg.train --x", "", ("python", "-m", "pkg.train", "--x"), {}),
        ("torchrun --no-python ./go", "", ("./go",), {}),
        ("accelerate launch train.py --a", "train.py", ("--a",), {}),
        (
            "accelerate launch --num_processes 8 --num_machines=2 --multi_gpu train.py",
            "train.py",
            (),
            {"workers": 2, "gpus_per_node": 4},
        ),
    ],
)
def test_lines_of_launchers_are_translated(line: str, script: str, args: tuple[str, ...], options: Any) -> None:
    made = of_words(shlex.split(line))
    assert (made.script, made.args, dict(made.options)) == (script, args, options)
    assert "elasticctl starts the ranks itself" in made.notes[0]


def test_variables_that_accelerate_would_set_are_set() -> None:
    made = of_words(shlex.split("accelerate launch --mixed-precision bf16 --gradient_accumulation_steps=4 train.py"))
    assert dict(made.env) == {"ACCELERATE_MIXED_PRECISION": "bf16", "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4"}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("torchrun", "torchrun names no script"),
        ("torchrun --nnodes", "torchrun: --nnodes needs a value"),
        ("torchrun --nnodes two train.py", '--nnodes "two" is not a whole number'),
        ("torchrun --frobnicate train.py", "torchrun: --frobnicate cannot be translated"),
        ("accelerate launch --config_file x.yaml train.py", "--config_file cannot be translated"),
        ("accelerate launch --num_processes 3 --num_machines 2 train.py", "cannot be shared evenly"),
        ("accelerate test", "accelerate test does not train"),
        ("deepspeed train.py", "deepspeed starts its own ranks"),
        ("mpirun -np 4 python train.py", "mpirun starts its own ranks"),
        ("A=1", "nothing to run"),
    ],
)
def test_untranslatable_options_are_refused(line: str, said: str) -> None:
    with pytest.raises(UsageError) as refused:
        of_words(shlex.split(line))
    assert said in str(refused.value)


def test_typed_options_take_precedence_over_the_line(run: Run, folder: Path) -> None:
    line = ("--", "torchrun", "--nnodes", "3", "--max-restarts", "9", "train.py")
    done = run("submit", "--dry-run", "--workers", "2", "-o", "json", *line)
    spec = json.loads(done.out)["spec"]
    assert (spec["replicaSpecs"]["Worker"]["replicas"], spec["backoffLimit"]) == (2, 9)
    assert "torchrun: elasticctl starts the ranks itself and forms the group\n" in done.err


def test_scripts_are_started_by_their_interpreters(run: Run, folder: Path) -> None:
    assert words_of(run, "train.sh") == ["bash", "train.sh"]
    (folder / "strict").write_text("#!/usr/bin/env -S dash -e\necho\n")
    assert words_of(run, "strict") == ["dash", "-e", "strict"]
    assert words_of(run, "--no-workspace", "strict") == ["dash", "-e", str(folder / "strict")]
    (folder / "strict").chmod(0o755)
    assert words_of(run, "strict") == [str(folder / "strict")]
    (folder / "snake").write_text("#!/usr/bin/env python3\nprint()\n")
    assert words_of(run, "snake")[1:] == [str(folder / "snake")]
    assert words_of(run, "-m", "pkg.train", "--", "--x")[1:] == ["-m", "pkg.train", "--x"]


def test_jobs_are_named_after_what_they_run(run: Run, folder: Path) -> None:
    for words, name in (
        (("--", "python", "-m", "pkg.digits"), "digits"),
        (("--", "torchrun", "train.py"), "train"),
        (("--", "bash", "train.sh"), "train"),
    ):
        assert json.loads(run("submit", "--dry-run", "-o", "json", *words).out)["metadata"]["name"] == name


def test_a_launcher_program_runs_as_it_is_typed(run: Run, folder: Path) -> None:
    line = ("-n", "4", "python", "train.py")
    (folder / "bin").mkdir()
    program = folder / "bin" / "mpirun"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    words = (str(program), *line)
    refused = run("submit", "--dry-run", "--", *words)
    assert (refused.code, "with --launcher" in refused.err) == (2, True)

    done = run("submit", "--dry-run", "--launcher", "--cpus", "3", "-o", "json", "--", *words)

    (container,) = json.loads(done.out)["spec"]["replicaSpecs"]["Worker"]["template"]["spec"]["containers"]
    assert container["command"] == ["elasticctl-launch", "--nproc-per-node", "3", "--launcher", "--"]
    assert container["args"] == list(words)
    assert "the command runs once, on the first worker" in done.err


@pytest.mark.parametrize(
    ("option", "what"),
    [
        (("--hang-timeout", "5m"), "--hang-timeout cannot be used. FIX: leave it out"),
        (("--on-nan", "stop"), "--on-nan cannot be used"),
        (("--budget", "20"), "a deadline or a budget to plan for cannot be used"),
        (
            ("--on-nan", "stop", "--hang-timeout", "5m"),
            "--hang-timeout and --on-nan cannot be used. FIX: leave them out",
        ),
    ],
)
def test_options_that_need_our_ranks_are_refused_for_a_launcher_program(
    run: Run, folder: Path, option: tuple[str, ...], what: str
) -> None:
    done = run("submit", "--dry-run", "--launcher", *option, "train.sh")
    assert (done.code, done.out) == (2, "")
    assert what in done.err


@pytest.mark.parametrize(
    ("text", "fix"),
    [
        ("#!/bin/sh\nset -e\nexec torchrun --standalone \\\n a.py\n", "submit -- torchrun --standalone a.py"),
        ("cd x && accelerate launch train.py", "FIX: "),
        ("python -m torch.distributed.run train.py", "submit -- python -m torch.distributed.run train.py"),
        ("/opt/bin/mpirun -np 2 python train.py", "FIX: give the Python script that it starts"),
    ],
)  # fmt: skip
def test_a_group_inside_a_script_is_refused(run: Run, folder: Path, text: str, fix: str) -> None:
    """Each worker would train alone, and all would succeed."""
    (folder / "all.sh").write_text(text)
    for words in (("all.sh",), ("--", "bash", "all.sh")):
        done = run("submit", "--dry-run", *words)
        assert (done.code, done.out) == (2, "")
        assert "all.sh starts its own ranks" in done.err
        assert fix in done.err


def test_a_script_that_only_mentions_launchers_is_not_refused(run: Run, folder: Path) -> None:
    (folder / "all.sh").write_text("# torchrun train.py\necho not torchrunning\npython train.py  # no torchrun here\n")
    assert run("submit", "--dry-run", "all.sh").code == 0
    assert run("submit", "--dry-run", "--", "bash", "-c", "torchrun train.py").code == 2


def test_a_program_that_is_not_there(run: Run, folder: Path) -> None:
    done = run("submit", "--dry-run", "--", "trainer", "--x")
    assert (done.code, done.err) == (
        2,
        'error: there is no program "trainer". FIX: give a script, or a command after `--`\n',
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("-m", "nopkg.train"), 'there is no module "nopkg.train" in {folder}, nor in the environment of {python}'),
        (("-m", "pkg.trian"), 'there is no module "pkg.trian" in {folder} (did you mean "pkg.train"?)'),
        (("--", "torchrun", "-m", "pkgs"), 'there is no module "pkgs" in {folder}, nor in the environment of {python}'),
        (("--setup", "pip install x", "-m", "pkg.x.y"), 'there is no module "pkg.x.y" in {folder}'),
    ],
)
def test_a_module_that_is_not_there(run: Run, folder: Path, words: tuple[str, ...], said: str) -> None:
    done = run("submit", "--dry-run", *words)
    assert (done.code, done.out) == (2, "")
    assert said.format(folder=folder, python=sys.executable) in done.err


@pytest.mark.parametrize(
    "words",
    [
        ("-m", "json.tool"),
        ("-m", "parts.train"),
        ("--setup", "pip install nopkg", "-m", "nopkg.train"),
        ("--env", "PYTHONPATH=src", "-m", "nopkg"),
        ("--", "python", "-W", "ignore", "-m", "nopkg"),
        ("--", "python", "train.py", "-m", "nopkg"),
    ],
)
def test_a_module_that_may_be_there(run: Run, folder: Path, words: tuple[str, ...]) -> None:
    """It is installed, or will be, or is a part of a package whose other parts are elsewhere."""
    (folder / "parts").mkdir()
    assert run("submit", "--dry-run", *words).code == 0


def test_a_command_is_kept_in_a_job_file(run: Run, folder: Path) -> None:
    assert run("submit", "--save", "job.yaml", "--", "python", "-m", "pkg.train", "--x").code == 0
    assert words_of(run, "-f", "job.yaml")[1:] == ["-m", "pkg.train", "--x"]
    assert run("submit", "--save", "job.yaml", "--", "torchrun", "--nnodes", "2", "train.py").code == 0
    assert (folder / "job.yaml").read_text() == "script: train.py\nworkers: 2\n"


@pytest.mark.usefixtures("light_spares", "forked_workers")
def test_a_shell_script_and_a_module_run_from_the_copy(run: Run, local_cluster: LocalCluster, project: Path) -> None:
    """What a shell script names by relative paths too."""
    assert run("submit", "train.sh", "--name", "shell", "-d", "--", "a", "b").code == 0
    assert run("submit", "-m", "pkg.train", "--name", "module", "-d", "--", "--x").code == 0
    for path in project.rglob("*.*"):
        path.write_text("edited")
    assert run("wait", "shell", "--timeout", "600s").code == 0
    assert run("wait", "module", "--timeout", "600s").code == 0
    shell, module = (
        [line.text for line in local_cluster.logs("default", name, LogQuery())] for name in ("shell", "module")
    )
    assert "shell a b of 0" in shell
    assert "module ['inner']" in shell
    assert "module ['--x']" in module
