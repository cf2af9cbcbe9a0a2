"""Both ends of the connections between a launcher and its ranks."""

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
    """The launcher's end, and the messages that it has received."""

    def __init__(self, folder: Path) -> None:
        self.received: list[tuple[str, int, str]] = []
        self.links = RankLinks(
            folder,
            on_lost=lambda generation, why: self.received.append(("lost", generation, why)),
            on_declined=lambda generation, why: self.received.append(("declined", generation, why)),
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


def test_ranks_stay_only_if_all_are_attached(launcher: Launcher) -> None:
    assert not launcher.links.are_attached([0, 1])
    first, second = launcher.rank(0), launcher.rank(1)
    wait_until(lambda: launcher.links.are_attached([0, 1]))
    second.close()
    wait_until(lambda: not launcher.links.are_attached([0, 1]))
    assert launcher.links.are_attached([0])
    first.close()


def test_a_rank_receives_the_end_of_its_generation_and_its_next_place(launcher: Launcher) -> None:
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


def test_lost_peers_and_declining_ranks_are_reported_to_the_launcher(launcher: Launcher) -> None:
    rank = launcher.rank(0, generation=4)
    rank.report_lost(rank.generation, "connection reset")
    wait_until(lambda: launcher.received == [("lost", 4, "connection reset")])
    rank.decline("no state")
    wait_until(lambda: launcher.received[1:] == [("declined", 4, "no state")])
    assert not launcher.links.are_attached([0])
    rank.close()


def test_a_rank_that_declines_late_is_reported_for_the_next_generation(launcher: Launcher) -> None:
    rank = launcher.rank(0, generation=4)
    wait_until(lambda: launcher.links.are_attached([0]))
    launcher.links.give_place(0, {"ELASTICCTL_GENERATION": "5"})
    launcher.links.report_end(4)
    wait_until(lambda: rank.is_over)  # sent after the place, which has therefore arrived
    rank.decline("a collective never ends")
    wait_until(lambda: launcher.received == [("declined", 5, "a collective never ends")])
    rank.close()


def test_a_rank_whose_link_is_closed_stops_waiting(launcher: Launcher) -> None:
    rank = launcher.rank(0)
    threading.Timer(0.1, rank.close).start()
    with pytest.raises(ConnectionError, match="has closed the connection"):
        rank.wait_for_place()


def test_without_a_listening_launcher_there_is_no_link(tmp_path: Path) -> None:
    assert LauncherLink.open({}) is None
    assert LauncherLink.open({"ELASTICCTL_LINK": str(tmp_path / "none"), "ELASTICCTL_GENERATION": "1"}) is None


def test_an_invalid_message_ends_the_link(launcher: Launcher) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line:
        line.connect(launcher.links.path)
        line.sendall(b'{"attach": 0, "generation": 1}\n')
        wait_until(lambda: launcher.links.are_attached([0]))
        line.sendall(b"not json\n")
        wait_until(lambda: not launcher.links.are_attached([0]))
