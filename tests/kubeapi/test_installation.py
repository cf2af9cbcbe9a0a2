"""What an installation for one namespace is made of, from that for the cluster."""

from __future__ import annotations

import pytest

from elasticctl.kubeapi import installation
from elasticctl.kubeapi.features import ALL, FOR_THE_CLUSTER, Feature
from elasticctl.kubeapi.installation import LABEL_NAMESPACE, OF_THE_CLUSTER, is_for_all
from tests.support.controller.rights import allowed, bound_roles, rights_of


def confined(*features: Feature) -> list[installation.Manifest]:
    return installation.manifests(namespace="ml", features=features, confined=True)


def test_without_features_it_has_no_rights_outside_of_its_namespace() -> None:
    found = confined()
    mine = [item for item in found if not is_for_all(item)]
    assert {item["metadata"]["namespace"] for item in mine} == {"ml"}
    assert {item["kind"] for item in mine} >= {"Role", "RoleBinding", "Deployment", "ServiceAccount"}
    assert not [item for item in found if item["kind"] in ("Namespace", "ClusterRoleBinding")]
    [role] = bound_roles(found)
    assert (role["kind"], rights_of(role)) == ("Role", allowed(()))
    assert ("", "nodes", "watch") not in rights_of(role)


def test_cluster_scoped_rights_are_in_a_role_named_after_the_namespace() -> None:
    found = bound_roles(confined(*Feature))
    assert {right for role in found for right in rights_of(role)} == allowed(ALL)
    for role in found:
        cluster = {resource in OF_THE_CLUSTER for _, resource, _ in rights_of(role)}
        assert cluster == {role["kind"] == "ClusterRole"}, "rights of both kinds in one role, or in the wrong one"
        assert role["metadata"].get("namespace") == (None if role["kind"] == "ClusterRole" else "ml")
    apart = [role["metadata"] for role in found if role["kind"] == "ClusterRole"]
    assert {item["name"] for item in apart} == {
        f"elasticctl-controller-{name}-ml" for name in ("nodes", "limits", "kueue")
    }
    assert all(item["labels"][LABEL_NAMESPACE] == "ml" for item in apart)


def test_every_role_is_bound_to_the_controller_of_the_namespace() -> None:
    found = confined(*Feature)
    for item in found:
        for subject in item.get("subjects", ()):
            assert (subject["name"], subject["namespace"]) == ("elasticctl-controller", "ml")


@pytest.mark.parametrize("feature", Feature)
def test_the_rights_of_a_feature_come_with_it_alone(feature: Feature) -> None:
    own = allowed({feature}) - allowed(())
    assert own
    assert own.isdisjoint(allowed(ALL - {feature}))


def test_the_deployment_remembers_what_was_asked_for() -> None:
    deployments = {
        name: next(item for item in found if item["kind"] == "Deployment")
        for name, found in {
            "none": confined(),
            "some": confined(Feature.KUEUE, Feature.NODES),
            "cluster": installation.manifests(),
        }.items()
    }
    assert installation.features_of(deployments["none"]) == frozenset()
    assert installation.features_of(deployments["some"]) == {Feature.KUEUE, Feature.NODES}
    assert installation.features_of(deployments["cluster"]) == FOR_THE_CLUSTER
    watched = {name: installation.watched_by(deployment) for name, deployment in deployments.items()}
    assert watched == {"none": "ml", "some": "ml", "cluster": ""}
    container = deployments["cluster"]["spec"]["template"]["spec"]["containers"][0]
    container["args"] = [arg for arg in container["args"] if "features" not in arg]
    assert installation.features_of(deployments["cluster"]) == ALL, "one from before features were asked for has all"


def test_no_rule_reads_or_creates_secrets_but_for_tokens_and_webhooks() -> None:
    secrets = [
        (role["metadata"]["name"], rule.get("resourceNames"), rule["verbs"])
        for role in bound_roles(installation.manifests(features=ALL))
        for rule in role["rules"]
        if "secrets" in rule["resources"]
    ]
    assert secrets == [
        ("elasticctl-controller", None, ["create", "update"]),
        ("elasticctl-controller-notifications", ["elasticctl-notify"], ["get"]),
    ]
