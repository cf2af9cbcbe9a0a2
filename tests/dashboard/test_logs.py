"""Pages of a job's log: the newest lines, those around a moment, those with a text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from elasticctl.api.errors import NotFoundError, UsageError
from elasticctl.api.spec import ElasticJob
from elasticctl.cluster.base import LogLine, LogQuery
from elasticctl.dashboard.logs import MAX_LINES, MAX_TEXT, Page
from tests.support.job_samples import at, job


class Talking:
    """A cluster whose job prints a line each second; like a kubelet, it knows moments to ten seconds only."""

    def __init__(self, count: int) -> None:
        self.lines = [
            LogLine("digits-worker-0", float(second), f"\x1b[32mLine\x1b[0m {second}") for second in range(count)
        ]
        self.asked: list[LogQuery] = []

    def logs(self, namespace: str, name: str, query: LogQuery) -> Iterator[LogLine]:
        self.asked.append(query)
        lines = [line for line in self.lines if query.since is None or line.at >= query.since // 10 * 10]
        yield from lines[-query.tail :] if query.tail else lines


def read(cluster: Talking, **query: str) -> tuple[list[int], bool]:
    found: dict[str, Any] = Page.parse(query).read(cluster, ElasticJob.from_manifest(job()))  # type: ignore[arg-type]
    return [int(at) for _, at, _ in found["lines"]], found["more"]


def test_pages() -> None:
    cluster = Talking(2_500)
    assert read(cluster) == ([*range(2_500 - MAX_LINES, 2_500)], False)
    assert (cluster.asked[-1].tail, cluster.asked[-1].everything) == (MAX_LINES, False)
    assert read(cluster, since="15", all="1") == ([*range(15, 15 + MAX_LINES)], True)
    assert cluster.asked[-1].everything
    assert read(cluster, since="2495") == ([*range(2_495, 2_500)], False)
    assert read(cluster, since="5", until="9.5") == ([5, 6, 7, 8, 9], False)
    assert read(cluster, since="0", until="1999") == ([*range(1_000, 2_000)], True)
    assert read(cluster, find="line 77") == ([77, *range(770, 780)], False)
    assert read(cluster, find="LINE ", worker="digits-worker-0") == ([*range(2_500 - MAX_LINES, 2_500)], True)
    assert cluster.asked[-1].workers == ("digits-worker-0",)


def test_lines_of_the_same_time_are_paged_one_by_one() -> None:
    cluster = Talking(0)
    burst = [LogLine("digits-worker-0", 5.0, str(n)) for n in range(2_500)]
    cluster.lines = [LogLine("digits-worker-0", 4.0, "before"), *burst, LogLine("digits-worker-0", 6.0, "behind")]

    def texts(**query: str) -> list[str]:
        found = Page.parse({"all": "1", **query}).read(cluster, ElasticJob.from_manifest(job()))  # type: ignore[arg-type]
        return [text for _, _, text in found["lines"]]

    assert texts(since="5", skip="1000") == [str(n) for n in range(1_000, 2_000)]
    assert texts(since="5", skip="2000") == [*(str(n) for n in range(2_000, 2_500)), "behind"]
    assert texts(since="0", until="5", skip="600") == [str(n) for n in range(900, 1_900)]
    assert texts(since="0", until="5", skip="2400") == ["before", *(str(n) for n in range(100))]


def test_one_rank_is_what_its_worker_prints_for_it() -> None:
    cluster = Talking(0)
    texts = [f"[rank{n % 2}] loss {n}" for n in range(6)] + ["[launcher] joins", "[rank10] other"]
    cluster.lines = [LogLine("digits-worker-3", float(n), text) for n, text in enumerate(texts)]
    several = job(generations=[{"generation": 1, "workers": ["digits-worker-3"], "formedAt": at(1)}])
    (container,) = several["spec"]["replicaSpecs"]["Worker"]["template"]["spec"]["containers"]
    container["command"] = ["elasticctl-launch", "--nproc-per-node", "2", "--", "python", "train.py"]

    def lines(**query: str) -> list[str]:
        found = Page.parse(query).read(cluster, ElasticJob.from_manifest(several))  # type: ignore[arg-type]
        return [text for _, _, text in found["lines"]]

    assert lines(rank="1") == ["[rank1] loss 1", "[rank1] loss 3", "[rank1] loss 5"]
    assert (cluster.asked[-1].workers, cluster.asked[-1].tail) == (("digits-worker-3",), 2 * MAX_LINES)
    assert lines(rank="1", find="LOSS 3") == ["[rank1] loss 3"]
    container["command"] = ["elasticctl-launch", "--", "python", "train.py"]
    assert lines(rank="0") == texts, "the only rank of its worker says so nowhere"
    with pytest.raises(NotFoundError, match="no rank 7: its only rank is 0"):
        lines(rank="7")


def test_a_long_line_is_cut() -> None:
    cluster = Talking(0)
    cluster.lines = [LogLine("digits-worker-0", 1.0, "x" * 10_000)]
    found = Page().read(cluster, ElasticJob.from_manifest(job()))  # type: ignore[arg-type]
    assert found["lines"] == [["digits-worker-0", 1.0, "x" * MAX_TEXT]]


def test_the_end_of_a_long_line_is_searched_too() -> None:
    cluster = Talking(0)
    cluster.lines = [LogLine("digits-worker-0", 1.0, "x" * 10_000 + "needle"), LogLine("digits-worker-0", 2.0, "x")]
    assert read(cluster, find="needle") == ([1], False)


@pytest.mark.parametrize(
    "query",
    [
        {"since": "yesterday"},
        {"since": "nan"},
        {"until": "inf"},
        {"worker": "../etc"},
        {"rank": "one"},
        {"skip": "-1"},
        {"skip": "9999999999"},
    ],
)
def test_an_invalid_page_is_refused(query: dict[str, str]) -> None:
    with pytest.raises(UsageError):
        read(Talking(1), **query)
