"""GCS: the contract, tokens, and its refusals as errors."""

from __future__ import annotations

import json
import sys
import threading
import types
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from google.auth import compute_engine
from google.auth.credentials import AnonymousCredentials
from google.auth.exceptions import TransportError
from google.cloud import storage as google_storage
from google.oauth2 import service_account

from elasticctl_store import storage as storages
from elasticctl_store.errors import StorageError
from elasticctl_store.storage import Storage, base, gcs_responses
from elasticctl_store.storage.cloud import CloudStorage
from elasticctl_store.storage.gcs import Gcs
from elasticctl_store.storage.http import HttpResponse
from elasticctl_store.storage.outages import Waiter
from tests.support import servers
from tests.support.clouds import QUICK, Cloud
from tests.support.gate import Fault, Seen, first
from tests.support.storage_contract import StorageContract


class TestGcsStorage(StorageContract):
    @pytest.fixture
    def storage(self, gs: Cloud) -> Storage:
        return gs.open()


def place_of(cloud: Cloud) -> base.Location:
    return base.parse(cloud.url, ("endpoint",))


def test_googles_own_client_reads_what_is_written(gs: Cloud) -> None:
    bucket = google_storage.Client(
        project="p",
        credentials=AnonymousCredentials(),  # type: ignore[no-untyped-call]
        client_options={"api_endpoint": f"http://127.0.0.1:{gs.gate._upstream}"},
    ).bucket(servers.BUCKET)
    prefix = place_of(gs).prefix
    body = bytes(range(256)) * 40 + b"\r\n"
    gs.open().put("data/ü +&", [body[:100], body[100:]])
    assert bucket.blob(prefix + "data/ü +&").download_as_bytes() == body
    bucket.blob(prefix + "data/theirs").upload_from_string(b"three")
    assert gs.open().get("data/theirs") == b"three"
    assert gs.open().list("") == ["data/theirs", "data/ü +&"]


def test_an_object_is_inserted_with_its_checksum(gs: Cloud) -> None:
    gs.gate.faults = first(Fault(flip="request"))
    gs.open().put("data/a", [b"one", b"two"], if_absent=True)
    assert [seen.target.partition("?")[2] for seen in gs.gate.seen] == ["uploadType=multipart&ifGenerationMatch=0"] * 2
    assert b'"crc32c": "' in gs.gate.seen[0].body
    assert gs.open().get("data/a") == b"onetwo"


def test_an_empty_page_does_not_end_a_listing(gs: Cloud) -> None:
    gs.open().put("data/a", [b""])
    page = json.dumps({"nextPageToken": "t"})
    plain = gs.gate.pass_on
    answers = iter([page.encode()])

    def pass_on(seen: Seen, body: bytes) -> object:
        reply = plain(seen, body)
        return type(reply)(200, reply.headers, next(answers, reply.body))

    gs.gate.pass_on = pass_on  # type: ignore[method-assign, assignment]
    assert gs.open().list("data/") == ["data/a"]
    assert "pageToken=t" in gs.gate.seen[-1].target


# Where, and as whom.


def test_the_endpoint_comes_from_the_url_or_the_emulators_variable(gs: Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
    gs.open().put("a", [b"x"])
    assert "authorization" not in gs.gate.seen[0].headers, "not over plain HTTP"
    for host in (f"http://127.0.0.1:{gs.gate.port}", f"127.0.0.1:{gs.gate.port}"):
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", host)
        assert storages.open(gs.url.partition("?")[0]).get("a") == b"x"


class TokenService(BaseHTTPRequestHandler):
    """Returns token-1, token-2, …, or refuses."""

    given = 0
    refuse = False

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        body = {"error": "invalid_grant", "error_description": "account disabled"}
        if not TokenService.refuse:
            TokenService.given += 1
            body = {"access_token": f"token-{TokenService.given}", "token_type": "Bearer", "expires_in": 3600}  # type: ignore[dict-item]
        self.send_response(400 if TokenService.refuse else 200)
        self.send_header("content-type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


@pytest.fixture
def with_account(gs: Cloud) -> Iterator[Storage]:
    """A storage that is opened with a service account."""
    TokenService.given, TokenService.refuse = 0, False
    with HTTPServer(("127.0.0.1", 0), TokenService) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        key = rsa.generate_private_key(65537, 2048).private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        account = {
            "client_email": "me@p.example",
            "private_key": key.decode(),
            "token_uri": f"http://127.0.0.1:{server.server_port}/token",
        }
        credentials = service_account.Credentials.from_service_account_info(account, scopes=["x"])  # type: ignore[no-untyped-call]
        place = place_of(gs)
        yield CloudStorage(Gcs(place, f"http://127.0.0.1:{gs.gate.port}", Waiter(place.url, QUICK), credentials))
        server.shutdown()


def test_a_token_that_expires_during_a_save_is_renewed_once(gs: Cloud, with_account: Storage) -> None:
    with_account.put("a", [b"x"])
    gs.gate.faults = lambda seen: (
        Fault(status=401, code="authError") if seen.headers["authorization"] == "Bearer token-1" else None
    )
    with_account.put("b", [b"x"])
    assert [seen.headers["authorization"] for seen in gs.gate.seen] == [f"Bearer token-{n}" for n in (1, 1, 2)]
    gs.gate.faults = lambda seen: Fault(status=401, code="authError")
    with pytest.raises(StorageError, match="the Google credentials were refused, and refreshed ones too"):
        with_account.put("c", [b"x"])
    assert TokenService.given == 3


def test_an_account_without_a_token_is_a_clear_error(gs: Cloud, with_account: Storage) -> None:
    TokenService.refuse = True
    with pytest.raises(StorageError, match=r"credentials give no token: .*account disabled.*FIX: renew them"):
        with_account.put("a", [b"x"])
    assert gs.gate.seen == []


@pytest.mark.parametrize(
    ("answer", "passing"),
    [(None, True), (503, True), (404, False)],
    ids=["no answer", "busy", "no account"],
)
def test_requests_to_an_unavailable_metadata_server_are_retried(
    gs: Cloud, monkeypatch: pytest.MonkeyPatch, answer: int | None, passing: bool
) -> None:
    asked = []

    def get(*args: object, **kwargs: object) -> object:
        asked.append(args)
        if len(asked) > 3:
            return {"access_token": "token", "expires_in": 3600, "scopes": "", "email": "me@p.example"}
        said = () if answer is None else (types.SimpleNamespace(status=answer),)
        raise TransportError("Failed to retrieve it", *said)

    monkeypatch.setattr("google.auth.compute_engine._metadata.get", get)
    place = place_of(gs)
    credentials = compute_engine.Credentials()  # type: ignore[no-untyped-call]
    storage = CloudStorage(Gcs(place, f"http://127.0.0.1:{gs.gate.port}", Waiter(place.url, QUICK), credentials))
    if passing:
        storage.put("a", [b"x"])
    else:
        with pytest.raises(StorageError, match="the Google credentials give no token"):
            storage.put("a", [b"x"])
        assert len(asked) == 1


def test_without_credentials_the_error_lists_their_sources(
    aws_keys: None, monkeypatch: pytest.MonkeyPatch, tmp_path: object
) -> None:
    for name in ("GOOGLE_APPLICATION_CREDENTIALS", "GOOGLE_CLOUD_PROJECT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path))
    monkeypatch.setenv("NO_GCE_CHECK", "true")
    with pytest.raises(StorageError, match=r"no Google credentials found. FIX: give the machine a service account"):
        storages.open("gs://bucket/x", QUICK).list("")


# What is refused.


@pytest.mark.parametrize(
    ("status", "code", "why"),
    [
        (
            403,
            "forbidden",
            "no permission: the credentials in use need storage.objects.create; GCS says: said forbidden",
        ),
        (
            404,
            "The specified bucket does not exist.",
            "there is no bucket 'bucket'. FIX: create it, or correct",
        ),
        (400, "invalid", "400 invalid said invalid"),
    ],
)
def test_a_refusal_is_explained_in_one_line(gs: Cloud, status: int, code: str, why: str) -> None:
    gs.gate.faults = lambda seen: Fault(status=status, code=code)
    with pytest.raises(StorageError, match=f"cannot write data/x to gs://bucket/.*: .*{why}") as refused:
        gs.open().put("data/x", [b"x"])
    assert "\n" not in str(refused.value)
    assert len(gs.gate.seen) == 1


def test_older_rate_limit_errors_are_retried(gs: Cloud) -> None:
    gs.gate.faults = first(Fault(status=403, code="rateLimitExceeded"))
    gs.open().put("a", [b"x"])
    assert len(gs.gate.seen) == 2


def test_a_missing_bucket_is_named(gs: Cloud) -> None:
    storage = storages.open(gs.gate.url("x", bucket="no-such"), QUICK)
    for action in (lambda: storage.put("a", [b"x"]), lambda: storage.list("")):
        with pytest.raises(StorageError, match="there is no bucket 'no-such'"):
            action()


@pytest.mark.parametrize("body", [b"<html>", b"[]", b""])
def test_an_endpoint_that_is_not_gcs_is_named(body: bytes) -> None:
    with pytest.raises(StorageError, match="something that is not GCS's JSON"):
        gcs_responses.parse(HttpResponse(200, {}, body))


def test_without_googles_packages_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "elasticctl_store.storage.gcs")
    monkeypatch.setitem(sys.modules, "google_crc32c", None)
    with pytest.raises(
        StorageError, match=r"gs:// needs the package google_crc32c\. FIX: pip install 'elasticctl\[gcs\]'"
    ):
        storages.open("gs://bucket/x")
