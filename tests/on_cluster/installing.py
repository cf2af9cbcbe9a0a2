"""What `install` applies, so that the lab can run it."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from elasticctl.api.codec import Manifest
from elasticctl.kubeapi import installation
from tests.on_cluster.waiting import wait_until

BUILT_S = 500.0
"""Within a test's time limit."""


def manifests(**given: Any) -> list[Manifest]:
    """What is installed."""
    image = built("controller")
    return _fitted(installation.manifests(image=image, **given), image)


def dashboard(namespace: str, flags: Sequence[str]) -> list[Manifest]:
    """The dashboard of many; the last is its Deployment."""
    image = built("dashboard")
    return _fitted(installation.dashboard_manifests(namespace, image, flags), image)


def built(name: str) -> str:
    """The image that a file in $ELASTICCTL_TEST_IMAGES names, once it is there: .ci/cluster builds them meanwhile."""
    folder = os.environ.get("ELASTICCTL_TEST_IMAGES")
    if not folder:
        return "lab/controller:dev"
    file, failed = Path(folder, name), Path(folder, "failed")
    wait_until(lambda: file.exists() or failed.exists(), BUILT_S)
    assert file.exists(), f"the image of the {name} could not be built"
    return file.read_text().strip()


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
