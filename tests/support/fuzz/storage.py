"""What a storage answers: listings, journal entries, share documents, workspaces."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from elasticctl_store.checkpoints import commits, entries, reader
from elasticctl_store.checkpoints.entries import Commit, Retention
from elasticctl_store.errors import DamagedError, StorageError
from elasticctl_store.storage import gcs_responses, s3_responses
from elasticctl_store.storage.base import Location
from elasticctl_store.storage.http import HttpResponse
from elasticctl_store.storage.local import LocalStorage
from elasticctl_store.workspace import packing
from tests.support.fuzz.inputs import as_json, changed, changed_bytes

SAMPLES = Path(__file__).parents[2] / "train/checkpoint/samples"
PLACE = Location("s3", "bucket", "jobs/", {})
KEEP = Retention(last=1, every_s=60.0, best=2, metric="loss")


def _is_commit(text: str) -> bool:
    return json.loads(text)["kind"] == "commit"


def _newest(sample: str) -> Any:
    entries_of_sample = (path.read_text() for path in sorted((SAMPLES / sample).glob("journal/*")))
    return json.loads(next(filter(_is_commit, entries_of_sample)))


COMMIT, PATCHED_COMMIT = _newest("two-ranks"), _newest("tables")
SHARES = [json.loads(path.read_text()) for path in sorted((SAMPLES / "two-ranks").glob("data/*/share-*.json"))]
PATCHED_SHARES = [json.loads((SAMPLES / "tables" / ref["key"]).read_text()) for ref in PATCHED_COMMIT["shares"]]
GOOD = entries.decode_commit(as_json(COMMIT).replace(b", ", b",").replace(b": ", b":"), 2)
WORKSPACE = {
    "format": packing.FORMAT,
    "items": [["file", "a/train.py", 12, "0" * 64, True], ["link", "b", "a/train.py"], ["folder", "c"]],
}
S3_LISTING = b"""<?xml version="1.0"?><ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><KeyCount>2</KeyCount>
<IsTruncated>false</IsTruncated><Contents><Key>jobs/a</Key></Contents><Contents><Key>jobs/b</Key></Contents></ListBucketResult>"""
S3_ERROR = b"<?xml version='1.0'?><Error><Code>AccessDenied</Code><Message>no</Message><Region>x</Region></Error>"
GCS_LISTING = {"kind": "storage#objects", "items": [{"name": "jobs/a"}, {"name": "jobs/b"}], "nextPageToken": "x"}
GCS_ERROR = {"error": {"code": 403, "message": "no", "errors": [{"reason": "rateLimitExceeded"}]}}

STATUSES = st.sampled_from([200, 301, 400, 401, 403, 404, 412, 429, 500, 503, 507])
S3_ANSWERS = st.tuples(STATUSES, changed_bytes(S3_LISTING, S3_ERROR))
GCS_ANSWERS = st.tuples(
    STATUSES,
    (changed(GCS_LISTING) | changed(GCS_ERROR)).map(as_json) | changed_bytes(as_json(GCS_LISTING), as_json(GCS_ERROR)),
)


def _sealed(body: Any) -> bytes:
    """An entry that says of itself that it is whole: only its fields are wrong."""
    if not isinstance(body, dict):
        return as_json(body)
    fields = {name: value for name, value in body.items() if name != "sha256"}
    whole = {**fields, "sha256": entries.digest_of(fields)}
    return json.dumps(whole, sort_keys=True, separators=(",", ":")).encode()


PATCHED = entries.decode_commit(_sealed(PATCHED_COMMIT), PATCHED_COMMIT["position"])
ENTRIES = (changed(COMMIT) | changed({**PATCHED_COMMIT, "position": 2})).map(_sealed) | changed_bytes(_sealed(COMMIT))
DOCUMENTS = changed(SHARES) | changed(PATCHED_SHARES) | changed_bytes(reader.seal(SHARES[0]))
WORKSPACES = changed(WORKSPACE)


def check_s3(answer: tuple[int, bytes]) -> None:
    """An answer of S3: a listing or a StorageError; and any refusal has words."""
    response = HttpResponse(answer[0], {}, answer[1])
    s3_responses.judge(response)
    assert str(s3_responses.as_error(response, s3_responses.LIST, "", PLACE))
    for read in (s3_responses.check_write, s3_responses.check_completion, s3_responses.upload_id):
        with suppress(StorageError):
            read(response)
    with suppress(StorageError):
        s3_responses.names(s3_responses.parse_listing(response.body))


def check_gcs(answer: tuple[int, bytes]) -> None:
    """An answer of GCS, likewise."""
    response = HttpResponse(answer[0], {}, answer[1])
    gcs_responses.judge(response)
    with suppress(StorageError):
        gcs_responses.stored_crc32c(response, "a")
    assert str(gcs_responses.as_error(response, gcs_responses.LIST, "", PLACE))
    with suppress(StorageError):
        gcs_responses.names(gcs_responses.parse_listing(response))


def check_entry(data: bytes) -> None:
    """An entry of a journal: an Entry with which all can be done that is done with one, or DamagedError."""
    try:
        entry = entries.decode(data, GOOD.position)
    except DamagedError:
        return
    assert json.loads(entries.encode(entry))
    if isinstance(entry, Commit):
        entries.commits_to_delete([GOOD, entry], KEEP)
        assert entry.folder


def check_documents(found: Any) -> None:
    """The share documents of a commit: Contents, or DamagedError."""
    try:
        if isinstance(found, bytes):
            found = [reader.load_document("a", found), SHARES[1]]
        if isinstance(found, list) and len(found) in (len(PATCHED_SHARES), len(SHARES)):
            reader.parse(GOOD if len(found) == len(SHARES) else PATCHED, found)
    except DamagedError:
        return


def check_workspace(data: Any) -> None:
    """The list of a workspace's files: a Listing that names nothing outside, or DamagedError."""
    try:
        listing = packing.parse(data)
    except DamagedError:
        return
    assert not any(packing.unfit(item.path) for item in listing.items)


def check_journal(data: bytes) -> None:
    """A journal with one entry that may be anything, between two good ones: those are found."""
    folder = Path("run")
    storage = LocalStorage(folder)
    good = [entries.encode(entries.decode_commit(_sealed({**COMMIT, "position": at}), at)) for at in (1, 3)]
    for position, entry in zip((1, 2, 3), (good[0], data, good[1]), strict=True):
        path = folder / entries.key_of(position)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(entry)
    assert {1, 3} <= {commit.position for commit in commits.read_commits(storage)}
