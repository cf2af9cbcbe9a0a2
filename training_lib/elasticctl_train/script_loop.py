"""What a run can detect of its script's loop, and what follows for the processes of its ranks.

When a worker is lost, the interrupted step is repeated: the body of the script's loop runs once more than steps count.
When a worker joins, its script begins in the middle. Neither matters to a loop that follows `Run`: it takes batches
until `run.loader` ends, or it reads `run.steps_done` in each step; and its collectives, if it makes any, are the same
in every step.

The rule: a loop whose form is understood keeps its processes. Every other loop restarts them, and one line of the log
says what to change. If the form shows before anything is lost, ranks restart when the group changes next, from the
copies in workers' memory (`ScriptLoop.why_restart`). If it shows by a repeated step, all ranks save and restart
immediately (`StepCount`); the same holds for optimizers that are stepped by a count of the script's own
(`same_training`). docs/recovery.md lists the cases.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.nn.parameter import is_lazy
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel

from elasticctl_train.checkpoint.parts import sample
from elasticctl_train.data.sample_order import Cursor, EpochPlan, Feed

_DEPTH = 3
"""How deep to look into a part: a class of the script's own may hold schedulers, in a list for example."""


@dataclass(frozen=True, slots=True)
class Obstacle:
    """Why ranks restart when the group changes, and what to change in the script so that they do not."""

    why: str
    fix: str


STREAM = Obstacle(
    "a stream cannot be redistributed at its current step", "use a dataset that has a length and can be indexed"
)
_GROUPS = Obstacle("the script creates process groups", "use the default group, which has all ranks")
_EARLY = Obstacle(
    "the script changes parameters before the optimizer's step", "change them between optimizer.step() and run.step()"
)
_FIRST = Obstacle(
    "the script calls collectives before its first step",
    "remove them: Run(…) returns when all ranks are there, and run.model starts with equal parameters",
)
_SOMETIMES = Obstacle(
    "the script calls collectives in some steps only", "call them in every step, or between two epochs"
)
_UNSAVED_FIX = (
    "create it before Run(…), of the bare model or the optimizer, and pass it by a name of your choice: "
    "Run(…, scheduler=scheduler), Run(…, average=average)"
)

LEFT_EARLY = (
    "the script leaves its loop early, and the last batches are not trained on: its own count includes steps that were "
    "repeated because a worker was lost. FIX: use run.steps_done, or put the loop over run.loader into `for epoch in "
    "run.epochs(…)`"
)


class ScriptLoop:
    """The form of a loop, as far as it has shown."""

    def __init__(self, run_parts: Mapping[str, object]) -> None:
        self.count, self.collectives = StepCount(), CollectiveCount()
        self.unsaved = UnsavedState(run_parts)

    def why_restart(self, *, makes_groups: bool, changes_early: bool, collectives: int) -> Obstacle | None:
        """Return why the processes cannot stay; None while the form is understood. Call this in each step.

        `makes_groups`: the script has made process groups, whose connections are not cut, so a rank could wait there
        without end for a peer that has moved on. `changes_early`: it has changed parameters before an optimizer did.
        `collectives`: how many it has made. With some before the first step, a newcomer would wait for the others,
        which are already training. With some in certain steps only, a newcomer that counts batches would make them in
        other steps than the rest.
        """
        if self.unsaved.found is not None:
            return self.unsaved.found
        if makes_groups:
            return _GROUPS
        if changes_early:
            return _EARLY
        if self.collectives.differ:
            return _SOMETIMES
        return _FIRST if self.collectives.has_made_before_first(collectives) else None

    def counts_batches(self, feed: Feed, plan: EpochPlan | None, cursor: Cursor) -> bool:
        """True in a pass of which exactly as many batches are left as were repeated.

        A loop that takes as many batches as `len(loader)` has said ends here, on all ranks.
        """
        return not feed.is_done and plan is not None and 0 < feed.repeated == plan.count(cursor.position)

    def leaves_early(self, feed: Feed, plan: EpochPlan | None, cursor: Cursor) -> bool:
        """True if training ends here by a count of the script's own, which includes repeated steps."""
        return not feed.is_done and (self.count.is_ahead(cursor.step) or self.counts_batches(feed, plan, cursor))

    def would_skip_batches(self, feed: Feed, batches: int) -> bool:
        """Return whether a script that makes its batches itself would not repeat those of a lost step.

        It counts steps itself, so its batches, and probably its learning rates, go by that count. `batches`: how many
        it has taken from `run.loader` in that step.
        """
        return not batches and not feed.begun and self.count.leads


class StepCount:
    """Compares how often the script has called `Run.step` with the number of steps that count.

    `for step in range(run.steps_done, 1000)` counts how often its body runs, so it ends a step early on the ranks that
    have repeated one. A rank that has joined since would wait for them. A script that reads `run.steps_done` after its
    last step, or whose loop `Run` has ended, goes by the steps that count. `in_step`: the calls for the step under way.
    """

    def __init__(self) -> None:
        self._calls = self._begun_at = self.in_step = 0
        self._read_at: int | None = None

    def start_at(self, steps_done: int) -> None:
        """Record where training begins in this process."""
        self._begun_at = steps_done

    def record_call(self) -> int:
        """Record a call of `Run.step`; return how many there were for this step."""
        self._calls += 1
        self.in_step += 1
        return self.in_step

    def record_read(self) -> None:
        """Record that the script has learned from `Run` how far training is."""
        self._read_at = self._calls

    def end_step(self) -> None:
        """Record that the step was made, or is to be repeated."""
        self.in_step = 0

    @property
    def leads(self) -> bool:
        """True in a call of `Run.step` if the script has not read `steps_done` since the one before. One that never
        does would begin at step 0 if it restarted, so its count leads nowhere."""
        return self._read_at is not None and self._read_at < self._calls - 1

    def is_ahead(self, steps_done: int) -> bool:
        """Return whether the script has counted a step twice, and has not read `steps_done` since its last call."""
        goes_by_own = self._read_at is not None and self._read_at < self._calls
        return goes_by_own and self._calls > steps_done + self.in_step - self._begun_at


class CollectiveCount:
    """Compares the numbers of collectives that the script itself makes in its steps.

    `differ` is set once two steps of one pass over the data have had different numbers of them.
    """

    def __init__(self) -> None:
        self.differ = False
        self._before_first: int | None = None
        self._is_checked = False
        self._at_begin = self._at_end = 0
        self._usual: int | None = None

    def enter_group(self) -> None:
        """Start to count from 0 in a new group."""
        self._at_end = 0

    def begin_step(self, count: int, *, is_comparable: bool) -> None:
        """Record the count at the start of a step or the end of a pass.

        `is_comparable`: a complete step precedes it, so their numbers can be compared.
        """
        if self._before_first is None:
            self._before_first = count
        made, self._at_begin = count - self._at_begin, count
        if not is_comparable:
            return
        self.differ |= self._usual is not None and made != self._usual
        self._usual = made

    def end_step(self, count: int) -> None:
        """Record the count at the end of a step."""
        self._at_end = count

    def has_made_any(self, count: int) -> bool:
        """True if the script has made a collective since the end of the last step in this group."""
        return count != self._at_end

    def has_made_before_first(self, count: int) -> bool:
        """True in the first step of a script that has made collectives before it (if none has begun: so far)."""
        was_checked, self._is_checked = self._is_checked, True
        return not was_checked and bool(count if self._before_first is None else self._before_first)


class UnsavedState:
    """Finds state that belongs to `parts` and that none of them holds, in the first two steps of a process: `found`.

    These are learning-rate schedulers, and averages or other copies of the models. No checkpoint has them, and no
    newcomer receives them, so they start from scratch whenever the script starts, and nothing fails.

    Before the first step, the script may not have created them yet. A copy of a model may be there only to be compared
    with, so it counts if the second step changes it. An `AveragedModel` counts immediately: an average may begin late.
    """

    def __init__(self, parts: Mapping[str, object]) -> None:
        self._parts = parts
        self.found: Obstacle | None = None
        self._searches = 0
        self._copies: list[tuple[weakref.ref[torch.nn.Module], list[torch.Tensor]]] = []

    def search(self) -> Obstacle | None:
        """Return what this step shows. Call it in each step.

        The first call searches all objects of this process, which takes some hundredths of a second.
        """
        self._searches += 1
        if self._searches > 2:
            return None
        names = self._search() if self._searches == 1 else self._changed()
        verb = "was" if len(names) == 1 else "were"
        why = f"the {' and the '.join(names)} {verb} not passed to Run"
        shown = Obstacle(why, _UNSAVED_FIX) if names else None
        self.found = self.found or shown
        return shown

    def _search(self) -> list[str]:
        # isinstance() would ask objects that pretend to be others, as proxies do, for their class.
        found = (each for each in gc.get_objects() if issubclass(type(each), LRScheduler | torch.nn.Module))
        existing = [each for each in found if _is_built(each)]
        # What a part holds is saved, however deep in it.
        saved = set[int]()
        _collect(self._parts.values(), saved)
        unsaved = [each for each in existing if id(each) not in saved]
        copies = self._copies_among(unsaved)
        # An average counts now; another copy of a model does once it changes.
        averages, averaged = [], set[int]()
        for average in (each for each in unsaved if isinstance(each, AveragedModel)):
            inner = {id(each) for each in average.modules()}
            if any(id(each) in inner for each in copies):
                averages.append(average)
                averaged |= inner
        self._copies = [(weakref.ref(each), sample(each.parameters())) for each in copies if id(each) not in averaged]
        return sorted({type(each).__name__ for each in [*self._schedulers_among(unsaved), *averages]})

    def _changed(self) -> list[str]:
        copies, self._copies = self._copies, []
        alive = [(copy, before) for found, before in copies if (copy := found()) is not None]
        changed = [copy for copy, before in alive if not all(map(torch.equal, before, sample(copy.parameters())))]
        return sorted({f"copy of {type(copy).__name__}" for copy in changed})

    def _schedulers_among(self, unsaved: Sequence[object]) -> list[LRScheduler]:
        """Return the schedulers whose optimizer is a part, without those that others of them consist of."""
        optimizers = {id(part) for part in self._parts.values()}
        schedulers = [each for each in unsaved if isinstance(each, LRScheduler)]
        found = [each for each in schedulers if id(getattr(each, "optimizer", None)) in optimizers]
        inner = set[int]()
        for each in found:
            _collect(vars(each).values(), inner)
        return [each for each in found if id(each) not in inner]

    def _copies_among(self, unsaved: Sequence[object]) -> list[torch.nn.Module]:
        """Return the modules that are like one of the parts, with parameters of their own."""
        models = [part for part in self._parts.values() if isinstance(part, torch.nn.Module)]
        kinds = {type(model) for model in models}
        shapes = [_shapes(model) for model in models]
        own = {id(one) for model in models for one in model.parameters()}
        found = [each for each in unsaved if isinstance(each, torch.nn.Module) and type(each) in kinds]
        apart = [each for each in found if own.isdisjoint(map(id, each.parameters()))]
        return [each for each in apart if _shapes(each) and _shapes(each) in shapes]


def _is_built(thing: object) -> bool:
    """Return False for a module that an error, or another thread, has left without its parameters."""
    return not isinstance(thing, torch.nn.Module) or "_parameters" in vars(thing)


def _collect(things: Iterable[object], found: set[int], depth: int = _DEPTH) -> None:
    """Add the ids of the schedulers and modules among these objects, in them, and in lists and dicts there."""
    for thing in things:
        if isinstance(thing, torch.nn.Module):
            found |= {id(module) for module in thing.modules()}
        elif isinstance(thing, LRScheduler):
            if id(thing) not in found:
                found.add(id(thing))
                _collect(vars(thing).values(), found)
        elif depth and not isinstance(thing, torch.optim.Optimizer | torch.Tensor | type):
            _collect(_held_by(thing), found, depth - 1)


def _held_by(thing: object) -> Iterable[object]:
    if isinstance(thing, Mapping):
        return thing.values()
    return thing if isinstance(thing, list | tuple) else getattr(thing, "__dict__", {}).values()


def _shapes(module: torch.nn.Module) -> list[torch.Size]:
    """The shapes of the module's parameters; none if some have no data yet, or never."""
    parameters = list(module.parameters())
    return [] if any(is_lazy(one) or one.is_meta for one in parameters) else [one.shape for one in parameters]
