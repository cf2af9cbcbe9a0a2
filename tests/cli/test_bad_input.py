"""Each mistake is one clear line on stderr and the right exit code, and leaves nothing behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.cli import Run

GOOD = """\
apiVersion: elastic.pytorch.org/v1alpha1
kind: ElasticJob
metadata: {name: a}
spec:
  replicaSpecs:
    Worker:
      template: {spec: {containers: [{name: elasticjob-worker, command: [sh]}]}}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, private_home: Path) -> Path:
    """Where the command is typed: a script, a manifest."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("print('hello')\n")
    (tmp_path / "job.yaml").write_text(GOOD)
    return tmp_path


@pytest.mark.parametrize("words", [["submit", ""], ["submit", "", "--dry-run"], ["sweep", "", "--grid", "lr=1,2"]])
def test_an_empty_name_is_no_script(folder: Path, run: Run, words: list[str]) -> None:
    done = run(*words)
    assert (done.code, done.err.startswith("error: nothing to run. FIX: give a script")) == (2, True)


@pytest.mark.parametrize(
    ("line", "code", "message"),
    [
        ("submit .", 2, 'the script "." is not a file'),
        ("submit train.py --env A", 2, "Invalid value for '--env': \"A\" is not of the form NAME=VALUE."),
        ("submit train.py --env a=b=c --env =x", 2, "Invalid value for '--env': \"=x\" is not of the form"),
        ("submit train.py --deadline 5y", 2, "Invalid value for '--deadline': \"5y\" is not a duration such as"),
        ("submit train.py --template none", 2, 'no job template "none". FIX: see `elasticctl template list`'),
        ("submit train.py --template ./none.yaml.j2", 2, "cannot read the template none.yaml.j2: No such file"),
        ("submit train.py --set spec.backofLimit=3", 2, "with --set: spec.backofLimit: unknown field (did you mean"),
        ("submit train.py --set a", 2, "Invalid value for '--set': \"a\" is not of the form PATH=VALUE."),
        ("submit train.py --dry-run maybe", 2, '--dry-run "maybe": is that a value, or an argument of the script?'),
        ("submit train.py -o json", 2, "--output needs --detach or --dry-run"),
        (
            "submit train.py -f job.yaml",
            2,
            "a script and a manifest (-f) cannot be used together. FIX: give one of them",
        ),
        (
            "submit -f job.yaml --gpus 2",
            2,
            "--gpus cannot be used with -f. FIX: change the manifest with --set PATH=VALUE",
        ),
        ("submit -f none.yaml", 2, "cannot read none.yaml: No such file or directory"),
        (
            "submit -f train.py",
            2,
            "train.py:1: must be a mapping, not \"print('hello')\". FIX: give an ElasticJob manifest",
        ),
        ("submit -f job.yaml --context prod", 3, 'no context "prod". FIX: see `elasticctl config get-contexts`'),
        ("list -o xml", 2, "Invalid value for '-o' / '--output': 'xml' is not one of"),
        ("list -w -o json", 2, "--watch shows tables and cannot be used with --output json"),
        ("status a -w -o json", 2, "--watch shows tables"),
        ("scale a --to 2 --add 1", 2, "no size given. FIX: add one of"),
        ("wait", 2, "no job given."),
        ("config use-context prod", 3, 'no context "prod"'),
        ("config set-context a,b --provider aws", 2, '"a,b" cannot be the name of a context'),
        ("config set-context prod", 2, "context prod is new. FIX: add --provider aws, gcp or kubernetes"),
        ("config set-context prod --provider local", 2, "the context local and the provider local belong together"),
        ("config set-context prod --provider aws --gpu-type t5", 2, 'unknown GPU type "t5"'),
        (
            "config set-context prod --provider aws --gpu-type t4 --gpus-per-node 3",
            2,
            "aws has no node with 3 t4 GPUs. FIX: --gpus-per-node 1, 4 or 8",
        ),
        ("config set-context prod --provider aws --storage ftp://x", 2, '--storage "ftp://x": give a folder, file:'),
        (
            "config set-context prod --provider aws --namespace My_Team",
            2,
            '"My_Team" is not a namespace. FIX: use lower-case',
        ),
        ("config delete-context local", 2, "the context local is built in and cannot be deleted"),
        ("template show none", 2, 'no job template "none"'),
        ("template new a/b", 2, '"a/b": a template\'s name is letters, digits'),
        ("local down --delete-jobs", 2, "--delete-jobs deletes every job of the local cluster. FIX: add --yes"),
        ("completion tcsh", 2, "Invalid value for 'SHELL': 'tcsh' is not one of"),
    ],
)
def test_one_line(run: Run, folder: Path, line: str, code: int, message: str) -> None:
    words = line.split()
    if words[0] == "submit" and "--context" not in words and "-o" not in words:
        words.insert(1, "--dry-run")
    done = run(*words)
    *talk, last = done.err.splitlines()
    assert done.code == code
    assert last.startswith(f"error: {message}")
    assert not any(other.startswith("error") for other in talk)
    assert done.out == ""
    assert not (folder / "home").exists()


def test_the_fix_in_an_error_names_the_place_of_the_command(run: Run, folder: Path) -> None:
    done = run("submit", "train.py", "--secret", "hub", "--dry-run", "--context", "local", "-n", "ml")
    assert done.err.splitlines()[-1].endswith("FIX: elasticctl secret set --context local -n ml hub KEY")


def test_an_error_names_what_a_cloud_context_lacks(run: Run, folder: Path) -> None:
    assert run("config", "set-context", "", "--provider", "aws").err.startswith('error: "" cannot be the name of a')
    assert run("config", "set-context", "prod", "--provider", "aws", "--gpu-type", "T4").code == 0
    submit = ("submit", "train.py", "--context", "prod", "--dry-run", "--gpus", "4")
    assert run(*submit).err == (
        "error: --image is needed in context prod. FIX: add it, or set it with `elasticctl config set-context`\n"
    )
    assert run(*submit, "--image", "i").err.startswith("error: --storage is needed in context prod")
    good = run(*submit, "--image", "i", "--storage", "s3://b/p")
    assert good.code == 0
    assert "nvidia.com/gpu: 1" in good.out
    assert run(*submit[:-2], "--image", "i", "--gpus", "3", "--gpus-per-node", "3").err.startswith(
        "error: aws has no node with 3 t4 GPUs. FIX: --gpus-per-node 1, 4 or 8"
    )


def test_many_ranks_are_not_started_on_a_machine_without_gpus(run: Run, folder: Path) -> None:
    """Where no one can be asked; on a terminal it is a question."""
    done = run("submit", "train.py", "--gpus", "16", "-d")
    assert (done.code, done.out) == (2, "")
    assert done.err.splitlines()[-1] == (
        "error: this machine has no GPU, and 16 ranks would share its CPUs. FIX: choose a cluster with --context,"
        " or give --workers 16 without GPUs for CPU ranks"
    )
    assert "runs on" not in done.err
    assert not (folder / "home").exists()


def test_a_corrupt_contexts_file_stops_everything_and_stays(run: Run, folder: Path) -> None:
    file = folder / "home" / "config.yaml"
    file.parent.mkdir()
    file.write_text("contexts:\n  - {name: prod, provider: aws")
    for words in (["list"], ["config", "set-context", "new", "--provider", "aws"], ["submit", "train.py", "--dry-run"]):
        done = run(*words)
        assert done.code == 2
        assert done.err.startswith(f"error: {file}:2: not YAML: ")
        assert done.err.count("\n") == 1
    assert file.read_text() == "contexts:\n  - {name: prod, provider: aws"


def test_a_bug_of_ours_is_one_line_unless_asked(
    run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from elasticctl.cli.main import main

    def broken() -> None:
        raise ZeroDivisionError("oh")

    monkeypatch.setattr("elasticctl.cli.verbs.set_up.config.user_config", broken)
    done = run("config", "view")
    assert (done.code, done.err.splitlines()[-1]) == (
        1,
        "error: this is a bug in elasticctl: ZeroDivisionError: oh (--debug shows where)",
    )
    assert main(["config", "view", "--debug"]) == 1
    assert "Traceback" in capsys.readouterr().err
