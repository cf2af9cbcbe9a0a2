"""Why a worker ended: the order of evidence, and messages of any content."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elasticctl.api.codec import Timestamp
from elasticctl.api.observed.workers import Pod
from elasticctl.api.spec import PodPhase
from elasticctl.api.status import Cause, WorkerStatus
from elasticctl_controller.core.causes import (
    MAX_LINE_CHARS,
    MAX_LINES,
    Loss,
    classify,
    classify_vanished,
    ended_at,
    parse_failure,
)
from tests.support.any_json import JSON
from tests.support.controller.samples import NOW, a_pod, an_end, termination_message

KNOWN = WorkerStatus(name="digits-worker-1", uid="uid-1", index=1, node="node-1")
LEAVING = WorkerStatus(name="digits-worker-1", uid="uid-1", index=1, removal="ScaledIn")
PEER = Loss(Timestamp(NOW - 1), exact=True)


def why(pod: Pod, worker: WorkerStatus | None = KNOWN, lost: frozenset[str] = frozenset(), losses=()) -> Cause | None:
    return classify(pod, worker, lost, losses, NOW)


@pytest.mark.parametrize("phase", [PodPhase.PENDING, PodPhase.RUNNING])
def test_a_worker_that_has_not_ended_has_no_cause(phase):
    assert why(a_pod(1, phase)) is None
    assert why(a_pod(1, phase, disruption_target=True)) is None  # it is only going to be evicted
    assert why(a_pod(1, phase), LEAVING) is None
    assert why(a_pod(1, phase, deleting=True), LEAVING) is None  # it still has its grace period


ENDS = [
    # 2. the cluster announced it
    ("announced", an_end(1, 1, disruption_target=True), Cause.PREEMPTED),
    ("announced, and the script made the best of it", an_end(1, 0, disruption_target=True), Cause.PREEMPTED),
    ("announced, terminating", a_pod(1, deleting=True, disruption_target=True), Cause.PREEMPTED),
    # 3. the pod's reason
    ("graceful node shutdown", an_end(1, None, reason="Terminated"), Cause.PREEMPTED),
    ("node shutdown", an_end(1, 1, reason="NodeShutdown"), Cause.PREEMPTED),
    ("kubelet makes room", an_end(1, None, reason="Preempting"), Cause.PREEMPTED),
    ("no room after all", an_end(1, None, reason="OutOfcpu"), Cause.EVICTED),
    ("no device after all", an_end(1, None, reason="UnexpectedAdmissionError"), Cause.EVICTED),
    ("node lost", an_end(1, None, reason="NodeLost"), Cause.NODE_LOST),
    ("killed for its own probe", an_end(1, 137, reason="ProbeFailed", message="its liveness probe"), Cause.APPLICATION),
    ("evicted", an_end(1, None, reason="Evicted", message="The node was low on resource: memory."), Cause.EVICTED),
    (
        "over its own storage limit",
        an_end(1, None, reason="Evicted", message="Pod ephemeral local storage usage exceeds the total limit"),
        Cause.APPLICATION,
    ),
    ("over its own deadline", an_end(1, 137, reason="DeadlineExceeded"), Cause.APPLICATION),
    # 4. nodes, and deletions that are not ours
    ("unknown", a_pod(1, PodPhase.UNKNOWN), Cause.NODE_LOST),
    ("deleted by hand", a_pod(1, deleting=True), Cause.DELETED),
    ("deleted by hand, failing on the way", an_end(1, 1, deleting=True), Cause.DELETED),
    # 5. to 8. the process
    ("success", an_end(1, 0), Cause.COMPLETED),
    ("success next to a failed sidecar", an_end(1, 0, phase=PodPhase.FAILED), Cause.COMPLETED),
    ("success next to a running sidecar", a_pod(1, exit_code=0), Cause.COMPLETED),
    ("the launcher had notice", an_end(1, 1, message=termination_message("preempted")), Cause.PREEMPTED),
    (
        "the launcher had notice and the script exits 0",
        an_end(1, 0, message=termination_message("preempted")),
        Cause.PREEMPTED,
    ),
    ("out of memory", an_end(1, 137, reason="OOMKilled"), Cause.OOM_KILLED),
    ("SIGKILL", an_end(1, 137, reason="Error"), Cause.KILLED),
    ("SIGTERM", an_end(1, 143, reason="Error"), Cause.KILLED),
    ("a killed rank", an_end(1, 137, message=termination_message("killed", exitCode=137)), Cause.KILLED),
    ("its end was not seen", a_pod(1, PodPhase.FAILED), Cause.KILLED),
    ("the launcher saw a peer go", an_end(1, 1, message=termination_message("collateral")), Cause.COLLATERAL),
    ("no step for too long", an_end(1, 1, message=termination_message("stuck")), Cause.STUCK),
    ("the script raised", an_end(1, 1, reason="Error", message=termination_message("application")), Cause.APPLICATION),
    ("a segfault", an_end(1, 139, reason="Error"), Cause.APPLICATION),
    ("a command that is not there", an_end(1, 128, reason="StartError"), Cause.APPLICATION),
    ("failed next to a running sidecar", a_pod(1, exit_code=3), Cause.APPLICATION),
]


@pytest.mark.parametrize(("pod", "cause"), [case[1:] for case in ENDS], ids=[case[0] for case in ENDS])
def test_the_evidence_gives_one_cause(pod, cause):
    assert why(pod) is cause
    assert why(pod, None) is cause


@pytest.mark.parametrize("pod", [case[1] for case in ENDS if case[1].phase is not PodPhase.RUNNING])
def test_a_worker_that_we_removed_counts_as_scaled_in_with_any_other_evidence(pod):
    assert why(pod, LEAVING) is Cause.SCALED_IN


def test_a_lost_node_ends_its_workers_and_excuses_their_failures():
    lost = frozenset({"node-1"})
    assert why(a_pod(1), lost=lost) is Cause.NODE_LOST
    assert why(a_pod(2), lost=lost) is None
    assert why(an_end(1, 1, message=termination_message("application")), lost=lost) is Cause.NODE_LOST
    assert why(an_end(1, 0), lost=lost) is Cause.COMPLETED
    assert why(an_end(1, 1, disruption_target=True), lost=lost) is Cause.PREEMPTED


def test_a_failure_shortly_after_a_peers_loss_is_collateral():
    assert why(an_end(1, 1), losses=[PEER]) is Cause.COLLATERAL
    assert why(an_end(1, 1, message=termination_message("application")), losses=[PEER]) is Cause.COLLATERAL
    assert why(an_end(1, 137, reason="OOMKilled"), losses=[PEER]) is Cause.OOM_KILLED
    assert why(an_end(1, 1), losses=[Loss(Timestamp(NOW - 31), exact=True)]) is Cause.APPLICATION


def test_a_worker_found_stuck_is_not_excused_by_a_peers_loss():
    assert why(an_end(1, 1, message=termination_message("stuck")), losses=[PEER]) is Cause.STUCK


def test_a_worker_made_after_the_loss_is_not_excused_by_it():
    fresh = an_end(1, 1, started_at=Timestamp(NOW - 0.5), created_at=Timestamp(NOW - 0.7))
    assert why(fresh, losses=[PEER]) is Cause.APPLICATION


def test_a_loss_seen_late_still_excuses_but_a_later_failure_does_not():
    assert why(an_end(1, 1), losses=[Loss(Timestamp(NOW + 4), exact=False)]) is Cause.COLLATERAL
    assert why(an_end(1, 1), losses=[Loss(Timestamp(NOW + 4), exact=True)]) is Cause.APPLICATION


def test_a_vanished_worker():
    assert classify_vanished(KNOWN, frozenset()) is Cause.DELETED
    assert classify_vanished(KNOWN, frozenset({"node-1"})) is Cause.NODE_LOST
    assert classify_vanished(LEAVING, frozenset({"node-1"})) is Cause.SCALED_IN


def test_an_end_is_never_in_the_future():
    assert ended_at(an_end(1, 1, finished_at=Timestamp(NOW + 50)), NOW) == NOW
    assert ended_at(an_end(1, 1, finished_at=Timestamp(NOW - 50)), NOW) == NOW - 50
    assert ended_at(an_end(1, 1, finished_at=None), NOW) == NOW


def test_a_launchers_message_is_read_and_bounded():
    found = parse_failure(
        termination_message("application", lastLines=[str(i) * 500 for i in range(50)], error="e" * 1000)
    )
    assert found is not None
    assert (found.rank, found.exit_code) == (2, 1)
    assert len(found.last_lines) == MAX_LINES
    assert found.last_lines[-1] == ("49" * 500)[:MAX_LINE_CHARS]
    assert len(found.error) == MAX_LINE_CHARS


@pytest.mark.parametrize(
    "message",
    [
        "",
        "Traceback (most recent call last):",
        "{",
        "{}",
        "[1]",
        '{"verdict": "maybe"}',
        '{"verdict": ["application"]}',
        '{"verdict": "application", "exitCode": ' + "9" * 5000 + "}",
        '{"a":' * 5000,
        '{"a":"' + "x" * 100_000 + '"}',
    ],
)
def test_any_other_message_is_no_report(message):
    assert parse_failure(message) is None
    assert why(an_end(1, 1, message=message)) is Cause.APPLICATION


def test_a_report_with_odd_values_can_still_be_stored():
    found = parse_failure(
        '{"verdict": "stuck", "rank": 99999999999999, "error": "\\ud800", "lastLines": [1, null, "x"]}'
    )
    assert found is not None
    assert (found.rank, found.error, found.last_lines) == (None, "?", ("x",))


reports = st.fixed_dictionaries(
    {"verdict": st.sampled_from(["application", "collateral", "stuck", "preempted"]) | JSON},
    optional=dict.fromkeys(("rank", "exitCode", "error", "lastLines", "signal", "generation", "at"), JSON),
)


@settings(max_examples=80)
@given(message=st.text() | JSON.map(json.dumps) | reports.map(json.dumps))
def test_no_message_raises(message):
    found = parse_failure(message)
    if found is not None:
        json.dumps(found.error).encode()
        assert all(len(line) <= MAX_LINE_CHARS for line in found.last_lines)
    assert why(an_end(1, 1, message=message)) is not None
