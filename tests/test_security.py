"""The promises of the page on security are tested."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/security.md").read_text("utf-8")
PROMISES = re.findall(r"^\| (.+?) \| (`[\w/]+\.py.*?`) \|$", PAGE, re.MULTILINE)


def test_there_are_promises() -> None:
    rows = PAGE[PAGE.index("## What is promised") : PAGE.index("## What is not")].splitlines()
    promised = [row for row in rows if row.startswith("| ") and not row.startswith("| promise")]
    assert len(promised) == len(PROMISES) > 15


@pytest.mark.parametrize("named", [name for _, names in PROMISES for name in re.findall(r"`(.+?)`", names)])
def test_each_promise_names_a_test_that_there_is(named: str) -> None:
    path, _, test = named.partition("::")
    text = (ROOT / path).read_text("utf-8")
    assert re.search(rf"^def {test}\(" if test else r"^def test_", text, re.MULTILINE)
