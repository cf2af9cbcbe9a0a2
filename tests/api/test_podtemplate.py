"""Pod templates of any content are read."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elasticctl.api.podtemplate import Hardware, capacity, hardware, node_labels
from elasticctl.api.spec import ElasticJob

LAUNCH = ["elasticctl-launch", "--nproc-per-node", "4", "--"]


def read(*containers: Any) -> Hardware:
    return hardware(ElasticJob(template={"spec": {"containers": list(containers)}}))


def test_the_workers_container_is_read_and_no_other() -> None:
    worker = {
        "name": "elasticjob-worker",
        "image": "team/train:1",
        "command": LAUNCH,
        "args": ["python", "train.py"],
        "env": [{"name": "ELASTICCTL_STORAGE", "value": "s3://b/p"}, {"name": "NODE", "valueFrom": {}}],
        "resources": {"limits": {"nvidia.com/gpu": "4"}},
    }
    found = read({"name": "sidecar", "image": "log"}, worker)
    assert found == Hardware(
        gpus_per_worker=4,
        storage="s3://b/p",
        ranks_per_worker=4,
        image="team/train:1",
        command=(*LAUNCH, "python", "train.py"),
        env={"ELASTICCTL_STORAGE": "s3://b/p"},
    )
    assert found.launched


def test_the_scripts_own_options_say_nothing_about_ranks() -> None:
    assert read({"command": ["elasticctl-launch", "--", "x", "--nproc-per-node", "8"]}).ranks_per_worker == 1
    assert not read({"command": ["torchrun", "--nproc-per-node", "2", "x"]}).launched


def test_a_job_is_in_the_launcher_role_by_the_launchers_own_option() -> None:
    assert read({"command": ["elasticctl-launch", "--launcher", "--"], "args": ["mpirun"]}).in_launcher_role
    assert not read({"command": ["elasticctl-launch", "--"], "args": ["x", "--launcher"]}).in_launcher_role
    assert not read({"command": ["x", "--launcher", "--"]}).in_launcher_role


@pytest.mark.parametrize("limit", [None, -1, "-1", "many", True, 1.5, [2]])
def test_odd_limits_are_no_gpus(limit: Any) -> None:
    assert read({"resources": {"limits": {"nvidia.com/gpu": limit}}}).gpus_per_worker == 0


@pytest.mark.parametrize("limit", ["9" * 5000, 10**400, "9999999"])
def test_a_limit_beyond_all_nodes_is_a_large_number(limit: Any) -> None:
    assert read({"resources": {"limits": {"nvidia.com/gpu": limit}}}).gpus_per_worker == 1_000_000


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.text(max_size=5) | st.sampled_from(["9" * 5000, 10**400]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["spec", "containers", "env", "name", "nodeSelector", "affinity"]), inner)
    ),
    max_leaves=8,
)


@given(JSON)
@settings(max_examples=50)
def test_nothing_raises(template: Any) -> None:
    wrapped: Any = template if isinstance(template, dict) else {"spec": template}
    hardware(ElasticJob(template=wrapped))
    assert capacity(wrapped) in ("", "spot", "onDemand")
    assert isinstance(node_labels(wrapped), dict)
