"""What the controller logs can be searched by job, generation and worker."""

from __future__ import annotations

import ast
import json
import logging
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import elasticctl_controller
from elasticctl.api.status import GroupGeneration, JobStatus
from elasticctl_controller.core.actions import Decision, Event
from elasticctl_controller.kube.manager import LogFormatter
from elasticctl_controller.loop.apply_actions import log_events
from tests.support.controller.samples import a_job

SOURCES = Path(elasticctl_controller.__file__).parent


def calls(path: Path) -> Iterator[ast.Call]:
    """Each call of a method of `log` in a module."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("log."):
            yield node


@pytest.mark.parametrize("room", ["core", "kube", "loop", "rendezvous"])
def test_lines_about_a_job_have_it_as_a_field(room: str) -> None:
    for path in sorted((SOURCES / room).rglob("*.py")):
        for call in calls(path):
            if any(re.search(r"\.key$|job %s", said) for said in map(ast.unparse, call.args)):
                assert "extra" in {word.arg for word in call.keywords}, f"{path}:{call.lineno}"


def test_events_and_groups_are_logged_with_their_fields(caplog: pytest.LogCaptureFixture) -> None:
    job = a_job()
    job = replace(job, status=replace(job.status, generation=3))
    group = GroupGeneration(4, ("digits-worker-0", "digits-worker-1"))
    lost = Event("Warning", "NodeLost", "lost worker digits-worker-2", "digits-worker-2")
    with caplog.at_level(logging.INFO):
        log_events(job, Decision(JobStatus(generation=4, generations=(group,)), events=(lost,)))
        log_events(job, Decision(job.status))
    formed, event = (json.loads(LogFormatter().format(record)) for record in caplog.records)
    assert (formed["job"], formed["generation"], formed["level"]) == (job.key, 4, "info")
    assert formed["message"] == f"job {job.key}: generation 4 has 2 workers"
    assert event.items() >= {
        ("job", job.key),
        ("generation", 4),
        ("worker", "digits-worker-2"),
        ("reason", "NodeLost"),
        ("level", "warning"),
    }
