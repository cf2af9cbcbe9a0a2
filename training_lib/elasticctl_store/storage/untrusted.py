"""Open storage URLs that somebody else wrote, with this process's credentials.

A URL may name an endpoint. In a job's own process that is up to the job, but users who may write jobs must not receive
the tokens of those who look at one. The endpoint of such a URL must therefore be the provider's own, the one
that this process's environment names, or that of a URL which the caller has chosen.
"""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Callable, Iterable
from urllib.parse import urlsplit

from elasticctl_store import storage
from elasticctl_store.errors import StorageError
from elasticctl_store.storage import base
from elasticctl_store.storage.base import Storage
from elasticctl_store.storage.outages import Patience

_REGION = r"[a-z]{2}(?:-[a-z]+)+-\d+"
_PROVIDERS_OWN = {
    # Only the S3 hosts below amazonaws.com: customers' load balancers and machines have names there too.
    "s3": re.compile(
        rf"s3(?:-fips|-accelerate)?(?:\.dualstack)?(?:[.-]{_REGION})?\.amazonaws\.com(?:\.cn)?"
        rf"|(?:bucket\.)?vpce-[a-z0-9-]+\.s3\.{_REGION}\.vpce\.amazonaws\.com(?:\.cn)?"
    ),
    "gs": re.compile(
        r"(?:storage|www|private|restricted)\.googleapis\.com"
        r"|storage\.[a-z0-9-]+\.rep\.googleapis\.com|storage-[a-z0-9-]+\.p\.googleapis\.com"
    ),
}
_VARIABLES = {"s3": "AWS_ENDPOINT_URL_S3", "gs": "STORAGE_EMULATOR_HOST"}


def open_untrusted(url: str, patience: Patience, chosen: Callable[[], Iterable[str]]) -> Storage:
    """Open a URL of unknown origin; otherwise like `storage.open`.

    `chosen` returns URLs that the caller has typed or configured. An endpoint that one of them names for the same
    scheme is trusted. It is only called for a URL that names an endpoint. Raises StorageError for an endpoint that is
    not trusted.
    """
    check_endpoint(url, "job", chosen)
    return storage.open(url, patience)


def check_endpoint(url: str, who: str, chosen: Callable[[], Iterable[str]]) -> None:
    """Raise StorageError for a URL, written in a `who` ("job"), whose endpoint is not trusted."""
    scheme, separator, _ = url.partition("://")
    if separator and scheme in _PROVIDERS_OWN:
        endpoint = _endpoint(url)
        if endpoint and not _is_named(scheme, endpoint, chosen):
            variable = _VARIABLES[scheme]
            raise StorageError(
                f"{base.without_secrets(url)}: the {who} names the endpoint {endpoint}, and your credentials are not"
                f" sent to an endpoint that only a {who} names. FIX: if it is yours, set ${variable}={endpoint}, or"
                f" name it in a context: elasticctl config set-context NAME --storage '{scheme}://BUCKET?endpoint={endpoint}'"
            )


def _endpoint(url: str) -> str:
    """Return the endpoint that a URL names, or "". Raises StorageError for an invalid URL."""
    return base.parse(url, ("endpoint", "region")).options.get("endpoint", "")


def _is_named(scheme: str, endpoint: str, chosen: Callable[[], Iterable[str]]) -> bool:
    wanted = _origin(endpoint)
    if wanted[0] == "https" and wanted[2] == 443 and _PROVIDERS_OWN[scheme].fullmatch(wanted[1]):
        return True
    for url in chosen():
        if url.startswith(f"{scheme}://"):
            try:
                named = _endpoint(url)
            except StorageError:
                continue  # reported where that URL is used
            if named and _origin(named) == wanted:
                return True
    named = _of_environment(scheme)
    return bool(named) and _origin(named) == wanted


def _origin(endpoint: str) -> tuple[str, str, int]:
    parts = urlsplit(endpoint)
    return parts.scheme, parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)


def _of_environment(scheme: str) -> str:
    """Return the endpoint that the environment, or a configuration file that it refers to, names; "" if there is
    none."""
    if scheme == "gs":
        emulator = os.environ.get(_VARIABLES["gs"], "")
        return emulator if "://" in emulator or not emulator else f"http://{emulator}"
    try:
        s3 = importlib.import_module("elasticctl_store.storage.s3")
    except ModuleNotFoundError:
        return ""  # `storage.open` reports what is not installed
    return str(s3.endpoint_of_environment())
