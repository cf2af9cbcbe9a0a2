"""The proof that no training was lost, from the record of the training script and the storage's journal.

The journal orders everything: a generation that takes over fences all before it and starts at the newest commit that is
before it in the journal, or at a copy in workers' memory that is newer. So the *committed line* of history consists,
for each generation that committed, of its steps from its start to its last commit. What was trained beyond that,
and is in no such copy, was undone, and repeated by a later generation.
"""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from elasticctl_store.checkpoints.entries import Commit, Entry, Generation

MAX_FAULTS = 5
CLOSE = 1e-7
"""The relative difference of weights that another order of summation may cause, in double precision."""


@dataclass(frozen=True, slots=True)
class Resume:
    """A rank of a generation of the journal started at `step`; `at` is in seconds since the epoch."""

    at: float
    pid: int
    worker: str
    rank: int
    world: int
    generation: int
    step: int


@dataclass(frozen=True, slots=True)
class Step:
    """One optimizer step on one rank, and the samples of its part of the global batch.

    `generation` is the group's: ranks that stay in their processes move from one to the next.
    """

    at: float
    rank: int
    world: int
    generation: int
    step: int
    epoch: int
    samples: tuple[int, ...]


@dataclass(slots=True)
class Record:
    """Everything that the training script has recorded, in order; `weights` once for each time that it came to its end.

    `batches` are the parts of steps that ranks were about to contribute: a rank may be killed after its gradients have
    reached the others, which make the step, and before it has recorded the step itself.
    """

    resumes: list[Resume] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    weights: list[list[float]] = field(default_factory=list)
    batches: list[Step] = field(default_factory=list)

    def add(self, lines: str) -> None:
        """Add complete lines."""
        for line in lines.splitlines():
            said = json.loads(line)
            kind = said.pop("kind")
            if kind == "weights":
                self.weights.append(said["values"])
            elif kind == "resumed":
                self.resumes.append(_of(Resume, said))
            else:
                found = self.batches if kind == "batch" else self.steps
                found.append(_of(Step, {**said, "samples": tuple(said["samples"])}))


@dataclass(frozen=True, slots=True)
class Stretch:
    """The part of the committed line that one generation trained: the steps after `begin` up to `end`."""

    generation: int
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Task:
    """What was to be trained."""

    samples: int
    global_batch: int
    epochs: int

    @property
    def steps(self) -> int:
        """The total number of optimizer steps."""
        return self.epochs * math.ceil(self.samples / self.global_batch)


def committed_line(entries: Iterable[Entry]) -> list[Stretch]:
    """Return the stretches, in order, from the journal's entries."""
    begin, ends = 0, dict[int, tuple[int, int]]()
    for entry in sorted(entries, key=lambda e: e.position):
        if isinstance(entry, Commit):
            first = ends.get(entry.generation, (begin, 0))[0]
            ends[entry.generation] = (first, entry.step)
            begin = entry.step
    return [Stretch(generation, *bounds) for generation, bounds in ends.items()]


def lost_commits(entries: Iterable[Entry], record: Record, acknowledged: Iterable[tuple[float, int]]) -> list[str]:
    """Return faults if a generation started before the newest commit that it could use, or at a step that never
    existed.

    After that commit it may start at a step that had been trained, and of which there was a copy in memory.
    `acknowledged` are (time, step) pairs: the newest commit at that time; a later generation must not start before it.
    """
    newest, begins = 0, dict[int, int]()
    for entry in sorted(entries, key=lambda e: e.position):
        if isinstance(entry, Generation):
            begins[entry.generation] = newest
        elif isinstance(entry, Commit):
            newest = entry.step
    faults = []
    for resume in record.resumes:
        expected = begins.get(resume.generation)
        trained = max((step.step for step in record.steps if step.at < resume.at), default=0)
        if expected is None or not expected <= resume.step <= max(expected, trained):
            faults.append(
                f"rank {resume.rank} of generation {resume.generation} began at {resume.step}, not {expected}"
            )
    for at, step in acknowledged:
        late = [r for r in record.resumes if r.at > at and r.step < step]
        faults += [f"step {step} was committed, but generation {r.generation} began at {r.step}" for r in late[:1]]
    return faults[:MAX_FAULTS]


def counted_steps(record: Record) -> dict[int, list[Step]]:
    """Return what the ranks of the last group that made each step recorded: steps of earlier groups were undone or
    lost.

    For a rank that was killed before it could record the step, that is the batch that it contributed.
    """
    last: dict[int, int] = {}
    for step in record.steps:
        last[step.step] = max(step.generation, last.get(step.step, 0))
    parts: dict[int, list[Step]] = defaultdict(list)
    for step in record.steps:
        if step.generation == last[step.step]:
            parts[step.step].append(step)
    for batch in record.batches:
        known = parts.get(batch.step, [])
        if known and batch.generation == last[batch.step] and all(batch.rank != step.rank for step in known):
            known.append(batch)
    return parts


def misused_samples(entries: Iterable[Entry], record: Record, task: Task) -> list[str]:
    """Return faults unless the committed line is the whole task with each sample of each epoch in it exactly once."""
    line = committed_line(entries)
    reached = line[-1].end if line else 0
    faults = [f"the last commit is of step {reached}, the end is {task.steps}"] if reached != task.steps else []
    used: dict[int, Counter[int]] = defaultdict(Counter)
    counted = counted_steps(record)
    for number in range(1, reached + 1):
        ranks = counted.get(number, [])
        if sorted(part.rank for part in ranks) != list(range(ranks[0].world if ranks else 1)):
            generation = ranks[0].generation if ranks else 0
            faults.append(f"step {number} of generation {generation} was not recorded once by every rank")
        for part in ranks:
            used[part.epoch].update(part.samples)
    once = Counter(range(task.samples))
    for epoch in range(task.epochs):
        if used[epoch] != once:
            missed, again = (sorted(found.elements()) for found in (once - used[epoch], used[epoch] - once))
            faults.append(f"epoch {epoch}: samples {missed[:5]} missed, {again[:5]} used again")
    return faults[:MAX_FAULTS]


def differing_weights(record: Record, undisturbed: Record) -> tuple[list[str], str]:
    """Return faults unless the final weights are those of the undisturbed run, and how the two were compared.

    They must be equal if all steps that count were trained by groups of the undisturbed one's size, otherwise close.
    """
    if not (record.weights and undisturbed.weights):
        return ["a run left no final weights"], ""
    sizes = {step.world for steps in counted_steps(record).values() for step in steps}
    same = sizes == {step.world for step in undisturbed.steps}
    mine, theirs = record.weights[-1], undisturbed.weights[-1]
    scale = max(map(abs, theirs))
    apart = max((abs(a - b) for a, b in zip(mine, theirs, strict=True)), default=0.0) / scale
    how = f"equal, world size {min(sizes)}" if same else f"{apart:.1e} apart, world sizes {sorted(sizes)}"
    if apart > (0.0 if same else CLOSE) or not all(map(math.isfinite, mine)):
        return [f"{apart:.1e} apart (relative to the largest), world sizes {sorted(sizes)}"], how
    return [], how


def _of(kind: Any, said: dict[str, Any]) -> Any:
    return kind(**{name: said[name] for name in kind.__slots__})
