"""A connection for tests: the API server shares a machine with all that it serves, and may be slow or just starting."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from urllib3.exceptions import ConnectTimeoutError, NewConnectionError, ReadTimeoutError

from elasticctl.api.errors import BusyError, UnreachableError
from elasticctl.kubeapi.connection import CLIENT, JSON, Connection, open_transport
from elasticctl.kubeapi.credentials import from_kubeconfig
from elasticctl.settings.kubeconfig import kubeconfig_paths

PATIENCE_S = 90.0
"""How long a request may wait for its answer, or for a server that takes it; no user would."""
PAUSE_S = 0.3


class PatientConnection(Connection):
    """The current context of $KUBECONFIG; `client` is what the server knows this by.

    A request that was not carried out is made again, as kubectl's library does it: the server could not be reached, or
    has said that it is busy. So is any GET.
    """

    def __init__(self, client: str = CLIENT) -> None:
        access = from_kubeconfig(kubeconfig_paths(), "")
        assert access is not None, "a login that only the package `kubernetes` knows"
        super().__init__(lambda: open_transport(access), client)

    def request(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | list[Any] | None = None,
        params: Mapping[str, str] | None = None,
        *,
        content_type: str = JSON,
        timeout_s: float = PATIENCE_S,
        most_bytes: int | None = None,
    ) -> dict[str, Any]:
        """See `Connection.request`."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            sent = time.monotonic()
            try:
                return super().request(
                    method, path, body, params, content_type=content_type, timeout_s=timeout_s, most_bytes=most_bytes
                )
            except (UnreachableError, BusyError) as error:
                now = time.monotonic()
                if now > deadline or not (method == "GET" or is_untried(error, now - sent < timeout_s)):
                    raise
                print(f"asked again: {error}")
            time.sleep(PAUSE_S)


def is_untried(error: UnreachableError | BusyError, is_early: bool) -> bool:
    """Whether the server has certainly not carried out the request. `is_early`: it could have taken longer."""
    if isinstance(error, BusyError):
        return error.retry_after_s is not None
    if isinstance(error.__cause__, ReadTimeoutError):
        return is_early  # it was the TLS handshake, which is given less time
    return isinstance(error.__cause__, ConnectTimeoutError | NewConnectionError)
