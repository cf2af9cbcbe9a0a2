"""The events: every way in which notice is given, and every way in which a worker is lost without notice."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from elasticctl.api.codec import Manifest
from elasticctl.api.errors import ElasticctlError
from elasticctl.kubeapi.connection import Connection, resource_path
from tests.on_cluster.interruptions.machines import Machine, number_inside, processes_of
from tests.on_cluster.interruptions.metadata import Metadata
from tests.support.faults import train
from tests.support.faults.inject import NAMESPACE, Job

NOTICE_S = {"aws": 120.0, "gcp": 30.0}
"""The notice that each cloud gives; after it the machine is gone, with everything that is still on it."""
BACK_S = 2.0
SCRIPT = Path(train.__file__)
HANDLER = "aws-node-termination-handler/spot-itn:NoSchedule"
OFF = "node.kubernetes.io/out-of-service=nodeshutdown:NoExecute"
RECOMMENDATION = "rebalance recommendation"
"""Only AWS gives it."""
NOTICES = {
    "drained": 1,
    "NodeClaim deleted": 1,
    "NodeClaim drifted": 1,
    "taint of the termination handler": 1,
    "spot notice": 1,
    RECOMMENDATION: 1,
    "pod evicted": 1,
    "pod deleted with grace": 1,
    "SIGTERM, as a node that shuts down sends it": 1,
}
SILENT = {
    "pod deleted without grace": 2,
    "rank killed": 2,
    "launcher killed": 1,
    "machine killed": 1,
    "machine off, and out of service": 1,
    "machine frozen": 1,
    "machine cut off": 1,
}
"""How many of each kind there are in a deck of events."""


@dataclass(slots=True)
class Fault:
    """An event that was caused, and what is left to do for it.

    `gone`: the workers (by uid) that must have been replaced. `deadline`: when their machine ends.
    """

    target: str
    at: float
    gone: frozenset[str] = frozenset()
    machine: Machine | None = None
    deadline: float | None = None
    afterwards: list[Callable[[], None]] = field(default_factory=list)

    def keep_time(self) -> None:
        """End the machine when its time has come. Once it is gone, repair what was broken about it: another machine
        may get its name and its network."""
        if self.deadline is not None and self.machine is not None and time.time() > self.deadline:
            self.machine.kill()
            self.deadline = None
        if self.afterwards and self.machine is not None and self.machine.node() is None:
            self._repair()

    def clear_up(self) -> None:
        """Repair what is broken, once the group is complete; machines that were to end are gone."""
        self._repair()
        if self.machine is not None:
            self.machine.release()

    def _repair(self) -> None:
        while self.afterwards:
            self.afterwards.pop(0)()


class FaultInjector:
    """Causes events to a job on machines of Karpenter."""

    def __init__(
        self, api: Connection, job: Job, metadata: Metadata, dice: random.Random, pods: str, notice_s: float
    ) -> None:
        self._api, self._job, self._metadata, self._dice, self._label = api, job, metadata, dice, pods
        self._notice_s = notice_s
        self._kinds: Mapping[str, Callable[[Manifest], Fault | None]] = {
            "drained": lambda pod: self._machine(pod, lambda m, s: m.drain(), notice_s),
            "NodeClaim deleted": lambda pod: self._machine(pod, lambda m, s: m.release()),
            "NodeClaim drifted": lambda pod: self._machine(pod, lambda m, s: m.drift()),
            "taint of the termination handler": lambda pod: self._machine(pod, lambda m, s: m.taint(HANDLER), notice_s),
            "spot notice": self._announce,
            RECOMMENDATION: self._recommend,
            "pod evicted": self._evict,
            "pod deleted with grace": lambda pod: self._delete(pod, {}),
            "pod deleted without grace": lambda pod: self._delete(pod, {"gracePeriodSeconds": 0}),
            "SIGTERM, as a node that shuts down sends it": lambda pod: self._signal_launcher(pod, signal.SIGTERM),
            "rank killed": self._kill_rank,
            "launcher killed": lambda pod: self._signal_launcher(pod, signal.SIGKILL),
            "machine killed": lambda pod: self._machine(pod, lambda m, s: m.kill()),
            "machine off, and out of service": lambda pod: self._machine(pod, self._put_out_of_service),
            "machine frozen": lambda pod: self._machine(pod, self._freeze),
            "machine cut off": lambda pod: self._machine(pod, self._cut_off),
        }

    def inject(self, kind: str) -> Fault | None:
        """Cause an event; return None if that was not possible just now."""
        pods = self.staying()
        return self._kinds[kind](self._dice.choice(pods)) if pods else None

    def staying(self) -> list[Manifest]:
        """Return the workers that run and are not about to leave, in order."""
        items = self._api.request("GET", resource_path("v1", NAMESPACE, "pods"), None, {"labelSelector": self._label})
        found = [
            pod
            for pod in items["items"]
            if "deletionTimestamp" not in pod["metadata"] and pod["status"].get("phase") == "Running"
        ]
        return sorted(found, key=lambda pod: str(pod["metadata"]["name"]))

    def _machine(
        self, pod: Manifest, how: Callable[[Machine, Fault], None], notice_s: float | None = None
    ) -> Fault | None:
        machine = Machine.of(self._api, pod["spec"]["nodeName"])
        if machine is None:
            return None
        at = time.time()
        fault = Fault(f"{_name(pod)} on {machine.name}", at, _uid(pod), machine)
        fault.deadline = None if notice_s is None else at + notice_s
        how(machine, fault)
        return fault

    def _put_out_of_service(self, machine: Machine, fault: Fault) -> None:
        machine.kill()
        machine.taint(OFF)

    def _freeze(self, machine: Machine, fault: Fault) -> None:
        fault.afterwards += [machine.thaw, lambda: time.sleep(BACK_S)]
        machine.freeze()

    def _cut_off(self, machine: Machine, fault: Fault) -> None:
        fault.afterwards += [machine.connect, lambda: time.sleep(BACK_S)]
        machine.cut_off()

    def _announce(self, pod: Manifest) -> Fault | None:
        ip, notice_s = pod["status"]["podIP"], self._notice_s
        fault = self._machine(pod, lambda m, s: self._metadata.announce(ip, s.at + notice_s), notice_s)
        if fault is not None:
            fault.afterwards.append(lambda: self._metadata.clear_notices(ip))
        return fault

    def _recommend(self, pod: Manifest) -> Fault | None:
        ip = pod["status"]["podIP"]
        fault = self._machine(pod, lambda m, s: self._metadata.recommend(ip, s.at))
        if fault is not None:
            fault.afterwards.append(lambda: self._metadata.clear_notices(ip))
        return fault

    def _evict(self, pod: Manifest) -> Fault | None:
        body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": _name(pod), "namespace": NAMESPACE}}
        at = time.time()
        try:
            self._api.request("POST", f"{_path(pod)}/eviction", body)
        except ElasticctlError:  # the disruption budget only permits it while the others are ready
            return None
        return Fault(_name(pod), at, _uid(pod))

    def _delete(self, pod: Manifest, options: Manifest) -> Fault | None:
        at = time.time()
        self._api.request("DELETE", _path(pod), options)
        return Fault(_name(pod), at, _uid(pod))

    def _kill_rank(self, pod: Manifest) -> Fault | None:
        began = [resume for resume in self._job.read().resumes if resume.worker == _name(pod)]
        numbers = {resume.pid for resume in began[-1:]}
        for process in processes_of(pod["metadata"]["uid"]):
            with suppress(psutil.Error):
                if number_inside(process) in numbers:
                    return _signal(process, signal.SIGKILL, f"rank of {_name(pod)}")
        return None

    def _signal_launcher(self, pod: Manifest, number: signal.Signals) -> Fault | None:
        for process in processes_of(pod["metadata"]["uid"]):
            if number_inside(process) == 1:
                return _signal(process, number, f"launcher of {_name(pod)}")
        return None


def _signal(process: psutil.Process, number: signal.Signals, target: str) -> Fault:
    at = time.time()
    process.send_signal(number)
    return Fault(target, at)


def _name(pod: Manifest) -> str:
    return str(pod["metadata"]["name"])


def _uid(pod: Manifest) -> frozenset[str]:
    return frozenset([pod["metadata"]["uid"]])


def _path(pod: Manifest) -> str:
    return resource_path("v1", NAMESPACE, "pods", _name(pod))
