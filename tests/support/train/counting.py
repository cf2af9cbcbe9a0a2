"""How many samples a run has counted at its end."""

from __future__ import annotations

import pytest

from elasticctl_train.session import Session


def note_samples(monkeypatch: pytest.MonkeyPatch) -> list[int | None]:
    """The number at the end of each run in this process, from now on."""
    counted: list[int | None] = []
    finish = Session.finish

    def noting(session: Session) -> None:
        counted.append(session.progress.samples_at(session.cursor))
        finish(session)

    monkeypatch.setattr(Session, "finish", noting)
    return counted
