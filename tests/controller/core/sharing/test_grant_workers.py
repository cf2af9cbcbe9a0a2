"""Who gets what, case by case; that it holds in all cases is for `test_page`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elasticctl_controller.core.sharing import grant_workers
from elasticctl_controller.core.sharing.claims import (
    Claim,
    GrantReason,
    Node,
    Project,
    SharedPool,
    SharingDecision,
    SharingRules,
    Worker,
)
from elasticctl_controller.core.sharing.grant_workers import decide
from tests.support.controller.shared_pool import NOTICE_S, RULES, Place, sizes

NOW = 10_000.0


def a_pool(*slots: int, name: str = "t4") -> SharedPool:
    return SharedPool(name, tuple(Node(f"n{number}", count) for number, count in enumerate(slots)))


def a_claim(key: str, least: int, most: int | None = None, **fields) -> Claim:
    """A job of the project before the slash, submitted long ago; with `granted` it has its workers, on no node yet."""
    claim = Claim(key, key.split("/")[0], "t4", least, least if most is None else most, **fields)
    workers = tuple(Worker(f"{key}-{number}", float(number)) for number in range(claim.granted))
    return replace(claim, workers=claim.workers or workers)


def guaranteed(name: str, slots: int, **fields) -> Project:
    return Project(name, guaranteed={"t4": slots}, **fields)


def decided(pool: SharedPool, claims: list[Claim], *projects: Project, now: float = NOW) -> SharingDecision:
    return decide([pool], projects, claims, now, RULES)


NEW = {"submitted_at": NOW, "changed_at": NOW}


@pytest.mark.parametrize(
    ("claims", "projects", "given"),
    [
        pytest.param([a_claim("a/x", 4, 9), a_claim("b/y", 5)], [], (8, 0), id="its least or nothing"),
        pytest.param([a_claim("a/x", 1, 9), a_claim("a/y", 3, 9)], [], (4, 4), id="what is left goes to the fewest"),
        pytest.param(
            [a_claim("a/x", 1, 9, granted=4), a_claim("a/y", 1, 3, granted=3), a_claim("a/z", 1, submitted_at=5.0)],
            [], (4, 3, 1), id="who has the odd worker keeps it",
        ),
        pytest.param(
            [a_claim("a/x", 7), a_claim("a/large", 4, submitted_at=1.0), a_claim("a/small", 1, submitted_at=2.0)],
            [], (7, 0, 1), id="a smaller job runs while a larger one does not fit",
        ),
        pytest.param(
            [a_claim("b/x", 6, granted=6), a_claim("a/large", 8, priority=3), a_claim("a/small", 2, submitted_at=5.0)],
            [guaranteed("a", 2)], (6, 0, 2), id="a guarantee is for whom it covers, even if others wait longer",
        ),
        pytest.param(
            [a_claim("b/x", 6, granted=6), a_claim("a/large", 8, granted=8), a_claim("a/small", 2, submitted_at=5.0)],
            [guaranteed("a", 2)], (6, 0, 2), id="a guarantee is for whom it covers, even if others ran before",
        ),
        pytest.param(
            [a_claim("a/wide", 1, 2, slots_per_worker=4), a_claim("a/narrow", 1, 3), a_claim("b/y", 1, 9)],
            [guaranteed("a", 7)], (1, 3, 1), id="a guarantee grows the workers that it covers",
        ),
        pytest.param(
            [a_claim("a/x", 8), a_claim("b/y", 8, submitted_at=1.0)],
            [guaranteed("a", 7)], (8, 0), id="a guarantee that fits no job is lent rather than left idle",
        ),
        pytest.param(
            [a_claim("a/small", 1), a_claim("a/urgent", 8, priority=5, submitted_at=1.0), a_claim("b/never", 9)],
            [guaranteed("b", 2)], (0, 8, 0), id="what is lent goes to the higher priority",
        ),
        pytest.param(
            [a_claim("a/x", 6, granted=6), a_claim("b/y", 3, **NEW)],
            [guaranteed("b", 2)], (6, 0), id="a job that needs more than the guarantee outranks no other",
        ),
        pytest.param(
            [a_claim("a/x", 6, granted=6), a_claim("b/y", 3, **NEW)],
            [guaranteed("b", 3)], (0, 3), id="a job that needs no more than it does",
        ),
        pytest.param(
            [a_claim("a/x", 1, 99), a_claim("b/y", 1, 99, submitted_at=1.0)],
            [guaranteed("a", 12), guaranteed("b", 4)], (6, 2), id="lost nodes are shared out by guarantee",
        ),
        pytest.param(
            [a_claim("a/x", 1, 99), a_claim("b/y", 1, 99)],
            [Project("a", weight=3.0)], (6, 2), id="the surplus is shared by weight",
        ),
        pytest.param(
            [a_claim("a/w", 2, 6, granted=6), a_claim("a/x", 2, granted=2), a_claim("a/y", 4, priority=1, **NEW)],
            [], (2, 2, 4), id="priority takes workers above the least before whole jobs",
        ),
    ],
)  # fmt: skip
def test_eight_slots_are_divided(claims: list[Claim], projects: list[Project], given: tuple[int, ...]) -> None:
    """As the page says, which `test_page` holds against it in all cases; these are those to begin with."""
    found = sizes(decided(a_pool(8), claims, *projects))
    assert tuple(found[claim.key] for claim in claims) == given


# Guarantees.


def test_a_guarantee_is_met_from_what_was_borrowed_the_youngest_workers_first() -> None:
    borrower = a_claim("a/x", 2, 4, granted=4)
    found = decided(a_pool(4), [borrower, a_claim("b/y", 2)], guaranteed("a", 2), guaranteed("b", 2))
    assert sizes(found) == {"a/x": 2, "b/y": 2}
    grant = found.grants["a/x"]
    assert grant.leave == ("a/x-2", "a/x-3")
    assert (grant.for_key, grant.change) == ("b/y", "gives 2 workers to b/y, because b is guaranteed that many")


def test_unused_slots_are_borrowed_and_reported_as_borrowed() -> None:
    found = decided(a_pool(4), [a_claim("a/x", 2, 4)], guaranteed("a", 2), guaranteed("b", 2))
    assert found.grants["a/x"].borrowed == 2
    assert found.grants["a/x"].words == "has all 4 workers that it asks for; borrows 2 GPUs from b"
    assert [(one.project, one.used, one.borrowed) for one in found.usage] == [("a", 4, 2), ("b", 0, 0)]


def test_lenders_are_named_with_what_they_lend() -> None:
    projects = [guaranteed("b", 2), guaranteed("c", 1)]
    words = {most: decided(a_pool(8), [a_claim("a/x", most)], *projects).grants["a/x"].words for most in (5, 6, 8)}
    assert words[5] == "has all 5 workers that it asks for; 5 GPUs beyond what a is guaranteed"
    beyond = ", and has 5 GPUs beyond what a is guaranteed"
    assert words[6] == f"has all 6 workers that it asks for; borrows 1 GPU from b{beyond}"
    assert words[8] == f"has all 8 workers that it asks for; borrows 2 GPUs from b and 1 GPU from c{beyond}"


def test_a_guarantee_is_the_reason_only_for_what_it_keeps_from_others() -> None:
    holder = a_claim("ma/x", 8, granted=8)
    waits = a_claim("b/y", 1, submitted_at=5.0)
    grant = decided(a_pool(8), [holder, waits], guaranteed("ma", 2)).grants["b/y"]
    assert (grant.reason, grant.words) == (GrantReason.WAITS_TURN, "waits for 1 GPU held by jobs that come first")
    both = [a_claim("b/x", 2), a_claim("c/x", 3), a_claim("a/y", 6, submitted_at=5.0), a_claim("c/z", 1)]
    words = decided(a_pool(8), both, guaranteed("b", 2), guaranteed("c", 3)).grants["a/y"].words
    assert words == "waits for 4 GPUs, 3 of which c is guaranteed"


def test_a_guarantee_outranks_priority() -> None:
    urgent = a_claim("a/urgent", 4, priority=9, granted=4)
    found = decided(a_pool(4), [urgent, a_claim("b/y", 2)], guaranteed("b", 2))
    assert sizes(found) == {"a/urgent": 0, "b/y": 2}
    assert found.grants["a/urgent"].words == "waits for 2 GPUs that b is guaranteed"


def test_a_limit_holds_though_there_is_room() -> None:
    found = decided(a_pool(8), [a_claim("a/x", 2, 8), a_claim("a/y", 2)], Project("a", limit={"t4": 4}))
    assert sizes(found) == {"a/x": 2, "a/y": 2}
    assert found.grants["a/x"].reason is GrantReason.LIMITED
    assert found.grants["a/x"].words == "has 2 of 8 workers: a may have 4 GPUs"


# Priority.


def test_priority_suspends_the_lowest_when_parts_do_not_do() -> None:
    claims = [
        a_claim("a/low", 3, priority=-1, granted=3),
        a_claim("a/elastic", 2, 5, granted=5),
        a_claim("a/urgent", 5, priority=1, submitted_at=NOW, changed_at=NOW),
    ]
    found = decided(a_pool(8), claims)
    assert sizes(found) == {"a/low": 0, "a/elastic": 3, "a/urgent": 5}
    assert found.grants["a/low"].change == "is suspended for a/urgent, which has a higher priority"
    assert found.grants["a/low"].words == "waits for 3 GPUs held by jobs of higher priority, such as a/urgent"


def test_a_suspended_job_resumes_by_itself() -> None:
    low = a_claim("a/low", 3, priority=-1, submitted_at=1.0, changed_at=NOW - 5, ran=True)
    found = decided(a_pool(8), [low])
    assert sizes(found) == {"a/low": 3}
    assert found.grants["a/low"].change == "resumes with 3 workers"
    never = replace(low, ran=False)
    assert decided(a_pool(8), [never]).grants["a/low"].change == "starts with 3 workers", "it only waited"


# Patience and fairness.


def test_a_running_job_is_left_alone_until_an_older_one_has_waited_long() -> None:
    older = a_claim("a/older", 4, submitted_at=NOW, changed_at=NOW)
    younger = a_claim("a/younger", 2, granted=2, submitted_at=NOW + 1, changed_at=NOW + 1)
    waiting = decided(a_pool(4), [older, younger], now=NOW + 599)
    assert sizes(waiting) == {"a/older": 0, "a/younger": 2}
    assert waiting.wake_at == NOW + 600
    assert waiting.grants["a/older"].words == "waits for 2 GPUs held by jobs that come first"
    over = decided(a_pool(4), [older, younger], now=NOW + 600)
    assert sizes(over) == {"a/older": 4, "a/younger": 0}
    assert over.grants["a/younger"].change == "is suspended for a/older, which comes first"


def test_a_stream_of_small_jobs_starves_no_large_one() -> None:
    """Each takes a minute; the large one runs once those before it have ended and its patience has."""
    place = Place({"n0": 4})
    place.jobs["a/large"] = a_claim("a/large", 4, submitted_at=0.5, changed_at=0.5)
    for minute in range(30):
        place.now = 60.0 * minute
        for key in [key for key, job in place.jobs.items() if job.granted and job.changed_at <= place.now - 60]:
            place.end(key)
        key = f"a/small-{minute}"
        place.jobs[key] = a_claim(key, 2, submitted_at=place.now, changed_at=place.now)
        place.decide()
        place.follow()
        if "a/large" not in place.jobs or place.jobs["a/large"].granted:
            break
    assert place.now <= 660.0


def test_a_new_job_starts_immediately_and_gets_its_fair_share_after_a_while() -> None:
    first = a_claim("a/x", 1, 8, granted=8, changed_at=NOW - 10)
    claims = [first, a_claim("b/y", 1, 8, submitted_at=NOW, changed_at=NOW)]
    at_once = decided(a_pool(8), claims)
    assert sizes(at_once) == {"a/x": 7, "b/y": 1}
    claims = [replace(claim, granted=at_once.grants[claim.key].workers, changed_at=NOW, workers=()) for claim in claims]
    assert sizes(decided(a_pool(8), claims, now=NOW + 59)) == {"a/x": 7, "b/y": 1}
    assert decided(a_pool(8), claims, now=NOW + 59).wake_at == NOW + 60
    assert sizes(decided(a_pool(8), claims, now=NOW + 60)) == {"a/x": 4, "b/y": 4}


def test_at_rest_there_is_nothing_to_wake_for() -> None:
    claims = [a_claim("a/x", 1, 8, granted=4), a_claim("b/y", 1, 8, granted=4)]
    found = decided(a_pool(8), claims)
    assert found.wake_at is None
    assert [grant.change for grant in found.grants.values()] == ["", ""]


# What is missing is stated.


def test_demand_up_to_the_most_is_stated_for_autoscalers() -> None:
    found = decided(a_pool(4), [a_claim("a/x", 2, 16), a_claim("a/y", 8)])
    assert {key: grant.pending for key, grant in found.grants.items()} == {"a/x": 12, "a/y": 8}


def test_demand_beyond_a_limit_is_not_stated() -> None:
    found = decided(a_pool(4), [a_claim("a/x", 2, 16), a_claim("a/y", 8)], Project("a", limit={"t4": 6}))
    assert {key: grant.pending for key, grant in found.grants.items()} == {"a/x": 2, "a/y": 0}


@pytest.mark.parametrize(
    ("pool", "reason", "words"),
    [
        (a_pool(), GrantReason.NO_ROOM, "waits for nodes: it needs 2 GPUs, and t4 has 0 GPUs"),
        (a_pool(8, name="h100"), GrantReason.NO_POOL, 'waits for nodes: there is no pool "t4"'),
    ],
)
def test_a_pool_that_is_not_there_is_waited_for(pool: SharedPool, reason: GrantReason, words: str) -> None:
    grant = decided(pool, [a_claim("a/x", 2, 4, granted=2)]).grants["a/x"]
    assert (grant.workers, grant.reason, grant.words) == (0, reason, words)
    assert grant.leave == ("a/x-0", "a/x-1")
    assert grant.pending == 4


def test_a_lack_of_nodes_is_named_as_the_reason() -> None:
    assert decided(a_pool(4), [a_claim("a/x", 2, 6)]).grants["a/x"].words == "has 4 of 6 workers: t4 has 4 GPUs in all"
    shrunk = decided(a_pool(4), [a_claim("a/x", 2, 6, granted=6)]).grants["a/x"]
    assert shrunk.change == "gives up 2 workers: t4 has only 4 GPUs"


def test_a_limit_that_was_lowered_is_named() -> None:
    shrunk = decided(a_pool(8), [a_claim("a/x", 2, 6, granted=6)], Project("a", limit={"t4": 3})).grants["a/x"]
    assert (shrunk.workers, shrunk.change) == (3, "gives up 3 workers: a may have no more")
    never = decided(a_pool(8), [a_claim("a/x", 4)], Project("a", limit={"t4": 3})).grants["a/x"]
    assert never.words == "cannot start: it needs 4 GPUs, and a may have 3 GPUs"
    full = decided(a_pool(8), [a_claim("a/x", 2), a_claim("a/y", 2)], Project("a", limit={"t4": 3})).grants["a/y"]
    assert full.words == "waits for other jobs of its project: a may have 3 GPUs"


def test_a_job_that_asks_for_fewer_workers_is_not_preempted_for_another() -> None:
    asked = a_claim("a/x", 1, 2, granted=6)
    found = decided(a_pool(8), [asked, a_claim("b/y", 6)])
    assert found.grants["a/x"].change == "gives up 4 workers: it asks for fewer"


# Workers of several slots.


def on(node: str, *names: str) -> tuple[Worker, ...]:
    return tuple(Worker(name, float(number), node) for number, name in enumerate(names))


def test_a_worker_is_on_one_node_as_a_whole() -> None:
    found = decided(a_pool(3, 3), [a_claim("a/x", 1, 4, slots_per_worker=2)])
    assert sizes(found) == {"a/x": 2}
    assert found.grants["a/x"].nodes == ("n0", "n1")
    none = decided(a_pool(3, 3), [a_claim("a/x", 1, slots_per_worker=4)]).grants["a/x"]
    assert none.words == "waits for nodes: a worker needs 4 GPUs on one node, and too few nodes have that"


def test_a_node_is_cleared_of_workers_that_fit_elsewhere() -> None:
    spread = a_claim("a/x", 2, granted=2, workers=(*on("n0", "x-0"), *on("n1", "x-1")))
    found = decided(a_pool(4, 4), [spread, a_claim("a/big", 1, priority=1, slots_per_worker=4)])
    assert sizes(found) == {"a/x": 2, "a/big": 1}
    moved = found.grants["a/x"]
    assert len(moved.leave) == len(moved.nodes) == 1
    assert set(moved.nodes).isdisjoint(found.grants["a/big"].nodes)


@pytest.mark.parametrize(("packings", "third"), [(grant_workers.PACKINGS, 2), (1, 0)])
def test_a_claim_that_does_not_fit_the_nodes_gets_nothing(packings, third, monkeypatch: pytest.MonkeyPatch) -> None:
    """Six slots for two workers and one of two slots each, of which two fit; who takes the rest is decided again."""
    monkeypatch.setattr(grant_workers, "PACKINGS", packings)
    claims = [
        a_claim("a/x", 2, slots_per_worker=2),
        a_claim("a/y", 1, slots_per_worker=2, submitted_at=1.0),
        a_claim("a/z", 1, 9, submitted_at=2.0),
    ]
    found = decided(a_pool(3, 3), claims)
    assert sizes(found) == {"a/x": 2, "a/y": 0, "a/z": third}
    assert found.grants["a/y"].reason is GrantReason.NO_ROOM
    assert found.usage[0].used == 4 + third


def test_small_workers_that_come_first_do_not_stand_in_the_way_of_large_ones() -> None:
    """Six and four slots: the guaranteed ones would just fit together on the node that a large one needs."""
    claims = [a_claim("c/small", 2), a_claim("a/large", 2, slots_per_worker=4)]
    found = decided(a_pool(4, 6), claims, guaranteed("c", 2))
    assert sizes(found) == {"c/small": 2, "a/large": 2}
    assert found.grants["c/small"].nodes == ("n1", "n1")


def test_a_division_that_would_alternate_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Claims that have something get nothing, and the other way round: a division that never comes to rest."""
    divide = grant_workers.divide

    def restless(*args: Any) -> Any:
        outcome = divide(*args)
        for one in outcome.allocations:
            one.given = 0 if one.claim.granted else one.claim.least
        return outcome

    monkeypatch.setattr(grant_workers, "divide", restless)
    found = decided(a_pool(4), [a_claim("a/x", 2, granted=2), a_claim("a/y", 3)])
    assert sizes(found) == {"a/x": 2, "a/y": 0}
    assert [grant.leave for grant in found.grants.values()] == [(), ()]


# The order of things makes no difference, and odd numbers make no trouble.


def test_pools_are_decided_apart() -> None:
    here, there = a_claim("a/x", 2, 4), replace(a_claim("a/y", 2, 4), pool="h100")
    found = decide([a_pool(3), a_pool(4, name="h100")], [], [here, there], NOW)
    assert sizes(found) == {"a/x": 3, "a/y": 4}


def test_slots_may_bear_another_name() -> None:
    pool = replace(a_pool(4), unit="slot")
    assert decided(pool, [a_claim("a/x", 2, 6)]).grants["a/x"].words == "has 4 of 6 workers: t4 has 4 slots in all"


numbers = st.integers(-3, 9)


@settings(max_examples=100)
@given(
    st.lists(
        st.builds(
            Claim,
            key=st.integers(0, 99).map(str),
            project=st.sampled_from("ab"),
            pool=st.sampled_from(["t4", "t4", "t4", "none"]),
            least=numbers,
            most=numbers,
            slots_per_worker=numbers,
            priority=numbers,
            submitted_at=st.floats(-10, 10),
            granted=numbers,
            changed_at=st.floats(-1000, 1000),
        ),
        max_size=6,
        unique_by=lambda claim: claim.key,
    ),
    st.lists(numbers.map(lambda slots: max(0, slots)), max_size=3),
    st.builds(
        Project, name=st.just("a"), weight=st.floats(-1, 3), guaranteed=st.fixed_dictionaries({"t4": numbers}),
        limit=st.fixed_dictionaries({"t4": numbers}),
    ),
)  # fmt: skip
def test_any_numbers_of_users_are_decided(claims, slots, project) -> None:
    found = decide([a_pool(*slots)], [project], claims, 0.0, SharingRules(patience_s=5.0, settle_s=5.0))
    assert found.grants.keys() == {claim.key for claim in claims}
    used = sum(found.grants[one.key].workers * max(1, one.slots_per_worker) for one in claims if one.pool == "t4")
    assert 0 <= used <= sum(slots)
    assert all(grant.words for grant in found.grants.values())


def test_a_claim_is_met_within_a_notice() -> None:
    """The bound: what is guaranteed is granted in the pass that sees the claim, and free when the notice is over."""
    place = Place({"n0": 4}, {"a": guaranteed("a", 2), "b": guaranteed("b", 2)})
    place.jobs["a/x"] = a_claim("a/x", 2, 4)
    place.decide()
    place.follow()
    place.now = 5.0
    place.jobs["b/y"] = a_claim("b/y", 2, submitted_at=5.0, changed_at=5.0)
    place.decide()
    place.follow()
    assert not any(worker.node for worker in place.jobs["b/y"].workers)
    place.now += NOTICE_S
    place.follow()
    assert [worker.node for worker in place.jobs["b/y"].workers] == ["n0", "n0"]
    place.end("b/y")
    place.decide()
    place.follow()
    assert [worker.node for worker in place.jobs["a/x"].workers] == ["n0"] * 4
