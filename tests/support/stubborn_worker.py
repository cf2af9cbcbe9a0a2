"""A worker that leaves processes behind: in sessions of their own, deaf to SIGTERM, one even without its environment.

`python stubborn_worker.py FOLDER [EXIT_CODE]`: each stray leaves a file named after its pid in FOLDER; then the worker
exits, or goes on for ever when no exit code is given.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

STRAYS = 2


def leave_stray(folder: Path, environment: dict[str, str]) -> None:
    if os.fork():
        return
    os.setsid()
    if os.fork():
        os._exit(0)  # an orphan from here on
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    (folder / str(os.getpid())).touch()
    os.execve("/bin/sleep", ["sleep", "1000"], environment)


def main() -> None:
    folder = Path(sys.argv[1])
    leave_stray(folder, dict(os.environ))
    leave_stray(folder, {})
    while len(list(folder.iterdir())) < STRAYS:
        time.sleep(0.01)
    if len(sys.argv) > 2:
        sys.exit(int(sys.argv[2]))
    while True:
        time.sleep(1)


if __name__ == "__main__":
    main()
