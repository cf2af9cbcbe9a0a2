"""rich's console for untrusted text. Imported for a terminal only."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from elasticctl.api.text import visible


class SafeConsole(Console):
    """Shows control characters instead of sending them to the terminal; rich lets most of them pass."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            if segment.control or segment.text.isprintable():
                yield segment
            else:
                yield Segment(visible(segment.text), segment.style)
