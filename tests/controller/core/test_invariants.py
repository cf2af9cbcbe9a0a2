"""What always holds: a controller with stale caches and crashes in front of an unkind cluster."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from elasticctl.api.observed.workers import Pod
from elasticctl.api.spec import CleanPodPolicy, ElasticJob, PodPhase, Policy, RestartPolicy, WorkerRef, worker_name
from elasticctl.api.status import Phase, ShareStatus
from elasticctl_controller.core.phase import DEADLINE_EXCEEDED
from elasticctl_controller.core.reconcile import apply_share
from tests.support.controller.samples import JOB_UID, termination_message
from tests.support.controller.world import Faults, World

NODES = st.sampled_from(["node-a", "node-b", "node-c"])
ENDS: list[tuple[str, dict[str, Any]]] = [
    ("application", {"exit_code": 1, "reason": "Error"}),
    ("application", {"exit_code": 1, "message": termination_message("application")}),
    ("application", {"exit_code": 139, "message": "{not json"}),
    ("collateral", {"exit_code": 1, "message": termination_message("collateral")}),
    ("stuck", {"exit_code": 1, "message": termination_message("stuck")}),
    ("preempted", {"exit_code": 143, "message": termination_message("preempted")}),
    ("preempted", {"exit_code": 1, "message": termination_message("preempted")}),
    ("killed", {"exit_code": 137}),
    ("killed", {"exit_code": None}),
    ("oom", {"exit_code": 137, "reason": "OOMKilled"}),
    ("disrupted", {"exit_code": 1, "disruption_target": True}),
    ("disrupted", {"exit_code": 0, "disruption_target": True}),
    ("success", {"exit_code": 0}),
]
FAULTS = st.builds(
    Faults,
    lose_write_answer=st.sampled_from([False, False, False, True]),
    action_fates=st.lists(st.sampled_from(["ok", "ok", "lost answer", "refused"]), max_size=3).map(tuple),
    crash_after=st.none() | st.integers(0, 3),
)
QUIET_PASSES = 200


class Cluster(RuleBasedStateMachine):
    """Rules are what may happen; the checks are in `World`, and in `teardown`, where the storm is over."""

    def __init__(self) -> None:
        super().__init__()
        self.world: World

    @initialize(
        desired=st.sampled_from([3, 0, 1, 2, 4]),
        low=st.integers(0, 2),
        spare=st.integers(0, 2),
        restart=st.sampled_from([RestartPolicy.ON_FAILURE, *RestartPolicy]),
        clean=st.sampled_from(CleanPodPolicy),
        backoff_limit=st.sampled_from([100, 0, 1, 3]),
        deadline_s=st.sampled_from([None, None, None, 60.0]),
        ttl_s=st.sampled_from([None, 0.0, 30.0]),
        started=st.booleans(),
    )
    def submit(self, desired, low, spare, restart, clean, backoff_limit, deadline_s, ttl_s, started):
        top = max(desired, low) + spare
        self.world = World(
            ElasticJob(
                name="digits",
                uid=JOB_UID,
                generation=1,
                desired=max(desired, low),
                min=low,
                max=top,
                restart_policy=restart,
                clean_pod_policy=clean,
                backoff_limit=backoff_limit,
                deadline_s=deadline_s,
                ttl_s=ttl_s,
                policy=Policy(straggler_seconds=5.0),
            )
        )
        if started:
            self.a_calm_stretch("node-a", 3)

    # The controller and its caches

    @rule(faults=FAULTS)
    def a_pass(self, faults):
        self.world.a_pass(faults)

    @rule(node=NODES, passes=st.integers(2, 4))
    def a_calm_stretch(self, node, passes):
        for _ in range(passes):
            self.world.crash()
            self.world.a_pass()
            self.all_pending_pods_run(node)

    @rule(jobs=st.integers(0, 3), pods=st.integers(0, 5), nodes=st.integers(0, 1))
    def news_arrives(self, jobs, pods, nodes):
        self.world.jobs.catch_up(jobs)
        self.world.pods.catch_up(pods)
        self.world.nodes.catch_up(nodes)

    @rule()
    def the_controller_crashes(self):
        self.world.crash()

    @rule(seconds=st.sampled_from([0.1, 1.0, 4.0, 12.0, 40.0, 200.0]))
    def time_passes(self, seconds):
        self.world.now += seconds

    # Pods and nodes

    @rule(node=NODES)
    def all_pending_pods_run(self, node):
        for pod in self._pods(PodPhase.PENDING):
            if node not in self.world.nodes.latest:
                self.world.run_pod(pod, node)

    @precondition(lambda self: self._pods(PodPhase.RUNNING))
    @rule(data=st.data(), ends=st.lists(st.sampled_from(ENDS), min_size=1, max_size=3), stamped=st.booleans())
    def workers_end(self, data, ends, stamped):
        for fact, fields in ends:
            pods = [pod for pod in self._pods(PodPhase.RUNNING) if pod.node not in self.world.nodes.latest]
            if pods:
                stamp = {"finished_at": self.world.stamp()} if stamped else {}
                self.world.end_pod(data.draw(st.sampled_from(pods)), fact, **fields, **stamp)

    @precondition(lambda self: self._pods(PodPhase.RUNNING))
    @rule(data=st.data())
    def a_worker_stops_answering(self, data):
        self.world.stop_answering(data.draw(st.sampled_from(self._pods(PodPhase.RUNNING))))

    @precondition(lambda self: self.world.ours())
    @rule(data=st.data(), gracefully=st.booleans(), announced=st.booleans())
    def a_pod_is_deleted_by_others(self, data, gracefully, announced):
        pod = data.draw(st.sampled_from(self.world.ours()))
        self.world.facts[pod.uid].add("deleted")
        if gracefully:
            if announced:
                self.world.facts[pod.uid].add("disrupted")
            self.world.put(replace(pod, deleting=True, disruption_target=pod.disruption_target or announced))
        else:
            self.world.drop(pod)

    @rule()
    def terminating_pods_leave(self):
        for pod in self.world.ours():
            if pod.deleting and pod.node not in self.world.nodes.latest:
                self.world.leave(pod)

    @rule(node=NODES)
    def a_node_is_lost(self, node):
        self.world.lose_node(node)

    @rule(node=NODES)
    def a_node_is_back(self, node):
        self.world.find_node(node)

    @rule(nodes=st.frozensets(NODES))
    def nodes_give_notice(self, nodes):
        self.world.give_notice(nodes)

    @rule(index=st.integers(0, 5), owner=st.sampled_from(["", "another-job"]), phase=st.sampled_from(PodPhase))
    def a_foreign_pod_takes_a_name(self, index, owner, phase):
        name = worker_name("digits", index)
        if name not in self.world.pods.latest:
            self.world.put(Pod(name, f"foreign-{index}", None, owner, phase))

    # The user

    @rule(replicas=st.integers(0, 6))
    def the_user_scales(self, replicas):
        self.world.edit(desired=replicas)

    @rule(low=st.integers(0, 3), top=st.integers(1, 6))
    def the_user_changes_the_bounds(self, low, top):
        self.world.edit(min=low, max=top)

    @rule(suspend=st.sampled_from([False, False, True]))
    def the_user_suspends_or_resumes(self, suspend):
        self.world.edit(suspend=suspend)

    # Sharing

    @rule(data=st.data(), workers=st.none() | st.integers(0, 6))
    def the_job_is_given_another_share(self, data, workers):
        uids = [pod.uid for pod in self.world.ours()]
        self.world.share = None if workers is None else ShareStatus(workers, message="shared", since=self.world.stamp())
        self.world.unwanted = frozenset(data.draw(st.lists(st.sampled_from(uids)))) if uids else frozenset()

    @precondition(lambda self: self.world.ours())
    @rule(data=st.data())
    def the_user_removes_a_worker(self, data):
        pod = data.draw(st.sampled_from(self.world.ours()))
        job = self.world.jobs.latest
        self.world.edit(desired=job.desired - 1, remove_workers=(*job.remove_workers, WorkerRef(pod.name, pod.uid)))

    @precondition(lambda self: len(self.world.jobs.versions) > 15)
    @rule()
    def the_user_cancels(self):
        self.world.edit(cancel=True)

    # After the storm

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        world = self.world
        world.crash()
        world.edit(suspend=False)
        world.give_notice(frozenset())
        for pod in list(world.pods.latest.values()):
            if pod.owner_uid != JOB_UID:
                assert pod.uid.startswith("foreign")
                world.drop(pod)
        self._settle()
        if not world.job_deleted:
            self._check_rest()

    def _settle(self) -> None:
        """Only events and requeues lead to passes now, as in the loop; everything has to come to rest."""
        world = self.world
        for _ in range(QUIET_PASSES):
            before = (len(world.jobs.versions), len(world.pods.versions))
            world.crash()
            decision = world.a_pass()
            self._kindly()
            if world.job_deleted:
                return
            if (len(world.jobs.versions), len(world.pods.versions)) == before:
                if decision.requeue_s is None:
                    return
                world.now += decision.requeue_s
        raise AssertionError(f"no rest after {QUIET_PASSES} passes: {decision}")

    def _kindly(self) -> None:
        world = self.world
        for pod in world.ours():
            if pod.deleting and pod.node not in world.nodes.latest:
                world.leave(pod)
            elif pod.phase is PodPhase.PENDING and not pod.deleting:
                world.run_pod(pod, "node-d")

    def _check_rest(self) -> None:
        world, job = self.world, self.world.jobs.latest
        live = [pod for pod in world.ours() if not pod.ended]
        assert world.a_pass().actions == ()
        assert world.jobs.latest is job, "a job at rest was written"
        status = job.status
        if not status.phase.terminal:
            desired = apply_share(job, world.share).desired
            assert len(live) == desired == status.active
            needed = max(1, job.min)
            assert (status.phase is Phase.RUNNING) == (desired >= needed)
        elif job.clean_pod_policy is not CleanPodPolicy.NONE or status.reason in ("Cancelled", DEADLINE_EXCEEDED):
            assert live == []

    def _pods(self, phase: PodPhase) -> list[Pod]:
        return [pod for pod in self.world.ours() if pod.phase is phase and not pod.deleting]


TestCluster = Cluster.TestCase
TestCluster.settings = settings(max_examples=60, stateful_step_count=40, suppress_health_check=list(HealthCheck))
