"""What axe-core finds on the page: nothing, in any view, in both themes, on a telephone and on a desk."""

from __future__ import annotations

from importlib import resources

import pytest

from elasticctl.api.quota import Quota
from tests.support.dashboard.cluster import Jobs, sharing
from tests.support.dashboard.visitor import FOUND, Visitor, hosted, see
from tests.support.job_samples import CURVE, FAILED, at, job
from tests.support.usage_samples import BUSY, HISTORY, IDLE

pytestmark = pytest.mark.browser

LOST = {"step": 120, "notFinite": {"loss": {"value": "NaN", "step": 81, "at": at(42)}}}
DIVERGED = {**CURVE, "metrics": {"loss": [2.3, 0.9, None, None], "accuracy": [0.1, 0.95]}}
PLANNED = job(
    "planned",
    curve=CURVE,
    plan={
        "finishAt": at(500),
        "steps": [{"at": at(2), "spot": 4, "onDemand": 0, "pool": "spot", "message": "the least expected cost"}],
    },
)
PLANNED["spec"]["goal"] = {"finishBy": at(900), "budget": 5.0}
VIEWS = {
    "#/": "#list li",
    "#/default/digits?vs=default%2Fdiverged&m=loss&s=0.9&gpus=each&diff=default%2Fdiverged": ".differences td",
    "#/default/diverged?x=step": ".metric-charts canvas",
    "#/default/failed": ".finding pre",
    "#/default/planned": ".plan canvas",
    "#/default/gone": ".empty h2",
    "#/projects": ".pool",
    "#/overview?by=project": ".team tbody tr",
}


@pytest.mark.parametrize(("width", "dark"), [(360, False), (1280, False), (1280, True)])
def test_axe_finds_nothing(visitor: Visitor, width: int, dark: bool) -> None:
    axe = resources.files("axe_playwright_python").joinpath("axe.min.js").read_text(encoding="utf-8")
    jobs = [
        job("digits", curve=CURVE, usage={"measured": 2, "workers": [BUSY, IDLE]}, usageHistory=HISTORY),
        job("diverged", curve=DIVERGED, progress=LOST),
        job("failed", **FAILED),
        PLANNED,
    ]
    long = sharing("a-job-with-a-rather-long-name-as-sweeps-give-them", "nlp", 0, "waits for 2 GPUs " + "x" * 200)
    cluster = Jobs(*jobs, long, quotas=[Quota("a-project-with-a-very-long-name-of-sixty-three-characters-in-all")])
    with hosted(cluster, namespace=None) as host:
        page = visitor.open(host.link, width=width, dark=dark)
        address = page.url
        for view, sign in VIEWS.items():
            page.goto(address + view)
            see(page.locator(sign).first).to_be_visible()
            page.evaluate(axe)
            assert page.evaluate(FOUND) == [], view
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            assert page.locator("#job").evaluate("(pane) => pane.scrollWidth - pane.clientWidth") <= 0, view
        page.goto(f"{address}#/default/digits")
        if width == 360:
            see(page.get_by_role("navigation")).to_be_hidden()
            page.get_by_role("link", name="All jobs").click()
            see(page.get_by_role("navigation")).to_be_visible()
            page.get_by_role("link", name="digits").click()
        page.get_by_role("button", name="Scale", exact=True).click()
        assert page.evaluate(FOUND) == []
