"""The first code of a rank: asks the kernel to kill it when the launcher dies, then becomes the user's command.

It has two modes, both run as a file, so that none of our packages needs to be importable:

    bootstrap.py LAUNCHER_PID exec COMMAND...      become COMMAND (run with -I -S: a few milliseconds)
    bootstrap.py LAUNCHER_PID spare FD MODULE...   import the modules, write a byte to FD, wait for one line
                                                   of JSON on stdin ({"argv": [...], "env": {...}}), run that script

A spare does in advance what takes long. Until it is needed, it holds no GPU context, opens no port and runs no user
code. Once it has its assignment, `__main__`, `sys.argv` and `sys.path` are as under `python SCRIPT`.
"""

import atexit
import contextlib
import ctypes
import errno
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import sys
import threading
import time
import types
from collections.abc import Iterator

PR_SET_PDEATHSIG = 1
PR_SET_PTRACER = 0x59616D61
"""Yama may forbid processes to read each other. This allows one process, with its descendants, to read this one: the
launcher reads the stacks of ranks that stand still. The setting outlives exec. The call fails, without harm, where
there is no Yama.
"""
RELEASE_S = 0.02
"""How long the interpreter of a former spare waits before it ends. gloo's threads need the interpreter to release the
tensors that they have moved. If it is shutting down by then, the process aborts although the script has finished
(https://github.com/pytorch/pytorch/pull/179291).
"""

COLLECTIVES_VARIABLE = "ELASTICCTL_COLLECTIVES"
"""The folder in which a rank reports its collectives, on a socket, and the signals that it has handled, in a pipe. Both
are named after its local rank.
"""
SHORT_OF = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
"""The errors of `accept` for lack of something that the script may give back: file descriptors, memory."""
ACCEPT_AGAIN_S = 0.5
DUMPS = ("_dump_nccl_trace_json", "_dump_fr_trace_json")
"""The functions that read torch's flight recorders: that of NCCL, and that of gloo."""


def main() -> None:
    """Run the mode that `sys.argv` names, as described above. Exits with 127 if a command cannot be started."""
    launcher_pid, mode, *rest = sys.argv[1:]
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        libc.prctl(PR_SET_PTRACER, int(launcher_pid), 0, 0, 0)
    if os.getppid() != int(launcher_pid):
        sys.exit(1)  # the launcher died before the prctl call
    if mode == "exec":
        exec_command(rest)
    else:
        wait_and_run(int(rest[0]), rest[1:])


def exec_command(command: list[str]) -> None:
    """Replace this process with `command`."""
    try:
        os.execvp(command[0], command)  # noqa: S606 (the user's own command)
    except OSError as error:
        sys.stderr.write(f"cannot start {command[0]!r}: {error.strerror}\n")
        sys.exit(127)


def wait_and_run(ready_fd: int, modules: list[str]) -> None:
    """Import those of `modules` that are installed, wait for the assignment, and run it."""
    if not is_path_safe():
        sys.path.pop(0)  # this file's folder, which the script must not see
    with imports_that_stay():
        for module in modules:
            with contextlib.suppress(ImportError):  # the script's own import will report it
                importlib.import_module(module)
    with contextlib.suppress(OSError):  # the launcher no longer waits for this
        os.write(ready_fd, b".")
    os.close(ready_fd)
    line = sys.stdin.readline()
    if not line:
        sys.exit(0)  # the launcher does not need this spare
    assignment = json.loads(line)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.environ.clear()
    os.environ.update(assignment["env"])
    atexit.register(time.sleep, RELEASE_S)  # registered first, called last
    if COLLECTIVES_VARIABLE in os.environ:
        folder, local_rank = os.environ[COLLECTIVES_VARIABLE], os.environ.get("LOCAL_RANK", "")
        report_signals(os.path.join(folder, f"signals.{local_rank}"))
        report_collectives(os.path.join(folder, f"c10d.{local_rank}"))
    run_script(assignment["argv"])


@contextlib.contextmanager
def imports_that_stay() -> Iterator[None]:
    """Exempt everything that is imported here from garbage collection, which for torch takes half a second at exit."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def report_signals(path: str) -> None:
    """Make Python write the number of each signal that it handles into a pipe, regardless of the script's handlers.

    This ends if the script, or asyncio, sets another descriptor. It does nothing if no launcher reads the pipe.
    """
    try:
        pipe = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
    except OSError:
        return  # no launcher reads the pipe

    def restore_wakeup() -> None:
        other = signal.set_wakeup_fd(-1)
        if other not in (-1, pipe):
            signal.set_wakeup_fd(other)

    signal.set_wakeup_fd(pipe, warn_on_full_buffer=False)
    os.register_at_fork(after_in_child=restore_wakeup)  # signals of a DataLoader's worker are not the rank's


def report_collectives(path: str) -> None:
    """Start a thread that reports the pending collectives to every process that connects to `path`.

    The thread sleeps until a process connects. Without a socket or a thread, a hang is reported
    without numbers.
    """
    listening = socket.socket(socket.AF_UNIX)
    try:
        with contextlib.suppress(FileNotFoundError):  # left by the previous rank
            os.unlink(path)
        listening.bind(path)
        listening.listen()
    except OSError:
        listening.close()
        return
    answering = threading.Thread(target=answer_questions, args=(listening,), name="elasticctl-collectives", daemon=True)
    # The thread inherits this: a signal would otherwise end a script that blocks it in all its threads, to wait for it.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        answering.start()
    except RuntimeError:  # the container's limit of threads
        listening.close()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def answer_questions(listening: socket.socket) -> None:
    """Answer each connection with one line of JSON for each flight recorder of torch, until the socket is closed."""
    while True:
        try:
            connected, _ = listening.accept()
        except ConnectionAbortedError:
            continue
        except OSError as error:
            if error.errno not in SHORT_OF:
                return  # the script has closed all descriptors that it does not know
            time.sleep(ACCEPT_AGAIN_S)
            continue
        c10d = sys.modules.get("torch._C._distributed_c10d")
        with connected, contextlib.suppress(Exception):  # the caller gets no answer then
            for name in DUMPS:
                if hasattr(c10d, name):
                    dump = getattr(c10d, name)(True, True)  # include collectives; only pending ones
                    connected.sendall((dump if isinstance(dump, bytes) else dump.encode()) + b"\n")


def run_script(argv: list[str]) -> None:
    """Run `argv` as `python ARGV...` does: a script or `-m MODULE`, with its arguments."""
    if argv[0] == "-m":
        sys.argv = argv[1:]
        prepend_to_path(os.getcwd())
        with errors_without_us():
            runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
        return
    path = os.path.abspath(argv[0])
    sys.argv = argv
    prepend_to_path(os.path.dirname(path))
    try:
        with open(path, "rb") as file:
            source = file.read()
    except OSError as error:
        sys.stderr.write(f"cannot open {argv[0]!r}: {error.strerror}\n")
        sys.exit(2)
    module = types.ModuleType("__main__")
    module.__file__ = path
    module.__builtins__ = __builtins__  # type: ignore[attr-defined]
    sys.modules["__main__"] = module  # DataLoader workers look up the script's classes there
    with errors_without_us():
        exec(compile(source, path, "exec"), module.__dict__)  # noqa: S102 (the user's own script)


@contextlib.contextmanager
def errors_without_us() -> Iterator[None]:
    """Handle an exception as Python does; its traceback begins with the script, without this module's frames."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 (see above)
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename in (__file__, contextlib.__file__):
            trace = trace.tb_next
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        sys.exit(1)


def prepend_to_path(folder: str) -> None:
    """Put `folder` first in `sys.path`, as the interpreter does for a script, unless it was started with -P or -I."""
    if not is_path_safe():
        sys.path.insert(0, folder)


def is_path_safe() -> bool:
    """True if the interpreter was started with -P or -I and adds no folder to `sys.path`. Python 3.10 has no -P."""
    return bool(getattr(sys.flags, "safe_path", sys.flags.isolated))


if __name__ == "__main__":
    main()
