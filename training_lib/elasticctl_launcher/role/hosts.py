"""The files by which a launcher program finds the workers, in a folder of each worker's own.

    hostfile             `HOST slots=N` a line, as Open MPI has it
    discover_hosts.sh    prints `HOST:N` a line, as Horovod has it
    workers.json         where each worker takes commands
    bin/ssh              runs a command on another worker; in the program's PATH before any other

They are replaced as a whole, so whoever reads one sees one group of workers.
"""

from __future__ import annotations

import ipaddress
import json
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

HOSTFILE_VARIABLE = "ELASTICCTL_HOSTFILE"
DISCOVERY_VARIABLE = "ELASTICCTL_DISCOVER_HOSTS"
_DISCOVERY = """#!/bin/sh
while read -r host slots; do echo "$host:${{slots#slots=}}"; done < {hostfile}
"""
_SSH = """#!/bin/sh
exec {python} -m elasticctl_launcher.role.rsh "$@"
"""
_ON_LOOPBACK = {
    "OMPI_MCA_oob_tcp_if_include": "lo",
    "OMPI_MCA_btl_tcp_if_include": "lo",
    "OMPI_MCA_btl": "self,tcp",
}
"""Where workers share one machine, Open MPI takes them for several, whose shared memory has the same names."""


class HostFiles:
    """Those of one worker, in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.hostfile, self.discovery = folder, folder / "hostfile", folder / "discover_hosts.sh"
        (folder / "bin").mkdir()
        self.write([])
        _write(self.discovery, _DISCOVERY.format(hostfile=shlex.quote(str(self.hostfile))), 0o700)
        _write(folder / "bin/ssh", _SSH.format(python=shlex.quote(sys.executable)), 0o700)

    def write(self, members: Sequence[Mapping[str, Any]]) -> None:
        """Name these members of the group, in order of rank."""
        where = {each["name"]: [host_of(each), each["host"], each["port"]] for each in members}
        _write(self.folder / "workers.json", json.dumps(where), 0o600)
        lines = (f"{host_of(each)} slots={each['slots']}\n" for each in members)
        _write(self.hostfile, "".join(lines), 0o600)

    def environment(self, environ: Mapping[str, str], *, on_loopback: bool) -> dict[str, str]:
        """`environ` for the launcher program, and for what it runs on other workers."""
        hostfile, path = str(self.hostfile), environ.get("PATH", os.defpath)
        return {
            "OMPI_MCA_plm_rsh_agent": "ssh",
            "OMPI_MCA_orte_default_hostfile": hostfile,
            # Otherwise Open MPI's daemons would outlive the connection that has started them.
            "OMPI_MCA_orte_leave_session_attached": "1",
            "PRTE_MCA_prte_default_hostfile": hostfile,
            "PRTE_MCA_prte_leave_session_attached": "1",
            **(_ON_LOOPBACK if on_loopback else {}),
            **environ,
            "PATH": os.pathsep.join((str(self.folder / "bin"), path)),
            HOSTFILE_VARIABLE: hostfile,
            DISCOVERY_VARIABLE: str(self.discovery),
        }


def host_of(member: Mapping[str, Any]) -> str:
    """What a member is called in the files: its address, and its name where all have the same one."""
    address, name = str(member["host"]), str(member["name"])
    return name if ":" in address or is_loopback(address) else address


def is_loopback(address: str) -> bool:
    """Is it the local cluster's, all of whose workers are on one machine?"""
    return ipaddress.ip_address(address).is_loopback


def address_of(hostfile: Path, host: str) -> tuple[str, int] | None:
    """Where a worker takes commands that is called `host` in the files, or has that name; None for no such worker.

    Raises OSError where there are no such files.
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
