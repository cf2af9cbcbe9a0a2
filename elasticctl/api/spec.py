"""A job as specified: `JobSpec` (what a researcher types) and `ElasticJob` (what the controller acts on).

A job template renders a `JobSpec` to an ElasticJob manifest (`elasticctl.templates`), which is the only format on disk,
on the wire and in the cluster. `ElasticJob.from_manifest` reads the part of it that decides how many workers there
should be and what happens when one ends. `api.observed.workers` describes workers as the cluster reports them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from typing import Any, TypeVar

from elasticctl.api.codec import Manifest as Manifest
from elasticctl.api.codec import Timestamp, from_json, from_rfc3339
from elasticctl.api.goal import Goal, PoolOrder
from elasticctl.api.objects import as_list, as_mapping, as_text
from elasticctl.api.status import JobStatus
from elasticctl_protocol.codec import camel
from elasticctl_protocol.variables import OnNan

E = TypeVar("E", bound=StrEnum)

GROUP = "elastic.pytorch.org"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
KIND = "ElasticJob"
PLURAL = "elasticjobs"
WORKER_CONTAINER = "elasticjob-worker"

LABEL_GROUP = "group-name"
LABEL_JOB = "job-name"
LABEL_TYPE = "replica-type"
LABEL_INDEX = "replica-index"
LABEL_MANAGED, MANAGER = "app.kubernetes.io/managed-by", "elasticctl"
"""On what the controller creates for a job in addition to its pods."""
ANNOTATION_SCALED_BY = f"{GROUP}/scaled-by"
ANNOTATION_NOTIFY = f"{GROUP}/notify"
"""Where notifications about the job go: a reference to a webhook's URL (`elasticctl.api.notifications`)."""
ANNOTATION_RERUN_OF = f"{GROUP}/rerun-of"
"""The name of the job that a rerun repeats."""
ANNOTATION_MOVING_TO = f"{GROUP}/moving-to"
"""`CONTEXT URL` of the target of a move that has begun."""
ANNOTATION_MOVING_FROM = f"{GROUP}/moving-from"
"""`CONTEXT CONTEXT`, source and target of a move, until the job is started in its new place."""
ANNOTATION_MOVED_TO = f"{GROUP}/moved-to"
ANNOTATION_MOVED_FROM = f"{GROUP}/moved-from"
"""`CONTEXT URL` where the job continued, and where it came from."""
ANNOTATION_FORMER_STORAGES = f"{GROUP}/former-storages"
"""The storage URLs, a line each, where this job kept its state and its logs before it moved."""
ANNOTATION_ATTEMPT = f"{GROUP}/attempt"
"""Which search for capacity created the job: no other may withdraw it."""
ANNOTATION_POOL = f"{GROUP}/pool"
"""On a pod of a job with a goal or an order of pools: that of its machine, such as `spot` or `onDemand`."""
ANNOTATION_PREEMPTED = f"{GROUP}/preempted"
"""On a pod that `preempt` is about to delete: it ends like one whose machine is reclaimed."""
ANNOTATION_ADMITTED = f"{GROUP}/admitted"
"""The uid of the Workload by whose admission the controller started the job."""
USER_LABEL = f"{GROUP}/user"
"""On a job: who submitted it."""
KUEUE = "kueue.x-k8s.io"
QUEUE_LABEL = f"{KUEUE}/queue-name"
"""On a job that Kueue admits: the built-in sharing leaves it alone."""
PRIORITY_CLASS_LABEL = f"{KUEUE}/priority-class"
"""On such a job: its rank there."""

DEFAULT_BACKOFF_LIMIT = 3
MAX_WORKERS = 2_000  # the roster of all workers has to fit an object of the API server (1.5 MB)
MAX_PRIORITY = 1_000
MAX_SECONDS = 10 * 365 * 86_400.0  # longer times than this mean "for ever", and stay within what a date can hold


class RestartPolicy(StrEnum):
    """What an ended worker means for the job; see docs/elasticjob.md."""

    EXIT_CODE = "ExitCode"
    ON_FAILURE = "OnFailure"
    ALWAYS = "Always"
    NEVER = "Never"


class CleanPodPolicy(StrEnum):
    """Which workers are removed when the job ends."""

    NONE = "None"
    RUNNING = "Running"
    ALL = "All"


class PodPhase(StrEnum):
    """Kubernetes' pod phases."""

    PENDING = "Pending"
    RUNNING = "Running"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"
    UNKNOWN = "Unknown"


@dataclass(frozen=True, slots=True)
class JobSpec:
    """One training job as a researcher describes it, which a job template renders.

    `command` is the script and its arguments as the launcher runs them; `workers` x `gpus_per_worker` = all GPUs
    (`gpus_per_worker` 0: CPU ranks); `launcher`: it runs on one worker and starts the ranks itself; `automatic`: the
    number of workers is chosen between the bounds; `goal` is `spec.goal`, `pools` is `spec.pools`.
    `gpu_type` is a name of `elasticctl.api.gpu_types`; `storage` is a URL; times are in seconds. A worker runs on a
    node that matches any of `node_terms`: label -> suitable values (none: the label must be absent).

    `workspace` is `URL#DIGEST` of the uploaded folder, `workspace_from` its path on the submitting machine. Every key
    of `secrets` becomes a variable; `secret_env`: variable -> (secret, key). `mounts`: volume claim -> path,
    or `secrets:CLASS` -> path for what a SecretProviderClass of the Secrets Store CSI driver names.

    `cpus`, `memory` and `shm` (shared memory) are those of each worker, as Kubernetes writes quantities. `labels` are
    the job's, `pod_labels` its pods', `annotations` both's.
    """

    name: str
    command: tuple[str, ...]
    namespace: str = "default"
    workers: int = 1
    min_workers: int | None = None
    max_workers: int | None = None
    automatic: bool = False
    goal: Mapping[str, Any] = field(default_factory=dict)
    pools: Mapping[str, Any] = field(default_factory=dict)
    priority: int = 0
    suspend: bool = False
    ranks_per_worker: int = 1
    launcher: bool = False
    gpus_per_worker: int = 0
    gpu_type: str = ""
    spot: bool = True
    provider: str = "local"
    image: str = ""
    service_account: str = ""
    working_dir: str = ""
    env: Mapping[str, str] = field(default_factory=dict)
    secrets: tuple[str, ...] = ()
    secret_env: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    mounts: Mapping[str, str] = field(default_factory=dict)
    storage: str = ""
    workspace: str = ""
    workspace_from: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    pod_labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    cpus: str = ""
    memory: str = ""
    shm: str = ""
    node_selector: Mapping[str, str] = field(default_factory=dict)
    node_terms: tuple[Mapping[str, tuple[str, ...]], ...] = ()
    tolerations: tuple[Mapping[str, str], ...] = ()
    restart_policy: RestartPolicy = RestartPolicy.ON_FAILURE
    clean_pod_policy: CleanPodPolicy = CleanPodPolicy.RUNNING
    backoff_limit: int = DEFAULT_BACKOFF_LIMIT
    deadline_s: int | None = None
    hang_timeout_s: int | None = None
    on_nan: OnNan = OnNan.WARN
    ttl_s: int | None = None
    grace_s: int = 30


@dataclass(frozen=True, slots=True)
class WorkerRef:
    """One incarnation of a worker to remove; its name alone would also mean its successor."""

    name: str = ""
    uid: str = ""


@dataclass(frozen=True, slots=True)
class Policy:
    """`spec.policy`, with times in seconds. Without a hang timeout, the job's own pace sets one; 0: never."""

    backoff_seconds: float = 1.0
    backoff_max_seconds: float = 60.0
    straggler_seconds: float = 30.0
    hang_timeout_seconds: float | None = None
    on_nan: OnNan = OnNan.WARN


@dataclass(frozen=True, slots=True)
class Sharing:
    """`spec.sharing`: whether the number of workers is chosen for the job, and its priority (higher goes first)."""

    automatic: bool = False
    priority: int = 0


@dataclass(frozen=True, slots=True)
class ElasticJob:
    """An ElasticJob object as the controller sees it; `template` is the pod template, opaque here.

    Built leniently: out-of-range numbers are clamped, so `0 <= min <= desired <= max <= MAX_WORKERS` always holds.
    `desired` is the wanted number of workers; for a job of automatic size, the largest number allowed. `bounded`: `max`
    was set by the user; otherwise the job can be scaled beyond it. `deleting`: the object is deleted and finalizers
    keep it; `orphaning`: one of them is that of a deletion without the workers. `contradiction` describes numbers that
    had to be clamped, which a server without CEL lets pass. `queue` is the Kueue queue that has to admit the job,
    `priority_class` its priority there, and `admitted` the Workload that started it. `user` submitted the job. `pools`
    is None where a goal or Kueue chooses them. `held`, `over_limit` and `node_types` are in no object: the first two
    are why the job is kept suspended although its owner wants it to run (a queue has not admitted it; its project's
    limits do not allow it), the last are the only node types on which its project may have workers.
    """

    name: str = ""
    namespace: str = "default"
    uid: str = ""
    resource_version: str = ""
    generation: int = 0
    created_at: Timestamp | None = None
    deleting: bool = False
    orphaning: bool = False
    desired: int = 0
    min: int = 0
    max: int = 0
    bounded: bool = False
    contradiction: str = ""
    restart_policy: RestartPolicy = RestartPolicy.ON_FAILURE
    clean_pod_policy: CleanPodPolicy = CleanPodPolicy.NONE
    backoff_limit: int = DEFAULT_BACKOFF_LIMIT
    deadline_s: float | None = None
    ttl_s: float | None = None
    suspend: bool = False
    cancel: bool = False
    rdzv_endpoint: str = ""
    remove_workers: tuple[WorkerRef, ...] = ()
    policy: Policy = Policy()
    sharing: Sharing = Sharing()
    goal: Goal | None = None
    pools: PoolOrder | None = None
    queue: str = ""
    priority_class: str = ""
    user: str = ""
    admitted: str = ""
    held: str = ""
    over_limit: str = ""
    node_types: tuple[str, ...] = ()
    template: Mapping[str, Any] = field(default_factory=dict)
    scaled_by: str = ""
    moving_to: str = ""
    moving_from: str = ""
    moved_to: str = ""
    former_storages: tuple[str, ...] = ()
    notify: str = ""
    status: JobStatus = JobStatus()

    @property
    def key(self) -> str:
        """`namespace/name`."""
        return f"{self.namespace}/{self.name}"

    @property
    def is_moving(self) -> bool:
        """True while a move of the job is unfinished; only finishing it decides where the job may train."""
        return bool(self.moving_from or (self.moving_to and not self.moved_to))

    @property
    def bounds(self) -> str:
        """`1-4`: the smallest and largest number of workers; `1+` without a largest one."""
        return f"{self.min}-{self.max}" if self.bounded else f"{self.min}+"

    @classmethod
    def from_manifest(cls, manifest: Mapping[str, Any]) -> ElasticJob:
        """Read an ElasticJob object, whatever it contains; never raises."""
        meta, spec = as_mapping(manifest.get("metadata")), as_mapping(manifest.get("spec"))
        worker = as_mapping(as_mapping(spec.get("replicaSpecs")).get("Worker"))
        replicas = _count(worker.get("replicas"), 1)
        top = min(_count(spec.get("maxReplicas"), max(replicas, _count(spec.get("minReplicas"), 0))), MAX_WORKERS)
        asked = _count(spec.get("minReplicas"), replicas)
        low = min(asked, top)
        amiss = "" if asked <= replicas <= top else f"minReplicas {asked}, {replicas} replicas, maxReplicas {top}"
        sharing, goal = from_json(Sharing, spec.get("sharing")), Goal.from_spec(spec.get("goal"))
        sharing = replace(sharing, automatic=sharing.automatic or goal is not None)
        queue = as_text(as_mapping(meta.get("labels")).get(QUEUE_LABEL))
        return cls(
            name=as_text(meta.get("name")),
            namespace=as_text(meta.get("namespace")) or "default",
            uid=as_text(meta.get("uid")),
            resource_version=as_text(meta.get("resourceVersion")),
            generation=_count(meta.get("generation"), 0),
            created_at=from_rfc3339(meta.get("creationTimestamp")),
            deleting=meta.get("deletionTimestamp") is not None,
            orphaning="orphan" in as_list(meta.get("finalizers")),
            desired=top if sharing.automatic else min(max(replicas, low), top),
            min=low,
            max=top,
            bounded=spec.get("maxReplicas") is not None,
            contradiction=amiss,
            restart_policy=_member(RestartPolicy, worker.get("restartPolicy"), RestartPolicy.ON_FAILURE),
            clean_pod_policy=_member(CleanPodPolicy, spec.get("cleanPodPolicy"), CleanPodPolicy.NONE),
            backoff_limit=_count(spec.get("backoffLimit"), DEFAULT_BACKOFF_LIMIT),
            deadline_s=_seconds(spec.get("activeDeadlineSeconds")),
            ttl_s=_seconds(spec.get("ttlSecondsAfterFinished")),
            suspend=spec.get("suspend") is True,
            cancel=spec.get("cancel") is True,
            rdzv_endpoint=as_text(spec.get("rdzvEndpoint")),
            remove_workers=tuple(from_json(WorkerRef, ref) for ref in as_list(spec.get("removeWorkers"))),
            policy=_policy(as_mapping(spec.get("policy"))),
            sharing=replace(sharing, priority=min(max(sharing.priority, -MAX_PRIORITY), MAX_PRIORITY)),
            goal=goal,
            pools=None if goal is not None or queue else PoolOrder.from_spec(spec.get("pools")),
            queue=queue,
            priority_class=as_text(as_mapping(meta.get("labels")).get(PRIORITY_CLASS_LABEL)),
            user=as_text(as_mapping(meta.get("labels")).get(USER_LABEL)),
            admitted=as_text(as_mapping(meta.get("annotations")).get(ANNOTATION_ADMITTED)),
            template=as_mapping(worker.get("template")),
            scaled_by=as_text(as_mapping(meta.get("annotations")).get(ANNOTATION_SCALED_BY)),
            moving_to=as_text(as_mapping(meta.get("annotations")).get(ANNOTATION_MOVING_TO)),
            moving_from=as_text(as_mapping(meta.get("annotations")).get(ANNOTATION_MOVING_FROM)),
            moved_to=as_text(as_mapping(meta.get("annotations")).get(ANNOTATION_MOVED_TO)),
            former_storages=tuple(
                as_text(as_mapping(meta.get("annotations")).get(ANNOTATION_FORMER_STORAGES)).splitlines()
            ),
            notify=as_text(as_mapping(meta.get("annotations")).get(ANNOTATION_NOTIFY)),
            status=from_json(JobStatus, manifest.get("status")),
        )


def worker_name(job: str, index: int) -> str:
    """The name of the pod and of its Service, as in TorchElastic."""
    return f"{job}-worker-{index}"


def worker_labels(job: str, index: int) -> dict[str, str]:
    """TorchElastic's four labels."""
    return {LABEL_GROUP: GROUP, LABEL_JOB: job, LABEL_TYPE: "worker", LABEL_INDEX: str(index)}


def _count(value: object, default: int) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else default


def _seconds(value: object) -> float | None:
    if not isinstance(value, int | float) or isinstance(value, bool) or not value >= 0:
        return None
    return float(min(value, MAX_SECONDS))


def _policy(data: Mapping[str, Any]) -> Policy:
    given: dict[str, Any] = {
        f.name: _seconds(data.get(camel(f.name))) for f in fields(Policy) if f.name.endswith("_seconds")
    }
    known = Policy(**{name: value for name, value in given.items() if value is not None})
    return replace(known, on_nan=_member(OnNan, data.get("onNan"), OnNan.WARN))


def _member(kind: type[E], value: object, default: E) -> E:
    return next((member for member in kind if member.value == value), default)
