"""No verb sends credentials to an endpoint that only an object of the cluster names."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from elasticctl.api.codec import Manifest
from elasticctl.api.errors import JobStorageError, NotFoundError
from elasticctl.api.spec import ANNOTATION_MOVING_TO, ElasticJob
from elasticctl.cli.verbs.start_jobs import submit
from elasticctl.cluster.base import LogQuery
from elasticctl.cluster.stored_logs import StoredLogs
from elasticctl.operations import target
from tests.support import job_samples
from tests.support.cli import Run
from tests.support.jobs import shell_job
from tests.support.stored import launched

pytestmark = pytest.mark.slow  # a server listens
SECRET = "planted-session-token"
ORDERS = (
    "checkpoints digits", "checkpoints verify digits", "checkpoints rm digits 10 -y",
    "checkpoints prune digits --keep-last 1 -y", "checkpoints pull digits model.safetensors", "delete digits -y",
    "prune --older-than 1s -y", "rerun digits -d --name digits --storage s3://b/p", "submit -f job.yaml -d",
    "move digits --to west", "move digits --to east --storage file:///nowhere",
)  # fmt: skip


@pytest.fixture
def thief() -> Iterator[SimpleNamespace]:
    """A server that records its requests."""
    heard: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            heard.append(f"{self.requestline}\n{self.headers}")
            self.send_error(403)

        do_PUT = do_POST = do_DELETE = do_HEAD = do_GET

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    yield SimpleNamespace(endpoint=f"http://127.0.0.1:{server.server_address[1]}", heard=heard)
    server.shutdown()
    server.server_close()


class Pretender:
    """A cluster with one job, which another user wrote."""

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest

    def get_job(self, namespace: str, name: str) -> Manifest:
        if name != self._manifest["metadata"]["name"]:
            raise NotFoundError(f"no job {name}")
        return self._manifest

    def list_jobs(self, namespace: str | None) -> list[Manifest]:
        return [self._manifest]

    def list_pods(self, namespace: str, name: str = "") -> list[Manifest]:
        return []

    def create_job(self, manifest: Manifest, *, dry_run: bool = False) -> Manifest:
        return manifest

    def patch_job(self, namespace: str, name: str, patch: Manifest) -> Manifest:
        return self._manifest

    def delete_job(self, namespace: str, name: str, **how: Any) -> None:
        pass


@pytest.fixture(params=["s3", "gs"])
def stolen(
    request: pytest.FixtureRequest,
    thief: SimpleNamespace,
    private_home: Path,
    aws_keys: None,
    run: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> str:
    """A job of the context `east` that keeps its state with the thief; the URL of that."""
    monkeypatch.setenv("AWS_SESSION_TOKEN", SECRET)
    url = f"{request.param}://bucket/p?endpoint={thief.endpoint}"
    manifest = job_samples.job(phase="Succeeded", completionTime=job_samples.at(2))
    container = manifest["spec"]["replicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]
    container["command"] = ["elasticctl-launch", "--", "python", "train.py"]
    container["env"] = [
        {"name": "ELASTICCTL_STORAGE", "value": url},
        {"name": "ELASTICCTL_WORKSPACE", "value": f"{url}#{'0' * 64}"},
    ]
    manifest["metadata"]["annotations"] = {ANNOTATION_MOVING_TO: f"west {url.replace('/p?', '/q?')}"}
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.yaml").write_text(json.dumps({key: manifest[key] for key in manifest if key != "status"}))
    for module in (target, submit):
        monkeypatch.setattr(module, "connect", lambda context: Pretender(manifest))
    for name in ("east", "west"):
        words = ("--provider", "kubernetes", "--storage", (tmp_path / name).as_uri())
        assert run("config", "set-context", name, *words).code == 0
    monkeypatch.setenv("ELASTICCTL_CONTEXT", "east")
    return url


@pytest.mark.parametrize("order", ORDERS)
def test_no_verb_connects_to_an_endpoint_that_only_a_job_names(
    order: str, run: Run, thief: SimpleNamespace, stolen: str
) -> None:
    run(*order.split())
    assert thief.heard == []


def test_the_refusal_is_one_line_and_its_fix_works(
    run: Run, thief: SimpleNamespace, stolen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = run("checkpoints", "digits")
    assert (refused.code, refused.err.count("\n")) == (3, 1)
    assert f"the job names the endpoint {thief.endpoint}, and your credentials are not sent" in refused.err
    scheme = stolen.partition(":")[0]
    place = ("--provider", "kubernetes", "--storage", f"{scheme}://BUCKET?endpoint={thief.endpoint}")
    assert run("config", "set-context", "other", *place).code == 0
    assert "only a job names" not in run("checkpoints", "digits").err
    assert thief.heard
    assert run("config", "delete-context", "other").code == 0
    thief.heard.clear()
    monkeypatch.setenv({"s3": "AWS_ENDPOINT_URL_S3", "gs": "STORAGE_EMULATOR_HOST"}[scheme], thief.endpoint)
    run("checkpoints", "digits")
    assert thief.heard


def test_a_url_that_the_caller_types_is_the_callers_choice(run: Run, thief: SimpleNamespace, stolen: str) -> None:
    run("checkpoints", stolen)
    assert thief.heard


def test_stored_logs_stay_unread(thief: SimpleNamespace, stolen: str) -> None:
    manifest = shell_job("j", "true", container=launched(stolen))
    manifest["metadata"]["uid"] = "job-uid"
    said: list[str] = []
    logs = StoredLogs(ElasticJob.from_manifest(manifest), said.append)
    assert list(logs.past({}, LogQuery())) == []
    assert "credentials are not sent to an endpoint that only a job names" in said[0]
    with pytest.raises(JobStorageError, match="only a job names"):
        logs.delete()
    assert thief.heard == []
