"""What a rank's last lines say about its end: which exception was the last, and whether a lost peer explains it.

Only the final exception counts. A script that logs "Connection reset by peer" about its data store, or retries a
collective, has said nothing about its own end; nor has the noise that libraries print after the exception.
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
"""What errors of torch, gloo and NCCL say when a peer was lost."""
OWN_SIGNS = (
    "ncclInvalidUsage",
    "ncclInvalidArgument",
    "ncclUnhandledCudaError",
    "ncclInternalError",
)
"""What NCCL says of a fault of this very process, also in a DistBackendError: no peer's loss explains it."""
PERMANENT = frozenset(
    {"SyntaxError", "IndentationError", "TabError", "ImportError", "ModuleNotFoundError", "NotFiniteError"}
)
"""Exceptions that the same script raises again wherever and whenever it is started, and the one that was to end it."""

_RANK_PREFIX = re.compile(r"\[rank\d+\]: ?(?!\[)")
"""What torch's excepthook puts before each line of a traceback; its C++ log has a bracket in place of the blank."""
_LOG = re.compile(r"(\[rank\d+\]:)?\[?[IWEF]\d{4} |\[rank\d+\]:\[|\[[IWEF]\d* ")
"""A line of the logs of torch's C++ parts or of glog."""
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
"""How the lines begin, other than those of the stacks, that Python's faulthandler prints when a signal ends it."""
_CPP_LINES = ("frame #", "Exception raised from ", "C++ CapturedTraceback:")
"""How the lines of a C++ backtrace begin."""


@dataclass(frozen=True, slots=True)
class FinalException:
    """The last exception of a rank: its first line, and its whole message line by line."""

    line: str
    message: tuple[str, ...]

    @property
    def type(self) -> str:
        """The name of its type without its module; empty for a C++ exception."""
        match = _EXCEPTION.match(self.line)
        return match["type"].rpartition(".")[2] if match else ""

    @property
    def is_permanent(self) -> bool:
        """True if starting the script again cannot help."""
        return self.type in PERMANENT

    @property
    def is_of_peers(self) -> bool:
        """True if the loss of a peer explains it."""
        text = "\n".join((self.line, *self.message))
        return any(sign in text for sign in PEER_SIGNS) and not any(sign in text for sign in OWN_SIGNS)


def find_final_exception(lines: Sequence[str]) -> FinalException | None:
    """The exception that ended the process which printed these last lines; None if they show none."""
    return _find_of_cpp(lines) or _find_of_fault(lines) or _find_of_python(lines)


def shown_lines(lines: Sequence[str], limit: int) -> tuple[str, ...]:
    """The last `limit` lines; of a process that a signal ended, the innermost frames of the thread that it hit."""
    start = _start_of_fault(lines)
    if start is None:
        return tuple(lines[-limit:])
    ends = [at for at in range(start + 1, len(lines)) if not lines[at].strip()] + [len(lines)]
    stacks = [lines[begin + 1 : end] for begin, end in itertools.pairwise(ends)]
    stacks = [stack for stack in stacks if stack and stack[0].startswith(_FAULT_LINES[1:3])]
    # A thread of C++ alone has no stack here; the main thread's is the last.
    hit = next((stack for stack in stacks if stack[0].startswith(_CURRENT_THREAD)), stacks[-1] if stacks else ())
    return (lines[start], *(line for line in hit if not _OWN_START.match(line)))[:limit]


def is_wrong_use(code: int, lines: Sequence[str]) -> bool:
    """True for a command that cannot work as it is typed: arguments that a script refuses, a file or program not there.

    argparse and click exit with 2, and shells with 126 or 127. A script may do so for reasons of its own, so the words
    that go with it have to be there too.
    """
    last = [line.strip().lower() for line in lines[-_USAGE_LINES:] if line.strip()]
    if code == _USAGE:
        has_usage = any(line.startswith("usage:") for line in last) and any("error" in line for line in last)
        return has_usage or any(line.startswith("cannot open ") or "can't open file " in line for line in last[-1:])
    return code in _NO_PROGRAM and any(line.endswith(_NO_PROGRAM_ENDS) for line in last[-1:])


def begins_last_words(line: str) -> bool:
    """Is this the first line of a traceback, or of C++ that ends the process?"""
    return _plain(line) == _TRACEBACK or (_TERMINATED in line and "throwing" in line)


def beside_last_words(lines: Sequence[str], final: FinalException) -> list[str]:
    """Of lines from a traceback on, those that are no part of it, nor of what torch prints about it."""
    last = max((at for at, line in enumerate(lines) if final.line in line), default=len(lines) - 1)
    return [line for line in lines[last + 1 :] if line.strip() and not _is_of_exception(line)]


def _is_of_exception(line: str) -> bool:
    plain = _plain(line)
    marked = plain is not line or line[0].isspace() or _TERMINATED in line
    return bool(marked or _LOG.match(line) or line.startswith((*_CPP_LINES, *_FAULT_LINES)))


def _plain(line: str) -> str:
    """A line without what torch's excepthook puts before it."""
    return _RANK_PREFIX.sub("", line, count=1) if _RANK_PREFIX.match(line) else line


def last_error_line(lines: Sequence[str]) -> str:
    """What comes nearest to an error without a traceback: the last line that says something."""
    return next((line.strip() for line in reversed(lines) if any(map(str.isalnum, line))), "")


def _find_of_python(lines: Sequence[str]) -> FinalException | None:
    """The last traceback's exception: its first line that is not indented, and what belongs to its message."""
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
            break  # torch marks every line of the exception; this one is somebody else's
        message.append(plain[at])
    return FinalException(plain[first], tuple(message))


def _first_not_indented(lines: Sequence[str], start: int) -> int | None:
    return next((at for at in range(start, len(lines)) if lines[at].strip() and not lines[at][0].isspace()), None)


def _start_of_fault(lines: Sequence[str]) -> int | None:
    """Where faulthandler began to print, unless an exception followed: then another process had ended."""
    for at in reversed(range(len(lines))):
        if lines[at].startswith(_FAULT):
            return at
        if _plain(lines[at]) == _TRACEBACK:
            return None
    return None


def _find_of_fault(lines: Sequence[str]) -> FinalException | None:
    """What a signal ended, in Python's words: `Fatal Python error: Segmentation fault`."""
    at = _start_of_fault(lines)
    return None if at is None else FinalException(lines[at], ())


def _find_of_cpp(lines: Sequence[str]) -> FinalException | None:
    """The exception that nobody caught in C++: what follows the last `terminate called after throwing`."""
    last = next((at for at in reversed(range(len(lines))) if _TERMINATED in lines[at]), None)
    if last is None or "throwing" not in lines[last]:
        return None  # "without an active exception": a thread that was still running at the end
    of_python = _start_of_fault(lines)
    end = of_python if of_python is not None and of_python > last else len(lines)
    message = [line.strip() for line in lines[last + 1 : end]]
    what = next((line for line in message if line.startswith("what():")), "")
    return FinalException(what.removeprefix("what():").strip() or lines[last].strip(), (lines[last], *message))
