"""The store: Kubernetes' rules for objects, and nothing half-made when a write fails."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from elasticctl.api.errors import ClusterError, ConflictError, NotFoundError, StorageFullError
from elasticctl.cluster.base import Manifest
from elasticctl_controller.local.database import EVENTS_PER_JOB
from elasticctl_controller.local.store import LocalStore, StoreChange
from tests.support.jobs import shell_job


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LocalStore]:
    store = LocalStore(tmp_path / "state.db", clock=lambda: 1_000_000.0)
    yield store
    store.close()


def pod(name: str, job: str = "job") -> Manifest:
    return {
        "metadata": {"name": name, "labels": {"job-name": job}},
        "spec": {"terminationGracePeriodSeconds": 7, "containers": []},
    }


def test_what_is_written_is_there_after_a_restart(tmp_path: Path) -> None:
    first = LocalStore(tmp_path / "state.db")
    job = first.create_job(shell_job("kept", "true"))
    first.close()
    second = LocalStore(tmp_path / "state.db")
    assert second.get_job("default", "kept") == job
    later = second.create_job(shell_job("later", "true"))
    assert int(later["metadata"]["resourceVersion"]) > int(job["metadata"]["resourceVersion"])
    second.close()


def test_the_status_is_written_only_over_the_version_it_was_made_from(store: LocalStore) -> None:
    job = store.create_job(shell_job("job", "true"))
    version = job["metadata"]["resourceVersion"]
    written = store.write_job_status("default", "job", {"phase": "Running"}, version)
    assert written["metadata"]["generation"] == 1
    with pytest.raises(ConflictError):
        store.write_job_status("default", "job", {"phase": "Failed"}, version)
    assert store.get_job("default", "job")["status"] == {"phase": "Running"}


def test_a_patch_leaves_the_status_and_the_identity_alone(store: LocalStore) -> None:
    job = store.create_job(shell_job("job", "true"))
    patch = {"status": {"phase": "Succeeded"}, "metadata": {"uid": "mine", "name": "other", "annotations": {"a": "b"}}}
    result = store.patch_job("default", "job", patch, check=lambda *_: None)
    assert "status" not in result
    assert (result["metadata"]["uid"], result["metadata"]["name"]) == (job["metadata"]["uid"], "job")
    assert result["metadata"]["annotations"] == {"a": "b"}
    assert result["metadata"]["generation"] == 1


def test_a_patch_that_changes_nothing_is_not_a_change(store: LocalStore) -> None:
    job = store.create_job(shell_job("job", "true"))
    heard: list[StoreChange] = []
    store.subscribe(heard.append)
    assert store.patch_job("default", "job", {"spec": job["spec"]}, check=lambda *_: None) == job
    assert heard == []


def test_a_refused_patch_changes_nothing(store: LocalStore) -> None:
    job = store.create_job(shell_job("job", "true"))

    def refuse(_: Manifest, __: Manifest) -> None:
        raise ConflictError("no")

    with pytest.raises(ConflictError):
        store.patch_job("default", "job", {"spec": {"suspend": True}}, check=refuse)
    assert store.get_job("default", "job") == job


def test_deleting_a_job_asks_for_the_deletion_of_its_pods_alone(store: LocalStore) -> None:
    mine, other = (store.create_job(shell_job(name, "true")) for name in ("job", "other"))
    store.create_pod(pod("job-worker-0"), mine["metadata"]["uid"])
    store.create_pod(pod("other-worker-0", "other"), other["metadata"]["uid"])
    store.record_event(mine["metadata"]["uid"], mine, "Normal", "Said", "something")
    store.delete_job("default", "job")
    deleting = {p["metadata"]["name"]: p["metadata"].get("deletionGracePeriodSeconds") for p in store.list_pods()}
    assert deleting == {"job-worker-0": 7, "other-worker-0": None}
    assert store.list_events(mine["metadata"]["uid"]) == []
    with pytest.raises(NotFoundError):
        store.create_pod(pod("job-worker-1"), mine["metadata"]["uid"])


def test_files_are_given_up_once_job_and_pod_are_gone(store: LocalStore) -> None:
    job = store.create_job(shell_job("job", "true"))
    uid = store.create_pod(pod("job-worker-0"), job["metadata"]["uid"])["metadata"]["uid"]
    store.remove_pod(uid)
    assert store.list_abandoned() == []
    assert [(i.worker, i.pod) for i in store.incarnations(job["metadata"]["uid"])] == [("job-worker-0", None)]
    store.delete_job("default", "job")
    assert store.list_abandoned() == [uid]
    store.delete_incarnation(uid)
    assert store.list_abandoned() == []


def test_a_deletion_can_only_come_nearer(store: LocalStore) -> None:
    job = store.create_job(shell_job("job", "true"))
    uid = store.create_pod(pod("job-worker-0"), job["metadata"]["uid"])["metadata"]["uid"]
    graces = []
    for grace_s in (None, 60.0, 0.0, 5.0):
        store.delete_pod(uid, grace_s=grace_s)
        graces.append(store.list_pods()[0]["metadata"]["deletionGracePeriodSeconds"])
    assert graces == [7, 7, 0, 0]


def test_a_job_made_again_is_not_deleted_for_the_old_one(store: LocalStore) -> None:
    old = store.create_job(shell_job("job", "true"))["metadata"]["uid"]
    store.delete_job("default", "job")
    store.create_job(shell_job("job", "true"))
    with pytest.raises(NotFoundError):
        store.delete_job("default", "job", uid=old)
    assert store.get_job("default", "job")


def test_events_are_counted_up_and_bounded(store: LocalStore) -> None:
    job = store.create_job(shell_job("job", "true"))
    uid = job["metadata"]["uid"]
    for number in range(EVENTS_PER_JOB + 10):
        store.record_event(uid, job, "Normal", "Said", f"thing {number}")
    for _ in range(3):
        store.record_event(uid, job, "Warning", "Again", "the same")
    events = store.list_events(uid)
    assert len(events) == EVENTS_PER_JOB
    assert (events[-1]["message"], events[-1]["count"]) == ("the same", 3)
    assert events[0]["message"] == "thing 11"


def test_listeners_are_called_once_the_change_is_on_disk(store: LocalStore) -> None:
    heard: list[tuple[StoreChange, bool]] = []

    def listen(change: StoreChange) -> None:
        heard.append((change, bool(store.list_jobs())))

    store.subscribe(listen)
    store.create_job(shell_job("job", "true"))
    assert heard == [(StoreChange("ElasticJob", "default", "job"), True)]


def test_threads_do_not_lose_each_others_changes(store: LocalStore) -> None:
    job = store.create_job(shell_job("job", "true"))
    uid = store.create_pod(pod("job-worker-0"), job["metadata"]["uid"])["metadata"]["uid"]

    def count_up(p: Manifest) -> Manifest:
        return {**p, "status": {"n": p["status"].get("n", 0) + 1}}

    threads = [threading.Thread(target=lambda: [store.update_pod(uid, count_up) for _ in range(25)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert store.list_pods()[0]["status"] == {"n": 100}


def test_a_full_disk_changes_nothing_and_is_reported(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store.create_job(shell_job("before", "true"))
    with store._database.reading() as db:  # SQLite's own "database or disk is full"
        pages = db.execute("PRAGMA page_count").fetchone()[0]
        db.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(StorageFullError, match=r"disk is full\. Nothing was changed"):
        store.create_job(shell_job("big", "x" * 1_000_000))
    assert [job["metadata"]["name"] for job in store.list_jobs()] == ["before"]
    with store._database.reading() as db:
        db.execute("PRAGMA max_page_count = 100000")
    store.create_job(shell_job("after", "true"))


@pytest.mark.parametrize("damage", [b"this is not a database at all" * 100, b"SQLite format 3\0" + b"\xff" * 8000])
def test_a_damaged_file_is_kept_and_named(tmp_path: Path, damage: bytes) -> None:
    path = tmp_path / "state.db"
    path.write_bytes(damage)
    with pytest.raises(ClusterError, match=r"state\.db is damaged .* move it away"):
        LocalStore(path)
    assert path.read_bytes() == damage


def test_a_file_of_a_newer_format_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    db = sqlite3.connect(path)
    db.execute("PRAGMA user_version = 99")
    db.close()
    with pytest.raises(ClusterError, match="newer elasticctl"):
        LocalStore(path)
