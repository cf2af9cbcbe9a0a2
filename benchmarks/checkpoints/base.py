"""The interface of a contender, and what several of them share."""

from __future__ import annotations

import functools
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

from benchmarks.checkpoints.training_state import Trainee

REGION = "us-east-1"
BUCKET = "benchmark"


@dataclass(frozen=True, slots=True)
class Place:
    """Where the checkpoints of a trial are stored."""

    endpoint: str
    prefix: str

    def key(self, number: int, name: str = "") -> str:
        """Return the key (or prefix of keys) of one save."""
        return f"{self.prefix}/save-{number}/{name}"

    def url(self, number: int) -> str:
        return f"s3://{BUCKET}/{self.prefix}/save-{number}"


class Contender(Protocol):
    """One rank's contender; all ranks call the same methods in the same order. Creating one sends nothing."""

    @property
    def cleans_up(self) -> bool:
        """Whether it deletes its old saves."""

    def prepare(self, trainee: Trainee) -> None:
        """Do what is done once, before training begins."""

    def save(self, trainee: Trainee, number: int) -> None:
        """Begin a save; training continues when this returns."""

    def committed_at_s(self) -> float | None:
        """When the last save was complete in the storage, on `time.perf_counter`; None: not yet. Rank 0's value
        counts."""

    def wait(self) -> None:
        """Return when nothing is left to do for the last save on this rank."""

    def restore(self, trainee: Trainee, number: int) -> None:
        """Restore the newest save, which has this number."""

    def close(self) -> None:
        """Release processes and connections."""


class Commit:
    """When a background save ended, or how it failed."""

    def __init__(self) -> None:
        self.at_s: float | None = None
        self._error: BaseException | None = None
        self._over = threading.Event()

    def end(self, error: BaseException | None = None) -> None:
        self._error = error
        if error is None:
            self.at_s = time.perf_counter()
        self._over.set()

    def follow(self, future: Future[Any]) -> None:
        """End when the future does."""
        future.add_done_callback(lambda done: self.end(done.exception()))

    def committed_at_s(self) -> float | None:
        """When it ended. Raises what the save failed with."""
        if self._error is not None:
            raise self._error
        return self.at_s

    def wait(self) -> None:
        self._over.wait()
        self.committed_at_s()


@functools.cache
def client() -> Any:
    """Return the boto3 client of this process: creating one takes longer than a small save."""
    import boto3

    return boto3.client("s3")
