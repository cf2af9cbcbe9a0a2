"""Checks a script before it is submitted: its module exists, it compiles, it joins its ranks and keeps checkpoints.

Without checkpoints, each loss sends training back to step 0. Without a group, each rank trains alone.
"""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from elasticctl.api.errors import UsageError
from elasticctl.api.text import did_you_mean, quote

if TYPE_CHECKING:
    from elasticctl.operations.submit.training_command import TrainingCommand

_TRAINS = re.compile(r"\.backward\(|optimizer\.step\(|\.training_step\(")
_SAVES = re.compile(
    r"elasticctl|checkpoint|ckpt|\bresume|\.save\(|save_state|save_model|save_pretrained|state_dict|Trainer|pickle"
    r"|safetensors|torchsnapshot|composer|deepspeed",
    re.IGNORECASE,
)
"""Any of these may mean that the script keeps its state somehow; only a script without all of them is warned about."""
_JOINS = re.compile(r"elasticctl|init_process_group|init_device_mesh|rendezvous", re.IGNORECASE)
_ALONE = frozenset(sys.stdlib_module_names) | {"torch", "torchvision", "torchaudio", "numpy", "tqdm"}
"""Packages that form no group by themselves. Others may, so scripts that import others are not warned about."""
_MOST_FILES = 100
_MOST_BYTES = 1 << 20
_UNKNOWN = (OSError, ValueError, RecursionError, MemoryError)  # the last two: nested too deep
_FIX = (
    "    from elasticctl_train import Run",
    "    with Run(model=model, optimizer=optimizer) as run:",
    "        for epoch in run.epochs(EPOCHS):",
    "            for batch in run.loader(dataset, global_batch=64):  # as before, then: run.step(loss=loss)",
)


def lines_of_bad_syntax(command: TrainingCommand) -> tuple[str, ...]:
    """A warning about a Python script that this Python cannot compile; the job's may be another version."""
    script = _python_script(command)
    if script is None:
        return ()
    try:
        _parse(script)
    except SyntaxError as e:
        python = f"Python {sys.version_info.major}.{sys.version_info.minor}"
        where = script.name if e.lineno is None else f"{script.name}, line {e.lineno}"
        return (f"{where}: {e.msg}, in {python}. FIX: correct it, unless the job has another version of Python",)
    except _UNKNOWN:
        pass
    return ()


def lines_without_checkpoints(command: TrainingCommand) -> tuple[str, ...]:
    """A warning about a Python script that trains, but neither saves its state nor imports code next to it that does.

    () if it does, or if that is unknown.
    """
    script = _python_script(command)
    if script is None:
        return ()
    texts = [text for text, _ in _sources(script)]
    if not any(map(_TRAINS.search, texts)) or any(map(_SAVES.search, texts)):
        return ()
    return (
        f"{script.name} saves no checkpoints: after each loss and each scaling it starts at step 0 again. These lines"
        " change that (docs/training.md):",
        *_FIX,
    )


def lines_of_lone_ranks(command: TrainingCommand, ranks: int) -> tuple[str, ...]:
    """A warning about a Python script that trains on several ranks without joining them.

    () if it joins them, or if that is unknown.
    """
    script = _python_script(command) if ranks > 1 else None
    if script is None:
        return ()
    sources = _sources(script)
    texts = [text for text, _ in sources]
    if not any(map(_TRAINS.search, texts)) or any(map(_JOINS.search, texts)):
        return ()
    imported = {name.partition(".")[0] for _, names in sources for name in names}
    if not all(name in _ALONE or _is_own_module(name, script) for name in imported):
        return ()
    return (
        f"{script.name} does not join its ranks: each of the {ranks} trains a model of its own, on all of the data."
        " FIX: train with Run (docs/training.md), or give --workers 1",
    )


def _is_own_module(name: str, script: Path) -> bool:
    roots = script.parent.resolve(), Path.cwd()
    return any((root / name).is_dir() or (root / f"{name}.py").is_file() for root in roots)


def _python_script(command: TrainingCommand) -> Path | None:
    if command.script:
        path = Path(command.script)
        return path if path.suffix == ".py" else None
    if command.args[:2] == ("python", "-m") and command.args[2:]:
        parts = command.args[2].split(".")
        found = Path(*parts).with_suffix(".py"), Path(*parts, "__main__.py")
        return next((path for path in found if path.is_file()), None)
    return None


def _sources(script: Path) -> list[tuple[str, list[str]]]:
    """(text, imported names) of the script, and of its imports from its own folder or the current one.

    Empty if any of these files cannot be read or parsed, or if there are too many of them.
    """
    roots = tuple(dict.fromkeys((script.parent.resolve(), Path.cwd())))
    todo, seen = [script.resolve()], set[Path]()
    found: list[tuple[str, list[str]]] = []
    while todo and len(seen) < _MOST_FILES:
        path = todo.pop()
        if path in seen:
            continue
        seen.add(path)
        try:
            data, tree = _parse(path)
            text, names = data.decode("utf-8-sig"), list(_imported(tree))
        except (SyntaxError, *_UNKNOWN):
            return []
        found.append((text, names))
        todo += [file for name in names for file in _files_of(name, (path.parent, *roots))]
    return [] if todo else found


def _parse(path: Path) -> tuple[bytes, ast.Module]:
    """The text of a Python file, and its syntax. Raises SyntaxError, or one of `_UNKNOWN` if it cannot be examined."""
    if path.stat().st_size > _MOST_BYTES:
        raise ValueError("too large")
    data = path.read_bytes()
    with warnings.catch_warnings(action="ignore"):  # such as those about the script's own escapes
        return data, ast.parse(data)


def _imported(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = f"{node.module}." if node.module else ""
            yield from (base + alias.name for alias in node.names)
            if node.module:
                yield node.module


def _files_of(name: str, roots: tuple[Path, ...]) -> list[Path]:
    parts = name.split(".")
    places = [place for root in roots for place in (root.joinpath(*parts).with_suffix(".py"),
                                                    root.joinpath(*parts, "__init__.py"))]  # fmt: skip
    return [place.resolve() for place in places if place.is_file()]


def check_module(words: Sequence[str], folder: Path, *, on_this_python: bool) -> None:
    """Raise UsageError if these words run a module that `folder`, where they are run, shows to be missing.

    A module of a package of the folder must exist. Any other may be installed where the job runs; that is known
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
    """True if the folder has a module of that name, with any suffix, or a package."""
    *above, last = parts
    place = folder.joinpath(*above)
    return (place / last).is_dir() or any(place.glob(f"{last}.*"))


def _near(name: str, folder: Path) -> str:
    return did_you_mean(name, _names_below(folder, name.count(".")))


def _names_below(folder: Path, depth: int) -> Iterator[str]:
    """The modules whose names have so many dots."""
    for path in folder.glob("*/" * depth + "*.py"):
        yield ".".join(path.relative_to(folder).with_suffix("").parts)
