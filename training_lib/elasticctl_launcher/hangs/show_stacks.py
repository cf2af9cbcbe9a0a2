"""Shows the stacks of a worker's ranks: `elasticctl-launch --stacks`, which `elasticctl stacks` runs in the worker.

The launcher writes the list of its ranks to its private folder. Whoever can read that folder can see the stacks.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from elasticctl_launcher.hangs.stacks import StackReader, ThreadStack
from elasticctl_launcher.workspace import PREFIX, UnpackedWorkspace, folders_for_sockets, path_in_source

RANKS = "ranks.json"
POD_VARIABLE = "ELASTICCTL_POD_UID"


def note_ranks(folder: Path, pids: Mapping[int, int], workspace: UnpackedWorkspace | None = None) -> None:
    """Write the ranks of this worker (rank -> pid), and what they run, to `folder`; skip it if the disk is full."""
    note: dict[str, Any] = {"pod": os.environ.get(POD_VARIABLE, "")}
    note["ranks"] = [{"rank": rank, "pid": pids[rank]} for rank in pids]
    if workspace is not None:
        note |= {"copy": str(workspace.folder), "source": str(workspace.source or "")}
    new = folder / f"{RANKS}.new"
    with suppress(OSError):
        new.write_text(json.dumps(note), "utf-8")
        new.replace(folder / RANKS)


def look_at_ranks(pod: str, parents: tuple[str, ...] | None = None) -> dict[str, Any]:
    """Return the Python stacks of the ranks of the worker whose pod has the uid `pod`, for JSON.

    `ranks` has one entry per rank, with `rank`, `pid` and `stacks`: one stack per thread of its processes, innermost
    frame first; files of the workspace are named as they were submitted. `trouble` says what could not be read; it is
    empty otherwise. `parents` are the folders to search for launchers' private folders.
    """
    reader = StackReader()
    notes = _notes(parents or folders_for_sockets())
    found: dict[str, Any] = next((note for note in notes if note.get("pod") == pod), {"ranks": []})
    ranks = [
        {**rank, "stacks": [_as_submitted(stack, found) for stack in reader.read_all(rank["pid"])]}
        for rank in found["ranks"]
    ]
    return {"ranks": ranks, "trouble": reader.trouble or ("" if ranks else "its ranks have not been started")}


def _as_submitted(stack: ThreadStack, note: Mapping[str, Any]) -> dict[str, Any]:
    copy, source = str(note.get("copy", "")), str(note.get("source", ""))
    frames = [{**dataclasses.asdict(frame), "file": path_in_source(frame.file, copy, source)} for frame in stack.frames]
    return {**dataclasses.asdict(stack), "frames": frames}


def _notes(parents: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    """The lists of ranks that launchers of this user have written; folders of other users are not trusted."""
    for folder in (folder for parent in dict.fromkeys(parents) for folder in Path(parent).glob(f"{PREFIX}*")):
        with suppress(OSError, ValueError):
            if folder.lstat().st_uid == os.getuid() and not folder.is_symlink():
                note = json.loads((folder / RANKS).read_text("utf-8"))
                if isinstance(note, dict):
                    yield note
