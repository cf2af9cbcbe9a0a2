"""Screens as text files in tests/cli/snapshots, so that a change of one is seen, and read, in its diff.

`UPDATE_SNAPSHOTS=1 pytest tests/cli/test_listing.py` writes them anew: look at the diff before it is committed.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "cli/snapshots"


def check(name: str, lines: Sequence[str]) -> None:
    """Fail where the lines are not those of the file `name`.txt."""
    path, text = FOLDER / f"{name}.txt", "".join(f"{line}\n" for line in lines)
    if os.environ.get("UPDATE_SNAPSHOTS"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, "utf-8")
    assert text == path.read_text("utf-8"), f"{path.name} differs"
