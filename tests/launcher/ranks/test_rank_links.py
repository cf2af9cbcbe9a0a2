"""The launcher's lines to its ranks, with the ranks' own end of them."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from elasticctl_launcher.ranks.rank_links import RankLinks
from elasticctl_train.inplace.launcher_link import LauncherLink
from tests.support.waiting import wait_until


class Launcher:
    """A launcher's end, and what it has heard."""

    def __init__(self, folder: Path) -> None:
        self.heard: list[tuple[str, int, str]] = []
        self.links = RankLinks(
            folder,
            on_lost=lambda generation, why: self.heard.append(("lost", generation, why)),
            on_declined=lambda generation, why: self.heard.append(("declined", generation, why)),
        )

    def rank(self, local_rank: int, generation: int = 1, on_over: Callable[[], None] = lambda: None) -> LauncherLink:
        environment = {
            "ELASTICCTL_LINK": self.links.path,
            "ELASTICCTL_GENERATION": str(generation),
            "LOCAL_RANK": str(local_rank),
        }
        link = LauncherLink.open(environment)
        assert link is not None
        link.listen(on_over)
        link.attach()
        return link


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Launcher]:
    made = Launcher(tmp_path)
    yield made
    made.links.close()


def test_all_ranks_have_to_be_there_to_stay(launcher: Launcher) -> None:
    assert not launcher.links.are_attached([0, 1])
    first, second = launcher.rank(0), launcher.rank(1)
    wait_until(lambda: launcher.links.are_attached([0, 1]))
    second.close()
    wait_until(lambda: not launcher.links.are_attached([0, 1]))
    assert launcher.links.are_attached([0])
    first.close()


def test_a_rank_hears_that_its_generation_is_over_and_its_next_place(launcher: Launcher) -> None:
    over = threading.Event()
    rank = launcher.rank(0, on_over=over.set)
    wait_until(lambda: launcher.links.are_attached([0]))
    launcher.links.report_end(0)
    launcher.links.report_end(1)
    wait_until(over.is_set)
    assert rank.is_over
    launcher.links.give_place(0, {"ELASTICCTL_GENERATION": "2", "RANK": "3"})
    assert rank.wait_for_place()["RANK"] == "3"
    assert (rank.generation, rank.is_over) == (2, False)
    rank.close()


def test_the_launcher_hears_of_lost_peers_and_of_ranks_that_cannot_stay(launcher: Launcher) -> None:
    rank = launcher.rank(0, generation=4)
    rank.report_lost(rank.generation, "connection reset")
    wait_until(lambda: launcher.heard == [("lost", 4, "connection reset")])
    rank.decline("no state")
    wait_until(lambda: launcher.heard[1:] == [("declined", 4, "no state")])
    assert not launcher.links.are_attached([0])
    rank.close()


def test_a_rank_that_is_stuck_in_a_generation_that_is_over_cannot_stay_in_the_next(launcher: Launcher) -> None:
    rank = launcher.rank(0, generation=4)
    wait_until(lambda: launcher.links.are_attached([0]))
    launcher.links.give_place(0, {"ELASTICCTL_GENERATION": "5"})
    launcher.links.report_end(4)
    wait_until(lambda: rank.is_over)  # said after the place, so that has come too
    rank.decline("a collective never ends")
    wait_until(lambda: launcher.heard == [("declined", 5, "a collective never ends")])
    rank.close()


def test_a_rank_whose_line_is_cut_waits_for_nothing(launcher: Launcher) -> None:
    rank = launcher.rank(0)
    threading.Timer(0.1, rank.close).start()
    with pytest.raises(ConnectionError, match="has closed the connection"):
        rank.wait_for_place()


def test_where_no_launcher_listens_there_is_no_line(tmp_path: Path) -> None:
    assert LauncherLink.open({}) is None
    assert LauncherLink.open({"ELASTICCTL_LINK": str(tmp_path / "none"), "ELASTICCTL_GENERATION": "1"}) is None


def test_what_is_no_message_ends_the_line(launcher: Launcher) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line:
        line.connect(launcher.links.path)
        line.sendall(b'{"attach": 0, "generation": 1}\n')
        wait_until(lambda: launcher.links.are_attached([0]))
        line.sendall(b"not json\n")
        wait_until(lambda: not launcher.links.are_attached([0]))
