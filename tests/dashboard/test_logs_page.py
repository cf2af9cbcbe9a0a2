"""The log in the page: live, of one worker, found by a text, and to and fro between a moment of it and the curves."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from elasticctl.cluster.base import LogLine, LogQuery
from tests.support.dashboard.cluster import Jobs
from tests.support.dashboard.visitor import MARKUP, Visitor, hosted, see
from tests.support.job_samples import AT, CURVE, at, job
from tests.support.waiting import wait_until

pytestmark = pytest.mark.browser
TURN = """(list, far) => {
  list.scrollBy(0, far);
  const { top } = list.getBoundingClientRect();
  return [...list.children].find((line) => line.getBoundingClientRect().bottom > top).textContent.split("step ")[1];
}"""
"""Scrolls so far; the number of the first line that is seen then."""


class Talking(Jobs):
    """Its only job prints `lines`."""

    def __init__(self, *lines: LogLine) -> None:
        workers = [{"name": f"digits-worker-{n}", "uid": f"w{n}", "phase": "Running"} for n in range(2)]
        super().__init__(job(curve=CURVE, workers=workers, phase="Succeeded", completionTime=at(70)))
        self.lines = list(lines)

    def logs(self, namespace: str, name: str, query: LogQuery) -> Iterator[LogLine]:
        wanted = [line for line in self.lines if not query.workers or line.worker in query.workers]
        yield from wanted[-query.tail :] if query.tail else wanted


class Loud(Jobs):
    """Its only job has printed a million lines, ten thousand at each moment, and prints on as long as it `goes_on`."""

    def __init__(self) -> None:
        group = {"generation": 1, "workers": ["digits-worker-0"], "formedAt": at(0)}
        found = job(workers=[{"name": "digits-worker-0", "uid": "w0", "phase": "Running"}], generations=[group])
        (container,) = found["spec"]["replicaSpecs"]["Worker"]["template"]["spec"]["containers"]
        container["command"] = ["elasticctl-launch", "--nproc-per-node", "2", "--", "python", "train.py"]
        super().__init__(found)
        self.count, self.goes_on = 1_000_000, False

    def logs(self, namespace: str, name: str, query: LogQuery) -> Iterator[LogLine]:
        if self.goes_on:
            self.count += 30_000
        since = 0 if query.since is None else max(0, int(query.since - AT) * 10_000)
        for n in range(max(since, self.count - query.tail) if query.tail else since, self.count):
            yield LogLine("digits-worker-0", AT + n // 10_000, f"[rank{n % 2}] step {n}")


def said(second: float, text: str, worker: int = 0) -> LogLine:
    return LogLine(f"digits-worker-{worker}", AT + second, text)


def test_the_log_is_live_and_can_be_searched(visitor: Visitor) -> None:
    lines = [said(n, f"step {n}", n % 2) for n in range(50)]
    cluster = Talking(*lines, said(50, f"\x1b[1;31mred\x1b[0m plain \x1b[2K{MARKUP}"))
    with hosted(cluster) as host:
        page = visitor.open(host.link)
        see(page.get_by_role("img", name=re.compile("^loss: "))).to_be_visible()  # what comes late moves what is below
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


def test_a_million_lines_are_gone_through_and_few_are_drawn(visitor: Visitor) -> None:
    cluster = Loud()
    with hosted(cluster) as host:
        page = visitor.open(host.link)
        page.get_by_role("button", name="Show the log").click()
        lines = page.get_by_label("Lines of the log")
        printed = lines.get_by_role("listitem")
        see(printed.last).to_contain_text("step 999999")
        page.get_by_role("button", name="First", exact=True).click()
        see(printed.first).to_contain_text("step 0")

        def turn(far_px: int) -> int:
            return int(lines.evaluate(TURN, far_px))

        wait_until(lambda: turn(3_000) > 12_000)  # beyond a moment at which ten thousand were printed
        assert printed.count() <= 800
        texts = lines.evaluate("(list) => [...list.children].map((line) => Number(line.textContent.split('step ')[1]))")
        assert texts == [*range(texts[0], texts[0] + len(texts))], "each line once, and in order"
        wait_until(lambda: turn(-3_000) == 0)
        assert printed.count() <= 800
        cluster.goes_on = True
        page.get_by_role("button", name="Live", exact=True).click()
        wait_until(lambda: cluster.count >= 1_150_000)
        cluster.goes_on = False
        see(printed.last).to_contain_text(f"step {cluster.count - 1}")


def test_the_log_of_one_rank(visitor: Visitor) -> None:
    with hosted(Loud()) as host:
        page = visitor.open(host.link)
        page.get_by_role("button", name="Show the log").click()
        page.get_by_label("Whose lines").select_option("Rank 1")
        printed = page.get_by_label("Lines of the log").get_by_role("listitem")
        see(printed.last).to_contain_text("[rank1] step 999999")
        see(printed.nth(-2)).to_contain_text("[rank1] step 999997")
        page.get_by_role("button", name="First", exact=True).click()
        see(printed.first).to_contain_text("[rank1] step 1")
        page.get_by_label("Find in the log").fill("step 99999")
        see(page.locator(".log-tools")).to_contain_text("6 lines with this text")
        see(printed).to_have_text([re.compile(rf"\[rank1\] step 99999{end}$") for end in ("", 1, 3, 5, 7, 9)])


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
