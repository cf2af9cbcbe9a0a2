"""Every line once, from every worker, with few threads, whatever a log holds and wherever its stream breaks."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elasticctl.api.errors import ClusterError, ForbiddenError
from elasticctl.api.spec import ElasticJob
from elasticctl.cluster.base import LogQuery
from elasticctl.cluster.kube import follow_logs, read_logs
from elasticctl.cluster.kube.client import KubeCluster
from elasticctl.cluster.kube.follow_logs import LogFollower
from elasticctl.cluster.kube.read_logs import LogCursor, split_stamp
from elasticctl.cluster.stored_logs import StoredLogs
from elasticctl.kubeapi.connection import Connection
from elasticctl.kubeapi.watch import Resource
from tests.support.fakeapi import FakeApi
from tests.support.jobs import shell_job
from tests.support.kube import JOBS, NAMESPACE, Follower, add_pod, end
from tests.support.waiting import wait_until

EARLY = "2026-01-02T03:04:05.1Z"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow_logs, "CHECK_EVERY_S", 0.05)
    monkeypatch.setattr(read_logs, "MIN_PAUSE_S", 0.02)
    monkeypatch.setattr(follow_logs, "MIN_PAUSE_S", 0.02)


def test_logs_are_merged_by_time(api: FakeApi, cluster: KubeCluster) -> None:
    job = cluster.create_job(shell_job("a", "true", 3))
    for index in range(2):
        pod = add_pod(api, job, index)["metadata"]["name"]
        for second in range(3):
            api.say(pod, f"{second}", at=f"2026-01-02T03:04:0{second}.{index}Z")
    add_pod(api, job, 2, "Pending")
    found = [(line.worker[-1], line.text) for line in cluster.logs("default", "a", LogQuery())]
    assert found == [(worker, second) for second in "012" for worker in "01"]
    tail = [line.text for line in cluster.logs("default", "a", LogQuery(tail=1, workers=("a-worker-1",)))]
    assert tail == ["2"]
    since = [line.text for line in cluster.logs("default", "a", LogQuery(since=1_767_323_041.05))]
    assert since == ["1", "2", "2"]


def test_a_worker_that_cannot_be_read_does_not_hide_the_others(api: FakeApi, cluster: KubeCluster) -> None:
    job = cluster.create_job(shell_job("a", "true", 2))
    for index in range(2):
        api.say(add_pod(api, job, index)["metadata"]["name"], "hello")
    gone = (500, {"message": "dial tcp 10.0.0.1:10250: i/o timeout"}, {})
    api.refuse = lambda request: gone if request.path.endswith("worker-0/log") else None
    lines = cluster.logs("default", "a", LogQuery())
    assert next(lines).worker == "a-worker-1"
    with pytest.raises(ClusterError, match=r"not all logs can be read: a-worker-0: .*i/o timeout"):
        next(lines)


def test_a_follow_sees_every_worker_and_ends_with_the_job(api: FakeApi, cluster: KubeCluster) -> None:
    job = cluster.create_job(shell_job("a", "true", 2))
    follower = Follower(cluster.logs("default", "a", LogQuery(follow=True)))
    add_pod(api, job, 0, "Pending")
    add_pod(api, job, 0)
    api.say("a-worker-0", "first", "second")
    wait_until(lambda: follower.texts() == {"a-worker-0": ["first", "second"]})
    # Made again under the same name, and one more.
    api.say("a-worker-0", "last words", end=True)
    api.remove(f"{NAMESPACE}/pods/a-worker-0")
    wait_until(lambda: follower.texts()["a-worker-0"][-1] == "last words")
    wait_until(lambda: api.streams == 0)
    del api.logs["a-worker-0"]
    for index in range(2):
        add_pod(api, job, index)
        api.say(f"a-worker-{index}", "again")
    wait_until(lambda: follower.texts().get("a-worker-1") == ["again"])
    for index in range(2):
        api.say(f"a-worker-{index}", "bye", end=True)
        add_pod(api, job, index, "Succeeded")
    end(api, cluster, "a")
    wait_until(follower.ended)
    assert follower.error is None
    assert follower.texts() == {
        "a-worker-0": ["first", "second", "last words", "again", "bye"],
        "a-worker-1": ["again", "bye"],
    }


def test_broken_streams_are_resumed_without_gaps_or_duplicates(api: FakeApi, cluster: KubeCluster) -> None:
    job = cluster.create_job(shell_job("a", "true"))
    add_pod(api, job, 0)
    wanted = [f"line {number}" for number in range(40)]
    api.logs["a-worker-0"].cut_after = [7, 9, 0, 21]
    for text in wanted[:30]:
        api.say("a-worker-0", text, at=EARLY)
    follower = Follower(cluster.logs("default", "a", LogQuery(follow=True)))
    wait_until(lambda: len(follower.got) == 30)
    api.say("a-worker-0", *wanted[30:])
    api.say("a-worker-0", end=True)
    add_pod(api, job, 0, "Succeeded")
    end(api, cluster, "a")
    wait_until(follower.ended)
    assert [line.text for line in follower.got] == wanted
    assert api.logs["a-worker-0"].cut_after == []


def test_many_workers_take_turns(api: FakeApi, cluster: KubeCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow_logs, "MAX_STREAMS", 4)
    job = cluster.create_job(shell_job("a", "true", 12))
    names = [f"a-worker-{index}" for index in range(12)]
    before, threads = set(threading.enumerate()), list[int]()
    follower = Follower(cluster.logs("default", "a", LogQuery(follow=True)))
    for index, name in enumerate(names):
        api.say(name, "one")
        add_pod(api, job, index)

    def said_one() -> bool:
        threads.append(len([t for t in set(threading.enumerate()) - before if t.name.startswith("logs-")]))
        return follower.texts() == {name: ["one"] for name in names}

    wait_until(said_one)
    for index, name in enumerate(names):
        api.say(name, "two", end=True)
        add_pod(api, job, index, "Succeeded")
    end(api, cluster, "a")
    wait_until(follower.ended)
    assert follower.texts() == {name: ["one", "two"] for name in names}
    assert max(threads) == 4


def test_a_slow_reader_delays_the_workers_and_does_not_fill_memory(
    api: FakeApi, cluster: KubeCluster, connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follow_logs, "BACKLOG_LINES", 10)
    job = cluster.create_job(shell_job("a", "true"))
    api.say("a-worker-0", *map(str, range(1000)), end=True)
    add_pod(api, job, 0, "Succeeded")
    end(api, cluster, "a")
    pods = Resource(f"{NAMESPACE}/pods")
    parsed = ElasticJob.from_manifest(job)
    stored = StoredLogs(parsed, pytest.fail)
    following = LogFollower(connection, parsed, f"{JOBS}/a", pods, LogQuery(follow=True), stored)
    lines = following.lines()
    assert next(lines).text == "0"
    wait_until(following._lines.full)
    assert [line.text for line in lines] == list(map(str, range(1, 1000)))


def test_an_abandoned_follow_leaves_nothing_open(api: FakeApi, cluster: KubeCluster) -> None:
    job = cluster.create_job(shell_job("a", "true"))
    add_pod(api, job, 0)
    api.say("a-worker-0", "hello")
    before = set(threading.enumerate())
    lines = cluster.logs("default", "a", LogQuery(follow=True))
    assert next(lines).text == "hello"
    lines.close()  # type: ignore[attr-defined]
    wait_until(lambda: not [t for t in set(threading.enumerate()) - before if t.name.startswith(("logs", "watch"))])


def test_without_the_right_to_read_logs_there_is_an_error(api: FakeApi, cluster: KubeCluster) -> None:
    job = cluster.create_job(shell_job("a", "true"))
    add_pod(api, job, 0)
    said = 'pods "a-worker-0" is forbidden: User "jo" cannot get resource "pods/log"'
    api.refuse = lambda request: (403, {"message": said}, {}) if request.path.endswith("/log") else None
    for follow in (True, False):
        with pytest.raises(ForbiddenError, match="pods/log"):
            list(cluster.logs("default", "a", LogQuery(follow=follow)))


# Stamps grow, but two writers may be a few milliseconds out of order, over the edge of a second too.
STEPS = st.lists(
    st.tuples(st.sampled_from([0, 1, 400, 200_000, 700_000, 3_000_000]), st.integers(-4000, 4000)), max_size=30
)


@settings(max_examples=50)
@given(STEPS, st.lists(st.integers(0, 12), max_size=8))
def test_each_line_comes_once_wherever_the_stream_breaks(steps: list[tuple[int, int]], cuts: list[int]) -> None:
    at, log = 1_700_000_000_000_000, []
    for number, (step, jitter) in enumerate(steps):
        at += step
        log.append((at + jitter, number))
    cursor = LogCursor()
    got: list[int] = []
    for cut in [*cuts, len(log) + 1]:
        since = cursor.resume()
        wanted = [line for line in log if since is None or line[0] >= since * 1e6]
        got += [number for stamp, number in wanted[:cut] if cursor.is_new(stamp)]
    assert got == list(range(len(log)))


def test_a_rotated_log_loses_nothing_that_is_still_there() -> None:
    cursor = LogCursor()
    second = 1_700_000_000_000_000
    assert all(cursor.is_new(second + n) for n in range(10))
    assert cursor.resume() == 1_699_999_999.0
    # The ten lines have been rotated away meanwhile; what comes is new, however few lines were passed over.
    assert [cursor.is_new(second + n) for n in (20, 21)] == [True, True]


def test_stamps_in_any_zone_and_lines_without_one() -> None:
    assert split_stamp(b"2026-01-02T03:04:05.123456789Z hello there\n") == (1_767_323_045_123_456, "hello there")
    assert split_stamp(b"2026-01-02T05:04:05.5+02:00 \xff") == (1_767_323_045_500_000, "\ufffd")
    assert split_stamp(b"2026-01-02T03:04:05Z \n") == (1_767_323_045_000_000, "")
    for garbage in (b"", b"unable to retrieve container logs for x\n", b"2026-01-02T03:04:05 no zone\n"):
        assert split_stamp(garbage) is None
