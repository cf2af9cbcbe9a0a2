"""`submit --setup COMMAND`: a command that a worker runs before its ranks, once per machine.

The command runs in the workspace's copy, in a virtual environment that sees all packages of the launcher's own
environment: `pip install -r requirements.txt` adds what is missing, and changes nothing for other jobs. The environment
is kept, and identified by the command, the content of the files that it names, and the interpreter. Workers that start
together wait for the one that creates it. A command that installs a folder (`pip install .`) is run by each worker,
because it is unknown what the folder depends on.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import suppress
from pathlib import Path

from elasticctl_protocol import variables
from elasticctl_store.errors import TrainError

KEPT_S = 30 * 86_400.0
"""An environment that has not been used for this long is deleted when another one is created."""
LEFT_BEHIND_S = 5.0
"""How long a process that a command has started may outlive it before the log names it."""
DONE = "elasticctl-setup-done"
"""The file that marks an environment as complete."""
_MAX_FILE_BYTES = 1 << 24
_PIP = """#!/bin/sh
if "{python}" -c "import pip" 2>/dev/null || ! command -v uv >/dev/null; then exec "{python}" -m pip "$@"; fi
exec uv pip "$@"
"""


class SetUp:
    """The environment for `$ELASTICCTL_SETUP`, in use until `close`.

    It is deleted then unless it is `kept`. Raises OSError if its folder cannot be created.
    """

    def __init__(self, root: Path, key: str, *, kept: bool = True) -> None:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.folder, self._kept = root / key, kept
        self._lock = os.open(root / f"{key}.lock", os.O_RDWR | os.O_CREAT, 0o600)

    def create(self, line: str, cwd: Path, environ: MutableMapping[str, str], say: Callable[[str], None]) -> None:
        """Create the environment unless it exists, and activate it in `environ`.

        Waits while another worker on this machine creates it. Raises TrainError if the command fails.
        """
        fcntl.flock(self._lock, fcntl.LOCK_EX)  # another worker on this machine may be creating it
        done, began = self.folder / DONE, time.monotonic()
        try:
            if done.exists():
                say(f"setup: {line}: already done on this machine")
            else:
                delete_unused(self.folder.parent)
                shutil.rmtree(self.folder, ignore_errors=True)
                say(f"setup: {line}")
                _create_environment(self.folder)
        except OSError as e:
            raise TrainError(f"setup: cannot create an environment in {self.folder}: {e.strerror or e}") from e
        environ["VIRTUAL_ENV"] = str(self.folder)
        environ["PATH"] = os.pathsep.join((str(self.folder / "bin"), environ.get("PATH", os.defpath)))
        if not done.exists():
            try:
                _run(line, cwd, environ, say)
            except BaseException:
                shutil.rmtree(self.folder, ignore_errors=True)
                raise
            done.touch()
            say(f"setup: took {time.monotonic() - began:.0f} s")
        os.utime(done)
        fcntl.flock(self._lock, fcntl.LOCK_SH)

    def translate(self, command: Sequence[str]) -> list[str]:
        """Return the command with this environment's interpreter instead of the launcher's."""
        if command[0] in ("python", "python3", sys.executable):
            return [str(self.folder / "bin/python"), *command[1:]]
        return list(command)

    def close(self) -> None:
        """Release the environment, and delete it unless it is kept."""
        os.close(self._lock)
        if not self._kept:
            shutil.rmtree(self.folder.parent, ignore_errors=True)


def set_up(environ: MutableMapping[str, str], cwd: Path, say: Callable[[str], None]) -> SetUp | None:
    """Run the command of `$ELASTICCTL_SETUP` in `cwd`; return None if there is none. Raises TrainError if it fails.

    `say` receives each line of its output. `environ` is changed to use the environment.
    """
    line = environ.get(variables.SETUP, "").strip()
    if not line:
        return None
    try:
        key = _key(line, cwd)
        root = cache_folder(environ) if key else Path(tempfile.mkdtemp(prefix="elasticctl-setup-"))
        made = SetUp(root, key or "environment", kept=bool(key))
    except OSError as e:
        raise TrainError(
            f"setup: no folder for environments: {e.filename}: {e.strerror}. FIX: set {variables.SETUP_CACHE}"
        ) from e
    try:
        made.create(line, cwd, environ, say)
    except BaseException:
        made.close()
        raise
    return made


def cache_folder(environ: MutableMapping[str, str]) -> Path:
    """Return the folder of this machine's environments."""
    base = environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(environ.get(variables.SETUP_CACHE) or Path(base, "elasticctl", "setup"))


def delete_unused(root: Path) -> None:
    """Delete environments that are not in use and have not been used for `KEPT_S` seconds."""
    for lock in root.glob("*.lock"):
        folder = lock.with_suffix("")
        with suppress(OSError):  # in use, or deleted by another worker
            if not folder.exists() or time.time() - _used_at(folder) < KEPT_S:
                continue
            descriptor = os.open(lock, os.O_RDWR)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder)
            finally:
                os.close(descriptor)


def _used_at(folder: Path) -> float:
    """When an environment was last used; 0 if it is incomplete, because its worker was killed while it created it."""
    try:
        return (folder / DONE).stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _key(line: str, cwd: Path) -> str:
    """A digest of everything the result depends on, as far as it is known; empty if it is not."""
    digest = hashlib.sha256("\0".join((line, sys.prefix, sys.version)).encode("utf-8", "surrogateescape"))
    try:
        words = shlex.split(line)
    except ValueError:
        return ""
    for word in words[1:]:
        path = cwd / word.partition("[")[0].rpartition("=")[2]
        with suppress(OSError, ValueError):
            if path.is_dir() or (path.is_file() and path.stat().st_size > _MAX_FILE_BYTES):
                return ""
            if path.is_file():
                digest.update(path.read_bytes())
    return digest.hexdigest()[:32]


def _create_environment(folder: Path) -> None:
    """Create a virtual environment that sees this interpreter's packages, with a pip that installs into it."""
    import venv

    venv.EnvBuilder(symlinks=True, with_pip=False).create(folder)
    packages = next(folder.glob("lib/python*/site-packages"))
    parents = [path for path in sys.path if path.rstrip("/").endswith(("site-packages", "dist-packages"))]
    lines = [f"import site; site.addsitedir({path!r})" for path in parents]
    (packages / "elasticctl-parent.pth").write_text("\n".join(lines) + "\n")
    for name in ("pip", "pip3"):
        pip = folder / "bin" / name
        pip.write_text(_PIP.format(python=folder / "bin/python"))
        pip.chmod(0o755)


def _run(line: str, cwd: Path, environ: MutableMapping[str, str], say: Callable[[str], None]) -> None:
    """Run a command, and wait for it and for all processes that it has started and that still hold its output."""
    last = ""
    with subprocess.Popen(
        ["/bin/sh", "-c", line],
        cwd=cwd,
        env=dict(environ),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    ) as process:
        threading.Thread(target=_name_left_behind, args=(process, say), name="setup", daemon=True).start()
        try:
            for raw in process.stdout or ():
                text = raw.decode("utf-8", "replace").rstrip()
                last = text or last
                say(f"setup: {text}")
            code = process.wait()
        except BaseException:  # SIGTERM may arrive at any time
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            raise
    if code:
        raise TrainError(f"setup failed with exit code {code}: {line}: {last[:300]}")


def _name_left_behind(process: subprocess.Popen[bytes], say: Callable[[str], None]) -> None:
    """Name the processes that still run after the command itself has ended: it may have started a server."""
    process.wait()
    time.sleep(LEFT_BEHIND_S)
    left = sorted(_names_in_session(process.pid))
    if left:
        say(
            f"setup: the command has ended, but processes that it started still run: waiting for {', '.join(left)}."
            " FIX: start servers from the script, or wait in the command for what they are needed for and end them"
        )


def _names_in_session(session: int) -> Iterator[str]:
    """The names of the programs in a session, as far as /proc shows them."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, ValueError, IndexError):
            name, _, rest = stat.read_text(errors="replace").partition("(")[2].rpartition(")")
            state, _, _, its_session = rest.split()[:4]
            if int(its_session) == session and state != "Z":
                yield name
