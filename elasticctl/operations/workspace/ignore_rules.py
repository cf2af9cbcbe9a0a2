"""Which files of a workspace are left out: the rules of .gitignore and .elasticctlignore.

In order of precedence: the defaults below; the `.gitignore` of each folder, from the top of the git repository on; the
`.elasticctlignore` of each folder. The last rule that matches decides, and `!pattern` includes a file again. As in git,
nothing can be included again below a folder that is left out.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

from pathspec import GitIgnoreSpec, Pattern

from elasticctl.api.errors import UsageError
from elasticctl.api.text import quote

GIT_RULES, OWN_RULES = ".gitignore", ".elasticctlignore"
DEFAULTS = """
.git
.hg/
.svn/
.jj/
__pycache__/
*.py[cod]
.venv/
.tox/
.nox/
node_modules/
*.egg-info/
.mypy_cache/
.pytest_cache/
.ruff_cache/
.ipynb_checkpoints/
.DS_Store
*.swp
.env
.env.*
.netrc
*.pem
*.ckpt
*.pt
*.pth
*.safetensors
wandb/
mlruns/
lightning_logs/
"""
"""Versions, caches, environments; secrets, which have a way of their own; checkpoints, and the records of runs."""
_OF_AN_ENVIRONMENT = "pyvenv.cfg"
_FOLDER = "ps_d"
"""By which pathspec marks where a rule has matched a folder."""
_NAMES_ONE = re.compile(r"!(?:[^\\*?\[]|\\.)*[^/\\*?\[]\s*")
"""A line that includes a path by its name, without wildcards."""


@dataclass(frozen=True, slots=True)
class _Layer:
    """The rules of one file, for paths below `base`."""

    base: Path
    spec: GitIgnoreSpec
    named: GitIgnoreSpec = field(default_factory=lambda: GitIgnoreSpec([]))
    """The rules that include a path by its name, without their `!`."""

    def names(self, path: Path) -> bool:
        """True if a line includes exactly this file."""
        relative = os.fsencode(path.relative_to(self.base).as_posix()).decode("utf-8", "replace")
        return any(_means(rule, relative, False) for rule in self.named.patterns)

    def says(self, path: Path, is_folder: bool) -> bool | None:
        """True: it is left out; False: it is included again; None: no rule matches."""
        relative = path.relative_to(self.base).as_posix()
        text = os.fsencode(relative).decode("utf-8", "replace")  # a name that is no text can be left out too
        return next((rule.include for rule in reversed(self.spec.patterns) if _means(rule, text, is_folder)), None)


def _means(rule: Pattern, path: str, is_folder: bool) -> bool:
    """True if a rule matches the path itself, not just a folder above it, which was decided before."""
    found = rule.match_file(f"{path}/" if is_folder else path)
    if found is None:
        return False
    end_of_folder = found.match.end(_FOLDER) if _FOLDER in found.match.re.groupindex else -1
    if end_of_folder >= 0:
        return bool(end_of_folder == len(path) + 1)
    return not is_folder or rule.match_file(path) is not None  # `a/**` is all in the folder, and not the folder


@dataclass(frozen=True, slots=True)
class IgnoreRules:
    """The rules that apply in one folder."""

    git: tuple[_Layer, ...]
    own: tuple[_Layer, ...]

    def within(self, folder: Path) -> IgnoreRules:
        """The rules in a folder below, including those of its own files. Raises UsageError."""
        git, own = _read(folder, GIT_RULES), _read(folder, OWN_RULES)
        return replace(self, git=(*self.git, *git), own=(*self.own, *own)) if git or own else self

    def leaves_out(self, path: Path, is_folder: bool) -> bool:
        """True if it is left out."""
        said = [layer.says(path, is_folder) for layer in (*self.git, *self.own)]
        decided = [one for one in said if one is not None]
        return bool(decided and decided[-1])

    def includes_by_name(self, path: Path) -> bool:
        """True if a line of .elasticctlignore without wildcards includes this file, whatever it contains."""
        return any(layer.names(path) for layer in self.own)


def rules_above(folder: Path) -> IgnoreRules:
    """The rules that apply to a folder before its own: the defaults, and those of its repository."""
    rules = IgnoreRules((_Layer(folder, GitIgnoreSpec.from_lines(DEFAULTS.splitlines())),), ())
    for above in reversed(_parents_in_repository(folder)):
        rules = rules.within(above)
    return rules


def is_environment(folder: Path) -> bool:
    """True for a Python environment of any name."""
    return (folder / _OF_AN_ENVIRONMENT).is_file()


def _parents_in_repository(folder: Path) -> list[Path]:
    """The folders above, nearest first, up to the top of the git repository; none outside one."""
    if (folder / ".git").exists():
        return []
    above = list(folder.parents)
    top = next((index for index, parent in enumerate(above) if (parent / ".git").exists()), None)
    return [] if top is None else above[: top + 1]


def _read(folder: Path, name: str) -> Iterable[_Layer]:
    path = folder / name
    try:
        text = path.read_text("utf-8-sig", "replace")
    except (FileNotFoundError, IsADirectoryError):
        return ()
    except OSError as e:
        raise UsageError(f"cannot read {path}: {e.strerror}") from e
    named = [line[1:] for line in text.splitlines() if _NAMES_ONE.fullmatch(line)]
    try:
        return (_Layer(folder, GitIgnoreSpec.from_lines(text.splitlines()), GitIgnoreSpec.from_lines(named)),)
    except ValueError as e:
        raise UsageError(f"{path}: not a rule of gitignore: {quote(str(e))}") from e
