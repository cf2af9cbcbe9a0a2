"""Where `cli.py` measures: a local cluster of its own, a small API server, or the cluster of $KUBECONFIG."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from benchmarks.commandline import installed_environment
from benchmarks.startup import elasticctl
from elasticctl.api.errors import NotFoundError
from elasticctl.cluster.base import Cluster, Manifest
from elasticctl.settings import contexts
from elasticctl.settings.contexts import Config, Context
from tests.support.jobs import shell_job
from tests.support.waiting import wait_until

TALKER = "talks"
_TALK = (
    "import time\n"
    "for n in range({lines}):\n"
    "    time.sleep(max(0.0, {at} + n * {every_s} - time.time()))\n"
    "    print('line', n, flush=True)\n"
)


@dataclass(frozen=True, slots=True)
class Talk:
    """How many workers print how many lines each, with how many seconds between two lines of a worker.

    `settle_s`: seconds that they get to start; then all of them begin together, and late ones catch up.
    """

    workers: int
    lines: int
    every_s: float
    settle_s: float


class Place(Protocol):
    """A cluster on which commands are run; `environ` is for elasticctl and kubectl."""

    name: str
    environ: Mapping[str, str]

    def fill(self, jobs: int) -> None:
        """Create that many jobs."""

    def talk(self, talk: Talk) -> None:
        """Create a job `talks` whose workers print soon."""


@dataclass(slots=True)
class OwnCluster:
    """A real cluster: the local one, or Kubernetes. Its jobs are suspended, so that they cost only space."""

    name: str
    environ: Mapping[str, str]
    cluster: Cluster
    image: str = ""
    python: str = sys.executable
    made: list[str] = field(default_factory=list)

    def fill(self, jobs: int) -> None:
        for number in range(len(self.made), jobs):
            self.made.append(f"job-{number:04}")
            self.cluster.create_job(self._job(self.made[-1], "true", 1, suspend=True))

    def talk(self, talk: Talk) -> None:
        program = _TALK.format(at=time.time() + talk.settle_s, lines=talk.lines, every_s=talk.every_s)
        script = f"exec {self.python} -c {shlex.quote(program)}"
        self.made.append(TALKER)
        self.cluster.create_job(self._job(TALKER, script, talk.workers, minReplicas=talk.workers))

    def clear(self) -> None:
        """Delete what was created."""
        for name in self.made:
            try:
                self.cluster.delete_job("default", name)
            except NotFoundError:
                continue

    def _job(self, name: str, script: str, workers: int, **spec: Any) -> Manifest:
        container = {"image": self.image} if self.image else {}
        return shell_job(name, script, workers, container=container, **spec)


@dataclass(slots=True)
class FakeCluster:
    """A small API server in a process of its own. It answers at once, so that only the command line's own time is
    left."""

    name: str
    environ: Mapping[str, str]
    server: subprocess.Popen[str]

    def fill(self, jobs: int) -> None:
        self._tell({"jobs": jobs})

    def talk(self, talk: Talk) -> None:
        self._tell({"talk": asdict(talk)})

    def _tell(self, command: Mapping[str, Any]) -> None:
        assert self.server.stdin is not None
        assert self.server.stdout is not None
        self.server.stdin.write(f"{json.dumps(command)}\n")
        self.server.stdin.flush()
        self.server.stdout.readline()


@contextmanager
def local() -> Iterator[OwnCluster]:
    """Start a local cluster of its own."""
    from elasticctl.cluster.local.client import LocalCluster
    from elasticctl.cluster.local.paths import local_paths

    with tempfile.TemporaryDirectory(prefix="ec-", dir="/tmp") as home:
        os.environ["ELASTICCTL_HOME"] = home
        environ = {**installed_environment(), "ELASTICCTL_CONTEXT": contexts.LOCAL}
        try:
            yield OwnCluster("local", environ, LocalCluster(local_paths()))
        finally:
            subprocess.run([elasticctl(), "local", "down"], env=environ, capture_output=True, check=False)


@contextmanager
def fake() -> Iterator[FakeCluster]:
    """Start a small API server."""
    with tempfile.TemporaryDirectory(prefix="ec-", dir="/tmp") as home:
        argv = [sys.executable, "-m", "benchmarks.commands.fake_cluster"]
        with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout is not None
            kubeconfig = _kubeconfig(Path(home), json.loads(server.stdout.readline()))
            yield FakeCluster("fake API server", _kube_environ(Path(home), kubeconfig), server)
            assert server.stdin is not None
            server.stdin.close()


@contextmanager
def kube(image: str, python: str) -> Iterator[OwnCluster]:
    """Use the cluster of $KUBECONFIG, with the controller in it."""
    from elasticctl.cluster.kube.client import KubeCluster
    from elasticctl.kubeapi.connection import connect

    with tempfile.TemporaryDirectory(prefix="ec-", dir="/tmp") as home:
        environ = _kube_environ(Path(home), os.environ["KUBECONFIG"])
        place = OwnCluster("Kubernetes", environ, KubeCluster(connect()), image, python)
        try:
            yield place
        finally:
            place.clear()
            wait_until(lambda: not place.cluster.list_jobs("default"), 120, every_s=0.5)


def kubectl(*words: str) -> list[str]:
    """Return the argv of kubectl; [] if it is not installed."""
    found = shutil.which("kubectl")
    return [found, *words] if found else []


def _kube_environ(home: Path, kubeconfig: str) -> Mapping[str, str]:
    context = Context("bench", contexts.KUBERNETES)
    contexts.save_config(Config("bench", (Context(contexts.LOCAL, contexts.LOCAL), context)), home / "config.yaml")
    # kubectl caches its discovery below HOME.
    return {**installed_environment(), "ELASTICCTL_HOME": str(home), "KUBECONFIG": kubeconfig, "HOME": str(home)}


def _kubeconfig(home: Path, cluster: Mapping[str, str]) -> str:
    content = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "bench",
        "contexts": [{"name": "bench", "context": {"cluster": "bench", "user": "me", "namespace": "default"}}],
        "clusters": [{"name": "bench", "cluster": dict(cluster)}],
        "users": [{"name": "me", "user": {"token": "none"}}],
    }
    (home / "kubeconfig").write_text(json.dumps(content))
    return str(home / "kubeconfig")
