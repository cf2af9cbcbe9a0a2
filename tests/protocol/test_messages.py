"""Messages as earlier releases wrote them: this one reads them, and writes the same."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticctl_protocol import local, reports, requests
from elasticctl_protocol.codec import NULL, Codec, written_as
from elasticctl_protocol.failures import FailureVerdict, TerminationMessage
from elasticctl_protocol.reports import ProgressReport, Report, decode_report, encode_report
from elasticctl_protocol.requests import (
    WIRE,
    FailAnswer,
    FailRequest,
    GroupVerdict,
    JoinRequest,
    Member,
    NoticeAnswer,
    NoticeRequest,
    WatchAnswer,
    WatchRequest,
    WatchState,
    problem_of,
)
from tests.support.any_json import JSON

ENDED: Mapping[str, Any] = {
    "generation": 2, "of_peers": False, "permanent": True, "stopping": False, "ended_s_ago": 0.125,
    "failure": {
        "rank": 3, "exit_code": 1, "signal": "", "error": "ValueError: 7", "last_lines": ["a", "b"],
        "verdict": "application",
    },
}  # fmt: skip
LOST = {
    "generation": 1, "of_peers": True, "permanent": False, "stopping": False, "ended_s_ago": 3.0,
    "failure": {
        "rank": None, "exit_code": None, "signal": "", "error": "Connection reset", "last_lines": [],
        "verdict": "collateral",
    },
}  # fmt: skip
MEMBER = {"uid": "u0", "name": "a-0", "host": "10.0.0.1", "port": 29500, "slots": 2}
SIGN = {"doing": "waiting", "since_s": 1.5}
RECORDED: list[tuple[type[Any], Mapping[str, Any]]] = [
    (
        requests.JoinRequest,
        {**MEMBER, "generation": 0, "prepared": False, "stays": False, "within_s": 60.0, "failed": [ENDED], **SIGN},
    ),
    (
        requests.JoinRequest,
        {**MEMBER, "generation": 3, "prepared": True, "stays": True, "serves_commands": True, "failed": []},
    ),
    (requests.JoinAnswer, {"state": "over"}),
    (requests.PrepareAnswer, {"state": "prepare", "ranks": 8, "examples": "[1]"}),
    (requests.FormedAnswer, {"state": "formed", "generation": 4, "members": [MEMBER], "anew": False}),
    (requests.WatchRequest, {"uid": "u0", "generation": 4, "draining": False, **SIGN}),
    (
        requests.WatchRequest,
        {
            "uid": "u0",
            "generation": 4,
            "draining": True,
            "members": [MEMBER],
            "stays": True,
            "serves_commands": False,
            "failed": [LOST, ENDED],
        },
    ),
    (requests.WatchAnswer, {"state": "current", "reason": ""}),
    (requests.WatchAnswer, {"state": "drain", "reason": "a-1 is removed", "leave": False}),
    (requests.FinishRequest, {"uid": "u0", "generation": 4, **SIGN}),
    (requests.FinishRequest, {"uid": "u0", "generation": 4, "for_all": True, "terminated": True}),
    (requests.FinishAnswer, {"state": "done"}),
    (requests.NoticeRequest, {"uid": "u0", "reason": "SIGTERM"}),
    (requests.NoticeRequest, {"uid": "u0", "reason": "SIGTERM", "stays": True}),
    (requests.NoticeRequest, {"uid": "u0", "reason": "AWS spot interruption", "stays": True, "in_s": 119.5}),
    (requests.NoticeRequest, {"uid": "u0", "reason": "AWS rebalance", "stays": True, "in_s": None}),
    (requests.NoticeAnswer, {"stay_s": None, "left_s": None}),
    (requests.NoticeAnswer, {"stay_s": 40.0, "left_s": 119.5}),
    (requests.LeaveRequest, {"uid": "u0", "reason": "SIGTERM"}),
    (requests.FailRequest, {"uid": "u0", **ENDED, "failed": [LOST], **SIGN}),
    (requests.FailAnswer, {"verdict": "pending"}),
    (requests.FailAnswer, {"verdict": "rejoin", "excused": True}),
    (requests.FailAnswer, {"verdict": "exit", "error": "ValueError: 7"}),
    (requests.Heartbeat, {"uid": "u0", "generation": 4, "doing": "running", "since_s": 0.25}),
    (requests.ReportRequest, {"messages": [{"kind": "finished"}]}),
    (requests.ReportAnswer, {"every_s": 0.5}),
    (requests.Refusal, {"error": "wrong token"}),
    (local.RankMessage, {"attach": 0, "generation": 3}),
    (local.RankMessage, {"decline": 3, "why": "the model has changed"}),
    (local.LauncherMessage, {"over": 3}),
    (local.LauncherMessage, {"place": {"RANK": "1"}}),
    (local.CopyRequest, {"copied": [["a/share", 7, 1234]]}),
    (local.CopyRequest, {"room": 4096}),
    (local.CopyAnswer, {"refused": ""}),
    (local.CopyAnswer, {"sending": False, "lack": "this is the only worker"}),
]
TRAINED = {"rank": 0, "generation": 1, "step": 9}
REPORTS: list[Mapping[str, Any]] = [
    {
        "kind": "progress", **TRAINED, "total_steps": 20, "epoch": 1, "total_epochs": 2, "samples_per_s": 8.5,
        "metrics": {"loss": 0.5, "other": {"value": "NaN", "since_step": 4}},
        "times": {"wall": 3.0, "data": 0.5, "save": 0.25},
    },
    {"kind": "resumed", **TRAINED, "source": "copies", "source_because": "x", "stays": False, "restarts_because": "y"},
    {"kind": "copied", **TRAINED, "every_steps": 7, "lack": "no room"},
    {"kind": "inputs", **TRAINED, "examples": "[1]"},
    {"kind": "committed", **TRAINED, "committed": 2, "size_bytes": 81, "duration_s": 0.5, "url": "s3://b"},
    {"kind": "waiting", **TRAINED, "reason": "the storage"},
    {"kind": "unsaved", **TRAINED, "reason": ""},
    {"kind": "metrics", "rank": 0, "generation": 1, "rows": ["{}"]},
    {"kind": "drained", **TRAINED},
    {"kind": "finished", **TRAINED},
    {
        "kind": "hang", "generation": 1, "step": 9,
        "ranks": [{"rank": 0, "where": "all_reduce", "for_s": 61.0, "waits": True}],
    },
    {
        "kind": "usage", "uid": "u0", "cpus_used": 1.5, "cpus": 8.0, "memory_bytes": 5, "memory_total_bytes": 9,
        "received_bytes_per_s": 3.0, "sent_bytes_per_s": 4.0,
        "gpus": {
            "percent": [97.0, None], "memory_bytes": [1.0, 2.0], "memory_total_bytes": [3.0, 3.0],
            "power_w": [70.5, None], "temperature_c": [50.0, 51.0], "idle_s": [0.0, 9.0],
        },
        "no_gpus": "none", "step_times": {"data": 0.1, "compute": 0.7, "all_reduce": 0.1, "save": 0.1},
    },
]  # fmt: skip


@pytest.mark.parametrize(("cls", "recorded"), RECORDED)
def test_the_format_of_messages_stays(cls: type[Any], recorded: Mapping[str, Any]) -> None:
    found = WIRE.decode(cls, recorded)
    assert json.loads(json.dumps(WIRE.encode(found))) == recorded
    assert problem_of(found) == ""


@pytest.mark.parametrize("recorded", REPORTS, ids=lambda recorded: recorded["kind"])
def test_the_format_of_reports_stays(recorded: Mapping[str, Any]) -> None:
    found = decode_report(recorded)
    assert found is not None
    assert json.loads(json.dumps(encode_report(found))) == recorded


def test_fields_that_older_releases_lack_have_defaults() -> None:
    joins = WIRE.decode(JoinRequest, {**MEMBER, "generation": 0, "failed": ENDED})
    assert (joins.prepared, joins.stays, [each.generation for each in joins.failed]) == (True, False, [2])
    assert WIRE.decode(WatchRequest, {"uid": "u0", "generation": 1}).members is None
    assert WIRE.decode(WatchAnswer, {}).state is WatchState.STALE
    assert WIRE.decode(FailAnswer, {}).verdict is GroupVerdict.EXIT
    assert WIRE.decode(NoticeAnswer, {}) == NoticeAnswer(0.0, math.inf)
    assert WIRE.decode(NoticeRequest, {"uid": "u0", "in_s": "soon"}).in_s == math.inf


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"uid": ""}, "uid: expected text of 1 to 512 characters"),
        ({"name": "x" * 513}, "name: expected text of 1 to 512 characters"),
        ({"port": 65_536}, "port: expected an integer from 1 to 65535"),
        ({"slots": True}, "slots: expected an integer from 1 to 4095"),
        ({"generation": -1}, "generation: expected an integer from 0 to 9007199254740991"),
        ({"host": None}, "host: expected text of 1 to 512 characters"),
    ],
)
def test_a_request_out_of_range_is_reported(change: Mapping[str, Any], problem: str) -> None:
    assert problem_of(WIRE.decode(JoinRequest, {**MEMBER, "generation": 0, **change})) == problem


def test_a_failure_report_becomes_a_request_for_a_verdict() -> None:
    report = WIRE.decode(requests.FailureReport, ENDED)
    request = FailRequest.of("u0", report, failed=(report,))
    assert WIRE.encode(request) == {"uid": "u0", **ENDED, "failed": [ENDED]}
    assert WIRE.decode(JoinRequest, MEMBER).member == Member("u0", "a-0", "10.0.0.1", 29500, 2)


def test_a_termination_message_uses_camel_case() -> None:
    text = (
        '{"verdict": "killed", "worker": "a-0", "rank": 0, "exitCode": 137, "signal": "SIGKILL",'
        ' "lastLines": ["x"], "generation": 0, "at": "2026-11-29T08:00:00+00:00"}'
    )
    found = TerminationMessage.from_text(text)
    assert found is not None
    assert (found.verdict, found.exit_code, found.permanent) == (FailureVerdict.KILLED, 137, None)
    assert found.to_text() == text
    for other in ("", "{}", "[]", '{"verdict": "unknown"}', "[" * 10_000):
        assert TerminationMessage.from_text(other) is None


@given(st.dictionaries(st.sampled_from(["kind", "rank", "generation", "step", "metrics", "times", "ranks"]), JSON))
def test_every_report_survives_its_encoding(message: Any) -> None:
    for kind in ("progress", "hang", "usage", "resumed"):
        assert isinstance(decode_report({**message, "kind": kind}), Report)
    assert decode_report(JSON) is None


def test_consecutive_ranks_are_abbreviated() -> None:
    assert reports.ranks_text([3]) == "rank 3"
    assert reports.ranks_text([0, 1, 2, 4, 6, 7]) == "ranks 0-2, 4, 6-7"
    assert ProgressReport().kind == "progress"


def test_a_null_takes_the_default() -> None:
    assert Codec().encode(NoticeAnswer(math.inf)) == {"stay_s": None, "left_s": None}
    assert written_as(lambda _: NULL, str)
