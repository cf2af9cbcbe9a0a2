"""What ranks report to their launcher, and launchers to the rendezvous service: a JSON object of a `kind` each.

A rank sends its reports as datagrams and never waits for an answer. The launcher reads some of them itself, and
forwards the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, ClassVar

from elasticctl_protocol.requests import WIRE


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The rank that reports, and where its training is: the generation, and the steps done."""

    kind: ClassVar[str] = ""
    rank: int | None = None
    generation: int | None = None
    step: int | None = None


# From ranks, for the service.


@dataclass(frozen=True, slots=True)
class StepSums:
    """Seconds since a rank's first step in this generation: in all, and for each part. None: unknown."""

    wall: float | None = None
    data: float | None = None
    all_reduce: float | None = None
    save: float | None = None


@dataclass(frozen=True, slots=True)
class NotFiniteValue:
    """A metric that JSON cannot represent: "NaN", "inf" or "-inf", and since which step."""

    value: str = ""
    since_step: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgressReport(Report):
    """A step is done. A metric is a number or a `NotFiniteValue`. `times` is for the launcher alone."""

    kind: ClassVar = "progress"
    total_steps: int | None = None
    epoch: int | None = None
    total_epochs: int | None = None
    samples_per_s: float | None = None
    metrics: Mapping[str, Any] | None = None
    times: StepSums | None = None


class StateSource(StrEnum):
    """Where the state came from that a generation continues with."""

    MEMORY = "memory"
    """The memory of ranks whose processes stayed."""
    COPIES = "copies"
    """Copies in the memory of launchers."""
    STORAGE = "storage"


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumedReport(Report):
    """A rank has restored the state of `step` (0: there was none).

    `source_because` is why no faster source could be used. `stays`: the rank stays in its process when the group
    changes; if not, `restarts_because` is why.
    """

    kind: ClassVar = "resumed"
    source: StateSource | None = None
    source_because: str | None = None
    stays: bool | None = None
    restarts_because: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CopiedReport(Report):
    """Ranks copy their state to launchers' memory about every `every_steps` steps (0: unknown, or no longer).

    `lack` is why the copies would not survive the loss of a worker, or are not made.
    """

    kind: ClassVar = "copied"
    every_steps: int | None = None
    lack: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class InputsReport(Report):
    """What the model is called with, as the text of a JSON list, for newcomers."""

    kind: ClassVar = "inputs"
    examples: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommittedReport(Report):
    """A checkpoint has been committed, the `committed`-th of this generation."""

    kind: ClassVar = "committed"
    committed: int | None = None
    size_bytes: int | None = None
    duration_s: float | None = None
    url: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingReport(Report):
    """Training is stopped until `reason` is over; an empty reason: it continues."""

    kind: ClassVar = "waiting"
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnsavedReport(Report):
    """Training continues, but saves wait for `reason`; an empty reason: no longer."""

    kind: ClassVar = "unsaved"
    reason: str = ""


# From ranks, for the launcher.


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricRows(Report):
    """Values of metrics to store: lines of JSON."""

    kind: ClassVar = "metrics"
    rows: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainedReport(Report):
    """The rank has committed the step that the ranks agreed on."""

    kind: ClassVar = "drained"


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedReport(Report):
    """The rank has made its last step."""

    kind: ClassVar = "finished"


# From launchers.


@dataclass(frozen=True, slots=True)
class RankPlace:
    """The call `where` that `rank` has been in for `for_s` seconds; `waits`: it waits there for other ranks, as far as
    its launcher can tell. An empty `where`: the rank moves again."""

    rank: int | None = None
    where: str = ""
    for_s: float | None = None
    waits: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class HangReport(Report):
    """Where ranks stand still, or that they move again."""

    kind: ClassVar = "hang"
    ranks: tuple[RankPlace, ...] = ()


@dataclass(frozen=True, slots=True)
class GpuUsage:
    """The GPUs of a worker, as columns; None: the GPU does not report it.

    `percent` is the share of time that it worked, `idle_s` the seconds since it last did more than next to nothing.
    """

    percent: tuple[float | None, ...] = ()
    memory_bytes: tuple[float | None, ...] = ()
    memory_total_bytes: tuple[float | None, ...] = ()
    power_w: tuple[float | None, ...] = ()
    temperature_c: tuple[float | None, ...] = ()
    idle_s: tuple[float | None, ...] = ()

    @property
    def count(self) -> int:
        """The number of GPUs."""
        return len(self.idle_s)


@dataclass(frozen=True, slots=True)
class StepShares:
    """The shares of time, from 0 to 1, spent on each part; a part that is None is unknown and included in `compute`.

    `data`: fetching batches. `all_reduce`: waiting for gradients of other ranks after the backward pass. `save`:
    pausing for a checkpoint. `compute`: everything else.
    """

    data: float | None = None
    compute: float | None = None
    all_reduce: float | None = None
    save: float | None = None

    @property
    def shares(self) -> tuple[float | None, ...]:
        """All four shares, in order."""
        return self.data, self.compute, self.all_reduce, self.save

    @property
    def is_known(self) -> bool:
        """True if any share is known."""
        return self.compute is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageReport(Report):
    """What the worker `uid` uses of its machine. `no_gpus` is why no GPUs are measured."""

    kind: ClassVar = "usage"
    uid: str = ""
    cpus_used: float | None = None
    cpus: float | None = None
    memory_bytes: int | None = None
    memory_total_bytes: int | None = None
    received_bytes_per_s: float | None = None
    sent_bytes_per_s: float | None = None
    gpus: GpuUsage | None = None
    no_gpus: str | None = None
    step_times: StepShares = field(default=StepShares())


_KINDS: Mapping[str, type[Report]] = {
    cls.kind: cls
    for cls in (
        ProgressReport,
        ResumedReport,
        CopiedReport,
        InputsReport,
        CommittedReport,
        WaitingReport,
        UnsavedReport,
        MetricRows,
        DrainedReport,
        FinishedReport,
        HangReport,
        UsageReport,
    )
}


def encode_report(report: Report) -> dict[str, Any]:
    """Return a report as JSON data."""
    return {"kind": report.kind, **WIRE.encode(report)}


def decode_report(data: object) -> Report | None:
    """Read a report; None for anything else."""
    kind = data.get("kind") if isinstance(data, Mapping) else None
    cls = _KINDS.get(kind) if isinstance(kind, str) else None
    return None if cls is None else WIRE.decode(cls, data)


def ranks_text(ranks: Sequence[int]) -> str:
    """`rank 3`, `ranks 0-2, 4-7`; `ranks` ascend."""
    runs: list[tuple[int, int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], rank)
        else:
            runs.append((rank, rank))
    text = ", ".join(f"{first}" if first == last else f"{first}-{last}" for first, last in runs)
    return f"rank {text}" if len(ranks) == 1 else f"ranks {text}"


MOST_PLACES = 5
"""Further ranks are only counted: a status holds the sentence."""


def describe_hang(places: Mapping[int, RankPlace]) -> str:
    """`rank 3 stands in DataLoader._next_data; ranks 0-2, 4-7 wait for it in all_reduce`; empty for no ranks."""
    standing = _by_where(places, waits=False)
    waiting = _by_where(places, waits=True)
    if not standing:
        parts = [f"{ranks_text(ranks)} {_verb(ranks, 'wait')} in {where}" for where, ranks in waiting]
    else:
        one = sum(len(ranks) for _, ranks in standing) == 1
        parts = [f"{ranks_text(ranks)} {_verb(ranks, 'stand')} in {where}" for where, ranks in standing]
        parts += [
            f"{ranks_text(ranks)} {_verb(ranks, 'wait')} for {'it' if one else 'them'} in {where}"
            for where, ranks in waiting
        ]
    left = sum(len(ranks) for _, ranks in [*standing, *waiting][MOST_PLACES:])
    more = [f"{left} more elsewhere"] if left else []
    return "; ".join([*parts[:MOST_PLACES], *more])


def _by_where(places: Mapping[int, RankPlace], *, waits: bool) -> list[tuple[str, list[int]]]:
    """The ranks that wait, or those that do not, grouped by place, in the order of each group's first rank."""
    found: dict[str, list[int]] = {}
    for rank, place in sorted(places.items()):
        if place.waits is waits:
            found.setdefault(place.where, []).append(rank)
    return list(found.items())


def _verb(ranks: Sequence[int], verb: str) -> str:
    return f"{verb}s" if len(ranks) == 1 else verb
