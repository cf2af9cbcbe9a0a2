"""Projects on the page, in a real browser: bars and words, live, with and without rights, by keyboard and by touch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from elasticctl.api.quota import Quota
from elasticctl.dashboard.feed import NO_QUOTAS, OWN_ONLY
from tests.support.dashboard.cluster import Jobs, sharing
from tests.support.dashboard.visitor import MARKUP, Visitor, hosted, see
from tests.support.job_samples import job

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

pytestmark = pytest.mark.browser

QUOTAS = (Quota("vision", 1.0, {"t4": 4}, {"t4": 8}), Quota("speech", 2.0, {"t4": 4}))


def shared(**settings: Any) -> Jobs:
    """Two projects: one has borrowed, the other waits for its own."""
    lent = sharing("train", "vision", 6, "has all 6 workers that it asks for; borrows 2 GPUs from speech", borrowed=2)
    waits = sharing(
        "tune", "speech", 0, "waits for 2 GPUs that speech is guaranteed", change="gave way to vision/train"
    )
    return Jobs(lent, waits, **{"quotas": QUOTAS} | settings)


def row(page: Page, project: str) -> Locator:
    return page.get_by_role("region", name="t4").get_by_role("listitem").filter(has_text=project)


def parts(row: Locator) -> list[float]:
    """How much of its bar is held by right, borrowed, guaranteed and not used; and where its limit is."""
    found: list[float] = row.evaluate(
        """(row) => {
          const whole = row.querySelector(".meter").getBoundingClientRect();
          const part = (kind) => row.querySelector(`.${kind}`).getBoundingClientRect();
          const sizes = ["own", "lent", "unused"].map((kind) => part(kind).width / whole.width);
          return [...sizes, part("limit").width && (part("limit").right - whole.left) / whole.width];
        }"""
    )
    return [round(part, 2) for part in found]


def test_who_holds_what_and_who_waits_is_shown_as_it_changes(visitor: Visitor) -> None:
    cluster = shared()
    with hosted(cluster, "vision") as host:
        page = visitor.open(host.link)
        page.get_by_role("link", name="Projects · 1 job waits").click()
        see(page.get_by_role("heading", name="Projects")).to_be_visible()
        pool = page.get_by_role("region", name="t4")
        see(pool).to_contain_text("6 of 8 GPUs held · 2 free")
        see(row(page, "vision")).to_have_text("vision6 held · 4 guaranteed · 2 borrowed · limit 8")
        see(row(page, "speech")).to_have_text(
            "speech0 held · 4 guaranteed (4 of them not used) · weight 2 · 1 job waits"
        )
        assert parts(row(page, "vision")) == [0.5, 0.25, 0, 1]
        assert parts(row(page, "speech")) == [0, 0, 0.5, 0]
        waiting = page.get_by_role("region", name="Waiting")
        see(waiting).to_contain_text(
            "speech/tune waits for 2 GPUs that speech is guaranteed. Last change: gave way to vision/train."
        )
        assert waiting.get_by_role("link").count() == 0, "which is a job of another page"

        share = {"workers": 4, "pool": "t4", "poolSlots": 8, "message": "has 4 of 6 workers"}
        cluster.change("train", active=4, share=share)
        cluster.change("tune", phase="Running", share={**share, "message": "has all 4 workers"})
        see(row(page, "vision")).to_have_text("vision4 held · 4 guaranteed · limit 8")
        see(pool).to_contain_text("8 of 8 GPUs held · 0 free")
        see(waiting).to_be_hidden()
        see(page.locator("#to-projects")).to_have_text("Projects")
        page.get_by_role("region", name="What each job has").get_by_role("link", name="vision/train").click()
        see(page.get_by_role("heading", name="train")).to_be_visible()
        see(page.get_by_role("heading", name="Projects")).to_be_hidden()


def test_without_sharing_nothing_is_shown(visitor: Visitor) -> None:
    with hosted(Jobs(job())) as host:
        page = visitor.open(host.link)
        see(page.get_by_role("heading", name="digits")).to_be_visible()
        see(page.locator("#to-projects")).to_be_hidden()
        page.goto(page.url.partition("#")[0] + "#/projects")
        see(page.get_by_role("main")).to_contain_text("No project has a quota, and no jobs share this cluster.")


def test_with_limited_rights_the_rest_is_shown(visitor: Visitor) -> None:
    with hosted(shared(forbidden=["quotas", "all jobs"]), "vision") as host:
        page = visitor.open(host.link)
        see(page.get_by_role("heading", name="train")).to_be_visible()
        page.get_by_role("link", name="Projects").click()
        see(page.get_by_role("main")).to_contain_text(NO_QUOTAS)
        see(page.get_by_role("main")).to_contain_text(OWN_ONLY.format("vision"))
        see(page.get_by_role("region", name="t4")).to_contain_text("6 of 8 GPUs held")
        see(page.get_by_role("region", name="t4")).not_to_contain_text("free")
        see(row(page, "vision")).to_have_text("vision6 held · 2 borrowed")


def test_names_of_projects_and_jobs_are_shown_as_text(visitor: Visitor) -> None:
    hostile = sharing("train", "vision", 2, MARKUP, change=MARKUP, pool=MARKUP)
    with hosted(Jobs(hostile, quotas=[Quota(MARKUP, 1.0, {MARKUP: 4, "__proto__": 2})]), "vision") as host:
        page = visitor.open(host.link)
        page.get_by_role("link", name="Projects").click()
        for place in (".pool h3", ".parts b", ".sentences"):
            see(page.locator(place).filter(has_text=MARKUP).first).to_be_visible()
        assert page.locator("img, b:has-text('bold') > *").count() == 0
        assert page.title() != "hit"


def test_the_keyboard_is_enough_for_projects(visitor: Visitor) -> None:
    with hosted(shared(), "vision") as host:
        page = visitor.open(host.link)
        see(page.locator("#to-projects")).to_be_visible()
        for link in ("#skip", "#to-team", "#to-projects"):
            page.keyboard.press("Tab")
            see(page.locator(link)).to_be_focused()
        page.keyboard.press("Enter")
        see(page.get_by_role("region", name="Projects", exact=True)).to_be_visible()
        see(page.locator("#to-projects")).to_have_attribute("aria-current", "page")
        page.keyboard.press("Shift+Tab")
        page.keyboard.press("Shift+Tab")
        see(page.get_by_text("Skip to the projects")).to_be_focused()
        page.keyboard.press("Enter")
        see(page.locator("#job")).to_be_focused()
        page.keyboard.press("Tab")
        see(page.get_by_role("link", name="vision/train")).to_be_focused()
        assert page.locator(".meter:not([aria-hidden])").count() == 0, "a bar says nothing that the words do not"
