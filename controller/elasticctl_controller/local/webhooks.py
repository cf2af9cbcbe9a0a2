"""From a reference to a webhook's URL on the local cluster: read anew for each message, kept nowhere."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

from elasticctl.api import notifications
from elasticctl.cluster.local.paths import LocalPaths
from elasticctl.cluster.local.secrets import Secrets
from elasticctl_controller.core.notifications import WebhookError
from elasticctl_controller.loop.notifier import Destination, value_of

MAX_FILE_BYTES = 4096


def of_machine(paths: LocalPaths, environ: Mapping[str, str] = os.environ) -> Callable[[Destination], str]:
    """URLs from the local cluster's secrets, and from files and variables of its user."""

    def url_of(destination: Destination) -> str:
        reference = notifications.parse_reference(destination.reference)
        if reference.kind == "file":
            return _file(Path(reference.name))
        if reference.kind == "env":
            if reference.name not in environ:
                raise WebhookError(
                    f"{reference.name} is not in the environment that the local cluster was started in;"
                    " `elasticctl local down`, set it, and the next command starts it again"
                )
            return environ[reference.name]
        return value_of(Secrets(paths).read(destination.namespace, notifications.SECRET) or {}, destination, reference)

    return url_of


def _file(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return file.read(MAX_FILE_BYTES).decode()
    except OSError as e:
        raise WebhookError(f"{path} cannot be read: {e.strerror}") from e
    except UnicodeDecodeError:
        raise WebhookError(f"{path} holds no text") from None
