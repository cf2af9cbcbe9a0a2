"""What a rank's last lines reveal about its end: the final exception, and whether a lost peer explains it.

Only the final exception counts. A script may log "Connection reset by peer" about its data store, or retry a
collective, and libraries may print more lines after the exception. None of this is related to the rank's end.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass

PEER_SIGNS = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Connection refused",
    "Broken pipe",
    "DistBackendError",
    "DistNetworkError",
    "DistStoreError",
    "ncclRemoteError",
    "ncclSystemError",
    "NCCL communicator was aborted",
    "recvBytes",
    "Timed out waiting",
    "gloo::",
    "/gloo/transport/",
)
"""Words in the errors of torch, gloo and NCCL after the loss of a peer."""
OWN_SIGNS = (
    "ncclInvalidUsage",
    "ncclInvalidArgument",
    "ncclUnhandledCudaError",
    "ncclInternalError",
)
"""NCCL's words for faults of this process itself, also in a DistBackendError, which no lost peer explains."""
PERMANENT = frozenset(
    {"SyntaxError", "IndentationError", "TabError", "ImportError", "ModuleNotFoundError", "NotFiniteError"}
)
"""Exceptions that the script raises again whenever it is started, and NotFiniteError, which is meant to end the job."""

_RANK_PREFIX = re.compile(r"\[rank\d+\]: ?(?!\[)")
"""The prefix that torch's excepthook adds to each line of a traceback. Its C++ log has a bracket instead of the space.
"""
_LOG = re.compile(r"(\[rank\d+\]:)?\[?[IWEF]\d{4} |\[rank\d+\]:\[|\[[IWEF]\d* ")
"""A line of the logs of torch's C++ code or of glog."""
_CODE_LINE = re.compile(r'\s+File ".*", line \d+')
_EXCEPTION = re.compile(r"(?P<type>[A-Za-z_][\w.]*)(: |$)")
_TERMINATED = "terminate called"
_USAGE, _NO_PROGRAM = 2, (126, 127)
_USAGE_LINES = 100
_NO_PROGRAM_ENDS = ("not found", "no such file or directory", "permission denied", "exec format error")
_TRACEBACK = "Traceback (most recent call last):"
_FAULT = "Fatal Python error: "
_CURRENT_THREAD = "Current thread 0x"
_OWN_START = re.compile(r'\s+File ".*/elasticctl_launcher/bootstrap\.py", line \d+')
"""Below the script there is our own start of it, which says nothing."""
_FAULT_LINES = (_FAULT, _CURRENT_THREAD, "Thread 0x", "Extension modules: ")
"""The beginnings of lines, other than frames, that Python's faulthandler prints when a signal ends the process."""
_CPP_LINES = ("frame #", "Exception raised from ", "C++ CapturedTraceback:")
"""The beginnings of the lines of a C++ backtrace."""


@dataclass(frozen=True, slots=True)
class FinalException:
    """The last exception of a rank: its first line, and the remaining lines of its message."""

    line: str
    message: tuple[str, ...]

    @property
    def type(self) -> str:
        """The name of its type without its module; empty for a C++ exception."""
        match = _EXCEPTION.match(self.line)
        return match["type"].rpartition(".")[2] if match else ""

    @property
    def is_permanent(self) -> bool:
        """True if another try cannot help."""
        return self.type in PERMANENT

    @property
    def is_of_peers(self) -> bool:
        """True if the loss of a peer explains it."""
        text = "\n".join((self.line, *self.message))
        return any(sign in text for sign in PEER_SIGNS) and not any(sign in text for sign in OWN_SIGNS)


def find_final_exception(lines: Sequence[str]) -> FinalException | None:
    """Return the exception that ended the process with these last lines; None if they show none."""
    return _find_of_cpp(lines) or _find_of_fault(lines) or _find_of_python(lines)


def shown_lines(lines: Sequence[str], limit: int) -> tuple[str, ...]:
    """Return the last `limit` lines, or, if a signal ended the process, the innermost frames of the thread it hit."""
    start = _start_of_fault(lines)
    if start is None:
        return tuple(lines[-limit:])
    ends = [at for at in range(start + 1, len(lines)) if not lines[at].strip()] + [len(lines)]
    stacks = [lines[begin + 1 : end] for begin, end in itertools.pairwise(ends)]
    stacks = [stack for stack in stacks if stack and stack[0].startswith(_FAULT_LINES[1:3])]
    # A thread without Python code has no stack here. The stack of the main thread is the last one.
    hit = next((stack for stack in stacks if stack[0].startswith(_CURRENT_THREAD)), stacks[-1] if stacks else ())
    return (lines[start], *(line for line in hit if not _OWN_START.match(line)))[:limit]


def is_wrong_use(code: int, lines: Sequence[str]) -> bool:
    """True for a command that cannot work as it is: invalid arguments, or a file or program that does not exist.

    argparse and click exit with 2, and shells with 126 or 127. A script may use these codes for other purposes, so the
    matching words have to be in its output, too.
    """
    last = [line.strip().lower() for line in lines[-_USAGE_LINES:] if line.strip()]
    if code == _USAGE:
        has_usage = any(line.startswith("usage:") for line in last) and any("error" in line for line in last)
        return has_usage or any(line.startswith("cannot open ") or "can't open file " in line for line in last[-1:])
    return code in _NO_PROGRAM and any(line.endswith(_NO_PROGRAM_ENDS) for line in last[-1:])


def begins_last_words(line: str) -> bool:
    """True for the first line of a traceback, or of a C++ exception that ends the process."""
    return _plain(line) == _TRACEBACK or (_TERMINATED in line and "throwing" in line)


def lines_apart_from_exception(lines: Sequence[str], final: FinalException) -> list[str]:
    """Return the `lines` that belong neither to the traceback at their start nor to torch's output about it."""
    last = max((at for at, line in enumerate(lines) if final.line in line), default=len(lines) - 1)
    return [line for line in lines[last + 1 :] if line.strip() and not _is_of_exception(line)]


def _is_of_exception(line: str) -> bool:
    plain = _plain(line)
    marked = plain is not line or line[0].isspace() or _TERMINATED in line
    return bool(marked or _LOG.match(line) or line.startswith((*_CPP_LINES, *_FAULT_LINES)))


def _plain(line: str) -> str:
    """A line without the prefix of torch's excepthook."""
    return _RANK_PREFIX.sub("", line, count=1) if _RANK_PREFIX.match(line) else line


def last_error_line(lines: Sequence[str]) -> str:
    """Return the best substitute for an error without a traceback: the last line with a letter or a digit."""
    return next((line.strip() for line in reversed(lines) if any(map(str.isalnum, line))), "")


def _find_of_python(lines: Sequence[str]) -> FinalException | None:
    """The exception of the last traceback: its first line that is not indented, and the rest of its message."""
    plain = [_plain(line) for line in lines]
    codes = (at for at in reversed(range(len(plain))) if _CODE_LINE.match(plain[at]))
    firsts = (_first_not_indented(plain, at + 1) for at in codes)
    first = next((at for at in firsts if at is not None and _EXCEPTION.match(plain[at])), None)
    if first is None:
        return None
    prefixed = plain[first] is not lines[first]
    message = []
    for at in range(first + 1, len(plain)):
        if _LOG.match(lines[at]) or _TERMINATED in lines[at]:
            continue
        if prefixed and plain[at] is lines[at]:
            break  # torch adds the prefix to every line of the exception, so this line is not part of it
        message.append(plain[at])
    return FinalException(plain[first], tuple(message))


def _first_not_indented(lines: Sequence[str], start: int) -> int | None:
    return next((at for at in range(start, len(lines)) if lines[at].strip() and not lines[at][0].isspace()), None)


def _start_of_fault(lines: Sequence[str]) -> int | None:
    """The index of faulthandler's first line; None if an exception follows, because then another process had ended."""
    for at in reversed(range(len(lines))):
        if lines[at].startswith(_FAULT):
            return at
        if _plain(lines[at]) == _TRACEBACK:
            return None
    return None


def _find_of_fault(lines: Sequence[str]) -> FinalException | None:
    """Python's message about the signal that ended it, such as `Fatal Python error: Segmentation fault`."""
    at = _start_of_fault(lines)
    return None if at is None else FinalException(lines[at], ())


def _find_of_cpp(lines: Sequence[str]) -> FinalException | None:
    """The uncaught C++ exception, which follows the last `terminate called after throwing`."""
    last = next((at for at in reversed(range(len(lines))) if _TERMINATED in lines[at]), None)
    if last is None or "throwing" not in lines[last]:
        return None  # "without an active exception": a thread was still running at exit
    of_python = _start_of_fault(lines)
    end = of_python if of_python is not None and of_python > last else len(lines)
    message = [line.strip() for line in lines[last + 1 : end]]
    what = next((line for line in message if line.startswith("what():")), "")
    return FinalException(what.removeprefix("what():").strip() or lines[last].strip(), (lines[last], *message))
