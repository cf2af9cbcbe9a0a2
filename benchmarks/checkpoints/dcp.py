"""Contenders that use `torch.distributed.checkpoint`."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Generator
from typing import Any, cast

import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemBase, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.staging import AsyncStager, DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter

from benchmarks.checkpoints.base import BUCKET, REGION, Commit, Place, client
from benchmarks.checkpoints.training_state import Trainee


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
    kind = AsyncCheckpointerType.THREAD

    def __init__(self, place: Place, rank: int) -> None:
        self._place = place
        self._group = dist.new_group(backend="gloo")
        self._commit = Commit()
        self._stager: AsyncStager | None = None

    def prepare(self, trainee: Trainee) -> None:
        self._stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=False,  # this one and the last two need a GPU
                use_shared_memory=self.kind is AsyncCheckpointerType.PROCESS,
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
        self._commit = Commit()
        saving: Any = async_save(
            trainee.state(),
            storage_writer=self.writer(number),
            process_group=self._group,
            async_checkpointer_type=self.kind,
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


class DcpProcess(Dcp):
    """The same with the checkpointer that writes from a process of its own."""

    kind = AsyncCheckpointerType.PROCESS


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
