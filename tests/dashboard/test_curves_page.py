"""Curves in the page: several together, any part of them, next to other runs, and kept in the address."""

from __future__ import annotations

import copy
import csv
import re
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote
from xml.etree import ElementTree

import pytest

from elasticctl_store.stored_logs import Incarnation
from tests.support.dashboard.cluster import Jobs
from tests.support.dashboard.visitor import MARKUP, Visitor, hosted, see
from tests.support.job_samples import AT, CURVE, at, job
from tests.support.stored import keeps_in, store_metrics

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

pytestmark = pytest.mark.browser
STEPS = 5_000
SPIKE = 2_345
SVG = "{http://www.w3.org/2000/svg}"


def run(name: str, folder: Path, *arguments: str, loss: float) -> dict[str, object]:
    """A run of some thousand steps, 50 a second, whose loss falls to a thousandth, with one spike."""
    found = keeps_in(job(name, phase="Succeeded", startTime=at(0), completionTime=at(100)), folder, *arguments)
    life = Incarnation(found["metadata"]["uid"], f"{name}-0", AT, "pod")
    values = ((step, 99.0 if step == SPIKE else loss * (1 - step / STEPS) + loss / 1000) for step in range(STEPS))
    rows = [
        {"step": step, "at": AT + step / 50, "samples": 64 * step, "loss": value, "lr": 0.1} for step, value in values
    ]
    rows += [{"step": STEPS, "at": AT + 100, "accuracy": 0.5}]
    store_metrics(folder, life, 1, rows)
    return found


def chart(page: Page, name: str) -> Locator:
    return page.get_by_role("img", name=re.compile(f"^{name}: "))


def reading(page: Page, name: str) -> Locator:
    return page.locator("figure", has=chart(page, name)).locator(".reading")


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, object]]:
    folder = tmp_path_factory.mktemp("runs")
    return [run("one", folder, "--lr", "0.1", loss=2.0), run("other", folder, "--lr", "0.2", loss=4.0)]


@pytest.fixture
def runs(stored: list[dict[str, object]]) -> Jobs:
    return Jobs(*copy.deepcopy(stored))


def test_several_metrics_and_any_part_of_them(visitor: Visitor, runs: Jobs) -> None:
    with hosted(runs) as host:
        page = visitor.open(host.link)
        page.goto(f"{page.url}#/default/one?x=step&m=loss&m=lr")
        see(page.locator(".metric-charts figure")).to_have_count(2)
        see(chart(page, "loss")).to_have_accessible_name(re.compile("^loss: 2.002 at step 0, 0.0024 at step 4,999$"))
        see(page.get_by_label("Smoothing")).to_have_value("")
        page.goto(page.url.replace("m=lr", "m=accuracy"))
        see(chart(page, "accuracy")).to_be_visible()
        for name in ("loss", "accuracy"):  # one axis for all: the only accuracy is that of the last step
            chart(page, name).focus()
            page.keyboard.press("End")
        cursors = page.locator(".metric-charts .u-cursor-x")
        loss_x, accuracy_x = cursors.evaluate_all("(lines) => lines.map((line) => line.getBoundingClientRect().x)")
        assert abs(loss_x - accuracy_x) < 3
        page.goto(page.url.replace("m=accuracy", "m=lr"))
        see(page.locator(".metric-charts figure")).to_have_count(2)
        loss = chart(page, "loss")
        box = loss.bounding_box()
        assert box is not None
        middle = box["x"] + 64 + (box["width"] - 72) * SPIKE / STEPS
        page.mouse.move(middle - 40, box["y"] + 50)
        page.mouse.down()
        page.mouse.move(middle + 40, box["y"] + 50, steps=4)
        page.mouse.up()
        see(page).to_have_url(re.compile("from=2[0-3][0-9][0-9]&to=2[3-6][0-9][0-9]"))
        loss.focus()
        for _ in range(8):
            page.keyboard.press("-" if page.url.count("from=-") else "+")
        page.keyboard.press("0")
        see(page).to_have_url(re.compile("m=lr$"))
        page.goto(re.sub("#.*", f"#/default/one?x=step&m=loss&from={SPIKE - 3}&to={SPIKE + 3}", page.url))
        see(loss).to_have_accessible_name(re.compile(f"at step {SPIKE - 4:,}, .* at step {SPIKE + 4:,}$"))
        loss.focus()
        for _ in range(5):
            page.keyboard.press("ArrowLeft")
        see(reading(page, "loss")).to_have_text(f"step {SPIKE:,}  99")
        page.keyboard.press("Shift+ArrowRight")
        see(page).to_have_url(re.compile(f"from={SPIKE - 1}&to={SPIKE + 5}"))
        page.reload()
        see(loss).to_have_accessible_name(re.compile(f"at step {SPIKE - 2:,}, .* at step {SPIKE + 6:,}$"))


def test_runs_next_to_each_other(visitor: Visitor, runs: Jobs) -> None:
    with hosted(runs) as host:
        page = visitor.open(host.link)
        page.goto(f"{page.url}#/default/one")
        page.get_by_label("Compare with").select_option("default/other")
        see(page).to_have_url(re.compile("vs=default%2Fother"))
        compared = page.get_by_label("Runs that are compared").get_by_role("listitem")
        see(compared.nth(0)).to_contain_text(re.compile("^oneSucceeded--lr 0.1$"))
        see(compared.nth(1)).to_contain_text(re.compile("^otherSucceeded--lr 0.2differencesremove$"))
        see(reading(page, "loss")).to_have_text("one 0.0024 · other 0.0048")
        page.get_by_text("Values as a table").click()
        see(page.get_by_role("row", name="other loss")).to_contain_text("0.0048")
        see(page.get_by_role("row", name="other loss")).to_contain_text("99")
        page.get_by_role("button", name="How other differs").click()
        part = page.locator(".differences")
        rows = part.get_by_role("row")
        see(rows.first).to_have_text("Whatoneother")
        see(rows.filter(has_text="--lr")).to_have_text("--lr0.10.2")
        see(rows.filter(has_text="loss lowest")).to_have_text("loss lowest0.00240.0048")
        see(part.get_by_role("status")).to_have_text(
            "Code: not known: both run what is in their image or on this machine"
        )
        see(page).to_have_url(re.compile("diff=default%2Fother"))
        page.reload()
        see(rows.filter(has_text="--lr")).to_have_text("--lr0.10.2")
        page.get_by_role("button", name="How other differs").click()
        see(part).to_be_hidden()
        page.get_by_role("button", name="Take other out").click()
        see(compared).to_have_count(0)
        see(reading(page, "loss")).to_have_text("0.0024")


def test_curves_are_taken_along(visitor: Visitor, runs: Jobs) -> None:
    with hosted(runs) as host:
        page = visitor.open(host.link)
        page.goto(f"{page.url}#/default/one")
        see(chart(page, "loss")).to_be_visible()
        with page.expect_download() as table:
            page.get_by_role("link", name="CSV").click()
        with open(table.value.path(), newline="") as file:
            rows = list(csv.DictReader(file))
        assert len(rows) == 2 * STEPS + 1
        assert rows[SPIKE] == {"metric": "loss", "step": str(SPIKE), "at": f"{AT + SPIKE / 50:.3f}", "value": "99.0"}
        with page.expect_download() as picture:
            page.get_by_role("button", name="The charts as a picture").click()
        assert picture.value.suggested_filename == "one.png"
        assert picture.value.path().read_bytes()[:4] == b"\x89PNG"


def test_a_drawing_has_the_curves_of_all_runs_and_the_words_of_the_axes(visitor: Visitor, runs: Jobs) -> None:
    runs.jobs["one"] = {**runs.jobs["one"], "metadata": {**runs.jobs["one"]["metadata"], "name": MARKUP}}
    with hosted(runs) as host:
        page = visitor.open(host.link)
        page.goto(f"{page.url}#/default/{quote(MARKUP, safe='')}?x=step&vs=default%2Fother&y=linear")
        see(reading(page, "loss")).to_contain_text("other 0.0048")
        with page.expect_download() as drawing:
            page.get_by_role("button", name="The charts as a drawing that can be enlarged").click()
        assert drawing.value.suggested_filename.endswith(".svg")
        found = ElementTree.fromstring(drawing.value.path().read_text())
    assert {part.tag.removeprefix(SVG) for part in found.iter()} == {
        "svg",
        "rect",
        "g",
        "text",
        "tspan",
        "line",
        "path",
    }
    loss, workers = found.findall(f"{SVG}g")
    assert [part.text for part in loss.iter(f"{SVG}tspan")] == [f"{MARKUP}: loss", "other"]
    assert {"1,000", "4,000", "100"} <= {part.text for part in loss.iter(f"{SVG}text")}
    curves = [part for part in loss.iter(f"{SVG}path") if part.get("fill") == "none"]
    assert len({part.get("stroke") for part in curves}) == len(curves) == 2
    assert all(part.get("d", "").count("L") > 100 for part in curves)
    assert len(list(workers.iter(f"{SVG}path"))) >= 1


def test_over_samples(visitor: Visitor, runs: Jobs) -> None:
    runs.jobs["old"] = job("old", curve=CURVE)
    with hosted(runs) as host:
        page = visitor.open(host.link)
        address = page.url
        page.goto(f"{address}#/default/one")
        page.get_by_label("Over").select_option("Samples")
        see(page).to_have_url(re.compile("x=samples"))
        see(chart(page, "loss")).to_have_accessible_name(re.compile("at 0 samples, 0.0024 at 319,936 samples$"))
        page.goto(f"{address}#/default/one?x=samples&from={64 * SPIKE - 100}&to={64 * SPIKE + 100}")
        see(chart(page, "loss")).to_have_accessible_name(re.compile(f"at {64 * (SPIKE + 2):,} samples$"))
        chart(page, "loss").focus()
        for _ in range(3):
            page.keyboard.press("ArrowLeft")
        see(reading(page, "loss")).to_have_text(f"{64 * SPIKE:,} samples  99")
        page.goto(f"{address}#/default/old?x=samples")
        see(page.locator(".metric-charts")).to_contain_text("How many samples its steps had is not known")
