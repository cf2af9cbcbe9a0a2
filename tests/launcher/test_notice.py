"""A launcher that the cloud tells of its end leaves as one that gets SIGTERM."""

from __future__ import annotations

import pytest

from elasticctl.api.codec import from_json
from elasticctl.api.status import RankFailure
from tests.support.metadata_server import ACTION, ACTION_PATH, PREEMPTED_PATH, fake_metadata

from .conftest import KEY, Lab
from .test_launch import python
from .test_metadata import INTERRUPTION, nobody


@pytest.mark.parametrize("cloud", ["aws", "gcp"])
def test_a_worker_that_hears_of_its_end_leaves_in_order(lab: Lab, cloud: str) -> None:
    with fake_metadata(cloud) as server:
        python(lab, "a-0", ELASTICCTL_NOTICE_SOURCE=cloud, ELASTICCTL_METADATA_URL=server.url)
        python(lab, "a-1")
        lab.add("a-0", "a-1")
        lab.until(lambda: "rank 0 of 2" in lab.output("a-0") and "rank 1 of 2" in lab.output("a-1"))
        server.answers |= {ACTION_PATH: (200, ACTION), PREEMPTED_PATH: (200, "TRUE")}
        assert lab.workers["a-0"].wait(20) == 143
    why = INTERRUPTION if cloud == "aws" else "GCP preemption"
    failure = from_json(RankFailure, lab.message("a-0"))
    assert (failure.verdict, failure.error, failure.exit_code) == ("preempted", why, 143)
    lab.until(lambda: "rank 0 of 1 generation 2" in lab.output("a-1"))
    assert all((lab.folder / f"reached-1-{rank}").exists() for rank in range(2)), "both committed the same step"
    assert lab.site.service.view(KEY).generations[-1].reason == f"a-0 has to stop: {why}"


def test_notice_reaches_a_worker_that_waits_for_a_group(lab: Lab) -> None:
    lab.add("a-0", "a-1")  # a-1 never comes, so a-0 waits for it
    with fake_metadata("gcp") as server:
        python(lab, "a-0", ELASTICCTL_NOTICE_SOURCE="auto", ELASTICCTL_METADATA_URL=server.url)
        lab.until(lambda: lab.site.service.groups[KEY].joined)
        server.answers[PREEMPTED_PATH] = 200, "TRUE"
        assert lab.workers["a-0"].wait(20) == 143
    assert from_json(RankFailure, lab.message("a-0")).verdict == "preempted"


def test_without_a_metadata_service_training_goes_on(lab: Lab) -> None:
    lab.add("a-0")
    python(lab, "a-0", ELASTICCTL_NOTICE_SOURCE="auto", ELASTICCTL_METADATA_URL=nobody())
    lab.until(lambda: "rank 0 of 1" in lab.output("a-0"))
    (lab.folder / "done").touch()
    assert lab.workers["a-0"].wait(20) == 0


def test_nobody_is_asked_unless_told(lab: Lab) -> None:
    lab.add("a-0")
    with fake_metadata("aws") as server:
        python(lab, "a-0", ELASTICCTL_METADATA_URL=server.url)
        lab.until(lambda: "rank 0 of 1" in lab.output("a-0"))
        (lab.folder / "done").touch()
        assert lab.workers["a-0"].wait(20) == 0
        assert server.asked == []


@pytest.mark.parametrize(
    "environment", [{"ELASTICCTL_NOTICE_SOURCE": "azure"}, {"ELASTICCTL_METADATA_URL": "ftp://azure"}]
)
def test_a_setting_that_is_none_is_refused(lab: Lab, environment: dict[str, str]) -> None:
    python(lab, "a-0", **environment)
    assert lab.workers["a-0"].wait(20) == 2
    assert "azure" in lab.output("a-0")
