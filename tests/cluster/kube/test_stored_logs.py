"""The output of workers whose node or pod is gone comes from the job's storage: every line, once, in order."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from elasticctl.api.codec import to_rfc3339
from elasticctl.api.errors import NotFoundError
from elasticctl.cluster.base import LogQuery
from elasticctl.cluster.kube import follow_logs, read_logs
from elasticctl.cluster.kube.client import KubeCluster
from elasticctl_store.stored_logs import Incarnation
from tests.support.fakeapi import FakeApi
from tests.support.jobs import shell_job
from tests.support.kube import JOBS, NAMESPACE, Follower, add_pod, end
from tests.support.stored import launched, store
from tests.support.waiting import wait_until

LATENCY_S = 0.002


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow_logs, "CHECK_EVERY_S", 0.05)
    monkeypatch.setattr(follow_logs, "SETTLE_S", 0.2)
    monkeypatch.setattr(read_logs, "MIN_PAUSE_S", 0.02)
    monkeypatch.setattr(follow_logs, "MIN_PAUSE_S", 0.02)


@pytest.fixture
def job(api: FakeApi, cluster: KubeCluster, tmp_path: Path) -> dict[str, Any]:
    """A job of two workers that keeps its logs in a folder, and has lost one before."""
    (tmp_path / "storage").mkdir()
    made = cluster.create_job(shell_job("a", "true", 2, container=launched(url(tmp_path))))
    return api.put(f"{JOBS}/a", {**made, "status": {"phase": "Running", "restarts": {"NodeLost": 1}}})


def url(folder: Path) -> str:
    return (folder / "storage").as_uri()


def life(job: dict[str, Any], pod: dict[str, Any], started_at: float = 1.0) -> Incarnation:
    return Incarnation(job["metadata"]["uid"], pod["metadata"]["name"], started_at, pod["metadata"]["uid"])


def texts(cluster: KubeCluster, **query: Any) -> list[str]:
    return [f"{line.worker[-1]}:{line.text}" for line in cluster.logs("default", "a", LogQuery(**query))]


def test_a_follow_goes_on_in_the_storage_when_the_node_is_gone(
    api: FakeApi, cluster: KubeCluster, job: dict[str, Any], tmp_path: Path
) -> None:
    """The stream to a lost node neither ends nor says anything; what it had not passed on is in the storage."""
    first, other = add_pod(api, job, 0), add_pod(api, job, 1)
    said = [(time.time() + n / 1000, "step" if n % 3 else f"epoch {n}") for n in range(40)]
    follower = Follower(cluster.logs("default", "a", LogQuery(follow=True)))
    for at, text in said[:25]:
        api.say("a-worker-0", text, at=to_rfc3339(at + LATENCY_S))
    api.say("a-worker-1", "untouched")
    wait_until(lambda: len(follower.got) == 26)
    store(url(tmp_path), life(job, first), *said[:38])  # killed, it could not send the last two
    api.logs["a-worker-0"] = type(api.logs["a-worker-0"])()  # the successor's own
    api.remove(f"{NAMESPACE}/pods/a-worker-0")
    second = add_pod(api, job, 0)
    api.say("a-worker-0", "again")
    wait_until(lambda: follower.texts()["a-worker-0"][-1] == "again")
    assert follower.texts() == {
        "a-worker-0": [text for _, text in said[:38]] + ["again"],
        "a-worker-1": ["untouched"],
    }
    for index in range(2):
        api.say(f"a-worker-{index}", "bye", end=True)
        add_pod(api, job, index, "Succeeded")
    end(api, cluster, "a")
    wait_until(follower.ended)
    assert follower.error is None
    assert follower.texts()["a-worker-0"][-2:] == ["again", "bye"]
    assert {first["metadata"]["uid"], other["metadata"]["uid"]} != second["metadata"]["uid"]
    assert texts(cluster, previous=True) == [f"0:{text}" for _, text in said[:38]]


def test_a_follow_begins_with_workers_that_were_gone_before(
    api: FakeApi, cluster: KubeCluster, job: dict[str, Any], tmp_path: Path
) -> None:
    gone, there = add_pod(api, job, 0), add_pod(api, job, 1)
    store(url(tmp_path), life(job, gone), (10.0, "one"), (11.0, "two"))
    store(url(tmp_path), life(job, there), (10.0, "not from here"))
    api.remove(f"{NAMESPACE}/pods/a-worker-0")
    api.say("a-worker-1", "from its pod")
    follower = Follower(cluster.logs("default", "a", LogQuery(follow=True)))
    wait_until(lambda: follower.texts() == {"a-worker-0": ["one", "two"], "a-worker-1": ["from its pod"]})
    end(api, cluster, "a")
    api.say("a-worker-1", end=True)
    add_pod(api, job, 1, "Succeeded")
    wait_until(follower.ended)


def test_a_job_whose_pods_are_all_deleted_can_still_be_read(
    api: FakeApi, cluster: KubeCluster, job: dict[str, Any], tmp_path: Path
) -> None:
    pods = [add_pod(api, job, index) for index in range(2)]
    for number, pod in enumerate(pods):
        store(url(tmp_path), life(job, pod), *((10.0 + 2 * n + number, f"{n}") for n in range(5)))
        api.remove(f"{NAMESPACE}/pods/{pod['metadata']['name']}")
    assert texts(cluster) == [f"{worker}:{n}" for n in range(5) for worker in (0, 1)]
    assert texts(cluster, tail=1) == ["0:4", "1:4"]
    assert texts(cluster, since=17.0, workers=("a-worker-1",)) == ["1:3", "1:4"]
    assert texts(cluster, workers=("a-worker-7",)) == []


def test_all_incarnations_come_in_order_from_cluster_or_storage(
    api: FakeApi, cluster: KubeCluster, job: dict[str, Any], tmp_path: Path
) -> None:
    for number in range(2):
        pod = add_pod(api, job, 0)
        store(url(tmp_path), life(job, pod, float(number)), (10.0 + number, f"life {number}"))
        api.remove(f"{NAMESPACE}/pods/a-worker-0")
    for index in range(2):
        now = add_pod(api, job, index)
        store(url(tmp_path), life(job, now, 5.0), (20.0, "not from here"))
        api.say(f"a-worker-{index}", "now", at="2026-01-02T03:04:05Z", end=True)
    assert texts(cluster, everything=True) == ["0:life 0", "0:life 1", "0:now", "1:now"]
    assert texts(cluster, previous=True) == ["0:life 0", "0:life 1"]
    assert texts(cluster) == ["0:now", "1:now"]
    with pytest.raises(NotFoundError, match="its storage has no copy"):
        texts(cluster, previous=True, workers=("a-worker-1",))


def test_the_storage_replaces_a_node_that_does_not_answer(
    api: FakeApi, cluster: KubeCluster, job: dict[str, Any], tmp_path: Path
) -> None:
    pods = [add_pod(api, job, index) for index in range(2)]
    store(url(tmp_path), life(job, pods[0]), (10.0, "stored"))
    api.say("a-worker-1", "there")
    gone = (500, {"message": "dial tcp 10.0.0.1:10250: i/o timeout"}, {})
    api.refuse = lambda request: gone if request.path.endswith("worker-0/log") else None
    assert texts(cluster) == ["0:stored", "1:there"]


def test_while_all_workers_are_present_the_storage_is_not_read(
    api: FakeApi, cluster: KubeCluster, job: dict[str, Any], tmp_path: Path
) -> None:
    """It would cost seconds, and a needless error for users who may not read it."""
    (tmp_path / "storage").rmdir()
    for index in range(2):
        add_pod(api, job, index)
        api.say(f"a-worker-{index}", "hello", at="2026-01-02T03:04:05Z")
    cluster._say = pytest.fail  # type: ignore[method-assign,assignment]
    assert texts(cluster) == ["0:hello", "1:hello"]


def test_the_storage_of_a_new_job_is_not_read(api: FakeApi, cluster: KubeCluster, tmp_path: Path) -> None:
    job = cluster.create_job(shell_job("a", "true", 2, container=launched(url(tmp_path))))
    cluster._say = pytest.fail  # type: ignore[method-assign,assignment]
    follower = Follower(cluster.logs("default", "a", LogQuery(follow=True)))
    add_pod(api, job, 0)
    api.say("a-worker-0", "hello", end=True)
    wait_until(lambda: follower.texts() == {"a-worker-0": ["hello"]})
    add_pod(api, job, 0, "Succeeded")
    end(api, cluster, "a")
    wait_until(follower.ended)
    assert follower.error is None


def test_without_the_storage_the_clusters_own_lines_are_shown(
    api: FakeApi, cluster: KubeCluster, job: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "storage").rmdir()
    said: list[str] = []
    cluster._say = said.append  # type: ignore[method-assign,assignment]
    add_pod(api, job, 1)
    api.say("a-worker-1", "hello")
    assert texts(cluster) == ["1:hello"]
    assert len(said) == 1
    assert said[0].startswith("cannot read the stored output of workers that are gone: ")
