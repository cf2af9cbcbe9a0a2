"""`move`: a job continues in another context, bit for bit as if it had never moved, and only there."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from elasticctl.api.codec import Manifest
from elasticctl.api.errors import UsageError
from elasticctl.api.gpu_types import gpu_type, place
from elasticctl.api.objects import at
from elasticctl.api.observed.cost import rate_of
from elasticctl.api.podtemplate import capacity, hardware, node_labels
from elasticctl.api.spec import ANNOTATION_MOVED_FROM, ANNOTATION_MOVED_TO, ANNOTATION_MOVING_FROM, ElasticJob, JobSpec
from elasticctl.cluster.base import Cluster, LogQuery
from elasticctl.cluster.local.client import LocalCluster
from elasticctl.cluster.local.paths import local_paths
from elasticctl.cluster.local.supervisor_client import shut_down
from elasticctl.operations import target
from elasticctl.operations.moved_manifest import JobLocation, moved_manifest, storage_patch, workspace_of
from elasticctl.operations.workspace.collect_files import collect_files, pieces_of
from elasticctl.settings.contexts import LOCAL, Context
from elasticctl.templates import render_manifest
from elasticctl_protocol import variables
from elasticctl_store import storage as storages
from elasticctl_store.checkpoints.commits import CommitWriter, moved_to, read_commits, read_entries
from elasticctl_store.checkpoints.entries import Moved
from elasticctl_store.workspace import transfer
from elasticctl_train.checkpoint.checkpointer import Checkpointer
from tests.support.cli import Run
from tests.support.clouds import Cloud
from tests.support.jobs import light_template
from tests.support.processes import processes_of
from tests.support.train.checkpoints import saved
from tests.support.train.ranks import alone, run_script
from tests.support.train.states import same
from tests.support.waiting import wait_until

STEPS = 48
TRAIN = """\
import os, sys, time
import torch
from elasticctl_train import Run, SavePolicy
from torch.utils.data import TensorDataset

torch.manual_seed(1)
model = torch.nn.Sequential(torch.nn.Linear(8, 300), torch.nn.ReLU(), torch.nn.Dropout(0.2), torch.nn.Linear(300, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
generator = torch.Generator().manual_seed(2)
data = TensorDataset(torch.randn(32, 8, generator=generator), torch.randn(32, 1, generator=generator))
steps = 0
with Run(model=model, optimizer=optimizer, save=SavePolicy(every_steps=4)) as run:
    for _ in run.epochs(6):
        for inputs, wanted in run.loader(data, global_batch=4):
            run.step(loss=torch.nn.functional.mse_loss(run.model(inputs), wanted))
            steps += 1
            if steps > 8 and not os.path.exists(sys.argv[1]):
                time.sleep(1.0)
"""


class Places:
    """Stands in for `elasticctl.cluster.connect`: two contexts that are local clusters of their own."""

    def __init__(self, **homes: Path) -> None:
        self.clusters = {name: LocalCluster(local_paths({variables.HOME: str(home)})) for name, home in homes.items()}

    def __call__(self, context: Context, *, starts: bool = True) -> Cluster:
        return self.clusters.get(context.name) or LocalCluster(starts=starts)


@dataclass(frozen=True, slots=True)
class World:
    """Two clusters with their contexts, and a training script."""

    places: Places
    homes: tuple[Path, Path]
    script: Path

    @property
    def east(self) -> LocalCluster:
        return self.places.clusters["east"]

    @property
    def west(self) -> LocalCluster:
        return self.places.clusters["west"]

    @property
    def go(self) -> Path:
        """Once this file is there, training hurries."""
        return self.script.parents[1] / "go"

    def job(self, url: str) -> Manifest:
        """Trains in `STEPS` steps, with the code that is sent along now."""
        keys = {name: os.environ[name] for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY") if name in os.environ}
        command = (sys.executable, str(self.script), str(self.go))
        sent = {"workspace": self.sent(), "workspace_from": str(self.script.parent)}
        spec = JobSpec("train", command, storage=url, env=keys, grace_s=10, **sent)
        return render_manifest(spec, light_template())

    def sent(self) -> str:
        """Have the script's folder in a storage as a workspace, and gone from here; its reference."""
        folder, url = self.script.parent, (self.homes[0] / "workspaces").as_uri()
        listing = collect_files(folder, None).listing
        transfer.send(storages.open(url), listing, "here", lambda file: pieces_of(folder, file), lambda count: None)
        self.script.rename(self.script.with_suffix(".kept"))
        return f"{url}#{listing.digest}"

    def step(self, cluster: LocalCluster) -> int:
        return int(at(cluster.get_job("default", "train"), "status", "progress", "step") or 0)

    def phase(self, cluster: LocalCluster) -> str:
        return str(at(cluster.get_job("default", "train"), "status", "phase"))

    def begun(self, url: str) -> int:
        """Have a job train in the east; returns how far it is at least."""
        self.east.create_job(self.job(url))
        wait_until(lambda: self.step(self.east) >= 6)
        return 6

    def end(self, cluster: LocalCluster) -> None:
        """Have the job come to its end."""
        self.go.touch()
        wait_until(lambda: self.phase(cluster) == "Succeeded")

    def expected(self, folder: Path) -> Any:
        """The last state of the same training in one go."""
        kept = self.script.with_suffix(".kept")
        process = alone(run_script, kept, ["/"], {"ELASTICCTL_STORAGE": str(folder)})
        process.join()
        assert process.exitcode == 0
        return last_state(str(folder))


def last_state(url: str) -> Any:
    found = Checkpointer(storages.open(url)).restore()
    assert found is not None
    assert found.commit.step == STEPS
    return found.state


@pytest.fixture
def world(
    home: Path, forked_workers: None, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> Iterator[World]:
    monkeypatch.delenv("ELASTICCTL_CONTEXT", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    other = Path(tempfile.mkdtemp(prefix="ec-"))
    places = Places(east=home, west=other)
    monkeypatch.setattr(target, "connect", places)
    for name in ("east", "west"):
        storage = str(tmp_path / name)
        assert run("config", "set-context", name, "--provider", "kubernetes", "--storage", storage).code == 0
    script = tmp_path / "src" / "train.py"
    script.parent.mkdir()
    script.write_text(TRAIN)
    try:
        yield World(places, (home, other), script)
    finally:
        shut_down(places.clusters["west"].paths, keep_jobs=False, say=print)
        left = processes_of(other)
        for process in left:
            process.kill()
        shutil.rmtree(other, ignore_errors=True)
    assert not left


@pytest.mark.timeout(900)
def test_between_two_clouds_it_ends_as_if_it_had_never_moved(
    run: Run, world: World, s3: Cloud, gs: Cloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    s3.name_endpoint(monkeypatch)
    before = world.begun(s3.url)
    done = run("move", "train", "--context", "east", "--to", "west", "--storage", gs.url)
    assert done.code == 0, done.err
    said = done.err.splitlines()
    assert said[0] == f"train: from east ({s3.open().url}) to west ({gs.open().url})"
    assert said[-1] == f"train: continues in west, with its state in {gs.open().url}"
    world.end(world.west)
    groups = world.west.get_job("default", "train")["status"]["generations"]
    assert before <= groups[0]["resumedStep"] < STEPS
    assert f"train: step {groups[0]['resumedStep']} copied: " in done.err
    assert same(last_state(gs.url), world.expected(tmp_path / "alone"))
    reference = hardware(ElasticJob.from_manifest(world.west.get_job("default", "train"))).env["ELASTICCTL_WORKSPACE"]
    assert reference.startswith("gs://bucket/jobs/workspaces?")
    # What is left in the east.
    old = world.east.get_job("default", "train")
    assert (old["spec"]["suspend"], world.phase(world.east)) == (True, "Suspended")
    assert old["metadata"]["annotations"] == {ANNOTATION_MOVED_TO: f"west {gs.url}"}
    refused = run("resume", "train", "--context", "east")
    assert (refused.code, refused.err) == (
        3,
        "error: train runs in context west now. FIX: `elasticctl resume train --context west`\n",
    )
    explained = run("explain", "train", "--context", "east")
    assert "It was moved to context west and runs only there." in explained.out
    assert "elasticctl status train --context west" in explained.out
    elsewhere_again = run("move", "train", "--context", "east", "--to", "local")
    assert "has been moved to context west. FIX: move it from there, with --context west" in elsewhere_again.err
    again = run("move", "train", "--context", "east", "--to", "west")
    assert (again.code, again.err.startswith("train has been moved to context west already")) == (0, True)
    # Whoever starts it there all the same gets nowhere.
    entries = [position for position, _ in read_entries(s3.open())]
    world.east.patch_job("default", "train", {"spec": {"suspend": False}})
    wait_until(lambda: "has been moved to" in _output(world.east))
    assert [position for position, _ in read_entries(s3.open())] == entries
    assert isinstance(next(read_entries(s3.open()))[1], Moved)


def _output(cluster: LocalCluster) -> str:
    lines = [*cluster.logs("default", "train", LogQuery(previous=True)), *cluster.logs("default", "train", LogQuery())]
    return "\n".join(line.text for line in lines)


def test_checkpoints_that_a_move_has_left_can_be_deleted(run: Run, private_home: Path, tmp_path: Path) -> None:
    storage, _ = saved(tmp_path / "left", steps=2)
    CommitWriter.take_over(storage).close("gs://b/x")
    done = run("checkpoints", "rm", str(tmp_path / "left"), "2", "1", "--force", "-y")
    assert done.code == 0, done.err
    assert list(read_commits(storage)) == []
    assert moved_to(storage) is not None


# What becomes of the manifest.


def cloud_job(provider: str, spot: bool = True, gpu: str = "t4", **fields: Any) -> Manifest:
    placement = place(provider, gpu_type(gpu), 1, spot=spot)
    spec = JobSpec(
        "digits", ("python", "train.py"), provider=provider, gpu_type=gpu, gpus_per_worker=1, spot=spot, image="old",
        storage="s3://old/digits", node_terms=placement.terms, tolerations=placement.tolerations, **fields,
    )  # fmt: skip
    return render_manifest(spec, light_template())


AWS = JobLocation(Context("aws", "aws", image="old", service_account="me"), "default", "s3://old/digits")
GCP = JobLocation(Context("gcp", "gcp", image="new", service_account="you"), "ml", "gs://new/digits-1")


@pytest.mark.parametrize("spot", [True, False])
@pytest.mark.parametrize(("old", "new"), [(AWS, GCP), (GCP, AWS)])
def test_nodes_are_asked_for_in_the_other_providers_words(old: JobLocation, new: JobLocation, spot: bool) -> None:
    manifest = cloud_job(old.context.provider, spot)
    made = ElasticJob.from_manifest(moved_manifest(manifest, old, new))
    direct = ElasticJob.from_manifest(cloud_job(new.context.provider, spot))
    assert node_labels(made.template) == node_labels(direct.template)
    assert capacity(made.template) == capacity(direct.template)
    assert at(made.template, "spec", "tolerations") == at(direct.template, "spec", "tolerations")
    assert rate_of(made) == rate_of(direct)
    assert made.suspend
    assert hardware(made).storage == new.url
    assert (made.namespace, made.name) == (new.namespace, "digits")


def test_defaults_of_the_old_context_become_those_of_the_new_one() -> None:
    made = moved_manifest(cloud_job("aws", service_account="me"), AWS, GCP)
    spec = at(made, "spec", "replicaSpecs", "Worker", "template", "spec")
    assert (spec["containers"][0]["image"], spec["serviceAccountName"]) == ("new", "you")
    other = cloud_job("aws", service_account="own")
    spec = at(moved_manifest(other, AWS, GCP), "spec", "replicaSpecs", "Worker", "template", "spec")
    assert spec["serviceAccountName"] == "own"
    assert made["metadata"]["annotations"] == {
        ANNOTATION_MOVED_FROM: "aws s3://old/digits",
        ANNOTATION_MOVING_FROM: "aws gcp",
    }


def test_the_users_own_settings_stay() -> None:
    manifest = cloud_job("aws")
    spec = at(manifest, "spec", "replicaSpecs", "Worker", "template", "spec")
    spec["nodeSelector"] = {"team": "vision", "node.kubernetes.io/instance-type": "g4dn.xlarge"}
    spec["tolerations"].append({"key": "team", "operator": "Exists"})
    made = at(moved_manifest(manifest, AWS, GCP), "spec", "replicaSpecs", "Worker", "template", "spec")
    assert made["nodeSelector"] == {"team": "vision"}
    assert {"key": "team", "operator": "Exists"} in made["tolerations"]


def test_a_job_cannot_move_to_a_provider_without_its_gpu() -> None:
    with pytest.raises(UsageError, match="gcp has no a10g GPUs"):
        moved_manifest(cloud_job("aws", gpu="a10g"), AWS, GCP)
    manifest = cloud_job("aws")
    del at(manifest, "spec", "replicaSpecs", "Worker", "template", "spec")["affinity"]
    with pytest.raises(UsageError, match="does not say which GPU type"):
        moved_manifest(manifest, AWS, GCP)
    with pytest.raises(UsageError, match="between this machine and a cluster"):
        moved_manifest(cloud_job("aws"), AWS, JobLocation(Context(LOCAL, LOCAL), "default", "file:///x"))


def test_the_workspace_is_next_to_the_new_state() -> None:
    digest = "f" * 64
    manifest = cloud_job("aws", workspace=f"s3://old/workspaces#{digest}", workspace_from="/home/me/project")
    assert workspace_of(manifest) == ("s3://old/workspaces", digest)
    assert workspace_of(moved_manifest(manifest, AWS, GCP)) == ("gs://new/workspaces", digest)
    assert workspace_of(cloud_job("aws")) == ("", "")
    patch = storage_patch(manifest, AWS, JobLocation(AWS.context, "default", "s3://other/digits"))
    (container,) = patch["spec"]["replicaSpecs"]["Worker"]["template"]["spec"]["containers"]
    found = {item["name"]: item.get("value") for item in container["env"]}
    assert found["ELASTICCTL_WORKSPACE"] == f"s3://other/workspaces#{digest}"
