"""Which modules a script will import, read from its source: what a warm spare can import before it is needed.

Only installed packages count. A module that lies beside the script is the user's own code, and importing it may do
things (read a file, open a port) that belong to a run, not to a process in waiting.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import sysconfig
from collections.abc import Iterable
from pathlib import Path

MAX_SOURCE_BYTES = 1 << 20


def installed_imports(script: str) -> list[str]:
    """The installed modules that `script` imports at its top level, in order; empty when it cannot be parsed."""
    path = Path(script)
    try:
        if path.stat().st_size > MAX_SOURCE_BYTES:
            return []
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return []
    named = dict.fromkeys(_top_level(tree.body))
    return [module for module in named if is_installed(module.split(".")[0])]


def is_installed(package: str) -> bool:
    """True for a package of this interpreter's library folders; False for a module of anybody's working folder."""
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return False
    if spec is None:
        return False
    places = [spec.origin or "", *(spec.submodule_search_locations or [])]
    libraries = tuple(os.path.join(sysconfig.get_path(name), "") for name in ("stdlib", "purelib", "platlib"))
    return any(place.startswith(libraries) for place in places)


def _top_level(body: Iterable[ast.stmt]) -> Iterable[str]:
    for statement in body:
        if isinstance(statement, ast.Import):
            yield from (alias.name for alias in statement.names)
        elif isinstance(statement, ast.ImportFrom) and statement.module and not statement.level:
            yield statement.module
