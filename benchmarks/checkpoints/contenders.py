"""The contenders, each used as documented and tuned as well as possible. They run in the ranks' processes.

Each save of the others has a prefix of its own, and they are told the newest one for a restore; ours finds it. A save
is stored at `s3://BUCKET/PREFIX/…` at the sink's endpoint, which boto3 and everything built on it read from
$AWS_ENDPOINT_URL.
"""

from __future__ import annotations

import io
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from benchmarks.checkpoints.base import BUCKET, REGION, Commit, Contender, Place, client
from benchmarks.checkpoints.dcp import Dcp, DcpProcess, S3TorchConnector
from benchmarks.checkpoints.training_state import Trainee

if TYPE_CHECKING:
    from elasticctl_store.storage import Storage


class Boto3:
    """`torch.save` into memory, uploaded by boto3 on a thread; rank 0 writes, all ranks read: what scripts typically
    do."""

    cleans_up = False

    def __init__(self, place: Place, rank: int) -> None:
        self._place, self._rank = place, rank
        self._commit = Commit()

    def prepare(self, trainee: Trainee) -> None:
        client()

    def save(self, trainee: Trainee, number: int) -> None:
        self._commit = Commit()
        if self._rank != 0:
            self._commit.end()
            return
        data = io.BytesIO()
        torch.save(trainee.state(), data)
        data.seek(0)
        threading.Thread(target=self._upload, args=(data, self._place.key(number, "state.pt"), self._commit)).start()

    def _upload(self, data: io.BytesIO, key: str, commit: Commit) -> None:
        try:
            client().upload_fileobj(data, BUCKET, key)
        except Exception as e:  # noqa: BLE001 - handed to whoever waits
            commit.end(e)
        else:
            commit.end()

    def committed_at_s(self) -> float | None:
        return self._commit.committed_at_s()

    def wait(self) -> None:
        self._commit.wait()

    def restore(self, trainee: Trainee, number: int) -> None:
        data = io.BytesIO()
        client().download_fileobj(BUCKET, self._place.key(number, "state.pt"), data)
        data.seek(0)
        trainee.load(torch.load(data, weights_only=True))

    def close(self) -> None:
        return


class TorchSnapshot:
    """`Snapshot.async_take`: unmaintained, and the first to distribute the writing of replicated state over the
    ranks."""

    cleans_up = False

    def __init__(self, place: Place, rank: int) -> None:
        self._place = place
        self._group = dist.new_group(backend="gloo")
        self._commit = Commit()

    def prepare(self, trainee: Trainee) -> None:
        return

    def save(self, trainee: Trainee, number: int) -> None:
        from torchsnapshot import Snapshot

        self._commit = commit = Commit()
        parts = {"model": trainee.model, "optimizer": trainee.optimizer}
        pending = Snapshot.async_take(self._place.url(number), parts, pg=self._group, replicated=["**"])

        def follow() -> None:
            try:
                pending.wait()
            except Exception as e:  # noqa: BLE001 - handed to whoever waits
                commit.end(e)
            else:
                commit.end()

        threading.Thread(target=follow).start()

    def committed_at_s(self) -> float | None:
        return self._commit.committed_at_s()

    def wait(self) -> None:
        self._commit.wait()

    def restore(self, trainee: Trainee, number: int) -> None:
        from torchsnapshot import Snapshot

        parts = {"model": trainee.model, "optimizer": trainee.optimizer}
        Snapshot(self._place.url(number), pg=self._group).restore(parts)

    def close(self) -> None:
        return


class Ours:
    """`Checkpointer`, as `Run` uses it."""

    cleans_up = True

    def __init__(self, place: Place, rank: int) -> None:
        from elasticctl_train.dist import join

        self._url = f"s3://{BUCKET}/{place.prefix}?endpoint={place.endpoint}&region={REGION}"
        self._world = join()
        self._commit = Commit()
        self._checkpoints: Any = None

    def _open(self) -> Any:
        from elasticctl_store.checkpoints.entries import Retention
        from elasticctl_train.checkpoint.checkpointer import Checkpointer

        if self._checkpoints is None:
            keep = Retention(last=1)
            kept = self._storage(self._url)
            self._checkpoints = Checkpointer(kept, self._world, keep=keep, on_commit=lambda *_: self._commit.end())
        return self._checkpoints

    def _storage(self, url: str) -> Storage:
        from elasticctl_store import storage

        return storage.open(url)

    def prepare(self, trainee: Trainee) -> None:
        self._open().prepare(trainee.state())

    def save(self, trainee: Trainee, number: int) -> None:
        from elasticctl_train.checkpoint.checkpointer import Label

        self._commit = Commit()
        self._checkpoints.save(trainee.state(), Label(step=number))
        if self._world.rank != 0:
            self._commit.end()

    def committed_at_s(self) -> float | None:
        return self._commit.committed_at_s()

    def wait(self) -> None:
        if not self._checkpoints.settle():
            raise self._checkpoints.failure()

    def restore(self, trainee: Trainee, number: int) -> None:
        restored = self._open().restore()
        if restored is None or restored.commit.step != number:
            raise RuntimeError(f"restored {restored and restored.commit}, and {number} is the newest save")
        trainee.load(restored.state)

    def close(self) -> None:
        return


class Obstore(Ours):
    """`Checkpointer` on a storage that leaves HTTP to the library obstore."""

    def _storage(self, url: str) -> Storage:
        from benchmarks.checkpoints import obstore_storage

        return obstore_storage.connect(url)


@dataclass(frozen=True, slots=True)
class Entry:
    """How to create a contender, and what it imports, which is done before anything is measured."""

    make: Callable[[Place, int], Contender]
    modules: tuple[str, ...]


_OURS = Entry(Ours, ("elasticctl_train.checkpoint.checkpointer", "elasticctl_store.storage.s3"))
CONTENDERS: Mapping[str, Entry] = {
    "boto3": Entry(Boto3, ("boto3",)),
    "dcp-thread": Entry(Dcp, ("boto3",)),
    "dcp-process": Entry(DcpProcess, ("boto3",)),
    "s3torchconnector": Entry(S3TorchConnector, ("s3torchconnector.dcp",)),
    "torchsnapshot": Entry(TorchSnapshot, ("torchsnapshot.storage_plugins.s3", "aiobotocore.session")),
    "elasticctl": _OURS,
    "elasticctl-tier": _OURS,
    "obstore": Entry(Obstore, ("elasticctl_train.checkpoint.checkpointer", "benchmarks.checkpoints.obstore_storage")),
}
"""Ours and the one with a tier differ in $ELASTICCTL_LOCAL_TIER."""
