"""Where operations report progress and warnings."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext


class Observer:
    """Receives what operations report. This one ignores it; `elasticctl.terminal` prints it."""

    def report(self, line: str) -> None:
        """Receive a remark or a warning in one line."""

    def transfer(self, doing: str, total_bytes: int) -> AbstractContextManager[Callable[[int], None]]:
        """Receive the progress of a transfer: the function is called with each number of additional bytes."""
        return nullcontext(lambda count: None)


SILENT = Observer()
