"""Which files of a folder are included: as git would do it, within a limit, and as it was at one moment."""

from __future__ import annotations

import itertools
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from elasticctl.api.errors import UsageError
from elasticctl.operations.workspace.collect_files import WorkspaceFiles, collect_files, pieces_of
from elasticctl.operations.workspace.workspace import Workspace
from elasticctl_store.workspace.packing import File, Folder, PackedLink

LIMIT = 1_000_000


def write(folder: Path, *paths: str, text: str = "x\n") -> None:
    for path in paths:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)


def paths(folder: Path) -> list[str]:
    return [item.path for item in collect_files(folder, LIMIT).listing.items]


# The rules.


def test_the_defaults_leave_out_what_should_not_be_sent(tmp_path: Path) -> None:
    wanted = ["train.py", "checkpoints/__init__.py", "conf/model.yaml", "data/small.csv", ".gitignore"]
    unwanted = [
        ".git/config",
        "lib/.git/HEAD",
        "__pycache__/train.cpython-311.pyc",
        "lib/__pycache__/a.pyc",
        "old.pyc",
        ".venv/bin/python",
        "my-env/pyvenv.cfg",
        "my-env/lib/torch.py",
        "node_modules/a.js",
        "proj.egg-info/PKG-INFO",
        ".env",
        ".env.local",
        "keys/server.pem",
        "runs/last.ckpt",
        "model.safetensors",
        "wandb/run-1/log",
    ]
    write(tmp_path, *wanted, *unwanted)
    assert [path for path in paths(tmp_path) if path not in ("keys", "lib", "runs")] == sorted(wanted)


def test_own_rules_take_precedence_over_gits_and_the_defaults(tmp_path: Path) -> None:
    write(tmp_path, "train.py", "out/a.txt", "out/b.txt", "vocab.pt", "big.pt", "secret.txt", "sub/c.log", "sub/d.log")
    (tmp_path / ".gitignore").write_text("out/*\n*.log\n")
    (tmp_path / ".elasticctlignore").write_text("!out/a.txt\n!vocab.pt\n/secret.txt\n.gitignore\n.elasticctlignore\n")
    (tmp_path / "sub" / ".elasticctlignore").write_text("!d.log\n.*\n")
    assert paths(tmp_path) == ["out/a.txt", "sub/d.log", "train.py", "vocab.pt"]


def test_the_rules_of_the_repository_above_hold(tmp_path: Path) -> None:
    write(tmp_path, ".git/HEAD", "deep/er/train.py", "deep/er/a.log", "deep/er/here.tmp", "deep/er/out/x")
    (tmp_path / ".gitignore").write_text("*.log\n/deep/er/out\n")
    (tmp_path / "deep" / ".gitignore").write_text("*.tmp\n")
    assert paths(tmp_path / "deep/er") == ["train.py"]
    assert "a.log" not in paths(tmp_path / "deep/er")
    (tmp_path / ".git/HEAD").unlink()
    (tmp_path / ".git").rmdir()
    assert "a.log" in paths(tmp_path / "deep/er")


NAMES = st.sampled_from(["a", "b", "ab", "c.txt", "d.log", "e f"])
TREES = st.lists(st.lists(NAMES, min_size=1, max_size=3).map("/".join), min_size=1, max_size=12)
RULES = st.lists(
    st.sampled_from(
        ["a", "b/", "/ab", "*.txt", "!*.txt", "**/d.log", "a/**", "!a/b", "a/*", "e\\ f", "# c", "[ab]", "?", "!/c.txt"]
    ),
    max_size=4,
).map("\n".join)


@given(TREES, RULES, RULES, st.sampled_from(["a", "b"]))
@example(["c.txt/a/b"], "a\n!/c.txt", "", "a")
@example(["a/b", "a/c.txt"], "a/**\n!a/b", "", "b")
@settings(max_examples=25)
def test_files_that_git_would_add_are_collected(
    tmp_path_factory: pytest.TempPathFactory, tree: list[str], rules: str, inner: str, sub: str
) -> None:
    """Real git is asked what it would add."""
    folder = tmp_path_factory.mktemp("repo")
    for path in tree:
        if not any((folder / above).is_file() for above in Path(path).parents) and not (folder / path).is_dir():
            write(folder, path)
    (folder / ".gitignore").write_text(rules + "\n")
    if (folder / sub).is_dir():
        (folder / sub / ".gitignore").write_text(inner + "\n")
    git = {"GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_SYSTEM": "/dev/null", "PATH": os.environ["PATH"]}
    subprocess.run(["git", "init", "-q"], cwd=folder, env=git, check=True)
    asked = ["git", "ls-files", "-z", "--others", "--exclude-standard"]
    listed = subprocess.run(asked, cwd=folder, env=git, check=True, capture_output=True, text=True).stdout
    files = [file.path for file in collect_files(folder, LIMIT).listing.files]
    assert files == sorted(path for path in listed.split("\0") if path)


# What goes along.


def test_links_empty_folders_and_bits_go_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "train.py", "lib/a.py", "run.sh")
    (tmp_path / "run.sh").chmod(0o755)
    (tmp_path / "here").symlink_to("lib/a.py")
    (tmp_path / "folder").symlink_to("lib")
    (tmp_path / "away").symlink_to("/etc")
    (tmp_path / "up").symlink_to(f"../{tmp_path.name}/train.py")
    (tmp_path / "empty/er").mkdir(parents=True)
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.chdir(tmp_path)  # a socket's path is short
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("sock")
        gathered = collect_files(tmp_path, LIMIT)
    assert [item.path for item in gathered.listing.items if isinstance(item, PackedLink)] == ["folder", "here"]
    assert [item.path for item in gathered.listing.items if isinstance(item, Folder)] == ["empty/er"]
    assert [file.path for file in gathered.listing.files if file.executable] == ["run.sh"]
    assert gathered.left_out == ("pipe", "sock", "away -> /etc", f"up -> ../{tmp_path.name}/train.py")


@pytest.mark.parametrize(
    "links",
    [
        {"a": "a"},
        {"a": "a//a"},
        {"a": "a/b"},
        {"a": "b", "b": "a"},
        {"a": "b", "b": "b/.", "lib/c": "../a/train.py"},
    ],
    ids=str,
)
def test_links_that_lead_in_a_circle_stay_behind(tmp_path: Path, links: dict[str, str]) -> None:
    write(tmp_path, "train.py", "lib/a.py")
    for path, target in {**links, "z": f"{tmp_path}/z"}.items():
        (tmp_path / path).symlink_to(target)
    gathered = collect_files(tmp_path, LIMIT)
    assert [item.path for item in gathered.listing.items] == ["lib/a.py", "train.py"]
    assert (gathered.left_out, gathered.loops) == (
        (f"z -> {tmp_path}/z",),
        tuple(f"{a} -> {b}" for a, b in links.items()),
    )
    planned = Workspace(tmp_path, WorkspaceFiles(gathered.listing, (), ("a -> b", "b -> a")), "file:///kept")
    line = 'left out of the workspace, links that lead in a circle: "a -> b" and "b -> a"'
    assert planned.plan_lines()[1:] == (line,)


def test_the_same_folder_elsewhere_and_later_has_the_same_digest(tmp_path: Path) -> None:
    for name in ("one", "two"):
        write(tmp_path / name, "train.py", "lib/a.py")
        os.utime(tmp_path / name / "train.py", (len(name), 10))
    assert (
        collect_files(tmp_path / "one", LIMIT).listing.digest == collect_files(tmp_path / "two", LIMIT).listing.digest
    )
    (tmp_path / "two/train.py").chmod(0o755)
    assert (
        collect_files(tmp_path / "one", LIMIT).listing.digest != collect_files(tmp_path / "two", LIMIT).listing.digest
    )


# What cannot.


def test_too_much_names_the_largest_files_and_the_fixes(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    for name, size in (("data/a.bin", 500_000), ("b.bin", 300_000), ("data/c.bin", 250_000), ("d.bin", 10)):
        (tmp_path / name).write_bytes(bytes(size))
    with pytest.raises(UsageError) as caught:
        collect_files(tmp_path, LIMIT)
    assert str(caught.value) == (
        f"the workspace {tmp_path} has 1.1 MB, more than 1.0 MB; the largest: data/a.bin (500.0 kB), b.bin (300.0 kB)"
        " and data/c.bin (250.0 kB). FIX: leave out what the job does not need with lines in .elasticctlignore, such as"
        " /data/, raise --workspace-limit, or choose --workspace or --no-workspace"
    )
    assert collect_files(tmp_path, None).listing.size_bytes == 1_050_010


def test_a_name_that_is_no_text_is_refused(tmp_path: Path) -> None:
    os.close(os.open(os.fsencode(tmp_path) + b"/a\xff", os.O_CREAT | os.O_WRONLY))
    with pytest.raises(
        UsageError, match=r'"a\\udcff" cannot be in the workspace: its path is not UTF-8. FIX: leave it out'
    ):
        collect_files(tmp_path, LIMIT)


def test_rules_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    write(tmp_path, "train.py")
    (tmp_path / ".elasticctlignore").mkdir()
    assert paths(tmp_path) == [".elasticctlignore", "train.py"]


BusyFile = Callable[[Callable[[Path, int], object]], None]


@pytest.fixture
def busy_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> BusyFile:
    """Does something to `log.txt` each time it is read."""
    write(tmp_path, "log.txt", text="x" * 1000)

    def disturb(work: Callable[[Path, int], object]) -> None:
        fstat, looks = os.fstat, itertools.count()

        def touched(descriptor: int) -> os.stat_result:
            work(tmp_path / "log.txt", next(looks))
            return fstat(descriptor)

        monkeypatch.setattr("elasticctl.operations.workspace.collect_files.os.fstat", touched)

    return disturb


@pytest.mark.parametrize("size", [0, 500])
def test_a_file_that_keeps_changing_is_refused(busy_file: BusyFile, tmp_path: Path, size: int) -> None:
    busy_file(lambda path, look: path.write_text(str(look % 10) * (size or 1000 - look)))
    with pytest.raises(UsageError, match=r"log.txt changed while it was read: submit again. FIX: leave it out"):
        collect_files(tmp_path, LIMIT)


def test_a_log_that_grows_goes_along_as_it_was(busy_file: BusyFile, tmp_path: Path) -> None:
    def append(path: Path, _: int) -> None:
        with path.open("a") as file:
            file.write("more\n")

    busy_file(append)
    (file,) = collect_files(tmp_path, LIMIT).listing.files
    content = b"".join(pieces_of(tmp_path, file))
    assert len(content) == file.size_bytes < (tmp_path / "log.txt").stat().st_size
    assert (tmp_path / "log.txt").read_bytes().startswith(content)


def test_the_commands_own_output_stays_behind(tmp_path: Path) -> None:
    write(tmp_path, "train.py")
    program = (
        "import sys; from pathlib import Path; from elasticctl.operations.workspace.collect_files import collect_files;"
        "print([file.path for file in collect_files(Path(sys.argv[1]), None).listing.files])"
    )
    with (tmp_path / "train.log").open("w") as log:
        subprocess.run([sys.executable, "-c", program, str(tmp_path)], stdout=log, check=True)
    assert (tmp_path / "train.log").read_text() == "['train.py']\n"


def test_a_file_that_has_changed_since_is_not_sent(tmp_path: Path) -> None:
    write(tmp_path, "train.py")
    (file,) = collect_files(tmp_path, LIMIT).listing.files
    assert list(pieces_of(tmp_path, file)) == [b"x\n"]
    write(tmp_path, "train.py", text="y\n")
    with pytest.raises(UsageError, match="changed while it was read"):
        list(pieces_of(tmp_path, file))
    (tmp_path / "train.py").unlink()
    (tmp_path / "train.py").symlink_to("/etc/passwd")
    with pytest.raises(UsageError, match="cannot read"):
        list(pieces_of(tmp_path, file))


def test_a_file_that_becomes_a_pipe_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "train.py")
    with pytest.raises(UsageError):
        list(pieces_of(tmp_path, File("train.py", 1, "0" * 64)))
