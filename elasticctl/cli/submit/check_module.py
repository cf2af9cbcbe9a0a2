"""Finds out before a job starts that the module of `python -m MODULE` is not there."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from elasticctl.api.errors import UsageError
from elasticctl.api.text import did_you_mean, quote


def check_module(words: Sequence[str], folder: Path, *, on_this_python: bool) -> None:
    """Raise UsageError if these words run a module that `folder`, where they are run, shows to be missing.

    A module of a package of the folder has to be there. Any other may be installed where the job runs; that is known
    only if the job runs `on_this_python`. A package without `__init__.py` may have further parts elsewhere.
    """
    name = _module_of(words)
    top, _, inner = name.partition(".")
    if not name.replace(".", "").isidentifier() or not top:
        return
    package = folder / top
    if inner and (package / "__init__.py").is_file():
        if not _has_module(package, inner.split(".")):
            raise UsageError(f"there is no module {quote(name)} in {folder}{_near(name, folder)}")
    elif on_this_python and not (_has_module(folder, [top]) or importlib.util.find_spec(top)):
        raise UsageError(
            f"there is no module {quote(name)} in {folder}, nor in the environment of {sys.executable}"
            f"{_near(name, folder)}"
        )


def _module_of(words: Sequence[str]) -> str:
    """The MODULE of `python [FLAGS] -m MODULE`; empty for other commands, and if a flag has a value of its own."""
    if not words or not Path(words[0]).name.startswith("python"):
        return ""
    at = next((at for at, word in enumerate(words[1:], 1) if word == "-m" or not word.startswith("-")), len(words))
    return words[at + 1] if at + 1 < len(words) and words[at] == "-m" else ""


def _has_module(folder: Path, parts: Sequence[str]) -> bool:
    """Is there a module of that name in the folder, with whatever suffix, or a package?"""
    *above, last = parts
    place = folder.joinpath(*above)
    return (place / last).is_dir() or any(place.glob(f"{last}.*"))


def _near(name: str, folder: Path) -> str:
    return did_you_mean(name, _names_below(folder, name.count(".")))


def _names_below(folder: Path, depth: int) -> Iterator[str]:
    """The modules whose names have so many dots."""
    for path in folder.glob("*/" * depth + "*.py"):
        yield ".".join(path.relative_to(folder).with_suffix("").parts)
