"""The reckoning of notices and silent losses: what each cost, by the steps that were recorded."""

from __future__ import annotations

import http.client
import math
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest

from benchmarks.faults.checks import Step
from benchmarks.interruptions.account import Cost, Event, costs, deck, never_whole, pace, redone_after_notice, rows
from benchmarks.interruptions.faults import NOTICES, SILENT
from benchmarks.interruptions.metadata import Metadata
from elasticctl_launcher.spot_notice import AwsNotices, GcpNotices, MetadataServer


def event(at: float, until: float, kind: str = "drained", whole_s: float | None = 2.0) -> Event:
    return Event(kind, kind in NOTICES, "worker-1", at, until, 0, 1.0, whole_s)


def steps(generation: int, world: int, first: int, begin: float, count: int) -> list[Step]:
    """A step a second."""
    return [
        Step(begin + number, rank, world, generation, first + number, 0, ())
        for number in range(count)
        for rank in range(world)
    ]


def test_an_event_costs_what_all_the_groups_that_follow_it_cost() -> None:
    record = [*steps(1, 3, 1, 100.0, 5), *steps(2, 2, 4, 110.0, 2), *steps(3, 3, 6, 114.0, 3)]
    (cost,) = costs([event(104.5, 116.5, "machine killed")], record)
    assert cost == Cost(first_step_s=5.5, standstill_s=6.0 + 3.0, groups=2, redone=2, smallest=2)


def test_each_event_costs_what_came_before_the_next() -> None:
    record = [*steps(1, 3, 1, 100.0, 5), *steps(2, 3, 6, 106.0, 4), *steps(3, 3, 9, 112.0, 2)]
    first, second = costs([event(104.5, 109.5), event(109.6, 113.5, "rank killed")], record)
    assert (first.redone, first.groups, first.standstill_s) == (0, 1, 2.0)
    assert (second.redone, second.groups, second.standstill_s) == (1, 1, 3.0)


def test_a_group_that_forms_before_any_event_costs_none_of_them_anything() -> None:
    record = [*steps(1, 2, 1, 100.0, 5), *steps(2, 3, 4, 110.0, 5)]
    assert costs([event(112.5, 114.5)], record) == [Cost()]


def test_what_a_frozen_rank_of_a_former_group_writes_late_is_no_group() -> None:
    record = [*steps(1, 3, 1, 100.0, 5), *steps(2, 3, 6, 108.0, 5), Step(110.5, 1, 3, 1, 5, 0, ())]
    (cost,) = costs([event(104.5, 112.5, "machine frozen")], record)
    assert (cost.groups, cost.redone, cost.standstill_s) == (1, 0, 4.0)


def test_a_step_in_which_the_loss_struck_was_not_made() -> None:
    """Those who are left record it, and begin it again."""
    left = [step for step in steps(1, 3, 6, 112.0, 1) if step.rank != 1]
    late = Step(115.5, 1, 3, 1, 6, 0, ())  # by a rank that was frozen
    record = [*steps(1, 3, 1, 100.0, 5), *left, *steps(2, 2, 6, 113.0, 5), late]
    (cost,) = costs([event(104.5, 118.5, "machine frozen")], record)
    assert (cost.redone, cost.interrupted, cost.standstill_s) == (0, 1, 9.0)
    assert redone_after_notice([event(104.5, 118.5)], [cost]) == ["drained (worker-1) at 104.5: 1 steps"]


def test_the_pace_is_of_steps_that_bring_the_training_on() -> None:
    record = [*steps(1, 2, 1, 1.0, 10), *steps(2, 2, 6, 11.0, 10)]  # 5 of 20 were done again
    assert pace(record, 0.5, 20.5) == 15 / 20
    assert pace(record, 100.0, 110.0) == 0.0


def test_only_steps_done_again_after_a_notice_speak_against_it() -> None:
    events = [event(1.0, 2.0), event(2.0, 3.0, "rank killed"), event(3.0, 4.0, whole_s=None)]
    prices = [Cost(redone=0), Cost(redone=4), Cost(redone=1)]
    assert redone_after_notice(events, prices) == ["drained (worker-1) at 3.0: 1 steps"]
    assert never_whole(events) == ["drained (worker-1) at 3.0"]


def test_rows_sum_up_each_kind_and_all_with_and_all_without_notice() -> None:
    events = [event(1.0, 2.0), event(2.0, 3.0, "rank killed"), event(3.0, 4.0, whole_s=None)]
    prices = [Cost(standstill_s=1.0), Cost(standstill_s=3.0, redone=4), Cost(standstill_s=2.0)]
    found = {row.kind: row for row in rows(events, prices)}
    assert list(found) == ["drained", "all with notice", "rank killed", "all without"]
    assert (found["drained"].events, found["drained"].standstill_s[0]) == (2, 1.5)
    assert (found["all without"].redone, found["all without"].most_redone) == (4, 4)
    nobody = rows(events[2:], prices[2:])[0]
    assert math.isnan(nobody.whole_s[0])


def test_half_of_a_deck_are_notices_and_no_kind_is_both() -> None:
    assert len(deck(NOTICES)) == len(deck(SILENT))
    assert not NOTICES.keys() & SILENT.keys()


@pytest.fixture
def metadata() -> Iterator[Metadata]:
    found = Metadata("127.0.0.1")
    yield found
    found.stop()


def test_each_pod_hears_of_its_own_machine_only(metadata: Metadata) -> None:
    source = AwsNotices(MetadataServer(metadata.url), rebalance=True)
    metadata.announce("10.88.3.2", 2_000_000_000.0)
    assert source.poll() is None
    metadata.recommend("127.0.0.1", 1_999_999_000.0)
    advice = source.poll()
    assert advice is not None
    assert advice.at is None
    metadata.announce("127.0.0.1", 2_000_000_000.0)
    notice = source.poll()
    assert notice is not None
    assert notice.at == 2_000_000_000.0
    metadata.forget("127.0.0.1")
    assert source.poll() is None


def test_google_cloud_gives_notice_without_a_time(metadata: Metadata) -> None:
    source = GcpNotices(MetadataServer(metadata.url))
    metadata.announce("10.88.3.2", 2_000_000_000.0)
    assert source.poll() is None
    metadata.announce("127.0.0.1", 2_000_000_000.0)
    notice = source.poll()
    assert notice is not None
    assert notice.words == "GCP preemption"
    metadata.forget("127.0.0.1")
    assert source.poll() is None


def test_other_questions_are_answered_too(metadata: Metadata) -> None:
    connection = http.client.HTTPConnection(urlsplit(metadata.url).netloc)
    connection.request("GET", "/latest/meta-data/instance-id")
    assert connection.getresponse().status == 404
    connection.close()
