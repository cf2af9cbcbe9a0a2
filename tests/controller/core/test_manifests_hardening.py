"""Pods as they are created on Kubernetes: the restricted profile, where the template leaves it open."""

from __future__ import annotations

import copy
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

from elasticctl_controller.core.manifests import harden


def hardened(worker: dict[str, Any] | None = None, **spec: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The pod's spec and its worker."""
    containers = [{"name": "elasticjob-worker", "image": "trainer", **(worker or {})}]
    pod = harden({"metadata": {"name": "p"}, "spec": {"containers": containers, **spec}})
    return pod["spec"], pod["spec"]["containers"][0]


def test_a_bare_pod_fits_the_restricted_profile() -> None:
    spec, worker = hardened()
    assert spec["securityContext"] == {
        "runAsNonRoot": True,
        "runAsUser": 1000,
        "runAsGroup": 1000,
        "fsGroup": 1000,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    assert worker["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": True,
    }
    assert spec["automountServiceAccountToken"] is False


def test_there_is_room_to_write_and_to_share() -> None:
    spec, worker = hardened({"resources": {"limits": {"memory": "8Gi"}}})
    volumes = {volume["name"]: volume["emptyDir"] for volume in spec["volumes"]}
    mounts = {mount["mountPath"]: mount["name"] for mount in worker["volumeMounts"]}
    assert volumes[mounts["/tmp"]] == {}
    assert volumes[mounts["/dev/shm"]] == {"medium": "Memory", "sizeLimit": "8Gi"}
    assert {item["name"]: item["value"] for item in worker["env"]} == {"HOME": "/tmp", "USER": "elasticjob"}


def test_lost_nodes_are_left_soon() -> None:
    spec, _ = hardened(tolerations=[{"key": "nvidia.com/gpu", "operator": "Exists"}])
    assert [(item["key"], item.get("tolerationSeconds")) for item in spec["tolerations"]] == [
        ("nvidia.com/gpu", None),
        ("node.kubernetes.io/not-ready", 10),
        ("node.kubernetes.io/unreachable", 10),
    ]


def test_a_lost_answer_of_the_name_server_holds_nobody_up() -> None:
    spec, _ = hardened()
    assert spec["dnsConfig"] == {"options": [{"name": "timeout", "value": "1"}, {"name": "attempts", "value": "3"}]}
    assert hardened(dnsConfig={})[0]["dnsConfig"] == {}


def test_what_the_template_says_stays() -> None:
    own = {"readOnlyRootFilesystem": False, "privileged": True}
    spec, worker = hardened(
        {
            "securityContext": own,
            "env": [{"name": "HOME", "value": "/home/me"}],
            "volumeMounts": [{"name": "mine", "mountPath": "/tmp/"}, {"name": "shm", "mountPath": "/dev/shm"}],
        },
        securityContext={"runAsUser": 0, "seccompProfile": {"type": "Unconfined"}},
        automountServiceAccountToken=True,
        tolerations=[{"operator": "Exists"}],
        volumes=[{"name": "mine", "emptyDir": {}}],
    )
    assert spec["securityContext"] == {"runAsUser": 0, "seccompProfile": {"type": "Unconfined"}}
    assert worker["securityContext"] == own
    assert worker["env"] == [{"name": "HOME", "value": "/home/me"}, {"name": "USER", "value": "elasticjob"}]
    assert [mount["name"] for mount in worker["volumeMounts"]] == ["mine", "shm"]
    assert (spec["automountServiceAccountToken"], spec["tolerations"]) == (True, [{"operator": "Exists"}])
    assert spec["volumes"] == [{"name": "mine", "emptyDir": {}}]


def test_a_user_chosen_by_a_container_is_chosen() -> None:
    spec, worker = hardened({"securityContext": {"runAsUser": 5}})
    assert "runAsUser" not in spec["securityContext"]
    assert worker["securityContext"]["runAsUser"] == 5


def test_a_user_chosen_by_one_container_leaves_the_others_theirs() -> None:
    images_user = {"name": "images-user", "securityContext": {"runAsNonRoot": True}}
    root = {"name": "root", "securityContext": {"runAsUser": 0}}
    pod = harden(
        {
            "spec": {
                "containers": [{"name": "elasticjob-worker", "securityContext": {"runAsGroup": 7}}, images_user],
                "initContainers": [{"name": "first"}, root],
            }
        }
    )
    keys = ("runAsNonRoot", "runAsUser", "runAsGroup")
    users = {
        item["name"]: tuple(item["securityContext"].get(key) for key in keys)
        for item in [*pod["spec"]["containers"], *pod["spec"]["initContainers"]]
    }
    assert users == {
        "elasticjob-worker": (True, 1000, 7),
        "images-user": (True, None, None),
        "first": (True, 1000, 1000),
        "root": (None, 0, None),
    }
    assert pod["spec"]["securityContext"] == {"fsGroup": 1000, "seccompProfile": {"type": "RuntimeDefault"}}
    assert harden(pod) == pod


def test_a_group_chosen_for_the_pod_is_everybodys() -> None:
    sidecar = {"name": "sidecar", "securityContext": {"runAsUser": 65534}}
    pod = harden(
        {
            "spec": {
                "containers": [{"name": "elasticjob-worker"}, sidecar],
                "securityContext": {"runAsGroup": 7, "fsGroup": 8},
            }
        }
    )
    assert (pod["spec"]["securityContext"]["runAsGroup"], pod["spec"]["securityContext"]["fsGroup"]) == (7, 8)
    worker = pod["spec"]["containers"][0]["securityContext"]
    assert (worker["runAsUser"], worker.get("runAsGroup")) == (1000, None)


def test_helpers_are_held_to_it_too() -> None:
    sidecar = {"name": "sidecar"}
    pod = harden({"spec": {"containers": [sidecar, {"name": "elasticjob-worker"}], "initContainers": [{"name": "i"}]}})
    first, worker = pod["spec"]["containers"]
    assert all(
        item["securityContext"]["readOnlyRootFilesystem"] for item in [first, worker, *pod["spec"]["initContainers"]]
    )
    assert {mount["mountPath"] for mount in first["volumeMounts"]} == {"/tmp"}
    assert {mount["mountPath"] for mount in worker["volumeMounts"]} == {"/tmp", "/dev/shm"}
    assert [volume["name"] for volume in pod["spec"]["volumes"]] == ["elasticctl-scratch", "elasticctl-shm"]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                [
                    "spec",
                    "containers",
                    "env",
                    "name",
                    "tolerations",
                    "volumes",
                    "key",
                    "securityContext",
                    "runAsUser",
                    "resources",
                    "limits",
                ]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@given(
    st.fixed_dictionaries(
        {
            "spec": st.dictionaries(
                st.sampled_from(["containers", "initContainers", "tolerations", "volumes", "securityContext"]), JSON
            )
        }
    )
)
@example({"spec": {"tolerations": [{"key": []}], "containers": [{"env": [{"name": {}}]}]}})
@settings(max_examples=60)
def test_a_template_of_any_content_is_taken_and_left_unchanged(pod: dict[str, Any]) -> None:
    before = copy.deepcopy(pod)
    once = harden(pod)
    assert pod == before
    assert harden(once) == once
