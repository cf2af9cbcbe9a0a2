"""The tables of docs/state-machines.md, made from the transition functions: `python -m tests.support.state_tables`.

To add a machine: an entry in `MACHINES`, and in the page a section of that name with a pair of marker lines

    <!-- table: NAME -->
    <!-- end of table -->

and a sentence for each state and event, its value as `code`. tests/test_state_machines.py checks the page.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from elasticctl_controller.core.group import group_states
from elasticctl_controller.local import lifecycle
from elasticctl_launcher import launcher_states as launcher_states

PAGE = Path(__file__).parents[2] / "docs" / "state-machines.md"


@dataclass(frozen=True, slots=True)
class Machine:
    """A state machine: `transition(state, event)` returns the next state, or raises `refused`.

    An event that is ignored returns the state it came in.
    """

    states: type[Enum]
    events: type[Enum]
    transition: Callable[[Any, Any], Enum]
    refused: type[Exception]

    def after(self, state: Enum, event: Enum) -> Enum | None:
        """The next state; None where the event is refused."""
        try:
            return self.transition(state, event)
        except self.refused:
            return None

    def table(self) -> str:
        """The Markdown table: a row for each event, where it leads from which states, and where it is ignored."""
        rows = [("event", "leads", "is ignored in"), ("---", "---", "---"), *map(self._row, self.events)]
        return "".join(f"| {' | '.join(row)} |\n" for row in rows)

    def _row(self, event: Enum) -> tuple[str, str, str]:
        pairs = [(state, after) for state in self.states if (after := self.after(state, event)) is not None]
        sources: dict[str, list[str]] = {}
        for state, after in pairs:
            if after is not state:
                sources.setdefault(after.value, []).append(state.value)
        leads = "; ".join(f"{', '.join(names)} → **{after}**" for after, names in sources.items())
        return f"`{event.value}`", leads, ", ".join(state.value for state, after in pairs if after is state)


MACHINES: Mapping[str, Machine] = {
    "Membership": Machine(
        group_states.GroupState, group_states.GroupEvent, group_states.transition, group_states.ImpossibleGroupEvent
    ),
    "Kubelet": Machine(
        lifecycle.KubeletState, lifecycle.KubeletEvent, lifecycle.transition, lifecycle.ImpossibleKubeletEvent
    ),
    "Launcher": Machine(
        launcher_states.LauncherState,
        launcher_states.LauncherEvent,
        launcher_states.transition,
        launcher_states.ImpossibleLauncherEvent,
    ),
}


def generate(page: str) -> str:
    """The page with the tables of all machines between their marker lines."""
    for name, machine in MACHINES.items():
        begin, end = f"<!-- table: {name} -->\n", "<!-- end of table -->"
        pattern = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.DOTALL)
        table = f"{begin}\n{machine.table()}\n{end}"
        page, count = pattern.subn(lambda _, table=table: table, page)  # type: ignore[misc]
        if count != 1:
            raise ValueError(f"{PAGE.name} needs one pair of marker lines for {name}; it has {count}")
    return page


if __name__ == "__main__":
    PAGE.write_text(generate(PAGE.read_text("utf-8")), "utf-8")
