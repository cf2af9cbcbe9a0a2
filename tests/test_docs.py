"""The documentation against the real thing: its commands run, its examples are valid, and it leaves nothing out."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import grimp
import psutil
import pytest

from elasticctl.api import validation
from elasticctl.api.spec import ElasticJob
from elasticctl.api.status import Cause, JobStatus
from elasticctl.cli.main import main
from elasticctl.cluster.local.client import LocalCluster
from elasticctl_launcher import main as launcher
from elasticctl_protocol.codec import camel
from tests.support import cli_page
from tests.support.page_examples import agree, as_shown, run_example, steps, with_outputs
from tests.support.waiting import wait_until

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]
BIN = Path(sys.executable).parent
UPDATES = bool(os.environ.get("UPDATE_QUICKSTART"))
"""Put what the commands print into the quickstart."""


def page(name: str) -> str:
    return (DOCS / name).read_text("utf-8")


def fences(text: str, language: str) -> list[str]:
    """The contents of a page's fenced blocks in one language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def sections(text: str, level: int) -> dict[str, str]:
    """Heading -> what is below it, for the headings of one level; "" is what comes before the first."""
    parts = re.split(rf"^{'#' * level} (.+)$", text, flags=re.MULTILINE)
    return {"": parts[0], **dict(zip(parts[1::2], parts[2::2], strict=True))}


def on_one_line(text: str) -> str:
    return " ".join(text.split())


def type_in(command: str, cwd: Path, typed: str = "") -> str:
    """What a command prints into a pipe, messages among its output: in this process, or by a shell if it needs one.

    `typed` is what it reads from its terminal. It fails unless the command succeeds.
    """
    if set(command) & set("$|;"):
        path = f"{BIN}{os.pathsep}{os.environ['PATH']}"
        done = subprocess.run(
            ["sh", "-c", command], cwd=cwd, env={**os.environ, "PATH": path}, input=typed,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
        )  # fmt: skip
        code, printed = done.returncode, done.stdout
    else:
        program, *words = shlex.split(command)
        assert program == "elasticctl"
        pipe = io.StringIO()
        with (
            contextlib.chdir(cwd),
            contextlib.redirect_stdout(pipe),
            contextlib.redirect_stderr(pipe),
            mock.patch.object(sys, "stdin", io.TextIOWrapper(io.BytesIO(typed.encode()))),
        ):
            code = main(words)
        printed = pipe.getvalue()
    assert code == 0, f"{command}\n{printed}"
    return printed


# The quickstart, typed by a test.


def settled(cluster: LocalCluster, lost: int) -> bool:
    """Whether a reader would go on: `lost` workers were lost and replaced, and all requests are carried out."""
    jobs = [ElasticJob.from_manifest(job) for job in cluster.list_jobs(None)]
    missed = [loss for job in jobs for loss in job.status.interruptions]
    return (
        len(missed) == lost
        and all(loss.recovered_at is not None for loss in missed)
        and all(trains_as_asked(job) for job in jobs if not job.status.phase.terminal)
    )


def trains_as_asked(job: ElasticJob) -> bool:
    """Whether a group of all the workers that its last change asks for has made a step."""
    newest = job.status.generations[-1:]
    return (
        job.status.observed_generation == job.generation
        and bool(newest)
        and newest[0].first_step_at is not None
        and len(newest[0].workers) == job.desired
    )


LOST = re.compile(r'kill -9 \$\(pgrep -n -f "(.*)"\)')


def kill_newest(pattern: str) -> None:
    """Do what `kill -9 $(pgrep -n -f PATTERN)` does, which is not everywhere."""
    found = {
        process.pid: process
        for process in psutil.process_iter(["cmdline", "create_time", "ppid"])
        if re.search(pattern, " ".join(process.info["cmdline"] or ()))
    }
    # What is forked here, and not started, has the command line of its parent for a moment.
    started = [process for process in found.values() if process.info["ppid"] not in found]
    max(started, key=lambda process: float(process.info["create_time"])).kill()


@pytest.mark.timeout(900)
def test_the_quickstart_works_as_written(
    home: Path, local_cluster: LocalCluster, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not UPDATES:
        request.getfixturevalue("forked_workers")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert local_cluster.list_jobs(None) == []  # which starts the supervisor
    checkout = home / "checkout"  # a path of its own, so that the page's `kill` can hit no other job
    shutil.copytree(ROOT / "examples", checkout / "examples")
    printed: dict[str, str] = {}
    outputs: list[list[str]] = []
    lost = 0
    for commands, sample in steps(page("quickstart.md")):
        for command in commands:
            if kills := LOST.fullmatch(command):
                kill_newest(kills[1].replace("$PWD", re.escape(str(checkout))))
                lost += 1
            else:  # on a busy machine, too, the long job is to last until it is cancelled
                printed[command] = type_in(command.replace("--epochs 200", "--epochs 100000"), checkout)
        if sample is not None:
            outputs.append(as_shown(printed[commands[-1]], checkout))
            assert UPDATES or agree(sample, printed[commands[-1]]), (sample, printed[commands[-1]])
        if commands[-1] != "elasticctl local down":
            wait_until(functools.partial(settled, local_cluster, lost))
    if UPDATES:
        (DOCS / "quickstart.md").write_text(with_outputs(page("quickstart.md"), outputs), "utf-8")
    assert lost == 1
    history = printed["elasticctl history digits"]
    assert re.search(r"\tKilled\t[0-9.m]+s\t\d+", history), history
    assert re.search(r"\t2 -> 3\t\w+\t[0-9.m]+s\t\d+", history), history
    assert "\t3 -> 2\t" in history
    assert printed['elasticctl wait digits; echo "exit code $?"'].endswith("\nexit code 4\n")
    assert printed['elasticctl wait train; echo "exit code $?"'].endswith("\nexit code 0\n")


# The commands of other pages, typed in their order. tests/cli/test_named_commands.py has what they submit, and whether
# those can be understood that are for clusters.

ELSEWHERE = re.compile(r"elasticctl (submit|install|doctor|dashboard|move|config)|--context|[A-Z]{2,}| N\b")
TYPED = {
    "goals.md": "simulate", "cli.md#JSON": "list history checkpoints", "sharing.md": "local scale quota",
    "dashboard.md": "secret", "cli.md#See what jobs do": "history", "cli.md#Change jobs": "prune",
}  # fmt: skip
"""Page, or page and heading -> the verbs that are typed: what they need is here, and they end."""
JQ: dict[str, Callable[[Any], Any]] = {
    """-r '.items[] | select(.status.phase == "Running") | .metadata.name'""": lambda found: [
        item["metadata"]["name"] for item in found["items"] if item["status"]["phase"] == "Running"
    ],
    ".totals.goodputShare": lambda found: found["totals"]["goodputShare"],
}
"""What the filters do that pages pipe JSON into."""


def typed(name: str) -> list[str]:
    """The commands of a page that this machine has everything for."""
    file, _, heading = name.partition("#")
    text = sections(page(file), 2)[heading] if heading else page(file)
    lines = re.findall(r"^    (elasticctl .*?)(?:  +#.*)?$", text, re.MULTILINE)
    ours = [line for line in lines if line.split()[1] in TYPED[name].split()]
    return [line for line in ours if not ELSEWHERE.search(re.sub(r"'.*'", "", line))]


@pytest.mark.timeout(900)
@pytest.mark.usefixtures("light_spares", "forked_workers")
def test_the_commands_of_other_pages_run(
    home: Path, local_cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert local_cluster.list_jobs(None) == []  # which starts the supervisor

    def status() -> JobStatus:
        return ElasticJob.from_manifest(local_cluster.get_job("default", "digits")).status

    train = "elasticctl submit -d --name digits --workers 2 --min-workers 1 --max-workers 4 examples/digits/train.py"
    type_in(f"{train} -- --epochs 100000 --step-delay-s 0.05", ROOT)
    wait_until(lambda: (status().checkpoint.committed or 0) > 3 and (status().progress.step or 0) > 20)
    printed, filtered = {}, {}
    for name, verbs in TYPED.items():
        commands = typed(name)
        assert {command.split()[1] for command in commands} == set(verbs.split())
        for command in commands:
            if " checkpoints rm " in command:  # a job that trains deletes old ones itself, between list and rm
                local_cluster.patch_job("default", "digits", {"spec": {"suspend": True}})
                wait_until(lambda: status().phase == "Suspended" and not status().active)
            plain, _, jq = command.partition(" | jq ")
            asked = "https://hooks.example.org/x\n" if " secret set " in command else ""
            printed[command] = type_in(plain if jq else command, home, asked)
            if jq:
                filtered[jq] = JQ[jq](json.loads(printed[command]))
            local_cluster.patch_job("default", "digits", {"spec": {"suspend": False}})
    assert filtered.keys() == JQ.keys()
    assert ["digits"] in filtered.values()
    assert any(isinstance(value, float) and 0 < value <= 1 for value in filtered.values())
    assert "digits" in printed["elasticctl simulate digits"] or "CPU rank" in printed["elasticctl simulate digits"]
    assert "vision" in printed["elasticctl quota list"]


# The training library's example.


def test_the_training_example_trains_and_resumes(tmp_path: Path) -> None:
    (script,) = (block for block in fences(page("training.md"), "python") if "__main__" in block)
    (tmp_path / "train.py").write_text(script)
    first = run_example(tmp_path / "train.py", ELASTICCTL_STORAGE="./state")
    assert first.count("epoch ") == 5
    assert "epoch 4: step 320, error 0.0" in first
    second = run_example(tmp_path / "train.py", ELASTICCTL_STORAGE="./state")
    assert "resumed from step 320, epoch 5" in second
    assert "step 384" not in second


STOPPING = """
import time
from elasticctl_train import SavePolicy, storage
from elasticctl_store.checkpoints.commits import read_commits

def stop_once_committed(step):
    while step not in [commit.step for commit in read_commits(storage.open("./state"))]:
        time.sleep(0.01)
    raise SystemExit
"""


def test_the_training_example_resumes_after_the_last_step_of_an_epoch(tmp_path: Path) -> None:
    """Then the loader has nothing left, and the code after it must not need what only a batch sets."""
    (script,) = (block for block in fences(page("training.md"), "python") if "__main__" in block)
    stop = f"                if run.steps_done == {2 * 4096 // 64}:\n{' ' * 20}stop_once_committed(run.steps_done)\n"
    last, report = "                run.step(loss=loss)\n", "            if run.is_main:\n"
    assert last + report in script
    (tmp_path / "train.py").write_text(script)
    saves = "optimizer=optimizer, save=SavePolicy(every_steps=128))"
    stopped = script.replace(last, last + stop).replace("optimizer=optimizer)", saves)
    (tmp_path / "stopped.py").write_text(STOPPING + stopped)
    first = run_example(tmp_path / "stopped.py", ELASTICCTL_STORAGE="./state")
    assert "epoch 0: " in first
    assert "epoch 1: " not in first
    second = run_example(tmp_path / "train.py", ELASTICCTL_STORAGE="./state")
    assert "resumed from step 128, epoch 1" in second
    assert "epoch 1: step 128, " in second
    assert "epoch 4: step 320, " in second


def test_the_sampler_example_goes_on_with_fewer_ranks(tmp_path: Path) -> None:
    (script,) = (block for block in fences(page("data.md"), "python") if "ElasticSampler(" in block)
    (tmp_path / "train.py").write_text(script)
    assert "epoch 3, loss 0.0" in run_example(tmp_path / "train.py", ranks=2)
    (tmp_path / "train.py").write_text(script.replace("sampler.epoch < 3", "sampler.epoch < 4"))
    second = run_example(tmp_path / "train.py")
    assert "rank 0 goes on at {'epoch': 3, 'position': 0, 'length': 1000" in second
    assert "epoch 4, loss 0.0" in second


def test_python_examples_are_python() -> None:
    blocks = [(path, block) for path in PAGES for block in fences(path.read_text("utf-8"), "python")]
    assert len(blocks) > 5
    for path, block in blocks:
        compile(block, str(path), "exec")


def main_of(script: str) -> list[str]:
    """The lines of `main` in a script of the example, without their indentation."""
    text = (ROOT / "examples" / "ddp" / script).read_text("utf-8")
    body = text[text.index("def main()") : text.index("if __name__")].splitlines()[1:]
    return [line.strip() for line in body if line.strip()]


def test_the_difference_shown_leads_from_the_plain_script_to_the_elastic_one() -> None:
    (shown,) = fences(page("training.md"), "diff")
    lines = [line for line in shown.splitlines() if line.strip()]
    assert [line[1:].strip() for line in lines if line[0] in " -"] == main_of("plain.py")
    assert [line[1:].strip() for line in lines if line[0] in " +"] == main_of("elastic.py")


# ElasticJob, field by field.


@pytest.mark.parametrize("name", ["elasticjob.md", "launcher.md"])
def test_example_manifests_are_valid(name: str) -> None:
    blocks = fences(page(name), "yaml")
    assert blocks
    for block in blocks:
        validation.load_manifest(block, name)


def spec_fields() -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Every field of the CRD's spec down to the pod template, with its schema."""
    schema = validation.crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]

    def walk(around: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
        for name, inner in around.get("properties", {}).items():
            yield name, inner
            if name != "template":
                yield from walk(inner)

    return walk(schema)


def rows(text: str) -> dict[str, str]:
    """First cell -> the whole row, for every word in backticks in the first cells of a page's tables."""
    found = {}
    for row in re.findall(r"^\|.*\|$", text, re.MULTILINE):
        for name in re.findall(r"`([^`]+)`", row.split("|")[1]):
            found[name] = row
    return found


def test_every_field_of_the_spec_is_described_with_its_default() -> None:
    described = rows(sections(page("elasticjob.md"), 2)["Spec"])
    for name, schema in spec_fields():
        if name == "Worker":
            continue
        assert name in described, f"docs/elasticjob.md does not describe spec field {name}"
        if "default" in schema:
            default = str(schema["default"])
            default = default.lower() if isinstance(schema["default"], bool) else default
            assert default in described[name].split("|")[2], f"the default of {name} is {default}"


def test_every_cause_is_described_and_whether_it_counts() -> None:
    described = rows(page("elasticjob.md"))
    for cause in Cause:
        assert described[cause.value].endswith("| **yes** |" if cause.counted else "| no |"), cause


def test_every_field_of_the_status_is_described() -> None:
    described = rows(sections(page("elasticjob.md"), 2)["Status"])
    assert [f.name for f in dataclasses.fields(JobStatus) if camel(f.name) not in described] == []


# The command line, verb by verb.


def test_the_page_of_verbs_is_what_help_prints() -> None:
    assert page("cli.md") == cli_page.generate(page("cli.md")), "FIX: make cli-page"


def test_every_option_of_the_launcher_is_described() -> None:
    described = {name.split()[0] for name in rows(page("launcher.md"))}
    with contextlib.redirect_stdout(io.StringIO()) as printed, pytest.raises(SystemExit):
        launcher.main(["--help"])
    options = set(re.findall(r"^ +(?:-\w, )?(--[a-z][a-z-]+)", printed.getvalue(), re.MULTILINE)) - {"--help"}
    assert options
    assert options <= described


# The map, and the site.


SOURCES = [
    path.relative_to(ROOT).as_posix()
    for folder in ("elasticctl", "controller", "training_lib", "job_templates", "tests", "benchmarks", "examples")
    for path in (ROOT / folder).rglob("*")
    if path.is_file()
]


CONTRACTS: Any = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["importlinter"]
PACKAGES = [
    package
    for contract in CONTRACTS["contracts"]
    if contract["type"] == "layers" and "containers" not in contract
    for layer in contract["layers"]
    for package in re.split(r"\s*[:|]\s*", layer)
]
"""What the import contracts put into layers, each above what it may import."""


def package_of(module: str) -> str:
    """The package of the contracts that a module lies in; the module itself, if it lies in none."""
    return next((package for package in PACKAGES if f"{module}.".startswith(f"{package}.")), module)


def test_the_map_shows_the_packages_of_the_contracts_and_what_they_import() -> None:
    graph = grimp.build_graph(*CONTRACTS["root_packages"], cache_dir=None)
    imported: dict[str, set[str]] = {package: set() for package in PACKAGES}
    for module in graph.modules:
        names = set(map(package_of, graph.find_modules_directly_imported_by(module)))
        imported.setdefault(package_of(module), set()).update(names & set(PACKAGES) - {package_of(module)})
    shown = {}
    for name, row in rows(sections(page("architecture.md"), 2)["The packages"]).items():
        cells = re.findall(r"`([^`]+)`", row.split("|")[3])
        shown[name] = {next((full for full in PACKAGES if full.split(".")[-1] == cell), cell) for cell in cells}
    assert shown == {package: imported[package] for package in PACKAGES}
    order = list(shown)
    assert [name for name, found in shown.items() if min(map(order.index, found), default=99) < order.index(name)] == []


def test_folders_that_the_map_names_exist() -> None:
    folders = {f"/{Path(source).parent.as_posix()}/" for source in SOURCES}
    named = re.findall(r"`([\w/]+/)`", page("architecture.md"))
    assert [name for name in named if not any(f"/{name}" in folder for folder in folders)] == []


def test_the_glossary_is_short() -> None:
    terms = re.findall(r"^\| ([^|]+?) \|", sections(page("index.md"), 2)["Glossary"], re.MULTILINE)[1:]
    assert terms == sorted(terms, key=str.lower)
    assert len(terms) <= 40


@pytest.mark.parametrize(("name", "most"), [("architecture.md", 2000), ("known-gaps.md", 1000)])
def test_pages_that_are_read_as_a_whole_are_short(name: str, most: int) -> None:
    assert len(page(name).split()) <= most


FENCED = re.compile(r"^ *```.*?^ *```$", re.MULTILINE | re.DOTALL)


def test_lines_of_pages_are_as_long_as_those_of_the_code() -> None:
    """Not tables, commands and pictures, whose lines cannot be broken."""
    long = {
        (path.name, line[:40])
        for path in (*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md")
        for line in FENCED.sub("", path.read_text("utf-8")).splitlines()
        if len(line) > 120 and not line.startswith(("|", "    ", "!["))
    }
    assert long == set()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    argv = [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(folder)]
    environ = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(argv, cwd=ROOT, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_the_site_has_every_page_and_loads_nothing_from_elsewhere(site: Path) -> None:
    for source in DOCS.glob("*.md"):
        html = (site / source.with_suffix(".html").name).read_text("utf-8")
        loaded = re.findall(r"<(?:script|img|iframe|link)\b[^>]*?(?:src|href)=[\"']?([^\"' >]+)", html)
        assert loaded
        assert [url for url in loaded if re.match(r"(https?:)?//", url)] == []


def links(path: Path) -> set[str]:
    """The files that a page links to, as it names them."""
    return {link for link in re.findall(r"\]\(([^)#]+)[^)]*\)", path.read_text("utf-8")) if "://" not in link}


def test_links_of_the_readme_lead_somewhere() -> None:
    assert [link for link in links(ROOT / "README.md") if not (ROOT / link).exists()] == []


def test_every_page_is_found_from_the_readme_and_from_the_first_page() -> None:
    pages = {path.name for path in DOCS.glob("*.md")} - {"index.md"}
    assert pages - {link.removeprefix("docs/") for link in links(ROOT / "README.md")} == set()
    assert pages - links(DOCS / "index.md") == set()


def test_pages_and_headings_that_code_names_are_there() -> None:
    """In messages, comments and CHANGELOG: `docs/training.md`, `docs/training.md#notice`."""
    named = re.compile(r"(?<![\w/.-])docs/([\w-]+\.md)(?:#([\w-]+))?")
    texts = [
        path.read_text("utf-8") for path in (ROOT / source for source in SOURCES) if path.suffix in (".py", ".yaml")
    ]
    texts += [(ROOT / name).read_text("utf-8") for name in ("CHANGELOG.md", "Makefile", "pyproject.toml")]
    found = {link for text in texts for link in named.findall(text)}
    headings = {path.name: anchors(path.read_text("utf-8")) for path in DOCS.glob("*.md")}
    assert {(name, heading) for name, heading in found if heading not in headings.get(name, ())} == set()


def anchors(text: str) -> set[str]:
    """Those of a page's headings, and of its top."""
    titles = re.findall(r"^#+ (.+)$", FENCED.sub("", text), flags=re.MULTILINE)
    return {"", *(re.sub(r"[^\w -]", "", title).strip().lower().replace(" ", "-") for title in titles)}


def test_every_path_of_the_checkout_that_a_page_names_is_there() -> None:
    """Files and folders of the repository, between backticks or in a command."""
    named = re.compile(
        r"(?<![\w/.~-])((?:examples|benchmarks|controller|docs|tests|training_lib|elasticctl)/[\w./-]+\w)"
    )
    missing = {
        (path.name, found)
        for path in (*PAGES, ROOT / "CONTRIBUTING.md")
        for found in named.findall(path.read_text("utf-8"))
        if not (ROOT / found).exists()
    }
    assert missing == set()
