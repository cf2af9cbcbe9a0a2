"""Makes the processes of this machine match the pods in the store, as a kubelet does on its node.

One thread, level-triggered: after every change it checks every pod, turns what it finds into an event of the worker's
state machine (`lifecycle`), and carries out what the event requires. So it does not matter at which point an earlier
supervisor was killed. A worker outlives the supervisor; the next one finds it by its shim's command line.
"""

from __future__ import annotations

import logging
import math
import platform
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from elasticctl.api.codec import from_rfc3339
from elasticctl.api.errors import ElasticctlError
from elasticctl.api.spec import LABEL_JOB
from elasticctl.api.text import plural
from elasticctl.cluster.base import Manifest
from elasticctl.cluster.local.capacity import choose_gpus, cpu_slots_of
from elasticctl.cluster.local.paths import LocalPaths
from elasticctl.cluster.local.private_paths import make_private, storage_error
from elasticctl.cluster.local.secrets import Secrets
from elasticctl_controller.core.workers import owner_uid
from elasticctl_controller.local import objects, processes
from elasticctl_controller.local.command import (
    ReadSecret,
    StartError,
    base_environment,
    build_command,
    gpus_requested,
    missing_secret,
    pinned_environment,
)
from elasticctl_controller.local.lifecycle import KubeletEvent, KubeletState, recovered_state, transition
from elasticctl_controller.local.objects import grace_s_of
from elasticctl_controller.local.processes import ExitWatcher, WorkerProcess
from elasticctl_controller.local.shim import START_ERROR_EXIT_CODE
from elasticctl_controller.local.store import LocalStore, StoreChange

START_POLL_S = 0.02
KILL_POLL_S = 0.05
SHIM_PATIENCE_S = 3.0
"""How long a shim may take to report and exit after its worker got SIGKILL."""
RETRY_S = 2.0
"""Pause after a failure of the machine, not the worker: a full disk, no more processes."""
NEVER = math.inf
UNSCHEDULABLE = "Unschedulable"
NO_CONFIG = "CreateContainerConfigError"
"""Kubernetes' word for a container whose secret is missing."""
SHUT_DOWN = "the local cluster is shut down"

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Worker:
    """What the kubelet knows about a pod's worker; it may be started again from `retry_at` on.

    `files` are its private files as they were last written. `stop_by` is when it must be gone, and `deletion` the pod's
    deletion timestamp that this follows from.
    """

    state: KubeletState
    process: WorkerProcess | None = None
    retry_at: float = 0.0
    files: Mapping[str, str] = field(default_factory=dict)
    deletion: float | None = None
    stop_by: float = 0.0


class LocalKubelet:
    """Starts, watches and stops the workers of one store.

    `files_for(pod)` returns what a worker's private files hold, by name, now; `gpus` are the ids to assign,
    `cpu_slots()` how many ranks without a GPU may run at a time (0: any number); `umask` is what workers create files
    with (-1: with this process's own); `on_exit(key, uid)` is called as soon as a worker of job `key` is found to have
    ended, before that is stored.

    All waits are timed by time.monotonic: a clock that is set, or a laptop that slept, neither shortens a grace period
    nor keeps a worker from starting.
    """

    def __init__(
        self,
        store: LocalStore,
        paths: LocalPaths,
        *,
        files_for: Callable[[Manifest], Mapping[str, str]],
        gpus: tuple[str, ...] = (),
        cpu_slots: Callable[[], int] = lambda: 0,
        umask: int = -1,
        on_exit: Callable[[str, str], None] = lambda key, uid: None,
    ) -> None:
        self._store, self._paths, self._umask = store, paths, umask
        self._files_for, self._gpus, self._cpu_slots, self._on_exit = files_for, gpus, cpu_slots, on_exit
        self._secrets = Secrets(paths)
        self._workers: dict[str, _Worker] = {}  # by the UID of the pod
        self._drain_from: float | None = None
        self._drained = threading.Event()
        self._stopping = threading.Event()
        self._exits = ExitWatcher()
        self._thread = threading.Thread(target=self._run, name="kubelet", daemon=True)
        store.subscribe(self._store_changed)

    def start(self) -> None:
        """Take over the workers that run already, then manage all workers in a thread."""
        self._adopt_workers()
        self._thread.start()

    def stop(self) -> None:
        """End the thread; the workers continue to run."""
        self._stopping.set()
        self._exits.wake()
        self._thread.join()
        self._exits.close()

    def drain(self) -> threading.Event:
        """Stop all workers and start no more, as a node that shuts down does; the event is set when none is left."""
        self._drain_from = time.monotonic()
        self._exits.wake()
        return self._drained

    def _store_changed(self, _: StoreChange) -> None:
        if not self._stopping.is_set():
            self._exits.wake()

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                delay_s = self._sync()
            except Exception:  # the edge of the loop: log, back off, retry
                log.exception("managing the workers failed; trying again in %.0f s", RETRY_S)
                self._stopping.wait(RETRY_S)  # a worker whose end has not been handled would wake us immediately
                continue
            self._exits.wait(max(0.0, min(delay_s, 3600.0)))

    def _adopt_workers(self) -> None:
        pods = {pod["metadata"]["uid"]: pod for pod in self._store.list_pods()}
        for uid, process in processes.find_running(self._paths.pods).items():
            if uid in pods:
                self._recover(pods[uid], process)
            else:  # its store was moved away: no supervisor will ever manage it
                log.warning("killing a worker that belongs to no job: pod %s", uid)
                process.kill_tree()
                process.kill_shim()
                processes.kill_strays(uid)

    def _recover(self, pod: Manifest, process: WorkerProcess | None = None) -> _Worker:
        """Begin to manage a worker, which an earlier supervisor may have started."""
        uid = pod["metadata"]["uid"]
        state = recovered_state(
            ended=objects.has_ended(pod),
            running=pod["status"]["phase"] == "Running",
            started=process is not None or processes.has_run(self._paths.pod_dir(uid)),
        )
        self._workers[uid] = worker = _Worker(state)
        if process is not None:
            self._watch(worker, process)
        return worker

    def _sync(self) -> float:
        """Check every pod once; returns seconds until one of them must be checked again."""
        now = time.monotonic()
        delays_s = [NEVER]
        for pod in self._store.list_pods():
            try:
                delays_s.append(self._sync_pod(pod, now))
            except (ElasticctlError, OSError) as e:
                log.warning("pod %s: %s; trying again in %.0f s", pod["metadata"]["name"], e, RETRY_S)
                delays_s.append(RETRY_S)
            except Exception:  # the edge of one pod: the others are managed all the same
                log.exception("pod %s: managing it failed", pod["metadata"]["name"])
                delays_s.append(RETRY_S)
        for uid in self._store.list_abandoned():
            shutil.rmtree(self._paths.pod_dir(uid), ignore_errors=True)
            self._store.delete_incarnation(uid)
        if self._drain_from is not None and not any(worker.process for worker in self._workers.values()):
            self._drained.set()
        return min(delays_s)

    def _sync_pod(self, pod: Manifest, now: float) -> float:
        """Check one pod once; returns seconds until it must be checked again."""
        worker = self._workers.get(pod["metadata"]["uid"]) or self._recover(pod)
        event = self._observe(pod, worker, now)
        if event in (KubeletEvent.STOP_REQUESTED, KubeletEvent.GRACE_EXPIRED):
            self._end_worker(event, pod, worker, now)
        elif event is not None:
            after = transition(worker.state, event)
            self._handle(event, pod, worker, now)
            worker.state = after  # only now: an event whose handling failed is observed again
        if worker.state is KubeletState.WAITING and self._drain_from is None and now >= worker.retry_at:
            event = self._start_worker(pod, worker, now)
            if event is not None:
                worker.state = transition(worker.state, event)
        if worker.process is not None:
            self._write_files(pod, worker)
        return self._delay_s(pod, worker, now)

    def _observe(self, pod: Manifest, worker: _Worker, now: float) -> KubeletEvent | None:
        """Return what has happened to a worker since it was last checked; None: nothing."""
        if worker.state in (KubeletState.WAITING, KubeletState.ENDED):
            return None if _deletion_deadline(pod) is None else KubeletEvent.POD_DELETED
        pod_dir = self._paths.pod_dir(pod["metadata"]["uid"])
        if worker.process is None or worker.process.has_ended():
            return KubeletEvent.EXITED if processes.has_run(pod_dir) else KubeletEvent.SHIM_LOST
        deadline = self._stop_deadline(pod, worker)
        if deadline is not None:
            return KubeletEvent.STOP_REQUESTED if now < deadline else KubeletEvent.GRACE_EXPIRED
        if worker.state is KubeletState.STARTING and processes.read_started(pod_dir) is not None:
            return KubeletEvent.WORKER_STARTED
        return None

    def _handle(self, event: KubeletEvent, pod: Manifest, worker: _Worker, now: float) -> None:
        """Carry out what follows from an observed event."""
        uid = pod["metadata"]["uid"]
        if event is KubeletEvent.WORKER_STARTED:
            self._record_start(pod)
        elif event is KubeletEvent.EXITED:
            self._record_exit(pod, worker)
        elif event is KubeletEvent.SHIM_LOST:
            self._unwatch(worker)
            processes.kill_strays(uid)
            worker.retry_at = now + RETRY_S
        elif event is KubeletEvent.POD_DELETED:
            self._store.remove_pod(uid)
            del self._workers[uid]

    def _delay_s(self, pod: Manifest, worker: _Worker, now: float) -> float:
        """Return seconds until a worker must be checked again, unless something else wakes the kubelet before."""
        if worker.state is KubeletState.WAITING and self._drain_from is None and worker.retry_at > now:
            return worker.retry_at - now
        if worker.state is KubeletState.STARTING:
            return START_POLL_S
        if worker.state is KubeletState.STOPPING:
            return (self._stop_deadline(pod, worker) or now) - now
        return KILL_POLL_S if worker.state is KubeletState.KILLING else NEVER

    def _start_worker(self, pod: Manifest, worker: _Worker, now: float) -> KubeletEvent | None:
        """Give the pod its GPUs and start its worker; None if it has to wait. Raises ElasticctlError."""
        uid, name = pod["metadata"]["uid"], pod["metadata"]["name"]
        worker.retry_at = now + RETRY_S  # in case anything below fails
        if self._lacks_secret(pod):
            return None
        gpus = self._place(pod)
        if gpus is None:
            worker.retry_at = now  # as soon as the end of another worker wakes the kubelet
            return None
        placed = self._store.update_pod(uid, lambda p: objects.mark_scheduled(p, platform.node(), gpus))
        if placed is None:
            return None
        pod_dir = self._paths.pod_dir(uid)
        try:
            pinned = pinned_environment(pod_dir, placed, gpus)
            command = build_command(placed, base_environment(), pinned, self._secret_reader(placed))
        except StartError as e:
            refusal = objects.Exit(START_ERROR_EXIT_CODE, time.time(), reason="StartError", message=str(e))
            self._store_exit(pod, refusal)
            return KubeletEvent.START_REFUSED
        try:
            make_private(pod_dir)
            self._write_files(pod, worker)
            self._watch(worker, processes.start_shim(pod_dir, command, self._umask))
        except OSError as e:
            raise storage_error(f"start {name}", e) from e
        return KubeletEvent.SHIM_STARTED

    def _write_files(self, pod: Manifest, worker: _Worker) -> None:
        """Write the worker's files if they are to hold something else; it may read them at any time. Raises OSError."""
        files = self._files_for(pod)
        if files == worker.files:
            return
        for name, text in files.items():
            path = self._paths.pod_dir(pod["metadata"]["uid"]) / name
            fresh = path.with_suffix(".tmp")
            processes.write_private(fresh, text)
            fresh.replace(path)
        worker.files = files

    def _place(self, pod: Manifest) -> tuple[str, ...] | None:
        """Choose the pod's GPUs; None, with an event, when too few are free."""
        if objects.is_scheduled(pod):
            return objects.gpus_of(pod)
        here = [p for p in self._store.list_pods() if objects.is_scheduled(p) and not objects.has_ended(p)]
        wanted, slots = gpus_requested(pod["spec"]), self._cpu_slots()
        if wanted or not slots:
            taken = [gpu for p in here for gpu in objects.gpus_of(p)]
            chosen = choose_gpus(self._gpus, taken, wanted)
            if chosen is None:
                self._report_wait(pod, wanted, "GPU", len(self._gpus), len(taken))
            return chosen
        wanted, used = cpu_slots_of(pod), sum(map(cpu_slots_of, here))
        if used + wanted <= slots:
            return ()
        self._report_wait(pod, wanted, "CPU slot", slots, used)
        return None

    def _report_wait(self, pod: Manifest, wanted: int, unit: str, total: int, used: int) -> None:
        if pod["status"].get("reason") == UNSCHEDULABLE:
            return
        message = f"waits for {plural(wanted, unit)}: {max(0, total - used)} of {total} on this machine are free"
        self._store.update_pod(pod["metadata"]["uid"], lambda p: objects.mark_waiting(p, UNSCHEDULABLE, message))
        self._record_event(pod, "Warning", "FailedScheduling", message)

    def _lacks_secret(self, pod: Manifest) -> bool:
        """Does the pod name a secret that is missing? It gets no GPU until the secret exists."""
        try:
            missing = missing_secret(pod, self._secret_reader(pod))
        except StartError:
            return False  # reported when it is started
        if missing and pod["status"].get("message") != missing:
            self._store.update_pod(pod["metadata"]["uid"], lambda p: objects.mark_waiting(p, NO_CONFIG, missing))
            self._record_event(pod, "Warning", "Failed", f"Error: {missing}")
        return bool(missing)

    def _secret_reader(self, pod: Manifest) -> ReadSecret:
        return partial(self._secrets.read, pod["metadata"]["namespace"])

    def _record_start(self, pod: Manifest) -> None:
        """Store that the worker runs, as its shim has reported."""
        uid = pod["metadata"]["uid"]
        started = processes.read_started(self._paths.pod_dir(uid))
        if started is not None:
            pid, started_at = started
            self._store.update_pod(uid, lambda p: objects.mark_running(p, pid, started_at))
            self._record_event(pod, "Normal", "Started", f"worker started as process {pid}")

    def _stop_deadline(self, pod: Manifest, worker: _Worker) -> float | None:
        """Return when the worker must be gone (of time.monotonic); None: it may continue to run."""
        deadlines = []
        deletion = _deletion_deadline(pod)
        if deletion is not None:
            if worker.deletion != deletion:
                left_s = min(deletion - time.time(), pod["metadata"].get("deletionGracePeriodSeconds", math.inf))
                worker.deletion, worker.stop_by = deletion, time.monotonic() + left_s
            deadlines.append(worker.stop_by)
        if self._drain_from is not None:
            deadlines.append(self._drain_from + grace_s_of(pod))
        return min(deadlines, default=None)

    def _end_worker(self, event: KubeletEvent, pod: Manifest, worker: _Worker, now: float) -> None:
        """Send SIGTERM once, and after the grace period SIGKILL until nothing is left; this is recorded in the pod
        first."""
        before, worker.state = worker.state, transition(worker.state, event)
        grace_s = (self._stop_deadline(pod, worker) or now) - now
        try:
            if before in (KubeletState.STARTING, KubeletState.RUNNING):
                self._record_end(pod, grace_s)
        finally:  # a full disk must not keep a worker from being stopped
            if worker.process is not None and worker.state is KubeletState.KILLING:
                worker.process.kill_tree()
                if grace_s < -SHIM_PATIENCE_S:
                    worker.process.kill_shim()
            elif worker.process is not None and worker.state is not before:
                worker.process.terminate()

    def _record_end(self, pod: Manifest, grace_s: float) -> None:
        if _deletion_deadline(pod) is None:  # a pod that is being deleted is marked already
            uid = pod["metadata"]["uid"]
            self._store.update_pod(uid, lambda p: objects.mark_disrupted(p, SHUT_DOWN))
        if grace_s > 0:
            self._record_event(pod, "Normal", "Killing", f"stopping the worker, {grace_s:.0f} s of grace")

    def _record_exit(self, pod: Manifest, worker: _Worker) -> None:
        """The shim is gone: kill what may be left of the worker and store how it ended."""
        metadata = pod["metadata"]
        uid = metadata["uid"]
        self._unwatch(worker)
        self._on_exit(f"{metadata['namespace']}/{metadata.get('labels', {}).get(LABEL_JOB, '')}", uid)
        processes.kill_strays(uid)
        self._store_exit(pod, processes.read_exit(self._paths.pod_dir(uid), time.time()))

    def _store_exit(self, pod: Manifest, how: objects.Exit) -> None:
        if how.reason == "StartError":
            self._record_event(pod, "Warning", "StartError", how.message)
        self._store.update_pod(pod["metadata"]["uid"], lambda p: objects.mark_ended(p, how))

    def _watch(self, worker: _Worker, process: WorkerProcess) -> None:
        worker.process = process
        self._exits.add(process.pid)

    def _unwatch(self, worker: _Worker) -> None:
        if worker.process is not None:
            self._exits.remove(worker.process.pid)
            worker.process = None

    def _record_event(self, pod: Manifest, type_: str, reason: str, message: str) -> None:
        self._store.record_event(owner_uid(pod), pod, type_, reason, message)


def _deletion_deadline(pod: Mapping[str, Any]) -> float | None:
    return from_rfc3339(pod["metadata"].get("deletionTimestamp"))
