"""Manifests are checked against the CRD, and each mistake has its line."""

from __future__ import annotations

import copy
import re
from contextlib import nullcontext
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from elasticctl.api import validation
from elasticctl.api.errors import SpecError
from elasticctl.api.spec import (
    API_VERSION,
    KIND,
    MAX_WORKERS,
    PLURAL,
    CleanPodPolicy,
    ElasticJob,
    Policy,
    RestartPolicy,
)
from elasticctl.api.status import JobStatus
from elasticctl.api.yamltext import YamlDocument, dump_yaml
from tests.support.jobs import GOOD
from tests.support.torchelastic import torchelastic_job

TORCHELASTIC = torchelastic_job("""
    containers:
      - name: elasticjob-worker
        image: example/examples:0.2.0
        imagePullPolicy: Always
        args: ["--nproc_per_node=1", "/workspace/main.py", "--epochs=10"]
        resources: {limits: {nvidia.com/gpu: 1}}
""")


def schema() -> dict[str, Any]:
    found: dict[str, Any] = validation.crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    return found


@pytest.mark.parametrize("text", [GOOD, TORCHELASTIC])
def test_good_manifests_load_and_round_trip(text: str) -> None:
    manifest = validation.load_manifest(text, "job.yaml")
    assert validation.load_manifest(dump_yaml(manifest)) == manifest


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "maxReplicas: 4",
            "sharing: {podGroup: Volcano}",
            "f:6: spec.sharing.podGroup: Volcano and scheduler-plugins are no longer supported. FIX: leave this out,"
            " and use Kueue (`submit --queue`) or Kubernetes' own gangs (`install --feature gangs`)",
        ),
        ("maxReplicas: 4", "maxReplica: 4", 'f:6: spec.maxReplica: unknown field (did you mean "maxReplicas"?)'),
        ("replicas: 2", "replicas: two", 'f:9: spec.replicaSpecs.Worker.replicas: must be a whole number, not "two"'),
        ("replicas: 2", "replicas: 2.0", "f:9: spec.replicaSpecs.Worker.replicas: must be a whole number, not 2.0"),
        ("replicas: 2", "replicas: yes", "f:9: spec.replicaSpecs.Worker.replicas: must be a whole number, not true"),
        ("replicas: 2", "replicas: 0", "f:9: spec.replicaSpecs.Worker.replicas: must be at least 1, not 0"),
        ("replicas: 2", "replicas: 5", "f:9: spec.replicaSpecs.Worker.replicas: 5 is more than maxReplicas, 4"),
        ("minReplicas: 1", "minReplicas: 3", "f:9: spec.replicaSpecs.Worker.replicas: 2 is less than minReplicas, 3"),
        ("minReplicas: 1", "minReplicas: 7", "f:5: spec.minReplicas: 7 is more than maxReplicas, 4"),
        (
            'value: "1"',
            "value: 1",
            "f:18: spec.replicaSpecs.Worker.template.spec.containers[0].env[0].value: must be text",
        ),
        (
            "- name: elasticjob-worker",
            "- image: x",
            "f:15: spec.replicaSpecs.Worker.template.spec.containers[0].name: req",
        ),
        ("containers:", "container:", "f:13: spec.replicaSpecs.Worker.template.spec.containers: required, but missing"),
        ("name: digits", "name: Digits", "f:3: metadata.name: must be lower-case letters, digits and '-', starting"),
        ("name: digits", 'name: "digits\\n"', "f:3: metadata.name: must be lower-case"),
        ("name: digits", f"name: {'a' * 52}", "f:3: metadata.name: must be at most 51 characters long"),
        ("name: digits", "name: a, labels: {b: 1}", "f:3: metadata.labels.b: must be text, not 1"),
        ("name: digits", "name: a, lables: {}", 'f:3: metadata.lables: unknown field (did you mean "labels"?)'),
        ("metadata: {name: digits}\n", "", "f:1: metadata: required, but missing"),
        ("kind: ElasticJob", "kind: Job", 'f:2: kind: must be "ElasticJob", not "Job"'),
        ("v1alpha1", "v1", f'f:1: apiVersion: must be "{API_VERSION}", not "elastic.pytorch.org/v1"'),
        ("spec:\n  min", "spek:\n  min", 'f:4: spek: unknown field (did you mean "spec"?) (and 1 more)'),
        ("minReplicas: 1", "cleanPodPolicy: running", "f:5: spec.cleanPodPolicy: must be None, Running or All, not"),
        (
            "minReplicas: 1",
            "policy: {hangTimeoutSeconds: -1}",
            "f:5: spec.policy.hangTimeoutSeconds: must be at least 0",
        ),
        (
            "minReplicas: 1",
            "removeWorkers: [{name: digits-worker-0}]",
            "f:5: spec.removeWorkers[0].uid: required, but missing",
        ),
        (GOOD, "", "f: the file is empty"),
        (GOOD, "- 1", "f:1: must be a mapping, not [1]"),
    ],
)
def test_each_mistake_names_its_field_and_line(old: str, new: str, message: str) -> None:
    assert old in GOOD
    with pytest.raises(SpecError) as caught:
        validation.load_manifest(GOOD.replace(old, new), "f")
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_open_parts_of_the_pod_stay_open() -> None:
    manifest = validation.load_manifest(GOOD)
    pod = manifest["spec"]["replicaSpecs"]["Worker"]["template"]["spec"]
    pod["topologySpreadConstraints"] = [{"maxSkew": 1}]
    validation.validate_manifest(YamlDocument(manifest, {}))


PATHS = [
    ("metadata",),
    ("metadata", "name"),
    ("metadata", "labels"),
    ("spec",),
    ("spec", "minReplicas"),
    ("spec", "policy"),
    ("spec", "removeWorkers"),
    ("spec", "replicaSpecs"),
    ("spec", "replicaSpecs", "Worker", "replicas"),
    ("spec", "replicaSpecs", "Worker", "template", "spec", "containers"),
    ("status",),
]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@given(st.lists(st.tuples(st.sampled_from(PATHS), JSON), min_size=1, max_size=3))
@settings(max_examples=60)
def test_a_mangled_manifest_is_refused_in_one_line_or_can_be_run(changes: list[tuple[tuple[str, ...], Any]]) -> None:
    manifest: Any = copy.deepcopy(validation.load_manifest(GOOD))
    for path, value in changes:
        around = manifest
        for key in path[:-1]:
            around = around.get(key) if isinstance(around, dict) else None
        if isinstance(around, dict):
            around[path[-1]] = value
    problem = "none"
    try:
        validation.validate_manifest(YamlDocument(manifest, {}))
    except SpecError as e:
        problem = str(e)
    else:
        job = ElasticJob.from_manifest(manifest)
        assert 1 <= job.min <= job.desired <= job.max
    assert problem.isprintable()  # nor any newline


def test_the_crd_says_what_the_dataclasses_say() -> None:
    spec = schema()["properties"]["spec"]["properties"]
    worker = spec["replicaSpecs"]["properties"]["Worker"]["properties"]
    job, policy = ElasticJob.from_manifest({}), Policy()
    assert validation.crd()["spec"]["names"]["kind"] == KIND
    assert validation.crd()["spec"]["names"]["plural"] == PLURAL
    assert spec["cleanPodPolicy"]["enum"] == [policy.value for policy in CleanPodPolicy]
    assert spec["cleanPodPolicy"]["default"] == job.clean_pod_policy.value
    assert spec["backoffLimit"]["default"] == job.backoff_limit
    assert worker["restartPolicy"]["enum"] == [policy.value for policy in RestartPolicy]
    assert worker["restartPolicy"]["default"] == job.restart_policy.value
    assert worker["replicas"]["default"] == job.desired
    assert worker["replicas"]["maximum"] == spec["maxReplicas"]["maximum"] == MAX_WORKERS
    defaults = {name: field.get("default") for name, field in spec["policy"]["properties"].items()}
    assert defaults == {
        "backoffSeconds": policy.backoff_seconds,
        "backoffMaxSeconds": policy.backoff_max_seconds,
        "stragglerSeconds": policy.straggler_seconds,
        "hangTimeoutSeconds": policy.hang_timeout_seconds,
        "onNan": policy.on_nan.value,
    }


def test_status_is_accepted_whatever_the_controller_writes() -> None:
    from elasticctl.api.codec import to_json

    manifest = validation.load_manifest(GOOD)
    validation.validate_manifest(YamlDocument({**manifest, "status": to_json(JobStatus())}, {}))


def walk(node: dict[str, Any]) -> Any:
    yield node
    for inner in node.get("properties", {}).values():
        yield from walk(inner)
    for key in ("items", "additionalProperties"):
        if isinstance(node.get(key), dict):
            yield from walk(node[key])


def test_the_schema_is_structural() -> None:
    """Kubernetes' rules for a v1 CRD: a type everywhere, and no properties next to additionalProperties."""
    for node in walk(schema()):
        assert node.get("type") in {"object", "array", "string", "integer", "number", "boolean"}
        assert not ("properties" in node and "additionalProperties" in node)
        assert ("items" in node) == (node["type"] == "array")
        assert set(node.get("required", ())) <= set(node.get("properties", ()))


@pytest.fixture(scope="module")
def rules() -> list[Any]:
    """The CEL rules of the CRD about one manifest, compiled."""
    return [compiled(text) for text in rule_texts() if "oldSelf" not in text]


def compiled(text: str) -> Any:
    import celpy

    environment = celpy.Environment()
    return environment.program(environment.compile(text))


def rule_texts() -> list[str]:
    return [rule["rule"] for rule in schema()["properties"]["spec"]["x-kubernetes-validations"]]


COUNT = st.none() | st.integers(1, 4)


@given(COUNT, COUNT, st.integers(1, 4))
@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_client_and_the_cel_rules_agree(rules: list[Any], low: int | None, high: int | None, replicas: int) -> None:
    from celpy.adapter import json_to_cel

    manifest = copy.deepcopy(validation.load_manifest(GOOD))
    spec = manifest["spec"]
    for name, value in (("minReplicas", low), ("maxReplicas", high)):
        del spec[name]
        if value is not None:
            spec[name] = value
    spec["replicaSpecs"]["Worker"]["replicas"] = replicas
    holds = all(rule.evaluate({"self": json_to_cel(spec)}) for rule in rules)
    accepted = True
    try:
        validation.validate_manifest(YamlDocument(manifest, {}))
    except SpecError:
        accepted = False
    assert accepted == holds


def test_every_rule_says_what_to_do_and_where() -> None:
    for rule in schema()["properties"]["spec"]["x-kubernetes-validations"]:
        assert "FIX: " in rule["message"]
        assert rule["fieldPath"].startswith(".")


def changed(suspend: bool = False, cancel: bool = False, image: str = "a", **extra: Any) -> dict[str, Any]:
    manifest = copy.deepcopy(validation.load_manifest(GOOD))
    manifest["spec"] |= {"suspend": suspend, "cancel": cancel}
    manifest["spec"]["replicaSpecs"]["Worker"]["template"] = {
        "spec": {"containers": [{"name": "x", "image": image}], **extra}
    }
    return manifest


@pytest.mark.parametrize(
    ("old", "new", "path"),
    [
        (changed(), changed(), ""),
        (changed(), changed(image="b"), "spec.replicaSpecs.Worker.template"),
        (changed(), changed(nodeSelector={"a": "b"}), "spec.replicaSpecs.Worker.template"),
        (changed(), changed(image="b", suspend=True), ""),
        (changed(suspend=True), changed(image="b", suspend=True), ""),
        (changed(suspend=True), changed(image="b"), ""),
        (changed(), changed(cancel=True), ""),
        (changed(cancel=True), changed(), "spec.cancel"),
    ],
)
def test_the_client_and_cel_allow_the_same_changes(old: dict[str, Any], new: dict[str, Any], path: str) -> None:
    from celpy.adapter import json_to_cel

    rules = [compiled(text) for text in rule_texts() if "oldSelf" in text]
    given = {"self": json_to_cel(new["spec"]), "oldSelf": json_to_cel(old["spec"])}
    assert all(rule.evaluate(given) for rule in rules) == (not path)
    if not path:
        validation.check_change(old, new)
        return
    with pytest.raises(SpecError) as e:
        validation.check_change(old, new)
    assert e.value.path == path
    assert "FIX: " in str(e.value)


@pytest.mark.parametrize(
    ("endpoint", "valid"),
    [
        ("etcd:2379", True),
        ("etcd.ml.svc.cluster.local:2379", True),
        ("10.0.0.1:29400", True),
        ("[::1]:29400", True),
        ("", True),
        ("etcd", False),
        ("etcd:", False),
        ("etcd:abc", False),
        (":2379", False),
        ("::1:2379", False),
        ("http://etcd:2379", False),
        ("etcd:2379\n", False),
        ("etcd:\u0661", False),
    ],
)
def test_a_rendezvous_has_a_host_and_a_port(endpoint: str, valid: bool) -> None:
    from celpy.adapter import json_to_cel

    (rule,) = schema()["properties"]["spec"]["properties"]["rdzvEndpoint"]["x-kubernetes-validations"]
    assert bool(compiled(rule["rule"]).evaluate({"self": json_to_cel(endpoint)})) == valid
    manifest = copy.deepcopy(validation.load_manifest(GOOD))
    manifest["spec"]["rdzvEndpoint"] = endpoint
    with nullcontext() if valid else pytest.raises(SpecError, match="HOST:PORT, such as etcd:2379"):
        validation.validate_manifest(YamlDocument(manifest, {}))


def test_the_columns_of_kubectl_fit_a_terminal() -> None:
    """As kubectl prints them: each as wide as its widest cell, three spaces apart, after the name."""
    widest = {
        "Phase": "Restarting",
        "Step": "10000000",
        "Age": "365d",
        "Wanted": "2000",
        "Placed": "2000",
        "Training": "2000",
    }
    (version,) = validation.crd()["spec"]["versions"]
    shown = [column["name"] for column in version["additionalPrinterColumns"] if not column.get("priority")]
    width = sum(max(len(name), len(widest[name])) + 3 for name in shown) - 3
    assert len("resnet50-imagenet") + 3 + width <= 80


@pytest.mark.parametrize(
    ("pools", "message"),
    [
        ({"order": [{"capacity": "spot", "zone": "us-east-1a"}, {"capacity": "spot"}, {"capacity": "onDemand"}]}, ""),
        ({"order": [{"instanceType": "g5.xlarge"}, {"zone": "zone-b"}], "waitSeconds": 60, "retrySeconds": 60}, ""),
        ({"order": [{"capacity": "spot"}, {}]}, "spec.pools.order[1]: describes no machines"),
        ({"order": [{"capacity": "spot"}] * 2}, "spec.pools.order: names a pool twice"),
        ({"order": []}, "spec.pools.order: must not be empty"),
        ({"waitSeconds": 60}, "spec.pools.order: required"),
        ({"order": [{"capacity": "on-demand"}]}, "spec.pools.order[0].capacity: must be spot or onDemand"),
        ({"order": [{"zone": "A"}]}, "spec.pools.order[0].zone: must be lower-case letters"),
        ({"order": [{"zone": "a"}], "waitSeconds": 0}, "spec.pools.waitSeconds: must be at least 1"),
    ],
)
def test_an_order_names_each_pool_once(pools: dict[str, Any], message: str) -> None:
    from celpy.adapter import json_to_cel

    manifest = copy.deepcopy(validation.load_manifest(GOOD))
    manifest["spec"]["pools"] = pools
    with pytest.raises(SpecError, match=re.escape(message)) if message else nullcontext():
        validation.validate_manifest(YamlDocument(manifest, {}))
    order = schema()["properties"]["spec"]["properties"]["pools"]["properties"]["order"]
    given = pools.get("order", [])
    rules = [(rule["rule"], given) for rule in order["x-kubernetes-validations"]]
    rules += [(rule["rule"], pool) for rule in order["items"]["x-kubernetes-validations"] for pool in given]
    kept = [bool(compiled(rule).evaluate({"self": json_to_cel(about)})) for rule, about in rules]
    assert (False in kept) == ("describes no" in message or "twice" in message)


@pytest.mark.parametrize(
    ("goal", "endpoint", "message"),
    [
        ({"finishBy": "2026-11-27T17:00:00Z", "budget": 200, "prefer": "time"}, "", ""),
        ({"budget": 0.5, "prices": {"onDemand": 3.06, "spot": 0.9}}, "", ""),
        ({"prefer": "cost"}, "", "spec.goal: has neither a deadline nor a budget"),
        ({"budget": 5}, "etcd:2379", "spec.rdzvEndpoint: a goal needs the controller's own rendezvous"),
        ({"finishBy": "Fri 18:00"}, "", "spec.goal.finishBy: must be a time such as 2026-11-27T17:00:00Z"),
        ({"finishBy": "2026-13-41T17:00:00Z"}, "", "spec.goal.finishBy: must be a time such as 2026-11-27T17:00:00Z"),
        ({"budget": 0}, "", "spec.goal.budget: must be at least 0.01"),
        ({"budget": 1, "prices": {"spot": 1}}, "", "spec.goal.prices.onDemand: required"),
    ],
)
def test_a_goal_says_by_when_or_for_how_much(goal: dict[str, Any], endpoint: str, message: str) -> None:
    from celpy.adapter import json_to_cel

    manifest = copy.deepcopy(validation.load_manifest(GOOD))
    manifest["spec"] |= {"goal": goal, "rdzvEndpoint": endpoint}
    with pytest.raises(SpecError, match=re.escape(message)) if message else nullcontext():
        validation.validate_manifest(YamlDocument(manifest, {}))
    spec = schema()["properties"]["spec"]
    rules = [(rule, goal) for rule in spec["properties"]["goal"]["x-kubernetes-validations"]]
    rules += [(rule, manifest["spec"]) for rule in spec["x-kubernetes-validations"] if "self.goal" in rule["rule"]]
    assert len(rules) == 2
    kept = [bool(compiled(rule["rule"]).evaluate({"self": json_to_cel(about)})) for rule, about in rules]
    assert (False in kept) == ("neither a deadline" in message or "own rendezvous" in message)
