"""What the state of a run consists of: its objects, the position in the data, and what else has to be restored."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch

from elasticctl_protocol import variables
from elasticctl_store.errors import RestoreError
from elasticctl_train import rng
from elasticctl_train.checkpoint import compatibility, dtensor, parts
from elasticctl_train.checkpoint.parts import Stateful
from elasticctl_train.data import loaders
from elasticctl_train.data.sample_order import Cursor
from elasticctl_train.data_parallel import Buckets, ResumableDataParallel
from elasticctl_train.meetings import Snapshot

log = logging.getLogger("elasticctl_train")


class RunState:
    """The objects that a script has passed to its run.

    `given` is the model as it was passed, `parts` are the objects that are the same on all ranks, by name, and
    `loaders` those that have a position of their own on each rank. `seed` is the script's, `buckets` are the gradient
    buckets of the checkpoint that was loaded, if it has any.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        others: Mapping[str, Stateful],
        *,
        choice: str | None,
        **named: Stateful | None,
    ) -> None:
        """Find out what is to be saved, and how. Raises StateError if a checkpoint cannot hold it.

        `choice` says what to do with a checkpoint that does not fit; see `Run`.
        """
        self._choice = compatibility.parse_choice(choice or os.environ.get(variables.RESUME) or "strict")
        self.given = model
        self.loaders = loaders.among(others)
        shared = {name: part for name, part in others.items() if name not in self.loaders}
        self.parts = parts.unwrap(model=model, **named, **shared)
        parts.check(self.parts)
        unwrapped: Any = self.parts[parts.MODEL]
        self._describe = parts.Describer(self.parts)
        self._parameters = frozenset(f"{parts.MODEL}/{name}" for name, _ in unwrapped.named_parameters())
        self._frozen = parts.Frozen(unwrapped)
        self.seed = torch.initial_seed()
        self.buckets: Buckets | None = None

    def place_model(self, device: torch.device) -> torch.device:
        """Move a plain model to `device`; return the device that the model is on."""
        if parts.is_parallel(self.given):
            return next(self.given.parameters()).device
        if not dtensor.has_sharded(self.given):
            self.given.to(device)
        return device

    def check(self, state: dict[str, Any], where: str) -> dict[str, Any]:
        """Check that a checkpoint is one of a run with these parts, before anything is changed. Raises RestoreError."""
        own = state.get(parts.OWN)
        if not isinstance(own, dict) or not {"cursor", "seed"} <= own.keys():
            raise RestoreError(
                f"{where}: it does not say how far training was, because something other than Run saved it. FIX: give "
                "Run another URL, and load what you need of this one with Checkpointer or dcp.load"
            )
        return compatibility.check(self.parts, state, where, self._choice)

    def load(self, state: Mapping[str, Any], where: str, *, is_main: bool) -> tuple[Cursor, Any]:
        """Load a whole state; return how far it is, and the state of the stream there, if the data is one."""
        different = compatibility.load(self.parts, state, where, self._choice)
        if different and is_main:
            log.warning("%s: taken over (resume=%s) although it does not fit %s", where, self._choice, different)
        own = state[parts.OWN]
        self.seed = own["seed"]
        self._frozen.put_back(own.get("frozen", {}))
        self.buckets = own.get("buckets")
        return Cursor(**own["cursor"]), own.get("stream")

    def capture(self, cursor: Cursor, mark: Any, wrapped: torch.nn.Module | None) -> Snapshot:
        """Return the state now: `mark` is that of a stream after the last step, `wrapped` the model that is called."""
        if isinstance(wrapped, ResumableDataParallel):
            self.buckets = wrapped.buckets()
        state = {name: part.state_dict() for name, part in self.parts.items()}
        state[parts.OWN] = {
            "cursor": asdict(cursor),
            "seed": self.seed,
            "stream": mark,
            "parts": self._describe(),
            "frozen": self._frozen.changed(),
            "buckets": self.buckets,
        }
        local = {"rng": rng.capture(), "loaders": {name: part.state_dict() for name, part in self.loaders.items()}}
        return Snapshot(state, local, parts.rank_0_only(self.parts), self._parameters, parts.until_step(self.parts))
