"""No command line and no manifest file gives a traceback."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

from hypothesis import strategies as st

from elasticctl.cli.main import main
from tests.support.jobs import GOOD

# fmt: off
FLAGS = [
    "--gpus", "--gpu-type", "--gpus-per-node", "--workers", "--min-gpus", "--max-gpus", "--min-workers",
    "--max-workers", "--name", "--image", "--env", "--storage", "--spot", "--on-demand", "--backoff-limit",
    "--deadline", "--ttl", "--hang-timeout",
    "--restart-policy", "--template", "-f", "--set", "-d", "--wait", "--dry-run",
    "--dry-run=client", "--context", "-n", "-o", "-h", "--", "-", "--worker", "--tail", "--since", "--to", "--add",
    "--from", "--provider", "-y", "-A",
]
VALUES = [
    "4", "0", "-1", "99999999999999999999", "t4", "h100", "train.py", "job.yaml", "bad.yaml", "A=B", "=", "90s", "5y",
    "x", "spec.backoffLimit=1", "spec.a[0]=[", "a.b=c", "s3://b/p", "file:///", "😀", "json", "default", "local", "..",
    "/", "~", "", " ", "\n", "\x1b[31m", "\udcff",
]
# fmt: on
# Verbs that read a cluster are left out here: they would start one. test_local_cluster.py runs them. `list` stands for
# them with an option that it has not, since a wrong value could be made good by a later one.
HEADS = [
    ["submit", "--dry-run"],
    ["submit", "--dry-run", "train.py"],
    ["submit", "-f", "job.yaml", "--dry-run"],
    ["config", "set-context"],
    ["config", "get-contexts"],
    ["config", "use-context"],
    ["config", "delete-context"],
    ["config", "view"],
    ["template", "list"],
    ["template", "show"],
    ["template", "new"],
    ["completion"],
    ["version"],
    ["config"],
    [],
    ["list", "--wath"],
    ["nothing"],
]  # fmt: skip
WORDS = st.lists(st.sampled_from(FLAGS) | st.sampled_from(VALUES) | st.text(max_size=6), max_size=6)


COMMAND_LINES = st.tuples(st.sampled_from(HEADS), WORDS)
LINES = GOOD.splitlines()
MANGLED = st.lists(
    st.tuples(
        st.integers(0, len(LINES) - 1),
        st.sampled_from(["", "  ", "- ", "x: ", "1", "[", "&a ", "*a", "~", "\t", "a: b"]),
    ),
    min_size=1,
    max_size=3,
)
MANIFEST_FILES = st.tuples(MANGLED, st.binary(max_size=4))


@contextlib.contextmanager
def _typing_in(folder: Path) -> Iterator[None]:
    """A folder to type in, with a home in it."""
    environ = {"ELASTICCTL_HOME": f"{folder}/home", "CUDA_VISIBLE_DEVICES": ""}
    with contextlib.chdir(folder), mock.patch.dict(os.environ, environ):
        if not Path("train.py").exists():
            Path("train.py").touch()
            Path("job.yaml").write_text(GOOD)
            Path("bad.yaml").write_text("a: [")
        yield


def _outcome(args: list[str]) -> tuple[int, str]:
    out, err = io.StringIO(), io.StringIO()
    nothing = mock.patch("sys.stdin", io.TextIOWrapper(io.BytesIO()))
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), nothing:
        code = main(args)
    return code, err.getvalue()


def _check(code: int, err: str) -> None:
    assert "Traceback" not in err
    assert "bug in elasticctl" not in err
    errors = [line for line in err.splitlines() if line.startswith("error: ")]
    assert len(errors) == (code != 0)
    assert code in (0, 1, 2, 3)


def check_command_line(folder: Path, typed: tuple[list[str], list[str]]) -> None:
    """An exit code and one line that says what is wrong; nothing is started."""
    head, words = typed
    with _typing_in(folder):
        _check(*_outcome([*head, *words]))
    assert not (folder / "home" / "local").exists()


def check_manifest_file(folder: Path, mangled: tuple[list[tuple[int, str]], bytes]) -> None:
    """The same of `submit -f`."""
    changes, tail = mangled
    lines = list(LINES)
    for index, text in changes:
        lines[index] = text + lines[index][len(text) // 2 :]
    with _typing_in(folder):
        Path("fuzz.yaml").write_bytes("\n".join(lines).encode() + tail)
        code, err = _outcome(["submit", "-f", "fuzz.yaml", "--dry-run"])
    _check(code, err)
    assert code in (0, 2)
