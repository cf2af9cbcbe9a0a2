"""What a request to scale becomes: a patch within the job's bounds, or one line."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from elasticctl.api.errors import ConflictError, ElasticctlError, NotFoundError, UsageError
from elasticctl.api.spec import ANNOTATION_SCALED_BY, ElasticJob
from elasticctl.cluster.local.client import LocalCluster
from elasticctl.operations.scale import Awaited, ScaleChange, ScaleRequest, await_workers, roll_back, scale, scale_patch
from elasticctl.operations.target import Target
from elasticctl.settings.contexts import Context
from tests.support.cli import Run
from tests.support.jobs import FOREVER, shell_job
from tests.support.waiting import wait_until

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
        (ScaleRequest(to=6), 6),
        (ScaleRequest(add=2), 6),
        (ScaleRequest(remove=2), 2),
        (ScaleRequest(gpus=10), 5),
        (ScaleRequest(remove_worker=("1", "worker-3")), 2),
        (ScaleRequest(remove_worker=("1", "digits-worker-1")), 3),
    ],
)
def test_the_number_of_workers(wish: ScaleRequest, count: int) -> None:
    patch = scale_patch(JOB, PODS, wish)
    assert workers(patch) == count
    assert patch["metadata"] == {"annotations": {ANNOTATION_SCALED_BY: "user"}}


def test_workers_are_removed_by_uid_and_old_requests_end_with_their_workers() -> None:
    job = copy.deepcopy(JOB)
    job["spec"]["removeWorkers"] = [
        {"name": "digits-worker-0", "uid": "gone"},
        {"name": "digits-worker-2", "uid": "uid-2"},
    ]
    assert scale_patch(job, PODS, ScaleRequest(remove_worker=("1",)))["spec"]["removeWorkers"] == [
        {"name": "digits-worker-2", "uid": "uid-2"},
        {"name": "digits-worker-1", "uid": "uid-1"},
    ]


def test_without_a_maximum_there_is_room() -> None:
    job = copy.deepcopy(JOB)
    del job["spec"]["maxReplicas"]
    assert workers(scale_patch(job, PODS, ScaleRequest(to=40))) == 40


@pytest.mark.parametrize(
    ("wish", "kind", "message"),
    [
        (ScaleRequest(to=7), UsageError, "7 workers are more than the maximum of digits, 6"),
        (ScaleRequest(add=3), UsageError, "7 workers are more than the maximum of digits, 6"),
        (ScaleRequest(remove=3), UsageError, "1 worker is fewer than the minimum of digits, 2"),
        (ScaleRequest(gpus=5), UsageError, "--gpus 5: a worker of digits has 2 GPUs, so it must be a multiple of 2"),
        (
            ScaleRequest(remove_worker=("9",)),
            NotFoundError,
            "digits has no worker digits-worker-9. It has digits-worker-0, ",
        ),
        (ScaleRequest(remove_worker=("x",)), UsageError, '"x" is not the name of a worker. FIX: give digits-worker-0'),
    ],
)
def test_requests_out_of_bounds(wish: ScaleRequest, kind: type[ElasticctlError], message: str) -> None:
    with pytest.raises(kind) as caught:
        scale_patch(JOB, PODS, wish)
    assert str(caught.value).startswith(message)


def test_a_job_that_has_ended_is_left_alone() -> None:
    with pytest.raises(ConflictError, match=r"digits has ended \(Succeeded\) and cannot be scaled"):
        scale_patch({**JOB, "status": {"phase": "Succeeded"}}, PODS, ScaleRequest(to=3))


def test_a_cpu_job_has_no_gpus_to_count() -> None:
    job = copy.deepcopy(JOB)
    del job["spec"]["replicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]["resources"]
    with pytest.raises(UsageError, match=r"digits runs on CPUs. FIX: give the number of workers with --to N"):
        scale_patch(job, PODS, ScaleRequest(gpus=4))


def test_automatic_is_a_request_of_its_own_and_a_number_ends_it() -> None:
    assert scale_patch(JOB, PODS, ScaleRequest(auto=True))["spec"] == {"sharing": {"automatic": True}}
    automatic = copy.deepcopy(JOB)
    automatic["spec"]["sharing"] = {"automatic": True}
    automatic["status"] |= {"desired": 3, "share": {"workers": 3}}
    patch = scale_patch(automatic, PODS, ScaleRequest(add=1))
    assert (workers(patch), patch["spec"]["sharing"]) == (4, {"automatic": False}), "one more than it was given"
    assert workers(scale_patch(automatic, PODS, ScaleRequest(to=6))) == 6
    assert "sharing" not in scale_patch(JOB, PODS, ScaleRequest(to=6))["spec"]


def test_a_change_in_words() -> None:
    assert ScaleChange(2, 4).words == "2 -> 4 workers"
    assert ScaleChange(2, 6, is_automatic=True).words == "as many workers as fit, 6 at most"


@pytest.fixture
def target(local_cluster: LocalCluster) -> Target:
    """A local cluster on which a worker of the job `digits`, and no more, finds a place."""
    from elasticctl.cluster.local.capacity import LocalSharing

    local_cluster.set_sharing(LocalSharing(on=True, cpu_slots=1))
    local_cluster.create_job(shell_job("digits", FOREVER, 1, minReplicas=1, maxReplicas=3))
    found = Target(Context("local", "local"), "default", local_cluster)
    wait_until(lambda: local_cluster.get_job("default", "digits").get("status", {}).get("phase") == "Running")
    return found


def digits(target: Target) -> ElasticJob:
    return ElasticJob.from_manifest(target.cluster.get_job("default", "digits"))


def test_a_scaling_that_does_not_get_its_workers_is_rolled_back(target: Target, run: Run) -> None:
    done = run("scale", "digits", "--to", "2", "--timeout", "1s", "--rollback")
    assert done.code == 124
    assert done.err.splitlines() == [
        "digits: 1 -> 2 workers",
        "digits: 1 of 2 workers running after 1 s",
        "digits: rolled back to 1 worker",
    ]
    assert digits(target).desired == 1
    wait_until(lambda: digits(target).status.observed_generation == digits(target).generation)
    assert digits(target).status.phase == "Running"


def test_a_dry_run_says_what_would_change_and_changes_nothing(target: Target, run: Run) -> None:
    before = target.cluster.get_job("default", "digits")["spec"]
    for words, said in [
        (("--to", "3"), "digits: 1 -> 3 workers (dry run: nothing changes)\n"),
        (("--auto",), "digits: as many workers as fit, 3 at most (dry run: nothing changes)\n"),
        (("--to", "4"), "error: 4 workers are more than the maximum of digits, 3\n"),
    ]:
        done = run("scale", "digits", *words, "--dry-run")
        assert (done.code, done.out, done.err) == (2 if said.startswith("error") else 0, "", said)
    assert target.cluster.get_job("default", "digits")["spec"] == before


def test_a_later_request_of_another_user_is_not_rolled_back(target: Target, run: Run) -> None:
    found = target.find("digits")
    change = scale(target, found, ScaleRequest(to=2))
    scale(target, found, ScaleRequest(to=3))
    assert not roll_back(target, found, change)
    assert digits(target).desired == 3


class Written:
    """A cluster on which a controller has written the job's status between each read and the first few patches."""

    def __init__(self, writes: int) -> None:
        self.job, self.writes = copy.deepcopy(JOB), writes

    def get_job(self, namespace: str, name: str) -> dict[str, Any]:
        return copy.deepcopy(self.job)

    def patch_job(self, namespace: str, name: str, patch: dict[str, Any]) -> dict[str, Any]:
        if self.writes:
            self.writes -= 1
            self.job["metadata"]["resourceVersion"] = str(int(self.job["metadata"]["resourceVersion"]) + 1)
        if patch["metadata"]["resourceVersion"] != self.job["metadata"]["resourceVersion"]:
            raise ConflictError("the job has been modified")
        self.job["spec"]["replicaSpecs"]["Worker"]["replicas"] = workers(patch)
        return self.get_job(namespace, name)


def test_a_status_written_meanwhile_does_not_block_a_scaling() -> None:
    cluster: Any = Written(writes=2)
    target = Target(Context("lab", "kubernetes"), "default", cluster)
    change = scale(target, JOB, ScaleRequest(to=6))
    assert (change.before, change.after) == (4, 6)
    cluster.writes = 2
    assert roll_back(target, JOB, change)
    assert workers(cluster.job) == 4
    cluster.writes = 9
    with pytest.raises(ConflictError):
        scale(target, JOB, ScaleRequest(to=6))


def test_another_job_of_the_same_name_is_not_rolled_back() -> None:
    cluster: Any = Written(writes=0)
    target = Target(Context("lab", "kubernetes"), "default", cluster)
    change = scale(target, JOB, ScaleRequest(to=6))
    cluster.job["metadata"]["uid"] = "another"
    for act in (lambda: roll_back(target, JOB, change), lambda: await_workers(target, JOB, 6, None)):
        with pytest.raises(NotFoundError, match="another job now has its name"):
            act()
    assert workers(cluster.job) == 6


def test_scale_does_not_wait_for_the_workers_of_a_suspended_job() -> None:
    cluster: Any = Written(writes=0)
    cluster.job["spec"]["suspend"] = True
    target = Target(Context("lab", "kubernetes"), "default", cluster)
    assert await_workers(target, JOB, 4, None)[0] is Awaited.SUSPENDED


def test_workers_that_wait_for_a_place_are_not_training(target: Target) -> None:
    from elasticctl.cluster.local.capacity import LocalSharing

    assert isinstance(target.cluster, LocalCluster)
    target.cluster.set_sharing(LocalSharing(on=False))
    wait_until(lambda: digits(target).status.share is None)
    scale(target, target.find("digits"), ScaleRequest(to=2))
    assert await_workers(target, target.find("digits"), 2, None)[0] is Awaited.RUNNING
    assert sum(worker.phase == "Running" for worker in digits(target).status.workers) == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--rollback", "--to", "2"), "error: --rollback needs a time limit. FIX: add --timeout 10m, for example\n"),
        (
            ("--auto", "--wait"),
            "error: --auto sets no number of workers to wait for. FIX: leave out --wait and --rollback\n",
        ),
        (("--auto", "--to", "2"), "error: no size given. FIX: add one of"),
        (("--to", "2", "--timeout", "5m"), "error: --timeout has no effect without waiting"),
    ],
)
def test_requests_that_make_no_sense(run: Run, private_home: Any, words: tuple[str, ...], message: str) -> None:
    done = run("scale", "digits", *words)
    assert (done.code, done.err.startswith(message)) == (2, True), done.err
