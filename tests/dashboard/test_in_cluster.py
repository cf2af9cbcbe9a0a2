"""The dashboard of many: who is let in, what each sees and may do, and what it keeps of them."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientResponse, ClientSession, CookieJar
from aiohttp.test_utils import TestServer
from yarl import URL

from elasticctl.api.observed.changes import changes_of
from elasticctl.cli.verbs.see_what_jobs_do.dashboard import NO_STORAGES
from elasticctl.cluster import job_storages
from elasticctl.dashboard import server, sessions
from elasticctl.dashboard.access import TOKEN_HEADER
from elasticctl.dashboard.in_cluster import COOKIE, READ_ONLY, ClusterDashboard
from elasticctl.kubeapi import connection
from elasticctl_protocol import variables
from elasticctl_store.errors import StorageError
from tests.support.cli import Run
from tests.support.dashboard.serving import Following, news_of
from tests.support.dashboard.team import Guest, Team, dashboard, team

JO, MARIA = "jo.token-of-jo", "maria.token-of-maria"


@dataclass(slots=True)
class Browser:
    """A client with cookies of its own."""

    session: ClientSession
    origin: str

    async def get(self, path: str, **headers: str) -> ClientResponse:
        return await self.session.get(self.origin + path, headers=headers, allow_redirects=False)

    async def post(self, path: str, body: Any = None, **headers: str) -> ClientResponse:
        given = {"Origin": self.origin, **headers}
        return await self.session.post(self.origin + path, data=json.dumps(body).encode(), headers=given)

    async def log_in(self, token: str) -> ClientResponse:
        return await self.post("/login", {"token": token})

    @asynccontextmanager
    async def events(self, base: str = "/", **headers: str) -> AsyncIterator[Following]:
        """A stream of news."""
        answer = await self.get(f"{base}events", **headers)
        assert answer.status == 200, await answer.text()
        async with news_of(answer) as following:
            yield following

    async def names(self, base: str = "/", **headers: str) -> list[str]:
        """The jobs that the page shows."""
        async with self.events(base, **headers) as following:
            return sorted(row["name"] for row in (await following("jobs"))["rows"])


Open = Callable[[], Browser]
Story = Callable[[Open, ClusterDashboard], Awaitable[None]]


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    people = {JO: Guest("jo@example.org", {"ml"}), MARIA: Guest("maria@example.org", {"nlp"}, {"nlp"})}
    with team(tmp_path, monkeypatch, people) as made:
        made.add("digits", "ml")
        made.add("words", "nlp")
        yield made


def run_scenario(scenario: Story, **rules: bool) -> None:
    """Run a scenario against a dashboard; `open()` is a new browser."""

    async def run() -> None:
        page = dashboard(**rules)
        async with TestServer(page.app()) as running:
            origin = f"http://127.0.0.1:{running.port}"
            clients: list[ClientSession] = []

            def open_browser() -> Browser:
                # Browsers send Secure cookies to their own machine without TLS.
                jar = CookieJar(unsafe=True, treat_as_secure_origin=URL(origin))
                clients.append(ClientSession(cookie_jar=jar))
                return Browser(clients[-1], origin)

            try:
                await scenario(open_browser, page)
            finally:
                for client in clients:
                    await client.close()

    asyncio.run(run())


def test_without_a_login_there_is_the_page_and_nothing_else(cluster: Team) -> None:
    async def scenario(open_browser: Open, _: ClusterDashboard) -> None:
        browser = open_browser()
        assert "<title>elasticctl</title>" in await (await browser.get("/")).text()
        assert (await browser.get("/in/ml/app.js")).status == 200
        assert (await browser.get("/healthz")).status == 200
        for path in ("events", "jobs/ml/digits", "jobs/ml/digits/logs", "jobs/ml/digits/metrics.csv"):
            for base in ("/", "/in/ml/"):
                assert (await browser.get(base + path)).status == 401, path
        assert (await browser.post("/jobs/ml/digits/cancel", {"uid": "uid-digits"})).status == 401
        session = await browser.get("/session")
        assert (session.status, (await session.json())["asks"]) == (401, "token")

    run_scenario(scenario, allow_changes=True)
    assert cluster.shown == []


@pytest.mark.parametrize(
    ("token", "status", "said"),
    [
        ("wrong", 401, "the cluster does not accept this token"),
        ("", 400, "this is not a token"),
        ("a b", 400, "this is not a token"),
        ("a\r\nX-Remote-User: admin", 400, "this is not a token"),
        (7, 400, "this is not a token"),
    ],
)
def test_a_wrong_token_is_refused(cluster: Team, token: str, status: int, said: str) -> None:
    async def scenario(open_browser: Open, _: ClusterDashboard) -> None:
        browser = open_browser()
        answer = await browser.log_in(token)
        assert answer.status == status
        assert said in (await answer.json())["error"]
        assert COOKIE not in answer.cookies
        assert (await browser.get("/events")).status == 401

    run_scenario(scenario)


def test_a_user_never_sees_what_only_another_may(cluster: Team) -> None:
    async def scenario(open_browser: Open, page: ClusterDashboard) -> None:
        jo, maria = open_browser(), open_browser()
        for browser, token in ((jo, JO), (maria, MARIA)):
            assert (await browser.log_in(token)).status == 200
        assert await jo.names("/in/ml/") == ["digits"]
        assert await maria.names("/in/nlp/") == ["words"]
        async with jo.events("/in/nlp/") as following:
            assert 'User "jo@example.org" cannot list' in (await following("trouble"))["message"]
            assert (await following("jobs"))["rows"] == []
        async with jo.events("/") as following:
            assert "at the cluster scope" in (await following("trouble"))["message"]
        # Also what the dashboard itself has seen, for somebody else.
        for path in ("jobs/nlp/words", "jobs/nlp/words/logs", "jobs/nlp/words/metrics", "jobs/nlp/words/metrics.csv"):
            for base in ("/", "/in/nlp/", "/in/ml/"):
                assert (await jo.get(base + path)).status == 404, path
        assert (await jo.get("/in/ml/jobs/ml/digits")).status == 200
        assert (await jo.get("/in/ml/jobs/ml/digits/compare?with=nlp/words")).status == 404

    run_scenario(scenario)


def test_without_the_right_any_more_a_jobs_last_state_is_hidden(cluster: Team) -> None:
    async def scenario(open_browser: Open, _: ClusterDashboard) -> None:
        jo = open_browser()
        await jo.log_in(JO)
        async with jo.events("/in/ml/") as following:
            assert len((await following("jobs"))["rows"]) == 1
            cluster.people[JO].sees = set()
            assert (await following("jobs"))["gone"] == ["uid-digits"]
        assert (await jo.get("/in/ml/jobs/ml/digits")).status == 404

    run_scenario(scenario)


def test_the_cookie_is_for_this_host_alone_and_the_token_is_never_sent_back(cluster: Team) -> None:
    async def scenario(open_browser: Open, _: ClusterDashboard) -> None:
        jo = open_browser()
        answer = await jo.log_in(JO)
        cookie = answer.headers["Set-Cookie"]
        assert cookie.startswith("__Host-")
        assert {"HttpOnly", "Secure", "SameSite=Strict", "Path=/"} <= set(cookie.split("; "))
        assert "Domain" not in cookie
        sent = cookie + await answer.text() + await (await jo.get("/session")).text()
        async with jo.events("/in/ml/") as following:
            sent += json.dumps([await following("hello"), await following("jobs")])
        sent += await (await jo.get("/in/ml/jobs/ml/digits")).text()
        assert "jo@example.org" in sent
        assert JO not in sent

    run_scenario(scenario)


def test_a_session_ends_when_the_cluster_no_longer_accepts_the_token(cluster: Team) -> None:
    async def scenario(open_browser: Open, page: ClusterDashboard) -> None:
        jo = open_browser()
        await jo.log_in(JO)
        async with jo.events("/in/ml/") as following:
            await following("jobs")
            del cluster.people[JO]  # it has expired
            with pytest.raises(EOFError):
                await following("nothing")
        for path in ("/in/ml/events", "/session", "/in/ml/jobs/ml/digits"):
            assert (await jo.get(path)).status == 401, path
        assert (await (await jo.get("/session")).json())["asks"] == "token"

    run_scenario(scenario)


def test_an_expired_token_shows_nothing_that_was_seen_earlier(cluster: Team) -> None:
    async def scenario(open_browser: Open, _: ClusterDashboard) -> None:
        jo = open_browser()
        await jo.log_in(JO)
        assert await jo.names("/in/ml/") == ["digits"]
        del cluster.people[JO]
        assert (await jo.get("/in/ml/jobs/ml/digits")).status == 401

    run_scenario(scenario)


def test_logging_out_ends_all_of_it(cluster: Team) -> None:
    async def scenario(open_browser: Open, _: ClusterDashboard) -> None:
        jo = open_browser()
        await jo.log_in(JO)
        kept = jo.session.cookie_jar.filter_cookies(URL(jo.origin))[COOKIE].value
        async with jo.events("/in/ml/") as following:
            await following("jobs")
            assert (await jo.post("/logout")).status == 200
            with pytest.raises(EOFError):
                await following("nothing")
        assert (await jo.get("/session")).status == 401
        assert (await jo.get("/session", Cookie=f"{COOKIE}={kept}")).status == 401, "the server has forgotten it too"
        before = (await jo.log_in(JO)).cookies[COOKIE].value
        await jo.log_in(MARIA)
        assert (await (await jo.get("/session")).json())["user"] == "maria@example.org"
        assert (await open_browser().get("/session", Cookie=f"{COOKIE}={before}")).status == 401, (
            "and so by a new login"
        )

    run_scenario(scenario)


def test_an_unused_login_ends_and_so_does_an_old_one(cluster: Team, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(open_browser: Open, _: ClusterDashboard) -> None:
        for limit in ("IDLE_S", "MAX_AGE_S"):
            jo = open_browser()
            assert (await jo.log_in(JO)).status == 200
            assert (await jo.get("/session")).status == 200
            with monkeypatch.context() as patch:
                patch.setattr(sessions, limit, -1.0)
                assert (await jo.get("/session")).status == 401, limit
            assert (await jo.get("/session")).status == 401

    run_scenario(scenario)


def test_logins_are_limited_and_one_user_cannot_use_up_those_of_others(cluster: Team) -> None:
    async def scenario(open_browser: Open, _: ClusterDashboard) -> None:
        maria, first = open_browser(), open_browser()
        await maria.log_in(MARIA)
        await first.log_in(JO)
        for _number in range(sessions.MAX_PER_USER):
            await open_browser().log_in(JO)
        assert (await first.get("/session")).status == 401
        assert (await maria.get("/session")).status == 200

    run_scenario(scenario)


def test_one_login_has_a_limited_number_of_namespaces(cluster: Team) -> None:
    async def scenario(open_browser: Open, page: ClusterDashboard) -> None:
        jo = open_browser()
        await jo.log_in(JO)
        for number in range(3 * sessions.MAX_APIS):
            async with jo.events(f"/in/n{number}/") as following:
                await following("hello")
        async with jo.events("/in/n0/"), jo.events("/in/n1/"), jo.events("/in/n2/"), jo.events("/in/n3/"):
            refused = await jo.get("/in/n4/events")
            assert "namespaces are open already" in (await refused.json())["error"]

    run_scenario(scenario)


def test_the_dashboard_is_read_only_by_default(cluster: Team) -> None:
    async def scenario(open_browser: Open, _: ClusterDashboard) -> None:
        maria = open_browser()
        await maria.log_in(MARIA)
        async with maria.events("/in/nlp/") as following:
            hello = await following("hello")
        assert hello["changes"] is False
        for path in ("suspend", "cancel", "stacks"):
            answer = await maria.post(
                f"/in/nlp/jobs/nlp/words/{path}", {"uid": "uid-words"}, **{TOKEN_HEADER: hello["token"]}
            )
            assert (answer.status, (await answer.json())["error"]) == (403, READ_ONLY)

    run_scenario(scenario)
    assert "suspend" not in cluster.job("nlp", "words")["spec"]
    assert all(request.method in ("GET", "POST") for request in cluster.api.requests)


def test_a_change_is_made_with_the_persons_rights_and_recorded_with_their_name(
    cluster: Team, capsys: pytest.CaptureFixture[str]
) -> None:
    async def scenario(open_browser: Open, _: ClusterDashboard) -> None:
        jo, maria = open_browser(), open_browser()
        await jo.log_in(JO)
        await maria.log_in(MARIA)
        tokens = {}
        for browser, base in ((jo, "/in/ml/"), (maria, "/in/nlp/")):
            async with browser.events(base) as following:
                tokens[base] = {TOKEN_HEADER: (await following("hello"))["token"]}
        refused = await jo.post("/in/ml/jobs/ml/digits/suspend", {"uid": "uid-digits"}, **tokens["/in/ml/"])
        assert refused.status == 403
        assert 'User "jo@example.org" cannot patch resource "elasticjobs"' in (await refused.json())["error"]
        done = await maria.post("/in/nlp/jobs/nlp/words/suspend", {"uid": "uid-words"}, **tokens["/in/nlp/"])
        assert done.status == 200, await done.text()

    run_scenario(scenario, allow_changes=True)
    assert "suspend" not in cluster.job("ml", "digits")["spec"]
    assert cluster.job("nlp", "words")["spec"]["suspend"] is True
    (change,) = changes_of(cluster.job("nlp", "words"))
    assert (change.by, change.verb, change.client.partition(" ")[0]) == ("maria@example.org", "suspend", "dashboard")
    (line,) = capsys.readouterr().out.splitlines()
    assert (json.loads(line)["by"], json.loads(line)["name"]) == ("maria@example.org", "words")


def test_changes_and_logins_come_from_the_page_itself(cluster: Team) -> None:
    async def scenario(open_browser: Open, _: ClusterDashboard) -> None:
        maria, jo = open_browser(), open_browser()
        await maria.log_in(MARIA)
        await jo.log_in(JO)
        async with maria.events("/in/nlp/") as following:
            own = {TOKEN_HEADER: (await following("hello"))["token"]}
        async with jo.events("/in/ml/") as following:
            others = {TOKEN_HEADER: (await following("hello"))["token"]}
        path, body = "/in/nlp/jobs/nlp/words/suspend", {"uid": "uid-words"}
        for headers in (
            {},
            others,
            {**own, "Origin": "https://evil.example"},
            {**own, "Origin": ""},
            {**own, "Sec-Fetch-Site": "same-site", "Sec-Fetch-Mode": "cors"},
        ):
            assert (await maria.post(path, body, **headers)).status == 403, headers
        for path in ("/login", "/logout"):
            refused = await maria.post(path, {"token": JO}, Origin="https://evil.example")
            assert refused.status == 403
        assert (await maria.get("/session")).status == 200
        # TLS may end in front of the pod: the page's origin is https://, ours http://.
        https = {**own, "Origin": maria.origin.replace("http:", "https:")}
        assert (await maria.post("/in/nlp/jobs/nlp/words/suspend", body, **https)).status == 200

    run_scenario(scenario, allow_changes=True)


def test_a_token_in_a_header_is_taken_behind_a_proxy_alone(cluster: Team) -> None:
    header = {"Authorization": f"Bearer {JO}"}

    async def alone(open_browser: Open, _: ClusterDashboard) -> None:
        assert (await open_browser().get("/in/ml/events", **header)).status == 401

    async def behind(open_browser: Open, _: ClusterDashboard) -> None:
        browser = open_browser()
        assert await browser.names("/in/ml/", **header) == ["digits"]
        assert (await browser.get("/in/ml/events")).status == 401, "there is no cookie"
        assert (await browser.log_in(JO)).status == 404
        without = await (await browser.get("/session")).json()
        assert (without["asks"], "sends no token" in without["error"]) == ("proxy", True)
        wrong = await (await browser.get("/session", Authorization="Bearer wrong")).json()
        assert "does not accept this token" in wrong["error"]
        out = await browser.post("/logout", **header)
        assert (await out.json())["next"] == "/oauth2/sign_out"

    run_scenario(alone)
    assert cluster.shown == []
    run_scenario(behind, behind_proxy=True)


def test_requests_that_come_together_are_one_login(cluster: Team) -> None:
    async def scenario(open_browser: Open, _: ClusterDashboard) -> None:
        browser = open_browser()
        answers = await asyncio.gather(
            *(browser.get("/session", Authorization=f"Bearer {JO}") for _ in range(8)),
        )
        assert [answer.status for answer in answers] == [200] * 8

    run_scenario(scenario, behind_proxy=True)
    assert len([request for request in cluster.api.requests if request.path.endswith("selfsubjectreviews")]) == 1


def test_no_storage_is_opened_where_they_are_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variables.CLOSED_STORAGES, "there are no credentials here")
    for url in (tmp_path.as_uri(), "file:///nowhere", "s3://bucket/run"):
        for opens in (job_storages.open_storage_here, job_storages.open_job_storage):
            with pytest.raises(StorageError, match="there are no credentials here"):
                opens(url)


def test_the_command_closes_storages_before_it_serves(run: Run, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[str] = []

    async def serve(*_: Any) -> None:
        closed.append(os.environ[variables.CLOSED_STORAGES])

    monkeypatch.setenv(variables.CLOSED_STORAGES, "")
    monkeypatch.setattr(connection, "in_pod", lambda: True)
    monkeypatch.setattr(server, "serve", serve)
    assert run("dashboard", "--in-cluster").code == 0
    assert closed == [NO_STORAGES]


def test_in_cluster_mode_is_only_for_a_pod(run: Run, home: Path) -> None:
    assert "--in-cluster is for a pod" in run("dashboard", "--in-cluster").err
    assert "FIX: add --in-cluster" in run("dashboard", "--allow-changes").err
