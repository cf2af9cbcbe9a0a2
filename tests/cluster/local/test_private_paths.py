"""What other users of the machine put in our place is refused, with its owner's name, before anything is sent to it."""

from __future__ import annotations

import os
import socket
import stat
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from elasticctl.api.errors import ClusterError, UnreachableError
from elasticctl.cluster.local import private_paths
from elasticctl.cluster.local.private_paths import check_folder, connect_private, make_private, owner_name, peer_uid
from elasticctl.cluster.local.supervisor_client import request
from elasticctl_launcher.service import client as service

SOMEBODY = 54321


@pytest.fixture
def folder() -> Iterator[Path]:
    """A private folder whose path is short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="ec-") as made:
        yield Path(made)


@pytest.fixture
def listening(folder: Path) -> Iterator[Path]:
    """A socket on which a process listens, and never answers."""
    path = folder / "api.sock"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen()
        yield path


def as_if_owned_by_somebody(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is ours belongs to another user: this process might run as root, and then no one would be refused."""
    mine = os.getuid()
    monkeypatch.setattr(private_paths.os, "getuid", lambda: mine + SOMEBODY)


def test_a_private_folder_is_made_and_closed(folder: Path) -> None:
    make_private(folder / "a/b")
    assert stat.S_IMODE((folder / "a/b").stat().st_mode) == 0o700
    (folder / "a/b").chmod(0o755)
    make_private(folder / "a/b")
    assert stat.S_IMODE((folder / "a/b").stat().st_mode) == 0o700


def test_a_folder_of_another_user_is_refused_by_name(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    me = owner_name(os.getuid())
    as_if_owned_by_somebody(monkeypatch)
    with pytest.raises(ClusterError, match=rf"not a folder of yours: it belongs to {me}\. FIX: "):
        make_private(folder)


def test_a_link_is_refused_wherever_it_leads(folder: Path) -> None:
    (folder / "real").mkdir(mode=0o700)
    (folder / "link").symlink_to("real")
    with pytest.raises(ClusterError, match=r"not a folder of yours: it is a link of .* to real"):
        make_private(folder / "link")
    (folder / "file").touch()
    with pytest.raises(ClusterError, match="not a folder of yours: it is a file of"):
        check_folder(folder / "file")


def test_files_from_a_folder_that_was_open_to_others_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_private(folder / "state")
    (folder / "state/state.db").touch()
    (folder / "state").chmod(0o777)
    check_folder(folder / "state")  # all of it is ours
    (folder / "state").chmod(0o777)
    scanned = os.scandir

    class Planted:
        path = str(folder / "state/state.db")

        def stat(self, *, follow_symlinks: bool) -> os.stat_result:
            return os.stat_result((0o600, 0, 0, 1, SOMEBODY, 0, 0, 0, 0, 0))

    monkeypatch.setattr(private_paths.os, "scandir", lambda path: [*scanned(path), Planted()])
    with pytest.raises(ClusterError, match=f"not a file of yours: it belongs to user {SOMEBODY}"):
        check_folder(folder / "state")


def test_the_other_end_of_a_socket_is_known() -> None:
    one, other = socket.socketpair(socket.AF_UNIX)
    with one, other:
        assert peer_uid(one) == os.geteuid()


def test_we_talk_to_ourselves(listening: Path) -> None:
    with connect_private(listening, 5.0) as connection:
        assert peer_uid(connection) == os.getuid()


def test_nothing_is_sent_to_a_process_of_another_user(listening: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(private_paths, "peer_uid", lambda connection: SOMEBODY)
    with pytest.raises(ClusterError, match=f"a process of user {SOMEBODY} answers there") as refused:
        request(listening, "GET", "/v1/info")
    assert not isinstance(refused.value, UnreachableError)  # which would start a supervisor, or try again


def test_no_socket_is_used_that_is_a_link_or_a_file(folder: Path, listening: Path) -> None:
    (folder / "link.sock").symlink_to(listening)
    (folder / "file.sock").touch()
    for name in ("link.sock", "file.sock"):
        with pytest.raises(ClusterError, match="not a socket of yours"):
            request(folder / name, "GET", "/v1/info")
    with pytest.raises(UnreachableError):
        request(folder / "none.sock", "GET", "/v1/info")


def test_a_worker_shows_its_token_to_no_other_user(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, heard = folder / "rendezvous.sock", list[bytes]()
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen()

        def listen() -> None:
            connection, _ = server.accept()
            with connection:
                connection.settimeout(30)
                heard.append(connection.recv(4096))

        thread = threading.Thread(target=listen)
        thread.start()
        (folder / "token").write_text("secret-token")
        monkeypatch.setattr(service, "peer_uid", lambda connection: SOMEBODY)
        caller = service.ServiceClient(f"unix://{path}", "default", "job", str(folder / "token"))
        with pytest.raises(service.ServiceAway, match=f"belongs to user {SOMEBODY}, not to this user"):
            caller.call("join", {})
        thread.join()
    assert heard == [b""]
