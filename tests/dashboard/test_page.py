"""The page in a real browser: what a person sees, types and clicks, on a screen and on a telephone."""

from __future__ import annotations

import copy
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from elasticctl.api.codec import to_rfc3339
from elasticctl.api.errors import UnreachableError
from elasticctl.api.spec import ElasticJob
from elasticctl.cluster.local.client import LocalCluster
from tests.support.cli import Run
from tests.support.dashboard.cluster import Jobs, many
from tests.support.dashboard.process import Serve
from tests.support.dashboard.visitor import MARKUP, PIXELS, Visitor, hosted, see
from tests.support.job_samples import CURVE, FAILED, at, job
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

pytestmark = pytest.mark.browser

DIGITS = Path(__file__).parents[2] / "examples" / "digits" / "train.py"


def tile(page: Page, title: str) -> Locator:
    return page.locator(".tile", has=page.get_by_text(title, exact=True))


def inked(page: Page, chart: int) -> int:
    """How many pixels of a chart's canvas have a colour: what is drawn without data is all grey."""
    drawn: int = page.evaluate(
        f"""(chart) => {{
          const shown = document.querySelectorAll("canvas")[chart];
          const data = ({PIXELS})(shown, shown.width);
          let found = 0;
          for (let i = 0; i < data.length; i += 4) {{
            const [red, green, blue, alpha] = data.subarray(i, i + 4);
            found += alpha > 200 && Math.max(red, green, blue) - Math.min(red, green, blue) > 60;
          }}
          return found;
        }}""",
        chart,
    )
    return drawn


@pytest.mark.timeout(900)
@pytest.mark.usefixtures("forked_workers")
def test_a_job_from_before_its_first_step_to_its_end(
    serve: Serve, visitor: Visitor, local_cluster: LocalCluster, run: Run
) -> None:
    page = visitor.open(serve().link())
    see(page.get_by_role("main")).to_contain_text("The local cluster is not running", ignore_case=True)
    assert local_cluster.list_jobs(None) == []  # which starts the supervisor
    begun = run(
        "submit", str(DIGITS), "--name", "digits", "--workers", "2", "--min-workers", "1", "--max-workers", "3",
        "--detach", "--", "--epochs", "100000", "--step-delay-s", "0.05",
    )  # fmt: skip
    assert begun.code == 0, begun.err
    see(page.get_by_role("heading", name="digits")).to_be_visible()
    see(page.locator(".far")).to_contain_text(re.compile(r"Step [1-9]"))
    first = page.locator(".far").inner_text()
    see(page.locator(".far")).not_to_have_text(first)
    see(page.get_by_role("img", name=re.compile("^loss: "))).to_be_visible()
    see(page.locator("canvas").nth(2)).to_be_visible()  # those of the machines may be there already
    wait_until(lambda: all(inked(page, chart) > 50 for chart in range(3)))

    assert run("preempt", "digits", "--worker", "1", "--notice", "none").code == 0
    disturbed = page.get_by_role("row", name=re.compile("Interruption digits-worker-1 Deleted"))
    see(disturbed).to_contain_text(re.compile(r"Deleted[\d.]+s"))

    page.get_by_role("button", name="Scale", exact=True).click()
    page.get_by_role("spinbutton", name="Workers").fill("3")
    page.get_by_role("dialog").get_by_role("button", name="Scale", exact=True).click()
    see(tile(page, "Workers")).to_contain_text("3 of 3")
    see(page.get_by_role("row", name=re.compile("Scaling 2 → 3 workers by user"))).to_be_visible()

    page.get_by_role("button", name="Suspend", exact=True).click()
    page.get_by_role("button", name="Let it run").click()
    see(page.get_by_role("dialog")).to_be_hidden()
    assert not ElasticJob.from_manifest(local_cluster.get_job("default", "digits")).suspend
    page.get_by_role("button", name="Suspend", exact=True).click()
    page.get_by_role("dialog").get_by_role("button", name="Suspend", exact=True).click()
    see(page.locator(".badge")).to_have_text("Suspended")
    page.get_by_role("button", name="Resume", exact=True).click()
    page.get_by_role("dialog").get_by_role("button", name="Resume", exact=True).click()
    see(page.locator(".badge")).to_have_text("Running")
    page.get_by_role("button", name="Cancel", exact=True).click()
    page.get_by_role("button", name="Cancel the job").click()
    see(page.locator(".badge")).to_have_text("Cancelled")
    see(page.get_by_role("button", name="Scale", exact=True)).to_be_hidden()
    assert ElasticJob.from_manifest(local_cluster.get_job("default", "digits")).status.phase == "Cancelled"


def test_job_messages_are_shown_as_text(visitor: Visitor) -> None:
    worker = {"name": MARKUP, "phase": MARKUP, "node": MARKUP, "uid": "w"}
    metrics = {MARKUP: [1.0, 2.0], "b": [1.0]}
    hostile = copy.deepcopy(
        job(
            **FAILED
            | {"workers": [worker], "curve": {**CURVE, "metrics": metrics}, "message": MARKUP, "reason": MARKUP}
        )
    )
    hostile["status"]["firstFailure"] |= {"error": MARKUP, "lastLines": [MARKUP]}
    hostile["status"]["interruptions"][0] |= {"worker": MARKUP, "message": MARKUP}
    container = hostile["spec"]["replicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]
    container |= {"command": [MARKUP], "image": MARKUP}
    with hosted(Jobs(hostile)) as host:
        page = visitor.open(host.link)
        see(page.locator("section.runs")).to_contain_text(MARKUP)
        see(page.locator(".findings")).to_contain_text(MARKUP)
        see(page.locator("section.workers")).to_contain_text(MARKUP)
        see(page.locator(".choice")).to_contain_text(MARKUP)
        assert page.locator("img, b:has-text('bold')").count() == 0
        assert page.title() != "hit"


def test_a_thousand_jobs_are_turned_over_and_found(visitor: Visitor) -> None:
    cluster = Jobs(*many(1000))
    with hosted(cluster) as host:
        page = visitor.open(host.link)
        rows = page.locator("#list li")
        see(rows).to_have_count(50)
        see(page.locator("#range")).to_have_text("1 to 50 of 1,000")
        see(page.locator("#summary")).to_have_text("500 running · 500 ended")
        page.get_by_label("Next page").click()
        see(page.locator("#range")).to_have_text("51 to 100 of 1,000")
        page.get_by_label("Which jobs").select_option("ended")
        see(page.locator("#range")).to_have_text("1 to 50 of 500")
        page.get_by_label("Find a job by name").fill("0123")
        see(rows).to_have_count(1)
        page.get_by_label("Which jobs").select_option("running")
        see(page.locator("#none")).to_have_text("No jobs match.")
        page.get_by_label("Which jobs").select_option("all")
        rows.first.get_by_role("link").click()
        see(page.get_by_role("heading", name="job-0123")).to_be_visible()
        del cluster.jobs["job-0123"]
        see(page.get_by_role("main")).to_contain_text("This job is gone")


def test_the_keyboard_is_enough(visitor: Visitor) -> None:
    with hosted(Jobs(job("one"), job("two"))) as host:
        page = visitor.open(host.link)
        see(page.locator("#list li")).to_have_count(2)
        page.keyboard.press("Tab")
        see(page.get_by_text("Skip to the job")).to_be_focused()
        for _ in range(5):
            page.keyboard.press("Tab")
        see(page.get_by_role("link", name=re.compile("^two"))).to_be_focused()
        page.keyboard.press("Enter")
        see(page.get_by_role("heading", name="two")).to_be_visible()
        see(page.locator("[aria-current]")).to_contain_text("two")
        page.get_by_role("button", name="Cancel", exact=True).focus()
        page.keyboard.press("Enter")
        see(page.get_by_role("button", name="Let it run")).to_be_focused()
        page.keyboard.press("Escape")
        see(page.get_by_role("dialog")).to_be_hidden()
        see(page.get_by_role("button", name="Cancel", exact=True)).to_be_focused()


def test_a_refusal_is_shown_where_it_was_requested(visitor: Visitor) -> None:
    cluster = Jobs(job())
    with hosted(cluster) as host:
        page = visitor.open(host.link)
        page.get_by_role("button", name="Scale", exact=True).click()
        cluster.jobs["digits"]["spec"]["maxReplicas"] = 2  # which the page does not know yet
        page.get_by_role("dialog").get_by_role("button", name="Scale", exact=True).click()
        see(page.get_by_role("alert").filter(has_text="more than the maximum")).to_be_visible()
        see(page.get_by_role("dialog")).to_be_visible()


def test_a_job_without_a_maximum_is_scaled_as_far_as_one_likes(visitor: Visitor) -> None:
    free = job()
    del free["spec"]["maxReplicas"]
    cluster = Jobs(free)
    with hosted(cluster) as host:
        page = visitor.open(host.link)
        see(tile(page, "Workers")).to_contain_text("1 or more")
        page.get_by_role("button", name="Scale", exact=True).click()
        see(page.locator("#ask-bounds")).to_have_text("1 or more")
        page.get_by_role("spinbutton", name="Workers").fill("9")
        page.get_by_role("dialog").get_by_role("button", name="Scale", exact=True).click()
        see(page.get_by_role("dialog")).to_be_hidden()
        wait_until(lambda: cluster.jobs["digits"]["spec"]["replicaSpecs"]["Worker"]["replicas"] == 9)


def test_all_charts_show_the_same_moment(visitor: Visitor) -> None:
    """Workers are a step function: between two changes their number is that after the first."""
    groups = [{"generation": 1, "workers": ["a", "b"], "openedAt": at(2), "formedAt": at(3)}]
    status = {"curve": CURVE, "generations": groups, "scalings": [], "phase": "Succeeded", "completionTime": at(70)}
    with hosted(Jobs(job(**status))) as host:
        page = visitor.open(host.link)
        readings = page.locator("figcaption .reading")
        see(readings).to_have_count(3)
        workers = page.get_by_role("img", name=re.compile("^Workers training: "))
        box = workers.bounding_box()
        assert box is not None
        workers.hover(position={"x": 0.88 * box["width"], "y": 40})  # at 60 of 70 s
        moment = re.compile(r"^(.*)  (.*)$")
        said = [moment.match(text) for text in readings.all_text_contents()]
        assert [found and found[2] for found in said] == ["0.21", "120", "2 of 4 wanted"]
        assert len({found and found[1] for found in said}) == 1


def test_the_charts_are_read_with_the_keyboard(visitor: Visitor) -> None:
    with hosted(Jobs(job(curve=CURVE))) as host:
        page = visitor.open(host.link)
        loss, readings = page.get_by_role("img", name=re.compile("^loss: ")), page.locator("figcaption .reading")
        loss.focus()
        for key, value, step in (("ArrowLeft", "0.21", "120"), ("ArrowLeft", "0.4", "80"), ("Home", "2.3", "0")):
            page.keyboard.press(key)
            see(readings.nth(0)).to_have_text(re.compile(rf"  {re.escape(value)}$"))
            see(readings.nth(1)).to_have_text(re.compile(rf"  {step}$"))
        page.keyboard.press("Escape")
        see(readings.first).to_have_text("0.21")


def test_the_largest_numbers_fit_their_axis(visitor: Visitor) -> None:
    with hosted(Jobs(job())) as host:
        page = visitor.open(host.link)
        ticks = "async (values) => (await import('./format.js')).marksOf(values)"
        for values in ([1e12, 1.1e12, 1.2e12], [-1.25e-12, 0, 1.25e-12], [1e300, 2e300], [0, 0.5, 1], [123400, 999999]):
            said = page.evaluate(ticks, values)
            assert max(map(len, said)) <= 8
            assert len(set(said)) == len(values)


def test_without_news_of_the_server_it_says_so_and_time_stands_still(visitor: Visitor) -> None:
    later = "const then = Date.now(); Date.now = () => then + 600_000; dispatchEvent(new Event('hashchange'))"
    cluster = Jobs(job(startTime=to_rfc3339(time.time() - 100)))
    with hosted(cluster) as host:
        page = visitor.open(host.link)
        see(page.locator(".titles").first).to_contain_text(re.compile("for [1-9]m"))
        cluster.trouble = UnreachableError("prod does not answer")
        see(page.locator("#banner")).to_contain_text("prod does not answer")
        page.evaluate(later)
        see(page.locator(".titles").first).to_contain_text(re.compile("for [1-9]m"))
        cluster.trouble = None
        see(page.locator("#banner")).to_be_hidden()
    see(page.locator("#connection")).to_have_text("Reconnecting")
    see(page.locator("#banner")).to_contain_text("elasticctl dashboard")
    before = page.locator(".titles").first.inner_text()
    page.evaluate(later)
    see(page.locator(".titles").first).to_have_text(before, use_inner_text=True)


def test_a_script_that_reports_no_steps_is_done_when_it_is(visitor: Visitor) -> None:
    with hosted(Jobs(job(phase="Succeeded", progress={}, completionTime=at(60)))) as host:
        page = visitor.open(host.link)
        see(page.locator(".far")).to_contain_text("Done; it reported no steps")


@pytest.mark.parametrize("width", [390, 1055])
def test_a_long_line_of_a_traceback_stays_in_its_place(visitor: Visitor, width: int) -> None:
    lines = ["Traceback (most recent call last):", "RuntimeError: " + "x" * 3_000]
    failed = {**FAILED, "firstFailure": {**FAILED["firstFailure"], "error": lines[-1], "lastLines": lines}}
    with hosted(Jobs(job(**failed | {"message": lines[-1]}))) as host:
        page = visitor.open(host.link + "#/default/digits", width=width)
        see(page.locator(".findings")).to_contain_text("--backoff-limit allows 3.")
        wider = """() => [...document.querySelectorAll('#job *')]
          .filter((node) => node.checkVisibility() && !node.closest('pre, .scroll, .uplot'))
          .filter((node) => node.getBoundingClientRect().right > innerWidth)
          .map((node) => node.outerHTML.slice(0, 80))"""
        assert page.evaluate(wider) == []
        assert page.locator("#job").evaluate("(pane) => pane.scrollWidth - pane.clientWidth") <= 0


def test_updates_move_nothing(visitor: Visitor) -> None:
    cluster = Jobs(job(curve=CURVE))
    with hosted(cluster) as host:
        page = visitor.open(host.link)
        see(page.get_by_role("img", name=re.compile("^loss: "))).to_be_visible()
        page.evaluate("""() => {
          globalThis.moved = 0;
          const seen = (list) => { for (const entry of list.getEntries()) globalThis.moved += entry.value; };
          new PerformanceObserver(seen).observe({ type: "layout-shift", buffered: false });
        }""")
        for step in (121, 200, 559):
            cluster.change(
                "digits", progress={"step": step, "totalSteps": 560}, checkpoint={"step": 1, "committed": step}
            )
            see(page.locator(".far")).to_contain_text(f"Step {step} of 560")
        assert page.evaluate("globalThis.moved") < 0.005


def test_the_charts_can_be_chosen_and_read(visitor: Visitor) -> None:
    with hosted(Jobs(job(curve=CURVE, phase="Succeeded", completionTime=at(62)))) as host:
        page = visitor.open(host.link)
        loss = page.get_by_role("img", name=re.compile("^loss: 2.3 at .*, 0.21 at "))
        see(loss).to_be_visible()
        page.get_by_role("button", name="accuracy").click()
        see(page.get_by_role("img", name=re.compile("^accuracy: "))).to_be_visible()
        see(page.get_by_role("button", name="accuracy")).to_have_attribute("aria-pressed", "true")
        see(page.locator("figcaption").first).to_contain_text("0.21")
        loss.hover(position={"x": 64, "y": 60})
        see(page.locator("figcaption").first).to_contain_text("2.3")


def test_a_loss_that_is_no_number_is_seen_at_a_glance(visitor: Visitor) -> None:
    curve = {**CURVE, "metrics": {"loss": [2.3, 0.9, None, None], "accuracy": [0.1, 0.95]}}
    lost = {"step": 120, "notFinite": {"loss": {"value": "NaN", "step": 81, "at": at(42)}}}
    with hosted(Jobs(job(curve=curve, phase="Succeeded", completionTime=at(62), progress=lost))) as host:
        page = visitor.open(host.link)
        loss = page.get_by_role("img", name=re.compile("^loss: 2.3 at .*, NaN since step 81 at "))
        see(loss).to_be_visible()
        see(page.locator("figcaption").first).to_contain_text("NaN since step 81")
        see(page.locator(".findings")).to_contain_text("loss NaN since step 81")
        see(page.locator("#list li")).to_contain_text("loss NaN since step 81")
        loss.hover(position={"x": 64, "y": 60})
        see(page.locator("figcaption").first).to_contain_text("2.3")
        page.get_by_role("button", name="accuracy").click()
        see(page.get_by_role("img", name=re.compile("^accuracy: 0.1 at .*, 0.95 at "))).to_be_visible()


def test_the_page_says_when_the_cluster_does_not_answer(visitor: Visitor) -> None:
    cluster = Jobs(job())
    with hosted(cluster) as host:
        page = visitor.open(host.link)
        see(page.locator("#connection")).to_have_text("Live")
        see(page.get_by_role("heading", name="digits")).to_be_visible()  # else there is nothing to keep showing
        cluster.trouble = UnreachableError("prod does not answer: is the VPN up?")
        see(page.locator("#banner")).to_contain_text("is the VPN up?")
        see(page.locator("#connection")).to_have_text("Waiting for the cluster")
        see(page.get_by_role("heading", name="digits")).to_be_visible()
        cluster.trouble = None
        see(page.locator("#banner")).to_be_hidden()


def test_after_a_break_it_goes_on_where_it_was(visitor: Visitor) -> None:
    cluster = Jobs(*many(3))
    with hosted(cluster) as host:
        page = visitor.open(host.link)
        see(page.locator("#list li")).to_have_count(3)
        page.evaluate("document.querySelectorAll('#list li').forEach((row) => { row.seen = true; })")
        with page.expect_request("**/events") as again:
            host.cut()
            cluster.change("job-0002", phase="Failed")
            see(page.locator("#connection")).to_have_text("Reconnecting")
        assert re.fullmatch(r"\w+\.\d+", again.value.all_headers()["last-event-id"])
        see(page.locator("#connection")).to_have_text("Live")
        see(page.get_by_role("link", name=re.compile("job-0002"))).to_contain_text("Failed")
        assert page.evaluate("[...document.querySelectorAll('#list li')].every((row) => row.seen)")


def test_without_jobs_it_says_how_to_start_one_and_what_has_the_focus_keeps_it(visitor: Visitor) -> None:
    with hosted(Jobs()) as host:
        page = visitor.open(host.link)
        see(page.get_by_role("main")).to_contain_text("No jobs yet")
        copies = page.get_by_role("main").get_by_role("button", name="Copy: elasticctl submit train.py")
        see(copies).to_be_visible()
        copies.focus()
        page.evaluate("dispatchEvent(new Event('hashchange'))")  # as each second, everything is drawn again
        see(copies).to_be_focused()
