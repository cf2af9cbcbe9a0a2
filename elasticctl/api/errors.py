"""Every error this project raises on purpose, in one tree.

    ElasticctlError                 exit code 1
    ├── UsageError                  2   the command line or a file it names is wrong
    │   ├── SpecError                   a manifest or job spec: names the field path and line
    │   ├── ConfigError                 the contexts file
    │   └── TemplateError               a job template
    ├── ClusterError                3   the cluster refused or cannot be reached
    │   ├── NotFoundError               no such job, worker or context
    │   ├── ConflictError               the name is taken, or the object changed under us
    │   ├── UnreachableError            no answer
    │   ├── CredentialsError            the cluster does not accept the credentials
    │   ├── ForbiddenError              it accepts them, but does not allow the request
    │   ├── BusyError                   it is overloaded: try again later
    │   ├── ExpiredError                it no longer keeps the requested version
    │   ├── TooLargeError               its answer is longer than the caller reads
    │   └── StorageFullError            the disk is full: nothing was written
    ├── JobStorageError         3   a job's storage (checkpoints, workspace, logs) failed
    └── JobFailedError              1   the job itself ended badly

Each message says what failed, the value, and what to do next ("FIX: ..."), in one or two lines. The
training side has a tree of its own (`elasticctl_store.errors`), because it imports nothing of the client.
"""

from __future__ import annotations


class ElasticctlError(Exception):
    """Base of all errors shown to a user as one clear line; `exit_code` is the process's."""

    exit_code = 1


class UsageError(ElasticctlError):
    """The input is wrong; nothing was done."""

    exit_code = 2


class SpecError(UsageError):
    """A manifest or spec has a wrong field.

    `path` is the field path (`spec.maxReplicas`), `line` its 1-based line in the file or None.
    """

    def __init__(self, message: str, *, path: str = "", line: int | None = None, source: str = "") -> None:
        self.path, self.line, self.source = path, line, source
        where = ":".join(str(part) for part in (source, line) if part)
        super().__init__(": ".join(part for part in (where, path, message) if part))


class ConfigError(UsageError):
    """The contexts file cannot be read, parsed or written."""


class TemplateError(UsageError):
    """A job template does not exist or does not render to an ElasticJob."""


class ClusterError(ElasticctlError):
    """The cluster refused the request or failed to carry it out."""

    exit_code = 3


class NotFoundError(ClusterError):
    """The named job, worker or context does not exist."""


class ConflictError(ClusterError):
    """The name is taken, or the object changed since it was read."""


class UnreachableError(ClusterError):
    """No answer from the cluster within the time allowed."""


class CredentialsError(ClusterError):
    """The cluster does not accept the credentials: there are none, or they have expired."""


class ForbiddenError(ClusterError):
    """The credentials may not do this, or the cluster's rules forbid the object; the message names the request."""


class BusyError(ClusterError):
    """The cluster is overloaded; `retry_after_s` is how long it asks to wait (None: it does not say)."""

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class ExpiredError(ClusterError):
    """The version that a watch or a page of a list starts from is too old: list again."""


class TooLargeError(ClusterError):
    """The answer is longer than the caller wants to read."""


class StorageFullError(ClusterError):
    """The disk is full; nothing was written."""


class JobStorageError(ElasticctlError):
    """A storage URL cannot be reached, read or written, or its content is damaged."""

    exit_code = 3


class JobFailedError(ElasticctlError):
    """The job that the command waited for did not succeed."""
