"""What can no longer be asked of a job that is on its way to its end."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from elasticctl.api.errors import ConflictError
from elasticctl.cli.framework.place import Where
from elasticctl.cli.verbs.change_jobs import lifecycle
from elasticctl.operations.target import Target
from elasticctl.settings.contexts import Context
from tests.support.job_samples import job


class OneJob:
    """A cluster with one job, that is being cancelled and whose controller has not seen it yet."""

    def __init__(self) -> None:
        self.patches: list[Any] = []
        self.is_deleted = False

    def get_job(self, namespace: str, name: str) -> dict[str, Any]:
        found = job(name)
        found["spec"]["cancel"] = True
        return found

    def delete_job(self, namespace: str, name: str) -> None:
        self.is_deleted = True

    def patch_job(self, namespace: str, name: str, patch: Any) -> dict[str, Any]:
        self.patches.append(patch)
        return self.get_job(namespace, name)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> OneJob:
    cluster = OneJob()
    target = Target(Context("lab", "kubernetes"), "default", cluster)  # type: ignore[arg-type]
    monkeypatch.setattr(lifecycle, "reach", lambda where: target)
    return cluster


@pytest.mark.parametrize(("verb", "done"), [(lifecycle.suspend, "suspended"), (lifecycle.resume, "resumed")])
def test_a_job_that_is_being_cancelled_is_neither_suspended_nor_resumed(cluster: OneJob, verb: Any, done: str) -> None:
    words = f"digits is being cancelled and cannot be {done}. FIX: `elasticctl rerun digits`"
    with pytest.raises(ConflictError, match=words):
        verb(jobs=("digits",), where=Where())
    assert cluster.patches == []


def test_deleting_a_running_job_asks_first(
    cluster: OneJob, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(lifecycle.sys, "stdin", SimpleNamespace(isatty=lambda: True))
    monkeypatch.setattr("typer.confirm", lambda question, err: asked.append(question))
    lifecycle.delete(jobs=("digits",), where=Where())
    assert asked == ["digits is still Running. Delete it?"]
    assert capsys.readouterr().err == "digits: not deleted\n"
    assert not cluster.is_deleted
    monkeypatch.setattr("typer.confirm", lambda question, err: True)
    lifecycle.delete(jobs=("digits",), where=Where())
    assert cluster.is_deleted


def test_a_job_can_be_cancelled_twice(cluster: OneJob) -> None:
    lifecycle.cancel(jobs=("digits",), where=Where())
    assert [patch["spec"] for patch in cluster.patches] == [{"cancel": True}]
