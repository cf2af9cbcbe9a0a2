"""The plan of a job with a deadline, as a picture; and the stacks of its ranks, by a button."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest

from elasticctl.api.codec import to_rfc3339
from elasticctl.api.spec import ElasticJob
from elasticctl.dashboard.page_data import job_details
from tests.support.dashboard.cluster import Jobs, Looked, launched, pod
from tests.support.dashboard.visitor import MARKUP, Visitor, hosted, see
from tests.support.job_samples import AT, at, job

HOUR_S = 3600.0


def planned(began: float, **status: Any) -> dict[str, Any]:
    """Two hours into the three it has: it began on spot in one zone, and has some machines on demand now."""

    def hour(number: float) -> str:
        return to_rfc3339(began + number * HOUR_S)

    steps = [
        {"at": hour(0), "pool": "spot/zone-a", "spot": 4, "onDemand": 0, "message": "the least expected cost"},
        {"at": hour(1.5), "pool": "spot/zone-b", "spot": 2, "onDemand": 1, "message": MARKUP},
    ]
    plan = {
        "at": hour(2), "pool": "spot/zone-b", "spot": 2, "onDemand": 1, "reason": "Cheapest", "message": MARKUP,
        "promised": True, "measured": True, "finishAt": hour(2.75), "spreadS": 300, "cost": 2.5, "steps": steps,
    }  # fmt: skip
    found = job(
        startTime=hour(0),
        curve={"since": hour(0), "atS": [60, 3600, 7000], "step": [0, 200, 400], "samplesPerS": [], "metrics": {}},
        progress={"step": 410, "totalSteps": 560},
        **{"plan": plan, "interruptions": [], "scalings": [], **status},
    )
    found["metadata"]["creationTimestamp"] = hour(0)
    prices = {"onDemand": 1.0, "spot": 0.3, "source": "simulated"}
    found["spec"]["goal"] = {"finishBy": hour(3), "budget": 5.0, "prices": prices}
    return found


def test_the_page_gets_the_plan_and_its_decisions() -> None:
    plan = job_details(ElasticJob.from_manifest(planned(AT)), (), AT + 2 * HOUR_S)["plan"]
    assert plan["words"].startswith("On track: ")
    assert plan["words"].endswith("; now 2 on spot in zone-b and 1 on demand")
    assert (plan["finishBy"], plan["finishAt"], plan["spreadS"], plan["budget"]) == (AT + 10800, AT + 9900, 300, 5.0)
    assert plan["steps"][1] | {"spot": 2, "onDemand": 1, "zone": "zone-b", "why": MARKUP} == plan["steps"][1]
    assert job_details(ElasticJob.from_manifest(job()), (), AT)["plan"] is None


@pytest.mark.browser
def test_a_plan_is_drawn_against_what_happened(visitor: Visitor) -> None:
    with hosted(Jobs(planned(time.time() - 2 * HOUR_S))) as host:
        page = visitor.open(host.link)
        part = page.get_by_role("region", name="Plan", exact=True)
        see(part).to_contain_text("now 2 on spot in zone-b and 1 on demand")
        see(part).to_contain_text(f"Why so many: {MARKUP}.")
        steps = part.get_by_role("img", name=re.compile("^Steps: 410 of 560 made; expected to end at .* 5m00s$"))
        see(steps.locator("canvas")).to_be_visible()
        workers = part.get_by_role("img", name=re.compile("^Workers: 0 training, 3 planned, 1 of them on demand$"))
        workers.focus()
        page.keyboard.press("Home")
        see(part.locator("figcaption").nth(1)).to_contain_text("0 training, 4 planned, 0 of them on demand")
        part.get_by_text("Decisions as a table").click()
        see(part.get_by_role("row").nth(1)).to_contain_text(f"2 on spot in zone-b, 1 on demand{MARKUP}")


@pytest.mark.browser
def test_a_job_that_has_ended_says_how_it_kept_its_goal(visitor: Visitor) -> None:
    ended = {"phase": "Succeeded", "active": 0, "completionTime": at(2.5 * HOUR_S), "workerSeconds": {"spot": 36_000.0}}
    with hosted(Jobs(planned(AT, **ended))) as host:
        part = visitor.open(host.link).get_by_role("region", name="Plan", exact=True)
        see(part).to_contain_text("Succeeded, 30m00s before its deadline; it cost about $3.00 of $5.00.")


@pytest.mark.browser
def test_the_stacks_of_all_ranks_by_a_button(visitor: Visitor) -> None:
    cluster = Jobs(launched(), job("other"))
    cluster.pods = [pod("digits-worker-0"), pod("digits-worker-1")]
    with hosted(cluster, access=Looked) as host:
        page = visitor.open(host.link)
        address = page.url
        page.goto(f"{address}#/default/digits")
        see(page.get_by_role("region", name="Plan", exact=True)).to_have_count(0)
        part = page.locator(".stack-tools")
        part.get_by_role("button", name="Stacks of all ranks").click()
        see(part.get_by_role("region")).to_contain_text("MainThread:\n    step (train.py:7)")
        see(part.get_by_role("status")).to_contain_text("digits-worker-1: its launcher cannot read stacks")
        page.goto(f"{address}#/default/other")
        see(part.get_by_role("region")).to_have_count(0)
        part.get_by_role("button", name="Stacks of all ranks").click()
        see(part.get_by_role("status")).to_contain_text("other does not run under elasticctl-launch")
