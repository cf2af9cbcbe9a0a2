"""Where job templates are found: shipped as package data, in the user's own folder, or at a path."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from elasticctl.api.errors import TemplateError
from elasticctl.api.text import did_you_mean, shown

SUFFIX = ".yaml.j2"
DEFAULT = "default"
MAX_SIZE_BYTES = 256 * 1024


@dataclass(frozen=True, slots=True)
class Template:
    """A job template's text; `path` is None for one that is shipped."""

    name: str
    text: str
    path: Path | None = None


def available(folder: Path) -> list[Template]:
    """The shipped templates, and the user's in `folder`, which hide shipped ones of the same name; by name."""
    found = {name: _shipped(name) for name in shipped_names()}
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        found[path.name.removesuffix(SUFFIX)] = _read(path)
    return [found[name] for name in sorted(found)]


def find(name: str, folder: Path) -> Template:
    """The template called `name`: the user's in `folder`, a shipped one, or the file at that path.

    Raises TemplateError when there is none or it cannot be read.
    """
    if "/" in name or name.endswith(SUFFIX):
        return _read(Path(name).expanduser())
    own = folder / f"{name}{SUFFIX}"
    if own.is_file():
        return _read(own)
    shipped = shipped_names()
    if name in shipped:
        return _shipped(name)
    known = [*shipped, *(path.name.removesuffix(SUFFIX) for path in folder.glob(f"*{SUFFIX}"))]
    raise TemplateError(
        f"no job template {shown(name)}{did_you_mean(name, known)}; `elasticctl template list` shows what there is"
    )


def shipped_names() -> list[str]:
    """Names of the templates that come with elasticctl."""
    names = (entry.name for entry in resources.files("job_templates").iterdir())
    return sorted(name.removesuffix(SUFFIX) for name in names if name.endswith(SUFFIX))


def _shipped(name: str) -> Template:
    return Template(name, resources.files("job_templates").joinpath(f"{name}{SUFFIX}").read_text("utf-8"))


def _read(path: Path) -> Template:
    name = path.name.removesuffix(SUFFIX)
    try:
        if path.stat().st_size > MAX_SIZE_BYTES:
            raise TemplateError(f"the template {path} is larger than {MAX_SIZE_BYTES} bytes")
        return Template(name, path.read_text("utf-8"), path)
    except (OSError, UnicodeDecodeError) as e:
        reason = e.strerror if isinstance(e, OSError) else "it is not UTF-8 text"
        raise TemplateError(f"cannot read the template {path}: {reason}") from e
