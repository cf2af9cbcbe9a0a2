"""Job files and project files: the options of `submit` as YAML or TOML, to keep next to the code.

A job file (`submit -f job.yaml`) describes one job: script, args and options, by their names on the command line. A
project file (`elasticctl.toml`, or `[tool.elasticctl]` in `pyproject.toml`) has the options of all jobs in a folder.
Paths are relative to the file, so both work in every clone. The command line takes precedence over the job file, and
that over the project file.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from elasticctl.api.errors import SpecError, UsageError
from elasticctl.api.text import did_you_mean, quote
from elasticctl.api.yamltext import dump_yaml, parse_yaml

PROJECT_FILES = ("elasticctl.toml", "pyproject.toml")
_SENT = ("script", "workspace", "env_file")
"""What they name is read on this machine, and goes to the job."""
_PATHS = ("script", "workspace", "storage", "env_file")
_SPECIAL = ("script", "args", "command")
_NOT_OF_A_JOB = (
    "script",
    "args",
    "module",
    "file",
    "save",
    "same_code",
    "detach",
    "wait",
    "dry_run",
    "output",
    "debug",
    "help",
)
_NAMES = {
    "set": "settings",
    "secret": "secrets",
    "mount": "mounts",
    "toleration": "tolerations",
    "label": "labels",
    "annotation": "annotations",
}
"""Options whose parameters are called otherwise."""


@dataclass(frozen=True, slots=True)
class JobFile:
    """A script with its arguments, or a `command`.

    `options` maps parameters to values as typed, with a list for an option that may be repeated. `path` is the file's.
    """

    script: str = ""
    args: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    path: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)


class Form(Enum):
    """What an option takes: one value, any number of values, or a yes or no."""

    VALUE = "one value"
    VALUES = "a list"
    YES_OR_NO = "true or false"


def options_of_files(parameters: Iterable[Any]) -> Mapping[str, Form]:
    """The parameters of `submit` that files may set, and what each takes."""
    return {str(one.name): _form(one) for one in parameters if one.name not in _NOT_OF_A_JOB}


def _form(parameter: Any) -> Form:
    if getattr(parameter, "is_flag", False):
        return Form.YES_OR_NO
    return Form.VALUES if getattr(parameter, "multiple", False) else Form.VALUE


def read_job_file(path: str, known: Mapping[str, Form]) -> JobFile | None:
    """The job file at `path`; None for a manifest, and for an unreadable file, which the caller reports.

    `known`: the parameters of `submit`. Raises UsageError for an unknown field, or a value that it does not take.
    """
    try:
        text = Path(path).read_bytes()
    except OSError:
        return None
    data = parse_yaml(text, path).data
    if not _describes_job(data):
        return None
    return _parse(data, path, known, special=True)


def read_project_file(folder: Path, known: Mapping[str, Form]) -> JobFile:
    """The nearest project file in `folder` and those above it, up to the root of the git repository or home.

    Raises UsageError for one that cannot be read.
    """
    home = Path(os.path.expanduser("~"))
    for place in (folder, *folder.parents):
        for name in PROJECT_FILES:
            data = _read_toml(place / name)
            if data is not None:
                return _parse(data, str(place / name), known, special=False)
        if (place / ".git").exists() or place == home:
            break
    return JobFile()


def check_reach(file: JobFile, names: Iterable[str]) -> None:
    """Raise UsageError for a file that would send other files of the caller, or JobStorageError for an unknown target.

    The file may come with someone else's repository. `names` are the options, and "script", that it sets. The files
    that they name have to be below the file's folder, its repository, or the current folder.
    """
    from elasticctl.api.errors import JobStorageError
    from elasticctl.cluster.job_storages import check_storage_of_file
    from elasticctl_store.errors import StorageError

    for name in names:
        value = file.script if name == "script" else file.options.get(name)
        if not isinstance(value, str) or not value:
            continue
        option = name.replace("_", "-")
        if name == "storage":
            try:
                check_storage_of_file(value)
            except StorageError as e:
                raise JobStorageError(f"{file.path}: {e}") from e
        elif name in _SENT and not _is_within_reach(file.path, value):
            typed = "the script" if name == "script" else f"--{option}"
            raise UsageError(
                f"{file.path}: {option}: {quote(value)} is outside of the file's folder and repository."
                f" FIX: if you mean to send that, type {typed} on the command line"
            )


def _is_within_reach(path: str, value: str) -> bool:
    base, target = Path(os.path.realpath(path)).parent, Path(os.path.realpath(value))
    home = Path(os.path.realpath(os.path.expanduser("~")))
    repository = next((place for place in (base, *base.parents) if (place / ".git").exists()), base)
    wide = {home, *home.parents, Path(os.path.realpath(tempfile.gettempdir()))}
    return any(target.is_relative_to(root) for root in {base, repository, Path(os.path.realpath("."))} - wide)


def write_job_file(path: str, script: str, args: Sequence[str], options: Mapping[str, Any]) -> None:
    """Write a job file; `options` as in `JobFile`, paths relative to the current folder.

    Without a script, `args` are a command. Raises UsageError if the file cannot be written, or if `path` is a file that
    is not a job file: that could be the script itself.
    """
    if os.path.exists(path) and not _is_job_file(path):
        raise UsageError(f"--save {path}: this file exists and is not a job file. FIX: choose another name")
    base = Path(os.path.abspath(path)).parent
    data: dict[str, Any] = {"script": _relative("script", script, base)} if script else {"command": list(args)}
    if script and args:
        data["args"] = list(args)
    spelled = {parameter: name for name, parameter in _NAMES.items()}
    for parameter, value in options.items():
        name = spelled.get(parameter, parameter).replace("_", "-")
        data[name] = _relative(parameter, value, base) if parameter in _PATHS else value
    try:
        Path(path).write_text(dump_yaml(data), "utf-8")
    except OSError as e:
        raise UsageError(f"cannot write {path}: {e.strerror}") from e


def _is_job_file(path: str) -> bool:
    try:
        return _describes_job(parse_yaml(Path(path).read_bytes(), path).data)
    except (OSError, SpecError):
        return False


def _describes_job(data: Any) -> bool:
    return isinstance(data, dict) and bool({"script", "command"} & {*data}) and "kind" not in data


def as_typed(value: Any) -> Any:
    """The value of an option as typed, which a file may contain."""
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        return [as_typed(item) for item in value]
    if isinstance(value, tuple):
        return str(value)
    return value.value if isinstance(value, Enum) else value


def _relative(parameter: str, value: str, base: Path) -> str:
    if ":" in value or (parameter == "storage" and os.path.isabs(value)):
        return value
    return os.path.relpath(os.path.abspath(value), base)


def _read_toml(path: Path) -> dict[str, Any] | None:
    """The content of our table in a file; None if either does not exist."""
    try:
        data = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError):
        return None
    if path.name == "pyproject.toml" and b"elasticctl" not in data:
        return None
    import tomllib

    try:
        found = tomllib.loads(data.decode("utf-8-sig"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as e:
        raise UsageError(f"{path}: not TOML: {e}") from e
    if path.name != "pyproject.toml":
        return found
    tool = found.get("tool")
    ours = tool.get("elasticctl") if isinstance(tool, dict) else None
    if ours is not None and not isinstance(ours, dict):
        raise UsageError(f"{path}: tool.elasticctl must be a table")
    return ours


def _parse(data: Mapping[str, Any], path: str, known: Mapping[str, Form], *, special: bool) -> JobFile:
    base = Path(os.path.abspath(path)).parent
    options: dict[str, Any] = {}
    for name, value in data.items():
        if special and name in _SPECIAL:
            continue
        parameter, given = _parameter(str(name), value)
        if parameter not in known:
            near = did_you_mean(str(name), [*(option.replace("_", "-") for option in known), *_NAMES])
            raise UsageError(
                f"{path}: unknown option {quote(name)}{near}. FIX: name options as `elasticctl submit` does"
            )
        typed = _typed(given, f"{path}: {name}", ":" if parameter == "mounts" else "=")
        typed = _fitting(typed, known[parameter], f"{path}: {name}")
        options[parameter] = _below(base, typed, parameter) if parameter in _PATHS else typed
    if not special:
        return JobFile(options=options, path=path)
    if "script" not in data or "command" in data:
        command = data["command"]
        if not isinstance(command, list) or not command or "script" in data or "args" in data:
            raise UsageError(f"{path}: command: must be a list of words, without script and args")
        return JobFile(command=tuple(_word(item, f"{path}: command") for item in command), path=path, options=options)
    script, args = data["script"], data.get("args")
    if not isinstance(script, str) or not script:
        raise UsageError(f"{path}: script: must be the path of a script")
    if not isinstance(args, list | None):
        raise UsageError(f'{path}: args: must be a list, such as [--epochs, "90"]')
    words = tuple(_word(item, f"{path}: args") for item in args or ())
    return JobFile(_below(base, script, "script"), words, path=path, options=options)


def _parameter(name: str, value: Any) -> tuple[str, Any]:
    """The parameter of an option, and its value; `on-demand: true` is `spot: false`."""
    if name in ("on-demand", "on_demand") and isinstance(value, bool):
        return "spot", not value
    return _NAMES.get(name, name.replace("-", "_")), value


def _typed(value: Any, where: str, between: str) -> Any:
    """The value as typed: a text, a list of texts, or a yes or no."""
    if isinstance(value, bool):
        return value
    if isinstance(value, Mapping):
        return [f"{key}{between}{_word(item, where)}" for key, item in value.items()]
    if isinstance(value, list):
        return [_word(item, where) for item in value]
    return _word(value, where)


def _fitting(typed: Any, form: Form, where: str) -> Any:
    """The value in the form that the option takes; a single value becomes a list."""
    if form is Form.VALUES and isinstance(typed, str):
        return [typed]
    if isinstance(typed, list) is not (form is Form.VALUES):
        raise UsageError(f"{where}: must be {form.value}")
    if isinstance(typed, bool) and form is not Form.YES_OR_NO:
        raise UsageError(f"{where}: must be {form.value}, not {quote(typed)}. FIX: put it in quotes if it is text")
    return typed


def _word(value: Any, where: str) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str | int | float):
        return str(value)
    raise UsageError(f"{where}: {quote(value)} is not a text or a number")


def _below(base: Path, value: Any, parameter: str) -> Any:
    """A path in a file, relative to the current folder; a URL unchanged."""
    if not isinstance(value, str):
        raise UsageError(f"{base}: {parameter}: {quote(value)} is not a path")
    if ":" in value:
        return value
    return os.path.relpath(base / Path(value).expanduser(), os.getcwd())
