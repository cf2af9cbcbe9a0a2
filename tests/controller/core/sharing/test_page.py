"""What is decided is what docs/sharing.md says, by a model that is written from the page alone."""

from __future__ import annotations

import random
import re
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elasticctl_controller.core.sharing.claims import Claim, GrantReason, Node, Project, SharedPool, SharingDecision
from elasticctl_controller.core.sharing.grant_workers import decide
from tests.support.controller.shared_pool import NOTICE_S, RULES, Place, sizes
from tests.support.controller.sharing_page import Page

NOW = 1e6
"""Long after everything: all patience has ended, and every size has settled."""
EVENTS = 12

quotas = st.none() | st.integers(0, 7)
jobs = st.tuples(
    st.sampled_from("abc"), st.integers(1, 4), st.integers(0, 5), st.sampled_from([1, 1, 2]), st.sampled_from([0, 0, 3])
)


@settings(max_examples=200)
@given(
    slots=st.integers(1, 14),
    wanted=st.lists(jobs, min_size=1, max_size=7),
    quota=st.tuples(quotas, quotas, quotas),
    limit=st.tuples(quotas, quotas, quotas),
    weight=st.sampled_from([1.0, 2.0]),
)
def test_the_division_is_the_pages(
    slots: int,
    wanted: list[tuple[str, int, int, int, int]],
    quota: tuple[int | None, ...],
    limit: tuple[int | None, ...],
    weight: float,
) -> None:
    claims = [
        Claim(f"{project}/j{at}", project, "t4", least, least + more, each, priority, float(at), changed_at=float(at))
        for at, (project, least, more, each, priority) in enumerate(wanted)
    ]
    projects = {
        name: build_project(name, own, most, weight if name == "b" else 1.0)
        for name, own, most in zip("abc", quota, limit, strict=True)
    }
    pool = SharedPool("t4", (Node("n", slots),))
    found = decide([pool], projects.values(), claims, NOW, RULES)
    assert sizes(found) == Page("t4", slots, projects, claims, NOW).decide()


def build_project(name: str, guaranteed: int | None, limit: int | None, weight: float) -> Project:
    return Project(name, weight, *({} if slots is None else {"t4": slots} for slots in (guaranteed, limit)))


@pytest.mark.seeds(50, search=1000)
def test_scenarios_follow_the_documented_rules(seed: int) -> None:
    """Jobs, nodes and quotas come and go in virtual time, and each division is the page's.

    `Place.decide` checks besides that nothing is over-committed, and that no limit is passed. At the end nothing
    changes any more, and a notice later every job has what was granted.
    """
    play(SharingScenario(seed))


@pytest.mark.seeds(25, search=500)
def test_workers_of_several_sizes_have_their_nodes_at_rest(seed: int) -> None:
    """Workers of one, two and four slots, of which the page cannot say which nodes they fit."""
    play(LargeWorkersScenario(seed))


def play(scenario: SharingScenario) -> None:
    for _ in range(EVENTS):
        scenario.step()
    scenario.come_to_rest()


def check_words(place: Place, decision: SharingDecision) -> None:
    """What reasons say of other projects is so: lenders have as much to lend, and who is in the way a guarantee."""
    usage = {one.project: one for one in decision.usage}
    free = place.pool.slots - sum(one.used for one in decision.usage)
    lent = Counter[str]()
    for key, grant in decision.grants.items():
        for slots, lender in re.findall(r"(\d+) GPUs? from (\w)", grant.words):
            lent[lender] += int(slots)
        if grant.reason in (GrantReason.WAITS_GUARANTEE, GrantReason.WAITS_PRIORITY, GrantReason.WAITS_TURN):
            job = place.jobs[key]
            missing = job.least * job.slots_per_worker - free
            assert re.match(rf"waits for {missing} GPUs?\b", grant.words), grant.words
        if grant.reason is GrantReason.WAITS_GUARANTEE:
            named = re.findall(r"\b[abc]\b", grant.words)
            assert named, grant.words
            assert all(usage[name].guaranteed and usage[name].used for name in named), grant.words
    for lender, slots in lent.items():
        assert slots <= usage[lender].guaranteed - usage[lender].used, f"{lender} lends {slots}"


class SharingScenario:
    """A pool of one large node with workers of one or two slots, or of several with workers of one."""

    def __init__(self, seed: int) -> None:
        self.seed, self.random, self.submitted = seed, random.Random(seed), 0
        self.large = seed % 2 == 0
        self.sizes = (1, 1, 2) if self.large else (1,)
        self.place = Place({"n0": 12 if self.large else 4}, now=1000.0)

    def step(self) -> None:
        """Something happens, or nothing but that time passes; then it is decided."""
        events = [self.a_job_comes] * 5 + [self.a_job_ends] * 2 + [self.a_job_changes, self.a_quota_changes]
        events += [self.a_node_changes] if self.large else [self.a_node_comes, self.a_node_goes]
        self.random.choice(events)()
        self.decide()
        self.place.follow(self.shuffled)
        self.place.now += self.random.choice([0.0, 1.0, NOTICE_S, 59.0, 60.0, 300.0, 600.0])
        self.place.follow(self.shuffled)

    def shuffled(self, keys: list[str]) -> list[str]:
        return self.random.sample(keys, len(keys))

    def a_job_comes(self) -> None:
        project, least = self.random.choice("abc"), self.random.randint(1, 4)
        key = f"{project}/j{self.submitted}"
        self.submitted += 1
        self.place.jobs[key] = Claim(
            key=key,
            project=project,
            pool="t4",
            least=least,
            most=least + self.random.choice([0, 0, 1, 2, 6]),
            slots_per_worker=self.random.choice(self.sizes),
            priority=self.random.choice([0, 0, 0, 1, 5, -1]),
            submitted_at=self.place.now,
            changed_at=self.place.now,
        )

    def a_job_ends(self) -> None:
        if self.place.jobs:
            self.place.end(self.random.choice(sorted(self.place.jobs)))

    def a_job_changes(self) -> None:
        """Its owner scales it, or gives it another priority."""
        if self.place.jobs:
            key = self.random.choice(sorted(self.place.jobs))
            job, least = self.place.jobs[key], self.random.randint(1, 4)
            most, priority = least + self.random.randint(0, 4), self.random.choice([0, 1])
            self.place.jobs[key] = replace(job, least=least, most=most, priority=priority)

    def a_quota_changes(self) -> None:
        name, slots = self.random.choice("abc"), [None, None, *range(9)]
        guaranteed, limit = self.random.choice(slots), self.random.choice([*slots, *[None] * 9])
        self.place.projects[name] = build_project(name, guaranteed, limit, self.random.choice([1.0, 2.0, 0.0]))

    def a_node_changes(self) -> None:
        self.place.lose("n0")
        self.place.nodes["n0"] = self.random.randint(1, 14)

    def a_node_comes(self) -> None:
        self.place.nodes.setdefault(f"n{self.random.randint(0, 3)}", self.random.randint(1, 6))

    def a_node_goes(self) -> None:
        if self.place.nodes:
            self.place.lose(self.random.choice(sorted(self.place.nodes)))

    def decide(self) -> dict[str, int]:
        place = self.place
        if not place.nodes:
            place.nodes["n0"] = 3
        expected = Page("t4", place.pool.slots, place.projects, list(place.jobs.values()), place.now).decide()
        decision = place.decide()
        assert sizes(decision) == expected, f"scenario {self.seed} at {place.now} s"
        check_words(place, decision)
        return expected

    def come_to_rest(self) -> None:
        for _ in range(6):
            at_rest = self.decide()
            self.place.follow(self.shuffled)
            self.place.now += NOTICE_S
            self.place.follow(self.shuffled)
            for job in self.place.jobs.values():
                assert [bool(worker.node) for worker in job.workers] == [True] * job.granted, f"scenario {self.seed}"
            self.place.now += RULES.patience_s + RULES.settle_s
        assert self.decide() == at_rest, f"scenario {self.seed} does not come to rest"


class LargeWorkersScenario(SharingScenario):
    """A pool of several nodes. A worker that was to go elsewhere may be put in the way of another, and move again."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.large, self.sizes, self.place = False, (1, 2, 4), Place({"n0": 4}, now=1000.0)

    def decide(self) -> dict[str, int]:
        return sizes(self.place.decide())

    def come_to_rest(self) -> None:
        for _ in range(12):
            self._a_round()
        at_rest = self.decide()
        for _ in range(3):
            self._a_round()
            assert self.decide() == at_rest, f"scenario {self.seed} does not come to rest"
        for job in self.place.jobs.values():
            assert [bool(worker.node) for worker in job.workers] == [True] * job.granted, f"scenario {self.seed}"

    def _a_round(self) -> None:
        self.decide()
        for _ in range(2):
            self.place.follow(self.shuffled)
            self.place.now += NOTICE_S
        self.place.follow(self.shuffled)
        self.place.now += RULES.patience_s + RULES.settle_s
