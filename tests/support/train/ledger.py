"""What `unbroken` wrote down: which samples were trained on, in which step, by which processes."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Ledger:
    """The lines of all processes, in order of time."""

    rows: tuple[dict[str, Any], ...]

    @classmethod
    def read(cls, folder: Path) -> Ledger:
        """Read what there is by now."""
        rows = []
        for file in folder.glob("ledger-*"):
            for line in file.read_text().splitlines():
                try:
                    rows.append(json.loads(line))
                except ValueError:  # a process that was killed while it wrote
                    continue
        return cls(tuple(sorted(rows, key=lambda row: row["at"])))

    @property
    def made(self) -> list[dict[str, Any]]:
        """The lines behind steps that were made."""
        return [row for row in self.rows if row["made"]]

    @property
    def furthest(self) -> int:
        """The last step that was made."""
        return max((row["step"] for row in self.made), default=0)

    @property
    def epoch(self) -> int:
        """The last epoch that was begun."""
        return max((row["epoch"] for row in self.rows), default=0)

    @property
    def pids(self) -> set[int]:
        """All processes that have trained."""
        return {row["pid"] for row in self.rows}

    def samples(self) -> dict[int, Counter[int]]:
        """How often each sample counts, by epoch.

        A step counts in the last group that made it: whoever made it in an earlier one has been lost with its state.
        Ranks that drain and do not stay make their last step without a word: others have gone on from there.
        """
        last: dict[int, int] = defaultdict(int)
        known, furthest = {row["step"] for row in self.made}, self.furthest
        for row in self.rows:
            if row["made"] or (row["step"] not in known and row["step"] < furthest):
                last[row["step"]] = max(last[row["step"]], row["group"])
        counted: dict[int, Counter[int]] = defaultdict(Counter)
        for row in self.rows:
            if not row["made"] and "jump" not in row and last.get(row["step"]) == row["group"]:
                counted[row["epoch"]].update(row["names"])
        return counted

    def redone(self) -> int:
        """How many steps a process has made that it had made before."""
        made = Counter((row["pid"], row["step"]) for row in self.made)
        return sum(count - 1 for count in made.values())

    def losses(self) -> dict[tuple[int, int], float]:
        """The loss of each step that was made, by step and the first sample of the rank's part."""
        return {(row["step"], row["names"][0]): row["loss"] for row in self.made if row["names"]}
