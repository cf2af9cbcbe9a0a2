"""Detects that the ranks of a generation stand still, reports where they stand, and restarts the group.

Each launcher inspects its own ranks. Each launcher whose ranks move also keeps increasing a number in the group's
store, where the others see it. A group hangs if no launcher increases the number. So ranks that wait for a
peer, on whichever worker, are left alone while that peer is working.
"""

from __future__ import annotations

import linecache
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from elasticctl_launcher.hangs.collectives import Collective
from elasticctl_launcher.hangs.process_activity import read_activity
from elasticctl_launcher.hangs.rank_location import describe, place_of
from elasticctl_launcher.hangs.stacks import StackReader, Stacks, main_thread, to_lines
from elasticctl_launcher.hangs.standstill import (
    Allowance,
    Sighting,
    TimeLimit,
    Track,
    follow,
    wakes_by_itself,
    where_all_are,
)
from elasticctl_launcher.system import start_thread
from elasticctl_protocol.failures import GROUP_HANGS
from elasticctl_protocol.reports import HangReport, RankPlace, Report

INSPECTIONS = 8
"""How many times the ranks are inspected in the shortest time that has any consequence."""
SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 10.0
TURNS = 3
"""How many more inspections a launcher waits whose ranks only wait, so that the launcher of the rank to blame is first.
"""
ANSWER_S = 2.0
"""How long an inspection waits for the group's store. A later answer is used by a later inspection."""
STACK_LINES = 20
"""How many lines of the blamed rank's stack a failure includes; the log has all of them."""
UNREADABLE = "no Python stack can be read"

log = logging.getLogger(__name__)


class CounterStore(Protocol):
    """The part of torch.distributed.Store that is used here."""

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
    """A group that hangs, as seen by one launcher; `places` are those of its own ranks.

    `of_peers`: its ranks only wait, so the cause is on another worker. `culprit` is the rank that the others wait for,
    None if it is not on this worker; `stack` are the lines of its stack.
    """

    generation: int
    still_s: float
    places: tuple[RankPlace, ...]
    of_peers: bool = False
    culprit: int | None = None
    stack: tuple[str, ...] = ()

    def describe(self) -> str:
        """Return one line for people."""
        return f"{GROUP_HANGS}: {describe(self.places)}"


class HangWatch:
    """Watches one generation after the other. The launcher's main thread calls `watch_generation` and `stop_watching`.

    Calls these functions, all from its own thread: `print_line(rank, text)` for lines of stacks, `report(report)` for
    reports to the service, `on_still(generation, still)` when the ranks have stood still for a while or move again,
    and `on_hang(hang)` when they have to be restarted. `timeout_s` is as in `TimeLimit`. `collective_of(local_rank)`
    returns the collective that a rank is in, if it is known, and `known_path(path)` the path by which people know a
    file.
    """

    def __init__(
        self,
        timeout_s: float | None,
        print_line: Callable[[int, str], None],
        report: Callable[[HangReport], None],
        *,
        on_still: Callable[[int, bool], None],
        on_hang: Callable[[Hang], None],
        collective_of: Callable[[int], Collective | None],
        known_path: Callable[[str], str] = str,
    ) -> None:
        self.time_limit = TimeLimit(timeout_s)
        self.print_line, self.report = print_line, report
        self.on_still, self.on_hang, self.collective_of = on_still, on_hang, collective_of
        self.known_path = known_path
        self.reader = StackReader()
        self.reported_at_s, self.step = time.monotonic(), 0
        self.lines: dict[int, int] = {}
        self._stop = threading.Event()

    def count_line(self, rank: int) -> None:
        """Record that a rank has printed a line."""
        self.lines[rank] = self.lines.get(rank, 0) + 1

    def record_report(self, report: Report) -> None:
        """Record a report of a rank through the training library."""
        self.reported_at_s, self.step = time.monotonic(), report.step or 0
        self.time_limit.record_report(report.kind, self.reported_at_s)

    def watch_generation(self, generation: int, ranks: Sequence[LocalRank], store: CounterStore, workers: int) -> None:
        """Start to watch the local `ranks` of a generation of `workers` workers, whose c10d store is `store`."""
        self.stop_watching()
        self._stop = threading.Event()
        self.time_limit.start_generation(time.monotonic())
        group = Peers(store if workers > 1 else None, f"elasticctl/moves/{generation}")
        watch = GenerationWatch(self, generation, tuple(ranks), group)
        start_thread(watch.run, self._stop, name=f"hangs-{generation}")

    def stop_watching(self) -> None:
        """Stop watching, because the ranks are about to be stopped."""
        self._stop.set()


class Peers:
    """Tracks whether the ranks of other workers move; `store` is None if there are no other workers.

    If the store is gone or does not answer, the other ranks are assumed to stand still: its host is lost, and so is the
    group.
    """

    def __init__(self, store: CounterStore | None, key: str) -> None:
        self._store, self._key, self._moves = store, key, 0
        self._question: threading.Thread | None = None
        self.are_there = store is not None
        self.moved_at_s = 0.0

    def exchange(self, *, we_move: bool) -> None:
        """Report whether our ranks move, and find out whether those of others did since the last call."""
        if self._store is None:
            return
        if self._question is None or not self._question.is_alive():
            try:
                self._question = start_thread(self._ask, self._store, int(we_move), name="hangs-peers")
            except OSError as error:
                log.debug("it is unknown whether other workers' ranks move: %s", error)
                return
        self._question.join(ANSWER_S)

    def _ask(self, store: CounterStore, amount: int) -> None:
        try:
            moves = store.add(self._key, amount)
        except (RuntimeError, OSError) as error:
            log.debug("it is unknown whether other workers' ranks move: %s", error)
            return
        if moves != self._moves:
            self._moves, self.moved_at_s = moves, time.monotonic()


class GenerationWatch:
    """Watches the ranks of one generation."""

    def __init__(self, parent: HangWatch, generation: int, ranks: Sequence[LocalRank], peers: Peers) -> None:
        self._parent, self._generation, self._ranks, self._peers = parent, generation, ranks, peers
        self._tracks: dict[int, Track] = {}
        self._reported_at_s: float | None = None

    def run(self, stop: threading.Event) -> None:
        """Inspect the ranks until `stop` is set or the group is found to hang."""
        while True:
            allowance = self._parent.time_limit.allowance()
            shortest_s = min(allowance.report_s, allowance.end_s or allowance.report_s)
            pause_s = min(LONGEST_PAUSE_S, max(SHORTEST_PAUSE_S, shortest_s / INSPECTIONS))
            if stop.wait(pause_s):
                return
            still_s = self._inspect(allowance, stop)
            if stop.is_set():
                return
            if self._reported_at_s is not None and still_s < allowance.report_s:
                self._withdraw()
            if self._reported_at_s is None and still_s >= allowance.report_s:
                self._report_standstill(still_s)
            if self._is_to_end(allowance, still_s, pause_s):
                self._report_standstill(still_s)
                self._parent.on_hang(self._hang(still_s))
                return

    def _inspect(self, allowance: Allowance, stop: threading.Event) -> float:
        """Inspect every rank; return for how many seconds no rank of the group has moved."""
        parent = self._parent
        began_s = time.monotonic()
        running = [rank for rank in self._ranks if rank.code is None]
        if not running:
            return 0.0
        for rank in running:
            before = self._tracks.get(rank.rank)
            lines = parent.lines.get(rank.rank, 0)
            # A rank that prints or reports moves, so its stack need not be read, which is expensive.
            quiet = before is None or before.seen.lines == lines
            seen = self._see(rank, lines, with_stack=quiet and parent.reported_at_s <= began_s - allowance.report_s / 2)
            self._tracks[rank.rank] = follow(before, seen, strict=allowance.strict)
            if stop.is_set():
                return 0.0
        for rank in self._ranks:
            if rank.code is not None:
                self._tracks.pop(rank.rank, None)
        moved_at_s = max([parent.reported_at_s, *(track.moved_at_s for track in self._tracks.values())])
        self._peers.exchange(we_move=moved_at_s >= began_s)
        now_s = time.monotonic()
        return max(0.0, now_s - max(moved_at_s, self._peers.moved_at_s))

    def _see(self, rank: LocalRank, lines: int, *, with_stack: bool) -> Sighting:
        pid = rank.process.pid
        stacks = self._parent.reader.read(pid) if with_stack else None
        return Sighting(time.monotonic(), lines, read_activity(pid), stacks, place_of(stacks, linecache.getline))

    def _is_to_end(self, allowance: Allowance, still_s: float, pause_s: float) -> bool:
        if allowance.end_s is None or (allowance.strict and wakes_by_itself(self._tracks)):
            return False
        only_waits = all(track.waits for track in self._tracks.values())
        patience_s = TURNS * pause_s if only_waits and self._peers.are_there else 0.0
        return still_s >= allowance.end_s + patience_s

    def _report_standstill(self, still_s: float) -> None:
        """Log every rank's stacks, and report the ranks' places to the service."""
        hang = self._hang(still_s)
        log.warning("generation %d: nothing has moved for %.0f s: %s", hang.generation, still_s, describe(hang.places))
        for rank in self._ranks:
            if rank.rank in self._tracks:
                stacks = self._parent.reader.read_all(rank.process.pid)
                for line in to_lines(stacks, self._parent.known_path) if stacks else (UNREADABLE,):
                    self._parent.print_line(rank.rank, f"[rank{rank.rank}] {line}")
        self._report([replace(place, for_s=round(place.for_s or 0.0, 1)) for place in hang.places])
        self._parent.on_still(self._generation, True)
        self._reported_at_s = time.monotonic() - still_s

    def _withdraw(self) -> None:
        """Report that the ranks move again."""
        still_s = time.monotonic() - (self._reported_at_s or 0.0)
        log.info("generation %d: the ranks move again, after %.0f s", self._generation, still_s)
        self._parent.time_limit.record_standstill(still_s)
        self._report([RankPlace(rank.rank) for rank in self._ranks])
        self._parent.on_still(self._generation, False)
        self._reported_at_s = None

    def _report(self, places: Sequence[RankPlace]) -> None:
        report = HangReport(generation=self._generation, step=self._parent.step, ranks=tuple(places))
        self._parent.report(report)

    def _with_numbers(self) -> dict[int, Track]:
        """The tracks, extended by the numbers of the collectives that ranks wait in."""
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
        stack = () if culprit is None else self._innermost_lines(self._tracks[culprit].seen.stacks)
        of_peers = culprit is None and self._peers.are_there
        return Hang(self._generation, still_s, places, of_peers, culprit, stack)

    def _innermost_lines(self, stacks: Stacks | None) -> tuple[str, ...]:
        """The main thread's stack, the innermost call last, as Python prints it, because its end is what is shown."""
        main = main_thread(stacks) if stacks else None
        lines = () if main is None else to_lines((main,), self._parent.known_path)
        return tuple(reversed(list(lines)[1 : STACK_LINES + 1]))
