"""The verbs in docs/cli.md, from what `--help` prints: `make cli-page`, or `python -m tests.support.cli_page`.

tests/test_docs.py checks the page. To change what it says about a verb, change the verb's docstring or the
`help` of its options.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from elasticctl.cli.main import main

PAGE = Path(__file__).parents[2] / "docs" / "cli.md"
BEGIN, END = "<!-- generated: verbs -->\n", "<!-- end of generated -->"
SAME_EVERYWHERE = re.compile(
    r"  (--context NAME|-n, --namespace NAME +The namespace; the context's|-h, --help|-y, --yes"
    r"|-l, --label .*Select jobs|-o, --output|-w, --watch"
    r"|--worker NAME .*The worker|--rank N .*The worker)"
)
"""Options that the top of the page describes for all verbs."""
LISTED = re.compile(r"^  ([a-z-]+)  ", re.MULTILINE)
"""A verb in a list of verbs."""


@dataclass(frozen=True, slots=True)
class Help:
    """What `--help` prints: the usage line, the description with its examples, and each heading with its lines."""

    usage: str
    description: tuple[str, ...]
    sections: dict[str, str]


def printed_help(*words: str) -> str:
    """The help of the command line, of a verb or of a group, as it is printed into a pipe of 80 columns."""
    plain = {"COLUMNS": "80", "NO_COLOR": "1"}
    with mock.patch.dict(os.environ, plain), contextlib.redirect_stdout(io.StringIO()) as printed:
        code = main([*words, "--help"])
    if code != 0:
        raise ValueError(f"elasticctl {' '.join(words)} --help: exit code {code}")
    return printed.getvalue()


def read_help(text: str) -> Help:
    usage, _, rest = text.partition("\n\n")
    first, *others = re.split(r"^(\S.*):\n", rest, flags=re.MULTILINE)
    sections = dict(zip(others[::2], map(without_common_options, others[1::2]), strict=True))
    blocks = tuple(block for block in re.split(r"\n\s*\n", first.strip("\n")) if block)
    return Help(" ".join(usage.removeprefix("Usage: ").split()), blocks, sections)


def without_common_options(lines: str) -> str:
    """The entries of a list, without those that every verb has; an entry goes on over lines that are indented more."""
    entries = re.split(r"^(?=  \S)", lines, flags=re.MULTILINE)
    return "".join(entry for entry in entries if not SAME_EVERYWHERE.match(entry)).rstrip()


def names(words: tuple[str, ...]) -> list[str]:
    """The verbs that a help lists, in its order; none for a verb that is no group."""
    found = read_help(printed_help(*words)).sections
    lists = [found["Commands"]] if "Commands" in found else [] if words else list(found.values())[1:]
    return [name for lines in lists for name in LISTED.findall(lines)]


def paragraphs(help_text: Help) -> Iterator[str]:
    """The description as Markdown: sentences on lines of up to 120 characters, examples as they are."""
    for block in help_text.description:
        is_code = block.startswith("    ") or all("  " in line.strip() for line in block.splitlines())
        yield textwrap.indent(textwrap.dedent(block), "    ") if is_code else wrapped(block)


def wrapped(text: str) -> str:
    return textwrap.fill(" ".join(text.split()), 120, break_on_hyphens=False, break_long_words=False)


def section(words: tuple[str, ...], shared: dict[str, str]) -> str:
    """A verb's part of the page. Options that `shared` lists under the same heading are named, and not repeated."""
    found = read_help(printed_help(*words))
    repeated = [title for title in found.sections if title in shared and words != ("submit",) and title != "Options"]
    options = {
        title: lines for title, lines in found.sections.items() if lines and title not in (*repeated, "Commands")
    }
    usage = [] if "Commands" in found.sections else [f"    {found.usage}"]
    parts = [f"{'#' * (2 + len(words))} {' '.join(words)}", *usage, *paragraphs(found)]
    if repeated:
        parts.append(wrapped(f"As for [`submit`](#submit): {', '.join(f'*{title}*' for title in repeated)}."))
    if options:
        parts.append("```text\n" + "\n\n".join(f"{title}:\n{lines}" for title, lines in options.items()) + "\n```")
    return "\n\n".join(parts)


def verbs_as_markdown() -> str:
    """All verbs, below the headings of the overview, with the verbs of a group below the group."""
    shared = read_help(printed_help("submit")).sections
    parts = []
    for title, lines in list(read_help(printed_help()).sections.items())[1:]:
        parts.append(f"## {title}")
        for verb in LISTED.findall(lines):
            parts.append(section((verb,), shared if verb == "sweep" else {}))
            parts += [section((verb, name), {}) for name in names((verb,))]
    return "\n\n".join(parts)


def generate(page: str) -> str:
    """The page with the verbs between its marker lines."""
    pattern = re.compile(f"{re.escape(BEGIN)}.*?{re.escape(END)}", re.DOTALL)
    made, count = pattern.subn(lambda _: f"{BEGIN}\n{verbs_as_markdown()}\n\n{END}", page)
    if count != 1:
        raise ValueError(f"{PAGE.name} needs one pair of marker lines; it has {count}")
    return made


if __name__ == "__main__":
    PAGE.write_text(generate(PAGE.read_text("utf-8")), "utf-8")
