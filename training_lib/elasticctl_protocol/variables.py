"""The names of all environment variables of elasticctl."""

from enum import StrEnum

# On a user's machine, for the command line.

CONTEXT = "ELASTICCTL_CONTEXT"
DEBUG = "ELASTICCTL_DEBUG"
HOME = "ELASTICCTL_HOME"
"""The folder of contexts and of the local cluster; workers of the local cluster inherit it."""
USER = "ELASTICCTL_USER"
CLOSED_STORAGES = "ELASTICCTL_CLOSED_STORAGES"
"""In the dashboard in a cluster: it reads no storage, and this says why."""

# From the controller, in every worker.

JOB = "ELASTICCTL_JOB"
JOB_UID = "ELASTICCTL_JOB_UID"
NAMESPACE = "ELASTICCTL_NAMESPACE"
WORKER = "ELASTICCTL_WORKER"
WORKER_INDEX = "ELASTICCTL_WORKER_INDEX"
POD_UID = "ELASTICCTL_POD_UID"
"""On the local cluster, in the environment of every process of a worker, so that leftover ones can be found."""
POD_IP = "ELASTICCTL_POD_IP"
RENDEZVOUS_ENDPOINT = "ELASTICCTL_RDZV_ENDPOINT"
TOKEN_FILE = "ELASTICCTL_RDZV_TOKEN_FILE"  # noqa: S105 - a name, not a secret
PEER_KEY_FILE = "ELASTICCTL_PEER_KEY_FILE"
"""The file with the key by which the workers of a job recognize each other."""
MIN_WORKERS = "ELASTICCTL_MIN_WORKERS"
MAX_WORKERS = "ELASTICCTL_MAX_WORKERS"
GRACE_S = "ELASTICCTL_GRACE_S"
"""How many seconds after SIGTERM the worker is killed."""
HANG_TIMEOUT_S = "ELASTICCTL_HANG_TIMEOUT_S"
ON_NAN = "ELASTICCTL_ON_NAN"
TERMINATION_LOG = "ELASTICCTL_TERMINATION_LOG"
"""The file for a worker's termination message; without it, Kubernetes' default path."""

# From the client, in a job's pod template, or set there by a user.

STORAGE = "ELASTICCTL_STORAGE"
START_FROM = "ELASTICCTL_START_FROM"
"""The checkpoint that a run without one of its own starts from: a URL, or URL#STEP."""
RESUME = "ELASTICCTL_RESUME"
SETUP = "ELASTICCTL_SETUP"
SETUP_CACHE = "ELASTICCTL_SETUP_CACHE"
WORKSPACE = "ELASTICCTL_WORKSPACE"
"""URL#DIGEST: where the job's workspace is stored, and its digest."""
WORKSPACE_FROM = "ELASTICCTL_WORKSPACE_FROM"
"""The path of the workspace on the machine where the job was submitted."""
NOTICE_SOURCE = "ELASTICCTL_NOTICE_SOURCE"
METADATA_URL = "ELASTICCTL_METADATA_URL"
LOG_UPLOAD = "ELASTICCTL_LOG_UPLOAD"
STOP_GRACE_S = "ELASTICCTL_STOP_GRACE_S"
RANKS_PER_WORKER = "ELASTICCTL_RANKS_PER_WORKER"

# From the launcher, in its ranks.

RUN_ID = "ELASTICCTL_RUN_ID"
ATTEMPT = "ELASTICCTL_ATTEMPT"
GENERATION = "ELASTICCTL_GENERATION"
REPORTS_SOCKET = "ELASTICCTL_AGENT_SOCKET"
NOTICE_FILE = "ELASTICCTL_NOTICE_FILE"
LINK_SOCKET = "ELASTICCTL_LINK"
COPIES_SOCKET = "ELASTICCTL_COPIES"
LOCAL_TIER = "ELASTICCTL_LOCAL_TIER"
PLACE = "ELASTICCTL_PLACE"
EXAMPLE_INPUTS = "ELASTICCTL_EXAMPLE_INPUTS"
"""What the ranks that train call their model with, for a newcomer that warms up before it has a place."""
HOSTFILE = "ELASTICCTL_HOSTFILE"
DISCOVER_HOSTS = "ELASTICCTL_DISCOVER_HOSTS"


class OnNan(StrEnum):
    """The values of `ON_NAN`: what to do about a loss that is NaN or infinite. Without it, training continues."""

    WARN = "warn"
    STOP = "stop"
    ROLLBACK = "rollback"
