"""What `install` applies, so that the lab can run it: its images hold no Python of their own."""

from __future__ import annotations

import os
import sys
from typing import Any

from elasticctl.api.codec import Manifest
from elasticctl.kubeapi import installation

IMAGE = os.environ.get("ELASTICCTL_TEST_CONTROLLER_IMAGE", "lab/controller:dev")


def manifests(**given: Any) -> list[Manifest]:
    """What is installed: the command is this very Python's."""
    found = installation.manifests(image=IMAGE, **given)
    for item in found:
        if item["kind"] == "Deployment":
            item["spec"]["template"]["spec"]["containers"][0]["command"][0] = sys.executable
    return found
