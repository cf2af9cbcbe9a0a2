"""What a rank starts as: ask the kernel to kill it when the launcher dies, then become the user's command.

Run as a file with `python -I -S`, so it imports nothing but the standard library and starts in a few milliseconds.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    """argv: the launcher's pid, then the command to become; exits 127 when it cannot be started."""
    launcher_pid, *command = sys.argv[1:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(launcher_pid):
        sys.exit(1)  # the launcher died before the kernel was asked
    try:
        os.execvp(command[0], command)  # noqa: S606 (the user's own command)
    except OSError as error:
        sys.stderr.write(f"cannot start {command[0]!r}: {error.strerror}\n")
        sys.exit(127)


if __name__ == "__main__":
    main()
