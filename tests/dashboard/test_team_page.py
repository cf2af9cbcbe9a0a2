"""The overview: what failed, waits and runs, who spent what, filtered by the address."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest

from elasticctl.api.codec import to_rfc3339
from elasticctl.api.spec import USER_LABEL
from tests.support.dashboard.cluster import Jobs, sharing
from tests.support.dashboard.visitor import Visitor, hosted, see
from tests.support.job_samples import FAILED, job
from tests.support.usage_samples import IDLE

pytestmark = pytest.mark.browser
HOUR_S = 3600.0


def of(user: str, name: str, project: str, hours_ago: float, **status: Any) -> dict[str, Any]:
    """A job that has had ten hours of one on-demand machine since then."""
    found = job(
        name, **{"startTime": ago(hours_ago), "workerSeconds": {"on-demand": 36_000.0}, "workers": [], **status}
    )
    found["metadata"] |= {"namespace": project, "labels": {USER_LABEL: user}, "creationTimestamp": ago(hours_ago)}
    pod = found["spec"]["replicaSpecs"]["Worker"]["template"]["spec"]
    pod["nodeSelector"] = {"node.kubernetes.io/instance-type": "g5.xlarge"}
    pod["containers"][0]["resources"] = {"limits": {"nvidia.com/gpu": 1}}
    return found


def ago(hours: float) -> str:
    return to_rfc3339(time.time() - hours * HOUR_S)


def test_a_team_sees_what_matters_to_it(visitor: Visitor) -> None:
    nan = {"step": 120, "notFinite": {"loss": {"value": "NaN", "step": 81, "at": ago(1)}}}
    waiting = of("cy", "queued", "nlp", 2, phase="Pending", active=0, startTime=None, message="the cluster is full")
    jobs = [
        of("ada", "healthy", "vision", 10),
        of("ada", "diverged", "vision", 10, progress=nan),
        waiting,
        of("cy", "broken", "nlp", 40, **{**FAILED, "completionTime": ago(1), "message": "bad learning rate"}),
        of("cy", "long-ago", "nlp", 90, **{**FAILED, "completionTime": ago(60), "message": "another error"}),
        sharing("shares", "speech", 4, "its right"),
        of("ada", "asleep", "vision", 9, usage={"measured": 1, "workers": [{**IDLE, "worker": "asleep-worker-0"}]}),
    ]
    with hosted(Jobs(*jobs), namespace=None) as host:
        page = visitor.open(host.link)
        page.get_by_role("link", name="Overview").click()

        def part(title: str) -> Any:
            return page.get_by_role("region", name=title, exact=True)

        see(part("Needs a look")).to_contain_text("diverged ada · vision loss NaN since step 81, and it goes on")
        see(part("Needs a look")).to_contain_text("asleep ada · vision 1 GPU does nothing: step 120 of 560")
        see(part("Failed").get_by_role("listitem")).to_have_text(
            [re.compile(r"^broken cy · nlp 1h\d\dm ago: bad learning rate$")]
        )
        see(part("Waiting")).to_contain_text(re.compile(r"queued cy · nlp for 2h\d\dm: the cluster is full"))
        see(part("Running").get_by_role("listitem")).to_have_count(2)
        see(part("Shared slots")).to_contain_text("t4 4 of 8 GPUs held, 4 free")
        rows = part("Where the money went").get_by_role("row")
        see(rows.nth(1)).to_have_text(re.compile(r"^(ada3|cy2)"))
        page.get_by_role("combobox", name="Period", exact=True).select_option("7")
        see(part("Failed").get_by_role("listitem")).to_have_count(2)
        page.get_by_role("combobox", name="Person", exact=True).select_option("cy")
        see(part("Running")).to_be_hidden()
        page.get_by_role("combobox", name="Money", exact=True).select_option("day")
        see(page).to_have_url(re.compile("#/overview.since=7&user=cy&by=day$"))
        page.reload()
        see(part("Failed").get_by_role("listitem")).to_have_count(2)
        see(part("Running")).to_be_hidden()
        see(rows.nth(1)).to_contain_text(re.compile(r"^20\d\d-\d\d-\d\d[12]\d"))
        part("Failed").get_by_role("link", name="broken").click()
        see(page.get_by_role("heading", name="broken")).to_be_visible()
        page.get_by_label("Find a job by name").fill("que")
        see(page).to_have_url(re.compile("q=que"))
        page.reload()
        see(page.locator("#list li")).to_have_count(1)


def test_a_thousand_jobs_of_history_are_a_few_elements(visitor: Visitor) -> None:
    def past(number: int) -> dict[str, Any]:
        ended = {"phase": "Failed" if number % 2 else "Succeeded", "active": 0, "completionTime": ago(number / 2)}
        return of(f"user-{number % 7}", f"past-{number:04}", f"team-{number % 5}", number / 2 + 1, **ended)

    with hosted(Jobs(*map(past, range(1000))), namespace=None) as host:
        page = visitor.open(host.link)
        page.goto(f"{page.url}#/overview?since=all")
        failed = page.get_by_role("region", name="Failed", exact=True)
        see(failed).to_contain_text("and 450 other jobs")
        see(failed.get_by_role("listitem")).to_have_count(50)
        rows = page.get_by_role("region", name="Where the money went").get_by_role("row")
        see(rows).to_have_count(8)
        assert page.evaluate("document.querySelectorAll('*').length") < 3000
        page.get_by_role("combobox", name="Period", exact=True).select_option("7")
        see(failed).to_contain_text("and 118 other jobs")
        page.get_by_label("Find a job by name").fill("past-0999")
        see(page.locator("#list li")).to_have_count(1)


def test_money_is_spread_over_the_days(visitor: Visitor) -> None:
    with hosted(Jobs(job())) as host:
        page = visitor.open(host.link)
        spread = """async ([job, since, now]) => {
          const { spread } = await import("./team.js");
          return [...spread(job, since, now) ?? [["none", 0]]].map(([day, usd]) => usd);
        }"""
        day, noon = 86_400.0, page.evaluate("new Date(2026, 0, 10, 12) / 1000")
        ended = {"costUsd": 48.0, "startedAt": noon - day, "endedAt": noon + day}
        assert page.evaluate(spread, [ended, 0, noon + 9 * day]) == pytest.approx([12.0, 24.0, 12.0])
        assert page.evaluate(spread, [ended, noon, noon + 9 * day]) == pytest.approx([12.0, 12.0])
        assert page.evaluate(spread, [{**ended, "endedAt": None}, 0, noon]) == pytest.approx([24.0, 24.0])
        assert page.evaluate(spread, [{**ended, "costUsd": None}, 0, noon]) == [0]
