"""The files that name the workers, as Open MPI and Horovod read them."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from elasticctl_launcher.launcher_role.hosts import HostFiles, address_of, host_of
from elasticctl_protocol.requests import Member


def member(name: str, host: str, slots: int = 1) -> Member:
    return Member(f"uid-{name}", name, host, 7000, slots)


def test_the_files_list_the_current_members(tmp_path: Path) -> None:
    folder = tmp_path / "with a space"
    folder.mkdir()
    files = HostFiles(folder)

    def discovered() -> list[str]:
        return subprocess.run([files.discovery], capture_output=True, text=True, check=True).stdout.splitlines()

    assert (files.hostfile.read_text(), discovered()) == ("", [])
    files.write([member("a-1", "10.0.0.5", 4), member("a-0", "10.0.0.6", 8)])
    assert files.hostfile.read_text() == "10.0.0.5 slots=4\n10.0.0.6 slots=8\n"
    assert discovered() == ["10.0.0.5:4", "10.0.0.6:8"]
    files.write([member("a-0", "10.0.0.6", 8)])
    assert discovered() == ["10.0.0.6:8"]
    assert address_of(files.hostfile, "10.0.0.6") == address_of(files.hostfile, "a-0") == ("10.0.0.6", 7000)
    assert address_of(files.hostfile, "a-1") is None


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "fd00::7"])
def test_the_name_replaces_an_address_that_hostfiles_cannot_hold(host: str) -> None:
    assert host_of(member("a-0", host)) == "a-0"


def test_variables_of_the_user_take_precedence(tmp_path: Path) -> None:
    found = HostFiles(tmp_path).environment(
        {"PATH": "/usr/bin", "OMPI_MCA_btl": "self,vader", "OMPI_MCA_orte_default_hostfile": "mine"}, on_loopback=True
    )
    assert (found["OMPI_MCA_btl"], found["OMPI_MCA_orte_default_hostfile"]) == ("self,vader", "mine")
    assert found["PATH"] == f"{tmp_path}/bin:/usr/bin"
    assert "OMPI_MCA_btl" not in HostFiles(tmp_path / "bin").environment({}, on_loopback=False)
