"""What `prune --state` deletes of workspaces: what no job names, and nothing that is young or new."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from elasticctl.cluster.local.client import LocalCluster
from elasticctl.operations.prune import KEEP_YOUNGER_S, delete_unused_workspaces, workspace_digests
from elasticctl_store import storage as storages
from elasticctl_store.workspace import transfer
from elasticctl_store.workspace.packing import File, Listing
from elasticctl_store.workspace.transfer import unpack
from tests.support import job_samples
from tests.support.cli import Run

NOW = 2_000_000_000.0


def send(folder: Path, origin: str, *contents: bytes) -> str:
    """A workspace of files of these contents; its digest."""
    by_digest = {hashlib.sha256(data).hexdigest(): data for data in contents}
    listing = Listing.of([File(f"f{number}", len(data), key) for number, (key, data) in enumerate(by_digest.items())])

    def read(file: File) -> Iterator[bytes]:
        yield by_digest[file.sha256]

    transfer.send(storages.open(str(folder)), listing, origin * 32, read, lambda count: None)
    return listing.digest


def age(folder: Path, seconds: float) -> None:
    for path in folder.rglob("*"):
        os.utime(path, (NOW - seconds, NOW - seconds))


def count(folder: Path, kind: str) -> int:
    return sum(1 for _ in (folder / kind).iterdir())


def test_what_no_job_names_goes_with_its_contents(tmp_path: Path) -> None:
    kept, lost, head = (send(tmp_path, "1", data, b"shared") for data in (b"kept", b"lost", b"head"))
    age(tmp_path, KEEP_YOUNGER_S + 1)
    assert delete_unused_workspaces(tmp_path, {kept}, NOW) == (1, len(b"lost"))
    assert not (tmp_path / "listings" / lost).exists()
    for number, digest in enumerate((kept, head)):
        copy = tmp_path / f"copy{number}"
        copy.mkdir()
        unpack(storages.open(str(tmp_path)), digest, copy)
    assert delete_unused_workspaces(tmp_path, {kept}, NOW) == (0, 0)


def test_what_is_young_stays(tmp_path: Path) -> None:
    send(tmp_path, "1", b"a")
    send(tmp_path, "1", b"b")
    age(tmp_path, KEEP_YOUNGER_S - 1)
    assert delete_unused_workspaces(tmp_path, (), NOW) == (0, 0)
    assert (count(tmp_path, "listings"), count(tmp_path, "packs")) == (2, 2)


def test_a_workspace_that_is_sent_at_the_same_moment_stays_whole(tmp_path: Path) -> None:
    """It points into a pack of the newest one of its folder, and its own listing is young."""
    send(tmp_path, "1", b"old", b"shared")
    age(tmp_path, KEEP_YOUNGER_S + 1)
    young = send(tmp_path, "1", b"new", b"shared")
    for name in (f"listings/{young}", "heads/" + "1" * 32):
        os.utime(tmp_path / name, (NOW, NOW))
    assert delete_unused_workspaces(tmp_path, (), NOW)[0] == 1
    (tmp_path / "copy").mkdir()
    unpack(storages.open(str(tmp_path)), young, tmp_path / "copy")


def test_a_damaged_listing_holds_nobody_up(tmp_path: Path) -> None:
    kept, damaged = send(tmp_path, "1", b"kept"), send(tmp_path, "2", b"damaged")
    (tmp_path / "listings" / damaged).write_text("{")
    age(tmp_path, KEEP_YOUNGER_S + 1)
    assert delete_unused_workspaces(tmp_path, {kept}, NOW) == (0, len(b"damaged"))
    assert delete_unused_workspaces(tmp_path / "nothing", (), NOW) == (0, 0)


def test_jobs_name_them_by_their_variable() -> None:
    manifest = job_samples.job()
    (container,) = manifest["spec"]["replicaSpecs"]["Worker"]["template"]["spec"]["containers"]
    container["env"].append({"name": "ELASTICCTL_WORKSPACE", "value": "s3://b/p?endpoint=http://x#abc"})
    assert workspace_digests([manifest, job_samples.job("other")]) == {"abc"}


@pytest.mark.usefixtures("idle_jobs")
def test_prune_keeps_those_of_jobs_that_stay(
    run: Run, local_cluster: LocalCluster, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    def end(*words: str) -> None:
        made = run(*words)
        assert made.code == 0, made.err
        assert run("cancel", made.out.strip()).code == 0
        assert run("wait", made.out.strip()).code == 4

    workspaces = home / "local/workspaces"
    for number in range(3):
        Path("train.py").write_text(f"print({number})\n")
        end("submit", "train.py", "--name", f"job{number}", "-d")
    for path in workspaces.rglob("*"):
        os.utime(path, (0, 0))
    assert run("delete", "job0", "-y").code == 0
    pruned = run("prune", "--older-than", "0s", "--phase", "Failed", "--state", "-y")
    assert (pruned.code, count(workspaces, "listings")) == (0, 3)  # no job was deleted, so nothing was swept
    end("rerun", "job1", "-d", "--set", "spec.suspend=true")
    pruned = run("prune", "--older-than", "0s", "--state", "-y")
    assert "2 workspaces no longer used deleted too, 18 B\n" in pruned.err
    assert count(workspaces, "listings") == 1  # the newest of its folder
