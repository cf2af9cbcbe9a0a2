"""What the page shows of projects, and how the dashboard finds it out with limited rights."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, cast

from hypothesis import given, settings

from elasticctl.api.errors import UnreachableError
from elasticctl.api.quota import Quota, usage_by_job
from elasticctl.api.spec import ElasticJob
from elasticctl.cluster.base import Cluster
from elasticctl.dashboard.feed import EVERY_S, NO_QUOTAS, OWN_ONLY, ProjectPoller
from elasticctl.dashboard.page_data import MAX_JOBS, MAX_ROWS, MAX_TEXT, Projects, projects_data
from tests.support.any_json import JSON
from tests.support.dashboard.cluster import Jobs, sharing
from tests.support.job_samples import job

LENT = sharing("train", "vision", 6, "has all 6 workers that it asks for; borrows 2 GPUs from speech", borrowed=2)
WAITS = sharing("tune", "speech", 0, "waits for 2 GPUs that speech is guaranteed")
QUOTAS = (Quota("vision", 1.0, {"t4": 4}, {"t4": 6}), Quota("speech", 2.0, {"t4": 4}, {"t4": 64}))


def shown(*manifests: dict[str, Any], quotas: tuple[Quota, ...] = QUOTAS) -> Projects:
    held = usage_by_job(map(ElasticJob.from_manifest, manifests))
    return projects_data([quota.to_manifest() for quota in quotas], held, (), all_seen=True)


def test_each_pool_with_its_projects_and_who_waits_for_whom() -> None:
    found = shown(LENT, WAITS)
    (pool,) = found["pools"]
    assert pool | {"pool": "t4", "unit": "GPU", "held": 6, "slots": 8, "free": 2, "scale": 6, "more": 0} == pool
    speech, vision = pool["projects"]
    assert vision | {"held": 6, "guaranteed": 4, "borrowed": 2, "unused": 0, "limit": 6, "waiting": 0} == vision
    assert speech | {"held": 0, "guaranteed": 4, "unused": 4, "waiting": 1, "weight": 2.0} == speech
    assert [item["job"] for item in found["waiting"]["jobs"]] == ["tune"]
    assert found["waiting"]["jobs"][0]["message"] == "waits for 2 GPUs that speech is guaranteed"
    assert [item["job"] for item in found["running"]["jobs"]] == ["train"]


def test_a_limit_beyond_all_there_is_does_not_shrink_the_bars() -> None:
    assert shown(LENT, quotas=(Quota("vision", limit={"t4": 8}),))["pools"][0]["scale"] == 8
    assert shown(LENT, quotas=(Quota("vision", limit={"t4": 9}),))["pools"][0]["scale"] == 6
    assert shown(quotas=(Quota("vision", limit={"t4": 8}),))["pools"][0]["scale"] == 0


def test_without_quotas_and_shares_there_is_nothing_to_show() -> None:
    assert shown(job(), quotas=())["pools"] == []


def test_it_is_cut_to_what_a_page_can_show() -> None:
    found = shown(*(sharing(f"job-{n:03}", f"team-{n:03}", 0, "x" * 9999) for n in range(300)), quotas=())
    assert (len(found["pools"][0]["projects"]), found["pools"][0]["more"]) == (MAX_ROWS, 300 - MAX_ROWS)
    assert (len(found["waiting"]["jobs"]), found["waiting"]["more"]) == (MAX_JOBS, 300 - MAX_JOBS)
    assert found["waiting"]["jobs"][0]["message"] == "x" * MAX_TEXT


@settings(max_examples=25)
@given(JSON, JSON)
def test_any_share_and_quota_can_be_shown(share: Any, spec: Any) -> None:
    held = usage_by_job([ElasticJob.from_manifest(job(share=share)), ElasticJob.from_manifest(LENT)])
    json.dumps(projects_data([{"metadata": {"name": "a"}, "spec": spec}], held, (), all_seen=True), allow_nan=False)


# How it is found out.


@dataclass
class Page:
    """A page of a namespace whose jobs it looks at, at the time that `now_s` says."""

    cluster: Jobs
    namespace: str | None = "vision"
    now_s: float = 0.0
    survey: ProjectPoller = field(init=False)

    def __post_init__(self) -> None:
        self.survey = ProjectPoller(cast(Cluster, self.cluster), self.namespace, lambda: self.now_s)

    def look(self) -> Projects:
        jobs = self.cluster.jobs.values()
        own = [found for found in jobs if self.namespace in (None, found["metadata"]["namespace"])]
        return self.survey.poll(map(ElasticJob.from_manifest, own))


def test_a_page_of_one_namespace_shows_all_projects() -> None:
    for namespace in ("vision", None):
        found = Page(Jobs(LENT, WAITS, quotas=QUOTAS), namespace).look()
        assert [row["project"] for row in found["pools"][0]["projects"]] == ["speech", "vision"]
        assert (found["pools"][0]["free"], found["notes"]) == (2, [])


def test_without_the_right_to_list_quotas_usage_is_shown() -> None:
    found = Page(Jobs(LENT, quotas=QUOTAS, forbidden=["quotas"])).look()
    assert found["notes"] == [NO_QUOTAS]
    (row,) = found["pools"][0]["projects"]
    assert (row["held"], row["guaranteed"]) == (6, 0)


def test_without_the_right_to_list_all_jobs_own_usage_is_shown_and_not_what_is_free() -> None:
    found = Page(Jobs(LENT, WAITS, quotas=QUOTAS, forbidden=["all jobs"])).look()
    assert found["notes"] == [OWN_ONLY.format("vision")]
    (pool,) = found["pools"]
    assert [row["held"] for row in pool["projects"]] == [0, 6]
    assert "free" not in pool
    assert found["waiting"]["jobs"] == []


def test_other_namespaces_are_asked_about_seldom_and_only_where_something_is_shared() -> None:
    alone = Page(Jobs(job()), "default")
    alone.look()
    assert alone.cluster.asked == 0
    page = Page(Jobs(LENT, WAITS, quotas=QUOTAS))
    for now_s, asked in ((0.0, 1), (EVERY_S / 2, 1), (EVERY_S, 2), (EVERY_S + 1, 2)):
        page.now_s = now_s
        page.look()
        assert page.cluster.asked == asked
    page.cluster.change("train", share={**LENT["status"]["share"], "workers": 4})
    assert page.look()["pools"][0]["projects"][1]["held"] == 4
    assert page.cluster.asked == 3, "what one's own jobs hold has changed: so have others', it seems"


def test_a_cluster_that_takes_long_is_left_alone_for_longer() -> None:
    page = Page(Jobs(LENT, WAITS, quotas=QUOTAS))
    answer = page.cluster.list_quotas

    def slowly() -> list[dict[str, Any]]:
        page.now_s += 5
        return answer()

    page.cluster.list_quotas = slowly  # type: ignore[method-assign]
    page.look()
    for now_s, workers, asked in ((20.0, 4, 1), (49.0, 2, 1), (50.0, 2, 2)):
        page.now_s = now_s
        page.cluster.change("train", share={**LENT["status"]["share"], "workers": workers})
        assert page.look()["pools"][0]["projects"][1]["held"] == workers, "one's own is known anyway"
        assert page.cluster.asked == asked


def test_what_others_do_meanwhile_is_seen() -> None:
    page = Page(Jobs(LENT, WAITS, quotas=QUOTAS))
    page.look()
    page.cluster.change("tune", share={**WAITS["status"]["share"], "workers": 2, "poolSlots": 8}, phase="Running")
    page.now_s = EVERY_S
    assert page.look()["pools"][0]["held"] == 8
    del page.cluster.jobs["tune"]
    page.now_s = 2 * EVERY_S
    assert page.look()["pools"][0]["held"] == 6


def test_a_cluster_that_does_not_answer_leaves_what_was_known() -> None:
    page = Page(Jobs(LENT, WAITS, quotas=QUOTAS))
    before = page.look()
    page.cluster.trouble, page.now_s = UnreachableError("no answer: is the VPN up?"), EVERY_S
    after = page.look()
    assert after["pools"] == before["pools"]
    assert after["notes"] == ["no answer: is the VPN up? What is shown of other projects may be out of date."]
    page.cluster.trouble, page.now_s = None, 2 * EVERY_S
    assert page.look() == before
