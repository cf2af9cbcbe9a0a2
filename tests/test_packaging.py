"""What `pip install` brings: the client, the controller and the trainer each get what they import, and no more."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, distribution, packages_distributions
from pathlib import Path

import grimp
import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
OURS = (
    "elasticctl",
    "elasticctl_controller",
    "elasticctl_launcher",
    "elasticctl_protocol",
    "elasticctl_store",
    "elasticctl_train",
    "job_templates",
)
REQUIREMENTS = {
    "client": PROJECT["dependencies"],
    "controller": PROJECT["optional-dependencies"]["controller"],
    "trainer": [line for extra in ("train", "s3", "gcs") for line in PROJECT["optional-dependencies"][extra]],
}
FILES = {
    "controller": ROOT / "controller" / "requirements.txt",
    "trainer": ROOT / "training_lib" / "requirements.txt",
}
FOLDERS = {"client": ROOT, "controller": ROOT / "controller", "trainer": ROOT / "training_lib"}
LOCKS = {part: folder / "requirements.lock" for part, folder in FOLDERS.items()}
TORCH_LOCK = FOLDERS["trainer"] / "torch.lock"
"""Of its own, because the builder of the image chooses the build of PyTorch."""
PARTS = {
    "client": ("elasticctl", "elasticctl_controller.local"),
    "controller": ("elasticctl_controller.kube",),
    "trainer": ("elasticctl_launcher", "elasticctl_train", "elasticctl_store.storage"),
}
ON_DEMAND = {
    "client": {"boto3", "botocore", "google-auth", "google-crc32c", "kubernetes"},  # extras, for buckets and old logins
    "controller": {"kubernetes", "platformdirs"},  # a pod has neither an old login nor a user's folders
    "trainer": {"botocore", "lightning", "transformers", "urllib3"},  # what others bring: a script, boto3
}
"""What a part imports only where it is there, or only where it is used."""
PROGRAMS = {"client": set[str](), "controller": set[str](), "trainer": {"py-spy"}}
"""What a part does not import, but runs."""
IMPORT_ALL = """
import importlib, pkgutil, sys
of_extras = ("__main__", ".storage.s3", ".storage.gcs", ".hooks.lightning", ".hooks.transformers")
for name in sys.argv[1:]:
    module = importlib.import_module(name)
    for found in pkgutil.walk_packages(module.__path__, name + "."):
        if not found.name.endswith(of_extras):
            importlib.import_module(found.name)
"""


def names(requirements: Iterable[str]) -> set[str]:
    """The distributions that requirements name."""
    return {re.split(r"[\[<>=,; ]", line, maxsplit=1)[0].lower() for line in requirements}


@pytest.mark.parametrize("part", FILES)
def test_an_image_installs_what_the_extras_say(part: str) -> None:
    lines = FILES[part].read_text("utf-8").splitlines()
    assert [line for line in lines if line and not line.startswith("#")] == REQUIREMENTS[part]


def locked(part: str) -> dict[str, str]:
    """What an image installs, by name: its version. Fails for a line that pins no version by hashes."""
    files = [LOCKS[part], *([TORCH_LOCK] if part == "trainer" else [])]
    text = "".join(re.sub(r"^ *#.*\n", "", file.read_text("utf-8"), flags=re.MULTILINE) for file in files)
    text = text.replace("\\\n", " ")
    found = {}
    for line in text.splitlines():
        pin = re.fullmatch(r"([\w.-]+)==([\w.]+)(?: ; [^#]+?)?(?: +--hash=sha256:[0-9a-f]{64})+ *", line)
        assert pin is not None, f"not pinned by hashes: {line}"
        found[pin[1]] = pin[2]
    return found


@pytest.mark.parametrize("part", LOCKS)
def test_an_image_installs_what_is_asked_for_and_no_other_file(part: str) -> None:
    found = locked(part)
    for requirement in map(Requirement, REQUIREMENTS[part]):
        assert requirement.specifier.contains(found[requirement.name]), requirement
    recipe = (FOLDERS[part] / "Dockerfile").read_text("utf-8")
    assert "pip install --no-cache-dir --require-hashes -r /tmp/requirements.lock" in recipe
    installs = [line for line in recipe.splitlines() if "pip install" in line and not line.startswith("#")]
    assert [line for line in installs if not re.search("--require-hashes|--no-deps", line)] == []


@pytest.fixture(scope="module")
def imports() -> grimp.ImportGraph:
    return grimp.build_graph(*OURS, include_external_packages=True)


@pytest.mark.parametrize("part", PARTS)
def test_what_is_required_is_what_is_imported(part: str, imports: grimp.ImportGraph) -> None:
    modules = set().union(*(imports.find_upstream_modules(name, as_package=True) for name in PARTS[part]))
    outside = {name.partition(".")[0] for name in modules if not name.startswith(OURS)} - sys.stdlib_module_names
    distributions = packages_distributions()
    found = {"google-auth"} if "google" in outside else set()
    for name in outside - {"google"}:
        found.add(distributions[name][0].lower().replace("_", "-"))
    assert found - ON_DEMAND[part] == names(REQUIREMENTS[part]) - ON_DEMAND[part] - PROGRAMS[part]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    pip(None, "wheel", "--no-deps", "--wheel-dir", str(folder), str(ROOT))
    (found,) = folder.glob("*.whl")
    return found


def pip(python: Path | None, *args: str) -> None:
    """Run pip, for another environment's Python or this one's."""
    where = [] if python is None else ["--python", str(python)]
    subprocess.run([sys.executable, "-m", "pip", "--quiet", *where, *args], check=True, timeout=500)


def environment(folder: Path) -> Path:
    """A clean virtual environment; returns its Python."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder / "venv")], check=True)
    return folder / "venv" / "bin" / "python"


def lend_torch(python: Path) -> None:
    """Link PyTorch and what it requires into an environment: to install it would take a minute."""
    (target,) = (python.parents[1] / "lib").glob("python*/site-packages")
    waiting, lent = ["torch"], set[str]()
    while waiting:
        name = waiting.pop()
        with suppress(PackageNotFoundError):  # required on another platform
            found = distribution(name)
            for top in {file.parts[0] for file in found.files or ()} - {"..", "__pycache__"}:
                if not (target / top).exists():
                    (target / top).symlink_to(Path(str(found.locate_file(top))))
            required = names(line for line in found.requires or () if "extra ==" not in line)
            waiting += required - lent
            lent |= required


def run(python: Path, program: str, *args: str, check: bool = True, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run a program of an environment, away from the checkout."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    argv = [str(python.with_name(program)), *args]
    cwd = python.parents[2]
    done = subprocess.run(
        argv, env=inherited | environ, cwd=cwd, capture_output=True, text=True, timeout=240, check=False
    )
    assert not check or done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done


def installed(python: Path, modules: Sequence[str]) -> set[str]:
    """Which of these modules an environment has."""
    code = "import importlib.util as i, sys; print(*(m for m in sys.argv[1:] if i.find_spec(m)))"
    return set(run(python, "python", "-c", code, *modules).stdout.split())


@pytest.mark.packaging
@pytest.mark.timeout(1200)
def test_the_client_alone(wheel: Path, tmp_path: Path, home: Path) -> None:
    python = environment(tmp_path)
    pip(python, "install", str(wheel))
    assert not installed(python, ["torch", "numpy", "boto3", "google", "kubernetes"])
    run(python, "python", "-c", IMPORT_ALL, "elasticctl", "elasticctl_store", "elasticctl_controller.local")
    assert run(python, "elasticctl", "version").stdout.startswith("elasticctl ")
    (tmp_path / "train.py").touch()
    manifest = run(python, "elasticctl", "submit", "train.py", "--workers", "2", "--dry-run").stdout
    assert "kind: ElasticJob" in manifest
    run(python, "elasticctl", "list")  # starts the local supervisor
    assert run(python, "elasticctl", "local", "status").returncode == 0


@pytest.mark.packaging
@pytest.mark.timeout(1200)
def test_the_dashboard_of_many_alone(wheel: Path, tmp_path: Path) -> None:
    """What its image installs is enough: away from a pod it says what it misses, and it has imported all by then."""
    python = environment(tmp_path)
    pip(python, "install", "--require-hashes", "-r", str(LOCKS["client"]))
    pip(python, "install", "--no-deps", str(wheel))
    refused = run(python, "python", "-m", "elasticctl.cli", "dashboard", "--in-cluster", check=False)
    assert (refused.returncode, "--in-cluster is for a pod" in refused.stderr) == (2, True), refused.stderr


@pytest.mark.packaging
@pytest.mark.timeout(1200)
def test_the_controller_alone(wheel: Path, tmp_path: Path) -> None:
    python = environment(tmp_path)
    pip(python, "install", "--require-hashes", "-r", str(LOCKS["controller"]))
    pip(python, "install", "--no-deps", str(wheel))
    unwanted = names(REQUIREMENTS["client"]) - names(REQUIREMENTS["controller"]) | {"torch", "numpy", "boto3"}
    assert not installed(python, sorted(unwanted))
    parts = [f"elasticctl_controller.{part}" for part in ("core", "loop", "rendezvous", "kube")]
    run(python, "python", "-c", IMPORT_ALL, *parts)
    assert "--rendezvous-url" in run(python, "python", "-m", "elasticctl_controller.kube.manager", "--help").stdout


@pytest.mark.packaging
@pytest.mark.timeout(900)
def test_the_trainer_alone(wheel: Path, tmp_path: Path) -> None:
    python = environment(tmp_path)
    lend_torch(python)
    pip(python, "install", "--require-hashes", "-r", str(LOCKS["trainer"]))
    pip(python, "install", "--no-deps", str(wheel))
    assert not installed(python, ["typer", "rich", "aiohttp", "yaml", "jsonschema", "psutil", "pathspec", "kubernetes"])
    run(python, "python", "-c", IMPORT_ALL, "elasticctl_launcher", "elasticctl_train", "elasticctl_store")
    run(python, "python", "-c", "import elasticctl_store.storage.s3, elasticctl_store.storage.gcs")
    torchrun = (
        "from importlib.metadata import entry_points; [e.load() for e in entry_points(group='torchrun.handlers')]"
    )
    run(python, "python", "-c", torchrun)
    assert "usage:" in run(python, "elasticctl-launch", "--help").stdout
    train = [str(ROOT / "tests" / "on_cluster" / "train.py"), "--step-delay-s", "0"]
    state = {"ELASTICCTL_STORAGE": (tmp_path / "state").as_uri()}
    first = run(python, "python", *train, "--epochs", "1", **state)
    assert "resumed" not in first.stderr
    assert "resumed from step" in run(python, "python", *train, "--epochs", "2", **state).stderr
    refused = run(python, "elasticctl", "version", check=False)
    assert (refused.returncode, "FIX: pip install elasticctl" in refused.stderr) == (1, True), refused.stderr
