"""Where a job's notifications go: from flags, manifests and contexts, and through a real local cluster."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from elasticctl.api import notifications
from elasticctl.api.errors import UsageError
from elasticctl.api.spec import ANNOTATION_NOTIFY
from elasticctl.cluster.local.client import LocalCluster
from elasticctl.cluster.local.secrets import Secrets
from elasticctl.operations.manifest_changes import with_notifications
from elasticctl.operations.rerun import Rerun, rerun_manifest
from elasticctl.settings.contexts import Context
from tests.support.cli import Run
from tests.support.jobs import shell_job
from tests.support.waiting import wait_until
from tests.support.webhooks import Hook, serving


@pytest.mark.parametrize("text", ["secret:slack", "file:/run/hook", "env:SLACK_URL"])
def test_references(text: str) -> None:
    assert str(notifications.parse_reference(text)) == text
    assert notifications.parse_reference("slack") == notifications.parse_reference("secret:slack")


@pytest.mark.parametrize(
    "text", ["", "secret:", "secret:a b", "file:relative", "env:1X", "vault:planted", "https://hooks/planted"]
)
def test_an_invalid_reference_is_refused_and_a_url_is_not_repeated(text: str) -> None:
    with pytest.raises(UsageError) as error:
        notifications.parse_reference(text)
    assert "planted" not in str(error.value)


def planned(run: Run, *args: str) -> str | None:
    done = run("submit", *args, "--dry-run", "-o", "json")
    assert done.code == 0, done.err
    annotations: dict[str, str] = json.loads(done.out)["metadata"].get("annotations", {})
    return annotations.get(ANNOTATION_NOTIFY)


def test_the_flag_goes_before_the_manifest_and_that_before_the_context(
    run: Run, private_home: Path, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.touch()
    manifest = shell_job("job", "true")
    plain, telling = tmp_path / "plain.json", tmp_path / "telling.json"
    plain.write_text(json.dumps(manifest))
    manifest["metadata"]["annotations"] = {ANNOTATION_NOTIFY: "secret:of-the-manifest"}
    telling.write_text(json.dumps(manifest))
    assert planned(run, str(script)) is None
    assert planned(run, str(script), "--notify", "slack") == "secret:slack"
    assert run("config", "set-context", "local", "--notify-url-from", f"file:{tmp_path}/hook").code == 0
    assert planned(run, str(script)) == f"file:{tmp_path}/hook"
    assert planned(run, "-f", str(plain)) == f"file:{tmp_path}/hook"
    assert planned(run, "-f", str(telling)) == "secret:of-the-manifest"
    assert planned(run, "-f", str(telling), "--notify", "env:HOOK") == "env:HOOK"
    assert planned(run, "-f", str(telling), "--notify", "none") is None
    assert planned(run, str(script), "--notify", "none") is None
    assert run("config", "set-context", "local", "--notify-url-from", "").code == 0
    assert planned(run, str(script)) is None


def test_a_rerun_notifies_as_the_old_job_did() -> None:
    old = telling(shell_job("old", "true"))
    made = rerun_manifest(old, Rerun("new", "", ""))
    local = Context("local", "local", notify_url_from="secret:of-the-context")
    for wanted, expected in [("", "secret:slack"), ("teams", "secret:teams"), ("none", None)]:
        annotations = with_notifications(made, wanted, local)["metadata"].get("annotations", {})
        assert annotations.get(ANNOTATION_NOTIFY) == expected


def test_on_a_cluster_only_its_secrets_are_accepted(run: Run, private_home: Path, tmp_path: Path) -> None:
    done = run("config", "set-context", "prod", "--provider", "aws", "--notify-url-from", "env:SLACK_URL")
    assert done.code == 2
    assert done.err.startswith("error: env: is for the local cluster: on Kubernetes give the KEY of the secret")
    assert run("config", "set-context", "prod", "--provider", "aws", "--notify-url-from", "slack").code == 0
    assert "notifyUrlFrom: secret:slack" in run("config", "view").out


def test_a_url_on_the_command_line_is_refused_and_not_repeated(run: Run, private_home: Path, tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    for args in (
        ("submit", str(tmp_path / "train.py"), "--dry-run", "--notify", "https://hooks.example.org/planted"),
        ("config", "set-context", "local", "--notify-url-from", "https://hooks.example.org/planted"),
    ):
        done = run(*args)
        assert done.code == 2
        assert "planted" not in done.out + done.err
        assert "elasticctl secret set elasticctl-notify KEY" in done.err


def test_a_job_sends_notifications(run: Run, local_cluster: LocalCluster, home: Path) -> None:
    """From the supervisor, no matter who submitted the job: start, loss, end; and an event if none is delivered."""
    with serving(Hook()) as hook:
        local_cluster.list_jobs(None)  # makes the state folder
        Secrets(local_cluster.paths).write("default", notifications.SECRET, {"slack": hook.url})
        script = f"until [ -e {home}/stop ]; do sleep 0.05; done"
        local_cluster.create_job(telling(shell_job("train", script, workers=2, minReplicas=1)))
        wait_until(lambda: "started" in hook.kinds)
        local_cluster.evict_pod("default", "train-worker-1", grace_s=0.0)
        wait_until(lambda: "interrupted" in hook.kinds)
        (home / "stop").touch()
        wait_until(lambda: "succeeded" in hook.kinds)
        local_cluster.create_job(telling(shell_job("broken", "exit 3", backoffLimit=0)))
        wait_until(lambda: any(text.startswith("*broken* (default) failed") for text in hook.texts))
        assert any(text.startswith("*train* (default) lost train-worker-1") for text in hook.texts)
        assert [kind for kind in hook.kinds if kind == "started"] in (["started"], ["started", "started"])
        secret = hook.url.rpartition("/")[2]
        kept = [path for path in local_cluster.paths.state.rglob("*") if path.is_file() and "secrets" not in path.parts]
        assert all(secret.encode() not in path.read_bytes() for path in kept)
    local_cluster.create_job(telling(shell_job("quiet", "true"), "secret:missing"))

    def failed() -> list[str]:
        events = local_cluster.list_events("default", "quiet")
        return [event["message"] for event in events if event["reason"] == "NotifyFailed"]

    undelivered = "a notification was not delivered to secret:missing"
    assert wait_until(failed)[0] == (
        f"{undelivered}: namespace default has no secret elasticctl-notify with the key missing"
    )
    events = run("events", "quiet").out
    assert [line for line in events.splitlines() if "NotifyFailed" in line and "secret:missing" in line]
    assert f"Notifications fail: {undelivered}" in run("explain", "quiet").out


def telling(manifest: dict[str, Any], reference: str = "secret:slack") -> dict[str, Any]:
    manifest["metadata"]["annotations"] = {ANNOTATION_NOTIFY: reference}
    return manifest
