"""Any object can be described, whatever it holds: for a person, for programs, on the page."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elasticctl.api.observed.history import fraction_done, goodput, remaining_s, steps_per_s
from elasticctl.api.observed.timeline import timeline
from elasticctl.api.spec import ElasticJob
from elasticctl.api.status import JobStatus
from elasticctl.api.text import span
from elasticctl.cli.framework.output import format_tabs
from elasticctl.cli.views.description import describe_job, format_sections
from elasticctl.cli.views.history import failure_lines, history_table, totals_lines
from elasticctl.cli.views.job import status_table
from elasticctl.cli.views.jobs import ListColumns, job_table
from elasticctl.dashboard.page_data import job_details
from elasticctl.diagnosis import Case, diagnose
from elasticctl.simulation.scaling import evidence_of
from tests.support.anything import JSON, shaped

NOW = 1_700_000_000.0
SPECS = st.fixed_dictionaries(
    {},
    optional={
        "minReplicas": JSON,
        "maxReplicas": JSON,
        "backoffLimit": JSON,
        "activeDeadlineSeconds": JSON,
        "policy": JSON,
        "sharing": JSON,
        "replicaSpecs": st.fixed_dictionaries(
            {"Worker": st.dictionaries(st.sampled_from(["replicas", "template"]), JSON)}
        ),
    },
)
PODS = JSON | st.fixed_dictionaries(
    {}, optional={"metadata": JSON, "status": st.fixed_dictionaries({"containerStatuses": JSON, "conditions": JSON})}
)


@pytest.mark.parametrize("seconds", [math.inf, math.nan, 1e300])
def test_a_time_without_end_is_a_long_one(seconds: float) -> None:
    assert span(seconds) == "11574074d1h"


@given(shaped(JobStatus), SPECS, st.lists(PODS, max_size=3))
@settings(max_examples=75)
def test_any_object_can_be_described(status: dict[str, Any], spec: dict[str, Any], pods: list[Any]) -> None:
    manifest = {"metadata": {"name": "digits", "uid": "u"}, "spec": spec, "status": status}
    job = ElasticJob.from_manifest(manifest)
    case = Case(job, tuple(pods), NOW)
    findings = diagnose(case)
    assert findings
    assert all(finding.text.endswith(".") for finding in findings)
    assert all(isinstance(line, str) for line in format_sections(describe_job(case, findings), 80))
    for table in (
        job_table([manifest], NOW, ListColumns(wide=True)),
        status_table(manifest, pods, NOW),
        history_table(job),
    ):
        assert all(line.count("\t") == len(table.header) - 1 for line in format_tabs(table).split("\n"))
    assert all(isinstance(line, str) for line in (*totals_lines(job, NOW), *failure_lines(job.status)))
    assert json.dumps(job_details(job, pods, NOW))


@given(shaped(JobStatus), st.lists(JSON, max_size=3))
@settings(max_examples=75)
def test_any_status_can_be_evaluated(status: dict[str, Any], events: list[Any]) -> None:
    job = ElasticJob.from_manifest({"metadata": {"name": "digits"}, "status": status})
    entries = timeline(job, events)
    assert entries == sorted(entries, key=lambda entry: entry.at)
    part = goodput(job.status, NOW)
    assert part is None or 0.0 <= part.share <= 1.0
    share = fraction_done(job.status)
    assert share is None or 0.0 <= share <= 1.0
    assert all(found is None or found >= 0.0 for found in (remaining_s(job.status), steps_per_s(job.status)))
    assert evidence_of(job, NOW).gpus_per_node >= 1
