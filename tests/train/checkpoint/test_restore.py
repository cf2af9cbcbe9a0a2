"""A restore by several ranks: each share is read from the nearest place, and once from storage."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from elasticctl_train.checkpoint import restore
from tests.support.train import ranks, sharded


@pytest.mark.parametrize(
    "cases",
    [
        [
            ("XY", "", "XYZ", [1, 1, 0], 2),  # no tier: each share is read once, by one rank
            ("XX", "", "XXX", [1, 1, 0], 0),  # and passed on in memory to ranks of the same node
            ("XX", "", "XXY", [1, 1, 0], 2),
            ("ab", "", "abc", [0, 0, 0], 2),  # a node joins and receives what it needs
        ],
        [
            ("aa", "", "aa", [0, 0], 0),  # one node, all ranks started again
            ("ab", "b", "ac", [0, 1], 2),  # one node is lost and replaced
        ],
        [("aa", "", "a", [0], 0)],
        [("XXX", "", "X", [3], 0)],
    ],
    ids=["three", "two", "one of two", "one of three"],
)
def test_every_share_is_read_at_most_once(tmp_path: Path, cases: list[tuple[str, str, str, list[int], int]]) -> None:
    """Nodes a, b, c have a local tier, X, Y, Z none."""

    def folders(case: int, nodes: str) -> list[str]:
        paths = [tmp_path / f"{node}{case}" for node in nodes]
        for path in paths:
            if path.name.islower():
                path.mkdir(mode=0o700, exist_ok=True)
        return [str(path) for path in paths]

    urls = [str(tmp_path / f"state-{case}") for case in range(len(cases))]
    saved_on = {url: folders(case, cases[case][0]) for case, url in enumerate(urls)}
    size = len(cases[0][0])
    assert ranks.run(sharded.save_on_nodes, size, saved_on) == [0] * size
    for case, (_, lost, *_) in enumerate(cases):
        if lost:
            (tmp_path / f"{lost}{case}").rename(tmp_path / "gone")
    restored_on = {url: folders(case, cases[case][2]) for case, url in enumerate(urls)}
    size = len(cases[0][2])
    assert ranks.run(sharded.restore_on_nodes, size, restored_on) == [0] * size
    for url, (*_, reads, parcels) in zip(urls, cases, strict=True):
        assert [Path(f"{url}-{rank}").read_text() for rank in range(size)] == [f"{own} {parcels}" for own in reads]


@pytest.mark.parametrize("fates", [["dies"], ["commits", "fails", "dies"]])
def test_the_last_committed_share_stays_in_memory_until_the_next_commit(tmp_path: Path, fates: list[str]) -> None:
    url, node = str(tmp_path / "state"), tmp_path / "node"
    node.mkdir(mode=0o700)
    places = {url: [str(node)] * 2}
    assert ranks.run(sharded.save_on_nodes, 2, places) == [0, 0]
    assert ranks.run(sharded.lose_commits, 2, url, str(node), fates) == [-signal.SIGKILL] * 2
    assert ranks.run(sharded.restore_on_nodes, 2, places) == [0, 0]
    assert [Path(f"{url}-{rank}").read_text() for rank in range(2)] == ["0 0", "0 0"]


def test_a_rank_without_memory_is_an_error_on_all_ranks(tmp_path: Path) -> None:
    url, outcome = str(tmp_path / "state"), str(tmp_path / "outcome")
    assert ranks.run(sharded.save_on_nodes, 2, {url: ["X", "X"]}) == [0, 0]
    assert ranks.run(sharded.restore_without_memory, 2, url, outcome) == [0, 0]
    said = {Path(f"{outcome}-{rank}").read_text() for rank in range(2)}
    assert said == {"no 268435456 MB of memory for a checkpoint: Cannot allocate memory"}


@pytest.mark.parametrize(
    ("sizes_bytes", "offered", "suppliers"),
    [
        ([5, 5, 5], [[], [], []], [0, 1, 2]),
        ([5, 5, 5], [[]], [0, 0, 0]),
        ([9, 1, 1, 8], [[], []], [0, 1, 0, 1]),
        ([5, 5], [[1], [0], []], [1, 0]),
        ([5, 5], [[0, 1], [0, 1]], [0, 1]),
        ([5, 5, 5], [[], [2], [1]], [0, 2, 1]),
    ],
)
def test_shares_are_supplied_evenly_and_preferably_from_memory(
    sizes_bytes: list[int], offered: list[list[int]], suppliers: list[int]
) -> None:
    assert restore.choose(sizes_bytes, offered) == suppliers
