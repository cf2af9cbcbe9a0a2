"""The contenders, each used as documented and tuned as well as possible. They run in the ranks' processes.

Each save of the others has a prefix of its own, and they are given the number of the newest one for a restore; ours
finds it. A save is stored at `s3://BUCKET/PREFIX/…` at the server's endpoint, which boto3 and everything built on it
read from $AWS_ENDPOINT_URL.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import threading
import time
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemBase, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.staging import AsyncStager, DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter

from benchmarks.checkpoints.training_state import Trainee

if TYPE_CHECKING:
    from elasticctl_store.storage import Storage

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


class Saver(Protocol):
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


class CommitWait:
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


class Boto3:
    """`torch.save` into memory, uploaded by boto3 on a thread; rank 0 writes, all ranks read: what scripts typically
    do."""

    cleans_up = False

    def __init__(self, place: Place, rank: int) -> None:
        self._place, self._rank = place, rank
        self._commit = CommitWait()

    def prepare(self, trainee: Trainee) -> None:
        client()

    def save(self, trainee: Trainee, number: int) -> None:
        self._commit = CommitWait()
        if self._rank != 0:
            self._commit.end()
            return
        data = io.BytesIO()
        torch.save(trainee.state(), data)
        data.seek(0)
        threading.Thread(target=self._upload, args=(data, self._place.key(number, "state.pt"), self._commit)).start()

    def _upload(self, data: io.BytesIO, key: str, commit: CommitWait) -> None:
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


class _Kept(io.BytesIO):
    """A file in memory that outlives its closing: DCP closes what it writes, and only then can it be uploaded."""

    def close(self) -> None:
        return


class Boto3Files(FileSystemBase):
    """The parts of a file system that DCP's own writer and reader need, over boto3: whole files, through memory.

    DCP supports object stores only through fsspec, whose S3 uses the same botocore.
    """

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[io.IOBase, None, None]:
        stream = _Kept()
        if mode == "rb":
            client().download_fileobj(BUCKET, str(path), stream)
            stream.seek(0)
        yield stream
        if mode == "wb":
            stream.seek(0)
            client().upload_fileobj(stream, BUCKET, str(path))

    def concat_path(self, path: str | os.PathLike[str], suffix: str) -> str:
        return f"{str(path).rstrip('/')}/{suffix}"

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        client().copy_object(Bucket=BUCKET, Key=str(new_path), CopySource={"Bucket": BUCKET, "Key": str(path)})
        self.rm_file(path)

    def init_path(self, path: str | os.PathLike[str]) -> str | os.PathLike[str]:
        return path

    def mkdir(self, path: str | os.PathLike[str]) -> None:
        return

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True

    def exists(self, path: str | os.PathLike[str]) -> bool:
        import botocore.exceptions

        try:
            client().head_object(Bucket=BUCKET, Key=str(path))
        except botocore.exceptions.ClientError:
            return False
        return True

    def rm_file(self, path: str | os.PathLike[str]) -> None:
        client().delete_object(Bucket=BUCKET, Key=str(path))


class Dcp:
    """`torch.distributed.checkpoint.async_save`, with a copy in memory that is reused from save to save."""

    cleans_up = False

    def __init__(self, place: Place, rank: int) -> None:
        self._place = place
        self._group = dist.new_group(backend="gloo")
        self._commit = CommitWait()
        self._stager: AsyncStager | None = None

    def prepare(self, trainee: Trainee) -> None:
        self._stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=False,  # this one and the last two need a GPU
                use_shared_memory=False,
                use_async_staging=False,
                use_non_blocking_copy=False,
            )
        )

    def writer(self, number: int) -> StorageWriter:
        writer: Any = FileSystemWriter(self._place.key(number), sync_files=False)
        writer.fs = Boto3Files()
        return cast(StorageWriter, writer)

    def reader(self, number: int) -> StorageReader:
        reader: Any = FileSystemReader(self._place.key(number))
        reader.fs = Boto3Files()
        return cast(StorageReader, reader)

    def save(self, trainee: Trainee, number: int) -> None:
        self._commit = CommitWait()
        saving: Any = async_save(
            trainee.state(),
            storage_writer=self.writer(number),
            process_group=self._group,
            async_checkpointer_type=AsyncCheckpointerType.THREAD,
            async_stager=self._stager,
        )
        self._commit.follow(getattr(saving, "upload_completion", saving))

    def committed_at_s(self) -> float | None:
        return self._commit.committed_at_s()

    def wait(self) -> None:
        self._commit.wait()

    def restore(self, trainee: Trainee, number: int) -> None:
        trainee.train_once()  # it loads into existing tensors: the optimizer must have its state
        state = trainee.state()
        load(state, storage_reader=self.reader(number), process_group=self._group)
        trainee.load(state)

    def close(self) -> None:
        if self._stager is not None:
            self._stager.close()


class S3TorchConnector(Dcp):
    """DCP with the reader and writer of s3torchconnector, which have their own S3 client."""

    def writer(self, number: int) -> StorageWriter:
        from s3torchconnector.dcp import S3StorageWriter

        writer: StorageWriter = S3StorageWriter(REGION, self._place.url(number), _connector_settings())
        return writer

    def reader(self, number: int) -> StorageReader:
        from s3torchconnector.dcp import S3StorageReader

        reader: StorageReader = S3StorageReader(REGION, self._place.url(number), _connector_settings())
        return reader


def _connector_settings() -> Any:
    from s3torchconnector import S3ClientConfig

    return S3ClientConfig(force_path_style=True)


class OurCheckpoints:
    """`Checkpointer`, as `Run` uses it."""

    cleans_up = True

    def __init__(self, place: Place, rank: int) -> None:
        from elasticctl_train.dist import join

        self._url = f"s3://{BUCKET}/{place.prefix}?endpoint={place.endpoint}&region={REGION}"
        self._world = join()
        self._commit = CommitWait()
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

        self._commit = CommitWait()
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


class Obstore(OurCheckpoints):
    """`Checkpointer` on a storage that leaves HTTP to the library obstore."""

    def _storage(self, url: str) -> Storage:
        from benchmarks.checkpoints import obstore_storage

        return obstore_storage.connect(url)


@dataclass(frozen=True, slots=True)
class Entry:
    """How to create a contender, and what it imports, which is done before anything is measured."""

    make: Callable[[Place, int], Saver]
    modules: tuple[str, ...]


_OURS = Entry(OurCheckpoints, ("elasticctl_train.checkpoint.checkpointer", "elasticctl_store.storage.s3"))
CONTENDERS: Mapping[str, Entry] = {
    "boto3": Entry(Boto3, ("boto3",)),
    "dcp": Entry(Dcp, ("boto3",)),
    "s3torchconnector": Entry(S3TorchConnector, ("s3torchconnector.dcp",)),
    "elasticctl": _OURS,
    "elasticctl-tier": _OURS,
    "obstore": Entry(Obstore, ("elasticctl_train.checkpoint.checkpointer", "benchmarks.checkpoints.obstore_storage")),
}
"""Ours and the one with a tier differ in $ELASTICCTL_LOCAL_TIER."""
