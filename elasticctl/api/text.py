"""Values, counts, durations and likely names as text: short, on one line, and safe to print on a terminal."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

_SHOWN_CHARS = 60
_FOR_EVER_S = 1e12
"""Durations calculated from odd numbers may be infinite; this is the most that is printed."""


# Control characters, except tabs and newlines; characters that reverse the direction of text or are invisible, except
# the joiners that scripts and emoji need; and lone surrogates, which cannot be printed.
_CONTROLS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff\ufeff"
    "\ufff9-\ufffb\U000e0000-\U000e0fff]"
)
_PRIVATE = ("KEY", "TOKEN", "SECRET", "PASSW", "PASSPHRASE", "CREDENTIAL")
_LOGIN = re.compile(r"(?<=://)[^\s/@]+@")
"""A name and a password, or a token, in a URL."""
COLOUR_CODES = re.compile(r"\x1b\[[0-9;:]{0,40}m")
_PLAIN_AGAIN = "\x1b[0m"


def visible(text: str) -> str:
    """Escape the control characters of untrusted text, except for tabs and newlines.

    A terminal would obey them: they can move the cursor, rename the window, and hide or rewrite what is printed. The
    escapes are those of JSON, so that JSON keeps its meaning.
    """
    return text if text.isprintable() else _CONTROLS.sub(_escape, text)


def _escape(found: re.Match[str]) -> str:
    """Escape a character as JSON does, with one beyond 16 bits as a surrogate pair."""
    units = found[0].encode("utf-16-be", "surrogatepass").hex()
    return "".join(f"\\u{units[at : at + 4]}" for at in range(0, len(units), 4))


def visible_line(text: str) -> str:
    """Escape a line of a log like `visible`, but keep its colours, which end with the line."""
    text = text.removesuffix("\r")
    if text.isprintable():
        return text
    pieces, end = [], 0
    for found in COLOUR_CODES.finditer(text):
        pieces += [visible(text[end : found.start()]), found[0]]
        end = found.end()
    pieces.append(visible(text[end:]))
    return "".join(pieces) + (_PLAIN_AGAIN if end else "")


def quote(value: Any) -> str:
    """`value` as JSON in at most 60 characters, without control characters and so without terminal escapes."""
    if isinstance(value, str):
        # Cut before encoding: a value may be megabytes long.
        text = '"' + "".join(map(_printable, value[: _SHOWN_CHARS + 1])) + '"'
    else:
        import json

        text = "".join(map(_printable, json.dumps(value, ensure_ascii=False, default=str)))
    return text if len(text) <= _SHOWN_CHARS else f"{text[: _SHOWN_CHARS - 3]}..."


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """` (did you mean "x"?)` with the nearest of `known`, or nothing when none is near."""
    import difflib  # slow to import, and few command lines are wrong

    # All flags begin with dashes, which would make unrelated ones look similar.
    folded = {option.lower().lstrip("-"): option for option in known}
    # One wrong letter of two is half of a name such as t4.
    wanted = name.lower().lstrip("-")[:100]
    near = difflib.get_close_matches(wanted, folded, n=1, cutoff=0.5 if len(wanted) <= 2 else 0.6)
    return f" (did you mean {quote(folded[near[0]])}?)" if near else ""


def join_or(names: Iterable[str]) -> str:
    """`a, b or c`."""
    *head, last = list(names)
    return f"{', '.join(head)} or {last}" if head else last


def join_and(names: Iterable[str]) -> str:
    """`a, b and c`."""
    *head, last = list(names)
    return f"{', '.join(head)} and {last}" if head else last


def join_some(names: Sequence[str], noun: str, most: int = 3) -> str:
    """`a, b, c and 5 more workers`: a limited number of names, then the number of others, with the `noun`."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {plural(more, f'more {noun}')}" if more > 0 else "")


def plural_are(number: int, noun: str) -> str:
    """`1 worker is`, `3 workers are`."""
    return f"{plural(number, noun)} {'is' if number == 1 else 'are'}"


def times(number: int) -> str:
    """`once`, `twice`, `3 times`."""
    return {1: "once", 2: "twice"}.get(number, f"{number} times")


def plural(number: int, noun: str) -> str:
    """`1 worker`, `3 workers`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def span(seconds: float) -> str:
    """Seconds as a person would write them: 0.4s, 12s, 3m40s, 2h05m, 3d4h."""
    if seconds < 10:
        return f"{max(seconds, 0):.1f}s"
    whole = round(min(_FOR_EVER_S, seconds))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02}m"
    return f"{whole // 86400}d{whole % 86400 // 3600}h"


def shorten(text: str, most_chars: int = 300) -> str:
    """Untrusted text on one line and cut to a length, so that the message around it stays readable."""
    line = " ".join(text.split())
    return line if len(line) <= most_chars else f"{line[: most_chars - 1]}…"


def dollars(amount: float) -> str:
    """`$1,234.50`."""
    return f"${amount:,.2f}"


def _printable(char: str) -> str:
    return char if char.isprintable() else char.encode("unicode_escape").decode("ascii")


def is_loopback(host: str) -> bool:
    """True for a name or an address of the loopback interface, but not for a name that only begins like one."""
    import ipaddress  # few need it

    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def size_text(count: int) -> str:
    """Bytes in a readable unit: 812 B, 1.4 MB, 3.2 GB."""
    amount, unit = float(count), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if amount < 1000:
            break
        amount, unit = amount / 1000, larger
    return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"


def part_of(part: int | None, whole: int | None) -> str:
    """`3/10`, `3` if the whole is unknown, or nothing."""
    if part is None:
        return ""
    return str(part) if whole is None else f"{part}/{whole}"


def public_value(name: str, value: str) -> str:
    """The value as it may be shown on a shared screen: without logins in URLs, and hidden if its name is a secret's."""
    return "(hidden)" if value and any(word in name.upper() for word in _PRIVATE) else _LOGIN.sub("(hidden)@", value)
