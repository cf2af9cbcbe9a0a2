"""Looks up the digest of an image's tag in its registry, so that an installation does not change when the tag moves.

Speaks the OCI distribution API, with the logins that Docker or Podman has stored for this user.
"""

from __future__ import annotations

import base64
import hashlib
import http.client
import json
import os
import re
import subprocess
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

from elasticctl.api.errors import ElasticctlError
from elasticctl.api.text import is_loopback

TIMEOUT_S = 10.0
_MOST_BYTES = 4 << 20
"""The largest manifest that the distribution API asks registries to accept."""
_MANIFESTS = (
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
    "application/vnd.docker.distribution.manifest.v2+json",
)
_IMAGE = re.compile(
    r"(?P<host>localhost(?::\d+)?|[\w-]+(?:\.[\w-]+)+(?::\d+)?|[\w-]+:\d+|\[[0-9a-f:]+\](?::\d+)?)"
    r"/(?P<name>[a-z0-9]+(?:[._/-]+[a-z0-9]+)*)(?::(?P<tag>\w[\w.-]{0,127}))?"
)
_CHALLENGE = re.compile(r'(\w+)="([^"]*)"')


class RegistryError(ElasticctlError):
    """A registry could not say what a tag stands for."""


def pin(image: str, environ: Mapping[str, str] = os.environ) -> str:
    """`HOST/NAME:TAG` with the digest that the tag stands for; unchanged if `image` has a digest already.

    Raises RegistryError if the image names no registry, or the registry does not answer, or not with an image.
    """
    if "@" in image:
        return image
    parts = _IMAGE.fullmatch(image)
    if parts is None:
        raise RegistryError("its name does not say which registry it is in")
    manifest = _Registry(parts["host"], parts["name"], environ).manifest(parts["tag"] or "latest")
    return f"{image}@sha256:{hashlib.sha256(manifest).hexdigest()}"


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Follows no redirection, which would send the login to another server."""

    def redirect_request(self, *_: Any) -> None:
        return None


class _Registry:
    """One repository of a registry. Nothing is sent in the clear, unless to this machine itself."""

    def __init__(self, host: str, name: str, environ: Mapping[str, str]) -> None:
        self._host, self._name, self._environ = host, name, environ
        self._scheme = "http" if is_loopback(urlsplit(f"//{host}").hostname or "") else "https"
        self._open = urllib.request.build_opener(_NoRedirect).open

    def manifest(self, tag: str) -> bytes:
        url = f"{self._scheme}://{self._host}/v2/{self._name}/manifests/{tag}"
        headers = {"Accept": ", ".join(_MANIFESTS)}
        try:
            return self._get(url, headers)
        except urllib.error.HTTPError as e:
            if e.code != http.client.UNAUTHORIZED:
                raise RegistryError(f"{self._host} answers {e.code} {e.reason}") from e
            challenge = e.headers.get("WWW-Authenticate", "")
        try:
            return self._get(url, {**headers, "Authorization": self._authorization(challenge)})
        except urllib.error.HTTPError as e:
            raise RegistryError(f"{self._host} answers {e.code} {e.reason}, with this user's login if any") from e

    def _authorization(self, challenge: str) -> str:
        """The header that a registry accepts: the login itself, or a token from its token service."""
        login = self._login()
        if not challenge.lower().startswith("bearer "):
            if not login:
                raise RegistryError(f"{self._host} requires a login, and there is none")
            return f"Basic {login}"
        answer = dict(_CHALLENGE.findall(challenge))
        realm = urlsplit(answer.get("realm", ""))
        if realm.scheme != "https" and not (realm.scheme == "http" and is_loopback(realm.hostname or "")):
            raise RegistryError(f"{self._host} asks for a login over an unencrypted connection")
        query = {"scope": f"repository:{self._name}:pull"} | {k: answer[k] for k in ("service",) if k in answer}
        headers = {"Authorization": f"Basic {login}"} if login else {}
        try:
            url = realm._replace(query="&".join(filter(None, (realm.query, urlencode(query))))).geturl()
            answer = json.loads(self._get(url, headers))
            return f"Bearer {answer.get('token') or answer['access_token']}"
        except (urllib.error.HTTPError, ValueError, KeyError, AttributeError) as e:
            raise RegistryError(f"{realm.netloc} gives no token for {self._host}: {e}") from e

    def _get(self, url: str, headers: Mapping[str, str]) -> bytes:
        """The body. Raises HTTPError for a refusal, RegistryError if there is no answer, or too large a one."""
        try:
            with self._open(urllib.request.Request(url, headers=dict(headers)), timeout=TIMEOUT_S) as answer:  # noqa: S310 - http or https, as above
                body: bytes = answer.read(_MOST_BYTES + 1)
        except urllib.error.HTTPError:
            raise
        except (OSError, http.client.HTTPException) as e:
            raise RegistryError(f"{urlsplit(url).netloc} cannot be reached: {getattr(e, 'reason', e)}") from e
        if len(body) > _MOST_BYTES:
            raise RegistryError(f"{urlsplit(url).netloc} answers with more than {_MOST_BYTES >> 20} MiB")
        return body

    def _login(self) -> str:
        """This user's name and password for the registry as HTTP's basic authentication writes them; "" if unknown."""
        for path in _login_files(self._environ):
            try:
                stored = json.loads(path.read_text())
                helper = stored.get("credHelpers", {}).get(self._host) or stored.get("credsStore", "")
                kept = str(stored.get("auths", {}).get(self._host, {}).get("auth", ""))
            except (OSError, ValueError, AttributeError):
                continue
            login = kept or (helper and _ask(helper, self._host))
            if login:
                return str(login)
        return ""


def _login_files(environ: Mapping[str, str]) -> list[Path]:
    home = Path(environ.get("HOME", "/"))
    found = [Path(environ.get("DOCKER_CONFIG") or home / ".docker", "config.json")]
    if "XDG_RUNTIME_DIR" in environ:
        found.append(Path(environ["XDG_RUNTIME_DIR"], "containers", "auth.json"))
    return found


def _ask(helper: str, host: str) -> str:
    """The login for a registry from one of Docker's credential helpers; "" if it has none."""
    if not re.fullmatch(r"[\w.-]+", helper):
        return ""
    argv = [f"docker-credential-{helper}", "get"]
    try:
        done = subprocess.run(argv, input=host, capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
        answer = json.loads(done.stdout)
        return base64.b64encode(f"{answer['Username']}:{answer['Secret']}".encode()).decode()
    except (OSError, subprocess.SubprocessError, ValueError, KeyError, TypeError):
        return ""
