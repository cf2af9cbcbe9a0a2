"""Secrets of the local cluster: kept for one user, given by reference, waited for, and nowhere else on disk."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any

import pytest

from elasticctl.api.errors import ClusterError, NotFoundError, UsageError
from elasticctl.cluster.base import LogQuery
from elasticctl.cluster.local.client import LocalCluster
from elasticctl.cluster.local.paths import LocalPaths, local_paths
from elasticctl.cluster.local.secrets import MAX_BYTES, Secrets
from elasticctl_controller.local.command import StartError, build_command, missing_secret
from tests.support.cluster_contract import phase, running
from tests.support.jobs import shell_job
from tests.support.local_pods import pod
from tests.support.waiting import wait_until

PLANTED = "planted-4f1c9e"
ALL = {"envFrom": [{"secretRef": {"name": "hub"}}]}


@pytest.fixture
def paths(tmp_path: Path) -> LocalPaths:
    return LocalPaths(tmp_path / "state", tmp_path / "run")


@pytest.fixture
def kept(paths: LocalPaths) -> Secrets:
    return Secrets(paths)


def key(name: str, secret: str, field: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "valueFrom": {"secretKeyRef": {"name": secret, "key": field, **more}}}


# The files.


def test_they_are_private_to_their_user(kept: Secrets, paths: LocalPaths) -> None:
    kept.write("default", "hub", {"HF_TOKEN": PLANTED, "OTHER": "two\nlines \u00fc"})
    assert kept.read("default", "hub") == {"HF_TOKEN": PLANTED, "OTHER": "two\nlines \u00fc"}
    assert kept.read("ml", "hub") is None
    (file,) = (paths.secrets / "default").iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    for folder in (paths.state, paths.secrets, paths.secrets / "default"):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    (known,) = kept.list("default")
    assert (known.name, known.keys) == ("hub", ("HF_TOKEN", "OTHER"))
    assert PLANTED not in repr(known)
    kept.delete("default", "hub")
    assert kept.list("default") == []
    with pytest.raises(NotFoundError):
        kept.delete("default", "hub")


def test_a_secret_that_cannot_be_stored_changes_nothing(kept: Secrets, paths: LocalPaths) -> None:
    kept.write("default", "hub", {"A": "1"})
    with pytest.raises(ClusterError, match="more than"):
        kept.write("default", "hub", {"A": "x" * MAX_BYTES})
    for name in ("..", "a/b", "", "A", "x" * 300):
        with pytest.raises(UsageError):
            kept.write("default", name, {"A": "1"})
        assert kept.read("default", name) is None
    assert kept.read("default", "hub") == {"A": "1"}
    (paths.secrets / "default" / "hub.json").write_text("{")
    with pytest.raises(ClusterError, match="is damaged"):
        kept.read("default", "hub")


# By reference.

SECRETS = {"hub": {"HF_TOKEN": PLANTED, "USER": "jo"}, "s3": {"key": "k"}}


def test_all_keys_or_one_become_variables() -> None:
    env = [key("AWS_KEY", "s3", "key"), {"name": "USER", "value": "me"}, {"name": "URL", "value": "u/$(HF_TOKEN)"}]
    command = build_command(pod(command=["x"], env=env, **ALL), {"USER": "base"}, {}, SECRETS.get)
    assert command.env == {"HF_TOKEN": PLANTED, "USER": "me", "AWS_KEY": "k", "URL": f"u/{PLANTED}"}
    prefixed = {"envFrom": [{"prefix": "HUB_", "secretRef": {"name": "hub"}}]}
    assert build_command(pod(command=["x"], **prefixed), {}, {}, SECRETS.get).env["HUB_USER"] == "jo"


@pytest.mark.parametrize("words", [["$(HF_TOKEN)"], ["--token=$(HF_TOKEN)"], ["$(URL)"]])
def test_no_secret_gets_onto_a_command_line(words: list[str]) -> None:
    env = [{"name": "URL", "value": "u/$(HF_TOKEN)"}]
    with pytest.raises(StartError, match="would show a secret to anyone who can run ps") as caught:
        build_command(pod(command=["x"], args=words, env=env, **ALL), {}, {}, SECRETS.get)
    assert PLANTED not in str(caught.value)


def test_a_variable_that_hides_a_secret_may_be_shown() -> None:
    env = [{"name": "HF_TOKEN", "value": "none"}]
    assert build_command(
        pod(command=["x"], args=["$(HF_TOKEN)", "$$(HF_TOKEN)"], env=env, **ALL), {}, {}, SECRETS.get
    ).argv == (
        "x",
        "none",
        "$(HF_TOKEN)",
    )


@pytest.mark.parametrize(
    ("container", "missing"),
    [
        (ALL, ""),
        ({"envFrom": [{"secretRef": {"name": "no"}}]}, 'secret "no" not found'),
        ({"envFrom": [{"secretRef": {"name": "no", "optional": True}}]}, ""),
        ({"env": [key("A", "hub", "USER")]}, ""),
        ({"env": [key("A", "hub", "NO")]}, 'secret "hub" has no key "NO"'),
        ({"env": [key("A", "no", "NO", optional=True)]}, ""),
        ({"env": [{"name": "A", "value": "b"}]}, ""),
    ],
)
def test_the_missing_secret_of_a_worker(container: dict[str, Any], missing: str) -> None:
    assert missing_secret(pod(command=["x"], **container), SECRETS.get) == missing


# A real worker.


def test_a_worker_waits_for_its_secret_and_then_has_it(local_cluster: LocalCluster, home: Path) -> None:
    script = 'test "$HF_TOKEN" = ' + PLANTED[:8] + '"$REST" && echo it is there; sleep 60'
    local_cluster.create_job(
        shell_job("needy", script, container={"env": [{"name": "REST", "value": PLANTED[8:]}], **ALL})
    )

    def waits() -> Any:
        (found,) = local_cluster.list_pods("default", "needy") or [None]
        return found and found["status"].get("reason") == "CreateContainerConfigError" and found["status"]["message"]

    def events() -> list[str]:
        found = [event["message"] for event in local_cluster.list_events("default", "needy")]
        return [message for message in found if message.startswith("Error: ")]

    assert wait_until(waits) == 'secret "hub" not found'
    assert wait_until(events) == ['Error: secret "hub" not found']
    Secrets(local_paths()).write("default", "hub", {"HF_TOKEN": PLANTED})
    wait_until(lambda: running(local_cluster, "needy"))
    wait_until(lambda: [line.text for line in local_cluster.logs("default", "needy", LogQuery())] == ["it is there"])
    outside = [
        path
        for path in home.rglob("*")
        if path.is_file() and "secrets" not in path.parts and PLANTED.encode() in path.read_bytes()
    ]
    assert outside == []
    assert phase(local_cluster, "needy") == "Running"
