"""The job's workspace, unpacked by a real launcher: what runs, where, and errors; and private folders."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from elasticctl.operations.workspace.collect_files import collect_files, pieces_of
from elasticctl_launcher import workspace
from elasticctl_launcher.workspace import (
    PREFIX,
    PrivateFolder,
    UnpackedWorkspace,
    create_folder_for_sockets,
    delete_orphaned_folders,
    unpack_workspace,
)
from elasticctl_store import storage as storages
from elasticctl_store.errors import TrainError
from elasticctl_store.workspace import transfer
from elasticctl_store.workspace.packing import Listing, PackedLink
from tests.support.clouds import Cloud
from tests.support.launcher_lab import Lab
from tests.support.train.ranks import start_server

SCRIPT = """
import os, sys
import helper
print("ran", os.path.abspath(__file__), "in", os.getcwd(), "with", helper.NAME, sys.argv[1:], os.environ["PWD"])
print("path", sys.path[0])
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """The folder of a project."""
    folder = tmp_path / "project"
    (folder / "src").mkdir(parents=True)
    (folder / "src/train.py").write_text(SCRIPT)
    (folder / "src/helper.py").write_text("NAME = 'helper'\n")
    (folder / "run.sh").write_text("#!/bin/sh\necho shell in $PWD\n")
    (folder / "run.sh").chmod(0o755)
    return folder


@pytest.fixture
def scratch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The launchers' temporary folder; its path is short, because sockets go there."""
    start_server()
    with tempfile.TemporaryDirectory(prefix="es-") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        monkeypatch.setattr(tempfile, "tempdir", None)
        yield Path(folder)


def sent(source: Path, url: str) -> str:
    """Send the folder; return the reference that a manifest contains."""
    listing = collect_files(source, None).listing
    transfer.send(storages.open(url), listing, "0" * 32, lambda file: pieces_of(source, file), lambda count: None)
    return f"{url}#{listing.digest}"


def left(scratch: Path) -> Iterator[Path]:
    return scratch.glob(f"{PREFIX}*")


def test_a_relative_command_runs_in_the_copy(lab: Lab, source: Path, scratch: Path, s3: Cloud) -> None:
    """The original folder may be gone, and is usually on another machine."""
    reference = sent(source, s3.url)
    source.rename(source.with_name("elsewhere"))
    lab.add("a-0")
    lab.start(
        "a-0", "python", "src/train.py", "--epochs", "3", ELASTICCTL_WORKSPACE=reference,
        ELASTICCTL_WORKSPACE_FROM=str(source),
    )  # fmt: skip
    assert lab.wait("a-0") == 0, lab.output("a-0")
    said = lab.output("a-0")
    assert "[launcher] workspace" in said
    assert f": 3 files, 0.2 kB from {storages.open(s3.url).url} in " in said
    assert "Found credentials" not in said  # a message of boto3
    assert "with helper ['--epochs', '3']" in said
    (line,) = (line for line in said.splitlines() if line.startswith("ran "))
    script, folder = Path(line.split()[1]), Path(line.split()[3])
    assert script == folder / "src/train.py"
    assert folder.is_relative_to(scratch)
    assert line.endswith(f" {folder}")
    assert f"path {folder}/src" in said
    assert list(left(scratch)) == []


def test_a_command_that_names_its_script_keeps_its_working_folder(lab: Lab, source: Path, scratch: Path) -> None:
    reference = sent(source, str(lab.folder / "kept"))
    (source / "src/train.py").write_text("print('edited')\n")
    lab.add("a-0", "a-1")
    env = {"ELASTICCTL_WORKSPACE": reference, "ELASTICCTL_WORKSPACE_FROM": str(source), "PWD": str(lab.folder)}
    lab.start("a-0", sys.executable, str(source / "src/train.py"), **env)
    lab.start("a-1", str(source / "run.sh"), **env)
    for name in ("a-0", "a-1"):
        assert lab.wait(name) == 0, lab.output(name)
    assert f" in {lab.folder} with helper []" in lab.output("a-0")
    assert "edited" not in lab.output("a-0")
    assert f"ran {scratch}/" in lab.output("a-0")
    assert f"shell in {lab.folder}" in lab.output("a-1")
    assert list(left(scratch)) == []


def test_a_module_runs_from_the_copy_in_its_original_working_folder(lab: Lab, scratch: Path) -> None:
    """With and without a spare; processes that it starts find the copy's modules too."""
    package = lab.folder / "pkg"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "names.py").write_text("NAME = 'as submitted'\n")
    (package / "train.py").write_text(
        "import os, subprocess, sys\nfrom pkg.names import NAME\n"
        "said = subprocess.check_output([sys.executable, '-c', 'import os; print(os.getcwd())'], text=True).strip()\n"
        "with open(os.environ['ELASTICCTL_WORKER'] + '.txt', 'w') as file:\n"
        "    print(NAME, __spec__.name, sys.argv[1:], said == os.getcwd() == os.environ['PWD'], __file__, file=file)\n"
    )
    reference = sent(lab.folder, str(scratch / "kept"))
    (package / "names.py").write_text("NAME = 'edited'\n")
    env = {
        "ELASTICCTL_WORKSPACE": reference, "ELASTICCTL_WORKSPACE_FROM": str(lab.folder), "PWD": str(lab.folder),
    }  # fmt: skip
    ways: dict[str, tuple[str, ...]] = {"a-0": (), "a-1": ("--preload", "none")}
    lab.add(*ways)
    for name, options in ways.items():
        lab.start(name, sys.executable, "-u", "-m", "pkg.train", "--lr", "3", options=options, **env)
    for name in ways:
        assert lab.wait(name) == 0, lab.output(name)
        said = (lab.folder / f"{name}.txt").read_text()
        assert said.startswith(f"as submitted pkg.train ['--lr', '3'] True {scratch}/"), said
    assert list(left(scratch)) == []


def test_a_damaged_workspace_is_reported_once_and_is_the_failure(lab: Lab, source: Path, scratch: Path) -> None:
    kept = lab.folder / "kept"
    reference = sent(source, str(kept))
    digest = reference.rpartition("#")[2]
    (pack,) = (kept / "packs").iterdir()
    pack.write_bytes(pack.read_bytes()[:-9] + b"123456789")
    lab.add("a-0")
    lab.start("a-0", "python", "src/train.py", ELASTICCTL_WORKSPACE=reference)
    assert lab.wait("a-0") == 1
    wanted = f"the workspace {digest[:12]} at {kept} is damaged"
    assert wanted in lab.output("a-0")
    assert lab.output("a-0").endswith("submit the job again from its folder\n")
    message = lab.message("a-0")
    assert (message["verdict"], message["exitCode"], message["worker"]) == ("application", 1, "a-0")
    assert wanted in str(message["error"])
    assert list(left(scratch)) == []


@pytest.mark.parametrize(
    ("reference", "said"),
    [
        ("file:///kept", "it must be URL#DIGEST, as submit sets it"),
        ("file:///kept#123", "it must be URL#DIGEST"),
        (f"ftp://user:word@host/kept#{'0' * 64}", "ftp:// is not a supported storage"),
        (f"s3://key:word@bucket/kept#{'0' * 64}", "set credentials in the environment"),
    ],
)
def test_an_invalid_reference_is_refused_without_showing_a_password(scratch: Path, reference: str, said: str) -> None:
    with pytest.raises(TrainError) as caught:
        unpack_workspace({"ELASTICCTL_WORKSPACE": reference})
    assert said in str(caught.value)
    assert "word" not in str(caught.value)


def test_without_a_workspace_nothing_is_unpacked() -> None:
    assert unpack_workspace({}) is None


def test_a_large_workspace_is_announced(
    tmp_path: Path, scratch: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "project").mkdir()
    (tmp_path / "project/data.bin").write_bytes(bytes(2_500_000))
    reference = sent(tmp_path / "project", str(tmp_path / "kept"))
    caplog.set_level("INFO")
    monkeypatch.setattr("elasticctl_launcher.workspace.LARGE_BYTES", 2_000_000)
    copy = unpack_workspace({"ELASTICCTL_WORKSPACE": reference})
    assert copy is not None
    copy.close()
    announced, done = caplog.messages
    assert announced == "workspace: fetching 1 file, 2.5 MB ..."
    assert ": 1 file, 2.5 MB from file://" in done
    assert list(left(scratch)) == []


def test_circular_links_are_named(tmp_path: Path, scratch: Path, caplog: pytest.LogCaptureFixture) -> None:
    """In a workspace that an earlier version has sent."""
    kept, listing = storages.open(str(tmp_path / "kept")), Listing.of([PackedLink("a", "a//a"), PackedLink("b", "a")])
    transfer.send(kept, listing, "0" * 32, lambda file: iter(()), lambda count: None)
    copy = unpack_workspace({"ELASTICCTL_WORKSPACE": f"{tmp_path}/kept#{listing.digest}"})
    assert copy is not None
    assert list(copy.folder.iterdir()) == []
    copy.close()
    assert caplog.messages == ["workspace: left out a link that leads in a circle: 'a' -> 'a//a' (and 1 more)"]


@pytest.mark.usefixtures("aws_keys")
def test_sigterm_ends_the_wait_for_the_storage(lab: Lab, scratch: Path) -> None:
    lab.add("a-0")
    nowhere = {"AWS_ENDPOINT_URL": "http://127.0.0.1:1", "ELASTICCTL_LOG_UPLOAD": "off"}
    lab.start("a-0", "true", ELASTICCTL_WORKSPACE=f"s3://bucket/job#{'a' * 64}", **nowhere)
    lab.until(lambda: list(left(scratch)))
    lab.workers["a-0"].terminate()
    assert lab.wait("a-0") == 143
    assert lab.message("a-0")["verdict"] == "preempted"
    assert list(left(scratch)) == []


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ('  File "COPY/src/a b.py", line 3, in <module>', '  File "/home/me/src/a b.py", line 3, in <module>'),
        ('[rank1]:   File "COPY/x"y.py", line 3, in f', '[rank1]:   File "/home/me/x"y.py", line 3, in f'),
        ('  File "COPY/x.py", line 4 in f', '  File "/home/me/x.py", line 4 in f'),
        ("COPY/x.py:7: UserWarning: slow", "/home/me/x.py:7: UserWarning: slow"),
        ("wrote COPY/out.pt", "wrote COPY/out.pt"),
        ("COPY/out.pt", "COPY/out.pt"),
        ('  File "COPY2/x.py", line 4 in f', '  File "COPY2/x.py", line 4 in f'),
        ('  File "/usr/lib/python3/x.py", line 4 in f', '  File "/usr/lib/python3/x.py", line 4 in f'),
    ],
)
def test_paths_in_tracebacks_are_those_of_the_submitted_folder(tmp_path: Path, line: str, shown: str) -> None:
    parent = PrivateFolder(tmp_path)
    copy = UnpackedWorkspace(parent, parent.path / "workspace", Path("/home/me"))
    try:
        assert copy.with_known_paths(line.replace("COPY", str(copy.folder))) == shown.replace("COPY", str(copy.folder))
    finally:
        copy.close()


def test_a_traceback_names_the_submitted_file(lab: Lab, source: Path, scratch: Path) -> None:
    (source / "src/train.py").write_text("import helper\nhelper.fail()\n")
    (source / "src/helper.py").write_text("def fail():\n    raise ValueError('no')\n")
    reference = sent(source, str(lab.folder / "kept"))
    lab.add("a-0")
    env = {"ELASTICCTL_WORKSPACE": reference, "ELASTICCTL_WORKSPACE_FROM": str(source)}
    lab.start("a-0", sys.executable, str(source / "src/train.py"), **env)
    assert lab.wait("a-0") == 1
    assert f'  File "{source}/src/helper.py", line 2, in fail' in lab.output("a-0").splitlines()
    assert f'File "{scratch}' not in lab.output("a-0")


OWNER = """
import sys, time
from pathlib import Path
from elasticctl_launcher.workspace import PrivateFolder
folder = PrivateFolder(Path(sys.argv[1]))
(folder.path / "snapshot").write_bytes(b"state")
print(folder.path, flush=True)
time.sleep(600)
"""


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """Another process, and the folder it owns."""
    with subprocess.Popen([sys.executable, "-c", OWNER, tmp_path], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process, Path(process.stdout.readline().strip())
        process.kill()


def test_a_folder_is_private_and_removed_at_the_end(tmp_path: Path) -> None:
    folder = PrivateFolder(tmp_path)
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    (folder.path / "x").touch()
    folder.close()
    assert list(tmp_path.iterdir()) == []


def test_an_interruption_while_a_folder_is_created_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def terminate(*_: object) -> None:
        raise SystemExit(143)

    monkeypatch.setattr(workspace.fcntl, "flock", terminate)
    with pytest.raises(SystemExit):
        PrivateFolder(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_an_existing_folder_of_the_same_name_is_kept(tmp_path: Path) -> None:
    folder = PrivateFolder(tmp_path, "hosts")
    with pytest.raises(FileExistsError):
        PrivateFolder(tmp_path, "hosts")
    assert folder.path.is_dir()
    folder.close()


def test_only_folders_of_dead_launchers_are_deleted(owner: tuple[subprocess.Popen[str], Path], tmp_path: Path) -> None:
    process, folder = owner
    delete_orphaned_folders(tmp_path)
    assert (folder / "snapshot").exists()
    process.kill()
    process.wait()
    PrivateFolder(tmp_path).close()  # the next launcher
    assert list(tmp_path.iterdir()) == []


def test_a_new_folder_without_a_lock_is_kept_for_a_while(tmp_path: Path) -> None:
    young, old = tmp_path / f"{workspace.PREFIX}young", tmp_path / f"{workspace.PREFIX}old"
    for folder in (young, old):
        folder.mkdir()
    os.utime(old, (1.0, 1.0))
    delete_orphaned_folders(tmp_path)
    assert list(tmp_path.iterdir()) == [young]


def test_other_folders_and_links_are_not_deleted(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    os.utime(kept, (1.0, 1.0))
    link = tmp_path / f"{workspace.PREFIX}link"
    link.symlink_to(kept)
    delete_orphaned_folders(tmp_path)
    assert kept.is_dir()
    assert link.is_symlink()


def test_without_shared_memory_there_is_no_folder_in_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(workspace, "SHARED_MEMORY", tmp_path / "none")
    assert workspace.create_shared_memory_folder() is None
    monkeypatch.setattr(workspace, "SHARED_MEMORY", tmp_path)
    folder = workspace.create_shared_memory_folder()
    assert folder is not None
    assert folder.path.parent == tmp_path
    folder.close()


@pytest.mark.parametrize("length", [40, 69, 70, 200])
def test_a_long_temporary_path_is_avoided_for_sockets(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory(prefix="e") as parent:
        long = Path(parent) / ("x" * (length - len(parent) - 1))
        long.mkdir()
        assert len(str(long)) == length
        monkeypatch.setattr(tempfile, "tempdir", str(long))
        folder = create_folder_for_sockets()
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as wire:
            wire.bind(str(folder.path / "agent.sock"))
        folder.close()


def test_without_a_folder_for_sockets_the_error_has_a_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/" + "x" * 100)
    monkeypatch.setattr(workspace, "SHORT_PARENTS", ("/no-such-folder",))
    with pytest.raises(OSError, match="FIX: set TMPDIR"):
        create_folder_for_sockets()
