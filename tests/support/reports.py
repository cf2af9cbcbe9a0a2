"""What operations report, in a list."""

from __future__ import annotations

from elasticctl.operations.observer import Observer


class Reports(Observer):
    """Keeps the lines."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def report(self, line: str) -> None:
        self.lines.append(line)
