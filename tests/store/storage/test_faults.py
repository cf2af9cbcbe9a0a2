"""Faults of networks and services, applied to every request of the cloud storages."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterable
from dataclasses import replace

import pytest

from elasticctl_store.checkpoints import entries
from elasticctl_store.checkpoints.commits import read_entries
from elasticctl_store.errors import DamagedError, ExistsError, StorageError
from elasticctl_store.storage import Storage, base, s3
from elasticctl_store.storage import cloud as clouds
from elasticctl_train.checkpoint.checkpointer import Checkpointer, Label
from tests.support.clouds import QUICK, Cloud
from tests.support.gate import Fault, Reply, Seen, first
from tests.support.train import programs
from tests.support.train.states import same

FAULTS = {
    "500": Fault(status=500, code="InternalError"),
    "503": Fault(status=503, code="SlowDown"),
    "429": Fault(status=429, code="rateLimitExceeded", headers=(("Retry-After", "0"),)),
    "409": Fault(status=409, code="ConditionalRequestConflict"),
    "reset before": Fault(lose="before"),
    "reset after": Fault(lose="after"),
    "hang after": Fault(hang=True),
    "truncated": Fault(truncate=True),
    "bit flipped on its way there": Fault(flip="request"),
    "slow": Fault(slow_s=0.002),
}
HASTY = replace(QUICK, silence_s=0.5, tries=100)
"""The timeout for silent servers; on a busy machine, every server is silent now and then."""


@pytest.fixture(params=FAULTS)
def fault(request: pytest.FixtureRequest) -> Fault:
    return FAULTS[request.param]


def test_faults_do_not_change_the_results_of_a_storage(cloud: Cloud, fault: Fault) -> None:
    storage, gate = cloud.open(HASTY if fault.hang else QUICK), cloud.gate
    body = random.Random(0).randbytes(10_000)
    gate.faults = first(fault)
    storage.put("data/a", [body[:7], memoryview(body)[7:]])
    gate.faults = first(fault)
    storage.put("journal/b", [b"mine"], if_absent=True)
    gate.faults = first(fault)
    with pytest.raises(ExistsError):
        storage.put("journal/b", [b"other"], if_absent=True)
    gate.faults = first(fault)
    assert storage.get("data/a") == body
    gate.faults = first(fault)
    into = bytearray(5_000)
    storage.read_into("data/a", 1_000, memoryview(into))
    assert into == body[1_000:6_000]
    gate.faults = first(fault)
    assert storage.list("") == ["data/a", "journal/b"]
    gate.faults = first(fault)
    storage.delete(["data/a"])
    assert storage.list("") == ["journal/b"]


def test_a_bit_flipped_in_a_response_is_detected(cloud: Cloud) -> None:
    storage = cloud.open()
    storage.put("journal/a", [b"an entry"], if_absent=True)
    cloud.gate.faults = first(Fault(flip="answer"))
    assert storage.get("journal/a") == b"an entry"


LIES = (
    b"",
    b"<html><body>Welcome</body></html>",
    b"{}",
    b'{"items": [{',
    b"<ListBucketResult><Key",
    b'{"items": [{"name": "of-somebody-else"}]}',
    b"<ListBucketResult><KeyCount>2</KeyCount><IsTruncated>false</IsTruncated></ListBucketResult>",
)
"""An invalid listing, a truncated one, and listings of other prefixes."""


def lies(cloud: Cloud, monkeypatch: pytest.MonkeyPatch, answers: Iterable[bytes]) -> None:
    """Answer the next reads with these bodies, and status 200 or 206."""
    plain, waiting = cloud.gate.pass_on, iter(answers)

    def pass_on(seen: Seen, body: bytes) -> Reply:
        reply = plain(seen, body)
        return replace(reply, body=next(waiting, reply.body)) if seen.method == "GET" else reply

    monkeypatch.setattr(cloud.gate, "pass_on", pass_on)


def test_an_inconsistent_response_is_requested_again(cloud: Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = cloud.open()
    storage.put("data/a", [b"what is there"])
    for lie in LIES:
        lies(cloud, monkeypatch, [lie] * 3)
        assert storage.list("data/") == ["data/a"]
        lies(cloud, monkeypatch, [lie] * 3)
        assert storage.get("data/a") == b"what is there"
        into = bytearray(4)
        lies(cloud, monkeypatch, [lie[:3]] * 3)
        storage.read_into("data/a", 5, memoryview(into))
        assert bytes(into) == b"is t"


STRANGE = LIES[:3]
"""Bodies of responses that a proxy sends with status 200 instead of the service."""


def replace_answers_to_writes(cloud: Cloud, monkeypatch: pytest.MonkeyPatch, answers: Iterable[bytes]) -> None:
    """Answer the next writes with status 200 and these bodies, without carrying them out."""
    plain, waiting = cloud.gate.pass_on, iter(answers)

    def pass_on(seen: Seen, body: bytes) -> Reply:
        answer = next(waiting, None) if seen.method in ("PUT", "POST") else None
        return plain(seen, body) if answer is None else Reply(200, [("Content-Type", "text/html")], answer)

    monkeypatch.setattr(cloud.gate, "pass_on", pass_on)


@pytest.mark.parametrize("part_bytes", [4, 1 << 20], ids=["in parts", "in one"])
@pytest.mark.parametrize("if_absent", [False, True])
def test_a_write_answered_by_something_else_is_retried_and_then_an_error(
    cloud: Cloud, if_absent: bool, part_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3, "PART_BYTES", part_bytes)
    storage = cloud.open()
    with monkeypatch.context() as lied:
        replace_answers_to_writes(cloud, lied, STRANGE)
        storage.put("data/a", [b"what is there"], if_absent=if_absent)
    assert storage.get("data/a") == b"what is there"
    replace_answers_to_writes(cloud, monkeypatch, itertools.cycle(STRANGE))
    with pytest.raises(StorageError, match=r"cannot write data/b to .*FIX: check (its|the) URL"):
        storage.put("data/b", [b"what is there"], if_absent=if_absent)


def test_an_invalid_listing_is_an_error_rather_than_an_empty_storage(
    cloud: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = cloud.open()
    storage.put("data/a", [b"what is there"])
    for lie in LIES[:3]:
        lies(cloud, monkeypatch, itertools.repeat(lie))
        with pytest.raises(StorageError, match="the endpoint answers with"):
            storage.list("data/")


def test_objects_that_are_too_large_are_not_read(cloud: Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = cloud.open()
    storage.put(entries.key_of(1), [b"x" * 4096])
    monkeypatch.setattr(base, "MOST_ENTRY_BYTES", 4095)
    with pytest.raises(DamagedError, match="has more than 4095 bytes"):
        storage.get(entries.key_of(1))
    assert [type(entry) for _, entry in read_entries(storage)] == [DamagedError]
    monkeypatch.setattr(base, "MOST_ENTRY_BYTES", 4096)
    assert len(storage.get(entries.key_of(1))) == 4096


def test_stored_checksums_are_compared_with_those_sent(cloud: Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first response says that something else was stored."""
    storage, plain = cloud.open(), cloud.gate.pass_on
    checksums = iter(["AAAAAA=="])

    def pass_on(seen: Seen, body: bytes) -> Reply:
        reply = plain(seen, body)
        wrong = next(checksums, "") if seen.method in ("PUT", "POST") else ""
        if wrong and cloud.gate.scheme == "s3":
            kept = [(name, value) for name, value in reply.headers if name.lower() != "x-amz-checksum-crc32"]
            return replace(reply, headers=[*kept, ("x-amz-checksum-crc32", wrong)])
        return replace(reply, body=json.dumps(json.loads(reply.body) | {"crc32c": wrong}).encode()) if wrong else reply

    monkeypatch.setattr(cloud.gate, "pass_on", pass_on)
    storage.put("data/a", [b"what is there"])
    assert sum(seen.method in ("PUT", "POST") for seen in cloud.gate.seen) == 2


@pytest.mark.parametrize("lost", [Fault(lose="after"), Fault(hang=True)], ids=["reset", "timeout"])
def test_a_create_whose_response_was_lost_is_read_back(cloud: Cloud, lost: Fault) -> None:
    storage = cloud.open(HASTY if lost.hang else QUICK)
    cloud.gate.faults = first(lost, times=2)
    storage.put("journal/1", [b"mine"], if_absent=True)
    assert storage.get("journal/1") == b"mine"
    assert storage.list("journal/") == ["journal/1"]


def test_a_create_that_lost_a_race_without_a_response_is_refused(cloud: Cloud) -> None:
    storage, other = cloud.open(), cloud.open()
    for taken in (b"him!", b"longer than mine", b""):
        other.put("journal/1", [taken])
        cloud.gate.faults = first(Fault(lose="before"), method="PUT" if cloud.gate.scheme == "s3" else "POST")
        with pytest.raises(ExistsError):
            storage.put("journal/1", [b"mine"], if_absent=True)
        assert storage.get("journal/1") == taken


def test_a_permanent_fault_ends_with_a_clear_error(cloud: Cloud) -> None:
    storage = cloud.open(replace(QUICK, tries=4))
    cloud.gate.faults = lambda seen: Fault(status=503, code="SlowDown")
    with pytest.raises(StorageError, match=r"cannot write data/a to .*: 503 SlowDown; tried 4 times in .* s; check"):
        storage.put("data/a", [b"x"])
    assert len(cloud.gate.seen) == 4


def test_a_large_object_is_read_in_parallel_ranges(cloud: Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clouds, "RANGE_BYTES", 50_000)
    storage = cloud.open()
    body = random.Random(1).randbytes(100_005)
    storage.put("data/large", [memoryview(body)])
    cloud.gate.seen.clear()
    cloud.gate.faults = first(Fault(truncate=True), times=2, method="GET")
    into = bytearray(len(body) - 2)
    storage.read_into("data/large", 1, memoryview(into))
    assert into == body[1:-1]
    assert len(cloud.gate.seen) == 5


# Checkpoints, through all of it.


def check(storage: Storage, acknowledged: list[int]) -> int:
    """Resume as a new run: exact, and not older than the last acknowledged save; return the step."""
    restored = Checkpointer(storage).restore()
    step = restored.commit.step if restored else 0
    assert step >= max(acknowledged, default=0)
    assert restored is None or same(restored.state, programs.state_of(step))
    return step


def test_checkpoints_survive_faults_at_any_request(cloud: Cloud) -> None:
    acknowledged: list[int] = []
    plan, turns = random.Random(2), itertools.cycle(FAULTS.values())
    cloud.gate.faults = lambda seen: next(turns) if plan.random() < 0.4 else None
    checkpoints = Checkpointer(cloud.open(HASTY), on_commit=lambda commit, _: acknowledged.append(commit.step))
    for step in (1, 2):
        checkpoints.save(programs.state_of(step), Label(step))
        assert checkpoints.settle()
    assert acknowledged == [1, 2]
    assert check(cloud.open(HASTY), acknowledged) == 2


def test_a_noisy_connection_does_not_make_a_run_resume_from_an_older_checkpoint(cloud: Cloud) -> None:
    checkpoints = Checkpointer(cloud.open())
    for step in (1, 2):
        checkpoints.save(programs.state_of(step), Label(step))
        assert checkpoints.settle()
    objects = "/download/" if cloud.gate.scheme == "gs" else "/jobs/"
    for number in range(1, 6):
        # A listing has no checksum: only TLS protects its names.
        cloud.gate.faults = first(Fault(flip="answer"), method="GET", part=objects, skip=number - 1)
        assert check(cloud.open(), [1, 2]) == 2


def test_a_service_that_ignores_preconditions_is_refused(cloud: Cloud) -> None:
    plain = cloud.gate.pass_on

    def lenient(seen: Seen, body: bytes) -> Reply:
        headers = {name: value for name, value in seen.headers.items() if name != "if-none-match"}
        return plain(replace(seen, headers=headers, target=seen.target.replace("&ifGenerationMatch=0", "")), body)

    cloud.gate.pass_on = lenient  # type: ignore[method-assign]
    with pytest.raises(StorageError, match="the service replaces an object that was to be created only if absent"):
        Checkpointer(cloud.open())
    assert len(list(read_entries(cloud.open()))) == 1
