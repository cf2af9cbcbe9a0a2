"""`cp`: files and folders to and from a worker, as a tar stream through a command in it.

What a worker sends is not trusted: nothing is written outside of the target, and no device, owner or link to elsewhere
is accepted (`tarfile.data_filter`).
"""

from __future__ import annotations

import os
import posixpath
import tarfile
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, BinaryIO, NamedTuple

import typer

from elasticctl.api.errors import ClusterError, ElasticctlError, NotFoundError, UsageError
from elasticctl.api.text import quote, shorten
from elasticctl.cli.framework.command import new_app, verb
from elasticctl.cli.framework.options import WHICH_WORKER
from elasticctl.cli.framework.place import Where, reach
from elasticctl.cluster import worker_access_of
from elasticctl.operations.workers import WhichWorker, find_worker
from elasticctl.terminal import say

if TYPE_CHECKING:
    from elasticctl.cluster.base import Manifest
    from elasticctl.cluster.worker_access import WorkerAccess

app = new_app()


class CopyPath(NamedTuple):
    """A path in a worker of `job`, or on this machine (`job` "")."""

    job: str
    path: str


def read_place(text: str) -> CopyPath:
    """JOB:PATH, or a local path; one with a colon before any slash needs `./` in front of it."""
    job, colon, path = text.partition(":")
    if not colon or "/" in job or not job:
        return CopyPath("", text)
    if path.startswith("//"):
        raise UsageError(f"{quote(text)} is a URL, and not a path in a worker. FIX: JOB:PATH, or a path here")
    return CopyPath(job, path or ".")


@verb(app, "cp")
def cp(
    *,
    source: Annotated[str, typer.Argument(metavar="FROM")],
    target: Annotated[str, typer.Argument(metavar="TO")],
    which: Annotated[WhichWorker, WHICH_WORKER],
    where: Where,
) -> None:
    """Copy a file or a folder to or from a worker; JOB:PATH is a path in it.

    Relative paths in a worker begin in its working directory. If the target is an existing folder, the source is copied
    into it. The worker needs tar. Write a local path that contains a colon as ./a:b.

    \b
      elasticctl cp train:outputs/model.pt model.pt
      elasticctl cp vocab.txt train:/tmp/vocab.txt --worker 1
    """
    from_, to = read_place(source), read_place(target)
    if bool(from_.job) == bool(to.job):
        raise UsageError("one of the paths must be in a worker: JOB:PATH. FIX: elasticctl cp JOB:outputs/model.pt .")
    if to.job and not os.path.lexists(from_.path):
        raise UsageError(f"there is no {quote(from_.path)} here")
    place = reach(where)
    pod = find_worker(place, from_.job or to.job, which)
    files = WorkerFiles(worker_access_of(place.context), pod)
    if from_.job:
        said = f"{files.fetch(from_.path, Path(to.path))} copied from {files.name}"
    else:
        said = f"{from_.path} copied to {files.name}:{files.send(Path(from_.path), to.path)}"
    say(said)


class WorkerFiles(NamedTuple):
    """The files of a worker."""

    access: WorkerAccess
    worker: Manifest

    @property
    def name(self) -> str:
        return str(self.worker["metadata"]["name"])

    def fetch(self, path: str, target: Path) -> Path:
        """Copy `path` to `target`, or into it if that is a folder; returns the new path."""
        folder, name = split(path)
        if target.is_dir() and name != ".":
            target = target / name
        if not hasattr(tarfile, "data_filter"):
            raise UsageError("cp needs a newer Python, which unpacks safely. FIX: Python 3.11.4 or newer")

        def receive(stream: BinaryIO) -> None:
            with tarfile.open(fileobj=stream, mode="r|") as archive:
                unpack(archive, name, target)

        self._pipe(["tar", "-c", "-f", "-", "-C", folder, "--", name], path, receive, reads=False)
        return target

    def send(self, source: Path, path: str) -> str:
        """Copy `source` to `path`, or into it if that is a folder; returns the new path."""
        from elasticctl.cluster.worker_access import Streams

        name = os.path.basename(os.path.abspath(source))
        with tempfile.TemporaryFile() as quiet:
            is_folder = self.access.run(
                self.worker, ["test", "-d", path], Streams(None, quiet.fileno(), quiet.fileno())
            )
        if is_folder == 0:
            path = posixpath.join(path, name)
        folder, name = split(path)

        def give(stream: BinaryIO) -> None:
            with tarfile.open(fileobj=stream, mode="w|") as archive:
                archive.add(source, name, filter=_without_owner)

        # Owned by the user who unpacks it, even root: ids of this machine mean nothing there.
        self._pipe(["tar", "-x", "-o", "-f", "-", "-C", folder], path, give, reads=True)
        return path

    def _pipe(self, argv: Sequence[str], path: str, work: Callable[[BinaryIO], None], *, reads: bool) -> None:
        """Run a command that reads what `work` writes, or prints what it reads. Raises ClusterError if that fails."""
        from elasticctl.cluster.worker_access import Streams

        receive, give = os.pipe()
        theirs, ours = (receive, give) if reads else (give, receive)
        failed: list[Exception] = []

        def act() -> None:
            try:
                with os.fdopen(ours, "wb" if reads else "rb") as stream:
                    work(stream)
            except (OSError, tarfile.TarError, ElasticctlError) as e:
                failed.append(e)

        thread = threading.Thread(target=act, name="cp", daemon=True)
        thread.start()
        code = 1
        with tempfile.TemporaryFile() as said:
            try:
                streams = Streams(theirs, said.fileno(), said.fileno()) if reads else Streams(None, give, said.fileno())
                code = self.access.run(self.worker, argv, streams)
            except BrokenPipeError:  # the reader has stopped: `failed` says why
                pass
            finally:
                os.close(theirs)
            thread.join()
            said.seek(0)
            why = shorten(said.read(4096).decode("utf-8", "replace"))
        if code == 127:
            raise ClusterError(f"{self.name} has no tar, which cp needs. FIX: add it to the image")
        if code and "No such file" in why:
            raise NotFoundError(f"there is no {quote(path)} in {self.name} ({why})")
        if code and not (failed and not why):
            raise ClusterError(f"{quote(path)} in {self.name} cannot be copied: {why or f'exit code {code}'}")
        for error in failed:
            _raise(error)


def _raise(error: Exception) -> None:
    if isinstance(error, tarfile.TarError):
        raise ClusterError(f"what the worker sent was not unpacked: {shorten(str(error))}") from error
    raise error


def split(path: str) -> tuple[str, str]:
    """The folder and the last component of a path in a worker; `.` for a path that is only a folder."""
    folder, name = posixpath.split(path.rstrip("/") or "/")
    return (path, ".") if name in ("", ".", "..") else (folder or ".", name)


def unpack(archive: tarfile.TarFile, name: str, target: Path) -> None:
    """Unpack a stream that contains `name`, a file or a folder, as `target`.

    An existing file is replaced once the new one is complete. Raises tarfile.TarError for paths elsewhere.
    """
    for member in archive:
        rest = posixpath.normpath(posixpath.relpath(member.name, name))
        if rest == "." and not member.isdir():
            _unpack_file(archive, member, target)
            return
        if member.islnk():
            member.linkname = posixpath.relpath(member.linkname, name)
        checked = tarfile.data_filter(member.replace(name=rest, deep=False), str(target))
        target.mkdir(exist_ok=True)
        if rest != ".":
            archive.extract(checked, target, set_attrs=True, filter="fully_trusted")


def _unpack_file(archive: tarfile.TarFile, member: tarfile.TarInfo, target: Path) -> None:
    content = archive.extractfile(member) if member.isfile() else None
    if content is None:
        raise tarfile.TarError(f"{member.name} is neither a file nor a folder")
    with tempfile.NamedTemporaryFile(dir=target.parent, prefix=f".{target.name[:100]}.", delete=False) as file:
        try:
            while data := content.read(1 << 20):
                file.write(data)
            file.flush()
            os.chmod(file.name, member.mode & 0o755 or 0o600)
            os.replace(file.name, target)
        except BaseException:
            os.unlink(file.name)
            raise


def _without_owner(member: tarfile.TarInfo) -> tarfile.TarInfo:
    """Remove the names and ids of this machine's users."""
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member
