"""train.py, in one worker of which memory is filled once a file in its storage says so.

    python tests/on_cluster/hungry.py FILE [arguments of train.py]

FILE holds the worker's name; it is removed before the memory is filled, so that the next worker of that name trains.
"""

from __future__ import annotations

import os
import runpy
import sys
import threading
import time
from pathlib import Path

BLOCK_BYTES = 64 << 20


def eat_when_signaled(file: Path) -> None:
    """Wait for the file, and fill all the memory there is."""
    while not (file.exists() and file.read_text() == os.environ["ELASTICCTL_WORKER"]):
        time.sleep(0.1)
    file.unlink()
    eaten = []
    while True:
        eaten.append(bytearray(b"\1" * BLOCK_BYTES))


if __name__ == "__main__":
    signal, *rest = sys.argv[1:]
    threading.Thread(target=eat_when_signaled, args=(Path(signal),), daemon=True).start()
    script = str(Path(__file__).with_name("train.py"))
    sys.argv = [script, *rest]
    runpy.run_path(script, run_name="__main__")
