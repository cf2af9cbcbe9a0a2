"""The service over HTTP: what it refuses, what it answers, how fast word spreads."""

from __future__ import annotations

import http.client
import json
import socket
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from elasticctl.api.codec import Timestamp
from elasticctl.api.status import Activity, CheckpointStatus, GroupGeneration, JobStatus, TokenStatus
from elasticctl_controller.rendezvous import groups
from elasticctl_controller.rendezvous.requests import BURST, RATE_PER_S, Caller, Limiter, Refused
from elasticctl_controller.rendezvous.service import GroupView, steady_clock
from elasticctl_launcher.rendezvous import ServiceAway, ServiceClient, ServiceRefused
from tests.support.any_json import JSON
from tests.support.launcher_lab import JOB_UID, KEY, TOKEN, Lab
from tests.support.waiting import wait_until


class _Raw(http.client.HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("localhost")
        self._socket_path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(str(self._socket_path))


class Client(ServiceClient):
    """The launcher's, without its timeouts."""

    def call(self, verb: str, body: Mapping[str, Any], timeout_s: float = 10.0) -> dict[str, Any]:
        return super().call(verb, body, 600.0)


@pytest.fixture
def client(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> Iterator[ServiceClient]:
    """A client of a service that ends no poll by itself: all answers are decisions."""
    monkeypatch.setattr(groups, "POLL_S", 600.0)
    lab.add("a-0", "a-1")
    client = Client(f"unix://{lab.folder}/r.sock", "default", "job", str(lab.folder / "token"))
    yield client
    client.close()


def agent(name: str, generation: int = 0) -> dict[str, Any]:
    return {
        "uid": f"uid-{name}", "name": name, "host": "127.0.0.1", "port": 29500, "slots": 1, "generation": generation,
    }  # fmt: skip


def form(client: ServiceClient, *names: str, generation: int = 0) -> dict[str, Any]:
    with ThreadPoolExecutor(len(names)) as pool:
        worlds = list(pool.map(lambda name: client.call("join", agent(name, generation)), names))
    assert all(world == worlds[0] for world in worlds)
    return worlds[0]


def post(lab: Lab, path: str, body: bytes, token: str = TOKEN) -> tuple[int, str]:
    connection = _Raw(lab.site.path)
    try:
        connection.request("POST", path, body, {"Authorization": f"Bearer {token}"})
        response = connection.getresponse()
        return response.status, response.read().decode()
    finally:
        connection.close()


def activity(lab: Lab) -> Activity:
    found = lab.site.service.view(KEY, JOB_UID).activity
    assert found is not None
    return found


def test_a_restarted_service_reports_immediately_that_it_knows_the_group(lab: Lab, client: ServiceClient) -> None:
    """A script that reports no steps gives no other reason to look at the job again."""
    world = form(client, "a-0", "a-1")
    lab.restart_service(JobStatus(generation=1))
    body = {"uid": "uid-a-0", "generation": 1, "members": world["members"], "doing": "running"}
    with ThreadPoolExecutor(1) as pool:
        watching = pool.submit(client.call, "watch", body)
        wait_until(lambda: lab.site.changed == [KEY])
        lab.site.service.drop(KEY)
        with pytest.raises(ServiceRefused):
            watching.result()


def test_the_former_token_is_good_for_a_while_and_then_waits_for_the_next(lab: Lab, client: ServiceClient) -> None:
    """With either a worker continues; with one that has expired it is asked to retry, and then reads a new one."""
    lab.site.service.authorization.token_for = lambda uid, number: f"{uid}-{number}"

    def answers(former_until: float | None, shown: int) -> int:
        until = None if former_until is None else Timestamp(former_until)
        lab.tell(JobStatus(token=TokenStatus(5, Timestamp(0), until)))
        return post(lab, "/v1/jobs/default/job/leave", b"?", token=f"{JOB_UID}-{shown}")[0]

    now = time.time()
    assert [answers(None, shown) for shown in (5, 4)] == [400, 400], "the next is not delivered yet"
    assert [answers(now + 60, shown) for shown in (5, 4)] == [400, 400]
    assert [answers(now - 1, shown) for shown in (5, 4, 1, 0, 6)] == [400, 503, 503, 401, 401]


def test_a_launcher_uses_the_next_token_once_it_is_in_its_file(lab: Lab, client: ServiceClient) -> None:
    form(client, "a-0", "a-1")
    lab.site.service.authorization.token_for = lambda uid, number: f"{uid}-{number}"
    lab.tell(JobStatus(token=TokenStatus(2, Timestamp(0), Timestamp(0))))
    (lab.folder / "token").write_text(f"{JOB_UID}-1")

    def beat() -> None:
        while True:
            with suppress(ServiceAway):
                client.call("heartbeat", {"uid": "uid-a-0", "generation": 1})
                return
            time.sleep(0.05)

    with ThreadPoolExecutor(1) as pool:
        beating = pool.submit(beat)
        time.sleep(0.3)
        assert not beating.done()
        (lab.folder / "next").write_text(f"{JOB_UID}-2")
        (lab.folder / "next").replace(lab.folder / "token")  # as a kubelet does: at no time is there none
        beating.result()


def test_a_worker_that_dies_in_the_middle_of_a_request_is_no_error(
    lab: Lab, client: ServiceClient, caplog: pytest.LogCaptureFixture
) -> None:
    head = f"POST /v1/jobs/default/job/leave HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n"
    for _ in range(3):
        with socket.socket(socket.AF_UNIX) as dying:
            dying.connect(str(lab.site.path))
            dying.sendall(f"{head}Content-Length: 100\r\n\r\n{{".encode())
        assert post(lab, "/v1/jobs/default/job/leave", b"?")[0] == 400
    lab.site.stop()
    assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == []


def test_another_jobs_name_is_refused(lab: Lab, client: ServiceClient) -> None:
    assert post(lab, "/v1/jobs/default/other/leave", b"{}")[0] == 410


@pytest.mark.parametrize(
    ("verb", "body", "status"),
    [
        ("dance", b"{}", 404),
        ("join", b"", 400),
        ("join", b"[]", 400),
        ("join", b"{", 400),
        ("join", b'"' + b"x" * 100 + b'"', 400),
        ("join", b"[" * 100_000, 400),
        ("join", b"x" * (3 << 20), 413),
        ("join", json.dumps({**agent("a-0"), "port": 0}).encode(), 400),
        ("join", json.dumps({**agent("a-0"), "slots": True}).encode(), 400),
        ("join", json.dumps({**agent("a-0"), "name": "x" * 1000}).encode(), 400),
        ("join", json.dumps({**agent("a-0"), "generation": -1}).encode(), 400),
        ("join", json.dumps(agent("unknown")).encode(), 409),
        ("watch", json.dumps({"uid": "uid-a-0", "generation": 1, "members": "all"}).encode(), 400),
        ("watch", json.dumps({"uid": "uid-a-0", "generation": 1, "members": []}).encode(), 400),
        ("report", json.dumps({"messages": [{}] * 1000}).encode(), 400),
    ],
)
def test_garbage_is_refused_and_changes_nothing(
    lab: Lab, client: ServiceClient, verb: str, body: bytes, status: int
) -> None:
    assert post(lab, f"/v1/jobs/default/job/{verb}", body)[0] == status
    assert not lab.site.service.view(KEY, JOB_UID).generations


def test_garbage_reports_are_skipped(lab: Lab, client: ServiceClient) -> None:
    form(client, "a-0", "a-1")
    good = {"kind": "progress", "generation": 1, "step": 3, "metrics": {"loss": 0.5, "bad": float("nan"), "text": "x"}}
    bad: list[Any] = [
        None,
        7,
        {"kind": "progress", "generation": 1, "step": "x"},
        {"kind": "?", "generation": 1, "step": 1},
        {"kind": "progress", "generation": 1, "step": 3, "metrics": {"loss": 10**400}},
        {"kind": "progress", "generation": 1, "step": 3, "samples_per_s": 10**400},
    ]
    client.call("report", {"messages": [*bad, good]})
    progress = lab.site.service.view(KEY, JOB_UID).progress
    assert progress is not None
    assert (progress.step, progress.metrics) == (3, {"loss": 0.5})


FIELDS = st.dictionaries(
    st.sampled_from(["uid", "name", "host", "port", "slots", "generation", "members", "messages", "reason", "kind"]),
    JSON,
)


@given(verb=st.sampled_from(["join", "watch", "leave", "fail", "report", "finish"]), body=FIELDS | JSON)
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_body_makes_the_service_fail(lab: Lab, verb: str, body: Any) -> None:
    lab.add("a-0", "a-1")
    status, text = post(lab, f"/v1/jobs/default/job/{verb}", json.dumps(body).encode())
    assert status in (200, 400, 409), text


def test_a_loss_is_reported_to_all_members_immediately(lab: Lab, client: ServiceClient) -> None:
    world = form(client, "a-0", "a-1")
    body = {"uid": "uid-a-0", "generation": 1, "members": world["members"]}
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(client.call, "watch", body)
        with pytest.raises(TimeoutError):
            answer.result(0.3)
        lab.site.service.report_loss(KEY, "uid-a-1")
        assert answer.result() == {"state": "stale", "reason": "lost a-1"}
    with pytest.raises(ServiceRefused, match="not one of the live workers"):
        client.call("join", agent("a-1", 1))


def test_an_agent_of_an_older_generation_is_notified(lab: Lab, client: ServiceClient) -> None:
    world = form(client, "a-0", "a-1")
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda name: client.call("join", agent(name, 1)), ["a-0", "a-1"]))
    body = {"uid": "uid-a-0", "generation": 1, "members": world["members"]}
    assert client.call("watch", body)["state"] == "stale"
    assert client.call("fail", {"uid": "uid-a-0", "generation": 1, "of_peers": False}) == {"verdict": "rejoin"}
    assert lab.site.service.view(KEY, JOB_UID).generations[-1].generation == 2


def test_a_job_that_the_controller_has_yet_to_look_at_is_asked_to_come_again(lab: Lab, client: ServiceClient) -> None:
    path, running = "/v1/jobs/default/other/leave", {"metadata": {"name": "other", "uid": "u"}, "spec": {}}
    lab.site.jobs["default/other"] = running
    assert post(lab, path, b"{}")[0] == 503
    assert post(lab, path, b"{}", token="wrong")[0] == 401
    lab.site.jobs["default/other"] = running | {"status": {"phase": "Succeeded"}}
    assert post(lab, path, b"{}")[0] == 410


def test_a_job_that_asks_without_end_is_slowed_down(lab: Lab, client: ServiceClient) -> None:
    limiter, now_s, caller = Limiter(), 100.0, Caller(KEY, JOB_UID)
    for _ in range(int(BURST)):
        limiter.check(caller, now_s)
    with pytest.raises(Refused, match="too many requests"):
        limiter.check(caller, now_s)
    limiter.check(Caller("default/other", "another uid"), now_s)
    limiter.check(Caller(KEY, "of the job that has its name now"), now_s)
    limiter.check(caller, now_s + 2 / RATE_PER_S)
    lab.site.service._limiter = limiter
    limiter._buckets[JOB_UID] = (0.0, time.monotonic() + 3600)
    with pytest.raises(ServiceAway, match="HTTP 429"):
        client.call("leave", {"uid": "uid-a-0", "reason": "x"})


def replace_job(lab: Lab, uid: str = "another uid") -> None:
    """Another job takes the name; the old one's workers have not stopped yet."""
    lab.site.service.set_group(KEY, status=JobStatus(), job_uid=uid, alive={}, minimum=1)


def test_a_late_report_of_the_old_jobs_agent_is_not_counted_for_the_new_job(lab: Lab, client: ServiceClient) -> None:
    """It was let in as one of the old job, and its body came only when the name was another's."""
    form(client, "a-0", "a-1")
    report = b'{"messages": [{"kind": "resumed", "generation": 1, "step": 5}]}'
    connection = _Raw(lab.site.path)
    connection.putrequest("POST", "/v1/jobs/default/job/report")
    connection.putheader("Authorization", f"Bearer {TOKEN}")
    connection.putheader("Content-Length", str(len(report)))
    connection.endheaders()
    connection.send(report[:10])
    wait_until(lambda: "report" in lab.site.verbs)
    replace_job(lab)
    connection.send(report[10:])
    assert connection.getresponse().status == 410
    connection.close()


@pytest.mark.parametrize("verb", ["join", "watch", "finish"])
def test_agents_of_the_old_job_are_refused_immediately(lab: Lab, client: ServiceClient, verb: str) -> None:
    if verb != "join":
        form(client, "a-0", "a-1")
    with ThreadPoolExecutor(1) as pool:
        poll = pool.submit(client.call, verb, agent("a-0", 0 if verb == "join" else 1))
        wait_until(lambda: verb in lab.site.verbs)
        time.sleep(0.1)
        replace_job(lab)
        with pytest.raises(ServiceRefused, match="no running job"):
            poll.result()


def test_what_is_known_of_a_job_is_not_shown_for_another_job_of_its_name(lab: Lab, client: ServiceClient) -> None:
    form(client, "a-0", "a-1")
    service = lab.site.service
    assert service.view(KEY, JOB_UID).generations
    assert service.view(KEY, "another uid") == GroupView()
    replace_job(lab)
    assert service.view(KEY, JOB_UID) == GroupView()
    assert service.view(KEY, "another uid") == GroupView(checkpoint=CheckpointStatus())


def test_a_clock_that_is_set_moves_no_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = steady_clock()
    before = clock()
    monkeypatch.setattr(time, "time", lambda: before - 86_400.0)
    assert 0 <= clock() - before < 3600


def test_a_rerun_under_the_same_name_gets_its_own_world(lab: Lab, client: ServiceClient) -> None:
    form(client, "a-0", "a-1")
    # Gone and made again between two passes: the controller never saw the job missing.
    alive = {"uid-b-0": "a-0", "uid-b-1": "a-1"}
    lab.site.service.set_group(KEY, status=JobStatus(), job_uid="another", alive=alive, minimum=1)
    world = form(client, "b-0", "b-1")
    assert (world["generation"], [one["uid"] for one in world["members"]]) == (1, ["uid-b-0", "uid-b-1"])


def test_a_replica_that_no_longer_leads_refuses_all_calls(lab: Lab, client: ServiceClient) -> None:
    world = form(client, "a-0", "a-1")
    body = {"uid": "uid-a-0", "generation": 1, "members": world["members"]}
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(client.call, "watch", body)
        wait_until(lambda: KEY in lab.site.service.groups.polls)
        lab.site.service._may_act = lambda: False
        lab.site.service.report_loss(KEY, "uid-a-1")
        with pytest.raises(ServiceAway, match="HTTP 503"):
            answer.result()
    with pytest.raises(ServiceAway, match="HTTP 503"):  # not the refusal that would end this worker
        client.call("join", agent("a-1", 1))


def test_a_service_that_starts_over_knows_what_agents_report_again(lab: Lab, client: ServiceClient) -> None:
    """While a leader could not renew its lease it refused all calls: no worker counts as silent for that."""
    world = form(client, "a-0", "a-1")
    body = {"uid": "uid-a-0", "generation": 1, "members": world["members"]}
    lab.site.jobs[KEY] = {"metadata": {"uid": JOB_UID}}
    with ThreadPoolExecutor(1) as pool:
        watching = pool.submit(client.call, "watch", body)
        wait_until(lambda: KEY in lab.site.service.groups.polls)
        lab.site.service.start_over()
        with pytest.raises(ServiceAway, match="HTTP 503"):  # not the refusal that would end this worker
            watching.result()
    with pytest.raises(ServiceAway):  # 503 again, or the connection is just being closed
        client.call("watch", body)
    lab.tell(JobStatus(generation=1))
    with ThreadPoolExecutor(1) as pool:
        watching = pool.submit(client.call, "watch", body)
        wait_until(lambda: KEY in lab.site.service.groups.polls)
        assert lab.site.service.groups.by_key[KEY].world is not None
        assert lab.site.service.view(KEY, JOB_UID).silent == frozenset()
        lab.site.service.drop(KEY)
        with pytest.raises(ServiceRefused):
            watching.result()


def test_a_header_of_any_bytes_is_refused(lab: Lab, client: ServiceClient) -> None:
    with socket.socket(socket.AF_UNIX) as raw:
        raw.connect(str(lab.site.path))
        raw.sendall(b"POST /v1/jobs/default/job/leave HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n")
        raw.sendall(b"Authorization: Bearer \xff\xfe\r\n\r\n{}")
        assert raw.recv(4096).startswith(b"HTTP/1.1 401 ")


def test_a_job_that_is_over_leaves_nothing_behind(lab: Lab, client: ServiceClient) -> None:
    form(client, "a-0", "a-1")
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(client.call, "watch", {"uid": "uid-a-0", "generation": 1})
        wait_until(lambda: KEY in lab.site.service.groups.polls)
        lab.site.service.drop(KEY)
        with pytest.raises(ServiceRefused, match="no running job"):
            answer.result()
    assert KEY not in lab.site.service.groups.polls


def test_a_restarted_service_asks_for_the_world_and_adopts_it(lab: Lab, client: ServiceClient) -> None:
    world = form(client, "a-0", "a-1")
    lab.site.service.drop(KEY)
    lab.add("a-0", "a-1")
    body = {"uid": "uid-a-0", "generation": 1}
    assert client.call("watch", body)["state"] == "unknown"
    with ThreadPoolExecutor(2) as pool:
        waits = [pool.submit(client.call, "watch", body | {"members": world["members"]})]
        wait_until(lambda: lab.site.service.view(KEY, JOB_UID).generations)
        waits.append(pool.submit(client.call, "watch", {"uid": "uid-a-1", "generation": 1}))
        lab.site.service.report_loss(KEY, "uid-a-1")
        assert {wait.result()["reason"] for wait in waits} <= {"lost a-1", "removed"}


def test_a_member_that_finished_before_a_restarted_service_knows_the_group_is_asked_again(
    lab: Lab, client: ServiceClient
) -> None:
    world = form(client, "a-0", "a-1")
    lab.site.service.drop(KEY)
    lab.add("a-0", "a-1")  # its generation had not been stored
    finished = {"uid": "uid-a-0", "generation": 1}
    with ThreadPoolExecutor(3) as pool:
        early = pool.submit(client.call, "finish", finished)
        wait_until(lambda: KEY in lab.site.service.groups.polls)
        watch = {"uid": "uid-a-1", "generation": 1, "members": world["members"]}
        pool.submit(client.call, "watch", watch)
        assert early.result()["state"] == "waiting"
        assert not lab.site.service.groups.by_key[KEY].members.finished
        again = pool.submit(client.call, "finish", finished)
        assert client.call("finish", {"uid": "uid-a-1", "generation": 1})["state"] == "done"
        assert again.result()["state"] == "done"
        lab.site.service.drop(KEY)  # ends the watch


def test_a_restarted_service_learns_from_members_that_their_ranks_stay(lab: Lab, client: ServiceClient) -> None:
    world = form(client, "a-0", "a-1")
    lab.site.service.drop(KEY)
    lab.add("a-0", "a-1", "a-2")
    watch = {"uid": "uid-a-0", "generation": 1, "members": world["members"], "stays": True}
    with ThreadPoolExecutor(1) as pool:
        watching = pool.submit(client.call, "watch", watch)
        wait_until(lambda: lab.site.service.view(KEY, JOB_UID).generations)
        newcomer = agent("a-2", 0) | {"prepared": False}
        assert client.call("join", newcomer) == {"state": "prepare", "ranks": 2, "examples": ""}
        lab.site.service.report_loss(KEY, "uid-a-1")
        assert watching.result()["state"] == "stale"


def test_a_restarted_service_takes_reports_once_it_knows_the_group(lab: Lab, client: ServiceClient) -> None:
    world = form(client, "a-0", "a-1")
    lab.site.service.drop(KEY)
    lab.add("a-0", "a-1")  # its generation had not been stored
    report = {"messages": [{"kind": "resumed", "generation": 1, "step": 7, "source": "memory", "stays": True}]}
    with pytest.raises(ServiceAway):
        client.call("report", report)
    watch = {"uid": "uid-a-1", "generation": 1, "members": world["members"]}
    with ThreadPoolExecutor(1) as pool:
        pool.submit(client.call, "watch", watch)
        wait_until(lambda: lab.site.service.view(KEY, JOB_UID).generations)
        client.call("report", report)
        (known,) = lab.site.service.view(KEY, JOB_UID).generations
        assert (known.resumed_step, known.stays) == (7, True)
        lab.site.service.drop(KEY)  # ends the watch


# What launchers say about themselves, and how the end of a generation is decided


def end(name: str, error: str = "ValueError: no", **more: Any) -> dict[str, Any]:
    failure = {"verdict": "application", "rank": 0, "exit_code": 1, "error": error, "last_lines": ["Traceback", error]}
    return {"uid": f"uid-{name}", "generation": 1, "of_peers": False, "failure": failure, **more}


def test_the_verdict_on_a_failure_is_given_once_all_ranks_have_ended(lab: Lab, client: ServiceClient) -> None:
    form(client, "a-0", "a-1")
    with ThreadPoolExecutor(2) as pool:
        victim = pool.submit(client.call, "fail", end("a-1", "Connection closed by peer", of_peers=True))
        culprit = pool.submit(client.call, "fail", end("a-0", ended_s_ago=0.5))
        assert [victim.result()["verdict"], culprit.result()["verdict"]] == ["rejoin", "rejoin"]
    assert form(client, "a-0", "a-1", generation=1)["generation"] == 2
    first = lab.site.service.view(KEY, JOB_UID).generations[0]
    assert first.failure is not None
    assert (first.failure.worker, first.failure.error, first.failure.last_lines) == (
        "a-0", "ValueError: no", ("Traceback", "ValueError: no"),
    )  # fmt: skip


@pytest.mark.parametrize("failure", [None, 7, {"rank": "x"}, {"error": ["\ud800"]}, {"last_lines": [{}] * 9}])
def test_a_failure_of_any_content_is_judged(lab: Lab, client: ServiceClient, failure: object) -> None:
    form(client, "a-0", "a-1")
    for name in ("a-0", "a-1"):
        body = {**end(name), "failure": failure, "ended_s_ago": "soon", "permanent": 1}
        assert client.call("fail", body)["verdict"] == "rejoin"


def test_a_launcher_that_reports_that_it_stops_is_waited_for(lab: Lab, client: ServiceClient) -> None:
    form(client, "a-0", "a-1")
    client.call("heartbeat", {"uid": "uid-a-1", "generation": 1, "doing": "stopping", "since_s": 50.0})
    client.call("leave", {"uid": "uid-a-0", "reason": "SIGTERM"})
    assert activity(lab).doing == "stopping"


def test_a_group_without_workers_waits_for_none(lab: Lab, client: ServiceClient) -> None:
    """The job is suspended and resumed: the time between them is not spent waiting."""
    form(client, "a-0", "a-1")
    lab.alive.clear()
    lab.minimum = 2
    lab.tell()
    resumed_at = time.time() + 0.2
    wait_until(lambda: time.time() > resumed_at)
    lab.add("b-0", "b-1")
    client.call("heartbeat", {"uid": "uid-b-0", "doing": "waiting"})
    assert (activity(lab).doing, activity(lab).detail) == ("waiting", "for 2 workers to join")
    assert (activity(lab).since or 0.0) > resumed_at - 0.1


def test_garbage_in_a_heartbeat_is_skipped(lab: Lab, client: ServiceClient) -> None:
    form(client, "a-0", "a-1")
    for doing in (None, 7, "dancing", "x" * 1000):
        client.call("heartbeat", {"uid": "uid-a-0", "doing": doing, "since_s": "long"})
    client.call("heartbeat", {"uid": "uid-unknown", "doing": "stopping"})
    assert activity(lab).doing == "running"


def test_a_finished_worker_starts_again_if_another_is_lost_and_ends_if_all_have_finished(
    lab: Lab, client: ServiceClient
) -> None:
    form(client, "a-0", "a-1")
    done = {"uid": "uid-a-0", "generation": 1}
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(client.call, "finish", done)
        client.call("leave", {"uid": "uid-a-1", "reason": "spot notice"})
        assert waiting.result()["state"] == "rejoin"
    form(client, "a-0", generation=1)
    assert client.call("finish", {**done, "generation": 2})["state"] == "done"
    lab.add("a-2")
    assert client.call("join", agent("a-2"))["state"] == "over"


def test_a_storage_that_does_not_answer_is_in_the_status(lab: Lab, client: ServiceClient) -> None:
    form(client, "a-0", "a-1")
    client.call("report", {"messages": [{"kind": "waiting", "generation": 1, "reason": "s3://b: 503"}]})
    assert (activity(lab).doing, activity(lab).detail) == ("waiting", "for s3://b: 503")
    client.call("report", {"messages": [{"kind": "progress", "generation": 1, "step": 3}]})
    assert activity(lab).doing == "training"


def test_a_worker_that_prepares_reports_its_failure_before_the_others_continue(lab: Lab, client: ServiceClient) -> None:
    """The service was restarted when it had judged the failure, and before it could store it."""
    form(client, "a-0", "a-1")
    stored = GroupGeneration(1, ("a-0", "a-1"), resumed_step=0, stays=True)
    lab.restart_service(JobStatus(generation=1, generations=(stored,)))
    lab.add("a-0", "a-1")
    group = lab.site.service.groups.by_key[KEY]
    failed = {"generation": 1, "ended_s_ago": 1.0, "failure": {"error": "the bug", "signal": "SIGKILL"}}
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(client.call, "join", {**agent("a-1", 1), "stays": True})
        wait_until(lambda: "uid-a-1" in group.next_generation.joined)
        own = {**agent("a-0", 1), "prepared": False, "failed": [failed]}
        assert client.call("join", own)["state"] == "prepare"
        assert other.result()["generation"] == 2
    failure = group.history.generations[0].failure
    assert failure is not None
    assert (failure.error, group.failures.count) == ("the bug", 1)


def test_a_newcomer_that_waits_already_gets_ready_once_the_others_say_that_they_stay(
    lab: Lab, client: ServiceClient
) -> None:
    form(client, "a-0", "a-1")
    lab.add("b-0")
    group = lab.site.service.groups.by_key[KEY]
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(client.call, "join", {**agent("b-0"), "prepared": False})
        wait_until(lambda: "uid-b-0" in group.next_generation.joined)
        client.call("report", {"messages": [{"kind": "resumed", "generation": 1, "step": 0, "stays": True}]})
        assert answer.result() == {"state": "prepare", "ranks": 2, "examples": ""}
    assert not group.next_generation.joined
    assert group.world is not None, "the others train on"


def test_saves_that_wait_are_in_the_status(lab: Lab, client: ServiceClient) -> None:
    form(client, "a-0", "a-1")
    client.call("report", {"messages": [{"kind": "progress", "generation": 1, "step": 3}]})
    for reason, detail in (("s3://b: 503 for 4m", "nothing is saved: s3://b: 503 for 4m"), ("", "")):
        client.call("report", {"messages": [{"kind": "unsaved", "generation": 1, "step": 3, "reason": reason}]})
        assert (activity(lab).doing, activity(lab).detail) == ("training", detail)


def test_a_report_wakes_no_poll_without_need(lab: Lab, client: ServiceClient) -> None:
    form(client, "a-0", "a-1")
    client.call("report", {"messages": [{"kind": "progress", "generation": 1, "step": 1}]})
    asked = 0
    group = lab.site.service.groups.by_key[KEY]

    class Counted(dict[str, str]):
        def __contains__(self, uid: object) -> bool:
            nonlocal asked
            asked += uid == "uid-a-0"
            return super().__contains__(uid)

    group.members.alive = Counted(group.members.alive)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(client.call, "watch", {"uid": "uid-a-0", "generation": 1})
        wait_until(lambda: asked >= 1)
        before = asked
        for step in range(2, 30):
            client.call("report", {"messages": [{"kind": "progress", "generation": 1, "step": step}]})
        assert asked == before
        client.call("leave", {"uid": "uid-a-1", "reason": "the end of the test"})


def test_a_worker_chooses_how_long_it_waits_for_its_group(client: ServiceClient) -> None:
    assert client.call("join", {**agent("a-0"), "within_s": 0.2}) == {"state": "waiting"}
