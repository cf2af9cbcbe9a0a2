"""Names in backticks, in pages and docstrings, are names of the code: modules, files, classes, fields, flags.

What counts as a name has a form that prose lacks: a dot, an underscore, an inner capital, a call's parentheses, a
leading `--`, or a file's ending. It has to occur in the code outside of comments and docstrings, where a name that was
changed or removed no longer does; and what is qualified, as in `Class.member` or `package.module.name`, must exist.
"""

from __future__ import annotations

import ast
import builtins
import functools
import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from elasticctl_protocol.codec import camel

ROOT = Path(__file__).parents[1]
PAGES = [*(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")), *sorted(ROOT.glob("docs/*.md"))]
PRODUCT = ("elasticctl", "controller", "training_lib", "job_templates")
FOLDERS = (*PRODUCT, "benchmarks", "examples", "tests", "docs", ".ci")
PATHS = [
    path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*")) if "__pycache__" not in path.parts
] + [path for path in ROOT.iterdir() if path.is_file()]
MODULES = [path for path in PATHS if path.suffix == ".py" and path.relative_to(ROOT).parts[0] in PRODUCT]
OF_WORDS = (".yaml", ".j2", ".toml", ".js", ".json", ".html")
"""Endings of files whose every word is known: manifests, templates, schemas, the scripts of the dashboard."""
OURS = ("elasticctl", "job_templates", "benchmarks", "examples")
CLI_PAGE = ROOT / "docs" / "cli.md"
"""It lists every option, as `--help` does."""

OTHERS: Mapping[str, str] = {
    "torch and other libraries": """dcp async_take Accelerator Engine add_param_group all_to_all get_extra_state no_sync
        on_save_checkpoint load_from_checkpoint parallelize_module purge_step pytorch_lightning reduce_scatter
        register_post_accumulate_grad_hook test_file_system_checkpoint_cpu.py update_parameters TORCH_FR_BUFFER_SIZE""",
    "Kubernetes and what runs on it": """ErrImagePull GenericWorkload ImagePullBackOff hostNetwork disablePodIMDS
        integrations.externalFrameworks manageJobsWithoutQueueName --cascade --force-conflicts --server-side
        --taint-node""",
    "other programs": """--client-secret-file --cookie-secret --host-discovery-script --no-deps --oidc-issuer-url
        --signal --strict core.excludesFile pandas""",
    "files and options that are examples": """--epochs --lr My_Train.py config.yaml elasticctl.toml entraîné.py
        gke_PROJECT_ZONE_train train.sh training_job.yaml --resume""",
}
"""Names that are not ours, by what they belong to."""
NOT_OURS = {name for names in OTHERS.values() for name in names.split()}
INSTANCES = {"run": "Run", "job": "Job", "checkpoints": "Checkpointer"}
"""What pages call an object -> its class."""
OTHER_TOOLS = re.compile(r"\| (?:torchrun|Slurm|in SkyPilot's YAML|TrainingJob)\b.*\n(?:\|.*\n)*")
"""A table whose first column is what another tool calls it."""


@dataclass
class Code:
    """What the code defines and mentions."""

    words: set[str] = field(default_factory=set)
    """Every word outside of docstrings and comments."""
    members: defaultdict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    """Class -> the names that its body defines or its methods assign; the classes of one name together."""
    bases: defaultdict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    endings: defaultdict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    """A module's dotted name, or the end of it -> the names that the module binds."""
    foreign: set[str] = field(default_factory=set)
    """Names that imports of other packages bind."""


DOCSTRING = re.compile(r'^ *r?"""(.*?)"""', re.MULTILINE | re.DOTALL)
"""A text that begins a line: it says what something is. Texts that the code uses begin after something else."""
COMMENT = re.compile(r"(?:^|  )#.*")


def dotted(path: Path) -> str:
    """The name by which a module is imported."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts[1:] if parts[0] in ("controller", "training_lib") else parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def code() -> Code:
    found = Code()
    for path in PATHS:
        folder = path.relative_to(ROOT).parts[0]
        if path.suffix == ".py" and folder == "tests":
            found.words |= set(re.findall(r"^ *def (\w+)", path.read_text("utf-8"), flags=re.MULTILINE))
        elif path.suffix == ".py":
            found.words.add(path.stem)
            found.words |= words_of(DOCSTRING.sub("", path.read_text("utf-8")))
        elif path.suffix in OF_WORDS and "images" not in path.parts:
            found.words |= words_of(path.read_text("utf-8"))
    found.words |= words_of(CLI_PAGE.read_text("utf-8"))
    for path in MODULES:
        add_module(found, dotted(path).split("."), path.read_text("utf-8"))
    for members in found.members.values():
        found.words |= set(map(camel, members))
    return found


def words_of(text: str) -> set[str]:
    return set(re.findall(r"--[a-z][a-z0-9-]+|\w+", COMMENT.sub("", text)))


def add_module(found: Code, parts: Sequence[str], source: str) -> None:
    tree = ast.parse(source)
    bound = {name for statement in tree.body for name in bound_by(statement)}
    for start in range(len(parts)):
        found.endings[".".join(parts[start:])] |= bound
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            assigned = re.findall(r"\bself\.(\w+)", ast.get_source_segment(source, node) or "")
            found.members[node.name] |= {name for inner in node.body for name in bound_by(inner)} | set(assigned)
            found.bases[node.name] |= {ast.unparse(base) for base in node.bases}
    imported = re.findall(r"^ *(?:from ([\w.]+) )?import (.+)$", source, flags=re.MULTILINE)
    for module, names in imported:
        if not (module or names).startswith(OURS):
            found.foreign |= {name.split(" as ")[-1].split(".")[0] for name in re.findall(r"[\w.]+(?: as \w+)?", names)}


def bound_by(statement: ast.stmt) -> Iterator[str]:
    """The names that a statement of a module or of a class binds, also below an `if`."""
    match statement:
        case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
            yield name
        case ast.AnnAssign(target=ast.Name(id=name)):
            yield name
        case ast.Assign(targets=targets):
            yield from (name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name))
        case ast.Import(names=names) | ast.ImportFrom(names=names):
            yield from (alias.asname or alias.name for alias in names)
        case ast.If(body=body, orelse=orelse):
            yield from (name for inner in (*body, *orelse) for name in bound_by(inner))


# What is wrong with a span.

FILE = re.compile(r"[\w./*<>-]*\w\.(?:py|md|j2|toml|yaml|svg|txt)(?:::\w+)?")
FLAG = re.compile(r"--[a-z][a-z0-9-]+")
NAME = re.compile(r"[A-Za-z_]\w*(?:\.\w+)*(?:\(.*\))?")
LOOKS_LIKE_CODE = re.compile(r"\w_\w|\.|\(|[a-z][A-Z]")
VARIABLE = re.compile(r"\bELASTICCTL_[A-Z_]*[A-Z]\b")


@functools.cache
def wrong(span: str) -> str | None:
    """The part of a span that looks like a name of ours and is none."""
    if not span or span in NOT_OURS:
        return None
    if FILE.fullmatch(span):
        return None if is_file(span) else span
    if span.startswith("--"):
        return next((flag for flag in FLAG.findall(span) if flag not in code().words and flag not in NOT_OURS), None)
    if variables := VARIABLE.findall(span):
        return next((name for name in variables if name not in code().words), None)
    if NAME.fullmatch(span) and LOOKS_LIKE_CODE.search(span):
        return None if is_name(re.sub(r"\(.*", "", span)) else span
    return None


def is_file(name: str) -> bool:
    path, _, test = name.partition("::")
    pattern = re.compile("(?:.*/)?" + re.escape(path.removeprefix("./")).replace(r"\*", "[^/]*") + r"\Z")
    found = [each for each in PATHS if pattern.match(each.relative_to(ROOT).as_posix())]
    return any(not test or f"def {test}(" in each.read_text("utf-8") for each in found)


def is_name(name: str) -> bool:
    known = code()
    *owners, last = name.split(".")
    if last.endswith("_") or NOT_OURS & {*owners, last}:
        return True
    if not owners:
        return last in known.words or hasattr(builtins, last)
    if owners[0] in known.foreign or owners[0] in sys.stdlib_module_names or name in known.endings:
        return True
    if owners[0] in ("spec", "status", "metadata", "replicaSpecs"):  # of a manifest
        return known.words.issuperset({*owners, last})
    owner = INSTANCES.get(owners[-1], owners[-1])
    if owner in known.members:
        return last in inherited(owner)
    if ".".join(owners) in known.endings:
        return last in known.endings[".".join(owners)]
    return known.words.issuperset({*owners, last})


def inherited(name: str) -> set[str]:
    """The members of a class and of its bases; every known word if it has a base that is not ours."""
    known = code()
    found = set(known.members[name])
    for base in known.bases[name]:
        ours = base.split("[")[0].split(".")[-1]
        found |= inherited(ours) if ours in known.members and ours != name else known.words
    return found


# Where spans are.


def spans(text: str) -> list[str]:
    return [" ".join(span.split()) for span in re.findall(r"(?<!`)`([^`]+)`(?!`)", text)]


def spans_of_page(text: str) -> list[str]:
    """Those of a page's sentences and tables, not of its code blocks; constants of ours are in no page."""
    prose = re.sub(r"^ *```.*?^ *```$", "", text, flags=re.MULTILINE | re.DOTALL)
    prose = OTHER_TOOLS.sub(lambda table: re.sub(r"^\|.*? \|", "|", table[0], flags=re.MULTILINE), prose)
    found = spans(re.sub(r"^    .*$", "", prose, flags=re.MULTILINE).replace("\\|", "|"))
    return [span for span in found if VARIABLE.search(span) or not span.isupper()]


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_names_in_pages_exist(page: Path) -> None:
    assert [span for span in spans_of_page(page.read_text("utf-8")) if wrong(span)] == []


def test_names_in_docstrings_exist() -> None:
    found = {
        (path.relative_to(ROOT).as_posix(), span)
        for path in MODULES
        for text in DOCSTRING.findall(path.read_text("utf-8"))
        for span in spans(text)
        if wrong(span)
    }
    assert sorted(found) == []


NO_NAMES = (
    "Run.no_such_attribute",
    "elasticctl_train.no_such_module",
    "core/no_such_file.py",
    "--no-such-option",
    "noSuch",
)


@pytest.mark.parametrize("name", NO_NAMES)
def test_a_name_that_does_not_exist_is_found(name: str) -> None:
    assert wrong(name) == name
    assert spans_of_page(f"A sentence with `{name}`.\n") == [name]
