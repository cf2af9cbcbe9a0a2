"""Every command that a page, a message or a help text names is one that can be typed: its verb and options exist."""

from __future__ import annotations

import ast
import functools
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.main import get_command, get_group

from elasticctl.cli.main import app
from tests.support.cli import Run, with_programs

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
FOLDERS = ("elasticctl", "controller", "training_lib", "examples", "job_templates")
SOURCES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".js"))
BEGIN = re.compile(r"(?<![\w/.-])(?<!from )elasticctl(?= +[a-z])")
INNER = re.compile(r"\$\((.*?)\)")
END = re.compile(r"`|\n|  |;|#|\)|(?<!\S)[|<>&]|\belasticctl(?= )|\Z")
"""Where a command ends in a text: at a quote, a gap, what a shell gives a meaning to, or at the next command."""
PLACEHOLDER = re.compile(r"\[?-?-?[A-Z_|…]+[\].,…]*|.*[\[…].*")
"""JOB, [OPTIONS], STEP…: a line with one is a form, and not to be typed as it is."""
VERBS = get_group(app).list_commands(typer.Context(get_group(app)))


def commands(text: str) -> Iterator[str]:
    """What stands behind `elasticctl` wherever a text names a command."""
    for part in (INNER.sub("1", text), *INNER.findall(text)):
        for found in BEGIN.finditer(part):
            end = END.search(part, found.end())
            assert end is not None
            yield part[found.end() : end.start()].strip(" .,:")


def blocks(page: str) -> Iterator[str]:
    """The lines of a page that are indented or fenced, as written but for their indentation; `\\` joins two."""
    fenced = False
    for line in page.replace("\\\n", "").splitlines():
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif fenced or line.startswith("    "):
            yield line.strip()


def spans(page: str) -> Iterator[str]:
    """What stands between backticks in a page's sentences, each on one line; not what is yet to be completed."""
    prose = re.sub(r"^ *```.*?^ *```$", "", page, flags=re.MULTILINE | re.DOTALL)
    for unfinished, found in re.findall(r"(completing )?`([^`]+)`", prose):
        if not unfinished:
            yield " ".join(found.split())


@functools.cache
def root() -> Any:
    """All of the command line."""
    return get_command(app)


def leaf(words: list[str]) -> tuple[typer.Context, list[str]]:
    """The command that `words` name, in a context of its own, and the words that are left for it."""
    command = root()
    context = command.make_context("elasticctl", [], resilient_parsing=True)
    while words and hasattr(command, "resolve_command"):
        context.resilient_parsing = False  # or a verb that is not there would be let pass
        name, command, words = command.resolve_command(context, list(words))
        context = typer.Context(command, parent=context, info_name=name)
    return context, words


def unknown_options(words: list[str]) -> list[str]:
    """The options among `words` that their verb does not have."""
    context, rest = leaf(words)
    ours = rest[: rest.index("--")] if "--" in rest else rest
    params = context.command.get_params(context)
    known = {"--debug", *(option for param in params for option in (*param.opts, *param.secondary_opts))}
    return [word for word in ours if word.startswith("-") and word.partition("=")[0] not in known]


def wrong(command: str) -> str | None:
    """What is wrong with a command as it is named; None: nothing."""
    try:
        unknown = unknown_options(re.sub(r"\$\{?\w+\}?", "x", command).split())
    except typer.TyperException as e:
        return f"elasticctl {command}: {e.format_message()}"
    return f"elasticctl {command}: no such option: {', '.join(unknown)}" if unknown else None


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_pages_name_verbs_and_options_that_exist(page: Path) -> None:
    text = page.read_text("utf-8")
    named = [command for part in (*blocks(text), *spans(text)) for command in commands(part)]
    assert [problem for command in named if command != "VERB" and (problem := wrong(command))] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_command_lines_of_pages_are_understood(page: Path) -> None:
    """Those that a reader copies: with all that they need, and values that their options take."""
    for line in blocks(page.read_text("utf-8")):
        for command in commands(line):
            words = shlex.split(re.sub(r"\$\{?\w+\}?", "x", command), comments=True)
            if any(PLACEHOLDER.fullmatch(word) for word in words) or "--help" in words:
                continue
            context, rest = leaf(words)
            context.command.make_context(context.info_name, rest, parent=context.parent)


def submits(page: Path) -> Iterator[list[str]]:
    """The words of each submit of a page that can be typed as it is."""
    for line in blocks(page.read_text("utf-8")):
        for command in commands(line):
            words = shlex.split(re.sub(r"\$\{?\w+\}?", "x", command), comments=True)
            if words[0] == "submit" and not any(PLACEHOLDER.fullmatch(word) for word in words):
                yield words


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, private_home: Path, run: Run) -> Path:
    """Where a reader sits: scripts, a template, and contexts of the names that pages use."""
    monkeypatch.chdir(tmp_path)
    with_programs(tmp_path / "bin", monkeypatch, "bash", "mpirun")
    for script in ("train.py", "experiments/train.py", "examples/digits/train.py", "pkg/train.py"):
        (tmp_path / script).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / script).write_text("print('hello')\n")
    (tmp_path / "state").mkdir()
    kept = ("--storage", (tmp_path / "state").as_uri(), "--image", "team/trainer:1")
    for name in ("aws", "gcp", "eks", "gke", "prod", "x"):  # $CLUSTER is x
        provider = "gcp" if name in ("gcp", "gke") else "aws"
        run("config", "set-context", name, "--provider", provider, "--gpu-type", "t4", *kept)
    run("template", "new", "mine")
    return tmp_path


@pytest.mark.parametrize("page", [page for page in PAGES if list(submits(page))], ids=lambda path: path.name)
def test_every_submit_of_a_page_makes_a_job(page: Path, desk: Path, run: Run) -> None:
    """As a dry run, which stops short of creating it; in a cloud's context on the pages about clusters."""
    run("config", "use-context", "prod" if page.stem in ("sharing", "storage") else "local")
    for words in submits(page):
        dry = [word for word in words if word != "--dry-run"]
        if "--save" in dry:  # the desk has a manifest of that name, which is not replaced
            (desk / dry[dry.index("--save") + 1]).unlink(missing_ok=True)
        done = run("submit", "--dry-run", *dry[1:])
        assert done.code == 0, (words, done.err)
        assert "kind: ElasticJob" in done.out
        (desk / "job.yaml").write_text(done.out)


def texts(source: str) -> Iterator[str]:
    """The texts of a Python module; what is put into one is an x."""
    inside = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.JoinedStr):
            inside |= {id(part) for part in node.values}
            yield "".join(part.value if isinstance(part, ast.Constant) else "x" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inside:
            yield node.value


def named_in(path: Path) -> Iterator[str]:
    """The commands that a source file's texts name; in a sentence without quotes, those that begin with a verb."""
    source = path.read_text("utf-8")
    for text in texts(source) if path.suffix == ".py" else [source]:
        quoted = {command for span in re.findall(r"`([^`]+)`", text) for command in commands(" ".join(span.split()))}
        yield from quoted
        yield from (each for each in commands(text) if each not in quoted and each.split()[0] in VERBS)


def test_messages_and_help_name_verbs_and_options_that_exist() -> None:
    named = {command: path.name for path in SOURCES for command in named_in(path)}
    assert len(named) > 50
    problems = {f"{path}: {problem}" for command, path in named.items() if (problem := wrong(command))}
    assert problems == set()
