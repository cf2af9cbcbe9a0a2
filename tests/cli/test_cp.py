"""`cp`: what is a place in a worker, and files that arrive as they were, and nowhere else."""

from __future__ import annotations

import io
import os
import random
import tarfile
from pathlib import Path

import pytest

from elasticctl.api.errors import NotFoundError, UsageError
from elasticctl.cli.verbs.find_out_what_is_wrong.cp import CopyPath, WorkerFiles, read_place, split, unpack
from elasticctl.cluster.local.paths import LocalPaths
from elasticctl.cluster.local.worker_access import LocalWorkerAccess
from tests.support.cli import Run
from tests.support.local_worker import local_worker


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("train:out/model.pt", CopyPath("train", "out/model.pt")),
        ("train:", CopyPath("train", ".")),
        ("model.pt", CopyPath("", "model.pt")),
        ("./a:b", CopyPath("", "./a:b")),
        ("/a:b", CopyPath("", "/a:b")),
        (":x", CopyPath("", ":x")),
    ],
)
def test_places(text: str, place: CopyPath) -> None:
    assert read_place(text) == place


def test_paths_of_workers_are_split() -> None:
    assert split("out/model.pt") == ("out", "model.pt")
    assert split("/model.pt/") == ("/", "model.pt")
    assert split("model.pt") == (".", "model.pt")
    assert [split(path) for path in (".", "..", "/", "out/..")] == [(p, ".") for p in (".", "..", "/", "out/..")]


@pytest.mark.usefixtures("private_home")
def test_an_error_is_one_line(run: Run, tmp_path: Path) -> None:
    assert run("cp", "a", "b").err.startswith("error: one of the paths must be in a worker: JOB:PATH. FIX: ")
    assert run("cp", "a:x", "b:y").code == 2
    assert run("cp", str(tmp_path / "absent"), "train:x").err.startswith("error: there is no ")
    with pytest.raises(UsageError, match="is a URL"):
        read_place("s3://team/model.pt")


@pytest.mark.needs("python 3.11.4")
def test_files_arrive_as_they_were(tmp_path: Path) -> None:
    there, here = tmp_path / "there", tmp_path / "here"
    here.mkdir()
    data = random.Random(1).randbytes(300_000)
    paths = LocalPaths(tmp_path / "state", tmp_path / "sockets")
    with local_worker(paths, there) as worker:
        room = WorkerFiles(LocalWorkerAccess(paths), worker)
        (there / "out" / "deep").mkdir(parents=True)
        (there / "out" / "deep" / "-x y").write_bytes(data)
        (there / "out" / "link").symlink_to("deep")
        assert room.fetch("out", here) == here / "out"
        assert (here / "out" / "deep" / "-x y").read_bytes() == data
        assert (here / "out" / "link").readlink() == Path("deep")
        (here / "taken").write_text("old")
        assert room.fetch("out/deep/-x y", here / "taken") == here / "taken"
        assert (here / "taken").read_bytes() == data
        assert room.fetch(".", here / "all") == here / "all"
        assert (here / "all" / "out" / "deep" / "-x y").read_bytes() == data

        assert room.send(here / "out", "copy") == "copy"
        assert (there / "copy" / "deep" / "-x y").read_bytes() == data
        assert room.send(here / "taken", "out") == "out/taken"
        assert (there / "out" / "taken").read_bytes() == data
        for name, work in (("absent", lambda: room.fetch("absent/x", here)), ("no", lambda: room.send(here, "no/x"))):
            with pytest.raises(NotFoundError, match=f'there is no "{name}/x" in shell-worker-0'):
                work()
        (here / "other" / "taken").mkdir(parents=True)
        with pytest.raises(IsADirectoryError):
            room.fetch("out/taken", here / "other")
        assert os.listdir(here / "other") == ["taken"]


def stream(*members: tuple[str, bytes, str]) -> tarfile.TarFile:
    """A tar stream of (name, type, where a link leads or "")."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w|") as archive:
        for name, kind, link in members:
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, link
            archive.addfile(info)
    content.seek(0)
    return tarfile.open(fileobj=content, mode="r|")


@pytest.mark.needs("python 3.11.4")
@pytest.mark.parametrize(
    "members",
    [
        [("out/../../evil", tarfile.REGTYPE, "")],
        [("/evil", tarfile.REGTYPE, "")],
        [("out", tarfile.DIRTYPE, ""), ("out/link", tarfile.SYMTYPE, "../../evil")],
        [("out", tarfile.DIRTYPE, ""), ("out/link", tarfile.SYMTYPE, "/etc")],
        [("out", tarfile.DIRTYPE, ""), ("out/link", tarfile.LNKTYPE, "../evil")],
        [("out/null", tarfile.CHRTYPE, "")],
        [("out", tarfile.SYMTYPE, "/etc")],
    ],
    ids=lambda members: members[-1][0] + members[-1][2],
)
def test_nothing_is_written_elsewhere(members: list[tuple[str, bytes, str]], tmp_path: Path) -> None:
    target = tmp_path / "inner" / "out"
    target.parent.mkdir()
    (tmp_path / "evil").write_text("mine")
    with stream(*members) as archive, pytest.raises(tarfile.TarError):
        unpack(archive, "out", target)
    assert (tmp_path / "evil").read_text() == "mine"
    assert sorted(os.listdir(tmp_path)) == ["evil", "inner"]
