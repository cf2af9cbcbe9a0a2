"""The pictures of docs/dashboard.md: from a run of real jobs on a local cluster of its own, and of made-up GPUs.

python -m tests.support.dashboard.screenshots           # writes docs/images/dashboard-*.png; takes four minutes
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from elasticctl.api.codec import to_rfc3339
from elasticctl.api.spec import ElasticJob
from elasticctl.cluster.local.client import LocalCluster
from tests.support.dashboard.cluster import Jobs
from tests.support.dashboard.process import Dashboard
from tests.support.dashboard.team import dashboard, served
from tests.support.dashboard.visitor import CHROMIUM, FLAGS, Visitor, hosted
from tests.support.jobs import FOREVER, shell_job
from tests.support.usage_samples import BUSY, IDLE, sample
from tests.support.waiting import wait_until

ROOT = Path(__file__).parents[3]
IMAGES = ROOT / "docs" / "images"
DIGITS = ROOT / "examples" / "digits" / "train.py"


def elasticctl(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "elasticctl.cli", *words], check=True, stdout=subprocess.DEVNULL)


def submit(name: str, *words: str) -> None:
    common = ("--workers", "2", "--min-workers", "1", "--max-workers", "4", "--backoff-limit", "0", "--detach")
    elasticctl("submit", str(DIGITS), "--name", name, *common, "--", *words)


def until(cluster: LocalCluster, name: str, step: int) -> None:
    """Wait until a job has come so far, or has ended."""

    def there() -> bool:
        status = ElasticJob.from_manifest(cluster.get_job("default", name)).status
        return status.phase.terminal or (status.progress.step or 0) >= step

    wait_until(there, 120, every_s=0.2)


def run_jobs(cluster: LocalCluster) -> None:
    """Jobs that have succeeded, failed, wait, and one that much happens to."""
    submit("digits-quick", "--epochs", "2")
    until(cluster, "digits-quick", 10**9)
    submit("digits-old-flags", "--epochs", "8", "--batch-size", "64")
    until(cluster, "digits-old-flags", 10**9)
    submit("digits-wide", "--epochs", "200", "--step-delay-s", "0.05")
    until(cluster, "digits-wide", 60)
    elasticctl("suspend", "digits-wide")
    submit("digits", "--epochs", "60", "--step-delay-s", "0.05")
    until(cluster, "digits", 250)
    elasticctl("preempt", "digits", "--worker", "1", "--notice", "none")
    until(cluster, "digits", 500)
    elasticctl("scale", "digits", "--to", "3")
    until(cluster, "digits", 800)


def aim(cluster: LocalCluster) -> None:
    """A job with a deadline that loses a worker on its way."""
    words = ("--finish-by", "6m", "--budget", "2", "--workers", "2", "--detach")
    elasticctl(
        "submit", str(DIGITS), "--name", "digits-tonight", *words, "--", "--epochs", "60", "--step-delay-s", "0.1"
    )
    until(cluster, "digits-tonight", 200)
    elasticctl("preempt", "digits-tonight", "--worker", "1", "--notice", "none")
    until(cluster, "digits-tonight", 600)


def share(cluster: LocalCluster) -> None:
    """Three projects: one has borrowed, one has its own, one waits."""
    elasticctl("cancel", "digits", "digits-tonight")
    elasticctl("local", "sharing", "on", "--cpu-slots", "8")
    elasticctl("quota", "set", "vision", "--guaranteed", "cpu=4", "--limit", "cpu=8")
    elasticctl("quota", "set", "speech", "--guaranteed", "cpu=3", "--weight", "2")

    def begin(namespace: str, name: str, least: int, most: int) -> None:
        size = {"minReplicas": least, "maxReplicas": most, "sharing": {"automatic": least < most}}
        cluster.create_job(shell_job(name, FOREVER, most, namespace=namespace, **size))

    def workers(namespace: str, name: str) -> int | None:
        found = ElasticJob.from_manifest(cluster.get_job(namespace, name)).status.share
        return found.workers if found and found.pool else None

    begin("vision", "resnet", 2, 8)
    wait_until(lambda: workers("vision", "resnet") == 8)
    begin("speech", "wav2vec", 2, 2)
    wait_until(lambda: workers("speech", "wav2vec") == 2 and workers("vision", "resnet") == 6)
    begin("nlp", "bert", 4, 4)
    wait_until(lambda: workers("nlp", "bert") == 0)


def machines(visitor: Visitor) -> None:
    """GPUs, which the machine that takes pictures need not have."""
    now = to_rfc3339(time.time())
    with hosted(Jobs(sample({**BUSY, "at": now}, {**IDLE, "at": now}, gpus=2))) as host:
        page = visitor.open(host.link, width=1400)
        page.goto(page.url + "#/default/digits?gpus=each")
        page.locator(".machines td").first.wait_for()
        page.locator(".machines").screenshot(path=IMAGES / "dashboard-machines.png")


def login(visitor: Visitor) -> None:
    """Where people log in to the dashboard of a cluster."""
    with served(dashboard()) as address:
        page = visitor.open(address, width=1280, height=460)
        page.get_by_label("A token of this cluster").wait_for()
        page.screenshot(path=IMAGES / "dashboard-login.png")


def main() -> None:
    """Run it, and take the pictures."""
    from playwright.sync_api import sync_playwright

    with tempfile.TemporaryDirectory(prefix="ec-") as home, sync_playwright() as playwright:
        os.environ["ELASTICCTL_HOME"] = home
        mine = Dashboard("--no-open")
        try:
            run_jobs(LocalCluster())
            with Visitor(playwright.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))) as visitor:
                machines(visitor)
                login(visitor)
                for name, width, height, dark in (("light", 1280, 940, False), ("dark", 400, 860, True)):
                    page = visitor.open(mine.link(), width=width, height=height, dark=dark)
                    page.goto(page.url + "#/default/digits")
                    page.locator("canvas").nth(2).wait_for()
                    page.screenshot(path=IMAGES / f"dashboard-{name}.png")
                page = visitor.open(mine.link(), width=1280, height=900)
                address = page.url
                page.goto(
                    f"{address}#/default/digits?x=step&m=loss&m=test_accuracy&s=0.9&vs=default%2Fdigits-wide&log=1"
                )
                page.locator(".lines li").nth(5).wait_for()
                for name, part in (("curves", ".course"), ("log", ".logs")):
                    page.locator(part).screenshot(path=IMAGES / f"dashboard-{name}.png")
                page.goto(f"{address}#/overview")
                page.get_by_role("heading", name="Failed").wait_for()
                page.screenshot(path=IMAGES / "dashboard-overview.png")
                aim(LocalCluster())
                page.goto(f"{address}#/default/digits-tonight")
                page.locator(".plan canvas").nth(1).wait_for()
                page.locator(".plan").screenshot(path=IMAGES / "dashboard-plan.png")
                share(LocalCluster())
                page = visitor.open(mine.link(), width=1280, height=760)
                page.get_by_role("link", name="Projects").click()
                page.get_by_text("nlp/bert").wait_for()
                page.screenshot(path=IMAGES / "dashboard-projects.png")
        finally:
            mine.end()
            elasticctl("local", "down", "--delete-jobs", "--yes")


if __name__ == "__main__":
    main()
