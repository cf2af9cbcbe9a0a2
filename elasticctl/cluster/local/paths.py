"""Where the local cluster keeps its state: one private folder per user, and two sockets with short paths.

<state>/state.db            jobs, pods, events (SQLite)
<state>/secret              key of the workers' tokens, 0600
<state>/secrets/            secrets that jobs refer to, 0600
<state>/workspaces/         copies of the folders that jobs run in
<state>/supervisor.log      the supervisor's log
<state>/pods/<uid>/         one worker: its log, its exit, its token
<sockets>/api.sock          for the command line
<sockets>/rendezvous.sock   for the workers
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from elasticctl.cluster.local.private_paths import make_private, storage_error
from elasticctl_protocol import variables

MAX_SOCKET_PATH_BYTES = 100
"""sun_path holds 108 bytes on Linux and 104 on macOS, the final NUL included."""


@dataclass(frozen=True, slots=True)
class LocalPaths:
    """The files of one local cluster; `sockets` is inside `state` unless that path is too long for a socket."""

    state: Path
    sockets: Path

    @property
    def database(self) -> Path:
        return self.state / "state.db"

    @property
    def secret(self) -> Path:
        return self.state / "secret"

    @property
    def workspaces(self) -> Path:
        """Copies of the folders that jobs run in."""
        return self.state / "workspaces"

    @property
    def secrets(self) -> Path:
        """Secrets that jobs name, a folder for each namespace."""
        return self.state / "secrets"

    @property
    def supervisor_log(self) -> Path:
        return self.state / "supervisor.log"

    @property
    def supervisor_lock(self) -> Path:
        """Held by the supervisor while it runs."""
        return self.state / "supervisor.lock"

    @property
    def start_lock(self) -> Path:
        """Held by the client that is starting the supervisor."""
        return self.state / "start.lock"

    @property
    def pods(self) -> Path:
        return self.state / "pods"

    @property
    def storage(self) -> Path:
        """The default storage of jobs."""
        return self.state / "storage"

    @property
    def api_socket(self) -> Path:
        return self.sockets / "api.sock"

    @property
    def rendezvous_socket(self) -> Path:
        return self.sockets / "rendezvous.sock"

    def pod_dir(self, uid: str) -> Path:
        """The folder of one worker's incarnation."""
        return self.pods / uid

    def log_file(self, uid: str) -> Path:
        """The output of one worker's incarnation."""
        return self.pod_dir(uid) / "log"

    def create(self) -> None:
        """Create the folders, private to this user; ClusterError when that fails or they belong to another user."""
        for folder in (self.state, self.pods, self.sockets):
            make_private(folder)
        if self.sockets.parent != self.state:
            _remember_sockets(self)


def local_paths(environ: Mapping[str, str] = os.environ) -> LocalPaths:
    """Find this user's local cluster; `ELASTICCTL_HOME` moves it. Reads at most one link and creates nothing."""
    home = environ.get(variables.HOME)
    if home:
        state = Path(os.path.expanduser(home)).absolute() / "local"
    else:
        import platformdirs

        state = platformdirs.user_state_path("elasticctl") / "local"
    return LocalPaths(state=state, sockets=_sockets_for(state))


def _sockets_for(state: Path) -> Path:
    near = state / "run"
    if len(os.fsencode(near / "rendezvous.sock")) <= MAX_SOCKET_PATH_BYTES:
        return near
    # TMPDIR may differ between shells; the link keeps all of them on the folder that was chosen first.
    if near.is_symlink():
        return near.readlink()
    import hashlib
    import tempfile

    name = hashlib.sha256(os.fsencode(state)).hexdigest()[:16]
    return Path(tempfile.gettempdir()) / f"elasticctl-{os.getuid()}-{name}"


def _remember_sockets(paths: LocalPaths) -> None:
    link = paths.state / "run"
    try:
        link.symlink_to(paths.sockets)
    except FileExistsError:
        pass
    except OSError as e:
        raise storage_error(f"make the link {link}", e) from e
