"""A Pod manifest as a command line and an environment."""

from __future__ import annotations

from typing import Any

import pytest

from elasticctl_controller.local.command import StartError, build_command, gpus_requested
from tests.support.local_pods import pod


def test_command_and_args_make_the_argv() -> None:
    command = build_command(pod(command=["python", "-u"], args=["train.py", "a b"], workingDir="/w"), {}, {})
    assert command.argv == ("python", "-u", "train.py", "a b")
    assert command.working_dir == "/w"


def test_the_worker_container_is_found_among_others() -> None:
    manifest = pod(command=["right"])
    manifest["spec"]["containers"].insert(0, {"name": "sidecar", "command": ["wrong"]})
    assert build_command(manifest, {}, {}).argv == ("right",)


def test_env_comes_in_layers() -> None:
    env = [{"name": "BASE", "value": "user"}, {"name": "PINNED", "value": "user"}, {"name": "EMPTY"}]
    command = build_command(pod(command=["x"], env=env), {"BASE": "base", "KEPT": "base"}, {"PINNED": "pinned"})
    assert command.env == {"BASE": "user", "KEPT": "base", "PINNED": "pinned", "EMPTY": ""}


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("metadata.name", "job-worker-0"),
        ("metadata.namespace", "default"),
        ("metadata.uid", "u1"),
        ("metadata.labels['replica-index']", "0"),
        ("metadata.annotations['none']", ""),
        ("spec.nodeName", "here"),
        ("status.podIP", "127.0.0.1"),
    ],
)
def test_field_references(path: str, value: str) -> None:
    env = [{"name": "FIELD", "valueFrom": {"fieldRef": {"fieldPath": path}}}]
    assert build_command(pod(command=["x"], env=env), {}, {}).env["FIELD"] == value


@pytest.mark.parametrize(
    ("text", "expanded"),
    [
        ("$(NAME)", "value"),
        ("a$(NAME)b$(NAME)", "avaluebvalue"),
        ("$$(NAME)", "$(NAME)"),
        ("a$$b $x $", "a$b $x $"),
        ("$(UNKNOWN)", "$(UNKNOWN)"),
        ("$NAME $( NAME)", "$NAME $( NAME)"),
    ],
)
def test_variable_references(text: str, expanded: str) -> None:
    env = [{"name": "NAME", "value": "value"}, {"name": "SECOND", "value": text}]
    command = build_command(pod(command=["x"], args=[text], env=env), {}, {})
    assert command.argv[1] == command.env["SECOND"] == expanded


@pytest.mark.parametrize(
    ("container", "said"),
    [
        ({}, "command"),
        ({"command": "train.py"}, "command: must be a list"),
        ({"command": ["a\0b"]}, "command: must be a list"),
        ({"command": ["x"], "envFrom": [{"configMapRef": {"name": "s"}}]}, "envFrom: only secretRef"),
        ({"command": ["x"], "env": [{"name": "A", "valueFrom": {"secretKeyRef": {}}}]}, "env A"),
        ({"command": ["x"], "env": [{"name": "A", "valueFrom": {"fieldRef": {"fieldPath": "no.such"}}}]}, "no.such"),
    ],
)
def test_a_worker_that_cannot_be_started_reports_why(container: dict[str, Any], said: str) -> None:
    with pytest.raises(StartError, match=said):
        build_command(pod(**container), {}, {})


@pytest.mark.parametrize(
    ("resources", "wanted"),
    [
        (None, 0),
        ({"limits": None}, 0),
        ({"limits": {"nvidia.com/gpu": 2}}, 2),
        ({"limits": {"nvidia.com/gpu": "4"}}, 4),
        ({"limits": {"nvidia.com/gpu": "many"}}, 0),
        ({"limits": {"nvidia.com/gpu": "9" * 5000}}, 10**20 - 1),
        ({"limits": {"cpu": "8"}}, 0),
    ],
)
def test_gpu_limits(resources: Any, wanted: int) -> None:
    assert gpus_requested({"containers": [{"resources": resources}]}) == wanted
