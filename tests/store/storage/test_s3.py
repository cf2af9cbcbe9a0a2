"""S3: the contract, uploads in parts, credentials, and its refusals as errors."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import boto3
import pytest
import torch
from botocore.utils import InstanceMetadataFetcher

from elasticctl_store import storage as storages
from elasticctl_store.checkpoints import entries
from elasticctl_store.checkpoints.commits import CommitWriter
from elasticctl_store.errors import ExistsError, FullError, StorageError
from elasticctl_store.storage import Storage, all_keys, base, s3_responses
from elasticctl_store.storage import s3 as s3_module
from elasticctl_store.storage.http import HttpRequest, HttpResponse, Verdict
from elasticctl_store.storage.s3 import Signer
from elasticctl_train.checkpoint.checkpointer import Checkpointer, Label
from tests.support import servers
from tests.support.clouds import QUICK, Cloud
from tests.support.gate import Fault, Gate, Reply, Seen, first
from tests.support.storage_contract import StorageContract
from tests.support.train.states import same

PART_BYTES = 100_000
LARGE = random.Random(0).randbytes(2 * PART_BYTES + 77)
COMPLETE = {"method": "POST", "part": "uploadId="}


class TestS3Storage(StorageContract):
    @pytest.fixture
    def storage(self, s3: Cloud) -> Storage:
        return s3.open()


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use small parts, so that small objects are uploaded in several."""
    monkeypatch.setattr(s3_module, "PART_BYTES", PART_BYTES)


@pytest.fixture
def boto(s3: Cloud) -> Any:
    """AWS's own client, without the gate's faults."""
    return boto3.client("s3", endpoint_url=f"http://127.0.0.1:{s3.gate._upstream}", region_name="us-east-1")


def name_of(cloud: Cloud, key: str) -> str:
    """An object's name in the bucket."""
    return base.parse(cloud.url, ("endpoint", "region")).prefix + key


def uploads(boto: Any, cloud: Cloud) -> list[str]:
    found = boto.list_multipart_uploads(Bucket=servers.BUCKET).get("Uploads", [])
    return [upload["Key"] for upload in found if upload["Key"].startswith(name_of(cloud, ""))]


def read(storage: Storage, key: str, size_bytes: int) -> bytes:
    into = bytearray(size_bytes)
    storage.read_into(key, 0, memoryview(into))
    return bytes(into)


def test_awss_own_client_reads_what_is_written(s3: Cloud, boto: Any) -> None:
    s3.open().put("data/ü +&", [b"one", b"two"])
    assert boto.get_object(Bucket=servers.BUCKET, Key=name_of(s3, "data/ü +&"))["Body"].read() == b"onetwo"
    boto.put_object(Bucket=servers.BUCKET, Key=name_of(s3, "data/theirs"), Body=b"three")
    assert s3.open().get("data/theirs") == b"three"
    boto.put_object(Bucket=servers.BUCKET, Key=name_of(s3, "data/a folder of the console/"))
    assert s3.open().list("") == ["data/theirs", "data/ü +&"]


def test_a_large_object_is_uploaded_in_parts_and_verified(s3: Cloud, boto: Any) -> None:
    s3.gate.faults = first(Fault(flip="request"), part="partNumber=2")
    s3.open().put("data/large", [LARGE[:10], memoryview(LARGE)[10:]])
    sent = [seen for seen in s3.gate.seen if "partNumber" in seen.target]
    assert sorted(len(seen.body) for seen in sent) == [77, PART_BYTES, PART_BYTES, PART_BYTES]
    assert all("x-amz-checksum-crc32" in seen.headers for seen in sent)
    assert read(s3.open(), "data/large", len(LARGE)) == LARGE
    assert uploads(boto, s3) == []


@pytest.mark.parametrize("refused", [{"part": "partNumber=2"}, COMPLETE], ids=["a part", "its end"])
def test_a_refused_upload_is_aborted(s3: Cloud, boto: Any, refused: dict[str, str]) -> None:
    s3.gate.faults = first(Fault(status=403, code="AccessDenied"), **refused)
    with pytest.raises(StorageError, match=r"cannot write data/large to .*need s3:PutObject"):
        s3.open().put("data/large", [LARGE])
    assert uploads(boto, s3) == []
    assert s3.open().list("") == []


@pytest.mark.parametrize("if_absent", [False, True])
def test_a_completed_upload_whose_response_was_lost_is_recognized(s3: Cloud, boto: Any, if_absent: bool) -> None:
    s3.gate.faults = first(Fault(lose="after"), **COMPLETE)
    s3.open().put("data/large", [LARGE], if_absent=if_absent)
    assert read(s3.open(), "data/large", len(LARGE)) == LARGE
    assert uploads(boto, s3) == []


def test_a_large_object_is_created_only_if_absent(s3: Cloud, boto: Any) -> None:
    s3.open().put("data/large", [b"small"])
    for fault in (None, Fault(lose="before")):
        s3.gate.faults = first(fault, **COMPLETE) if fault else lambda seen: None
        with pytest.raises(ExistsError):
            s3.open().put("data/large", [LARGE], if_absent=True)
    assert s3.open().get("data/large") == b"small"
    assert uploads(boto, s3) == []


def test_an_error_in_a_response_with_status_200_is_recognized(s3: Cloud) -> None:
    s3.gate.faults = first(Fault(status=200, code="InternalError"), **COMPLETE)
    s3.open().put("data/large", [LARGE])
    assert len([seen for seen in s3.gate.seen if seen.method == "POST" and "uploadId=" in seen.target]) == 2


def test_uploads_of_killed_runs_are_aborted_by_the_next_run(s3: Cloud, boto: Any) -> None:
    ours = entries.share_key(entries.save_folder(1, 1, 10, "ab12cd34"), 0, 1)
    for key in (ours, entries.tensors_key(ours), "data/imagenet/train.tar", "packs/of-a-workspace"):
        boto.create_multipart_upload(Bucket=servers.BUCKET, Key=name_of(s3, key))
    boto.create_multipart_upload(Bucket=servers.BUCKET, Key="of another job")
    CommitWriter.take_over(s3.open())
    assert sorted(uploads(boto, s3)) == [
        name_of(s3, key) for key in ("data/imagenet/train.tar", "packs/of-a-workspace")
    ]
    left = boto.list_multipart_uploads(Bucket=servers.BUCKET)["Uploads"]
    assert "of another job" in [upload["Key"] for upload in left]


def test_a_run_without_permission_to_list_uploads_works(s3: Cloud) -> None:
    s3.gate.faults = first(Fault(status=403, code="AccessDenied"), part="?uploads")
    assert CommitWriter.take_over(s3.open()).generation.generation == 1


# Where, and as whom.


@pytest.mark.parametrize(
    ("url", "environ", "origin", "path"),
    [
        ("s3://bkt/x?region=eu-west-1", {}, "https://bkt.s3.eu-west-1.amazonaws.com", "/"),
        ("s3://bkt/x", {"AWS_REGION": "eu-west-3"}, "https://bkt.s3.eu-west-3.amazonaws.com", "/"),
        ("s3://b.k.t/x?region=eu-west-1", {}, "https://s3.eu-west-1.amazonaws.com", "/b.k.t/"),
        ("s3://bkt/x?endpoint=http://minio:9000", {}, "http://minio:9000", "/bkt/"),
        ("s3://bkt/x", {"AWS_ENDPOINT_URL_S3": "http://ceph:8000"}, "http://ceph:8000", "/bkt/"),
        ("s3://bkt/x?endpoint=http://minio:9000", {"AWS_ENDPOINT_URL": "http://no"}, "http://minio:9000", "/bkt/"),
    ],
)
def test_the_endpoint_comes_from_the_url_or_the_environment(
    url: str, environ: dict[str, str], origin: str, path: str, aws_keys: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    signer = Signer(base.parse(url, ("endpoint", "region")))
    assert (signer.origin, signer.path) == (origin, path)


def test_credentials_do_not_appear_in_logs(aws_keys: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SESSION_TOKEN", "a-token")
    signer = Signer(base.parse("s3://bkt/x?region=eu-west-1", ("endpoint", "region")))
    headers = signer.sign(HttpRequest("PUT", "/x", {"if-none-match": "*"}))
    assert headers["X-Amz-Security-Token"] == "a-token"
    assert headers["X-Amz-Content-SHA256"] == "UNSIGNED-PAYLOAD"
    assert "/eu-west-1/s3/aws4_request" in headers["Authorization"]
    assert "if-none-match" in headers["Authorization"]
    assert servers.KEYS["AWS_SECRET_ACCESS_KEY"] not in str(headers)


def test_without_credentials_the_error_lists_their_sources(s3: Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in servers.KEYS:
        monkeypatch.delenv(name)
    with pytest.raises(StorageError, match=r"no AWS credentials found. FIX: give the machine a role, or set"):
        s3.open().list("")
    assert s3.gate.seen == []


def expire(seen: Seen) -> Fault | None:
    return (
        Fault(status=400, code="ExpiredToken")
        if "/AKIAOLD/" in seen.headers["authorization"].replace("=", "/")
        else None
    )


def give(credentials: Path, key: str) -> None:
    credentials.write_text(f"[default]\naws_access_key_id = {key}\naws_secret_access_key = s3cr3t\n")


@pytest.fixture
def credentials(s3: Cloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of credentials that `expire` knows as old ones, in place of the environment's."""
    for name in servers.KEYS:
        monkeypatch.delenv(name)
    file = tmp_path / "credentials"
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    give(file, "AKIAOLD")
    return file


def test_expired_credentials_are_read_again(s3: Cloud, credentials: Path) -> None:
    storage = s3.open()
    storage.put("a", [b"x"])
    s3.gate.faults = expire
    with pytest.raises(StorageError, match="the AWS credentials have expired, and newly read ones too") as expired:
        storage.put("b", [b"x"])
    assert "s3cr3t" not in str(expired.value)
    give(credentials, "AKIANEW")
    storage.put("b", [b"x"])
    assert list(all_keys(storage, "")) == ["a", "b"]


@pytest.mark.parametrize("renewed", [True, False])
def test_credentials_may_expire_during_a_save(
    renewed: bool, s3: Cloud, credentials: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def expire_in_the_midst(seen: Seen) -> Fault | None:
        if "partNumber=2" in seen.target and not expired:
            expired.append(seen)
            if renewed:
                give(credentials, "AKIANEW")
        return expire(seen) if expired else None

    expired: list[Seen] = []
    states = [{"model": {"w": torch.full((PART_BYTES,), float(step))}} for step in (1, 2)]
    checkpoints = Checkpointer(s3.open())
    checkpoints.save(states[0], Label(1))
    assert checkpoints.settle()
    s3.gate.faults = expire_in_the_midst
    checkpoints.save(states[1], Label(2))
    assert checkpoints.settle() == renewed
    assert expired
    if not renewed:
        assert "the AWS credentials have expired" in str(checkpoints.failure())
    assert "s3cr3t" not in f"{caplog.text} {checkpoints.failure()}"
    give(credentials, "AKIANEW")
    restored = Checkpointer(s3.open()).restore()
    assert restored is not None
    assert same(restored.state, states[renewed])


def soon() -> str:
    """A time so close that credentials which expire then are renewed before they are used."""
    return (datetime.now(UTC) + timedelta(seconds=60)).strftime("%Y-%m-%dT%H:%M:%SZ")


@pytest.fixture
def sts(s3: Cloud, server_ports: servers.Ports, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """AWS's token service, which exchanges the token in a file for credentials, as it does in pods on EKS."""
    gate = Gate("sts", server_ports.s3)
    (tmp_path / "token").write_text("a-token")
    for name in servers.KEYS:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ROLE_ARN", "arn:aws:iam::123456789012:role/trainer")
    monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(tmp_path / "token"))
    monkeypatch.setenv("AWS_ENDPOINT_URL_STS", f"http://127.0.0.1:{gate.port}")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")  # botocore's own pauses are long
    yield gate
    gate.close()


def test_requests_to_a_busy_token_service_are_retried(s3: Cloud, sts: Gate) -> None:
    codes = {"ServiceUnavailable": 503, "Throttling": 400, "IDPCommunicationError": 400}
    faults = [*(Fault(status=status, code=code) for code, status in codes.items()), Fault(lose="before")]
    sts.faults = lambda seen: faults.pop() if faults else None
    s3.open().put("a", [b"x"])
    assert (len(sts.seen), len(s3.gate.seen)) == (5, 1)


def test_a_refused_role_is_one_clear_line(s3: Cloud, sts: Gate) -> None:
    sts.faults = lambda seen: Fault(status=403, code="AccessDenied")
    with pytest.raises(StorageError, match=r"s3://bucket/.*: no new AWS credentials: .*AccessDenied.*check the role"):
        s3.open().put("a", [b"x"])
    assert (len(sts.seen), len(s3.gate.seen)) == (1, 0)


def test_requests_wait_for_an_unavailable_metadata_service(s3: Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
    """botocore sees a machine without a role, but earlier credentials show that it has one."""
    for name in servers.KEYS:
        monkeypatch.delenv(name)
    monkeypatch.delenv("AWS_EC2_METADATA_DISABLED")
    given = {"role_name": "r", "access_key": "AKIA", "secret_key": "s", "token": "t", "expiry_time": soon()}
    answers = iter([given, {}, {}, {**given, "expiry_time": "2100-01-01T00:00:00Z"}])
    monkeypatch.setattr(InstanceMetadataFetcher, "retrieve_iam_role_credentials", lambda self: next(answers))
    storage = s3.open()
    storage.put("a", [b"x"])
    assert next(answers, None) is None
    assert s3.gate.seen[-1].method == "PUT"


def test_credentials_that_arrive_expired_are_one_clear_line(
    s3: Cloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in servers.KEYS:
        monkeypatch.delenv(name)
    given = {"Version": 1, "AccessKeyId": "a", "SecretAccessKey": "b", "Expiration": "2020-01-01T00:00:00Z"}
    (tmp_path / "given.json").write_text(json.dumps(given))
    (tmp_path / "config").write_text(f"[default]\ncredential_process = cat {tmp_path}/given.json\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    with pytest.raises(StorageError, match=r"no new AWS .* still expired.*FIX: check the role, .* machine's clock"):
        s3.open().put("a", [b"x"])


# What is refused.


REFUSALS = [
    (403, "AccessDenied", (), "no permission: the credentials in use need s3:PutObject"),
    (403, "InvalidAccessKeyId", (), r"the AWS credentials were refused \(InvalidAccessKeyId\)"),
    (403, "SignatureDoesNotMatch", (), "were refused"),
    (403, "RequestTimeTooSkewed", (), r"this machine's clock is wrong \(the service's says .*\)\. FIX: set it"),
    (301, "PermanentRedirect", (("x-amz-bucket-region", "eu-7"),), r"is in eu-7\. FIX: add \?region=eu-7"),
    (400, "AuthorizationHeaderMalformed", (), r"is in another region\. FIX: add \?region="),
    (404, "NoSuchBucket", (), "there is no bucket 'bucket'. FIX: create it, or correct the URL"),
    (507, "XMinioStorageFull", (), "no room"),
    (501, "NotImplemented", (), "AWS_REQUEST_CHECKSUM_CALCULATION=when_required"),
    (400, "InvalidThing", (), "400 InvalidThing said InvalidThing"),
]


def test_a_refusal_is_explained_in_one_line(s3: Cloud) -> None:
    for status, code, headers, why in REFUSALS:
        s3.gate.seen.clear()
        s3.gate.faults = first(Fault(status=status, code=code, headers=headers))
        with pytest.raises(StorageError, match=f"cannot write data/x to s3://bucket/.*: .*{why}") as refused:
            s3.open().put("data/x", [b"x"])
        assert "\n" not in str(refused.value)
        assert len(s3.gate.seen) == 1


def test_a_service_without_room_is_full(s3: Cloud) -> None:
    for status, code in ((507, "InsufficientStorage"), (507, "XMinioStorageFull"), (403, "QuotaExceeded")):
        s3.gate.seen.clear()
        s3.gate.faults = first(Fault(status=status, code=code))
        with pytest.raises(FullError):
            s3.open().put("data/x", [b"x"])
        assert len(s3.gate.seen) == 1


def test_a_missing_bucket_is_named(s3: Cloud) -> None:
    storage = storages.open(s3.gate.url("x", bucket="no-such"), QUICK)
    for action in (lambda: storage.put("a", [b"x"]), lambda: storage.get("a"), lambda: storage.list("")):
        with pytest.raises(StorageError, match="there is no bucket 'no-such'"):
            action()


def test_an_endpoint_that_is_not_s3_is_named(s3: Cloud) -> None:
    with pytest.raises(StorageError, match="something that is not S3's XML"):
        s3_responses.parse(b"<html><p>welcome</html>")


def test_an_error_after_keep_alive_spaces_is_recognized() -> None:
    body = b" " * 400 + b"\r\n<?xml version='1.0'?><Error><Code>InternalError</Code></Error>"
    assert s3_responses.judge(HttpResponse(200, {}, body)) is Verdict.TEMPORARY


def test_a_listing_of_another_prefix_is_requested_again(s3: Cloud) -> None:
    """For example the empty page after the last one."""
    storage = s3.open()
    for key in ("a/1", "a/2"):
        storage.put(key, [b"x"])
    plain, answers = s3.gate.pass_on, list[Reply]()

    def pass_on(seen: Seen, body: bytes) -> Reply:
        answers.append(plain(seen, body))
        return answers[0] if len(answers) in (2, 3) else answers[-1]

    s3.gate.pass_on = pass_on  # type: ignore[method-assign]
    assert storage.list("a/", after="a/2") == []
    assert storage.list("a/") == ["a/1", "a/2"]
    assert len(answers) == 4


def test_a_service_without_checksums_can_be_used(s3: Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_REQUEST_CHECKSUM_CALCULATION", "when_required")
    s3.open().put("a", [b"x"])
    assert not any("checksum" in name for name in s3.gate.seen[0].headers)


def test_without_boto3_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "elasticctl_store.storage.s3")
    monkeypatch.setitem(sys.modules, "boto3", None)
    with pytest.raises(StorageError, match=r"s3:// needs the package boto3\. FIX: pip install 'elasticctl\[s3\]'"):
        storages.open("s3://bucket/x")
