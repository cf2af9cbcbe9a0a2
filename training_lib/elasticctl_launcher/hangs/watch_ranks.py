"""Watches the ranks of one generation for standing still, reports where they stand, and has the group restarted.

Each launcher looks at its own ranks. Whether those of others move it learns from a number in the group's store, which
every launcher whose ranks move keeps raising: a group hangs when nobody does. So ranks that wait for a peer which is
long at work, on whichever worker, are left alone.
"""

from __future__ import annotations

import linecache
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from elasticctl_launcher.hangs.collectives import Collective
from elasticctl_launcher.hangs.pace import Allowance, Pace
from elasticctl_launcher.hangs.places import RankPlace, describe, place_of
from elasticctl_launcher.hangs.stacks import StackReader, Stacks, main_thread, to_lines
from elasticctl_launcher.hangs.standstill import Sighting, Track, follow, wakes_by_itself, where_all_are
from elasticctl_launcher.hangs.vitals import read_vitals

LOOKS = 8
"""In the shortest time that leads to anything, the ranks are looked at about this often."""
SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 10.0
TURNS = 3
"""A launcher whose ranks only wait lets this many looks pass, so that the one whose rank is to blame comes first."""
ANSWER_S = 2.0
"""How long a look waits for the group's store; a later answer is heard by a later look."""
GROUP_HANGS = "the group hangs"
"""How the error of a hang begins; the controller knows it by that."""
STACK_LINES = 20
"""Of the stack of the rank to blame, in the failure's own story; the log has all of it."""

log = logging.getLogger(__name__)


class Store(Protocol):
    """What is needed of torch.distributed.Store."""

    def add(self, key: str, amount: int, /) -> int: ...


class Process(Protocol):
    """The process of a rank."""

    @property
    def pid(self) -> int: ...


class LocalRank(Protocol):
    """A rank of this worker; `code` is None while it runs."""

    @property
    def rank(self) -> int: ...

    @property
    def local_rank(self) -> int: ...

    @property
    def process(self) -> Process: ...

    @property
    def code(self) -> int | None: ...


@dataclass(frozen=True, slots=True)
class Hang:
    """A group that hangs, as one launcher sees it: `places` are those of its ranks.

    `of_peers`: its ranks only wait; the cause is with another worker. `culprit` is the rank that the others wait for,
    None if there is no such rank; `stack` are lines about it.
    """

    generation: int
    still_s: float
    places: tuple[RankPlace, ...]
    of_peers: bool = False
    culprit: int | None = None
    stack: tuple[str, ...] = ()

    def describe(self) -> str:
        """One line for people."""
        return f"{GROUP_HANGS}: {describe(self.places)}"


class HangWatch:
    """Watches generation after generation. `begin` and `end` come from the launcher's main thread.

    Calls `print_line(rank, text)` for lines of stacks, `report(message)` with what the service is to know,
    `on_still(generation, still)` when the ranks have stood still for a while, or move again, and `on_hang(hang)` when
    they are to be restarted; all from a thread of its own. `timeout_s` is `Pace`'s. `collective_of(local_rank)` is the
    collective that a rank is in, as far as it is known.
    """

    def __init__(
        self,
        timeout_s: float | None,
        print_line: Callable[[int, str], None],
        report: Callable[[dict[str, Any]], None],
        *,
        on_still: Callable[[int, bool], None],
        on_hang: Callable[[Hang], None],
        collective_of: Callable[[int], Collective | None],
    ) -> None:
        self.pace = Pace(timeout_s)
        self.print_line, self.report = print_line, report
        self.on_still, self.on_hang, self.collective_of = on_still, on_hang, collective_of
        self.reader = StackReader()
        self.reported_at_s, self.step = time.monotonic(), 0
        self.lines: dict[int, int] = {}
        self._stop = threading.Event()

    def note_line(self, rank: int) -> None:
        """A rank has printed a line."""
        self.lines[rank] = self.lines.get(rank, 0) + 1

    def note_report(self, message: Mapping[str, Any]) -> None:
        """A rank has reported something through the training library."""
        self.reported_at_s, self.step = time.monotonic(), message["step"]
        self.pace.note_report(str(message.get("kind")), self.reported_at_s)

    def begin(self, generation: int, ranks: Sequence[LocalRank], store: Store, workers: int) -> None:
        """The ranks of a generation of `workers` workers have been started here."""
        self.end()
        self._stop = threading.Event()
        self.pace.begin(time.monotonic())
        group = Peers(store if workers > 1 else None, f"elasticctl/moves/{generation}")
        watch = GenerationWatch(self, generation, tuple(ranks), group)
        threading.Thread(target=watch.run, args=(self._stop,), name=f"hangs-{generation}", daemon=True).start()

    def end(self) -> None:
        """The ranks are about to be stopped: what they do from now on means nothing."""
        self._stop.set()


class Peers:
    """Do the ranks of other workers move? `store` is None where there are none.

    A store that is gone, or does not answer, says that nobody does: its host is lost, and so is the group.
    """

    def __init__(self, store: Store | None, key: str) -> None:
        self._store, self._key, self._moves = store, key, 0
        self._question: threading.Thread | None = None
        self.are_there = store is not None
        self.moved_at_s = 0.0

    def look(self, *, we_move: bool) -> None:
        """Tell the others whether our ranks move, and see whether theirs did since the last look."""
        if self._store is None:
            return
        if self._question is None or not self._question.is_alive():
            arguments = (self._store, int(we_move))
            self._question = threading.Thread(target=self._ask, args=arguments, name="hangs-peers", daemon=True)
            self._question.start()
        self._question.join(ANSWER_S)

    def _ask(self, store: Store, amount: int) -> None:
        try:
            moves = store.add(self._key, amount)
        except (RuntimeError, OSError) as error:
            log.debug("cannot tell whether other workers' ranks move: %s", error)
            return
        if moves != self._moves:
            self._moves, self.moved_at_s = moves, time.monotonic()


class GenerationWatch:
    """The looks at one generation's ranks."""

    def __init__(self, parent: HangWatch, generation: int, ranks: Sequence[LocalRank], peers: Peers) -> None:
        self._parent, self._generation, self._ranks, self._peers = parent, generation, ranks, peers
        self._tracks: dict[int, Track] = {}
        self._told_at_s: float | None = None

    def run(self, stop: threading.Event) -> None:
        """Look until `stop` is set or the group is found to hang."""
        while True:
            allowance = self._parent.pace.allowance()
            shortest_s = min(allowance.report_s, allowance.end_s or allowance.report_s)
            pause_s = min(LONGEST_PAUSE_S, max(SHORTEST_PAUSE_S, shortest_s / LOOKS))
            if stop.wait(pause_s):
                return
            still_s = self._look(allowance, stop)
            if stop.is_set():
                return
            if self._told_at_s is not None and still_s < allowance.report_s:
                self._withdraw()
            if self._told_at_s is None and still_s >= allowance.report_s:
                self._tell(still_s)
            if self._is_to_end(allowance, still_s, pause_s):
                self._tell(still_s)
                self._parent.on_hang(self._hang(still_s))
                return

    def _look(self, allowance: Allowance, stop: threading.Event) -> float:
        """Look at every rank; for how many seconds has nobody moved?"""
        parent = self._parent
        began_s = time.monotonic()
        running = [rank for rank in self._ranks if rank.code is None]
        if not running:
            return 0.0
        for rank in running:
            before = self._tracks.get(rank.rank)
            lines = parent.lines.get(rank.rank, 0)
            # Who prints or reports moves: the dearer look is spared.
            quiet = before is None or before.seen.lines == lines
            seen = self._see(rank, lines, with_stack=quiet and parent.reported_at_s <= began_s - allowance.report_s / 2)
            self._tracks[rank.rank] = follow(before, seen, strict=allowance.strict)
            if stop.is_set():
                return 0.0
        for rank in self._ranks:
            if rank.code is not None:
                self._tracks.pop(rank.rank, None)
        moved_at_s = max([parent.reported_at_s, *(track.moved_at_s for track in self._tracks.values())])
        self._peers.look(we_move=moved_at_s >= began_s)
        now_s = time.monotonic()
        return max(0.0, now_s - max(moved_at_s, self._peers.moved_at_s))

    def _see(self, rank: LocalRank, lines: int, *, with_stack: bool) -> Sighting:
        pid = rank.process.pid
        stacks = self._parent.reader.read(pid) if with_stack else None
        return Sighting(time.monotonic(), lines, read_vitals(pid), stacks, place_of(stacks, linecache.getline))

    def _is_to_end(self, allowance: Allowance, still_s: float, pause_s: float) -> bool:
        if allowance.end_s is None or (allowance.strict and wakes_by_itself(self._tracks)):
            return False
        only_waits = all(track.waits for track in self._tracks.values())
        patience_s = TURNS * pause_s if only_waits and self._peers.are_there else 0.0
        return still_s >= allowance.end_s + patience_s

    def _tell(self, still_s: float) -> None:
        """Put every rank's stacks into the log, and tell the service where they are."""
        hang = self._hang(still_s)
        log.warning("generation %d: nothing has moved for %.0f s: %s", hang.generation, still_s, describe(hang.places))
        for rank in self._ranks:
            if rank.rank in self._tracks:
                for line in _stack_lines(self._parent.reader.read_all(rank.process.pid)):
                    self._parent.print_line(rank.rank, f"[rank{rank.rank}] {line}")
        places = [
            {"rank": place.rank, "where": place.where, "for_s": round(place.for_s, 1), "waits": place.waits}
            for place in hang.places
        ]
        self._report(places)
        self._parent.on_still(self._generation, True)
        self._told_at_s = time.monotonic() - still_s

    def _withdraw(self) -> None:
        """They move again."""
        still_s = time.monotonic() - (self._told_at_s or 0.0)
        log.info("generation %d: the ranks move again, after %.0f s", self._generation, still_s)
        self._parent.pace.note_spell(still_s)
        self._report([{"rank": rank.rank, "where": ""} for rank in self._ranks])
        self._parent.on_still(self._generation, False)
        self._told_at_s = None

    def _report(self, places: Sequence[Mapping[str, Any]]) -> None:
        message = {"kind": "hang", "generation": self._generation, "step": self._parent.step, "ranks": list(places)}
        self._parent.report(message)

    def _with_numbers(self) -> dict[int, Track]:
        """The tracks, with the numbers of the collectives that ranks wait in."""
        tracks = dict(self._tracks)
        for rank in self._ranks:
            track = tracks.get(rank.rank)
            if track is not None and track.seen.place.kind.waits:
                found = self._parent.collective_of(rank.local_rank)
                place = found.at(track.seen.place) if found else track.seen.place
                tracks[rank.rank] = replace(track, seen=replace(track.seen, place=place))
        return tracks

    def _hang(self, still_s: float) -> Hang:
        places = where_all_are(self._with_numbers(), time.monotonic())
        culprit = next((place.rank for place in places if not place.waits), None)
        stack = () if culprit is None else _innermost_lines(self._tracks[culprit].seen.stacks)
        of_peers = culprit is None and self._peers.are_there
        return Hang(self._generation, still_s, places, of_peers, culprit, stack)


def _innermost_lines(stacks: Stacks | None) -> tuple[str, ...]:
    """The main thread's stack as Python prints it, the innermost call last: what is shown of it is its end."""
    main = main_thread(stacks) if stacks else None
    return () if main is None else tuple(reversed(list(to_lines((main,)))[1 : STACK_LINES + 1]))


def _stack_lines(stacks: Stacks | None) -> list[str]:
    return list(to_lines(stacks)) if stacks else ["no Python stack can be read"]
