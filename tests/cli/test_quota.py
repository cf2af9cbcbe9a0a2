"""`quota`, `local sharing` and what other verbs show of shares."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from elasticctl.api.errors import SpecError
from elasticctl.api.quota import PoolUsage, ProjectUsage, Quota, usage_by_job, usage_by_project
from elasticctl.api.spec import ElasticJob
from elasticctl.cli.verbs.set_up.quota import bar, free_lines, holdings_table, job_sentences
from elasticctl.cli.views.history import history_table, scalings
from elasticctl.cli.views.job import status_table
from elasticctl.cli.views.jobs import job_table
from elasticctl.cluster.local.client import LocalCluster
from elasticctl.diagnosis import Case, diagnose
from elasticctl.operations.rerun import Rerun, rerun_manifest
from tests.support.cli import Run
from tests.support.job_samples import AT, at, job
from tests.support.jobs import FOREVER, shell_job
from tests.support.waiting import wait_until

FULL = {"workers": 4, "borrowed": 2, "pool": "t4", "slotsPerWorker": 2, "reason": "Full",
        "message": "has all 4 workers that it asks for; borrows 4 GPUs from b"}  # fmt: skip
WAITS = {"workers": 0, "pool": "t4", "reason": "WaitsForTurn",
         "message": "waits for 2 GPUs held by jobs that come first", "change": "gives 2 workers to a/one"}  # fmt: skip


def shared(name: str, project: str, share: dict[str, Any], **status: Any) -> dict[str, Any]:
    found = job(name, share=share, **status)
    found["metadata"]["namespace"] = project
    return found


JOBS = [shared("one", "a", FULL), shared("two", "b", WAITS, phase="Pending"), job("alone")]
HELD = usage_by_job(map(ElasticJob.from_manifest, JOBS))


def test_a_line_for_each_project_and_kind() -> None:
    rows = usage_by_project([Quota("a", 1.0, {"t4": 4}, {"t4": 16}).to_manifest()], HELD)
    assert [line[:7] for line in holdings_table(rows, "utf-8").rows] == [
        ("a", "t4", "8", "4", "16", "4", "0"),
        ("b", "t4", "0", "0", "", "0", "1"),
    ]


@pytest.mark.parametrize(
    ("held", "guaranteed", "borrowed", "drawn"),
    [
        (8, 4, 4, "#" * 10 + "+" * 10),
        (2, 8, 0, "#" * 5 + "." * 15),
        (0, 4, 0, "." * 10),
        (0, 0, 0, ""),
    ],
)
def test_a_bar_shows_what_is_held_by_right_borrowed_and_idle(
    held: int, guaranteed: int, borrowed: int, drawn: str
) -> None:
    row = ProjectUsage("a", "t4", 1.0, held, guaranteed, None, borrowed, max(0, guaranteed - held + borrowed), 0)
    assert bar(row, 8, "ascii") == drawn
    assert len(bar(row, 8, "utf-8")) == len(drawn)
    assert bar(row, 0, "ascii") == ""


def test_a_sentence_for_each_job() -> None:
    assert list(job_sentences(HELD)) == [
        "a/one has all 4 workers that it asks for; borrows 4 GPUs from b.",
        "b/two waits for 2 GPUs held by jobs that come first. Last change: gives 2 workers to a/one.",
    ]


def test_a_sentence_for_each_pool_whose_free_slots_are_known() -> None:
    pools = [
        PoolUsage("a100", "GPU", 0, None, None),
        PoolUsage("cpu", "CPU slot", 0, 1, 1),
        PoolUsage("t4", "GPU", 8, 16, None),
    ]
    assert list(free_lines(pools)) == ["cpu: 1 of 1 CPU slot free"]


def test_status_and_list_say_what_is_borrowed() -> None:
    fields = dict(status_table(JOBS[0], [], AT + 60).rows)
    assert fields["Workers"] == "4 of 4 training (1-4), CPU, borrowing 2"
    assert job_table([JOBS[0]], AT + 60).rows[0][-1] == "borrowing 2"
    over = job("over", share=FULL, phase="Succeeded")
    assert "borrowing" not in str(status_table(over, [], AT + 60).rows)


def test_why_it_waits_is_the_first_cause() -> None:
    found = diagnose(Case(ElasticJob.from_manifest(JOBS[1]), (), AT + 60))[0]
    assert (found.rule, found.decisive) == ("waiting-for-its-share", True)
    assert found.text == (
        "It waits for 2 GPUs held by jobs that come first. Last change: gives 2 workers to a/one. Its progress is kept:"
        " step 100. It resumes by itself."
    )
    assert found.mends[0].command == "elasticctl quota list"


def test_a_job_that_gave_way_was_not_suspended_on_request() -> None:
    gave_way = ElasticJob.from_manifest(shared("two", "b", WAITS, phase="Suspended"))
    rules = [finding.rule for finding in diagnose(Case(gave_way, (), AT + 60))]
    assert rules[0] == "waiting-for-its-share"
    assert "suspended" not in rules
    asleep = shared("two", "b", WAITS, phase="Suspended")
    asleep["spec"]["suspend"] = True
    assert diagnose(Case(ElasticJob.from_manifest(asleep), (), AT + 60))[0].rule == "suspended"


def test_a_job_of_kueues_waits_to_be_admitted() -> None:
    queued = job("one", phase="Suspended")
    queued["metadata"]["labels"] = {"kueue.x-k8s.io/queue-name": "team-a"}
    queued["spec"]["suspend"] = True
    found = diagnose(Case(ElasticJob.from_manifest(queued), (), AT + 60))[0]
    assert found.text == "It waits to be admitted to Kueue's queue team-a. Its progress is kept: step 100."
    rerun = rerun_manifest({**queued, "spec": {**queued["spec"], "suspend": False}}, Rerun("one-2"))
    assert rerun["spec"]["suspend"] is True
    assert "suspend" not in rerun_manifest({**job("two"), "spec": {**queued["spec"]}}, Rerun("two-2"))["spec"]


def test_other_findings_about_sharing_come_last() -> None:
    fewer = {**FULL, "workers": 2, "message": "has 2 of 4 workers: t4 has 4 GPUs, shared with 1 other job"}
    growing = shared("one", "a", fewer, growth="1 ready to join; waits at most 9.0s for 1 more to start")
    texts = {f.rule: f.text for f in diagnose(Case(ElasticJob.from_manifest(growing), (), AT + 60))}
    assert texts["fewer-than-wanted"] == "It has 2 of 4 workers: t4 has 4 GPUs, shared with 1 other job."
    assert texts["waiting-to-grow"].startswith("It could grow: 1 ready to join")
    assert texts["borrowing"].startswith("2 workers are borrowed")


def test_the_history_shows_who_asked_and_how_far_it_is() -> None:
    changes = [
        {"at": at(1), "fromWorkers": 4, "toWorkers": 2, "by": "sharing", "message": "gives 2 workers to b/two",
         "phase": "Superseded"},
        {"at": at(2), "fromWorkers": 2, "toWorkers": 3, "by": "user", "phase": "InProgress"},
    ]  # fmt: skip
    found = ElasticJob.from_manifest(job("one", scalings=changes, interruptions=[]))
    assert [row[2:5] for row in history_table(found).rows] == [
        ("4 -> 2", "sharing: gives 2 workers to b/two", "superseded"),
        ("2 -> 3", "user", "in progress"),
    ]
    assert scalings(found.status)[0].endswith("4 -> 2 workers  by sharing: gives 2 workers to b/two  superseded")


def test_quotas_are_set_listed_explained_and_removed(run: Run, home: Any, local_cluster: LocalCluster) -> None:
    assert run("local", "sharing").err == "sharing is off\n"
    assert run("local", "sharing", "on", "--cpu-slots", "3").err == "sharing is on, 3 CPU slots\n"
    assert run("quota", "list").err.startswith("no project has a quota")
    done = run("quota", "set", "a", "--guaranteed", "cpu=2", "--limit", "cpu=4")
    assert (done.code, done.err) == (0, "a: guaranteed 2 cpu; limit 4 cpu; weight 1\n")
    assert run("quota", "set", "a", "--weight", "2", "--limit", "cpu=none").err == (
        "a: guaranteed 2 cpu; limit none; weight 2\n"
    )
    local_cluster.create_job(shell_job("one", FOREVER, 3, namespace="a", minReplicas=3))
    wait_until(lambda: local_cluster.get_job("a", "one").get("status", {}).get("phase") == "Running")
    local_cluster.create_job(shell_job("two", FOREVER, 1, namespace="b"))
    wait_until(lambda: local_cluster.get_job("b", "two").get("status", {}).get("share", {}).get("pool"))
    listed = run("quota", "list")
    assert [line.split("\t")[:7] for line in listed.out.splitlines()[1:]] == [
        ["a", "cpu", "3", "2", "-", "1", "0"],
        ["b", "cpu", "0", "0", "-", "0", "1"],
    ]
    assert re.match(r"cpu: 0 of 3 CPU slots free\nb/two waits for 1 CPU slot", listed.err)
    data = json.loads(run("quota", "list", "-o", "json").out)
    assert (data["kind"], len(data["holdings"]), [each["job"] for each in data["jobs"]]) == (
        "QuotaList",
        2,
        ["one", "two"],
    )
    assert data["pools"] == [{"pool": "cpu", "unit": "CPU slot", "held": 3, "slots": 3, "free": 0}]
    assert run("quota", "explain", "a").out.startswith("a/one has all 3 workers")
    assert run("explain", "two", "-n", "b").out.splitlines()[1].startswith("It waits for 1 CPU slot")
    assert run("quota", "rm", "a").code == 0
    assert run("quota", "rm", "a").err == "error: there is no ElasticQuota 'a'\n"
    assert run("local", "sharing", "off").err == "sharing is off\n"


def test_limits_of_jobs_are_set_shown_kept_and_removed(run: Run, home: Any, local_cluster: LocalCluster) -> None:
    done = run("quota", "set", "a", "--max-priority", "5", "--allow-storage", "s3://a/", "--allow-storage", "s3://b")
    assert done.err == (
        "a: guaranteed nothing; limit none; weight 1\na: jobs are limited to priority 5 at most; storage s3://a/, s3://b\n"
    )
    assert "jobs are limited to priority 5 at most" in run("quota", "list").err
    job = shell_job("loud", FOREVER, namespace="a", sharing={"priority": 6})
    said = "project a does not allow this job: its priority is 6, and 5 is the most."
    with pytest.raises(SpecError, match=said):
        local_cluster.create_job(job)
    refused = run("submit", "-n", "a", "--priority", "6", "-d", "--", "sleep", "1")
    assert (refused.code, refused.out) == (2, "")
    assert f"error: {said[:-1]}; its storage" in refused.err
    local_cluster.create_job({**job, "spec": {**job["spec"], "sharing": {"priority": 5}}})
    local_cluster.patch_job("a", "loud", {"spec": {"sharing": {"priority": 9}}})
    assert run("quota", "set", "a", "--max-priority", "any", "--allow-storage", "any").err.count("\n") == 1
    local_cluster.create_job({**job, "metadata": {"name": "louder", "namespace": "a"}})


MISTAKES = [
    ("quota set a", "nothing to set. FIX: add --guaranteed KIND=N, --limit KIND=N or --weight W\n"),
    ("quota set a --guaranteed t5=1", 'spec.guaranteed: "t5" is not'),
    ("quota set a --guaranteed t4=x", '--guaranteed t4=x: "x" is not a whole number, or `none`\n'),
    ("quota set a --guaranteed t4=4 --limit t4=2", "spec.guaranteed.t4: 4 t4 are"),
    ("quota set a --weight 0", "spec.weight: must be from 0.001 to 1000, not 0.0\n"),
    ("quota set A_b --weight 1", 'metadata.name: "A_b" is not a valid name'),
    ("local sharing --cpu-slots 2", "--cpu-slots goes with `on`"),
    ("quota set a --max-priority high", '--max-priority high: "high" is not a number, or `any`\n'),
    ("quota set a --max-priority 1001", "spec.allowed.priority: must be a whole number from -1000 to 1000"),
    ("quota set a --usd-per-day nan", "spec.allowed.usdPerDay: must be an amount in US dollars"),
    ("quota set a --allow-storage /data", 'spec.allowed.storage: "/data" is not a URL'),
    ("quota set a --allow-image a*b", 'spec.allowed.images: "a*b" has a *'),
]


@pytest.mark.usefixtures("home")
def test_wrong_use_is_one_line(run: Run) -> None:
    for line, message in MISTAKES:
        done = run(*line.split())
        assert (done.code, done.err.count("\n")) == (2, 1), done
        assert done.err.startswith(f"error: {message}"), done.err


def test_why_a_job_over_its_limits_does_not_run_is_the_first_cause() -> None:
    said = "project b does not allow this job: its priority is 6, and 5 is the most"
    held = ElasticJob.from_manifest(job("two", phase="Suspended", reason="OverLimit", message=said))
    found = diagnose(Case(held, (), AT + 60))
    assert (found[0].rule, found[0].decisive) == ("over-limit", True)
    assert found[0].text == f"P{said[1:]}. Its progress is kept: step 100."
    assert "suspended" not in [finding.rule for finding in found]
