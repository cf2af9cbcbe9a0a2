"""No reader of what others wrote fails in another way than its own. `make fuzz` tries more: docs/reliability.md."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elasticctl.settings.kubeconfig import read_contexts
from elasticctl_controller.rendezvous.requests import MAX_STEP
from tests.support.anything import JSON
from tests.support.fuzz.client import KUBECONFIG
from tests.support.fuzz.inputs import as_json, changed
from tests.support.fuzz.rendezvous import BODIES, PROGRESS, send
from tests.support.fuzz.targets import TARGETS

OTHER = KUBECONFIG["contexts"][1]
SHAPES = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.sampled_from(["a", ""]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["name", "context", "user"]), inner),
    max_leaves=5,
)
"""What YAML of ours can hold; a file that has more in it is refused as a whole, with the line."""


@pytest.mark.parametrize("name", TARGETS)
def test_whatever_it_is_it_is_read_or_refused(name: str, tmp_path: Path) -> None:
    target = TARGETS[name]

    @given(target.inputs)
    @settings(max_examples=target.slice)
    def check(found: object) -> None:
        target.check(tmp_path, found)

    check()


@pytest.mark.parametrize("verb", BODIES)
def test_what_is_changed_was_right_before(verb: str) -> None:
    assert send(verb, as_json(BODIES[verb]))[0] in (None, 200)


@given(JSON | changed(PROGRESS))
@settings(max_examples=100)
def test_a_report_that_is_none_hides_no_other(odd: object) -> None:
    last = MAX_STEP - 1  # what is odd may still be a report, but not of a later step
    status, view = send("report", as_json({"messages": [odd, {**PROGRESS, "step": last}]}))
    assert (status, view.progress and view.progress.step) == (200, last)


@given(SHAPES)
@settings(max_examples=100)
def test_a_context_that_is_none_hides_no_other(tmp_path_factory: pytest.TempPathFactory, odd: object) -> None:
    file = tmp_path_factory.getbasetemp() / "kubeconfig"
    file.write_bytes(as_json({**KUBECONFIG, "contexts": [odd, OTHER]}))
    assert OTHER["name"] in read_contexts([file])
