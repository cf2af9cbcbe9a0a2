"""Where admitted workers may go."""

from __future__ import annotations

from typing import Any

from elasticctl_controller.core.sharing.kueue import apply_placement
from tests.support.controller.kueue import TEMPLATE, queued, stored

SPOT = {"key": "spot", "operator": "Exists"}


def flavor(**spec: Any) -> dict[str, Any]:
    return {"metadata": {"name": "f"}, "spec": spec}


def test_flavors_add_to_the_template_and_take_nothing_from_it() -> None:
    template = {"spec": {**TEMPLATE["spec"], "tolerations": [SPOT]}}
    flavors = [
        flavor(nodeLabels={"gpu": "t4", "zone": "b"}, tolerations=[SPOT, {"key": "gpu"}]),
        flavor(nodeLabels={"memory": "high"}),
        flavor(),
    ]
    spec = apply_placement(template, stored(queued()), flavors)["spec"]
    assert spec["nodeSelector"] == {"zone": "a", "gpu": "t4", "memory": "high"}
    assert spec["tolerations"] == [SPOT, {"key": "gpu"}]
    assert spec["containers"] == TEMPLATE["spec"]["containers"]
    assert template["spec"]["tolerations"] == [SPOT]


def test_admission_checks_have_a_say_too() -> None:
    update = {
        "name": "workers",
        "annotations": {"provisioned-by": "x"},
        "labels": {"team": "other", "l": "1"},
        "nodeSelector": {"pool": "new"},
    }
    checks = [{"name": "provisioning", "podSetUpdates": [{**update, "name": "others", "labels": {"no": "1"}}, update]}]
    found = apply_placement(TEMPLATE, stored(queued(), admissionChecks=checks), [])
    assert found["metadata"] == {"labels": {"l": "1", "team": "vision"}, "annotations": {"provisioned-by": "x"}}
    assert found["spec"]["nodeSelector"] == {"pool": "new", "zone": "a"}


def test_without_any_the_template_is_as_it_was() -> None:
    assert apply_placement(TEMPLATE, stored(queued()), []) == TEMPLATE
    assert apply_placement({}, {}, [flavor(nodeLabels={"a": "b"})]) == {"spec": {"nodeSelector": {"a": "b"}}}
