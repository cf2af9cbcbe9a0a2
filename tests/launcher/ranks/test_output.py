"""The output of a rank as lines: complete ones, and progress bars that are redrawn."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

import pytest

from elasticctl_launcher.ranks.output import PROGRESS_S, LastTraceback, RankOutput
from tests.support.waiting import wait_until


@dataclass
class Rank:
    """Writes output as a rank does; `said` are the lines that result. `now` is the reader's clock, in seconds."""

    said: list[str] = field(default_factory=list)
    noted: list[str] = field(default_factory=list)
    now: float = 0.0

    def __post_init__(self) -> None:
        read, self.pipe = os.pipe()
        self.output = RankOutput(
            os.fdopen(read, "rb", buffering=0), LastTraceback(self.noted.append, self.said.append), lambda: self.now
        )

    def prints(self, text: bytes) -> None:
        os.write(self.pipe, text)

    def ends(self) -> list[str]:
        """Print no more; returns all lines."""
        os.close(self.pipe)
        self.output.drain()
        return self.said


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        (b"one\ntwo\n\nthree", ["one", "two", "", "three"]),
        (b"dos\r\nlines\r\n", ["dos", "lines"]),
        (b"\r 0%\r 50%\r100%\nnext\n", ["100%", "next"]),
        (b"\r 50%\r100%", [" 50%\r", "100%"]),
        (b"epoch 1\r\r", ["epoch 1\r", "epoch 1"]),
        (b"epoch 1\r", ["epoch 1"]),
        (b"\r 99%\r     \r\nafter\n", [" 99%", "after"]),
        ("\r1%|█\r2%|██\n".encode(), ["2%|██"]),
    ],
)
def test_carriage_returns_are_resolved_as_on_a_terminal(text: bytes, lines: list[str]) -> None:
    rank = Rank()
    rank.prints(text)
    assert rank.ends() == lines


def test_a_progress_bar_is_printed_at_intervals() -> None:
    rank = Rank()
    rank.prints(b"\r 1%\r 2%\r")
    wait_until(lambda: rank.said == [" 2%\r"])
    rank.now = PROGRESS_S / 2
    for text in (b" 3%\r", b" 4%\r"):
        rank.prints(text)
    rank.prints(b"\n")
    wait_until(lambda: rank.said == [" 2%\r", " 4%"])
    rank.prints(b"\r 6%\r")
    rank.prints(b"\n")
    wait_until(lambda: rank.said[-1] == " 6%")
    rank.now = 2 * PROGRESS_S
    rank.prints(b" 7%\r 8%\r")
    wait_until(lambda: rank.said[-1] == " 8%\r")
    rank.prints(b" 8%\n")
    rank.prints(b"done")
    assert rank.ends() == [" 2%\r", " 4%", " 6%", " 8%\r", " 8%", "done"]


def test_an_endless_progress_bar_needs_bounded_memory() -> None:
    rank = Rank()
    for step in range(2000):
        rank.prints(b"%099d\r" % step)
    said = rank.ends()
    assert 1 <= len(said) <= 2
    assert said[-1] == f"{1999:099}"


PEERS = b"""[rank1]: Traceback (most recent call last):
[rank1]:   File "/x/train.py", line 20, in <module>
[rank1]:     loss.backward()
[rank1]: RuntimeError: [/pytorch/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4711
[W1124 03:00:00.000000001 ProcessGroup.hpp:940] Warning: No backend of type 0 found
saved nothing
"""
ERROR = "RuntimeError: [/pytorch/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4711"


@pytest.mark.parametrize("peers_ended", [True, False])
def test_a_traceback_about_a_lost_peer_becomes_one_line(peers_ended: bool) -> None:
    rank = Rank()
    rank.prints(b"step 1\n" + PEERS)
    rank.ends()
    assert rank.said == ["step 1"]
    assert rank.noted[-1] == "saved nothing", "all lines are recorded immediately"
    rank.output.close(peers_ended=peers_ended)
    rank.output.wait_for_last_words()
    summed_up = [f"a peer was lost: {ERROR} (5 lines of its traceback left out)", "saved nothing"]
    assert rank.said[1:] == (summed_up if peers_ended else PEERS.decode().splitlines())


def test_another_traceback_is_printed_when_the_rank_ends() -> None:
    own = ["Traceback (most recent call last):", '  File "x.py", line 1, in <module>', "ValueError: nothing of peers"]
    rank = Rank()
    rank.prints("\n".join(own).encode())
    assert rank.ends() == own


def test_a_held_traceback_is_printed_soon_if_the_rank_continues() -> None:
    rank = Rank()
    rank.prints(PEERS)
    wait_until(lambda: rank.said == PEERS.decode().splitlines())
    rank.prints(b"tried again\n")
    assert rank.ends()[-1] == "tried again"


def test_an_endless_traceback_is_not_held() -> None:
    said: list[str] = []
    words = LastTraceback(lambda line: None, said.append)
    for line in (PEERS * 200).decode().splitlines():
        words.add(line)
    assert len(said) > 200 * 6 - 401
