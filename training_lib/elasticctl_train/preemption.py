"""Notice: the word that this group of ranks has to come to an end soon.

It comes from outside (a spot reclaim, a scale-up, a drained node) to the launcher, which makes a file appear. A rank
only looks whether it is there; what follows is agreed by all at a step known to all (`policy`), in no signal handler.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

NOTICE_VARIABLE = "ELASTICCTL_NOTICE_FILE"


@dataclass(frozen=True, slots=True)
class Notice:
    """Where notice would appear; `path` is empty where nobody can give any."""

    path: str = ""

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> Notice:
        """The launcher's file for this generation."""
        return cls(environ.get(NOTICE_VARIABLE, ""))

    @property
    def possible(self) -> bool:
        """True where a launcher may give notice."""
        return bool(self.path)

    def given(self) -> bool:
        """True once notice has been given; costs one look at the file system."""
        return self.possible and os.path.exists(self.path)
