"""The folder that goes along, and a secret by its name, on a cluster: no image holds the script."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

from elasticctl.api.yamltext import dump_yaml
from tests.on_cluster.commands import elasticctl, kubectl
from tests.on_cluster.replicas import Replicas
from tests.on_cluster.trainer import HOST_FOLDER, IMAGE
from tests.support.jobs import LIGHT

NAME = "luggage"
SCRIPT = """\
import os
import sys
from lib import version

line = f"{version.NUMBER} {os.environ['HF_TOKEN'] == 'planted-in-a-secret'} {os.getcwd() == os.path.dirname(__file__)}"
with open(f"{sys.argv[1]}/rank-{os.environ['RANK']}", "w") as file:
    file.write(line)
"""
POD = "spec.replicaSpecs.Worker.template.spec"


@pytest.fixture
def state() -> Path:
    """A folder that this machine and all nodes have at the same path."""
    folder = HOST_FOLDER / NAME
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    folder.chmod(0o777)  # workers run as any user
    return folder


@pytest.mark.usefixtures("cli_home")
def test_the_folder_and_a_secret_reach_every_worker(replicas: Replicas, state: Path, tmp_path: Path) -> None:
    project = tmp_path / "project"
    (project / "lib").mkdir(parents=True)
    (project / "train.py").write_text(SCRIPT)
    (project / "lib/version.py").write_text("NUMBER = 1\n")
    kubectl("delete", "secret", "hub", "--ignore-not-found")
    kubectl("create", "secret", "generic", "hub", "--from-literal=HF_TOKEN=planted-in-a-secret")
    binaries = Path(sys.executable).parent  # the nodes have this environment at the same path
    volume = {"name": "state", "hostPath": {"path": str(state), "type": "Directory"}}
    memory = {"name": "shared-memory", "emptyDir": {"medium": "Memory"}}
    mounts = [{"name": "shared-memory", "mountPath": "/dev/shm"}, {"name": "state", "mountPath": str(state)}]
    fields = {
        f"{POD}.volumes": [memory, volume],
        f"{POD}.containers[0].volumeMounts": mounts,
        f"{POD}.containers[0].command": [str(binaries / "elasticctl-launch"), *LIGHT, "--nproc-per-node", "1", "--"],
    }
    settings = [word for path, value in fields.items() for word in ("--set", f"{path}={dump_yaml(value).strip()}")]
    path = f"PATH={binaries}{os.pathsep}/usr/local/bin:/usr/bin:/bin"
    words = ("--name", NAME, "--workers", "2", "--image", IMAGE, "--storage", state.as_uri(), "--secret", "hub")
    submit = ("submit", str(project / "train.py"), *words, "--env", path, *settings, "-d", "--", str(state))
    try:
        first = elasticctl(*submit)
        assert first.code == 0, first
        assert "2 of them sent" in first.err
        ended = elasticctl("wait", NAME, "--timeout", "8m")
        assert ended.code == 0, (ended, elasticctl("logs", NAME), elasticctl("describe", NAME))
        found = {file.name: file.read_text() for file in state.glob("rank-*")}
        assert found == {"rank-0": "1 True True", "rank-1": "1 True True"}
        assert "planted" not in elasticctl("describe", NAME, "-o", "json").out
        (project / "lib/version.py").write_text("NUMBER = 2\n")
        (state / "rank-0").unlink()
        again = elasticctl("rerun", NAME, "--same-code", "--wait")
        assert again.code == 0, again
        assert (state / "rank-0").read_text() == "1 True True"
    finally:
        for job in (NAME, f"{NAME}-2"):
            elasticctl("delete", job, "-y")
        kubectl("delete", "secret", "hub", "--ignore-not-found")
