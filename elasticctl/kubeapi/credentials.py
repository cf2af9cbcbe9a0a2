"""Addresses and credentials of API servers, from kubeconfig files and a pod's service account, read as kubectl does.

The `kubernetes` package can do that too, but takes ten times as long to import as a request takes. It is used only for
logins from before credential plugins (`connection`).
"""

from __future__ import annotations

import base64
import binascii
import json
import os
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from elasticctl.api.codec import from_rfc3339
from elasticctl.api.errors import ConfigError, CredentialsError, NotFoundError
from elasticctl.api.text import quote, shorten
from elasticctl.settings.kubeconfig import Kubeconfig, KubeconfigEntry, read_kubeconfig

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
TOKEN_KEPT_S = 60.0
"""How long a token from a file is used before it is read again: service account tokens are renewed hourly."""
_EXPIRES_EARLY_S = 30.0
_PLUGIN_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Access:
    """A server's address, and the credentials. `authorization` returns the header's value, "" for none.

    `tls_name` is the name in the server's certificate if it differs from the URL's; `verified` is False if the
    certificate is not checked.
    """

    server: str
    authorization: Callable[[], str] = str
    tls: ssl.SSLContext | None = None
    tls_name: str = ""
    proxy: str = ""
    verified: bool = True


def from_kubeconfig(paths: Iterable[Path], context: str = "") -> Access | None:
    """Read a context ("": the current one); None if it uses a login from before credential plugins.

    Runs the context's credential plugin. Raises NotFoundError if there is no such context, CredentialsError if it
    cannot be used.
    """
    files = tuple(paths)
    try:
        found = read_kubeconfig(files)
    except ConfigError as e:
        raise CredentialsError(f"the kubeconfig cannot be used: {e}") from e
    if not any(path.exists() for path in files):
        names = os.pathsep.join(map(str, files))
        raise NotFoundError(f"there is no kubeconfig at {names}. FIX: set $KUBECONFIG, or have your cloud write one")
    cluster, user = _find_entries(found, context)
    if "auth-provider" in user.content:
        return None
    try:
        return _access(cluster, user)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:  # a file of another shape
        raise CredentialsError(f"the kubeconfig cannot be used: {shorten(f'{type(e).__name__}: {e}')}") from e


def from_service_account() -> Access:
    """Read the service account of the pod that this runs in. Raises CredentialsError."""
    try:
        token = _TokenFile(SERVICE_ACCOUNT / "token")
        token()
        return Access(_server_of_pod(), token, _tls_of_pod())
    except OSError as e:
        raise _unusable_pod(e) from e


def from_login(token: str) -> Access:
    """The API server of this pod's cluster, with a user's token and none of the pod's own credentials.

    Raises CredentialsError.
    """
    try:
        return Access(_server_of_pod(), lambda: f"Bearer {token}", _tls_of_pod())
    except OSError as e:
        raise _unusable_pod(e) from e


def _server_of_pod() -> str:
    host, port = os.environ.get("KUBERNETES_SERVICE_HOST", ""), os.environ.get("KUBERNETES_SERVICE_PORT", "443")
    return f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"


def _tls_of_pod() -> ssl.SSLContext:
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    tls.load_verify_locations(SERVICE_ACCOUNT / "ca.crt")
    return tls


def _unusable_pod(error: OSError) -> CredentialsError:
    return CredentialsError(f"this pod's service account cannot be used: {shorten(str(error))}")


def _find_entries(found: Kubeconfig, context: str) -> tuple[KubeconfigEntry, KubeconfigEntry]:
    """Return the cluster and the user of a context."""
    entry = found.contexts.get(context or found.current)
    cluster = found.clusters.get(str(entry.content.get("cluster"))) if entry else None
    if entry is None or cluster is None or not isinstance(cluster.content.get("server"), str):
        about = f"context {quote(context)}" if context else "current context"
        missing = "it does not exist" if entry is None else f"it has no cluster {quote(entry.content.get('cluster'))}"
        raise NotFoundError(f"no usable {about} in the kubeconfig ({missing}). FIX: see `kubectl config get-contexts`")
    return cluster, found.users.get(str(entry.content.get("user")), KubeconfigEntry({}, entry.folder))


def _access(cluster: KubeconfigEntry, user: KubeconfigEntry) -> Access:
    server = cluster.content["server"].rstrip("/")
    plugin = _Plugin(user, cluster) if isinstance(user.content.get("exec"), dict) else None
    verified = cluster.content.get("insecure-skip-tls-verify") is not True
    made = plugin.current() if plugin else {}  # now, not with the first request: a failing login is reported early
    tls = _tls(cluster, user, made, verified) if server.startswith("https:") else None
    return Access(
        server=server,
        authorization=plugin.authorization if plugin else _authorization(user),
        tls=tls,
        tls_name=str(cluster.content.get("tls-server-name") or ""),
        proxy=str(cluster.content.get("proxy-url") or "") or _proxy_of_environment(server),
        verified=verified,
    )


def _authorization(user: KubeconfigEntry) -> Callable[[], str]:
    """The Authorization header from the kubeconfig, or from a file that it names."""
    content = user.content
    if content.get("tokenFile"):
        return _TokenFile(user.folder / str(content["tokenFile"]))
    if content.get("token"):
        value = f"Bearer {str(content['token']).strip()}"
    elif content.get("username"):
        pair = f"{content['username']}:{content.get('password', '')}".encode()
        value = f"Basic {base64.b64encode(pair).decode()}"
    else:
        value = ""
    return lambda: value


def _tls(cluster: KubeconfigEntry, user: KubeconfigEntry, made: Mapping[str, Any], verified: bool) -> ssl.SSLContext:
    """The CA for the server's certificate, and the client's certificate; `made` is the output of a plugin."""
    # Not `create_default_context`: since Python 3.13 it rejects many clusters' certificates.
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    authority = _pem(cluster, "certificate-authority")
    if not verified:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    elif authority:
        context.load_verify_locations(cadata=authority.decode("ascii"))
    else:
        context.load_default_certs()
    certificate, key = _pem(user, "client-certificate"), _pem(user, "client-key")
    if made.get("clientCertificateData"):
        certificate, key = made["clientCertificateData"].encode(), made["clientKeyData"].encode()
    if certificate:
        # Python reads certificates from files only.
        with tempfile.NamedTemporaryFile() as file:  # mode 0600, deleted right away
            file.write(certificate + b"\n" + key)
            file.flush()
            context.load_cert_chain(file.name)
    return context


def _pem(entry: KubeconfigEntry, field: str) -> bytes:
    """`FIELD-data`, else the content of the file that `FIELD` names; b"" without either."""
    data, path = entry.content.get(f"{field}-data"), entry.content.get(field)
    if data:
        try:
            return base64.b64decode("".join(str(data).split()), validate=True)
        except binascii.Error as e:
            raise ValueError(f"{field}-data: {e}") from e
    return (entry.folder / str(path)).read_bytes() if path else b""


def _proxy_of_environment(server: str) -> str:
    if not any(name.lower().endswith("_proxy") for name in os.environ):
        return ""
    import urllib.request  # rarely needed, and slow to import

    url = urlsplit(server)
    proxies: Mapping[str, str] = urllib.request.getproxies_environment()
    if urllib.request.proxy_bypass_environment(url.netloc):  # type: ignore[attr-defined]  # not in typeshed
        return ""
    return proxies.get(url.scheme) or proxies.get("all") or ""


class _TokenFile:
    """A bearer token in a file that another process keeps up to date."""

    def __init__(self, path: Path) -> None:
        self._path, self._value, self._read_at = path, "", float("-inf")

    def __call__(self) -> str:
        now = time.monotonic()
        if now - self._read_at > TOKEN_KEPT_S:
            self._value, self._read_at = f"Bearer {self._path.read_text().strip()}", now
        return self._value


class _Plugin:
    """A command that prints credentials (EKS, GKE); it runs again when they have expired."""

    def __init__(self, user: KubeconfigEntry, cluster: KubeconfigEntry) -> None:
        self._spec, self._folder, self._cluster = user.content["exec"], user.folder, cluster
        self._issued: Mapping[str, Any] = {}
        self._expires_at: float | None = None

    def current(self) -> Mapping[str, Any]:
        """The `status` of the ExecCredential that it printed."""
        expired = self._expires_at is not None and self._expires_at - _EXPIRES_EARLY_S <= time.time()
        if not self._issued or expired:
            self._issued = self._run()
            self._expires_at = from_rfc3339(self._issued.get("expirationTimestamp"))
        return self._issued

    def authorization(self) -> str:
        """The header's value; CredentialsError if the plugin fails."""
        token = self.current().get("token")
        return f"Bearer {token}" if token else ""

    def _run(self) -> Mapping[str, Any]:
        version = self._spec.get("apiVersion")
        interactive = self._spec.get("interactiveMode") != "Never" and sys.stdin is not None and sys.stdin.isatty()
        about: dict[str, Any] = {"interactive": interactive}
        if self._spec.get("provideClusterInfo"):
            about["cluster"] = _cluster_info(self._cluster)
        asked = json.dumps({"apiVersion": version, "kind": "ExecCredential", "spec": about})
        environ = {item["name"]: item["value"] for item in self._spec.get("env") or []}
        try:
            done = subprocess.run(
                self._argv(),
                env={**os.environ, **environ, "KUBERNETES_EXEC_INFO": asked},
                stdin=None if interactive else subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=None if interactive else subprocess.PIPE,
                timeout=None if interactive else _PLUGIN_TIMEOUT_S,
                text=True,
                check=False,
            )
        except FileNotFoundError as e:
            hint = shorten(str(self._spec.get("installHint") or "")) or "install it, or log in another way"
            raise CredentialsError(
                f"the kubeconfig logs in with {quote(self._spec['command'])}, which is not installed. FIX: {hint}"
            ) from e
        except (OSError, subprocess.TimeoutExpired) as e:
            raise plugin_error(f"{e} {self._spec.get('installHint') or ''}") from e
        if done.returncode:
            said = (done.stderr or "").strip()
            raise plugin_error(f"exit code {done.returncode}: {said}" if said else f"exit code {done.returncode}")
        return _status_of(done.stdout, version)

    def _argv(self) -> list[str]:
        command = str(self._spec["command"])
        return [str(self._folder / command) if "/" in command else command, *map(str, self._spec.get("args") or [])]


def plugin_error(said: str) -> CredentialsError:
    """The error for a plugin that failed with this message."""
    return CredentialsError(
        f"the kubeconfig's credential plugin failed ({shorten(said)}). FIX: log in to the cloud again"
    )


def _status_of(printed: str, version: Any) -> Mapping[str, Any]:
    try:
        made = json.loads(printed)
        status = made["status"]
    except (ValueError, KeyError, TypeError) as e:
        raise plugin_error("its output is not an ExecCredential") from e
    if made.get("apiVersion") != version:
        raise plugin_error(f"its output is of the version {quote(made.get('apiVersion'))}, not {quote(version)}")
    if not isinstance(status, dict) or not (status.get("token") or status.get("clientCertificateData")):
        raise plugin_error("its output contains no credentials")
    return status


def _cluster_info(cluster: KubeconfigEntry) -> dict[str, Any]:
    """The description of the cluster that a plugin gets if it asks for it."""
    settings = ("server", "tls-server-name", "insecure-skip-tls-verify", "proxy-url")
    found = {name: cluster.content[name] for name in settings if cluster.content.get(name)}
    authority = _pem(cluster, "certificate-authority")
    if authority:
        found["certificate-authority-data"] = base64.b64encode(authority).decode()
    extensions = cluster.content.get("extensions")
    for item in extensions if isinstance(extensions, list) else []:
        if item.get("name") == "client.authentication.k8s.io/exec":
            found["config"] = item.get("extension")
    return found
