"""The page where things go wrong, or slowly: bad addresses, slow clusters, late refusals, connections that just die."""

from __future__ import annotations

import re
import threading
from typing import Any

import pytest

from elasticctl.api.errors import ConflictError
from tests.support.dashboard.cluster import Jobs, many
from tests.support.dashboard.visitor import PIXELS, Visitor, hosted, see
from tests.support.job_samples import at, job
from tests.support.waiting import wait_until

pytestmark = pytest.mark.browser


def test_an_invented_address_names_no_job(visitor: Visitor) -> None:
    with hosted(Jobs(job())) as host:
        page = visitor.open(host.link)
        see(page.get_by_role("heading", name="digits")).to_be_visible()
        page.goto(page.url.partition("#")[0] + "#/default/%E0%A4")
        see(page.get_by_role("main")).to_contain_text("This job is gone")
        page.get_by_role("link", name="digits").click()
        see(page.get_by_role("heading", name="digits")).to_be_visible()


def test_a_job_that_takes_long_to_come_does_not_leave_another_in_its_place(visitor: Visitor) -> None:
    cluster, answers = Jobs(job("quick"), job("slow")), threading.Event()
    cluster.jobs["slow"]["metadata"]["creationTimestamp"] = "2020-01-01T00:00:00Z"

    def pods(_: str, name: str) -> list[Any]:
        if name == "slow":
            answers.wait()
        return []

    cluster.list_pods = pods  # type: ignore[method-assign]
    try:
        with hosted(cluster) as host:
            page = visitor.open(host.link)
            see(page.get_by_role("heading", name="quick")).to_be_visible()
            page.get_by_role("link", name="slow").click()
            see(page.get_by_role("main")).to_contain_text("Asking the cluster about slow.")
            see(page.get_by_role("button", name="Cancel", exact=True)).to_be_hidden()
            page.get_by_role("link", name="quick").click()
            see(page.get_by_role("heading", name="quick")).to_be_visible()
            page.get_by_role("link", name="slow").click()
            answers.set()
            see(page.get_by_role("heading", name="slow")).to_be_visible()
    finally:
        answers.set()


def test_a_job_that_comes_does_not_push_away_the_one_that_is_read(visitor: Visitor) -> None:
    cluster = Jobs(job("old"))
    with hosted(cluster) as host:
        page = visitor.open(host.link)
        see(page.get_by_role("heading", name="old")).to_be_visible()
        newer = job("new")
        newer["metadata"]["creationTimestamp"] = at(60)
        cluster.jobs["new"] = newer
        see(page.locator("#list li").first).to_contain_text("new")
        see(page.locator("#list [aria-current]")).to_contain_text("old")
        see(page.get_by_role("heading", name="old")).to_be_visible()
        del cluster.jobs["old"]
        see(page.get_by_role("heading", name="new")).to_be_visible()


def test_a_late_refusal_is_shown_all_the_same(visitor: Visitor) -> None:
    """Even where its question has been closed, and another one is open that it has nothing to do with."""
    cluster, answers = Jobs(job()), threading.Event()

    def refuse(*_: object) -> Any:
        answers.wait()
        raise ConflictError("somebody else was faster")

    cluster.patch_job = refuse  # type: ignore[method-assign]
    try:
        with hosted(cluster) as host:
            page = visitor.open(host.link)
            page.get_by_role("button", name="Suspend", exact=True).click()
            page.get_by_role("dialog").get_by_role("button", name="Suspend", exact=True).click()
            page.keyboard.press("Escape")
            page.get_by_role("button", name="Cancel", exact=True).click()
            answers.set()
            see(page.locator("#said")).to_have_text("digits: no suspend: somebody else was faster")
            see(page.get_by_role("heading", name="Cancel digits for good?")).to_be_visible()
            see(page.locator("#ask-error")).to_have_text("")
    finally:
        answers.set()


def test_a_connection_that_dies_without_a_word_is_noticed(visitor: Visitor) -> None:
    with hosted(Jobs(*many(2))) as host:
        page = visitor.open("about:blank")
        page.clock.install()
        page.goto(host.link)
        see(page.locator("#connection")).to_have_text("Live")
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        page.clock.run_for(20_000)
        assert not [url for url in asked if url.endswith("/events")], "a sign of life comes every 15 s"
        with page.expect_request("**/events"):
            page.clock.run_for(50_000)
        see(page.locator("#connection")).to_have_text("Live")
        see(page.locator("#list li")).to_have_count(2)


def test_a_long_run_has_numbers_on_its_axes(visitor: Visitor) -> None:
    long = {"since": at(2), "atS": [0, 3600], "step": [0, 5_000_000], "metrics": {"loss": [2.0, 1.0]}}
    with hosted(Jobs(job(curve=long))) as host:
        page = visitor.open(host.link)
        see(page.get_by_role("img", name=re.compile("^Steps: 0 at .*, 5,000,000 at "))).to_be_visible()
        left_of_the_plot = f"""() => {{
          const data = ({PIXELS})(document.querySelectorAll("canvas")[1], 50 * devicePixelRatio);
          return data.some((value, place) => place % 4 === 3 && value > 100);
        }}"""
        wait_until(lambda: page.evaluate(left_of_the_plot))


def test_the_cursor_on_a_long_course_does_not_upset_a_short_one(visitor: Visitor) -> None:
    def course(points: int) -> dict[str, Any]:
        return {"since": at(2), "atS": [*range(points)], "step": [*range(points)], "metrics": {"loss": [1.0] * points}}

    with hosted(Jobs(job("long", curve=course(50)), job("short", curve=course(3)))) as host:
        page = visitor.open(host.link)
        page.get_by_role("link", name="long").click()
        see(page.get_by_role("heading", name="long")).to_be_visible()
        loss = page.get_by_role("img", name=re.compile("^loss: "))
        loss.hover(position={"x": 60, "y": 60})
        page.mouse.move(400, 400)
        loss.hover()
        page.evaluate("location.hash = '#/default/short'")
        see(page.get_by_role("heading", name="short")).to_be_visible()
        see(page.locator("figcaption").first).to_contain_text("1")


def test_a_metric_without_numbers_is_shown(visitor: Visitor) -> None:
    curve = {"since": at(2), "atS": [0, 20], "step": [0, 40], "metrics": {"loss": ["x"], "accuracy": [0.5]}}
    with hosted(Jobs(job(curve=curve))) as host:
        page = visitor.open(host.link)
        see(page.get_by_role("img", name=re.compile("^accuracy: 0.5 at "))).to_be_visible()
        page.goto(page.url + "#/default/digits?m=loss&m=accuracy")
        see(page.get_by_role("img", name=re.compile("^accuracy: 0.5 at "))).to_be_visible()


def test_an_end_that_was_not_recorded_is_not_made_up(visitor: Visitor) -> None:
    worker = {"name": "digits-worker-0", "uid": "w", "phase": "Failed", "cause": "Killed"}
    with hosted(Jobs(job(phase="Failed", workers=[worker]))) as host:
        page = visitor.open(host.link)
        see(page.get_by_role("heading", name="digits")).to_be_visible()
        see(page.locator(".titles").first).to_have_text("digitsFailed")
        see(page.get_by_role("row", name="digits-worker-0")).to_have_text(re.compile("Killed.ended$"))
