"""Which image a tag stands for: looked up in Debian's own registry where it is installed, and in small servers."""

from __future__ import annotations

import base64
import hashlib
import json
import socket
import stat
import subprocess
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

from elasticctl.kubeapi.registry import RegistryError, pin
from tests.support.ports import free_port
from tests.support.waiting import wait_until

MANIFEST = b'{"schemaVersion": 2}'
DIGEST = f"sha256:{hashlib.sha256(MANIFEST).hexdigest()}"
LOGIN = base64.b64encode(b"ada:lovelace").decode()
# bcrypt of "lovelace"
HTPASSWD = "ada:$2b$05$abcdefghijklmnopqrstuuugyJgZetmHGvxwCJ1rpgM8bgT8KJ8.i\n"

Answer = tuple[int, dict[str, str], bytes]


@contextmanager
def served(answer: Callable[[str, dict[str, str]], Answer]) -> Iterator[str]:
    """HOST:PORT of a server that answers a path and headers with status, headers and body."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, headers, body = answer(self.path, {name.lower(): value for name, value in self.headers.items()})
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            return

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


def logged_in(home: Path, host: str, **stored: object) -> dict[str, str]:
    """The environment of a user whose Docker has stored a login."""
    (home / ".docker").mkdir()
    (home / ".docker" / "config.json").write_text(json.dumps(stored or {"auths": {host: {"auth": LOGIN}}}))
    return {"HOME": str(home)}


def with_token_service(seen: list[str]) -> Callable[[str, dict[str, str]], Answer]:
    """A registry that wants a token, and the service that gives one to those who are logged in."""

    def answer(path: str, headers: dict[str, str]) -> Answer:
        seen.append(path)
        url = urlsplit(path)
        if url.path == "/token":
            asked = parse_qs(url.query)
            if headers.get("authorization") != f"Basic {LOGIN}":
                return 403, {}, b""
            assert asked == {"service": ["r"], "scope": ["repository:team/c:pull"], "account": ["x"]}
            return 200, {}, b'{"token": "t0"}'
        if headers.get("authorization") == "Bearer t0":
            return 200, {}, MANIFEST
        realm = f'Bearer realm="http://{headers["host"]}/token?account=x",service="r"'
        return 401, {"WWW-Authenticate": realm}, b""

    return answer


def test_a_tag_is_looked_up_with_the_stored_login(tmp_path: Path) -> None:
    seen: list[str] = []
    with served(with_token_service(seen)) as host:
        assert pin(f"{host}/team/c:1", logged_in(tmp_path, host)) == f"{host}/team/c:1@{DIGEST}"
        assert seen[0] == "/v2/team/c/manifests/1"
        with pytest.raises(RegistryError, match="gives no token for"):
            pin(f"{host}/team/c:1", {"HOME": "/nonexistent"})


def test_a_login_may_be_kept_by_a_helper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    helper = tmp_path / "docker-credential-vault"
    helper.write_text('#!/bin/sh\nread host; echo "{\\"Username\\": \\"ada\\", \\"Secret\\": \\"lovelace\\"}"\n')
    helper.chmod(helper.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    with served(with_token_service([])) as host:
        assert pin(f"{host}/team/c", logged_in(tmp_path, host, credHelpers={host: "vault"})).endswith(f"/c@{DIGEST}")


def test_a_digest_is_left_as_it_is() -> None:
    assert pin(f"r.example/c:1@{DIGEST}") == f"r.example/c:1@{DIGEST}"


@pytest.mark.parametrize("image", ["c", "c:1", "team/c:1", "r.example/../c", "r.example/c:1?x", "r.example/C", ""])
def test_a_name_without_a_registry_is_not_looked_up(image: str) -> None:
    with pytest.raises(RegistryError, match="does not say which registry"):
        pin(image)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ((404, {}, b""), "answers 404"),
        ((302, {"Location": "http://127.0.0.1:1/"}, b""), "answers 302"),
        ((401, {"WWW-Authenticate": 'Basic realm="r"'}, b""), "requires a login, and there is none"),
        ((401, {"WWW-Authenticate": 'Bearer realm="http://r.example/t"'}, b""), "over an unencrypted connection"),
        ((401, {"WWW-Authenticate": 'Bearer realm="http://127.r.example/t"'}, b""), "over an unencrypted connection"),
        (
            (401, {"WWW-Authenticate": 'Bearer realm="http://localhost.r.example/t"'}, b""),
            "over an unencrypted connection",
        ),
        (
            (401, {"WWW-Authenticate": 'Bearer realm="http://localhost@r.example/t"'}, b""),
            "over an unencrypted connection",
        ),
        ((401, {}, b""), "requires a login"),
        ((200, {}, b"x" * (5 << 20)), "more than 4 MiB"),
    ],
)
def test_other_answers_are_reported(answer: Answer, said: str, tmp_path: Path) -> None:
    with served(lambda *_: answer) as host, pytest.raises(RegistryError, match=said):
        pin(f"{host}/c:1", {"HOME": str(tmp_path)})


def test_a_missing_registry_is_reported() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))  # and does not listen
        with pytest.raises(RegistryError, match="cannot be reached"):
            pin(f"127.0.0.1:{silent.getsockname()[1]}/c:1")


@pytest.mark.needs("docker-registry")
def test_a_real_registry_says_what_a_tag_stands_for(tmp_path: Path) -> None:
    host = f"127.0.0.1:{free_port()}"
    (tmp_path / "users").write_text(HTPASSWD)
    (tmp_path / "registry.yaml").write_text(
        f"version: 0.1\nstorage: {{filesystem: {{rootdirectory: {tmp_path}/kept}}}}\nhttp: {{addr: '{host}'}}\n"
        f"auth: {{htpasswd: {{realm: r, path: {tmp_path}/users}}}}\n"
    )
    with subprocess.Popen(
        ["docker-registry", "serve", tmp_path / "registry.yaml"], stderr=subprocess.DEVNULL
    ) as server:
        try:
            wait_until(lambda: _request(host, "GET", "").status == 200)
            kind = "application/vnd.oci.image.manifest.v1+json"
            config = b"{}"
            blob = {"digest": f"sha256:{hashlib.sha256(config).hexdigest()}", "size": len(config)}
            where = _request(host, "POST", "team/c/blobs/uploads/").headers["Location"]
            _request(host, "PUT", f"{where}&digest={blob['digest']}", config)
            of_config = {"mediaType": "application/vnd.oci.image.config.v1+json", **blob}
            manifest = json.dumps({"schemaVersion": 2, "mediaType": kind, "config": of_config, "layers": []}).encode()
            _request(host, "PUT", "team/c/manifests/1", manifest, kind)
            environ = logged_in(tmp_path, host)
            pinned = f"{host}/team/c:1@sha256:{hashlib.sha256(manifest).hexdigest()}"
            assert pin(f"{host}/team/c:1", environ) == pinned
            with pytest.raises(RegistryError, match="answers 404"):
                pin(f"{host}/team/c:2", environ)
            with pytest.raises(RegistryError, match="requires a login, and there is none"):
                pin(f"{host}/team/c:1", {"HOME": "/nonexistent"})
        finally:
            server.terminate()


class _Reply:
    def __init__(self, status: int, headers: dict[str, str]) -> None:
        self.status, self.headers = status, headers


def _request(host: str, method: str, path: str, body: bytes | None = None, kind: str = "application/x") -> _Reply:
    url = path if path.startswith("http") else f"http://{host}/v2/{path}"
    headers = {"Authorization": f"Basic {LOGIN}", "Content-Type": kind}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, body, headers, method=method), timeout=240) as answer:
            return _Reply(answer.status, dict(answer.headers))
    except urllib.error.HTTPError as e:
        raise AssertionError(f"{method} {path}: {e.read()!r}") from e
    except OSError:
        return _Reply(0, {})
