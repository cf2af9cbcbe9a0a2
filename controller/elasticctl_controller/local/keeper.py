"""What a kubelet is to a node: makes the processes of this machine match the pods in the store.

One thread, level-triggered: after every change it looks at every pod and does the next thing it needs, so it does not
matter at which point an earlier supervisor was killed. A worker outlives the supervisor; the next one finds it by its
shim's command line and goes on.
"""

from __future__ import annotations

import logging
import math
import platform
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from elasticctl.api.codec import from_rfc3339
from elasticctl.api.errors import ElasticctlError
from elasticctl.api.spec import LABEL_JOB
from elasticctl.api.text import counted
from elasticctl.cluster.base import Manifest
from elasticctl.cluster.local.gpus import choose
from elasticctl.cluster.local.paths import LocalPaths, make_private, storage_error
from elasticctl.cluster.local.secrets import Secrets
from elasticctl.cluster.local.sharing import cpu_slots_of
from elasticctl_controller.local import objects, processes
from elasticctl_controller.local.command import (
    ReadSecret,
    StartError,
    base_environment,
    command_of,
    gpus_wanted,
    missing_secret,
    pinned_environment,
    token_file,
)
from elasticctl_controller.local.objects import grace_of
from elasticctl_controller.local.processes import ExitWatcher, WorkerProcess
from elasticctl_controller.local.shim import START_ERROR_EXIT_CODE
from elasticctl_controller.local.store import Change, Store

START_POLL_S = 0.02
KILL_POLL_S = 0.05
SHIM_PATIENCE_S = 3.0
"""How long after its worker's SIGKILL a shim may take to report and go."""
RETRY_S = 2.0
"""Pause after the machine (not the worker) has failed us: a full disk, no more processes."""
NEVER = math.inf
UNSCHEDULABLE = "Unschedulable"
NO_CONFIG = "CreateContainerConfigError"
"""Kubernetes' word for a container whose secret is not there."""
SHUT_DOWN = "the local cluster is shut down"

log = logging.getLogger(__name__)


class Keeper:
    """Starts, watches and stops the workers of one store.

    `token_for(job_uid)` gives the content of a worker's token file; `gpus` are the ids to hand out, `cpu_slots()` how
    many ranks without one may run at once (0: any number); `on_exit(key, uid)` is called as soon as a worker of job
    `key` is seen to have ended, before that is stored.
    """

    def __init__(
        self,
        store: Store,
        paths: LocalPaths,
        *,
        token_for: Callable[[str], str],
        gpus: tuple[str, ...] = (),
        cpu_slots: Callable[[], int] = lambda: 0,
        on_exit: Callable[[str, str], None] = lambda key, uid: None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store, self._paths, self._clock = store, paths, clock
        self._token_for, self._gpus, self._cpu_slots, self._on_exit = token_for, gpus, cpu_slots, on_exit
        self._secrets = Secrets(paths)
        self._processes: dict[str, WorkerProcess] = {}
        self._told_to_stop: set[str] = set()
        self._retry_at: dict[str, float] = {}
        self._drain_from: float | None = None
        self._drained = threading.Event()
        self._stopping = threading.Event()
        self._exits = ExitWatcher()
        self._thread = threading.Thread(target=self._run, name="keeper", daemon=True)
        store.subscribe(self._changed)

    def start(self) -> None:
        """Take over the workers that run already, then keep going in a thread."""
        self._adopt()
        self._thread.start()

    def stop(self) -> None:
        """End the thread; the workers run on."""
        self._stopping.set()
        self._exits.wake()
        self._thread.join()
        self._exits.close()

    def drain(self) -> threading.Event:
        """Stop all workers and start no more, as a node that is shut down does; the event is set when none is left."""
        self._drain_from = self._clock()
        self._exits.wake()
        return self._drained

    def _changed(self, _: Change) -> None:
        if not self._stopping.is_set():
            self._exits.wake()

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                delay_s = self._sync()
            except Exception:  # the edge of the loop: log, back off, look again
                log.exception("looking after the workers failed; trying again in %.0f s", RETRY_S)
                self._stopping.wait(RETRY_S)  # a worker that has ended, and was not seen to, would wake us at once
                continue
            self._exits.wait(max(0.0, min(delay_s, 3600.0)))

    def _adopt(self) -> None:
        known = {pod["metadata"]["uid"] for pod in self._store.list_pods()}
        for uid, process in processes.find_running(self._paths.pods).items():
            if uid in known:
                self._watch(uid, process)
            else:  # its store was moved away: nobody will ever look after it
                log.warning("ending a worker that no job knows: pod %s", uid)
                process.kill_tree()
                process.kill_shim()
                processes.sweep(uid)

    def _sync(self) -> float:
        """Look after every pod once; returns seconds until one of them has to be looked at again."""
        now = self._clock()
        pods = self._store.list_pods()
        delays_s = [NEVER]
        for pod in pods:
            try:
                delays_s.append(self._sync_pod(pod, now))
            except (ElasticctlError, OSError) as e:
                log.warning("pod %s: %s; trying again in %.0f s", pod["metadata"]["name"], e, RETRY_S)
                delays_s.append(RETRY_S)
            except Exception:  # the edge of one pod: the others are looked after all the same
                log.exception("pod %s: looking after it failed", pod["metadata"]["name"])
                delays_s.append(RETRY_S)
        for uid in self._store.abandoned():
            shutil.rmtree(self._paths.pod_dir(uid), ignore_errors=True)
            self._store.forget(uid)
        if self._drain_from is not None and not self._processes:
            self._drained.set()
        return min(delays_s)

    def _sync_pod(self, pod: Manifest, now: float) -> float:
        uid = pod["metadata"]["uid"]
        process = self._processes.get(uid)
        if objects.has_ended(pod):
            if _deletion_deadline(pod) is not None:
                self._store.remove_pod(uid)
            return NEVER
        if process is None:
            return self._sync_without_process(pod, now)
        if process.ended():
            return self._collect(pod, now)
        deadline = self._stop_deadline(pod)
        if deadline is not None:
            return self._stop(pod, process, deadline, now)
        if pod["status"]["phase"] == "Pending":
            return self._note_start(pod)
        return NEVER

    def _sync_without_process(self, pod: Manifest, now: float) -> float:
        uid = pod["metadata"]["uid"]
        pod_dir = self._paths.pod_dir(uid)
        if processes.has_exited(pod_dir) or processes.read_started(pod_dir):
            return self._collect(pod, now)  # it ended while no supervisor was there
        if _deletion_deadline(pod) is not None:
            self._store.remove_pod(uid)
            return NEVER
        if self._drain_from is not None:
            return NEVER
        wait_s = self._retry_at.get(uid, now) - now
        return wait_s if wait_s > 0 else self._start(pod, now)

    def _start(self, pod: Manifest, now: float) -> float:
        """Give the pod its GPUs and start its worker; a pod that cannot have them waits for the end of another."""
        uid, name = pod["metadata"]["uid"], pod["metadata"]["name"]
        self._retry_at[uid] = now + RETRY_S  # should anything below fail
        if self._lacks_a_secret(pod):
            return RETRY_S
        gpus = self._place(pod)
        if gpus is None:
            del self._retry_at[uid]
            return NEVER
        placed = self._store.update_pod(uid, lambda p: objects.scheduled(p, platform.node(), gpus))
        if placed is None:
            return NEVER
        pod_dir = self._paths.pod_dir(uid)
        try:
            pinned = pinned_environment(pod_dir, uid, gpus)
            command = command_of(placed, base_environment(), pinned, self._reader(placed))
        except StartError as e:
            failure = objects.Exit(START_ERROR_EXIT_CODE, now, reason="StartError", message=str(e))
            self._end(pod, failure)
            return NEVER
        try:
            make_private(pod_dir)
            processes.write_private(token_file(pod_dir), self._token_for(_owner_uid(pod)))
            self._watch(uid, processes.start(pod_dir, command))
        except OSError as e:
            raise storage_error(f"start {name}", e) from e
        return START_POLL_S

    def _place(self, pod: Manifest) -> tuple[str, ...] | None:
        """Choose the pod's GPUs; None, and said so, when too few are free."""
        if objects.is_scheduled(pod):
            return objects.gpus_of(pod)
        here = [p for p in self._store.list_pods() if objects.is_scheduled(p) and not objects.has_ended(p)]
        wanted, slots = gpus_wanted(pod["spec"]), self._cpu_slots()
        if wanted or not slots:
            taken = [gpu for p in here for gpu in objects.gpus_of(p)]
            chosen = choose(self._gpus, taken, wanted)
            if chosen is None:
                self._let_wait(pod, wanted, "GPU", len(self._gpus), len(taken))
            return chosen
        wanted, used = cpu_slots_of(pod), sum(map(cpu_slots_of, here))
        if used + wanted <= slots:
            return ()
        self._let_wait(pod, wanted, "CPU slot", slots, used)
        return None

    def _let_wait(self, pod: Manifest, wanted: int, unit: str, there: int, used: int) -> None:
        if pod["status"].get("reason") == UNSCHEDULABLE:
            return
        message = f"waits for {counted(wanted, unit)}: {max(0, there - used)} of this machine's {there} are free"
        self._store.update_pod(pod["metadata"]["uid"], lambda p: objects.waiting(p, UNSCHEDULABLE, message))
        self._say(pod, "Warning", "FailedScheduling", message)

    def _lacks_a_secret(self, pod: Manifest) -> bool:
        """Does it name a secret that is not there? It is looked for again, and has no GPU until then."""
        try:
            missing = missing_secret(pod, self._reader(pod))
        except StartError:
            return False  # said when it is started
        if missing and pod["status"].get("message") != missing:
            self._store.update_pod(pod["metadata"]["uid"], lambda p: objects.waiting(p, NO_CONFIG, missing))
            self._say(pod, "Warning", "Failed", f"Error: {missing}")
        return bool(missing)

    def _reader(self, pod: Manifest) -> ReadSecret:
        return partial(self._secrets.read, pod["metadata"]["namespace"])

    def _note_start(self, pod: Manifest) -> float:
        """Look whether the shim has got the worker going."""
        uid = pod["metadata"]["uid"]
        started = processes.read_started(self._paths.pod_dir(uid))
        if started is None:
            return START_POLL_S
        pid, started_at = started
        self._retry_at.pop(uid, None)
        self._store.update_pod(uid, lambda p: objects.running(p, pid, started_at))
        self._say(pod, "Normal", "Started", f"worker started as process {pid}")
        return NEVER

    def _stop_deadline(self, pod: Manifest) -> float | None:
        """When the worker has to be gone (seconds since the epoch); None: it may run on."""
        deadlines = [_deletion_deadline(pod)]
        if self._drain_from is not None:
            deadlines.append(self._drain_from + grace_of(pod))
        return min((d for d in deadlines if d is not None), default=None)

    def _stop(self, pod: Manifest, process: WorkerProcess, deadline: float, now: float) -> float:
        """Bring the worker nearer to its end: SIGTERM once, SIGKILL to its whole tree from the deadline on."""
        uid = pod["metadata"]["uid"]
        if uid not in self._told_to_stop:
            self._told_to_stop.add(uid)
            if _deletion_deadline(pod) is None:
                self._store.update_pod(uid, lambda p: objects.disrupted(p, "TerminationByKubelet", SHUT_DOWN))
            if now < deadline:
                self._say(pod, "Normal", "Killing", f"stopping the worker, {deadline - now:.0f} s of grace")
                process.terminate()
        if now < deadline:
            return deadline - now
        process.kill_tree()
        if now > deadline + SHIM_PATIENCE_S:
            process.kill_shim()
        return KILL_POLL_S

    def _collect(self, pod: Manifest, now: float) -> float:
        """The shim is gone: end what may be left of the worker and store how it ended."""
        uid = pod["metadata"]["uid"]
        pod_dir = self._paths.pod_dir(uid)
        self._forget(uid)
        if not processes.has_exited(pod_dir) and processes.read_started(pod_dir) is None:
            processes.sweep(uid)
            return RETRY_S  # the shim did not get as far as starting it, or not as far as saying so
        metadata = pod["metadata"]
        self._on_exit(f"{metadata['namespace']}/{metadata.get('labels', {}).get(LABEL_JOB, '')}", uid)
        processes.sweep(uid)
        self._end(pod, processes.read_exit(pod_dir, now))
        return NEVER

    def _end(self, pod: Manifest, how: objects.Exit) -> None:
        uid = pod["metadata"]["uid"]
        self._store.update_pod(uid, lambda p: objects.ended(p, how))
        self._retry_at.pop(uid, None)
        if how.reason == "StartError":
            self._say(pod, "Warning", "StartError", how.message)

    def _watch(self, uid: str, process: WorkerProcess) -> None:
        self._processes[uid] = process
        self._exits.add(process.pid)

    def _forget(self, uid: str) -> None:
        process = self._processes.pop(uid, None)
        self._told_to_stop.discard(uid)
        if process is not None:
            self._exits.remove(process.pid)

    def _say(self, pod: Manifest, type_: str, reason: str, message: str) -> None:
        self._store.record_event(_owner_uid(pod), pod, type_, reason, message)


def _deletion_deadline(pod: Mapping[str, Any]) -> float | None:
    return from_rfc3339(pod["metadata"].get("deletionTimestamp"))


def _owner_uid(pod: Mapping[str, Any]) -> str:
    owners = pod["metadata"].get("ownerReferences", [])
    return next((str(ref["uid"]) for ref in owners if ref.get("controller")), "")
