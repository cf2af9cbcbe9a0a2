"""`submit` with several contexts: the cheapest first, the next when capacity does not come, and never two at a time."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from elasticctl.api.errors import UsageError
from elasticctl.cluster.local.client import LocalCluster
from elasticctl.operations.submit import failover
from tests.support.cli import Run, without_aws
from tests.support.fakeapi import FakeApi, Request
from tests.support.waiting import wait_until

JOBS = "/apis/elastic.pytorch.org/v1alpha1/namespaces/default/elasticjobs"
PODS = "/api/v1/namespaces/default/pods"


@dataclass
class Place:
    """A cluster whose controller brings so many workers for each job, and takes them away when it is cancelled.

    Its work is done by the next request. `refuse` is called next, like that of the server.
    """

    api: FakeApi
    brings: int
    lets_go: bool = True
    most_live: int = 0
    refuse: Callable[[Request], Any] = lambda request: None

    def __post_init__(self) -> None:
        self.api.refuse = self._before

    def _before(self, request: Request) -> Any:
        with self.api.changed:
            for path, job in list(self.api.objects.items()):
                if path.startswith(JOBS):
                    self._look_at(path, job)
        return self.refuse(request)

    def live(self) -> list[str]:
        with self.api.changed:
            return [path for path in self.api.objects if path.startswith(PODS)]

    def names(self) -> list[str]:
        with self.api.changed:
            return [path.rpartition("/")[2] for path in self.api.objects if path.startswith(JOBS)]

    def _look_at(self, path: str, job: dict[str, Any]) -> None:
        name = path.rpartition("/")[2]
        if job["spec"].get("cancel"):
            if self.lets_go:
                for pod in self.live():
                    self.api.remove(pod)
                self._say(path, job, {"phase": "Cancelled", "active": 0})
            return
        for index in range(self.brings):
            pod = f"{PODS}/{name}-worker-{index}"
            if pod not in self.api.objects:
                owner = {"uid": job["metadata"]["uid"], "controller": True}
                metadata = {"name": f"{name}-worker-{index}", "ownerReferences": [owner], "labels": {"job-name": name}}
                metadata["labels"]["group-name"] = "elastic.pytorch.org"
                self.api.put(pod, {"metadata": metadata, "status": {"phase": "Running"}})
        self.most_live = max(self.most_live, len(self.live()))
        self._say(path, job, {"phase": "Running" if self.brings else "Pending", "active": self.brings})

    def _say(self, path: str, job: dict[str, Any], status: dict[str, Any]) -> None:
        if job.get("status") != status:
            self.api.put(path, {**job, "status": status})


Make = Callable[..., Place]


@pytest.fixture
def place(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run) -> Iterator[Make]:
    """`place("cheap", "aws", brings=0)`: a context with a cluster behind it."""
    monkeypatch.delenv("ELASTICCTL_CONTEXT", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    without_aws(monkeypatch)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "train.py").write_text("print('trained')\n")
    servers: dict[str, str] = {}
    with ExitStack() as stack:

        def make(name: str, provider: str, brings: int = 0, url: str = "") -> Place:
            made = Place(FakeApi(), brings)
            stack.callback(made.api.close)
            servers[name] = url or made.api.url
            _write_kubeconfig(tmp_path / "kubeconfig", servers)
            (tmp_path / "state").mkdir(exist_ok=True)
            storage = ("--storage", str(tmp_path / "state"), "--image", "i")
            assert (
                run("config", "set-context", name, "--provider", provider, "--kube-context", name, *storage).code == 0
            )
            return made

        yield make


def _write_kubeconfig(path: Path, servers: dict[str, str]) -> None:
    content = {
        "apiVersion": "v1",
        "kind": "Config",
        "contexts": [{"name": name, "context": {"cluster": name, "user": "me"}} for name in servers],
        "clusters": [{"name": name, "cluster": {"server": url}} for name, url in servers.items()],
        "users": [{"name": "me", "user": {"token": "t1"}}],
    }
    path.write_text(json.dumps(content))


WHAT = ("src/train.py", "--gpus", "2", "--gpu-type", "t4", "--min-gpus", "2", "--no-workspace")


def test_the_cheapest_is_tried_first_and_the_next_when_it_has_no_capacity(run: Run, place: Make) -> None:
    dear, cheap = place("dear", "gcp", brings=2), place("cheap", "aws", brings=1)
    overlaps: list[list[str]] = []

    def look(request: Request) -> None:
        if _creates(request):
            overlaps.append(cheap.live() + cheap.names())

    dear.refuse = look
    done = run("submit", *WHAT, "--context", "dear,cheap", "--capacity-timeout", "0s", "-d")
    assert (done.code, done.out) == (0, "train\n"), done.err
    assert overlaps == [[]]
    assert (cheap.most_live, cheap.live(), cheap.names()) == (1, [], [])
    assert (dear.names(), len(dear.live())) == (["train"], 2)
    said = done.err.splitlines()
    assert said[0] == "in this order, by price: cheap ($0.32 an hour), dear ($0.32 an hour); up to 0.0s each"
    assert "cheap: 1 of 2 workers within 0.0s; withdrawing it" in said
    assert said[-1] == "train runs in dear ($0.32 an hour); not in cheap: 1 of 2 workers within 0.0s"


def test_a_context_with_capacity_ends_the_search(run: Run, place: Make) -> None:
    cheap, dear = place("cheap", "aws", brings=2), place("dear", "gcp", brings=2)
    done = run("submit", *WHAT, "--context", "dear,cheap", "-d")
    assert (done.code, done.out) == (0, "train\n")
    assert done.err.endswith("train runs in cheap ($0.32 an hour), the cheapest\n")
    assert dear.api.requests == []
    assert cheap.names() == ["train"]


@pytest.mark.usefixtures("light_spares", "forked_workers")
def test_this_machine_takes_over_if_no_cloud_has_capacity(
    run: Run, place: Make, local_cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cheap = place("cheap", "aws")
    passed_s = [0.0]

    def let_time_pass(request: Request) -> None:
        passed_s[0] += 1000.0 * (request.path == f"{JOBS}/train")

    cheap.refuse = let_time_pass
    clock = SimpleNamespace(sleep=time.sleep, monotonic=lambda: time.monotonic() + passed_s[0])
    monkeypatch.setattr(failover, "time", clock)
    local = ("src/train.py", "--gpus", "1", "--gpu-type", "t4", "--context", "local,cheap")
    done = run("submit", *local, "--storage", "state", "--no-workspace", "--capacity-timeout", "500s", "--wait")
    assert done.code == 0, done.err
    assert "cheap ($0.16 an hour), local (no known price)" in done.err
    assert "train runs in local (no known price); not in cheap: 0 of 1 worker within 8m20s" in done.err
    assert cheap.names() == []
    assert local_cluster.get_job("default", "train")["status"]["phase"] == "Succeeded"


def test_a_context_that_cannot_run_it_is_skipped_with_its_reason(run: Run, place: Make) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        silent = f"http://127.0.0.1:{listening.getsockname()[1]}"
    place("away", "gcp", url=silent)
    place("closed", "aws", brings=2).refuse = forbidden
    place("plain", "kubernetes", brings=2)
    good = place("good", "gcp", brings=2)
    done = run("submit", *WHAT, "--context", "closed,away,plain,good", "-d")
    assert (done.code, good.names()) == (0, ["train"]), done.err
    reasons = done.err.splitlines()[-1]
    for reason in (
        "not in plain: --gpu-type t4: the GPU labels of a plain",
        "not in closed: ",
        "may not",
        "not in away: ",
    ):
        assert reason in reasons, reasons


def forbidden(request: Request) -> tuple[int, Any, dict[str, str]] | None:
    message = "elasticjobs is forbidden: User me may not create them"
    return (403, {"kind": "Status", "code": 403, "reason": "Forbidden", "message": message}, {})


def test_without_capacity_anywhere_nothing_is_left(run: Run, place: Make) -> None:
    places = [place("one", "aws"), place("two", "gcp", brings=1)]
    done = run("submit", *WHAT, "--context", "one,two", "--capacity-timeout", "0s", "-d")
    assert (done.code, done.out) == (3, "")
    assert [item.names() + item.live() for item in places] == [[], []]
    assert done.err.splitlines()[-1].startswith(
        "error: no context could run the job, and nothing was left behind: one: 0 of"
    )


def test_the_same_refusal_of_all_is_reported_once(run: Run, place: Make) -> None:
    place("one", "aws")
    place("two", "gcp")
    done = run("submit", "src/none.py", "--context", "one,two", "--gpus", "1", "--gpu-type", "t4")
    assert (done.code, done.err.count("\n")) == (2, 1), done.err
    assert 'none.py" does not exist' in done.err
    assert run("submit", "src/train.py", "--context", "one,,two").code == 2
    assert 'no context "three"' in run("submit", "src/train.py", "--context", "one,three").err
    assert "stdin can be read only once" in run("submit", "-f", "-", "--context", "one,two").err


def test_a_manifest_goes_where_it_finds_workers(run: Run, place: Make, tmp_path: Path) -> None:
    cheap, dear = place("cheap", "aws"), place("dear", "aws", brings=2)
    file = tmp_path / "job.yaml"
    file.write_text(run("submit", *WHAT, "--context", "cheap,dear", "--dry-run").out)
    assert cheap.api.requests == []
    done = run("submit", "-f", str(file), "--context", "cheap,dear", "--capacity-timeout", "0s", "-d")
    assert (done.code, cheap.names(), dear.names()) == (0, [], ["train"]), done.err
    assert "cheap ($0.32 an hour), dear ($0.32 an hour)" in done.err


def test_a_job_of_the_same_name_is_not_taken_for_ours(run: Run, place: Make) -> None:
    cheap, dear = place("cheap", "aws"), place("dear", "gcp", brings=2)
    cheap.api.put(f"{JOBS}/mine", {"metadata": {"name": "mine", "namespace": "default"}, "spec": {}})
    done = run("submit", *WHAT, "--name", "mine", "--context", "cheap,dear", "-d")
    assert (done.code, cheap.names(), dear.names()) == (0, ["mine"], ["mine"]), done.err
    assert "not in cheap: " in done.err


def test_no_other_context_is_tried_unless_the_workers_have_ended(
    run: Run, place: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failover, "GONE_WITHIN_S", 0.5)
    stuck, other = place("stuck", "aws", brings=1), place("other", "gcp", brings=2)
    stuck.lets_go = False
    done = run("submit", *WHAT, "--context", "stuck,other", "--capacity-timeout", "0s", "-d")
    assert (done.code, other.api.requests) == (3, [])
    assert "train may still be in context stuck, so no other was tried: its workers have not ended" in done.err
    assert done.err.endswith("FIX: `elasticctl delete train --context stuck`\n")
    assert stuck.names() == []  # its deletion was asked for all the same


def test_an_answer_that_got_lost_leaves_no_orphan(run: Run, place: Make) -> None:
    cheap, dear = place("cheap", "aws"), place("dear", "gcp", brings=2)

    def lose(request: Request) -> tuple[int, Any, dict[str, str]] | None:
        if not _creates(request):
            return None
        cheap.refuse = lambda request: None
        cheap.api.answer(request)
        return 504, {"kind": "Status", "code": 504, "reason": "Timeout", "message": "who knows"}, {}

    cheap.refuse = lose
    done = run("submit", *WHAT, "--context", "cheap,dear", "-d")
    assert (done.code, cheap.names(), dear.names()) == (0, [], ["train"]), done.err


# Ctrl-C at any moment, and a terminal that is closed.


@pytest.fixture
def interrupt() -> Iterator[Callable[[signal.Signals], None]]:
    """Sends a signal to this process, in which the command runs. The tests may run with some of them ignored."""
    missed: list[int] = []
    numbers = (signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(number, lambda number, _: missed.append(number)) for number in numbers]
    yield lambda number: os.kill(os.getpid(), number)
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)
    assert missed == []


Interrupt = Callable[[signal.Signals], None]


def _once_it_waits(where: Place, act: Callable[[], None]) -> None:
    """Do that when the job is first read."""

    def look(request: Request) -> None:
        if where.live() and (request.method, request.path) == ("GET", f"{JOBS}/train"):
            where.refuse = lambda request: None
            act()

    where.refuse = look


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupted_search_leaves_nothing(
    run: Run, place: Make, interrupt: Interrupt, number: signal.Signals
) -> None:
    cheap, dear = place("cheap", "aws", brings=1), place("dear", "gcp", brings=2)
    _once_it_waits(cheap, lambda: interrupt(number))
    done = run("submit", *WHAT, "--context", "cheap,dear")
    assert done.code == 130, done.err
    assert (cheap.names(), cheap.live(), dear.api.requests) == ([], [], [])
    assert "cheap: interrupted; withdrawing it" in done.err


def test_under_nohup_a_closed_terminal_ends_nothing(run: Run, place: Make, interrupt: Interrupt) -> None:
    cheap, dear = place("cheap", "aws", brings=1), place("dear", "gcp", brings=2)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    _once_it_waits(cheap, lambda: interrupt(signal.SIGHUP))
    done = run("submit", *WHAT, "--context", "cheap,dear", "--capacity-timeout", "0s", "-d")
    assert (done.code, cheap.names(), dear.names()) == (0, [], ["train"])


def test_interrupted_while_it_is_being_created(
    run: Run, place: Make, interrupt: Interrupt, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request is on its way: the server carries it out although no one waits for the answer."""
    standing = SimpleNamespace(sleep=time.sleep, monotonic=lambda: 0.0)  # the create is in time, however late
    monkeypatch.setattr(failover, "time", standing)
    cheap, dear = place("cheap", "aws", brings=1), place("dear", "gcp", brings=2)

    def slowly(request: Request) -> None:
        if _creates(request):  # it comes behind the first question whether it is there
            interrupt(signal.SIGINT)
            wait_until(lambda: ("GET", f"{JOBS}/train") in _asked(cheap))

    cheap.refuse = slowly
    done = run("submit", *WHAT, "--context", "cheap,dear")
    assert done.code == 130
    assert ("DELETE", f"{JOBS}/train") in _asked(cheap)
    assert (cheap.names(), dear.api.requests) == ([], [])


def test_interrupted_twice_it_is_deleted_immediately(run: Run, place: Make, interrupt: Interrupt) -> None:
    stuck = place("stuck", "aws", brings=1)
    stuck.lets_go = False

    def again() -> None:
        interrupt(signal.SIGINT)
        stuck.refuse = lambda request: interrupt(signal.SIGINT) if request.method == "PATCH" else None

    _once_it_waits(stuck, again)
    assert run("submit", *WHAT, "--context", "stuck,local").code == 130
    assert stuck.names() == []


def _creates(request: Request) -> bool:
    return request.method == "POST" and request.path.startswith(JOBS)


def _asked(where: Place) -> list[tuple[str, str]]:
    return [(request.method, request.path) for request in list(where.api.requests)]


def test_several_contexts_are_a_list() -> None:
    assert failover.split_contexts("") == ("",)
    assert failover.split_contexts("aws") == ("aws",)
    assert failover.split_contexts("aws, gcp,aws") == ("aws", "gcp")
    for wrong in (",", "aws,", ",aws"):
        with pytest.raises(UsageError):
            failover.split_contexts(wrong)


def test_a_dry_run_looks_for_the_name_where_the_job_would_be(run: Run, place: Make) -> None:
    place("dear", "gcp", brings=2)
    cheap = place("cheap", "aws", brings=2)
    assert run("config", "set-context", "cheap", "--namespace", "ml").code == 0
    done = run("submit", *WHAT, "--context", "dear,cheap", "--dry-run=server")
    assert done.code == 0, done.err
    asked = {request.path for request in cheap.api.requests if "/namespaces/" in request.path}
    assert asked == {JOBS.replace("default", "ml")}
