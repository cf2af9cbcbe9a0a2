"""Which endpoints get this process's credentials if somebody else wrote the URL."""

from __future__ import annotations

from pathlib import Path

import pytest

from elasticctl_store.errors import StorageError
from elasticctl_store.storage import Patience
from elasticctl_store.storage.untrusted import check_endpoint, open_untrusted

pytestmark = pytest.mark.usefixtures("aws_keys")

THIEVES = (
    "https://thief.example", "http://127.0.0.1:9", "http://169.254.169.254", "https://amazonaws.com",
    "https://s3.amazonaws.com.thief.example", "https://s3.us-east-1.amazonaws.com:8443",
    "http://s3.us-east-1.amazonaws.com", "https://thief-1.us-east-1.elb.amazonaws.com",
    "https://x.execute-api.us-east-1.amazonaws.com", "https://ec2-1-2-3-4.compute-1.amazonaws.com",
    "https://vpce-1-2.vpce-svc-3.us-east-1.vpce.amazonaws.com", "https://s3.amazonaws.com.",
    "https://s3xamazonaws.com", "https://googleapis.com.thief.example", "https://thief.googleapis.com",
    "http://storage.googleapis.com", "https://storage.googleapis.com:444", "https://[::1]:9",
    "https://s3.us-east-1.amazonaws.com\\.thief.example",
)  # fmt: skip
OWN = {
    "s3": (
        "https://s3.amazonaws.com", "https://s3.eu-west-1.amazonaws.com", "https://s3.eu-west-1.amazonaws.com:443",
        "https://s3-us-west-2.amazonaws.com", "https://s3.dualstack.us-east-1.amazonaws.com",
        "https://s3-fips.us-gov-west-1.amazonaws.com", "https://s3-accelerate.amazonaws.com",
        "https://s3.cn-north-1.amazonaws.com.cn", "https://bucket.vpce-1a-2b.s3.us-east-1.vpce.amazonaws.com",
    ),
    "gs": (
        "https://storage.googleapis.com", "https://storage.us-east1.rep.googleapis.com",
        "https://storage-mine.p.googleapis.com", "https://restricted.googleapis.com",
    ),
}  # fmt: skip


def nothing() -> list[str]:
    return []


@pytest.mark.parametrize("scheme", ["s3", "gs"])
def test_an_endpoint_that_only_the_url_names_is_refused(scheme: str) -> None:
    variable = {"s3": "AWS_ENDPOINT_URL_S3", "gs": "STORAGE_EMULATOR_HOST"}[scheme]
    for endpoint in THIEVES:
        with pytest.raises(StorageError, match="credentials are not sent to an endpoint that only a job names") as e:
            open_untrusted(f"{scheme}://bucket/p?endpoint={endpoint}", Patience(tries=1), nothing)
        assert f"${variable}={endpoint}" in str(e.value)
        assert f"--storage '{scheme}://BUCKET?endpoint={endpoint}'" in str(e.value)
    url = f"{scheme}://bucket/p?endpoint={OWN[scheme][0]}&endpoint=https://thief.example"  # the last one counts
    with pytest.raises(StorageError, match=r"the job names the endpoint https://thief\.example"):
        open_untrusted(url, Patience(tries=1), nothing)


@pytest.mark.parametrize("scheme", ["s3", "gs"])
def test_the_providers_own_endpoints_are_trusted(scheme: str) -> None:
    for url in (f"{scheme}://bucket/p", f"{scheme}://bucket/p?endpoint={OWN[scheme][0]}"):
        assert open_untrusted(url, Patience(tries=1), nothing).url == url
    for endpoint in OWN[scheme]:
        check_endpoint(f"{scheme}://bucket/p?endpoint={endpoint}", "job", nothing)


@pytest.mark.parametrize("scheme", ["s3", "gs"])
def test_an_endpoint_chosen_by_the_caller_is_trusted_for_its_scheme_only(scheme: str) -> None:
    url = f"{scheme}://other/p?endpoint=http://minio:9000"
    named = ["", "gs://broken?nonsense=1", "s3://broken?nonsense=1", f"{scheme}://mine?endpoint=HTTP://MINIO:9000/"]
    check_endpoint(url, "job", lambda: named)
    others = {"s3": "gs", "gs": "s3"}[scheme]
    for chosen in (f"{others}://mine?endpoint=http://minio:9000", f"{scheme}://mine?endpoint=http://minio:9001"):
        with pytest.raises(StorageError, match="only a job names"):
            check_endpoint(url, "job", lambda chosen=chosen: [chosen])


@pytest.mark.parametrize(
    ("scheme", "variable", "value"),
    [
        ("s3", "AWS_ENDPOINT_URL_S3", "http://minio:9000"),
        ("s3", "AWS_ENDPOINT_URL", "http://minio:9000"),
        ("gs", "STORAGE_EMULATOR_HOST", "http://minio:9000"),
        ("gs", "STORAGE_EMULATOR_HOST", "minio:9000"),
    ],
)
def test_an_endpoint_of_the_environment_is_trusted(
    scheme: str, variable: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    check_endpoint(f"{scheme}://other/p?endpoint=http://minio:9000", "job", nothing)


def test_an_endpoint_of_the_profile_is_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config").write_text("[default]\nendpoint_url = http://minio:9000\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    check_endpoint("s3://other/p?endpoint=http://minio:9000", "job", nothing)
    with pytest.raises(StorageError, match="only a job names"):
        check_endpoint("s3://other/p?endpoint=http://minio:9001", "job", nothing)


def test_the_callers_urls_are_read_only_for_foreign_endpoints(tmp_path: Path) -> None:
    for url in (tmp_path.as_uri(), str(tmp_path), "s3://bucket/p", "gs://bucket/p?endpoint=https://www.googleapis.com"):
        check_endpoint(url, "job", lambda: pytest.fail("asked"))
    with pytest.raises(StorageError, match="is not a supported storage"):
        open_untrusted("S3://bucket/p?endpoint=https://thief.example", Patience(tries=1), nothing)
