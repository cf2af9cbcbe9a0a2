"""What `install` applies, so that the lab can run it."""

from __future__ import annotations

import os
import sys
from typing import Any

from elasticctl.api.codec import Manifest
from elasticctl.kubeapi import installation

IMAGE = os.environ.get("ELASTICCTL_TEST_CONTROLLER_IMAGE", "lab/controller:dev")


def manifests(**given: Any) -> list[Manifest]:
    """What is installed. The lab's own image has no files: it runs the code of this very Python."""
    found = installation.manifests(image=IMAGE, **given)
    for item in found:
        if item["kind"] == "Deployment":
            pod = item["spec"]["template"]["spec"]
            if IMAGE.startswith("lab/"):
                pod["containers"][0]["command"][0] = sys.executable
            else:
                pod["runtimeClassName"] = "image"  # the lab's word for one that has
    return found
