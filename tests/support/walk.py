"""A walk through everything a researcher types, on any place that runs jobs.

`PROMISED` is the table of verbs and options that the command line was designed with. Each step types some of them and
looks at what came of it; at the end nothing promised may have been left out.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from elasticctl.api.codec import Manifest
from elasticctl.api.spec import ElasticJob
from elasticctl.cli.main import main
from tests.support.cli import Done
from tests.support.jobs import LIGHT, shell_job
from tests.support.waiting import wait_until

PROMISED: Mapping[str, tuple[str, ...]] = {
    "submit": (
        "--gpus", "--gpu-type", "--gpus-per-node", "--min-gpus", "--max-gpus", "--spot", "--on-demand", "--name",
        "--image", "--env", "--secret", "--mount", "--workspace", "--storage", "--priority", "--ttl", "--deadline",
        "--backoff-limit", "-f", "--set", "--template", "-d", "--dry-run", "--wait",
    ),
    "list": ("-w", "-A", "-n", "--context", "-o"),
    "status": ("-w", "-o"),
    "logs": ("-f", "--worker", "--rank", "--since", "--tail", "--previous", "--grep", "--timestamps"),
    "scale": (
        "--gpus", "--to", "--add", "--remove", "--remove-worker", "--wait", "--timeout", "--rollback", "--dry-run",
    ),
    "wait": ("--for=running", "--timeout"),
    "describe": ("-o",),
    "events": ("-w", "-o"),
    "history": ("-o",),
    "explain": ("-o",),
    "suspend": (),
    "resume": (),
    "cancel": (),
    "delete": ("-y",),
    "rerun": ("--from-checkpoint",),
    "prune": ("--older-than", "--dry-run", "-y"),
    "preempt": ("--worker", "--rank", "--notice"),
    "checkpoints": ("list", "verify", "rm", "pull"),
    "config": ("get-contexts", "use-context", "set-context", "delete-context", "import", "view"),
    "install": ("--dry-run", "--uninstall"),
    "doctor": (),
    "template": ("list", "show", "new"),
    "local": ("status", "down"),
    "completion": ("bash", "zsh", "fish"),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Place:
    """Where the walk goes. Both kinds of job keep what they have below `folder`, which is the same for all.

    `train(name)` is a manifest of one or two workers that train for long and save often; `shell(name, script)` one of
    a worker that runs a script. `kube_context` is what `config import` and `install` are tried with.
    """

    context: str
    folder: Path
    train: Callable[[str], Manifest]
    shell: Callable[[str, str], Manifest]
    kube_context: str
    patience_s: int = 600


@dataclass(slots=True)
class Walk:
    """The steps, in their order; `typed` remembers every command line."""

    place: Place
    folder: Path
    typed: list[tuple[str, ...]] = field(default_factory=list)

    def run(self, *args: str, code: int | None = 0) -> Done:
        """Type a command line in this process, and hold its exit code against what is expected (None: any)."""
        self.typed.append(args)
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            ended = main(args)
        done = Done(ended, out.getvalue(), err.getvalue())
        assert code is None or done.code == code, (args, done)
        assert "Traceback" not in done.err
        assert "\x1b" not in done.out + done.err
        return done

    def start(self, *args: str) -> subprocess.Popen[str]:
        """Type one that goes on, in a process of its own, whose output goes into a pipe."""
        self.typed.append(args)
        argv = [sys.executable, "-m", "elasticctl.cli", *args]
        return subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ})

    def file(self, manifest: Manifest) -> str:
        """The path of a manifest to submit."""
        path = self.folder / f"{manifest['metadata']['name']}.json"
        path.write_text(json.dumps(manifest))
        return str(path)

    def job(self, name: str) -> ElasticJob:
        """The job as the command line shows it."""
        return ElasticJob.from_manifest(json.loads(self.run("status", name, "-o", "json").out))

    def left_out(self) -> list[str]:
        """What was promised and was not typed."""
        missing = []
        for verb, words in PROMISED.items():
            lines = [line for line in self.typed if line[0] == verb]
            if not lines:
                missing.append(verb)
            for word in words:
                name, _, _ = word.partition("=")
                used = any(given == word or given.partition("=")[0] == name for line in lines for given in line)
                if not used:
                    missing.append(f"{verb} {word}")
        return missing

    def everything(self) -> dict[str, str]:
        """All steps in their order; what `doctor` finds at the end."""
        self.sets_up()
        self.plans()
        assert self.trains() == "walk"
        self.logs()
        self.scales()
        self.loses()
        self.pauses()
        self.keeps()
        self.ends()
        return self.checks_up()

    # The steps.

    def plans(self) -> None:
        """A plan for a cloud, and the manifest that it comes to; nothing is created."""
        script = self.folder / "train.py"
        script.write_text("print('hello')\n")
        size = ("--gpus", "8", "--gpu-type", "t4", "--gpus-per-node", "4", "--min-gpus", "4", "--max-gpus", "16")
        kept = ("--env", "A=1", "--ttl", "1h", "--deadline", "1d", "--backoff-limit", "5", "--template", "default")
        where = ("--name", "planned", "--image", "team/train:1", "--storage", "s3://team/runs", "--context", "spare")
        more = ("--secret", "hub", "--priority", "5", "--mount", "data:/data", "--workspace", str(self.folder))
        rest = ("--spot", "--set", "spec.policy.hangTimeoutSeconds=60", "-o", "json", "--dry-run", *more)
        made = json.loads(self.run("submit", str(script), *size, *kept, *where, *rest, "--", "--epochs", "3").out)
        spec, worker = made["spec"], made["spec"]["replicaSpecs"]["Worker"]
        container = worker["template"]["spec"]["containers"][0]
        assert made["metadata"]["name"] == "planned"
        assert (worker["replicas"], spec["minReplicas"], spec["maxReplicas"]) == (2, 1, 4)
        assert (spec["ttlSecondsAfterFinished"], spec["activeDeadlineSeconds"]) == (3600, 86400)
        assert (spec["backoffLimit"], spec["policy"]["hangTimeoutSeconds"]) == (5, 60)
        assert {"name": "A", "value": "1"} in container["env"]
        assert container["args"][-2:] == ["--epochs", "3"]
        self.run("config", "delete-context", "spare")
        manifest = self.file(self.place.shell("checked", "true"))
        assert "name: checked" in self.run("submit", "-f", manifest, "--dry-run=server").out
        assert self.run("submit", "-f", manifest, "--on-demand", "--dry-run", code=2).err.startswith("error: ")

    def trains(self) -> str:
        """A job that trains, as every reading verb shows it."""
        manifest = self.file(self.place.train("walk"))
        assert self.run("submit", "-f", manifest, "-d").out == "walk\n"
        assert self.run("submit", "-f", manifest, "-d", code=3).err.startswith("error: ")
        self.run("wait", "walk", "--for=running", "--timeout", f"{self.place.patience_s}s")
        wait_until(lambda: self.job("walk").status.checkpoint.step, self.place.patience_s, every_s=0.2)
        header, *rows = self.run("list", "-A").out.splitlines()
        (row,) = (dict(zip(header.split("\t"), line.split("\t"), strict=True)) for line in rows if "\twalk\t" in line)
        assert (row["PHASE"], row["WORKERS"].partition(" ")[0]) == ("Running", "2/2")
        assert re.match(r"\d+(/\d+)?$", row["STEP"])
        assert re.match(r"\d+ .* ago$", row["CHECKPOINT"])
        for form in ("table", "wide", "json", "yaml", "name"):
            assert "walk" in self.run("list", "-o", form, "-n", "default", "--context", self.place.context).out
            assert "walk" in self.run("status", "wal", "-o", form).out
        for verb in ("describe", "events", "history", "explain"):
            assert "walk" in self.run(verb, "walk", "-o", "json").out
            assert self.run(verb, "walk").code == 0
        return "walk"

    def logs(self) -> None:
        """What its workers say."""
        assert "worker-0 | " in self.run("logs", "walk", "--worker", "0", "--tail", "5").out
        stamped = self.run("logs", "walk", "--since", "1h", "--timestamps", "--tail", "1").out.splitlines()
        assert all(re.match(r"worker-\d \| \d{4}-\d\d-\d\dT", line) for line in stamped)
        # These workers have no predecessors: one kind of cluster prints nothing, the other says so.
        assert self.run("logs", "walk", "--previous", code=None).code in (0, 3)
        assert "worker-" in self.run("logs", "walk", "--rank", "0").out
        assert self.run("logs", "walk", "--grep", "no such line is ever said").out == ""
        following = self.start("logs", "-f", "walk", "--tail", "1")
        assert following.stdout is not None
        assert following.stdout.readline().startswith("worker-")
        following.kill()
        following.communicate()

    def scales(self) -> None:
        """More workers, fewer, these; and what is refused."""
        within = ("--wait", "--timeout", f"{self.place.patience_s}s")
        assert self.run("scale", "walk", "--to", "3", *within).err.endswith("3 workers are running\n")
        assert self.run("scale", "walk", "--remove-worker", "2", *within).err.endswith("2 workers are running\n")
        assert self.run("scale", "walk", "--add", "9", code=2).err == (
            "error: 11 workers are more than the maximum of walk, 4\n"
        )
        assert self.run("scale", "walk", "--gpus", "2", code=2).err.startswith("error: walk runs on CPUs. FIX: ")
        self.run("scale", "walk", "--remove", "1", *within)
        self.run("scale", "walk", "--to", "2", "--dry-run")
        assert self.job("walk").desired == 1
        self.run("scale", "walk", "--to", "2", *within, "--rollback")

    def loses(self) -> None:
        """Interruptions, rehearsed, and their record."""
        pods = json.loads(self.run("describe", "walk", "-o", "json").out)["pods"]
        last = pods[-1]["metadata"]["name"].rpartition("-")[2]
        for words in (("--worker", last, "--notice", "none"), ("--rank", "0", "--notice", "30s")):
            before = self.job("walk").status
            self.run("preempt", "walk", *words)
            wait_until(lambda before=before: self._again(before.generation), self.place.patience_s, every_s=0.2)
        history = json.loads(self.run("history", "walk", "-o", "json").out)
        assert [item["cause"] for item in history["interruptions"]][-2:] == ["Deleted", "Preempted"]
        assert len(history["scalings"]) >= 3
        assert "group formed" in self.run("events", "walk").out
        self.run("wait", "walk", "--timeout", "0s", code=124)

    def _again(self, generation: int) -> bool:
        """Whether a later group of two trains."""
        job = self.job("walk")
        newest = job.status.generations[-1]
        return newest.generation > generation and newest.first_step_at is not None and job.status.active == 2

    def pauses(self) -> None:
        """Suspended, resumed."""
        self.run("suspend", "walk")
        wait_until(lambda: self.job("walk").status.phase == "Suspended", self.place.patience_s, every_s=0.1)
        assert "suspended" in self.run("explain", "walk").out
        self.run("resume", "walk")
        self.run("wait", "walk", "--for=running", "--timeout", f"{self.place.patience_s}s")

    def keeps(self) -> None:
        """What it has kept, looked at and taken along; and the same once more from there."""
        url = (self.place.folder / "walk").as_uri()
        self.run("cancel", "walk")
        watching = self.start("status", "-w", "walk")
        out, _ = watching.communicate(timeout=self.place.patience_s)
        assert watching.returncode == 0
        assert out.splitlines()[-1].split("\t")[:2] == ["walk", "Cancelled"]
        self.run("wait", "walk", "--timeout", f"{self.place.patience_s}s", code=4)
        self.run("events", "walk", "-w")
        found = json.loads(self.run("checkpoints", "list", url, "-o", "json").out)["checkpoints"]
        steps = [each["step"] for each in found]
        assert steps == sorted(steps, reverse=True)
        self.run("checkpoints", "verify", "walk", "--step", str(steps[0]))
        model = self.folder / "model.safetensors"
        self.run("checkpoints", "pull", "walk", str(model))
        assert model.stat().st_size > 1000
        self.run("checkpoints", "rm", url, str(steps[-1]), code=2)
        self.run("checkpoints", "rm", url, str(steps[-1]), "-y")
        left = [int(step) for step in self.run("checkpoints", "list", url, "-o", "name").out.split()]
        assert left == steps[:-1]
        self.run("rerun", "walk", "--from-checkpoint", str(left[0]), "--name", "again", "-d")
        wait_until(lambda: self.job("again").status.progress.step, self.place.patience_s, every_s=0.2)
        assert (self.job("again").status.progress.step or 0) >= left[0]
        assert self.job("again").status.generations[0].resumed_step == left[0]
        assert self.run("delete", "again", code=2).err.startswith("error: again is still Running. FIX: add --yes")
        self.run("delete", "again", "-y")

    def ends(self) -> None:
        """How jobs end, as exit codes; and what becomes of them."""
        good = self.file(self.place.shell("good", "echo all is well"))
        assert "all is well" in self.run("submit", "-f", good).out
        bad = self.file(self.place.shell("bad", "echo no such file >&2; exit 7"))
        done = self.run("submit", "-f", bad, "--wait", code=1)
        assert re.search(r"bad-worker-[01]: exit code 7", done.err), done.err  # it was tried twice
        assert "exit code 7" in self.run("explain", "bad").out
        self.run("wait", "bad", code=1)
        self.run("wait", "nobody", code=3)
        assert "walk" in self.run("prune", "--older-than", "0s", "--dry-run").out
        assert self.run("prune", "--older-than", "0s", code=2).err.startswith("error: this deletes 3 jobs")
        self.run("prune", "--older-than", "0s", "-y")
        wait_until(lambda: self.run("list", "-o", "name").out == "", self.place.patience_s, every_s=0.2)
        listing = self.start("list", "-w")
        assert listing.poll() is None
        listing.kill()
        listing.communicate()

    def sets_up(self) -> None:
        """Contexts, templates, the cluster's own parts, completion."""
        listed = self.run("config", "get-contexts", "-o", "name").out.split()
        if self.place.kube_context not in listed:
            assert f"context {self.place.kube_context} added" in self.run("config", "import").err
        self.run("config", "import")
        self.run("config", "set-context", "spare", "--provider", "aws", "--gpu-type", "t4", "--storage", "s3://b/p")
        before = json.loads(self.run("config", "get-contexts", "-o", "json").out)["currentContext"]
        self.run("config", "use-context", "spare")
        assert "currentContext: spare" in self.run("config", "view").out
        self.run("config", "use-context", before)
        there = ("--context", self.place.kube_context)
        printed = self.run("install", *there, "--image", "team/controller:1", "--dry-run").out
        assert "kind: CustomResourceDefinition" in printed
        assert self.run("install", *there, "--uninstall", "--dry-run").code == 0
        self.run("template", "new", "mine", "--from", "default")
        assert "mine" in self.run("template", "list").out
        assert "kind: ElasticJob" in self.run("template", "show", "mine").out
        for shell in ("bash", "zsh", "fish"):
            assert "elasticctl" in self.run("completion", shell).out
        self.run("version")

    def checks_up(self) -> dict[str, str]:
        """What `doctor` finds of the place: check -> outcome."""
        done = self.run("doctor", "-o", "json", "--storage", self.place.folder.as_uri(), code=None)
        found = json.loads(done.out)
        assert found["context"] == self.place.context
        assert done.code == any(check["outcome"] == "failed" for check in found["checks"])
        return {check["name"]: check["outcome"] for check in found["checks"]}


TRAIN = Path(__file__).with_name("simple_train.py")


def training(name: str, folder: Path, **container: Any) -> Manifest:
    """Two workers, up to four, that train for longer than any test, and save every second."""
    script = [sys.executable, str(TRAIN), "--epochs", "100000", "--sample-s", "0.0016"]
    worker = {
        "command": [str(Path(sys.executable).parent / "elasticctl-launch"), *LIGHT, "--nproc-per-node", "1", "--"],
        "args": script,
        "env": [
            {"name": "ELASTICCTL_STORAGE", "value": (folder / name).as_uri()},
            {"name": "OMP_NUM_THREADS", "value": "1"},
        ],
        **container,
    }
    return shell_job(name, "", 2, container=worker, grace_s=10, minReplicas=1, maxReplicas=4)
