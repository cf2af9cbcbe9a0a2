"""Suggests a verb for a word that is not one: another tool's name for it, or a misspelling."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence

from elasticctl.api.text import did_you_mean

# What others call it -> what it may be called here; the first that a group has is suggested, or all in a tuple.
_OTHER_WORDS: Mapping[str, tuple[str, ...]] = {
    "apply": ("submit", "set-context"),
    "attach": ("logs",),
    "diff": ("compare",),
    "connect": ("shell",),
    "cost": ("history",),
    "create": ("submit", "set-context", "new", "set"),
    "download": ("pull",),
    "enter": ("shell",),
    "evict": ("preempt",),
    "forward": ("port-forward",),
    "get": ("list", "get-contexts", "show"),
    "info": ("describe", "status", "show"),
    "interrupt": ("preempt",),
    "jobs": ("list",),
    "kill": ("cancel",),
    "launch": ("submit",),
    "log": ("logs",),
    "ls": ("list", "get-contexts"),
    "pause": ("suspend",),
    "ps": ("list",),
    "queue": ("list",),
    "remove": ("delete", "rm", "delete-context"),
    "restart": ("rerun",),
    "retry": ("rerun",),
    "rm": ("delete", "delete-context"),
    "delete": ("rm", "delete-context"),
    "run": ("submit",),
    "sbatch": ("submit",),
    "scancel": ("cancel",),
    "show": ("describe", "view"),
    "ssh": ("shell",),
    "squeue": ("list",),
    "start": ("submit", "status"),
    "stop": ("suspend", "down"),
    "tail": ("logs",),
    "terminate": ("cancel",),
    "nvidia-smi": ("top",),
    "usage": ("top",),
    "train": ("submit",),
    "unpause": ("resume",),
    "upload": ("submit",),
    "use": ("use-context",),
    "why": ("explain",),
}
_DESTRUCTIVE = ("cancel", "delete", "delete-context", "down", "move", "preempt", "prune", "rm")
"""Verbs that are suggested for their own names with a slip of the finger in them, never for another word."""
_A_SLIP = 0.85


def verb_meant(name: str, known: Sequence[str]) -> str:
    """` (did you mean "x"?)` with the verb that was probably meant by `name`, or nothing."""
    word = name.lower()[:100]
    for other in _OTHER_WORDS.get(word, ()):
        if other in known:
            more = ', or "cancel" to end it for good' if (word, other) == ("stop", "suspend") else ""
            return f' (did you mean "{other}"{more}?)'
    slips = difflib.get_close_matches(word, _DESTRUCTIVE, n=1, cutoff=_A_SLIP)
    if slips and slips[0] in known:
        return f' (did you mean "{slips[0]}"?)'
    return did_you_mean(name, [verb for verb in known if verb not in _DESTRUCTIVE])
