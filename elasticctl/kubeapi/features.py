"""Optional features of a controller, each with its own rights, which are chosen at installation.

The rights are the roles labelled `elasticctl.dev/feature` in the controller's `deploy/features.yaml`.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

LABEL_FEATURE = "elasticctl.dev/feature"


class Feature(StrEnum):
    """A feature, by its name in `install --feature`."""

    NODES = "nodes"
    LIMITS = "limits"
    KUEUE = "kueue"
    GANGS = "gangs"
    NOTIFICATIONS = "notifications"


ALL = frozenset(Feature)
FOR_THE_CLUSTER = frozenset({Feature.NODES, Feature.LIMITS})
"""What an installation for the whole cluster always has; for one namespace it takes an administrator."""


def parse_features(text: str) -> frozenset[Feature]:
    """Read `nodes,kueue`; "" is none. Raises ValueError for a name that no feature has."""
    return frozenset(Feature(name) for name in text.split(",") if name)


def format_features(features: Iterable[Feature]) -> str:
    """The text that `parse_features` reads, always the same for the same features."""
    given = set(features)
    return ",".join(feature for feature in Feature if feature in given)


RETIRED = {
    "pod-groups": "Volcano and scheduler-plugins are no longer supported. FIX: use Kueue (--feature kueue) or the gangs"
    " of Kubernetes itself (--feature gangs)"
}
"""Features that there were once, and what to use instead."""


def left_out(feature: Feature) -> str:
    """The message for a user of a feature that was not installed."""
    return f"the controller was installed without {feature}. FIX: have it installed with --feature {feature}"
