"""Copies of shares in the memory of launchers: newer than the last commit, and sufficient to continue after a restart.

Between commits, each rank writes its share, in the format of a checkpoint, to a folder in its launcher's shared memory,
and has the launcher send it to one on another node (`elasticctl_launcher.peers.copy_holder`, which also describes the
protocol of the socket). A set of shares with one folder name is a complete state if it has one of every rank, no matter
on which nodes. Ranks that restart look together for the newest set, and prefer it to an older commit.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import re
import socket
import time
from collections.abc import Iterator, Mapping, Set
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elasticctl_protocol import variables
from elasticctl_protocol.local import COPIES_FOLDER, CopyAnswer, CopyRequest, to_line
from elasticctl_protocol.requests import WIRE
from elasticctl_store.checkpoints import entries
from elasticctl_store.checkpoints.entries import Commit, ObjectRef
from elasticctl_store.checkpoints.reader import is_sealed, load_document
from elasticctl_store.errors import DamagedError
from elasticctl_store.storage.local import LocalStorage
from elasticctl_train.checkpoint.memory.copying import LateCopy
from elasticctl_train.checkpoint.memory.local_tier import LocalObject
from elasticctl_train.checkpoint.rank_shares import Share
from elasticctl_train.dist import World

log = logging.getLogger("elasticctl_train")

SHARE_OF_TIME = 0.005
"""The maximum fraction of time for which training is stopped for copies."""
BACKGROUND_SHARE = 0.05
"""The maximum fraction of time in which they are written and sent, next to training."""
TIMEOUT_S = 2.0
_NO_ANSWER = "the launcher does not answer"


@dataclass(frozen=True, slots=True)
class Candidate:
    """A complete set of shares: a commit as if it had been stored, and the documents of its shares."""

    commit: Commit
    documents: tuple[Any, ...]


class Copies:
    """One rank's copies. `failed` says why no more are made, `lack` why the last one is on this node only.

    `steps_back` is about how many steps training will be past the newest complete copy when the next one is complete; 0
    if unknown. `storage` is the node's folder of copies for one URL: what the ranks of this and of other launchers have
    written.
    """

    def __init__(self, folder: Path, path: str) -> None:
        self.storage, self._folder, self._path = LocalStorage(folder), folder, path
        self.failed = ""
        self.lack = ""
        self.step = 0
        self.steps_back = 0
        self._number = 0
        self._cost_s = self._write_s = self._waited_s = 0.0
        self._sending_since: float | None = None
        self._refused = ""
        self._due_s = self._began_s = time.monotonic()

    @classmethod
    def open(cls, url: str, environ: Mapping[str, str] = os.environ) -> Copies | None:
        """Return the copies for a storage URL; None if no launcher takes any."""
        base, path = environ.get(variables.LOCAL_TIER), environ.get(variables.COPIES_SOCKET)
        if not (base and path):
            return None
        folder = Path(base, COPIES_FOLDER) / hashlib.sha256(url.encode()).hexdigest()[:16]
        with suppress(OSError):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            return cls(folder, path)
        return None

    # Making them

    def is_due(self) -> bool:
        """Return whether it is time for the next copy."""
        return not self.failed and time.monotonic() >= self._due_s

    def is_ready(self) -> bool:
        """Return whether the launcher has sent the last copy."""
        if self._sending_since is None:
            return True
        answer = self._ask(CopyRequest(state=True))
        self.lack = self._refused or (_NO_ANSWER if answer is None else answer.lack or "")
        if answer is not None and answer.sending:
            return False
        self._write_s = max(0.0, time.monotonic() - self._sending_since - self._waited_s)
        self._sending_since = None
        return True

    def begin_copy(self, step: int, cost_s: float) -> None:
        """Record that training was stopped for `cost_s` seconds for the copy of `step`, which is being written now."""
        now_s = time.monotonic()
        made_steps, took_s = step - self.step, now_s - self._began_s
        self.step, self._cost_s = step, cost_s
        self._sending_since = self._began_s = now_s
        self._due_s = now_s + self.interval_s
        until_whole_s = self.interval_s + self._write_s
        self.steps_back = (
            max(made_steps, math.ceil(until_whole_s * made_steps / max(took_s, 1e-6))) if self._number else 0
        )

    @property
    def interval_s(self) -> float:
        """The time between two copies in seconds, from what the last one has cost."""
        return max(self._cost_s / SHARE_OF_TIME, self._write_s / BACKGROUND_SHARE)

    def keep_share(self, share: Share, folder: str, world: World) -> None:
        """Write the share, in the background thread, and have it sent. Errors are recorded in `failed`."""
        try:
            answer = self._ask(CopyRequest(room=2 * share.plan.size_bytes))
            if answer is not None and answer.refused:
                raise OSError(answer.refused)
            key = entries.share_key(folder, world.rank, world.size)
            (file,) = share.write(self.storage, key)
            self._waited_s = sum(copy.waited_s for copy in share.copied if isinstance(copy, LateCopy))
            document = self.storage.get(key)
            files = (
                (self._name(file.key), file.size_bytes, int(file.checksum.removeprefix("crc32:"), 16)),
                (self._name(key), len(document), int(entries.checksum([document]).removeprefix("crc32:"), 16)),
            )
            answer = self._ask(CopyRequest(copied=files))
            self._refused = _NO_ANSWER if answer is None else answer.refused or ""
        except Exception as e:  # noqa: BLE001 - the edge of a thread: training continues without copies
            self.fail(str(e))

    def fail(self, why: str) -> None:
        """Make no more copies; logged once."""
        if not self.failed:
            log.warning("the state is not copied to other workers' memory: %s", why)
        self.stop(why)

    def stop(self, why: str) -> None:
        """Make no more copies, because of what another rank has logged."""
        self.failed = self.failed or why

    def next_folder(self, generation: int, step: int, run_id: str) -> str:
        """Return the name of the next set, which is the same on all ranks."""
        self._number += 1
        return entries.save_folder(generation, self._number, step, run_id)

    def _name(self, key: str) -> str:
        return f"{self._folder.name}/{key}"

    def _ask(self, request: CopyRequest) -> CopyAnswer | None:
        """Return the launcher's answer; None if there is none."""
        with suppress(OSError, ValueError), socket.socket(socket.AF_UNIX) as line:
            line.settimeout(TIMEOUT_S)
            line.connect(self._path)
            line.sendall(to_line(request))
            with line.makefile() as answers:
                return WIRE.decode(CopyAnswer, json.loads(answers.readline()))
        return None

    # Finding them

    def offers(self) -> dict[ObjectRef, LocalObject]:
        """Return the complete tensor files that are here, by their descriptions in the documents."""
        found = {}
        for key, data in self.documents().items():
            with suppress(DamagedError, KeyError, TypeError, OSError):
                ref = ObjectRef(**load_document(key, data.encode())["tensors"])
                path = self._folder / ref.key
                if ref.key == entries.tensors_key(key) and path.stat().st_size == ref.size_bytes:
                    found[ref] = LocalObject(path)
        return found

    def documents(self) -> dict[str, str]:
        """Return the share documents that are here, by key."""
        found = {}
        for path in self._folder.glob(f"{entries.DATA}*/share-*.json"):
            with suppress(OSError, UnicodeDecodeError):
                data = path.read_bytes()
                if is_sealed(data):
                    found[str(path.relative_to(self._folder))] = data.decode()
        return found


def find_sets(world: World, copies: Copies, newer_than: tuple[int, int]) -> Iterator[Candidate]:
    """Yield the complete sets that ranks' nodes hold, newest first. All ranks must iterate together.

    `newer_than` is the (generation, step) of a commit.
    """
    mine = copies.documents()
    # Each document is sent by the first rank whose node has it.
    known = world.gather(list(mine))
    everywhere = {key for keys in known for key in keys}
    for folder, keys in _whole_sets(everywhere, newer_than):
        wanted = [key for key in keys if next(i for i, held in enumerate(known) if key in held) == world.rank]
        found: dict[str, str] = {}
        for part in world.gather({key: mine[key] for key in wanted}):
            found |= part
        with suppress(DamagedError, KeyError, TypeError, ValueError):
            yield _candidate(folder, {key: found[key].encode() for key in keys})


def _whole_sets(everywhere: Set[str], newer_than: tuple[int, int]) -> list[tuple[str, list[str]]]:
    """Return the folders for which there is every rank's share, newest first, with the keys in order of rank."""
    found: list[tuple[tuple[int, int], str, list[str]]] = []
    for first in everywhere:
        folder, _, name = first.rpartition("/")
        save = entries.save_of(f"{folder}/")
        size = re.fullmatch(r"share-00000-of-(\d{5,9})\.json", name, re.ASCII)
        if save is None or size is None or (save.generation, save.step) <= newer_than:
            continue
        keys = [
            entries.share_key(f"{folder}/", rank, int(size[1])) for rank in range(min(int(size[1]), len(everywhere)))
        ]
        if len(keys) == int(size[1]) and everywhere >= set(keys):
            found.append(((save.generation, save.step), f"{folder}/", keys))
    return [(folder, keys) for _, folder, keys in sorted(found, reverse=True)]


def _candidate(folder: str, documents: Mapping[str, bytes]) -> Candidate:
    """Return the set of these documents. Raises DamagedError, KeyError, TypeError or ValueError if they form no
    checkpoint."""
    loaded = tuple(load_document(key, data) for key, data in documents.items())
    refs = tuple(ObjectRef(key, len(data), entries.checksum([data])) for key, data in documents.items())
    save, said = entries.save_of(folder), loaded[0]["label"]
    if save is None:
        raise ValueError(folder)
    commit = Commit(
        position=0,
        generation=save.generation,
        number=0,
        step=save.step,
        epoch=int(said["epoch"]),
        shares=refs,
        size_bytes=sum(int(document["tensors"]["size_bytes"]) for document in loaded),
        at=float(said["at"]),
        metrics=dict(said["metrics"]),
    )
    return Candidate(commit, loaded)
