"""The files by which a launcher program finds the workers, in a private folder of each worker.

    hostfile             one line `HOST slots=N` per worker, in Open MPI's format
    discover_hosts.sh    prints one line `HOST:N` per worker, in Horovod's format
    workers.json         the address at which each worker accepts commands
    bin/ssh              runs a command on another worker; comes first in the program's PATH

Each file is replaced atomically, so a reader sees the members of one generation.
"""

from __future__ import annotations

import ipaddress
import json
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from elasticctl_protocol import variables
from elasticctl_protocol.requests import Member

_DISCOVERY = """#!/bin/sh
while read -r host slots; do echo "$host:${{slots#slots=}}"; done < {hostfile}
"""
_SSH = """#!/bin/sh
exec {python} -m elasticctl_launcher.launcher_role.rsh "$@"
"""
_ON_LOOPBACK = {
    "OMPI_MCA_oob_tcp_if_include": "lo",
    "OMPI_MCA_btl_tcp_if_include": "lo",
    "OMPI_MCA_btl": "self,tcp",
}
"""For workers on one machine: Open MPI takes them for several machines, whose shared memory would have clashing names.
"""


class HostFiles:
    """The files of one worker, in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.hostfile, self.discovery = folder, folder / "hostfile", folder / "discover_hosts.sh"
        (folder / "bin").mkdir()
        self.write([])
        _write(self.discovery, _DISCOVERY.format(hostfile=shlex.quote(str(self.hostfile))), 0o700)
        _write(folder / "bin/ssh", _SSH.format(python=shlex.quote(sys.executable)), 0o700)

    def write(self, members: Sequence[Member]) -> None:
        """Write these members of the group, in order of rank."""
        where = {each.name: [host_of(each), each.host, each.port] for each in members}
        _write(self.folder / "workers.json", json.dumps(where), 0o600)
        lines = (f"{host_of(each)} slots={each.slots}\n" for each in members)
        _write(self.hostfile, "".join(lines), 0o600)

    def environment(self, environ: Mapping[str, str], *, on_loopback: bool) -> dict[str, str]:
        """Return `environ` extended for the launcher program, and for its commands on other workers."""
        hostfile, path = str(self.hostfile), environ.get("PATH", os.defpath)
        return {
            "OMPI_MCA_plm_rsh_agent": "ssh",
            "OMPI_MCA_orte_default_hostfile": hostfile,
            # Otherwise Open MPI's daemons would outlive the connection that started them.
            "OMPI_MCA_orte_leave_session_attached": "1",
            "PRTE_MCA_prte_default_hostfile": hostfile,
            "PRTE_MCA_prte_leave_session_attached": "1",
            **(_ON_LOOPBACK if on_loopback else {}),
            **environ,
            "PATH": os.pathsep.join((str(self.folder / "bin"), path)),
            variables.HOSTFILE: hostfile,
            variables.DISCOVER_HOSTS: str(self.discovery),
        }


def host_of(member: Member) -> str:
    """Return a member's name in the files: its address, or its name if all members share one address."""
    return member.name if ":" in member.host or is_loopback(member.host) else member.host


def is_loopback(address: str) -> bool:
    """True for an address of the local cluster, whose workers share one machine."""
    return ipaddress.ip_address(address).is_loopback


def address_of(hostfile: Path, host: str) -> tuple[str, int] | None:
    """Return the (host, port) at which the worker `host` accepts commands; None if there is no such worker.

    `host` is the worker's name, or its name in the files. Raises OSError if the files do not exist.
    """
    for name, (known, address, port) in json.loads((hostfile.parent / "workers.json").read_text()).items():
        if host in (name, known):
            return str(address), int(port)
    return None


def _write(path: Path, text: str, mode: int) -> None:
    partial = path.with_name(f"{path.name}.new")
    partial.write_text(text)
    partial.chmod(mode)
    partial.replace(path)
