"""The lab's machines: who runs on them, and what can happen to them."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from elasticctl.api.codec import Manifest
from elasticctl.api.errors import ElasticctlError, NotFoundError
from elasticctl.kubeapi.connection import MERGE_PATCH, Connection, resource_path
from elasticctl_protocol import variables
from tests.on_cluster.commands import LAB, LAB_HOME

CLAIMS = "/apis/karpenter.sh/v1/nodeclaims"
FREEZERS = Path("/sys/fs/cgroup/freezer/kubelab")
_CHAINS = (("FORWARD", "-s"), ("FORWARD", "-d"), ("INPUT", "-s"), ("OUTPUT", "-d"))


@dataclass(frozen=True, slots=True)
class Machine:
    """A node of Karpenter, as it was when it was chosen: another one may get its name later."""

    api: Connection
    name: str
    uid: str
    claim: str

    @classmethod
    def of(cls, api: Connection, name: str) -> Machine | None:
        """Return the machine of this name; None if it is not one of Karpenter's, or is being removed."""
        claims = api.request("GET", CLAIMS)["items"]
        claim = next((c for c in claims if c.get("status", {}).get("nodeName") == name), None)
        if claim is None or "deletionTimestamp" in claim["metadata"]:
            return None
        try:
            node = api.request("GET", resource_path("v1", None, "nodes", name))
        except NotFoundError:
            return None
        return cls(api, name, node["metadata"]["uid"], claim["metadata"]["name"])

    def node(self) -> Manifest | None:
        """Return its object; None if it is gone."""
        try:
            node: Manifest = self.api.request("GET", resource_path("v1", None, "nodes", self.name))
        except NotFoundError:
            return None
        return node if node["metadata"]["uid"] == self.uid else None

    def kill(self) -> None:
        """End the machine without notice, if it still exists."""
        if self.node() is not None:
            subprocess.run([LAB, "kill-node", self.name], check=True, capture_output=True, timeout=120)

    def drain(self) -> None:
        """Cordon it and evict its pods, for as long as that takes."""
        argv = ["kubectl", "drain", self.name, "--ignore-daemonsets", "--force", "--delete-emptydir-data"]
        subprocess.Popen([*argv, "--timeout=170s"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def taint(self, taint: str) -> None:
        """Add a taint to it, unless it is gone: KEY[=VALUE]:EFFECT."""
        if self.node() is not None:
            argv = ["kubectl", "taint", "node", self.name, taint, "--overwrite"]
            subprocess.run(argv, check=True, capture_output=True, timeout=60)

    def release(self) -> None:
        """Have Karpenter remove it, as it does by itself."""
        with suppress(ElasticctlError):
            self.api.request("DELETE", f"{CLAIMS}/{self.claim}")

    def drift(self) -> None:
        """Have Karpenter replace it, because it is not as its NodePool would make it now."""
        patch = {"metadata": {"annotations": {"karpenter.sh/nodepool-hash": "another"}}}
        with suppress(ElasticctlError):
            self.api.request("PATCH", f"{CLAIMS}/{self.claim}", patch, content_type=MERGE_PATCH)

    def freeze(self) -> None:
        """Freeze it with everything that runs on it."""
        self._kubelet(signal.SIGSTOP)
        (FREEZERS / self.name / "freezer.state").write_text("FROZEN")

    def thaw(self) -> None:
        """Let it continue, if it is still there."""
        with suppress(FileNotFoundError):
            (FREEZERS / self.name / "freezer.state").write_text("THAWED")
        self._kubelet(signal.SIGCONT)

    def cut_off(self) -> None:
        """Cut it off: everything on it keeps running, but only the storage can be reached."""
        self._kubelet(signal.SIGSTOP)
        self._rules("-I")

    def connect(self) -> None:
        """Reconnect it to the network."""
        self._rules("-D")
        self._kubelet(signal.SIGCONT)

    def _rules(self, verb: str) -> None:
        pods = f"10.88.{self.name.removeprefix('node-')}.0/24"  # a node's own slice of the lab's network
        for chain, direction in _CHAINS:
            argv = ["iptables", "-w", verb, chain, direction, pods, "-j", "DROP"]
            subprocess.run(argv, check=True, capture_output=True, timeout=60)

    def _kubelet(self, number: signal.Signals) -> None:
        """Signal the kubelet, unless Karpenter has taken the machine away meanwhile."""
        with suppress(FileNotFoundError, ProcessLookupError):
            os.kill(int((LAB_HOME / "pid" / f"kubelet-{self.name}").read_text().split()[0]), number)


def processes_of(pod_uid: str) -> Iterator[psutil.Process]:
    """Return the processes of a pod's worker."""
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get(variables.POD_UID) == pod_uid:
                yield process


def number_inside(process: psutil.Process) -> int:
    """Return the pid of a process in its own container; 0 if it is gone."""
    with suppress(OSError):
        for line in Path(f"/proc/{process.pid}/status").read_text().splitlines():
            if line.startswith("NSpid:"):
                return int(line.split()[-1])
    return 0
