"""docs/state-machines.md shows the state machines as the code has them."""

from __future__ import annotations

import re

import pytest

from tests.support.state_tables import MACHINES, PAGE, generate


def test_the_tables_are_those_of_the_code() -> None:
    """They have a cell for each pair of state and event: any exception but the machine's own fails here."""
    page = PAGE.read_text("utf-8")
    assert page == generate(page), "FIX: python -m tests.support.state_tables"


@pytest.mark.parametrize("name", MACHINES)
def test_every_event_can_happen_in_some_state(name: str) -> None:
    machine = MACHINES[name]
    pairs = [(state, event, machine.after(state, event)) for state in machine.states for event in machine.events]
    assert {event for _, event, after in pairs if after is not None} == set(machine.events)


@pytest.mark.parametrize("name", MACHINES)
def test_the_page_explains_every_state_and_event(name: str) -> None:
    section = re.split(r"^## ", PAGE.read_text("utf-8").partition(f"## {name}\n")[2], flags=re.MULTILINE)[0]
    prose = re.sub(r"^\|.*$", "", section, flags=re.MULTILINE)
    machine = MACHINES[name]
    missing = [item.value for item in (*machine.states, *machine.events) if f"`{item.value}`" not in prose]
    assert not missing
