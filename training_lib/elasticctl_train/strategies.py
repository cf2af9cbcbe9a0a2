"""What becomes of a rank's process when the group of ranks changes.

`Run` is written against `Strategy`. A further way to recover needs a module with a class that has these methods, and a
line in `choose_strategy`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch

from elasticctl_store.errors import TrainError
from elasticctl_train import dist
from elasticctl_train.checkpoint import dtensor, parts
from elasticctl_train.data.sample_order import Cursor, Feed, Step
from elasticctl_train.data_parallel import Buckets, ResumableDataParallel
from elasticctl_train.inplace import keep_ranks
from elasticctl_train.inplace.elastic_ddp import ElasticDataParallel
from elasticctl_train.inplace.keep_ranks import KeepRanks
from elasticctl_train.run_state import RunState
from elasticctl_train.script_loop import Obstacle, ScriptLoop

State = Mapping[str, Any]


class Strategy(Protocol):
    """How a rank gets from one group of ranks into the next, and what it brings along.

    `world` is this rank's place in the newest group. `has_state`: its ranks had the state in memory when it began, so
    no checkpoint is read. `stays`: the process is kept when the group
    changes; otherwise `why_restarts` says why not. `must_restart`: the ranks have agreed to save and restart.

    All ranks of a group make these calls in the same order, most of them from `Run`:

        enter(model)            once: join the first group; returns the state of ranks that already train, if any
        wrap(model, buckets)    once: the model for the script to call

        begin_step(is_first)    the first batch of a step is about to be fetched: the state is now that of the last step
        why_restart()           in each step: why the script's loop does not allow this strategy, if so
        is_lost                 at the end of a step: the optimizers have not made it, because a peer is lost
        complete(work)          if it was made, or training ends: do `work`, which communicates; False if that failed
                                because of a lost peer, or because the group is to change
        enter_next(lost, ...)   after either: back to the end of the last step, and into the next group; returns the
                                state of a rank that is further, if there is one. `lost` is the step to be repeated
        share_buffers()         in `work`: what ranks have of their own and checkpoints have of one becomes the same
        new_examples()          in `work`: what newcomers need to prepare, if that has to be reported
        reduce_waits_s()        at any time, for reports: how long this rank has waited for gradients

        hold_state()            where a script may leave its loop too early: a copy for `return_to_held`
        return_to_held()        it has: undo what it has done since
        restart_all()           have all ranks save and restart. Raises GroupOver; returns if that is not possible

        replace(why)            have the launcher restart this process. Does not return
        leave()                 training ends, or continues with another strategy

    A strategy that repeats steps has to undo what the script's loop has done in them. If it loses a state, the
    ranks find the newest copy in workers' memory or the newest checkpoint when they start (`Session`). For a trainer
    that owns the loop, its hook makes these calls around the trainer's own step instead of `Run`.
    """

    stays: bool
    why_restarts: str
    must_restart: bool

    @property
    def world(self) -> dist.World: ...
    @property
    def has_state(self) -> bool: ...
    @property
    def is_lost(self) -> bool: ...

    def enter(self, model: torch.nn.Module) -> State | None: ...
    def wrap(self, model: torch.nn.Module, buckets: Buckets | None) -> torch.nn.Module: ...
    def begin_step(self, is_first: bool) -> None: ...
    def why_restart(self) -> Obstacle | None: ...
    def complete(self, work: Callable[[], None]) -> bool: ...
    def enter_next(self, lost: Step | None, cursor: Cursor, state: Callable[[], State]) -> State | None: ...
    def share_buffers(self) -> None: ...
    def hold_state(self) -> None: ...
    def return_to_held(self) -> None: ...
    def restart_all(self, *, has_state: bool = True) -> None: ...
    def replace(self, why: str) -> None: ...
    def leave(self) -> None: ...
    def new_examples(self) -> str | None: ...
    def reduce_waits_s(self) -> float | None: ...


class RestartRanks:
    """The strategy for everything that no other one can do: the launcher restarts the ranks when the group changes.

    Nothing is repeated in the process, so most of its methods do nothing.
    """

    stays = has_state = is_lost = must_restart = False

    def __init__(self, world: dist.World, why_restarts: str, model: torch.nn.Module | None = None) -> None:
        """`model` is the model that the script calls, if another strategy has wrapped it already."""
        self.world, self.why_restarts = world, why_restarts
        self._model = model

    def enter(self, model: torch.nn.Module) -> State | None:
        """Return None: the state comes from a checkpoint, if there is one."""

    def wrap(self, model: torch.nn.Module, buckets: Buckets | None) -> torch.nn.Module:
        """Return the model in DistributedDataParallel, if there are several ranks and it is neither wrapped nor
        sharded."""
        if self._model is None:
            is_ready = self.world.size == 1 or parts.is_parallel(model) or dtensor.has_sharded(model)
            self._model = model if is_ready else ResumableDataParallel(model, buckets=buckets)
        return self._model

    def begin_step(self, is_first: bool) -> None:
        """Do nothing: no step is repeated."""

    def why_restart(self) -> Obstacle | None:
        """Return None: it restarts already."""

    def complete(self, work: Callable[[], None]) -> bool:
        """Do the work."""
        work()
        return True

    def enter_next(self, lost: Step | None, cursor: Cursor, state: Callable[[], State]) -> State | None:
        """Raise RuntimeError: the launcher ends this process instead."""
        raise RuntimeError("this process does not stay when its group changes")

    def share_buffers(self) -> None:
        """Do nothing: DistributedDataParallel does it when the next step begins."""

    def hold_state(self) -> None:
        """Do nothing: no step is repeated."""

    def return_to_held(self) -> None:
        """Raise TrainError: another strategy, which has the copy, has repeated steps of this epoch."""
        raise TrainError(
            "the script has left its loop early, because its own count includes steps that were repeated, and what it "
            "has done since cannot be undone: the run has to resume from its newest checkpoint"
        )

    def restart_all(self, *, has_state: bool = True) -> None:
        """Do nothing: the launcher cannot be asked for it."""

    def replace(self, why: str) -> None:
        """Do nothing: the launcher does it when the group changes."""

    def leave(self) -> None:
        """Do nothing."""

    def new_examples(self) -> str | None:
        """Return None: newcomers do not prepare next to these ranks."""

    def reduce_waits_s(self) -> float | None:
        """Return how long this rank has waited for gradients of others; None if unknown."""
        if self.world.size == 1:
            return 0.0
        return self._model.reduce_waits_s() if isinstance(self._model, ElasticDataParallel) else None


def choose_strategy(
    state: RunState, feed: Feed, loop: ScriptLoop, *, on_skip: Callable[[], None], saves: bool
) -> Strategy:
    """Return the first strategy that the objects of a run allow.

    `on_skip()` is called for each optimizer step that a strategy skips. `saves`: the run has a storage.
    """
    why_not_kept = keep_ranks.why_not(state.parts, state.given, [*state.loaders])
    kept = None if why_not_kept else KeepRanks.open(state.parts, feed, loop, on_skip=on_skip, saves=saves)
    return kept or RestartRanks(dist.join(), why_not_kept)


def restart_instead(strategy: Strategy, why: str, model: torch.nn.Module | None) -> RestartRanks:
    """Return the strategy of a run whose ranks restart from now on; `model` is what `strategy` has wrapped."""
    strategy.leave()
    return RestartRanks(strategy.world, why, model)
