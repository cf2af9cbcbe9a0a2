"""One job in a simulated cluster: the parts, and what can happen to them.

Properties are checked as things happen (`checks`); running a world raises the first error.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from elasticctl.api.codec import Manifest
from elasticctl.api.goal import PoolOrder
from elasticctl.api.spec import ElasticJob
from elasticctl.api.status import JobStatus
from tests.support.jobs import shell_job
from tests.support.virtual.checks import Ledger
from tests.support.virtual.clock import VirtualLoop, WallClock
from tests.support.virtual.cluster import Cluster, Pod
from tests.support.virtual.launcher import Launcher, Timing
from tests.support.virtual.network import Network, Weather
from tests.support.virtual.script import Fault, Figures, Script, Storage, Training
from tests.support.virtual.service import FOR_EVER_S, ControlPlane, without_threads

NAME = "job"
POLL_S = 20.0
LEASE_S = 10.0
AFTER_S = 60.0
"""How long an outage has an effect: a launcher whose answer was lost asks again after 40 s."""


@dataclass(frozen=True, slots=True)
class Setup:
    """A job and the cluster it is submitted to. `lazy`: polls are held instead of being renewed every 20 s.

    `elected`: the controller's process ends when it cannot renew its lease, as on Kubernetes. `pools` is `spec.pools`.
    """

    workers: int = 3
    minimum: int = 1
    maximum: int = 3
    backoff_limit: int = 3
    nodes: int = 3
    grace_s: float = 30.0
    lag_s: float = 0.05
    pod_start_s: float = 3.0
    lazy: bool = True
    elected: bool = False
    script: Script = Script()
    timing: Timing = Timing()
    pools: PoolOrder | None = None


@dataclass(eq=False)
class World:
    """A job, its cluster and its controller; begins with `start`."""

    setup: Setup
    seed: int
    loop: VirtualLoop = field(default_factory=VirtualLoop)
    launchers: dict[str, Launcher] = field(default_factory=dict)
    trainings: list[Training] = field(default_factory=list)
    storage: Storage = field(default_factory=Storage)
    figures: Figures = field(default_factory=Figures)

    def __post_init__(self) -> None:
        self.dice = random.Random(self.seed)
        self.script = self.setup.script
        self.clock = WallClock(self.loop)
        self.cluster = Cluster(self.loop, self.dice, self._launch)
        self.cluster.lag_s, self.cluster.start_s = self.setup.lag_s, self.setup.pod_start_s
        self.cluster.grace_s = self.setup.grace_s
        self.plane = ControlPlane(self.loop, self.cluster, self.clock, self._heard_at)
        self.network = Network(self.loop, self.dice, self.plane, renews=self.setup.lazy)
        self.cluster.subscribe(self.plane.enqueue)
        self.plane.on_start.append(self._reconnect)
        self.ledger = Ledger(self)
        self.cluster.on_write, self.cluster.on_delete = self.ledger.check_write, self.ledger.check_delete
        self.cluster.on_end = self.ledger.note_end
        self._outages: dict[str, float] = {}
        self._cut_until: dict[str, float] = {}
        self.key, self.job_uid = f"default/{NAME}", "uid-1"
        self._read: tuple[Manifest, ElasticJob] | None = None

    def run(self, until_s: float) -> None:
        """Let time pass until then."""
        with without_threads(self.loop, FOR_EVER_S if self.setup.lazy else POLL_S):
            self.loop.run_until(until_s)

    def start(self) -> None:
        """Start the controller and submit the job."""
        setup = self.setup
        for number in range(setup.nodes):
            self.cluster.add_node(f"node-{number}")
        self.nodes_made = setup.nodes
        with without_threads(self.loop, FOR_EVER_S if setup.lazy else POLL_S):
            self.plane.start([])
            manifest = shell_job(
                NAME,
                "true",
                setup.workers,
                minReplicas=setup.minimum,
                maxReplicas=setup.maximum,
                backoffLimit=setup.backoff_limit,
                policy={"backoffSeconds": 1.0, "backoffMaxSeconds": 60.0},
                **({} if setup.pools is None else {"pools": setup.pools.as_spec()}),
            )
            self.cluster.put_job(manifest, self.job_uid)

    def close(self) -> None:
        """End everything."""
        with without_threads(self.loop, POLL_S):
            self.plane.crash()
            self.loop.finish()

    @property
    def job(self) -> ElasticJob:
        """The job as it is stored; read again only after a write, which puts a manifest in the place of the former."""
        stored = self.cluster.jobs[self.key]
        if self._read is None or self._read[0] is not stored:
            self._read = stored, ElasticJob.from_manifest(stored)
        return self._read[1]

    @property
    def status(self) -> JobStatus:
        return self.job.status

    @property
    def now_training(self) -> Training | None:
        """The newest generation."""
        return self.trainings[-1] if self.trainings else None

    @property
    def is_disturbed(self) -> bool:
        """Whether something is cut off or away at this moment."""
        if self.loop.time() < max([*self._outages.values(), *self._cut_until.values()], default=-AFTER_S) + AFTER_S:
            return True
        return not self.plane.is_up or self.cluster.away or self.storage.away

    def training(self, generation: int, members: tuple[str, ...]) -> Training:
        """The generation of these members, which all of them ask for."""
        for known in reversed(self.trainings[-3:]):
            if known.generation == generation and known.members == members:
                return known
        begin = self.ledger.check_begin
        made = Training(
            self.loop, self.dice, self.script, self.storage, self.figures, generation, members, self._report, begin
        )
        self.trainings.append(made)
        return made

    # What happens

    def lose_node(self, name: str, known_s: float) -> None:
        """A machine dies; the cluster knows after `known_s`."""
        if name in self.cluster.nodes and self.cluster.nodes[name].up:
            self.ledger.note_fault()
            self.cluster.lose_node(name, known_s)

    def add_node(self, labels: Mapping[str, str] | None = None) -> str:
        """A machine comes."""
        self.nodes_made += 1
        name = f"node-{self.nodes_made - 1}"
        self.cluster.add_node(name, labels)
        return name

    def pod_on(self, name: str) -> Pod | None:
        """What runs there."""
        node = self.cluster.nodes.get(name)
        return None if node is None or not node.up else node.pod

    def crash_service(self, away_s: float) -> None:
        """The controller's process dies; another begins after `away_s`."""
        if self.plane.is_up:
            self.network.break_all()
            self.plane.crash()
            if self.script.bug is not None and self.script.bug.fault is Fault.HANGS:
                self.ledger.note_fault()  # a hang that is detected meanwhile is not counted
            self.loop.after(away_s, self._restart_service)

    def _restart_service(self) -> None:
        if self.cluster.away:  # a new process lists all jobs before it serves
            self.loop.after(1.0, self._restart_service)
        elif not self.plane.is_up:
            self.plane.start(list(self.cluster.jobs))
            self._outages["service"] = self.loop.time()  # until launchers call, it does not know what they do

    def cut_service(self, name: str, for_s: float) -> None:
        """A launcher cannot reach the service, but its ranks reach their peers."""
        self.ledger.note_cut(name, for_s)
        self.ledger.note_fault()
        self.network.cut_off(name)
        self._cut_until[name] = max(self._cut_until.get(name, 0.0), self.loop.time() + for_s)
        self.loop.at(self._cut_until[name], self._heal, name)

    def isolate(self, name: str, for_s: float, lost_s: float) -> None:
        """A machine loses its network."""
        self.cut_service(name, for_s)
        self.ledger.note_fault()
        for training in self.trainings[-2:]:
            training.stall(name)
        self.cluster.isolate(name, lost_s)
        self.loop.after(for_s, self.cluster.rejoin, name)

    def freeze(self, name: str, for_s: float) -> None:
        """Nothing on a machine moves, but its kubelet."""
        pod = self.pod_on(name)
        launcher = self.launchers.get(pod.uid) if pod is not None else None
        if launcher is None:
            return
        self.cut_service(name, for_s)
        self.ledger.note_fault()
        launcher.frozen = True
        for training in self.trainings[-2:]:
            training.stall(name)

    def kill(self, name: str) -> None:
        """SIGKILL to a launcher."""
        pod = self.pod_on(name)
        if pod is not None:
            self.ledger.note_fault()
            self.cluster.kill(pod)

    def reclaim(self, name: str, gone_s: float) -> None:
        """A machine is reclaimed; its launcher is notified `gone_s` before."""
        self.ledger.note_fault()
        self.cluster.notice(name, gone_s)

    def delete_pod(self, name: str) -> None:
        """Somebody deletes a pod."""
        pod = self.pod_on(name)
        if pod is not None and not pod.gone:
            self.ledger.note_fault()
            self.cluster.remove_pod(pod)

    def stop_api(self, for_s: float) -> None:
        """The API server does not answer for so long."""
        self._away("api", for_s, self._end_api_outage)
        self.cluster.away = True
        if self.setup.elected:
            self.loop.after(LEASE_S, self._lose_lease)

    def _lose_lease(self) -> None:
        if self.cluster.away:
            self.crash_service(1.0)

    def stop_storage(self, for_s: float) -> None:
        """The storage does not answer for so long."""
        self._away("storage", for_s, self._end_storage_outage)
        self.storage.away = True

    def change_weather(self, for_s: float, **weather: float) -> None:
        """Messages get lost or come late for so long, reports of failures too."""
        self.ledger.note_fault()
        self._away("weather", for_s, self._end_weather)
        self.network.weather = replace(self.network.weather, **weather)

    def step_clock(self, by_s: float) -> None:
        """The clock of the controller's machine is set."""
        self.clock.offset_s += by_s

    def scale(self, workers: int) -> None:
        """The owner wants another number of workers; one that is let go with a failure of its own is excused."""
        self.ledger.note_fault()

        def change(spec: dict[str, Any]) -> None:
            spec["replicaSpecs"]["Worker"]["replicas"] = workers

        self.cluster.edit_job(self.key, change)

    def suspend(self, for_s: float) -> None:
        """The owner suspends the job for so long; workers that are let go with a failure of their own are excused."""
        if self.status.phase.terminal:
            return
        self.ledger.note_fault()
        self._outages["suspended"] = self.loop.time() + for_s
        self.cluster.edit_job(self.key, lambda spec: spec.update(suspend=True))
        self.loop.after(for_s, self.cluster.edit_job, self.key, lambda spec: spec.update(suspend=False))

    def _away(self, what: str, for_s: float, end: Callable[[], None]) -> None:
        """Something ends after `for_s`, or later if another outage of it lasts longer."""
        until = self._outages[what] = max(self._outages.get(what, 0.0), self.loop.time() + for_s)

        def over() -> None:
            if self._outages[what] <= self.loop.time() + 1e-6:
                end()

        self.loop.at(until, over)

    def _end_api_outage(self) -> None:
        self.cluster.come_back()

    def _end_storage_outage(self) -> None:
        self.storage.away = False

    def _end_weather(self) -> None:
        self.network.weather = Weather()

    def _heal(self, name: str) -> None:
        if self._cut_until[name] > self.loop.time() + 1e-6:
            return  # it has been cut off again
        self.network.heal(name)
        for launcher in list(self.launchers.values()):
            if launcher.node == name:
                launcher.frozen = False
                launcher.reconnect()
        for training in self.trainings[-2:]:
            training.resume(name)

    # What the parts ask

    def _launch(self, pod: Pod) -> Launcher:
        timing = self.setup.timing
        launcher = self.launchers[pod.uid] = Launcher(self, pod, (self.key, self.job_uid), timing)
        return launcher

    def _report(self, uid: str, message: dict[str, object]) -> None:
        self.launchers[uid].report(message)

    def _heard_at(self, uid: str, began: float) -> float | None:
        launcher = self.launchers.get(uid)
        return None if launcher is None else launcher.heard_at(began)

    def _reconnect(self) -> None:
        for launcher in self.launchers.values():
            launcher.reconnect()
