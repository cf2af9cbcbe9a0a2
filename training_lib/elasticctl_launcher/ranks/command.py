"""Commands that run Python, as far as a warm spare has to understand them."""

from __future__ import annotations

import ast
import importlib.util
import os
import shutil
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

MAX_SOURCE_BYTES = 1 << 20
PLAIN_FLAGS = frozenset("bBdEIOPqRsSuv")
"""One-letter flags of the interpreter that do not change which program it runs."""
FLAGS_WITH_VALUE = frozenset("WX")


@dataclass(frozen=True, slots=True)
class PythonCommand:
    """A command that a spare can run: the interpreter, its flags, and the arguments from the script on."""

    interpreter: str
    argv: tuple[str, ...]
    flags: tuple[str, ...] = ()

    @classmethod
    def parse(cls, command: Sequence[str]) -> PythonCommand | None:
        """Parse `python [FLAGS] SCRIPT ...` or `python [FLAGS] -m MODULE ...`; return None for anything else."""
        if not os.path.basename(command[0]).startswith("python"):
            return None
        interpreter = shutil.which(command[0])
        rest = list(command[1:])
        flags: list[str] = []
        while rest and (count := _words_of_flag(rest[0])):
            flags += rest[:count]
            del rest[:count]
        is_script = bool(rest) and not rest[0].startswith("-")
        is_module = len(rest) > 1 and rest[0] == "-m"
        return cls(interpreter, tuple(rest), tuple(flags)) if interpreter and (is_script or is_module) else None


def _words_of_flag(word: str) -> int:
    """How many words the interpreter's flags in `word` take: 2 for `-X dev`, 0 if one of them is unknown."""
    if word == "--check-hash-based-pycs":
        return 2
    if len(word) < 2 or word[0] != "-":
        return 0
    for at, letter in enumerate(word[1:], 2):
        if letter in FLAGS_WITH_VALUE:
            return 1 if word[at:] else 2
        if letter not in PLAIN_FLAGS:
            return 0
    return 1


def installed_imports(script: str) -> list[str]:
    """Return the installed modules that `script` imports at its top level, in order; empty if it cannot be parsed."""
    path = Path(script)
    try:
        if path.stat().st_size > MAX_SOURCE_BYTES:
            return []
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return []
    modules: list[str] = []
    for statement in tree.body:
        if isinstance(statement, ast.Import):
            modules += [alias.name for alias in statement.names]
        elif isinstance(statement, ast.ImportFrom) and statement.module and not statement.level:
            modules.append(statement.module)
    return [module for module in dict.fromkeys(modules) if is_installed(module.split(".")[0])]


def is_installed(package: str) -> bool:
    """True for a package in this interpreter's library folders; False for one elsewhere, as in the working folder."""
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return False
    if spec is None:
        return False
    places = [spec.origin or "", *(spec.submodule_search_locations or [])]
    libraries = tuple(os.path.join(sysconfig.get_path(name), "") for name in ("stdlib", "purelib", "platlib"))
    return any(place.startswith(libraries) for place in places)
