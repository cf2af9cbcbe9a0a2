"""No reader of what others wrote fails in another way than its own. See docs/recovery.md."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elasticctl.settings.kubeconfig import read_contexts
from elasticctl_controller.rendezvous.requests import MAX_STEP
from tests.support.anything import JSON
from tests.support.fuzz import client, command_line, rendezvous, storage
from tests.support.fuzz.client import KUBECONFIG
from tests.support.fuzz.inputs import as_json, changed
from tests.support.fuzz.rendezvous import BODIES, PROGRESS, send

OTHER = KUBECONFIG["contexts"][1]
SHAPES = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.sampled_from(["a", ""]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["name", "context", "user"]), inner),
    max_leaves=5,
)
"""What YAML of ours can hold; a file that has more in it is refused as a whole, with the line."""


READERS: Mapping[str, tuple[st.SearchStrategy[Any], Callable[..., None]]] = {
    "S3's answers": (storage.S3_ANSWERS, storage.check_s3),
    "GCS's answers": (storage.GCS_ANSWERS, storage.check_gcs),
    "entries of a journal": (storage.ENTRIES, storage.check_entry),
    "journals": (storage.ENTRIES, storage.check_journal),
    "share documents": (storage.DOCUMENTS, storage.check_documents),
    "lists of workspaces": (storage.WORKSPACES, storage.check_workspace),
    "requests of workers": (rendezvous.REQUESTS, rendezvous.check_request),
    "YAML": (client.YAML, client.check_yaml),
    "manifests": (client.MANIFESTS, client.check_manifest),
    "templates": (client.TEMPLATES, client.check_template),
    "kubeconfig": (client.KUBECONFIGS, client.check_kubeconfig),
    "contexts": (client.CONFIGS, client.check_config),
    "command lines": (command_line.COMMAND_LINES, command_line.check_command_line),
    "manifest files": (command_line.MANIFEST_FILES, command_line.check_manifest_file),
}
"""What others wrote: input that is almost right, and what must hold of who reads it, in a folder for its files."""


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The readers' files: a new folder for each input would take more time than they do."""
    with contextlib.chdir(tmp_path_factory.mktemp("input")):
        yield


@pytest.mark.parametrize("name", READERS)
@given(st.data())
@settings(max_examples=80)
def test_whatever_it_is_it_is_read_or_refused(name: str, data: st.DataObject) -> None:
    inputs, check = READERS[name]
    check(data.draw(inputs))


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
