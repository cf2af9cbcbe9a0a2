"""Tells whether a script goes by a count of its own, in which repeated steps count twice.

`for step in range(run.steps_done, 1000)` counts how often its body runs. After the loss of a worker, the body runs
once more for the step that was lost, so such a loop ends a step early, on the ranks that were there. A rank that has
joined since counts on from `run.steps_done`, and would wait for them. A script that asks for `run.steps_done` behind
its last step, or whose loop `Run` has ended, goes by the steps that count.
"""

from __future__ import annotations


class OwnCount:
    """Compares how often the script has called `Run.step` with the number of steps that count."""

    def __init__(self) -> None:
        self._calls = self._begun_at = 0
        self._asked_at: int | None = None

    def begin(self, steps_done: int) -> None:
        """Record where training begins in this process."""
        self._begun_at = steps_done

    def call(self) -> None:
        """Record a call of `Run.step`."""
        self._calls += 1

    def ask(self) -> None:
        """Record that the script has learned from `Run` how far training is."""
        self._asked_at = self._calls

    @property
    def leads(self) -> bool:
        """True in a call of `Run.step` if the script has not asked since the one before. One that never asks would
        begin at step 0 if it started again, so its count leads nowhere."""
        return self._asked_at is not None and self._asked_at < self._calls - 1

    def is_ahead(self, steps_done: int) -> bool:
        """Return whether the script has counted a step twice, and has not asked since its last call of `Run.step`."""
        goes_by_own = self._asked_at is not None and self._asked_at < self._calls
        return goes_by_own and self._calls > steps_done - self._begun_at
