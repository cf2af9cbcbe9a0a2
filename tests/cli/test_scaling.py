"""What a wish to scale becomes: a patch within the job's bounds, or one line."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from elasticctl.cli.scale import Wish
from elasticctl.cli.scaling import scale_patch
from elasticctl.errors import ConflictError, ElasticctlError, NotFoundError, UsageError
from elasticctl.spec import ANNOTATION_SCALED_BY

JOB: dict[str, Any] = {
    "metadata": {"name": "digits", "namespace": "default", "resourceVersion": "7", "uid": "u"},
    "spec": {
        "minReplicas": 2,
        "maxReplicas": 6,
        "replicaSpecs": {
            "Worker": {
                "replicas": 4,
                "template": {"spec": {"containers": [{"name": "w", "resources": {"limits": {"nvidia.com/gpu": 2}}}]}},
            }
        },
    },
    "status": {"phase": "Running"},
}
PODS = [{"metadata": {"name": f"digits-worker-{n}", "uid": f"uid-{n}"}} for n in range(4)]


def workers(patch: dict[str, Any]) -> int:
    found: int = patch["spec"]["replicaSpecs"]["Worker"]["replicas"]
    return found


@pytest.mark.parametrize(
    ("wish", "count"),
    [
        (Wish(to=6), 6),
        (Wish(add=2), 6),
        (Wish(remove=2), 2),
        (Wish(gpus=10), 5),
        (Wish(remove_worker=("1", "worker-3")), 2),
        (Wish(remove_worker=("1", "digits-worker-1")), 3),
    ],
)
def test_the_number_of_workers(wish: Wish, count: int) -> None:
    patch = scale_patch(JOB, PODS, wish)
    assert workers(patch) == count
    assert patch["metadata"] == {"annotations": {ANNOTATION_SCALED_BY: "user"}, "resourceVersion": "7"}


def test_workers_are_removed_by_uid_and_old_wishes_end_with_their_workers() -> None:
    job = copy.deepcopy(JOB)
    job["spec"]["removeWorkers"] = [
        {"name": "digits-worker-0", "uid": "gone"},
        {"name": "digits-worker-2", "uid": "uid-2"},
    ]
    assert scale_patch(job, PODS, Wish(remove_worker=("1",)))["spec"]["removeWorkers"] == [
        {"name": "digits-worker-2", "uid": "uid-2"},
        {"name": "digits-worker-1", "uid": "uid-1"},
    ]


def test_without_a_maximum_there_is_room() -> None:
    job = copy.deepcopy(JOB)
    del job["spec"]["maxReplicas"]
    assert workers(scale_patch(job, PODS, Wish(to=40))) == 40


@pytest.mark.parametrize(
    ("wish", "kind", "message"),
    [
        (Wish(to=7), UsageError, "7 workers are more than the maximum of digits, 6"),
        (Wish(add=3), UsageError, "7 workers are more than the maximum of digits, 6"),
        (Wish(remove=3), UsageError, "1 worker is fewer than the minimum of digits, 2"),
        (Wish(gpus=5), UsageError, "--gpus 5: a worker of digits has 2 GPUs, so it must be a multiple of 2"),
        (Wish(remove_worker=("9",)), NotFoundError, "digits has no worker digits-worker-9; it has digits-worker-0, "),
        (Wish(remove_worker=("x",)), UsageError, '"x" names no worker; they are called digits-worker-0 (or 0)'),
    ],
)
def test_wishes_out_of_bounds(wish: Wish, kind: type[ElasticctlError], message: str) -> None:
    with pytest.raises(kind) as caught:
        scale_patch(JOB, PODS, wish)
    assert str(caught.value).startswith(message)


def test_a_job_that_has_ended_is_left_alone() -> None:
    with pytest.raises(ConflictError, match=r"digits has ended \(Succeeded\) and cannot be scaled"):
        scale_patch({**JOB, "status": {"phase": "Succeeded"}}, PODS, Wish(to=3))


def test_a_cpu_job_has_no_gpus_to_count() -> None:
    job = copy.deepcopy(JOB)
    del job["spec"]["replicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]["resources"]
    with pytest.raises(UsageError, match="digits runs on CPUs; say --to N, in workers"):
        scale_patch(job, PODS, Wish(gpus=4))
