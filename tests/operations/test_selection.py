"""Choosing among many jobs: filters, orders, labels, and verbs that take several."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from elasticctl.api.errors import NotFoundError, UsageError
from elasticctl.cli.framework.place import Where
from elasticctl.cli.verbs.change_jobs import lifecycle
from elasticctl.cli.verbs.see_what_jobs_do import list_status as list_verb
from elasticctl.cli.views import follow
from elasticctl.cluster.base import LogLine
from elasticctl.operations.logs import in_turn, merged
from elasticctl.operations.selection import UNENDED, JobFilter, chosen_names, fits, phases, selector
from elasticctl.operations.target import Target
from elasticctl.settings.contexts import Context
from tests.support.job_samples import AT, at, job

NOW = AT + 7200.0


def made(name: str, phase: str, second: float, **labels: str) -> dict[str, Any]:
    found = job(name, phase=phase, progress={"step": int(second)})
    found["metadata"]["creationTimestamp"] = at(second)
    found["metadata"]["labels"] = labels
    return found


JOBS = [
    made("lr-10", "Succeeded", 0, sweep="lr", team="vision"),
    made("lr-9", "Running", 3600, sweep="lr", **{"elastic.pytorch.org/user": "ada"}),
    made("other", "Failed", 7000),
]


class Cluster:
    def __init__(self) -> None:
        self.patched: list[str] = []

    def list_jobs(self, namespace: str | None) -> list[dict[str, Any]]:
        return JOBS

    def get_job(self, namespace: str, name: str) -> dict[str, Any]:
        return next(each for each in JOBS if each["metadata"]["name"] == name)

    def patch_job(self, namespace: str, name: str, patch: Any) -> dict[str, Any]:
        self.patched.append(name)
        return self.get_job(namespace, name)


@pytest.fixture
def cluster() -> Cluster:
    return Cluster()


@pytest.fixture
def target(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Target:
    target = Target(Context("lab", "kubernetes"), "default", cluster)  # type: ignore[arg-type]
    for verbs in (lifecycle, list_verb):
        monkeypatch.setattr(verbs, "reach", lambda where: target)
    return target


def names(chosen: JobFilter) -> list[str]:
    return [each["metadata"]["name"] for each in chosen.of(JOBS, NOW)]


@pytest.mark.parametrize(
    ("chosen", "found"),
    [
        (JobFilter(), ["lr-10", "lr-9", "other"]),
        (JobFilter(phase=(phases("Running,failed"),)), ["lr-9", "other"]),
        (JobFilter(phase=(phases("ended"),)), ["lr-10", "other"]),
        (JobFilter(phase=(phases("active"),)), ["lr-9"]),
        (JobFilter(label=(selector("sweep=lr"),)), ["lr-10", "lr-9"]),
        (JobFilter(label=(selector("sweep"), selector("!team"))), ["lr-9"]),
        (JobFilter(label=(selector("sweep==lr,team!=vision"),)), ["lr-9"]),
        (JobFilter(user="ada"), ["lr-9"]),
        (JobFilter(label=(selector("user=ada"),)), ["lr-9"]),
        (JobFilter(since=3600), ["lr-9", "other"]),
        (JobFilter(limit=1), ["other"]),
        (JobFilter(sort="newest", limit=2), ["other", "lr-9"]),
        (JobFilter(sort="name"), ["lr-9", "lr-10", "other"]),
        (JobFilter(sort="phase"), ["lr-9", "lr-10", "other"]),
        (JobFilter(sort="step", limit=1), ["other"]),
        (JobFilter(sort="cost"), ["lr-10", "lr-9", "other"]),
    ],
)
def test_jobs_that_a_filter_finds(chosen: JobFilter, found: list[str]) -> None:
    assert names(chosen) == found


def test_me_is_the_current_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ELASTICCTL_USER", "ada")
    assert names(JobFilter(user="me")) == ["lr-9"]


@pytest.mark.parametrize("text", ["", "a b", "=x", "!a=b", "a=b=c", "a,,b"])
def test_no_selector(text: str) -> None:
    with pytest.raises(ValueError, match="is not of the form"):
        selector(text)


def test_no_phase() -> None:
    with pytest.raises(ValueError, match=r'did you mean "running"'):
        phases("runing")


def test_jobs_without_labels_fit_what_is_not_wanted() -> None:
    assert fits({"metadata": {"name": "x", "labels": None}}, (selector("a!=b"), selector("!c")))


def test_the_list_is_filtered_for_people_and_programs(target: Target, capsys: pytest.CaptureFixture[str]) -> None:
    list_verb.list_jobs(chosen=JobFilter(label=(selector("sweep=lr"),)), output="name", where=Where())
    list_verb.list_jobs(chosen=JobFilter(label=(selector("team"),)), where=Where())
    list_verb.list_jobs(chosen=JobFilter(label=(selector("unused"),)), where=Where())
    said = capsys.readouterr()
    assert said.out.splitlines()[:2] == ["lr-10", "lr-9"]
    assert [line.split("\t")[0] for line in said.out.splitlines()[2:]] == ["NAME", "lr-10"]
    assert said.err.startswith("no matching jobs in namespace default of context lab.")


def test_verbs_take_jobs_by_label(target: Target, cluster: Cluster) -> None:
    lifecycle.cancel(label=(selector("sweep=lr"),), where=Where())
    assert cluster.patched == ["lr-9"], "the one that has ended is left alone"


def test_names_or_labels() -> None:
    target = Target(Context("lab", "kubernetes"), "default", Cluster())  # type: ignore[arg-type]
    assert chosen_names(target, ("a", "b", "a"), ()) == ("a", "b")
    for wrong in (((), ()), (("a",), (selector("b"),))):
        with pytest.raises(UsageError):
            chosen_names(target, *wrong)
    with pytest.raises(NotFoundError, match="no job with these labels"):
        chosen_names(target, (), (selector("unused"),))
    with pytest.raises(NotFoundError, match="but lr-10 is Succeeded"):
        chosen_names(target, (), (selector("team"),), UNENDED)


@pytest.mark.parametrize(
    ("codes", "code"), [((0, 0), 0), ((0, 4), 4), ((4, 124), 124), ((124, 1), 1), ((None, 0), 3), ((None, 1), 1)]
)
def test_the_exit_code_of_several_is_the_worst(
    codes: tuple[int | None, ...], code: int, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    def await_end(target: Target, followed: Any, **how: Any) -> int:
        found: int | None = codes[followed["at"]]
        if found is None:
            raise NotFoundError("gone")
        return found

    monkeypatch.setattr(follow, "await_end", await_end)
    assert follow.await_all(target, [{"at": 0}, {"at": 1}]) == code


def test_lines_of_several_jobs() -> None:
    def lines(name: str) -> Iterator[LogLine]:
        for number in range(500):
            yield LogLine(f"{name}-worker-0", 0.0, str(number))

    sources = [lambda: lines("a"), lambda: lines("b")]
    assert [line.worker for line in in_turn(sources)] == ["a-worker-0"] * 500 + ["b-worker-0"] * 500
    together = list(merged(sources))
    for name in ("a", "b"):
        assert [line.text for line in together if line.worker == f"{name}-worker-0"] == [*map(str, range(500))]


def test_an_exception_from_one_of_them_is_raised() -> None:
    def failing() -> Iterator[LogLine]:
        yield LogLine("a-worker-0", 0.0, "a")
        raise NotFoundError("gone")

    with pytest.raises(NotFoundError):
        list(merged([failing, lambda: iter(())]))
