"""The dashboard's HTTP interface, requested as a browser does, and as those do that must be refused."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from aiohttp import ClientResponse, ClientSession, CookieJar, web
from aiohttp.test_utils import TestServer

from elasticctl.api.errors import ForbiddenError, UnreachableError
from elasticctl.cluster.base import Manifest
from elasticctl.cluster.worker_access import Streams
from elasticctl.dashboard import feed, user_api
from elasticctl.dashboard.access import TOKEN_HEADER
from elasticctl.dashboard.server import MAX_BODY_BYTES, Dashboard
from elasticctl.dashboard.user_api import MAX_CALLS, MAX_VIEWERS, Scope
from elasticctl.settings.contexts import Context
from elasticctl_store.stored_logs import Incarnation
from tests.support.dashboard.cluster import Jobs, Looked, launched, many, pod, sharing
from tests.support.dashboard.serving import Following, news_of
from tests.support.job_samples import AT, at, job
from tests.support.stored import keeps_in, store_metrics


@dataclass(slots=True)
class Browser:
    """A client with cookies; `page` is what it talks to, and `arrived` are the paths that it was asked for."""

    session: ClientSession
    page: Dashboard
    origin: str
    arrived: list[str]

    async def get(self, path: str = "", **headers: str) -> ClientResponse:
        url = self.origin + (path if path.startswith("/") else self.page.gate.base + path)
        return await self.session.get(url, headers=headers, allow_redirects=False)

    async def enter(self) -> None:
        assert (await self.get(self.page.gate.issue())).status == 303

    async def post(self, path: str, body: Any, **headers: str) -> ClientResponse:
        given = {TOKEN_HEADER: self.page.gate.token, "Origin": self.origin, **headers}
        url = self.origin + self.page.gate.base + path
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return await self.session.post(url, data=data, headers=given)

    @asynccontextmanager
    async def events(self, last: str = "") -> AsyncIterator[Following]:
        """A stream of news."""
        answer = await self.get("events", **({"Last-Event-ID": last} if last else {}))
        assert answer.status == 200
        assert answer.content_type == "text/event-stream"
        async with news_of(answer) as following:
            yield following

    async def asking(self, path: str) -> asyncio.Task[ClientResponse]:
        """A request that has come to its handler."""
        before = len(self.arrived)
        task = asyncio.create_task(self.post(path, b""))
        while len(self.arrived) == before:
            await asyncio.sleep(0.01)
        return task


def browse(scenario: Callable[[Browser, Jobs], Awaitable[None]], *manifests: dict[str, Any], **settings: Any) -> None:
    """Run a scenario against a server of its own, whose browser has been let in."""

    async def run() -> None:
        cluster = Jobs(*manifests)
        namespace, access = settings.pop("namespace", "default"), settings.pop("access", None)
        place = Scope(cluster, Context("local", "local"), namespace, access)  # type: ignore[arg-type]
        page = Dashboard(place, poll_s=0.02, **settings)
        app, arrived = page.app(), []

        @web.middleware
        async def note(request: web.Request, handler: Callable[[web.Request], Awaitable[Any]]) -> Any:
            arrived.append(request.path)
            return await handler(request)

        app.middlewares.append(note)
        async with TestServer(app) as running, ClientSession(cookie_jar=CookieJar(unsafe=True)) as session:
            browser = Browser(session, page, f"http://127.0.0.1:{running.port}", arrived)
            await browser.enter()
            await scenario(browser, cluster)

    with mock.patch.object(feed, "SHARE", 1.0):  # a machine that is busy is no slow cluster
        asyncio.run(run())


def test_a_link_works_once_and_leaves_nothing_in_the_address() -> None:
    async def scenario(browser: Browser, _: Jobs) -> None:
        link = browser.page.gate.issue()
        first = await browser.get(link)
        assert (first.status, first.headers["Location"]) == (303, browser.page.gate.base)
        cookie = first.headers["Set-Cookie"]
        assert f"Path={browser.page.gate.base}" in cookie
        assert "HttpOnly" in cookie
        assert "SameSite=Lax" in cookie
        assert browser.page.gate.token not in cookie
        again = await browser.get(link)
        assert again.status == 403
        assert "works once" in await again.text()

    browse(scenario)


def test_without_the_cookie_nothing_is_answered() -> None:
    async def scenario(browser: Browser, cluster: Jobs) -> None:
        browser.session.cookie_jar.clear()
        for path in ("", "app.js", "events", "jobs/default/digits", "nothing"):
            assert (await browser.get(path)).status == 403, path
        for path in ("/", "/favicon.ico", "/events", f"{browser.page.gate.base}x?ticket=1"):
            assert (await browser.get(path)).status == 403, path
        refused = await browser.post("jobs/default/digits/cancel", {"uid": "uid-digits"})
        assert refused.status == 403
        assert "cancel" not in cluster.jobs["digits"]["spec"]

    browse(scenario, job())


def test_a_new_browser_is_reported() -> None:
    entries: list[None] = []

    async def scenario(browser: Browser, _: Jobs) -> None:
        await browser.enter()
        await browser.get("?ticket=wrong")
        assert len(entries) == 2  # `browse` let one in before

    browse(scenario, on_entry=lambda: entries.append(None))


def test_another_name_for_this_machine_is_refused() -> None:
    async def scenario(browser: Browser, _: Jobs) -> None:
        for host in ("evil.example", "evil.example:80", "127.0.0.1.evil.example"):
            assert (await browser.get("", Host=host)).status == 403
        assert (await browser.get("", Host="localhost:1234")).status == 200

    browse(scenario)


def test_other_sites_get_nothing() -> None:
    async def scenario(browser: Browser, _: Jobs) -> None:
        for mode in ("cors", "no-cors"):
            answer = await browser.get("events", **{"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": mode})
            assert answer.status == 403
        answer = await browser.get("", **{"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"})
        assert answer.status == 200

    browse(scenario)


def test_the_page_may_load_nothing_from_elsewhere_and_is_kept_nowhere() -> None:
    async def scenario(browser: Browser, _: Jobs) -> None:
        for path in ("", "app.js", "style.css", "vendor/uPlot.esm.js", "jobs/default/none", "nothing"):
            answer = await browser.get(path)
            policy = answer.headers["Content-Security-Policy"]
            assert "default-src 'none'" in policy
            assert "unsafe" not in policy
            assert "//" not in policy
            assert answer.headers["Cache-Control"] == "no-store"
            assert answer.headers["X-Content-Type-Options"] == "nosniff"
            assert "Python" not in answer.headers["Server"]
        page = await (await browser.get("")).text()
        assert "<script type=" in page
        assert "://" not in page

    browse(scenario)


def test_only_the_pages_files_can_be_asked_for() -> None:
    async def scenario(browser: Browser, _: Jobs) -> None:
        base = browser.page.gate.base
        for path in (
            "index.html",
            "assets.py",
            f"{base}../server.py",
            f"{base}%2e%2e/server.py",
            "vendor/",
            "vendor/x",
        ):
            assert (await browser.get(path)).status in (403, 404), path

    browse(scenario)


def test_changes_are_sent_as_they_happen() -> None:
    async def scenario(browser: Browser, cluster: Jobs) -> None:
        async with browser.events() as following:
            hello = await following("hello")
            assert (hello["context"], hello["namespace"]) == ("local", "default")
            first = await following("jobs")
            assert first["whole"]
            assert [row["name"] for row in first["rows"]] == ["digits"]
            cluster.jobs["other"] = job("other")
            del cluster.jobs["digits"]
            news = await following("jobs")
            assert not news["whole"]
            assert ([row["name"] for row in news["rows"]], news["gone"]) == (["other"], ["uid-digits"])

    browse(scenario, job())


def test_a_viewer_that_comes_back_gets_what_it_missed() -> None:
    async def scenario(browser: Browser, cluster: Jobs) -> None:
        async with browser.events() as following:
            seen = (await following("jobs"))["id"]
        cluster.change("job-0001", phase="Suspended")
        async with browser.events(seen) as following:
            news = await following("jobs")
            assert not news["whole"]
            assert [row["name"] for row in news["rows"]] == ["job-0001"]
        for unknown in ("0.1", "", f"{seen.partition('.')[0]}.999", "x"):
            async with browser.events(unknown) as following:
                assert (await following("jobs"))["whole"]

    browse(scenario, *many(3))


def test_a_silent_cluster_is_reported_and_comes_back() -> None:
    async def scenario(browser: Browser, cluster: Jobs) -> None:
        cluster.trouble = UnreachableError("no answer: is the VPN up?")
        async with browser.events() as following:
            assert (await following("trouble"))["message"] == "no answer: is the VPN up?"
            cluster.trouble = None
            await following("well")
            assert (await following("jobs"))["rows"]

    browse(scenario, job())


def test_the_cluster_is_queried_once_for_all_viewers_and_not_without_any() -> None:
    async def scenario(browser: Browser, cluster: Jobs) -> None:
        assert cluster.asked == 0
        async with browser.events() as one, browser.events() as other:
            await one("jobs")
            await other("jobs")
            assert browser.page.api.feed.viewers == 2
        while browser.page.api.feed.viewers:
            await asyncio.sleep(0.01)
        asked = cluster.asked
        await asyncio.sleep(0.3)
        assert cluster.asked <= asked + 1  # the look that was under way

    browse(scenario, job())


def test_only_so_many_may_watch() -> None:
    async def scenario(browser: Browser, _: Jobs) -> None:
        streams = [browser.events() for _ in range(MAX_VIEWERS)]
        for stream in streams:
            await (await stream.__aenter__())("hello")
        refused = await browser.get("events")
        assert refused.status == 503
        assert "close one" in (await refused.json())["error"]
        for stream in streams:
            await stream.__aexit__(None, None, None)

    browse(scenario, job())


def test_details_are_of_a_job_that_was_seen() -> None:
    async def scenario(browser: Browser, cluster: Jobs) -> None:
        async with browser.events() as following:
            await following("jobs")
            answered = await (await browser.get("jobs/default/digits")).json()
            assert answered["job"]["uid"] == "uid-digits"
        for path in ("jobs/default/other", "jobs/kube-system/digits", "jobs/default/..%2f"):
            answer = await browser.get(path)
            assert answer.status == 404, path
        assert "the job other no longer exists" in (await (await browser.get("jobs/default/other")).json())["error"]

    browse(scenario, job())


def test_stacks_of_all_ranks_are_read_only_when_the_page_asks() -> None:
    async def scenario(browser: Browser, cluster: Jobs) -> None:
        cluster.pods = [pod("digits-worker-0"), pod("digits-worker-1"), pod("digits-worker-2", "Pending")]
        async with browser.events() as following:
            await following("jobs")
            found = await (await browser.post("jobs/default/digits/stacks", b"")).json()
            assert found["lines"] == [
                "rank 0, digits-worker-0",
                "  MainThread:",
                "    step (train.py:7)",
                "  feeder:",
                "    step (train.py:7)",
            ]
            refused = "digits-worker-1: its launcher cannot read stacks (exit code 1: Yama says no)"
            assert (found["more"], found["troubles"]) == (0, [refused])
            answer = await browser.post("jobs/default/other/stacks", b"")
            assert (answer.status, (await answer.json())["error"].partition(".")[0]) == (
                400,
                "other does not run under elasticctl-launch, which knows its ranks",
            )
            cluster.pods = []
            assert (await browser.post("jobs/default/digits/stacks", b"")).status == 409
            assert (await browser.post("jobs/default/digits/stacks", b"", **{TOKEN_HEADER: "x"})).status == 403
            assert (await browser.get("jobs/default/digits/stacks")).status in (404, 405)

    browse(scenario, launched(), job("other"), access=Looked)


def test_viewers_that_give_up_share_one_reading_of_stacks() -> None:
    gate, looks = threading.Event(), []

    class Slow(Looked):
        def run(self, worker: Manifest, argv: Sequence[str], streams: Streams) -> int:
            looks.append(worker["metadata"]["name"])
            gate.wait()
            return super().run(worker, argv, streams)

    async def scenario(browser: Browser, cluster: Jobs) -> None:
        cluster.pods = [pod("digits-worker-0")]
        async with browser.events() as following:
            await following("jobs")
            try:
                for _ in range(3):
                    (await browser.asking("jobs/default/digits/stacks")).cancel()
                while not looks:
                    await asyncio.sleep(0.01)
                last = await browser.asking("jobs/default/digits/stacks")
            finally:
                gate.set()
            assert (await (await last).json())["lines"][0] == "rank 0, digits-worker-0"
            assert looks == ["digits-worker-0"]
            await browser.post("jobs/default/digits/stacks", b"")
            assert len(looks) == 2

    browse(scenario, launched(), access=Slow)


def test_a_change_reaches_the_cluster_and_the_page() -> None:
    async def scenario(browser: Browser, cluster: Jobs) -> None:
        async with browser.events() as following:
            await following("jobs")
            answer = await browser.post("jobs/default/digits/scale", {"uid": "uid-digits", "workers": 2})
            assert answer.status == 200
            assert (await following("jobs"))["rows"][0]["desired"] == 2

    browse(scenario, job())


def test_a_refused_change_says_why() -> None:
    async def scenario(browser: Browser, cluster: Jobs) -> None:
        for path, body, status, said in (
            ("digits/scale", {"uid": "uid-digits", "workers": 9}, 400, "more than the maximum"),
            ("digits/explode", {"uid": "uid-digits"}, 400, "is not a valid change"),
            ("digits/cancel", b"{", 400, "not JSON"),
            ("digits/cancel", b"[" * 2000, 400, "not JSON"),
            ("digits/cancel", {"uid": "old"}, 404, "another job now has its name"),
            ("other/cancel", {"uid": "u"}, 404, "no job other"),
            ("digits/cancel", b" " * (MAX_BODY_BYTES + 1), 413, ""),
        ):
            answer = await browser.post(f"jobs/default/{path}", body)
            assert answer.status == status, path
            assert said in (await answer.json())["error"]
        assert cluster.jobs["digits"] == job()

    browse(scenario, job())


def test_a_change_that_another_page_asks_for_is_refused() -> None:
    async def scenario(browser: Browser, cluster: Jobs) -> None:
        for headers in ({TOKEN_HEADER: ""}, {TOKEN_HEADER: "wrong"}, {"Origin": "http://evil.example"}, {"Origin": ""}):
            answer = await browser.post("jobs/default/digits/cancel", {"uid": "uid-digits"}, **headers)
            assert answer.status == 403, headers
        assert cluster.jobs["digits"] == job()

    browse(scenario, job())


def test_a_page_of_one_namespace_changes_no_other() -> None:
    async def scenario(browser: Browser, cluster: Jobs) -> None:
        answer = await browser.post("jobs/default/digits/cancel", {"uid": "uid-digits"})
        assert answer.status == 404
        assert cluster.jobs["digits"] == job()

    browse(scenario, job(), namespace="team-a")


def test_a_quiet_stream_gives_signs_of_life(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(user_api, "HEARTBEAT_S", 0.05)

    async def scenario(browser: Browser, _: Jobs) -> None:
        async with browser.events() as following:
            await following("alive")
            await following("alive")

    browse(scenario)


def test_projects_are_sent_as_they_change_and_to_each_viewer_that_comes_back() -> None:
    async def scenario(browser: Browser, cluster: Jobs) -> None:
        async with browser.events() as following:
            assert (await following("projects"))["pools"] == []
            cluster.jobs["train"] = sharing("train", "default", 6, "has all 6 workers that it asks for")
            answered = await following("projects")
            assert answered["pools"][0]["projects"][0]["held"] == 6
        async with browser.events() as following:
            assert (await following("projects"))["pools"] == answered["pools"]

    browse(scenario, job())


def test_jobs_are_looked_at_on_while_projects_take_long() -> None:
    async def scenario(browser: Browser, cluster: Jobs) -> None:
        answers = threading.Event()

        def slowly() -> list[Any]:
            answers.wait()
            raise ForbiddenError("jo may not list elasticquotas")

        cluster.list_quotas = slowly  # type: ignore[method-assign]
        async with browser.events() as following:
            try:
                assert (await following("jobs"))["whole"]
                for active in (1, 2):
                    cluster.change("digits", active=active)
                    assert (await following("jobs"))["rows"][0]["active"] == active
            finally:
                answers.set()
            assert "quotas" in (await following("projects"))["notes"][0]

    browse(scenario, job())


def test_a_request_that_was_given_up_does_not_block_others() -> None:
    """A viewer that switches jobs faster than the cluster answers has few requests running, each of them once."""

    async def scenario(browser: Browser, cluster: Jobs) -> None:
        answers, asked = threading.Event(), []

        def slow(_: str, name: str) -> list[Any]:
            asked.append(name)
            answers.wait()
            return []

        async def look_away(name: str) -> None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(browser.get(f"jobs/default/{name}"), 0.02)

        cluster.list_pods = slow  # type: ignore[method-assign]
        async with browser.events() as following:
            await following("jobs")
            try:
                for name in [*cluster.jobs][:MAX_CALLS]:
                    while name not in asked:  # on a busy machine the server may hear of it too late
                        await look_away(name)
                for _ in range(3):
                    for name in cluster.jobs:
                        await look_away(name)
                assert sorted(asked) == [f"job-{n:04}" for n in range(MAX_CALLS)]
            finally:
                answers.set()
            answered = await asyncio.gather(*(browser.get(f"jobs/default/{name}") for name in cluster.jobs))
            assert {answer.status for answer in answered} == {200}
        assert sorted(asked) == sorted(cluster.jobs)

    browse(scenario, *many(MAX_CALLS + 2))


def test_pods_of_an_earlier_job_of_the_name_do_not_count() -> None:
    async def scenario(browser: Browser, cluster: Jobs) -> None:
        pulled = {"waiting": {"reason": "ErrImagePull", "message": "no such image"}}
        old = {
            "metadata": {"name": "digits-worker-0", "uid": "p", "ownerReferences": [{"uid": "of-the-old-one"}]},
            "status": {"phase": "Pending", "containerStatuses": [{"state": pulled}]},
        }
        cluster.list_pods = lambda namespace, name: [old]  # type: ignore[method-assign]
        async with browser.events() as following:
            await following("jobs")
            found = await (await browser.get("jobs/default/digits")).json()
        assert [finding["text"] for finding in found["findings"] if "image" in finding["text"]] == []

    browse(scenario, job(phase="Pending"))


def test_headers_that_are_no_text_are_refused_like_others() -> None:
    async def scenario(browser: Browser, _: Jobs) -> None:
        host = browser.origin.removeprefix("http://")
        reader, writer = await asyncio.open_connection(*host.split(":"))
        cookie = b"Cookie: elasticctl-dashboard=\xff\xfe\r\n"
        writer.write(b"GET / HTTP/1.1\r\nHost: " + host.encode() + b"\r\n" + cookie + b"Connection: close\r\n\r\n")
        answer = await reader.read()
        writer.close()
        assert answer.startswith((b"HTTP/1.1 403 ", b"HTTP/1.1 400 ")), answer[:80]

    browse(scenario)


def test_curves_come_from_the_storage_or_else_from_the_status(tmp_path: Path) -> None:
    curve = {"since": at(2), "atS": [0, 20], "step": [0, 40], "samplesPerS": [80, 81], "metrics": {"loss": [2.3, 0.9]}}
    kept = keeps_in(job("kept", curve=curve), tmp_path, "--lr", "0.1")
    store_metrics(tmp_path, Incarnation("uid-kept", "kept-0", AT, "pod"), 1, [{"step": 1, "at": AT, "grad": 0.5}])

    async def scenario(browser: Browser, _: Jobs) -> None:
        async with browser.events() as following:
            await following("jobs")
            answered = await (await browser.get("jobs/default/kept/metrics?m=grad&m=loss&m=other&x=step")).json()
            assert (answered["names"], answered["stored"], answered["trouble"]) == (
                ["grad", "loss", "samples/s"],
                True,
                "",
            )
            assert {name: series["y"] for name, series in answered["series"].items()} == {
                "grad": [0.5],
                "loss": [2.3, 0.9],
            }
            assert answered["command"] == "elasticctl-launch -- python train.py --lr 0.1"
            table = await browser.get("jobs/default/kept/metrics.csv")
            assert (table.content_type, await table.text()) == (
                "text/csv",
                f'metric,step,at,value\n"grad",1,{AT:.3f},0.5\n',
            )
            gone = await (await browser.get("jobs/default/gone/metrics?m=loss")).json()
            assert (list(gone["series"]), gone["stored"]) == (["loss"], False)
            assert "is not a folder on this machine" in gone["trouble"]
            for wrong in ("x=moon", "from=a", "from=nan", "from=3&to=2", "points=0", "points=99999"):
                assert (await browser.get(f"jobs/default/kept/metrics?m=loss&{wrong}")).status == 400
            assert (await browser.get("jobs/default/unknown/metrics")).status == 404
            compared = await (await browser.get("jobs/default/kept/compare?with=default/gone")).json()
            assert ["grad last", "0.5", ""] in compared["rows"]
            assert ["loss last", "", "0.9"] in compared["rows"]
            assert compared["code"] == "not known: both run what is in their image or on this machine"
            assert "gone: " in compared["troubles"][0]
            for unknown in ("default/unknown", "", "gone"):
                assert (await browser.get(f"jobs/default/kept/compare?with={unknown}")).status == 404

    browse(scenario, kept, keeps_in(job("gone", curve=curve), tmp_path / "gone"))
