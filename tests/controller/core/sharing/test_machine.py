"""Anything may happen in any order: jobs and nodes come and go, quotas change, workers follow late. See `place`."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from elasticctl_controller.core.sharing.claims import Claim, Project
from tests.support.controller.shared_pool import NOTICE_S, RULES, Place, sizes

PROJECTS = ("a", "b", "c")
NODES = ("n0", "n1", "n2", "n3")
ROUNDS = 12
"""After so many rounds of patience without anything new, nothing may change any more."""

quotas = st.none() | st.integers(0, 6)


class Sharing(RuleBasedStateMachine):
    """One pool of up to four nodes; every worker takes one slot, so that all can be said exactly."""

    slots_per_worker: Sequence[int] = (1,)

    def __init__(self) -> None:
        super().__init__()
        self.place = Place({"n0": 4})
        self.submitted = 0

    # What people do

    @precondition(lambda self: len(self.place.jobs) < 8)
    @rule(
        project=st.sampled_from(PROJECTS),
        least=st.integers(1, 4),
        more=st.sampled_from([0, 0, 1, 2, 6, 50]),
        each=st.integers(0, 2),
        priority=st.sampled_from([0, 0, 0, 1, 5, -1]),
        tie=st.booleans(),
    )
    def a_job_comes(self, project, least, more, each, priority, tie):
        key = f"{project}/j{'x' * (self.submitted % 3)}{self.submitted}"
        self.submitted += 1
        self.place.now += 0.0 if tie else 1.0
        self.place.jobs[key] = Claim(
            key=key,
            project=project,
            pool="t4",
            least=least,
            most=least + more,
            slots_per_worker=self.slots_per_worker[each % len(self.slots_per_worker)],
            priority=priority,
            submitted_at=self.place.now,
            changed_at=self.place.now,
        )

    @precondition(lambda self: self.place.jobs)
    @rule(data=st.data())
    def a_job_ends(self, data):
        self.place.end(data.draw(st.sampled_from(sorted(self.place.jobs))))

    @rule(name=st.sampled_from(PROJECTS), guaranteed=quotas, limit=quotas, weight=st.sampled_from([1.0, 2.0, 0.0]))
    def a_quota_changes(self, name, guaranteed, limit, weight):
        self.place.projects[name] = Project(
            name, weight, {} if guaranteed is None else {"t4": guaranteed}, {} if limit is None else {"t4": limit}
        )

    # Nodes

    @rule(name=st.sampled_from(NODES), slots=st.integers(1, 6))
    def a_node_comes(self, name, slots):
        self.place.nodes.setdefault(name, slots)

    @precondition(lambda self: self.place.nodes)
    @rule(data=st.data())
    def a_node_goes(self, data):
        self.place.lose(data.draw(st.sampled_from(sorted(self.place.nodes))))

    # The controller, and its workers

    @rule()
    def it_is_decided(self):
        self.place.decide()

    @rule(data=st.data())
    def workers_follow(self, data):
        self.place.follow(lambda keys: data.draw(st.permutations(sorted(keys))))

    @rule()
    def a_notice_later_all_have_what_was_granted(self):
        """The bound within which guarantees are met: one pass, and the notice of those who have to go."""
        self.place.decide()
        self.place.follow()
        self.place.now += NOTICE_S
        self.place.follow()
        self.everybody_has_a_node()

    @rule(seconds=st.sampled_from([1.0, NOTICE_S, RULES.settle_s, RULES.patience_s]))
    def time_passes(self, seconds):
        self.place.now += seconds

    @invariant()
    def no_node_holds_more_than_it_has(self):
        self.place.free()

    def teardown(self):
        """Left alone it comes to rest, and then everybody has the workers that were granted."""
        for _ in range(ROUNDS):
            self._a_round(RULES.patience_s + RULES.settle_s)
        settled = sizes(self.place.decide())
        for _ in range(3):
            self._a_round(RULES.patience_s)
            assert sizes(self.place.ask()) == settled
        Sharing.everybody_has_a_node(self)

    def _a_round(self, seconds: float) -> None:
        self.place.decide()
        for _ in range(2):
            self.place.follow()
            self.place.now += NOTICE_S
        self.place.follow()
        self.place.now += seconds

    def everybody_has_a_node(self) -> None:
        for job in self.place.jobs.values():
            assert len(job.workers) == job.granted
            assert all(worker.node for worker in job.workers)


class SharingOfLargeWorkers(Sharing):
    """The same with workers of one, two and four slots, which have to fit their nodes."""

    slots_per_worker = (1, 2, 4)

    def everybody_has_a_node(self) -> None:
        """Not at once: a worker that was to go elsewhere may have been put in its way, and is moved again."""


TestSharing = Sharing.TestCase
TestSharing.settings = settings(max_examples=80, stateful_step_count=40)
TestSharingOfLargeWorkers = SharingOfLargeWorkers.TestCase
TestSharingOfLargeWorkers.settings = settings(max_examples=80, stateful_step_count=40)
