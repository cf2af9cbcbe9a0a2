"""`checkpoints`: what is listed, found damaged, fetched and deleted."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.torch

from elasticctl.api.text import size_text
from elasticctl.cli.verbs.checkpoints_and_plans.checkpoints import checkpoint_data, checkpoints_table
from elasticctl.operations.checkpoints import CheckpointStorage, list_checkpoints
from elasticctl.terminal import Terminal
from elasticctl_store.checkpoints.commits import CommitWriter, delete_commit, read_commits
from elasticctl_store.checkpoints.entries import Commit, ObjectRef
from elasticctl_store.checkpoints.verify import CheckedCommit
from elasticctl_store.errors import FencedError, StorageError
from elasticctl_store.storage import all_keys
from elasticctl_store.storage.local import LocalStorage
from elasticctl_train.checkpoint.checkpointer import Checkpointer, Label
from tests.support import job_samples, journals
from tests.support.cli import Run
from tests.support.train.checkpoints import damage_step, fill, steps

pytestmark = pytest.mark.usefixtures("private_home")  # deletions are written down there


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A storage with four checkpoints, whose losses fall but for the last."""
    folder = tmp_path / "state"
    fill(LocalStorage(folder))
    return folder


@pytest.fixture
def job(folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A job called digits that keeps its state there."""
    manifest = job_samples.job()
    container = manifest["spec"]["replicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]
    container["env"][0]["value"] = folder.as_uri()
    monkeypatch.setattr(
        "elasticctl.cli.verbs.checkpoints_and_plans.checkpoints.reach",
        lambda where: SimpleNamespace(
            find=lambda name, whole=False: manifest, cluster=None, namespace="default", observer=Terminal()
        ),
    )
    return manifest


@pytest.mark.usefixtures("job")
@pytest.mark.parametrize("words", [("list", "digits"), ("digits",)])
def test_a_jobs_checkpoints_are_listed_newest_first(run: Run, words: tuple[str, ...]) -> None:
    done = run("checkpoints", *words)
    assert (done.code, done.err) == (0, "")
    header, *rows = [line.split("\t") for line in done.out.splitlines()]
    assert header == ["STEP", "EPOCH", "AGE", "SIZE", "RANKS", "STATE"]
    assert [row[0] for row in rows] == ["40", "30", "20", "10"]
    assert all(row[1] == str(int(row[0]) // 20) and row[4:] == ["1", "whole"] for row in rows)
    assert "loss=0.75" in run("checkpoints", *words, "-o", "wide").out


def test_a_storage_without_checkpoints_is_no_error(run: Run, tmp_path: Path) -> None:
    done = run("checkpoints", "list", str(tmp_path / "nothing"))
    assert (done.code, done.out) == (0, "")
    assert "no checkpoints at file://" in done.err


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ("", ""),
        ("own", ""),
        (
            "file:///else\x1b[2Jwhere",
            ': its script saves to "file:///else\\x1b[2Jwhere". FIX: give that URL in place of digits',
        ),
    ],
)
def test_the_url_of_a_script_that_saves_elsewhere_is_named_and_not_opened(
    run: Run, job: dict[str, Any], folder: Path, said: str, words: str
) -> None:
    for key in list(all_keys(LocalStorage(folder), "")):
        (folder / key).unlink()
    url = LocalStorage(folder).url
    job["status"]["checkpoint"] = {"step": 36, "committed": 1, "url": url if said == "own" else said}
    done = run("checkpoints", "list", "digits")
    assert (done.code, done.out + done.err) == (0, f"digits: no checkpoints at {url}{words}\n")
    done = run("checkpoints", "verify", "digits")
    assert (done.code, done.err) == (3, f"error: digits: there are no checkpoints at {url} to verify{words}\n")


def test_there_is_nothing_to_verify_where_there_is_nothing(run: Run, tmp_path: Path) -> None:
    done = run("checkpoints", "verify", str(tmp_path / "nothere"))
    assert (done.code, done.out) == (3, "")
    assert "there are no checkpoints at file://" in done.err
    (tmp_path / "nothere").mkdir()
    done = run("checkpoints", "pull", str(tmp_path / "nothere"), str(tmp_path / "model.safetensors"))
    assert (done.code, done.err) == (3, "error: no intact checkpoint exists\n")
    done = run("checkpoints", "verify", "s3:/bucket/run")
    assert (done.code, done.err) == (
        2,
        'error: "s3:/bucket/run" is not the URL of a storage. FIX: give s3://bucket/run\n',
    )


class Retained(LocalStorage):
    """A storage whose job deletes the checkpoint of step 10 as soon as its tensors are read."""

    def read_into(self, key: str, start: int, into: memoryview) -> None:
        to_delete = [commit for commit in read_commits(self) if commit.step == 10 and key.startswith(commit.folder)]
        for commit in to_delete:
            delete_commit(self, commit)
        super().read_into(key, start, into)


@pytest.mark.parametrize(("verb", "seen"), [("list", 3), ("verify", 3)])
def test_a_checkpoint_that_the_job_deletes_meanwhile_is_not_damaged(
    run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch, verb: str, seen: int
) -> None:
    monkeypatch.setattr("elasticctl_store.storage.open", lambda url, patience: Retained(Path(url)))
    done = run("checkpoints", verb, str(folder))
    assert done.code == 0, done
    assert len(done.out.splitlines()) == 1 + seen
    assert "damaged:" not in done.out


def test_verify_says_what_the_job_deleted_while_it_read(
    run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = list_checkpoints(CheckpointStorage("state", LocalStorage(folder), running=True))
    monkeypatch.setattr("elasticctl.operations.checkpoints.list_checkpoints", lambda place: found)
    delete_commit(LocalStorage(folder), next(c for c in read_commits(LocalStorage(folder)) if c.step == 20))
    done = run("checkpoints", "verify", str(folder))
    assert (done.code, len(done.out.splitlines())) == (0, 4)
    assert done.err.endswith(": 3 checkpoints, 0 damaged, 1 deleted by the job meanwhile\n")


def test_verify_finds_a_flipped_bit(run: Run, folder: Path) -> None:
    assert run("checkpoints", "verify", str(folder)).code == 0
    damage_step(folder, 30)
    done = run("checkpoints", "verify", str(folder))
    assert done.code == 1
    states = {line.split("\t")[0]: line.split("\t")[-1] for line in done.out.splitlines()[1:]}
    assert states["30"].startswith("damaged: data/")
    assert [states[step] for step in ("40", "20", "10")] == ["whole"] * 3
    assert done.err.endswith("4 checkpoints, 1 damaged\n")
    assert run("checkpoints", "verify", str(folder), "--step", "20").code == 0


def test_pull_writes_one_plain_file(run: Run, folder: Path, tmp_path: Path) -> None:
    target = tmp_path / "model.safetensors"
    done = run("checkpoints", "pull", str(folder), str(target))
    assert (done.code, done.out) == (0, ""), done.err
    assert safetensors.torch.load_file(target)["w"].tolist() == [40.0] * 300
    assert f"{target}: 1 tensor of model, step 40, 1." in done.err
    again = run("checkpoints", "pull", str(folder), str(target), "--step", "20")
    assert (again.code, "add --force to replace it" in again.err) == (2, True)
    run("checkpoints", "pull", str(folder), str(target), "--step", "20", "--force")
    assert safetensors.torch.load_file(target)["w"].tolist() == [20.0] * 300
    other = tmp_path / "optimizer.safetensors"
    run("checkpoints", "pull", str(folder), str(other), "--part", "optimizer")
    assert safetensors.torch.load_file(other).keys() == {"momentum"}


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("pull", "{}", "{}"), 2, "is a folder. FIX: name a file, such as"),
        (("pull", "{}", "x", "--part", "ema"), 3, "the checkpoint of step 40 has no part 'ema', only model, optimizer"),
        (("pull", "{}", "x", "--step", "15"), 3, "no checkpoint of step 15 exists; there are: 40, 30, 20, 10"),
        (("rm", "{}", "40", "-y"), 2, "step 40 is the newest intact checkpoint, from which {} would continue"),
        (("rm", "{}", "10"), 2, "this would delete 1 checkpoint (step 10, 2."),
        (("rm", "{}", "ten"), 2, '"ten" is not a whole number'),
        (("prune", "{}", "--keep-best", "1"), 2, "--keep-best and --metric need each other"),
        (("list", "ftp://x/y"), 3, "ftp:// is not a supported storage"),
        (("lst", "{}"), 2, 'there is no verb "lst" (did you mean "list"?)'),
    ],
)
def test_mistakes_are_one_line(
    run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], code: int, said: str
) -> None:
    monkeypatch.chdir(folder)
    done = run("checkpoints", *(word.format(folder) for word in words))
    assert done.code == code
    assert said.format(folder) in done.err
    assert done.err.count("\n") == 1
    assert steps(folder) == [40, 30, 20, 10]


def test_rm_deletes_entry_and_data(run: Run, folder: Path) -> None:
    done = run("checkpoints", "rm", str(folder), "30", "10", "10", "-y")
    assert (done.code, done.out) == (0, ""), done.err
    assert "deleted 2 checkpoints (steps 10, 30, " in done.err
    assert steps(folder) == [40, 20]
    assert len(list((folder / "data").iterdir())) == 2


def test_the_intended_one_of_two_checkpoints_of_a_step_is_deleted(run: Run, tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path / "state")
    for step in (5, 7, 7, 9):
        journals.commit(storage, CommitWriter.take_over(storage), step)
    numbers = [commit.number for commit in read_commits(storage)]
    assert numbers == [4, 3, 2, 1]
    order = ("checkpoints", "rm", str(tmp_path / "state"), "7", "-y")
    refused = run(*order)
    assert (refused.code, refused.err.count("\n")) == (2, 1)
    assert "there are 2 checkpoints of step 7, with the numbers 3, 2. FIX: say which with --number" in refused.err
    assert "no checkpoint of step 7 has number 4; there are: 3, 2" in run(*order, "--number", "4").err
    assert "FIX: give one step" in run(*order[:4], "5", "-y", "--number", "2").err
    assert run("checkpoints", "verify", str(tmp_path / "state"), "--step", "7").err.endswith(
        "2 checkpoints, 0 damaged\n"
    )
    assert run(*order, "--number", "2").code == 0
    assert [commit.number for commit in read_commits(storage)] == [4, 3, 1]
    assert run(*order).code == 0
    assert [commit.number for commit in read_commits(storage)] == [4, 1]


@pytest.mark.parametrize("keep", ["1", "2"])
def test_prune_reads_what_it_leaves(run: Run, folder: Path, keep: str) -> None:
    damage_step(folder, 40)
    done = run("checkpoints", "prune", str(folder), "--keep-last", keep, "-y")
    assert done.code == 0
    assert "step 40 is damaged: data/" in done.err
    assert steps(folder) == [40, 30, 20][: 1 + int(keep)]


def test_prune_deletes_nothing_if_nothing_is_intact(run: Run, folder: Path) -> None:
    for step in (10, 20, 30, 40):
        damage_step(folder, step)
    done = run("checkpoints", "prune", str(folder), "--keep-last", "1", "-y")
    assert (done.code, done.err.count("is damaged")) == (0, 3), "of a single one that is left nothing newer could go"
    assert "nothing to delete; 4 checkpoints are kept" in done.err
    assert steps(folder) == [40, 30, 20, 10]


def test_prune_with_force_trusts_the_quick_check(run: Run, folder: Path) -> None:
    damage_step(folder, 40)
    assert run("checkpoints", "prune", str(folder), "--keep-last", "1", "-y", "--force").code == 0
    assert steps(folder) == [40]


def test_rm_leaves_the_newest_that_is_verified_intact(run: Run, job: dict[str, Any], folder: Path) -> None:
    job["status"]["phase"] = "Succeeded"
    damage_step(folder, 40)
    done = run("checkpoints", "rm", "digits", "30", "-y")
    assert (done.code, "step 30 is the newest intact checkpoint" in done.err) == (2, True)
    assert run("checkpoints", "rm", "digits", "40", "20", "-y").code == 0
    assert steps(folder) == [30, 10]


def test_pull_falls_back_and_says_why(run: Run, folder: Path, tmp_path: Path) -> None:
    damage_step(folder, 40)
    next((folder / "data").glob("*step000000030*/*.safetensors")).unlink()
    target = tmp_path / "model.safetensors"
    done = run("checkpoints", "pull", str(folder), str(target))
    assert done.code == 0, done.err
    assert safetensors.torch.load_file(target)["w"].tolist() == [20.0] * 300
    assert [line.partition(": ")[2][:19] for line in done.err.splitlines()][:2] == [
        "step 40 is damaged:",
        "step 30 is damaged:",
    ]
    assert f"{folder}: taking step 20, the newest that is intact\n" in done.err
    asked = run("checkpoints", "pull", str(folder), str(target), "--step", "40", "--force")
    assert asked.code == 3
    assert "no intact checkpoint of step 40 exists (data/" in asked.err
    assert asked.err.endswith("; there are: 40, 30, 20, 10\n")
    assert safetensors.torch.load_file(target)["w"].tolist() == [20.0] * 300


def test_a_damaged_newest_one_goes_by_force_or_once_the_job_has_ended(
    run: Run, job: dict[str, Any], folder: Path
) -> None:
    next((folder / "data").glob("*step000000040*/*.safetensors")).unlink()
    done = run("checkpoints", "rm", "digits", "40", "-y")
    assert (done.code, "step 40 is the newest checkpoint, though damaged. Deleting it stops" in done.err) == (2, True)
    assert steps(folder) == [40, 30, 20, 10]
    job["status"]["phase"] = "Succeeded"
    assert run("checkpoints", "rm", "digits", "40", "-y").code == 0
    next((folder / "data").glob("*step000000030*/*.safetensors")).unlink()
    job["status"]["phase"] = "Running"
    assert run("checkpoints", "rm", "digits", "20", "-y").code == 2
    assert run("checkpoints", "rm", "digits", "30", "-y", "--force").code == 0
    assert steps(folder) == [20, 10]


def test_the_newest_one_of_a_running_job_goes_only_by_force_and_fences_it(run: Run, tmp_path: Path) -> None:
    running = fill(LocalStorage(tmp_path / "state"))
    assert run("checkpoints", "rm", str(tmp_path / "state"), "40", "-y").code == 2
    assert run("checkpoints", "rm", str(tmp_path / "state"), "40", "-y", "--force").code == 0
    running.save({"model": {}}, Label(50))
    with pytest.raises(FencedError):
        running.settle()
    younger = Checkpointer(LocalStorage(tmp_path / "state"))
    restored = younger.restore()
    assert restored is not None
    assert restored.commit.step == 30


def test_prune_keeps_the_last_and_the_best(run: Run, folder: Path) -> None:
    words = ("checkpoints", "prune", str(folder), "--keep-last", "1", "--keep-best", "1", "--metric", "loss")
    done = run(*words, "--dry-run")
    assert [line.split("\t")[0] for line in done.out.splitlines()] == ["STEP", "20", "10"]
    assert "would delete 2 checkpoints (steps 10, 20, " in done.err
    assert steps(folder) == [40, 30, 20, 10]
    assert run(*words, "-y").code == 0
    assert steps(folder) == [40, 30]
    again = run(*words, "-y")
    assert (again.code, "nothing to delete; 2 checkpoints are kept" in again.err) == (0, True)


def test_prune_counts_only_intact_ones(run: Run, folder: Path) -> None:
    next((folder / "data").glob("*step000000040*/*.safetensors")).unlink()
    assert run("checkpoints", "prune", str(folder), "--keep-last", "1", "-y").code == 0
    assert steps(folder) == [40, 30]


def journal(folder: Path) -> list[Path]:
    """The entries, newest first."""
    return sorted((folder / "journal").iterdir())


def test_repair_makes_entries_again(run: Run, folder: Path) -> None:
    for entry in journal(folder)[:2]:
        entry.write_bytes(entry.read_bytes()[:-9])
    assert "40" not in run("checkpoints", "list", str(folder), "-o", "name").out
    done = run("checkpoints", "repair", str(folder))
    assert (done.code, done.err.splitlines()[-1]) == (0, f"{folder}: 4 checkpoints, 0 damaged")
    assert [f"{folder}: step {step} is listed again" for step in (30, 40)] == [
        line for line in done.err.splitlines() if "again" in line
    ]
    assert steps(folder) == [40, 30, 20, 10]


def test_repair_starts_over_if_nothing_is_intact(run: Run, folder: Path) -> None:
    words = ("checkpoints", "repair", str(folder), "--start-over")
    whole = run(*words, "-y")
    assert (whole.code, "step 40 is intact, and" in whole.err) == (2, True)
    for step in (10, 20, 30, 40):
        damage_step(folder, step)
    with pytest.raises(StorageError, match=r"step 40: .* FIX: .*repair file://.* --start-over"):
        Checkpointer(LocalStorage(folder)).restore()
    assert "FIX: add --yes to confirm" in run(*words).err
    assert steps(folder) == [40, 30, 20, 10]
    done = run(*words, "-y")
    assert (done.code, done.err.endswith("starts at step 0\n")) == (0, True)
    assert Checkpointer(LocalStorage(folder)).restore() is None


def test_starting_over_names_leftovers_that_keep_a_run_from_starting(run: Run, folder: Path) -> None:
    for saved in (folder / "data").iterdir():
        saved.rename(saved.with_name(f"old-{saved.name}"))
    shutil.rmtree(folder / "journal")
    only = run("checkpoints", "repair", str(folder))
    assert (only.code, "old-g000001-n000004" in only.err) == (1, True)
    done = run("checkpoints", "repair", str(folder), "--start-over", "-y")
    assert (done.code, "old-g000001-n000004" in done.err, "starts at step 0" in done.err) == (1, True, False)
    with pytest.raises(StorageError, match="old-g000001-n000001"):
        Checkpointer(LocalStorage(folder)).restore()


@pytest.mark.parametrize("is_damaged", [False, True])
def test_without_a_journal_the_remaining_objects_are_named(run: Run, folder: Path, is_damaged: bool) -> None:
    shutil.rmtree(folder / "journal")
    for document in (folder / "data").rglob("*.json") if is_damaged else ():
        document.write_bytes(b"{}")
    said = ", but there may be a lost one: data/g"
    listed, verified = run("checkpoints", str(folder)), run("checkpoints", "verify", str(folder))
    assert (listed.code, verified.code) == (0, 3)
    assert said in listed.err
    assert said in verified.err
    assert f"checkpoints repair {folder}" in verified.err
    assert run("checkpoints", "repair", str(folder)).code == is_damaged


def test_deletion_is_confirmed_on_a_terminal(run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: True))
    for answer, left in ((False, [40, 30, 20, 10]), (True, [40, 30, 20])):
        monkeypatch.setattr("typer.confirm", lambda text, err, answer=answer: answer)
        assert run("checkpoints", "rm", str(folder), "10").code == 0
        assert steps(folder) == left


@pytest.mark.parametrize(
    ("count", "said"), [(0, "0 B"), (812, "812 B"), (1400, "1.4 kB"), (3_200_000_000, "3.2 GB"), (10**16, "10000.0 TB")]
)
def test_sizes_are_short(count: int, said: str) -> None:
    assert size_text(count) == said


def test_a_meter_shows_on_a_terminal_alone(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with Terminal().transfer("step 4", 100) as on_bytes:
        on_bytes(50)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    with Terminal().transfer("step 4", 100) as on_bytes:
        on_bytes(100)
    assert "step 4" in capsys.readouterr().err


def test_a_checkpoint_whose_parameters_are_not_finite_is_listed_as_such() -> None:
    commit = Commit(3, 1, 3, 3, 0, (ObjectRef("data/x/y", 0, "crc32:00000000"),), 0, not_finite=("model/a", "model/b"))
    (row,) = checkpoints_table([CheckedCommit(3, commit)], 0.0).rows
    assert row[-1] == "whole, but not finite: model/a and 1 more"
    assert checkpoint_data(CheckedCommit(3, commit))["notFinite"] == ["model/a", "model/b"]
    assert "notFinite" not in checkpoint_data(CheckedCommit(3, replace(commit, not_finite=())))


def test_a_deletion_by_url_is_recorded(run: Run, folder: Path) -> None:
    assert run("checkpoints", "rm", str(folder), "10", "-y").code == 0
    record = json.loads(run("history", "-o", "json").out)["changes"][-1]
    assert (record["verb"], record["name"]) == ("delete checkpoints", folder.as_uri())
    assert "step 10" in record["fields"][0]["before"]
