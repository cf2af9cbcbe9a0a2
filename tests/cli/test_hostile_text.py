"""What a job, a node or a message brings is text, whatever control characters are in it."""

from __future__ import annotations

import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from elasticctl.cli.framework import output
from elasticctl.cli.framework.log_lines import print_log_lines
from elasticctl.cluster.base import LogLine
from elasticctl.operations import target
from tests.support import job_samples
from tests.support.cli import Run

PLANTED = "x\x1b]0;owned\x07\x1b[2J\x9b1A\x1b[31m\r\x08\u202ey"
ORDERS = (
    "status digits", "status digits -o json", "list", "list -o wide", "list -o yaml", "list -o json", "describe digits",
    "describe digits -o json", "explain digits", "history digits", "events digits", "events digits -o json",
    "delete digits", "checkpoints digits", "rerun digits --dry-run",
)  # fmt: skip


def obeyed(text: str) -> list[str]:
    """What a terminal would obey."""
    return [char for char in text if (ord(char) < 32 and char not in "\t\n") or 127 <= ord(char) < 160]


def planted(value: Any) -> Any:
    """The same with the control characters in all of its texts that a job or a node brings."""
    match value:
        case dict():
            return {key: planted(item) for key, item in value.items()}
        case list():
            return [planted(item) for item in value]
        case str() if value and not value[0].isdigit():
            return value + PLANTED
    return value


@pytest.fixture
def hostile(monkeypatch: pytest.MonkeyPatch, private_home: Path) -> dict[str, Any]:
    """A cluster with a job whose status an attacker has written."""
    manifest = job_samples.job()
    status = manifest["status"]
    manifest["status"] = planted(status) | {"phase": status["phase"]}
    manifest["spec"]["replicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]["env"] = [
        {"name": "ELASTICCTL_STORAGE", "value": "file:///" + PLANTED},
        {"name": "A" + PLANTED, "value": PLANTED},
    ]
    manifest["metadata"]["annotations"] = {"note": PLANTED}
    event = {
        "metadata": {"name": "e", "namespace": "default", "uid": "e"},
        "involvedObject": {"kind": "ElasticJob", "name": "digits", "uid": "uid-digits"},
        "type": "Warning" + PLANTED,
        "reason": PLANTED,
        "message": PLANTED,
        "lastTimestamp": job_samples.at(3),
        "firstTimestamp": job_samples.at(3),
        "count": 1,
    }
    cluster = SimpleNamespace(
        get_job=lambda namespace, name: manifest,
        list_jobs=lambda namespace: [manifest],
        list_pods=lambda *args: [],
        pods_of=lambda jobs: {job.uid: [] for job in jobs},
        list_events=lambda *args: [event],
        events=lambda *args, **kwargs: [event],
        capacity=lambda *args: None,
        list_budgets=lambda namespace: [],
    )
    monkeypatch.setattr(target, "connect", lambda context: cluster)
    return manifest


@pytest.mark.parametrize("order", ORDERS)
def test_no_verb_sends_them_to_the_terminal(order: str, run: Run, hostile: dict[str, Any]) -> None:
    done = run(*order.split())
    assert obeyed(done.out) == []
    assert obeyed(done.err) == []
    assert "\u202e" not in done.out + done.err


def test_they_are_shown(run: Run, hostile: dict[str, Any]) -> None:
    assert "\\u001b]0;owned\\u0007" in run("describe", "digits").out


def test_lines_of_logs_keep_their_colours_alone(capsys: pytest.CaptureFixture[str]) -> None:
    print_log_lines([LogLine(f"digits-worker-{PLANTED}", 0.0, PLANTED)], "digits")
    (line,) = capsys.readouterr().out.splitlines()
    assert line.replace("\x1b[31m", "").replace("\x1b[0m", "") == (
        "worker-x\\u001b]0;owned\\u0007\\u001b[2J\\u009b1A\\u001b[31m\\u000d\\u0008\\u202ey | "
        "x\\u001b]0;owned\\u0007\\u001b[2J\\u009b1A\\u000d\\u0008\\u202ey"
    )


def test_a_screen_gets_none_but_those_of_its_own() -> None:
    from rich.text import Text

    drawn = io.StringIO()
    screen = output.console(drawn, width=200)
    screen.print(Text(PLANTED), PLANTED, output.rich_table(output.Table(("A",), [(PLANTED,)])))
    assert obeyed(drawn.getvalue()) == []
    assert drawn.getvalue().count("\\u001b]0;owned") == 3
