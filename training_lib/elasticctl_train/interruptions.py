"""How often a run loses work, as it has observed, by the age of its machines.

    interruptions.json     what all groups that have trained at a storage URL have seen, and who trains there now

Machines in clouds do not fail at a constant rate: most are reclaimed early, and some clouds end every spot machine
after a day ("Modeling The Temporally Constrained Preemptions of Transient Cloud VMs", Kadupitiya et al., 2020). So both
the time that machines were in a group and the losses are counted by age.

An *interruption* is the end of a group that lost work, because it did not hand over what it had done. A group that
committed its last step, because workers were added, removed or given notice or because the job was suspended, is not
one, and neither is a group whose state survives in its ranks or in workers' memory. A group counts as alive until it
reported its end, or else for at most `UNSEEN_S` after its last commit: while a job waits for machines, or for its user,
it learns nothing.

The file is only an optimization: without it, or if it cannot be read, a run learns from the beginning.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path

from elasticctl_store.checkpoints.commits import read_commits
from elasticctl_store.checkpoints.run_records import INTERRUPTIONS
from elasticctl_store.errors import DamagedError, MissingError, StorageError
from elasticctl_store.storage import Storage

log = logging.getLogger("elasticctl_train")

AGES_S = (0.0, 3600.0, 3 * 3600.0, 12 * 3600.0, 20 * 3600.0)
"""Losses are counted separately from each of these ages on."""

PRIOR_S = 4 * 3600.0
"""The assumed mean time between interruptions of a spot group before anything is known."""

QUIET_S = 24 * 3600.0
"""The longest mean time between interruptions that is assumed: Google's preemptible machines end within 24 hours."""

UNSEEN_S = 600.0
"""How long a group may have lived after it was last seen: the longest interval between saves."""

_AGE_EVENTS = 1.0
"""The weight of the overall rate, in losses at one age."""

_MOST_S = 1e11
_NONE = (0.0,) * len(AGES_S)


@dataclass(frozen=True, slots=True)
class RankMachine:
    """A machine that ranks run on: an id that it keeps until it reboots, and when it booted (by rank 0's clock)."""

    id: str
    booted_at: float


@dataclass(frozen=True, slots=True)
class Hazard:
    """The rate of interruptions: `by_age` for each machine (per second), `other` regardless of their ages.

    `ages_s` are the ages of the machines now.
    """

    by_age: Sequence[float]
    other: float
    ages_s: Sequence[float]

    def between_s(self) -> float:
        """Return the mean time between interruptions at the current rate; at most `QUIET_S`."""
        return 1 / self._rate(0.0)

    def best_interval_s(self, cost_s: float) -> float:
        """Return how long to continue before a save that costs `cost_s` seconds pays.

        It pays once the work that is expected to be lost, the integral of rate times work at risk, has grown to its
        cost. At a constant rate, that is after sqrt(2 x cost x mean time between interruptions).
        """
        changes_s = sorted({edge - age_s for edge in AGES_S for age_s in self.ages_s if edge > age_s})
        lost_s = 0.0
        for start_s, end_s in pairwise((0.0, *changes_s, math.inf)):
            rate = self._rate(start_s + min(end_s - start_s, 2.0) / 2)
            lost_by_then_s = lost_s + rate * (end_s**2 - start_s**2) / 2
            if lost_by_then_s >= cost_s:
                return math.sqrt(start_s**2 + 2 * (cost_s - lost_s) / rate)
            lost_s = lost_by_then_s
        raise AssertionError("the last span has no end")

    def _rate(self, after_s: float) -> float:
        rate = self.other + sum(self.by_age[_span(age_s + after_s)] for age_s in self.ages_s)
        return max(rate, 1 / QUIET_S)


@dataclass(frozen=True, slots=True)
class Record:
    """What has been seen so far, and the group that trains now, or did last.

    `machine_s` and `losses` count the machines' time and their losses by age; `group_s` and `others` count the group's
    time and the interruptions in which no machine was lost. A loss of several machines at the same time is one
    interruption, divided among them. `ended_at` is set by a group that lost nothing at its end.
    """

    machine_s: Sequence[float] = _NONE
    losses: Sequence[float] = _NONE
    group_s: float = 0.0
    others: float = 0.0
    machines: Sequence[RankMachine] = field(default_factory=tuple)
    since: float = 0.0
    ended_at: float | None = None

    def followed_by(
        self, machines: Sequence[RankMachine], now: float, *, committed_at: float | None, work_lost: bool
    ) -> Record:
        """Return the record after another group has begun.

        `committed_at` is the last commit before it; `work_lost` says whether the work since then was lost.
        """
        if not self.machines:
            return Record(self.machine_s, self.losses, self.group_s, self.others, tuple(machines), now)
        seen_at = max(self.since, min(committed_at or 0.0, now))
        until = self.ended_at if self.ended_at is not None else min(now, seen_at + UNSEEN_S)
        until = min(max(until, self.since), now)
        losses, others = list(self.losses), self.others
        if work_lost and self.ended_at is None:
            present = {machine.id for machine in machines}
            lost = [machine for machine in self.machines if machine.id not in present]
            for machine in lost:
                losses[_span(until - machine.booted_at)] += 1 / len(lost)
            others += not lost
        machine_s, group_s = self._lived(until)
        return Record(tuple(machine_s), tuple(losses), group_s, others, tuple(machines), now)

    def _lived(self, until: float) -> tuple[list[float], float]:
        """Return `machine_s` and `group_s` including the present group's time until then."""
        machine_s = list(self.machine_s)
        for machine in self.machines:
            for span, spent_s in enumerate(_spent(self.since - machine.booted_at, until - machine.booted_at)):
                machine_s[span] += spent_s
        return machine_s, self.group_s + max(0.0, until - self.since)

    def hazard(self, now: float) -> Hazard:
        """Return the rates to expect of the machines in the group, which has lived until now.

        All machines together are assumed to have had one more interruption, in `PRIOR_S`. From there, each age is
        weighted by what was seen of it.
        """
        machine_s, group_s = self._lived(now)
        usual = (1 + sum(self.losses)) / (PRIOR_S * max(1, len(self.machines)) + sum(machine_s))
        by_age = [
            (_AGE_EVENTS + lost) / (_AGE_EVENTS / usual + spent_s)
            for lost, spent_s in zip(self.losses, machine_s, strict=True)
        ]
        other = self.others / (PRIOR_S + group_s)
        return Hazard(by_age, other, [max(0.0, now - machine.booted_at) for machine in self.machines] or [0.0])


def unknown_hazard() -> Hazard:
    """Return the rates to expect of machines about which nothing is known."""
    return Record().hazard(0.0)


def _span(age_s: float) -> int:
    return max(0, bisect_right(AGES_S, age_s) - 1)


def _spent(from_s: float, to_s: float) -> list[float]:
    """Return how much of the time between two ages belongs to each span."""
    ends_s = (*AGES_S[1:], math.inf)
    starts_s = (-math.inf, *AGES_S[1:])
    return [max(0.0, min(to_s, end) - max(from_s, start)) for start, end in zip(starts_s, ends_s, strict=True)]


def this_machine() -> tuple[str, float | None]:
    """Return an id of this machine, and its age in seconds; None if the system does not provide it."""
    with suppress(OSError, ValueError, IndexError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_bytes().strip()
        age_s = float(Path("/proc/uptime").read_text().split()[0])
        return hashlib.sha256(boot).hexdigest()[:16], max(0.0, age_s)
    return "", None


def machines_of(found: Sequence[tuple[str, float | None]], before: Record, now: float) -> list[RankMachine]:
    """Return the machines of all ranks, each once, from every rank's `this_machine()`.

    A machine of unknown age is as old as this record has known it.
    """
    known = {machine.id: machine for machine in before.machines}
    machines = {}
    for name, age_s in found:
        seen = known.get(name)
        if seen is not None:
            machines[name] = seen  # measured by one clock: uptime jumps after a machine was asleep
        else:
            machines[name] = RankMachine(name, now - (age_s or 0.0))
    return list(machines.values())


class Interruptions:
    """On rank 0: maintains the record of a storage URL in the background. Training never waits for it."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._record = Record()
        self._began_s = time.monotonic()
        self._thread: threading.Thread | None = None

    def begin_group(self, found: Sequence[tuple[str, float | None]], *, work_lost: bool) -> None:
        """Record that a group begins, on the machines that each rank has described by `this_machine()`."""
        self._run(lambda: self._record_begin(found, work_lost))

    def end_group(self, grace_s: float) -> None:
        """Record that the group ends without losing work; wait at most `grace_s` seconds for it to be stored."""
        self._run(lambda: self._write(replace(self._record, ended_at=time.time())))
        self.join(grace_s)

    def hazard(self) -> Hazard:
        """Return the rates to expect of the machines from now on."""
        began_s, record = self._began_s, self._record
        return record.hazard(record.since + time.monotonic() - began_s)

    def join(self, grace_s: float | None = None) -> None:
        """Wait for what is being read or written."""
        if self._thread is not None:
            self._thread.join(grace_s)

    def _run(self, work: Callable[[], None]) -> None:
        before = self._thread

        def run() -> None:
            if before is not None:
                before.join()
            try:
                work()
            except StorageError as e:
                log.info("%s: the record of interruptions is unavailable: %s", self._storage.url, e)

        self._thread = threading.Thread(target=run, name="elasticctl-interruptions", daemon=True)
        self._thread.start()

    def _record_begin(self, found: Sequence[tuple[str, float | None]], work_lost: bool) -> None:
        now = time.time()
        try:
            before = decode(self._storage.get(INTERRUPTIONS))
        except (MissingError, DamagedError):
            before = Record()
        commit = next(read_commits(self._storage), None) if before.machines else None
        machines = machines_of(found, before, now)
        record = before.followed_by(machines, now, committed_at=commit.at if commit else None, work_lost=work_lost)
        self._began_s = time.monotonic()
        self._write(record)

    def _write(self, record: Record) -> None:
        self._record = record
        self._storage.put(INTERRUPTIONS, [encode(record)])


def encode(record: Record) -> bytes:
    """Return a record as JSON."""
    return json.dumps(asdict(record)).encode()


def decode(data: bytes) -> Record:
    """Return the record from JSON; an empty record for anything else."""
    try:
        body = json.loads(data)
        machines = tuple(RankMachine(one["id"], float(one["booted_at"])) for one in body["machines"])
        record = Record(**{**body, "machines": machines})
        if all(isinstance(machine.id, str) for machine in machines) and _are_counts(record):
            return record
    except (ValueError, KeyError, TypeError, RecursionError, OverflowError):
        pass
    return Record()


def _are_counts(record: Record) -> bool:
    rows = record.machine_s, record.losses
    values = [*record.machine_s, *record.losses, record.group_s, record.others, record.since]
    values += [] if record.ended_at is None else [record.ended_at]
    values += [machine.booted_at for machine in record.machines]
    return all(isinstance(row, list) and len(row) == len(AGES_S) for row in rows) and all(
        isinstance(value, int | float) and 0 <= value < _MOST_S for value in values
    )
