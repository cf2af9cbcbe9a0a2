"""Logging in and out in a browser, where many share the dashboard of a cluster."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.dashboard.team import Guest, Team, dashboard, served, team
from tests.support.dashboard.visitor import FOUND, Visitor, see

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.browser

JO, MARIA = "jo.token-of-jo", "maria.token-of-maria"


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Team]:
    people = {JO: Guest("jo@example.org", {"ml"}, {"ml"}), MARIA: Guest("maria@example.org", {"*"})}
    with team(tmp_path, monkeypatch, people) as made:
        made.add("digits", "ml")
        made.add("words", "nlp")
        yield made


def log_in(page: Page) -> None:
    page.get_by_label("A token of this cluster").fill(JO)
    page.get_by_role("button", name="Log in").click()


@pytest.mark.parametrize(("width", "dark"), [(360, False), (1280, True)])
def test_axe_finds_nothing_at_the_login_and_behind_it(cluster: Team, visitor: Visitor, width: int, dark: bool) -> None:
    axe = resources.files("axe_playwright_python").joinpath("axe.min.js").read_text(encoding="utf-8")
    with served(dashboard()) as address:
        page = visitor.open(f"{address}/in/ml/", width=width, dark=dark)
        see(page.get_by_role("dialog", name="Log in to elasticctl")).to_be_visible()
        page.evaluate(axe)
        assert page.evaluate(FOUND) == []
        page.get_by_label("A token of this cluster").fill("wrong")
        page.keyboard.press("Enter")
        see(page.get_by_role("alert").filter(has_text="does not accept this token")).to_be_visible()
        assert page.evaluate(FOUND) == []
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        log_in(page)
        see(page.locator("#list li")).to_have_count(1)
        page.evaluate(axe)
        assert page.evaluate(FOUND) == []
        assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_a_link_to_a_job_is_there_after_the_login_and_nothing_after_the_log_out(
    cluster: Team, visitor: Visitor
) -> None:
    with served(dashboard()) as address:
        page = visitor.open(f"{address}/in/ml/#/ml/digits")
        log_in(page)
        see(page.get_by_role("heading", name="digits")).to_be_visible()
        see(page.get_by_text("jo@example.org")).to_be_visible()
        see(page.get_by_text("this dashboard has no credentials for them")).to_be_visible()
        see(page.get_by_role("button", name="Suspend")).to_be_hidden()
        kept = page.evaluate("document.cookie + JSON.stringify({ ...localStorage, ...sessionStorage })")
        assert JO not in page.url + page.content() + kept
        page.get_by_role("button", name="Log out").click()
        see(page.get_by_role("dialog", name="Log in to elasticctl")).to_be_visible()
        assert "digits" not in page.inner_text("body")
        assert page.url.endswith("/in/ml/#/ml/digits")


def test_when_the_token_expires_the_page_asks_for_a_login(cluster: Team, visitor: Visitor) -> None:
    with served(dashboard()) as address:
        page = visitor.open(f"{address}/in/ml/")
        log_in(page)
        see(page.get_by_role("heading", name="digits")).to_be_visible()
        del cluster.people[JO]
        see(page.get_by_role("dialog", name="Log in to elasticctl")).to_be_visible()
        assert "digits" not in page.inner_text("body")


def test_a_namespace_is_chosen_at_the_top(cluster: Team, visitor: Visitor) -> None:
    with served(dashboard()) as address:
        page = visitor.open(address)
        log_in(page)
        see(page.get_by_text("Or name a namespace at the top.")).to_be_visible()
        page.get_by_label("Namespace").fill("ml")
        page.keyboard.press("Enter")
        see(page.get_by_role("heading", name="digits")).to_be_visible()
        assert page.url == f"{address}/in/ml/"
        page.get_by_label("Namespace").fill("")
        page.keyboard.press("Enter")
        see(page.get_by_text("at the cluster scope")).to_be_visible()
        assert page.url == f"{address}/"
