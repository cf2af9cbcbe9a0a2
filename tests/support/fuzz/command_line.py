"""No command line and no manifest file gives a traceback."""

from __future__ import annotations

import contextlib
import io
import os
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


def _type(args: list[str]) -> int:
    """Type this in a folder that has a home in it; returns the exit code."""
    Path("train.py").touch()
    Path("job.yaml").write_text(GOOD)
    Path("bad.yaml").write_text("a: [")
    environ = {"ELASTICCTL_HOME": f"{Path.cwd()}/home", "CUDA_VISIBLE_DEVICES": ""}
    home, nothing = mock.patch.dict(os.environ, environ), mock.patch("sys.stdin", io.TextIOWrapper(io.BytesIO()))
    with home, nothing, contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as written:
        code = main(args)
    err = written.getvalue()
    assert "Traceback" not in err
    assert "bug in elasticctl" not in err
    errors = [line for line in err.splitlines() if line.startswith("error: ")]
    assert len(errors) == (code != 0)
    assert code in (0, 1, 2, 3)
    return code


def check_command_line(typed: tuple[list[str], list[str]]) -> None:
    """An exit code and one line that says what is wrong; nothing is started."""
    head, words = typed
    _type([*head, *words])
    assert not Path("home/local").exists()


def check_manifest_file(mangled: tuple[list[tuple[int, str]], bytes]) -> None:
    """The same of `submit -f`."""
    changes, tail = mangled
    lines = list(LINES)
    for index, text in changes:
        lines[index] = text + lines[index][len(text) // 2 :]
    Path("fuzz.yaml").write_bytes("\n".join(lines).encode() + tail)
    assert _type(["submit", "-f", "fuzz.yaml", "--dry-run"]) in (0, 2)
