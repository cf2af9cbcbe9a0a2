"""What `install` applies, so that the lab can run it."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

from elasticctl.api.codec import Manifest
from elasticctl.kubeapi import installation

IMAGE = os.environ.get("ELASTICCTL_TEST_CONTROLLER_IMAGE", "lab/controller:dev")
DASHBOARD_IMAGE = os.environ.get("ELASTICCTL_TEST_DASHBOARD_IMAGE", "lab/controller:dev")


def manifests(**given: Any) -> list[Manifest]:
    """What is installed."""
    return _fitted(installation.manifests(image=IMAGE, **given), IMAGE)


def dashboard(namespace: str, flags: Sequence[str]) -> list[Manifest]:
    """The dashboard of many; the last is its Deployment."""
    return _fitted(installation.dashboard_manifests(namespace, DASHBOARD_IMAGE, flags), DASHBOARD_IMAGE)


def _fitted(found: list[Manifest], image: str) -> list[Manifest]:
    """The lab's own image has no files: it runs the code of this very Python."""
    for item in found:
        if item["kind"] == "Deployment":
            pod = item["spec"]["template"]["spec"]
            if image.startswith("lab/"):
                pod["containers"][0]["command"][0] = sys.executable
            else:
                pod["runtimeClassName"] = "image"  # the lab's word for one that has
    return found
