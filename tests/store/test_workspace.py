"""The submitted folder: named by content, sent once, unpacked exactly and nowhere else."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import random
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from elasticctl_store import storage as storages
from elasticctl_store.errors import DamagedError, MissingError, StorageError
from elasticctl_store.storage import Storage, all_keys
from elasticctl_store.workspace import packing, transfer
from elasticctl_store.workspace.packing import (
    PIECE_BYTES,
    File,
    Folder,
    Item,
    Lead,
    Listing,
    PackedLink,
    Packer,
    lead_of,
    pack_ranges,
    parse,
    unfit,
)
from elasticctl_store.workspace.transfer import unpack
from tests.support.clouds import Cloud

ORIGIN = "0" * 32
CODE = {"train.py": b"import model\n", "lib/model.py": b"x = 1\n" * 500, "lib/data.bin": bytes(range(256)) * 40}


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


class Desk:
    """Contents by path, the target storage, and how often each file was read."""

    def __init__(self, storage: Storage) -> None:
        self.storage = storage
        self.reads: list[str] = []

    def send(self, contents: dict[str, bytes], *more: Item, origin: str = ORIGIN) -> tuple[Listing, transfer.Sent]:
        files = [File(path, len(data), sha256(data), path.endswith(".sh")) for path, data in contents.items()]
        listing = Listing.of([*files, *more])

        def read(file: File) -> Iterator[bytes]:
            self.reads.append(file.path)
            data = contents[file.path]
            yield from (data[at : at + PIECE_BYTES] for at in range(0, len(data), PIECE_BYTES))

        return listing, transfer.send(self.storage, listing, origin, read, lambda count: None)

    def stored(self, prefix: str = "") -> list[str]:
        return list(all_keys(self.storage, prefix))

    @property
    def pack(self) -> str:
        """The key of the only pack."""
        (found,) = self.stored("packs/")
        return found


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(storages.open(str(tmp_path / "kept")))


def contents_of(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and not path.is_symlink()
    }


def fresh(tmp_path: Path, name: str = "copy") -> Path:
    folder = tmp_path / name
    folder.mkdir()
    return folder


# There and back.


def test_a_workspace_is_unpacked_as_it_was(desk: Desk, tmp_path: Path) -> None:
    links = (
        PackedLink("latest", "lib/model.py"),
        PackedLink("lib/up", "../train.py"),
        PackedLink("nowhere", "missing"),
    )
    contents = {
        **CODE,
        "run.sh": b"#!/bin/sh\n",
        "empty": b"",
        "\u00fcber/\u4f60\u597d \n.txt": b"1",
        "lib/twin": CODE["train.py"],
    }
    listing, sent = desk.send(contents, *links, Folder("out/empty"))
    copy = fresh(tmp_path)
    assert unpack(desk.storage, listing.digest, copy) == listing
    assert contents_of(copy) == contents
    assert {path: os.readlink(copy / path) for path in ("latest", "lib/up", "nowhere")} == {
        link.path: link.target for link in links
    }
    assert list((copy / "out/empty").iterdir()) == []
    modes = {path: bool((copy / path).stat().st_mode & stat.S_IXUSR) for path in ("run.sh", "train.py")}
    assert modes == {"run.sh": True, "train.py": False}
    assert sent.files == len(contents) - 1  # two files with the same content


def test_a_large_file_is_sent_in_pieces(desk: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "PACK_BYTES", 3 * PIECE_BYTES)
    noise = random.Random(1).randbytes(2 * PIECE_BYTES + 77)
    contents = {
        "noise": noise,
        "zeros": bytes(3 * PIECE_BYTES),
        "again": noise[PIECE_BYTES:] + noise[:PIECE_BYTES],
        **CODE,
    }
    listing, _ = desk.send(contents)
    packs = desk.stored("packs/")
    assert len(packs) > 1
    assert sum(len(desk.storage.get(key)) for key in packs) < 2 * len(noise) + 50_000  # zeros and code are compressed
    copy = fresh(tmp_path)
    unpack(desk.storage, listing.digest, copy)
    assert contents_of(copy) == contents


@pytest.mark.usefixtures("aws_keys")
def test_both_clouds_store_a_workspace(cloud: Cloud, tmp_path: Path) -> None:
    desk = Desk(cloud.open())
    listing, sent = desk.send(CODE)
    assert sent.files == 3
    _, nothing = desk.send(CODE)
    _, one = desk.send({**CODE, "train.py": b"import sys\n"})
    assert (nothing.files, one.files, one.size_bytes) == (0, 1, 11)
    unpack(desk.storage, listing.digest, fresh(tmp_path))
    assert contents_of(tmp_path / "copy") == CODE


# What is sent.


def test_stored_content_is_not_sent_again(desk: Desk) -> None:
    first, _ = desk.send(CODE)
    before = desk.stored()
    desk.reads.clear()
    second, sent = desk.send(dict(reversed(CODE.items())), origin="1" * 32)
    assert second.digest == first.digest
    assert (sent, desk.reads) == (transfer.Sent(), [])
    assert set(desk.stored()) - set(before) == {f"heads/{'1' * 32}"}


def test_only_new_content_of_a_changed_folder_is_sent(desk: Desk, tmp_path: Path) -> None:
    desk.send(CODE)
    for turn in range(1, 4):
        desk.reads.clear()
        changed = {**CODE, "train.py": f"turn = {turn}\n".encode(), "moved/model.py": CODE["lib/model.py"]}
        listing, sent = desk.send(changed)
        assert (desk.reads, sent.files) == (["train.py"], 1)
        unpack(desk.storage, listing.digest, fresh(tmp_path, f"copy{turn}"))
        assert contents_of(tmp_path / f"copy{turn}") == changed


def test_a_deleted_pack_is_sent_again(desk: Desk, tmp_path: Path) -> None:
    listing, _ = desk.send(CODE)
    pack = desk.pack
    desk.storage.delete([pack])
    assert desk.send(CODE)[1].files == 3
    unpack(desk.storage, listing.digest, fresh(tmp_path))


def test_a_damaged_listing_is_replaced(desk: Desk, tmp_path: Path) -> None:
    listing, _ = desk.send(CODE)
    desk.storage.put(f"listings/{listing.digest}", [b'{"listing": 1}'])
    with pytest.raises(DamagedError):
        unpack(desk.storage, listing.digest, fresh(tmp_path, "none"))
    desk.send(CODE)
    unpack(desk.storage, listing.digest, fresh(tmp_path))
    assert contents_of(tmp_path / "copy") == CODE


def test_a_file_that_cannot_be_read_leaves_no_workspace(desk: Desk) -> None:
    listing = Listing.of([File("a", 1, sha256(b"a"))])

    def read(file: File) -> Iterator[bytes]:
        yield b"a"
        raise RuntimeError("changed")

    with pytest.raises(RuntimeError):
        transfer.send(desk.storage, listing, ORIGIN, read, lambda count: None)
    with pytest.raises(MissingError):
        transfer.find(desk.storage, listing.digest)


def test_two_storages_can_hold_the_same_workspace(desk: Desk, tmp_path: Path) -> None:
    listing, _ = desk.send(CODE)
    other = storages.open(str(tmp_path / "other"))
    for _ in range(2):
        transfer.copy_workspace(desk.storage, other, listing.digest)
    unpack(other, listing.digest, fresh(tmp_path))
    assert contents_of(tmp_path / "copy") == CODE
    pack = desk.pack
    desk.storage.put(pack, [b"damaged"])
    with pytest.raises(DamagedError):
        transfer.copy_workspace(desk.storage, storages.open(str(tmp_path / "third")), listing.digest)


def test_small_files_are_read_in_one_request() -> None:
    packer, contents = Packer(), {f"{number:064x}": f"file {number}\n".encode() for number in range(300)}
    packs = [pack for content, data in contents.items() for pack in packer.add(content, data)] + list(packer.close())
    assert len(packs) == len(pack_ranges(packer.places, contents)) == 1
    apart = [content for number, content in enumerate(contents) if number % 2]
    assert len(pack_ranges(packer.places, apart)) == 150


# Damage.


@pytest.mark.parametrize("cut", [slice(0, -1), slice(1, None), slice(0, 40)])
def test_a_damaged_pack_is_detected(desk: Desk, tmp_path: Path, cut: slice) -> None:
    listing, _ = desk.send(CODE)
    pack = desk.pack
    desk.storage.put(pack, [desk.storage.get(pack)[cut]])
    with pytest.raises(DamagedError):
        unpack(desk.storage, listing.digest, fresh(tmp_path))
    kept = transfer.find(desk.storage, listing.digest)
    with pytest.raises(DamagedError):
        transfer.read_files(desk.storage, kept, [item for item in listing.items if isinstance(item, File)])


def test_files_can_be_read_without_unpacking(desk: Desk) -> None:
    listing, _ = desk.send({**CODE, "empty": b""})
    wanted = [item for item in listing.items if isinstance(item, File) and item.path in ("train.py", "empty")]
    found = transfer.read_files(desk.storage, transfer.find(desk.storage, listing.digest), wanted)
    assert found == {sha256(data): data for data in (CODE["train.py"], b"")}


@given(st.data())
@settings(max_examples=20)
def test_every_flipped_bit_is_detected(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    folder = tmp_path_factory.mktemp("flip")
    desk = Desk(storages.open(str(folder / "kept")))
    listing, _ = desk.send(CODE)
    pack = desk.pack
    content = bytearray(desk.storage.get(pack))
    bit = data.draw(st.integers(0, len(content) * 8 - 1))
    content[bit // 8] ^= 1 << bit % 8
    desk.storage.put(pack, [bytes(content)])
    try:
        unpack(desk.storage, listing.digest, fresh(folder))
    except DamagedError:
        return
    assert contents_of(folder / "copy") == CODE  # a bit that fills up the last byte of a compressed piece


def test_another_workspace_under_the_same_digest_is_refused(desk: Desk, tmp_path: Path) -> None:
    one, _ = desk.send(CODE)
    other, _ = desk.send({"evil.py": b"rm -rf\n"})
    desk.storage.put(f"listings/{one.digest}", [desk.storage.get(f"listings/{other.digest}")])
    with pytest.raises(DamagedError, match="does not match its name"):
        unpack(desk.storage, one.digest, fresh(tmp_path))


def test_a_decompression_bomb_is_not_unpacked(desk: Desk, tmp_path: Path) -> None:
    contents = {"a": b"x" * 1000}
    listing, _ = desk.send(contents)
    document = json.loads(desk.storage.get(f"listings/{listing.digest}"))
    bomb, _ = desk.send({"zeros": bytes(PIECE_BYTES)})
    (place,) = transfer.find(desk.storage, bomb.digest).places[sha256(bytes(PIECE_BYTES))]
    document["places"] = {sha256(contents["a"]): [[place.pack, place.start, place.stored_bytes, 1000]]}
    assert place.stored_bytes > 1000 or document
    desk.storage.put(f"listings/{listing.digest}", [json.dumps(document).encode()])
    with pytest.raises(DamagedError):
        unpack(desk.storage, listing.digest, fresh(tmp_path))


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (MissingError("x"), "no longer exists. FIX: submit the job again from its folder"),
        (DamagedError("bad bytes"), "is damaged (bad bytes). FIX: submit the job again from its folder"),
        (StorageError("no permission"), "cannot get the workspace abcabcabcabc at s3://b: no permission"),
    ],
)
def test_failures_are_described_in_one_line(error: StorageError, said: str) -> None:
    assert said in transfer.describe_failure(error, "s3://b", "abc" * 10)


# What may be unpacked.

FILE = sha256(b"")
NAMES = st.sampled_from(["a", "b", "c", "..", ".", "", "/", "a/b", "\0", "\u00fc", "x" * 300, "\udcff"])
PATHS = st.lists(NAMES, min_size=1, max_size=4).map("/".join)
ITEMS = st.lists(
    st.builds(File, PATHS, st.just(0), st.just(FILE), st.booleans())
    | st.builds(PackedLink, PATHS, PATHS)
    | st.builds(Folder, PATHS),
    max_size=6,
)


LOOPS = [
    [PackedLink("a", "a")],
    [PackedLink("a", "a//a")],
    [PackedLink("a", "a/b")],
    [PackedLink("a", "./a/..")],
    [PackedLink("a", "b"), PackedLink("b", "a")],
    [PackedLink("a", "b"), PackedLink("b", "b/../../a"), PackedLink("c/d", "../a/x")],
]
"""Dangling links. For Python, the real path of the second one is `/a`."""


@given(ITEMS)
@example([PackedLink("a", "a//a")])
@settings(max_examples=100)
def test_nothing_outside_of_the_folder_is_written(tmp_path_factory: pytest.TempPathFactory, items: list[Item]) -> None:
    """Any listing is refused, or everything that it creates, and that its links reach, is in the folder."""
    try:
        listing = parse(json.loads(json.dumps(Listing(tuple(items)).to_json())))
    except (DamagedError, UnicodeEncodeError):
        return
    around = tmp_path_factory.mktemp("around")
    copy, desk = fresh(around), Desk(storages.open(str(around / "kept")))
    transfer.send(desk.storage, listing, ORIGIN, lambda file: iter(()), lambda count: None)
    unpack(desk.storage, listing.digest, copy)
    assert {path.name for path in around.iterdir()} == {"copy", "kept"}
    top = os.path.realpath(copy)
    for path in copy.rglob("*"):
        assert os.path.realpath(path).startswith(top)


@pytest.mark.parametrize("links", LOOPS)
def test_circular_links_are_left_out(desk: Desk, tmp_path: Path, links: list[PackedLink]) -> None:
    """Earlier versions have sent such workspaces, which must still run."""
    listing, _ = desk.send(CODE, *links, PackedLink("z", "train.py"))
    assert listing.loops == tuple(links)
    copy = fresh(tmp_path)
    unpack(desk.storage, listing.digest, copy)
    assert [path.name for path in copy.rglob("*") if path.is_symlink()] == ["z"]


def test_a_chain_of_links_cannot_leave_the_folder() -> None:
    """By their text, both links stay in the folder; resolved by the kernel, the second one leaves it."""
    links = {"p/q/x": "../../r", "p/q/a": "x/../../etc"}
    assert [lead_of(path, links) for path in links] == [Lead.WITHIN, Lead.OUT]
    with pytest.raises(DamagedError, match=r"'p/q/a' of a workspace leads out of it"):
        Listing.of([PackedLink(path, target) for path, target in links.items()] + [Folder("r")])


@pytest.mark.parametrize("links", [{"a": "b", "b": "/etc"}, {"a": "b/a", "b": "/"}, {"a": "/a"}, {"a": "../copy/a"}])
def test_a_circle_through_another_folder_leads_out(links: dict[str, str]) -> None:
    with pytest.raises(DamagedError, match="the link 'a' of a workspace leads out of it"):
        Listing.of(PackedLink(path, target) for path, target in links.items())


@pytest.mark.parametrize(
    "items",
    [
        [File("a", 0, FILE), File("a/b", 0, FILE)],
        [PackedLink("a", "b"), File("a/c", 0, FILE)],
        [File("a", 0, FILE), Folder("a")],
        [Folder("a"), File("a/b", 0, FILE)],
    ],
)
def test_conflicting_items_are_refused(items: list[Item]) -> None:
    for order in itertools.permutations(items):
        with pytest.raises(DamagedError):
            Listing.of(order)


@pytest.mark.parametrize(
    "data",
    [
        None,
        {},
        {"format": "elasticctl-workspace/2", "items": []},
        {"format": "elasticctl-workspace/1"},
        {"format": "elasticctl-workspace/1", "items": [["file", "a"]]},
        {"format": "elasticctl-workspace/1", "items": [["file", "a", -1, FILE, False]]},
        {"format": "elasticctl-workspace/1", "items": [["file", "a", 1, "../x", False]]},
        {"format": "elasticctl-workspace/1", "items": [["pipe", "a"]]},
    ],
)
def test_invalid_listings_are_refused(data: object) -> None:
    with pytest.raises(DamagedError):
        parse(data)


@pytest.mark.parametrize(
    ("path", "wrong"),
    [("a/b", ""), ("a//b", "names"), ("/a", "names"), ("../a", "names"), ("x" * 256, "too long"), ("\udcff", "UTF-8")],
)
def test_valid_and_invalid_paths(path: str, wrong: str) -> None:
    assert (wrong in unfit(path)) if wrong else unfit(path) == ""


def test_the_digest_depends_on_contents_only() -> None:
    """The digest is fixed, because existing jobs name workspaces by it."""
    listing = Listing.of([File("b.py", 3, sha256(b"b=1")), PackedLink("a", "b.py"), Folder("c")])
    assert listing.digest == sha256(
        b'{"format":"elasticctl-workspace/1","items":[["link","a","b.py"],["file","b.py",3,"'
        + sha256(b"b=1").encode()
        + b'",false],["folder","c"]]}'
    )
