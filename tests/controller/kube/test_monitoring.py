"""The alert rules and the dashboard that are shipped: Prometheus accepts them, and they name metrics that there are."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from elasticctl.api.status import Interruption, JobStatus
from elasticctl_controller.kube.metrics import ControllerMetrics

MONITORING = Path(__file__).parents[3] / "controller" / "monitoring"
RULES = MONITORING / "alerts.yaml"
DASHBOARD: dict[str, Any] = json.loads((MONITORING / "dashboard.json").read_text("utf-8"))
METRIC = re.compile(r"\belasticctl_\w+")


def rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(RULES.read_text("utf-8"))["groups"] for rule in group["rules"]]


def expressions() -> Iterator[str]:
    yield from (rule["expr"] for rule in rules())
    yield from (target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"])


def served() -> dict[str, set[str]]:
    """Every sample on the metrics page with its labels, once each metric has a value."""
    metrics = ControllerMetrics()
    metrics.observe_pass(0.02, "conflict")
    metrics.count_request("GET", "ok")
    metrics.observe_replacement(0.4)
    lost = Interruption(uid="u", at=1.0, recovery_s=2.0, steps_redone=3)
    metrics.observe_status(JobStatus(), JobStatus(restarts={"NodeLost": 1}, interruptions=(lost,)))
    metrics.register_gauges(lambda: [{}], lambda: 0, lambda: True)
    families = text_string_to_metric_families(metrics.render().decode())
    found: dict[str, set[str]] = {}
    for sample in (sample for family in families for sample in family.samples):
        found.setdefault(sample.name, set()).update(sample.labels)
    return found


@pytest.mark.parametrize("expression", list(expressions()))
def test_every_metric_and_label_that_is_asked_for_is_served(expression: str) -> None:
    names = METRIC.findall(expression)
    assert names
    assert set(names) <= served().keys()
    for name, chosen in re.findall(r"(\w+)\{([^}]*)\}", expression):
        assert set(re.findall(r"(\w+)=", chosen)) <= served()[name]


def test_every_metric_is_on_the_dashboard_and_in_the_docs() -> None:
    shown = {re.sub(r"_bucket$", "", name) for text in expressions() for name in METRIC.findall(text)}
    documented = (MONITORING.parents[1] / "docs" / "operations.md").read_text("utf-8")
    for name in {re.sub(r"_(bucket|sum|count)$", "", name) for name in served()}:
        assert name in shown
        assert f"`{name}" in documented


def test_every_alert_is_documented_and_says_what_it_means() -> None:
    documented = (MONITORING.parents[1] / "docs" / "operations.md").read_text("utf-8")
    for rule in rules():
        assert f"`{rule['alert']}`" in documented
        assert rule["annotations"].keys() == {"summary", "description"}
        assert rule["labels"].keys() == {"severity"}


@pytest.mark.needs("promtool")
def test_prometheus_accepts_the_rules_and_they_fire_when_they_should() -> None:
    for words in (["check", "rules", RULES], ["test", "rules", MONITORING / "alerts_test.yaml"]):
        done = subprocess.run(["promtool", *words], capture_output=True, text=True, timeout=240, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.needs("promtool")
def test_prometheus_understands_what_the_dashboard_asks(tmp_path: Path) -> None:
    asked = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
    recorded = [
        {"record": f"panel:{n}", "expr": text.replace("$__rate_interval", "5m")} for n, text in enumerate(asked)
    ]
    path = tmp_path / "rules.yaml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": recorded}]}))
    done = subprocess.run(
        ["promtool", "check", "rules", path], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
