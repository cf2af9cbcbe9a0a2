"""What pages show, run for real: scripts, and the quickstart's commands with the outputs that it shows.

    UPDATE_QUICKSTART=1 .venv/bin/python -m pytest tests/test_docs.py -k quickstart      # or: make quickstart

puts what the commands have printed into the quickstart.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from elasticctl.cli.framework.output import Table, format_aligned
from tests.support.forked.launcher import take_output
from tests.support.train.ranks import alone, run_script, start

PATIENCE_S = 240.0


def run_example(script: Path, ranks: int = 1, **environ: str) -> str:
    """What `python -W error SCRIPT` prints in the script's folder, on so many ranks; all of them have to end well."""
    log = script.with_suffix(".log")
    log.write_text("")
    processes = [alone(_run, script, log, environ)] if ranks == 1 else start(_run, ranks, script, log, environ)
    for process in processes:
        process.join(PATIENCE_S)
        if process.exitcode is None:
            process.kill()
            process.join()
    assert {process.exitcode for process in processes} == {0}, log.read_text()
    return log.read_text()


def _run(script: Path, log: Path, environ: Mapping[str, str]) -> None:
    take_output(log)
    os.chdir(script.parent)
    run_script(script, [], environ)


BLOCK = re.compile(r"^```(bash|text)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
MORE = "\N{HORIZONTAL ELLIPSIS}"
SHOWN, FIRST = 7, 5
"""Of an output with more lines, its first and its last are shown."""
FIRST_CELLS = 3
"""So many words of a table's row have to be the same."""


def steps(text: str) -> Iterator[tuple[list[str], str | None]]:
    """Each block of commands, with the output that the page shows after it (None: none)."""
    blocks = [(found[1], found[2]) for found in BLOCK.finditer(text)]
    for (kind, content), (next_kind, following) in itertools.pairwise([*blocks, ("", "")]):
        if kind == "bash":
            yield content.splitlines(), following if next_kind == "text" else None


def as_shown(printed: str, checkout: Path) -> list[str]:
    """What a command has printed into a pipe, as a reader's terminal has it, with a reader's paths."""
    printed = printed.replace(str(checkout), "/home/me/elasticctl")
    printed = re.sub(r"file:///\S*?/(storage|workspaces)\b", rf"file:///{MORE}/\1", printed)
    printed = re.sub(r"\w+ \(login\)", "me (login)", printed)
    lines = printed.rstrip("\n").split("\n")
    rows = [tuple(line.split("\t")) for line in lines if "\t" in line]
    if len(rows) > 1:
        empty = [all(cells[column] in ("", "-") for cells in rows[1:]) for column in range(len(rows[0]))]
        filled = [tuple("" if cell == "-" else cell for cell in cells) for cells in rows]
        kept = [tuple(cell for cell, none in zip(cells, empty, strict=False) if not none) for cells in filled]
        lines = format_aligned(Table(kept[0], kept[1:]))[0] + [line for line in lines if "\t" not in line]
    if len(lines) > SHOWN:
        lines = [*lines[:FIRST], MORE, lines[-1]]
    return [line.rstrip() for line in lines]


def agree(sample: str, printed: str) -> bool:
    """Whether each line of the page was printed, in their order, except for what is different each time.

    A table has fewer columns on the page: without those that were empty. What stands in the last ones depends on the
    moment.
    """
    found = iter([_words(line) for line in printed.splitlines()])
    wanted, is_table = [], False
    for line in sample.splitlines():
        if line.strip() != MORE:
            wanted.append(_words(line)[:FIRST_CELLS] if is_table else _words(line))
            is_table |= line.isupper()
    return all(any(_among(words, candidate) for candidate in found) for words in wanted)


def _among(words: Sequence[str], candidate: Sequence[str]) -> bool:
    rest = iter(candidate)
    return all(word in rest for word in words)


def _words(line: str) -> list[str]:
    """Its words, without numbers, durations, the ends of generated names, and folders."""
    line = re.sub(r"file:///\S*?/(storage|workspaces)\b", r"file:///\1", line)
    line = re.sub(r"/\S*(/examples/digits)", r"\1", line)
    line = re.sub(r"\b[0-9a-f]{12}\b", "ID", line)
    line = re.sub(r"(train|digits)-[0-9a-f]{8}\b", r"\1-ID", line)
    return [re.sub(r"(\d+[dhms])+", "0s", re.sub(r"\d+([.,]\d+)*", "0", word)) for word in line.split()]


def with_outputs(text: str, outputs: Sequence[Sequence[str]]) -> str:
    """The page with these outputs in place of those that it shows, one for each block that has one."""
    left = iter(outputs)
    kinds = [found[1] for found in BLOCK.finditer(text)]
    follows = iter([now == "text" and before == "bash" for before, now in itertools.pairwise(["", *kinds])])

    def put(found: re.Match[str]) -> str:
        if not next(follows):
            return found[0]
        return "```text\n" + "".join(f"{line}\n" for line in next(left)) + "```"

    return BLOCK.sub(put, text)
