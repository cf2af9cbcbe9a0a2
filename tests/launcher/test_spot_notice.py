"""Spot notices of a fake metadata service, and what a launcher does about them."""

from __future__ import annotations

import json
import logging
import queue
import socket
from collections.abc import Callable, Iterator

import pytest

from elasticctl.api.codec import from_json
from elasticctl.api.status import RankFailure
from elasticctl_launcher import spot_notice
from elasticctl_launcher.spot_notice import (
    AUTO,
    AWS,
    AWS_REBALANCE,
    GCP,
    GIVE_UP_AFTER,
    AwsNotices,
    MetadataError,
    MetadataServer,
    NoticeWatch,
    SpotNotice,
    check_url,
    make_source,
)
from tests.support.launcher_lab import JOB_UID, KEY, Lab
from tests.support.metadata_server import (
    ACTION,
    ACTION_PATH,
    PREEMPTED_PATH,
    REBALANCE_PATH,
    TOKEN_PATH,
    FakeMetadata,
    fake_metadata,
)
from tests.support.waiting import wait_until

INTERRUPTION = "AWS spot interruption at 2026-03-01T08:22:00Z"
POLL_S = 0.01


@pytest.fixture
def aws() -> Iterator[FakeMetadata]:
    with fake_metadata("aws") as server:
        yield server


@pytest.fixture
def gcp() -> Iterator[FakeMetadata]:
    with fake_metadata("gcp") as server:
        yield server


Notices = queue.SimpleQueue[SpotNotice]


@pytest.fixture
def watch() -> Iterator[Callable[[spot_notice.NoticeSource], Notices]]:
    """Starts a watch; what it has noticed comes out of the queue."""
    watches = []

    def start(source: spot_notice.NoticeSource) -> Notices:
        notices: Notices = queue.SimpleQueue()
        watches.append(NoticeWatch(source, notices.put, POLL_S))
        watches[-1].start()
        return notices

    yield start
    for each in watches:
        each.close()


def words_of(source: spot_notice.NoticeSource) -> str:
    notice = source.poll()
    assert notice is not None
    return notice.words


def nobody() -> str:
    """A URL at which nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}"


@pytest.mark.parametrize("choice", [AWS, AUTO])
def test_aws_gives_notice(aws: FakeMetadata, watch: Callable[..., Notices], choice: str) -> None:
    notices = watch(make_source(choice, aws.url))
    wait_until(lambda: aws.asked.count(f"GET {ACTION_PATH}") >= 3)
    assert notices.empty(), "404 is no notice"
    aws.answers[ACTION_PATH] = 200, ACTION
    assert notices.get(timeout=240).words == INTERRUPTION


@pytest.mark.parametrize("choice", [GCP, AUTO])
def test_gcp_gives_notice(gcp: FakeMetadata, watch: Callable[..., Notices], choice: str) -> None:
    notices = watch(make_source(choice, gcp.url))
    wait_until(lambda: gcp.asked.count(f"GET {PREEMPTED_PATH}") >= 3)
    assert notices.empty()
    gcp.answers[PREEMPTED_PATH] = 200, "TRUE"
    assert notices.get(timeout=240).words == "GCP preemption"


def test_the_cloud_that_answers_is_the_only_one_asked_from_then_on(gcp: FakeMetadata) -> None:
    source = make_source(AUTO, gcp.url)
    assert [source.poll(), source.poll(), source.poll()] == [None, None, None]
    assert [line for line in gcp.asked if "latest" in line] == [f"PUT {TOKEN_PATH}"]


def test_a_token_is_fetched_once_and_again_when_it_has_expired(aws: FakeMetadata) -> None:
    source = make_source(AWS, aws.url)
    assert source.poll() is None
    assert source.poll() is None
    assert aws.tokens == 1
    aws.tokens += 1  # the one that is held is of no use any more
    assert source.poll() is None
    aws.answers[ACTION_PATH] = 200, ACTION
    assert words_of(source) == INTERRUPTION
    assert aws.tokens == 3


def test_a_recommendation_is_notice_only_when_asked_for(aws: FakeMetadata) -> None:
    aws.answers[REBALANCE_PATH] = 200, '{"noticeTime": "2026-03-01T08:00:00Z"}'
    assert make_source(AWS, aws.url).poll() is None
    assert f"GET {REBALANCE_PATH}" not in aws.asked
    assert words_of(make_source(AWS_REBALANCE, aws.url)) == "AWS rebalance recommendation at 2026-03-01T08:00:00Z"


GARBAGE = ["", "<html>Log in</html>", "[]", "{}", '{"action": 7}', "TRUE", "\0\xff", "9" * 10_000]


def test_garbage_is_no_notice_and_no_end(aws: FakeMetadata, watch: Callable[..., Notices]) -> None:
    notices = watch(make_source(AWS, aws.url))
    wait_until(lambda: f"GET {ACTION_PATH}" in aws.asked)
    for text in GARBAGE:
        aws.answers[ACTION_PATH] = 200, text
        seen = len(aws.asked)
        wait_until(lambda seen=seen: len(aws.asked) >= seen + 3)
        del aws.answers[ACTION_PATH]  # else the pauses grow
        wait_until(lambda seen=seen: len(aws.asked) >= seen + 5)
    assert notices.empty()
    aws.answers[ACTION_PATH] = 200, ACTION
    assert notices.get(timeout=240).words == INTERRUPTION


def test_garbage_is_no_preemption(gcp: FakeMetadata) -> None:
    for text in ("true", "<html>TRUE</html>", "", "FALSE TRUE"):
        gcp.answers[PREEMPTED_PATH] = 200, text
        with pytest.raises(MetadataError, match="instance/preempted: HTTP 200"):
            make_source(GCP, gcp.url).poll()


def test_a_token_that_is_none_is_not_sent_anywhere(aws: FakeMetadata) -> None:
    for token in ("", "two words", "line\nX-Evil: 1", "é"):
        aws.answers[TOKEN_PATH] = 200, token
        with pytest.raises(MetadataError, match="api/token: HTTP 200"):
            make_source(AWS, aws.url).poll()
    assert set(aws.asked) == {f"PUT {TOKEN_PATH}"}


def test_what_is_no_time_is_left_out(aws: FakeMetadata) -> None:
    for time_text in ("soon", 7, None, "2026-03-01T08:22:00Z\nevil"):
        aws.answers[ACTION_PATH] = 200, json.dumps({"action": "stop", "time": time_text})
        assert words_of(make_source(AWS, aws.url)) == "AWS spot interruption"


def test_trouble_in_between_is_outlasted_and_said_once(
    aws: FakeMetadata, watch: Callable[..., Notices], caplog: pytest.LogCaptureFixture
) -> None:
    notices = watch(make_source(AWS, aws.url))
    wait_until(lambda: f"GET {ACTION_PATH}" in aws.asked)
    for status in (500, 503, 403):
        aws.answers[ACTION_PATH] = status, "trouble"
        seen = len(aws.asked)
        wait_until(lambda seen=seen: len(aws.asked) >= seen + 2)
    aws.answers[ACTION_PATH] = 200, ACTION
    assert notices.get(timeout=240).words == INTERRUPTION
    assert len([r for r in caplog.records if "no usable answer" in r.message]) == 1


@pytest.mark.parametrize("choice", [AWS, GCP, AUTO])
def test_where_nobody_answers_it_stops_and_says_so_once(
    watch: Callable[..., Notices], caplog: pytest.LogCaptureFixture, choice: str
) -> None:
    notices = watch(make_source(choice, nobody()))
    wait_until(lambda: "continuing without" in caplog.text)
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert notices.empty()


def test_a_service_that_always_fails_is_asked_a_bounded_number_of_times(
    aws: FakeMetadata, watch: Callable[..., Notices], caplog: pytest.LogCaptureFixture
) -> None:
    aws.answers[TOKEN_PATH] = 403, "Forbidden"
    watch(make_source(AWS, aws.url))
    wait_until(lambda: "HTTP 403" in caplog.text)
    assert aws.asked == [f"PUT {TOKEN_PATH}"] * GIVE_UP_AFTER


def test_a_service_that_hangs_holds_nobody_up(aws: FakeMetadata) -> None:
    aws.answers[TOKEN_PATH] = 0, ""
    with pytest.raises(MetadataError, match="timed out"):
        AwsNotices(MetadataServer(aws.url, timeout_s=0.1)).poll()


def test_no_proxy_is_asked(gcp: FakeMetadata, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", nobody())
    monkeypatch.setenv("HTTP_PROXY", nobody())
    assert make_source(GCP, gcp.url).poll() is None


@pytest.mark.parametrize(
    "url", ["", "169.254.169.254", "https://x", "file:///x", "http://", "http://x/y", "http://x:y"]
)
def test_an_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match=r"http://HOST|port|Port"):
        check_url(url)
    assert check_url("http://[fd00:ec2::254]/") == "http://[fd00:ec2::254]"


# A launcher that gets a notice leaves as one that gets SIGTERM.


def test_a_worker_that_hears_of_its_end_leaves_in_order(lab: Lab) -> None:
    """Nobody else's metadata service is asked: a-1 has not been told to."""
    with fake_metadata("aws") as server, fake_metadata("aws") as other:
        lab.start_script("a-0", ELASTICCTL_NOTICE_SOURCE="aws", ELASTICCTL_METADATA_URL=server.url)
        lab.start_script("a-1", ELASTICCTL_METADATA_URL=other.url)
        lab.add("a-0", "a-1")
        lab.until(lambda: "rank 0 of 2" in lab.output("a-0") and "rank 1 of 2" in lab.output("a-1"))
        server.answers[ACTION_PATH] = 200, ACTION
        assert lab.wait("a-0") == 143
        assert other.asked == []
    failure = from_json(RankFailure, lab.message("a-0"))
    assert (failure.verdict, failure.error, failure.exit_code) == ("preempted", INTERRUPTION, 143)
    lab.until(lambda: "rank 0 of 1 generation 2" in lab.output("a-1"))
    assert all((lab.folder / f"reached-1-{rank}").exists() for rank in range(2)), "both committed the same step"
    assert lab.site.service.view(KEY, JOB_UID).generations[-1].reason == f"a-0 has to stop: {INTERRUPTION}"


def test_notice_reaches_a_worker_that_waits_for_a_group(lab: Lab) -> None:
    lab.add("a-0", "a-1")  # a-1 never comes, so a-0 waits for it
    with fake_metadata("gcp") as server:
        lab.start_script("a-0", ELASTICCTL_NOTICE_SOURCE="auto", ELASTICCTL_METADATA_URL=server.url)
        lab.until(lambda: "join" in lab.site.verbs)
        server.answers[PREEMPTED_PATH] = 200, "TRUE"
        assert lab.wait("a-0") == 143
    assert from_json(RankFailure, lab.message("a-0")).verdict == "preempted"
