"""Commands that are printed name the place that the command line has named."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from elasticctl.terminal import name_place, with_place


@pytest.fixture(autouse=True)
def nowhere() -> Iterator[None]:
    yield
    name_place("", "")


@pytest.mark.parametrize(
    ("text", "placed"),
    [
        ("elasticctl explain digits", "elasticctl explain digits -n ml"),
        ("Next: details: elasticctl status digits", "Next: details: elasticctl status digits -n ml"),
        ("elasticctl scale digits --to 2", "elasticctl scale -n ml digits --to 2"),
        ("elasticctl logs -f digits", "elasticctl logs -n ml -f digits"),
        ("FIX: list them with `elasticctl list`", "FIX: list them with `elasticctl list -n ml`"),
        (
            "elasticctl explain a   see its output: elasticctl logs a",
            "elasticctl explain a -n ml   see its output: elasticctl logs a -n ml",
        ),
        ("elasticctl checkpoints list a", "elasticctl checkpoints list a -n ml"),
        ("see: elasticctl stacks a", "see: elasticctl stacks a -n ml"),
        ("elasticctl top a -o wide", "elasticctl top -n ml a -o wide"),
        ("elasticctl secret set hub KEY", "elasticctl secret set -n ml hub KEY"),
        ("elasticctl sweep --continue lr", "elasticctl sweep -n ml --continue lr"),
        ("elasticctl status a -n other", "elasticctl status a -n other"),
        ("elasticctl quota list", "elasticctl quota list"),
        ("elasticctl statuses digits", "elasticctl statuses digits"),
        ("elasticctl install", "elasticctl install"),
    ],
)
def test_a_namespace_that_was_given_is_in_each_command(text: str, placed: str) -> None:
    name_place("", "ml")
    assert with_place(text) == placed


def test_a_context_that_was_given_is_too() -> None:
    name_place("lab", "ml")
    assert with_place("elasticctl wait a") == "elasticctl wait a --context lab -n ml"
    assert with_place("elasticctl wait a --context b") == "elasticctl wait -n ml a --context b"
    assert with_place("elasticctl quota list") == "elasticctl quota list --context lab"
    assert with_place("FIX: elasticctl install") == "FIX: elasticctl install --context lab"


def test_options_that_were_not_given_are_not_added() -> None:
    name_place("", "")
    assert with_place("elasticctl wait a") == "elasticctl wait a"
