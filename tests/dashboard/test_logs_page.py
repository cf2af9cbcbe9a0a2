"""The log in the page: live, of one worker, found by a text, and to and fro between a moment of it and the curves."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from elasticctl.cluster.base import LogLine, LogQuery
from tests.support.dashboard.cluster import Jobs
from tests.support.dashboard.looks import MARKUP, see
from tests.support.dashboard.visitor import Visitor, hosted
from tests.support.job_samples import AT, CURVE, at, job

pytestmark = pytest.mark.browser


class Talking(Jobs):
    """Its only job prints `lines`."""

    def __init__(self, *lines: LogLine) -> None:
        workers = [{"name": f"digits-worker-{n}", "uid": f"w{n}", "phase": "Running"} for n in range(2)]
        super().__init__(job(curve=CURVE, workers=workers, phase="Succeeded", completionTime=at(70)))
        self.lines = list(lines)

    def logs(self, namespace: str, name: str, query: LogQuery) -> Iterator[LogLine]:
        wanted = [line for line in self.lines if not query.workers or line.worker in query.workers]
        yield from wanted[-query.tail :] if query.tail else wanted


def said(second: float, text: str, worker: int = 0) -> LogLine:
    return LogLine(f"digits-worker-{worker}", AT + second, text)


def test_the_log_is_live_and_can_be_searched(visitor: Visitor) -> None:
    lines = [said(n, f"step {n}", n % 2) for n in range(50)]
    cluster = Talking(*lines, said(50, f"\x1b[1;31mred\x1b[0m plain \x1b[2K{MARKUP}"))
    with hosted(cluster) as host:
        page = visitor.open(host.link)
        page.get_by_role("button", name="Show the log").click()
        printed = page.get_by_label("Lines of the log").get_by_role("listitem")
        see(printed).to_have_count(51)
        see(printed.last.locator(".text")).to_have_text(f"red plain {MARKUP}")
        see(printed.last.locator(".ansi-1.bold")).to_have_text("red")
        see(printed.last).to_be_in_viewport()
        cluster.lines += [said(50.5, "the same"), said(50.5, "the same"), said(51, "a new one", 1)]
        see(printed.last).to_contain_text("worker-1a new one")
        see(printed).to_have_count(54)
        page.get_by_label("Whose lines").select_option("digits-worker-1")
        see(printed).to_have_count(26)
        page.get_by_label("Find in the log").fill("STEP 4")
        see(printed).to_have_count(5)
        see(page.locator(".log-tools")).to_contain_text("5 lines with this text")
        page.reload()
        see(page.get_by_role("button", name="Hide the log")).to_be_visible()
        see(printed).to_have_count(54)


def test_from_a_curve_to_the_log_and_back(visitor: Visitor) -> None:
    with hosted(Talking(*(said(n / 10, f"line {n}") for n in range(700)))) as host:
        page = visitor.open(host.link)
        loss = page.get_by_role("img", name=re.compile("^loss: "))
        loss.focus()
        for key in ("ArrowLeft", "ArrowLeft", "Enter"):  # the second last point: 40 s after 2 s
            page.keyboard.press(key)
        here = page.locator(".lines .here")
        see(here).to_contain_text("line 420")
        see(here).to_be_in_viewport()
        first = page.get_by_label("Lines of the log").get_by_role("listitem").first
        see(first).to_contain_text("line 370")
        page.get_by_role("button", name="Earlier", exact=True).last.click()
        see(first).to_contain_text("line 0")
        page.get_by_role("listitem").filter(has_text=re.compile("line 220$")).get_by_role("button").click()
        see(loss).to_be_in_viewport()
        see(page.locator("figure .reading").first).to_have_text(re.compile("  0.9$"))  # of 22 s
        page.get_by_role("button", name=re.compile("^The log at ")).last.click()
        see(page.get_by_label("Lines of the log")).to_be_in_viewport()
