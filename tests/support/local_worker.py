"""A process as the shim of a local worker would have started it: all that entering one needs."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from elasticctl.cluster.base import Manifest
from elasticctl.cluster.local.paths import LocalPaths
from elasticctl_protocol import variables

UID = "4a1f"


@contextmanager
def local_worker(paths: LocalPaths, folder: Path, **environ: str) -> Iterator[Manifest]:
    """The pod of a worker that runs in `folder`, until the block ends."""
    folder.mkdir(exist_ok=True)
    paths.pod_dir(UID).mkdir(parents=True)
    inherited = {"PATH": os.environ["PATH"], variables.POD_UID: UID}
    with subprocess.Popen(["sleep", "1000"], env={**inherited, **environ}, cwd=folder) as process:
        try:
            # The shim writes into space that it has reserved.
            report = json.dumps({"pid": process.pid, "startedAt": 0.0}) + "  "
            (paths.pod_dir(UID) / "started.json").write_text(report)
            yield {"metadata": {"name": "shell-worker-0", "namespace": "default", "uid": UID}}
        finally:
            process.kill()
